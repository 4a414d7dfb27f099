"""Named tensors: yielded as they are, once."""

from collections.abc import Iterator

import pytest
import torch

from syncline.weight_sync import (
    DuplicateTensorError,
    NamedTensors,
    NameTable,
    TransportError,
    Update,
    UpdateState,
    WeightPart,
)
from syncline.weight_sync.testing import IdentityEncoder, RecordingGuard, counting, make_slot


def test_a_module_is_an_update_of_its_tensors() -> None:
    module = torch.nn.Linear(3, 2)
    slots = [
        make_slot(name, tuple(tensor.shape), IdentityEncoder())
        for name, tensor in module.named_parameters()
    ]
    update = Update.begin(NameTable(slots), 1, guard=RecordingGuard())
    update.put_all(NamedTensors(module.named_parameters()))
    assert update.commit().num_tensors == 2
    for slot in slots:
        assert slot.storage["weight"].equal(module.get_parameter(slot.name))


def test_tensors_are_yielded_one_at_a_time_without_a_copy() -> None:
    asked: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(2):
            asked.append(i)
            yield f"w{i}", kept[i]

    kept = [counting((2,)), counting((2,))]
    transport = iter(NamedTensors(tensors()))
    assert asked == []
    first = next(transport)
    assert asked == [0]
    assert (first.name, first.part) == ("w0", None)
    assert first.tensor is kept[0]


def test_a_transport_that_is_read_again_is_an_error_not_an_empty_sender() -> None:
    transport = NamedTensors(iter([("w", counting((2,)))]))
    assert [part.name for part in transport] == ["w"]
    with pytest.raises(TransportError, match="read already"):
        iter(transport)


def test_a_name_that_comes_twice_is_refused_not_the_last_to_win() -> None:
    slot = make_slot("w", (2,), IdentityEncoder())
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard())
    with pytest.raises(DuplicateTensorError):
        update.put_all(NamedTensors([("w", counting((2,))), ("w", counting((2,), 5))]))
    assert slot.storage["weight"].tolist() == [1, 2]


def test_a_sender_that_breaks_off_leaves_the_update_open_for_an_abort() -> None:
    def broken() -> Iterator[WeightPart]:
        yield WeightPart(name="a", tensor=counting((2,)))
        raise ConnectionError("the trainer died")

    slots = [make_slot(name, (2,), IdentityEncoder()) for name in "ab"]
    guard = RecordingGuard()
    update = Update.begin(NameTable(slots), 1, guard=guard)
    with pytest.raises(ConnectionError, match="the trainer died"):
        update.put_all(broken())
    assert update.state is UpdateState.OPEN
    assert guard.held
    assert update.abort("the trainer died").live_bytes_written
    assert not guard.held
