"""Recorded steps: graphs for the CPU, with the faults of device graphs.

A recording replays the same ops on the same storages, whatever became of them, as a device
graph replays the same kernels on the same addresses. So a replay after the memory was
released, moved or replaced really reads poison or old bytes, and a test can show it. It makes
nothing faster; it is the stand-in that lets the registry, the ledger and the residency
machine be tested without a GPU.

Capturing runs the step once for real, writes into external memory included. Outputs are static
buffers of the graph: valid until the next replay of the same graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from syncline.graph_lifecycle.arena.memory import outside_autograd
from syncline.graph_lifecycle.errors import (
    StaleGraphError,
    UncapturableOpError,
    UnknownGraphError,
)
from syncline.graph_lifecycle.stores.recorder import (
    Call,
    HostSyncGuard,
    Recorder,
    RefusedOpError,
    Slot,
)
from syncline.graph_lifecycle.types import FaultKind, GraphKey, StepFunction, StorageFault


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    calls: tuple[Call, ...]
    env: tuple[Tensor | None, ...]  # What is there before the first call.
    external_bytes: tuple[tuple[torch.UntypedStorage, int], ...]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    output_slots: Mapping[str, Slot]


class RecordedStore:
    """Recorded steps by key; satisfies GraphStore."""

    __slots__ = ("_name", "_recordings")

    def __init__(self, name: str = "recorded") -> None:
        self._name = name
        self._recordings: dict[GraphKey, _Recording] = {}

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return tuple(self._recordings)

    @property
    def num_bytes(self) -> int:
        """Bytes of the static inputs and outputs; what a replay produces between is not kept."""
        return sum(
            tensor.nbytes
            for recording in self._recordings.values()
            for tensors in (recording.inputs, recording.outputs)
            for tensor in tensors.values()
        )

    def capture(
        self, key: GraphKey, fn: StepFunction, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """Run `fn` once on static copies of `inputs` and keep its calls.

        Returns the external tensors. UncapturableOpError names the first op that a replay
        could not repeat; nothing is kept then.
        """
        if key in self._recordings:
            raise ValueError(f"key {key!r} is captured already")
        with outside_autograd():
            static = {name: _contiguous_clone(tensor) for name, tensor in inputs.items()}
        recorder = Recorder(static)
        outputs, slots = self._record(key, fn, recorder, static)
        with outside_autograd():
            buffers = {name: _contiguous_clone(tensor) for name, tensor in outputs.items()}
        self._recordings[key] = _Recording(
            calls=tuple(recorder.calls),
            env=tuple(recorder.env),
            external_bytes=tuple(
                (t.untyped_storage(), t.untyped_storage().nbytes()) for t in recorder.externals
            ),
            inputs=static,
            outputs=MappingProxyType(buffers),
            output_slots=slots,
        )
        return tuple(recorder.externals)

    def _record(
        self,
        key: GraphKey,
        fn: StepFunction,
        recorder: Recorder,
        static: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Slot]]:
        guard = HostSyncGuard()
        try:
            with torch.no_grad(), guard, recorder:
                outputs = dict(fn(MappingProxyType(static)))
            refusal = recorder.refusal or guard.refusal
            if refusal is not None:
                raise refusal
            _require_tensors(outputs)
            return outputs, {name: recorder.slot_of(t) for name, t in outputs.items()}
        except RefusedOpError as error:
            raise UncapturableOpError(
                key=key, store=self._name, op=error.op, why=error.why
            ) from error

    def replay(self, key: GraphKey, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the recorded calls on `inputs`; ask the registry instead, which checks first.

        ValueError, before anything is copied, if the inputs are not those of the capture in
        name, shape and dtype. The one fault it reports itself is memory that is no longer
        there at all, where a device would raise a memory access fault.
        """
        if key not in self._recordings:
            raise UnknownGraphError(key=key, known=self.keys)
        recording = self._recordings[key]
        _require_mapped(key, recording)
        _require_same_inputs(recording.inputs, inputs)
        # Inference mode: no autograd bookkeeping, and any tensor may be written.
        with torch.inference_mode():
            for name, tensor in inputs.items():
                recording.inputs[name].copy_(tensor)
            env = list(recording.env)
            for call in recording.calls:
                call.run(env)
            for name, slot in recording.output_slots.items():
                produced = env[slot.index]
                assert produced is not None
                recording.outputs[name].copy_(produced)
        return recording.outputs

    def discard(self, key: GraphKey) -> None:
        self._recordings.pop(key, None)


def _require_tensors(outputs: Mapping[str, object]) -> None:
    for name, output in outputs.items():
        if not isinstance(output, Tensor):
            kind = type(output).__name__
            raise RefusedOpError(f"output {name!r}", f"it is a {kind}, not a tensor")


def _contiguous_clone(tensor: Tensor) -> Tensor:
    # In its deterministic mode PyTorch fills what it allocates, and cannot fill packed fp4.
    held = tensor.detach().view(torch.uint8) if tensor.itemsize == 1 else tensor.detach()
    return held.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def _require_mapped(key: GraphKey, recording: _Recording) -> None:
    gone = [
        StorageFault(tensor=f"a storage of {captured} bytes", kind=FaultKind.FREED)
        for storage, captured in recording.external_bytes
        if storage.nbytes() < captured
    ]
    if gone:
        raise StaleGraphError(key=key, faults=gone)


def _require_same_inputs(static: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if static.keys() != given.keys():
        raise ValueError(f"inputs must be {sorted(static)}, got {sorted(given)}")
    for name, tensor in given.items():
        expected = static[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise ValueError(
                f"inputs[{name!r}] must be {expected.dtype} {tuple(expected.shape)}, "
                f"got {tensor.dtype} {tuple(tensor.shape)}"
            )
