"""A copy that writes late, for tests of what must not be read before its writer has ended.

Unit: one program's numbers. For a GPU with programmatic dependent launch.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def late_copy_kernel(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """Copies `count` numbers of 32 bits some 0.4 ms after it has let the next kernel begin."""
    gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    delay = tl.inline_asm_elementwise(
        "nanosleep.u32 400000; mov.u32 $0, 0;", "=r,r", [at], dtype=tl.int32, is_pure=False, pack=1
    )
    gdc_wait()
    number = tl.load(source_ptr + at, mask=at < count)
    tl.store(target_ptr + at + delay, number, mask=at < count)
