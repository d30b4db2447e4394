"""Lays out a `.pt` file: what torch.save would write, with a gap for each storage's bytes.

1. The object is pickled as torch.save pickles it; each storage becomes a key, in order of first use.
2. ArchiveLayout places the records of the zip archive: small storages at multiples of 64 bytes, as torch.save
   does, large ones at multiples of 4096, so that they are written without a copy.
3. The layout refers to the memory of the storages, and to the fields of their CRC-32s.
"""

import io
import pickle
import sys
import zlib
from typing import IO, Any, cast

import torch

from trunkline import _core
from trunkline._errors import Unsupported
from trunkline._formats.open_file import BinaryFile, WholeWriter
from trunkline._formats.pt.unloadable import (
    LOADABLE,
    is_loadable,
    is_of_tensors,
    unloadable_parts,
    warn_of_unloadable,
)
from trunkline._formats.pt.unpicklable import find_unpicklable
from trunkline._tensor_io.memory import is_in_reach
from trunkline._tensor_io.sources import SourceLayout, Sources
from trunkline._tensor_io.tensors import objection_if_freed, objection_in_any_file, objection_in_pt

# The folder of the records, which torch.save names after the file. One letter: storages are aligned to 64
# bytes, so that a few more letters in the name of each can add 64 bytes to each small one.
_PREFIX = "t"
_PROTOCOL = 2
# The format version that torch writes: kProducedFileFormatVersion of caffe2/serialize/versions.h.
_VERSION = b"3\n"


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does, and collects tensors and storages; the keys of these are 0, 1 and so on."""

    def __init__(self, file: io.BytesIO, root: object, path: str) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._root = root
        self.storages: list[torch.UntypedStorage] = []
        self.tensors: list[torch.Tensor] = []
        self.kinds: set[type] = set()  # of all objects but tensors that pickle does not know
        self._path = path
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object of a type that pickle does not know."""
        if not isinstance(obj, torch.Tensor):
            if not is_of_tensors(obj):
                self.kinds.add(type(obj))
            return NotImplemented
        why = objection_in_any_file(obj) or objection_in_pt(obj.dtype) or objection_if_freed(obj)
        if why is None:
            self.tensors.append(obj)
            try:
                return obj.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
            except (RuntimeError, NotImplementedError) as error:  # of torch, for tensors without a storage
                why = f"cannot be saved, not even by torch.save: {str(error).partition(chr(10))[0]}"
        where = path_in_object(self._root, obj) or f"a {type(obj).__name__}"
        raise Unsupported(None, f"saving {self._path}: {where} {why}", self._path)

    def persistent_id(self, obj: Any) -> Any:
        """Return the persistent id of a storage; None for any other object, which is then pickled."""
        if isinstance(obj, torch.storage.TypedStorage):
            name = obj._pickle_storage_type()  # type: ignore[no-untyped-call]
            return self._identity(
                obj._untyped_storage,
                getattr(torch, name),
                obj.dtype,
                obj._size(),  # type: ignore[no-untyped-call]
            )
        if isinstance(obj, torch.UntypedStorage):
            return self._identity(obj, torch.UntypedStorage, torch.uint8, obj.nbytes())
        return None

    def _identity(self, storage: torch.UntypedStorage, kind: Any, dtype: torch.dtype, elements: int) -> Any:
        device = storage.device
        if not is_in_reach(device):
            raise Unsupported(
                None,
                f"saving {self._path}: {self._place_of(storage)} is on the device {device}, but only tensors "
                "on the CPU and CUDA GPUs can be saved; move it first, for example with tensor.cpu()",
                self._path,
            )
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) != dtype:
            raise RuntimeError(
                "Cannot save multiple tensors or storages that view the same data as different types"
            )
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self.storages))
            self.storages.append(storage)
        location = "cpu" if device.type == "cpu" else torch.serialization.location_tag(storage)
        return ("storage", kind, key, location, elements)

    def _place_of(self, storage: torch.UntypedStorage) -> str:
        """Return the place of the tensor whose storage is being pickled, or of the storage."""
        last = self.tensors[-1:]  # a tensor is pickled immediately before its storage
        where = path_in_object(self._root, last[0]) if last and last[0].device == storage.device else None
        return where or path_in_object(self._root, storage) or "a tensor"


def path_in_object(root: object, wanted: object) -> str | None:
    """Return the path of an object in `root`, as Python code that begins with `obj`; None if not found.

    Another thread may change `root` meanwhile; then it may not be found.
    """
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("obj", root)]
    while pending:
        place, value = pending.pop()
        if value is wanted:
            return place
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            children = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            pending.extend((f"{place}[{key!r}]", child) for key, child in reversed(children))
    return None


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pickled(obj: object, path: str) -> tuple[bytes, _Pickler]:
    file = io.BytesIO()
    pickler = _Pickler(file, obj, path)
    try:
        pickler.dump(obj)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        where = find_unpicklable(obj, lambda part: _Pickler(io.BytesIO(), part, path).dump(part))
        if where is None or type(error) not in (pickle.PicklingError, AttributeError, TypeError):
            raise
        raise type(error)(f"saving {path}: {where} cannot be pickled: {error}") from error
    return file.getvalue(), pickler


def _why_not_loadable(obj: object, pickled: bytes, pickler: _Pickler, path: str) -> str | None:
    """Return which parts of an object weights_only=True does not load from its file; None if it loads all."""
    if pickler.kinds <= LOADABLE:  # of nearly all states
        return None

    def objection(part: object) -> bool:
        file = io.BytesIO()
        try:
            _Pickler(file, part, path).dump(part)
        except Exception:  # it is only a part of what was pickled, and may be unusual on its own
            return False
        return not is_loadable(file.getvalue())

    return None if is_loadable(pickled) else unloadable_parts(obj, objection)


def lay_out_records(pickled: bytes, sizes: list[int]) -> _core.ArchiveLayout:
    """Lay out the records of torch.save for a pickle and its storages.

    Omits ".format_version" and ".storage_alignment", from which torch would compute the offsets of storages,
    assuming that all are aligned alike.
    """
    # Torch writes a digest of names and contents, which only serves to distinguish files.
    digest = f"{zlib.crc32(pickled):020d}{zlib.crc32(repr(sizes).encode()):020d}"
    return _core.ArchiveLayout(
        _PREFIX,
        [("data.pkl", pickled), ("byteorder", sys.byteorder.encode())],
        sizes,
        [("version", _VERSION), (".data/serialization_id", digest.encode())],
    )


def write_to(file: BinaryFile, obj: object, path: str) -> None:
    """Write what torch.save writes to an open file. Raises the errors of lay_out()."""
    pickled, pickler = _pickled(obj, path)
    warn_of_unloadable(_why_not_loadable(obj, pickled, pickler, path), path)
    del pickled, pickler
    writer = WholeWriter(file)
    torch.save(obj, cast("IO[bytes]", writer))
    if writer.error is not None:
        raise writer.error


def archive_of(obj: object, path: str) -> tuple[_core.ArchiveLayout, list[torch.UntypedStorage]]:
    """Lay out the records of the `.pt` file of `obj`, and return its storages in the order of the payloads.

    Reads nothing of the storages. Raises the errors of lay_out().
    """
    pickled, pickler = _pickled(obj, path)
    archive = lay_out_records(pickled, [storage.nbytes() for storage in pickler.storages])
    return archive, pickler.storages


def lay_out(obj: object, path: str) -> SourceLayout:
    """Lay out the `.pt` file of `obj` as torch.save would write it.

    Allocates no copies of the storages. The layout refers to the memory of obj's storages, which must not
    change until it is written. Each storage of 1 MiB or more is at a multiple of 4096 bytes, each other at
    one of 64; its CRC-32 is filled in once it is known, so that stock torch.load and zip tools accept the
    file. Raises the errors of torch.save for objects that cannot be pickled, Unsupported for a storage on a
    device other than the CPU and CUDA GPUs. Thread-safe.
    """
    pickled, pickler = _pickled(obj, path)
    warn_of_unloadable(_why_not_loadable(obj, pickled, pickler, path), path)
    storages = pickler.storages
    sizes = [storage.nbytes() for storage in storages]
    archive = lay_out_records(pickled, sizes)
    tensors = pickler.tensors
    sources = Sources(storages, tensors, lambda index: path_in_object(obj, tensors[index]))
    layout = SourceLayout(path, archive.nbytes, sources)
    addresses = [storage.data_ptr() if storage.device.type == "cpu" else 0 for storage in storages]
    layout.add_archive(archive, addresses, storages)
    if 0 in addresses:  # empty, or on a GPU
        for storage, (offset, nbytes, _, _) in zip(storages, archive.payloads(), strict=True):
            if nbytes > 0 and storage.device.type != "cpu":
                layout.add(offset, _bytes_of(storage))
    return layout
