"""The one description of a stored weight: recipe and layout; knows no names and no ranks."""

from syncline.model_ops_rocm.formats.checksums import (
    checksum_logical,
    checksum_stored,
    checksum_tensor,
)
from syncline.model_ops_rocm.formats.recipes import (
    PerTokenFp8,
    Recipe,
    TensorSpec,
    Unquantised,
)
from syncline.model_ops_rocm.formats.storage_format import StorageFormat

__all__ = [
    "PerTokenFp8",
    "Recipe",
    "StorageFormat",
    "TensorSpec",
    "Unquantised",
    "checksum_logical",
    "checksum_stored",
    "checksum_tensor",
]
