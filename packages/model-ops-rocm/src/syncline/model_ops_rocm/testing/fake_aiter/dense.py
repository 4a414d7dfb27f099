"""Norm, activation and rotary embedding of the stand-in; float32 inside, one rounding."""

import torch

from syncline.model_ops_rocm.testing.fake_aiter.checks import Functions, abort_unless, need_dense

_HALVES = (torch.bfloat16, torch.float16)


def functions() -> Functions:
    return {
        "rmsnorm2d_fwd": rmsnorm2d_fwd,
        "silu_and_mul": silu_and_mul,
        "rope_cached_positions_2c_fwd_inplace": rope_cached_positions_2c_fwd_inplace,
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
    half = cos.shape[-1]
    for name, tensor in (("q", q), ("k", k)):
        need_dense(name, tensor, _HALVES)
        abort_unless(tensor.ndim == 4, f"{name} is not s, b, heads, dim")
        abort_unless(tensor.shape[:2] == positions.shape, "positions are not s, b")
        abort_unless(2 * half <= tensor.shape[-1], "cos is wider than a head")
    for name, tensor in (("cos", cos), ("sin", sin)):
        need_dense(name, tensor, (q.dtype,))
        abort_unless(tensor.shape[1:] == (1, 1, half), f"{name} is not max_pos, 1, 1, rot / 2")
    abort_unless(positions.dtype == torch.int64, "positions are not int64")
    abort_unless(rotate_style in (0, 1), "no style of a rotation")
    abort_unless(reuse_freqs_front_part is True and nope_first is False, "other arrangements")
    inside = (positions >= 0) & (positions < cos.shape[0])
    abort_unless(bool(inside.all()), "a read outside of cos")
    cos, sin = (angle[positions].float().squeeze(2) for angle in (cos, sin))
    pairs = rotate_style == 1
    for tensor in (q, k):
        turned = tensor[..., : 2 * half]
        split = turned.reshape(*turned.shape[:-1], *((half, 2) if pairs else (2, half))).float()
        one, other = split.unbind(-1 if pairs else -2)
        rotated = torch.stack(
            (one * cos - other * sin, other * cos + one * sin), dim=-1 if pairs else -2
        )
        turned.copy_(rotated.flatten(-2))
