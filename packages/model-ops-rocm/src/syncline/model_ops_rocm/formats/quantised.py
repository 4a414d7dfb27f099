"""The quantised recipe: codes of a narrow type, with a scale per matrix, row or block.

Unit: a matrix [..., N, K]; leading dimensions are further matrices, a vector is a matrix of one
row. Code = source / scale in float32, exactly rounded, clamped, to nearest even; scale from the
largest magnitude of its block. A block that the matrix' edge cuts is smaller and has its scale.
Which of AITER's quantisers a value equals, and where it differs on purpose, is in
docs/quantisers.md. Knows no layout, and nothing of what is stored beside it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch

from syncline.model_ops_rocm.formats.recipes import WEIGHT, WEIGHT_SCALE, Encoded, TensorSpec
from syncline.model_ops_rocm.quant.blocks import (
    Blocks,
    amax_bits,
    amax_of_bits,
    decode_blocks,
    encode_blocks,
    grid_shape,
)
from syncline.model_ops_rocm.quant.e8m0 import E8m0Mode
from syncline.model_ops_rocm.quant.minifloat import (
    E2M1,
    decode_minifloat,
    pack_nibbles,
    unpack_nibbles,
)
from syncline.model_ops_rocm.quant.scales import e8m0_scales, fp32_scales, scales_as_float32
from syncline.model_ops_rocm.quant.scheme import (
    CODE_DTYPES,
    INT8_MAX,
    MINI_FLOATS,
    SCALE_DTYPES,
    CodeType,
    Granularity,
    ScaleType,
    ZeroRule,
    max_of,
)
from syncline.model_ops_rocm.regions import Region, full_region, region_numel

_BLOCKS = {
    Granularity.BLOCK_1X128: (1, 128),
    Granularity.BLOCK_128X128: (128, 128),
    Granularity.BLOCK_1X32: (1, 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """Compared by value. `clamp` is the largest magnitude of a code, and what amax is scaled to.

    None means the type's largest value, and a smaller one must be a value of the type (7 in int8 is
    the range of int4). `e8m0_mode` is given for e8m0 scales and for no others. Decoding gives
    float32.
    """

    granularity: Granularity
    code: CodeType
    scale: ScaleType = ScaleType.FP32
    zero: ZeroRule = ZeroRule.ONE
    clamp: float | None = None
    e8m0_mode: E8m0Mode | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        top = max_of(self.code)
        if self.clamp is not None:
            if not _is_value(self.code, self.clamp):
                raise ValueError(
                    f"Quantised: clamp must be a positive value of {self.code}, at most {top},"
                    f" got {self.clamp}"
                )
            if self.clamp == top:
                # One spelling of one recipe, so that equal recipes compare equal.
                object.__setattr__(self, "clamp", None)
        if (self.e8m0_mode is not None) != (self.scale is ScaleType.E8M0):
            raise ValueError(
                "Quantised: e8m0_mode must be given for e8m0 scales and for no others, got"
                f" {self.e8m0_mode!r} with {self.scale}"
            )
        if self.scale is ScaleType.E8M0 and self.code is CodeType.INT8:
            raise ValueError("Quantised: scale must be fp32 for int8 codes, got e8m0")

    def _check_kinds(self) -> None:
        """A string would compare equal to its value, and store other bytes."""
        for name, value, kind in (
            ("granularity", self.granularity, Granularity),
            ("code", self.code, CodeType),
            ("scale", self.scale, ScaleType),
            ("zero", self.zero, ZeroRule),
            ("e8m0_mode", self.e8m0_mode, E8m0Mode | None),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"Quantised: {name} must be a {kind}, got {value!r}")

    @property
    def limit(self) -> float:
        """The largest magnitude of a code."""
        return max_of(self.code) if self.clamp is None else self.clamp

    @property
    def dtype(self) -> torch.dtype:
        """What the codes are stored as."""
        return CODE_DTYPES[self.code]

    def describe(self) -> str:
        parts = [self.granularity.value, self.code.value, self.scale.value]
        if self.e8m0_mode is not None:
            parts.append(self.e8m0_mode.name.lower())
        if self.zero is not ZeroRule.ONE:
            parts.append(f"zero_{self.zero}")
        if self.clamp is not None:
            parts.append(f"max_{self.clamp:g}")
        return "_".join(parts)

    def storage_spec(self, logical_shape: SequenceABC[int]) -> dict[str, TensorSpec]:
        *lead, rows, columns = self._matrix(logical_shape)
        weight = tuple(logical_shape)
        if self.code is CodeType.E2M1:
            if columns % 2:
                raise ValueError(
                    f"{self.describe()}: logical_shape must have an even last dimension, or be"
                    f" padded to one, got {list(logical_shape)}"
                )
            weight = (*weight[:-1], columns // 2)
        grid = grid_shape(rows, columns, self._block(rows, columns))
        scale = (*lead, *grid) if len(logical_shape) > 1 else grid[1:]
        return {
            WEIGHT: TensorSpec(shape=weight, dtype=self.dtype),
            WEIGHT_SCALE: TensorSpec(shape=scale, dtype=SCALE_DTYPES[self.scale]),
        }

    def logical_shape(self, weight_shape: SequenceABC[int]) -> tuple[int, ...]:
        if self.code is CodeType.E2M1 and weight_shape:
            return (*weight_shape[:-1], 2 * weight_shape[-1])
        return tuple(weight_shape)

    def code_region(self, region: Region) -> Region | None:
        if self.code is not CodeType.E2M1:
            return region
        start, stop = region[-1]
        if start % 2 or stop % 2:
            return None
        return (*region[:-1], (start // 2, stop // 2))

    def is_whole_domain(self, logical_shape: SequenceABC[int], region: Region) -> bool:
        if region_numel(region) == 0:
            return True
        rows, columns = self._matrix(logical_shape)[-2:]
        sizes = zip((rows, columns), self._block(rows, columns), strict=True)
        return all(
            start % block == 0 and (stop % block == 0 or stop == size)
            for (start, stop), (size, block) in zip(self._rectangle(region), sizes, strict=True)
        )

    def scale_region(self, logical_shape: SequenceABC[int], region: Region) -> dict[str, Region]:
        grid = self.blocks(logical_shape, region).grid
        return {WEIGHT_SCALE: (*region[:-2], *grid) if len(region) > 1 else grid[1:]}

    def blocks(self, logical_shape: SequenceABC[int], region: Region) -> Blocks:
        """How the region lies on the grid of scales."""
        rows, columns = self._matrix(logical_shape)[-2:]
        row_range, column_range = self._rectangle(region)
        return Blocks(rows=row_range, columns=column_range, block=self._block(rows, columns))

    def amax(
        self, source: torch.Tensor, *, logical_shape: SequenceABC[int], region: Region
    ) -> torch.Tensor:
        """int32 of the shape of `scale_region`: maxima as bits, see `AmaxPartial`."""
        bits = amax_bits(_as_matrix(source.float()), self.blocks(logical_shape, region))
        return bits if source.ndim > 1 else bits[0]

    def scales_of(self, amax: torch.Tensor) -> torch.Tensor:
        """Stored scales of float32 maxima; NaN where the maximum is not finite."""
        if self.e8m0_mode is None:
            return fp32_scales(amax, clamp=self.limit, zero=self.zero)
        return e8m0_scales(
            amax,
            clamp=self.limit,
            zero=self.zero,
            mode=self.e8m0_mode,
            mantissa_bits=MINI_FLOATS[self.code].mantissa_bits,
        )

    def encode(
        self,
        source: torch.Tensor,
        *,
        logical_shape: SequenceABC[int],
        region: Region,
        scales: torch.Tensor | None = None,
    ) -> Encoded:
        if scales is None:
            bits = self.amax(source, logical_shape=logical_shape, region=region)
            part = self.scales_of(amax_of_bits(bits))
        else:
            ranges = self.scale_region(logical_shape, region)[WEIGHT_SCALE]
            part = scales[tuple(slice(start, stop) for start, stop in ranges)].to(source.device)
        numbers = scales_as_float32(part)
        unusable = ~((numbers > 0) & numbers.isfinite()).all() | ~source.float().isfinite().all()
        codes = encode_blocks(
            _as_matrix(source.float()),
            _as_matrix(numbers),
            self.blocks(logical_shape, region),
            code=self.code,
            clamp=self.limit,
        )
        if self.code is CodeType.E2M1:
            codes = pack_nibbles(codes).view(self.dtype)
        codes = codes if source.ndim > 1 else codes[0]
        return Encoded(tensors={WEIGHT: codes, WEIGHT_SCALE: part}, nonfinite=unusable)

    def decode(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        codes = stored[WEIGHT]
        if self.code is CodeType.E2M1:
            values = decode_minifloat(unpack_nibbles(codes.view(torch.uint8)), E2M1)
        else:
            values = codes.float()
        if values.numel() == 0:
            return values
        scale = scales_as_float32(stored[WEIGHT_SCALE])
        blocks = self.blocks(values.shape, full_region(values.shape))
        decoded = decode_blocks(_as_matrix(values), _as_matrix(scale), blocks)
        return (decoded if values.ndim > 1 else decoded[0]).contiguous()

    def _matrix(self, logical_shape: SequenceABC[int]) -> tuple[int, ...]:
        if not logical_shape:
            raise ValueError(f"{self.describe()}: logical_shape must have a row dimension, got []")
        return (1, *logical_shape) if len(logical_shape) == 1 else tuple(logical_shape)

    def _rectangle(self, region: Region) -> Region:
        return ((0, 1), *region) if len(region) == 1 else region[-2:]

    def _block(self, rows: int, columns: int) -> tuple[int, int]:
        if self.granularity is Granularity.TENSOR:
            return (max(rows, 1), max(columns, 1))
        if self.granularity is Granularity.TOKEN:
            return (1, max(columns, 1))
        return _BLOCKS[self.granularity]


def _is_value(code: CodeType, value: float) -> bool:
    if code is CodeType.INT8:
        return value == int(value) and 1 <= value <= INT8_MAX
    return MINI_FLOATS[code].holds(value)


def _as_matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim > 1 else x[None]
