"""The launches of the ops from logits to tokens."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from kernel_families.base import Arguments, Calls, Rules, empty, ids
from syncline.model_ops_rocm.contracts.logits import Distribution, Draw, Vocabulary
from syncline.model_ops_rocm.contracts.logits_rules import LogitsRules
from syncline.model_ops_rocm.triton.configs.base import ConfigKey

# A vocabulary of which the last rows of the head are padding.
_COLUMNS: Final = 151_936
_REAL: Final = Vocabulary(151_665)


def _floats(num_rows: int) -> torch.Tensor:
    return torch.empty(num_rows, device="meta")


def _partials(num_rows: int) -> torch.Tensor:
    return torch.empty((8, num_rows, 3), dtype=torch.float64, device="meta")


def _variants(key: ConfigKey, num_rows: int, rest: Arguments) -> Iterator[tuple[str, Arguments]]:
    if key.kind != "row":
        return
    logits = empty(key, num_rows, _COLUMNS)
    plain: Arguments = {
        "logits_RV": logits,
        "distribution": Distribution(_floats(num_rows)),
        "vocabulary": _REAL,
    }
    yield "plain", plain | rest
    if key.dtype is torch.bfloat16:
        shard = Vocabulary(8 * _COLUMNS, 3 * _COLUMNS, 3, _partials(num_rows))
        yield "shard", plain | {"vocabulary": shard} | rest


def _draw(num_rows: int) -> Draw:
    samples = torch.empty(num_rows, dtype=torch.int32, device="meta")
    return Draw(ids(num_rows), samples, ids(num_rows))


def _samples(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    rest: Arguments = {"draw": _draw(num_tokens)}
    yield from _variants(key, num_tokens, rest)
    if key.kind == "filter":
        floats = _floats(num_tokens)
        top_k = torch.empty(num_tokens, dtype=torch.int32, device="meta")
        filtered: Arguments = {
            "logits_RV": empty(key, num_tokens, _COLUMNS),
            "distribution": Distribution(floats, top_k, floats, floats),
            "vocabulary": _REAL,
        }
        yield "filtered", filtered | rest


def _tokens(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    yield from _variants(key, num_tokens, {"token_ids_R": ids(num_tokens)})


def _tops(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    yield from _variants(key, num_tokens, {"num_top": 20})


def _shards(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    arguments: Arguments = {
        "logits_RV": empty(key, num_tokens, _COLUMNS),
        "temperature_R": _floats(num_tokens),
        "vocabulary": Vocabulary(8 * _COLUMNS, 3 * _COLUMNS),
    }
    yield "plain", arguments


def _combined(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    floats = _floats(num_tokens)
    yield "plain", {"partials_SRP": _partials(num_tokens), "temperature_R": floats}


def _ruled(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    logits, floats = empty(key, num_tokens, _COLUMNS), _floats(num_tokens)
    words = torch.empty(num_tokens, _COLUMNS // 32, dtype=torch.int32, device="meta")
    rules = LogitsRules(
        allowed_RW=words,
        forbidden_ids_RF=ids(num_tokens, 4),
        forbidden_until_R=ids(num_tokens),
        positions_R=ids(num_tokens),
        bias_ids_RB=ids(num_tokens, 16),
        bias_values_RB=torch.empty(num_tokens, 16, device="meta"),
        counts_SV=torch.empty(256, _COLUMNS, dtype=torch.int32, device="meta"),
        rows_R=ids(num_tokens),
        repetition_R=floats,
        frequency_R=floats,
        presence_R=floats,
        temperature_R=floats,
    )
    yield "everything", {"logits_RV": logits, "rules": rules, "vocabulary": _REAL, "out": logits}


def _counts(key: ConfigKey, num_tokens: int) -> Iterator[tuple[str, Arguments]]:
    table = torch.empty(256, _COLUMNS, dtype=torch.int32, device="meta")
    for is_prompt in (False, True):
        tokens: Arguments = {"token_ids_T": ids(num_tokens), "rows_T": ids(num_tokens)}
        variant = "prompt" if is_prompt else "generated"
        yield variant, tokens | {"counts_SV": table, "is_prompt": is_prompt}


CALLS: Final[Mapping[str, Calls]] = {
    "apply_logits_rules": _ruled,
    "count_tokens": _counts,
    "sample": _samples,
    "token_logprobs": _tokens,
    "top_logprobs": _tops,
    "logits_partials": _shards,
    "combine_partials": _combined,
}
# Narrow: what there is one of per row, per tile or per 32 ids. Logits are read in wide loads.
RULES: Final[Mapping[str, Rules]] = {
    "apply_logits_rules": Rules(max_narrow_loads=26, max_narrow_stores=1),
    "count_tokens": Rules(max_narrow_loads=8, max_narrow_stores=2),
    "sample": Rules(
        max_narrow_loads=14,
        max_narrow_stores=4,
        # A sample is single runs, each with its tile's largest; what is collected is closed up
        # one by one.
        narrow_loads={"bracket_kernel": 41, "settle_kernel": 68, "kept_kernel": 47},
        narrow_stores={"bracket_kernel": 6, "collect_kernel": 18, "settle_kernel": 6},
    ),
    "token_logprobs": Rules(max_narrow_loads=8, max_narrow_stores=2),
    "top_logprobs": Rules(max_narrow_loads=8, max_narrow_stores=2),
    "logits_partials": Rules(max_narrow_loads=6, max_narrow_stores=3),
    "combine_partials": Rules(max_narrow_loads=4, max_narrow_stores=3),
}
