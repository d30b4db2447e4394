"""Members of .npz files: zip archives of .npy files, stored or deflated.

The range of a member begins with its local header, which says how it is compressed, and has its checksum.
"""

import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy

from trunkline import _core
from trunkline._errors import Corrupt, CutOff, Error, Format, Unsupported
from trunkline.data._npy import array_of, head_bytes, parse_head
from trunkline.data._skipping import DAMAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_SIGNATURE = b"PK\x03\x04"
_STORED, _DEFLATED = 0, 8
_ENCRYPTED, _SIZES_FOLLOW = 0x1, 0x8
_PROBE_BYTES = 4096  # of a member, in which the header of most arrays ends
# What zipfile raises for damaged archives.
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, EOFError, OverflowError, IndexError),
)


class _Local(NamedTuple):
    """What a local header says."""

    flags: int
    method: int
    checksum: int
    name: str
    data: int  # bytes from the header's beginning


def scan(path: str, size: int, skip: bool) -> "tuple[NDArray[Any], NDArray[Any], Sequence[tuple[int, str]]]":
    """Find the members of a .npz file. Raises OSError, Corrupt, Format, Unsupported."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return find_members(file, path, size, skip)


def find_members(
    file: BinaryIO, path: str, size: int, skip: bool
) -> "tuple[NDArray[Any], NDArray[Any], Sequence[tuple[int, str]]]":
    """Find the members of a .npz file of `size` bytes. `path` is for messages."""
    offsets, lengths, skipped = [], [], []
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except _ZIP_ERRORS as error:
        is_zip = _read_at(file, 0, 4) in (_SIGNATURE, b"PK\x05\x06")
        kind: type[Error] = Corrupt if is_zip else Format
        raise kind(None, f"{path}: is not a .npz file, or truncated or damaged: {error}", path) from None
    names: set[str] = set()
    for member in members:
        try:
            if member.filename in names:
                raise Format(None, f"{path}: the member {member.filename!r} is duplicated", path)
            names.add(member.filename)
            length = _check_member(file, path, size, member)
        except DAMAGE as error:
            if not skip:
                raise
            skipped.append((max(member.header_offset, 0), str(error)))
            continue
        offsets.append(member.header_offset)
        lengths.append(length)
    return numpy.array(offsets, numpy.uint64), numpy.array(lengths, numpy.uint64), skipped


def _read_at(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    return file.read(nbytes) or b""


def _check_member(file: BinaryIO, path: str, size: int, member: zipfile.ZipInfo) -> int:
    """Return the bytes of a member with its local header."""
    where = f"{path}: at byte {member.header_offset}"
    if member.header_offset < 0:
        raise Corrupt(None, f"{where}: the archive's directory names a place before the file", path)
    start = _read_at(file, member.header_offset, _PROBE_BYTES)
    local = _parse_local(memoryview(start), path, where)
    if local.name != member.filename or local.method != member.compress_type:
        raise Corrupt(None, f"{where}: a member contradicts the archive's directory", path)
    name = f"{path}: {member.filename}"
    if local.flags & _ENCRYPTED:
        raise Unsupported(None, f"{name}: is encrypted", path)
    if local.flags & _SIZES_FOLLOW:
        raise Unsupported(
            None, f"{name}: its checksum follows the data, as in archives that were written into a pipe", path
        )
    if local.method not in (_STORED, _DEFLATED):
        raise Unsupported(
            None, f"{name}: is compressed by method {local.method}; only deflate is supported", path
        )
    if local.checksum != member.CRC:
        raise Corrupt(None, f"{where}: a member contradicts the archive's directory", path)
    length = local.data + member.compress_size
    if member.header_offset + length > size:
        raise CutOff(
            None, f"{name}: ends at byte {member.header_offset + length}, but the file has {size}", path
        )
    _check_array(start[local.data : length], local.method, name)
    return length


def _check_array(start: bytes, method: int, name: str) -> None:
    """Raise an error if a member is not an array of plain numbers. `start`: its first bytes, as stored."""
    if method == _DEFLATED:
        try:
            start = zlib.decompressobj(-zlib.MAX_WBITS).decompress(start, _PROBE_BYTES)
        except zlib.error as error:
            raise Corrupt(None, f"{name}: cannot be decompressed: {error}", name) from None
    if len(start) < 12 or head_bytes(start[:12], name) <= len(start):
        parse_head(start, name)


def _parse_local(memory: memoryview, path: str, where: str) -> _Local:
    if len(memory) < _LOCAL_HEADER.size:
        raise CutOff(None, f"{where}: the header of a member is truncated", path)
    fields = _LOCAL_HEADER.unpack_from(memory)
    signature, _, flags, method, _, _, checksum, _, _, name_bytes, extra_bytes = fields
    if signature != _SIGNATURE:
        raise Corrupt(None, f"{where}: the header of a member is missing", path)
    begin = _LOCAL_HEADER.size
    name = bytes(memory[begin : begin + name_bytes]).decode("utf-8" if flags & 0x800 else "cp437", "replace")
    return _Local(flags, method, checksum, name, begin + name_bytes + extra_bytes)


def viewer(path_of: Callable[[int], str]) -> Callable[[Any, int], object]:
    """Return the function that makes the array of a sample. `path_of`: the path of a sample's file."""

    def view(memory: Any, sample: int) -> object:
        memory = memoryview(memory)
        path = path_of(sample)
        local = _parse_local(memory, path, path)
        name = f"{path}: {local.name}"
        data = memory[local.data :]
        if local.method == _DEFLATED:
            try:
                data = memoryview(zlib.decompress(data, -zlib.MAX_WBITS))
            except zlib.error as error:
                raise Corrupt(None, f"{name}: cannot be decompressed: {error}", path) from None
        if _core.crc32(data) != local.checksum:
            raise Corrupt(None, f"{name}: the data contradict their checksum (CRC-32)", path)
        header = parse_head(bytes(data[: head_bytes(bytes(data[:12]), name)]), name)
        return array_of(data, header, name)

    return view
