"""The agreed public names, and the error tree as errors.py draws it."""

import inspect

import syncline.graph_lifecycle as package
from syncline.graph_lifecycle import errors

AGREED = {
    "Arena",
    "ArenaError",
    "CaptureError",
    "CaptureReport",
    "CaptureRequest",
    "DegradedMode",
    "FaultKind",
    "GraphError",
    "GraphKey",
    "GraphReceipt",
    "GraphRegistry",
    "GraphStore",
    "PlainArena",
    "PoisonArena",
    "Recapture",
    "ReceiptError",
    "RecordedStore",
    "ReleaseError",
    "ReleaseReceipt",
    "ReleasedMemoryWrittenError",
    "Residency",
    "ResidencyError",
    "RestoreReport",
    "SleepReport",
    "StaleGraphError",
    "StepFunction",
    "StorageFault",
    "StorageInUseError",
    "StorageLedger",
    "Tag",
    "TagState",
    "UncapturableOpError",
    "UnknownGraphError",
    "WakeError",
    "WakeReport",
}


def test_the_public_names_are_the_agreed_ones() -> None:
    assert len(package.__all__) == len(AGREED)
    assert set(package.__all__) == AGREED
    for name in AGREED:
        assert getattr(package, name) is not None


def test_every_error_is_public_and_drawn_under_its_base() -> None:
    assert errors.__doc__ is not None
    drawn = [line for line in errors.__doc__.splitlines() if line.lstrip("|`- ")[:1].isupper()]
    for name, error in inspect.getmembers(errors, inspect.isclass):
        if not issubclass(error, Exception):
            continue
        assert name in AGREED
        line = next(line for line in drawn if line.lstrip("|`- ").split()[0] == name)
        depth = line.index(name) // 4
        assert depth == len(error.__mro__) - len(errors.GraphError.__mro__)


def test_tags_and_states_read_as_their_names() -> None:
    assert [str(tag) for tag in package.Tag] == ["weights", "kv_cache", "graphs", "static"]
    assert [str(state) for state in package.TagState] == ["awake", "asleep"]
