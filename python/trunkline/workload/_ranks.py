"""Several ranks on this machine: a process for each, which meet before every step."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import IO, Any, Protocol

from trunkline._core import StepBarrierMemory
from trunkline._errors import Error
from trunkline.workload._data_files import PARTS, PartName
from trunkline.workload._phase import Rank
from trunkline.workload._rank_progress import RankProgress, Report

ABORTED = 3  # exit status of a rank that ended because another one did
_POLL_SECONDS = 0.02
# Imports nothing from the working directory, which `-m` would: a calendar.py there is not the library's.
_RANK_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from trunkline.workload._rank_process import run; run()"
)
_BARRIER_BYTES = len(PARTS) * StepBarrierMemory.size()


class Job(Protocol):
    """What every rank does. It is pickled for them."""

    @property
    def end_seconds(self) -> float:
        """How long ranks have to end by themselves when the run ends early."""

    def run(self, rank: Rank, report: Report) -> dict[str, Any]:
        """Run it on one rank; return its counts. `report` gets what is done now and then, and may raise."""


def run_ranks(job: Job, ranks: int, report: Report = lambda *_: None) -> list[dict[str, Any]]:
    """Run the job on so many ranks; return the counts of each. `report` gets what all have done.

    Raises Error that names the rank if one ends before its time; the others are then ended, too.
    """
    descriptor = os.memfd_create("trunkline-ranks")
    try:
        os.ftruncate(descriptor, _BARRIER_BYTES + RankProgress.size(ranks))
        barriers = barriers_of(descriptor)
        progress = progress_of(descriptor, ranks)
        with closing(progress), tempfile.TemporaryDirectory(prefix="trunkline-ranks-") as folder:
            outputs = [open(f"{folder}/{rank}", "w+b") for rank in range(ranks)]  # noqa: SIM115, PTH123
            try:
                tick = lambda: report(*progress.least())  # noqa: E731
                return _run(job, ranks, descriptor, list(barriers.values()), outputs, tick)
            finally:
                for each in outputs:
                    each.close()
    finally:
        os.close(descriptor)


def barriers_of(descriptor: int) -> dict[PartName, StepBarrierMemory]:
    """Map the memory that all ranks share: a barrier for each phase, which counts steps separately."""
    return {name: StepBarrierMemory(descriptor, number) for number, name in enumerate(PARTS)}


def progress_of(descriptor: int, ranks: int) -> RankProgress:
    """Map how far each rank is."""
    return RankProgress(descriptor, _BARRIER_BYTES, ranks)


def _run(
    job: Job,
    ranks: int,
    descriptor: int,
    barriers: Sequence[StepBarrierMemory],
    outputs: Sequence[IO[bytes]],
    tick: Callable[[], object],
) -> list[dict[str, Any]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            arguments = map(str, (descriptor, rank, ranks, os.getpid()))
            command = [sys.executable, "-c", _RANK_PROGRAM, *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=outputs[rank], pass_fds=(descriptor,)
            )
            processes.append(process)
            assert process.stdin is not None
            try:
                pickle.dump(job, process.stdin)
                process.stdin.close()
            except BrokenPipeError:
                break  # it has ended; below, it is named
        _wait(processes, tick)
    except BaseException:
        for barrier in barriers:
            barrier.abort()
        _end(processes, job.end_seconds)
        raise
    results = []
    for output in outputs:
        output.seek(0)
        results.append(json.load(output))
    return results


def _wait(processes: list[subprocess.Popen[bytes]], tick: Callable[[], object]) -> None:
    """Wait for all, and call `tick` meanwhile; raise Error for the first that fails."""
    while True:
        tick()
        statuses = [process.poll() for process in processes]
        for rank, status in enumerate(statuses):
            if status not in (None, 0, ABORTED):
                raise Error(errno.ECHILD, f"rank {rank} {_how(status)}; the run is not complete")
        if None not in statuses:
            break
        time.sleep(_POLL_SECONDS)
    if ABORTED in statuses:
        raise Error(errno.ECHILD, f"rank {statuses.index(ABORTED)} ended early; the run is not complete")


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"failed with exit status {status}"


def _end(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)
    for process in processes:
        if process.poll() is None:  # in a read that does not end
            process.kill()
        process.wait()
