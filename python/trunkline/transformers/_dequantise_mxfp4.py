"""Dequantises mxfp4 experts while a model runs, as transformers does when it loads them, but faster."""

from functools import cache

import torch

_CHUNK_ELEMENTS = 1 << 18  # so that what is computed in between stays in the processor's caches
# The values of the codes, of which a byte holds two, the lower bits first.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ZERO_EXPONENT = 127  # the code of a scale of 1; the largest exponent of a float32
_LARGEST = 255


class Mxfp4Workspace:
    """Memory for what is computed in between, which is kept: new memory costs more than the computing."""

    def __init__(self) -> None:
        """It has no memory at first."""
        self._indices = torch.empty(0, dtype=torch.int32, device="cpu")
        self._pairs = torch.empty(0, dtype=torch.int64, device="cpu")

    def pairs(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` int32 and `count` int64; their values are arbitrary."""
        if count > self._indices.numel():
            with torch.inference_mode(False):  # else they could not be written to outside of that mode
                self._indices = torch.empty(count, dtype=torch.int32, device="cpu")
                self._pairs = torch.empty(count, dtype=torch.int64, device="cpu")
        return self._indices[:count], self._pairs[:count]


@torch.no_grad()
def dequantise_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, workspace: Mxfp4Workspace
) -> None:
    """Write the values of a matrix into `out`, which is transposed: (32 * groups, rows).

    `blocks`: uint8 of the shape (rows, groups, 16), 32 codes each. `scales`: uint8 of (rows, groups).
    """
    rows, groups, nbytes = blocks.shape
    columns = groups * nbytes * 2
    table = _table()
    exponents = scales.to(torch.int32) - _ZERO_EXPONENT
    factors = torch.pow(2.0, exponents.clamp(max=_ZERO_EXPONENT))
    # The largest is beyond a float32: as a factor it would be infinity, of which the product with 0 is NaN.
    further = torch.where(exponents > _ZERO_EXPONENT, 2.0, 1.0) if int(scales.max()) == _LARGEST else None
    step = max(1, _CHUNK_ELEMENTS // columns)
    for begin in range(0, rows, step):
        codes = blocks[begin : begin + step]
        indices, pairs = workspace.pairs(codes.numel())
        indices.view(codes.shape).copy_(codes)
        torch.index_select(table, 0, indices, out=pairs)
        values = pairs.view(torch.float32).view(len(codes), groups, -1)
        values.mul_(factors[begin : begin + step, :, None])
        if further is not None:
            values.mul_(further[begin : begin + step, :, None])
        # Converted first: torch moves equal dtypes faster to where the matrix is transposed.
        out[:, begin : begin + step].copy_(values.view(len(codes), columns).to(out.dtype).t())


@cache
def _table() -> torch.Tensor:
    """Return for each byte the two float32 that it stands for, as one int64."""
    pairs = [[_VALUES[byte & 15], _VALUES[byte >> 4]] for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device="cpu").view(torch.int64).reshape(-1)
