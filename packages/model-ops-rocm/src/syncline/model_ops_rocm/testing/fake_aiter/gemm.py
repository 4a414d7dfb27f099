"""The stand-in's matrix products, of weights as they are stored; float32 inside, one rounding."""

from typing import Final

import torch

from syncline.model_ops_rocm.testing.fake_aiter.checks import Functions, abort_unless, need_dense
from syncline.model_ops_rocm.testing.fake_aiter.stored import unshuffled

NATIVE: Final = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
_HALVES = (torch.bfloat16, torch.float16)


class FakeTunedGemm:
    """`tgemm`: shuffled where the weight's object says `is_shuffled`."""

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._native = NATIVE[arch]

    def mm(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        otype: torch.dtype | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        types = _HALVES if scale_a is None else (self._native,)
        need_dense("A", A, types)
        need_dense("B", B, types)
        abort_unless((scale_a is None) == (scale_b is None), "one scale of two")
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
        if scale_a is not None and scale_b is not None:
            need_dense("scale_a", scale_a, (torch.float32,))
            need_dense("scale_b", scale_b, (torch.float32,))
            abort_unless(scale_a.numel() == scale_b.numel() == 1, "scales are not scalars")
            product *= scale_a * scale_b
        if bias is not None:
            abort_unless(bias.shape == B.shape[:1], "bias does not fit")
            product += bias.float()
        return product.to(A.dtype if otype is None else otype)


class FakeGemm:
    """The products of one architecture, which multiplies one kind of fp8."""

    def __init__(self, arch: str) -> None:
        self._tuned = FakeTunedGemm(arch)
        self._native = NATIVE[arch]

    def functions(self) -> Functions:
        return {
            "tgemm.mm": self._tuned.mm,
            "gemm_a8w8": self.gemm_a8w8,
            "gemm_a8w8_bpreshuffle": self.gemm_a8w8_bpreshuffle,
            "gemm_a8w8_blockscale": self.gemm_a8w8_blockscale,
            "gemm_a8w8_blockscale_bpreshuffle": self.gemm_a8w8_blockscale_bpreshuffle,
        }

    def gemm_a8w8(
        self,
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        xs: torch.Tensor,
        ws: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        splitK: int | None = None,
    ) -> torch.Tensor:
        self._check(XQ, WQ, (torch.int8, self._native), dtype)
        product = _per_row(XQ, WQ, xs, ws)
        if bias is not None:
            need_dense("bias", bias, (dtype,))
            abort_unless(bias.shape == WQ.shape[:1], "bias does not fit")
            product += bias.float()
        return product.to(dtype)

    def gemm_a8w8_bpreshuffle(
        self,
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        xs: torch.Tensor,
        ws: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        self._check(XQ, WQ, (self._native,), dtype)
        abort_unless(bias is None, "bias must be None")
        return _per_row(XQ, unshuffled(WQ), xs, ws).to(dtype)

    def gemm_a8w8_blockscale(
        self,
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        xs: torch.Tensor,
        ws: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        self._check(XQ, WQ, (self._native,), dtype)
        return _per_block(XQ, WQ, xs, ws).to(dtype)

    def gemm_a8w8_blockscale_bpreshuffle(
        self,
        XQ: torch.Tensor,
        WQ: torch.Tensor,
        xs: torch.Tensor,
        ws: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The memory of xs is [K / 128, M], whatever its shape."""
        self._check(XQ, WQ, (self._native,), dtype)
        need_dense("xs", xs, (torch.float32,))
        by_column = xs.view(xs.shape[1], xs.shape[0]).T.contiguous()
        return _per_block(XQ, unshuffled(WQ), by_column, ws).to(dtype)

    def _check(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        types: tuple[torch.dtype, ...],
        dtype: torch.dtype,
    ) -> None:
        need_dense("XQ", x, types)
        need_dense("WQ", weight, (x.dtype,))
        abort_unless(dtype in _HALVES, "another result")
        abort_unless(x.ndim == weight.ndim == 2, "XQ and WQ are no matrices")
        abort_unless(x.shape[1] == weight.shape[1], "XQ and WQ do not multiply")


def _per_row(
    x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor
) -> torch.Tensor:
    for name, scale, rows in (("xs", xs, len(x)), ("ws", ws, len(weight))):
        need_dense(name, scale, (torch.float32,))
        abort_unless(scale.numel() == rows, f"{name} is not one per row")
    return (x.float() @ weight.float().T) * xs.view(-1, 1) * ws.view(1, -1)


def _per_block(
    x: torch.Tensor, weight: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor
) -> torch.Tensor:
    num_rows, depth = weight.shape
    abort_unless(num_rows % 128 == 0 and depth % 128 == 0, "sizes that are no multiples of 128")
    need_dense("xs", xs, (torch.float32,))
    need_dense("ws", ws, (torch.float32,))
    abort_unless(xs.shape == (len(x), depth // 128), "xs is not one per 128 of a row")
    abort_unless(ws.shape == (num_rows // 128, depth // 128), "ws is not one per 128 x 128")
    spread = ws.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (x.float() * xs.repeat_interleave(128, 1)) @ (weight.float() * spread).T
