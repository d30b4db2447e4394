"""What users get for the bytes of a sample."""

import ast
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy
from numpy.lib import format as npy_format

from trunkline import _core
from trunkline._parsing import parsed
from trunkline.data import _npz, _parquet
from trunkline.data._info import IndexInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

View = Callable[[Any, int], object]


def viewer(
    info: IndexInfo,
    paths: Sequence[str],
    first_samples: "NDArray[numpy.uint64]",
    offsets: "NDArray[numpy.uint64] | None",
) -> View:
    """Return the function that makes the view of a sample from its memory and its number."""

    def path_of(sample: int) -> str:
        return paths[_file_of(first_samples, sample)]

    def ranges_of(sample: int) -> tuple[str, int, list[int]]:
        assert offsets is not None
        file = _file_of(first_samples, sample)
        begin = sample * info.ranges_per_sample
        ranges = offsets[begin : begin + info.ranges_per_sample].tolist()
        return paths[file], sample - int(first_samples[file]), ranges

    if info.format == "npy":
        return _row_viewer(info)
    if info.format == "webdataset":
        return _archive_viewer(path_of)
    if info.format == "npz":
        return _npz.viewer(path_of)
    if info.format == "parquet":
        return _parquet.viewer(info.columns, ranges_of)
    return _memory_itself


def _memory_itself(memory: Any, sample: int) -> object:
    return memory


def row_dtype(info: IndexInfo) -> "numpy.dtype[Any] | None":
    """Return the dtype of the rows of .npy files; None for another format."""
    if info.format != "npy":
        return None
    return npy_format.descr_to_dtype(parsed(lambda: ast.literal_eval(info.dtype)))


def _row_viewer(info: IndexInfo) -> View:
    found = row_dtype(info)
    assert found is not None
    dtype = found  # as mypy does not see in view() that it is not None
    shape = tuple(info.row_shape)

    def view(memory: Any, sample: int) -> object:
        return numpy.frombuffer(memory, numpy.uint8).view(dtype).reshape(shape)

    return view


def _file_of(first_samples: "NDArray[numpy.uint64]", sample: int) -> int:
    return int(numpy.searchsorted(first_samples, numpy.uint64(sample), side="right")) - 1


def _archive_viewer(path_of: Callable[[int], str]) -> View:
    def view(memory: Any, sample: int) -> object:
        key, members = _core.parse_tar_sample(memory, path_of(sample))
        parts: dict[str, Any] = {"__key__": key}
        for extension, begin, end in members:
            parts[extension] = memory[begin:end]
        return parts

    return view
