"""What starts the ranks of a run: processes of this machine, or those that mpirun has started."""

from typing import Any, Protocol

from trunkline._progress import Progress
from trunkline.workload._phase import Rank
from trunkline.workload._rank_progress import UNKNOWN, Report
from trunkline.workload._ranks import Job, run_ranks


class Launcher(Protocol):
    """Runs jobs on all ranks."""

    @property
    def ranks(self) -> int | None:
        """How many ranks there are; None: as many as a job is run on."""

    def per_machine(self, ranks: int) -> int:
        """Return how many of so many ranks share the memory of a machine, at most."""

    def meeting(self, folder: str) -> str:
        """Return the URL where torch's processes of all ranks meet. `folder`: of the first rank."""

    def run(self, job: Job, ranks: int, progress: Progress) -> list[dict[str, Any]]:
        """Run the job on so many ranks; return the counts of each.

        Closes the progress, which shows what all ranks have done. Raises Error that names the rank if one
        fails.
        """


class LocalLauncher:
    """Ranks on this machine: one in this process, or several in processes of their own."""

    ranks = None

    def per_machine(self, ranks: int) -> int:
        """All of them."""
        return ranks

    def meeting(self, folder: str) -> str:
        """A file."""
        return f"file://{folder}/ranks"

    def run(self, job: Job, ranks: int, progress: Progress) -> list[dict[str, Any]]:
        """Run the job; see Launcher."""
        try:
            report = shown_by(progress)
            return [job.run(Rank(), report)] if ranks == 1 else run_ranks(job, ranks, report)
        finally:
            progress.close()


def shown_by(progress: Progress) -> Report:
    """Return what shows reports as that progress."""
    shown = 0

    def report(done: int, utilization: float = UNKNOWN) -> None:
        nonlocal shown
        progress.add(done - shown, "" if utilization < 0 else f"utilization {utilization:.1%}")
        shown = done

    return report
