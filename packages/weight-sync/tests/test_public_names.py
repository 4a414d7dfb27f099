"""The names of the package, agreed one by one, and the one base of its errors."""

import inspect

import syncline.weight_sync as package
from syncline.weight_sync import errors

AGREED = [
    "AbortReport",
    "Alias",
    "AliasMismatchError",
    "DerivedTensor",
    "DtypeMismatchError",
    "DuplicateTensorError",
    "Encoder",
    "EncoderContractError",
    "Ignored",
    "IncompleteUpdateError",
    "Landing",
    "Manifest",
    "ManifestError",
    "MissingRegion",
    "Mode",
    "NameTable",
    "NamedTensors",
    "NonFiniteWeightError",
    "NotInManifestError",
    "Region",
    "ShapeMismatchError",
    "SlotSource",
    "StaleVersionError",
    "StorageError",
    "SyncReport",
    "Target",
    "TensorRefusedError",
    "Transport",
    "TransportError",
    "UnknownNameError",
    "UnusableTensorError",
    "Update",
    "UpdateOptions",
    "UpdateState",
    "UpdateStateError",
    "WeightPart",
    "WeightSlot",
    "WeightSyncError",
    "WriteGuard",
    "combined_checksum",
    "logical_checksums",
    "manifest_of",
    "stored_checksums",
    "tensors_checksum",
    "whole_region",
]


def test_the_public_names_are_the_agreed_ones() -> None:
    assert package.__all__ == AGREED


def test_every_error_has_the_one_base_and_stands_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    found = [
        (name, cls)
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, Exception)
    ]
    assert len(found) > 10
    for name, cls in found:
        assert issubclass(cls, errors.WeightSyncError)
        assert name in tree
        assert name in package.__all__
