"""The synchronous face: whole batches, answered in input order; or samples as they end.

`generate` is a loop around `LLMEngine.step`; `submit` and `poll` are the same loop cut open, so
both can be under way together. Adds no rule of its own but one: every sample asked for comes back,
or an error names those that did not.
"""

import os
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from tqdm import tqdm

from syncline.engine.assemble import request_output_of
from syncline.engine.build import build_parts
from syncline.engine.config import EngineConfig
from syncline.engine.engine import LLMEngine
from syncline.engine.errors import EngineError, MissingResultsError, NotReadyError, PromptError
from syncline.engine.intake import PreparedRequest, Prompt, require_list, token_ids_of
from syncline.engine.outputs import RequestOutput, Sample
from syncline.engine.sampling_params import SamplingParams
from syncline.engine.updates import NamedTensors
from syncline.graph_lifecycle import SleepReport, Tag, WakeReport
from syncline.scheduler_core import PauseMode, SchedulerStats
from syncline.weight_sync import AbortReport, Manifest, Mode, Region, SyncReport

Prompts = Prompt | SequenceABC[Prompt]
Params = SamplingParams | SequenceABC[SamplingParams]

PROGRESS_DELAY_S = 1.0  # A call shorter than this shows no bar.


class LLM:
    """An engine for whoever waits for its answers. Not thread-safe."""

    __slots__ = ("_finished", "_num_requests", "engine")

    def __init__(
        self,
        model: str | os.PathLike[str],
        **config: Any,  # EngineConfig checks each field
    ) -> None:
        settings = EngineConfig.from_kwargs(model=model, **config)
        self._bind(LLMEngine(settings, build_parts(settings)))

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """Around an engine that exists, whatever its parts are."""
        llm = cls.__new__(cls)
        llm._bind(engine)
        return llm

    def _bind(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._finished: deque[Sample] = deque()
        self._num_requests = 0

    # Batches

    def generate(
        self, prompts: Prompts, sampling_params: Params | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in input order, its samples in index order.

        prompts: a text, a list of token ids, or a list of either. A prompt that cannot be taken
        refuses the whole call before anything runs. MissingResultsError when a sample was lost.
        """
        self._require_running("generate")
        batch = self._add(prompts, sampling_params)
        num_samples = sum(prepared.request.num_samples for prepared in batch)
        try:
            with tqdm(
                total=num_samples,
                desc="generate",
                unit="sample",
                delay=PROGRESS_DELAY_S,
                miniters=0,  # Steps in which nothing ends move it too: tokens are shown.
                disable=not use_tqdm,
            ) as progress:
                return self._run(batch, progress)
        except BaseException:
            # Ctrl-C, a failed step or a lost sample: nobody waits for the rest any more.
            for prepared in batch:
                self.engine.abort(prepared.request.request_id)
            raise

    def score(self, token_ids: SequenceABC[int]) -> list[float]:
        """The logprob of each token but the first, given those before it, at temperature 1.

        Padded vocabulary rows are left out of the normaliser; nothing is filtered. Takes as many
        tokens as a prompt may have.
        """
        ids = token_ids_of(token_ids)
        if len(ids) < 2:
            raise ValueError(f"score needs at least 2 token ids, got {len(ids)}")
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        (output,) = self.generate(ids, params, use_tqdm=False)
        entries = output.prompt_logprobs
        if entries is None:
            raise EngineError(f"no logprobs came back: {output.outputs[0].finish_detail}")
        scored = zip(entries[1:], output.prompt_token_ids[1:], strict=True)
        return [entry[token_id] for entry, token_id in scored if entry is not None]

    # One by one

    def submit(self, prompts: Prompts, sampling_params: Params | None = None) -> list[str]:
        """Queue prompts; their request ids, in input order. `poll` hands out what ends."""
        self.engine.require_ready("submit")
        batch = self._add(prompts, sampling_params)
        return [prepared.request.request_id for prepared in batch]

    def poll(self, timeout_s: float | None = None) -> list[Sample]:
        """Step until a sample has ended; every sample that has by then, in the order they ended.

        Empty when nothing is left to do, while paused, or after timeout_s without one.
        """
        self._finished.extend(self.engine.take_ended())
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._finished and self.engine.has_work:
            self._finished.extend(self.engine.step())
            stalled = self.engine.stalled()
            if stalled is not None and not self._finished:
                if self.engine.is_paused:
                    break
                raise EngineError(f"nothing can move: {stalled}")
            if deadline is not None and time.monotonic() >= deadline:
                break
        ended = list(self._finished)
        self._finished.clear()
        return ended

    def abort(self, request_ids: str | Iterable[str]) -> list[Sample]:
        """End requests now; their samples not handed out yet, with the tokens so far.

        Unknown and ended ids are passed over: they may have ended a moment ago.
        """
        chosen = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        for request_id in chosen:
            self._finished.extend(self.engine.abort(request_id))
        ended = [sample for sample in self._finished if sample.request_id in chosen]
        self._finished = deque(s for s in self._finished if s.request_id not in chosen)
        return ended

    # State

    @property
    def stats(self) -> SchedulerStats:
        return self.engine.stats

    @property
    def true_vocab_size(self) -> int:
        """Ids from here on are padding of the embedding table."""
        return self.engine.parts.limits.true_vocab_size

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    def pause(self, mode: PauseMode = "wait") -> None:
        """abort, keep: at once. wait: steps until every request that has begun has ended, and is
        refused while no step can be made.

        What has ended is handed out by `poll`; the engine stays paused until `resume`.
        """
        self.engine.pause(mode)
        while mode == "wait" and self.engine.is_settling:
            self._finished.extend(self.engine.step())

    def resume(self) -> None:
        self.engine.resume()

    def sleep(
        self, level: int | None = None, *, tags: Iterable[Tag | str] | None = None
    ) -> SleepReport:
        """See `LLMEngine.sleep`."""
        return self.engine.sleep(level, tags=tags)

    def wake_up(self, tags: Iterable[Tag | str] | None = None) -> WakeReport:
        """See `LLMEngine.wake_up`."""
        return self.engine.wake_up(tags)

    def update_weights(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        mode: Mode = "direct",
    ) -> SyncReport:
        """A whole update in one call; see `begin_update` for one in pieces."""
        return self.engine.update_weights(named_tensors, version, mode=mode)

    def begin_update(
        self, version: int, *, manifest: Manifest | None = None, mode: Mode = "direct"
    ) -> None:
        self.engine.updates.begin(version, manifest=manifest, mode=mode)

    def put_weight(self, name: str, tensor: Tensor, part: Region | None = None) -> None:
        self.engine.updates.put(name, tensor, part)

    def commit_update(self) -> SyncReport:
        return self.engine.updates.commit()

    def abort_update(self, reason: str) -> AbortReport:
        return self.engine.updates.abort(reason)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Inside

    def _require_running(self, action: str) -> None:
        self.engine.require_ready(action)
        if self.engine.is_paused:
            raise NotReadyError(action, "the engine is paused; call resume() first")

    def _add(self, prompts: Prompts, sampling_params: Params | None) -> list[PreparedRequest]:
        """All of them added, or none: a refused call takes no id, no seed and no place."""
        listed = _as_prompt_list(prompts)
        params = _as_params_list(sampling_params, len(listed))
        with self.engine.all_or_nothing():
            batch = [
                self.engine.prepare(f"llm-{number}", prompt, one)
                for number, (prompt, one) in enumerate(
                    zip(listed, params, strict=True), self._num_requests
                )
            ]
            self.engine.add_all(batch)
        self._num_requests += len(batch)
        return batch

    def _run(self, batch: list[PreparedRequest], progress: "tqdm[Any]") -> list[RequestOutput]:
        samples: dict[str, list[Sample]] = {p.request.request_id: [] for p in batch}
        num_left = sum(prepared.request.num_samples for prepared in batch)
        num_tokens_before = self.stats.num_accepted_tokens
        while num_left > 0 and self.engine.has_work:
            num_ended = 0
            for sample in self.engine.step():
                if sample.request_id in samples:
                    samples[sample.request_id].append(sample)
                    num_ended += 1
                else:
                    self._finished.append(sample)  # Of a `submit` that is under way.
            num_left -= num_ended
            if not progress.disable:
                num_tokens = self.stats.num_accepted_tokens - num_tokens_before
                progress.set_postfix(tokens=num_tokens, refresh=False)
                progress.update(num_ended)
            if self.engine.stalled() is not None:
                break
        self.engine.drain_if_done()
        return self._gather(batch, samples)

    def _gather(
        self, batch: list[PreparedRequest], samples: dict[str, list[Sample]]
    ) -> list[RequestOutput]:
        missing = []
        for position, prepared in enumerate(batch):
            found = {s.output.index for s in samples[prepared.request.request_id]}
            missing += [
                (position, index)
                for index in range(prepared.request.num_samples)
                if index not in found
            ]
        if missing:
            num_expected = sum(prepared.request.num_samples for prepared in batch)
            raise MissingResultsError(missing, num_expected, self.engine.stalled() or "")
        return [request_output_of(samples[prepared.request.request_id]) for prepared in batch]


def _as_prompt_list(prompts: Prompts) -> list[Prompt]:
    """A text or a list of ids is one prompt; anything else is a list of prompts.

    What an item holds is checked where it is prepared.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(  # Any: a prompt or an id, or what is refused later
        require_list(prompts, "prompts must be a text, a list of token ids or a list of either")
    )
    are_prompts = [isinstance(item, Iterable) for item in listed]
    if all(are_prompts):
        return listed
    if not any(are_prompts):
        return [listed]
    position = are_prompts.index(False)
    raise PromptError(
        f"prompts mixes token ids and prompts: item {position} is {listed[position]!r}"
    )


def _as_params_list(params: Params | None, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, SequenceABC):
        raise ValueError(
            f"sampling_params must be SamplingParams or a list of them, got {params!r}"
        )
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params has {len(params)} items for {num_prompts} prompts")
    return list(params)
