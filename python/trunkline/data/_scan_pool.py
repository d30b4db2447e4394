"""Scans files in threads."""

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from trunkline._progress import Progress
from trunkline.data._options import Options

Result = TypeVar("Result")

_AHEAD = 64  # files a thread: results that wait for an earlier file


def scan_files(
    files: Sequence[int],
    scan: Callable[[int], Result],
    options: Options,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, Result]]:
    """Yield each of `files` with what `scan` returns for it, in their order; called in threads.

    An error of one ends all; so does closing the iterator. `stop`: makes calls of `scan` in progress end soon.
    """
    progress = Progress("indexing", len(files), "files")
    done = 0
    pool = concurrent.futures.ThreadPoolExecutor(min(options.workers, max(1, len(files))), "trunkline-index")
    waiting: deque[tuple[int, concurrent.futures.Future[Result]]] = deque()
    rest = iter(files)
    try:
        while True:
            while len(waiting) < _AHEAD * options.workers and (file := next(rest, None)) is not None:
                waiting.append((file, pool.submit(scan, file)))
            if not waiting:
                break
            file, future = waiting.popleft()
            yield file, future.result()
            del future
            done += 1
            progress.add(1)
            if options.report is not None:
                options.report(done, len(files))
    finally:
        progress.close()
        stop()
        pool.shutdown(wait=True, cancel_futures=True)
