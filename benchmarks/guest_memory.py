"""A virtual machine's free memory, kept from its hypervisor while something is measured.

With free page reporting (Documentation/mm/free_page_reporting.rst) pages that were free for a while cost 0.4
to 2.5 s/GB when they are used again, by any process, and which pages those are varies: what needs new
memory then measures that. Kernels that let the waiting time be set are asked to wait longer.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PARAMETERS = Path("/sys/module/page_reporting/parameters")
_WAIT = {"min_free_ms": 60_000, "max_waiting_mib": 1 << 20}  # least time free, and how much may wait


def touch_new_memory(nbytes: int) -> None:
    """Let the kernel provide as much memory, in huge pages, and give it back."""
    # Private: shared memory would come in small pages.
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(23)  # MADV_POPULATE_WRITE


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
