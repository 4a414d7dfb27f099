"""What a consumer of one request has seen, and what is new: cumulative outputs while it runs.

Holds back text that may be the beginning of a stop string, so that nothing is shown and then taken
back. Knows no asyncio and no scheduler rule; it looks at sequences and never changes them.
"""

from syncline.engine.assemble import completion_of
from syncline.engine.intake import PreparedRequest
from syncline.engine.outputs import CompletionOutput, RequestOutput, Sample, TopLogprobs
from syncline.engine.tokenizer import IncrementalDetokenizer, Tokenizer
from syncline.scheduler_core import Sequence


class RequestStream:
    """The samples of one request as they grow."""

    __slots__ = (
        "_detokenizers",
        "_outputs",
        "_prepared",
        "_prompt_logprobs",
        "_stop_window",
        "_tokenizer",
    )

    def __init__(self, prepared: PreparedRequest, tokenizer: Tokenizer) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        num_samples = prepared.request.num_samples
        self._detokenizers = [IncrementalDetokenizer(tokenizer) for _ in range(num_samples)]
        self._outputs: list[CompletionOutput | None] = [None] * num_samples
        self._prompt_logprobs: tuple[TopLogprobs | None, ...] | None = None
        self._stop_window = max((len(s) for s in prepared.params.stop_strings), default=1) - 1

    @property
    def request_id(self) -> str:
        return self._prepared.request.request_id

    @property
    def is_finished(self) -> bool:
        return all(o is not None and o.finish_reason is not None for o in self._outputs)

    def grow(self, sequence: Sequence) -> bool:
        """Take what a running sequence has; whether it has more than last time."""
        detokenizer = self._detokenizers[sequence.sample_index]
        seen = detokenizer.num_tokens
        if sequence.num_output_tokens == seen:
            return False
        for token_id in sequence.output_token_ids[seen:]:
            detokenizer.append(token_id)
        text = detokenizer.text
        shown = text[: max(0, len(text) - self._stop_window)]
        self._outputs[sequence.sample_index] = completion_of(sequence, self._prepared, shown)
        return True

    def finish(self, sample: Sample) -> None:
        """Take a sample that has ended, with its final text."""
        self._outputs[sample.output.index] = sample.output
        if sample.output.index == 0:
            self._prompt_logprobs = sample.prompt_logprobs

    def output(self) -> RequestOutput:
        """The request as it stands; samples that have no token yet are left out."""
        outputs = tuple(output for output in self._outputs if output is not None)
        request = self._prepared.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=outputs,
            num_cached_tokens=outputs[0].num_cached_tokens if outputs else 0,
            finished=self.is_finished,
        )
