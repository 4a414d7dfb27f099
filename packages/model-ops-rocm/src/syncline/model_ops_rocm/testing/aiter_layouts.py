"""Which of our layouts each recorded case of AITER's layout functions is; knows no tensor.

Unit: a case of a recorded file, by name. The names say what was called: `gui1` is is_guinterleave,
`gateup1` gate_up, `E2` two experts in flattened rows, `pf32_kw8` the tile of a Triton kernel.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayout:
    """How to read a case: its input becomes the logical tensor as the fields say."""

    layout: PermutedLayout | None  # None: AITER returns its input
    num_experts: int | None = None  # of a 2D input that has the experts' rows flattened
    transposed: bool = False  # the input is [E, K, N]
    gives_transposed: bool = False  # the output is a transposed view of what is stored
    single_column: bool = False  # the input has rows of one element


def recorded_layout(file_name: str, case: str) -> RecordedLayout:
    """KeyError for a file that records no layout."""
    return _FILES[file_name](case)


def _flag(case: str, name: str) -> bool:
    return f"{name}1" in case


def _number(case: str, name: str) -> int:
    """The number after the last `name`, e.g. 64 of `pad64`."""
    digits = case.rsplit(name, 1)[1].split("_")[0]
    return int(digits)


def _num_dims(case: str) -> int:
    """Of the input, whose shape ends the name."""
    return case.rsplit("_", 1)[1].count("x") + 1


def _plain(case: str) -> RecordedLayout:
    return RecordedLayout(layout=byte_tile_shuffle())


def _tiles(case: str) -> RecordedLayout:
    rows, k_chunk = (int(number) for number in case.split("_")[1:3])
    return RecordedLayout(layout=byte_tile_shuffle(rows=rows, k_chunk=k_chunk))


def _int4(case: str) -> RecordedLayout:
    return RecordedLayout(layout=byte_tile_shuffle(int4_container=case.startswith("use_int4")))


def _pad_k(case: str) -> RecordedLayout:
    return RecordedLayout(layout=byte_tile_shuffle(pad_k_to=_number(case, "pad")))


def _gate_up(case: str) -> RecordedLayout:
    lanes = _number(case, "nlane") if "nlane" in case else 16
    return RecordedLayout(layout=gate_up_shuffle(gate_up=_flag(case, "gateup"), lanes=lanes))


def _moe_weight(case: str) -> RecordedLayout:
    interleaved, gate_up = _flag(case, "gui"), _flag(case, "gateup")
    if case.startswith("interleave_gate_up_rows"):
        return RecordedLayout(layout=gate_up_rows(), single_column=_num_dims(case) == 2)
    if case.startswith("gfx1250"):
        layout = gate_up_rows_shuffle() if interleaved and gate_up else byte_tile_shuffle()
    else:
        layout = gate_up_shuffle(gate_up=gate_up) if interleaved else byte_tile_shuffle()
    return RecordedLayout(layout=layout)


def _gfx1250_weight(case: str) -> RecordedLayout:
    if case.startswith("shuffle_mxfp8fp4_a"):
        return RecordedLayout(layout=gfx1250_tiles(rows=2, columns=128, merged=False))
    if case.startswith("shuffle_"):
        return RecordedLayout(layout=gfx1250_tiles(merged=False))
    transposed = _num_dims(case) == 3
    # The Triton function gives its result the shape of its input.
    gives = transposed and not case.startswith("triton")
    return RecordedLayout(layout=gfx1250_tiles(), transposed=transposed, gives_transposed=gives)


def _nk(case: str) -> RecordedLayout:
    _, inst_n, inst_k = case.split("_")[:3]
    return RecordedLayout(layout=shuffle_nk(inst_n=int(inst_n), inst_k=int(inst_k)))


def _e8m0(case: str) -> RecordedLayout:
    return RecordedLayout(layout=None if case.startswith("f32") else e8m0_shuffle())


def _e8m0_gate_up(case: str) -> RecordedLayout:
    layout = e8m0_gate_up_shuffle(gate_up=_flag(case, "gateup"))
    return RecordedLayout(layout=layout, num_experts=_number(case, "_E"))


def _n32k4(case: str) -> RecordedLayout:
    both = _flag(case, "gui") and _flag(case, "gateup")
    layout = n32k4_gate_up() if both else scale_tiles(merged=True)
    return RecordedLayout(layout=layout, num_experts=_number(case, "_E") if "_E" in case else None)


def _moe_scale(case: str) -> RecordedLayout:
    if case.startswith("gfx1250"):
        return _n32k4(case)
    return _e8m0_gate_up(case) if _flag(case, "gui") else RecordedLayout(layout=e8m0_shuffle())


def _gfx1250_scale(case: str) -> RecordedLayout:
    if case.startswith("mxfp8fp4"):
        return RecordedLayout(layout=scale_tiles(pad_rows=True))
    return RecordedLayout(layout=scale_tiles(columns=8 if "intype8" in case else 4))


def _int4_scale(case: str) -> RecordedLayout:
    return RecordedLayout(layout=None if case.startswith("f32") else int4_scale_pairs())


def _triton_scale(case: str) -> RecordedLayout:
    kind, where = case.split("_")[:2]
    if kind == "batched":
        # Without a width, a tile is as wide as the scale.
        columns = int(case.rsplit("x", 1)[1]) if where == "kwNone" else _number(case, "kw")
        return RecordedLayout(layout=batched_scale_tiles(columns=columns))
    transposed = kind == "moe"
    if where == "gfx942":
        return RecordedLayout(layout=None)
    if where == "gfx950":
        layout = e8m0_shuffle(padded=False, merged=True)
    elif transposed:
        layout = scale_tiles(merged=True)
    else:
        rows, columns = _number(case, "pf"), _number(case, "kw")
        layout = scale_tiles(rows=rows, columns=columns, merged=True)
    return RecordedLayout(layout=layout, transposed=transposed, gives_transposed=transposed)


_FILES: Final[Mapping[str, Callable[[str], RecordedLayout]]] = {
    "shuffle_weight_plain": _plain,
    "shuffle_weight_layouts": _tiles,
    "shuffle_weight_int4": _int4,
    "shuffle_weight_pad_k": _pad_k,
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
RECORDED_LAYOUT_FILES: Final = tuple(_FILES)
