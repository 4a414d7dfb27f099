"""Norm, activation, rotary embedding and linear by AITER; knows no model."""

from collections.abc import Sequence as SequenceABC
from typing import Final

import torch

from syncline.model_ops_rocm.aiter.ops.common import (
    AiterOp,
    as_tensor,
    refuse_batch_invariant,
    require_device,
    require_halves,
    to_write,
    written,
)
from syncline.model_ops_rocm.arguments import (
    RMS_NORM,
    ROTARY,
    SILU_AND_MUL,
    check_rms_norm,
    check_rotary_embedding,
    check_silu_and_mul,
)
from syncline.model_ops_rocm.checks import (
    refuse,
    require_dtype,
    require_ndim,
    require_out,
    require_shape,
)
from syncline.model_ops_rocm.contracts import NormStyle
from syncline.model_ops_rocm.errors import LayoutError
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16, WeightLayout

_LINEAR: Final = "linear"
_NEOX: Final = 0
_ROW_MAJOR: Final = RowMajor()
_SHUFFLED: Final = Shuffle16x16()
LINEAR_LAYOUTS: Final[tuple[WeightLayout, ...]] = (_SHUFFLED, _ROW_MAJOR)
# Without a tuned entry the shuffled product is left to hipBLASLt on gfx942; elsewhere assembly
# kernels take it, and those assert these multiples.
_SHUFFLED_MULTIPLE: Final = 64


class AiterRMSNorm(AiterOp):
    """`rmsnorm2d_fwd`, model-sensitive: rounded before the weight, as the contract says.

    The sum with the residual is PyTorch's, before it: AITER's fused call normalises the sum that is
    not rounded yet, and is not on record to take one tensor as residual in and out.
    """

    __slots__ = ()

    def __call__(  # noqa: PLR0913 - the contract's keywords
        self,
        x_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        *,
        residual_TH: torch.Tensor | None = None,
        style: NormStyle = NormStyle.ROUND_THEN_WEIGHT,
        batch_invariant: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contracts.RMSNorm`; one style, and never batch-invariant."""
        refuse_batch_invariant(RMS_NORM, batch_invariant)
        check_rms_norm(x_TH, weight_H, eps, residual_TH=residual_TH, out=out)
        if style is not NormStyle.ROUND_THEN_WEIGHT:
            refuse(RMS_NORM, "style", f"be {NormStyle.ROUND_THEN_WEIGHT} on aiter", style)
        require_halves(RMS_NORM, "x", x_TH)
        require_device(RMS_NORM, self.aiter, x=x_TH, weight=weight_H, residual=residual_TH, out=out)
        norm = self.aiter.function("rmsnorm2d_fwd")
        if residual_TH is not None:
            x_TH = residual_TH.add_(x_TH)
        if x_TH.numel() == 0:
            return torch.empty_like(x_TH) if out is None else out
        rows = x_TH.reshape(-1, x_TH.shape[-1]).contiguous()
        normed = as_tensor(norm(rows, weight_H.contiguous(), eps, use_model_sensitive_rmsnorm=1))
        return written(out, normed.view(x_TH.shape))


class AiterSiluAndMul(AiterOp):
    """`silu_and_mul`: rounded once, where the contract rounds silu first."""

    __slots__ = ()

    def __call__(self, x_T2I: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `contracts.SiluAndMul`."""
        shape = check_silu_and_mul(x_T2I, out=out)
        require_halves(SILU_AND_MUL, "x", x_T2I)
        require_device(SILU_AND_MUL, self.aiter, x=x_T2I, out=out)
        activate = self.aiter.function("silu_and_mul")
        result = to_write(out, shape, x_T2I)
        if x_T2I.numel() != 0:
            rows = x_T2I.reshape(-1, x_T2I.shape[-1]).contiguous()
            activate(result.view(-1, shape[-1]), rows)
        return written(out, result)


class AiterRotaryEmbedding(AiterOp):
    """`rope_cached_positions_2c_fwd_inplace` on copies of q and k.

    The angles of the tokens are gathered first, rounded to q's dtype: AITER takes cos and sin apart
    and in that dtype, and reads whatever lies at a position, so the positions it gets are the
    tokens' own numbers.
    """

    __slots__ = ()

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        positions_T: torch.Tensor,
        *,
        is_interleaved: bool = False,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `contracts.RotaryEmbedding`; whole heads, the first half paired with the second."""
        check_rotary_embedding(q_TNH, k_TKH, cos_sin_cache, positions_T, out=out)
        if is_interleaved:
            refuse(ROTARY, "is_interleaved", "be False on aiter", is_interleaved)
        if cos_sin_cache.shape[1] != q_TNH.shape[2]:
            limit = f"turn all {q_TNH.shape[2]} dimensions of a head on aiter"
            refuse(ROTARY, "cos_sin_cache", limit, list(cos_sin_cache.shape))
        require_halves(ROTARY, "q", q_TNH)
        outs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None) if out is None else out
        require_device(
            ROTARY,
            self.aiter,
            q=q_TNH,
            k=k_TKH,
            cos_sin_cache=cos_sin_cache,
            positions=positions_T,
            q_out=outs[0],
            k_out=outs[1],
        )
        rotate = self.aiter.function("rope_cached_positions_2c_fwd_inplace")
        num_tokens = q_TNH.shape[0]
        q = to_write(outs[0], q_TNH.shape, q_TNH).copy_(q_TNH)
        k = to_write(outs[1], k_TKH.shape, k_TKH).copy_(k_TKH)
        if num_tokens != 0:
            cos, sin = _angles(cos_sin_cache, positions_T, q.dtype)
            numbers = torch.arange(num_tokens, device=q.device).unsqueeze(0)
            # One sequence of as many positions as tokens: AITER's dimensions are s, b, heads, dim.
            rotate(q.unsqueeze(0), k.unsqueeze(0), cos, sin, numbers, _NEOX, True, False)
        return written(outs[0], q), written(outs[1], k)


class AiterLinear(AiterOp):
    """`tgemm.mm`, which picks a kernel by its tables, and takes a shuffled weight by a flag."""

    __slots__ = ()

    @property
    def layouts(self) -> SequenceABC[WeightLayout]:
        """What `layout` may be, the preferred one first."""
        return LINEAR_LAYOUTS

    def workspace_bytes(self, weight: torch.Tensor, max_tokens: int) -> int:
        """0: AITER allocates by itself."""
        return 0

    def __call__(  # noqa: PLR0913 - the contract's
        self,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        layout: WeightLayout,
        out: torch.Tensor | None = None,
        batch_invariant: bool = False,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `contracts.Linear`; never batch-invariant."""
        refuse_batch_invariant(_LINEAR, batch_invariant)
        shape = self._check(x_TK, weight, bias, layout)
        if out is not None:
            require_out(_LINEAR, out, shape, x_TK.dtype)
        require_device(_LINEAR, self.aiter, x=x_TK, weight=weight, bias=bias, out=out)
        multiply = self.aiter.function("tgemm.mm")
        if x_TK.numel() == 0 or weight.numel() == 0:
            return _empty_product(shape, x_TK, bias, out)
        rows = x_TK.reshape(-1, x_TK.shape[-1]).contiguous()
        # The flag lies on the tensor's object: a view of our own has it or not as the layout says.
        stored = weight.view(weight.shape)
        if layout == _SHUFFLED:
            stored.is_shuffled = True  # type: ignore[attr-defined]  # AITER looks for it
        product = as_tensor(multiply(rows, stored, bias, x_TK.dtype))
        return written(out, product.view(shape))

    def _check(
        self,
        x_TK: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layout: WeightLayout,
    ) -> tuple[int, ...]:
        """The shape of the result."""
        require_halves(_LINEAR, "x", x_TK)
        require_ndim(_LINEAR, "weight", weight, 2)
        require_dtype(_LINEAR, "weight", weight, x_TK.dtype)
        num_out, num_in = weight.shape
        if x_TK.ndim == 0 or x_TK.shape[-1] != num_in:
            refuse(_LINEAR, "x", f"have a last dimension of {num_in}", list(x_TK.shape))
        if bias is not None:
            require_shape(_LINEAR, "bias", bias, weight.shape[:1])
            require_dtype(_LINEAR, "bias", bias, x_TK.dtype)
        if layout not in LINEAR_LAYOUTS:
            accepted = ", ".join(one.describe() for one in LINEAR_LAYOUTS)
            raise LayoutError(
                layout=layout.describe(), precondition=f"{_LINEAR} to take it", got=accepted
            )
        if not weight.is_contiguous():
            refuse(_LINEAR, "weight", "be contiguous", f"strides {weight.stride()}")
        if layout == _SHUFFLED:
            self._check_shuffled(weight)
        return (*x_TK.shape[:-1], num_out)

    def _check_shuffled(self, weight: torch.Tensor) -> None:
        _SHUFFLED.check(weight.shape, weight.dtype)
        if weight.dtype != torch.bfloat16:
            refuse(_LINEAR, "weight", "be bfloat16 where it is shuffled", weight.dtype)
        if self.aiter.arch(weight.device) == "gfx942":
            return
        if any(size % _SHUFFLED_MULTIPLE for size in weight.shape):
            limit = f"have multiples of {_SHUFFLED_MULTIPLE} where it is shuffled"
            refuse(_LINEAR, "weight", limit, list(weight.shape))


def _angles(
    cos_sin_cache: torch.Tensor, positions_T: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each token, [T, 1, 1, D / 2] contiguous; NaN for a position outside."""
    num_positions, head_dim = cos_sin_cache.shape
    known = positions_T.clamp(0, num_positions - 1)
    if not positions_T.is_cuda and not torch.equal(known, positions_T):
        refuse(ROTARY, "positions", f"be in [0, {num_positions})", "one outside")
    angles = cos_sin_cache.index_select(0, known).to(dtype)
    angles = angles.masked_fill_((known != positions_T).unsqueeze(-1), float("nan"))
    cos, sin = angles.view(-1, 1, 1, head_dim).chunk(2, dim=-1)
    return cos.contiguous(), sin.contiguous()


def _empty_product(
    shape: tuple[int, ...],
    x_TK: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """No element to multiply: a sum of nothing is 0, plus the bias."""
    result = torch.zeros(shape, dtype=x_TK.dtype, device=x_TK.device)
    return written(out, result if bias is None else result.add_(bias))
