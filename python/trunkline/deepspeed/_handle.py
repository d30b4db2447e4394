"""The handles of DeepSpeed's ops async_io and gds."""

import threading
from os import PathLike, fspath
from typing import Any

import torch

from trunkline._core import Pin, pin
from trunkline._errors import Unsupported
from trunkline.deepspeed import _pinned
from trunkline.deepspeed._operation import Operation

_ALIGNMENT = 512  # for each thread, as DeepSpeed computes it

_Path = str | PathLike[str]


class aio_handle:  # noqa: N801 - DeepSpeed's name
    """Reads and writes tensors, blocking or not; wait() waits for those that do not block. Thread-safe.

    Tensors may be on the CPU or a CUDA GPU, pinned or not, of any size, strides and alignment. The parameters
    are those of DeepSpeed and only returned again: how files are read and written is up to the engine of the
    process (trunkline.default_engine(), `trunkline tune`).

    Methods that begin or complete a transfer raise trunkline.Error, an OSError, where DeepSpeed returns -1 or
    ends the process.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        """Raises ValueError for a number that is not positive."""
        numbers = {
            "block_size": block_size,
            "queue_depth": queue_depth,
            "intra_op_parallelism": intra_op_parallelism,
        }
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, not {value}")
        self._numbers = numbers
        self._single_submit = bool(single_submit)
        self._overlap_events = bool(overlap_events)
        self._pending: list[tuple[Operation, bool]] = []  # and whether to validate it
        self._lock = threading.Lock()

    def get_block_size(self) -> int:
        """Return the block_size that was passed."""
        return self._numbers["block_size"]

    def get_queue_depth(self) -> int:
        """Return the queue_depth that was passed."""
        return self._numbers["queue_depth"]

    def get_single_submit(self) -> bool:
        """Return the single_submit that was passed."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Return the overlap_events that was passed."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return the intra_op_parallelism that was passed."""
        return self._numbers["intra_op_parallelism"]

    def get_alignment(self) -> int:
        """Return the bytes to which DeepSpeed aligns what it writes."""
        return self._numbers["intra_op_parallelism"] * _ALIGNMENT

    def read(self, buffer: torch.Tensor, filename: _Path, validate: bool, file_offset: int = 0) -> int:
        """Read, and return 0. See sync_pread()."""
        Operation.read(buffer, fspath(filename), file_offset).finish(validate=validate)
        return 0

    def write(self, buffer: torch.Tensor, filename: _Path, validate: bool, file_offset: int = 0) -> int:
        """Write, and return 0. See sync_pwrite()."""
        Operation.write(buffer, fspath(filename), file_offset).finish(validate=validate)
        return 0

    def pread(
        self,
        buffer: torch.Tensor,
        filename: _Path,
        validate: bool,
        async_: bool = False,
        file_offset: int = 0,
        **keywords: Any,
    ) -> int:
        """Read, and return 1; with `async`, begin to read, and return 0."""
        waits = not _async_of(async_, keywords)
        return self._begun(Operation.read(buffer, fspath(filename), file_offset), waits, validate)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: _Path,
        validate: bool,
        async_: bool = False,
        file_offset: int = 0,
        **keywords: Any,
    ) -> int:
        """Write, and return 1; with `async`, begin to write, and return 0."""
        waits = not _async_of(async_, keywords)
        return self._begun(Operation.write(buffer, fspath(filename), file_offset), waits, validate)

    def sync_pread(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """Fill the tensor from byte `file_offset` of the file; return 1.

        Raises EndOfFile if the file is too short.
        """
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """Write the tensor to byte `file_offset` of the file, which is made if there is none; return 1.

        The file is not truncated. As with DeepSpeed, fsync is left to the caller.
        """
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: torch.Tensor, filename: _Path, file_offset: int = 0) -> int:
        """Begin what sync_pread() does, and return 0. The tensor is filled when wait() has returned."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: _Path | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Begin what sync_pwrite() does, and return 0. The tensor must not change until wait() has returned.

        filename: a path, or the number of a file that is open for writing, which is not closed.
        """
        if filename is not None and fd is not None:
            raise TypeError("async_pwrite: pass filename or fd, not both")
        target = fd if filename is None else filename
        if target is None:
            raise TypeError("async_pwrite: pass filename or fd")
        if isinstance(target, int):
            return self._begun(Operation.write_to(buffer, target, file_offset), False, False)
        return self.pwrite(buffer, target, False, True, file_offset)

    def wait(self) -> int:
        """Wait for all that has begun and was not waited for; return how many reads and writes that were.

        If some failed, raises the error of the first once all have ended. Raises RuntimeError if there are
        none.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        if not pending:
            raise RuntimeError("wait: nothing has begun since the last wait(); call async_pread() first")
        errors = []
        left = list(pending)
        try:
            while left:
                if (error := _error_of(*left[0])) is not None:
                    errors.append(error)
                left.pop(0)
        finally:
            if left:  # Ctrl-C: a later wait() waits for the rest
                with self._lock:
                    self._pending = left + self._pending
        if errors:
            raise errors[0]
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """Make a page-aligned tensor of so many elements, of the example's dtype, in locked memory."""
        return _pinned.new_locked(num_elem, example_tenosr.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Release such a tensor; return False if it is not one. Its memory goes with its last view."""
        return _pinned.free(tensor.data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether torch has pinned the memory of the tensor, or it is part of a locked tensor."""
        return _pinned.is_pinned(buffer)

    def _begun(self, operation: Operation, waits: bool, validate: bool) -> int:
        if waits:
            operation.finish(validate=validate)
            return 1
        with self._lock:
            self._pending.append((operation, validate))
        return 0


def _error_of(operation: Operation, validate: bool) -> Exception | None:
    """Wait for the operation; return what it failed with."""
    try:
        operation.finish(validate=validate)
    except Exception as error:
        return error
    return None


class gds_handle(aio_handle):  # noqa: N801 - DeepSpeed's name
    """The same with tensors on a GPU whose memory can be registered for GPUDirect Storage."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Arguments as for aio_handle."""
        super().__init__(*arguments, **keywords)
        self._pins: dict[int, Pin] = {}

    def new_pinned_device_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """Make a registered tensor of so many elements, with the example's dtype and device."""
        tensor = torch.empty(num_elem, dtype=example_tenosr.dtype, device=example_tenosr.device)
        self.pin_device_tensor(tensor)
        return tensor

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """End the registration of a tensor; return False if it has none."""
        return self.unpin_device_tensor(tensor)

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Register a tensor on a GPU. Raises Unsupported for one that is not."""
        if tensor.device.type != "cuda":
            raise Unsupported(None, f"pin_device_tensor: the tensor is on {tensor.device}, not on a CUDA GPU")
        self._pins[tensor.data_ptr()] = pin(tensor)
        return True

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """End the registration of a tensor; return False if it has none."""
        registered = self._pins.pop(tensor.data_ptr(), None)
        if registered is None:
            return False
        registered.close()
        return True


def _async_of(async_: bool, keywords: dict[str, Any]) -> bool:
    """Return the argument `async`, a keyword of Python: it comes as **{"async": ...}, or by position."""
    value = keywords.pop("async", async_)
    if keywords:
        raise TypeError(f"unexpected arguments: {', '.join(keywords)}")
    return bool(value)
