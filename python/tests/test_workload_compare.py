"""Two runs of workloads side by side: their ratios, and what makes them hard to compare."""

import json
from pathlib import Path
from typing import Any

import pytest

from trunkline._readable import duration, quantity
from trunkline._sizes import size
from trunkline.workload import cli, compare


def results(**changes: Any) -> dict[str, Any]:
    """What a run came to, as far as it is compared."""
    base: dict[str, Any] = {"workload": "images", "ranks": 2, "null_device": False, "directories": ["/mnt/a"]}
    base |= {"utilization": 0.5, "gb_s": 2.0, "samples_per_second": 100.0, "running_seconds": 10.0}
    base |= {"wait_seconds": {"p50": 0.0, "p99": 0.004}, "evaluation": None, "steps": 40}
    base |= {"parameters": {"files": 12, "batch_size": 2}, "bounded_by_emulator": False}
    return {**base, **changes}


def test_ratios_of_the_figures() -> None:
    other = results(utilization=0.75, gb_s=3.0, wait_seconds={"p50": 0.001, "p99": 0.001})
    comparison = compare(results(), other)
    assert comparison["warnings"] == []
    rows = {row["figure"]: (row["a"], row["b"], row["ratio"]) for row in comparison["figures"]}
    assert rows == {
        "utilization": (0.5, 0.75, 1.5),
        "gb_s": (2.0, 3.0, 1.5),
        "samples_per_second": (100.0, 100.0, 1.0),
        "running_seconds": (10.0, 10.0, 1.0),
        "wait_seconds.p50": (0.0, 0.001, None),
        "wait_seconds.p99": (0.004, 0.001, 0.25),
    }


def test_a_figure_that_one_run_lacks_has_no_ratio() -> None:
    comparison = compare(results(), results(evaluation={"gb_s": 4.0}))
    assert {"figure": "evaluation.gb_s", "a": None, "b": 4.0, "ratio": None} in comparison["figures"]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"workload": "text"}, "workload differs: images and text"),
        ({"ranks": 8}, "ranks differs: 2 and 8"),
        ({"null_device": True}, "A used storage, B the null device"),
        ({"parameters": {"files": 24, "batch_size": 2}}, "files differs: 12 and 24"),
        ({"parameters": {"files": 12, "batch_size": 2, "epochs": 3}}, "epochs differs: None and 3"),
        ({"parameters": None, "steps": 80}, "steps differs: 40 and 80"),
        ({"bounded_by_emulator": True}, "B is bounded by the emulator: its storage may be faster"),
    ],
)
def test_what_is_hard_to_compare_is_a_warning(changes: dict[str, Any], warning: str) -> None:
    [said] = compare(results(), results(**changes))["warnings"]
    assert said.startswith(warning)


def test_other_disks_are_what_is_compared() -> None:
    assert compare(results(), results(directories=["/mnt/b", "/mnt/c"]))["warnings"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": "bench"}, "b is not the result of a run; give the output of `trunkline workload run"),
        (
            {"command": "workload run", "error": {"message": "no disk"}},
            r"b is of a run that failed \(no disk\); run",
        ),
        ({"schema": 2}, "b: schema 2 is not supported; upgrade trunkline"),
        ({"ranks": "2"}, "b is not the result of a run: it has no ranks; give"),
        ({"gb_s": "fast"}, "b: gb_s is fast, not a number"),
        ({"gb_s": True}, "b: gb_s is True, not a number"),
        ({"gb_s": float("nan")}, "b: gb_s is nan, not a number"),
        ({"gb_s": 10**400}, "b: gb_s is 1000.*, not a number"),
    ],
)
def test_what_is_not_a_result_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(results(), results(**changes))


def test_runs_are_compared_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(
        "model: {name: tiny}\nreader: {batch_size: 2}\ntrain: {computation_time: 0.0001}\n"
        "dataset: {format: jpeg, num_files_train: 8, record_length: 500}\n"
    )
    outputs = []
    for number, changed in enumerate(("train.epochs=2", "train.epochs=3")):
        command = ["workload", "run", str(file), "--null-device", "--json", "--set", changed]
        assert cli.main(command) == 0
        outputs.append(tmp_path / f"{number}.json")
        outputs[-1].write_text(capsys.readouterr().out)
    assert cli.main(["workload", "compare", *map(str, outputs), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["schema"]) == ("workload compare", 1)
    assert document["files"] == [str(each) for each in outputs]
    assert document["warnings"] == ["epochs differs: 2 and 3"]
    assert cli.main(["workload", "compare", *map(str, outputs)]) == 0
    text = capsys.readouterr().out
    assert f"A  {outputs[0]}: tiny, 1 accelerator, on the null device" in text
    assert "\nWARNING: epochs differs: 2 and 3\n" in text
    [row] = [line for line in text.splitlines() if line.startswith("compute_seconds")]
    assert row.split() == ["compute_seconds", "800", "us", "1.2", "ms", "1.500"]


def test_a_file_that_is_not_a_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    for text, message in (
        ("{", f"{file} is not valid JSON (Expecting"),
        ("[" * 100_000, f"{file} is not valid JSON (maximum recursion depth"),
        ("[]", f"{file} is not the result of a run; give the output of"),
    ):
        file.write_text(text)
        assert cli.main(["workload", "compare", str(file), str(file)]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["workload", "compare", str(tmp_path / "none"), str(file)]) == 1
    assert "no such file or directory (ENOENT); check the path\n" in capsys.readouterr().err


def test_numbers_are_readable() -> None:
    assert [duration(each) for each in (0, 2e-9, 0.00125, 119, 150, 7300, 2e5)] == [
        *("0", "2 ns", "1.25 ms", "119 s", "2.5 min", "2.03 h", "2.31 days")
    ]
    assert [quantity(each) for each in (0.00012, 999.5, 1000, 1.5e6)] == [
        *("0.00012", "999.5", "1,000", "1,500,000")
    ]
    assert [size(each) for each in (999, 1e3, 2.5e9, 5e15)] == ["999 B", "1 kB", "2.5 GB", "5e+03 TB"]
