"""fio, the peer that measurements are compared with: one run of it, read from its JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class FioError(Exception):
    """fio is not there, or ended with an error; the message is fio's."""


@dataclass(frozen=True)
class FioRun:
    """What fio says of one run; `seconds` contain the final fsync of writes."""

    bytes: int
    seconds: float
    cpu_seconds: float  # user and system time of fio's jobs, start-up excluded

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds

    @property
    def cpu_seconds_per_gb(self) -> float:
        return self.cpu_seconds / self.bytes * 1e9


def run(
    files: Sequence[Path],
    rw: str,
    *,
    block_bytes: int,
    depth: int,
    engine: str,
    file_bytes: int | None = None,
    total_bytes: int | None = None,
    jobs: int = 1,
    **options: str | int,
) -> FioRun:
    """Direct I/O of kind `rw` ("read", "write", "randread") over `files`, in turn block by block.

    file_bytes: the size of each file (default: as they are). total_bytes: how much is moved (default: each
    file once). options: further fio options by name.
    """
    arguments: dict[str, str | int] = {
        "name": "peer",
        "filename": ":".join(str(file).replace(":", r"\:") for file in files),
        "rw": rw,
        "bs": block_bytes,
        "iodepth": depth,
        "ioengine": engine,
        "direct": 1,
        "thread": 1,
        "numjobs": jobs,
        "group_reporting": 1,
        "output-format": "json",
        "scramble_buffers": 0,  # our memory is not changed between transfers either
    }
    if file_bytes is not None:
        arguments["filesize"] = file_bytes
    if total_bytes is not None:
        arguments["io_size"] = total_bytes
    if "write" in rw:
        arguments["end_fsync"] = 1
        arguments["fallocate"] = "none"  # before its clock starts; ours counts
    arguments |= options
    command = ["fio", *(f"--{name}={value}" for name, value in arguments.items())]
    # Its memory on huge pages, as that of our tensors is: else each transfer has hundreds of segments.
    # (--iomem=mmaphuge needs pages that were set aside for it.)
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    except FileNotFoundError as error:
        raise FioError("fio is not installed") from error
    except subprocess.CalledProcessError as error:
        raise FioError(f"{' '.join(command)}: {(error.stderr or error.stdout).strip()}") from error
    # Notes of fio may stand before the JSON.
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    part = job["write" if "write" in rw else "read"]
    seconds = part["io_bytes"] / part["bw_bytes"]  # finer than "runtime", which is whole milliseconds
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return FioRun(part["io_bytes"], seconds, cpu)


@cache
def best_engine() -> str:
    """The first of io_uring, libaio and psync that runs here: containers may forbid io_uring."""
    if not shutil.which("fio"):
        raise FioError("fio is not installed")
    with tempfile.TemporaryDirectory(prefix="trunkline-fio-") as scratch:
        file = Path(scratch) / "probe"
        file.write_bytes(os.urandom(65536))
        for engine in ("io_uring", "libaio"):
            try:
                run([file], "read", block_bytes=4096, depth=1, engine=engine, direct=0)
            except FioError:
                continue
            return engine
    return "psync"
