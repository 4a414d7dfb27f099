"""What the ops between two decode steps refuse, on every backend; see `arguments`."""

from collections.abc import Iterator
from dataclasses import fields

import torch

from syncline.model_ops_rocm.checks import (
    INDEX_DTYPES,
    refuse,
    require_apart,
    require_contiguous,
    require_dtype,
    require_float,
    require_index,
    require_kind,
    require_ndim,
    require_shape,
    require_tensors,
)
from syncline.model_ops_rocm.contracts.decoding import DecodeInputs, DecodeState, Rejection

ADVANCE = "advance"
# What `advance` reads alone, of the values that it writes to.
_READ = (
    "out.query_start_loc",
    "out.rows",
    "state.min_num_tokens",
    "state.max_num_tokens",
    "state.stop_ids",
    "state.block_tables",
)
VERIFY = "verify_drafts"


def require_matrix(
    op: str, argument: str, tensor: torch.Tensor, shape: tuple[int | None, int | None]
) -> None:
    """Two dimensions of int64 or int32, of the sizes that are not None."""
    if tensor.dtype not in INDEX_DTYPES:
        refuse(op, argument, "be int64 or int32", tensor.dtype)
    require_ndim(op, argument, tensor, 2)
    wanted = tuple(
        size if size is not None else found for size, found in zip(shape, tensor.shape, strict=True)
    )
    require_shape(op, argument, tensor, wanted)


def check_advance(
    tokens_RQ: torch.Tensor | None,
    state: DecodeState,
    out: DecodeInputs,
    *,
    num_accepted_R: torch.Tensor | None,
    drafts_RK: torch.Tensor | None,
    lays_out: bool,
) -> tuple[int, int]:
    """Returns R and Q."""
    require_kind(ADVANCE, "state", state, DecodeState)
    require_kind(ADVANCE, "out", out, DecodeInputs)
    num_rows, num_queries = _rows_and_queries(tokens_RQ, out, drafts_RK)
    if tokens_RQ is None and not lays_out:
        refuse(ADVANCE, "tokens", "be given where no step is laid out", None)
    num_state_rows = _check_state(state)
    if num_accepted_R is not None:
        require_index(ADVANCE, "num_accepted", num_accepted_R, num_rows)
    elif num_queries > 1 and tokens_RQ is not None:
        refuse(ADVANCE, "num_accepted", f"be given for {num_queries} tokens per row", None)
    if drafts_RK is not None:
        require_matrix(ADVANCE, "drafts", drafts_RK, (num_rows, num_queries - 1))
    if out.rows_R is None and num_state_rows < num_rows:
        limit = f"have the {num_rows} rows of tokens, without out.rows"
        refuse(ADVANCE, "state.num_tokens", limit, num_state_rows)
    if num_rows and not num_state_rows:
        refuse(ADVANCE, "state.num_tokens", "have a row", list(state.num_tokens_S.shape))
    _check_inputs(out, num_rows, num_queries)
    _check_apart(state, out, tokens=tokens_RQ, drafts=drafts_RK, num_accepted=num_accepted_R)
    return num_rows, num_queries


def _rows_and_queries(
    tokens_RQ: torch.Tensor | None, out: DecodeInputs, drafts_RK: torch.Tensor | None
) -> tuple[int, int]:
    if tokens_RQ is not None:
        require_matrix(ADVANCE, "tokens", tokens_RQ, (None, None))
        num_rows, num_queries = tokens_RQ.shape
        if num_queries == 0:
            refuse(ADVANCE, "tokens", "have at least one token per row", list(tokens_RQ.shape))
        return num_rows, num_queries
    require_index(ADVANCE, "out.seq_lens", out.seq_lens_R, None)
    num_rows = out.seq_lens_R.shape[0]
    if drafts_RK is None:
        return num_rows, 1
    require_matrix(ADVANCE, "drafts", drafts_RK, (num_rows, None))
    return num_rows, 1 + drafts_RK.shape[1]


def _check_state(state: DecodeState) -> int:
    """The number of state rows."""
    require_index(ADVANCE, "state.num_tokens", state.num_tokens_S, None)
    num_rows = state.num_tokens_S.shape[0]
    require_dtype(ADVANCE, "state.is_alive", state.is_alive_S, torch.bool)
    require_shape(ADVANCE, "state.is_alive", state.is_alive_S, (num_rows,))
    require_dtype(ADVANCE, "state.faults", state.faults_S, torch.int32)
    require_shape(ADVANCE, "state.faults", state.faults_S, (num_rows,))
    if state.block_size < 1:
        refuse(ADVANCE, "state.block_size", "be positive", state.block_size)
    require_index(ADVANCE, "state.last_ids", state.last_ids_S, num_rows)
    require_index(ADVANCE, "state.min_num_tokens", state.min_num_tokens_S, num_rows)
    require_index(ADVANCE, "state.max_num_tokens", state.max_num_tokens_S, num_rows)
    for name, letters, tensor in _tensors(state):
        if letters == "S":
            require_contiguous(ADVANCE, f"state.{name}", tensor)
            continue
        require_matrix(ADVANCE, f"state.{name}", tensor, (num_rows, None))
        if tensor.stride(1) != 1:
            refuse(ADVANCE, f"state.{name}", "have contiguous rows", f"strides {tensor.stride()}")
    return num_rows


def _named(rejection: Rejection) -> Iterator[tuple[str, torch.Tensor]]:
    for name, _, tensor in _tensors(rejection):
        yield f"rejection.{name}", tensor


def _tensors(
    value: DecodeState | DecodeInputs | Rejection,
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name, shape letters and tensor of each field that is there."""
    for field in fields(value):
        tensor = getattr(value, field.name)
        name, _, letters = field.name.rpartition("_")
        if isinstance(tensor, torch.Tensor):
            yield name, letters, tensor


def _check_apart(state: DecodeState, out: DecodeInputs, **given: torch.Tensor | None) -> None:
    found = {f"out.{name}": tensor for name, _, tensor in _tensors(out)}
    found |= {f"state.{name}": tensor for name, _, tensor in _tensors(state)}
    read = {name: found.pop(name, None) for name in _READ}
    require_apart(ADVANCE, found, given | read)


def _check_inputs(out: DecodeInputs, num_rows: int, num_queries: int) -> None:
    num_places = out.input_ids_T.shape[0] if out.input_ids_T.ndim else 0
    lengths = {"R": num_rows, "R1": num_rows + 1, "T": num_places}
    for name, letter, tensor in _tensors(out):
        require_index(ADVANCE, f"out.{name}", tensor, lengths[letter])
        require_contiguous(ADVANCE, f"out.{name}", tensor)
    if out.query_start_loc_R1 is not None:
        if num_places > num_rows * num_queries:
            limit = f"have at most {num_rows} x {num_queries} places"
            refuse(ADVANCE, "out.input_ids", limit, num_places)
    elif num_places != num_rows:
        limit = f"have {num_rows} places, one per row, without query_start_loc"
        refuse(ADVANCE, "out.input_ids", limit, num_places)


def check_verify(
    drafts_RK: torch.Tensor,
    target: torch.Tensor,
    *,
    rejection: Rejection | None,
    query_start_loc_R1: torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    require_matrix(VERIFY, "drafts", drafts_RK, (None, None))
    num_rows, num_queries = drafts_RK.shape[0], drafts_RK.shape[1] + 1
    leading: tuple[int, ...] = (num_rows, num_queries)
    if query_start_loc_R1 is not None:
        require_index(VERIFY, "query_start_loc", query_start_loc_R1, num_rows + 1)
        require_contiguous(VERIFY, "query_start_loc", query_start_loc_R1)
        leading = tuple(target.shape[:1]) or (0,)
    if rejection is None:
        if target.dtype not in INDEX_DTYPES:
            refuse(VERIFY, "target", "be int64 or int32", target.dtype)
        if target.shape != leading:
            refuse(VERIFY, "target", f"have shape {_shape(leading)}", list(target.shape))
    else:
        require_float(VERIFY, "target", target)
        if target.ndim != len(leading) + 1 or target.shape[:-1] != leading:
            refuse(VERIFY, "target", f"have shape {_shape(leading, 'V')}", list(target.shape))
        if target.shape[-1] == 0:
            refuse(VERIFY, "target", "have at least one id", list(target.shape))
        _check_rejection(rejection, drafts_RK, target)
    if out is not None:
        require_tensors(VERIFY, "out", out)
        require_matrix(VERIFY, "out[0]", out[0], (num_rows, num_queries))
        require_index(VERIFY, "out[1]", out[1], num_rows)
        require_contiguous(VERIFY, "out[1]", out[1])
        inputs = {} if rejection is None else dict(_named(rejection))
        inputs |= {"drafts": drafts_RK, "target": target}
        if query_start_loc_R1 is not None:
            inputs["query_start_loc"] = query_start_loc_R1
        require_apart(VERIFY, {"out[0]": out[0], "out[1]": out[1]}, inputs)


def _shape(sizes: tuple[int, ...], *letters: str) -> str:
    return f"[{', '.join((*map(str, sizes), *letters))}]"


def _check_rejection(rejection: Rejection, drafts_RK: torch.Tensor, target: torch.Tensor) -> None:
    require_kind(VERIFY, "rejection", rejection, Rejection)
    num_rows, num_drafts = drafts_RK.shape
    require_dtype(VERIFY, "rejection.seeds", rejection.seeds_R, torch.int64)
    vectors = [
        ("seeds", rejection.seeds_R),
        ("sample_index", rejection.sample_index_R),
        ("positions", rejection.positions_R),
    ]
    for name, vector in vectors:
        require_index(VERIFY, f"rejection.{name}", vector, num_rows)
        require_contiguous(VERIFY, f"rejection.{name}", vector)
    if rejection.temperature_R is not None:
        name = "rejection.temperature"
        require_dtype(VERIFY, name, rejection.temperature_R, torch.float32)
        require_shape(VERIFY, name, rejection.temperature_R, (num_rows,))
        require_contiguous(VERIFY, name, rejection.temperature_R)
    if rejection.draft_logits_RKV is not None:
        name, logits = "rejection.draft_logits", rejection.draft_logits_RKV
        require_dtype(VERIFY, name, logits, target.dtype)
        require_shape(VERIFY, name, logits, (num_rows, num_drafts, target.shape[-1]))
