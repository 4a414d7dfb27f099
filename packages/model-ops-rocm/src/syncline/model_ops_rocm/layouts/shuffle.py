"""The weight layouts of AITER's kernels, as values; knows no recipe and no scale.

Notation: digits of n and of k, most significant first, and the order in which storage counts
through them. A chunk is 16 bytes of a row: P = 16 / itemsize elements.
Source: ROCm/aiter e4048607a `aiter/ops/shuffle.py`, each by its name there. Differs: a layout has
an inverse, writes by region into given storage, raises instead of asserting, and sets no
`is_shuffled` on the tensor (an attribute that `view`, `clone` and `nn.Parameter` lose).
"""

from syncline.model_ops_rocm.layouts.digits import REST
from syncline.model_ops_rocm.layouts.permuted import PermutedLayout

_CHUNK_BYTES = 16
_LANES = 64  # of a wavefront


def byte_tile_shuffle(
    *, rows: int = 16, k_chunk: int = 16, pad_k_to: int = 1, int4_container: bool = False
) -> PermutedLayout:
    """shuffle_weight(layout=(rows, k_chunk), pad_k_to=, use_int4=).

    n / rows, k / P, n % rows, k % P.
    A tile of `rows` rows x 16 bytes is one run, and tiles are in row-major order, for elements of 1
    (fp8, int8, packed fp4 and int4), 2 and 4 bytes. `k_chunk` only says what K must be a multiple
    of: 2 * k_chunk elements. `int4_container`: each int8 holds one int4, of which 16 bytes hold 32
    once they are packed.
    """
    _positive("byte_tile_shuffle", rows=rows, k_chunk=k_chunk, pad_k_to=pad_k_to)
    if int4_container and pad_k_to != 1:
        raise ValueError(
            f"byte_tile_shuffle: pad_k_to must be 1 for an int4 container, got {pad_k_to}"
        )
    suffix = "_int4" if int4_container else ""
    padding = f"_pad_k_{pad_k_to}" if pad_k_to > 1 else ""
    return PermutedLayout(
        name=f"shuffle_{rows}x{k_chunk}{suffix}{padding}",
        row_digits=(REST, rows),
        column_digits=(REST, 2 * _CHUNK_BYTES if int4_container else _CHUNK_BYTES),
        order=(0, 2, 1, 3),
        column_unit="bytes",
        column_multiple=2 * k_chunk,
        pad_columns_to=pad_k_to,
        item_sizes=(1,) if int4_container else (1, 2, 4),
    )


def Shuffle16x16() -> PermutedLayout:
    """shuffle_weight with layout (16, 16): what the GEMM and MoE kernels with preshuffle read."""
    return byte_tile_shuffle()


def Shuffle32x16() -> PermutedLayout:
    """shuffle_weight with layout (32, 16): what the int8 assembly GEMM reads."""
    return byte_tile_shuffle(rows=32)


def gate_up_shuffle(*, gate_up: bool, lanes: int = 16, k_pack: int = 16) -> PermutedLayout:
    """shuffle_weight(layout=(lanes, k_pack), is_guinterleave=True, gate_up=); shuffle_weight_a16w4.

    [E, N, K] of experts; `gate_up`: N is the gate rows and then as many up rows, and storage
    alternates blocks of `lanes` rows of each. Otherwise (the down projection) the blocks follow one
    another. k has digits (REST, 64 / lanes, k_pack), k_pack in *elements*, so that for elements of
    more than a byte it is another order than the plain shuffle.
    """
    _positive("gate_up_shuffle", lanes=lanes, k_pack=k_pack)
    if _LANES % lanes != 0:
        raise ValueError(f"gate_up_shuffle: lanes must divide {_LANES}, got {lanes}")
    return PermutedLayout(
        name=f"shuffle_{'gate_up' if gate_up else 'down'}_{lanes}x{k_pack}",
        row_digits=(2, REST, lanes) if gate_up else (REST, lanes),
        column_digits=(REST, _LANES // lanes, k_pack),
        order=(1, 0, 3, 4, 2, 5) if gate_up else (0, 2, 3, 1, 4),
    )


def gate_up_rows() -> PermutedLayout:
    """interleave_gate_up_rows: gate row 0, up row 0, gate row 1, ...; K as it is."""
    return PermutedLayout(
        name="gate_up_rows", row_digits=(2, REST), column_digits=(REST,), order=(1, 0, 2)
    )


def gate_up_rows_shuffle() -> PermutedLayout:
    """moe_shuffle_weight on gfx1250 with both flags: `gate_up_rows`, then the 16x16 shuffle."""
    return PermutedLayout(
        name="gate_up_rows_shuffle_16x16",
        row_digits=(2, REST, 8),
        column_digits=(REST, _CHUNK_BYTES),
        order=(1, 3, 2, 0, 4),
        column_unit="bytes",
        column_multiple=32,
    )


def shuffle_nk(*, inst_n: int, inst_k: int, int4_container: bool = False) -> PermutedLayout:
    """shuffle_weight_NK(inst_N, inst_K, use_int4): tiles of a matrix instruction, lane by lane."""
    _positive("shuffle_nk", inst_n=inst_n, inst_k=inst_k)
    if _LANES % inst_n != 0:
        raise ValueError(f"shuffle_nk: inst_n must divide {_LANES}, got {inst_n}")
    k_lanes = _LANES // inst_n
    if inst_k % k_lanes != 0:
        raise ValueError(f"shuffle_nk: inst_k must be a multiple of {k_lanes}, got {inst_k}")
    per_lane = inst_k // k_lanes * (2 if int4_container else 1)
    return PermutedLayout(
        name=f"shuffle_nk_{inst_n}x{inst_k}{'_int4' if int4_container else ''}",
        row_digits=(REST, inst_n),
        column_digits=(REST, k_lanes, per_lane),
        order=(0, 2, 3, 1, 4),
        item_sizes=(1,) if int4_container else (1, 2, 4),
    )


def gfx1250_tiles(*, rows: int = 16, columns: int = 16, merged: bool = True) -> PermutedLayout:
    """Tiles of rows x columns *elements*, row-major inside and out.

    The default is shuffle_weight_gfx1250, stored as [..., N / 16, 16 K]; AITER passes and returns
    3D tensors transposed ([E, K, N], and a view [E, 16 K, N / 16] of these bytes). Not merged, on
    bytes: 16 x 16 is shuffle_mxfp8fp4_b and shuffle_weight_f4, 2 x 128 is shuffle_mxfp8fp4_a.
    """
    _positive("gfx1250_tiles", rows=rows, columns=columns)
    return PermutedLayout(
        name=f"gfx1250_{rows}x{columns}{'_merged' if merged else ''}",
        row_digits=(REST, rows),
        column_digits=(REST, columns),
        order=(0, 2, 1, 3),
        # AITER asks K % 32 of a weight, although its tiles are 16 wide.
        column_multiple=32 if merged and columns == 16 else 1,
        merged_rows=rows if merged else 1,
    )


def _positive(where: str, **values: int) -> None:
    for field, value in values.items():
        if value < 1:
            raise ValueError(f"{where}: {field} must be positive, got {value}")
