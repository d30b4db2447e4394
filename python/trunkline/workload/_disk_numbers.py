"""What one disk can do, from the measurements of `trunkline bench --json` and `trunkline tune --json`."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trunkline._errors import errno_reason
from trunkline.workload._storage import Disk


def measured_disk(paths: Iterable[str]) -> Disk:
    """Return what the files of measurements say of one disk: of several, the best of each number.

    Measurements of several directories count as those of as many disks. Raises ValueError with the path if a
    file is not the output of one of the commands, or has no measurement of reading or writing.
    """
    best: dict[str, float] = {}
    sources: dict[str, str] = {}
    block_bytes = None
    for path in paths:
        for name, value, source, block in _numbers(path):
            if value > best.get(name, 0.0):
                best[name], sources[name] = value, f"{path}: {source}"
                block_bytes = block if name == "iops" else block_bytes
    return Disk(**best, iops_block_bytes=block_bytes, sources=sources)


def with_given(disk: Disk, given: Mapping[str, float | None]) -> Disk:
    """Return the disk with numbers that the user gives, which replace measured ones."""
    numbers = {name: value for name, value in given.items() if value is not None}
    block_bytes = None if "iops" in numbers else disk.iops_block_bytes
    sources = {**disk.sources, **dict.fromkeys(numbers, "given")}
    return replace(disk, **numbers, iops_block_bytes=block_bytes, sources=sources)


def _numbers(path: str) -> "list[tuple[str, float, str, int | None]]":
    """Return (name, value, source, size of the blocks) of each measurement in a file."""
    expected = "give the output of `trunkline bench --json` or `trunkline tune --json`"
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"--bench: cannot read {path}: {errno_reason(error.errno or 0)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {expected}") from error
    command = document.get("command") if isinstance(document, dict) else None
    if command in ("bench", "tune") and "error" in document:
        raise ValueError(f"{path}: `trunkline {command}` failed there; measure again ({expected})")
    if command not in ("bench", "tune"):
        raise ValueError(f"{path} has no measurements of disks; {expected}")
    try:
        found = _of_bench(document) if command == "bench" else _of_tune(document)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: incomplete, or of another version of trunkline ({error!r})") from error
    found = [each for each in found if 0 < each[1] < math.inf]
    if not found:
        raise ValueError(f"{path} has no measurement of reading or writing; {expected}")
    return found


def _of_bench(document: dict[str, Any]) -> "list[tuple[str, float, str, int | None]]":
    disks, block = len(document["paths"]), int(document["options"]["block_bytes"])
    found: list[tuple[str, float, str, int | None]] = []
    for row in document["results"]:
        rate = float(row.get("gb_s_with_sync", row["gb_s"])) / disks
        source = f"{row['name']}, {row['order']}, blocks of {block / 1024:g} KiB{_spread(disks)}"
        if row["operation"] == "read":
            found += [("read_gb_s", rate, source, block), ("iops", rate * 1e9 / block, source, block)]
        elif row["operation"] == "write":
            found.append(("write_gb_s", rate, source, block))
    return found


def _of_tune(document: dict[str, Any]) -> "list[tuple[str, float, str, int | None]]":
    """Random reads, as trainings have them, and sequential writes, as checkpoints have them."""
    disks, rates = len(document["paths"]), document["best"]["bytes_per_second"]
    patterns = (("read_gb_s", "random read"), ("write_gb_s", "sequential write"))
    return [
        (name, float(rates[pattern]) / disks / 1e9, f"{pattern}, tuned{_spread(disks)}", None)
        for name, pattern in patterns
        if pattern in rates
    ]


def _spread(disks: int) -> str:
    return f", of {disks} disks" if disks > 1 else ""
