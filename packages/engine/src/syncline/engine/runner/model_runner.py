"""Executes plans on a real model: state, inputs, forward, sampling, results, in this order.

A launch leaves everything the next launch needs on the device, so plans may be launched before the
results of earlier ones are collected. Decides nothing about requests, memory or versions: it does
what a plan says, and refuses a plan it cannot honour before touching any state.
"""

from collections import deque
from collections.abc import Sequence as SequenceABC

import torch
from torch import Tensor

from syncline.engine.errors import RunnerError
from syncline.engine.layers import Ops
from syncline.engine.layers.rope import fill_cos_sin
from syncline.engine.memory import LayerCache, allocate_kv_pool
from syncline.engine.models.config import ModelConfig
from syncline.engine.models.registry import build_model
from syncline.engine.runner.draws import DrawWindow
from syncline.engine.runner.graphs import DecodeGraphs
from syncline.engine.runner.inputs import InputBuilder, StepInputs
from syncline.engine.runner.results import PendingStep, to_result
from syncline.engine.runner.settings import RunnerSettings
from syncline.engine.runner.state import DeviceState
from syncline.engine.sampling.batch import SamplingBatch, SamplingColumns
from syncline.engine.sampling.penalties import TokenHistory
from syncline.engine.sampling.pipeline import LogitsPipeline, SampledTokens
from syncline.engine.sampling.resolved import ResolvedSampling
from syncline.engine.sampling.scoring import Scores, score_tokens
from syncline.engine.weights import WeightBuilder
from syncline.graph_lifecycle import Arena, CaptureRequest, GraphKey, GraphRegistry, Tag
from syncline.scheduler_core import StepPlan, StepResult
from syncline.weight_sync import NameTable, WeightSlot


class ModelRunner:
    """Implements `runner.protocol.Runner`; its weights are poison until they are loaded.

    slots, name_table   every stored weight, and every name for it, for the first load and updates
    kv_caches           per layer, the scheduler's blocks and then the reserved one
    kv_format           what makes cached KV incompatible; for the prefix cache's root

    Unless `enforce_eager`, decode steps are replayed from graphs of `registry` where one fits. They
    exist after `capture_graphs`; `recapture` is what brings them back after a wake.
    """

    __slots__ = (
        "_columns",
        "_draws",
        "_graphs",
        "_in_flight",
        "_inputs",
        "_last_step_id",
        "_model",
        "_ops",
        "_pipeline",
        "_requests",
        "_state",
        "kv_caches",
        "name_table",
        "settings",
        "slots",
    )

    def __init__(
        self,
        model_config: ModelConfig,
        settings: RunnerSettings,
        arena: Arena,
        *,
        op_backend: str = "torch",
        registry: GraphRegistry | None = None,
    ) -> None:
        if registry is None and not settings.enforce_eager:
            raise RunnerError("enforce_eager=False needs a graph registry")
        self.settings = settings
        self._ops = Ops.select(backend=op_backend, device=settings.device, dtype=settings.dtype)
        builder = WeightBuilder(arena, settings.dtype, settings.weight_layout)
        cos_sin_PD = arena.allocate(
            "cos_sin",
            (settings.max_model_len, model_config.head_dim),
            settings.dtype,
            tag=Tag.STATIC,
        )
        fill_cos_sin(cos_sin_PD, model_config.rope_theta)
        self._model = build_model(model_config, self._ops, builder, cos_sin_PD)
        self.slots: list[WeightSlot] = builder.slots
        self.name_table: NameTable = builder.name_table()
        self.kv_caches: list[LayerCache] = allocate_kv_pool(
            arena,
            model_config,
            num_blocks=settings.num_kv_blocks,
            block_size=settings.block_size,
            dtype=settings.dtype,
        )
        self._graphs = (
            None
            if registry is None or settings.enforce_eager
            else DecodeGraphs(registry, self._model, self.kv_caches, settings)
        )
        self._state = DeviceState(arena, settings)
        self._columns = SamplingColumns(settings.max_num_seqs + 1, settings.device)
        self._inputs = InputBuilder(self._state, self._columns, settings)
        self._draws = DrawWindow(settings.device)
        self._pipeline = LogitsPipeline(settings.true_vocab_size, settings.logprobs_mode)
        self._requests: dict[str, ResolvedSampling] = {}
        self._in_flight: deque[PendingStep] = deque()
        self._last_step_id = -1

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def kv_format(self) -> str:
        return f"{str(self.settings.dtype).removeprefix('torch.')}/{self.settings.block_size}"

    def register(self, request_id: str, sampling: ResolvedSampling) -> None:
        if request_id in self._requests:
            raise RunnerError(f"request {request_id!r} is registered already")
        if sampling.true_vocab_size != self.settings.true_vocab_size:
            raise RunnerError(
                f"request {request_id!r} was resolved for {sampling.true_vocab_size} ids, "
                f"the model has {self.settings.true_vocab_size}"
            )
        self._requests[request_id] = sampling

    def forget(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is None:
            raise RunnerError(f"request {request_id!r} is not registered")

    def capture_graphs(self) -> None:
        """Capture every decode size, or none: CaptureError then, and steps run eagerly.

        Does nothing under `enforce_eager`. The weights may be anything; they are read again at
        every replay.
        """
        if self._graphs is not None:
            self._graphs.capture()

    def recapture(self, keys: tuple[GraphKey, ...]) -> list[CaptureRequest]:
        """A `graph_lifecycle.Recapture` for this runner's graphs."""
        if self._graphs is None:
            raise RunnerError(f"this runner has no graphs, asked for {keys}")
        return self._graphs.requests(keys)

    def launch(self, plan: StepPlan) -> None:
        self._require_executable(plan)
        with torch.inference_mode():
            self._apply(plan)
            self._in_flight.append(self._run(plan.step_id, self._inputs.build(plan)))
        self._last_step_id = plan.step_id

    def collect(self) -> StepResult:
        if not self._in_flight:
            raise RunnerError("no step is in flight")
        return to_result(self._in_flight.popleft())

    def _require_executable(self, plan: StepPlan) -> None:
        if plan.step_id <= self._last_step_id:
            raise RunnerError(
                f"step {plan.step_id} comes after step {self._last_step_id}: plans run in order"
            )
        if plan.window != 1:
            raise RunnerError(f"a window of {plan.window} steps is not supported, only 1")
        if plan.num_draft_tokens is not None and any(plan.num_draft_tokens):
            raise RunnerError("draft tokens are not supported")
        for join in plan.joined:
            if join.request_id not in self._requests:
                raise RunnerError(f"request {join.request_id!r} is joined but not registered")

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.left:
            self._columns.leave(row)
        self._state.apply(plan)
        for join in plan.joined:
            self._columns.join(
                join.row,
                self._requests[join.request_id],
                join.sample_index,
                join.num_prompt_tokens,
            )
        if plan.block_copies:
            for cache in self.kv_caches:
                self._ops.kv_copy_blocks(cache.k_BKCD, cache.v_BKCD, plan.block_copies)

    def _run(self, step_id: int, step: StepInputs) -> PendingStep:
        hidden_SH = self._hidden_states(step)
        num_yielding = len(step.members.rows)
        scores = self._score(step, hidden_SH[num_yielding:]) if step.prompt_spans else None
        sampled = self._sample(step, hidden_SH[:num_yielding]) if num_yielding else None
        if sampled is not None:
            self._state.append(step.members.rows_Y, step.positions_Y, sampled.token_ids_R)
        return PendingStep(
            step_id=step_id,
            members=step.members,
            sampled=sampled,
            prompt_spans=step.prompt_spans,
            scores=scores,
            positions=self._known_positions(step),
        )

    def _hidden_states(self, step: StepInputs) -> Tensor:
        if self._graphs is not None and step.is_decode_only:
            replayed = self._graphs.hidden_states(step.model)
            if replayed is not None:
                return replayed
        return self._model.forward(step.model, self.kv_caches)

    def _sample(self, step: StepInputs, hidden_RH: Tensor) -> SampledTokens:
        return self._pipeline.forward(
            self._model.compute_logits(hidden_RH),
            step.members.sampling,
            step.positions_Y,
            history=self._history(step.members.sampling, step),
            uniform_R=self._draws.next(step.members, step.positions_Y),
        )

    def _history(self, batch: SamplingBatch, step: StepInputs) -> TokenHistory | None:
        if batch.penalties is None:
            return None
        rows_P = batch.penalties.rows_P
        known = self._state.known_num_tokens
        width = max(known[row] for row in step.members.rows)
        return TokenHistory(
            token_ids_PL=self._state.token_ids_SL[:, :width][step.members.rows_Y[rows_P]].long(),
            num_tokens_P1=step.positions_Y[rows_P][:, None],
        )

    def _score(self, step: StepInputs, hidden_QH: Tensor) -> Scores:
        targets = [
            self._state.token_ids_SL[span.row, span.start : span.stop] for span in step.prompt_spans
        ]
        return score_tokens(
            hidden_QH,
            torch.cat(targets).long(),
            self._model.compute_logits,
            true_vocab_size=self.settings.true_vocab_size,
            num_top=max(span.num_top for span in step.prompt_spans),
        )

    def _known_positions(self, step: StepInputs) -> SequenceABC[int]:
        if step.members.sampling.top_logprobs is None:
            return ()
        known = self._state.known_num_tokens
        return tuple(known[row] - 1 for row in step.members.rows)
