"""Linear of few rows on sm_90, in 16 bits or fp8 by fp8: one program makes a tile of the result.

Unit: that tile, which has all of K: tiles of x and of a row-major weight are fed and multiplied by
`linear_rings`. With SWAP the weight is the left operand, so that a few rows of x are the narrow
side of an instruction.

In Gluon, as `linear_rings`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from syncline.model_ops_rocm.triton.kernels.early import kept, store_kept
from syncline.model_ops_rocm.triton.kernels.linear_rings import add_products, make_rings, share_out


@gluon.jit
def _tile(row, index):
    """(first row, tile along K) of what is fed as number `index`."""
    return row, index


@gluon.jit
def _along(ptr, places, stride, mask, AXIS: gl.constexpr):
    """float32 numbers at `places`, of which the tile's other axis, AXIS, shares each."""
    found = gl.load(ptr + places * stride, mask=mask, other=0.0).to(gl.float32)
    return gl.expand_dims(found, AXIS)


@gluon.jit
def _multiply(
    x_ring,
    weight_ring,
    count,
    pointers,
    strides,
    first_n,
    num_rows,
    num_columns,
    HAS_BIAS: gl.constexpr,
    HAS_CODES: gl.constexpr,
    SWAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """The sums of all tiles, scaled, with the bias, into the result."""
    x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr = pointers
    x_scale_row, weight_scale_row, bias_stride, out_stride, out_last = strides
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[gl.num_warps(), 1],
        instr_shape=[16, BLOCK_M if SWAP else BLOCK_N, 32 if HAS_CODES else 16],
    )
    M_AXIS: gl.constexpr = 1 if SWAP else 0
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(1 - M_AXIS, layout)).to(gl.int64)
    n = first_n.to(gl.int64) + gl.arange(0, BLOCK_N, gl.SliceLayout(M_AXIS, layout))
    m_inside, n_inside = m < num_rows, n < num_columns
    gdc_wait()
    # What few threads wait for is asked before the loop: after it, everything would wait.
    if HAS_CODES:
        x_scale = _along(x_scale_ptr, m, x_scale_row, m_inside, 1 - M_AXIS)
        weight_scale = _along(weight_scale_ptr, n, weight_scale_row, n_inside, M_AXIS)
    if HAS_BIAS:
        bias = _along(bias_ptr, n, bias_stride, n_inside, M_AXIS)
    SHAPE: gl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    at = gl.expand_dims(m * out_stride, 1 - M_AXIS) + gl.expand_dims(n * out_last, M_AXIS)
    inside = gl.expand_dims(m_inside, 1 - M_AXIS) & gl.expand_dims(n_inside, M_AXIS)
    if SWAP:
        places = kept(out_ptr, at, inside)
    acc = gl.zeros(SHAPE, gl.float32, layout)
    acc = add_products(acc, x_ring, weight_ring, 0, count, SWAP)
    if HAS_CODES:
        acc = acc * x_scale * weight_scale
    if HAS_BIAS:
        acc += bias
    if SWAP:
        store_kept(out_ptr, places, acc)
    else:
        # A compiler stores neighbours together only where it sees that they are.
        gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["num_rows"])
def specialised_linear_kernel(
    x_desc,  # [M, K], parts of tiles: [BLOCK_M, BLOCK_K], or of codes [BLOCK_M, K_BLOCK]
    weight_desc,  # [N, K], likewise of BLOCK_N
    x_scale_ptr,  # float32; read of codes alone, as is the weight's
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,  # at most BLOCK_M
    num_columns,
    depth,  # at least STAGES * BLOCK_K
    x_scale_row,  # strides of scales: 0 where one serves all
    weight_scale_row,
    out_stride,
    out_last,
    bias_stride,
    HAS_BIAS: gl.constexpr,
    SWAP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    X_STAGES: gl.constexpr,  # tiles of x under way
    STAGES: gl.constexpr,  # of the weight
    AHEAD: gl.constexpr,  # of those, before the first ones are there
    RELEASE: gl.constexpr,  # tiles before the last at which the next kernel may begin
):
    HAS_CODES: gl.constexpr = weight_desc.dtype.primitive_bitwidth == 8
    first_n = gl.program_id(0) * BLOCK_N
    count = gl.cdiv(depth, BLOCK_K)
    x_ring, weight_ring = make_rings(
        x_desc, weight_desc, first_n, _tile, BLOCK_K, X_STAGES, STAGES, AHEAD
    )
    pointers = (x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr)
    strides = (x_scale_row, weight_scale_row, bias_stride, out_stride, out_last)
    share_out(
        _multiply,
        (
            pointers, strides, first_n, num_rows, num_columns,
            HAS_BIAS, HAS_CODES, SWAP, BLOCK_M, BLOCK_N,
        ),
        x_ring, weight_ring, count, "specialised_linear_kernel", _tile, AHEAD, RELEASE,
    )  # fmt: skip
