"""Dequantises fp8 weights while a model runs, with the results of transformers' own operation, but faster."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

_CHUNK_ELEMENTS = 1 << 19  # so that what is computed in between stays in the processor's caches
# The bits of a float8_e4m3fn, moved by seven to the left, are those of a float16 smaller by this factor.
_HALF_FACTOR = 256.0
_HALF_BITS = -16385  # all but the uppermost bit of the exponent
_NAN = 127  # the bits of NaN, but for the sign
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


class Workspace:
    """Memory for what is computed in between, which is kept: new memory costs more than the computing."""

    _DTYPES = (torch.uint8, torch.int16, torch.float32)

    def __init__(self) -> None:
        """It has no memory at first."""
        self._codes, self._bits, self._values = (torch.empty(0, dtype=dtype) for dtype in self._DTYPES)

    def matrices(self, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return matrices of uint8, int16 and float32 of this shape; their values are arbitrary."""
        count = torch.Size(shape).numel()
        if count > self._codes.numel():
            with torch.inference_mode(False):  # else they could not be written to outside of that mode
                made = [torch.empty(count, dtype=dtype, device="cpu") for dtype in self._DTYPES]
            self._codes, self._bits, self._values = made
        codes, bits, values = (
            memory[:count].view(*shape) for memory in (self._codes, self._bits, self._values)
        )
        return codes, bits, values


class Dequantise:
    """Computes the values of a weight from its stored tensors: the quantised matrix, and its scales."""

    def __init__(self, operation: Any, dtype: torch.dtype, workspace: Workspace | None = None) -> None:
        """`operation`: of transformers. `dtype`: of the values. `workspace`: may be shared in a thread."""
        self._operation = operation
        self._kind: Any = type(operation)
        self._workspace = Workspace() if workspace is None else workspace
        self._target = nn.Module()  # from which the operation takes the dtype
        self._target.weight = nn.Parameter(torch.empty(0, dtype=dtype, device="meta"), requires_grad=False)

    @torch.no_grad()
    def __call__(self, stored: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values into `out`."""
        matrix, scales = stored
        grid = grid_of(matrix, scales) if _is_equal(self._kind, out.dtype) else None
        block = len(out) // len(scales) if scales.dim() > 1 else len(out)
        for begin, end in _chunks(len(out), block, max(1, _CHUNK_ELEMENTS // max(1, out.shape[1]))):
            blocks = slice(begin // block, -(-end // block))
            if grid is None or not multiply(matrix[begin:end], grid[blocks], out[begin:end], self._workspace):
                of_chunk = scales[blocks] if scales.dim() > 1 else scales
                out[begin:end].copy_(self.by_operation(matrix[begin:end], of_chunk))

    def by_operation(self, matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the values, computed by transformers' operation at once."""
        tensors = {"weight": [matrix], "weight_scale_inv": [scales]}
        made = self._operation.convert(tensors, full_layer_name="weight", model=self._target)["weight"]
        values: torch.Tensor = made[0] if isinstance(made, list) else made
        return values


def _chunks(rows: int, block: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and end of chunks of about `wanted` rows: whole blocks of rows, or parts of one."""
    begin = 0
    while begin < rows:
        next_block = (begin // block + 1) * block
        end = begin + wanted // block * block if block <= wanted else min(begin + wanted, next_block)
        yield begin, min(end, rows)
        begin = end


def grid_of(matrix: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
    """Return the scales of the blocks that multiply() requires; None if it cannot compute the values."""
    if matrix.dtype != torch.float8_e4m3fn or scales.dtype not in _SCALES or matrix.device.type != "cpu":
        return None
    grid = scales.to(torch.float32) * _HALF_FACTOR
    if not bool(grid.isfinite().all()):
        return None
    return grid if grid.dim() > 1 else grid.reshape(1, 1)


def multiply(matrix: torch.Tensor, grid: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> bool:
    """Write the product of float8_e4m3fn and their blocks' scales, in units of 1/256, into `out`.

    torch converts float8 one by one, which is slower than reading them from a disk. Returns False, and leaves
    `out` as it was, if any is NaN.
    """
    codes, bits, values = workspace.matrices(matrix.shape)
    torch.bitwise_and(matrix.view(torch.uint8), _NAN, out=codes)
    if codes.numel() and int(codes.max()) == _NAN:
        return False
    bits.copy_(matrix.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(_HALF_BITS)
    values.copy_(bits.view(torch.float16))
    columns = values.shape[1]
    by_row = grid.repeat_interleave(columns // grid.shape[1], 1)
    values.view(len(grid), -1, columns).mul_(by_row[:, None])
    out.copy_(values)
    return True


@cache
def _is_equal(operation: type[Any], dtype: torch.dtype) -> bool:
    """Whether multiply() computes what this version of transformers does, for every float8_e4m3fn."""
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    codes = codes[codes % 128 != _NAN]
    matrix = codes.repeat(4, 1).view(torch.float8_e4m3fn)
    scales = torch.tensor([[0.0123, 3.7], [1.0, 2.0**-20]], device="cpu")
    grid, found = grid_of(matrix, scales), torch.empty_like(matrix, dtype=dtype)
    expected = Dequantise(operation(None), dtype).by_operation(matrix, scales)
    return grid is not None and multiply(matrix, grid, found, Workspace()) and torch.equal(found, expected)
