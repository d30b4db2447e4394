"""The manifest of a pack (docs/formats/pack.md): what it holds, and what it was made from."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trunkline._core import FileLayout
from trunkline._errors import Format
from trunkline._streaming.stored import FileTensor
from trunkline._tensor_io.tensors import dtype_name, dtype_named
from trunkline._tensor_io.transfer import write_layouts

NAME = "pack.json"
_FORMAT = "trunkline pack"
_VERSION = 1
_MAX_BYTES = 100_000_000  # as the header of a safetensors file; the manifest lists its tensors


@dataclass(frozen=True)
class SourceFile:
    """A file that a pack was made from, as it was then."""

    name: str
    nbytes: int
    modified_ns: int
    head_sha256: str  # of the bytes before the data
    data_crc32c: int
    changed_ns: int = 0  # of the inode
    inode: int = 0


# In Recipe.converter: before the digest of how records of quantised experts are laid out.
EXPERTS = ", experts "


@dataclass(frozen=True)
class Recipe:
    """Everything else that decides what a pack holds; a pack made by another recipe is replaced."""

    config_sha256: str
    dtype: str
    converter: str  # the library that converted the tensors, and its version; "" if none did

    @property
    def form(self) -> str:
        """How the pack differs from the files of the model, in words; "" if it has their bytes."""
        if EXPERTS in self.converter:
            return "quantised experts"
        return "converted" if self.converter else ""


@dataclass
class Manifest:
    """A pack: one file of weights, striped over `volumes` directories when there are several."""

    weights: str  # name of the file
    nbytes: int
    volumes: int
    recipe: Recipe
    source: list[SourceFile]
    tensors: list[FileTensor] = field(default_factory=list)  # in the order of their bytes; `file` is 0
    directories: list[str] = field(default_factory=list)  # if there are several; [] in older manifests
    model: str = ""  # as the user called it, for lists of packs; "" in older manifests

    def write(self, directory: Path) -> None:
        """Write the manifest into the directory, atomically and durably: from now on the pack exists."""
        weights: dict[str, Any] = {"name": self.weights, "bytes": self.nbytes, "volumes": self.volumes}
        if self.directories:
            weights["directories"] = self.directories
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "weights": weights,
            "recipe": asdict(self.recipe),
            "source": [asdict(file) for file in self.source],
            "tensors": [_described(stored) for stored in self.tensors],
        }
        contents = json.dumps(document, indent=1).encode()
        layout = FileLayout(directory / NAME, len(contents))
        layout.add(0, contents)
        write_layouts([layout])


def _described(stored: FileTensor) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": stored.name,
        "dtype": dtype_name(stored.dtype),
        "shape": stored.shape,
        "offset": stored.offset,
        "crc32c": stored.checksum,
    }
    if stored.slice_checksums:
        described["slices_crc32c"] = stored.slice_checksums
    return described


def file_version(directory: Path) -> tuple[int, int, int] | None:
    """Return inode and times of the manifest, which change when it is replaced; None if there is none."""
    try:
        status = (directory / NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def read(directory: Path) -> Manifest | None:
    """Return the manifest of the pack in the directory; None if there is none. Raises Format."""
    path = directory / NAME
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if len(text) > _MAX_BYTES:
        raise _invalid(path, f"it is larger than {_MAX_BYTES} bytes")
    return parse(text, path)


def parse(text: bytes, path: Path) -> Manifest:
    """Parse the text of the manifest at `path`. Raises Format."""
    try:
        document = json.loads(text)
        if document["format"] != _FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        if document["version"] != _VERSION:
            raise ValueError(
                f"it has format version {document['version']}, and this Trunkline reads {_VERSION}"
            )
        return _of(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise _invalid(path, error) from error


def _invalid(path: Path, why: object) -> Format:
    return Format(
        None,
        f"cannot read {path}: it is not the manifest of a pack that this Trunkline supports ({why}); remove "
        "it to rebuild the pack",
        str(path),
    )


def _of(document: dict[str, Any]) -> Manifest:
    weights = document["weights"]
    manifest = Manifest(
        weights=str(weights["name"]),
        nbytes=int(weights["bytes"]),
        volumes=int(weights["volumes"]),
        recipe=Recipe(**document["recipe"]),
        source=[SourceFile(**file) for file in document["source"]],
        tensors=[_tensor_of(entry) for entry in document["tensors"]],
        directories=list(map(str, weights.get("directories", []))),
        model=str(document.get("model", "")),
    )
    if manifest.directories and len(manifest.directories) != manifest.volumes:
        raise ValueError("its list of directories is incomplete")
    if "/" in manifest.weights or manifest.weights in ("", ".", ".."):
        raise ValueError(f"{manifest.weights!r} is not a file name for its weights")
    for stored in manifest.tensors:
        if any(not 0 <= (checksum or 0) < 1 << 32 for checksum in (stored.checksum, *stored.slice_checksums)):
            raise ValueError(f"a checksum of {stored.name!r} is not a CRC-32C")
        if stored.slices and stored.shape[:1] != (stored.slices,):
            raise ValueError(f"the tensor {stored.name!r} does not have {stored.slices} slices")
        if min((stored.offset, *stored.shape)) < 0 or stored.offset + stored.nbytes > manifest.nbytes:
            raise ValueError(f"the tensor {stored.name!r} is outside of the file")
    return manifest


def _tensor_of(entry: dict[str, Any]) -> FileTensor:
    slice_checksums = tuple(int(checksum) for checksum in entry.get("slices_crc32c", ()))
    return FileTensor(
        str(entry["name"]),
        0,
        int(entry["offset"]),
        dtype_named(entry["dtype"]),
        tuple(int(extent) for extent in entry["shape"]),
        int(entry["crc32c"]),
        len(slice_checksums),
        slice_checksums,
    )
