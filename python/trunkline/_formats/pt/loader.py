"""Loads `.pt` files of torch >= 1.6: rebuilds the objects without their bytes, which the engine then reads.

1. Directory, local headers and data.pkl are read and checked, so all further steps are known to be safe.
2. build.py builds a plain object on unfilled storages. Any other object is left to torch.load with
   weights_only=True, which reads the file through a _Reader. When torch reads the payload of a storage, the
   _Reader leaves torch's memory untouched (which costs nothing) and remembers the record; torch then passes
   that storage to map_location, which returns new memory instead, and knows the record for it.
3. One layout of all these extents is read at the speed of the device, with the CRC-32s that the file records.

Step 2 leaves tensors unfilled while the pickle runs. If the pickle does more than build tensors, the _Reader
reads the payloads immediately instead.
"""

import errno
import io
import os
import pickle
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trunkline import _core
from trunkline._errors import Corrupt, Error, Format, Unsupported
from trunkline._formats.file_version import Version, check_unchanged, version_of
from trunkline._formats.pt.archive import Archive, Source, Verify
from trunkline._formats.pt.build import build
from trunkline._formats.pt.zip import Record
from trunkline._formats.selection import Selection, leaves_of, selected
from trunkline._tensor_io import transfer
from trunkline._tensor_io.map_location import DeviceOf, device_of
from trunkline._tensor_io.memory import CPU, empty_bytes, is_fresh

ReadLayouts = Callable[..., None]
FillMemory = Callable[[Archive, "_core.File", "Memory"], None]


class _Reader(io.RawIOBase):
    """The file as torch.load reads it; with `deferred`, storages are recorded instead of read.

    An error is kept in `error`, because torch's reader does not propagate every exception.
    """

    def __init__(self, source: Source, archive: Archive, *, deferred: bool) -> None:
        super().__init__()
        self._source = source
        self._archive = archive
        self._deferred = deferred
        self._position = 0
        self._unpickling = False
        self.record: Record | None = None
        self._done = 0
        self._crc = 0
        self.error: BaseException | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (0, self._position, self._source.size)[whence] + offset
        return self._position

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self._source.size - self._position)
        buffer = bytearray(left if nbytes is None or nbytes < 0 else min(nbytes, left))
        self.readinto(buffer)
        return bytes(buffer)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._source.size - self._position)]
        try:
            if self.error is not None:
                raise self.error
            if len(view):
                self._fill(view)
        except BaseException as error:
            self.error = error
            raise
        self._position += len(view)
        return len(view)

    def _fill(self, view: memoryview) -> None:
        record = self._archive.payload_at(self._position)
        if record is self._archive.pickle:
            self._unpickling = True
        if not self._unpickling or record is None or not record.is_storage:
            # Before it reads the pickle, torch searches for the end record, in blocks that overlap payloads.
            view[:] = self._source.read(self._position, len(view))
            return
        if self._position == record.offset:
            self.record, self._done, self._crc = record, 0, 0
        if record is not self.record or self._position != record.offset + self._done:
            raise Unsupported(
                None, f"this version of torch reads {record.name} out of order", self._source.path
            )
        if not self._deferred:
            self._source.read_into(view, self._position)
            self._crc = zlib.crc32(view, self._crc)
        self._done += len(view)
        if self._done == record.nbytes and not self._deferred:
            self._archive.check(record, self._crc)

    def take(self) -> Record | None:
        """Return the record that torch has just read completely, once; None if there is none."""
        record, self.record = self.record, None
        return record if record is not None and self._done == record.nbytes else None


class _StorageAllocator:
    """A map_location for torch.load that allocates the storages, and knows which record fills each."""

    def __init__(self, reader: _Reader, archive: Archive, locate: DeviceOf, *, deferred: bool) -> None:
        self._reader = reader
        self._archive = archive
        self._locate = locate
        self._deferred = deferred
        self.targets: dict[Record, torch.Tensor] = {}

    def __call__(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """Return the storage for tensors that were saved at a location, of the same size."""
        device = self._locate(location)
        record = self._reader.take()
        nbytes = storage.nbytes()
        if nbytes != (record.nbytes if record else 0) or (self._deferred and record in self.targets):
            raise Format(
                None,
                f"{self._archive.path}: a tensor's storage of {nbytes} bytes does not match its record "
                "(or torch.serialization.skip_data() is in effect)",
                self._archive.path,
            )
        if record is None or not self._deferred:
            return storage if device.type == "cpu" else _moved(storage, device)
        if is_fresh(nbytes) or device.type != "cpu":
            self.targets[record] = target = empty_bytes(nbytes, device)
            return target.untyped_storage()
        target = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.targets[record] = target.set_(storage)
        return storage


def _moved(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    """Return a copy on the device."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).to(device).untyped_storage()


def load(
    path: "str | os.PathLike[str]",
    *,
    device: torch.device = CPU,
    locate: DeviceOf | None = None,
    engine: "_core.Engine | None" = None,
    verify: Verify = "auto",
    mmap: bool = False,
    selection: Selection | None = None,
    read_layouts: ReadLayouts = transfer.read_layouts,
    fill_memory: FillMemory | None = None,
) -> Any:
    """Load what torch.save wrote to `path` (torch >= 1.6), every tensor into the memory of `device`.

    With `locate` the device of each tensor is that of the location where it was saved. With a `selection`
    only what it selects is returned and, if the pickle only builds tensors, read.

    The pickle can only run what torch.load(weights_only=True) allows, including classes that were passed to
    torch.serialization.add_safe_globals. `verify`: "auto" verifies each CRC-32 that the file records, True
    requires one for every record, False verifies none. With `mmap` the tensors are a private mapping of the
    file, as with torch.load(mmap=True); only verify=True then reads and verifies them. `read_layouts`
    replaces transfer.read_layouts, with the same arguments; `fill_memory` replaces fill(), is called once
    without `mmap`, and has to verify what it reads.

    Raises Format for any other file (including older files and TorchScript archives), Corrupt, naming file
    and tensor, for bytes that contradict their CRC-32, Unsupported for objects that weights_only does not
    allow. Thread-safe.
    """
    if verify not in ("auto", True, False):
        raise ValueError(f'verify: must be "auto", True or False, not {verify!r}')
    locator = _Locator(locate or device_of(device))

    def fill_alone(archive: Archive, file: "_core.File", memory: "Memory") -> None:
        fill(archive, file, memory, file.size, engine, read_layouts)

    try:
        fill_it = fill_memory or fill_alone
        return _load(os.fsdecode(path), locator, engine, verify, mmap, selection, fill_it)
    except Exception:
        if locator.error is not None:  # rather than what became of it
            raise locator.error from None
        raise


class _Locator:
    """A DeviceOf whose error is kept: neither build() nor torch propagate every exception."""

    def __init__(self, locate: DeviceOf) -> None:
        self._locate = locate
        self.error: Exception | None = None

    def __call__(self, location: str) -> torch.device:
        """Return the device for a location."""
        try:
            return self._locate(location)
        except Exception as error:
            self.error = error
            raise


def _load(
    path: str,
    locate: DeviceOf,
    engine: "_core.Engine | None",
    verify: Verify,
    mmap: bool,
    selection: Selection | None,
    fill_memory: FillMemory,
) -> Any:
    version = version_of(path)
    with _core.open(path, engine=engine, direct="unless_cached") as file:
        source = Source(file, path)
        with _core.GcPause():
            archive = Archive(source, verify)
        if mmap:
            return _selected_of(_checked_mapping(archive, locate, verify), selection, path)
        if not archive.foreign_byte_order:
            memory = Memory(archive, locate)
            with _core.GcPause():
                built, result = _build(archive, memory, selection)
            if built:
                # While the file is open: another one may have its name by now.
                fill_memory(archive, file, memory)
                _check_unverified(archive, memory, version)
                return result
        result, memory = _load_by_torch(archive, source, locate)
        with _core.GcPause():
            result = _selected_of(result, selection, path)
            if selection is not None:
                _drop_unused(memory, result)
        fill_memory(archive, file, memory)
    if verify is False or archive.scan is None:  # nothing was verified, or whatever torch has read
        check_unchanged(path, version)
    _check_unverified(archive, memory, version)
    return result


def _check_unverified(archive: Archive, memory: "Memory", version: Version | None) -> None:
    """Raise Error if the file was written to, and memory was filled without comparing checksums."""
    if any(archive.expected(record) is None for record in [*memory.large, *memory.small]):
        check_unchanged(archive.path, version)


def _selected_of(value: Any, selection: Selection | None, path: str) -> Any:
    return value if selection is None else selected(value, selection, path)


def _build(archive: Archive, memory: "Memory", selection: Selection | None) -> tuple[bool, Any]:
    """Return what build() does, with memory for the selected tensors alone."""
    if selection is None:
        return build(archive.pickled(), memory.make)
    outlines = Outlines(archive)
    built, outline = build(archive.pickled(), outlines.make)
    if not built:
        return False, None
    wanted = outlines.keys_of(selected(outline, selection, archive.path))

    def make(key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        return (memory if key in wanted else outlines).make(key, nbytes, location)

    _, whole = build(archive.pickled(), make)
    return True, selected(whole, selection, archive.path)


class Outlines:
    """Storages without memory, on the device meta, and the keys that they stand for."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._keys: dict[int, str] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no other has the same identity

    def make(self, key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        """Return a storage for a key. Raises Format if there is no record of that size."""
        self._archive.storage_record(key, nbytes)
        storage = torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
        self._keys[storage._cdata] = key
        self._storages.append(storage)
        return storage

    def key_of(self, tensor: torch.Tensor) -> str:
        """Return the key of a tensor's storage."""
        return self._keys[tensor.untyped_storage()._cdata]

    def keys_of(self, value: Any) -> set[str]:
        """Return the keys of all tensors in a nesting."""
        return {self.key_of(part) for _, part in leaves_of(value) if isinstance(part, torch.Tensor)}


def _drop_unused(memory: "Memory", value: Any) -> None:
    """Leave out of what is read what no tensor in a nesting uses, unless other objects could use it."""
    used: set[int] = set()
    for _, part in leaves_of(value):
        if isinstance(part, torch.Tensor) and part.layout is torch.strided and type(part) in _PLAIN_TENSORS:
            used.add(part.untyped_storage().data_ptr())
        elif type(part) not in _WITHOUT_TENSORS:
            return
    memory.large = {record: target for record, target in memory.large.items() if target.data_ptr() in used}


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_WITHOUT_TENSORS = (str, int, float, bool, type(None), bytes, complex, torch.Size, torch.dtype, torch.device)


def _load_by_torch(archive: Archive, source: Source, locate: DeviceOf) -> "tuple[Any, Memory]":
    """Return what torch.load makes of the file, and the memory that is still to be filled."""
    path = archive.path
    archive.check_storages()
    deferred = archive.scan is not None and archive.scan.plain and not archive.foreign_byte_order
    if archive.scan is None and archive.foreign_byte_order:
        raise Unsupported(
            None,
            f"{path} has the other byte order and an unusual pickle; load and save it on a machine with "
            "that byte order",
            path,
        )
    reader = _Reader(source, archive, deferred=deferred)
    allocator = _StorageAllocator(reader, archive, locate, deferred=deferred)
    result = _guarded(
        path,
        lambda: torch.load(reader, weights_only=True, map_location=allocator, mmap=False),  # type: ignore[arg-type]
        reader,
    )
    memory = Memory(archive, locate)
    memory.large = allocator.targets
    return result, memory


def _checked_mapping(archive: Archive, locate: DeviceOf, verify: Verify) -> Any:
    device = locate("cpu")
    if device.type != "cpu":
        raise ValueError(f"mmap: mapped files are in main memory, not on {device}; load without mmap")
    if verify is True:
        archive.check_all()
    archive.check_storages()
    return _mapped(archive)


def _mapped(archive: Archive) -> Any:
    path = archive.path
    # Typed for TypedStorage, but called with UntypedStorage.
    stay: Any = _stay
    result = _guarded(path, lambda: torch.load(path, weights_only=True, mmap=True, map_location=stay))
    if archive.scan is None:
        # The sizes of its storages are unchecked, and in a mapping storages could extend past their records.
        raise Unsupported(
            None, f"{path} does not contain a pickle that torch.save writes; load it without mmap", path
        )
    return result


def _stay(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    return storage


class Memory:
    """The storages to read records into: large ones as tensors of bytes, and small ones."""

    def __init__(self, archive: Archive, locate: DeviceOf) -> None:
        self._archive = archive
        self._locate = locate
        self.large: dict[Record, torch.Tensor] = {}
        self.small: dict[Record, torch.UntypedStorage] = {}

    def make(self, key: str, nbytes: int, location: str) -> torch.UntypedStorage:
        """Return an unfilled storage for a key. Raises Format if there is no record of that size."""
        record = self._archive.storage_record(key, nbytes)
        device = self._locate(location)
        if is_fresh(nbytes) or device.type != "cpu":
            self.large[record] = target = empty_bytes(nbytes, device)
            return target.untyped_storage()
        self.small[record] = storage = torch.UntypedStorage(nbytes, device="cpu")  # type: ignore[no-untyped-call]
        return storage


def fill(
    archive: Archive,
    file: "_core.File",
    memory: Memory,
    size: int,
    engine: "_core.Engine | None",
    read_layouts: ReadLayouts,
    keep_open: bool = False,
) -> None:
    """Read the records' bytes from the file, and verify them."""
    if not memory.large and not memory.small:
        return
    layout = _core.FileLayout(archive.path, size)
    layout.read_from(file, keep_open=keep_open)
    for record, target in memory.large.items():
        layout.add_target(record.offset, target, fresh=is_fresh(record.nbytes))
    small = list(memory.small.values())
    layout.add_targets(
        [record.offset for record in memory.small],
        [record.nbytes for record in memory.small],
        [storage.data_ptr() for storage in small],
        small,
    )
    verified: list[Record] = []
    for record in sorted([*memory.large, *memory.small], key=lambda record: record.offset):
        expected = archive.expected(record)
        if expected is not None:
            layout.add_checksum("crc32", record.offset, record.offset + record.nbytes, expected)
            verified.append(record)
    try:
        read_layouts([layout], engine=engine, verify=bool(verified))
    except Corrupt as error:
        index: Any = getattr(error, "checksum", None)
        if index is None:
            raise
        raise archive.corrupt(verified[index]) from error


def _guarded(path: str, load: Callable[[], Any], reader: _Reader | None = None) -> Any:
    """Run torch.load, and raise its errors as those of this package."""
    try:
        result = load()
        if reader is not None and reader.error is not None:
            raise reader.error
        return result
    except Exception as error:
        if reader is not None and reader.error is not None:
            raise reader.error from None
        if isinstance(error, (Error, Warning)):
            raise
        if isinstance(error, pickle.UnpicklingError):
            why = explanation(error)
            trust = TRUST if "add_safe_globals" in why else ""
            raise Unsupported(None, f"{path} cannot be loaded safely: {why}{trust}", path) from None
        if isinstance(error, MemoryError):
            raise Error(errno.ENOMEM, f"loading {path}: out of memory", path) from error
        raise Format(
            None, f"{path}: torch cannot load its pickle: {type(error).__name__}: {error}", path
        ) from error


# Further advice for a class that is not allowed.
TRUST = (
    " Or save model.state_dict() instead of a whole model; torch.load(path, weights_only=False) loads a file "
    "that you trust, and runs the code in it"
)
_ADVICE: Sequence[str] = (
    # Torch's suggestions to load with weights_only=False, and to report an issue.
    r"\x1b\[\d+m",
    r"^Weights only load failed\.",
    r"This file can still be loaded.*?WeightsUnpickler error:",
    r"In PyTorch 2\.6.*?trusted source\.",
    r"Please file an issue.*?WeightsUnpickler error:",
    r"Check the documentation of torch\.load.*",
)


def explanation(error: pickle.UnpicklingError) -> str:
    """Return torch's message about the object that it rejected, without the advice to trust the file."""
    text = str(error)
    for pattern in _ADVICE:
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    return " ".join(text.split())
