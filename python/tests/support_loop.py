"""Filesystems in files, mounted over loop devices, whose power can be cut (root only)."""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_FS_IOC_SHUTDOWN = 0x8004587D
# What the filesystem completes before it stops forever: everything, only the log, nothing.
FLUSH_ALL, FLUSH_LOG, FLUSH_NOTHING = 0, 1, 2

# Images are sparse. That of xfs is the least that mkfs.xfs accepts.
_IMAGE_BYTES = {
    "ext4": 96 << 20,
    "xfs": 300 << 20,
    "btrfs": 128 << 20,
    "vfat": 96 << 20,
    "fuse2fs": 96 << 20,
}
_MKFS = {
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
    "vfat": ["mkfs.vfat", "-F", "32"],
    # ext4 again, served to FUSE by a program.
    "fuse2fs": ["mkfs.ext4", "-q", "-F", "-O", "^has_journal"],
    "ext4": ["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-K"],
}


class LoopFilesystem:
    """One filesystem on a loop device. A context: at its end, whatever happens, nothing is left.

    The loop device goes with the mount (autoclear), and the mount with the mount namespace where the process
    has one of its own: then nothing stays after a SIGKILL either.
    """

    def __init__(self, kind: str, nbytes: int = 0) -> None:
        """kind: a key of _MKFS; nbytes: size of the device (0: small)."""
        scratch = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
        self.kind = kind
        self._home = Path(tempfile.mkdtemp(prefix="trunkline-loop-", dir=scratch))
        self._image = self._home / "image"
        self.path = self._home / "mount"
        try:
            self.path.mkdir()
            with self._image.open("wb") as image:
                image.truncate(nbytes or _IMAGE_BYTES[kind])
            _run(*_MKFS[kind], str(self._image))
            self.mount()
        except BaseException:
            self.close()
            raise

    def mount(self) -> None:
        """Mount it, which recovers what a cut has left."""
        if self.kind == "fuse2fs":
            _run("fuse2fs", "-o", "rw", str(self._image), str(self.path))
            return
        _run("mount", "-t", self.kind, "-o", "loop,noatime", str(self._image), str(self.path))

    def unmount(self) -> None:
        """Unmount it. Waits for the kernel to end what killed processes had under way."""
        deadline = time.monotonic() + 30
        while True:
            result = subprocess.run(["umount", str(self.path)], capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return
            if "busy" not in result.stderr or time.monotonic() > deadline:
                raise RuntimeError(f"umount {self.path}: {result.stderr}")
            time.sleep(0.01)

    def shut_down(self, flag: int) -> None:
        """Cut its power: from now on nothing more reaches the device."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, struct.pack("I", flag))
        except OSError as error:
            if error.errno != errno.EIO:  # it is down already
                raise
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unmount and remove it."""
        if os.path.ismount(self.path):
            try:
                self.unmount()
            except RuntimeError:
                with suppress(OSError):
                    subprocess.run(["umount", "--lazy", str(self.path)], check=False)
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> "LoopFilesystem":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def why_not(kind: str) -> str:
    """Why such filesystems cannot be used here; empty where they can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    server = ["fuse2fs"] if kind == "fuse2fs" else []
    tools = (_MKFS[kind][0], *server, "mount", "umount", "unshare")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (scripts/setup.sh test)"
    try:
        with LoopFilesystem(kind):
            return ""
    except (OSError, RuntimeError) as error:
        return f"no {kind} on a loop device: {error}"


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr.strip()}")
