"""Lays a `.pt` file out: what torch.save would write, with a hole for each storage's bytes.

1. The object is pickled as torch.save pickles it; each storage becomes a key, in order of first use.
2. ArchiveLayout says where the records of the zip archive go: small storages at multiples of 64 bytes, as in
   files of torch.save, large ones at multiples of 4096, so that they move without a copy.
3. The layout refers to the memory of the storages, and to the places of their CRC-32s.
"""

import io
import pickle
import sys
import zlib
from typing import Any

import torch

from trunkline import _core
from trunkline._errors import Unsupported
from trunkline._tensor_io.memory import is_in_reach
from trunkline._tensor_io.sources import SourceLayout, Sources
from trunkline._tensor_io.tensors import objection_if_freed, objection_in_any_file, objection_in_pt

# The folder of the records, which torch.save names after the file. One letter: storages are aligned to 64
# bytes, so that a few more letters in the name of each can add 64 bytes to each small one.
_PREFIX = "t"
_PROTOCOL = 2
# Of the format, as torch writes it: kProducedFileFormatVersion of caffe2/serialize/versions.h.
_VERSION = b"3\n"


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does, and collects tensors and storages: these by their keys, 0, 1 and so on."""

    def __init__(self, file: io.BytesIO, root: object, path: str) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self._root = root
        self.storages: list[torch.UntypedStorage] = []
        self.tensors: list[torch.Tensor] = []
        self._path = path
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return what pickle asks an object that is none of its own types for."""
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        why = objection_in_any_file(obj) or objection_in_pt(obj.dtype) or objection_if_freed(obj)
        if why is None:
            self.tensors.append(obj)
            try:
                return obj.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]
            except (RuntimeError, NotImplementedError) as error:  # of torch, for what has no storage
                why = f"cannot be saved, nor could torch.save: {str(error).partition(chr(10))[0]}"
        where = path_in_object(self._root, obj) or f"a {type(obj).__name__}"
        raise Unsupported(None, f"saving {self._path}: {where} {why}", self._path)

    def persistent_id(self, obj: Any) -> Any:
        """Return what stands for a storage; None for any other object, which is then pickled."""
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
                f"saving {self._path}: a tensor is on device {device}, and only those in the memory of the "
                "CPU and of CUDA GPUs can be laid out; move it first, for example with tensor.cpu()",
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


def path_in_object(root: object, wanted: object) -> str | None:
    """Return where in `root` an object is, as Python code from `obj` on; None where no container has it."""
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("obj", root)]
    while pending:
        place, value = pending.pop()
        if value is wanted:
            return place
        if isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            children = value.items() if isinstance(value, dict) else enumerate(value)
            pending.extend((f"{place}[{key!r}]", child) for key, child in children)
    return None


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pickled(obj: object, path: str) -> tuple[bytes, _Pickler]:
    file = io.BytesIO()
    pickler = _Pickler(file, obj, path)
    pickler.dump(obj)
    return file.getvalue(), pickler


def lay_out_records(pickled: bytes, sizes: list[int]) -> _core.ArchiveLayout:
    """Lay out the records of torch.save for a pickle and its storages.

    But for ".format_version" and ".storage_alignment", from which torch would compute where the storages are,
    as though all were aligned alike.
    """
    # Torch writes a digest of names and contents. It tells two files apart; nothing else looks at it.
    digest = f"{zlib.crc32(pickled):020d}{zlib.crc32(repr(sizes).encode()):020d}"
    return _core.ArchiveLayout(
        _PREFIX,
        [("data.pkl", pickled), ("byteorder", sys.byteorder.encode())],
        sizes,
        [("version", _VERSION), (".data/serialization_id", digest.encode())],
    )


def lay_out(obj: object, path: str) -> SourceLayout:
    """Lay out the `.pt` file of `obj` as torch.save would write it.

    Nothing of the size of the storages is allocated. The layout refers to the memory of obj's storages: they
    must not change until it is written. Each storage of 1 MiB or more lies at a multiple of 4096 bytes, each
    other at one of 64; each has its CRC-32 patched in once it is known, so that stock torch.load and zip
    tools accept the file. Raises what torch.save raises for what cannot be pickled, Unsupported for a storage
    on another device than the CPU and CUDA GPUs. Thread-safe.
    """
    pickled, pickler = _pickled(obj, path)
    storages = pickler.storages
    sizes = [storage.nbytes() for storage in storages]
    archive = lay_out_records(pickled, sizes)
    layout = SourceLayout(path, archive.nbytes, Sources(storages, pickler.tensors))
    addresses = [storage.data_ptr() if storage.device.type == "cpu" else 0 for storage in storages]
    layout.add_archive(archive, addresses, storages)
    if 0 in addresses:  # empty, or on a GPU
        for storage, (offset, nbytes, _, _) in zip(storages, archive.payloads(), strict=True):
            if nbytes > 0 and storage.device.type != "cpu":
                layout.add(offset, _bytes_of(storage))
    return layout
