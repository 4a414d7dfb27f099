"""Time of one whole decoder layer of Qwen3, captured: the number that predicts an engine's step.

One decode row with 512 tokens of context goes through as many layers, one after another, as have a
gigabyte of weights together; each has its own weights and cache, blocks in random order. Time is
that of the graph over the number of layers; the floor is what one layer must read, over the copy
rate. Ops are the registry's: by Triton where it has them, linear by whichever backend is faster for
the weight's shape, attention that merges its parts in its own launch or in one more, where it has
parts, whichever is faster for the model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast  # Any: ops, whose arguments differ

import torch
from gpu_timing import Machine, Row, node_seconds, num_operands

from syncline.model_ops_rocm import AttentionMetadata, RowMajor, available, detect_arch, select
from syncline.model_ops_rocm.kv import KVLayout, KVOrder
from syncline.model_ops_rocm.testing.launches import launched_by

DTYPE: Final = torch.bfloat16
CONTEXT: Final = 512
EPS: Final = 1e-6
ROW_MAJOR: Final = RowMajor()
LAYOUT: Final = KVLayout(order=KVOrder.HND, dtype=DTYPE, kernel_block_size=64)
_NUM_BLOCKS: Final = 4 * CONTEXT // LAYOUT.kernel_block_size
Op = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One of the sizes of Qwen3; `promised_s` is the most that a layer may take."""

    name: str
    hidden: int
    num_heads: int
    num_kv_heads: int
    intermediate: int  # of one expert, if there are any
    promised_s: float
    head_dim: int = 128
    num_experts: int = 0
    top_k: int = 1

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def bytes_read(self) -> int:
        """By one layer for one token."""
        heads = self.num_heads * self.head_dim
        weights = self.hidden * (self.qkv_width + heads + self.num_experts)
        weights += self.top_k * 3 * self.hidden * self.intermediate
        kv = 2 * CONTEXT * self.num_kv_heads * self.head_dim
        return (weights + kv) * DTYPE.itemsize


MODELS: Final = (
    Model(
        name="8B",
        hidden=4_096,
        num_heads=32,
        num_kv_heads=8,
        intermediate=12_288,
        promised_s=105e-6,
    ),
    Model(
        name="30B-A3B",
        hidden=2_048,
        num_heads=32,
        num_kv_heads=4,
        intermediate=768,
        promised_s=42e-6,
        num_experts=128,
        top_k=8,
    ),
    Model(
        name="0.6B",
        hidden=1_024,
        num_heads=16,
        num_kv_heads=8,
        intermediate=3_072,
        promised_s=23e-6,
    ),
)


class Step:
    """What the layers of one step share: where the token is, and where its row's blocks are."""

    __slots__ = ("angles", "meta", "positions", "slots")

    def __init__(self, head_dim: int) -> None:
        size = LAYOUT.kernel_block_size
        blocks = torch.randperm(_NUM_BLOCKS, device="cuda")[: CONTEXT // size].int()
        self.positions = torch.tensor([CONTEXT - 1], device="cuda")
        self.slots = (blocks[-1:] * size + (CONTEXT - 1) % size).int()
        self.angles = torch.randn(CONTEXT, head_dim, device="cuda")
        self.meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
            seq_lens=torch.tensor([CONTEXT], dtype=torch.int32, device="cuda"),
            block_tables=blocks.unsqueeze(0),
            num_decode_rows=1,
        )


class Linear:
    """One projection, with a weight, a result and a workspace of its own."""

    __slots__ = ("_op", "_out", "_weight", "_workspace")

    def __init__(self, num_in: int, num_out: int) -> None:
        backend = fastest_linear(num_in, num_out)
        self._op = op_of("linear", backend)
        self._weight = random(num_out, num_in).mul_(num_in**-0.5)
        self._out = random(1, num_out)
        self._workspace = workspace_of(self._op, self._weight, 1) if backend == "triton" else {}

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        self._op(x_TK, self._weight, layout=ROW_MAJOR, out=self._out, **self._workspace)
        return self._out


class Mlp:
    """gate and up, SwiGLU, down."""

    __slots__ = ("_activate", "_down", "_gate_up", "_product")

    def __init__(self, model: Model) -> None:
        self._activate = op_of("silu_and_mul")
        self._gate_up = Linear(model.hidden, 2 * model.intermediate)
        self._down = Linear(model.intermediate, model.hidden)
        self._product = random(1, model.intermediate)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        self._activate(self._gate_up(x_TH), out=self._product)
        return self._down(self._product)


class Experts:
    """The router and its experts."""

    __slots__ = ("_experts", "_out", "_route", "_router", "_routes", "_top_k", "_weights", "_work")

    def __init__(self, model: Model) -> None:
        num_experts, hidden, intermediate = model.num_experts, model.hidden, model.intermediate
        self._route, self._experts = op_of("moe_route"), op_of("moe_experts")
        self._top_k, self._router = model.top_k, Linear(hidden, num_experts)
        w13 = random(num_experts, 2 * intermediate, hidden).mul_(hidden**-0.5)
        w2 = random(num_experts, hidden, intermediate).mul_(intermediate**-0.5)
        self._weights, self._out = (w13, w2), random(1, hidden)
        self._routes = (
            torch.empty(1, model.top_k, device="cuda"),
            torch.empty(1, model.top_k, dtype=torch.int32, device="cuda"),
        )
        self._work = workspace_of(self._experts, w13, model.top_k, 1, DTYPE)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        self._route(self._router(x_TH), self._top_k, out=self._routes)
        self._experts(
            *(x_TH, *self._weights, *self._routes),
            layout=ROW_MAJOR,
            out=self._out,
            **self._work,
        )
        return self._out


class Layer:
    """A decoder layer of one model, with a cache that is full of other tokens."""

    def __init__(self, model: Model, step: Step) -> None:
        self._model, self._step = model, step
        self._norm, self._heads = op_of("rms_norm"), op_of("qk_norm_rope_kv_write")
        self._attend = op_of("paged_attention")
        heads = model.num_heads * model.head_dim
        self._qkv, self._o = Linear(model.hidden, model.qkv_width), Linear(heads, model.hidden)
        self._mlp = Experts(model) if model.num_experts else Mlp(model)
        self._norms = [random(model.hidden) for _ in range(2)]
        self._head_norms = random(model.head_dim), random(model.head_dim)
        self._normed = random(1, model.hidden)
        self._q, self._attended = random(2, 1, model.num_heads, model.head_dim).unbind()
        shape = (_NUM_BLOCKS, model.num_kv_heads, LAYOUT.kernel_block_size, model.head_dim)
        self._caches = random(*shape), random(*shape)
        sizes = (self._attend, self._q, self._caches[0], step.meta)
        self._work = workspace_of(*sizes, layout=LAYOUT)
        self._counters = counters_of(*sizes, layout=LAYOUT)
        self.has_counters = True  # whether attention merges its parts in the launch that makes them

    def __call__(self, x_TH: torch.Tensor, residual_TH: torch.Tensor) -> torch.Tensor:
        """What is to be added to the residual."""
        x_TH = self._normalised(x_TH, residual_TH, 0)
        attended = self._attention(self._qkv(x_TH))
        x_TH = self._normalised(self._o(attended), residual_TH, 1)
        return self._mlp(x_TH)

    def _normalised(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, which: int
    ) -> torch.Tensor:
        self._norm(x_TH, self._norms[which], EPS, residual_TH=residual_TH, out=self._normed)
        return self._normed

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        model, step = self._model, self._step
        heads = qkv.view(1, -1, model.head_dim)
        first_k, first_v = model.num_heads, model.num_heads + model.num_kv_heads
        self._heads(
            *(heads[:, :first_k], heads[:, first_k:first_v], heads[:, first_v:]),
            *(step.angles, step.positions, *self._caches, step.slots),
            layout=LAYOUT,
            norm_weights=self._head_norms,
            eps=EPS,
            out=self._q,
        )
        scale = model.head_dim**-0.5
        self._attend(
            *(self._q, *self._caches, step.meta),
            scale=scale,
            layout=LAYOUT,
            out=self._attended,
            **self._work,
            **(self._counters if self.has_counters else {}),
        )
        return self._attended.view(1, -1)

    def attention_kernels(self) -> list[str]:
        """Names of the kernels that attend; compiles them, and launches nothing."""
        first, *attend = launched_by(lambda: self._attention(random(1, self._model.qkv_width)))
        assert "rope" in first, first
        return attend


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """One row per model; `quick` changes nothing."""
    for model in MODELS:
        step = Step(model.head_dim)
        layers = [Layer(model, step) for _ in range(max(num_operands(model.bytes_read), 4))]
        seconds, kernels = _fastest(layers, model.hidden)
        floor = model.bytes_read / machine.copy_bytes_per_s
        yield Row(
            op="decoder layer",
            shape=f"Qwen3-{model.name}, 1 row of {CONTEXT}",
            backend="triton, linear " + "/".join(sorted(_used_linear)),
            seconds=seconds,
            floor_s=floor,
            target=floor / model.promised_s,
            note=f"promised {model.promised_s * 1e6:.0f} us; {len(layers)} layers, by {kernels}",
        )
        del layers
        torch.cuda.empty_cache()


def _fastest(layers: list[Layer], hidden: int) -> tuple[float, str]:
    """Of a layer, and by which kernels it attends then.

    In one launch attention ends sooner; but what comes after it starts sooner, too, and the loads
    of a large weight then stand before those of the KV.
    """
    seconds: dict[str, float] = {}
    for has_counters in (True, False):
        for layer in layers:
            layer.has_counters = has_counters
        kernels = " and ".join(layers[0].attention_kernels())
        if kernels not in seconds:
            seconds[kernels] = layer_seconds(layers, hidden)
    fastest = min(seconds, key=lambda kernels: seconds[kernels])
    return seconds[fastest], fastest


def layer_seconds(layers: list[Layer], hidden: int) -> float:
    """Of one layer in a graph of all of them, each fed by the one before."""
    residual, first = random(1, hidden), random(1, hidden)
    fed = [first]

    def call(layer: Layer) -> Callable[[], object]:
        def run() -> None:
            fed[0] = layer(fed[0], residual)

        return run

    return node_seconds([call(layer) for layer in layers])


_used_linear: set[str] = set()


@cache
def fastest_linear(num_in: int, num_out: int) -> str:
    """The backend whose product of one row with such a weight takes the least time."""
    seconds = {}
    for backend in ("triton", "torch"):
        if not is_there("linear", backend):
            continue
        op = op_of("linear", backend)
        calls: list[Callable[[], object]] = []
        for _ in range(num_operands(num_in * num_out * DTYPE.itemsize)):
            x, weight, out = random(1, num_in), random(num_out, num_in), random(1, num_out)
            work = workspace_of(op, weight, 1) if backend == "triton" else {}
            calls.append(
                lambda op=op, x=x, weight=weight, out=out, work=work: op(  # type: ignore[misc]  # defaults bind the operands
                    x, weight, layout=ROW_MAJOR, out=out, **work
                )
            )
        seconds[backend] = node_seconds(calls)
        del calls
        torch.cuda.empty_cache()
    fastest = min(seconds, key=lambda backend: seconds[backend])
    _used_linear.add(fastest)
    return fastest


def workspace_of(op: Op, *shapes: object, **layouts: object) -> dict[str, torch.Tensor]:
    """The keyword of an op that has a workspace."""
    num_bytes = cast(Any, op).workspace_bytes(*shapes, **layouts)
    return {"workspace": torch.empty(num_bytes, dtype=torch.uint8, device="cuda")}


def counters_of(op: Op, *shapes: object, **layouts: object) -> dict[str, torch.Tensor]:
    """The keyword of an op that merges the parts of a result in the launch that computes them."""
    size = cast(Any, op).counters_size(*shapes, **layouts)
    return {"counters": torch.zeros(size, dtype=torch.int32, device="cuda")}


def is_there(op: str, backend: str) -> bool:
    lines = available(op=op, backend=backend, arch=detect_arch(), dtype=DTYPE)
    return all(line.why_not is None for line in lines)


def op_of(op: str, backend: str = "triton") -> Op:
    return cast(Op, select(op, backend=backend, arch=detect_arch(), dtype=DTYPE))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")
