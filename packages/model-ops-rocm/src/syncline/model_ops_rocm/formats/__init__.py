"""The one description of a stored weight: recipe and layout; knows no names and no ranks."""

from syncline.model_ops_rocm.formats.checksums import (
    checksum_logical,
    checksum_stored,
    checksum_tensor,
)
from syncline.model_ops_rocm.formats.coded import CodedSource
from syncline.model_ops_rocm.formats.jobs import EncodeJob
from syncline.model_ops_rocm.formats.padding import Padding
from syncline.model_ops_rocm.formats.partials import AmaxPartial
from syncline.model_ops_rocm.formats.per_token import PerTokenFp8
from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.formats.recipes import Encoded, Recipe, TensorSpec, Unquantised
from syncline.model_ops_rocm.formats.storage_format import StorageFormat

__all__ = [
    "AmaxPartial",
    "CodedSource",
    "EncodeJob",
    "Encoded",
    "Padding",
    "PerTokenFp8",
    "Quantised",
    "Recipe",
    "StorageFormat",
    "TensorSpec",
    "Unquantised",
    "checksum_logical",
    "checksum_stored",
    "checksum_tensor",
]
