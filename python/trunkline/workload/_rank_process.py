"""One of several ranks of a workload: the program that _ranks.py runs."""

import json
import os
import pickle
import sys

from trunkline._errors import Cancelled
from trunkline.workload._phase import Rank
from trunkline.workload._rank_progress import UNKNOWN
from trunkline.workload._ranks import ABORTED, Job, barriers_of, progress_of

_INTERRUPTED = 130


def main() -> int:
    """Arguments: the descriptor of the barrier, rank, number of ranks, process that started it."""
    descriptor, number, count, parent = map(int, sys.argv[1:])
    job: Job = pickle.load(sys.stdin.buffer)

    progress = progress_of(descriptor, count)

    def report(done: int, utilization: float = UNKNOWN) -> None:
        if os.getppid() != parent:
            raise Cancelled(0, "the process that started this rank has ended")
        progress.set(number, done, utilization)

    try:
        counts = job.run(Rank(number, count, barriers_of(descriptor)), report)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Cancelled:
        return ABORTED
    except (OSError, ValueError) as error:
        print(f"trunkline workload: rank {number}: {error}", file=sys.stderr, flush=True)
        return 1
    json.dump(counts, sys.stdout)
    return 0


def run() -> None:
    """Run main(), and end the process."""
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything has ended and is stored. Threads of torch's process group that need the interpreter while it
    # shuts down could end this process by SIGABRT ("terminate called without an active exception").
    os._exit(status)
