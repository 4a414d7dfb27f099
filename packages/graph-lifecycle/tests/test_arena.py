"""Arenas: aligned memory by name and tag, given back and brought back under the same objects."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from syncline.graph_lifecycle import (
    Arena,
    ArenaError,
    PlainArena,
    PoisonArena,
    ReceiptError,
    ReleasedMemoryWrittenError,
    StorageInUseError,
    StorageLedger,
    Tag,
)
from syncline.graph_lifecycle.testing import is_poisoned, rebind

MakeArena = Callable[[StorageLedger | None], Arena]

ARENAS: dict[str, MakeArena] = {
    "poison": lambda ledger: PoisonArena(ledger=ledger),
    "poison_moving": lambda ledger: PoisonArena(True, ledger=ledger),
    "plain": lambda ledger: PlainArena(ledger=ledger),
}
NAN_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
OTHER_DTYPES = [torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16, torch.bool]


@pytest.fixture(params=ARENAS)
def make_arena(request: pytest.FixtureRequest) -> MakeArena:
    return ARENAS[request.param]


@pytest.fixture
def arena(make_arena: MakeArena) -> Arena:
    return make_arena(None)


def weights(arena: Arena, *names: str) -> list[torch.Tensor]:
    return [arena.allocate(name, (4, 4), torch.float32, tag=Tag.WEIGHTS) for name in names]


def test_memory_of_packed_fp4_is_handed_out_in_the_deterministic_mode_of_pytorch(
    arena: Arena,
) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        tensor = arena.allocate("t", (3, 5), torch.float4_e2m1fn_x2, tag=Tag.WEIGHTS)
    finally:
        torch.use_deterministic_algorithms(False)
    tensor.view(torch.uint8).fill_(0x55)
    receipt = arena.release(Tag.WEIGHTS)
    assert bool((tensor.view(torch.uint8) == 0xFF).all())
    arena.restore(receipt)
    assert tensor.shape == (3, 5) and tensor.is_contiguous()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3), (7, 64)])
@pytest.mark.parametrize("dtype", NAN_DTYPES + OTHER_DTYPES, ids=str)
def test_a_tensor_is_contiguous_aligned_and_of_the_shape_and_dtype_asked_for(
    arena: Arena, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = arena.allocate("t", shape, dtype, tag=Tag.STATIC)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.data_ptr() % 256 == 0
    assert arena.tensor("t") is tensor
    end = tensor.storage_offset() * dtype.itemsize + tensor.nbytes
    assert end <= tensor.untyped_storage().nbytes()


def test_resident_bytes_are_the_sum_of_the_tags_allocations_rounded_up(arena: Arena) -> None:
    arena.allocate("a", (1,), torch.uint8, tag=Tag.WEIGHTS)
    arena.allocate("b", (256,), torch.uint8, tag=Tag.WEIGHTS)
    arena.allocate("c", (65,), torch.float32, tag=Tag.WEIGHTS)
    arena.allocate("d", (0,), torch.float32, tag=Tag.WEIGHTS)
    arena.allocate("e", (1024,), torch.uint8, tag=Tag.KV_CACHE)
    assert arena.resident_bytes(Tag.WEIGHTS) == 256 + 256 + 512 + 0
    assert arena.resident_bytes(Tag.KV_CACHE) == 1024
    assert arena.resident_bytes(Tag.STATIC) == 0
    assert arena.names(Tag.WEIGHTS) == ("a", "b", "c", "d")
    arena.free("b")
    assert arena.resident_bytes(Tag.WEIGHTS) == 256 + 512
    assert arena.names(Tag.WEIGHTS) == ("a", "c", "d")


def test_memory_made_in_inference_mode_is_written_in_any_mode(arena: Arena) -> None:
    with torch.inference_mode():
        (weight,) = weights(arena, "w")
    weight.fill_(1)
    receipt = arena.release(Tag.WEIGHTS)
    with torch.inference_mode():
        arena.restore(receipt)
        weight.fill_(2)
    weight.fill_(3)
    assert weight.sum() == 48


def test_bad_arguments_are_refused_by_field_and_value(arena: Arena) -> None:
    weights(arena, "w")
    with pytest.raises(ValueError, match="'w' is allocated already"):
        weights(arena, "w")
    with pytest.raises(ValueError, match=r"shape of 'n' .* \(2, -1\)"):
        arena.allocate("n", (2, -1), torch.float32, tag=Tag.WEIGHTS)
    with pytest.raises(ValueError, match="tag must be one of weights, kv_cache, static"):
        arena.allocate("g", (2,), torch.float32, tag=Tag.GRAPHS)
    for call in (arena.free, arena.tensor):
        with pytest.raises(ValueError, match=r"'x' is not allocated; names: \['w'\]"):
            call("x")
    for tag in (Tag.STATIC, Tag.GRAPHS):
        with pytest.raises(ValueError, match="tag must be one of weights, kv_cache"):
            arena.release(tag)
    assert arena.names(Tag.WEIGHTS) == ("w",)


@pytest.mark.parametrize("dtype", NAN_DTYPES, ids=str)
def test_released_float_memory_reads_nan_in_every_element(arena: Arena, dtype: torch.dtype) -> None:
    tensor = arena.allocate("t", (3, 5), dtype, tag=Tag.WEIGHTS)
    tensor.copy_(torch.ones(3, 5))
    arena.release(Tag.WEIGHTS)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert tensor.shape == (3, 5) and tensor.dtype == dtype
    assert tensor.to(wide).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [(torch.int64, -1), (torch.int32, -1), (torch.int8, -1), (torch.uint8, 255), (torch.bool, 1)],
    ids=str,
)
def test_released_memory_without_nan_reads_the_documented_pattern(
    arena: Arena, dtype: torch.dtype, poison: int
) -> None:
    tensor = arena.allocate("t", (9,), dtype, tag=Tag.KV_CACHE)
    tensor.fill_(0)
    arena.release(Tag.KV_CACHE)
    assert tensor.to(torch.int64).tolist() == [poison] * 9


@pytest.mark.parametrize("dtype", NAN_DTYPES + OTHER_DTYPES, ids=str)
@pytest.mark.parametrize("move", [False, True])
def test_a_poison_arena_shows_what_was_never_written_before_and_after_a_sleep(
    move: bool, dtype: torch.dtype
) -> None:
    arena = PoisonArena(move_on_restore=move)
    tensor = arena.allocate("t", (5, 3), dtype, tag=Tag.WEIGHTS)
    assert is_poisoned(tensor)
    tensor.copy_(torch.zeros(5, 3))
    assert not is_poisoned(tensor)
    arena.restore(arena.release(Tag.WEIGHTS))
    assert is_poisoned(tensor)


def test_a_restore_brings_back_the_same_objects_with_their_shapes_and_lost_contents(
    arena: Arena,
) -> None:
    first, second = weights(arena, "w1", "w2")
    kv = arena.allocate("kv", (8,), torch.int64, tag=Tag.KV_CACHE)
    for value, tensor in enumerate((first, second, kv)):
        tensor.fill_(value)
    before = [t.data_ptr() for t in (first, second)]
    receipt = arena.release(Tag.WEIGHTS)
    assert (receipt.tag, receipt.num_bytes, receipt.names) == (Tag.WEIGHTS, 512, ("w1", "w2"))
    assert arena.resident_bytes(Tag.WEIGHTS) == 0
    assert kv.tolist() == [2] * 8
    report = arena.restore(receipt)
    assert (report.tag, report.num_bytes) == (Tag.WEIGHTS, 512)
    assert report.moved is not arena.keeps_addresses
    assert arena.resident_bytes(Tag.WEIGHTS) == 512
    assert arena.tensor("w1") is first and arena.tensor("w2") is second
    after = [t.data_ptr() for t in (first, second)]
    if arena.keeps_addresses:
        assert after == before
    assert all(p % 256 == 0 for p in after)
    for tensor in (first, second):
        assert tensor.shape == (4, 4) and tensor.is_contiguous()
        tensor.fill_(5)
        assert tensor.sum() == 80
    assert kv.tolist() == [2] * 8


def test_a_moving_arena_brings_every_tensor_back_elsewhere_and_leaves_poison_behind() -> None:
    arena = PoisonArena(move_on_restore=True)
    tensors = weights(arena, "w1", "w2")
    old_views = [t.view(-1) for t in tensors]
    receipt = arena.release(Tag.WEIGHTS)
    arena.restore(receipt)
    for tensor, old in zip(tensors, old_views, strict=True):
        tensor.fill_(1)
        assert tensor.untyped_storage()._cdata != old.untyped_storage()._cdata
        assert tensor.data_ptr() != old.data_ptr()
        assert old.isnan().all()


def test_two_cycles_at_kept_addresses_change_no_pointer() -> None:
    arena = PoisonArena()
    tensors = [*weights(arena, "w"), arena.allocate("kv", (3,), torch.half, tag=Tag.KV_CACHE)]
    before = [(t.data_ptr(), t.untyped_storage()._cdata) for t in tensors]
    for _ in range(2):
        receipts = [arena.release(tag) for tag in (Tag.KV_CACHE, Tag.WEIGHTS)]
        for receipt in receipts:
            arena.restore(receipt)
        assert [(t.data_ptr(), t.untyped_storage()._cdata) for t in tensors] == before


def test_a_plain_arena_really_frees_even_while_somebody_keeps_a_view() -> None:
    arena = PlainArena()
    (weight,) = weights(arena, "w")
    kept = weight[1:]
    storage = weight.untyped_storage()
    arena.release(Tag.WEIGHTS)
    assert storage.nbytes() == 0
    assert kept.untyped_storage().nbytes() == 0
    assert weight.untyped_storage().nbytes() <= 64


def test_freed_memory_reads_poison_through_the_tensor_that_is_left(arena: Arena) -> None:
    (weight,) = weights(arena, "w")
    weight.fill_(1)
    arena.free("w")
    assert weight.shape == (4, 4) and weight.isnan().all()
    (again,) = weights(arena, "w")
    assert again is not weight


def test_a_receipt_is_consumed_exactly_once(arena: Arena) -> None:
    weights(arena, "w")
    receipt = arena.release(Tag.WEIGHTS)
    arena.restore(receipt)
    with pytest.raises(ReceiptError, match="consumed already") as caught:
        arena.restore(receipt)
    assert caught.value.receipt == receipt
    second = arena.release(Tag.WEIGHTS)
    with pytest.raises(ReceiptError, match="consumed already"):
        arena.restore(receipt)
    arena.restore(second)


def test_a_foreign_or_altered_receipt_restores_nothing(make_arena: MakeArena) -> None:
    arena, other = make_arena(None), make_arena(None)
    for each in (arena, other):
        weights(each, "w")
    receipt, foreign = arena.release(Tag.WEIGHTS), other.release(Tag.WEIGHTS)
    with pytest.raises(ReceiptError, match="issued by somebody else"):
        arena.restore(foreign)
    with pytest.raises(ReceiptError, match="altered"):
        arena.restore(replace(receipt, num_bytes=1))
    assert arena.resident_bytes(Tag.WEIGHTS) == 0
    arena.restore(receipt)
    other.restore(foreign)


def test_a_released_tag_is_neither_released_again_nor_allocated_nor_freed(arena: Arena) -> None:
    weights(arena, "w")
    receipt = arena.release(Tag.WEIGHTS)
    for misuse in (
        lambda: arena.release(Tag.WEIGHTS),
        lambda: weights(arena, "more"),
        lambda: arena.free("w"),
    ):
        with pytest.raises(ArenaError, match="weights is released"):
            misuse()
    arena.allocate("kv", (4,), torch.float32, tag=Tag.KV_CACHE)
    assert arena.restore(receipt).num_bytes == 256


def test_writing_into_sleeping_memory_is_found_at_the_restore(arena: Arena) -> None:
    first, _ = weights(arena, "w1", "w2")
    receipt = arena.release(Tag.WEIGHTS)
    first.zero_()
    with pytest.raises(ReleasedMemoryWrittenError) as caught:
        arena.restore(receipt)
    assert (caught.value.tag, caught.value.names) == (Tag.WEIGHTS, ("w1",))
    assert arena.resident_bytes(Tag.WEIGHTS) == 0
    assert is_poisoned(first)
    arena.restore(receipt)
    first.fill_(1)
    assert first.sum() == 16


def test_a_tensor_bound_elsewhere_by_its_holder_is_named(arena: Arena) -> None:
    first, _ = weights(arena, "w1", "w2")
    rebind(first, torch.ones(4, 4))
    for misuse in (lambda: arena.release(Tag.WEIGHTS), lambda: arena.free("w1")):
        with pytest.raises(ArenaError, match=r"\['w1'\] were bound to foreign memory"):
            misuse()
    assert arena.resident_bytes(Tag.WEIGHTS) == 512
    assert first.sum() == 16


@pytest.mark.parametrize("action", ["free", "release"])
@pytest.mark.parametrize("kind", ARENAS)
def test_what_a_live_graph_reads_is_neither_freed_nor_moved(kind: str, action: str) -> None:
    ledger = StorageLedger()
    arena = ARENAS[kind](ledger)
    first, second = weights(arena, "w1", "w2")
    first.fill_(1)
    ledger.record("decode", [first[0]])
    ledger.record("draft", [first, torch.ones(1)])
    arena.free("w2")
    refused = action == "free" or not arena.keeps_addresses
    call = (lambda: arena.free("w1")) if action == "free" else lambda: arena.release(Tag.WEIGHTS)
    if not refused:
        call()
        return
    with pytest.raises(StorageInUseError) as caught:
        call()
    assert caught.value.names == ("w1",)
    assert caught.value.graphs == ("decode", "draft")
    assert first.sum() == 16 and arena.resident_bytes(Tag.WEIGHTS) == 256
    ledger.forget("decode")
    with pytest.raises(StorageInUseError) as caught:
        call()
    assert caught.value.graphs == ("draft",)
    ledger.forget("draft")
    call()
    assert first.isnan().all() and second.isnan().all()


def test_the_memory_of_one_tag_says_nothing_about_another(make_arena: MakeArena) -> None:
    ledger = StorageLedger()
    arena = make_arena(ledger)
    (weight,) = weights(arena, "w")
    arena.allocate("kv", (4,), torch.float32, tag=Tag.KV_CACHE)
    ledger.record("g", [weight])
    receipt = arena.release(Tag.KV_CACHE)
    assert ledger.faults("g") == ()
    arena.restore(receipt)
