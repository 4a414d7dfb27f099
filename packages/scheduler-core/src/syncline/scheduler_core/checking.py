"""Whether a caller's value is of the kind that its field needs: refused by field and value.

A value of the wrong kind that got in would fail much later, in the middle of a plan.
"""

import math
from collections.abc import Mapping
from struct import error as struct_error
from struct import pack


def require_int(name: str, value: object) -> None:
    """Raise ValueError unless it is an int: a float or an integer of fixed width does not count."""
    if not isinstance(value, int):
        raise ValueError(f"{name} must be an int, got {value!r}")


def require_str(name: str, value: object) -> None:
    """Raise ValueError unless it is a str."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a str, got {value!r}")


def require_bool(name: str, value: object) -> None:
    """Raise ValueError unless it is a bool: "no" would count as yes."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be a bool, got {value!r}")


def require_kind(name: str, value: object, kind: type) -> None:
    """Raise ValueError unless it is of this class."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")


def require_time(name: str, value: object) -> None:
    """Raise ValueError unless it is a finite number, or None."""
    if value is None:
        return
    if not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number or None, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def require_token_ids(name: str, values: tuple[int, ...]) -> None:
    """Raise ValueError unless it is a tuple or list, not empty, of integers in [0, 2**32)."""
    if not isinstance(values, tuple | list):  # pyright: ignore[reportUnnecessaryIsInstance]  a caller's data
        raise ValueError(f"{name} must be a tuple of ints, got {values!r}")
    if not values:
        raise ValueError(f"{name} must not be empty")
    try:
        pack(f"{len(values)}I", *values)  # Both bounds and the kind in one pass.
    except struct_error:
        for value in values:
            if not hasattr(value, "__index__"):
                raise ValueError(f"{name} must be ints, got {value!r}") from None
        lowest, highest = min(values), max(values)
        bound = f"at least 0, got {lowest}" if lowest < 0 else f"below 2**32, got {highest}"
        raise ValueError(f"{name} must be {bound}") from None


def require_frozenset(name: str, value: object) -> None:
    """Raise ValueError unless it is a frozenset."""
    if not isinstance(value, frozenset):
        raise ValueError(f"{name} must be a frozenset, got {value!r}")


def require_mapping(name: str, value: object) -> None:
    """Raise ValueError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an int or a mapping, got {value!r}")
