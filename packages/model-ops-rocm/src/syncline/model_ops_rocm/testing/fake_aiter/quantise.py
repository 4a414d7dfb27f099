"""The stand-in's quantisers, rounded as AITER's kernels are on record to: by reciprocals."""

from collections.abc import Callable
from typing import Final

import torch

from syncline.model_ops_rocm.testing.fake_aiter.checks import Functions, abort_unless, need_dense
from syncline.model_ops_rocm.testing.fake_aiter.enums import Enumeration, Member
from syncline.model_ops_rocm.testing.fake_aiter.gemm import NATIVE

_HALVES = (torch.bfloat16, torch.float16)
_MAX: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0}
_FLOOR: Final = 1e-10
Pair = tuple[torch.Tensor, torch.Tensor]


class FakeQuantisers:
    """Those of one architecture, which has one kind of fp8."""

    def __init__(self, arch: str, quants: Enumeration) -> None:
        self._native = NATIVE[arch]
        self._by_type: dict[Member, Callable[..., Pair]] = {
            quants.per_Tensor: self._per_tensor,
            quants.per_Token: self._per_token,
            quants.per_1x128: self._per_1x128,
            quants.per_1x32: self._per_1x32,
        }

    def functions(self) -> Functions:
        return {"get_hip_quant": self.get_hip_quant, "rmsnorm_quant": self.rmsnorm_quant}

    def get_hip_quant(self, qType: Member) -> Callable[..., Pair]:
        return self._by_type[qType]

    def rmsnorm_quant(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor,
        w: torch.Tensor,
        eps: float,
        group_size: int = 0,
        shuffle_scale: bool = False,
        gemma: bool = False,
    ) -> None:
        self._check(x)
        need_dense("w", w, (x.dtype,))
        need_dense("out", out, (self._native,))
        need_dense("scale", scale, (torch.float32,))
        abort_unless(x.ndim == 2 and w.shape == x.shape[1:] == out.shape[1:], "sizes do not fit")
        abort_unless(group_size in (0, 128) and not shuffle_scale, "another form of scales")
        x32 = x.float()
        normed = x32 * torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
        normed *= w.float() + 1.0 if gemma else w.float()
        groups = normed.view(-1, group_size or x.shape[1])
        abort_unless(scale.numel() == len(groups), "another number of scales")
        codes, scales = self._encoded(groups, floor=_FLOOR)
        out.view(torch.uint8).copy_(codes.view(out.shape).view(torch.uint8))
        scale.copy_(scales.view(scale.shape))

    def _per_tensor(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None = None,
        quant_dtype: torch.dtype | None = None,
    ) -> Pair:
        self._check(x, quant_dtype)
        abort_unless(scale is not None, "a scale of its own is not on record here")
        assert scale is not None
        need_dense("scale", scale, (torch.float32,))
        return self._codes(x.float(), scale), scale

    def _per_token(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None = None,
        quant_dtype: torch.dtype | None = None,
    ) -> Pair:
        self._check(x, quant_dtype)
        if scale is not None:
            raise NotImplementedError("a scale per token is not given")
        codes, scales = self._encoded(x.float(), floor=0.0)
        # 0 times infinity, in a clamp of three numbers, is the lowest of them.
        lowest = torch.full_like(codes.float(), -_MAX[self._native]).to(self._native)
        bits = torch.where(scales == 0, lowest.view(torch.uint8), codes.view(torch.uint8))
        return bits.view(self._native), scales

    def _per_1x128(
        self,
        x: torch.Tensor,
        quant_dtype: torch.dtype | None = None,
        transpose_scale: bool = False,
        scale_type: torch.dtype = torch.float32,
    ) -> Pair:
        self._check(x, quant_dtype)
        abort_unless(x.shape[1] % 128 == 0, "columns that are no multiple of 128")
        abort_unless(not transpose_scale and scale_type == torch.float32, "another form of scales")
        codes, scales = self._encoded(x.float().view(-1, 128), floor=_FLOOR)
        return codes.view(x.shape), scales.view(len(x), -1)

    def _per_1x32(
        self,
        x: torch.Tensor,
        quant_dtype: torch.dtype | None = None,
        shuffle: bool = False,
        scale_type: torch.dtype = torch.float32,
    ) -> Pair:
        self._check(x, quant_dtype)
        abort_unless(x.shape[1] % 32 == 0, "columns that are no multiple of 32")
        abort_unless(scale_type == torch.float8_e8m0fnu and not shuffle, "another form of scales")
        groups = x.float().view(-1, 32)
        amax = groups.abs().amax(-1, keepdim=True).clamp(min=_FLOOR)
        exponent = torch.ceil(torch.log2(amax.double() / _MAX[self._native]))
        codes = self._codes(groups, torch.exp2(exponent).float())
        bytes_ = (exponent + 127).to(torch.uint8).view(len(x), -1)
        return codes.view(x.shape), bytes_.view(torch.float8_e8m0fnu)

    def _check(self, x: torch.Tensor, quant_dtype: torch.dtype | None = None) -> None:
        need_dense("x", x, _HALVES)
        abort_unless(x.ndim == 2, "x is not rows")
        abort_unless(quant_dtype in (None, self._native), "the other kind of fp8")

    def _encoded(self, groups: torch.Tensor, *, floor: float) -> Pair:
        amax = groups.abs().amax(-1, keepdim=True).clamp(min=floor)
        scales = amax * torch.tensor(1.0 / _MAX[self._native])
        return self._codes(groups, scales), scales

    def _codes(self, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        limit = _MAX[self._native]
        return (groups * (1.0 / scales)).clamp(-limit, limit).to(self._native)
