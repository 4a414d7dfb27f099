"""Storing by Triton beyond the parity cases: codes that come, limits, refusals, many at once."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest
import torch

from syncline.model_ops_rocm import (
    AmaxInto,
    CodedSource,
    CodeType,
    E4m3fnuzWeight,
    E4m3fnWeight,
    Encode,
    EncodeGrouped,
    EncodeJob,
    FormatError,
    Granularity,
    Padding,
    PerTokenFp8,
    Quantised,
    RowMajor,
    Shuffle16x16,
    StorageFormat,
    Unquantised,
    checksum_stored,
    full_region,
    select,
)
from syncline.model_ops_rocm.layouts import e8m0_shuffle, scale_tiles
from syncline.model_ops_rocm.testing import allocate, encode_whole, every_recipe, uneven
from syncline.model_ops_rocm.testing.jobs import change, jobs_of_every_kind
from syncline.model_ops_rocm.triton import BACKEND

FN, FNUZ = CodeType.E4M3FN, CodeType.E4M3FNUZ
TOKEN = Granularity.TOKEN
Ops = tuple[Encode, EncodeGrouped]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(scope="module")
def ops(kernels: Mapping[str, object]) -> Ops:
    loaded = kernels
    return cast(Encode, loaded["encode"]), cast(EncodeGrouped, loaded["encode_grouped"])


def flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.bool)


def workspace() -> torch.Tensor:
    return torch.full((8_192,), 0xA5, dtype=torch.uint8)


def recipe(granularity: Granularity, code: CodeType = FN) -> Quantised:
    return Quantised(granularity=granularity, code=code)


def coded(made_by: Quantised, x: torch.Tensor) -> CodedSource:
    stored = encode_whole(StorageFormat(recipe=made_by), x)
    kind = E4m3fnWeight if made_by.code is FN else E4m3fnuzWeight
    weight = kind(codes=stored["weight"], scale=stored["weight_scale"])
    return CodedSource(weight=weight, granularity=made_by.granularity)


@pytest.mark.parametrize("each", every_recipe()[::11], ids=Quantised.describe)
def test_a_recipe_at_its_limits_leaves_the_bytes_of_the_reference(
    ops: Ops, each: Quantised
) -> None:
    storage = StorageFormat(recipe=each)
    for factor in (2.0**-140, 2.0**-80, 2.0**118):
        x = uneven(5, 130) * factor
        stored, raised = allocate(storage, (5, 130)), flag()
        job = EncodeJob.whole(storage, stored, x)
        ops[0](job, nonfinite=raised, workspace=workspace())
        assert checksum_stored(stored) == checksum_stored(encode_whole(storage, x))
        assert not raised.item()


SQUARES = recipe(Granularity.BLOCK_128X128)


@pytest.mark.parametrize(
    ("made_by", "storage"),
    [
        (
            recipe(Granularity.BLOCK_128X128),
            StorageFormat(recipe=recipe(Granularity.BLOCK_128X128)),
        ),
        (
            recipe(Granularity.TOKEN),
            StorageFormat(recipe=recipe(Granularity.TOKEN, FNUZ), layout=Shuffle16x16()),
        ),
        (
            recipe(Granularity.BLOCK_1X128),
            StorageFormat(
                recipe=recipe(Granularity.BLOCK_1X128),
                padding=Padding(rows=48, columns=160, row_multiple=64, column_multiple=512),
            ),
        ),
        (recipe(Granularity.BLOCK_1X128, FNUZ), StorageFormat(recipe=PerTokenFp8())),
        (recipe(Granularity.TOKEN), StorageFormat(recipe=Unquantised(torch.bfloat16))),
    ],
    ids=str,
)
def test_codes_are_kept_or_encoded_anew_as_the_reference_does(
    ops: Ops, made_by: Quantised, storage: StorageFormat
) -> None:
    shape = (48, 160)
    source = coded(made_by, uneven(*shape))
    expected, alone, among = (allocate(storage, shape) for _ in range(3))
    storage.encode_into(expected, source, full_region(shape))
    ops[0](EncodeJob.whole(storage, alone, source), nonfinite=flag())
    ops[1]([EncodeJob.whole(storage, among, source)], nonfinite=flag(), workspace=workspace())
    assert checksum_stored(alone) == checksum_stored(among) == checksum_stored(expected)


def test_numbers_of_codes_are_those_of_pytorch_for_every_byte_and_type_of_scale(ops: Ops) -> None:
    every_byte = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(2, 3, 2)
    powers = torch.tensor([[0, 254, 130], [127, 1, 100]], dtype=torch.uint8)
    for dtype, kind in (
        (torch.float8_e4m3fn, E4m3fnWeight),
        (torch.float8_e4m3fnuz, E4m3fnuzWeight),
    ):
        codes = every_byte.view(dtype)
        for scale in (
            powers[..., None].view(torch.float8_e8m0fnu),
            torch.tensor([[2.0**-140, 3.0, 1e30], [0.1, 7.5, 1e-30]])[..., None],
        ):
            weight = kind(codes=codes, scale=scale)
            source = CodedSource(weight=weight, granularity=Granularity.TOKEN)
            storage = StorageFormat(recipe=Unquantised(torch.float32))
            stored = allocate(storage, tuple(codes.shape))
            ops[0](EncodeJob.whole(storage, stored, source))
            numbers = source.numbers()
            assert torch.equal(stored["weight"].isnan(), numbers.isnan())
            assert torch.equal(stored["weight"].nan_to_num(), numbers.nan_to_num())


def test_codes_with_scales_of_their_own_come_under_a_common_one(ops: Ops) -> None:
    storage, shape = StorageFormat(recipe=recipe(Granularity.TENSOR)), (2, 48, 64)
    x, cuts = uneven(*shape), ((0, 16), (16, 40), (40, 48))
    parts = [coded(recipe(Granularity.BLOCK_128X128), x[:, start:stop]) for start, stop in cuts]
    loaded = BACKEND.load()["amax_into"]
    ours, theirs = storage.new_amax(shape), storage.new_amax(shape)
    stored, expected = allocate(storage, shape), allocate(storage, shape)
    for part, cut in zip(parts, cuts, strict=True):
        cast(AmaxInto, loaded)(storage, ours, part, ((0, 2), cut, (0, 64)))
        storage.amax_into(theirs, part, ((0, 2), cut, (0, 64)))
    assert torch.equal(ours.bits, theirs.bits)
    scales = storage.scales(ours)
    for part, cut in zip(parts, cuts, strict=True):
        region = ((0, 2), cut, (0, 64))
        ops[0](EncodeJob(storage, stored, part, region, scales), nonfinite=flag())
        storage.encode_into(expected, part, region, scales=scales)
    assert checksum_stored(stored) == checksum_stored(expected)


def test_kept_scales_go_to_a_layout_of_their_own_with_its_padding(ops: Ops) -> None:
    made_by = replace(every_recipe()[-8], granularity=Granularity.BLOCK_1X32, code=FN)
    for layout in (e8m0_shuffle(), scale_tiles(pad_rows=True)):
        storage = StorageFormat(recipe=made_by, scale_layout=layout)
        expected, stored = (allocate(storage, (40, 384)) for _ in range(2))
        source = coded(made_by, uneven(40, 384))
        assert storage.keeps(source)
        storage.encode_into(expected, source, full_region((40, 384)))
        ops[0](EncodeJob.whole(storage, stored, source), nonfinite=flag())
        assert checksum_stored(stored) == checksum_stored(expected)


def test_a_bfloat16_source_is_read_as_what_it_is(ops: Ops) -> None:
    # The interpreter has no bfloat16 of its own; every finite pattern goes through.
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).reshape(512, 128)
    x = torch.where(x.isfinite(), x, torch.zeros_like(x))
    for storage in (
        StorageFormat(recipe=recipe(Granularity.BLOCK_1X128)),
        StorageFormat(recipe=Unquantised(torch.float32)),
    ):
        stored = allocate(storage, (512, 128))
        ops[0](EncodeJob.whole(storage, stored, x), nonfinite=flag())
        assert checksum_stored(stored) == checksum_stored(encode_whole(storage, x))
    storage, y = StorageFormat(recipe=Unquantised(torch.bfloat16)), uneven(64, 33)
    stored = allocate(storage, (64, 33))
    ops[0](EncodeJob.whole(storage, stored, y))
    assert checksum_stored(stored) == checksum_stored(encode_whole(storage, y))


def test_what_this_backend_cannot_take_is_refused_before_a_byte_is_stored(ops: Ops) -> None:
    encode, grouped = ops
    storage = StorageFormat(recipe=PerTokenFp8())
    stored, x = allocate(storage, (4, 32)), uneven(4, 32)
    kept = checksum_stored(stored)
    job = EncodeJob.whole(storage, stored, x)
    with pytest.raises(ValueError, match=r"encode: nonfinite must be given: this backend does not"):
        encode(job)
    with pytest.raises(ValueError, match=r"encode: source must be float32, bfloat16 or float16"):
        encode(replace(job, source=x.double()), nonfinite=flag())
    with pytest.raises(FormatError, match=r"a source of shape \[4, 32\], got \[3, 32\]"):
        encode(replace(job, source=x[:3]), nonfinite=flag())
    tensor = StorageFormat(recipe=recipe(Granularity.TENSOR))
    per_tensor = EncodeJob.whole(tensor, allocate(tensor, (4, 32)), x)
    with pytest.raises(ValueError, match=r"encode: workspace must be contiguous uint8 with at le"):
        encode(per_tensor, nonfinite=flag(), workspace=workspace()[:3])
    with pytest.raises(ValueError, match=r"workspace must be contiguous uint8 with at least 512"):
        other = replace(job, out=allocate(storage, (4, 32)))
        grouped([job, other], nonfinite=flag(), workspace=workspace()[:511])
    with pytest.raises(ValueError, match=r"encode_grouped: workspace must start at a multiple of"):
        grouped([job], nonfinite=flag(), workspace=workspace()[1:])
    with pytest.raises(
        ValueError, match=r"encode: scales must be contiguous, got strides \(2, 1\)"
    ):
        encode(replace(job, scales=torch.ones(4, 2)[:, :1]), nonfinite=flag())
    double = StorageFormat(recipe=Unquantised(torch.float64))
    with pytest.raises(FormatError, match=r"requires float32, bfloat16 or float16 storage, got fl"):
        encode(EncodeJob.whole(double, {"weight": torch.zeros(4, 32).double()}, x))
    # Jobs like the first one, but for the tensors that they would be stored in, or their scales.
    wrong = [
        replace(job, out={**stored, "weight_scale": torch.zeros(8, 1)[::2]}),
        job,
        replace(job, source=x[:3]),
        replace(job, scales=torch.ones(4, 2)[:, :1]),
    ]
    with pytest.raises(ValueError) as caught:
        grouped([job, *wrong], nonfinite=flag(), workspace=workspace())
    told = str(caught.value).removeprefix("encode_grouped: ").split("; ")
    limits = (
        "weight_scale in contiguous",
        "a source of shape [4, 32]",
        "scales must be contiguous",
    )
    for one, index, limit in zip(told, (1, 3, 4), limits, strict=True):
        assert one.startswith(f"jobs[{index}]: ") and limit in one
    fnuz = StorageFormat(recipe=recipe(Granularity.TOKEN, FNUZ))
    converted = EncodeJob.whole(fnuz, allocate(fnuz, (4, 32)), coded(recipe(Granularity.TOKEN), x))
    with pytest.raises(ValueError, match=r"jobs\[1\]: .* converted with a look at the host"):
        grouped.prepare([job, converted], nonfinite=flag(), workspace=workspace())
    assert checksum_stored(stored) == kept


def test_many_weights_of_one_kind_are_each_stored_in_their_place(ops: Ops) -> None:
    storage = StorageFormat(recipe=recipe(Granularity.BLOCK_1X128), layout=RowMajor())
    shapes = [(1 + number * 7 % 40, 128) for number in range(9)]
    sources = [uneven(*shape) * (number + 1) for number, shape in enumerate(shapes)]
    jobs = [EncodeJob.whole(storage, allocate(storage, tuple(x.shape)), x) for x in sources]
    # One with its scales given, one that is a part.
    jobs[3] = replace(jobs[3], scales=torch.full((shapes[3][0], 1), 0.5))
    jobs[5] = replace(jobs[5], source=sources[5][2:9], region=((2, 9), (0, 128)))
    raised = flag()
    num_bytes = ops[1].workspace_bytes((storage, shape) for shape in shapes)
    prepared = ops[1].prepare(
        jobs, nonfinite=raised, workspace=torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
    )
    assert prepared.num_launches == 2  # of which one has its scales given
    prepared()
    assert not raised.item()
    for job in jobs:
        expected = allocate(storage, tuple(job.out["weight"].shape))
        storage.encode_into(expected, job.source, job.region, scales=job.scales)
        assert checksum_stored(job.out) == checksum_stored(expected)
    sources[7][0, 5] = float("nan")
    prepared()
    assert raised.item()
    assert jobs[7].out["weight_scale"][0].isnan().all()


def test_a_job_is_like_another_one_only_in_all_that_is_checked(ops: Ops) -> None:
    storage = StorageFormat(recipe=PerTokenFp8())
    jobs = [EncodeJob.whole(storage, allocate(storage, (4, 32)), uneven(4, 32)) for _ in range(8)]
    out, x = jobs[1].out, jobs[1].source
    assert isinstance(x, torch.Tensor)
    jobs[1] = replace(jobs[1], out={"weight": out["weight"]})
    jobs[2] = replace(jobs[2], out={"weight_scale": out["weight_scale"]})
    jobs[3] = replace(jobs[3], out={**jobs[3].out, "bias": torch.zeros(4)})
    jobs[4] = replace(jobs[4], out={**jobs[4].out, "weight": out["weight"].to("meta")})
    jobs[5] = replace(jobs[5], source=x.to("meta"))
    jobs[6] = replace(jobs[6], source=x.double(), storage_format=replace(storage))
    with pytest.raises(ValueError) as caught:
        ops[1].prepare(jobs, nonfinite=flag(), workspace=workspace())
    told = str(caught.value).removeprefix("encode_grouped: ").split("; ")
    assert [one.split(":")[0] for one in told] == [f"jobs[{index}]" for index in range(1, 7)]


def test_maxima_are_made_in_memory_that_is_not_given_too(ops: Ops) -> None:
    formats = [StorageFormat(recipe=recipe(Granularity.TENSOR)) for _ in range(3)]  # all equal
    jobs = [
        EncodeJob.whole(storage, allocate(storage, (5, 70)), uneven(5, 70) * (number + 1))
        for number, storage in enumerate(formats)
    ]
    prepared = ops[1].prepare(jobs, nonfinite=flag())
    assert prepared.num_launches == 3
    prepared()
    for job in jobs:
        expected = allocate(job.storage_format, (5, 70))
        job.storage_format.encode_into(expected, job.source, job.region)
        assert checksum_stored(job.out) == checksum_stored(expected)


def test_what_is_prepared_stores_what_its_tensors_hold_by_then(ops: Ops) -> None:
    jobs, expected, raised = jobs_of_every_kind(), jobs_of_every_kind(), flag()
    weights = [(job.storage_format, job.check(nonfinite=raised)) for job in jobs]
    poisoned = torch.full((ops[1].workspace_bytes(weights),), 0xA5, dtype=torch.uint8)
    prepared = ops[1].prepare(jobs, nonfinite=raised, workspace=poisoned)
    reference = select("encode_grouped", dtype=torch.float32).prepare(expected, nonfinite=flag())
    for _ in range(2):
        prepared()
        reference()
        assert not raised.item()
        for index, (job, other) in enumerate(zip(jobs, expected, strict=True)):
            assert checksum_stored(job.out) == checksum_stored(other.out), index
        change(jobs)
        change(expected)


@pytest.mark.parametrize("of_scales", [False, True])
@pytest.mark.parametrize("code", [FN, FNUZ])
def test_kept_codes_that_are_no_number_raise_the_flag(
    ops: Ops, code: CodeType, of_scales: bool
) -> None:
    powers = replace(every_recipe()[-8], granularity=Granularity.BLOCK_1X32, code=code)
    for made_by, bad in ((recipe(TOKEN, code), b"\0\0\0\0"), (powers, b"\xff")):
        storage, source = StorageFormat(recipe=made_by), coded(made_by, uneven(6, 160))
        stored, expected, raised = allocate(storage, (6, 160)), allocate(storage, (6, 160)), flag()
        job = EncodeJob.whole(storage, stored, source)
        ops[0](job, nonfinite=raised)
        ops[1]([job], nonfinite=raised, workspace=workspace())
        assert not raised.item()
        held, wrong = source.weight.codes.view(torch.uint8), b"\x7f" if code is FN else b"\x80"
        if of_scales:
            held, wrong = source.weight.scale.view(torch.uint8), bad
        held[-1, -len(wrong) :] = torch.tensor(list(wrong), dtype=torch.uint8)
        storage.encode_into(expected, source, full_region((6, 160)), nonfinite=raised)
        assert raised.item()
        for is_grouped in (False, True):
            raised = flag()
            if is_grouped:
                ops[1]([job], nonfinite=raised, workspace=workspace())
            else:
                ops[0](job, nonfinite=raised)
            assert raised.item()
            assert checksum_stored(stored) == checksum_stored(expected)


def test_a_stack_of_stacks_is_stored_whole_and_in_parts(ops: Ops) -> None:
    """A launch for each inner stack that is no neighbour of the one before: others lie ahead."""
    storage = StorageFormat(recipe=recipe(Granularity.BLOCK_1X128), layout=RowMajor())
    wide = uneven(4 * 3 * 40, 16).reshape(4, 3, 40, 16)
    for source in (wide[:2, :2], wide[::2, 1:], wide[:2, :2].mT.contiguous().mT):
        shape = tuple(source.shape)
        stored, parts, expected = (allocate(storage, shape) for _ in range(3))
        storage.encode_into(expected, source, full_region(shape))
        ops[0](EncodeJob.whole(storage, stored, source), nonfinite=flag())
        for index in range(2):
            region = ((index, index + 1), *full_region(shape)[1:])
            job = EncodeJob(storage, parts, source[index : index + 1], region)
            ops[0](job, nonfinite=flag())
        assert checksum_stored(stored) == checksum_stored(parts) == checksum_stored(expected)
