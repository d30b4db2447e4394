"""Cache files of indexes: docs/formats/sample-index.md."""

import errno
import hashlib
import json
import mmap
import os
import struct
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy

from trunkline import _core
from trunkline._errors import Error, Format, errno_reason, exception_of, system_errors
from trunkline._logging import Log
from trunkline._replacing import replacing
from trunkline.data._index import ARRAYS, Index
from trunkline.data._info import IndexInfo
from trunkline.data._listing import Listing
from trunkline.data._own_files import ALIGNMENT, MAGIC, is_index

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = Log("data")

VERSION = 1
_HEAD = struct.Struct("<16sIIQ")  # magic, version, CRC-32C of the header, bytes of the header
_MAX_HEADER_BYTES = 1 << 30
_MAPPED_BYTES = 1 << 20  # smaller arrays are read
_PIECE_BYTES = 4 << 20
_UNWRITABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.EBUSY,
    None,  # Unsupported: not a file
)


class Cache:
    """Where the index of some arguments is kept."""

    def __init__(self, cache: str, listing: Listing, key: dict[str, Any]) -> None:
        """`cache`: "auto", or a path. `key`: the arguments that decide which samples there are."""
        self._key = {**key, "root": os.fsdecode(listing.root), "paths": listing.given}
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        if cache != "auto":
            self._places = [cache]
        else:
            self._places = [os.fsdecode(listing.root) + f".trunkline-index-{digest}"]
            if (folder := _cache_folder()) is not None:
                self._places.append(f"{folder}/index-{digest}")
        self._required = cache != "auto"
        if self._required:
            _check_given(cache, listing)

    def load(self) -> Index | None:
        """Return the index that was kept, whether or not it is of the files as they are now."""
        for path in self._places:
            try:
                index, key = _open(path)
            except FileNotFoundError:
                continue
            except Exception as error:
                _log.info("not using the index %s: %s", path, error)
                continue
            if key == self._key:
                return index
            _log.info("not using the index %s: it was made with other arguments", path)
        return None

    def save(self, info: IndexInfo, arrays: "dict[str, NDArray[Any]]") -> Index | None:
        """Keep an index; return it as mapped from the file. None if there is no place for it."""
        for path in self._places:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
                # The scan may have taken long; and a link may lead anywhere.
                if self._required or os.path.islink(path):  # noqa: PTH114
                    _check_is_replaceable(path)
                _write(path, info, arrays, self._key)
                with system_errors(f"read the index {path}", path):
                    index, key = _open(path, verify=False)
                # Another process may have replaced it by one that was made with other arguments.
                return index if key == self._key else None
            except OSError as error:  # noqa: PERF203
                if self._required or error.errno not in _UNWRITABLE:
                    raise
                _log.info("cannot keep the index in %s: %s", path, error)
        return None


def is_current(index: Index, listing: Listing) -> bool:
    """Whether an index is of the files as they are."""
    names = ("path_blob", "path_ends", "sizes", "mtimes_ns", "inodes")
    return all(numpy.array_equal(getattr(index, f"_{name}"), getattr(listing, name)) for name in names)


def reopen(path: str, checksum: int) -> Index:
    """Map the index that was pickled. Raises Error if there is another in its place."""
    try:
        index, _ = _open(path, verify=False)
    except FileNotFoundError:
        index = None
    if index is None or index._cached_at != (path, checksum):
        gone = "no longer exists" if index is None else "was replaced, because the data changed"
        raise Error(None, f"cannot unpickle an index: its file {path} {gone}; rebuild the index", path)
    return index


def _cache_folder() -> str | None:
    """Return the user's folder; None for one without a home, for whom a folder named ~ would be made."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("/"):  # as its specification says
        base = os.path.expanduser("~/.cache")  # noqa: PTH111
    return f"{base}/trunkline" if base.startswith("/") else None


def _check_given(cache: str, listing: Listing) -> None:
    """Raise if the path that the user gave is a folder, one of the data files, or another file."""
    _check_is_no_folder(cache)
    try:
        status = os.stat(cache)  # noqa: PTH116
    except OSError:
        return  # free, or writing it fails
    real = os.path.realpath(cache)
    for each in numpy.flatnonzero(listing.inodes == status.st_ino).tolist():
        if os.path.realpath(listing.path(each)) == real:
            raise ValueError(f"cache: {cache} is one of the data files; give the index a name of its own")
    _check_is_replaceable(cache)


def _check_is_no_folder(cache: str) -> None:
    if cache.endswith("/") or os.path.isdir(cache):  # noqa: PTH112
        folder = cache.rstrip("/")
        raise exception_of(
            "system",
            errno.EISDIR,
            f"cache: {cache} is a folder; name a file in it, such as {folder}/index",
            cache,
        )


def _check_is_replaceable(cache: str) -> None:
    """Raise if there is anything but an index. An index that is damaged, or of another version, is one."""
    _check_is_no_folder(cache)
    try:
        if not os.path.exists(cache) or is_index(cache):  # noqa: PTH110
            return
    except OSError as error:
        code = error.errno or errno.EIO
        raise exception_of(
            "system", code, f"cache: cannot read {cache}: {errno_reason(code)}", cache
        ) from None
    raise exception_of(
        "system",
        errno.EEXIST,
        f"cache: {cache} exists and is not an index of tl.data.index; give the index another name, or "
        "remove that file",
        cache,
    )


def _write(path: str, info: IndexInfo, arrays: "dict[str, NDArray[Any]]", key: dict[str, Any]) -> None:
    """Write the file under another name, and rename it when all of it is durable."""
    stored = {name: numpy.ascontiguousarray(array, ARRAYS[name]) for name, array in arrays.items()}
    # The header has the arrays' offsets, on which its own size must not depend.
    entries = {name: [0, array.size, 0] for name, array in stored.items()}
    document = {"key": key, "info": asdict(info), "arrays": entries, "file_bytes": 0}
    room = _aligned(_HEAD.size + len(json.dumps(document)) + 64 * (len(entries) + 1))
    offset = room
    for name, array in stored.items():
        entries[name] = [offset, array.size, _core.crc32c(array.view(numpy.uint8)) if array.size else 0]
        offset = _aligned(offset + array.nbytes)
    document["file_bytes"] = offset
    header = json.dumps(document).encode()
    with replacing(path) as file:
        file.write(_HEAD.pack(MAGIC, VERSION, _core.crc32c(header), len(header)) + header)
        for name, array in stored.items():
            file.seek(entries[name][0])
            file.write(array.view(numpy.uint8).data)
        file.truncate(offset)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _open(path: str, verify: bool = True) -> tuple[Index, dict[str, Any]]:
    """Map a file; return the index and its key. Raises OSError, and any other error for other files."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        size = os.fstat(file.fileno()).st_size
        document, checksum = _read_header(file, path)
        if document["file_bytes"] != size:
            raise Format(None, f"{path}: has {size} bytes instead of {document['file_bytes']}", path)
        arrays = {}
        for name, (offset, count, crc) in document["arrays"].items():
            dtype = numpy.dtype(ARRAYS[name])
            nbytes = count * dtype.itemsize
            if offset < 0 or count < 0 or offset + nbytes > size:
                raise Format(None, f"{path}: the array {name} is not within the file", path)
            if verify and _checksum_of(file, offset, nbytes) != crc:
                raise Format(None, f"{path}: the array {name} contradicts its checksum", path)
            arrays[name] = _array(file, offset, count, dtype)
    fields = document["info"]
    for name in ("row_shape", "columns", "classes"):
        fields[name] = tuple(fields[name]) if fields[name] is not None else None
    fields["skipped"] = tuple((where, at, why) for where, at, why in fields["skipped"])
    return Index(IndexInfo(**fields), arrays, (path, checksum)), document["key"]


def _read_header(file: BinaryIO, path: str) -> tuple[dict[str, Any], int]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise Format(None, f"{path}: is not an index of trunkline", path)
    _, version, checksum, nbytes = _HEAD.unpack(head)
    if version != VERSION:
        raise Format(None, f"{path}: is of version {version}; this build reads version {VERSION}", path)
    header = file.read(nbytes) if nbytes <= _MAX_HEADER_BYTES else b""
    if len(header) != nbytes or _core.crc32c(header) != checksum:
        raise Format(None, f"{path}: its header contradicts its checksum", path)
    document: dict[str, Any] = json.loads(header)
    return document, checksum


def _checksum_of(file: BinaryIO, offset: int, nbytes: int) -> int:
    """Return the CRC-32C of a part of a file, read in pieces: mapped, all of it would count as our memory."""
    checksum = 0
    buffer = memoryview(bytearray(min(nbytes, _PIECE_BYTES)))
    while nbytes:
        got = os.preadv(file.fileno(), [buffer[: min(nbytes, len(buffer))]], offset)
        if not got:
            break
        checksum = _core.crc32c(buffer[:got], checksum)
        offset += got
        nbytes -= got
    return checksum


def _array(file: BinaryIO, offset: int, count: int, dtype: "numpy.dtype[Any]") -> "NDArray[Any]":
    nbytes = count * dtype.itemsize
    if nbytes < _MAPPED_BYTES:
        return numpy.frombuffer(os.pread(file.fileno(), nbytes, offset), dtype)
    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(file.fileno(), offset - begin + nbytes, prot=mmap.PROT_READ, offset=begin)
    return numpy.frombuffer(mapped, dtype, count, offset - begin)
