"""PlainArena on a real device: what it gives back, others can have."""

import pytest
import torch

from syncline.graph_lifecycle import PlainArena, RecordedStore, Tag, UncapturableOpError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]
SIZE = 256 << 20


def test_released_device_memory_is_free_and_comes_back_under_the_same_tensor() -> None:
    arena = PlainArena(device="cuda")
    weight = arena.allocate("w", (SIZE // 2,), torch.bfloat16, tag=Tag.WEIGHTS)
    table = arena.allocate("rope", (64,), torch.float32, tag=Tag.STATIC)
    table.fill_(3)
    for _ in range(2):
        weight.fill_(1)
        kept_view = weight[1:]
        before = torch.cuda.memory_allocated()
        receipt = arena.release(Tag.WEIGHTS)
        assert before - torch.cuda.memory_allocated() >= SIZE - 4096
        assert kept_view.untyped_storage().nbytes() == 0
        assert weight.shape == (SIZE // 2,) and weight[:8].isnan().all()
        assert arena.restore(receipt).num_bytes == SIZE
        assert torch.cuda.memory_allocated() == before
        weight.fill_(2)
        assert weight.float().mean() == 2 and weight.data_ptr() % 256 == 0
    assert table.eq(3).all()


def test_a_restore_that_does_not_fit_changes_nothing_and_may_be_repeated() -> None:
    arena = PlainArena(device="cuda")
    names = ["a", "b", "c", "d"]
    for name in names:
        arena.allocate(name, (SIZE,), torch.uint8, tag=Tag.KV_CACHE)
    receipt = arena.release(Tag.KV_CACHE)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - 2 * SIZE - (64 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        arena.restore(receipt)
    assert arena.resident_bytes(Tag.KV_CACHE) == 0
    del hog
    torch.cuda.empty_cache()
    assert arena.restore(receipt).num_bytes == 4 * SIZE
    for name in names:
        arena.tensor(name).fill_(1)


def test_the_recording_store_refuses_device_tensors_by_name() -> None:
    weight = torch.ones(2, device="cuda")
    with pytest.raises(UncapturableOpError, match="cuda:0"):
        RecordedStore().capture("g", lambda _: {"y": weight * 2}, {})
