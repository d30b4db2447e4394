"""One read or write of a tensor, as DeepSpeed asks for it."""

import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trunkline._arguments import offset_argument
from trunkline._core import open as open_file
from trunkline._errors import exception_of, system_error
from trunkline.deepspeed._descriptor import DescriptorFile

if TYPE_CHECKING:
    from concurrent.futures import Future as WriteFuture

    from trunkline._core import File, Future

_NEW_FILE_MODE = 0o600  # as DeepSpeed creates files
_COMPARED_BYTES = 16 << 20  # at a time


class Operation:
    """A transfer that has begun. Its file is open until it has ended."""

    def __init__(
        self, buffer: torch.Tensor, file: "File | DescriptorFile", name: str, offset: int, *, reads: bool
    ) -> None:
        """Begin it. Takes the file over."""
        self._name = name
        self._offset = offset
        self._reads = reads
        self._file = file
        self._target = buffer
        try:
            # Where it is, also if the working directory changes.
            self._path = name if name.startswith("/") else os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118
            if reads and not isinstance(file, DescriptorFile):
                self._check_size(buffer.nbytes, file.size)
            # The engine takes contiguous memory.
            self._memory = buffer.detach() if buffer.is_contiguous() else buffer.detach().contiguous()
            self._future: Future | WriteFuture[int]
            if reads and not isinstance(file, DescriptorFile):
                self._future = file.async_pread(self._memory, offset)
            else:
                self._future = file.async_pwrite(self._memory, offset)
        except BaseException:
            file.close()
            raise

    @classmethod
    def read(cls, buffer: torch.Tensor, path: str, offset: int) -> "Operation":
        """Begin to read. Raises EndOfFile if the file is too short, OSError if it cannot be opened."""
        offset = offset_argument(offset, "file_offset")
        return cls(buffer, open_file(path, "r"), path, offset, reads=True)

    @classmethod
    def write(cls, buffer: torch.Tensor, path: str, offset: int) -> "Operation":
        """Begin to write into the file, which is made if there is none; what it has elsewhere stays."""
        offset = offset_argument(offset, "file_offset")
        return cls(buffer, _open_or_make(path), path, offset, reads=False)

    @classmethod
    def write_to(cls, buffer: torch.Tensor, fd: int, offset: int) -> "Operation":
        """Begin to write into a file that is open for writing; the caller may close it at once."""
        offset = offset_argument(offset, "file_offset")
        path = f"/proc/self/fd/{fd}"  # the same file, also if it has been removed
        try:
            mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        except OSError as error:
            raise system_error(error, f"write to the file descriptor {fd}", path) from error
        if mode == os.O_RDONLY:
            raise exception_of(
                "system",
                errno.EBADF,
                f"cannot write to the file descriptor {fd}: it is open for reading only; open the file with "
                "os.O_RDWR",
                path,
            )
        try:
            file: File | DescriptorFile = open_file(path, "r+")
        except OSError:  # this user may not open it again
            file = DescriptorFile(fd)
        return cls(buffer, file, path, offset, reads=False)

    def finish(self, *, validate: bool = False) -> None:
        """Wait until it has ended. Raises what it failed with; `validate`: Corrupt if the file differs."""
        try:
            self._future.result()
            if self._reads and self._memory.data_ptr() != self._target.data_ptr():
                self._target.detach().copy_(self._memory)
        finally:
            self._file.close()
        if validate:
            self._compare()

    def _check_size(self, nbytes: int, size: int) -> None:
        if self._offset + nbytes > size:
            raise exception_of(
                "end_of_file",
                0,
                f"{self._name} has {size} bytes, which end before byte {self._offset + nbytes}: "
                f"{nbytes} bytes from {self._offset} were asked for; check whether it was written as a whole",
                self._name,
            )

    def _compare(self) -> None:
        """Read through the page cache what was moved, and compare."""
        expected = self._memory.to("cpu").reshape(-1).view(torch.uint8).numpy()
        with Path(self._path).open("rb") as file:
            file.seek(self._offset)
            for begin in range(0, len(expected), _COMPARED_BYTES):
                part = expected[begin : begin + _COMPARED_BYTES]
                if file.read(len(part)) != part.tobytes():
                    raise exception_of(
                        "corrupt",
                        errno.EBADMSG,
                        f"{self._name} differs from the buffer within {len(part)} bytes from "
                        f"{self._offset + begin}; is another program writing it?",
                        self._name,
                    )


def _open_or_make(path: str) -> "File":
    try:
        return open_file(path, "r+")
    except FileNotFoundError:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, _NEW_FILE_MODE))
        except OSError as error:
            raise system_error(error, f"make {path}", path) from error
        return open_file(path, "r+")
