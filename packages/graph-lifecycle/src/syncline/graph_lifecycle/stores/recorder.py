"""Records the ATen calls of one step as a list that can be run again on the same storages.

Every tensor that a call takes is one of three: produced by an earlier call, a static input of
the graph, or external. An external tensor is kept as an alias of its STORAGE with the same
offset, size and stride, as a device graph keeps an address: what its Tensor object is bound to
later is unknown to the recording. Knows nothing of keys, stores or arenas.

Seen are the calls that go through the dispatcher on the capturing thread. A Python number or a
shape that the step computes is baked in; so is the content of a tensor built from Python
numbers. What a custom op does inside is its own affair.

Source: the recording is that of torch.fx's make_fx (PyTorch 2.11). Differs: eager, untransformed,
externals by storage, host syncs refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from syncline.graph_lifecycle.arena.memory import outside_autograd, unbound

_HOST_SYNC = "a value leaves the device, a replay would go on with the value of the capture"
_DATA_SHAPE = "the shape of its result depends on data"
_RANDOM = "it draws from a global generator; draw from a counter given as an input"
_MOVES = "it moves or resizes memory under the graph"
_RAW_POINTER = "work behind a raw pointer is not seen, so it would be missing from the replay"

# Methods that read memory without passing the dispatcher.
_REFUSED_METHODS = {
    torch.Tensor.tolist: _HOST_SYNC,
    torch.Tensor.numpy: _HOST_SYNC,
    torch.Tensor.cpu: _HOST_SYNC,
    torch.Tensor.__array__: _HOST_SYNC,
    torch.Tensor.__dlpack__: _RAW_POINTER,
    torch.Tensor.data_ptr: _RAW_POINTER,
}

_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_MOVING = {"set_", "resize_", "resize_as_", "_resize_output_"}

# Arguments and results of ATen ops: tensors, scalars, None, and lists of those.
Value = Any  # The schema of each op says what; mypy cannot.


class RefusedOpError(Exception):
    """Internal to the stores, which turn it into an UncapturableOpError with their key."""

    def __init__(self, op: str, why: str) -> None:
        self.op = op
        self.why = why
        super().__init__(f"{op}: {why}")


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for the tensor at one index of a recording's environment."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded op; tensors among its arguments and results are Slots."""

    func: OpOverload
    args: tuple[Value, ...]
    kwargs: Mapping[str, Value]
    results: Value

    def run(self, env: list[Tensor | None]) -> None:
        args = _map(self.args, Slot, lambda slot: env[slot.index])
        kwargs = {name: _map(v, Slot, lambda s: env[s.index]) for name, v in self.kwargs.items()}
        _bind(self.results, self.func(*args, **kwargs), env)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Records while active; `slot_of` and the attributes are read afterwards."""

    def __init__(self, static_inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.calls: list[Call] = []
        self.env: list[Tensor | None] = []  # Externals and static inputs; None: produced.
        self.externals: list[Tensor] = []  # The Tensor objects met, not their aliases.
        self._slots: dict[int, Slot] = {}
        self._seen: list[Tensor] = []  # Holds every tensor, so that no id is given twice.
        self._own_storages: set[int] = set()
        self._external_storages: set[int] = set()
        self.refusal: RefusedOpError | None = None  # Kept, in case the step swallows it.
        self.inputs = {
            name: self._add(tensor, held=tensor) for name, tensor in static_inputs.items()
        }
        self._own_storages.update(_storage_id(t) for t in static_inputs.values())

    def slot_of(self, tensor: Tensor) -> Slot:
        """The slot of a tensor given to or returned by the step; external if it is neither."""
        found = self._slots.get(id(tensor))
        return found if found is not None else self._add_external("the step's output", tensor)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Value, ...] = (),
        kwargs: Mapping[str, Value] | None = None,
    ) -> Value:
        named = dict(kwargs or {})
        # In inference mode composite ops arrive whole; their parts could hide a host sync.
        with self:
            result = func.decompose(*args, **named)
        if result is not NotImplemented:
            return result
        try:
            return self._record(func, args, named)
        except RefusedOpError as error:
            self.refusal = self.refusal or error
            raise

    def _record(
        self, func: OpOverload, args: tuple[Value, ...], kwargs: Mapping[str, Value]
    ) -> Value:
        why = _why_refused(func, args, kwargs)
        if why is not None:
            raise RefusedOpError(str(func), why)

        def to_slot(tensor: Tensor) -> Slot:
            known = self._slots.get(id(tensor))
            return known if known is not None else self._add_external(str(func), tensor)

        slots = _map(args, Tensor, to_slot)
        named_slots = {name: _map(value, Tensor, to_slot) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        results = _map(result, Tensor, lambda tensor: self._add_result(str(func), tensor))
        self.calls.append(Call(func=func, args=slots, kwargs=named_slots, results=results))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch's hook; True, its default, imports the whole compiler at the first call.
        return False

    def _add(self, tensor: Tensor, *, held: Tensor | None) -> Slot:
        slot = Slot(len(self.env))
        self.env.append(held)
        self._slots[id(tensor)] = slot
        self._seen.append(tensor)
        return slot

    def _add_result(self, op: str, tensor: Tensor) -> Slot:
        known = self._slots.get(id(tensor))
        if known is not None:
            return known  # An in-place op returns its argument.
        _require_plain(op, tensor)
        if _storage_id(tensor) not in self._external_storages:
            self._own_storages.add(_storage_id(tensor))
        return self._add(tensor, held=None)

    def _add_external(self, op: str, tensor: Tensor) -> Slot:
        _require_plain(op, tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise RefusedOpError(op, "it takes a lazily conjugated or negated tensor")
        if _storage_id(tensor) in self._own_storages:
            raise RefusedOpError(
                op, "it takes a view that was made of the step's own tensors out of sight"
            )
        self.externals.append(tensor)
        self._external_storages.add(_storage_id(tensor))
        return self._add(tensor, held=_alias(tensor))


class HostSyncGuard(TorchFunctionMode):
    """Refuses the methods that read memory behind the dispatcher's back."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: RefusedOpError | None = None

    def __torch_function__(
        self,
        func: Callable[..., Value],
        types: object,
        args: tuple[Value, ...] = (),
        kwargs: Mapping[str, Value] | None = None,
    ) -> Value:
        why = _REFUSED_METHODS.get(func)
        if why is not None:
            error = RefusedOpError(f"Tensor.{func.__name__}", why)
            self.refusal = self.refusal or error
            raise error
        return func(*args, **(kwargs or {}))


def _why_refused(
    func: OpOverload, args: tuple[Value, ...], kwargs: Mapping[str, Value]
) -> str | None:
    name = func.overloadpacket.__name__
    if torch.Tag.data_dependent_output in func.tags:
        return _HOST_SYNC
    if name in _INDEXING:
        return _DATA_SHAPE if _has_mask(args[1]) else None
    if torch.Tag.dynamic_output_shape in func.tags:
        return _DATA_SHAPE
    if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs):
        return _RANDOM
    return _MOVES if name in _MOVING else None


def _has_mask(indices: Value) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _drops_nothing(func: OpOverload, args: tuple[Value, ...], kwargs: Mapping[str, Value]) -> bool:
    # Attention is tagged as random for its dropout, which inference never turns on.
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", given) == 0.0)
    return False


def _require_plain(op: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or _is_wrapper(tensor):
        what = f"{type(tensor).__name__} of layout {tensor.layout}"
        raise RefusedOpError(op, f"a {what}, which has no storage of its own")
    if tensor.device.type != "cpu":
        raise RefusedOpError(op, f"a tensor on {tensor.device}, the recording is for the CPU")


def _is_wrapper(tensor: object) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def _alias(tensor: Tensor) -> Tensor:
    with outside_autograd():
        return unbound(tensor.dtype, tensor.device).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )


def _storage_id(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


def _map(value: Value, kind: type[Any], change: Callable[[Any], Value]) -> Value:  # any ATen value
    """`value` with every instance of `kind` changed, in lists and tuples too."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, kind, change) for item in value)
    return value


def _bind(results: Value, produced: Value, env: list[Tensor | None]) -> None:
    if isinstance(results, Slot):
        env[results.index] = produced
    elif isinstance(results, (list, tuple)):
        for slot, item in zip(results, produced, strict=True):
            _bind(slot, item, env)
