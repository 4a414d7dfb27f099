"""Which configuration decode rows in parts are launched with; needs Triton and no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from syncline.model_ops_rocm import AttentionMetadata
from syncline.model_ops_rocm.testing.stand_in import stand_in_driver
from syncline.model_ops_rocm.triton.configs import CONFIGS, key_for
from syncline.model_ops_rocm.triton.configs.attention import (
    CLOSE,
    CLOSE_LONG,
    EIGHTHS,
    HALVES,
    QUARTERS,
    has_short_row,
)
from syncline.model_ops_rocm.triton.launch import IS_INTERPRETED, LAUNCHER
from syncline.model_ops_rocm.triton.ops.attention import PAGED

BLOCK_SIZE = 64


def kinds(
    arch: str,
    *,
    context: int,
    num_rows: int = 1,
    head_dim: int = 128,
    max_seq_len: int | None = None,
    is_preparing: bool = False,
) -> list[str]:
    """Of the launches of a step of rows of 4 heads of KV that are up to `context` long."""
    width = context // BLOCK_SIZE
    cache = torch.empty(num_rows * width, 4, BLOCK_SIZE, head_dim, dtype=torch.bfloat16)
    q = torch.empty(num_rows, 32, head_dim, dtype=torch.bfloat16)
    meta = AttentionMetadata(
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32),
        seq_lens=torch.ones(num_rows, dtype=torch.int32),
        block_tables=torch.zeros(num_rows, width, dtype=torch.int32),
        num_decode_rows=num_rows,
        max_seq_len=max_seq_len,
    )
    with stand_in_driver(arch), LAUNCHER.compiling(is_preparing=is_preparing) as compiled:
        PAGED(q, cache, cache.clone(), meta, scale=1.0)
    return [one.key.kind for one in compiled if one.key.op == "paged_attention"]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_parts_of_one_tile_are_short() -> None:
    # Of 64 dimensions: of 128 clusters attend to so few rows.
    assert kinds("sm_90", context=512, head_dim=64) == ["decode_short"]
    assert kinds("sm_90", context=2_048, head_dim=64) == ["decode_short"]
    assert kinds("sm_90", context=2_112, head_dim=64) == ["decode_split"]
    assert kinds("sm_90", context=4_096, max_seq_len=512, head_dim=64) == ["decode_short"]
    # Five tiles in four parts; two tiles for each of two parts.
    assert kinds("sm_90", context=320, head_dim=64) == ["decode_split"]
    assert kinds("sm_90", context=512, num_rows=5, head_dim=64) == ["decode_split"]
    assert kinds("sm_90", context=256, head_dim=64) == ["decode"]
    assert kinds("sm_90", context=4_160) == ["decode_split"]
    assert kinds("sm_90", context=512, head_dim=256) == ["decode_split"]
    assert kinds("gfx942", context=512) == ["decode_split"]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_what_is_prepared_serves_any_number_of_rows_and_any_length() -> None:
    few = {EIGHTHS, QUARTERS, HALVES, CLOSE, CLOSE_LONG}
    every = {"decode", "decode_split", "decode_short", *few}
    assert set(kinds("sm_90", context=4_096, num_rows=8, is_preparing=True)) == every
    assert set(kinds("sm_90", context=64, is_preparing=True)) == every
    narrow = kinds("sm_90", context=4_096, head_dim=64, is_preparing=True)
    assert set(narrow) == every - few
    of_amd = {"decode", "decode_split"}
    assert set(kinds("gfx942", context=4_096, is_preparing=True)) == of_amd


def test_short_parts_have_rows_where_it_is_said() -> None:
    of_parts = [key for key in CONFIGS if key.op == "paged_attention" and "split" in key.kind]
    found = {
        key_for(key.op, key.arch, key.dtype, head_dim, "decode_short")
        for key in of_parts
        for head_dim in (16, 64, 72, 128, 136, 256)
        if has_short_row(key, head_dim)
    }
    assert found == {key for key in CONFIGS if key.kind.startswith("decode_short")}
