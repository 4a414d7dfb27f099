"""KV layouts: the address of each slot by hand, sizes, conversions, and tokens there and back."""

from collections.abc import Callable

import pytest
import torch

from syncline.model_ops_rocm import LayoutError, select
from syncline.model_ops_rocm.kv import (
    KVLayout,
    KVOrder,
    KVPool,
    KVScale,
    Side,
    logical_caches,
    read_tokens,
    write_tokens,
)
from syncline.model_ops_rocm.quant import FP8_MAX, per_token_fp8_encode
from syncline.model_ops_rocm.testing.bits import flat_bits, random_bits
from syncline.model_ops_rocm.testing.goldens import GoldenCase, flag

NUM_HEADS, HEAD_DIM = 2, 32
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, torch.float16, FP8, torch.float8_e4m3fnuz)


def pool_of(
    order: KVOrder,
    dtype: torch.dtype = torch.bfloat16,
    *,
    scale: KVScale = KVScale.NONE,
    block_size: int = 32,
) -> KVPool:
    """Three blocks of the manager's, of kernel blocks of 16 slots."""
    layout = KVLayout(order=order, dtype=dtype, kernel_block_size=16, scale=scale)
    return KVPool(
        layout=layout,
        num_blocks=3,
        block_size=block_size,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
    )


# block, head, offset, dim, elements in 16 bytes -> address; kernel blocks of 16 slots.
Formula = Callable[[int, int, int, int, int], int]


def nhd(b: int, h: int, o: int, d: int, _: int) -> int:
    return ((b * 16 + o) * NUM_HEADS + h) * HEAD_DIM + d


def hnd(b: int, h: int, o: int, d: int, _: int) -> int:
    return ((b * NUM_HEADS + h) * 16 + o) * HEAD_DIM + d


def d_major(b: int, h: int, o: int, d: int, _: int) -> int:
    return ((b * NUM_HEADS + h) * HEAD_DIM + d) * 16 + o


def x_keys(b: int, h: int, o: int, d: int, x: int) -> int:
    return (((b * NUM_HEADS + h) * (HEAD_DIM // x) + d // x) * 16 + o) * x + d % x


def x_values(b: int, h: int, o: int, d: int, x: int) -> int:
    return (((b * NUM_HEADS + h) * (16 // x) + o // x) * HEAD_DIM + d) * x + o % x


FORMULAS: dict[KVOrder, tuple[Formula, Formula]] = {
    KVOrder.NHD: (nhd, nhd),
    KVOrder.HND: (hnd, hnd),
    KVOrder.HND_D_MAJOR_KEYS: (d_major, hnd),
    KVOrder.AITER_X: (x_keys, d_major),
    KVOrder.AITER_X_SHUFFLED_V: (x_keys, x_values),
}


@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_slot_is_where_the_formula_says(order: KVOrder, dtype: torch.dtype) -> None:
    pool = pool_of(order, dtype)
    slots = torch.arange(pool.num_slots)
    sides: tuple[Side, Side] = ("k", "v")
    for side, formula in zip(sides, FORMULAS[order], strict=True):
        by_hand = [
            [
                [formula(*divmod_slot(slot, head), d, 16 // dtype.itemsize) for d in range(32)]
                for head in range(NUM_HEADS)
            ]
            for slot in range(pool.num_slots)
        ]
        addresses = pool.addresses(side, slots)
        assert addresses.tolist() == by_hand
        assert addresses.reshape(-1).sort().values.tolist() == list(range(addresses.numel()))
        for slot in (0, 15, 16, 63, 95):
            assert pool.address(side, slot, 1, 19) == by_hand[slot][1][19]
        logical = random_bits(pool.logical_shape, dtype)
        stored = pool.from_logical(side, logical)
        assert stored.shape == pool.specs()[side].shape
        by_slot = flat_bits(stored)[addresses].view(6, 16, NUM_HEADS, HEAD_DIM).transpose(1, 2)
        assert torch.equal(by_slot.reshape(-1), flat_bits(logical))
        assert torch.equal(flat_bits(pool.to_logical(side, stored)), flat_bits(logical))


def divmod_slot(slot: int, head: int) -> tuple[int, int, int]:
    return slot // 16, head, slot % 16


def test_the_shapes_are_those_that_kernels_expect() -> None:
    shapes = {
        order: tuple(spec.shape for spec in pool_of(order).specs().values()) for order in KVOrder
    }
    assert shapes == {
        KVOrder.NHD: ((6, 16, 2, 32), (6, 16, 2, 32)),
        KVOrder.HND: ((6, 2, 16, 32), (6, 2, 16, 32)),
        KVOrder.HND_D_MAJOR_KEYS: ((6, 2, 32, 16), (6, 2, 16, 32)),
        KVOrder.AITER_X: ((6, 2, 4, 16, 8), (6, 2, 32, 16)),
        KVOrder.AITER_X_SHUFFLED_V: ((6, 2, 4, 16, 8), (6, 2, 2, 32, 8)),
    }
    in_fp8 = pool_of(KVOrder.AITER_X_SHUFFLED_V, FP8).specs()
    assert in_fp8["k"].shape == (6, 2, 2, 16, 16)
    assert in_fp8["v"].shape == (6, 2, 1, 32, 16)


@pytest.mark.parametrize(
    ("scale", "order", "shape"),
    [
        (KVScale.TENSOR, KVOrder.HND, (1,)),
        (KVScale.HEAD, KVOrder.NHD, (2,)),
        (KVScale.TOKEN, KVOrder.NHD, (6, 16, 2)),
        (KVScale.TOKEN, KVOrder.HND, (6, 2, 16)),
        (KVScale.TOKEN, KVOrder.AITER_X, (2, 6, 16)),
        (KVScale.TOKEN, KVOrder.AITER_X_SHUFFLED_V, (6, 2, 16)),
    ],
)
def test_scales_have_their_place(scale: KVScale, order: KVOrder, shape: tuple[int, ...]) -> None:
    pool = pool_of(order, FP8, scale=scale)
    for name in ("k_scale", "v_scale"):
        assert pool.specs()[name].shape == shape
        assert pool.specs()[name].dtype == torch.float32
    stored = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    logical = pool.to_logical("k_scale", stored)
    assert logical.shape == pool.scale_shape
    assert torch.equal(pool.from_logical("k_scale", logical), stored)
    for slot, head in ((0, 0), (17, 1), (95, 1), (40, 0)):
        block, offset = divmod(slot, 16)
        index = {KVScale.TENSOR: (0,), KVScale.HEAD: (head,)}.get(scale, (block, head, offset))
        assert stored.view(-1)[pool.scale_address(slot, head)] == logical[index]


@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("scale", KVScale)
def test_the_bytes_add_up(order: KVOrder, scale: KVScale) -> None:
    pool = pool_of(order, FP8, scale=scale)
    tensors = [torch.empty(spec.shape, dtype=spec.dtype) for spec in pool.specs().values()]
    assert pool.num_bytes == sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    fixed = {KVScale.TENSOR: 2 * 4, KVScale.HEAD: 2 * NUM_HEADS * 4}.get(scale, 0)
    assert pool.num_bytes == pool.bytes_per_block * pool.num_blocks + fixed
    assert pool_of(order).bytes_per_block == 2 * NUM_HEADS * HEAD_DIM * 2 * 32


def poisoned(pool: KVPool) -> dict[str, torch.Tensor]:
    tensors = {}
    for seed, (name, spec) in enumerate(pool.specs().items()):
        tensors[name] = random_bits(spec.shape, spec.dtype, seed)
    if pool.layout.scale in (KVScale.TENSOR, KVScale.HEAD):
        tensors["k_scale"].copy_(torch.arange(1, tensors["k_scale"].numel() + 1) / 64)
        tensors["v_scale"].copy_(torch.arange(1, tensors["v_scale"].numel() + 1) / 256)
    return tensors


SLOTS = torch.tensor([31, 3, -1, 95, 16, 64], dtype=torch.int32)
KEPT = SLOTS[SLOTS >= 0]


@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_come_back_bit_for_bit_and_nothing_else_changes(
    order: KVOrder, dtype: torch.dtype
) -> None:
    pool = pool_of(order, dtype)
    tensors = poisoned(pool)
    before = read_bits(pool, tensors)
    k, v = (random_bits((6, NUM_HEADS, HEAD_DIM), dtype, seed) for seed in (5, 6))
    write_tokens(pool, tensors, k, v, SLOTS)
    after = read_bits(pool, tensors)
    for side, source in enumerate((k, v)):
        wanted = before[side].clone()
        wanted[KEPT.long()] = flat_bits(source).view(source.shape)[SLOTS >= 0]
        assert torch.equal(after[side], wanted)


def read_bits(pool: KVPool, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """All tokens as integers [slot, head, dim]."""
    read = read_tokens(pool, tensors, torch.arange(pool.num_slots))
    return [flat_bits(side).view(side.shape) for side in read]


@pytest.mark.parametrize("order", KVOrder)
@pytest.mark.parametrize("scale", [KVScale.TENSOR, KVScale.HEAD, KVScale.TOKEN])
@pytest.mark.parametrize("dtype", [FP8, torch.float8_e4m3fnuz])
def test_scaled_tokens_come_back_rounded_once(
    order: KVOrder, scale: KVScale, dtype: torch.dtype
) -> None:
    pool = pool_of(order, dtype, scale=scale)
    tensors = poisoned(pool)
    generator = torch.Generator().manual_seed(7)
    k, v = torch.randn((2, 6, NUM_HEADS, HEAD_DIM), generator=generator).bfloat16()
    v[1] *= 1000  # beyond what the given scales can hold: clamped, never NaN
    k[3, 0] = 0
    write_tokens(pool, tensors, k, v, SLOTS)
    read = read_tokens(pool, tensors, KEPT)
    limit = FP8_MAX[dtype]
    for name, source, got in zip(("k", "v"), (k, v), read, strict=True):
        numbers = source[SLOTS >= 0].float()
        if scale == KVScale.TOKEN:
            codes, scales = per_token_fp8_encode(numbers, dtype)
        else:
            scales = tensors[f"{name}_scale"].view(1, -1, 1)
            codes = (numbers / scales).clamp(-limit, limit).to(dtype)
        assert got.dtype == torch.float32
        assert torch.equal(got, codes.float() * scales)
        assert got.isfinite().all()


@pytest.mark.parametrize("order", KVOrder)
def test_every_order_means_what_the_torch_backend_attends(order: KVOrder) -> None:
    pool = pool_of(order, torch.float32)
    tensors = {name: torch.zeros(spec.shape) for name, spec in pool.specs().items()}
    k, v = (
        torch.randn((6, NUM_HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    write_tokens(pool, tensors, k, v, SLOTS)
    k_cache, v_cache = torch.zeros(2, *pool.logical_shape)
    select("kv_write", dtype=torch.float32)(k, v, k_cache, v_cache, SLOTS)
    k_read, v_read = logical_caches(pool, tensors)
    assert torch.equal(k_read, k_cache)
    assert torch.equal(v_read, v_cache)
    assert k_read.is_contiguous() and v_read.is_contiguous()


def test_a_slot_keeps_its_number_in_kernel_blocks() -> None:
    layout = KVLayout(order=KVOrder.HND, dtype=torch.bfloat16, kernel_block_size=16)
    tables = torch.tensor([[2, 0, -7], [1, -7, -7]], dtype=torch.int32)
    kernel_tables = layout.kernel_block_tables(tables, 64)
    assert kernel_tables.dtype == torch.int32
    assert kernel_tables.shape == (2, 12)
    assert kernel_tables[0, :8].tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
    assert (kernel_tables[1, 4:] < 0).all()
    for position in (0, 5, 16, 63, 64, 127):
        slot = int(tables[0, position // 64]) * 64 + position % 64
        assert slot == int(kernel_tables[0, position // 16]) * 16 + position % 16
    assert torch.equal(layout.kernel_block_tables(tables[:, :2], 16), tables[:, :2])


@pytest.mark.parametrize("block_size", [0, 8, 24])
def test_kernel_blocks_must_fill_the_managers(block_size: int) -> None:
    wanted = f"a block_size that is a multiple of 16, got {block_size}"
    layout = KVLayout(order=KVOrder.HND, dtype=torch.bfloat16, kernel_block_size=16)
    with pytest.raises(LayoutError, match=wanted):
        layout.kernel_blocks_per_block(block_size)
    if block_size:
        with pytest.raises(LayoutError, match=wanted):
            pool_of(KVOrder.HND, block_size=block_size)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"order": "hnd"}, "order must be a KVOrder, got 'hnd'"),
        ({"scale": "none"}, "scale must be a KVScale, got 'none'"),
        ({"dtype": torch.int8}, "dtype must be one of .*, got torch.int8"),
        ({"kernel_block_size": 0}, "kernel_block_size must be positive, got 0"),
        ({"scale": KVScale.TOKEN}, "scale must be none for torch.bfloat16.*, got token"),
        (
            {"order": KVOrder.AITER_X_SHUFFLED_V, "kernel_block_size": 12},
            "kernel_block_size must be a multiple of 8 for aiter_x_shuffled_v .*, got 12",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    good = {"order": KVOrder.HND, "dtype": torch.bfloat16, "kernel_block_size": 16}
    with pytest.raises(ValueError, match=message):
        KVLayout(**{**good, **fields})  # type: ignore[arg-type]  # wrong types on purpose


def test_a_pool_that_cannot_be_is_refused() -> None:
    layout = KVLayout(order=KVOrder.AITER_X, dtype=torch.bfloat16, kernel_block_size=16)
    with pytest.raises(LayoutError, match="a head_dim that is a multiple of 8, got 20"):
        KVPool(layout=layout, num_blocks=1, block_size=16, num_kv_heads=1, head_dim=20)
    for field in ("num_blocks", "num_kv_heads", "head_dim"):
        sizes = {"num_blocks": 1, "num_kv_heads": 1, "head_dim": 16, field: 0}
        with pytest.raises(ValueError, match=f"{field} must be positive, got 0"):
            KVPool(layout=layout, block_size=16, **sizes)


def test_layouts_are_values_with_names_that_differ() -> None:
    layouts = [
        KVLayout(order=order, dtype=dtype, kernel_block_size=size, scale=scale)
        for order in KVOrder
        for dtype in (torch.bfloat16, FP8)
        for size in (16, 64)
        for scale in (KVScale if dtype == FP8 else (KVScale.NONE,))
    ]
    assert len(set(layouts)) == len({layout.describe() for layout in layouts}) == len(layouts)
    layouts[0].require_accepted("paged_attention", layouts[:2])
    with pytest.raises(LayoutError, match=r"paged_attention to take it, got nhd/bfloat16/16"):
        layouts[1].require_accepted("paged_attention", layouts[:1])
    with pytest.raises(LayoutError, match=r"kv_write to take it, got nothing"):
        layouts[1].require_accepted("kv_write", ())


def test_a_write_that_does_not_fit_is_refused_with_nothing_written() -> None:
    pool = pool_of(KVOrder.HND, FP8, scale=KVScale.HEAD)
    tensors = poisoned(pool)
    kept = {name: flat_bits(tensor).clone() for name, tensor in tensors.items()}
    k = torch.zeros((2, NUM_HEADS, HEAD_DIM))
    slots = torch.tensor([0, 1])
    bad = {**tensors, "k": tensors["k"].transpose(2, 3)}
    with pytest.raises(LayoutError, match=r"k of torch.float8_e4m3fn \[6, 2, 16, 32\]"):
        write_tokens(pool, bad, k, k, slots)
    with pytest.raises(LayoutError, match=r"tensors named \['k', 'k_scale', 'v', 'v_scale'\]"):
        write_tokens(pool, {"k": tensors["k"]}, k, k, slots)
    with pytest.raises(LayoutError, match=r"k in contiguous storage"):
        apart = torch.empty((6, 2, 32, 16), dtype=FP8).transpose(2, 3)
        write_tokens(pool, {**tensors, "k": apart}, k, k, slots)
    with pytest.raises(ValueError, match=r"v must have shape \[2, 2, 32\]"):
        write_tokens(pool, tensors, k, k[:1], slots)
    with pytest.raises(ValueError, match=r"k must be of at least 16-bit floating point"):
        write_tokens(pool, tensors, k.to(FP8), k, slots)
    for wrong in ([0, 96], [-2, 0]):
        with pytest.raises(ValueError, match=r"slots must be -1 or in \[0, 96\)"):
            write_tokens(pool, tensors, k, k, torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"name each slot once, got \[5, 5\]"):
        write_tokens(pool, tensors, k, k, torch.tensor([5, 5]))
    with pytest.raises(ValueError, match=r"slots must be in \[0, 96\), got -1"):
        read_tokens(pool, tensors, torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"v_scale must be finite and positive"):
        zeros = {**tensors, "v_scale": torch.zeros(NUM_HEADS)}
        write_tokens(pool, zeros, k, k, slots)
    with pytest.raises(LayoutError, match=r"a tensor named one of"):
        pool.to_logical("scale", tensors["k"])
    with pytest.raises(LayoutError, match=r"v of torch.float8_e4m3fn \[6, 2, 16, 32\]"):
        pool.from_logical("v", k)
    with pytest.raises(LayoutError, match=r"requires scales"):
        pool_of(KVOrder.HND).scale_address(0, 0)
    with pytest.raises(ValueError, match=r"k must be torch.bfloat16"):
        plain = pool_of(KVOrder.HND)
        write_tokens(plain, poisoned(plain), k, k, slots)
    assert all(torch.equal(flat_bits(tensor), kept[name]) for name, tensor in tensors.items())


@pytest.mark.golden
def test_pools_equal_what_aiter_recorded(goldens: Callable[[str], list[GoldenCase]]) -> None:
    for case in goldens("kv_cache_layout"):
        check_golden(case)


def check_golden(case: GoldenCase) -> None:
    recorded = case.tensors
    shuffled = flag(case.args, "asm_layout")
    k, v = (recorded[name].flatten(0, 1) for name in ("key", "value"))
    num_blocks, num_kv_heads, _, block_size, _ = recorded["k_cache"].shape
    pool = KVPool(
        layout=KVLayout(
            order=KVOrder.AITER_X_SHUFFLED_V if shuffled else KVOrder.AITER_X,
            dtype=recorded["k_cache"].dtype,
            kernel_block_size=block_size,
            scale=KVScale.TOKEN if "k_scale" in recorded else KVScale.NONE,
        ),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=k.shape[-1],
    )
    tensors = {
        name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in pool.specs().items()
    }
    write_tokens(pool, tensors, k, v, recorded["slot_mapping"])
    for name, tensor in tensors.items():
        golden = recorded[name if name.endswith("scale") else f"{name}_cache"]
        assert golden.numel() == tensor.numel(), (str(case), name)
        if name in ("k", "v"):
            assert tensor.shape == golden.shape, (str(case), name)
        assert torch.equal(flat_bits(tensor), flat_bits(golden)), (str(case), name)
