"""A stand-in for AITER with the names and signatures on record, for tests on a CPU.

Unit: one installed AITER. Its functions read what they are given *as AITER stores it*, by address
formulas that are written here once more and share nothing with this package's layouts, so that a
tensor in a wrong layout gives a wrong number. Where AITER's checks abort the process, it raises
`AiterAbort`, which no `except Exception` stops. It says nothing about AITER's speed or rounding.
Source: ROCm/aiter e4048607a, read, and none of it copied: the interface is on record in
`aiter/interface.py`, the arithmetic is PyTorch's.
"""

from syncline.model_ops_rocm.testing.fake_aiter.build import FakeAiter
from syncline.model_ops_rocm.testing.fake_aiter.checks import AiterAbort
from syncline.model_ops_rocm.testing.fake_aiter.distribution import write_distribution

__all__ = ["AiterAbort", "FakeAiter", "write_distribution"]
