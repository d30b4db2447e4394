#!/usr/bin/env python3
"""Say what became slower from one file of results to another.

    .venv/bin/python benchmarks/compare.py benchmarks/results/OLD.json benchmarks/results/NEW.json [--json]

A measurement is worse if its median is worse by more than the threshold and by more than the spread of its
rounds (half of highest - lowest, of both files together), and if it is so beside its peer too: where the peer
became slower alike, the machine was. Exit status: 0 nothing is worse, 1 something is, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import kept_results
from kept_results import Document, key
from tables import Row


@dataclass
class Change:
    """One measurement in both files. Changes are relative: 0.1 is 10 % slower, or costlier."""

    section: str
    case: str
    peer: str
    unit: str
    old: float
    new: float
    change: float
    change_beside_peer: float
    limit: float

    @property
    def verdict(self) -> str:
        if min(self.change, self.change_beside_peer) > self.limit:
            return "worse"
        if max(self.change, self.change_beside_peer) < -self.limit:
            return "better"
        return "same"


def more_is_better(row: Row) -> bool:
    """Speeds end in "per second"; the rest is time or memory."""
    return str(row["unit"]).endswith("/s")


def worsening(old: float, new: float, row: Row) -> float:
    """By how much `new` is worse than `old`, relative to it; 0.0 where nothing can be said."""
    if old <= 0 or new <= 0:
        return 0.0
    return old / new - 1 if more_is_better(row) else new / old - 1


def spread(row: Row) -> float:
    """Half of what lies between the lowest and the highest round, relative to the median."""
    runs = row["runs"]
    return (max(runs) - min(runs)) / 2 / row["median"] if len(runs) > 1 and row["median"] else 0.0


def change_of(old: Row, new: Row, threshold: float) -> Change:
    """What became of one measurement."""
    change = worsening(old["median"], new["median"], new)
    peer_change = worsening(old["peer_median"], new["peer_median"], new)
    return Change(
        *key(new),
        unit=new["unit"],
        old=old["median"],
        new=new["median"],
        change=change,
        change_beside_peer=(1 + change) / (1 + peer_change) - 1,
        limit=max(threshold, spread(old) + spread(new)),
    )


def compare(old: Document, new: Document, threshold: float) -> tuple[list[Change], list[str]]:
    """The changes of all that both have, and what only one of them has."""
    olds, news = (
        {key(row): row for row in each["comparisons"] if row["value"] is not None} for each in (old, new)
    )
    changes = [change_of(olds[name], row, threshold) for name, row in news.items() if name in olds]
    alone = [f"{', '.join(name)}: only in the old results" for name in olds if name not in news]
    alone += [f"{', '.join(name)}: only in the new results" for name in news if name not in olds]
    return changes, alone


def report(changes: list[Change], alone: list[str]) -> str:
    """The changes that count, worst first, and what could not be compared."""
    lines = [
        f"{one.verdict:<7}{one.section}: {one.case}: {one.old:.3f} -> {one.new:.3f} {one.unit} (cost "
        f"{one.change:+.1%}, beside {one.peer} {one.change_beside_peer:+.1%}; limit {one.limit:.1%})"
        for one in sorted(changes, key=lambda one: -one.change)
        if one.verdict != "same"
    ]
    counts = {name: sum(one.verdict == name for one in changes) for name in ("worse", "better", "same")}
    lines += alone
    return "\n".join([*lines, ", ".join(f"{count} {name}" for name, count in counts.items())])


def main() -> int:
    parser = argparse.ArgumentParser(description="Say what became slower between two files of results.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.05, help="relative (default: 0.05)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    if not options.threshold >= 0:
        parser.error("--threshold must not be negative")
    try:
        old, new = (kept_results.load(path) for path in (options.old, options.new))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    changes, alone = compare(old, new, options.threshold)
    if options.json:
        rows = [{**asdict(one), "verdict": one.verdict} for one in changes]
        print(json.dumps({"schema": 1, "changes": rows, "not_compared": alone}, indent=1))
    else:
        print(report(changes, alone))
    return 1 if any(one.verdict == "worse" for one in changes) else 0


if __name__ == "__main__":
    sys.exit(main())
