#!/usr/bin/env python3
"""Adds up result files of scripts/run_tests.py and scripts/lint.py into one closing line.

    scripts/sum_results.py FILE...

A file that is missing counts as one failure. Exits with 1 when anything failed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from results import Outcome, closing_line, read_results


def main(paths: list[str]) -> int:
    outcomes: dict[str, Outcome] = {}
    for path in paths:
        if Path(path).is_file():
            outcomes |= {f"{path}:{name}": outcome for name, outcome in read_results(Path(path)).items()}
        else:
            print(f"no results in {path}")
            outcomes[path] = Outcome(failures=["no results"])
    print(closing_line(outcomes))
    return 1 if any(outcome.failed for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
