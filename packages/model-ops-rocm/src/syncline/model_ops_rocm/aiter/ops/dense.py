"""Norm, activation and rotary embedding by AITER; knows no model."""

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
from syncline.model_ops_rocm.arguments.dense import (
    RMS_NORM,
    ROTARY,
    SILU_AND_MUL,
    check_rms_norm,
    check_rotary_embedding,
    check_silu_and_mul,
)
from syncline.model_ops_rocm.checks import (
    refuse,
)
from syncline.model_ops_rocm.contracts import NormStyle

_HALVES_STYLE: Final = 0
_PAIRS_STYLE: Final = 1
_MODEL_SENSITIVE: Final = {NormStyle.ROUND_THEN_WEIGHT: 1, NormStyle.WEIGHT_THEN_ROUND: 0}


class AiterRMSNorm(AiterOp):
    """`rmsnorm2d_fwd`, which rounds before the weight if it is told to be model-sensitive.

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
        """See `contracts.RMSNorm`; without Gemma's style, and never batch-invariant."""
        refuse_batch_invariant(RMS_NORM, batch_invariant)
        check_rms_norm(x_TH, weight_H, eps, residual_TH=residual_TH, out=out, style=style)
        if style not in _MODEL_SENSITIVE:
            refuse(RMS_NORM, "style", f"be {' or '.join(_MODEL_SENSITIVE)} for AITER", style)
        require_halves(RMS_NORM, "x", x_TH)
        require_device(RMS_NORM, self.aiter, x=x_TH, weight=weight_H, residual=residual_TH, out=out)
        norm = self.aiter.function("rmsnorm2d_fwd")
        if residual_TH is not None:
            x_TH = residual_TH.add_(x_TH)
        if x_TH.numel() == 0:
            return torch.empty_like(x_TH) if out is None else out
        rows = x_TH.reshape(-1, x_TH.shape[-1]).contiguous()
        flag = _MODEL_SENSITIVE[style]
        normed = as_tensor(norm(rows, weight_H.contiguous(), eps, use_model_sensitive_rmsnorm=flag))
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
        """See `contracts.RotaryEmbedding`."""
        check_rotary_embedding(q_TNH, k_TKH, cos_sin_cache, positions_T, out=out)
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
            style = _PAIRS_STYLE if is_interleaved else _HALVES_STYLE
            # One sequence of as many positions as tokens: AITER's dimensions are s, b, heads, dim.
            # The width of cos says how much of a head is turned, from its front on.
            rotate(q.unsqueeze(0), k.unsqueeze(0), cos, sin, numbers, style, True, False)
        return written(outs[0], q), written(outs[1], k)


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
