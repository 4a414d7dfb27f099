"""A sample of a row's logits, and what it weighs below some values.

It is single runs of WIDTH ids, evenly spread. What a tile without a larger logit weighs is known
exactly, so single large logits, which a sample misses, are never guessed at. Knows no request.
"""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.logits import NEG_INF


@triton.jit
def ask_for_sample(
    row_ptr, last_stride, num_real, is_read, is_whole, FEW: tl.constexpr, MANY: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A sample of at most a quarter of the row, in MANY parts, of which the first FEW are one, too.

    Of each part [LANES, GROUP] as stored, -inf where nothing is, and int32 [LANES], their tiles, 0
    where nothing is; no more than the FEW unless `is_whole`, and nothing unless it `is_read`. How
    many ids each stands for, of all and of the FEW. A thread has GROUP of a part, and adds them up
    itself. May be asked before the wait for the kernels ahead.
    """
    RUNS: tl.constexpr = LANES * GROUP // WIDTH
    num_runs = num_real // WIDTH
    num_chunks = tl.maximum(tl.minimum(num_runs // 4, MANY * RUNS), 1)
    num_parts = (num_chunks + RUNS - 1) // RUNS
    # A row has at most 2^15 runs; one division for all of them.
    step = (num_runs << 10) // num_chunks
    lanes = tl.arange(0, LANES)
    groups, places = lanes // (WIDTH // GROUP), lanes % (WIDTH // GROUP) * GROUP
    in_group = tl.arange(0, GROUP)[None, :]
    parts, number, number_few = (), num_chunks, num_chunks * 0
    for part in tl.static_range(MANY):
        # Any part is spread over all of the row.
        chunks = groups * num_parts + part
        limit = tl.where(is_read & (part < num_parts), tl.minimum(num_chunks, num_runs), 0)
        if part >= FEW:
            limit = tl.where(is_whole, limit, 0)
        else:
            number_few += tl.where(
                part < num_parts, (num_chunks - part + num_parts - 1) // num_parts, 0
            )
        is_here = chunks < limit
        firsts = tl.where(is_here, (chunks * step) >> 10, 0) * WIDTH
        columns = (firsts + places)[:, None] + in_group
        at = row_ptr + columns.to(tl.int64) * last_stride
        # From L2: see `read_ahead`.
        x = tl.load(at, mask=is_here[:, None], other=NEG_INF, cache_modifier=".cg")
        parts += ((x, firsts // TILE),)  # type: ignore[assignment]  # tuples grow
    each = num_real.to(tl.float32) / (number * WIDTH).to(tl.float32)
    return parts, each, num_real.to(tl.float32) / (number_few * WIDTH).to(tl.float32)


@triton.jit
def with_tops(asked, maxima_ptr, MANY: tl.constexpr):
    """Of each part of `ask_for_sample` x, and float32 [LANES], their tiles' largest logits."""
    parts = ()
    for part in tl.static_range(MANY):
        # Where nothing is, nothing weighs anything whatever this says.
        tops = tl.load(maxima_ptr + asked[part][1])
        parts += ((asked[part][0], tops),)  # type: ignore[assignment]  # tuples grow
    return parts


@triton.jit
def weights_of(x, scale, offset, IS_CUDA: tl.constexpr):
    """float32: 2^(x * scale - offset), of a sample: not exact, and 0 for what is no normal number.

    On CUDA in PTX, since otherwise such numbers are scaled, and cost three instructions more.
    """
    powers = tl.fma(x, tl.broadcast_to(scale, x.shape), tl.broadcast_to(-offset, x.shape))
    if IS_CUDA:
        weights = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [powers], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        weights = tl.exp2(powers)
    return weights


@triton.jit
def number_from(parts, value, FEW: tl.constexpr):
    """float32: how many of the first FEW parts reach a value."""
    number = tl.sum((parts[0][0].to(tl.float32) >= value).to(tl.float32), axis=1)
    for part in tl.static_range(1, FEW):
        number += tl.sum((parts[part][0].to(tl.float32) >= value).to(tl.float32), axis=1)
    return tl.sum(number, axis=0)


@triton.jit
def add_four(a_1, b_1, c_1, d_1, a_2, b_2, c_2, d_2):
    return a_1 + a_2, b_1 + b_2, c_1 + c_2, d_1 + d_2


@triton.jit
def sum_below(value, x, weights, tops):
    """float32 [LANES]: what lies below a value, in tiles that reach it."""
    return tl.where(tops >= value, tl.sum(tl.where(x < value, weights, 0.0), axis=1), 0.0)


@triton.jit
def four_below(v_1, v_2, v_3, v_4, part, scale, offset, IS_CUDA: tl.constexpr):
    """See `sum_below`: of four values."""
    x, tops = part[0].to(tl.float32), part[1]
    weights = weights_of(x, scale, offset, IS_CUDA)
    s_1, s_2 = sum_below(v_1, x, weights, tops), sum_below(v_2, x, weights, tops)
    return s_1, s_2, sum_below(v_3, x, weights, tops), sum_below(v_4, x, weights, tops)


@triton.jit
def three_below(low, guess, high, part, scale, offset, IS_CUDA: tl.constexpr):
    """See `sum_below`: of three values, and the squares of the second."""
    x, tops = part[0].to(tl.float32), part[1]
    weights = weights_of(x, scale, offset, IS_CUDA)
    parts = tl.where(x < guess, weights, 0.0)
    at_guess = tl.where(tops >= guess, tl.sum(parts, axis=1), 0.0)
    squares = tl.where(tops >= guess, tl.sum(parts * parts, axis=1), 0.0)
    at_low, at_high = sum_below(low, x, weights, tops), sum_below(high, x, weights, tops)
    return at_low, at_guess, squares, at_high
