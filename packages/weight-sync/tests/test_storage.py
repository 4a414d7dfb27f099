"""The stored tensors under an update: released, moved, padded, strided, of any dtype or shape."""

import gc
import weakref
from collections.abc import Mapping

import pytest
import torch

from syncline.weight_sync import (
    DuplicateTensorError,
    IncompleteUpdateError,
    Mode,
    NameTable,
    Region,
    StorageError,
    UnusableTensorError,
    Update,
    UpdateState,
    WeightSlot,
    stored_checksums,
)
from syncline.weight_sync.regions import slices
from syncline.weight_sync.tensors import require_usable
from syncline.weight_sync.testing import (
    IdentityEncoder,
    RecordingGuard,
    counting,
    make_slot,
    stored_bytes,
)

both_modes = pytest.mark.parametrize("mode", ["direct", "staged"])


@both_modes
def test_storage_released_before_or_during_an_update_is_refused_by_name(mode: Mode) -> None:
    slot = make_slot("w", (4,), IdentityEncoder())
    tensor = slot.storage["weight"]
    table = NameTable([slot])
    update = Update.begin(table, 1, guard=RecordingGuard(), mode=mode)
    update.put("w", counting((2,)), ((0, 2),))
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StorageError, match="'weight' of w holds no memory") as caught:
        update.put("w", counting((2,)), ((2, 4),))
    assert (caught.value.slot, caught.value.tensor) == ("w", "weight")
    with pytest.raises(StorageError, match="holds no memory"):
        Update.begin(table, 2, guard=RecordingGuard(), mode=mode)
    update.abort("asleep")


def test_a_source_may_begin_where_released_storage_was() -> None:
    source, released, stored = counting((2,)), counting((2,)), counting((2,))
    released.untyped_storage().resize_(0)
    require_usable("w", source, {source.untyped_storage().data_ptr(): released})
    with pytest.raises(UnusableTensorError, match="w: is the engine's own memory"):
        require_usable("w", stored.view(2, 1), {stored.untyped_storage().data_ptr(): stored})


@both_modes
def test_storage_that_moves_under_an_update_ends_it(mode: Mode) -> None:
    """The parts before the move lie in the old place: a commit would serve half of each."""
    slot = make_slot("w", (4,), IdentityEncoder())
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard(), mode=mode)
    update.put("w", counting((4,)))
    elsewhere = torch.full((4,), torch.nan)
    slot.storage["weight"].set_(elsewhere.untyped_storage(), 0, (4,), (1,))
    with pytest.raises(StorageError, match="has moved"):
        update.commit()
    assert update.state is UpdateState.OPEN
    update.abort("moved")
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard(), mode=mode)
    update.put("w", counting((4,)))
    update.commit()
    assert slot.storage["weight"].tolist() == [1, 2, 3, 4]


@both_modes
def test_a_slot_without_elements_needs_nothing_and_takes_its_name_once(mode: Mode) -> None:
    slot = make_slot("empty", (0, 4), IdentityEncoder())
    table = NameTable([slot])
    assert Update.begin(table, 1, guard=RecordingGuard(), mode=mode).commit().coverage == 1.0
    update = Update.begin(table, 2, guard=RecordingGuard(), mode=mode)
    update.put("empty", torch.zeros(0, 4))
    with pytest.raises(DuplicateTensorError):
        update.put("empty", torch.zeros(0, 4))
    assert update.commit().num_tensors == 1


@both_modes
def test_a_scalar_slot_is_one_element(mode: Mode) -> None:
    slot = make_slot("scalar", (), IdentityEncoder())
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard(), mode=mode)
    with pytest.raises(IncompleteUpdateError):
        update.commit()
    update.put("scalar", torch.tensor(4.0))
    with pytest.raises(DuplicateTensorError):
        update.put("scalar", torch.tensor(4.0), ())
    update.commit()
    assert slot.storage["weight"].item() == 4.0


class Padded(IdentityEncoder):
    """Stores its rows among more rows than it has: what no region owns stays as it was."""

    def storage(self, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((4 * -(-shape[0] // 4), *shape[1:]), -1.0)}


@both_modes
def test_padding_survives_every_update(mode: Mode) -> None:
    slot = make_slot("w", (5, 2), Padded())
    for version in range(2):
        update = Update.begin(NameTable([slot]), version, guard=RecordingGuard(), mode=mode)
        update.put("w", counting((3, 2), version), ((0, 3), (0, 2)))
        update.put("w", counting((2, 2), version), ((3, 5), (0, 2)))
        update.commit()
        stored = slot.storage["weight"]
        assert stored[:5].equal(torch.cat([counting((3, 2), version), counting((2, 2), version)]))
        assert stored[5:].eq(-1).all()


class RawBytes(IdentityEncoder):
    """Writes a dtype that has no arithmetic and on some devices not even a copy."""

    def encode_into(
        self, out: Mapping[str, torch.Tensor], source: torch.Tensor, region: Region
    ) -> None:
        out["weight"].view(torch.uint8)[slices(region)].copy_(source)


@both_modes
@pytest.mark.parametrize(
    "dtype",
    [torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8, torch.bool],
    ids=str,
)
def test_storage_of_any_dtype_is_copied_and_compared_by_its_bytes(
    dtype: torch.dtype, mode: Mode
) -> None:
    storage = {"weight": torch.zeros(2, 3, dtype=torch.uint8).view(dtype)}
    slot = WeightSlot(name="w", logical_shape=(2, 3), encoder=RawBytes(dtype), storage=storage)
    table = NameTable([slot], aliases={"tied": "w"})
    update = Update.begin(table, 1, guard=RecordingGuard(), mode=mode)
    update.put("w", torch.ones(2, 3))
    update.put("tied", torch.ones(2, 3))
    update.commit()
    assert stored_bytes(slot)["weight"] == b"\1" * 6
    assert len(stored_checksums([slot])["w"]) == 64


def test_packed_fp4_is_staged_in_the_deterministic_mode_of_pytorch() -> None:
    """Which fills what it allocates, and cannot fill packed fp4."""
    torch.use_deterministic_algorithms(True)
    try:
        test_storage_of_any_dtype_is_copied_and_compared_by_its_bytes(
            torch.float4_e2m1fn_x2, "staged"
        )
    finally:
        torch.use_deterministic_algorithms(False)


class WholeBytes(RawBytes):
    """Likewise, of the whole slot at once: pieces wait for one another."""

    def region_is_encodable(self, shape: tuple[int, ...], region: Region) -> bool:
        return all(bounds == (0, size) for bounds, size in zip(region, shape, strict=True))

    def encode_into(
        self, out: Mapping[str, torch.Tensor], source: torch.Tensor, region: Region
    ) -> None:
        super().encode_into(out, source.view(torch.uint8), region)


@both_modes
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_pieces_of_packed_fp4_wait_for_one_another(is_deterministic: bool, mode: Mode) -> None:
    fp4 = torch.float4_e2m1fn_x2
    storage = {"weight": torch.zeros(4, 3, dtype=torch.uint8).view(fp4)}
    slot = WeightSlot(name="w", logical_shape=(4, 3), encoder=WholeBytes(fp4), storage=storage)
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard(), mode=mode)
        for start in (0, 2):
            piece = torch.full((2, 3), 7 + start, dtype=torch.uint8).view(fp4)
            update.put("w", piece, ((start, start + 2), (0, 3)))
        update.commit()
    finally:
        torch.use_deterministic_algorithms(False)
    assert stored_bytes(slot)["weight"] == b"\7" * 6 + b"\11" * 6


@both_modes
def test_strided_storage_is_written_in_place(mode: Mode) -> None:
    arena = torch.full((4, 6), -1.0)
    slot = WeightSlot(
        name="w",
        logical_shape=(2, 3),
        encoder=IdentityEncoder(),
        storage={"weight": arena[::2, ::2]},
    )
    table = NameTable([slot], aliases={"tied": "w"})
    update = Update.begin(table, 1, guard=RecordingGuard(), mode=mode)
    update.put("w", counting((2, 3)))
    update.put("tied", counting((2, 3)))
    update.commit()
    assert arena[::2, ::2].equal(counting((2, 3)))
    assert arena.eq(-1).sum() == 18


def test_staged_shadows_and_waiting_parts_end_with_the_update() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    class Watching(IdentityEncoder):
        def encode_into(self, out, source, region):  # type: ignore[no-untyped-def]  # as the base
            made.append(weakref.ref(out["weight"]))
            super().encode_into(out, source, region)

    slot = make_slot("w", (2,), Watching())
    update = Update.begin(NameTable([slot]), 1, guard=RecordingGuard(), mode="staged")
    update.put("w", counting((2,)))
    assert made[0]() is not None
    update.commit()
    gc.collect()
    assert made[0]() is None
