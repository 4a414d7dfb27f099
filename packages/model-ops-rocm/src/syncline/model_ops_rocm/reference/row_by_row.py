"""Products whose rows do not depend on the rows beside them: one row at a time, always.

Unit: one product with a matrix [N, K]. A library picks its way to sum by the number of rows and, in
tiles of small matrices, by a row's place among them: so every row here is the only one of its tile,
which lies at one address that every alignment allows. Right, not fast.
"""

import torch
import torch.nn.functional as F


def linear_row_by_row(
    x_TK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """F.linear(x, weight, bias) for x [..., K]; each row's bits are its own."""
    shape = (*x_TK.shape[:-1], weight.shape[0])
    if 0 in (*shape, x_TK.shape[-1]):
        return F.linear(x_TK, weight, bias)
    rows = x_TK.reshape(-1, x_TK.shape[-1])
    result = rows.new_empty(rows.shape[0], weight.shape[0])
    tile = rows.new_empty(1, rows.shape[1])
    for index in range(rows.shape[0]):
        tile.copy_(rows[index : index + 1])
        result[index] = F.linear(tile, weight, bias)[0]
    return result.view(shape)
