"""Speed of rotary embedding, of quantised activations and of the fused ops."""

from collections.abc import Callable, Iterator
from typing import Any, Final, cast  # Any: ops, whose arguments differ

import torch
from gpu_timing import Machine, Row, num_operands, row_of_bytes

from syncline.model_ops_rocm import (
    CodeType,
    E8m0Mode,
    Granularity,
    Quantised,
    ScaleType,
    detect_arch,
    select,
)
from syncline.model_ops_rocm.kv import KVLayout, KVOrder, KVPool, KVScale
from syncline.model_ops_rocm.triton.targets import casts_natively

TARGET: Final = 0.75
HEADS: Final = (32, 8, 128)  # of queries, of keys and values, head_dim
_LARGE: Final = 2**26
_DTYPE: Final = torch.bfloat16
Make = Callable[[], Callable[[], object]]


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """Rotation is promised, the rest is not; unless `quick`, also what a decode step has."""
    for num_tokens in (8_192,) if quick else (8_192, 256, 1):
        yield _row(machine, "rotary_embedding", num_tokens, _rotation(num_tokens), promised=True)
        for scale in (KVScale.NONE, KVScale.TOKEN):
            make = _heads(num_tokens, scale)
            yield _row(machine, "qk_norm_rope_kv_write", num_tokens, make, kind=f"{scale} scale")
        for recipe in _recipes():
            kind = recipe.describe()
            for op, make in (
                ("quantise_activation", _quantisation(num_tokens, 4_096, recipe)),
                ("rms_norm_quant", _norm(num_tokens, 4_096, recipe)),
                ("silu_and_mul_quant", _activation(num_tokens, 12_288, recipe)),
            ):
                yield _row(machine, op, num_tokens, make, kind=kind)


def _recipes() -> tuple[Quantised, ...]:
    is_fnuz = casts_natively(detect_arch(), CodeType.E4M3FNUZ)
    code = CodeType.E4M3FNUZ if is_fnuz else CodeType.E4M3FN
    return (
        Quantised(granularity=Granularity.TOKEN, code=code),
        Quantised(granularity=Granularity.BLOCK_1X128, code=code),
        Quantised(
            granularity=Granularity.BLOCK_1X32,
            code=code,
            scale=ScaleType.E8M0,
            e8m0_mode=E8m0Mode.ROUND_UP,
        ),
    )


class _Measured:
    """How to make one call, and the bytes that it must move."""

    __slots__ = ("make", "num_bytes", "width")

    def __init__(self, make: Make, num_bytes: int, width: str) -> None:
        self.make, self.num_bytes, self.width = make, num_bytes, width


def _quantisation(num_tokens: int, width: int, recipe: Quantised) -> _Measured:
    def make() -> Callable[[], object]:
        op, x = _op("quantise_activation"), _random(num_tokens, width)
        out = op(x, recipe)
        return lambda: op(x, recipe, out=out)

    return _Measured(make, 3 * num_tokens * width, str(width))


def _norm(num_tokens: int, width: int, recipe: Quantised) -> _Measured:
    def make() -> Callable[[], object]:
        op, weight = _op("rms_norm_quant"), _random(width)
        x, residual = _random(num_tokens, width), _random(num_tokens, width)
        out = op(x, weight, 1e-6, recipe, residual_TH=residual)
        return lambda: op(x, weight, 1e-6, recipe, residual_TH=residual, out=out)

    return _Measured(make, 7 * num_tokens * width, f"{width} + residual")


def _activation(num_tokens: int, width: int, recipe: Quantised) -> _Measured:
    def make() -> Callable[[], object]:
        op, x = _op("silu_and_mul_quant"), _random(num_tokens, 2 * width)
        out = op(x, recipe)
        return lambda: op(x, recipe, out=out)

    return _Measured(make, 5 * num_tokens * width, str(width))


def _fused_heads(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_heads, num_kv_heads, head_dim = HEADS
    fused = _random(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    first_v = num_heads + num_kv_heads
    return fused[:, :num_heads], fused[:, num_heads:first_v], fused[:, first_v:]


def _rotation(num_tokens: int) -> _Measured:
    num_heads, num_kv_heads, head_dim = HEADS

    def make() -> Callable[[], object]:
        op, (q, k, _) = _op("rotary_embedding"), _fused_heads(num_tokens)
        angles, positions = _angles(num_tokens)
        out = _random(num_tokens, num_heads, head_dim), _random(num_tokens, num_kv_heads, head_dim)
        return lambda: op(q, k, angles, positions, out=out)

    num_bytes = 4 * num_tokens * (num_heads + num_kv_heads) * head_dim
    return _Measured(make, num_bytes, f"{num_heads}/{num_kv_heads} x {head_dim}")


def _heads(num_tokens: int, scale: KVScale) -> _Measured:
    num_heads, num_kv_heads, head_dim = HEADS
    code = _recipes()[0].dtype
    dtype = _DTYPE if scale is KVScale.NONE else code
    layout = KVLayout(order=KVOrder.HND, dtype=dtype, kernel_block_size=64, scale=scale)
    pool = KVPool(
        layout=layout,
        num_blocks=num_tokens // 64 + 2,
        block_size=64,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )

    def make() -> Callable[[], object]:
        op, heads = _op("qk_norm_rope_kv_write"), _fused_heads(num_tokens)
        angles, positions = _angles(num_tokens)
        stored = {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device="cuda")
            for name, spec in pool.specs().items()
        }
        slots = torch.randperm(pool.num_slots, device="cuda")[:num_tokens].int()
        arguments: dict[str, Any] = {
            "layout": layout,
            "norm_weights": (_random(head_dim), _random(head_dim)),
            "out": _random(num_tokens, num_heads, head_dim),
        }
        if scale is not KVScale.NONE:
            arguments["kv_scales"] = (stored["k_scale"], stored["v_scale"])
        caches = stored["k"], stored["v"]
        return lambda: op(*heads, angles, positions, *caches, slots, **arguments)

    per_token = 2 * (2 * num_heads + 2 * num_kv_heads) + 2 * num_kv_heads * dtype.itemsize
    shape = f"{num_heads}/{num_kv_heads} x {head_dim}"
    return _Measured(make, num_tokens * per_token * head_dim, shape)


def _angles(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(num_tokens + 8, HEADS[2], device="cuda")
    return angles, torch.arange(num_tokens, device="cuda") + 7


def _op(name: str) -> Callable[..., Any]:
    found = select(name, backend="triton", arch=detect_arch(), dtype=_DTYPE)
    return cast(Callable[..., Any], found)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=_DTYPE, device="cuda")


def _row(
    machine: Machine,
    op: str,
    num_tokens: int,
    measured: _Measured,
    *,
    kind: str = "",
    promised: bool = False,
) -> Row:
    calls = [measured.make() for _ in range(num_operands(measured.num_bytes))]
    return row_of_bytes(
        machine,
        f"{op}, {kind}" if kind else op,
        f"{num_tokens} x {measured.width}",
        calls,
        measured.num_bytes,
        target=TARGET if promised and measured.num_bytes > _LARGE else None,
    )
