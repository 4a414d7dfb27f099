"""AITER's functions, found and compared with the record once; calls none of them.

Unit: one installed AITER. What is missing is kept as a line of text per function, so that an AITER
that lacks one function serves the ops that do without.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch

from syncline.model_ops_rocm.aiter.distribution import PACKAGE, VERSION
from syncline.model_ops_rocm.aiter.enums import ENUMS, members_by_value
from syncline.model_ops_rocm.aiter.interface import KNOWN_FAULTS, RECORD, AiterFunction, KnownFault
from syncline.model_ops_rocm.errors import BackendUnavailableError

Function = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aiter:
    """An imported AITER: what can be called, and why the rest cannot."""

    version: str
    functions: Mapping[str, Function]
    problems: Mapping[str, str]  # per function or enumeration that is not as recorded
    members: Mapping[str, Mapping[int, object]]  # per enumeration of AITER: by value
    faults: frozenset[str]  # functions that this version may answer wrongly, as recorded
    device_type: str  # where its kernels run
    arch: Callable[[torch.device], str]

    def function(self, name: str) -> Function:
        """BackendUnavailableError, saying what is missing, unless it is as recorded."""
        if name in self.problems:
            raise unavailable(self.problems[name])
        return self.functions[name]

    def member(self, ours: IntEnum) -> object:
        """AITER's member of the same value."""
        name = ENUMS[type(ours)]
        # By name and value: integer enumerations of two kinds are equal where their values are.
        if int(ours) not in self.members[name]:
            raise unavailable(self.problems[name])
        return self.members[name][int(ours)]


def unavailable(why: str) -> BackendUnavailableError:
    return BackendUnavailableError(backend="aiter", package=PACKAGE, version=VERSION, why=why)


def detect(
    version: str,
    *,
    device_type: str,
    arch: Callable[[torch.device], str],
    known_faults: Iterable[KnownFault] = KNOWN_FAULTS,
) -> Aiter:
    """Import AITER and look for everything on record.

    The import builds a C++ module, asks `rocminfo` for a GPU, and raises RuntimeError without ROCm:
    whatever it raises becomes a BackendUnavailableError.
    """
    try:
        importlib.import_module("aiter")
    except Exception as error:
        # RuntimeError without ROCm, ModuleNotFoundError of jax without a driver, and others.
        raise unavailable(f"import aiter raised {type(error).__name__}: {error}") from error
    label = f"{PACKAGE} {version}"
    functions: dict[str, Function] = {}
    problems: dict[str, str] = {}
    for recorded in RECORD.values():
        found = _find(recorded.places, recorded.name)
        why = _why_not_callable(recorded, found)
        if why is not None:
            problems[recorded.name] = f"{label}: {why}"
        elif callable(found):
            functions[recorded.name] = found
    members: dict[str, Mapping[int, object]] = {}
    for ours, name in ENUMS.items():
        members[name] = members_by_value(_find(("aiter",), name))
        missing = [f"{one.name} = {one.value}" for one in ours if int(one) not in members[name]]
        if missing:
            problems[name] = f"{label}: aiter.{name} has no member {', '.join(missing)}"
    return Aiter(
        version=version,
        functions=functions,
        problems=problems,
        members=members,
        faults=frozenset(fault.function for fault in known_faults if fault.is_in(version)),
        device_type=device_type,
        arch=arch,
    )


def _find(places: tuple[str, ...], path: str) -> object:
    """The attribute, None if no place has it."""
    for place in places:
        try:
            found: object = importlib.import_module(place)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            continue
        return found
    return None


def _why_not_callable(recorded: AiterFunction, found: object) -> str | None:
    """What of a call on record the function would not take."""
    place = f"{recorded.places[-1]}.{recorded.name}"
    if found is None:
        return f"it has no {' or '.join(f'{one}.{recorded.name}' for one in recorded.places)}"
    if not callable(found):
        return f"{place} is no function"
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return f"{place} has no signature to compare"
    kinds = {parameter.kind for parameter in parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return f"{place} has a signature that names no parameters"
    return _why_not_bound(recorded, place, list(parameters.values()))


def _why_not_bound(
    recorded: AiterFunction, place: str, parameters: list[inspect.Parameter]
) -> str | None:
    names = [parameter.name for parameter in parameters]
    for keyword in recorded.keywords:
        if keyword not in names:
            return f"{place} has no parameter {keyword}"
    given = len(recorded.positional)
    by_position = [one for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    if len(by_position) < given:
        return f"{place} takes {len(by_position)} arguments by position, on record {given}"
    for position, name in enumerate(recorded.positional):
        if name in names and names.index(name) != position:
            return f"{place} has parameter {name} at {names.index(name)}, on record at {position}"
    taken = {*names[:given], *recorded.keywords}
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in taken:
            return f"{place} demands a parameter {parameter.name} that is not on record"
    if set(names[:given]) & set(recorded.keywords):
        twice = sorted(set(names[:given]) & set(recorded.keywords))
        return f"{place} has parameter {twice[0]} among the first {given}, on record after them"
    return None
