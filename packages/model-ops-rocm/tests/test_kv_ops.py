"""kv_write and kv_copy_blocks: the right slots change, and no others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syncline.model_ops_rocm import select
from syncline.model_ops_rocm.testing import HostSyncError, NoHostSync, as_d_major

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NB, K, BS, D = 5, 2, 4, 8
kv_write = select("kv_write", dtype=torch.float32)
kv_copy_blocks = select("kv_copy_blocks", dtype=torch.float32)


def caches(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (NB, K, BS, D)
    return (
        torch.arange(NB * K * BS * D).reshape(shape).to(dtype),
        -torch.arange(NB * K * BS * D).reshape(shape).to(dtype),
    )


def write_one_by_one(cache: torch.Tensor, tokens: torch.Tensor, slots: list[int]) -> torch.Tensor:
    expected = cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // BS, :, slot % BS] = tokens[token]
    return expected


@given(
    slots=st.lists(st.integers(0, NB * BS - 1), unique=True, max_size=12),
    holes=st.lists(st.integers(0, 12), max_size=4),
    index_dtype=st.sampled_from([torch.int64, torch.int32]),
    dtype=st.sampled_from(DTYPES),
    d_major=st.booleans(),
)
def test_each_token_lands_in_its_slot_and_minus_one_writes_nothing(
    slots: list[int],
    holes: list[int],
    index_dtype: torch.dtype,
    dtype: torch.dtype,
    d_major: bool,
) -> None:
    for hole in holes:
        slots.insert(min(hole, len(slots)), -1)
    fused = torch.randn(len(slots), 3 * K * D).to(dtype)
    k, v = (fused[:, i * K * D : (i + 1) * K * D].view(-1, K, D) for i in (0, 2))
    k_cache, v_cache = caches(dtype)
    if d_major:
        k_cache = as_d_major(k_cache)
    expected_k = write_one_by_one(k_cache, k, slots)
    expected_v = write_one_by_one(v_cache, v, slots)
    kv_write(k, v, k_cache, v_cache, torch.tensor(slots, dtype=index_dtype))
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


def test_only_padding_changes_nothing() -> None:
    k_cache, v_cache = caches()
    kept = k_cache.clone(), v_cache.clone()
    kv_write(torch.ones(3, K, D), torch.ones(3, K, D), k_cache, v_cache, torch.tensor([-1] * 3))
    assert torch.equal(k_cache, kept[0])
    assert torch.equal(v_cache, kept[1])


def test_one_kv_head_works() -> None:
    k_cache, v_cache = torch.zeros(3, 1, 4, 2), torch.zeros(3, 1, 4, 2)
    k, v = torch.randn(2, 1, 2), torch.randn(2, 1, 2)
    kv_write(k, v, k_cache, v_cache, torch.tensor([7, 8]))
    assert torch.equal(k_cache[1, :, 3], k[0])
    assert torch.equal(v_cache[2, :, 0], v[1])
    assert k_cache.count_nonzero() == 4


def test_the_promise_of_no_padding_spares_the_look_at_the_slots() -> None:
    k_cache, v_cache = caches()
    k, v = torch.randn(2, K, D), torch.randn(2, K, D)
    slots = torch.tensor([0, 19])
    expected = write_one_by_one(k_cache, k, [0, 19])
    with NoHostSync():
        kv_write(k, v, k_cache, v_cache, slots, may_skip=False)
        with pytest.raises(HostSyncError):
            kv_write(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected)


@pytest.mark.parametrize("slot", [-2, NB * BS, 10_000])
def test_a_slot_outside_the_cache_is_refused_with_nothing_written(slot: int) -> None:
    k_cache, v_cache = caches()
    kept = k_cache.clone()
    k = torch.zeros(2, K, D)
    with pytest.raises(ValueError, match=r"kv_write: slot_mapping must be -1 or in \[0, 20\), got"):
        kv_write(k, k, k_cache, v_cache, torch.tensor([0, slot]))
    assert torch.equal(k_cache, kept)
    with pytest.raises(ValueError, match=r"kv_write: slot_mapping must be in \[0, 20\)"):
        kv_write(k, k, k_cache, v_cache, torch.tensor([0, slot]), may_skip=False)


def test_a_broken_promise_of_no_padding_is_refused() -> None:
    k_cache, v_cache = caches()
    kept = k_cache.clone(), v_cache.clone()
    k = torch.zeros(1, K, D)
    with pytest.raises(ValueError, match=r"kv_write: slot_mapping must be in \[0, 20\)"):
        kv_write(k, k, k_cache, v_cache, torch.tensor([-1]), may_skip=False)
    assert torch.equal(k_cache, kept[0])
    assert torch.equal(v_cache, kept[1])


@pytest.mark.parametrize("d_major", [False, True])
def test_copies_read_every_source_first(d_major: bool) -> None:
    k_cache, v_cache = caches()
    if d_major:
        k_cache = as_d_major(k_cache)
    kept = k_cache.clone(), v_cache.clone()
    kv_copy_blocks(k_cache, v_cache, ((0, 3), (3, 1)))
    for cache, before in zip((k_cache, v_cache), kept, strict=True):
        assert torch.equal(cache[3], before[0])
        assert torch.equal(cache[1], before[3])
        assert torch.equal(cache[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_pairs_in_a_tensor_are_copied_and_minus_one_is_skipped(index_dtype: torch.dtype) -> None:
    k_cache, v_cache = caches()
    kept = k_cache.clone(), v_cache.clone()
    workspace = torch.empty(kv_copy_blocks.workspace_bytes(k_cache, 4), dtype=torch.uint8)
    pairs = torch.tensor([[0, 3], [-1, 2], [3, 1], [4, -1]], dtype=index_dtype)
    kv_copy_blocks(k_cache, v_cache, pairs, workspace=workspace)
    for cache, before in zip((k_cache, v_cache), kept, strict=True):
        assert torch.equal(cache, before[[0, 3, 2, 0, 4]])
    with pytest.raises(ValueError, match=r"kv_copy_blocks: pairs must have shape \[C, 2\]"):
        kv_copy_blocks(k_cache, v_cache, pairs[:, :1])
    with pytest.raises(ValueError, match=r"kv_copy_blocks: pairs must be int64 or int32"):
        kv_copy_blocks(k_cache, v_cache, pairs.float())
    with pytest.raises(ValueError, match=r"kv_copy_blocks: pairs must name each destination once"):
        kv_copy_blocks(k_cache, v_cache, pairs[[0, 0]])


def test_copying_nothing_is_fine() -> None:
    k_cache, v_cache = caches()
    kept = k_cache.clone()
    kv_copy_blocks(k_cache, v_cache, ())
    assert torch.equal(k_cache, kept)


def test_kv_ops_name_what_is_wrong() -> None:
    k_cache, v_cache = caches()
    k = torch.zeros(2, K, D)
    slots = torch.tensor([0, 1])
    with pytest.raises(
        ValueError, match=r"kv_write: v must have shape \[2, 2, 8\], got \[1, 2, 8\]"
    ):
        kv_write(k, k[:1], k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"kv_write: k must be torch.float32, got torch.float16"):
        kv_write(k.half(), k, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"kv_write: slot_mapping .* 2 entries, got"):
        kv_write(k, k, k_cache, v_cache, slots[:1])
    with pytest.raises(ValueError, match=r"kv_write: slot_mapping must be int64 or int32, got"):
        kv_write(k, k, k_cache, v_cache, slots.float())
    with pytest.raises(ValueError, match=r"kv_write: k_cache must be contiguous, or the transpose"):
        kv_write(k, k, k_cache[::2], v_cache[::2], slots)
    with pytest.raises(ValueError, match=r"kv_write: v_cache must be contiguous, got strides"):
        kv_write(k, k, k_cache, as_d_major(v_cache), slots)
    with pytest.raises(ValueError, match=r"kv_write: v_cache must have shape \[5, 2, 4, 8\]"):
        kv_write(k, k, k_cache, v_cache[:3], slots)
    with pytest.raises(ValueError, match=r"kv_copy_blocks: pairs .* ids in \[0, 5\), got \(0, 5\)"):
        kv_copy_blocks(k_cache, v_cache, ((0, 5),))
    with pytest.raises(ValueError, match=r"kv_copy_blocks: pairs .* in \[0, 5\), got \(-1, 1\)"):
        kv_copy_blocks(k_cache, v_cache, ((-1, 1),))
    with pytest.raises(ValueError, match=r"kv_copy_blocks: pairs must name each destination once"):
        kv_copy_blocks(k_cache, v_cache, ((0, 1), (2, 1)))
