"""What ends the process in AITER, as an exception; knows no function."""

from collections.abc import Callable

import torch


class AiterAbort(BaseException):
    """Stands for std::abort(): on a GPU, the process would be gone."""


def abort_unless(condition: bool, what: str) -> None:
    if not condition:
        raise AiterAbort(what)


def need_dense(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Contiguous and of one of the types; not empty: a launch of no blocks is an error."""
    abort_unless(tensor.is_contiguous(), f"{name} is not contiguous")
    abort_unless(tensor.dtype in dtypes, f"{name} is {tensor.dtype}")
    abort_unless(tensor.numel() > 0, f"{name} is empty")


Functions = dict[str, Callable[..., object]]
