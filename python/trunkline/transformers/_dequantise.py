"""Dequantises weights while a model runs, with the results of transformers' own operations, but faster.

What each byte of a quantised matrix stands for, with the scale of its block, is looked up in tables that are
computed as transformers computes the values.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from trunkline import _core

_CHUNK_ELEMENTS = 1 << 19  # so that what is computed in between stays in the processor's caches
_CODES = 256
_DIMENSIONS = 2
_VALUE_BYTES = (2, 4)  # that look_up() knows
_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_FP4 = {torch.int8, getattr(torch, "float4_e2m1fn_x2", torch.int8)}  # two values in a byte
# Those of a half of a byte, of which the lower one comes first.
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ZERO_EXPONENT = 127  # the code of a scale of 1


class Dequantise:
    """Computes the values of a weight from its stored tensors: the quantised matrix, and its scales."""

    def __init__(self, operation: Any, dtype: torch.dtype) -> None:
        """`operation`: of transformers. `dtype`: of the values."""
        self._operation = operation
        self._kind: Any = type(operation)
        self._target = nn.Module()  # from which the operation takes the dtype
        self._target.weight = nn.Parameter(torch.empty(0, dtype=dtype, device="meta"), requires_grad=False)

    @torch.no_grad()
    def __call__(self, stored: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the values into `out`."""
        matrix, scales = stored
        if _is_equal(self._kind, matrix.dtype, scales.dtype, out.dtype) and look_up(matrix, scales, out):
            return
        if scales.dim() > _DIMENSIONS:
            out.copy_(self.by_operation(matrix, scales))
            return
        block = len(out) // len(scales) if scales.dim() > 1 else len(out)
        for begin, end in _chunks(len(out), block, max(1, _CHUNK_ELEMENTS // max(1, out.shape[1]))):
            of_chunk = scales[begin // block : -(-end // block)] if scales.dim() > 1 else scales
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


def look_up(matrix: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> bool:
    """Write the product of a matrix of fp8 or fp4 and the scales of its blocks into `out`.

    The product is that of float32, rounded to the dtype of `out`. Returns False, and leaves `out` as it was,
    where that is not faster, or not possible.
    """
    rows, columns = matrix.shape
    grid = (scales.shape[-2], scales.shape[-1]) if scales.dim() > 1 else (1, 1)
    if out.dtype.itemsize not in _VALUE_BYTES or scales.numel() != grid[0] * grid[1]:
        return False
    if rows % grid[0] or columns % grid[1]:
        return False
    if scales.dtype.itemsize == 1:
        tables = _tables_of_codes(matrix.dtype, scales.dtype, out.dtype)
        of_blocks = scales.reshape(-1).view(torch.uint8).to(torch.int32)
    elif scales.numel() * _CODES <= matrix.numel():
        tables = _tables(_values_of(matrix.dtype), scales.to(torch.float32).reshape(-1), out.dtype)
        of_blocks = torch.arange(scales.numel(), dtype=torch.int32, device="cpu")
    else:
        return False
    _fill(matrix.view(torch.uint8), of_blocks, (rows // grid[0], columns // grid[1]), tables, out)
    return True


@torch.no_grad()
def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the values of a matrix into `out`, which is transposed: of the shape (32 * groups, rows).

    `blocks`: uint8 of the shape (rows, groups, 16). `scales`: uint8 of (rows, groups). `out`: of a dtype of
    2 or 4 bytes.
    """
    rows, _, nbytes = blocks.shape
    of_blocks = scales.reshape(-1).to(torch.int32)
    _fill(blocks.reshape(rows, -1), of_blocks, (1, nbytes), _tables_of_mxfp4(out.dtype), out, transposed=True)


def _fill(
    codes: torch.Tensor,
    of_blocks: torch.Tensor,
    block: tuple[int, int],
    tables: torch.Tensor,
    out: torch.Tensor,
    *,
    transposed: bool = False,
) -> None:
    """Replace bytes by what the tables, of the shape (tables, 256, values), have for them."""
    _core.look_up(
        codes.contiguous(),
        columns=codes.shape[1],
        tables_of_blocks=of_blocks,
        block_rows=block[0],
        block_columns=block[1],
        tables=tables,
        values=tables.shape[2],
        out=out,
        transposed=transposed,
        threads=torch.get_num_threads(),
    )


def _tables(values: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a table for each factor: the products with the values."""
    return (values[None] * factors[:, None, None]).to(dtype)


@cache
def _tables_of_codes(matrix: torch.dtype, scales: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Return a table for each scale that a byte can stand for."""
    codes = torch.arange(_CODES, dtype=torch.uint8, device="cpu")
    if scales == torch.uint8:
        factors = (codes.to(torch.float32) - _ZERO_EXPONENT).exp2()
    else:
        factors = codes.view(scales).to(torch.float32)
    return _tables(_values_of(matrix), factors, dtype)


@cache
def _tables_of_mxfp4(dtype: torch.dtype) -> torch.Tensor:
    exponents = torch.arange(_CODES, dtype=torch.int32, device="cpu") - _ZERO_EXPONENT
    return torch.ldexp(_values_of(torch.int8).to(dtype)[None], exponents[:, None, None]).to(dtype)


@cache
def _values_of(dtype: torch.dtype) -> torch.Tensor:
    """Return the values that each byte of a matrix stands for, as float32 of the shape (256, values)."""
    if dtype in _FP4:
        pairs = [[_FP4_VALUES[byte & 15], _FP4_VALUES[byte >> 4]] for byte in range(_CODES)]
        return torch.tensor(pairs, dtype=torch.float32, device="cpu")
    return torch.arange(_CODES, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)[:, None]


@cache
def _is_equal(operation: type[Any], matrix: torch.dtype, scales: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether look_up() computes what this version of transformers does, for every byte of a matrix."""
    if matrix not in _FP8 | _FP4 or dtype.itemsize not in _VALUE_BYTES:
        return False
    codes = torch.arange(_CODES, dtype=torch.uint8, device="cpu").repeat(4, 2).view(matrix)
    if scales.itemsize == 1:
        grid = torch.tensor([[120, 127], [130, 3]], dtype=torch.uint8, device="cpu").view(scales)
    else:
        grid = torch.tensor([[0.0123, 3.7], [1.0, 2.0**-20]], device="cpu").to(scales)
    found = torch.empty(4, 2 * _CODES * (2 if matrix in _FP4 else 1), dtype=dtype, device="cpu")
    expected = Dequantise(operation(None), dtype).by_operation(codes, grid)
    return look_up(codes, grid, found) and torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))
