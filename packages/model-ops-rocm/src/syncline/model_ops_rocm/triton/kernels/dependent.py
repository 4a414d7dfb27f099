"""Programmatic dependent launch of sm_90: a kernel starts while the one before it ends.

A launch with the option `launch_pdl` must wait before it touches what a kernel before it may have
written or read; OVERLAP says that it has the option. What it may read before: the weight of a
product and its scales, since no kernel that writes those lets the next begin early; and by
`read_ahead` what a call of several kernels was given, or what the kernel ahead has waited for.
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
def read_ahead(ptr):
    """What no kernel that still runs writes, before the wait for the kernels ahead.

    Of a call of several kernels what it was given: its first one waits before it lets the next
    begin, so that all that came before the call has ended. And what kernels wrote that the one
    ahead has waited for, if that lets the next begin only then. From L2: an L1 may hold what was
    there earlier until the wait.
    """
    return tl.load(ptr, cache_modifier=".cg")
