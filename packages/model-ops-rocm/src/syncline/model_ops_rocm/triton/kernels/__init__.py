"""The kernels, and nothing else: importing a module of this package imports Triton.

Every kernel: float32 arithmetic, rounded only where the contract rounds; no `not` on a tensor and
no `tl.assume`, which the interpreter gets wrong; row offsets in int64; no atomics. What a launch
may vary (rows of a step) is never specialised on, so that another number compiles nothing.
"""
