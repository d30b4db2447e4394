"""What `make demo` prints fits into a terminal of 80 columns."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytest.importorskip("matplotlib")


def test_lines_of_the_report_fit_into_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import demo_report

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
