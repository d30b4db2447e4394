"""Results that are kept from run to run: benchmarks/results/*.json.

A document has `date`, `commit`, `machine` (in words, never a name), `software`, `disks`, `command` and
`comparisons` (measurement.Comparison.as_json). Added by hand: `about`, how it came about, and `notes`, a
sentence on a section by its name. Where `runs` is empty the row was transcribed from a table: its spread is
not known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import tables

Document: TypeAlias = dict[str, Any]
FOLDER = Path(__file__).resolve().parent / "results"


def newest() -> Path:
    """The results that the documents show: the last by date, of one day the last by `time`."""
    files = sorted(FOLDER.glob("*.json"), key=lambda path: _when(load(path)))
    if not files:
        raise FileNotFoundError(f"{FOLDER} holds no results")
    return files[-1]


def shown(path: Path) -> Document:
    """What the documents show of a file: with rows of earlier files for peers that were not installed.

    Such a row is a whole one, ours and the peer's as measured together, with the date in `earlier` and beside
    the peer's name.
    """
    document = load(path)
    others = [load(other) for other in FOLDER.glob("*.json") if other.resolve() != path.resolve()]
    before = sorted((other for other in others if _when(other) <= _when(document)), key=_when, reverse=True)
    rows = [
        next((_dated(old, row) for old in before if _dated(old, row)), row) if row["value"] is None else row
        for row in document["comparisons"]
    ]
    return {**document, "comparisons": rows}


def _dated(document: Document, row: tables.Row) -> tables.Row:
    """The measured row of this case and peer, with the date; empty if there is none."""
    for old in document["comparisons"]:
        if key(old) == key(row) and old["value"] is not None:
            return {**old, "peer": f"{old['peer']} ({document['date']})", "earlier": document["date"]}
    return {}


def _when(document: Document) -> tuple[str, str]:
    return document["date"], document.get("time", "")


def load(path: Path) -> Document:
    """Read a document; ValueError if it is not of this version."""
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != 1:
        raise ValueError(f"{path}: these are not results of benchmarks/bench.py (schema 1)")
    return document


def key(row: tables.Row) -> tuple[str, str, str]:
    """What a row measures, beside whom."""
    return (row["section"], row["case"], row["peer"])


def merge(old: Document, new: Document) -> Document:
    """The new document, with what the old one has of sections that the new one did not measure.

    What describes the run is the new one's; its command is added to those of the old.
    """
    measured = {row["section"] for row in new["comparisons"]}
    kept = [row for row in old["comparisons"] if row["section"] not in measured]
    sections = dict.fromkeys(row["section"] for row in [*old["comparisons"], *new["comparisons"]])
    rows = [row for name in sections for row in [*kept, *new["comparisons"]] if row["section"] == name]
    merged = {**new, "comparisons": rows}
    if kept:
        commands = [old["command"], new["command"]]
        merged["command"] = "; ".join(dict.fromkeys(commands))
    notes = {name: text for name, text in old.get("notes", {}).items() if name not in measured}
    if notes:
        merged["notes"] = notes
    return merged
