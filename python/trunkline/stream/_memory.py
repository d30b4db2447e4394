"""How much memory there is for weights when nobody says."""

from contextlib import suppress
from pathlib import Path

_SHARE = 0.5


def default_budget() -> int:
    """Return half of the memory that is available, in bytes: of the machine, or of the control group."""
    available = [
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            available.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return int(min(available) * _SHARE)
