"""Row groups of Parquet files: we read the chosen column chunks, Arrow decodes them."""

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from trunkline._errors import Corrupt, Error, Format
from trunkline.data._listing import Listing
from trunkline.data._options import Options
from trunkline.data._scan_pool import scan_files
from trunkline.data._skipping import DAMAGE, Skipped
from trunkline.data._uniform import first_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEPT_FOOTERS = 64  # of files that were read last


@dataclass
class _Chunks:
    """Where the chosen column chunks of a file are: arrays of [row group, column]."""

    offsets: "NDArray[numpy.uint64]"
    lengths: "NDArray[numpy.uint64]"
    schema: list[tuple[str, str]]  # path and type of each chosen column


def parquet_module() -> Any:
    """Import pyarrow.parquet. Raises ImportError that says how to install it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f'format "parquet" requires pyarrow, which cannot be imported ({error}): pip install pyarrow'
        ) from None
    return pyarrow.parquet


def parquet_parts(
    listing: Listing, options: Options, skipped: Skipped
) -> "tuple[dict[str, Any], dict[str, NDArray[Any]]]":
    """Return the fields and arrays of an index of row groups."""
    parquet_module()

    def scan(file: int) -> _Chunks | Error:
        try:
            return _scan(listing.path(file), int(listing.sizes[file]), options.columns)
        except DAMAGE as error:
            return error

    counts = numpy.zeros(len(listing), numpy.int64)
    found: list[_Chunks] = []
    first: tuple[str, _Chunks] | None = None
    for file, chunks in scan_files(range(len(listing)), scan, options):
        path = listing.path(file)
        if isinstance(chunks, _Chunks):
            first = first or (path, chunks)
            if chunks.schema != first[1].schema:
                message = f"{path}: has other columns than {first[0]}, or other types; index them separately"
                chunks = Format(None, message, path)
        if isinstance(chunks, Error):
            skipped.add(path, 0, chunks)
            continue
        counts[file] = len(chunks.offsets)
        found.append(chunks)
    if first is None:
        raise Format(
            None, f"none of the {len(listing)} files could be indexed; the first is {listing.path(0)}"
        )
    offsets, lengths = _merged(
        numpy.concatenate([chunks.offsets for chunks in found]),
        numpy.concatenate([chunks.lengths for chunks in found]),
    )
    return {"columns": options.columns, "ranges_per_sample": offsets.shape[1]}, {
        "first_samples": first_samples(counts),
        "offsets": offsets.reshape(-1),
        "lengths": lengths.reshape(-1),
    }


def _merged(
    offsets: "NDArray[numpy.uint64]", lengths: "NDArray[numpy.uint64]"
) -> "tuple[NDArray[numpy.uint64], NDArray[numpy.uint64]]":
    """Merge columns that are adjacent in all row groups; return arrays of [row group, range]."""
    if not len(offsets):
        return numpy.zeros((0, 1), numpy.uint64), numpy.zeros((0, 1), numpy.uint64)
    order = numpy.argsort(offsets[0], kind="stable")
    offsets, lengths = offsets[:, order], lengths[:, order]
    ends = offsets + lengths
    apart = (ends[:, :-1] != offsets[:, 1:]).any(axis=0)
    begins = numpy.concatenate([[0], numpy.flatnonzero(apart) + 1])
    lasts = numpy.concatenate([numpy.flatnonzero(apart), [offsets.shape[1] - 1]])
    return offsets[:, begins], ends[:, lasts] - offsets[:, begins]


def _footer(path: str) -> Any:
    import pyarrow

    try:
        return parquet_module().read_metadata(path)
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of a system call; Arrow raises OSError for damage, too
        raise Format(None, f"{path}: its Parquet footer cannot be read: {error}", path) from None


def _scan(path: str, size: int, columns: Sequence[str] | None) -> _Chunks:
    footer = _footer(path)
    schema = footer.schema
    names = [schema.column(each).path for each in range(footer.num_columns)]
    chosen = _chosen(names, columns, path)
    shape = (footer.num_row_groups, len(chosen))
    offsets, lengths = numpy.zeros(shape, numpy.uint64), numpy.zeros(shape, numpy.uint64)
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for place, column in enumerate(chosen):
            chunk = row_group.column(column)
            begin, nbytes = chunk.data_page_offset, chunk.total_compressed_size
            dictionary = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
            if dictionary is not None and 0 < dictionary < begin:
                begin = dictionary
            if begin < 0 or nbytes < 0 or begin + nbytes > size:
                raise Corrupt(
                    None,
                    f"{path}: the column {names[column]} of row group {group} ends at byte {begin + nbytes}, "
                    f"but the file has {size}",
                    path,
                )
            offsets[group, place], lengths[group, place] = begin, nbytes
    return _Chunks(
        offsets, lengths, [(names[each], str(schema.column(each).physical_type)) for each in chosen]
    )


def _chosen(names: list[str], columns: Sequence[str] | None, path: str) -> list[int]:
    """Return the columns that are stored for the chosen ones, of which those of nested types have several."""
    if columns is None:
        return list(range(len(names)))
    chosen = set()
    for column in columns:
        found = [each for each, name in enumerate(names) if name == column or name.startswith(f"{column}.")]
        if not found:
            tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
            raise ValueError(f"columns: {path} has no column {column!r}; it has {', '.join(tops)}")
        chosen.update(found)
    return sorted(chosen)


class _RangesFile(io.RawIOBase):
    """The parts of a file that were read, as if it were the file."""

    def __init__(self, ranges: Sequence[tuple[int, memoryview]], path: str) -> None:
        super().__init__()
        self._ranges = ranges
        self._path = path
        self._size = max(offset + len(memory) for offset, memory in ranges)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, nbytes: int = -1) -> Any:
        begin = self._position
        end = self._size if nbytes < 0 else begin + nbytes
        for offset, memory in self._ranges:
            if offset <= begin and end <= offset + len(memory):
                self._position = end
                return memory[begin - offset : end - offset]
        raise Corrupt(
            None,
            f"{self._path}: bytes {begin} to {end} are needed, but belong to none of the chosen columns: the "
            "file was modified after it was indexed, or its footer is damaged",
            self._path,
        )


def viewer(
    columns: Sequence[str] | None, ranges_of: Callable[[int], tuple[str, int, list[int]]]
) -> Callable[[Any, int], object]:
    """Return the function that makes the table of a sample.

    `ranges_of`: the path of a sample's file, its row group, and the offsets of its ranges.
    """
    import pyarrow

    parquet = parquet_module()
    footer_of = functools.lru_cache(_KEPT_FOOTERS)(_footer)

    def view(memory: Any, sample: int) -> object:
        path, row_group, offsets = ranges_of(sample)
        pieces = memory if isinstance(memory, list | tuple) else [memory]
        file = _RangesFile(
            [(offset, memoryview(piece)) for offset, piece in zip(offsets, pieces, strict=True)], path
        )
        try:
            source = parquet.ParquetFile(
                pyarrow.PythonFile(file, mode="r"),
                metadata=footer_of(path),
                pre_buffer=False,
                page_checksum_verification=True,  # of pages that have one
            )
            # Not with Arrow's threads, which would take turns here to call Python.
            return source.read_row_group(
                row_group, columns=None if columns is None else list(columns), use_threads=False
            )
        except Error:
            raise  # by _RangesFile
        except (OSError, pyarrow.ArrowException) as error:
            raise Corrupt(None, f"{path}: row group {row_group} cannot be decoded: {error}", path) from error

    return view
