"""The records of one `.pt` file, which are checked before torch reads them."""

import sys
import zlib
from bisect import bisect_right
from functools import cached_property
from typing import Literal

from trunkline import _core
from trunkline._errors import Corrupt, CutOff, Format, Unsupported
from trunkline._formats.loading_hints import part_of_checkpoint
from trunkline._formats.pt import pickle as pt_pickle
from trunkline._formats.pt import zip as pt_zip
from trunkline._formats.pt.zip import Record

# How much of the end of the file is read at once: it contains the central directory of most files.
_TAIL_BYTES = 1 << 20
# Local headers with smaller gaps than this are read together, this much at a time.
_HEADERS_GAP = 32 << 10
_HEADERS_BYTES = 4 << 20
_PIECE_BYTES = 8 << 20

Verify = Literal["auto"] | bool


class Source:
    """A file whose small, known parts are kept in memory once they are read."""

    def __init__(self, file: _core.File, path: str) -> None:
        """Read the end of `file`, which must stay open as long as this is used."""
        self.path = path
        self.size = file.size
        self._file = file
        tail = min(self.size, _TAIL_BYTES)
        self._tail_at = self.size - tail
        self._tail = self.read_new(self._tail_at, tail)
        self.kept: dict[int, bytes] = {}

    def read_new(self, offset: int, nbytes: int) -> bytes:
        """Read from the file."""
        data = bytearray(nbytes)
        self.read_into(data, offset)
        return bytes(data)

    def read_into(self, buffer: "bytearray | memoryview", offset: int) -> None:
        """Fill `buffer` from the file."""
        if len(buffer) == 0:
            return
        got = self._file.pread(buffer, offset)
        if got != len(buffer):
            raise Corrupt(None, f"{self.path} was truncated while it was read", self.path)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read from the parts in memory, or else from the file, which must contain the range."""
        kept = self.kept.get(offset)
        if kept is not None and nbytes <= len(kept):
            return kept[:nbytes]
        if offset >= self._tail_at:
            begin = offset - self._tail_at
            return self._tail[begin : begin + nbytes]
        return self.read_new(offset, nbytes)


class Archive:
    """The records of a `.pt` file, checked, and what its pickle would do."""

    def __init__(self, source: Source, verify: Verify) -> None:
        """Read and check all but the storages' bytes. Raises Format; Corrupt for a wrong CRC-32."""
        self.path = source.path
        self._source = source
        self._verify = verify
        _check_start(source)
        directory = pt_zip.read_directory(source.read, source.size, source.path)
        headers = _read_headers(source, directory)
        self._records = list(pt_zip.place_records(directory, headers, source.path))
        self._payloads = [record.offset for record in self._records]
        prefix = self._records[0].name.partition("/")[0] + "/" if self._records else ""
        for record in self._records:
            if not record.name.startswith(prefix):
                raise Format(
                    None,
                    f"{self.path}: record {record.name} is not in {prefix}, as all of torch.save are",
                    self.path,
                )
        self.by_name = {record.name.removeprefix(prefix): record for record in self._records}
        if "constants.pkl" in self.by_name:
            raise Format(
                None, f"{self.path} is a TorchScript archive; load it with torch.jit.load", self.path
            )
        if "data.pkl" not in self.by_name:
            raise Format(
                None, f"{self.path} is a zip archive without data.pkl, so not one of torch.save", self.path
            )
        self.pickle = self.by_name["data.pkl"]
        for name in ("data.pkl", "byteorder", ".format_version", ".storage_alignment", "version"):
            self._keep(name)
        self._keep(".data/serialization_id")

    def _keep(self, name: str) -> None:
        record = self.by_name.get(name)
        if record is not None and record.nbytes:
            data = self._source.read_new(record.offset, record.nbytes)
            self.check(record, zlib.crc32(data))
            self._source.kept[record.offset] = data

    @cached_property
    def scan(self) -> pt_pickle.Scan | None:
        """A scan of the pickle."""
        return pt_pickle.scan(self.pickled())

    def pickled(self) -> bytes:
        """Return the pickle."""
        return self._source.read(self.pickle.offset, self.pickle.nbytes)

    def check_storages(self) -> None:
        """Check that each storage has a record of its size: some versions of torch do not check it."""
        for storage in self.scan.storages if self.scan else ():
            self.storage_record(storage.key, storage.nbytes)

    def storage_record(self, key: str, nbytes: int) -> Record:
        """Return the record of a storage of `nbytes`. Raises Format if there is none of that size."""
        record = self.by_name.get(f"data/{key}")
        if record is None:
            raise Format(None, f"{self.path} has no record data/{key}, which a tensor needs", self.path)
        if record.nbytes != nbytes:
            raise Format(
                None,
                f"{self.path}: record {record.name} has {record.nbytes} bytes, but its tensors need {nbytes}",
                self.path,
            )
        return record

    @property
    def foreign_byte_order(self) -> bool:
        """Whether the file declares another byte order than this machine's."""
        record = self.by_name.get("byteorder")
        return (
            record is not None and self._source.read(record.offset, record.nbytes) != sys.byteorder.encode()
        )

    def payload_at(self, offset: int) -> Record | None:
        """Return the record whose payload contains `offset`; None for headers and gaps."""
        index = bisect_right(self._payloads, offset) - 1
        if index < 0:
            return None
        record = self._records[index]
        return record if record.offset <= offset < record.offset + record.nbytes else None

    def expected(self, record: Record) -> int | None:
        """Return the CRC-32 that the payload must have; None if none is checked.

        Torch records 0 under set_crc32_options(False), and for data that is filled in after skip_data: then
        the checksum is unknown.
        """
        if not self._verify:
            return None
        if record.crc:
            return record.crc
        if self._verify is True and record.nbytes:
            raise Format(
                None,
                f"{self.path} records no CRC-32 for {record.name} (torch.save writes none under "
                'set_crc32_options(False)), and verify=True requires it; load it with verify="auto"',
                self.path,
            )
        return None

    def check(self, record: Record, crc: int) -> None:
        """Compare the CRC-32 of the record's payload with the recorded one. Raises Corrupt."""
        expected = self.expected(record)
        if expected is not None and crc != expected:
            raise self.corrupt(record)

    def corrupt(self, record: Record) -> Corrupt:
        """Make the error for a payload that contradicts its CRC-32."""
        key = record.name.rpartition("/")[2]
        names = self.scan.names() if self.scan and record.is_storage else {}
        what = f"tensor {names[key]!r} (record {record.name})" if names.get(key) else f"record {record.name}"
        error = Corrupt(
            None,
            f"{self.path}: the bytes of {what} contradict the CRC-32 recorded for them; "
            "restore the file from another copy",
            self.path,
        )
        if record.is_storage:
            error.tensor = names.get(key) or key
        return error

    def check_all(self) -> None:
        """Read every record and verify its CRC-32."""
        largest = max((record.nbytes for record in self._records), default=0)
        piece = memoryview(bytearray(min(_PIECE_BYTES, largest)))
        for record in self._records:
            crc = 0
            end = record.offset + record.nbytes
            for offset in range(record.offset, end, _PIECE_BYTES):
                part = piece[: min(_PIECE_BYTES, end - offset)]
                self._source.read_into(part, offset)
                crc = zlib.crc32(part, crc)
            self.check(record, crc)


_HEAD_BYTES = 32
# How the first pickle of older files holds torch.serialization.MAGIC_NUMBER: as a long of ten bytes, after
# the opcodes for the protocol and, from protocol 4 on, the frame.
_LEGACY_MAGIC = b"\x8a\x0a" + 0x1950A86A20F9469CFC6C.to_bytes(10, "little")


def _check_start(source: Source) -> None:
    head = source.read(0, min(_HEAD_BYTES, source.size))
    if head.startswith(b"PK\3\4"):
        return
    if source.size == 0:
        raise CutOff(None, f"{source.path} is empty; copy or save it again", source.path)
    part = part_of_checkpoint(source.path)
    if part is not None:
        raise Format(None, f"{source.path} {part}", source.path)
    if head.startswith(b"GGUF"):
        raise Unsupported(
            None,
            f"{source.path} is a GGUF file, which is not supported; load it with transformers "
            "(gguf_file=...) or llama.cpp, or use the model's safetensors files",
            source.path,
        )
    what = "is neither a file of torch.save (a zip archive) nor of safetensors; "
    if head.startswith(b"version https://git-lfs"):
        what = "is a pointer of Git LFS, not the file itself; download it with git lfs pull"
    elif _LEGACY_MAGIC in head:
        what = (
            "was written by torch < 1.6, or with _use_new_zipfile_serialization=False; load it with "
            "torch.load(path, weights_only=True), and convert it with torch.save"
        )
    elif head[8:9] == b"{":
        what = "looks like a safetensors file; give it a name that ends in .safetensors"
    else:
        what += "check the path, and that the file was copied completely"
    raise Format(None, f"{source.path} {what}", source.path)


def _read_headers(source: Source, directory: pt_zip.Directory) -> list[bytes]:
    """Read the local headers of all entries, adjacent ones together; keep only the headers."""
    headers: list[bytes] = []
    entries = directory.entries
    first = 0
    while first < len(entries):
        begin = entries[first].header
        end = begin
        after = first
        while after < len(entries):
            entry = entries[after]
            entry_end = min(entry.header + pt_zip.header_bytes(entry), directory.begin)
            if after > first and (entry.header - end > _HEADERS_GAP or entry_end - begin > _HEADERS_BYTES):
                break
            end = max(end, entry_end)
            after += 1
        data = source.read(begin, end - begin)
        for entry in entries[first:after]:
            at = entry.header - begin
            header = data[at : at + pt_zip.header_bytes(entry)]
            source.kept[entry.header] = header[: pt_zip.LOCAL_HEADER.size]
            headers.append(header)
        first = after
    return headers
