"""Products whose rows do not depend on the rows beside them: tiles of as many rows, always.

Unit: one product with a matrix [N, K]. A library picks its way to sum by the number of rows, so
every product here has the same; what the last tile lacks is zeros. That a row's place in the tile
changes nothing is tested, not promised by anyone.
"""

from typing import Final

import torch
import torch.nn.functional as F

TILE_ROWS: Final = 32


def linear_in_tiles(
    x_TK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """F.linear(x, weight, bias) for x [..., K]; each row's bits are its own."""
    rows = x_TK.reshape(-1, x_TK.shape[-1])
    result = rows.new_empty(rows.shape[0], weight.shape[0])
    tile = rows.new_zeros(TILE_ROWS, rows.shape[1])
    for start in range(0, rows.shape[0], TILE_ROWS):
        part = rows[start : start + TILE_ROWS]
        tile[: part.shape[0]] = part
        tile[part.shape[0] :] = 0
        result[start : start + TILE_ROWS] = F.linear(tile, weight, bias)[: part.shape[0]]
    return result.view(*x_TK.shape[:-1], weight.shape[0])
