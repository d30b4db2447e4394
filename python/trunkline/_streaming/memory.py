"""How much memory weights may use by default."""

from contextlib import suppress
from pathlib import Path

import torch

from trunkline._core import parse_size

_SHARE = 0.5


def budget_argument(memory_budget: int | str | None, device: torch.device) -> int:
    """Return how many bytes of the device's memory weights may use: by default half of what is free."""
    if memory_budget is not None:
        return parse_size(memory_budget, "memory_budget")
    if device.type == "cpu":
        return default_budget()
    return int(torch.cuda.mem_get_info(device)[0] * _SHARE)


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
