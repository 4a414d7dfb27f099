"""Where each recipe equals which of AITER's quantisers, and where it differs on purpose.

The table below is the one of docs/quantisers.md. Each row is compared twice: with the compatible
functions on numbers made here, and, where they are at hand, with the recorded vectors. A row names
the elements that may differ; all others are equal in scale and code, and what stands in the place
of AITER's number is tested too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from syncline.model_ops_rocm import (
    CodeType,
    E8m0Mode,
    Granularity,
    Quantised,
    ScaleType,
    StorageFormat,
    ZeroRule,
    full_region,
)
from syncline.model_ops_rocm.layouts.base import empty_storage
from syncline.model_ops_rocm.reference import aiter_compat as compat
from syncline.model_ops_rocm.testing.goldens import GoldenCase, flag, number

FN, FNUZ, I8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
CODES = {FN: CodeType.E4M3FN, FNUZ: CodeType.E4M3FNUZ, I8: CodeType.INT8}
BYTES = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: `file` and `cases` name the recorded vectors of `reference`."""

    recipe: Quantised
    reference: Callable[[torch.Tensor], Pair]
    file: str
    cases: Callable[[GoldenCase], bool]
    # What may differ: overflowing casts, truncated int8, zero blocks, NaN scales of large amax.
    differs: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.recipe.describe()}-{self.file}"


def makes(
    dtype: torch.dtype, *parts: str, without: tuple[str, ...] = ()
) -> Callable[[GoldenCase], bool]:
    """Cases with scales of their own and codes of the dtype, whose arguments have all `parts`."""
    return lambda case: (
        case.outputs["y"].dtype == dtype
        and "scale_in" not in case.inputs
        and all(part in case.args for part in parts)
        and not any(part in case.args for part in without)
    )


def scaled(dtype: torch.dtype, scale: torch.dtype) -> Callable[[GoldenCase], bool]:
    """Cases with codes and scales of the dtypes."""
    return lambda case: case.outputs["y"].dtype == dtype and case.outputs["scale"].dtype == scale


def rounded(mode: int) -> Callable[[GoldenCase], bool]:
    """Cases of fp4 with the mode, whose default is 1, in AITER's own arrangement."""
    return lambda case: (
        number(case.args, "round_mode", 1) == mode
        and "pack_dim=0" not in case.args
        and not flag(case.args, "shuffle")
    )


def rows() -> Iterator[Row]:
    for dtype in (FN, FNUZ, I8):
        code = CODES[dtype]
        faults = {FN: {"nothing"}, FNUZ: {"overflow"}, I8: {"truncation"}}[dtype]
        yield Row(
            recipe=Quantised(granularity=Granularity.TOKEN, code=code),
            reference=partial(compat.pertoken_quant, dtype=dtype),
            file="quant_per_token",
            cases=makes(dtype, without=("dtypeMax=",)),
            differs=frozenset(faults),
        )
        yield Row(
            recipe=Quantised(granularity=Granularity.TENSOR, code=code),
            reference=partial(compat.per_tensor_quant, dtype=dtype),
            file="quant_per_tensor",
            cases=makes(dtype),
            differs=frozenset(faults | {"zero"}),
        )
        yield Row(
            recipe=Quantised(granularity=Granularity.BLOCK_1X128, code=code),
            reference=partial(compat.per_1x128_quant, dtype=dtype),
            file="quant_per_1x128",
            cases=makes(dtype),
            differs=frozenset(faults),
        )
    yield Row(
        recipe=Quantised(granularity=Granularity.TOKEN, code=CodeType.INT8, clamp=7.0),
        reference=lambda x: compat.pertoken_quant(x, I8, dtype_max=7.0),
        file="quant_per_token",
        cases=makes(I8, "dtypeMax=7"),
        differs=frozenset({"truncation"}),
    )
    for dtype in (FN, FNUZ):
        yield Row(
            recipe=Quantised(granularity=Granularity.BLOCK_128X128, code=CODES[dtype]),
            reference=partial(compat.weight_per_128x128_quant, dtype=dtype),
            file="quant_128x128",
            cases=makes(dtype, "weight_per_128x128_quant("),
            differs=frozenset({"overflow"} if dtype == FNUZ else set()),
        )
        yield Row(
            recipe=Quantised(
                granularity=Granularity.BLOCK_128X128, code=CODES[dtype], zero=ZeroRule.SMALLEST
            ),
            reference=partial(compat.atom_per_128x128_quant, dtype=dtype),
            file="quant_128x128",
            cases=makes(dtype, "quantize_weight_to_fp8_128x128_blockscale("),
        )
        yield Row(
            recipe=mx(CODES[dtype], E8m0Mode.ROUND_UP),
            reference=partial(compat.per_1x32_f8_quant, dtype=dtype, e8m0=True),
            file="quant_per_1x32_mxfp8",
            cases=scaled(dtype, torch.float8_e8m0fnu),
        )
    yield Row(
        recipe=Quantised(granularity=Granularity.BLOCK_1X32, code=CodeType.E4M3FN, clamp=256.0),
        reference=lambda x: compat.per_1x32_f8_quant(x, FN, e8m0=False),
        file="quant_per_1x32_mxfp8",
        cases=scaled(FN, torch.float32),
        differs=frozenset({"zero", "overflow"}),
    )
    for mode in E8m0Mode:
        yield Row(
            recipe=mx(CodeType.E2M1, mode),
            reference=partial(compat.per_1x32_f4_quant, mode=int(mode)),
            file="quant_per_1x32_mxfp4",
            cases=rounded(int(mode)),
            differs=frozenset({"nan scale"} if mode is E8m0Mode.EVEN else set()),
        )
    yield Row(
        recipe=Quantised(granularity=Granularity.BLOCK_1X32, code=CodeType.INT8, clamp=7.0),
        reference=compat.per_1x32_i4_quant,
        file="quant_per_1x32_int4",
        cases=lambda case: case.inputs["x"].dtype == torch.float32,
        differs=frozenset({"int4 scale"}),
    )


def mx(code: CodeType, mode: E8m0Mode) -> Quantised:
    return Quantised(
        granularity=Granularity.BLOCK_1X32,
        code=code,
        scale=ScaleType.E8M0,
        zero=ZeroRule.SMALLEST,
        e8m0_mode=mode,
    )


TABLE = list(rows())


def encode(recipe: Quantised, x: torch.Tensor) -> Pair:
    storage = StorageFormat(recipe=recipe)
    stored = {
        name: empty_storage(spec.shape, spec.dtype, x.device)
        for name, spec in storage.storage_spec(x.shape).items()
    }
    storage.encode_into(stored, x, full_region(x.shape))
    return stored["weight"], stored["weight_scale"]


def as_numbers(recipe: Quantised, codes: torch.Tensor, scale: torch.Tensor) -> Pair:
    """Every code and every scale spread over the elements, as float32."""
    if recipe.code is CodeType.E2M1:
        values = compat.mxfp4_to_f32(codes.view(torch.uint8))
    else:
        values = codes.float()
    factors = compat.e8m0_to_f32(scale.view(torch.uint8)) if scale.itemsize == 1 else scale
    rows_, columns = values.shape[-2:]
    high = {"tensor": rows_, "128x128": 128}.get(recipe.granularity.value, 1)
    wide = {"1x128": 128, "128x128": 128, "1x32": 32}.get(recipe.granularity.value, columns)
    spread = factors.repeat_interleave(high, -2).repeat_interleave(wide, -1)
    return values, spread[..., :rows_, :columns]


def compare(row: Row, x: torch.Tensor, reference: Pair) -> None:
    """Equal but for the differences that the row declares, and those are as they ought to be."""
    codes, scale = encode(row.recipe, x)
    theirs_codes, theirs_scale = reference
    if row.file == "quant_per_1x32_int4":
        theirs_scale = theirs_scale.transpose(-1, -2).float()
        assert torch.equal(scale.bfloat16().float(), theirs_scale)
        theirs_scale = scale
    theirs_scale = theirs_scale.view(scale.shape)
    ours, our_scale = as_numbers(row.recipe, codes, scale)
    theirs, their_scale = as_numbers(row.recipe, theirs_codes, theirs_scale)
    assert ours.isfinite().all()
    assert (our_scale > 0).all()
    quotient = x.float() / our_scale
    differs = (ours != theirs) | (ours.signbit() != theirs.signbit()) | (our_scale != their_scale)
    allowed = torch.zeros_like(differs)
    limit = row.recipe.limit
    if "overflow" in row.differs:
        over = quotient.abs() > limit
        assert ours[over].abs().eq(limit).all()
        allowed |= over
    if "truncation" in row.differs:
        assert torch.equal(ours, quotient.round().clamp(-limit, limit))
        inside = quotient.abs() <= limit
        assert torch.equal(theirs[inside], quotient.trunc()[inside])
        allowed |= (quotient != quotient.trunc()) | ~inside
    if "zero" in row.differs:
        zero = their_scale == 0
        assert ours[zero].eq(0).all() or x.float()[zero].ne(0).any()
        assert our_scale[zero].eq(1).all()
        allowed |= zero
    if "nan scale" in row.differs:
        nan = their_scale.isnan()
        assert x.float()[nan].isfinite().all()
        assert quotient[nan].abs().le(8).all()
        allowed |= nan
    assert not (differs & ~allowed).any()


def made_up(row: Row) -> torch.Tensor:
    """Zero blocks, subnormals, ties, large numbers and -0, in integers times powers of two."""
    shape: tuple[int, ...] = (12, 256)
    if row.recipe.granularity is Granularity.BLOCK_128X128:
        shape = (2, 128, 256) if row.recipe.zero is ZeroRule.ONE else (130, 200)
    count = torch.Size(shape).numel()
    mixed = torch.arange(count, dtype=torch.int64) * 2_654_435_761 % 65_536
    x = ((mixed - 32_768).float() * 2.0**-12).view(shape)
    flat = x.view(-1, shape[-1])
    if row.recipe.granularity is Granularity.BLOCK_128X128:
        flat[:128, :128] = 0
        return x
    flat *= 2.0 ** ((torch.arange(flat.shape[0]) % 9 - 4).float()[:, None])
    if row.recipe.granularity is Granularity.TENSOR:
        return x
    flat[0] = 0
    flat[1] = -0.0
    flat[2] *= 2.0**-143
    flat[3] *= 2.0**-120
    flat[4] *= 2.0**121
    if row.file != "quant_per_1x32_int4":
        return x
    return x[5:].contiguous()


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_recipe_equals_its_reference_but_for_the_declared_differences(row: Row) -> None:
    x = made_up(row)
    compare(row, x, row.reference(x))
    compare(row, x.bfloat16().float(), row.reference(x.bfloat16().float()))


def test_a_tensor_of_zeros_has_scale_one_where_aiter_has_nan() -> None:
    for row in TABLE:
        if row.recipe.granularity is Granularity.TENSOR:
            x = torch.zeros(2, 64)
            compare(row, x, row.reference(x))
            assert encode(row.recipe, x)[1].tolist() == [[1.0]]


@pytest.mark.golden
@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_recipe_equals_the_recorded_vectors_but_for_the_declared_differences(
    goldens: Callable[[str], list[GoldenCase]], row: Row
) -> None:
    # A recipe refuses what is not finite, so there is nothing to compare.
    cases = [
        case
        for case in goldens(row.file)
        if row.cases(case) and bool(case.inputs["x"].isfinite().all())
    ]
    if not cases:
        pytest.skip(f"no case of the recording is {row}")
    for case in cases:
        codes, scale = (
            tensor.view(torch.uint8) if tensor.dtype in BYTES else tensor
            for tensor in (case.outputs["y"], case.outputs["scale"])
        )
        compare(row, case.inputs["x"], (codes, scale))


def test_the_table_in_the_documentation_names_every_recipe() -> None:
    path = Path(__file__).parents[3] / "docs" / "quantisers.md"
    if not path.exists():
        pytest.skip("docs/ is not part of this distribution")
    text = path.read_text("utf-8")
    assert [str(row) for row in TABLE if f"`{row.recipe.describe()}`" not in text] == []
