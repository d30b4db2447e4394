"""Tensors between NVMe and memory at the speed of the hardware.

Open a file; read into and write from torch tensors, numpy arrays, whatever has the buffer protocol or DLPack:

    import trunkline as tl

    with tl.open("weights.bin") as file:
        file.pread(tensor, offset=4096)            # blocking
        future = file.async_pread(other, 0)        # or not: future.result(), await future
"""

from typing import TYPE_CHECKING, Any

from trunkline._core import (
    Buffer,
    Engine,
    Faults,
    File,
    Future,
    Read,
    Volume,
    Write,
    default_engine,
    open,  # noqa: A004 - the name of the package's own open, as io.open
    pinned_empty,
    wait_all,
)
from trunkline._core import version as __version__
from trunkline._errors import (
    Cancelled,
    Corrupt,
    EndOfFile,
    Error,
    Format,
    OutOfBudget,
    Timeout,
    Unsupported,
)

if TYPE_CHECKING:
    from trunkline import torch as torch

__all__ = [
    "Buffer",
    "Cancelled",
    "Corrupt",
    "EndOfFile",
    "Engine",
    "Error",
    "Faults",
    "File",
    "Format",
    "Future",
    "OutOfBudget",
    "Read",
    "Timeout",
    "Unsupported",
    "Volume",
    "Write",
    "__version__",
    "default_engine",
    "open",
    "pinned_empty",
    "wait_all",
]


def __getattr__(name: str) -> Any:
    """Import trunkline.torch at its first use, so that trunkline itself works without torch installed."""
    if name == "torch":
        import importlib

        return importlib.import_module("trunkline.torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
