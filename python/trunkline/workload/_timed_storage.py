"""Saving and restoring through trunkline.dcp, and how long a rank takes. Imports torch."""

import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trunkline.dcp import StorageReader, StorageWriter


class _Writer(StorageWriter):
    """Measures the writing of this rank alone."""

    own_ns = 0

    def write_data(self, *arguments: Any, **named: Any) -> Any:
        """Write the items of this rank."""
        begin = time.monotonic_ns()
        result = super().write_data(*arguments, **named)
        self.own_ns = time.monotonic_ns() - begin
        return result


class _Reader(StorageReader):
    """Measures the reading of this rank alone."""

    own_ns = 0

    def read_data(self, *arguments: Any, **named: Any) -> Any:
        """Read the items of this rank."""
        begin = time.monotonic_ns()
        result = super().read_data(*arguments, **named)
        self.own_ns = time.monotonic_ns() - begin
        return result


def timed_save(
    state: dict[str, torch.Tensor], path: Path, volumes: list[Path] | None, durable: bool, alone: bool
) -> tuple[int, int]:
    """Save a new checkpoint; return the nanoseconds of the call, and those in which this rank wrote.

    `alone`: without a process group. Else it is collective.
    """
    writer = _Writer(path, volumes=volumes, durable=durable, overwrite=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        begin = time.monotonic_ns()
        save(dict(state), storage_writer=writer, no_dist=alone)
        return time.monotonic_ns() - begin, writer.own_ns


def timed_restore(state: dict[str, torch.Tensor], path: Path, alone: bool) -> tuple[int, int]:
    """Restore into these tensors; return nanoseconds as timed_save() does."""
    reader = _Reader(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        begin = time.monotonic_ns()
        load(dict(state), storage_reader=reader, no_dist=alone)
        return time.monotonic_ns() - begin, reader.own_ns
