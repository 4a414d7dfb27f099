"""Speed of storing bfloat16 weights as fp8: 3 bytes an element move, however scales are made.

Maxima that are added to those of other parts read 2.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_timing import Machine, Row, num_operands, row_of_bytes

from syncline.model_ops_rocm import (
    CodeType,
    EncodeJob,
    Granularity,
    Quantised,
    Shuffle16x16,
    StorageFormat,
    Unquantised,
    detect_arch,
    full_region,
    select,
)

TARGET = 0.75
ROWS = 8_192
EXPERT = (768, 2_048)
NUM_EXPERTS = 512


def rows(machine: Machine, *, quick: bool) -> Iterator[Row]:
    """The promised recipes, and the others unless `quick`."""
    for granularity, columns in (
        (Granularity.BLOCK_1X128, 8_192),
        (Granularity.BLOCK_128X128, 8_192),
        (Granularity.TOKEN, 4_096),
        (Granularity.TOKEN, 12_288),
    ):
        yield _one(machine, _fp8(granularity), columns, TARGET)
    if not quick:
        for granularity in (Granularity.BLOCK_1X128, Granularity.BLOCK_128X128, Granularity.TOKEN):
            shuffled = StorageFormat(recipe=_fp8(granularity).recipe, layout=Shuffle16x16())
            yield _one(machine, shuffled, 8_192)
        # Two passes: the floor is still that of one.
        yield _one(machine, _fp8(Granularity.TENSOR), 8_192)
        copied = StorageFormat(recipe=Unquantised(torch.bfloat16), layout=Shuffle16x16())
        yield _one(machine, copied, 8_192)
        for granularity in (Granularity.BLOCK_128X128, Granularity.TENSOR):
            for shape in ((ROWS, 8_192), EXPERT):
                yield _maxima(machine, _fp8(granularity), shape)
    # The last in two passes: the floor is still that of one.
    for granularity in (Granularity.BLOCK_1X128, Granularity.TENSOR):
        yield _many(machine, _fp8(granularity))


def _fp8(granularity: Granularity) -> StorageFormat:
    return StorageFormat(recipe=Quantised(granularity=granularity, code=CodeType.E4M3FN))


def _job(storage: StorageFormat, shape: tuple[int, int]) -> EncodeJob:
    out = {
        name: torch.empty(spec.shape, dtype=spec.dtype, device="cuda")
        for name, spec in storage.storage_spec(shape).items()
    }
    return EncodeJob.whole(storage, out, torch.randn(shape, dtype=torch.bfloat16, device="cuda"))


def _num_bytes(job: EncodeJob) -> int:
    stored = sum(tensor.numel() * tensor.itemsize for tensor in job.out.values())
    return stored + 2 * job.source.shape.numel()


def _one(
    machine: Machine, storage: StorageFormat, columns: int, target: float | None = None
) -> Row:
    encode = select("encode", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    shape = (ROWS, columns)
    nonfinite = torch.zeros(1, dtype=torch.bool, device="cuda")
    num_bytes = encode.workspace_bytes(storage, shape)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    jobs = [_job(storage, shape) for _ in range(num_operands(3 * ROWS * columns))]
    calls: list[Callable[[], object]] = [
        lambda job=job: encode(job, nonfinite=nonfinite, workspace=workspace)  # type: ignore[misc]  # a default binds the job
        for job in jobs
    ]
    return row_of_bytes(
        machine,
        "encode",
        f"{ROWS} x {columns} {storage.describe()}",
        calls,
        _num_bytes(jobs[0]),
        target=target,
    )


def _maxima(machine: Machine, storage: StorageFormat, shape: tuple[int, int]) -> Row:
    amax_into = select("amax_into", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    num_bytes = 2 * math.prod(shape)
    calls: list[Callable[[], object]] = []
    for _ in range(num_operands(num_bytes)):
        source = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        maxima = storage.new_amax(shape, "cuda")
        calls.append(partial(amax_into, storage, maxima, source, full_region(shape)))
    return row_of_bytes(
        machine,
        "amax_into",
        f"{shape[0]} x {shape[1]} {storage.describe()}",
        calls,
        num_bytes,
    )


def _many(machine: Machine, storage: StorageFormat) -> Row:
    """Prepared once, and recorded; the note says what preparing takes of the host."""
    grouped = select("encode_grouped", backend="triton", arch=detect_arch(), dtype=torch.bfloat16)
    nonfinite = torch.zeros(1, dtype=torch.bool, device="cuda")
    num_bytes = grouped.workspace_bytes([(storage, EXPERT)] * NUM_EXPERTS)
    calls: list[Callable[[], object]] = []
    times: list[float] = []
    for _ in range(2):
        jobs = [_job(storage, EXPERT) for _ in range(NUM_EXPERTS)]
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        for _ in range(3):
            begun = time.perf_counter()
            prepared = grouped.prepare(jobs, nonfinite=nonfinite, workspace=workspace)
            times.append(time.perf_counter() - begun)
        calls.append(prepared)
    return row_of_bytes(
        machine,
        "encode_grouped",
        f"{NUM_EXPERTS} of {EXPERT[0]} x {EXPERT[1]} {storage.describe()}",
        calls,
        sum(map(_num_bytes, jobs)),
        note=f"{statistics.median(times) / NUM_EXPERTS * 1e6:.0f} us of the host each, once",
    )
