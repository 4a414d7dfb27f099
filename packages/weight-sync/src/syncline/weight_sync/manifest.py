"""An announced update, checked as a whole before it begins.

Compares names, shapes and dtypes with the table and finds everything that is wrong at once. Knows
no contents; that what was announced also comes is the update's matter.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from syncline.weight_sync.coverage import Coverage
from syncline.weight_sync.errors import (
    MAX_LISTED,
    DtypeMismatchError,
    DuplicateTensorError,
    IncompleteUpdateError,
    ManifestError,
    MissingRegion,
    ShapeMismatchError,
    UnknownNameError,
    WeightSyncError,
)
from syncline.weight_sync.names import Alias, Ignored, NameTable, Target
from syncline.weight_sync.regions import whole_region
from syncline.weight_sync.tensors import require_dtype

Manifest = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def manifest_of(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The manifest of whole tensors. Raises DuplicateTensorError for a name that comes twice."""
    manifest: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in tensors:
        if name in manifest:
            raise DuplicateTensorError(name, whole_region(tensor.shape), "in one manifest")
        manifest[name] = (tuple(tensor.shape), tensor.dtype)
    return manifest


def require_complete(manifest: Manifest, table: NameTable) -> None:
    """Raise ManifestError with every unknown, misshapen, mistyped, double and missing tensor."""
    problems: list[WeightSyncError] = []
    announced: dict[str, Target] = {}
    aliases: list[Alias] = []
    for name, (shape, dtype) in manifest.items():
        found = table.find(name)
        if found is None:
            # A search costs milliseconds, and a wrong prefix makes every name unknown.
            nearest = table.nearest(name) if len(problems) < MAX_LISTED else None
            problems.append(UnknownNameError(name, nearest))
            continue
        if isinstance(found, Ignored):
            continue
        target = found.target if isinstance(found, Alias) else found
        if isinstance(found, Alias):
            aliases.append(found)
        else:
            announced[name] = found
        problems.extend(_mismatches(name, target, tuple(shape), dtype))
    for alias in aliases:
        announced.setdefault(alias.target.name, alias.target)
    problems.extend(_gaps_and_doubles(announced, table))
    if problems:
        raise ManifestError(tuple(problems))


def _mismatches(
    name: str, target: Target, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[WeightSyncError]:
    if shape != target.full_shape:
        yield ShapeMismatchError(name, target.full_shape, shape)
    for landing in target.landings:
        try:
            require_dtype(name, dtype, landing.slot)
        except DtypeMismatchError as error:
            yield error
            return


def _gaps_and_doubles(
    announced: Mapping[str, Target], table: NameTable
) -> Iterator[WeightSyncError]:
    covered = {name: Coverage(slot.logical_shape) for name, slot in table.slots.items()}
    for name, target in announced.items():
        for landing in target.landings:
            coverage = covered[landing.slot.name]
            doubles = coverage.overlaps(landing.region)
            for region in doubles:
                yield DuplicateTensorError(name, region, f"in slot {landing.slot.name}")
            for region in coverage.missing(landing.region):
                coverage.add(region)
    missing = tuple(
        MissingRegion(slot=name, region=region, names=table.names_for(table.slots[name], region))
        for name, coverage in covered.items()
        for region in coverage.missing()
    )
    if missing:
        yield IncompleteUpdateError(missing)
