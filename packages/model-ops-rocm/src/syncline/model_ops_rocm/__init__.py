"""Ops of language models behind contracts, and the one description of a stored weight.

Unit: one op call, or one stored weight. Knows tensors, layouts and quantisation; does not know
models, names of weights, ranks, block ownership or schedules. Importing it needs PyTorch alone: no
GPU, Triton or AITER.
"""

from syncline.model_ops_rocm.arch import KNOWN_ARCHS, detect_arch
from syncline.model_ops_rocm.contracts import (
    AttentionMetadata,
    Embedding,
    GatherRows,
    KVCopyBlocks,
    KVWrite,
    Linear,
    PagedAttention,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
)
from syncline.model_ops_rocm.errors import (
    BackendUnavailableError,
    FormatError,
    LayoutError,
    NoConfigurationError,
    NoImplementationError,
    NotPreparedError,
    OpError,
)
from syncline.model_ops_rocm.formats import (
    AmaxPartial,
    Encoded,
    Padding,
    PerTokenFp8,
    Quantised,
    Recipe,
    StorageFormat,
    TensorSpec,
    Unquantised,
    checksum_logical,
    checksum_stored,
    checksum_tensor,
)
from syncline.model_ops_rocm.layouts import RowMajor, Shuffle16x16, WeightLayout
from syncline.model_ops_rocm.quant import (
    CodeType,
    E4m3fnuzWeight,
    E4m3fnWeight,
    E8m0Mode,
    Granularity,
    ScaleType,
    ZeroRule,
    to_e4m3fnuz,
)
from syncline.model_ops_rocm.regions import Region, full_region
from syncline.model_ops_rocm.registry import Availability, available, prepare, select

__all__ = [
    "KNOWN_ARCHS",
    "AmaxPartial",
    "AttentionMetadata",
    "Availability",
    "BackendUnavailableError",
    "CodeType",
    "E4m3fnWeight",
    "E4m3fnuzWeight",
    "E8m0Mode",
    "Embedding",
    "Encoded",
    "FormatError",
    "GatherRows",
    "Granularity",
    "KVCopyBlocks",
    "KVWrite",
    "LayoutError",
    "Linear",
    "NoConfigurationError",
    "NoImplementationError",
    "NotPreparedError",
    "OpError",
    "Padding",
    "PagedAttention",
    "PerTokenFp8",
    "Quantised",
    "RMSNorm",
    "Recipe",
    "Region",
    "RotaryEmbedding",
    "RowMajor",
    "ScaleType",
    "Shuffle16x16",
    "SiluAndMul",
    "StorageFormat",
    "TensorSpec",
    "Unquantised",
    "WeightLayout",
    "ZeroRule",
    "available",
    "checksum_logical",
    "checksum_stored",
    "checksum_tensor",
    "detect_arch",
    "full_region",
    "prepare",
    "select",
    "to_e4m3fnuz",
]
