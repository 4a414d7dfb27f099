"""A job given to a backend by name; the one module of this package that knows the registry."""

import torch

from syncline.model_ops_rocm.arch import detect_arch
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.recipes import WEIGHT
from syncline.model_ops_rocm.registry import select


def encode_by(backend: str, job: EncodeJob, nonfinite: torch.Tensor | None) -> None:
    """By the op "encode" on the GPU at hand, with a workspace of its own."""
    dtype = torch.float32 if isinstance(job.source, CodedSource) else job.source.dtype
    op = select("encode", backend=backend, arch=detect_arch(), dtype=dtype)
    shape = job.check(nonfinite=nonfinite)
    num_bytes = op.workspace_bytes(job.storage_format, shape)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=job.out[WEIGHT].device)
    op(job, nonfinite=nonfinite, workspace=workspace)
