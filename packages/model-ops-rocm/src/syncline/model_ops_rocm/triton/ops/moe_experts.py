"""The experts of a layer by Triton: two to five launches on one stream.

Few pairs are computed one at a time (`direct`: gate and up, then down with the weighted sum); more
are sorted into blocks, so that an expert's weights are read once for all of its pairs.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.linear import require_layout
from syncline.model_ops_rocm.arguments.moe import (
    FP8_DTYPES,
    LAYOUTS,
    MOE_EXPERTS,
    ExpertShapes,
    check_moe_experts,
)
from syncline.model_ops_rocm.checks import refuse, workspace_of
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.layouts import Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.triton.configs import CONFIGS
from syncline.model_ops_rocm.triton.configs.base import ANY_WIDTH
from syncline.model_ops_rocm.triton.configs.moe import (
    CODES,
    DIRECT,
    DOWN,
    FP8_ROWS,
    GATE_UP,
    INVARIANT,
    MAX_DIRECT_PAIRS,
    rows_of,
)
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.moe_direct import (
    direct_down_kernel,
    direct_gate_up_kernel,
)
from syncline.model_ops_rocm.triton.kernels.moe_experts import down_kernel, gate_up_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, Chosen, overlaps, require_reachable
from syncline.model_ops_rocm.triton.ops.moe_call import (
    Encoded,
    ExpertCall,
    bytes_of_parts,
)
from syncline.model_ops_rocm.triton.ops.moe_codes import require_native, run_codes
from syncline.model_ops_rocm.triton.ops.moe_routing import launch_combine, launch_sort
from syncline.model_ops_rocm.triton.ops.quantise import quantise_activation

_CHUNK_BYTES: Final = 16
_ALIGNMENT_OF_LOADS: Final = 16


class _Path(NamedTuple):
    """One way of computing a step."""

    gate_up: Chosen
    down: Chosen
    is_direct: bool


class TritonMoeExperts:
    """See `contracts.MoeExperts`."""

    __slots__ = ()

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        return LAYOUTS

    def workspace_bytes(
        self, w13: torch.Tensor, top_k: int, max_tokens: int, dtype: torch.dtype
    ) -> int:
        num_experts, rows, hidden = w13.shape
        shapes = ExpertShapes(max_tokens, top_k, num_experts, hidden, rows // 2)
        return sum(bytes_of_parts(shapes, dtype, is_fp8=w13.dtype in FP8_DTYPES))

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        x_TH: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        *,
        layout: WeightLayout,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        recipe: Quantised | None = None,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        routing = (weights_TK, ids_TK)
        shapes = check_moe_experts(x_TH, (w13, w2), routing, layout, (scales, recipe), out)
        chunk = _chunk(layout, w13)
        num_bytes = sum(bytes_of_parts(shapes, x_TH.dtype, is_fp8=scales is not None))
        workspace = workspace_of(MOE_EXPERTS, workspace, num_bytes, x_TH.device)
        if workspace.data_ptr() % _ALIGNMENT_OF_LOADS != 0:
            limit = f"be aligned to {_ALIGNMENT_OF_LOADS} bytes"
            refuse(MOE_EXPERTS, "workspace", limit, f"{workspace.data_ptr():#x}")
        if out is None:
            out = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        require_reachable(MOE_EXPERTS, x=x_TH, w13=w13, w2=w2, weights=weights_TK, ids=ids_TK)
        require_reachable(MOE_EXPERTS, out=out, workspace=workspace)
        if scales is not None:
            require_reachable(MOE_EXPERTS, **{"scales[0]": scales[0], "scales[1]": scales[1]})
        if w13.dtype is torch.float8_e4m3fnuz:
            _refuse_fnuz()
        if recipe is not None:
            require_native(recipe)
        if out.numel() == 0:
            return out
        if shapes.num_pairs == 0 or w13.numel() == 0:
            return out.zero_()
        call = ExpertCall(x_TH, w13, w2, routing, scales, recipe, out, shapes, workspace, chunk)
        _compute(call, batch_invariant=batch_invariant)
        return out


MOE_EXPERTS_OP: Final = TritonMoeExperts()


def _chunk(layout: WeightLayout, w13: torch.Tensor) -> int:
    """Elements of 16 bytes in the shuffle, or 0 for row-major."""
    if w13[:1].numel() >= 2**31:
        refuse(MOE_EXPERTS, "w13", "have fewer than 2^31 elements of an expert", list(w13.shape))
    require_layout(MOE_EXPERTS, layout, LAYOUTS)
    return _CHUNK_BYTES // w13.element_size() if layout == Shuffle16x16() else 0


def _refuse_fnuz() -> None:
    if LAUNCHER.arch.startswith("sm_"):
        refuse(MOE_EXPERTS, "w13", f"be float8_e4m3fn on {LAUNCHER.arch}", torch.float8_e4m3fnuz)


def _compute(call: ExpertCall, *, batch_invariant: bool) -> None:
    rows = rows_of(call.x.dtype, is_fp8=call.scales is not None)
    if call.recipe is None:
        for path in _paths(rows, call.shapes, batch_invariant=batch_invariant):
            (_run_direct if path.is_direct else _run_sorted)(call, path)
        return
    is_direct = not batch_invariant and call.shapes.num_pairs <= MAX_DIRECT_PAIRS
    if not is_direct or LAUNCHER.is_preparing:
        width = ANY_WIDTH if batch_invariant else call.shapes.mean_pairs
        for pair in _buckets(FP8_ROWS, width, f"{GATE_UP}-{CODES}", f"{DOWN}-{CODES}"):
            run_codes(call, call.recipe, *pair)
    if is_direct or (LAUNCHER.is_preparing and not batch_invariant):
        kinds = (f"{GATE_UP}-{DIRECT}", f"{DOWN}-{DIRECT}")
        for pair in _buckets(rows, call.shapes.num_pairs, *kinds):
            _run_direct(call, _Path(*pair, is_direct=True))


def _paths(dtype: torch.dtype, shapes: ExpertShapes, *, batch_invariant: bool) -> Iterator[_Path]:
    """The way of this step; while compiling, those of every number of tokens."""
    suffix = f"-{INVARIANT}" if batch_invariant else ""
    kinds = [(f"{GATE_UP}{suffix}", f"{DOWN}{suffix}", shapes.mean_pairs)]
    direct = (f"{GATE_UP}-{DIRECT}", f"{DOWN}-{DIRECT}", shapes.num_pairs)
    if LAUNCHER.is_preparing:
        kinds += [] if batch_invariant else [direct]
    elif not batch_invariant and shapes.num_pairs <= MAX_DIRECT_PAIRS:
        kinds = [direct]
    for gate_up, down, width in kinds:
        for pair in _buckets(dtype, width, gate_up, down):
            yield _Path(*pair, is_direct=gate_up.endswith(DIRECT))


def _buckets(
    dtype: torch.dtype, width: int, gate_up: str, down: str
) -> Iterator[tuple[Chosen, Chosen]]:
    """What `width` takes; while compiling, what any takes."""
    chosen = LAUNCHER.config(MOE_EXPERTS, dtype, width, gate_up)
    buckets = [chosen[0].up_to]
    if LAUNCHER.is_preparing:
        buckets = [
            key.up_to for key in CONFIGS if (*key[:3], key.kind) == (*chosen[0][:3], gate_up)
        ]
    for up_to in buckets:
        yield (
            LAUNCHER.config(MOE_EXPERTS, dtype, up_to, gate_up),
            LAUNCHER.config(MOE_EXPERTS, dtype, up_to, down),
        )


def _run_direct(call: ExpertCall, path: _Path) -> None:
    shapes, activated, scales = call.shapes, call.activated(), call.scales_or_weights
    (_, gate_up), (_, down) = path.gate_up, path.down
    x = _encoded(call, call.x, None if call.recipe is None else call.codes_of_x(call.recipe))
    constants = {"TOP_K": shapes.top_k, "ENCODED": call.recipe is not None}
    LAUNCHER.launch(
        direct_gate_up_kernel,
        (-(-shapes.intermediate // gate_up.constants["BLOCK_N"]), shapes.num_pairs),
        path.gate_up,
        (*x, call.w13, scales[0], activated, call.routing[1], *x[0].stride()),
        {**call.constants(path.gate_up), **constants, "OVERLAP": overlaps(gate_up)},
    )
    codes = None if call.recipe is None else call.codes_of_activated(call.recipe)
    LAUNCHER.launch(
        direct_down_kernel,
        (-(-shapes.hidden // down.constants["BLOCK_N"]), shapes.num_tokens),
        path.down,
        (
            *_encoded(call, activated, codes),
            *(call.w2, scales[1], call.out, *call.routing, *call.out.stride()),
        ),
        {
            **call.constants(path.down),
            **constants,
            "OVERLAP": overlaps(down),
            "BLOCK_SLOTS": power_of_two(shapes.top_k),
        },
    )


def _encoded(call: ExpertCall, x: torch.Tensor, codes: Encoded | None) -> Encoded:
    """x as it is multiplied: by `codes`, where it is to be encoded; else scales are not read."""
    if codes is None or call.recipe is None:
        return x, x
    return quantise_activation(x, call.recipe, out=codes)


def _run_sorted(call: ExpertCall, path: _Path) -> None:
    shapes, scales = call.shapes, call.scales_or_weights
    block_size = path.gate_up[1].constants["BLOCK_M"]
    activated, y, pairs = call.activated(), call.y(), call.sort(block_size)
    launch_sort(call.routing[1], pairs, block_size, 1)
    num_blocks = pairs.block_groups.shape[0]
    blocks = (pairs.pairs, pairs.block_groups, shapes.num_pairs, num_blocks)
    LAUNCHER.launch(
        gate_up_kernel,
        (num_blocks * -(-shapes.intermediate // path.gate_up[1].constants["BLOCK_N"]),),
        path.gate_up,
        (call.x, call.w13, scales[0], activated, *blocks, *call.x.stride()),
        {**call.constants(path.gate_up), "TOP_K": shapes.top_k},
    )
    LAUNCHER.launch(
        down_kernel,
        (num_blocks * -(-shapes.hidden // path.down[1].constants["BLOCK_N"]),),
        path.down,
        (activated, call.w2, scales[1], y, *blocks),
        call.constants(path.down),
    )
    launch_combine(y, call.routing, call.out, shapes.num_experts, by_pair=True)
