"""Disks and servers as numbers, and how many of them a demand requires."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trunkline._numbers import check_count, check_positive
from trunkline.workload._demand import Demand


@dataclass(frozen=True)
class Disk:
    """What one disk can do; None: not known."""

    read_gb_s: float | None = None
    """Bandwidth of reading, in 10^9 bytes per second."""
    iops: float | None = None
    """Reads per second."""
    write_gb_s: float | None = None
    """Bandwidth of writing, in 10^9 bytes per second."""
    iops_block_bytes: int | None = None
    """Size of the reads that `iops` counts; None: that of the samples."""
    capacity_bytes: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each number is from, by its name."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that is not positive."""
        for name in ("read_gb_s", "iops", "write_gb_s", "capacity_bytes"):
            if getattr(self, name) is not None:
                check_positive(f"Disk.{name}", getattr(self, name))


@dataclass(frozen=True)
class Server:
    """A storage server: what its network carries, and how many disks it has."""

    gb_s: float | None = None
    """Bandwidth of its network, in 10^9 bytes per second; None: not the limit."""
    disks: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a number that is not positive."""
        if self.gb_s is not None:
            check_positive("Server.gb_s", self.gb_s)
        if self.disks is not None:
            check_count("Server.disks", self.disks)


@dataclass(frozen=True)
class Needs:
    """What storage must deliver at the same time, and hold."""

    demand: Demand
    capacity_bytes: float
    write_gb_s: float = 0.0


def disks_for(needs: Needs, disk: Disk) -> dict[str, Any] | None:
    """Return how many disks the needs require, and why; None if nothing is known of a disk.

    {"bandwidth", "reads", "writes", "capacity", "needed", "bound_by"}: a number of disks for each of the
    first four, None where the disk's number is not known, the largest of them, and which one that is.
    """
    counts = {
        "bandwidth": _count(needs.demand.gb_s, disk.read_gb_s),
        "reads": _count(needs.demand.reads_per_second, disk.iops),
        "writes": _count(needs.write_gb_s, disk.write_gb_s),
        "capacity": _count(needs.capacity_bytes, disk.capacity_bytes),
    }
    known = {name: count for name, count in counts.items() if count is not None}
    if not known:
        return None
    bound_by = max(known, key=lambda name: known[name])
    return {**counts, "needed": max(1, known[bound_by]), "bound_by": bound_by}


def servers_for(gb_s: float, disks: int | None, server: Server | None) -> int | None:
    """Return how many servers carry the bandwidth and hold the disks; None if that is not known."""
    if server is None:
        return None
    counts = [_count(gb_s, server.gb_s), None if disks is None else _count(disks, server.disks)]
    known = [count for count in counts if count is not None]
    return max(1, *known) if known else None


def _count(needed: float, of_one: float | None) -> int | None:
    # Rounding errors must not add a disk: 3 x 0.1 GB/s are three disks of 0.1.
    return None if of_one is None else math.ceil(needed / of_one * (1 - 1e-12))
