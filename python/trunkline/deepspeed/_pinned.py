"""Page-aligned tensors in locked memory, which all handles of the process know."""

import ctypes
import mmap
import threading
import weakref

import torch

_libc = ctypes.CDLL(None, use_errno=True)


class _Regions:
    """Where the memory of locked tensors is: base address and size of each, until it is released."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, base: int, nbytes: int, memory: object) -> None:
        with self._lock:
            self._sizes[base] = nbytes
        weakref.finalize(memory, self.remove, base).atexit = False

    def remove(self, base: int) -> bool:
        with self._lock:
            return self._sizes.pop(base, None) is not None

    def contains(self, begin: int, nbytes: int) -> bool:
        with self._lock:
            return any(base <= begin and begin + nbytes <= base + size for base, size in self._sizes.items())


_regions = _Regions()


def new_locked(num_elem: int, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of zeros in page-aligned memory. Where a GPU is in use, torch pins it for copies.

    Without a GPU it is locked against swapping where RLIMIT_MEMLOCK allows; I/O needs only its alignment.
    """
    if num_elem < 0:
        raise ValueError(f"num_elem: must not be negative, not {num_elem}")
    nbytes = num_elem * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if torch.cuda.is_available():
        tensor = torch.zeros(num_elem, dtype=dtype, pin_memory=True)
        _regions.add(tensor.data_ptr(), nbytes, tensor.untyped_storage())
        return tensor
    memory = mmap.mmap(-1, nbytes)
    tensor = torch.frombuffer(memory, dtype=dtype)
    _libc.mlock(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(nbytes))
    _regions.add(tensor.data_ptr(), nbytes, memory)
    return tensor


def is_pinned(buffer: torch.Tensor) -> bool:
    """Whether torch has pinned the memory of the tensor, or it is within that of a locked tensor."""
    if buffer.device.type != "cpu":
        return False
    return buffer.is_pinned() or _regions.contains(buffer.data_ptr(), buffer.nbytes)


def free(address: int) -> bool:
    """Forget a locked tensor by its address; return whether there was one.

    Its memory is released with the last tensor that uses it: no tensor is left without memory.
    """
    return _regions.remove(address)


class pin_handle:  # noqa: N801 - DeepSpeed's name
    """Handle of DeepSpeed's op pin_memory. Thread-safe."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Make a locked tensor of so many elements, of the example's dtype. Raises MemoryError, OSError."""
        return new_locked(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Release a locked tensor, see free(); return False if it is not one."""
        return free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Release the locked tensor at an address."""
        return free(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether the memory of the tensor is locked."""
        return is_pinned(buffer)
