"""Errors of the engine; each carries its facts as attributes.

    EngineError
    +-- EngineConfigError (ValueError)     a configuration field that is unknown or out of range
    +-- CheckpointError                    a model directory that cannot be read
    |   +-- UnsupportedModelError          readable, but no model of ours fits it
    +-- PromptError (ValueError)           a prompt the engine cannot take
    |   +-- PromptTooLongError
    |   +-- TokenIdError
    +-- MissingResultsError                generate() would have lost samples
    +-- EngineFailedError                  an earlier step failed; the engine takes no more work
    +-- EngineClosedError                  used after close()
    +-- NotReadyError                      asked for what its present state forbids, by name
    +-- UpdateOrderError                   put, commit or abort without begin; begin twice
    +-- RunnerError                        the runner was driven against its protocol

Errors of the packages below keep their own classes when they reach a caller: `WeightSyncError` for
an update that was refused, `GraphError` for residency and graphs, `SchedulerError`, `KVCacheError`.
A bad argument that is not listed here is a plain `ValueError`.
"""

from collections.abc import Sequence as SequenceABC


class EngineError(Exception):
    """Base of everything the engine itself raises."""


class EngineConfigError(EngineError, ValueError):
    """A field of the configuration is unknown, or its value cannot be used."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class CheckpointError(EngineError):
    """A checkpoint directory is missing, incomplete or damaged."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(f"checkpoint {path}: {detail}")
        self.path = path
        self.detail = detail


class UnsupportedModelError(CheckpointError):
    """The checkpoint is readable, but describes a model the engine does not build."""


class PromptError(EngineError, ValueError):
    """A prompt cannot be taken as it is."""


class PromptTooLongError(PromptError):
    """The prompt leaves no room for a single output token."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens; max_model_len={max_model_len} leaves room "
            f"for at most {max_model_len - 1} and one output token"
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len


class TokenIdError(PromptError):
    """A prompt token id is not one of the tokenizer's."""

    def __init__(self, token_id: int, position: int, true_vocab_size: int) -> None:
        super().__init__(
            f"prompt token id {token_id} at position {position} is outside "
            f"[0, {true_vocab_size}), the ids the tokenizer really has"
        )
        self.token_id = token_id
        self.position = position
        self.true_vocab_size = true_vocab_size


class MissingResultsError(EngineError):
    """Samples ended without a result; `missing` lists (prompt index, sample index)."""

    def __init__(
        self, missing: SequenceABC[tuple[int, int]], num_expected: int, why: str = ""
    ) -> None:
        shown = ", ".join(f"prompt {prompt} sample {sample}" for prompt, sample in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        super().__init__(
            f"{len(missing)} of {num_expected} samples have no result: {shown}{more}"
            + (f" ({why})" if why else "")
        )
        self.missing = tuple(missing)
        self.num_expected = num_expected
        self.why = why


class EngineFailedError(EngineError):
    """A step failed in a way that leaves the state unknown; build a new engine."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine has failed and takes no more work: {reason}")
        self.reason = reason


class EngineClosedError(EngineError):
    """The engine was closed."""

    def __init__(self, action: str) -> None:
        super().__init__(f"cannot {action}: the engine is closed")
        self.action = action


class NotReadyError(EngineError):
    """The engine's present state forbids the action; the state is unchanged."""

    def __init__(self, action: str, why: str) -> None:
        super().__init__(f"cannot {action}: {why}")
        self.action = action
        self.why = why


class UpdateOrderError(EngineError):
    """A weight update was driven out of order, for example `put` without `begin`."""


class RunnerError(EngineError):
    """A runner was asked for something out of its order of calls; see `runner.protocol`."""
