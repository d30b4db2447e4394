"""What `make demo` prints fits into a terminal of 80 columns."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("matplotlib")


def test_lines_of_the_report_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    demo_report = importlib.import_module("demo_report")

    rows = [
        demo_report.Measured(
            "load", "Trunkline: safetensors read again in place", "trunkline", "", [1, 9], [0.1]
        ),
        demo_report.Measured("load", "fio read: 1 MiB blocks, depth 32", "fio", "", [2, 3], [0.2]),
    ]
    lines = demo_report.table(rows).split("\n")
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80

    text = "  a table    keeps its spaces\n" + "words " * 40 + "\n\nend\n"
    wrapped = demo_report.wrapped(text)
    assert max(map(len, wrapped.split("\n"))) <= 80
    assert wrapped.startswith("  a table    keeps its spaces\n")
    assert wrapped.endswith("\n\nend\n")
    assert wrapped.split() == text.split()


def test_the_table_of_generating_fits_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), str(EXAMPLES.parent / "benchmarks"), *sys.path])
    run = {"tokens_per_second": 12.3, "memory_bytes": 6e8, "first_token_seconds": 1.25}
    stats = {"wait_seconds": 1, "seconds": 2, "streamed_bytes": 3e8}
    streamed = {**run, "stats": stats}
    result = {"in_memory": run, "streamed": streamed, "budget_bytes": 3e8, "weight_bytes": 6e8}

    table = importlib.import_module("larger_than_memory").table(result)
    shown = importlib.import_module("demo_report").wrapped(table)

    assert shown.split("\n")[:3] == table.split("\n")[:3], "a row of the table was wrapped"
    assert max(map(len, shown.split("\n"))) <= 80
