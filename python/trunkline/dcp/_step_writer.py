"""Writes one step of a trunkline.dcp.Checkpointer."""

import dataclasses
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from trunkline._core import FileSet
from trunkline.dcp._task import Cancellation
from trunkline.dcp._writer import StorageWriter


class StepWriter(StorageWriter):
    """Writes one step, whose manifest has the number of the commit."""

    def __init__(self, path: Path, save_id: str, cancellation: Cancellation, **options: Any) -> None:
        """`save_id`: that of run_directory.new_save_id()."""
        super().__init__(path, **options)
        self._save_id = save_id
        self._cancellation = cancellation

    def storage_meta(self) -> StorageMeta | None:
        """Return the entry of the metadata that identifies this save."""
        meta = super().storage_meta()
        assert meta is not None
        return dataclasses.replace(meta, save_id=self._save_id)

    def _replaces_torch(self) -> bool:
        return False

    def _check_cancelled(self) -> None:
        self._cancellation.check()

    def _watch(self, files: FileSet | None) -> None:
        self._cancellation.watch(files)
