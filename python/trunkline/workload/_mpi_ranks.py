"""The ranks of a run are the processes that mpirun has started, on one machine or several.

Rank 0 is in charge: it sends each job to the others, takes part in it, and collects what they counted. At the
end it sends them the exit status.
"""

import errno
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trunkline._errors import Cancelled, Error, Unsupported
from trunkline._progress import Progress
from trunkline.workload._data_files import PARTS
from trunkline.workload._launcher import shown_by
from trunkline.workload._phase import Rank
from trunkline.workload._rank_progress import Report
from trunkline.workload._ranks import Job
from trunkline.workload._step_reduction import Request, StepReduction, wait_until

if TYPE_CHECKING:
    from array import array

# Set by mpirun of Open MPI, and of MPICH and its relatives (Intel MPI, MVAPICH).
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def started_ranks() -> int:
    """Return how many processes mpirun has started; 1 without it."""
    return max(1, *(_number(name) for name in _SIZE_VARIABLES))


def started_rank() -> int:
    """Return which of them this is, before MPI is initialized."""
    return max(_number(name) for name in _RANK_VARIABLES)


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


@dataclass(frozen=True)
class _Outcome:
    """What became of a job on one rank."""

    counts: dict[str, Any] | None
    failure: str | None = None  # None as well: ended because another rank failed
    machine: str = ""


@dataclass(frozen=True)
class _End:
    """What rank 0 sends last."""

    status: int


class MpiRanks:
    """All ranks of MPI, as one of them sees them; on rank 0 a Launcher. Not thread-safe."""

    def __init__(self) -> None:
        """Initialize MPI. All ranks do. Raises Unsupported if it cannot be used, naming what to install."""
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # the package; a library of MPI
            why = " ".join(str(error).split())
            raise Unsupported(
                errno.EOPNOTSUPP,
                f"{started_ranks()} ranks under mpirun require the package mpi4py, and that MPI is installed "
                f"(pip install mpi4py; on Debian, apt-get install openmpi-bin libopenmpi-dev): {why}",
            ) from error
        self._mpi = MPI
        self._messages = MPI.COMM_WORLD.Dup()
        self._steps = MPI.COMM_WORLD.Dup()
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.ranks: int = MPI.COMM_WORLD.Get_size()
        if self.ranks != started_ranks():
            raise Unsupported(
                errno.EOPNOTSUPP,
                f"mpirun has started {started_ranks()} ranks, and mpi4py finds {self.ranks}: it uses another "
                "MPI library than that mpirun; install mpi4py for it (pip install --no-binary mpi4py mpi4py)",
            )
        here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self._per_machine: int = MPI.COMM_WORLD.allreduce(here.Get_size(), MPI.MAX)
        here.Free()

    def per_machine(self, ranks: int) -> int:
        """Return how many ranks the fullest machine has."""
        return min(ranks, self._per_machine)

    def meeting(self, folder: str) -> str:
        """A file if all ranks are on one machine, else a port of this one."""
        if self._per_machine == self.ranks:
            return f"file://{folder}/ranks"
        return free_address(self._mpi.Get_processor_name())

    def run(self, job: Job, ranks: int, progress: Progress) -> list[dict[str, Any]]:
        """Run the job on all ranks, on rank 0; see Launcher. The progress is that of this rank."""
        assert ranks == self.ranks
        try:
            for rank in range(1, self.ranks):
                self._send(job, rank)
            outcomes = [self._run_share(job, shown_by(progress))]
            outcomes += [self._receive(rank) for rank in range(1, self.ranks)]
        finally:
            progress.close()
        return _counts_of(outcomes)

    def serve(self) -> int:
        """Take part in what rank 0 runs, on another rank; return the exit status that rank 0 decides on."""
        while not isinstance(message := self._receive(0), _End):
            self._send(self._run_share(message, lambda *_: None), 0)
        return message.status

    def end(self, status: int) -> None:
        """End the others with this exit status, on rank 0."""
        for rank in range(1, self.ranks):
            self._send(_End(status), rank)

    def close(self) -> None:
        """Finalize MPI, once all ranks do."""
        self._mpi.Finalize()

    def abort(self) -> None:
        """End all ranks at once."""
        sys.stderr.flush()
        self._mpi.COMM_WORLD.Abort(1)

    def _run_share(self, job: Job, report: Report) -> _Outcome:
        """Run the job on this rank. Ends all ranks if others do not notice that this one has failed."""
        reduction = StepReduction(self._begin_maximum)
        machine = self._mpi.Get_processor_name()
        outcome = _run_job(job, Rank(self.rank, self.ranks, dict.fromkeys(PARTS, reduction)), report, machine)
        failed = outcome.counts is None
        if not reduction.finish(failed, job.end_seconds if failed else None):
            print(
                f"trunkline workload run: rank {self.rank} on {machine} failed: "
                f"{outcome.failure or 'other ranks do not answer'}; the run is not complete",
                file=sys.stderr,
            )
            self.abort()
        return outcome

    def _begin_maximum(self, own: "array[int]", largest: "array[int]") -> Request:
        mpi = self._mpi
        request: Request = self._steps.Iallreduce([own, mpi.INT64_T], [largest, mpi.INT64_T], op=mpi.MAX)
        return request

    def _send(self, message: object, rank: int) -> None:
        wait_until(self._messages.isend(message, dest=rank).Test)

    def _receive(self, rank: int) -> Any:
        found: list[Any] = []

        def has_come() -> bool:
            found[:] = [self._messages.improbe(source=rank)]
            return found[0] is not None

        wait_until(has_come)
        return found[0].recv()


def _run_job(job: Job, rank: Rank, report: Report, machine: str) -> _Outcome:
    try:
        return _Outcome(job.run(rank, report), None, machine)
    except Cancelled:
        return _Outcome(None, None, machine)
    except KeyboardInterrupt:
        return _Outcome(None, "interrupted", machine)
    except (OSError, ValueError) as error:
        return _Outcome(None, str(error), machine)
    except Exception as error:
        traceback.print_exc()
        return _Outcome(None, f"{type(error).__name__}: {error}", machine)


def _counts_of(outcomes: list[_Outcome]) -> list[dict[str, Any]]:
    """Return the counts of all ranks; raise Error for the first that failed by itself, or else that ended."""
    ended = [rank for rank, each in enumerate(outcomes) if each.counts is None]
    if ended:
        rank = next((rank for rank in ended if outcomes[rank].failure is not None), ended[0])
        first = outcomes[rank]
        why = f"failed: {first.failure}" if first.failure is not None else "ended early"
        raise Error(errno.ECHILD, f"rank {rank} on {first.machine} {why}; the run is not complete")
    return [each.counts for each in outcomes if each.counts is not None]


def free_address(host: str) -> str:
    """Return a URL of torch.distributed, with a port of this machine that is free now."""
    import socket

    with socket.socket() as found:
        found.bind(("", 0))
        return f"tcp://{host}:{found.getsockname()[1]}"
