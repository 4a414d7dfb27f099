"""The experts of a layer by Triton: two or four launches on one stream.

Few pairs are computed one at a time (`direct`: gate and up, then down with the weighted sum); more
are sorted into blocks, so that an expert's weights are read once for all of its pairs.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import Final, NamedTuple

import torch

from syncline.model_ops_rocm.arguments.linear import require_layout
from syncline.model_ops_rocm.arguments.moe import (
    LAYOUTS,
    MOE_EXPERTS,
    SCALE_BLOCK,
    ExpertShapes,
    check_moe_experts,
    is_per_row,
)
from syncline.model_ops_rocm.checks import refuse, require_workspace
from syncline.model_ops_rocm.contracts.moe import SortedPairs, sorted_capacity
from syncline.model_ops_rocm.layouts import Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.triton.configs import CONFIGS
from syncline.model_ops_rocm.triton.configs.base import ConfigKey
from syncline.model_ops_rocm.triton.configs.moe import (
    DIRECT,
    DOWN,
    GATE_UP,
    INVARIANT,
    MAX_BLOCK_PAIRS,
    MAX_DIRECT_PAIRS,
    rows_of,
)
from syncline.model_ops_rocm.triton.geometry import power_of_two
from syncline.model_ops_rocm.triton.kernels.moe_direct import (
    direct_down_kernel,
    direct_gate_up_kernel,
)
from syncline.model_ops_rocm.triton.kernels.moe_experts import down_kernel, gate_up_kernel
from syncline.model_ops_rocm.triton.launch import LAUNCHER, overlaps, require_reachable
from syncline.model_ops_rocm.triton.ops.moe_routing import launch_combine, launch_sort
from syncline.model_ops_rocm.triton.targets import LaunchConfig

_CHUNK_BYTES: Final = 16
_ALIGNMENT_OF_LOADS: Final = 16
_ALIGNMENT: Final = 256
_Chosen = tuple[ConfigKey, LaunchConfig]


class _Path(NamedTuple):
    """One way of computing a step."""

    gate_up: _Chosen
    down: _Chosen
    is_direct: bool


class _Call(NamedTuple):
    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    routing: tuple[torch.Tensor, torch.Tensor]  # weights, ids
    scales: tuple[torch.Tensor, torch.Tensor] | None
    out: torch.Tensor
    shapes: ExpertShapes
    workspace: torch.Tensor
    chunk: int

    def constants(self) -> dict[str, int]:
        scale = 0
        if self.scales is not None:
            scale = 1 if is_per_row(self.scales[0], self.w13) else SCALE_BLOCK
        return {
            "NUM_EXPERTS": self.shapes.num_experts,
            "HIDDEN": self.shapes.hidden,
            "INTERMEDIATE": self.shapes.intermediate,
            "CHUNK": self.chunk,
            "SCALE": scale,
        }


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
        return sum(_parts(shapes, dtype))

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
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        routing = (weights_TK, ids_TK)
        shapes = check_moe_experts(x_TH, (w13, w2), routing, layout, scales, out)
        chunk = _chunk(layout, w13)
        num_bytes = sum(_parts(shapes, x_TH.dtype))
        if workspace is None:
            workspace = torch.empty(num_bytes, dtype=torch.uint8, device=x_TH.device)
        require_workspace(MOE_EXPERTS, workspace, num_bytes)
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
        if out.numel() == 0:
            return out
        if shapes.num_pairs == 0 or w13.numel() == 0:
            return out.zero_()
        call = _Call(x_TH, w13, w2, routing, scales, out, shapes, workspace, chunk)
        rows = rows_of(x_TH.dtype, is_fp8=scales is not None)
        for path in _paths(rows, shapes, batch_invariant=batch_invariant):
            (_run_direct if path.is_direct else _run_sorted)(call, path)
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


def _parts(shapes: ExpertShapes, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of the workspace: activations, results of pairs, and a sort in the largest blocks."""
    capacity = shapes.num_pairs + shapes.num_experts * (MAX_BLOCK_PAIRS - 1)
    parts = (
        shapes.num_pairs * shapes.intermediate * dtype.itemsize,
        shapes.num_pairs * shapes.hidden * dtype.itemsize,
        *(4 * capacity, 4 * capacity, 4 * shapes.num_experts),
    )
    return tuple(-(-part // _ALIGNMENT) * _ALIGNMENT for part in parts)


def _paths(dtype: torch.dtype, shapes: ExpertShapes, *, batch_invariant: bool) -> Iterator[_Path]:
    """The way of this step; while compiling, those of every number of tokens."""
    suffix = f"-{INVARIANT}" if batch_invariant else ""
    width = -(-shapes.num_pairs // shapes.num_experts)
    kinds = [(f"{GATE_UP}{suffix}", f"{DOWN}{suffix}", width)]
    direct = (f"{GATE_UP}-{DIRECT}", f"{DOWN}-{DIRECT}", shapes.num_pairs)
    if LAUNCHER.is_compiling:
        kinds += [] if batch_invariant else [direct]
    elif not batch_invariant and shapes.num_pairs <= MAX_DIRECT_PAIRS:
        kinds = [direct]
    for gate_up, down, width in kinds:
        chosen = LAUNCHER.config(MOE_EXPERTS, dtype, width, gate_up)
        buckets = [chosen[0].up_to]
        if LAUNCHER.is_compiling:
            buckets = [
                key.up_to for key in CONFIGS if (*key[:3], key.kind) == (*chosen[0][:3], gate_up)
            ]
        for up_to in buckets:
            yield _Path(
                LAUNCHER.config(MOE_EXPERTS, dtype, up_to, gate_up),
                LAUNCHER.config(MOE_EXPERTS, dtype, up_to, down),
                is_direct=gate_up.endswith(DIRECT),
            )


def _split(call: _Call, block_size: int) -> tuple[torch.Tensor, torch.Tensor, SortedPairs]:
    """The workspace's activations and results by pair, and its sort, without places."""
    shapes, dtype = call.shapes, call.x.dtype
    sizes = list(_parts(shapes, dtype))
    activated, y, pairs, groups, counts = torch.split(call.workspace[: sum(sizes)], sizes)
    capacity = sorted_capacity(shapes.num_pairs, shapes.num_experts, block_size)
    return (
        activated.view(dtype)[: shapes.num_pairs * shapes.intermediate],
        y.view(dtype)[: shapes.num_pairs * shapes.hidden].view(-1, shapes.hidden),
        SortedPairs(
            pairs.view(torch.int32)[:capacity],
            groups.view(torch.int32)[: capacity // block_size],
            counts.view(torch.int32)[: shapes.num_experts],
            call.routing[1],
        ),
    )


def _tile(chosen: _Chosen, constants: dict[str, int]) -> dict[str, int]:
    """Columns of one step: no more than share a scale."""
    block_k = chosen[1].constants["BLOCK_K"]
    return {"BLOCK_K": min(block_k, SCALE_BLOCK) if constants["SCALE"] > 1 else block_k}


def _run_direct(call: _Call, path: _Path) -> None:
    shapes, constants = call.shapes, call.constants()
    activated, _, _ = _split(call, 1)
    ids = call.routing[1]
    s13, s2 = (call.w13, call.w2) if call.scales is None else call.scales
    constants = {**constants, "TOP_K": shapes.top_k}
    LAUNCHER.launch(
        direct_gate_up_kernel,
        (-(-shapes.intermediate // path.gate_up[1].constants["BLOCK_N"]), shapes.num_pairs),
        path.gate_up,
        (call.x, call.w13, s13, activated, ids, *call.x.stride()),
        {
            **constants,
            **_tile(path.gate_up, constants),
            "STAGES": path.gate_up[1].num_stages,
            "OVERLAP": overlaps(path.gate_up[1]),
        },
    )
    LAUNCHER.launch(
        direct_down_kernel,
        (-(-shapes.hidden // path.down[1].constants["BLOCK_N"]), shapes.num_tokens),
        path.down,
        (activated, call.w2, s2, call.out, *call.routing, *call.out.stride()),
        {
            **constants,
            **_tile(path.down, constants),
            "OVERLAP": overlaps(path.down[1]),
            "BLOCK_SLOTS": power_of_two(shapes.top_k),
        },
    )


def _run_sorted(call: _Call, path: _Path) -> None:
    shapes, constants = call.shapes, call.constants()
    block_size = path.gate_up[1].constants["BLOCK_M"]
    activated, y, pairs = _split(call, block_size)
    s13, s2 = (call.w13, call.w2) if call.scales is None else call.scales
    launch_sort(call.routing[1], pairs, block_size, 1)
    num_blocks = pairs.block_groups.shape[0]
    blocks = (pairs.pairs, pairs.block_groups, shapes.num_pairs, num_blocks)
    LAUNCHER.launch(
        gate_up_kernel,
        (num_blocks * -(-shapes.intermediate // path.gate_up[1].constants["BLOCK_N"]),),
        path.gate_up,
        (call.x, call.w13, s13, activated, *blocks, *call.x.stride()),
        {**constants, **_tile(path.gate_up, constants), "TOP_K": shapes.top_k},
    )
    LAUNCHER.launch(
        down_kernel,
        (num_blocks * -(-shapes.hidden // path.down[1].constants["BLOCK_N"]),),
        path.down,
        (activated, call.w2, s2, y, *blocks),
        {**constants, **_tile(path.down, constants)},
    )
    launch_combine(y, call.routing, call.out, shapes.num_experts, by_pair=True)
