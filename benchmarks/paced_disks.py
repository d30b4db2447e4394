#!/usr/bin/env python3
"""Disks whose limit is exactly known: loop devices over files in tmpfs, throttled by the block-I/O cgroup
controller.

A disk of a shared machine may change its speed twofold within minutes; these do not, so results can be quoted
as achieved / limit. Needs root, loop devices and either version of the controller:

- version 1: the limit sits on the root group and holds for every process, buffered writes included;
- version 2: it sits on a group of its own, which this process joins while the disks are up. Buffered writes
  are not held to it there unless the memory controller runs in that group as well.

    with PacedDisks([2_000_000_000] * 4, limit_mb_s=1000) as disks:
        disks.directories       # four mounted directories
        disks.limit(0)          # no limit from here on
        disks.rest()            # before each measurement: see there

    benchmarks/paced_disks.py [--count 4] [--limit-mb-s 1000] [--bytes-each 1600000000] -- COMMAND ...

The second form runs COMMAND with the directories appended to its arguments.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

CGROUP = Path("/sys/fs/cgroup")
MEMORY = Path("/dev/shm")
CHUNK = 1 << 20


class PacedDisksError(Exception):
    """This machine cannot make them; the message says what is missing."""


def why_unavailable() -> str | None:
    """What keeps this process from making paced disks; None when nothing does."""
    if os.geteuid() != 0:
        return "only root can make paced disks"
    if not Path("/dev/loop-control").exists():
        return "no loop devices (/dev/loop-control is missing)"
    for command in ("losetup", "mkfs.ext4", "mount", "umount"):
        if not shutil.which(command):
            return f"{command} is not installed"
    if not _version_1() and "io" not in _read(CGROUP / "cgroup.controllers").split():
        return "no block-I/O cgroup controller"
    return None


class PacedDisks:
    """ext4 filesystems of `sizes` bytes, each limited to `limit_mb_s` (10^6 bytes/s, 0: none) each way."""

    def __init__(
        self, sizes: Sequence[int] = (1_600_000_000,), limit_mb_s: int = 1000, *, raid0: bool = False
    ) -> None:
        """`raid0`: one btrfs striped over all of them, without checksums of data, and one directory: for
        peers that know one directory only.
        """
        self._raid0 = raid0
        self._sizes = [size // CHUNK * CHUNK for size in sizes]
        self._limit_mb_s = limit_mb_s
        self._images: list[Path] = []
        self._devices: list[str] = []
        self._numbers: list[str] = []  # "major:minor", the controller's name of a device
        self._mounted: list[Path] = []
        self._scratch: Path | None = None
        self._group: _OwnGroup | None = None
        self._paced = False

    @property
    def directories(self) -> list[Path]:
        return list(self._mounted)

    def __enter__(self) -> PacedDisks:
        if why := why_unavailable():
            raise PacedDisksError(why)
        needed = sum(self._sizes)
        if shutil.disk_usage(MEMORY).free < needed:
            raise PacedDisksError(f"{len(self._sizes)} disks need {needed} bytes of {MEMORY}")
        try:
            self._scratch = Path(tempfile.mkdtemp(prefix="trunkline-disks-"))
            if not _version_1():
                self._group = _OwnGroup()
            for index, size in enumerate(self._sizes):
                self._add(index, size)
            if self._raid0:
                if not shutil.which("mkfs.btrfs"):
                    raise PacedDisksError("mkfs.btrfs is not installed")
                _run("mkfs.btrfs", "-q", "-f", "-d", "raid0", "-m", "raid0", *self._devices)
                _run("btrfs", "device", "scan", *self._devices)
                self._mount(self._devices[0], self._scratch / "raid0", "-o", "nodatasum")
            else:
                for index, device in enumerate(self._devices):
                    # Nothing is left to a kernel thread that would share the limit with what is measured.
                    _run("mkfs.ext4", "-q", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", device)
                    self._mount(device, self._scratch / str(index))
            self.limit(self._limit_mb_s)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def limit(self, mb_s: int) -> None:
        """Changes the limit of every disk, in 10^6 bytes/s each way; 0 takes it off."""
        self._paced = mb_s > 0
        for number in self._numbers:
            if self._group:
                rate = str(mb_s * 1_000_000) if mb_s else "max"
                (self._group.path / "io.max").write_text(f"{number} rbps={rate} wbps={rate}\n")
            else:
                for way in ("read", "write"):
                    file = CGROUP / "blkio" / f"blkio.throttle.{way}_bps_device"
                    file.write_text(f"{number} {mb_s * 1_000_000}\n")

    def rest(self) -> None:
        """Lets the throttle come to rest, so that all measurements begin alike.

        It deals in slices of 0.1 s, and grants one of them in advance. Who begins right behind something else
        inherits an open slice with what is left of it, or gets two in advance: 4 % to 15 % of a gigabyte.
        """
        if self._paced:
            time.sleep(0.5)

    def _add(self, index: int, size: int) -> None:
        assert self._scratch is not None
        image = MEMORY / f"{self._scratch.name}-{index}.img"
        image.touch(mode=0o600, exist_ok=False)
        self._images.append(image)
        # All of its memory now: first touch in the middle of a write would measure the page allocator, here
        # or (fallocate is not enough) that of the machine that this one is a guest of.
        with image.open("rb+", buffering=0) as file:
            for _ in range(size // CHUNK):
                file.write(bytes(CHUNK))
        # Direct, so that the image's pages are not cached a second time.
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
        self._devices.append(device)
        self._numbers.append((Path("/sys/block") / Path(device).name / "dev").read_text().strip())

    def _mount(self, device: str, directory: Path, *options: str) -> None:
        directory.mkdir()
        _run("mount", *options, device, str(directory))
        self._mounted.append(directory)
        directory.chmod(0o1777)

    def _remove(self) -> None:
        """Takes down whatever is up; goes on past what refuses and says so at the end."""
        refused: list[str] = []

        def attempt(*command: str) -> None:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                refused.append(f"{' '.join(command)}: {done.stderr.strip()}")

        try:
            self.limit(0)
        except OSError as error:
            refused.append(f"taking the limits off: {error}")
        for directory in self._mounted:
            attempt("umount", str(directory))
        for device in self._devices:
            attempt("losetup", "--detach", device)
        for image in self._images:
            image.unlink(missing_ok=True)
        if self._group:
            self._group.leave()
        if self._scratch and not refused:
            shutil.rmtree(self._scratch)
        self._images, self._devices, self._numbers, self._mounted = [], [], [], []
        if refused:
            print("paced_disks: could not take everything down:\n  " + "\n  ".join(refused), file=sys.stderr)


class _OwnGroup:
    """A version 2 group with the io controller that this process is in until leave()."""

    def __init__(self) -> None:
        self._home = CGROUP / _read(Path("/proc/self/cgroup")).partition("::")[2].strip().lstrip("/")
        self.path = CGROUP / f"trunkline-{os.getpid()}"
        (CGROUP / "cgroup.subtree_control").write_text("+io\n")
        self.path.mkdir()
        (self.path / "cgroup.procs").write_text(f"{os.getpid()}\n")

    def leave(self) -> None:
        (self._home / "cgroup.procs").write_text(f"{os.getpid()}\n")
        self.path.rmdir()


def _version_1() -> bool:
    return (CGROUP / "blkio").is_dir()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except subprocess.CalledProcessError as error:
        raise PacedDisksError(f"{' '.join(command)}: {error.stderr.strip()}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command with the directories of paced disks.")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--limit-mb-s", type=int, default=1000, help="10^6 bytes/s each way, 0: none")
    parser.add_argument("--bytes-each", type=int, default=1_600_000_000)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        with PacedDisks([options.bytes_each] * options.count, options.limit_mb_s) as disks:
            return subprocess.run([*options.command, *map(str, disks.directories)], check=False).returncode
    except PacedDisksError as error:
        print(f"paced_disks: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
