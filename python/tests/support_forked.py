"""Code in separate processes that are forked from one which has imported transformers.

Importing it takes four seconds of processor time; a fork takes none. For tests of what processes do to each
other's files, not of what an import or an exit does.
"""

import multiprocessing
import sys
from multiprocessing.process import BaseProcess

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["trunkline._streaming.pack", "trunkline.transformers"])


def start_code(code: str, *arguments: object) -> BaseProcess:
    """Run `code` with arguments in sys.argv[1:]. The process ends with this one; join() it."""
    process = _PROCESSES.Process(target=_run, args=(code, [str(each) for each in arguments]), daemon=True)
    process.start()
    return process


def exit_codes(processes: list[BaseProcess]) -> list[int | None]:
    """Wait for all, each at most four minutes."""
    for process in processes:
        process.join(240)
    return [process.exitcode for process in processes]


def _run(code: str, arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    exec(code, {"__name__": "__main__"})
