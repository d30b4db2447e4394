"""Tensors between NVMe and memory at the speed of the hardware.

Open a file; read into and write from torch tensors, numpy arrays, and objects with the buffer protocol or
DLPack:

    import trunkline as tl

    with tl.open("weights.bin") as file:
        file.pread(tensor, offset=4096)            # blocking
        future = file.async_pread(other, 0)        # or not: future.result(), await future
"""

import logging as _logging_first  # noqa: F401 - so that its exit handler runs after ours
import os as _os
from typing import TYPE_CHECKING, Any

from trunkline._core import (
    Buffer,
    Engine,
    Faults,
    File,
    Future,
    Pin,
    Read,
    Volume,
    Write,
    default_engine,
    open,  # noqa: A004 - the name of the package's own open, as io.open
    pin,
    pinned_empty,
    wait_all,
)
from trunkline._core import version as __version__
from trunkline._errors import (
    Cancelled,
    Corrupt,
    CutOff,
    DeviceError,
    EndOfFile,
    Error,
    Format,
    OutOfBudget,
    RankError,
    Timeout,
    Unsupported,
)

# Not in __all__: `import *` does not shadow the builtin ones, which catch these too.
from trunkline._errors import FileExistsError as FileExistsError  # noqa: A004
from trunkline._errors import FileNotFoundError as FileNotFoundError  # noqa: A004
from trunkline._errors import IsADirectoryError as IsADirectoryError  # noqa: A004
from trunkline._errors import NotADirectoryError as NotADirectoryError  # noqa: A004
from trunkline._errors import PermissionError as PermissionError  # noqa: A004
from trunkline._exit_hook import check_not_finalizing as _check_not_finalizing  # and registers the hook
from trunkline._logging import configure as _configure_logging
from trunkline._trace import trace

if TYPE_CHECKING:
    from trunkline import data as data
    from trunkline import dcp as dcp
    from trunkline import deepspeed as deepspeed
    from trunkline import lightning as lightning
    from trunkline import stream as stream
    from trunkline import torch as torch
    from trunkline import transformers as transformers
    from trunkline._checkpoint_tools.export import export_checkpoint
    from trunkline._formats.tensor_reader import TensorReader
    from trunkline.checkpoint.directory.checkpointer import Checkpointer
    from trunkline.checkpoint.directory.open_tensors import open_tensors
    from trunkline.checkpoint.iter_tensors import iter_tensors
    from trunkline.checkpoint.load import load
    from trunkline.checkpoint.save import SaveHandle, save, save_async
    from trunkline.checkpoint.tiers.tier import Tier

__all__ = [
    "Buffer",
    "Cancelled",
    "Checkpointer",
    "Corrupt",
    "CutOff",
    "DeviceError",
    "EndOfFile",
    "Engine",
    "Error",
    "Faults",
    "File",
    "Format",
    "Future",
    "OutOfBudget",
    "Pin",
    "RankError",
    "Read",
    "SaveHandle",
    "TensorReader",
    "Tier",
    "Timeout",
    "Unsupported",
    "Volume",
    "Write",
    "__version__",
    "default_engine",
    "export_checkpoint",
    "iter_tensors",
    "load",
    "open",
    "open_tensors",
    "pin",
    "pinned_empty",
    "save",
    "save_async",
    "trace",
    "wait_all",
]


_configure_logging()

if _os.environ.get("TRUNKLINE_DEEPSPEED", "") not in ("", "0"):
    from trunkline._deepspeed_hook import watch as _watch_for_deepspeed

    _watch_for_deepspeed()

# Imported at first use: modules that need torch, or a library on top of it, which the rest works without, and
# what few programs need.
_LAZY_MODULES = ("data", "dcp", "deepspeed", "lightning", "stream", "torch", "transformers")
_LAZY_NAMES = {
    "Checkpointer": "trunkline.checkpoint.directory.checkpointer",
    "SaveHandle": "trunkline.checkpoint.save",
    "TensorReader": "trunkline._formats.tensor_reader",
    "Tier": "trunkline.checkpoint.tiers.tier",
    "export_checkpoint": "trunkline._checkpoint_tools.export",
    "iter_tensors": "trunkline.checkpoint.iter_tensors",
    "load": "trunkline.checkpoint.load",
    "open_tensors": "trunkline.checkpoint.directory.open_tensors",
    "save": "trunkline.checkpoint.save",
    "save_async": "trunkline.checkpoint.save",
}


def __getattr__(name: str) -> Any:
    """Import public names lazily."""
    if name in _LAZY_MODULES or name in _LAZY_NAMES:
        _check_not_finalizing(f"use trunkline.{name}")  # an import would raise an error that is hard to read
    import importlib

    if name in _LAZY_MODULES:
        return importlib.import_module(f"trunkline.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(_LAZY_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all public names, also those that are not imported yet."""
    return sorted({*__all__, *_LAZY_MODULES})
