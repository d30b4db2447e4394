"""The files of a checkpoint, and where its items are in them."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from trunkline._formats.checkpoint_names import DESCRIPTOR, is_manifest, is_shard
from trunkline._formats.dcp_names import (
    is_data_file_name,
    is_rank_manifest_name,
    is_refused_name,
    is_torch_metadata,
    is_torch_temporary_metadata,
)
from trunkline._formats.node_names import RECORD
from trunkline._paths import check_is_local, names_in
from trunkline.dcp._owner import new_file_id

CHUNK_BYTES = 1 << 20  # what one CRC-32C covers, counted from the start of a file
ALIGNMENT = 4096  # of items of at least as many bytes, so that they move without a copy
SMALL_ALIGNMENT = 64  # of smaller ones; a multiple of the size of every dtype's elements

_SAFETENSORS = re.compile(r"(shard-[0-9]{5,}-)?model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
_SHARDED = "sharded"  # the folder where HuggingFaceStorageWriter puts shards that it then consolidates
_OF_DCP = b"DCP_SHARDING_INFO"  # in the header of its files, but not of other files with these names
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors

DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype
}


@dataclass(frozen=True)
class DataFile:
    """A file of items. `crc32c`: one checksum per chunk, 4 bytes each, little-endian."""

    name: str
    nbytes: int
    crc32c: bytes

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Return the begin and end of the bytes that checksum `chunk` covers."""
        return chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.nbytes)

    def chunk_crc(self, chunk: int) -> int:
        """Return the checksum of a chunk."""
        return int.from_bytes(self.crc32c[4 * chunk : 4 * chunk + 4], "little")


@dataclass(frozen=True)
class StoredItem:
    """Bytes of a file that hold one item: a tensor's elements in row-major order, or bytes without a dtype.

    An empty item is in no file.
    """

    file: DataFile | None
    offset: int
    nbytes: int
    dtype: str | None
    shape: tuple[int, ...] | None


def new_data_file_name(rank: int, volume: int, directory: Path) -> str:
    """Return a new, unique name, so that a save never touches the files of another.

    It identifies `directory` as the owner of the file.
    """
    return f"{data_file_prefix(rank)}{volume}-{new_file_id(directory)}.shard"


def data_file_prefix(rank: int) -> str:
    """Return how the names of a rank's data files begin."""
    return f"rank{rank:05d}-"


def list_torch_metadata(directory: Path) -> list[str]:
    """Return the names of the files by which torch's FileSystemReader loads checkpoints of a directory.

    They are followed by the temporary files of saves that were interrupted, or are running: such a save
    removes the file of an older checkpoint before its own has that name.
    """
    names = sorted(names_in(directory))
    return [
        *filter(is_torch_metadata, names),
        *filter(is_torch_temporary_metadata, names),
    ]


def find_torch_safetensors(directory: Path) -> str | None:
    """Return a file by which torch's HuggingFaceStorageReader loads a checkpoint of a directory.

    Models that other programs wrote have files of the same names, but are not such checkpoints.
    """
    for folder in ("", _SHARDED):
        try:
            names = names_in(directory / folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in sorted(names):
            match = _SAFETENSORS.fullmatch(name)
            if match is not None and (match[1] or _is_of_dcp(directory / folder / name)):
                return str(Path(folder, name))
    return None


def _is_of_dcp(path: Path) -> bool:
    if not path.is_file():  # opening a pipe would wait for a writer
        return False
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        return nbytes <= _MAX_HEADER_BYTES and _OF_DCP in file.read(nbytes)


def checkpointer_file(directory: Path) -> str | None:
    """Return a file that shows that a directory belongs to a Checkpointer, or is a step of one; else None.

    A step that has shards but no manifest yet counts as well.
    """
    try:
        names = names_in(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next(
        (
            name
            for name in sorted(names)
            if name in (DESCRIPTOR, RECORD) or is_manifest(name) or is_shard(name)
        ),
        None,
    )


def leftovers(names: Iterable[str]) -> list[str]:
    """Return the names of files that saves create, which are leftovers if no manifest refers to them."""
    return [name for name in names if _is_left_by_saves(name)]


def _is_left_by_saves(name: str) -> bool:
    return is_data_file_name(name) or is_rank_manifest_name(name) or is_refused_name(name)


def directory_argument(value: "str | os.PathLike[str]", name: str) -> str:
    """Return an argument that names a directory as str; raises TypeError, ValueError."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}: must be str or os.PathLike of str, not {type(value).__name__}")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError(f"{name}: must be str or os.PathLike of str, not of {type(path).__name__}")
    if not path or "\0" in path:
        raise ValueError(f"{name}: {path!r} does not name a directory")
    check_is_local(path, name)
    return path


def is_possible_checkpoint_id(checkpoint_id: "str | os.PathLike[str]") -> bool:
    """Whether it is the path of a directory that exists or could be created, not a URL."""
    if not isinstance(checkpoint_id, str | os.PathLike):
        return False
    path = os.fspath(checkpoint_id)
    if not isinstance(path, str) or not path or "://" in path:
        return False
    path = os.path.abspath(path)  # noqa: PTH100 - Path.absolute keeps ".."
    while not os.path.lexists(path):
        path = os.path.dirname(path)  # noqa: PTH120 - as above
    return os.path.isdir(path) and os.access(path, os.W_OK)  # noqa: PTH112
