"""Emulated trainings: what is read, what is counted, and what is wrong with the data or a rank."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trunkline import Corrupt, OutOfBudget
from trunkline.workload import Workload, _batch_memory, cli, load
from trunkline.workload._batch_memory import batch_memory_bytes
from trunkline.workload._generate import generate
from trunkline.workload._histogram import merged, percentile_seconds
from trunkline.workload._parse import parse_text
from trunkline.workload._phase import Order, order_of, reads_of
from trunkline.workload._ranks import run_ranks
from trunkline.workload._results import document_of, phase_results, text_of
from trunkline.workload._run import run
from trunkline.workload._samples import Units, units_of
from trunkline.workload._training import Job, is_evaluated, steps_of

SECTIONS = ("dataset", "reader", "train", "evaluation", "workflow", "metric")


def workload(**changes: Any) -> Workload:
    """Twelve files of a sample, in batches of two, in no time. `changes`: "section__key"."""
    document: dict[str, Any] = {name: {} for name in SECTIONS}
    document["model"] = {"name": "tiny"}
    document["dataset"] = {"format": "jpeg", "num_files_train": 12, "record_length_bytes": 5000}
    document["reader"] = {"batch_size": 2, "read_threads": 2, "sample_shuffle": "seed"}
    document["train"] = {"computation_time": 0.0002, "epochs": 3}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        document[section][name] = value
    return parse_text(json.dumps(document), "tiny.yaml")


def ran(spec: Workload, *directories: Path, ranks: int = 1) -> dict[str, Any]:
    generate(spec, list(directories))
    return run(spec, list(directories), ranks)


def test_every_sample_is_read_in_every_epoch(tmp_path: Path) -> None:
    document = ran(workload(), tmp_path / "a", tmp_path / "b")
    assert document["steps"] == 18
    assert document["samples"] == 36
    assert document["bytes"] == 36 * 5000
    assert [each["steps"] for each in document["epochs"]] == [6, 6, 6]
    assert document["compute_seconds"] == pytest.approx(18 * 0.0002)
    assert 0 < document["utilization"] <= 1
    assert 0 < document["utilization_dlio"] <= 1
    assert document["running_seconds"] == pytest.approx(
        document["compute_seconds"] + document["waited_seconds"]
    )
    assert sum(count for _, count in document["step_histogram_ns"]) == 17
    assert document["null_device"] is False
    assert document["parameters"]["files"] == 12
    assert document["parameters"]["batch_size"] == 2
    assert document["emulator"]["steps"] == 18  # all that there are
    text_of(document)


@pytest.mark.parametrize(
    ("changes", "sample_bytes"),
    [
        ({"dataset__format": "npz"}, None),
        ({"dataset__format": "npz", "dataset__num_samples_per_file": 3}, 5000 + 128 + 56),
        ({"dataset__format": "npy"}, 5000 + 128),
        ({"dataset__format": "npy", "dataset__num_samples_per_file": 3}, 5000),
        ({"dataset__format": "tfrecord", "dataset__num_samples_per_file": 3}, 5000),
        ({"dataset__format": "indexed_binary", "dataset__num_samples_per_file": 3}, 5000),
        ({"dataset__format": "png", "dataset__num_subfolders_train": 3}, 5000),
    ],
)
def test_all_formats_are_read(tmp_path: Path, changes: dict[str, Any], sample_bytes: int | None) -> None:
    spec = workload(**changes)
    document = ran(spec, tmp_path / "a", tmp_path / "b")
    samples = 3 * 12 * spec.dataset.samples_per_file
    assert document["samples"] == samples
    if sample_bytes is not None:
        assert document["bytes"] == samples * sample_bytes
    else:
        stored = sum(path.stat().st_size for path in tmp_path.rglob("*.npz"))
        assert document["bytes"] == 3 * stored


def test_of_parquet_the_chosen_columns_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    columns = [{"name": "a", "dtype": "float32"}, {"name": "b", "size": 1000, "read": False}]
    parquet = {"columns": columns, "row_group_size": 40}
    spec = workload(
        dataset__format="parquet",
        dataset__parquet=parquet,
        dataset__num_samples_per_file=100,
        dataset__record_length_bytes=4004,
        reader__batch_size=60,
    )
    document = ran(spec, tmp_path)
    assert document["steps"] == 3 * (1200 // 60)
    assert document["samples"] == 3 * 1200
    assert 3 * 1200 * 4 <= document["bytes"] < 3 * 1200 * 4 + 3 * 36 * 100  # with headers of pages


def test_the_null_device_needs_no_data() -> None:
    document = run(workload(dataset__num_files_train=2000, train__epochs=1), None)
    assert document["null_device"] is True
    assert document["steps"] == 1000
    assert document["bytes"] == 0
    assert document["emulator"]["utilization"] == document["utilization"]
    assert "on the null device" in text_of(document)


def test_the_null_device_may_have_a_speed() -> None:
    spec = workload(dataset__num_files_train=400, train__epochs=1)
    document = run(spec, None, device_gb_s=0.02)  # 2 x 5000 bytes in 0.5 ms; a step computes for 0.2 ms
    assert document["null_device"] is True
    assert document["device_gb_s"] == 0.02
    assert document["bytes"] == 400 * 5000
    assert document["utilization"] < 0.45
    assert document["running_seconds"] > 199 * 0.0005
    assert document["emulator"]["steps"] == 200  # on a device without a speed
    assert "on an imagined device of 0.02 GB/s" in text_of(document)
    with pytest.raises(ValueError, match="device_gb_s: must be above 0, not 0"):
        run(spec, None, device_gb_s=0)
    with pytest.raises(ValueError, match="device_gb_s: only for the null device; pass None as directories"):
        run(spec, ["/data"], device_gb_s=1)


def test_evaluations_come_between_epochs_and_count_apart(tmp_path: Path) -> None:
    spec = workload(
        workflow__evaluation=True,
        dataset__num_files_eval=4,
        evaluation__eval_time=0.0001,
        evaluation__eval_after_epoch=2,
        train__epochs=5,
    )
    document = ran(spec, tmp_path)
    assert document["steps"] == 30
    evaluation = document["evaluation"]
    assert evaluation["steps"] == 4 * 4  # after epochs 2, 3, 4 and 5
    assert evaluation["bytes"] == 16 * 5000
    assert "evaluation" in text_of(document)
    every_second = workload(
        workflow__evaluation=True,
        dataset__num_files_eval=4,
        evaluation__eval_time=0,
        evaluation__epochs_between_evals=2,
    ).evaluation
    assert [epoch for epoch in range(1, 8) if is_evaluated(every_second, epoch)] == [1, 3, 5, 7]


def test_steps_are_bounded() -> None:
    spec = workload(train__total_training_steps=8)
    assert steps_of(spec, 6, None) == [6, 2]
    assert steps_of(spec, 6, 3) == [3]
    assert steps_of(workload(), 6, None) == [6, 6, 6]


def test_data_that_is_missing_or_another_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^directories: there is no directory .*/mistyped; check the path$"):
        run(workload(), [tmp_path / "mistyped"])
    with pytest.raises(ValueError, match="no folder train in .*; make the data set with"):
        run(workload(), [tmp_path])
    generate(workload(), [tmp_path])
    with pytest.raises(ValueError, match="was generated with a different record_bytes"):
        run(workload(dataset__record_length_bytes=6000), [tmp_path])
    (tmp_path / "train/img_05_of_12.jpeg").unlink()
    with pytest.raises(ValueError, match="train: 11 samples, but tiny has 12; make the missing ones with"):
        run(workload(), [tmp_path])
    with pytest.raises(ValueError, match="tiny has no training: workflow.train is false"):
        run(workload(workflow__train=False), [tmp_path])
    with pytest.raises(
        ValueError, match="tiny has 12 samples in train, and a step needs 8 for each of 2 ranks"
    ):
        run(workload(reader__batch_size=8), None, 2)


def test_directories_are_all_given_in_their_order(tmp_path: Path) -> None:
    both = [tmp_path / "a", tmp_path / "b"]
    generate(workload(), both)
    with pytest.raises(ValueError, match="was generated as directory 1 of 2; pass exactly these 2"):
        run(workload(), both[:1])
    with pytest.raises(ValueError, match="these 2, in their order"):
        run(workload(), both[::-1])
    (tmp_path / "c").mkdir()
    with pytest.raises(ValueError, match="has no trunkline-workload.json"):
        run(workload(), [both[0], tmp_path / "c"])


def test_a_scaled_data_set_is_found_as_it_is(tmp_path: Path) -> None:
    generate(workload(dataset__num_files_train=6), [tmp_path])
    assert run(workload(), [tmp_path])["steps"] == 9  # 6 of the declared 12 files are there


def test_a_number_of_files_without_effect_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(workload(dataset__num_files_train=6), [tmp_path / "data"])
    file = tmp_path / "tiny.yaml"
    file.write_text(
        "model: {name: tiny}\ndataset: {format: jpeg, num_files_train: 12, record_length_bytes: 5000}\n"
        "reader: {batch_size: 2}\ntrain: {computation_time: 0.001}\n"
    )
    command = ["workload", "run", str(file), "--data", str(tmp_path / "data")]
    assert cli.main([*command, "--set", "dataset.num_files_train=64"]) == 0
    err = capsys.readouterr().err
    assert "--set dataset.num_files_train=64 has no effect: 6 files were generated in" in err
    assert cli.main(command) == 0
    assert "no effect" not in capsys.readouterr().err


def test_data_of_others_is_read(tmp_path: Path) -> None:
    """As DLIO writes it: without a descriptor."""
    generate(workload(), [tmp_path])
    (tmp_path / "trunkline-workload.json").unlink()
    assert run(workload(), [tmp_path])["samples"] == 36


def test_damage_is_an_error(tmp_path: Path) -> None:
    spec = workload(dataset__format="tfrecord")
    generate(spec, [tmp_path])
    [damaged] = tmp_path.rglob("img_07_*")
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(Corrupt, match="img_07_of_12"):
        run(spec, [tmp_path])


def test_ranks_share_the_samples_and_step_together(tmp_path: Path) -> None:
    document = ran(workload(), tmp_path, ranks=3)
    assert document["ranks"] == 3
    assert document["steps"] == 6  # 12 samples of 3 x 2
    assert "over the ranks      " in text_of(document)
    assert document["samples"] == 36
    assert document["bytes"] == 36 * 5000
    assert [rank["bytes"] for rank in document["per_rank"]] == [12 * 5000] * 3
    assert sum(count for _, count in document["step_histogram_ns"]) == 3 * 5


def test_ranks_evaluate_together(tmp_path: Path) -> None:
    spec = workload(
        workflow__evaluation=True, dataset__num_files_eval=5, evaluation__eval_time=0.0001, train__epochs=4
    )
    document = ran(spec, tmp_path, ranks=2)
    assert document["steps"] == 4 * 3
    assert document["evaluation"]["steps"] == 4 * 2  # 5 samples of 2 x 1
    assert document["evaluation"]["bytes"] == 4 * 4 * 5000


def test_the_error_of_a_rank_names_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = workload(dataset__format="tfrecord")
    generate(spec, [tmp_path])
    run(spec, [tmp_path])  # makes the index
    [damaged] = tmp_path.rglob("img_07_*")
    stamp = damaged.stat()
    with damaged.open("r+b") as file:
        file.seek(100)
        file.write(b"\0\1\2\3")
    os.utime(damaged, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(OSError, match=r"rank [01] failed with exit status 1; the run is not complete"):
        run(spec, [tmp_path], 2)
    assert "img_07_of_12" in capfd.readouterr().err


def _children(process: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{process}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return found


def _wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def test_a_rank_that_dies_ends_the_run_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text(
        "model: {name: slow}\ndataset: {format: jpeg, num_files_train: 1000000, record_length_bytes: 10}\n"
        "reader: {batch_size: 1}\ntrain: {computation_time: 0.001}\n"
    )
    command = [
        sys.executable,
        "-m",
        "trunkline",
        "workload",
        "run",
        str(file),
        "--null-device",
        "--ranks",
        "3",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        ranks = _wait_for(lambda: len(found := _children(process.pid)) == 3 and found)
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL; the run is not complete" in errors
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_an_interrupt_ends_the_run(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text(
        "dataset: {format: jpeg, num_files_train: 1000, record_length_bytes: 10}\n"
        "reader: {batch_size: 1}\ntrain: {computation_time: 100}\n"
    )
    program = (
        "import sys, threading, signal, os, time\n"
        "from trunkline.workload import cli, _training\n"
        "real = _training.Phase.run_epoch\n"
        "def begin(self, steps, tick, *more):\n"
        "    real(self, steps, lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "_training.Phase.run_epoch = begin\n"
        "sys.exit(cli.main(['workload', 'run', sys.argv[1], '--null-device']))\n"
    )
    command = [sys.executable, "-c", program, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 130, done.stderr
    assert "interrupted" in done.stderr


def test_orders_follow_from_the_shuffles() -> None:
    def order(samples: int, **reader: str) -> Order:
        spec = workload(
            dataset__format="npz",
            dataset__num_samples_per_file=samples,
            **{f"reader__{key}": value for key, value in reader.items()},
        )
        assert spec.reader is not None
        return order_of(spec.dataset, spec.reader, units_of(spec.dataset, 12), 5, directories=3)

    assert order(1, sample_shuffle="seed") == Order(1, 5)
    assert order(7, sample_shuffle="seed") == Order(1, 5)
    assert order(1, sample_shuffle="random") == Order(1, 5)  # all ranks have the seed of the run
    assert order(7, sample_shuffle="off", file_shuffle="seed") == Order(7, 5)
    assert order(1, sample_shuffle="off", file_shuffle="seed") == Order(1, 5)
    assert order(7, sample_shuffle="off") == Order(0, 5, files_at_a_time=3, chunk=7)  # directories in turns


def test_threads_read_tfrecord_files_side_by_side() -> None:
    def order(ranks: int, directories: int, **reader: str) -> Order:
        spec = workload(
            dataset__format="tfrecord",
            dataset__num_samples_per_file=100,
            reader__batch_size=10,
            reader__read_threads=4,
            **{f"reader__{key}": value for key, value in reader.items()},
        )
        assert spec.reader is not None
        return order_of(spec.dataset, spec.reader, units_of(spec.dataset, 12), 5, ranks, directories)

    assert order(1, 1, sample_shuffle="off") == Order(0, 5, files_at_a_time=4, chunk=2)
    assert order(2, 1, sample_shuffle="off") == Order(0, 5, files_at_a_time=8, chunk=2)
    assert order(1, 6, sample_shuffle="off") == Order(0, 5, files_at_a_time=6, chunk=2)
    shuffled = order(1, 1, sample_shuffle="off", file_shuffle="seed")
    assert shuffled == Order(100, 5, files_at_a_time=4, chunk=2)
    assert order(1, 1, sample_shuffle="seed") == Order(1, 5)


def test_progress_of_several_ranks_is_reported() -> None:
    reports: list[tuple[int, float]] = []

    def report(done: int, utilization: float = -1.0) -> None:
        reports.append((done, utilization))

    spec = workload(train__computation_time=0.05, train__total_training_steps=20)
    assert spec.train is not None
    run_ranks(Job(spec, None), 2, report)
    done = [steps for steps, _ in reports]
    assert done == sorted(done)
    assert 0 < done[-1] <= 20
    assert all(0 < utilization <= 1 for steps, utilization in reports if steps > 2)


def test_units_and_slots() -> None:
    spec = workload(
        dataset__format="parquet", dataset__num_samples_per_file=100, dataset__parquet={"row_group_size": 40}
    )
    assert units_of(spec.dataset, 3) == Units(9, 3, 40, 20)
    assert units_of(workload().dataset, 3) == Units(3, 1, 1, 1)
    assert reads_of(4, 7, Units(100, 1, 1, 1)) == (5, 7)
    assert reads_of(1, 1, Units(100, 1, 1, 1)) == (2, 1)
    assert reads_of(8, 48, Units(100, 1, 288, 288)) == (3, 1)  # a read is good for six batches
    assert reads_of(4, 16384, Units(100, 10, 6144, 6144)) == (8, 2)


def test_memory_that_batches_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_memory_bytes(load("unet3d_h100")) == pytest.approx(5 * 7 * 146600628)
    assert batch_memory_bytes(load("dlrm_b200")) == 8 * 2 * 6144 * 160
    generate(workload(), [tmp_path])
    monkeypatch.setattr(_batch_memory, "free_memory_bytes", lambda: 10_000)
    with pytest.raises(OutOfBudget, match="batches that tiny reads ahead need 0.00 GB of memory"):
        run(workload(), [tmp_path])
    run(workload(), None)


def counts(**changes: Any) -> dict[str, Any]:
    """Counts of a rank: 10 steps of 100 ms, the first of which waited 900 ms, and one more 500 ms."""
    base = {"steps": 10, "samples": 20, "bytes": 2_000_000_000, "busy_ns": 1_000_000_000}
    base |= {"running_ns": 2_400_000_000, "first_busy_ns": 100_000_000, "first_running_ns": 1_000_000_000}
    base |= {"late_loop_ns": 0, "loop_cpu_ns": 1_000_000}
    lists: dict[str, Any] = {
        "step_times": [(100_000_000, 8), (600_000_000, 1)],
        "waits": [(0, 8), (500_000_000, 1)],
        "time_line": {"width_ns": 1 << 20, "first": 0, "compute_ns": [], "wait_ns": [], "bytes": []},
        "epochs": [(5, 400_000_000, 400_000_000), (5, 400_000_000, 900_000_000)],
    }
    return {**base, **lists, **changes}


def test_utilization_by_the_rule_and_by_the_code() -> None:
    results = phase_results([counts()])
    assert results["utilization"] == pytest.approx(900 / 1400)
    assert results["utilization_dlio"] == pytest.approx((1 + 4 / 9) / 2)
    assert results["gb_s"] == pytest.approx(2 / 2.4)
    assert results["samples_per_second"] == pytest.approx(20 / 2.4)
    assert results["waited_seconds"] == pytest.approx(1.4)
    assert results["step_seconds"] == {"p50": 0.1, "p90": 0.6, "p99": 0.6, "p99.9": 0.6, "max": 0.6}


def document(**changes: Any) -> dict[str, Any]:
    """The document of a run on one rank with these counts."""
    rank = {
        "train": counts(**changes),
        "evaluation": None,
        "checkpoints": None,
        "reads_in_flight": [],
        "open_seconds": 0,
        "wall_seconds": 1,
    }
    proof = {"utilization": 1.0, "steps": 3, "loop_cpu_seconds": 0.1, "running_seconds": 1}
    return document_of(workload(metric__au=0.5), [rank], proof, ["/data"])


def test_a_single_step_measures_no_utilization() -> None:
    only = {"busy_ns": 100_000_000, "running_ns": 1_000_000_000, "epochs": [(1, 0, 0)]}
    single = document(steps=1, step_times=[], waits=[], **only)
    assert single["utilization"] is single["utilization_dlio"] is None
    assert single["target_reached"] is None
    assert single["epochs"][0]["utilization"] is single["per_rank"][0]["utilization"] is None
    text = text_of(single)
    assert "utilization         not measurable: there was only the first step, which is left out\n" in text
    assert "by DLIO's code      not measured" in text
    assert "100.00% without" not in text
    assert "FEW STEPS: only 0 were measured" in text


def test_a_run_on_one_step_reports_no_utilization(tmp_path: Path) -> None:
    single = workload(dataset__num_files_train=2, reader__batch_size=2, train__epochs=1)
    generate(single, [tmp_path])
    result = run(single, [tmp_path])
    assert (result["steps"], result["utilization"]) == (1, None)
    assert result["bounded_by_emulator"] is False
    text_of(result)


@pytest.mark.parametrize(("steps", "is_few"), [(20, True), (21, False)])
def test_few_steps_are_said_and_the_first_is_left_out(steps: int, is_few: bool) -> None:
    text = text_of(document(steps=steps))
    assert "64.29% without the first step (target 50%: reached)" in text
    assert ("FEW STEPS: only 19 were measured" in text) is is_few


def test_ranks_are_added_up() -> None:
    slow = counts(running_ns=3_400_000_000, bytes=1_000_000_000)
    results = phase_results([counts(), slow])
    assert results["utilization"] == pytest.approx((900 / 1400 + 900 / 2400) / 2)
    assert results["gb_s"] == pytest.approx(3 / 3.4)
    assert results["step_histogram_ns"] == [[100_000_000, 16], [600_000_000, 2]]


def test_a_bound_of_the_emulator_is_said() -> None:
    def document(emulator: float, late_ns: int) -> dict[str, Any]:
        rank = {
            "train": counts(late_loop_ns=late_ns),
            "evaluation": None,
            "checkpoints": None,
            "reads_in_flight": [],
            "open_seconds": 0,
            "wall_seconds": 1,
        }
        proof = {"utilization": emulator, "steps": 3, "loop_cpu_seconds": 0.1, "running_seconds": 1}
        return document_of(workload(metric__au=0.5), [rank], proof, ["/data"])

    fine = document(0.995, 0)
    assert fine["bounded_by_emulator"] is False
    assert fine["target_reached"] is True
    assert "BOUNDED" not in text_of(fine)
    assert document(0.98, 0)["bounded_by_emulator"] is True
    late = document(0.995, 100_000_000)
    assert late["bounded_by_emulator"] is True
    assert "BOUNDED BY THE EMULATOR" in text_of(late)


def test_histograms_merge_exactly() -> None:
    one, other = [(10, 1), (20, 2)], [(20, 5), (30, 1)]
    both = merged([one, other])
    assert both == [(10, 1), (20, 7), (30, 1)]
    assert percentile_seconds(both, 50) == 20e-9
    assert percentile_seconds(both, 100) == 30e-9
    assert percentile_seconds([], 50) == 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(
        "model: {name: tiny}\nreader: {batch_size: 2, pin_memory: true}\ntrain: {computation_time: 0.0001}\n"
        "dataset: {format: jpeg, num_files_train: 8, record_length: 500}\nmetric: {au: 0.000001}\n"
    )
    data = ["--data", str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(["workload", "generate", str(file), *data]) == 0
    capsys.readouterr()
    assert cli.main(["workload", "run", str(file), *data, "--set", "train.epochs=2", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert (document["command"], document["schema"], document["steps"]) == ("workload run", 1, 8)
    assert document["target_reached"] is True
    assert "reader.pin_memory: ignored: memory is always pinned" in captured.err
    assert cli.main(["workload", "run", str(file), *data]) == 0
    assert "tiny, 1 accelerator, on" in capsys.readouterr().out
    for wrong in (
        [],
        [*data, "--null-device"],
        [*data, "--ranks", "0"],
        [*data, "--device-gb-s", "1"],
        ["--null-device", "--device-gb-s", "0"],
    ):
        assert cli.main(["workload", "run", str(file), *wrong]) == 2
