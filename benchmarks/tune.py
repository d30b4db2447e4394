#!/usr/bin/env python3
"""What `trunkline tune` chooses, beside the best of a full grid search, on disks whose limit is known.

    benchmarks/tune.py [--disks 2] [--limit-mb-s 1000] [--each 0.25] [--output tune.json]

On one disk, and on all of them together: every candidate is measured for the same time (`trunkline tune
--exhaustive`), then `tune` searches in at most a tenth of the time that this took. The search's choice, the
best three of the grid, and the defaults are measured once more, in turns: the grid's own numbers would favour
whatever was lucky there. The choice should reach 0.97 of the best of these three, and never be slower than
the defaults. Needs root for the disks (paced_disks.py), or directories (--dir), and the trunkline command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from measurement import commit, machine, progress
from paced_disks import PacedDisks

MB = 1_000_000
RANDOM_BLOCK = 64 * 1024  # as `trunkline tune` does
PATTERNS = {
    "sequential read": ["--read"],
    "sequential write": ["--write", "--write-mode", "overwrite"],
    "random read": ["--read", "--random"],
    "random write": ["--write", "--write-mode", "overwrite", "--random"],
}
FINALISTS = 3  # of the grid
ROUNDS = 3
LEAST_BUDGET_S = 5.0  # that tune accepts

Settings = dict[str, Any]


def trunkline(*arguments: str | Path) -> dict[str, Any]:
    """The JSON that the command prints. It follows no tuning, and leaves none."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRUNKLINE_TUNING": str(Path(folder) / "tuning.json")}
        command = [sys.executable, "-m", "trunkline", *map(str, arguments), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def rate(directories: Sequence[Path], settings: Settings, pattern: str, size: int) -> float:
    """Bytes per second, of writes until they are durable."""
    block = RANDOM_BLOCK if "random" in pattern else settings["block_bytes"]
    named: list[str | Path] = ["bench", *directories, *PATTERNS[pattern]]
    document = trunkline(
        *named,
        *("--engine", settings["backend"], "--lanes", str(settings["lanes"])),
        *("--queue-depth", str(settings["queue_depth"]), "--block", str(block)),
        *("--direct", "always" if settings["direct"] else "never"),
        *("--size", str(size), "--repeat", "1"),
    )
    row = document["results"][0]
    return float(row["gb_s_with_sync" if "write" in pattern else "gb_s"]) * 1e9


def geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def measured_again(
    directories: Sequence[Path], contestants: dict[str, Settings], size: int, rest: Callable[[], None]
) -> dict[str, float]:
    """The geometric mean over the patterns of each one's median rate, measured in turns."""
    rates: dict[str, dict[str, list[float]]] = {
        name: {pattern: [] for pattern in PATTERNS} for name in contestants
    }
    for number in range(1, ROUNDS + 1):
        for pattern in PATTERNS:
            for name, settings in contestants.items():
                progress(f"again, round {number} of {ROUNDS}: {pattern}, {name}")
                rest()
                rates[name][pattern].append(rate(directories, settings, pattern, size))
    return {
        name: geometric_mean([median(runs) for runs in of_pattern.values()])
        for name, of_pattern in rates.items()
    }


def compare(
    directories: Sequence[Path], options: argparse.Namespace, rest: Callable[[], None]
) -> dict[str, Any]:
    """One search beside one grid, on these directories together."""
    size = ["--size", str(options.size)]
    progress(f"grid on {len(directories)}")
    grid = trunkline("tune", *directories, "--exhaustive", f"{options.each}s", *size)
    budget_s = max(LEAST_BUDGET_S, grid["seconds"] / 10)
    progress(f"search for {budget_s:.1f} s")
    search = trunkline("tune", *directories, "--budget", f"{budget_s}s", *size)
    finalists = grid["measured"][:FINALISTS]
    contestants: dict[str, Settings] = {
        "choice": search["best"]["settings"],
        "defaults": search["defaults"]["settings"],
    }
    contestants |= {f"grid's {place}": each["settings"] for place, each in enumerate(finalists, 1)}
    again = measured_again(directories, contestants, options.size, rest)
    best = max(again[f"grid's {place}"] for place in range(1, len(finalists) + 1))
    return {
        "disks": len(directories),
        "candidates": grid["candidates"],
        "grid_seconds": grid["seconds"],
        "search_seconds": search["seconds"],
        "share_of_time": search["seconds"] / grid["seconds"],
        "measured_by_search": len(search["measured"]) + 1,
        "why_search_ended": search["why"],
        "settings": contestants,
        "bytes_per_second": again,
        "choice_over_best": again["choice"] / max(best, again["defaults"]),
        "choice_over_defaults": again["choice"] / again["defaults"],
    }


@contextlib.contextmanager
def open_directories(options: argparse.Namespace) -> Iterator[tuple[list[Path], Callable[[], None]]]:
    """Paced disks, or the directories that were named, and what lets their throttle come to rest."""
    if options.dir:
        yield options.dir, lambda: None
        return
    # tune leaves half of the free space free.
    with PacedDisks([2 * options.size + 256 * MB] * options.disks, options.limit_mb_s) as disks:
        yield disks.directories, disks.rest


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--disks", type=int, default=2)
    parser.add_argument("--limit-mb-s", type=int, default=1000, help="of each disk, each way (1000)")
    parser.add_argument("--dir", type=Path, nargs="+", help="directories in place of paced disks")
    parser.add_argument("--size", type=int, default=500 * MB, help="of each scratch file, in bytes")
    parser.add_argument(
        "--each", type=float, default=0.25, help="seconds of a pattern of a candidate in the grid (0.25)"
    )
    parser.add_argument("--output", type=Path, help="write the JSON to this file, too")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    document: dict[str, Any] = {"benchmark": "tune", "machine": machine(), "commit": commit()}
    with open_directories(options) as (directories, rest):
        groups = [directories[:1]] + ([directories] if len(directories) > 1 else [])
        document["results"] = [compare(group, options, rest) for group in groups]
    if not options.dir:
        document["limit_mb_s"] = options.limit_mb_s
    text = json.dumps(document, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    for result in document["results"]:
        print(
            f"{result['disks']} disk(s): the choice reaches {result['choice_over_best']:.3f} of the best "
            f"(goal: >= 0.97) and {result['choice_over_defaults']:.3f} of the defaults (goal: >= 1, within "
            f"the noise) in {result['share_of_time']:.3f} of the grid's time (goal: <= 0.1)",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
