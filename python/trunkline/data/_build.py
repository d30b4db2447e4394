"""Builds an index: lists the files, decides their format, scans them, and keeps the table in a cache file."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import numpy

from trunkline._core import Volume
from trunkline._errors import Corrupt, reword
from trunkline._errors import FileNotFoundError as NoFiles
from trunkline._logging import Log
from trunkline.data import _npz
from trunkline.data._cache import Cache, is_current
from trunkline.data._index import Index
from trunkline.data._info import IndexInfo
from trunkline.data._kinds import KINDS
from trunkline.data._listing import Listing, kinds_present, settled
from trunkline.data._options import Options, check_columns, options_of
from trunkline.data._parquet import parquet_parts
from trunkline.data._skipping import Skipped
from trunkline.data._table import native_scan, table_parts
from trunkline.data._uniform import npy_parts, record_parts
from trunkline.data._volume_files import list_volume

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trunkline._types import Path

_log = Log("data")

_TABLES = ("files", "npz", "tfrecord", "webdataset", "parquet")
_WORTH_SAVING = 1 << 20  # bytes of a table of files, which is made from their list alone

Format = Literal["auto", "files", "records", "npy", "npz", "tfrecord", "webdataset", "parquet"]


def index(
    paths: "Path | Iterable[Path]",
    *,
    format: Format = "auto",  # noqa: A002 - as the files' formats are called everywhere
    record_bytes: int | None = None,
    stride_bytes: int | None = None,
    header_bytes: int = 0,
    columns: Iterable[str] | None = None,
    cache: "Path | Literal['auto'] | bool | None" = "auto",
    on_error: Literal["raise", "skip"] = "raise",
    progress: Callable[[int, int], object] | None = None,
    workers: int | None = None,
    volume: Volume | None = None,
) -> Index:
    """Find where each sample is in files, and in the files in folders; return the Index.

    paths: a file or folder, or several. Files are sorted by path, and so are those in folders, at any depth;
    names that begin with a dot are left out there. Samples are numbered from 0, file after file.

    format: what a sample is.
        "files": a whole file. Its class is the first folder below the given one.
        "records": `record_bytes` bytes, every `stride_bytes` (None: record_bytes; less: records overlap) from
            byte `header_bytes` of a file on. Without a stride, files must hold whole records.
        "npy": a row of a .npy file, an array of all dimensions but the first. All rows have one shape.
        "npz": a member of a .npz file.
        "tfrecord": a record of a TFRecord file.
        "webdataset": the adjacent members of a .tar file whose names are the same up to the first dot.
        "parquet": a row group, with `columns` (None: all). Requires pyarrow.
        "auto": by the files' suffixes (.npy, .npz, .tfrecord, .tfrecords, .tfrec, .tar, .parquet), which must
            agree; "files" if there are only others; "records" if record_bytes is given.
    Where a format is given, files of other suffixes in folders are left out, unless there are only these.

    cache: where the table is kept for the next call. "auto": beside the data if that folder is writable, else
        in $XDG_CACHE_HOME/trunkline (~/.cache/trunkline); a path: there, where no file but an index is
        replaced (FileExistsError, IsADirectoryError); None or False: nowhere. It is rebuilt when the size,
        the time or the inode of a file has changed. "records", "npy" have no table.
    on_error: "raise", or "skip" damaged samples, or the rest of a file where no more can be found; they are
        logged as warnings of the logger "trunkline", and listed by Index.skipped.
    progress: called with the number of files that are scanned, and of all. None: a line on stderr, if it is a
        terminal and the scan takes long.
    workers: threads that scan files.
    volume: the Volume that holds the files; paths are then names in it, and format is "records".

    Raises ValueError or TypeError for arguments, trunkline.Corrupt or trunkline.Format for damaged files and
    trunkline.Unsupported for variants of formats that are not supported, each with the name of the file,
    another OSError if files cannot be read. Ctrl-C ends it.
    """
    options = options_of(
        format, record_bytes, stride_bytes, header_bytes, columns, cache, on_error, progress, workers
    )
    if volume is not None:
        listing = list_volume(volume, paths, options.format)
        return _build(options.format, listing, options, volume)
    given_cache = None if options.cache == "auto" else options.cache
    name, listing = _chosen(settled(paths, given_cache), options)
    check_columns(options.columns, name)
    try:
        return _build(name, listing, options)
    except Corrupt as error:
        reword(
            error,
            f'{error}; copy, download or write the file again, or pass on_error="skip" to leave out what is '
            "damaged",
        )
        raise


def _chosen(listing: Listing, options: Options) -> tuple[str, Listing]:
    """Return the format, and the files that have it."""
    present = kinds_present(listing)
    if not present:
        where = listing.path(0) if len(listing) else listing.root.decode(errors="backslashreplace")
        raise NoFiles(
            None, f"{where} has no files to index (names that begin with a dot are left out)", where
        )
    name = options.format
    if name == "auto":
        if len(present) > 1:
            found = ", ".join(f"{count} of {_shown(kind)}" for kind, count in present.items())
            raise ValueError(f"format: the files are of several formats: {found}; pass format= to choose one")
        return next(iter(present)), listing
    if name in ("files", "records"):
        return name, listing
    matching = listing.kinds == KINDS.index(name)
    if not matching[listing.listed == 0].any():
        return name, listing
    return name, listing.only(matching | (listing.listed != 0))


def _shown(kind: str) -> str:
    return "other suffixes" if kind == "files" else f"format {kind!r}"


def _build(name: str, listing: Listing, options: Options, volume: Volume | None = None) -> Index:
    key: dict[str, Any] = {
        "format": name,
        "columns": options.columns and list(options.columns),
        "skip": options.skip,
    }
    if name == "webdataset":
        key["rules"] = 2  # earlier builds left out linked members, and archives after the first
    cache = Cache(options.cache, listing, key) if options.cache and name in _TABLES else None
    old = cache.load() if cache is not None else None
    if old is not None and is_current(old, listing):
        return old
    if old is not None:
        _log.info("index of %s: rebuilt, since files have changed", listing.root.decode(errors="replace"))
    skipped = Skipped(options.skip)
    info, arrays = _scanned(name, listing, options, skipped, old)
    class_files, class_ids, classes = listing.class_runs()
    arrays |= {
        "path_blob": listing.path_blob,
        "path_ends": listing.path_ends,
        "sizes": listing.sizes,
        "mtimes_ns": listing.mtimes_ns,
        "inodes": listing.inodes,
        "class_files": class_files,
        "class_ids": class_ids,
    }
    if volume is not None:
        info["volume"] = (tuple(volume.directories), volume.stripe_bytes)
    full = IndexInfo(name, len(listing.root), classes=classes, skipped=skipped.report(), **info)
    if cache is None or (name == "files" and options.cache == "auto" and listing.nbytes < _WORTH_SAVING):
        return Index(full, arrays)
    return cache.save(full, arrays) or Index(full, arrays)


def _scanned(
    name: str, listing: Listing, options: Options, skipped: Skipped, old: Index | None
) -> "tuple[dict[str, Any], dict[str, NDArray[Any]]]":
    """Return the fields and arrays that depend on the format."""
    if name == "files":
        return _file_parts(listing)
    if name == "records":
        return record_parts(listing, options, skipped)
    if name == "npy":
        return npy_parts(listing, options, skipped)
    if name == "parquet":
        return parquet_parts(listing, options, skipped)
    if name == "npz":
        return {}, table_parts(listing, _npz.scan, lambda: None, options, skipped, old)
    scan, stop = native_scan(name)
    info = {"framing": "tfrecord"} if name == "tfrecord" else {}
    return info, table_parts(listing, scan, stop, options, skipped, old)


def _file_parts(listing: Listing) -> "tuple[dict[str, Any], dict[str, NDArray[Any]]]":
    return {}, {
        "first_samples": numpy.arange(len(listing) + 1, dtype=numpy.uint64),
        "offsets": numpy.zeros(len(listing), numpy.uint64),
        "lengths": listing.sizes,
    }
