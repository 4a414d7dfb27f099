"""Which of our layouts each recorded call of AITER's layout functions is; computes nothing.

Unit: one recorded call, by the text of its arguments and by what its input is: nothing depends on
the name of a case. An argument that the text leaves out has AITER's default.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Final

import torch

from syncline.model_ops_rocm.layouts import (
    PermutedLayout,
    batched_scale_tiles,
    byte_tile_shuffle,
    e8m0_gate_up_shuffle,
    e8m0_shuffle,
    gate_up_rows,
    gate_up_rows_shuffle,
    gate_up_shuffle,
    gfx1250_tiles,
    int4_scale_pairs,
    n32k4_gate_up,
    scale_tiles,
    shuffle_nk,
)
from syncline.model_ops_rocm.testing.goldens import flag, number, numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayout:
    """How to read a call: its input becomes the logical tensor as the fields say."""

    layout: PermutedLayout | None  # None: AITER returns its input
    num_experts: int | None = None  # of a 2D input that has the experts' rows flattened
    transposed: bool = False  # the input is [E, K, N]
    gives_transposed: bool = False  # the output is a transposed view of what is stored
    single_column: bool = False  # the input has rows of one element


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    args: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def flag(self, name: str) -> bool:
        return flag(self.args, name)

    def number(self, name: str, default: int | None = None) -> int:
        return number(self.args, name, default)

    def experts(self) -> int | None:
        """Of an input whose experts' rows are flattened; one without the argument is what it is."""
        return self.number("experts_cnt") if "experts_cnt=" in self.args else None


def recorded_layout(
    kind: str, args: str, shape: SequenceABC[int], dtype: torch.dtype
) -> RecordedLayout:
    """KeyError for a kind that records no layout. `shape` and `dtype` are the input's."""
    return _KINDS[kind](_Call(args=args, shape=tuple(shape), dtype=dtype))


def _byte_tiles(call: _Call) -> RecordedLayout:
    """shuffle_weight without an interleave."""
    rows, k_chunk = numbers(call.args, "layout", (16, 16))
    layout = byte_tile_shuffle(
        rows=rows,
        k_chunk=k_chunk,
        pad_k_to=call.number("pad_k_to", 1),
        int4_container=call.flag("use_int4"),
    )
    return RecordedLayout(layout=layout)


def _gate_up(call: _Call) -> RecordedLayout:
    lanes, k_pack = numbers(call.args, "layout", (16, 16))
    lanes = call.number("NLane", lanes)
    layout = gate_up_shuffle(gate_up=call.flag("gate_up"), lanes=lanes, k_pack=k_pack)
    return RecordedLayout(layout=layout)


def _moe_weight(call: _Call) -> RecordedLayout:
    if "interleave_gate_up_rows" in call.args:
        return RecordedLayout(layout=gate_up_rows(), single_column=len(call.shape) == 2)
    if not call.flag("is_guinterleave"):
        return _byte_tiles(call)
    if "gfx1250" not in call.args:
        return _gate_up(call)
    layout = gate_up_rows_shuffle() if call.flag("gate_up") else byte_tile_shuffle()
    return RecordedLayout(layout=layout)


def _gfx1250_weight(call: _Call) -> RecordedLayout:
    if "moe_weight_decode_view(" in call.args:
        return RecordedLayout(layout=None, gives_transposed=True)
    if "shuffle_mxfp8fp4_a(" in call.args:
        return RecordedLayout(layout=gfx1250_tiles(rows=2, columns=128, merged=False))
    if "shuffle_mxfp8fp4_b(" in call.args or "shuffle_weight_f4(" in call.args:
        return RecordedLayout(layout=gfx1250_tiles(merged=False))
    transposed = len(call.shape) == 3
    # The Triton function gives its result the shape of its input.
    gives = transposed and "triton" not in call.args
    return RecordedLayout(layout=gfx1250_tiles(), transposed=transposed, gives_transposed=gives)


def _nk(call: _Call) -> RecordedLayout:
    layout = shuffle_nk(
        inst_n=call.number("inst_N"),
        inst_k=call.number("inst_K"),
        int4_container=call.flag("use_int4"),
    )
    return RecordedLayout(layout=layout)


def _e8m0(call: _Call) -> RecordedLayout:
    """shuffle_scale, which returns what is no byte."""
    if call.dtype.itemsize != 1:
        return RecordedLayout(layout=None)
    if call.flag("is_guinterleave"):
        return _e8m0_gate_up(call)
    return RecordedLayout(layout=e8m0_shuffle())


def _e8m0_gate_up(call: _Call) -> RecordedLayout:
    layout = e8m0_gate_up_shuffle(gate_up=call.flag("gate_up"))
    return RecordedLayout(layout=layout, num_experts=call.experts())


def _n32k4(call: _Call) -> RecordedLayout:
    both = call.flag("is_guinterleave") and call.flag("gate_up")
    layout = n32k4_gate_up() if both else scale_tiles(merged=True)
    num_experts = call.experts() if len(call.shape) == 2 else None
    return RecordedLayout(layout=layout, num_experts=num_experts)


def _moe_scale(call: _Call) -> RecordedLayout:
    return _n32k4(call) if "gfx1250" in call.args else _e8m0(call)


def _gfx1250_scale(call: _Call) -> RecordedLayout:
    if "shuffle_mxfp8fp4_scale(" in call.args:
        return RecordedLayout(layout=scale_tiles(pad_rows=True))
    return RecordedLayout(layout=scale_tiles(columns=8 if call.number("intype") == 8 else 4))


def _int4_scale(call: _Call) -> RecordedLayout:
    return RecordedLayout(layout=int4_scale_pairs() if call.dtype.itemsize == 2 else None)


def _triton_scale(call: _Call) -> RecordedLayout:
    if "shuffle_scale_batched(" in call.args:
        # Without a width, a tile is as wide as the scale.
        columns = call.number("scale_k_width", call.shape[-1])
        return RecordedLayout(layout=batched_scale_tiles(columns=columns))
    transposed = "shuffle_scale_moe(" in call.args
    if "gfx942" in call.args:
        return RecordedLayout(layout=None)
    if "gfx950" in call.args:
        layout = e8m0_shuffle(padded=False, merged=True)
    else:
        rows = call.number("preshuffle_factor", 32 if transposed else 16)
        columns = call.number("scale_kwidth", 4)
        layout = scale_tiles(rows=rows, columns=columns, merged=True)
    return RecordedLayout(layout=layout, transposed=transposed, gives_transposed=transposed)


_KINDS: Final[Mapping[str, Callable[[_Call], RecordedLayout]]] = {
    "shuffle_weight_plain": _byte_tiles,
    "shuffle_weight_layouts": _byte_tiles,
    "shuffle_weight_int4": _byte_tiles,
    "shuffle_weight_pad_k": _byte_tiles,
    "shuffle_weight_guinterleave": _gate_up,
    "moe_shuffle_weight": _moe_weight,
    "shuffle_weight_gfx1250": _gfx1250_weight,
    "shuffle_weight_NK": _nk,
    "shuffle_scale_e8m0": _e8m0,
    "shuffle_scale_guinterleave": _e8m0_gate_up,
    "shuffle_scale_n32k4": _n32k4,
    "moe_shuffle_scale": _moe_scale,
    "shuffle_scale_gfx1250": _gfx1250_scale,
    "shuffle_scale_int4": _int4_scale,
    "triton_shuffle_scale": _triton_scale,
}
RECORDED_LAYOUTS: Final = tuple(_KINDS)
