"""Norm, activation, rotary embedding and GEMM of the stand-in; float32 inside, one rounding."""

import torch

from syncline.model_ops_rocm.testing.fake_aiter.checks import Functions, abort_unless, need_dense
from syncline.model_ops_rocm.testing.fake_aiter.stored import unshuffled

_HALVES = (torch.bfloat16, torch.float16)


class FakeTunedGemm:
    """`tgemm`: shuffled where the weight's object says `is_shuffled`."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        otype: torch.dtype | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        need_dense("A", A, _HALVES)
        need_dense("B", B, _HALVES)
        abort_unless(A.ndim == B.ndim == 2 and A.shape[1] == B.shape[1], "A and B do not multiply")
        abort_unless(A.dtype == B.dtype, "A and B differ in dtype")
        if getattr(B, "is_shuffled", False) is True:
            if self._arch != "gfx942":
                # On record as Python assertions of the assembly path.
                assert B.shape[0] % 64 == 0
                assert B.shape[1] % 64 == 0
                assert A.dtype == torch.bfloat16
            B = unshuffled(B)
        product = A.float() @ B.float().T
        if bias is not None:
            abort_unless(bias.shape == B.shape[:1], "bias does not fit")
            product += bias.float()
        return product.to(A.dtype if otype is None else otype)


class FakeDense:
    """The functions of one architecture."""

    def __init__(self, arch: str) -> None:
        self._gemm = FakeTunedGemm(arch)

    def functions(self) -> Functions:
        return {
            "rmsnorm2d_fwd": rmsnorm2d_fwd,
            "silu_and_mul": silu_and_mul,
            "rope_cached_positions_2c_fwd_inplace": rope_cached_positions_2c_fwd_inplace,
            "tgemm.mm": self._gemm.mm,
        }


def rmsnorm2d_fwd(
    x: torch.Tensor, w: torch.Tensor, eps: float, use_model_sensitive_rmsnorm: int = 0
) -> torch.Tensor:
    need_dense("x", x, _HALVES)
    need_dense("w", w, (x.dtype,))
    abort_unless(x.ndim == 2 and w.shape == x.shape[1:], "x and w do not fit")
    x32 = x.float()
    normed = x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    if use_model_sensitive_rmsnorm:
        return normed.to(x.dtype) * w
    return (normed * w.float()).to(x.dtype)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor, limit: float = 0.0) -> None:
    need_dense("x", x, _HALVES)
    need_dense("out", out, (x.dtype,))
    abort_unless(out.shape == (x.shape[0], x.shape[1] // 2), "out does not fit x")
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(gate * torch.sigmoid(gate) * up)


def rope_cached_positions_2c_fwd_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    rotate_style: int,
    reuse_freqs_front_part: bool,
    nope_first: bool,
) -> None:
    half = q.shape[-1] // 2
    for name, tensor in (("q", q), ("k", k)):
        need_dense(name, tensor, _HALVES)
        abort_unless(tensor.ndim == 4, f"{name} is not s, b, heads, dim")
        abort_unless(tensor.shape[:2] == positions.shape, "positions are not s, b")
    for name, tensor in (("cos", cos), ("sin", sin)):
        need_dense(name, tensor, (q.dtype,))
        abort_unless(tensor.shape[1:] == (1, 1, half), f"{name} is not max_pos, 1, 1, rot / 2")
    abort_unless(positions.dtype == torch.int64, "positions are not int64")
    abort_unless(rotate_style == 0, "this stand-in knows halves only")
    abort_unless(reuse_freqs_front_part is True and nope_first is False, "other arrangements")
    inside = (positions >= 0) & (positions < cos.shape[0])
    abort_unless(bool(inside.all()), "a read outside of cos")
    cos, sin = (angle[positions].float().squeeze(2) for angle in (cos, sin))
    for tensor in (q, k):
        one, other = tensor.float().chunk(2, dim=-1)
        tensor.copy_(torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1))
