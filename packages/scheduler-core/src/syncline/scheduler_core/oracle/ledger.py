"""Which weights computed the KV behind every sampled token, kept from plans and results alone.

What a sequence ought to be follows, also when KV of several weight versions lies in one row, as the
policy `keep_kv` allows. Knows neither scheduler nor device.
"""

from syncline.scheduler_core.oracle.model import HashModel
from syncline.scheduler_core.plan import RowJoin, StepPlan, StepResult
from syncline.scheduler_core.sequence import Sequence
from syncline.scheduler_core.types import RowId, SequenceId


class _LedgerRow:
    """versions[p]: the weights that computed position p of the sequence in this row."""

    __slots__ = ("seq_id", "versions")

    def __init__(self, join: RowJoin, weight_version: int) -> None:
        self.seq_id = join.seq_id
        # Whatever is taken over was listed in this epoch, so these weights computed it.
        self.versions = [weight_version] * join.num_computed_tokens


class VersionLedger:
    """Fed with every plan and its result, in order; then asked what a sequence should hold."""

    __slots__ = ("_rows", "_samples")

    def __init__(self) -> None:
        self._rows: dict[RowId, _LedgerRow] = {}
        self._samples: dict[SequenceId, list[tuple[int, ...]]] = {}

    def note(self, plan: StepPlan, result: StepResult) -> None:
        version = plan.weight_version
        for row_id in plan.left:
            del self._rows[row_id]
        for join in plan.joined:
            self._rows[join.row] = _LedgerRow(join, version)
        counts = iter(result.counts or (1,) * len(result.token_ids))
        for row_id in plan.decode_rows:
            for _ in range(next(counts)):
                self._rows[row_id].versions.append(version)
                self._sample(self._rows[row_id])
        for chunk in plan.prefill_chunks:
            row = self._rows[chunk.row]
            row.versions[chunk.start : chunk.stop] = [version] * (chunk.stop - chunk.start)
            if chunk.is_final:
                self._sample(row)

    def expected(self, model: HashModel, sequence: Sequence) -> list[tuple[int, float]]:
        """(token id, logprob) of every output token that the sequence has, as it should be."""
        expected: list[tuple[int, float]] = []
        samples = self._samples.get(sequence.seq_id, [])
        for i in range(sequence.num_output_tokens):
            token_ids = sequence.token_ids[: sequence.num_prompt_tokens + i]
            context = 0
            for token_id, version in zip(token_ids, samples[i], strict=True):
                context = model.extend(context, token_id, version)
            expected.append(model.sample(context, sequence.sample_index))
        return expected

    def _sample(self, row: _LedgerRow) -> None:
        self._samples.setdefault(row.seq_id, []).append(tuple(row.versions))
