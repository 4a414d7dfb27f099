"""Parts of one result, merged in the launch that computes them: by the program that comes last.

Unit: one tile of a result, of which each of `splits` programs stores a part, in a workspace, and
then arrives at the tile's counter. The last to arrive finds every part stored, and adds them in
their own order, so that the bits depend on no race. Counters are zero before the first call, and
each call leaves them zero; calls that may overlap need their own. Knows no op.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_hip


@triton.jit
def arrive(counter_ptr, splits):
    """(whether all others have arrived, whether the counter is astray: not zeroed by somebody).

    Each of the tile's programs calls this once, after it stored its part, even if it had nothing to
    add. All threads' stores are before the barrier, and the addition releases them; it acquires
    what others released, so that `load_part` sees every part. A program that finds a number outside
    [0, splits) is astray, and writes NaN in place of the result.
    """
    if is_hip():
        # A barrier there waits for no store of another wave.
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0",
            "=v,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    is_last = before == splits - 1
    if is_last:
        tl.store(counter_ptr, 0)
    return is_last, (before < 0) | (before >= splits)


@triton.jit
def load_part(at, inside):
    """What a program stored before it arrived, zeros outside: from L2, where all memory is one."""
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
