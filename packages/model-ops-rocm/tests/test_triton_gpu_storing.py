"""Storing by Triton on a GPU: the bytes of the CPU in every recipe, and the division they need."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from syncline.model_ops_rocm import (
    CodedSource,
    CodeType,
    E4m3fnWeight,
    EncodeJob,
    Granularity,
    Quantised,
    Region,
    RowMajor,
    Shuffle16x16,
    StorageFormat,
    checksum_stored,
    detect_arch,
    full_region,
    select,
)
from syncline.model_ops_rocm.testing import allocate, encode_whole, every_recipe, uneven
from syncline.model_ops_rocm.testing.jobs import change, jobs_of_every_kind
from syncline.model_ops_rocm.triton import sealed

pytestmark = pytest.mark.gpu
BLOCK = 1 << 10
NUM_PAIRS = 1 << 24
# Below it no code is told from 0, and above it none is reached.
SMALLEST = 2.0**-20


def scales_between(low: int, high: int, generator: torch.Generator) -> torch.Tensor:
    """float32 of any significand, many of nearly all ones or zeros, and exponents in a range."""
    bits = torch.randint(0, 1 << 23, (NUM_PAIRS,), generator=generator, device="cuda")
    bits[::3] = (1 << 23) - 1 - bits[::3] % 64
    bits[1::7] = bits[1::7] % 64
    exponents = torch.randint(low, high, (NUM_PAIRS,), generator=generator, device="cuda")
    return ((exponents + 127 << 23) | bits).to(torch.int32).view(torch.float32)


def numerators(scales: torch.Tensor, generator: torch.Generator) -> Iterator[torch.Tensor]:
    shape = scales.shape
    powers = torch.randint(-30, 20, shape, generator=generator, device="cuda").float().exp2()
    yield torch.randn(shape, generator=generator, device="cuda") * powers * scales
    # Within two units of a quotient of few bits: a tie of some code, or halfway to its neighbour.
    few = torch.randint(1, 4_096, shape, generator=generator, device="cuda") * powers
    near = torch.randint(-2, 3, shape, generator=generator, device="cuda", dtype=torch.int32)
    yield ((few * scales).view(torch.int32) + near).view(torch.float32)
    bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, device="cuda")
    yield bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("exponents", [(-80, 100), (-30, 30)])
def test_products_give_the_quotient_of_an_exact_division(exponents: tuple[int, int]) -> None:
    from syncline.model_ops_rocm.triton.kernels.quotient_probe import quotients_kernel

    generator = torch.Generator("cuda").manual_seed(11)
    scales = scales_between(*exponents, generator)
    for x in numerators(scales, generator):
        # A quotient of 2^120 or more is not asked for; zeros of both signs are.
        x = torch.where(x.isfinite() & ((x / scales).abs() < 2.0**119), x, -0.0)
        x[::17] = 0
        products, divided = torch.empty_like(x), torch.empty_like(x)
        quotients_kernel[(NUM_PAIRS // BLOCK,)](x, scales, products, divided, BLOCK)
        counts = divided.abs() >= SMALLEST
        assert torch.equal(products[counts], divided[counts])
        assert (products[~counts].abs() < 2 * SMALLEST).all()
        assert torch.equal(products.signbit(), divided.signbit())
        on_cpu = x[:BLOCK].cpu() / scales[:BLOCK].cpu()
        assert torch.equal(divided[:BLOCK].cpu(), on_cpu)


@pytest.mark.parametrize("recipe", every_recipe(), ids=Quantised.describe)
def test_every_recipe_leaves_the_bytes_of_the_cpu(recipe: Quantised) -> None:
    encode = select("encode", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    storage, shape = StorageFormat(recipe=recipe), (130, 288)
    for factor in (1.0, 2.0**-140, 2.0**110):
        x = (uneven(*shape) * factor).bfloat16()
        out = {name: tensor.cuda() for name, tensor in allocate(storage, shape).items()}
        flag = torch.zeros(1, dtype=torch.bool, device="cuda")
        num_bytes = encode.workspace_bytes(storage, shape)
        workspace = torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device="cuda")
        job = EncodeJob.whole(storage, out, x.cuda())
        encode(job, nonfinite=flag, workspace=workspace)
        assert checksum_stored(out) == checksum_stored(encode_whole(storage, x))
        assert not flag.item()


@pytest.mark.parametrize("columns", [8_192, 12_296, 33_000])
def test_wide_rows_have_one_scale_however_many_blocks_hold_them(columns: int) -> None:
    storage = StorageFormat(recipe=Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FN))
    x = uneven(6, columns).bfloat16()
    out = {name: tensor.cuda() for name, tensor in allocate(storage, (6, columns)).items()}
    flag = torch.zeros(1, dtype=torch.bool, device="cuda")
    storage.encode_into(out, x.cuda(), full_region(x.shape), nonfinite=flag, backend="triton")
    assert checksum_stored(out) == checksum_stored(encode_whole(storage, x))


@pytest.mark.parametrize("layout", [RowMajor(), Shuffle16x16()], ids=lambda x: x.describe())
def test_codes_that_come_are_kept_where_they_belong(layout: RowMajor) -> None:
    recipe = Quantised(granularity=Granularity.BLOCK_128X128, code=CodeType.E4M3FN)
    stored = encode_whole(StorageFormat(recipe=recipe), uneven(256, 384))
    weight = E4m3fnWeight(codes=stored["weight"].cuda(), scale=stored["weight_scale"].cuda())
    source = CodedSource(weight=weight, granularity=recipe.granularity)
    storage = StorageFormat(recipe=recipe, layout=layout)
    out = {name: tensor.cuda() for name, tensor in allocate(storage, (256, 384)).items()}
    flag = torch.zeros(1, dtype=torch.bool, device="cuda")
    storage.encode_into(out, source, full_region(source.shape), nonfinite=flag, backend="triton")
    expected = allocate(storage, (256, 384))
    storage.encode_into(expected, source, full_region(source.shape))
    assert checksum_stored(out) == checksum_stored(expected)


def test_an_expert_behind_more_than_two_to_the_31_elements_is_stored_there() -> None:
    storage = StorageFormat(
        recipe=Quantised(granularity=Granularity.BLOCK_1X128, code=CodeType.E4M3FN)
    )
    shape = (66, 4_096, 8_192)
    out = {
        name: torch.zeros(spec.num_bytes, dtype=torch.uint8, device="cuda")
        .view(spec.dtype)
        .view(spec.shape)
        for name, spec in storage.storage_spec(shape).items()
    }
    assert out["weight"].numel() > 2**31
    region: Region = ((65, 66), (0, 4_096), (0, 8_192))
    x = uneven(1, 4_096, 8_192)
    source, flag = x.cuda(), torch.zeros(1, dtype=torch.bool, device="cuda")
    storage.encode_into(out, source, region, nonfinite=flag, backend="triton")
    last = {name: tensor[65:] for name, tensor in out.items()}
    assert checksum_stored(last) == checksum_stored(encode_whole(storage, x))
    assert not out["weight"].view(torch.uint8)[:65].any()
    # As one of many, too.
    grouped = select("encode_grouped", backend="triton", arch=detect_arch(), dtype=torch.float32)
    for tensor in last.values():
        tensor.view(torch.uint8).zero_()
    job = EncodeJob(storage, out, source[:, :2_048], ((65, 66), (0, 2_048), (0, 8_192)))
    below = replace(job, source=source[:, 2_048:], region=((65, 66), (2_048, 4_096), (0, 8_192)))
    num_bytes = grouped.workspace_bytes([(storage, shape)] * 2)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    grouped([below, job], nonfinite=flag, workspace=workspace)
    assert checksum_stored(last) == checksum_stored(encode_whole(storage, x))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_prepared_is_recorded_and_reads_what_its_tensors_hold_by_then(
    dtype: torch.dtype,
) -> None:
    grouped = select("encode_grouped", backend="triton", arch=detect_arch(), dtype=dtype)
    jobs, expected = jobs_of_every_kind("cuda", dtype), jobs_of_every_kind("cpu", dtype)
    wide = StorageFormat(recipe=Quantised(granularity=Granularity.TOKEN, code=CodeType.E4M3FN))
    for many, device in ((jobs, "cuda"), (expected, "cpu")):
        out = {name: one.to(device) for name, one in allocate(wide, (3, 33_000)).items()}
        many.append(EncodeJob.whole(wide, out, uneven(3, 33_000).to(dtype).to(device)))
    flag = torch.zeros(1, dtype=torch.bool, device="cuda")
    num_bytes = grouped.workspace_bytes([(job.storage_format, job.check()) for job in jobs])
    workspace = torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device="cuda")
    prepared = grouped.prepare(jobs, nonfinite=flag, workspace=workspace)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph = torch.cuda.CUDAGraph()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with sealed(), torch.cuda.graph(graph):
            prepared()  # the first call of all
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            prepared()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before >= taken
            with pytest.raises(ValueError, match=r"jobs must be prepared before a graph is rec"):
                grouped(jobs, nonfinite=flag, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = select("encode_grouped", dtype=dtype)
    for _ in range(2):
        change(jobs)
        change(expected)
        graph.replay()
        on_cpu(expected, nonfinite=torch.zeros(1, dtype=torch.bool))
        assert not flag.item()
        for job, other in zip(jobs, expected, strict=True):
            assert checksum_stored(job.out) == checksum_stored(other.out)
    source = jobs[0].source
    assert isinstance(source, torch.Tensor)
    source[-1, -1] = float("nan")
    graph.replay()
    assert flag.item()


def test_codes_that_come_are_stored_in_a_recorded_graph() -> None:
    encode = select("encode", backend="triton", arch=detect_arch(), dtype=torch.float32)
    jobs = [job for job in jobs_of_every_kind("cuda") if isinstance(job.source, CodedSource)]
    expected = [job for job in jobs_of_every_kind() if isinstance(job.source, CodedSource)]
    flag = torch.zeros(1, dtype=torch.bool, device="cuda")
    for job in jobs:
        encode(job, nonfinite=flag)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for job in jobs:
            encode(job, nonfinite=flag)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    change(jobs)
    change(expected)
    graph.replay()
    for job, other in zip(jobs, expected, strict=True):
        other.storage_format.encode_into(other.out, other.source, other.region)
        assert checksum_stored(job.out) == checksum_stored(other.out)
    assert not flag.item()
