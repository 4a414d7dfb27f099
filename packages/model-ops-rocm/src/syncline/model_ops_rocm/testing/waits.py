"""What a kernel does before it waits for the kernels ahead, as its Triton IR says it."""

import re
from typing import Final, NamedTuple

_WAIT: Final = "griddepcontrol.wait"
_NEXT: Final = "griddepcontrol.launch_dependents"
_ACCESS: Final = re.compile(r"tt\.(load|store|atomic\w*)(?: \w+, \w+, \w+,)? (%\w+)(.*)")
_VALUE: Final = re.compile(r"(%\w+)(?::\d+)? = ")
_CARRIED: Final = re.compile(r"(%\w+) = (%\w+)")


class Ahead(NamedTuple):
    """Before the last wait of a kernel, in the order of its text."""

    num_waits: int
    lets_next_begin: bool  # before the first of them
    is_read: set[str]  # arguments of the kernel
    is_written: set[str]
    is_cached: set[str]  # of those that are read, what an L1 may then hold


def ahead_of_wait(ttir: str) -> Ahead:
    """Of a kernel's TTIR; an argument that is not known is written as the value it comes by."""
    before, _, _ = ttir.rpartition(_WAIT)
    origins: dict[str, set[str]] = {}
    read: set[str] = set()
    written: set[str] = set()
    cached: set[str] = set()
    for line in before.splitlines():
        if "tt.func public" in line:
            origins = {name: {name[1:]} for name in re.findall(r"(%\w+): !tt\.ptr", line)}
            continue
        for name, first in _CARRIED.findall(line.partition("iter_args(")[2]):
            origins[name] = origins.get(first, set())
        if found := _ACCESS.search(line):
            kind, address, rest = found.groups()
            names = origins.get(address) or {address}
            if kind == "load":
                read |= names
                cached |= set() if "cacheModifier = cg" in rest else names
            else:
                written |= names
        elif (found := _VALUE.search(line)) and "!tt.ptr" in line:
            used = re.findall(r"%\w+", line[found.end() :])
            origins[found[1]] = set().union(*(origins.get(one, set()) for one in used))
    return Ahead(
        num_waits=ttir.count(_WAIT),
        lets_next_begin=_NEXT in ttir.partition(_WAIT)[0],
        is_read=read,
        is_written=written,
        is_cached=cached,
    )
