"""What users get for the bytes of a sample."""

import ast
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy
from numpy.lib import format as npy_format

from trunkline.data._info import IndexInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

View = Callable[[Any, int], object]


def viewer(info: IndexInfo, paths: Sequence[str], first_samples: "NDArray[numpy.uint64]") -> View:
    """Return the function that makes the view of a sample from its memory and its number."""
    if info.format == "npy":
        return _row_viewer(info)
    return _memory_itself


def _memory_itself(memory: Any, sample: int) -> object:
    return memory


def _row_viewer(info: IndexInfo) -> View:
    dtype = npy_format.descr_to_dtype(ast.literal_eval(info.dtype))
    shape = tuple(info.row_shape)

    def view(memory: Any, sample: int) -> object:
        return numpy.frombuffer(memory, numpy.uint8).view(dtype).reshape(shape)

    return view
