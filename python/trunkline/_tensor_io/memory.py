"""Memory of tensors that are saved and loaded, and devices that support it."""

import ctypes
import errno
from typing import TypeAlias

from trunkline import _core
from trunkline._errors import Error, Unsupported
from trunkline._torch_or_numpy import HAS_TORCH, torch

Device: TypeAlias = "str | int | torch.device"

CPU = torch.device("cpu")

# Tensors of at least this size get separate pages, into which direct I/O reads without a copy, and which are
# freed with them; torch allocates smaller ones.
OWN_PAGES_BYTES = 1 << 20


def is_in_reach(device: torch.device) -> bool:
    """Whether tensors on the device are read and written without a copy by torch."""
    return device.type in ("cpu", "cuda")


def device_argument(device: Device, path: str | None = None, argument: str = "device") -> torch.device:
    """Return the device that an argument names.

    Raises TypeError and ValueError for anything else, Unsupported for devices that are not in reach.
    """
    try:
        # torch.device(1) fails if there is no GPU.
        wanted = torch.device("cuda", device) if type(device) is int else torch.device(device)
    except TypeError:
        raise TypeError(
            f"{argument}: must be a str, an int or a torch.device, not {type(device).__name__}"
        ) from None
    except RuntimeError:
        raise ValueError(f'{argument}: must be "cpu" or "cuda" ("cuda:1"), not {device!r}') from None
    if not is_in_reach(wanted):
        raise Unsupported(
            None, f'{argument}: {wanted} is not supported; load to "cpu" and move from there', path
        )
    if wanted.type == "cuda" and not torch.cuda.is_available():
        why = "torch sees no CUDA GPU" if HAS_TORCH else "torch is not installed"
        raise Unsupported(None, f'{argument}: {wanted} is not available: {why}; use "cpu"', path)
    return wanted


def empty_bytes(nbytes: int, device: torch.device = CPU) -> torch.Tensor:
    """Return an uninitialized tensor of `nbytes` uint8."""
    if device.type == "cpu" and is_fresh(nbytes):
        return torch.frombuffer(_core.aligned_empty(nbytes), dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the allocator keeps it: glibc's does."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def out_of_memory(error: BaseException, what: str, path: str | None = None) -> Error | None:
    """Return an Error for a failed allocation for `what`; None if `error` is another kind of error."""
    # For the CPU torch raises a RuntimeError.
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
        return None
    return Error(
        errno.ENOMEM, f"{what}: {str(error).splitlines()[0]}; free memory, or load less at once", path
    )


def is_fresh(nbytes: int) -> bool:
    """Whether empty_bytes(nbytes), in main memory, is `fresh` to FileLayout.add_target."""
    return nbytes >= OWN_PAGES_BYTES
