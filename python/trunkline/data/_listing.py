"""The files that an index is made of: folders walked in the order of the names, one stat for each file."""

import errno
import hashlib
import itertools
import os
import stat
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from trunkline._errors import errno_reason, exception_of
from trunkline._paths import absolute_path
from trunkline.data._kinds import KINDS, kind_of
from trunkline.data._own_files import OwnFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray


_SETTLED_NS = 20_000_000  # longer than a tick of the clock that stamps files


@dataclass
class Listing:
    """Files, as arrays; none of Python's objects stays for each."""

    root: bytes  # the folder that all files are in, with a slash at the end
    given: str  # identifies the paths that were given, by their names below the root
    path_blob: "NDArray[numpy.uint8]"
    path_ends: "NDArray[numpy.uint64]"
    sizes: "NDArray[numpy.uint64]"
    mtimes_ns: "NDArray[numpy.int64]"
    inodes: "NDArray[numpy.uint64]"
    kinds: "NDArray[numpy.uint8]"  # places in KINDS
    listed: "NDArray[numpy.uint8]"  # 1: given by its own path, not found in a folder
    class_of: "NDArray[numpy.int64]"  # a place in classes; -1: not in a class folder
    classes: list[str]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that an index keeps."""
        arrays = (self.path_blob, self.path_ends, self.sizes, self.mtimes_ns, self.inodes)
        return sum(array.nbytes for array in arrays)

    def path(self, file: int) -> str:
        """Return the absolute path of a file."""
        begin = int(self.path_ends[file - 1]) if file else 0
        return os.fsdecode(self.path_blob[begin : int(self.path_ends[file])].tobytes())

    def only(self, mask: "NDArray[numpy.bool_]") -> "Listing":
        """Return the files of which the mask says True."""
        if mask.all():
            return self
        lengths = numpy.diff(self.path_ends, prepend=numpy.uint64(0))
        kept = lengths[mask]
        return Listing(
            self.root,
            self.given,
            self.path_blob[numpy.repeat(mask, lengths.astype(numpy.int64))],
            numpy.cumsum(kept, dtype=numpy.uint64),
            self.sizes[mask],
            self.mtimes_ns[mask],
            self.inodes[mask],
            self.kinds[mask],
            self.listed[mask],
            self.class_of[mask],
            self.classes,
        )

    def class_runs(self) -> "tuple[NDArray[numpy.uint64], NDArray[numpy.int64], tuple[str, ...]]":
        """Return where each run of files of one class begins, its class, and the names of the classes.

        All are empty unless every file is in a class folder. Classes without files are left out.
        """
        if not len(self) or (self.class_of < 0).any():
            return numpy.zeros(0, numpy.uint64), numpy.zeros(0, numpy.int64), ()
        used, ids = numpy.unique(self.class_of, return_inverse=True)
        names = [self.classes[each] for each in used]
        order = sorted(range(len(names)), key=names.__getitem__)
        rank = numpy.empty(len(names), numpy.int64)
        rank[order] = numpy.arange(len(names))
        ids = rank[ids]
        starts = numpy.flatnonzero(numpy.diff(ids, prepend=-1))
        return starts.astype(numpy.uint64), ids[starts], tuple(names[each] for each in order)


class _Collector:
    """Collects files."""

    def __init__(self) -> None:
        self.blob = bytearray()
        self.ends, self.sizes, self.inodes = array("Q"), array("Q"), array("Q")
        self.mtimes, self.class_of = array("q"), array("q")
        self.kinds, self.listed = array("B"), array("B")
        self.classes: dict[bytes, int] = {}

    def add(self, path: bytes, status: os.stat_result, listed: bool, class_name: bytes | None) -> None:
        self.blob += path
        self.ends.append(len(self.blob))
        self.sizes.append(status.st_size)
        self.mtimes.append(status.st_mtime_ns)
        self.inodes.append(status.st_ino)
        self.kinds.append(kind_of(path))
        self.listed.append(listed)
        known = -1 if class_name is None else self.classes.setdefault(class_name, len(self.classes))
        self.class_of.append(known)

    def listing(self, root: bytes, given: str) -> Listing:
        return Listing(
            root,
            given,
            numpy.frombuffer(bytes(self.blob), numpy.uint8),
            _array(self.ends, numpy.uint64),
            _array(self.sizes, numpy.uint64),
            _array(self.mtimes, numpy.int64),
            _array(self.inodes, numpy.uint64),
            _array(self.kinds, numpy.uint8),
            _array(self.listed, numpy.uint8),
            _array(self.class_of, numpy.int64),
            [os.fsdecode(name) for name in self.classes],
        )


def _array(values: "array[int]", dtype: Any) -> "NDArray[Any]":
    return numpy.frombuffer(values.tobytes(), dtype)


def settled(paths: Any, cache: str | None = None) -> Listing:
    """List files as list_files(), none of which was modified just before.

    A write in the same tick of the clock would not change the time of a file, and not be noticed later.
    """
    if not isinstance(paths, str | bytes | os.PathLike):
        if not isinstance(paths, Iterable):
            raise TypeError(f"paths: must be a path, or a list of paths, not {type(paths).__name__}")
        paths = list(paths)  # maybe an iterator
    listing = list_files(paths, cache)
    age_ns = time.time_ns() - int(listing.mtimes_ns.max(initial=0))
    if not 0 <= age_ns < _SETTLED_NS:
        return listing
    time.sleep((_SETTLED_NS - age_ns) / 1e9)
    return list_files(paths, cache)


def list_files(paths: Any, cache: str | None = None) -> Listing:
    """List files, and those in folders, sorted by path. Raises trunkline.Error, TypeError and ValueError.

    Files and folders whose names begin with a dot are left out, unless they are given by their own path. The
    library's own files are always left out. `cache`: where an index is kept that may be damaged.
    """
    given = [paths] if isinstance(paths, str | bytes | os.PathLike) else list(paths)
    if not given:
        raise ValueError("paths: must name at least one file or folder")
    own = OwnFiles(cache)
    roots = []
    for each in given:
        name = os.fsencode(absolute_path(each, "paths"))
        if own.has_temporary_name(name):
            continue
        status = _stat(name)
        folder = stat.S_ISDIR(status.st_mode)
        if not folder and not stat.S_ISREG(status.st_mode):
            raise ValueError(f"paths: {os.fsdecode(name)} is neither a file nor a folder")
        if not folder and own.has(name, status):
            continue
        # Without what commonpath() drops; not by normpath(), for which a link and ".." cancel each other.
        name = b"".join(b"/" + part for part in name.split(b"/") if part not in (b"", b"."))
        roots.append((name + (b"/" if folder else b""), status))
    if not roots:
        raise ValueError(f"paths: {os.fsdecode(name)} is one of the library's own files; name the data")
    roots.sort(key=lambda root: root[0])
    for (one, _), (other, _) in itertools.pairwise(roots):
        if other == one or (one.endswith(b"/") and other.startswith(one)):
            within = "is given twice" if other == one else f"is in {os.fsdecode(one)}, which is given too"
            raise ValueError(f"paths: {os.fsdecode(other)} {within}")
    found = _Collector()
    for path, status in roots:
        if path.endswith(b"/"):
            for below, below_status in _walk(path):
                if own.has(below, below_status):
                    continue
                first, slash, _ = below[len(path) :].partition(b"/")
                found.add(below, below_status, False, first if slash else None)
        else:
            found.add(path, status, True, None)
    folders = [path if path.endswith(b"/") else os.path.dirname(path) for path, _ in roots]  # noqa: PTH120
    common = os.path.commonpath(folders).rstrip(b"/") + b"/"
    digest = hashlib.sha256(b"\0".join(path[len(common) :] for path, _ in roots))
    return found.listing(common, digest.hexdigest()[:16])


def _stat(path: bytes) -> os.stat_result:
    try:
        return os.stat(path)  # noqa: PTH116 - bytes
    except OSError as error:
        raise _failed("cannot index", path, error) from None


def _failed(what: str, path: bytes, error: OSError) -> Exception:
    name = os.fsdecode(path)
    code = error.errno or errno.EIO
    return exception_of("system", code, f"{what} {name}: {errno_reason(code)}", name)


def _walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Yield path and status of the files below a folder, whose path ends with a slash, sorted by path."""
    # Each open folder with what is left in it, and the identities of the folders, to notice loops of links.
    stack: list[tuple[Iterator[tuple[bytes, os.stat_result]], tuple[int, int]]] = []

    def enter(folder: bytes, status: os.stat_result) -> None:
        identity = (status.st_dev, status.st_ino)
        if any(identity == above for _, above in stack):
            raise exception_of(
                "system",
                errno.ELOOP,
                f"{os.fsdecode(folder)} leads to a folder that it is in",
                os.fsdecode(folder),
            )
        stack.append((iter(_entries(folder)), identity))

    enter(root, _stat(root))
    while stack:
        entry = next(stack[-1][0], None)
        if entry is None:
            stack.pop()
        elif entry[0].endswith(b"/"):
            enter(*entry)
        else:
            yield entry


def _entries(folder: bytes) -> Sequence[tuple[bytes, os.stat_result]]:
    """Return the files and folders in a folder, sorted; paths of folders end with a slash."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    continue
                status = _stat(entry.path)
                if stat.S_ISDIR(status.st_mode):
                    found.append((entry.path + b"/", status))
                elif stat.S_ISREG(status.st_mode):
                    found.append((entry.path, status))
    except OSError as error:
        if hasattr(error, "file"):
            raise  # by _stat
        raise _failed("cannot list", folder, error) from None
    found.sort(key=lambda entry: entry[0])
    return found


def kinds_present(listing: Listing) -> dict[str, int]:
    """Return how many files there are of each kind, by the names of KINDS."""
    counts = numpy.bincount(listing.kinds, minlength=len(KINDS))
    return {name: int(count) for name, count in zip(KINDS, counts, strict=True) if count}
