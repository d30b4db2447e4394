#!/usr/bin/env python3
"""Bring what the documents show of measured results up to date with benchmarks/results.

    .venv/bin/python benchmarks/make_tables.py [RESULTS.json] [--check]

That is the tables of docs/performance.md, the short one of README.md, and the plot docs/speed.svg, from the
newest results unless a file is named. --check writes nothing, and fails if one of them is not current.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import highlights
import kept_results
import speed_plot
import tables
from kept_results import Document

ROOT = Path(__file__).resolve().parent.parent
PLOT = ROOT / "docs/speed.svg"


def performance(results: Document) -> str:
    """The machine, and a table for each section."""
    about = [f"{results['machine']}; measured on {results['date']}; {results['software']}."]
    commit = f" Commit {results['commit']}." if results.get("commit") else ""
    about.append(f"Disks: {results['disks']}.{commit} Command: `{results['command']}`.")
    about += [results["about"]] if "about" in results else []
    if any("earlier" in row for row in results["comparisons"]):
        about.append("A row with a date was measured then: its peer was not installed in this run.")
    return "\n".join([*about, "", tables.markdown(results["comparisons"], results.get("notes"))])


def replaced(text: str, name: str, block: str, script: str = "make_tables.py") -> str:
    """The text with the block in place of what stands between the marks of this name, made by `script`."""
    marks = (f"<!-- {name}: made by benchmarks/{script} -->", f"<!-- end of {name} -->")
    pattern = re.compile(f"(?<={re.escape(marks[0])}\n).*?(?={re.escape(marks[1])})", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"{script}: there must be one {marks[0]}, with {marks[1]} after it")
    return pattern.sub(lambda _: f"\n{block}\n\n", text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Make tables and a plot from kept results.")
    parser.add_argument("results", type=Path, nargs="?", help="default: the newest of benchmarks/results")
    parser.add_argument("--check", action="store_true", help="fail if a document is not current")
    options = parser.parse_args()
    path = options.results or kept_results.newest()
    results = kept_results.shown(path)
    stale = []
    for name, block in (
        ("docs/performance.md", performance(results)),
        ("README.md", highlights.markdown(results["comparisons"])),
    ):
        document = ROOT / name
        text = document.read_text(encoding="utf-8")
        current = replaced(text, "results", block)
        if current != text:
            stale.append(name)
            if not options.check:
                document.write_text(current, encoding="utf-8")
    if not PLOT.exists() or speed_plot.digest(results["comparisons"]) not in PLOT.read_text(encoding="utf-8"):
        stale.append("docs/speed.svg")
        if not options.check:
            speed_plot.draw(results["comparisons"], PLOT)
    for name in stale:
        print(f"{name} {'is not what' if options.check else 'now shows what'} {path.name} says")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
