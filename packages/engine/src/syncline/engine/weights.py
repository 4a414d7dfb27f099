"""Where the weights of one model live: slots in the arena, and the table of every name for them.

Layers ask `WeightBuilder` for storage and say which checkpoint names feed it; afterwards its slots
are all there is to load and to update. Knows no layer and no checkpoint file.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from syncline.engine.config import WeightLayoutName
from syncline.engine.errors import EngineConfigError
from syncline.graph_lifecycle import Arena, Tag
from syncline.model_ops_rocm import (
    LayoutError,
    RowMajor,
    Shuffle16x16,
    StorageFormat,
    Unquantised,
    WeightLayout,
)
from syncline.weight_sync import NameTable, SlotSource, WeightSlot

LAYOUTS: Final[Mapping[WeightLayoutName, WeightLayout]] = {
    "row_major": RowMajor(),
    "shuffle_16x16": Shuffle16x16(),
}


class WeightBuilder:
    """Allocates stored weights and remembers their slots, in the order they were asked for."""

    __slots__ = ("_arena", "_dtype", "_layout_name", "aliases", "slots")

    def __init__(self, arena: Arena, dtype: torch.dtype, layout_name: WeightLayoutName) -> None:
        self._arena = arena
        self._dtype = dtype
        self._layout_name = layout_name
        self.slots: list[WeightSlot] = []
        self.aliases: dict[str, str] = {}

    @property
    def linear_layout(self) -> WeightLayout:
        """How linear weights are stored; embeddings, heads, biases and norms are row major."""
        return LAYOUTS[self._layout_name]

    def linear(self, name: str, parts: Mapping[str, int], in_features: int) -> Tensor:
        """A weight [sum of parts, in_features]; `parts` maps a checkpoint name to its rows."""
        return self._slot(name, parts, in_features, self.linear_layout)

    def table(self, name: str, num_rows: int, num_columns: int) -> Tensor:
        """A weight [num_rows, num_columns] that is read by rows: an embedding or a head."""
        return self._slot(name, {name: num_rows}, num_columns, RowMajor())

    def vector(self, name: str, parts: Mapping[str, int]) -> Tensor:
        """A weight [sum of parts]: a norm's scale, a bias."""
        return self._slot(name, parts, None, RowMajor())

    def name_table(self) -> NameTable:
        """Every name that a checkpoint or a trainer may use, after all layers were built."""
        return NameTable(self.slots, aliases=self.aliases)

    def _slot(
        self, name: str, parts: Mapping[str, int], num_columns: int | None, layout: WeightLayout
    ) -> Tensor:
        columns = () if num_columns is None else (num_columns,)
        shape = (sum(parts.values()), *columns)
        storage_format = StorageFormat(recipe=Unquantised(self._dtype), layout=layout)
        try:
            specs = storage_format.storage_spec(shape)
        except LayoutError as error:
            raise EngineConfigError(
                f"weight_layout={self._layout_name!r} cannot store {name} {shape}: {error}",
                field="weight_layout",
            ) from error
        storage = {
            key: self._arena.allocate(f"{name}.{key}", spec.shape, spec.dtype, tag=Tag.WEIGHTS)
            for key, spec in specs.items()
        }
        sources = []
        start = 0
        for part_name, num_rows in parts.items():
            region = ((start, start + num_rows), *((0, size) for size in columns))
            sources.append(SlotSource(name=part_name, region=region))
            start += num_rows
        self.slots.append(
            WeightSlot(
                name=name,
                logical_shape=shape,
                encoder=storage_format,
                storage=storage,
                sources=tuple(sources),
            )
        )
        return storage["weight"]
