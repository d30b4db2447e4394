"""A virtual machine's free memory, kept from its hypervisor while something is measured.

With free page reporting (Documentation/mm/free_page_reporting.rst) pages that were free for a while cost 0.4
to 2.5 s/GB when they are used again, by any process, and which pages those are varies: what needs new
memory then measures that. Kernels that let the waiting time be set are asked to wait longer.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None)
_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23
_PARAMETERS = Path("/sys/module/page_reporting/parameters")
_WAIT = {"min_free_ms": 60_000, "max_waiting_mib": 1 << 20}  # least time free, and how much may wait


def touch_new_memory(nbytes: int) -> None:
    """Let the kernel provide as much memory, in huge pages, and give it back."""
    # Private: shared memory would come in small pages.
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_MADV_POPULATE_WRITE)


def populate(nbytes: int, advice: int) -> None:
    """Let all processors together make as much new memory resident, in pages as `advice` to madvise says."""
    threads = os.cpu_count() or 1
    part = nbytes // threads // _HUGE_PAGE * _HUGE_PAGE
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(advice)
        first = ctypes.c_char.from_buffer(memory)
        begin = ctypes.addressof(first)
        del first  # the mapping cannot be closed before

        def run(number: int) -> None:
            end = nbytes if number == threads - 1 else (number + 1) * part
            # By ctypes: the method of mmap keeps other threads of Python from running.
            _LIBC.madvise(
                ctypes.c_void_p(begin + number * part),
                ctypes.c_size_t(end - number * part),
                _MADV_POPULATE_WRITE,
            )

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(threads)))


@contextmanager
def free_memory_kept(nbytes: int) -> Iterator[str]:
    """Hold page reporting back, with `nbytes` free that are there, and yield words for a report that say so
    (empty where there is no reporting).
    """
    with ExitStack() as restore:
        if not _PARAMETERS.exists():
            yield ""
            return
        try:
            for name, value in _WAIT.items():
                path = _PARAMETERS / name
                before = path.read_text()
                path.write_text(str(value))
                restore.callback(path.write_text, before)
        except OSError:
            yield "free page reporting is on"
        else:
            touch_new_memory(nbytes)
            yield "free page reporting is held back"
