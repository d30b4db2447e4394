"""Kept results of benchmarks: what compare.py says of two files, and what the documents show."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def row(case: str, unit: str, runs: list[float], peer_runs: list[float], peer: str = "fio") -> dict[str, Any]:
    median, theirs = sorted(runs)[len(runs) // 2], sorted(peer_runs)[len(peer_runs) // 2]
    return {
        "section": "reading",
        "case": case,
        "unit": unit,
        "runs": runs,
        "median": median,
        "peer": peer,
        "peer_runs": peer_runs,
        "peer_median": theirs,
        "compared": "ratio",
        "value": median / theirs,
        "goal": ">= 0.9",
        "met": median / theirs >= 0.9,
        "why_not": None,
    }


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "date": "2026-01-02",
        "commit": "0123456",
        "machine": "2 cores, 24 GiB",
        "software": "fio 3.33",
        "disks": "4 disks",
        "command": "make bench",
        "comparisons": list(rows),
    }


def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, *arguments], capture_output=True, text=True, check=False
    )


def compare(
    folder: Path, old: dict[str, Any], new: dict[str, Any], *options: str
) -> subprocess.CompletedProcess[str]:
    for name, document in (("old.json", old), ("new.json", new)):
        (folder / name).write_text(json.dumps(document))
    return run("compare.py", folder / "old.json", folder / "new.json", *options)


SPEED = row("one disk", "GB/s", [1.0, 1.01, 0.99], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("unit", "factor", "verdict", "status"),
    [
        ("GB/s", 0.8, "worse", 1),
        ("GB/s", 1.25, "better", 0),
        ("GB/s", 0.97, "same", 0),
        ("CPU s/GB", 1.25, "worse", 1),
        ("s", 0.8, "better", 0),
    ],
)
def test_what_became_slower_is_worse(
    tmp_path: Path, unit: str, factor: float, verdict: str, status: int
) -> None:
    old = {**SPEED, "unit": unit}
    new = {**old, "median": old["median"] * factor, "runs": [run * factor for run in old["runs"]]}
    done = compare(tmp_path, results(old), results(new), "--json")
    assert done.returncode == status, done.stderr
    [change] = json.loads(done.stdout)["changes"]
    assert change["verdict"] == verdict


def test_a_change_within_the_spread_of_the_rounds_is_none(tmp_path: Path) -> None:
    old = row("one disk", "GB/s", [0.8, 1.0, 1.2], [1.0, 1.0, 1.0])
    new = row("one disk", "GB/s", [0.6, 0.8, 1.0], [1.0, 1.0, 1.0])
    done = compare(tmp_path, results(old), results(new))
    assert done.returncode == 0
    assert done.stdout == "0 worse, 0 better, 1 same\n"


def test_a_machine_that_became_slower_for_all_is_none_of_ours(tmp_path: Path) -> None:
    new = row("one disk", "GB/s", [0.5, 0.505, 0.495], [0.5, 0.5, 0.5])
    assert compare(tmp_path, results(SPEED), results(new)).returncode == 0


def test_what_only_one_file_has_is_named(tmp_path: Path) -> None:
    other = {**SPEED, "case": "four disks"}
    done = compare(tmp_path, results(SPEED, other), results(SPEED))
    assert done.returncode == 0
    assert "reading, four disks, fio: only in the old results" in done.stdout


def test_files_that_are_no_results_are_wrong_usage(tmp_path: Path) -> None:
    done = compare(tmp_path, results(SPEED), {"comparisons": []})
    assert done.returncode == 2
    assert "these are not results" in done.stderr


def test_sections_of_an_earlier_run_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import kept_results

    saving = {**SPEED, "section": "saving", "case": "kept"}
    old = {
        **results({**SPEED, "case": "before"}, saving),
        "notes": {"reading": "measured too early", "saving": "kept"},
    }
    new = {**results({**SPEED, "case": "anew"}), "command": "make bench --only reading"}
    before = copy.deepcopy(old)
    merged = kept_results.merge(old, new)
    assert [each["case"] for each in merged["comparisons"]] == ["anew", "kept"]
    assert merged["command"] == "make bench; make bench --only reading"
    assert merged["notes"] == {"saving": "kept"}
    assert old == before


def test_kept_results_are_whole() -> None:
    files = sorted((BENCHMARKS / "results").glob("*.json"))
    assert files
    for file in files:
        document = json.loads(file.read_text(encoding="utf-8"))
        assert document["schema"] == 1
        assert {"date", "machine", "disks", "command", "comparisons"} <= document.keys()
        transcribed = "ranscribed" in document.get("about", "")
        assert all(each["runs"] or each["why_not"] or transcribed for each in document["comparisons"])


def test_documents_show_the_newest_results() -> None:
    pytest.importorskip("matplotlib")
    done = run("make_tables.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore")
def test_the_document_shows_what_is_predicted_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import which_model

    shown = which_model.DOCUMENT.read_text(encoding="utf-8").splitlines()
    for model in which_model.MODELS:
        if model.name in ("Mixtral-8x7B", "gpt-oss-20b"):
            assert which_model.row(model) in shown


def test_a_peer_that_was_not_installed_is_shown_from_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import kept_results

    monkeypatch.setattr(kept_results, "FOLDER", tmp_path)
    missing = {"value": None, "why_not": "it is not installed"}
    other = row("one disk", "GB/s", [1.0], [0.9], "fio")
    runs = {
        "2026-01-01": [row("one disk", "GB/s", [0.8], [0.4], "DeepSpeed")],
        "2026-01-02": [row("one disk", "GB/s", [0.9], [0.5], "DeepSpeed"), other],
        "2026-01-03": [{**row("one disk", "GB/s", [1.0], [0.0001], "DeepSpeed"), **missing}, other],
        "2026-01-04": [row("one disk", "GB/s", [0.7], [0.7], "DeepSpeed")],  # later
    }
    for date, rows in runs.items():
        (tmp_path / f"{date}.json").write_text(json.dumps({**results(*rows), "date": date}))
    shown = kept_results.shown(tmp_path / "2026-01-03.json")["comparisons"]
    assert [(each["peer"], each["median"], each["peer_median"]) for each in shown] == [
        ("DeepSpeed (2026-01-02)", 0.9, 0.5),
        ("fio", 1.0, 0.9),
    ]
