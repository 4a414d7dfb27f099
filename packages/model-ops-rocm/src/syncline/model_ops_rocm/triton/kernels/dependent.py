"""Programmatic dependent launch of sm_90: a kernel starts while the one before it ends.

A launch with the option `launch_pdl` must wait before it touches what a kernel before it may have
written or read; OVERLAP says that it has the option.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def await_inputs(OVERLAP: tl.constexpr):
    """Until the kernels before have ended and their writes are seen.

    The next kernel may start at once: what it does before it waits in turn, such as asking for its
    weights, then overlaps this kernel and the end of the one before.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def await_turn(OVERLAP: tl.constexpr):
    """As `await_inputs`, but the next kernel starts only when this one's turn has come.

    For a kernel that shares its multiprocessors badly with programs that wait.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def await_and_end(OVERLAP: tl.constexpr):
    """As `await_inputs`, but the next kernel starts only when all programs of this one have ended.

    For one before few programs that take long: they are spread evenly only over multiprocessors
    that are empty.
    """
    if OVERLAP:
        gdc_wait()


@triton.jit
def read_ahead(ptr):
    """What no kernel ahead of this one in its call writes, before the wait for them.

    The first kernel of the call waits before it lets the next begin, so that all that came before
    the call has ended; but an L1 may still hold what was there earlier: this reads L2.
    """
    return tl.load(ptr, cache_modifier=".cg")
