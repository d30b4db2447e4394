"""Jobs on the ranks of mpirun. Argument: `fail`, one rank fails; `hang`, and the others do not notice."""

import sys
import time
from typing import Any

from trunkline import Error
from trunkline._progress import Progress
from trunkline.workload._mpi_ranks import MpiRanks
from trunkline.workload._phase import Rank
from trunkline.workload._rank_progress import Report


class Failing:
    """Fails on rank 2. Other ranks meet, or with `hang` sleep."""

    end_seconds = 0.5

    def __init__(self, hang: bool) -> None:
        self._hang = hang

    def run(self, rank: Rank, report: Report) -> dict[str, Any]:
        """Run on one rank."""
        if rank.number == 2:
            raise ValueError("the disk is on fire")
        while self._hang:
            time.sleep(0.1)
        reduction: Any = rank.barriers["train"]
        while True:
            reduction.begin(0)
            while reduction.poll() is None:
                time.sleep(0.001)


def fails(ranks: MpiRanks) -> bool:
    """Run the job on all ranks, from rank 0; print the error."""
    try:
        ranks.run(Failing(sys.argv[1] == "hang"), ranks.ranks, Progress("failing", 1, "steps"))
    except Error as error:
        print(error, flush=True)
        return True
    return False


def main() -> int:
    """Run on this rank."""
    ranks = MpiRanks()
    if ranks.rank > 0:
        status = ranks.serve()
    else:
        status = sum(fails(ranks) for _ in range(2))  # a job that failed leaves nothing behind
        ranks.end(status)
    ranks.close()
    print(f"rank {ranks.rank} exits with {status}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
