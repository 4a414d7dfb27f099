"""Calls with one argument made wrong: each must be refused by name, or mean something.

Unit: one change of one tensor of one parity case. Knows no op and no backend.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any  # an entry of a tuple

import torch

from syncline.model_ops_rocm.layouts.base import as_bits
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker, buffers_of

Change = Callable[[torch.Tensor], torch.Tensor]
Path = tuple[str | int, ...]
# Arguments that are written, and what none of them is compared with.
RESULTS = ("out", "lse_TN", "residual_TH", "nonfinite", "counts_SV", "partial", "state")
CACHES = ("k_cache", "v_cache")
WRITE_CACHES = ("kv_write", "qk_norm_rope_kv_write", "kv_copy_blocks")
# What a value that is written brings along, to be read.
READ = {
    *("query_start_loc_R1", "rows_R"),
    *("min_num_tokens_S", "max_num_tokens_S", "stop_ids_SE", "block_tables_SM"),
}
# A result that may be what it is made of: in `apply_logits_rules`, and given scales.
IN_PLACE = (
    {("out", ()), ("logits_RV", ())},
    {("job", ("out", "weight_scale")), ("job", ("scales",))},
)
SCRATCH = ("workspace", "counters")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongCall:
    """`case` with `change` made to the tensor of `argument` that `path` leads to."""

    case: Case
    argument: str
    path: Path
    change: str
    _apply: Change

    def build(self, make: Maker) -> Arguments:
        call = self.case.build(make)
        given = call[self.argument]
        return call | {self.argument: _put(given, self.path, self._apply)}

    def __str__(self) -> str:
        where = ".".join(map(str, (self.argument, *self.path)))
        return f"{self.case}: {where} {self.change}"


def one_per_shape_of_call(cases: Iterable[Case]) -> Iterator[Case]:
    """Of each op, the first case for each set of tensors and other arguments; none without rows."""
    seen = set()
    for case in cases:
        call = case.build(Maker(torch.float32))
        names = frozenset(name for name, value in call.items() if value is not None)
        given = frozenset(_places(call)) | names
        if (case.op, given) not in seen and not case.label.startswith(("0", "none")):
            seen.add((case.op, given))
            yield case


def calls_elsewhere(case: Case, make: Maker) -> Iterator[WrongCall]:
    """Each tensor of the case on the meta device."""
    for argument, given in case.build(make).items():
        for path, _ in _parts(given):
            yield WrongCall(
                case=case, argument=argument, path=path, change="elsewhere", _apply=_elsewhere
            )


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def wrong_calls(case: Case, make: Maker) -> Iterator[WrongCall]:
    """Every change of every tensor of the case: of dtype, of rank, of sizes, of the last stride.

    A wrong dtype is `dtype`, or `double` where a float64 takes the place of another float.
    """
    for argument, given in case.build(make).items():
        for path, tensor in _parts(given):
            for change, apply in _changes(tensor):
                yield WrongCall(
                    case=case, argument=argument, path=path, change=change, _apply=apply
                )


def calls_of_wrong_kinds(case: Case, make: Maker) -> Iterator[tuple[str, Arguments]]:
    """Each argument that is a value of a class, or several tensors, as something else."""
    for argument, given in case.build(make).items():
        if given is not None and not isinstance(given, torch.Tensor | bool | int | float | str):
            for wrong in ("row_major", 3, object(), {}, (3,), torch.zeros(2)):
                yield f"{case}: {argument} {wrong}", case.build(make) | {argument: wrong}


def overlaid_calls(case: Case, make: Maker) -> Iterator[tuple[str, Arguments]]:
    """Each result laid over each other tensor of the call, which are apart in the case itself."""
    places = _places(case.build(make))
    for result, other in itertools.product(places, places):
        if (
            result == other
            or {result, other} in IN_PLACE
            or not _is_written(case.op, result)
            or other[0] in SCRATCH
        ):
            continue
        call = case.build(make)
        found = _places(call)
        tensors = found[result], found[other]
        addresses = {one.untyped_storage().data_ptr() for one in tensors}
        if all(one.numel() for one in tensors) and len(addresses) == 2:
            lay = partial(_laid, torch.zeros(max(one.nbytes for one in tensors), dtype=torch.uint8))
            for argument, path in (result, other):
                call[argument] = _put(call[argument], path, lay)
            yield f"{case}: {_name(result)} over {_name(other)}", call


def _is_written(op: str, place: tuple[str, Path]) -> bool:
    argument, path = place
    if argument in CACHES:
        return op in WRITE_CACHES
    if argument in ("job", "jobs"):
        return "out" in path
    return argument in RESULTS and not READ.intersection(path)


def _places(call: Arguments) -> dict[tuple[str, Path], torch.Tensor]:
    return {
        (argument, path): tensor
        for argument, given in call.items()
        for path, tensor in _parts(given)
    }


def _name(place: tuple[str, Path]) -> str:
    return ".".join(map(str, (place[0], *place[1])))


def _laid(over: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous in the first bytes of `over`."""
    laid = over[: tensor.nbytes].view(as_bits(tensor).dtype).view(tensor.shape)
    return laid.copy_(as_bits(tensor)).view(tensor.dtype)


def bytes_of(call: Arguments) -> list[torch.Tensor]:
    """Copies of every buffer of a call, as bytes."""
    buffers = [buffer for value in call.values() for buffer in buffers_of(value)]
    return [as_bits(one).contiguous().reshape(-1).clone().view(torch.uint8) for one in buffers]


def _parts(given: object) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor of an argument, in tuples, mappings and dataclasses within each other."""
    if isinstance(given, torch.Tensor):
        yield (), given
        return
    for step, entry in _entries(given).items():
        yield from (((step, *path), tensor) for path, tensor in _parts(entry))


def _entries(given: object) -> Mapping[str | int, object]:
    if isinstance(given, tuple):
        return dict(enumerate(given))
    if isinstance(given, Mapping):
        return given
    if is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name) for field in fields(given)}
    return {}


def _put(given: object, path: Path, apply: Change) -> object:
    if not path:
        assert isinstance(given, torch.Tensor)
        return apply(given)
    entries = dict(_entries(given))
    entries[path[0]] = _put(entries[path[0]], path[1:], apply)
    if isinstance(given, tuple):
        values: list[Any] = list(entries.values())
        # A named tuple is made from its entries, a plain one from a list of them.
        return type(given)(*values) if type(given) is not tuple else tuple(values)
    if isinstance(given, Mapping):
        return entries
    assert is_dataclass(given) and not isinstance(given, type) and isinstance(path[0], str)
    return replace(given, **{path[0]: entries[path[0]]})


def _changes(tensor: torch.Tensor) -> Iterator[tuple[str, Change]]:
    if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield "double", lambda one: one.double()
    else:
        yield "dtype", lambda one: one.view(torch.uint8).short() if one.ndim else one.short()
    yield "rank + 1", lambda one: one.unsqueeze(0)
    if not tensor.ndim or not tensor.numel():
        return
    yield "rank - 1", lambda one: one.select(0, 0)
    yield "last size - 1", lambda one: one.narrow(-1, 0, one.shape[-1] - 1)
    yield "first size + 1", lambda one: _repeated(one)
    yield "last stride 2", lambda one: _spread(one)


def _repeated(tensor: torch.Tensor) -> torch.Tensor:
    """With its first row once more; not every dtype of a byte can be concatenated."""
    plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return torch.cat((plain, plain[:1])).view(tensor.dtype)


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]
