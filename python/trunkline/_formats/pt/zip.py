"""Parses the zip archive of a `.pt` file strictly: where each record is.

The layout is that of PKWARE's APPNOTE.TXT 6.3: for each record a local header, its payload and (with flag bit
3) a data descriptor; then the central directory; then the end record, with its zip64 form before it.

Archives that torch and this module could read differently are rejected: with duplicated names, a local header
that contradicts the central directory, or records that overlap.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

from trunkline._errors import CutOff, Format

LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")

_ENCRYPTED = 1 << 0
_HAS_DESCRIPTOR = 1 << 3
_STORED = 0
_FULL16 = 0xFFFF
_FULL32 = 0xFFFFFFFF
_ZIP64_EXTRA = 1
# The end record and the longest comment after it.
_MAX_END_BYTES = _END.size + _FULL16

# Offset of the CRC in an entry of the central directory, and in a data descriptor (after its signature).
ENTRY_CRC_AT = 16
DESCRIPTOR_CRC_AT = 4

# Reads nbytes at an offset; the range must be inside the file.
ReadAt = Callable[[int, int], bytes]


class Entry(NamedTuple):
    """An entry of the central directory, for one record; `position`: offset of the entry itself."""

    name: bytes
    header: int
    nbytes: int
    crc: int
    position: int


class Record(NamedTuple):
    """One record: the offsets of its payload, its local header and its entry in the directory."""

    name: str
    header: int
    offset: int
    nbytes: int
    crc: int
    entry: int

    @property
    def is_storage(self) -> bool:
        """Whether it contains the bytes of a storage, like archive/data/0."""
        return self.name.partition("/")[2].startswith("data/")


class Directory(NamedTuple):
    """The central directory, which begins at `begin`; entries are in order of their headers' offsets."""

    entries: list[Entry]
    begin: int


def _reject(path: str, what: str) -> NoReturn:
    raise Format(None, f"{path} is not a zip archive that torch.save writes: {what}", path)


def _find_end(read: ReadAt, size: int, path: str) -> tuple[int, int, int, int]:
    """Find the end record: (entries, bytes of the directory, its offset, the limit for its end)."""
    tail_at = max(0, size - _MAX_END_BYTES)
    tail = read(tail_at, size - tail_at)
    found = tail.rfind(b"PK\5\6", 0, max(0, len(tail) - _END.size + 4))
    if found < 0:
        raise CutOff(
            None,
            f"{path} begins like a zip archive but has no end record: it is truncated or was never finished; "
            "copy or save it again",
            path,
        )
    position = tail_at + found
    _, disk, first_disk, here, entries, nbytes, offset, comment = _END.unpack_from(tail, found)
    if position + _END.size + comment != size:
        _reject(path, "bytes follow its end record")
    if disk or first_disk or here != entries:
        _reject(path, "it spans several disks")
    locator_at = position - _LOCATOR64.size
    if locator_at < 0:
        return entries, nbytes, offset, position
    signature, disk, end64_at, disks = _LOCATOR64.unpack(read(locator_at, _LOCATOR64.size))
    if signature != b"PK\6\7":
        return entries, nbytes, offset, position
    if disk or disks > 1 or end64_at + _END64.size > locator_at:
        _reject(path, "its zip64 end record is not before its locator")
    end64 = _END64.unpack(read(end64_at, _END64.size))
    signature, _, _, _, disk, first_disk, here, entries64, nbytes64, offset64 = end64
    if signature != b"PK\6\6" or disk or first_disk or here != entries64:
        _reject(path, "its zip64 end record is damaged")
    for short, full, value in (
        (entries, _FULL16, entries64),
        (nbytes, _FULL32, nbytes64),
        (offset, _FULL32, offset64),
    ):
        if short not in (full, value):
            _reject(path, "its two end records contradict each other")
    return entries64, nbytes64, offset64, end64_at


def _extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        yield kind, extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes


def _widen(values: list[int], extra: bytes) -> list[int] | None:
    """Replace full 32-bit values by those of the zip64 extra field, in order; None if it is too short."""
    full = [i for i, value in enumerate(values) if value == _FULL32]
    if not full:
        return values
    field = next((data for kind, data in _extra_fields(extra) if kind == _ZIP64_EXTRA), b"")
    if len(field) < 8 * len(full):
        return None
    wide = struct.unpack_from(f"<{len(full)}Q", field)
    values = list(values)
    for i, value in zip(full, wide, strict=True):
        values[i] = value
    return values


def read_directory(read: ReadAt, size: int, path: str) -> Directory:
    """Read the central directory of an archive of `size` bytes. Raises Format; Corrupt if the end is missing.

    Every record must be stored, not compressed or encrypted; no two names may differ only in case (torch
    ignores case).
    """
    count, nbytes, begin, limit = _find_end(read, size, path)
    if begin + nbytes > limit or count * _ENTRY.size > nbytes:
        _reject(path, "its central directory overlaps its end record")
    directory = read(begin, nbytes)
    entries: list[Entry] = []
    at = 0
    for number in range(count):
        if at + _ENTRY.size > nbytes:
            _reject(path, f"its central directory ends before entry {number}")
        fields = _ENTRY.unpack_from(directory, at)
        signature, _, _, flags, method, _, _, crc, packed, unpacked, name_bytes, extra_bytes = fields[:12]
        comment_bytes, disk, _, _, header = fields[12:]
        name_at = at + _ENTRY.size
        extra_at = name_at + name_bytes
        after = extra_at + extra_bytes + comment_bytes
        if signature != b"PK\1\2" or after > nbytes:
            _reject(path, f"entry {number} of its central directory is damaged")
        name = directory[name_at:extra_at]
        wide = _widen([unpacked, packed, header], directory[extra_at : extra_at + extra_bytes])
        if wide is None or disk:
            _reject(path, f"the entry of record {name!r} in its central directory is damaged")
        unpacked, packed, header = wide
        if method != _STORED or packed != unpacked or flags & _ENCRYPTED:
            _reject(path, f"record {name!r} is compressed or encrypted, which torch.save never does")
        if header + LOCAL_HEADER.size + name_bytes + unpacked > begin:
            _reject(path, f"record {name!r} overlaps the central directory")
        entries.append(Entry(name, header, unpacked, crc, begin + at))
        at = after
    if at != nbytes:
        _reject(path, "bytes follow the last entry of its central directory")
    if len({entry.name.lower() for entry in entries}) != len(entries):
        _reject(path, "two records have the same name")
    entries.sort(key=lambda entry: entry.header)
    return Directory(entries, begin)


def header_bytes(entry: Entry) -> int:
    """Return how many bytes from `entry.header` on are needed to place the record, with a zip64 field."""
    return LOCAL_HEADER.size + len(entry.name) + 64


def place_records(directory: Directory, headers: Iterable[bytes | memoryview], path: str) -> Iterator[Record]:
    """Place each record of the directory; `headers`: the first header_bytes() of each, fewer at the end.

    Raises Format, naming the record, if a local header contradicts the directory or records overlap.
    """
    end = 0
    for entry, header in zip(directory.entries, headers, strict=True):
        record = _place(entry, header, path)
        if entry.header < end:
            _reject(path, f"record {entry.name!r} overlaps the one before it")
        end = record.offset + record.nbytes
        if end > directory.begin:
            _reject(path, f"record {entry.name!r} overlaps the central directory")
        yield record


def _place(entry: Entry, header: bytes | memoryview, path: str) -> Record:
    fields = LOCAL_HEADER.unpack_from(header)
    signature, _, flags, method, _, _, crc, packed, unpacked, name_bytes, extra_bytes = fields
    name_at = LOCAL_HEADER.size
    extra_at = name_at + name_bytes
    if signature != b"PK\3\4" or header[name_at:extra_at] != entry.name or method != _STORED:
        _reject(path, f"the local header of record {entry.name!r} contradicts the central directory")
    wide = _widen([unpacked, packed], bytes(header[extra_at : extra_at + extra_bytes]))
    has_descriptor = flags & _HAS_DESCRIPTOR and [crc, packed, unpacked] == [0, 0, 0]
    if flags & _ENCRYPTED or (wide != [entry.nbytes, entry.nbytes] and not has_descriptor):
        _reject(path, f"the local header of record {entry.name!r} contradicts the central directory")
    try:
        name = entry.name.decode()
    except UnicodeDecodeError:
        _reject(path, f"the name of record {entry.name!r} is not UTF-8")
    offset = entry.header + extra_at + extra_bytes
    return Record(name, entry.header, offset, entry.nbytes, entry.crc, entry.position)
