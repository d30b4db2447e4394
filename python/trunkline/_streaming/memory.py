"""How much memory weights may use by default."""

import os

import torch

from trunkline._core import free_memory_bytes, parse_size

_SHARE = 0.5


def budget_argument(memory_budget: int | str | None, device: torch.device) -> int:
    """Return how many bytes of the device's memory weights may use: by default half of what is free."""
    if memory_budget is not None:
        return parse_size(memory_budget, "memory_budget")
    if device.type == "cpu":
        return default_budget()
    return int(torch.cuda.mem_get_info(device)[0] * _SHARE)


def default_budget() -> int:
    """Return half of the memory that is available, in bytes: of the machine, or of its control groups."""
    return int(free_memory_bytes() * _SHARE)


def machine_memory() -> int:
    """Return how much memory the machine has, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
