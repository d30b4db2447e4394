"""Lays a `.pt` file out: what torch.save would write, with a hole for each storage's bytes.

1. torch.save runs under torch.serialization.skip_data and writes into a Capture: all but the bytes of
   storages, for which it leaves room.
2. The pickler that torch.save subclasses notes which storage has which key.
3. The central directory of what was captured says where the payload of each key goes, and where its CRC-32.
"""

import copyreg
import io
import pickle
import threading
from bisect import bisect_right
from collections import ChainMap
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.serialization import config

from trunkline import _core
from trunkline._errors import Error, Unsupported
from trunkline.checkpoint import _pt_zip
from trunkline.checkpoint._memory import is_in_reach
from trunkline.checkpoint._own_thread import run_in_own_thread

# Blocks of direct I/O: with payloads at multiples of it, every storage moves without a copy on either way.
STORAGE_ALIGNMENT = 4096

# Held while torch's settings are other than the user's: in older versions of torch they are the process's.
_settings = threading.RLock()
_this_thread = threading.local()


class Capture:
    """A write-only file that keeps what is written in pieces, and nothing for what is only sought over."""

    def __init__(self) -> None:
        """Make it empty."""
        self._starts: list[int] = []
        self._pieces: list[bytearray] = []
        self._position = 0

    def write(self, data: "bytes | memoryview") -> int:
        """Append to the piece that ends here, or begin one; torch lends the memory for this call only."""
        view = memoryview(data).cast("B")
        if self._pieces and self._starts[-1] + len(self._pieces[-1]) == self._position:
            self._pieces[-1] += view
        else:
            self._starts.append(self._position)
            self._pieces.append(bytearray(view))
        self._position += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Advance over `offset` bytes, the one way in which torch seeks while it saves."""
        if whence != io.SEEK_CUR or offset < 0:
            raise io.UnsupportedOperation("only forward, from the current position")
        self._position += offset
        return self._position

    def tell(self) -> int:
        """Return the position of the next write."""
        return self._position

    def flush(self) -> None:
        """Do nothing."""

    def pieces(self) -> list[tuple[int, bytearray]]:
        """What was written: (offset, bytes), ascending, no two adjacent."""
        return list(zip(self._starts, self._pieces, strict=True))

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return what the file holds there, zeros where nothing was written."""
        found = bytearray(nbytes)
        for index in range(max(0, bisect_right(self._starts, offset) - 1), len(self._starts)):
            begin = self._starts[index] - offset
            if begin >= nbytes:
                break
            piece = memoryview(self._pieces[index])[max(0, -begin) : nbytes - begin]
            found[max(0, begin) : max(0, begin) + len(piece)] = piece
        return bytes(found)


def _reduce(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "meta" and not tensor.is_quantized:
        return tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    # Under skip_data, which is a thread's own, torch refuses quantised tensors and warns of meta tensors,
    # though their pickles are the same: another thread makes them without.
    return run_in_own_thread(lambda: tensor.__reduce_ex__(2))  # type: ignore[no-untyped-call]


# Only what has no __reduce_ex__ of its own.
_REDUCERS: ChainMap[Any, Any] = ChainMap(
    {torch.Tensor: _reduce, torch.nn.Parameter: _reduce}, copyreg.dispatch_table
)


def _noting_pickler(storages: dict[str, torch.UntypedStorage], path: str) -> SimpleNamespace:
    """Make what torch.save takes as pickle_module: its pickler notes each storage by its key."""

    class Pickler(pickle.Pickler):
        dispatch_table = _REDUCERS

        def __init_subclass__(cls, **arguments: Any) -> None:
            super().__init_subclass__(**arguments)
            identify = cls.persistent_id

            def persistent_id(self: Pickler, obj: Any) -> Any:
                identity = identify(self, obj)
                if identity is not None:
                    _note(storages, identity, obj, path)
                return identity

            cls.persistent_id = persistent_id  # type: ignore[method-assign, assignment]

    return SimpleNamespace(Pickler=Pickler, __name__="pickle")


def _note(storages: dict[str, torch.UntypedStorage], identity: tuple[Any, ...], obj: Any, path: str) -> None:
    storage = obj._untyped_storage if isinstance(obj, torch.storage.TypedStorage) else obj
    if not is_in_reach(storage.device):
        raise Unsupported(
            None,
            f"saving {path}: a tensor is on device {storage.device}, and only those in the memory of the CPU "
            "and of CUDA GPUs can be laid out; move it first, for example with tensor.cpu()",
            path,
        )
    # ("storage", type, key, location, number of elements)
    storages[identity[2]] = storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _capture(obj: object, path: str) -> tuple[Capture, dict[str, torch.UntypedStorage]]:
    """What torch.save writes without the data, and the storages by their keys."""
    capture = Capture()
    noted: dict[str, torch.UntypedStorage] = {}
    settings = {"save.storage_alignment": STORAGE_ALIGNMENT, "save.compute_crc32": True}
    _this_thread.lays_out = True
    try:
        with _settings, config.patch(settings), torch.serialization.skip_data():  # type: ignore[attr-defined]
            torch.save(obj, capture, pickle_module=_noting_pickler(noted, path))  # type: ignore[arg-type]
        return capture, dict(noted)
    finally:
        # Torch's pickler class refers to it until the garbage collector runs: it must not hold storages.
        noted.clear()


def lay_out(obj: object, path: str) -> "_core.FileImage":
    """Lay out the `.pt` file of `obj` as torch.save would write it.

    Nothing of the size of the storages is allocated. The image refers to the memory of obj's storages: they
    must not change until it is written. Each non-empty storage lies at a multiple of 4096 bytes and has its
    CRC-32 patched in once it is known, so that stock torch.load and zip tools accept the file. Raises what
    torch.save raises for what cannot be pickled, Unsupported for a storage on another device than the CPU and
    CUDA GPUs.
    Thread-safe.
    """
    # In a thread of its own: skip_data that stayed after an interrupt would have torch.save write no data.
    if getattr(_this_thread, "lays_out", False):  # for an object that is pickled by saving another
        capture, storages = _capture(obj, path)
    else:
        capture, storages = run_in_own_thread(lambda: _capture(obj, path))
    size = capture.tell()
    image = _core.FileImage(path, size)
    for offset, piece in capture.pieces():
        image.add(offset, piece)
    directory = _pt_zip.read_directory(capture.read, size, path)
    headers = (capture.read(entry.header, _pt_zip.header_bytes(entry)) for entry in directory.entries)
    for record in _pt_zip.place_records(directory, headers, path):
        storage = storages.get(record.name.partition("/data/")[2])
        if storage is None or record.nbytes == 0:
            continue
        if storage.nbytes() != record.nbytes:
            raise Error(
                None, f"saving {path}: another thread resized a tensor meanwhile; save when none does", path
            )
        end = record.offset + record.nbytes
        image.add(record.offset, _bytes_of(storage))
        crc = image.add_sum("crc32", record.offset, end)
        image.add_patch(end + _pt_zip.DESCRIPTOR_CRC_AT, crc, "le32")
        image.add_patch(record.entry + _pt_zip.ENTRY_CRC_AT, crc, "le32")
    return image
