"""One request's sampling, with everything fixed that its parameters leave to the engine.

Made once when the request is added and never changed: a preempted or resumed sequence draws with
the seed of its first admission. Knows the model only by the number of ids it really has.
"""

from dataclasses import dataclass

from syncline.engine.sampling_params import SEED_LIMIT, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSampling:
    """Sampling parameters and the facts of the model and the request that complete them.

    seed              64 bits, the key of every draw of this request; its samples differ by index.
    eos_token_ids     the model's; whether they end a sequence is `params.ignore_eos`.
    true_vocab_size   ids from here on are padding and never sampled.
    """

    params: SamplingParams
    seed: int
    true_vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEED_LIMIT:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")
        if self.true_vocab_size < 1:
            raise ValueError(f"true_vocab_size must be positive, got {self.true_vocab_size}")
        for token_id in self.params.logit_bias or {}:
            if token_id >= self.true_vocab_size:
                raise ValueError(
                    f"logit_bias names token id {token_id}; ids end at {self.true_vocab_size - 1}"
                )
        for token_id in self.params.stop_token_ids:
            if token_id >= self.true_vocab_size:
                raise ValueError(
                    f"stop_token_ids names token id {token_id}, which can never be sampled; "
                    f"ids end at {self.true_vocab_size - 1}"
                )
        if len(self.forbidden_token_ids) == self.true_vocab_size:
            raise ValueError(
                f"min_tokens={self.params.min_tokens} forbids all {self.true_vocab_size} ids: "
                "stop_token_ids and the end-of-sequence ids cover the whole vocabulary"
            )
        for field in ("logprobs", "prompt_logprobs"):
            count = self.params.logprobs if field == "logprobs" else self.params.prompt_logprobs
            if count is not None and count > self.true_vocab_size:
                raise ValueError(
                    f"{field} must be at most the vocabulary of {self.true_vocab_size}, got {count}"
                )

    @property
    def forbidden_token_ids(self) -> tuple[int, ...]:
        """Ids that `min_tokens` forbids until enough tokens exist: everything that would stop.

        An id that is padding, or beyond the vocabulary, cannot be sampled and needs no mask.
        """
        if self.params.min_tokens == 0:
            return ()
        stopping = set(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            stopping |= self.eos_token_ids
        return tuple(sorted(i for i in stopping if i < self.true_vocab_size))

    @property
    def needs_history(self) -> bool:
        """Whether a penalty makes the next token depend on the tokens so far."""
        params = self.params
        return (
            params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.repetition_penalty != 1.0
        )
