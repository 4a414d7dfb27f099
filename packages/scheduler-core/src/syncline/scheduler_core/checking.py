"""Whether a caller's value is of the kind that its field needs: refused by field and value.

A value of the wrong kind that got in would fail much later, in the middle of a plan.
"""

from collections.abc import Mapping


def require_int(name: str, value: object) -> None:
    """Raise ValueError unless it is an int: a float or an integer of fixed width does not count."""
    if not isinstance(value, int):
        raise ValueError(f"{name} must be an int, got {value!r}")


def require_str(name: str, value: object) -> None:
    """Raise ValueError unless it is a str."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a str, got {value!r}")


def require_frozenset(name: str, value: object) -> None:
    """Raise ValueError unless it is a frozenset."""
    if not isinstance(value, frozenset):
        raise ValueError(f"{name} must be a frozenset, got {value!r}")


def require_mapping(name: str, value: object) -> None:
    """Raise ValueError unless it is a mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an int or a mapping, got {value!r}")
