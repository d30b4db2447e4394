"""Loads a .pt file on all ranks of a process group, which read its storages together."""

import hashlib
from typing import Any

import torch

from trunkline._core import Engine, File, crc32, crc32_combine
from trunkline._formats import pt
from trunkline._formats.file_version import Version, check_unchanged, version_of
from trunkline._formats.pt.archive import Archive
from trunkline._formats.pt.loader import Memory
from trunkline._formats.pt.zip import Record
from trunkline._formats.safetensors import Header, StoredTensor
from trunkline._formats.safetensors.loader import Verify
from trunkline._formats.safetensors.pieces import Piece
from trunkline._formats.selection import Selection
from trunkline._tensor_io.background import start_thread
from trunkline._tensor_io.flag import Flag
from trunkline._tensor_io.map_location import DeviceOf
from trunkline.checkpoint.group_rounds import Rounds, cut_for_ranks
from trunkline.checkpoint.reading_ranks import ReadingRanks

_MEMORY_BYTES = 1 << 30  # for pieces in flight
_GRAIN_BYTES = 4096  # pieces begin and end where direct I/O can


def load_pt(
    ranks: ReadingRanks,
    path: str,
    *,
    locate: DeviceOf,
    engine: Engine | None,
    verify: Verify,
    selection: Selection | None,
) -> Any:
    """Do what pt.load() does, on all of the ranks: each reads an equal share of the storages' bytes.

    The directory and the pickle are read by every rank, as is all of a file whose pickle does more than build
    tensors. A collective operation. Raises what pt.load() raises where this rank reads, and RankError if
    another rank fails.
    """
    reading = _Reading(ranks, path, verify)
    try:
        return pt.load(
            path,
            locate=locate,
            engine=engine,
            verify=verify,
            selection=selection,
            fill_memory=reading.fill,
        )
    except Exception as error:
        if not reading.has_begun:
            ranks.agree(None, [], error, path)  # the other ranks wait for this one
        raise
    finally:
        reading.end()


class _Reading:
    """What fills the storages of one file."""

    def __init__(self, ranks: ReadingRanks, path: str, verify: Verify) -> None:
        self._ranks = ranks
        self._path = path
        self._verify = verify
        self._version: Version | None = version_of(path)
        self.has_begun = False  # the other ranks know that this one can read the file
        self._records: _Records | None = None
        self._error: BaseException | None = None
        self._thread: Flag | None = None  # set when it has ended

    def fill(self, archive: Archive, file: File, memory: Memory) -> None:
        """Fill the memory. A collective operation."""
        records = _Records(archive, file.size, memory, self._version)
        self.has_begun = True
        unchecked = [] if records.all_checked else [self._version]
        self._ranks.agree((records.digest(), self._verify), unchecked, None, self._path)
        pieces = cut_for_ranks([records.header], self._ranks.size, _MEMORY_BYTES, [_GRAIN_BYTES])
        self._records = records
        rounds = Rounds(self._ranks, [file], pieces, records)
        self._thread = Flag()
        # In a thread: signals are handled meanwhile, and operations of the group wait in C++.
        start_thread(lambda: self._run(rounds), self._thread)
        self._thread.wait()
        if self._error is not None:
            raise self._error
        records.check_whole()

    def _run(self, rounds: Rounds) -> None:
        try:
            rounds.run()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Let later reads use the group. A thread that still runs ends at its next meeting."""
        if self._records is not None:
            self._records.is_stopped = True
        if self._thread is None or self._thread.is_set():
            self._ranks.close()


class _Records:
    """The records to read, and the memory that they are copied to: the user of the pieces."""

    def __init__(self, archive: Archive, file_bytes: int, memory: Memory, version: Version | None) -> None:
        self._archive = archive
        targets = memory.large | {
            record: torch.empty(0, dtype=torch.uint8).set_(storage)
            for record, storage in memory.small.items()
        }
        self._records: list[Record] = sorted(
            (each for each in targets if each.nbytes), key=lambda record: record.offset
        )
        self._targets: list[torch.Tensor] = [targets[record] for record in self._records]
        self._expected = [archive.expected(record) for record in self._records]
        self._crcs = [0] * len(self._records)
        stored = [
            StoredTensor(each.name, "U8", (each.nbytes,), each.offset, each.offset + each.nbytes)
            for each in self._records
        ]
        # The pieces are those of a safetensors file with a tensor of bytes for each record.
        self.header = Header(archive.path, file_bytes, b"", {}, stored, version)
        self.is_stopped = False

    @property
    def all_checked(self) -> bool:
        """Whether each record has a checksum that is verified."""
        return all(expected is not None for expected in self._expected)

    def digest(self) -> str:
        """Return a text that is equal where the same records, with equal checksums, are to be read."""
        what = [(each.name, each.offset, each.nbytes, each.crc) for each in self._records]
        return hashlib.sha256(repr((self.header.file_bytes, what)).encode()).hexdigest()

    def verify(self, piece: Piece, contents: torch.Tensor) -> list[int]:
        """Return the CRC-32 of each part of a piece; 0 for parts of records without one."""
        if not self.all_checked:
            check_unchanged(self.header.path, self.header.version)
        return [
            0 if self._expected[part.tensor] is None else crc32(contents[part.at : part.at + part.nbytes])
            for part in piece.parts
        ]

    def use(self, piece: Piece, contents: torch.Tensor, verified: list[int]) -> None:
        """Copy the parts of a piece. Raises Corrupt once a record is complete and its CRC-32 is wrong."""
        for part, crc in zip(piece.parts, verified, strict=True):
            into = self._targets[part.tensor][part.begin : part.begin + part.nbytes]
            into.copy_(contents[part.at : part.at + part.nbytes])
            self._crcs[part.tensor] = crc32_combine(self._crcs[part.tensor], crc, part.nbytes)

    def stop_reason(self) -> str | None:
        """Return why this rank ends early."""
        return "its load was interrupted" if self.is_stopped else None

    def check_whole(self) -> None:
        """Raise Corrupt if a record contradicts its CRC-32: on all ranks, which know the same."""
        for record, expected, crc in zip(self._records, self._expected, self._crcs, strict=True):
            if expected is not None and crc != expected:
                raise self._archive.corrupt(record)
