"""Scans files in threads."""

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from trunkline._progress import Progress
from trunkline.data._options import Options

Result = TypeVar("Result")

_AHEAD = 8  # calls a thread, whose results may wait for that of an earlier one
_CALLS_PER_THREAD = 16
_MAX_AT_ONCE = 256  # files a call


def scan_files(
    files: Sequence[int],
    scan: Callable[[int], Result],
    options: Options,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, Result]]:
    """Yield each of `files` with what `scan` returns for it, in their order; called in threads.

    An error of one ends all; so does closing the iterator. `stop`: makes calls of `scan` end soon.
    """
    progress = Progress("indexing", len(files), "files")
    done = 0
    workers = max(1, min(options.workers, len(files)))
    at_once = max(1, min(_MAX_AT_ONCE, len(files) // (_CALLS_PER_THREAD * workers)))
    closed = threading.Event()

    def scan_some(some: Sequence[int]) -> list[tuple[int, Result]]:
        return [(file, scan(file)) for file in some if not closed.is_set()]

    pool = concurrent.futures.ThreadPoolExecutor(workers, "trunkline-index")
    waiting: deque[concurrent.futures.Future[list[tuple[int, Result]]]] = deque()
    rest = iter(range(0, len(files), at_once))
    try:
        while True:
            while len(waiting) < _AHEAD * workers and (first := next(rest, None)) is not None:
                waiting.append(pool.submit(scan_some, files[first : first + at_once]))
            if not waiting:
                break
            for file, result in waiting.popleft().result():
                yield file, result
                done += 1
                progress.add(1)
                if options.report is not None:
                    options.report(done, len(files))
    finally:
        progress.close()
        closed.set()
        stop()
        pool.shutdown(wait=True, cancel_futures=True)
