"""The quotient by itself, for tests: no op launches this."""

import triton
import triton.language as tl

from syncline.model_ops_rocm.triton.kernels.encode import exact_quotients


@triton.jit
def quotients_kernel(x_ptr, scale_ptr, products_ptr, divided_ptr, BLOCK_WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    x, scale = tl.load(x_ptr + at), tl.load(scale_ptr + at)
    tl.store(products_ptr + at, exact_quotients(x, scale))
    tl.store(divided_ptr + at, tl.div_rn(x, scale))
