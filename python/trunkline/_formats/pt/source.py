"""An open `.pt` file, whose tensors are read one by one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy
import torch

from trunkline import _core
from trunkline._core import Engine
from trunkline._errors import Unsupported
from trunkline._formats.file_version import Version, check_unchanged
from trunkline._formats.pt.archive import Archive, Verify
from trunkline._formats.pt.archive import Source as Bytes
from trunkline._formats.pt.build import build
from trunkline._formats.pt.loader import Memory, Outlines, fill
from trunkline._formats.selection import leaves_of
from trunkline._formats.tensor_reader import Description
from trunkline._tensor_io import transfer
from trunkline._tensor_io.map_location import device_of

if TYPE_CHECKING:
    from trunkline._formats.slices import Runs


class PtSource:
    """The tensors of a file, under names such as "model.0.weight"."""

    def __init__(
        self,
        path: str,
        file: "_core.File",
        close: Callable[[], object],
        *,
        device: torch.device,
        engine: Engine | None,
        verify: Verify,
        version: Version | None,
    ) -> None:
        """`file`: which `close` closes; `version`: version_of() its path before it was opened.

        Raises the errors of load(), and Unsupported for other objects.
        """
        self.path = path
        self.metadata: dict[str, str] = {}
        self._file = file
        self._close = close
        self._version = None if version is None else version.of_open_file()
        self._device = device
        self._engine = engine
        self._bytes = Bytes(file, path)
        with _core.GcPause():
            self._archive = Archive(self._bytes, verify)
            self._verify = verify
            self._outlines = Outlines(self._archive)
            built, outline = (
                (False, None)
                if self._archive.foreign_byte_order
                else build(self._archive.pickled(), self._outlines.make)
            )
            if not built:
                raise Unsupported(
                    None,
                    f"{path} has objects besides dicts, lists, numbers, strings and tensors, or another byte "
                    "order, of which open_tensors() cannot read single tensors; load it with trunkline.load",
                    path,
                )
            named = [(name, part) for name, part in leaves_of(outline) if isinstance(part, torch.Tensor)]
            self._names = [name for name, _ in named]
            self._tensors = dict(named)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._names)

    def describe(self, name: str) -> Description:
        """Return the description of a tensor."""
        outline = self._tensors[name]
        return Description(outline.dtype, tuple(outline.shape), outline.is_contiguous())

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor; its storage as a whole, unless nothing is verified: that has one checksum."""
        outline = self._tensors[name]
        key = self._outlines.key_of(outline)
        nbytes = outline.untyped_storage().nbytes()
        if self._verify is False and outline.is_contiguous() and outline.nbytes < nbytes:
            flat = torch.empty(outline.nbytes, dtype=torch.uint8, device=self._device)
            self._read_at(outline, numpy.zeros(1, numpy.int64), flat.numel(), flat)
            return flat.view(outline.dtype).reshape(outline.shape)
        memory = Memory(self._archive, device_of(self._device))
        storage = memory.make(key, nbytes, "cpu")
        fill(
            self._archive,
            self._file,
            memory,
            self._bytes.size,
            self._engine,
            transfer.read_layouts,
            keep_open=True,
        )
        if self._archive.expected(self._archive.storage_record(key, nbytes)) is None:
            check_unchanged(self.path, self._version)
        tensor = torch.empty(0, dtype=outline.dtype, device=storage.device)
        tensor.set_(storage, outline.storage_offset(), outline.shape, outline.stride())
        return tensor if outline.nbytes == nbytes else tensor.clone()

    def read_runs(self, name: str, runs: "Runs", target: torch.Tensor) -> None:
        """Read ranges of the bytes of a contiguous tensor."""
        self._read_at(self._tensors[name], runs.offsets, runs.nbytes, target)

    def _read_at(
        self, outline: torch.Tensor, offsets: "numpy.ndarray", nbytes: int, target: torch.Tensor
    ) -> None:
        key = self._outlines.key_of(outline)
        record = self._archive.storage_record(key, outline.untyped_storage().nbytes())
        begin = record.offset + outline.storage_offset() * outline.itemsize
        self._file.read_ranges(target, offsets + begin, nbytes)
        check_unchanged(self.path, self._version)

    def close(self) -> None:
        """Close the file."""
        self._close()
