"""Measurements compared with a peer: taken in turn within one run, compared round by round, shown as a
table.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Literal

import tables


@dataclass
class Spent:
    """Wall-clock and processor time (user and system, all threads) of a `with spent()` block, in seconds."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0


@contextmanager
def spent() -> Iterator[Spent]:
    result = Spent()
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    yield result
    result.seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    result.cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def interleave(
    rounds: int, ways: dict[str, Callable[[], float]], label: str, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Each way once a round, so that whatever else the machine does meets all of them alike. A round before
    the first is not counted: it is the first to use files, memory and code.
    """
    results: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items() if warm_up else ():
        progress(f"{label}: warming up: {name}")
        way()
    for number in range(1, rounds + 1):
        for name, way in ways.items():
            progress(f"{label}: round {number} of {rounds}: {name}")
            results[name].append(way())
    return results


def progress(text: str) -> None:
    live = sys.stderr.isatty()
    sys.stderr.write(f"\r\x1b[2K{text}" if live else f"{text}\n")
    sys.stderr.flush()


@dataclass
class Comparison:
    """One measured thing beside its peer, and the goal for it.

    How they are compared: "ratio" is the median over rounds of ours / peer, "difference" that of ours - peer,
    "ours" that of ours alone, whose goal is a number of its own. The goal is a bound for that, from below or
    from above. A peer that did not run leaves `why_not`.
    """

    section: str
    case: str
    unit: str
    peer: str
    ours: list[float]
    theirs: list[float]
    compared: Literal["ratio", "difference", "ours"] = "ratio"
    at_least: float | None = None
    at_most: float | None = None
    why_not: str = ""

    @property
    def value(self) -> float | None:
        if not self.ours or not self.theirs:
            return None
        if self.compared == "ours":
            return median(self.ours)
        pairs = zip(self.ours, self.theirs, strict=True)
        if self.compared == "ratio":
            return median(ours / theirs for ours, theirs in pairs)
        return median(ours - theirs for ours, theirs in pairs)

    @property
    def goal(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}" if self.at_most is not None else ""

    @property
    def met(self) -> bool | None:
        value = self.value
        if value is None or not self.goal:
            return None
        return value >= self.at_least if self.at_least is not None else value <= (self.at_most or 0.0)

    def as_json(self) -> dict[str, object]:
        return {
            "section": self.section,
            "case": self.case,
            "unit": self.unit,
            "runs": self.ours,
            "median": median(self.ours) if self.ours else None,
            "peer": self.peer,
            "peer_runs": self.theirs,
            "peer_median": median(self.theirs) if self.theirs else None,
            "compared": self.compared,
            "value": self.value,
            "goal": self.goal or None,
            "met": self.met,
            "why_not": self.why_not or None,
        }


def machine() -> str:
    """The processors, memory and kernel of this machine in words; never its name."""
    cpu = "unknown CPU"
    with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = ".".join(platform.release().split(".")[:2])  # what follows names builds, and sometimes machines
    return f"{os.cpu_count()} cores ({cpu}), {gib:.0f} GiB, Linux {kernel}"


def software() -> str:
    """The versions of what is measured beside us."""
    found = []
    for name in ("torch", "safetensors", "transformers", "accelerate", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    with suppress(OSError):
        done = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False)
        found.insert(0, done.stdout.strip().replace("fio-", "fio "))
    return ", ".join(found)


def commit() -> str:
    """The commit of the project that is measured, marked where files differ from it; "" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


@dataclass
class Results:
    """All comparisons of a run, and where it ran."""

    disks: str
    command: str
    machine: str = field(default_factory=machine)
    software: str = field(default_factory=software)
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    time_of_day: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))
    comparisons: list[Comparison] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return {
            "schema": 1,
            "date": self.date,
            "time": self.time_of_day,
            "commit": self.commit,
            "machine": self.machine,
            "software": self.software,
            "disks": self.disks,
            "command": self.command,
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
        }

    def table(self) -> str:
        lines = [f"{self.machine}, {self.date}; {self.disks}"]
        lines.append(f"{'':<52}{'median':>9}{'peer':>9}{'compared':>10}  goal     peer")
        section = ""
        for one in self.comparisons:
            if one.section != section:
                section = one.section
                lines.append(f"{section}, {one.unit}")
            if one.value is None:
                lines.append(f"  {one.case:<50}  not run beside {one.peer}: {one.why_not}")
                continue
            mark = {True: "", False: "  MISSED", None: ""}[one.met]
            value = f"{one.value:>+10.3f}" if one.compared == "difference" else f"{one.value:>10.3f}"
            numbers = f"{median(one.ours):>9.3f}{median(one.theirs):>9.3f}{value}"
            lines.append(f"  {one.case:<50}{numbers}  {one.goal:<8} {one.peer}{mark}")
        return "\n".join(lines)

    def markdown(self) -> str:
        """The tables of docs/performance.md."""
        return tables.markdown([comparison.as_json() for comparison in self.comparisons])
