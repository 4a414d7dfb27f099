"""Weights that come in fp8: kept bit for bit where they fit, else encoded anew."""

import pytest
import torch

from syncline.model_ops_rocm import (
    CodedSource,
    CodeType,
    E4m3fnuzWeight,
    E4m3fnWeight,
    E8m0Mode,
    FormatError,
    Granularity,
    Padding,
    Quantised,
    Region,
    ScaleType,
    Shuffle16x16,
    StorageFormat,
    Unquantised,
    checksum_stored,
    full_region,
    to_e4m3fnuz,
)
from syncline.model_ops_rocm.layouts import e8m0_shuffle
from syncline.model_ops_rocm.testing import Stored, allocate, encode_whole, uneven

SHAPE = (144, 256)
FN, FNUZ = CodeType.E4M3FN, CodeType.E4M3FNUZ


def recipe(granularity: Granularity, code: CodeType = FN, *, powers: bool = False) -> Quantised:
    return Quantised(
        granularity=granularity,
        code=code,
        scale=ScaleType.E8M0 if powers else ScaleType.FP32,
        e8m0_mode=E8m0Mode.ROUND_UP if powers else None,
    )


def coded(made_by: Quantised, x: torch.Tensor) -> CodedSource:
    stored = encode_whole(StorageFormat(recipe=made_by), x)
    kind = E4m3fnWeight if made_by.code is FN else E4m3fnuzWeight
    weight = kind(codes=stored["weight"], scale=stored["weight_scale"])
    return CodedSource(weight=weight, granularity=made_by.granularity)


def stored_of(storage: StorageFormat, source: CodedSource) -> Stored:
    stored = allocate(storage, tuple(source.shape))
    storage.encode_into(stored, source, full_region(source.shape))
    return stored


@pytest.mark.parametrize("granularity", Granularity, ids=str)
@pytest.mark.parametrize("code", [FN, FNUZ], ids=str)
def test_codes_that_fit_are_kept_in_any_layout(granularity: Granularity, code: CodeType) -> None:
    made_by, x = recipe(granularity, code), uneven(*SHAPE)
    source = coded(made_by, x)
    for layout in (StorageFormat(recipe=made_by).layout, Shuffle16x16()):
        storage = StorageFormat(recipe=made_by, layout=layout)
        assert storage.keeps(source)
        assert checksum_stored(stored_of(storage, source)) == checksum_stored(
            encode_whole(storage, x)
        )


def test_scales_that_no_encoder_would_make_are_kept_too() -> None:
    source = coded(recipe(Granularity.BLOCK_128X128), uneven(*SHAPE))
    odd = CodedSource(
        weight=E4m3fnWeight(codes=source.weight.codes, scale=source.weight.scale * 3),
        granularity=source.granularity,
    )
    storage = StorageFormat(recipe=recipe(Granularity.BLOCK_128X128), layout=Shuffle16x16())
    stored = stored_of(storage, odd)
    assert torch.equal(stored["weight_scale"], odd.weight.scale)
    assert torch.equal(storage.decode(stored), odd.numbers())


def test_e4m3fn_codes_become_e4m3fnuz_once_and_mean_the_same() -> None:
    for powers in (False, True):
        source = coded(recipe(Granularity.BLOCK_1X32, powers=powers), uneven(*SHAPE))
        scale_layout = e8m0_shuffle() if powers else StorageFormat(recipe=source.recipe).layout
        storage = StorageFormat(
            recipe=recipe(Granularity.BLOCK_1X32, FNUZ, powers=powers), scale_layout=scale_layout
        )
        stored = stored_of(storage, source)
        assert torch.equal(storage.decode(stored), source.numbers().abs() * source.numbers().sign())
        assert isinstance(source.weight, E4m3fnWeight)
        # What is that type already is not converted again.
        again = CodedSource(weight=to_e4m3fnuz(source.weight), granularity=source.granularity)
        assert checksum_stored(stored_of(storage, again)) == checksum_stored(stored)
    # The other way there is no exact one: its numbers are encoded.
    back = StorageFormat(recipe=recipe(Granularity.BLOCK_1X32))
    fnuz = coded(recipe(Granularity.BLOCK_1X32, FNUZ), uneven(*SHAPE))
    assert not back.keeps(fnuz)
    assert checksum_stored(stored_of(back, fnuz)) == checksum_stored(
        encode_whole(back, fnuz.numbers())
    )


def test_parts_with_scales_of_their_own_are_encoded_to_a_common_one() -> None:
    # A fused projection: three tensors, each with its scale, stored under one.
    storage, shape = StorageFormat(recipe=recipe(Granularity.TENSOR)), (48, 64)
    x, rows = uneven(*shape), ((0, 16), (16, 40), (40, 48))
    parts = [coded(recipe(Granularity.TENSOR), x[start:stop]) for start, stop in rows]
    assert len({float(part.weight.scale) for part in parts}) == 3
    partial = storage.new_amax(shape)
    for part, bounds in zip(parts, rows, strict=True):
        storage.amax_into(partial, part, (bounds, (0, 64)))
    scales, stored = storage.scales(partial), allocate(storage, shape)
    for part, bounds in zip(parts, rows, strict=True):
        region: Region = (bounds, (0, 64))
        with pytest.raises(FormatError, match=r"whole in the domain of its scales"):
            storage.encode_into(stored, part, region)
        storage.encode_into(stored, part, region, scales=scales)
    numbers = torch.cat([part.numbers() for part in parts])
    assert checksum_stored(stored) == checksum_stored(encode_whole(storage, numbers))


def test_codes_that_do_not_fit_are_encoded_from_their_numbers() -> None:
    source = coded(recipe(Granularity.BLOCK_128X128), uneven(*SHAPE))
    for target in (
        recipe(Granularity.TOKEN),
        recipe(Granularity.BLOCK_128X128, powers=True),
        Quantised(granularity=Granularity.BLOCK_128X128, code=FN, clamp=240.0),
        Unquantised(torch.bfloat16),
    ):
        storage = StorageFormat(recipe=target)
        assert not storage.keeps(source)
        assert checksum_stored(stored_of(storage, source)) == checksum_stored(
            encode_whole(storage, source.numbers())
        )


def test_kept_codes_have_zeros_for_padding_and_its_blocks_the_scale_of_zeros() -> None:
    made_by = recipe(Granularity.BLOCK_1X128)
    padding = Padding(rows=30, columns=200, row_multiple=16, column_multiple=512)
    storage = StorageFormat(recipe=made_by, layout=Shuffle16x16(), padding=padding)
    x = uneven(30, 200)
    assert checksum_stored(stored_of(storage, coded(made_by, x))) == checksum_stored(
        encode_whole(storage, x)
    )


def test_codes_and_scales_that_mean_no_number_are_refused_or_reported() -> None:
    good = coded(recipe(Granularity.TOKEN), uneven(4, 32))
    storage = StorageFormat(recipe=recipe(Granularity.TOKEN))
    codes, scale = good.weight.codes.clone(), good.weight.scale.clone()
    codes.view(torch.uint8)[1, 1] = 0x7F
    scale[2, 0] = -1.0
    for weight in (
        E4m3fnWeight(codes=codes, scale=good.weight.scale),
        E4m3fnWeight(codes=good.weight.codes, scale=scale),
    ):
        source = CodedSource(weight=weight, granularity=Granularity.TOKEN)
        stored = allocate(storage, (4, 32))
        kept = checksum_stored(stored)
        with pytest.raises(ValueError, match=r"source must be finite, and given scales positive"):
            storage.encode_into(stored, source, full_region((4, 32)))
        assert checksum_stored(stored) == kept
        flag = torch.zeros(1, dtype=torch.bool)
        storage.encode_into(stored, source, full_region((4, 32)), nonfinite=flag)
        assert flag.item()
        assert torch.equal(stored["weight"].view(torch.uint8), weight.codes.view(torch.uint8))


def test_scales_that_are_no_grid_of_the_codes_are_refused() -> None:
    good = coded(recipe(Granularity.TOKEN), uneven(4, 32))
    with pytest.raises(ValueError, match=r"CodedSource: scale must have shape \[1, 1\], one of"):
        CodedSource(weight=good.weight, granularity=Granularity.TENSOR)
    storage = StorageFormat(recipe=recipe(Granularity.TOKEN))
    with pytest.raises(FormatError, match=r"a source of shape \[3, 32\], got \[4, 32\]"):
        storage.encode_into(allocate(storage, (4, 32)), good, ((0, 3), (0, 32)))
