"""Enumerations as pybind11 makes them: members have values and equal no integer."""

from collections.abc import Mapping


class Member:
    """One member; equal to itself alone."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value


class Enumeration:
    """The members by name, as `__members__` and as attributes."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self.__members__ = dict(members)

    def __getattr__(self, name: str) -> Member:
        members: dict[str, Member] = self.__dict__.get("__members__", {})
        if name not in members:
            raise AttributeError(name)
        return members[name]


def enumeration(*names: str, first: int = 0) -> Enumeration:
    numbered = enumerate(names, start=first)
    return Enumeration({name: Member(name, value) for value, name in numbered})
