"""Memory that is saved from and loaded into."""

import errno
from typing import TypeAlias

import torch

from trunkline import _core
from trunkline._errors import Error, Unsupported

Device: TypeAlias = "str | int | torch.device"

CPU = torch.device("cpu")

# From here on a tensor has pages of its own, into which direct I/O reads without a copy, and which are freed
# with it; the small ones are torch's.
OWN_PAGES_BYTES = 1 << 20


def is_in_reach(device: torch.device) -> bool:
    """Whether bytes move between files and tensors of the device without a copy by torch."""
    return device.type in ("cpu", "cuda")


def device_argument(device: Device, path: str | None = None) -> torch.device:
    """Return the device that an argument `device` names.

    Raises TypeError and ValueError for what names none, Unsupported for others than these.
    """
    try:
        # torch.device(1) fails where there is no GPU.
        wanted = torch.device("cuda", device) if type(device) is int else torch.device(device)
    except TypeError:
        raise TypeError(
            f"device: must be a str, an int or a torch.device, not {type(device).__name__}"
        ) from None
    except RuntimeError as error:
        raise ValueError(f"device: torch knows no device {device!r}: {str(error).splitlines()[0]}") from None
    if not is_in_reach(wanted):
        raise Unsupported(None, f'device: {wanted} is not supported; load to "cpu" and move from there', path)
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise Unsupported(None, f'device: {wanted} is not there: torch sees no CUDA GPU; load to "cpu"', path)
    return wanted


def empty_bytes(nbytes: int, device: torch.device = CPU) -> torch.Tensor:
    """Make a tensor of `nbytes` uint8 that nobody has touched yet."""
    if device.type == "cpu" and is_fresh(nbytes):
        return torch.frombuffer(_core.aligned_empty(nbytes), dtype=torch.uint8)
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def out_of_memory(error: BaseException, what: str, path: str | None = None) -> Error | None:
    """Return the error of memory for `what` that could not be had; None where `error` is of another kind."""
    # Of the CPU torch raises a RuntimeError.
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
        return None
    return Error(
        errno.ENOMEM, f"{what}: {str(error).splitlines()[0]}; free memory, or load less at once", path
    )


def is_fresh(nbytes: int) -> bool:
    """Whether empty_bytes(nbytes), in main memory, is `fresh` to FileLayout.add_target."""
    return nbytes >= OWN_PAGES_BYTES
