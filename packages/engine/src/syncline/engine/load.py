"""A checkpoint directory's weights, read tensor by tensor, as the first update of a model.

Everything that can be said from the headers (files, names, shapes, dtypes) is checked before a byte
of a weight is written; the update itself then refuses what only the contents show. Loading has no
path of its own into the weights. Knows no architecture.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from syncline.engine.errors import CheckpointError
from syncline.weight_sync import NameTable, SyncReport, Update, WeightSyncError, WriteGuard

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Checkpoint:
    """The weight files of one directory, their headers read.

    manifest   name -> (shape, dtype) of every tensor in every file
    """

    __slots__ = ("_files", "manifest", "path")

    def __init__(self, directory: str | Path) -> None:
        """Raises CheckpointError for a missing directory, file or shard, a damaged file, or an
        index that disagrees with its shards. One file `model.safetensors` goes before an index."""
        root = Path(directory)
        self.path = str(root)
        if not root.is_dir():
            raise CheckpointError(self.path, "no such directory")
        self._files: dict[str, tuple[str, ...]] = {}
        self.manifest: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if (root / SINGLE_FILE).is_file():
            self._read_header(SINGLE_FILE, None)
        else:
            for file, names in self._read_index().items():
                self._read_header(file, names)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor once, file by file, one in memory at a time."""
        for file, names in self._files.items():
            with safe_open(Path(self.path) / file, framework="pt") as handle:
                for name in names:
                    yield name, handle.get_tensor(name)

    def _read_index(self) -> dict[str, set[str]]:
        path = Path(self.path) / INDEX_FILE
        if not path.is_file():
            raise CheckpointError(
                self.path,
                f"neither {SINGLE_FILE} nor {INDEX_FILE} exists; only safetensors is read",
            )
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            pairs = [(str(file), str(name)) for name, file in weight_map.items()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                self.path, f"{INDEX_FILE} has no readable weight_map: {error!r}"
            ) from error
        shards: dict[str, set[str]] = {}
        for file, name in pairs:
            shards.setdefault(file, set()).add(name)
        missing = [file for file in shards if not (Path(self.path) / file).is_file()]
        if missing:
            raise CheckpointError(self.path, f"shards are missing: {', '.join(sorted(missing))}")
        return shards

    def _read_header(self, file: str, expected: set[str] | None) -> None:
        """`expected`: the names that the index places in this shard."""
        try:
            with safe_open(Path(self.path) / file, framework="pt") as handle:
                names = tuple(handle.keys())
                for name in names:
                    part = handle.get_slice(name)
                    self._announce(file, name, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(self.path, f"{file} is damaged or truncated: {error}") from error
        if expected is not None and expected != set(names):
            absent = ", ".join(sorted(expected - set(names))) or "none"
            extra = ", ".join(sorted(set(names) - expected)) or "none"
            raise CheckpointError(
                self.path,
                f"{file} disagrees with {INDEX_FILE}: missing in the shard: {absent}; "
                f"not in the index: {extra}",
            )
        self._files[file] = names

    def _announce(self, file: str, name: str, shape: tuple[int, ...], dtype_name: str) -> None:
        if dtype_name not in _DTYPES:
            raise CheckpointError(self.path, f"{file}: {name} has the unknown dtype {dtype_name}")
        if name in self.manifest:
            raise CheckpointError(self.path, f"{name} is in {file} and in another shard")
        self.manifest[name] = (shape, _DTYPES[dtype_name])


class NobodyReads:
    """The write guard of a model that has never served: there is no one to wait for."""

    __slots__ = ()

    def acquire(self, reason: str) -> None:
        """Granted at once."""

    def first_write(self) -> None:
        """Nothing was computed from the weights before."""

    def release(self) -> None:
        """Nothing was held."""


def load_checkpoint(
    checkpoint: Checkpoint, table: NameTable, *, version: int = 0, guard: WriteGuard | None = None
) -> SyncReport:
    """Fill every slot of the table from the checkpoint, as one update.

    CheckpointError when the files do not fit the model: unknown, missing, misshapen or unusable
    tensors, each named; the weight-sync error is its cause. Weights that were valid before are
    untouched if the headers were wrong; after a damaged content they are not valid any more.
    """
    update: Update | None = None
    try:
        update = Update.begin(
            table,
            version,
            guard=NobodyReads() if guard is None else guard,
            manifest=checkpoint.manifest,
        )
        for name, tensor in checkpoint.tensors():
            update.put(name, tensor)
        return update.commit()
    except BaseException as error:
        if update is not None:
            update.abort(f"loading {checkpoint.path} failed: {error}")
        if isinstance(error, (WeightSyncError, SafetensorError, OSError)):
            raise CheckpointError(checkpoint.path, str(error)) from error
        raise
