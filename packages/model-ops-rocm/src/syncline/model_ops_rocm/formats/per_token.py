"""fp8 codes with one float32 scale per row: the quantised recipe of token granularity, by name."""

from typing import Final

import torch

from syncline.model_ops_rocm.formats.quantised import Quantised
from syncline.model_ops_rocm.quant.scheme import CodeType, Granularity

_CODES: Final = {
    torch.float8_e4m3fn: CodeType.E4M3FN,
    torch.float8_e4m3fnuz: CodeType.E4M3FNUZ,
}


def PerTokenFp8(dtype: torch.dtype = torch.float8_e4m3fn) -> Quantised:
    """fp8 codes with one float32 scale per row of the last dimension; decodes to float32.

    Raises ValueError for a dtype that is not fp8.
    """
    if dtype not in _CODES:
        raise ValueError(
            f"PerTokenFp8: dtype must be one of {[str(known) for known in _CODES]}, got {dtype}"
        )
    return Quantised(granularity=Granularity.TOKEN, code=_CODES[dtype])
