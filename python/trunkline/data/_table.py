"""Samples of different sizes: a table of offsets and lengths, from scans of all files."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from trunkline import _core
from trunkline._errors import Error
from trunkline.data._index import Index
from trunkline.data._listing import Listing
from trunkline.data._options import Options
from trunkline.data._scan_pool import scan_files
from trunkline.data._skipping import DAMAGE, Skipped
from trunkline.data._uniform import first_samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    # (offset, length) of each sample, and (offset, reason) of what was skipped.
    Table = tuple[NDArray[numpy.uint64], NDArray[numpy.uint64], Sequence[tuple[int, str]]]

# Finds the samples of a file of so many bytes; `skip`: as on_error="skip".
FileScan = Callable[[str, int, bool], "Table"]


def table_parts(
    listing: Listing,
    scan_one: FileScan,
    stop: Callable[[], object],
    options: Options,
    skipped: Skipped,
    old: Index | None,
) -> "dict[str, NDArray[Any]]":
    """Return the arrays of the table. `old`: an index from before; what it has is not scanned again."""
    unchanged = _Unchanged(old, listing) if old is not None else None

    def scan(file: int) -> "Table | Error":
        known = unchanged.table(file) if unchanged is not None else None
        if known is not None:
            return known
        try:
            return scan_one(listing.path(file), int(listing.sizes[file]), options.skip)
        except DAMAGE as error:
            return error

    counts = numpy.zeros(len(listing), numpy.int64)
    found: list[tuple[NDArray[numpy.uint64], NDArray[numpy.uint64]] | None] = [None] * len(listing)
    for file, scanned in scan_files(range(len(listing)), scan, options, stop):
        if isinstance(scanned, Error):
            skipped.add(listing.path(file), 0, scanned)
            continue
        offsets, lengths, reasons = scanned
        for offset, reason in reasons:
            skipped.add_reason(listing.path(file), offset, reason)
        counts[file] = len(offsets)
        if len(offsets):
            found[file] = offsets, lengths
    return joined(counts, found)


def joined(
    counts: "NDArray[numpy.int64]", found: "list[tuple[NDArray[numpy.uint64], NDArray[numpy.uint64]] | None]"
) -> "dict[str, NDArray[Any]]":
    """Join the tables of files. Empties `found`, so that each is in memory once."""
    firsts = first_samples(counts)
    if numpy.count_nonzero(counts) == 1:
        offsets, lengths = next(table for table in found if table is not None)
        return {"first_samples": firsts, "offsets": offsets, "lengths": lengths}
    offsets = numpy.empty(int(firsts[-1]), numpy.uint64)
    lengths = numpy.empty(int(firsts[-1]), numpy.uint64)
    for file, table in enumerate(found):
        if table is not None:
            begin, end = int(firsts[file]), int(firsts[file + 1])
            offsets[begin:end], lengths[begin:end] = table
            found[file] = None
            del table
    return {"first_samples": firsts, "offsets": offsets, "lengths": lengths}


class _Unchanged:
    """The tables of files that an index from before has as they are now."""

    def __init__(self, old: Index, listing: Listing) -> None:
        self._old = old
        self._files: dict[str, int] = {path: file for file, path in enumerate(old.paths)}
        self._skipped: dict[str, list[tuple[int, str]]] = {}
        self._listing = listing
        for path, offset, reason in old.skipped:
            self._skipped.setdefault(path, []).append((offset, reason))

    def table(self, file: int) -> "Table | None":
        path = self._listing.path(file)
        was = self._files.get(path)
        old, now = self._old, self._listing
        if was is None or (now.sizes[file], now.mtimes_ns[file], now.inodes[file]) != (
            old._sizes[was],
            old._mtimes_ns[was],
            old._inodes[was],
        ):
            return None
        assert old._offsets is not None
        assert old._lengths is not None
        begin, end = int(old._first_samples[was]), int(old._first_samples[was + 1])
        return old._offsets[begin:end], old._lengths[begin:end], self._skipped.get(path, ())


def native_scan(name: str) -> tuple[FileScan, Callable[[], object]]:
    """Return the scanner of TFRecord files or WebDataset archives, and what stops it."""
    stop = _core.ScanStop()
    native = {"tfrecord": _core.scan_tfrecords, "webdataset": _core.scan_tar}[name]

    def scan(path: str, size: int, skip: bool) -> "Table":
        return native(path, skip, stop)

    return scan, stop.stop
