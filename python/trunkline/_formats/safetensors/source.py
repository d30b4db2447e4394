"""Open safetensors files, whose tensors are read one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trunkline import _core
from trunkline._core import Engine
from trunkline._formats.file_version import check_unchanged
from trunkline._formats.safetensors import checksums
from trunkline._formats.safetensors.loader import Header, Verify, dtype_and_shape, load_files
from trunkline._formats.tensor_reader import Description
from trunkline._torch_or_numpy import torch

if TYPE_CHECKING:
    from trunkline._formats.slices import Runs


class SafetensorsSource:
    """The files of one model."""

    def __init__(
        self,
        path: str,
        headers: Sequence[Header],
        files: "Sequence[_core.File]",
        close: Callable[[], object],
        *,
        device: torch.device,
        engine: Engine | None,
        verify: Verify,
    ) -> None:
        """`files`: which `close` closes, and their headers. No tensor is in two files."""
        self.path = path
        self.metadata: dict[str, str] = {}
        for header in headers:
            self.metadata.update({key: text for key, text in header.metadata.items() if key != checksums.KEY})
        # Checked at every read.
        versions = [None if each.version is None else each.version.of_open_file() for each in headers]
        self._headers = [
            replace(header, version=version) for header, version in zip(headers, versions, strict=True)
        ]
        self._files = files
        self._close = close
        self._device = device
        self._engine = engine
        self._verify = verify
        self._stored = {
            stored.name: (index, stored) for index, header in enumerate(headers) for stored in header.tensors
        }

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._stored)

    def describe(self, name: str) -> Description:
        """Return the description of a tensor."""
        index, stored = self._stored[name]
        return Description(*dtype_and_shape(stored, self._headers[index].path), is_plain=True)

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        index, stored = self._stored[name]
        [tensors] = load_files(
            [replace(self._headers[index], tensors=[stored])],
            [self._files[index]],
            device=self._device,
            engine=self._engine,
            verify=self._verify,
            keep_open=True,
        )
        return tensors[name]

    def read_runs(self, name: str, runs: "Runs", target: torch.Tensor) -> None:
        """Read ranges of the bytes of a tensor."""
        index, stored = self._stored[name]
        self._files[index].read_ranges(target, runs.offsets + stored.begin, runs.nbytes)
        check_unchanged(self._headers[index].path, self._headers[index].version)

    def close(self) -> None:
        """Close the files."""
        self._close()
