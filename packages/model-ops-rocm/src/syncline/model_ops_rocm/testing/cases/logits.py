"""Calls of the ops from logits to tokens."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from syncline.model_ops_rocm.contracts.logits import Distribution, Draw, Vocabulary
from syncline.model_ops_rocm.reference.logits import TorchLogitsPartials
from syncline.model_ops_rocm.testing.parity import Arguments, Case, Maker

# Logprobs are float64, from float32 weights whatever the logits are. Ids are equal.
_ROUNDING: Final = (2e-6, 1e-12)
_OPS: Final = ("sample", "token_logprobs", "top_logprobs", "logits_partials", "combine_partials")
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES: Final[Mapping[tuple[str, torch.dtype], tuple[float, float]]] = MappingProxyType(
    {(op, dtype): _ROUNDING for op in _OPS for dtype in _DTYPES}
)
_NAN, _INF = float("nan"), float("inf")
_TEMPERATURES: Final = (1.0, 0.0, 0.3, 7.0)
Logits = Callable[[Maker], torch.Tensor]
Rest = Callable[[Maker, int], Arguments]


def cycled(make: Maker, num_rows: int, *values: float) -> torch.Tensor:
    """float32, the values in turn."""
    numbers = (values * (num_rows // len(values) + 1))[:num_rows]
    return torch.tensor(numbers, dtype=torch.float32, device=make.device)


def draws(make: Maker, num_rows: int) -> Draw:
    """Different seeds, samples and positions."""
    return Draw(
        seeds_R=make.distinct(num_rows, 1_000) * -(2**50) + 2**62,
        sample_index_R=make.distinct(num_rows, 1_000, torch.int32),
        positions_R=make.distinct(num_rows, 4_000),
    )


def filters(make: Maker, num_rows: int) -> Distribution:
    """Each filter on in some rows, alone and with others, and a greedy row that heeds none."""
    return Distribution(
        temperature_R=cycled(make, num_rows, 1.0, 2.0, 0.0),
        top_k_R=cycled(make, num_rows, 5, 0, 2, 40, 1).to(torch.int32),
        top_p_R=cycled(make, num_rows, 0.8, 0.6, 0.3, 0.95),
        min_p_R=cycled(make, num_rows, 0.0, 0.02, 0.1, 0.0, 0.02, 1.0, 0.0),
    )


def _logits(num_rows: int, num_columns: int, *, scale: float = 1.0, pad: int = 0) -> Logits:
    return lambda make: make.randn(num_rows, num_columns, pad=pad).mul_(scale)


def _rounded(num_rows: int, num_columns: int) -> Logits:
    """Many equal logits."""
    return lambda make: make.randn(num_rows, num_columns).mul_(2.0).round_()


def _faulty(make: Maker) -> torch.Tensor:
    logits = make.randn(7, 1_100)
    logits[0, 1_090] = logits[1, 3] = float("nan")
    logits[2, 700] = float("inf")
    logits[3] = float("-inf")
    logits[4, :1_099] = float("-inf")
    return logits


def _one_nan_each(make: Maker) -> torch.Tensor:
    """NaN in the tile of the largest logit, before it and behind it."""
    logits = make.randn(4, 7)
    logits[torch.arange(4), torch.arange(4)] = float("nan")
    return logits


def _spoilt(num_rows: int, num_columns: int, true_size: int) -> Logits:
    def build(make: Maker) -> torch.Tensor:
        logits = make.randn(num_rows, num_columns, pad=5).mul_(2.0)
        logits[:, true_size:] = float("nan")
        return logits

    return build


def _flat(make: Maker) -> torch.Tensor:
    """Rows of which thousands stay; of steps of an eighth in bfloat16, and far below zero."""
    logits = make.randn(6, 6_016)
    logits[2:4] += 20.0
    logits[4:] -= 30.0
    return logits


def _of_all_kinds(make: Maker) -> torch.Tensor:
    """Rows flat, peaked, sorted, of equal logits, masked, faulty and steep, in three tiles."""
    return _kinds(make, 2_501)


def _of_all_kinds_padded(make: Maker) -> torch.Tensor:
    """Likewise, in rows of whole 32 bytes."""
    logits = _kinds(make, 2_512)
    logits[:, 2_501:] = float("nan")
    return logits


def _kinds(make: Maker, num_columns: int) -> torch.Tensor:
    logits = make.randn(16, num_columns)
    logits[1, 1_777] = logits[2, 5] = logits[2, 2_048] = 12.0
    logits[3:5] = logits[3:5].sort(dim=1, descending=True).values
    logits[5:8] = logits[5:8].mul_(2.0).round_()
    logits[8, 100:2_400] = logits[9, :2_048] = float("-inf")
    logits[10] = 0.5
    logits[11, 2_500] = float("nan")
    logits[12] *= 40.0
    return logits


def _filtered_widely(make: Maker, num_rows: int) -> Arguments:
    """Filters that keep one id, a few, most and all; a greedy row and a padding row."""
    draw = draws(make, num_rows)
    draw.positions_R[num_rows - 1] = -1
    top_k_R = cycled(make, num_rows, 0, 1, 0, 50, 0, 1_500, 2_501).to(torch.int64)
    top_p_R = cycled(make, num_rows, 0.9, 0.9, 0.999999, 1e-6, 0.5)
    min_p_R = cycled(make, num_rows, 0.0, 0.0, 0.0, 0.05)
    temperature_R = cycled(make, num_rows, 1.0, 0.7, 1.0, 1.0, 1.0, 0.0)
    distribution = Distribution(temperature_R, top_k_R, top_p_R, min_p_R)
    return {"distribution": distribution, "draw": draw}


def _transposed(make: Maker) -> torch.Tensor:
    return make.randn(40, 3).T


def _case(op: str, label: str, logits: Logits, rest: Rest) -> Case:
    def build(make: Maker) -> Arguments:
        given = logits(make)
        return {"logits_RV": given, **rest(make, given.shape[0])}

    return Case(op=op, label=label, build=build)


def _pair(make: Maker, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.full(shape, -7, dtype=torch.int64, device=make.device)
    return ids, torch.full(shape, -7.0, dtype=torch.float64, device=make.device)


def _drawn(make: Maker, num_rows: int) -> Arguments:
    distribution = Distribution(cycled(make, num_rows, *_TEMPERATURES))
    out = _pair(make, num_rows)
    return {"distribution": distribution, "draw": draws(make, num_rows), "out": out}


def _padded_rows(make: Maker, num_rows: int) -> Arguments:
    call = _drawn(make, num_rows)
    draw = draws(make, num_rows)
    draw.positions_R[::2] = -1
    temperature_R = cycled(make, num_rows, 1.0, -1.0, _INF, _NAN, 0.5)
    return call | {"draw": draw, "distribution": Distribution(temperature_R)}


def _drawn_of(true_size: int) -> Rest:
    return lambda make, rows: _drawn(make, rows) | {"vocabulary": Vocabulary(true_size)}


def _filtered(make: Maker, num_rows: int) -> Arguments:
    return {"distribution": filters(make, num_rows), "draw": draws(make, num_rows)}


def _one_filter(name: str, *values: float) -> Rest:
    def rest(make: Maker, num_rows: int) -> Arguments:
        given = cycled(make, num_rows, *values)
        given = given.to(torch.int64) if name == "top_k_R" else given
        distribution = Distribution(cycled(make, num_rows, 0.7, 1.5), **{name: given})
        return {"distribution": distribution, "draw": draws(make, num_rows)}

    return rest


def _given_ids(make: Maker, num_rows: int) -> Arguments:
    ids = make.distinct(num_rows, 40, torch.int32)
    ids[1::4], ids[2::5] = -1, 5_000
    out = torch.full((num_rows,), -7.0, dtype=torch.float64, device=make.device)
    return {"token_ids_R": ids, "out": out}


def _given_filtered(make: Maker, num_rows: int) -> Arguments:
    ids = make.distinct(num_rows, 40)
    return {"token_ids_R": ids, "distribution": filters(make, num_rows)}


def _top(num_top: int) -> Rest:
    def rest(make: Maker, num_rows: int) -> Arguments:
        temperature_R = cycled(make, num_rows, *_TEMPERATURES)
        call: Arguments = {"num_top": num_top, "out": _pair(make, num_rows, num_top)}
        return call | {"distribution": Distribution(temperature_R)}

    return rest


def _top_filtered(make: Maker, num_rows: int) -> Arguments:
    return {"num_top": 6, "distribution": filters(make, num_rows)}


def _shards(make: Maker, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partials of three shards, the middle one to be replaced by the caller's, and temperatures."""
    temperature_R = cycled(make, num_rows, *_TEMPERATURES)
    drawn = make.randn(3, num_rows, 50).float().cpu()
    partials = [
        TorchLogitsPartials()(
            *(drawn[shard],),
            temperature_R=temperature_R.cpu(),
            vocabulary=Vocabulary(120, 50 * shard),
        )
        for shard in range(3)
    ]
    return torch.stack(partials).to(make.device), temperature_R


def _shard_case(op: str, rest: Rest) -> Case:
    """The middle of three shards, of which the last is partly padding."""

    def build(make: Maker) -> Arguments:
        logits = make.randn(6, 50, pad=2)
        partials, temperature_R = _shards(make, 6)
        partials[1] = TorchLogitsPartials()(
            *(logits.float().cpu(),),
            temperature_R=temperature_R.cpu(),
            vocabulary=Vocabulary(120, 50),
        ).to(make.device)
        call = {"logits_RV": logits, "vocabulary": Vocabulary(120, 50, 1, partials)}
        return call | rest(make, 6) | {"distribution": Distribution(temperature_R)}

    return Case(op=op, label="shard", build=build)


def _partials(num_columns: int, vocabulary: Vocabulary) -> Case:
    def rest(make: Maker, num_rows: int) -> Arguments:
        temperature_R = cycled(make, num_rows, *_TEMPERATURES)
        return {"temperature_R": temperature_R, "vocabulary": vocabulary}

    label = f"5x{num_columns}-from-{vocabulary.first_id}"
    return _case("logits_partials", label, _logits(5, num_columns, pad=1), rest)


def _combined(make: Maker) -> Arguments:
    partials, temperature_R = _shards(make, 4)
    partials[1, 2] = torch.tensor([float("nan"), float("nan"), -1.0], dtype=torch.float64)
    partials[2, :2] = torch.tensor([float("-inf"), 0.0, -1.0], dtype=torch.float64)
    partials[:, 3] = torch.tensor([float("-inf"), 0.0, -1.0], dtype=torch.float64)
    return {"partials_SRP": partials, "temperature_R": temperature_R}


CASES: Final[tuple[Case, ...]] = (
    _case("sample", "0x64", _logits(0, 64), _drawn),
    _case("sample", "1x1", _logits(1, 1), _drawn),
    _case("sample", "5x33", _logits(5, 33, pad=3), _drawn),
    _case("sample", "4x1025", _logits(4, 1_025, scale=3.0, pad=1), _drawn),
    _case("sample", "4x5003-padded", _spoilt(4, 5_003, 4_097), _drawn_of(4_097)),
    _case("sample", "4x2050-sure", _logits(4, 2_050, scale=60.0), _drawn),
    _case("sample", "transposed", _transposed, _drawn),
    _case("sample", "7x1100-faulty", _faulty, _drawn),
    _case("sample", "7x1100-faulty-filtered", _faulty, _filtered),
    _case("sample", "4x7-one-nan-filtered", _one_nan_each, _filtered),
    _case("top_logprobs", "4x7-one-nan-filtered", _one_nan_each, _top_filtered),
    _case("sample", "5x9-padding-rows", _logits(5, 9), _padded_rows),
    _case("sample", "6x40-filtered", _logits(6, 40, scale=2.0), _filtered),
    _case("sample", "2x1100-ties", _rounded(2, 1_100), _one_filter("top_k_R", 900, 1_100)),
    _case("sample", "2x1100-top-p", _logits(2, 1_100), _one_filter("top_p_R", 0.0, 0.9)),
    _case("sample", "2x1100-top-p-nan", _logits(2, 1_100), _one_filter("top_p_R", _NAN, 0.9)),
    _case("sample", "3x40-top-p-below", _logits(3, 40), _one_filter("top_p_R", -_INF, -1.0, _INF)),
    _case("sample", "3x40-min-p-beyond", _logits(3, 40), _one_filter("min_p_R", _INF, 2.0, -_INF)),
    _case("sample", "2x40-min-p-nan", _logits(2, 40), _one_filter("min_p_R", 0.05, _NAN)),
    _case("sample", "2x40-min-p", _logits(2, 40), _one_filter("min_p_R", 0.5, 0.05)),
    _case("sample", "16x2501-all-kinds", _of_all_kinds, _filtered_widely),
    _case(
        "sample",
        "16x2512-all-kinds",
        _of_all_kinds_padded,
        lambda make, rows: _filtered_widely(make, rows) | {"vocabulary": Vocabulary(2_501)},
    ),
    _case("sample", "6x6016-flat", _flat, _one_filter("top_p_R", 0.9, 0.5, 0.999, 0.05, 0.7)),
    _shard_case("sample", lambda make, rows: {"draw": draws(make, rows)}),
    _case("token_logprobs", "0x64", _logits(0, 64), _given_ids),
    _case("token_logprobs", "8x1030", _logits(8, 1_030, pad=2), _given_ids),
    _case("token_logprobs", "2x40-filtered", _logits(2, 40), _given_filtered),
    _shard_case(
        "token_logprobs",
        lambda make, rows: {"token_ids_R": torch.arange(rows, device=make.device) * 11 + 41},
    ),
    _case("top_logprobs", "2x1", _logits(2, 1), _top(1)),
    _case("top_logprobs", "4x1030-ties", _rounded(4, 1_030), _top(5)),
    _case("top_logprobs", "7x1100-faulty", _faulty, _top(2)),
    _case("top_logprobs", "2x40-filtered", _logits(2, 40), _top_filtered),
    _shard_case("top_logprobs", lambda make, rows: {"num_top": 3}),
    _partials(1_030, Vocabulary(5_000, 2_000)),
    _partials(40, Vocabulary(2_010, 2_000)),
    _partials(8, Vocabulary(2_000, 2_000)),
    Case(op="combine_partials", label="3x4", build=_combined),
)
