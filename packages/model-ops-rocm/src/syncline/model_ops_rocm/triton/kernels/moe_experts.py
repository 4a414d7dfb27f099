"""The projections of mixture of experts, each expert's own; knows no routing.

A block is BLOCK_M pairs of one expert, as the sort leaves them. Weights stream through once; a
block without an expert ends at once.
"""

import triton
import triton.language as tl


@triton.jit
def weight_at(rows, columns, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Where a matrix's elements are: row-major, or 16 x 16 shuffled with CHUNK of them in 16 B."""
    if CHUNK == 0:
        return rows[:, None] * WIDTH + columns[None, :]
    else:
        in_rows = (rows // 16) * (16 * WIDTH) + (rows % 16) * CHUNK
        in_columns = (columns // CHUNK) * (16 * CHUNK) + columns % CHUNK
        return in_rows[:, None] + in_columns[None, :]


@triton.jit
def tile_of(num_tiles, num_blocks, GROUP_BLOCKS: tl.constexpr):
    """(tile, block) of this program: tiles of GROUP_BLOCKS blocks run side by side."""
    program = tl.program_id(0)
    in_group = GROUP_BLOCKS * num_tiles
    first = (program // in_group) * GROUP_BLOCKS
    size = tl.minimum(num_blocks - first, GROUP_BLOCKS)
    return (program % in_group) // size, first + (program % in_group) % size


@triton.jit
def activated_of(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of float32 sums, every step rounded to `dtype`."""
    gate = gate.to(dtype).to(tl.float32)
    # exp overflows to inf for a very negative gate, and gate / inf = 0.
    activated = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32)
    return (activated * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def scale_at(
    scale_ptr, rows, first_column, ROWS: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr
):
    """The scales of some rows of one matrix, at a block of columns: SCALE columns share one."""
    return tl.load(
        scale_ptr + (rows // SCALE) * ((WIDTH + SCALE - 1) // SCALE) + first_column // SCALE,
        mask=rows < ROWS,
        other=0.0,
    )


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def gate_up_kernel(  # noqa: PLR0915 - a kernel is one body
    x_ptr,
    weight_ptr,  # [E, 2I, H]
    scale_ptr,
    activated_ptr,  # [T * k, I]
    pairs_ptr,
    experts_ptr,  # of each block
    num_pairs,
    num_blocks,
    x_token,
    x_last,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,  # 0: none, 1: of a row, else of a block of so many rows and columns
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
):
    TILES: tl.constexpr = (INTERMEDIATE + BLOCK_N - 1) // BLOCK_N
    tile, block = tile_of(TILES, num_blocks, GROUP_BLOCKS)
    expert = tl.load(experts_ptr + block)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pairs < num_pairs
        x_rows = x_ptr + (pairs // TOP_K).to(tl.int64) * x_token
        rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = rows < INTERMEDIATE
        weight_ptr += expert.to(tl.int64) * (2 * INTERMEDIATE * HIDDEN)
        gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if SCALE == 1:
            scale_ptr += expert.to(tl.int64) * (2 * INTERMEDIATE)
        elif SCALE > 1:
            scale_ptr += expert.to(tl.int64) * (
                ((2 * INTERMEDIATE + SCALE - 1) // SCALE) * ((HIDDEN + SCALE - 1) // SCALE)
            )
        for start in range(0, HIDDEN, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            x_mask = is_pair[:, None]
            mask = is_row[:, None]
            if HIDDEN % BLOCK_K != 0:
                x_mask &= (columns < HIDDEN)[None, :]
                mask &= (columns < HIDDEN)[None, :]
            x = tl.load(x_rows[:, None] + (columns * x_last)[None, :], mask=x_mask, other=0.0)
            at = weight_at(rows, columns, HIDDEN, CHUNK)
            # The up row that belongs to a gate row; in the shuffle it is as far away.
            up_at = weight_at(INTERMEDIATE + rows, columns, HIDDEN, CHUNK)
            gates = tl.load(weight_ptr + at, mask=mask, other=0.0).to(x.dtype)
            ups = tl.load(weight_ptr + up_at, mask=mask, other=0.0).to(x.dtype)
            if SCALE > 1:
                of_gates = scale_at(scale_ptr, rows, start, 2 * INTERMEDIATE, HIDDEN, SCALE)
                of_ups = scale_at(
                    scale_ptr, INTERMEDIATE + rows, start, 2 * INTERMEDIATE, HIDDEN, SCALE
                )
                gate += tl.dot(x, tl.trans(gates), input_precision="ieee") * of_gates[None, :]
                up += tl.dot(x, tl.trans(ups), input_precision="ieee") * of_ups[None, :]
            else:
                gate = tl.dot(x, tl.trans(gates), gate, input_precision="ieee")
                up = tl.dot(x, tl.trans(ups), up, input_precision="ieee")
        if SCALE == 1:
            gate *= tl.load(scale_ptr + rows, mask=is_row, other=0.0)[None, :]
            up *= tl.load(scale_ptr + INTERMEDIATE + rows, mask=is_row, other=0.0)[None, :]
        activated = activated_of(gate, up, activated_ptr.dtype.element_ty)
        at = pairs.to(tl.int64)[:, None] * INTERMEDIATE + rows[None, :]
        tl.store(activated_ptr + at, activated, mask=is_pair[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def down_kernel(
    activated_ptr,  # [T * k, I]
    weight_ptr,  # [E, H, I]
    scale_ptr,
    y_ptr,  # [T * k, H]
    pairs_ptr,
    experts_ptr,
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
):
    TILES: tl.constexpr = (HIDDEN + BLOCK_N - 1) // BLOCK_N
    tile, block = tile_of(TILES, num_blocks, GROUP_BLOCKS)
    expert = tl.load(experts_ptr + block)
    if (expert >= 0) & (expert < NUM_EXPERTS):
        pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pairs < num_pairs
        inputs = activated_ptr + pairs.to(tl.int64) * INTERMEDIATE
        rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = rows < HIDDEN
        weight_ptr += expert.to(tl.int64) * (HIDDEN * INTERMEDIATE)
        y = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        if SCALE == 1:
            scale_ptr += expert.to(tl.int64) * HIDDEN
        elif SCALE > 1:
            scale_ptr += expert.to(tl.int64) * (
                ((HIDDEN + SCALE - 1) // SCALE) * ((INTERMEDIATE + SCALE - 1) // SCALE)
            )
        for start in range(0, INTERMEDIATE, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            in_mask = is_pair[:, None]
            mask = is_row[:, None]
            if INTERMEDIATE % BLOCK_K != 0:
                in_mask &= (columns < INTERMEDIATE)[None, :]
                mask &= (columns < INTERMEDIATE)[None, :]
            activated = tl.load(inputs[:, None] + columns[None, :], mask=in_mask, other=0.0)
            at = weight_at(rows, columns, INTERMEDIATE, CHUNK)
            weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(activated.dtype)
            if SCALE > 1:
                scale = scale_at(scale_ptr, rows, start, HIDDEN, INTERMEDIATE, SCALE)
                y += tl.dot(activated, tl.trans(weight), input_precision="ieee") * scale[None, :]
            else:
                y = tl.dot(activated, tl.trans(weight), y, input_precision="ieee")
        if SCALE == 1:
            y *= tl.load(scale_ptr + rows, mask=is_row, other=0.0)[None, :]
        at = pairs.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
        mask = is_pair[:, None] & is_row[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
