"""Emulated inferences: arrivals, latencies and deadlines, batches, the model that is loaded, and the log."""

import json
import os
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from trunkline import Corrupt, Unsupported
from trunkline.workload import Workload, _batch_memory, _inference_log, cli
from trunkline.workload._generate import generate
from trunkline.workload._inference_log import InferenceLog
from trunkline.workload._inference_rank import arrival_times_ns
from trunkline.workload._inference_results import inference_document, text_of_inference
from trunkline.workload._parse import parse_text
from trunkline.workload._run import run
from trunkline.workload._spec import Logging, Normal

TEXT = """\
model: {name: tiny}
workflow: {inference: true}
dataset: {format: jpeg, num_files_train: 12, record_length_bytes: 5000}
inference:
  queries: 20
  arrival_rate: 2000
  computation_time: 0.0002
"""
LOG = "inference.logging={record_bytes: 100, fsync: group, group: 8}"


def workload(*overrides: str, **inference: Any) -> Workload:
    overrides += tuple(f"inference.{key}={value}" for key, value in inference.items())
    return parse_text(TEXT, "tiny.yaml", overrides)


def ran(spec: Workload, *directories: Path, **options: Any) -> dict[str, Any]:
    generate(spec, list(directories))
    return run(spec, list(directories), **options)


def test_queries_are_answered_one_at_a_time(tmp_path: Path) -> None:
    document = ran(workload(deadline=60), tmp_path / "a", tmp_path / "b")
    assert (document["mode"], document["queries"], document["samples"]) == ("server", 20, 20)
    assert document["bytes"] == 20 * 5000
    assert document["latency_seconds"]["p50"] >= 0.0002
    assert document["running_seconds"] >= 20 * 0.0002
    assert 0 < document["utilization"] <= 1
    assert sum(count for _, count in document["latency_histogram_ns"]) == 20
    assert document["deadline"]["within"] == 1.0
    assert document["deadline"]["reached"] is True
    assert (document["load"], document["log"], document["logs"]) == (None, None, None)
    text = text_of_inference(json.loads(json.dumps(document)))
    assert "tiny, inference in server mode on 1 accelerator" in text
    assert "  deadline            60 s for 99 % of the queries: reached, 100.00% are within it" in text


def test_a_queue_builds_up_when_queries_arrive_too_fast(tmp_path: Path) -> None:
    """20 queries within a microsecond, 5 ms each: the last one waits for 19 others."""
    document = ran(workload(arrival_rate=1e9, computation_time=0.005, deadline=0.049), tmp_path)
    assert document["queue_seconds"]["max"] >= 19 * 0.005
    assert document["latency_seconds"]["max"] >= 20 * 0.005
    assert document["deadline"]["within"] <= 9 / 20
    assert document["deadline"]["reached"] is False
    assert "missed" in text_of_inference(document)


def test_arrivals_are_a_poisson_process() -> None:
    times = arrival_times_ns(100.0, 20_000, 7, 0)
    gaps = [after - before for before, after in zip([0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1e7, rel=0.03)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)  # as of an exponential distribution
    assert times == arrival_times_ns(100.0, 20_000, 7, 0)
    assert times != arrival_times_ns(100.0, 20_000, 7, 1)


def test_batches_are_computed_on(tmp_path: Path) -> None:
    document = ran(workload(mode="offline", queries=7, batch_size=4, shuffle="false"), tmp_path)
    assert (document["mode"], document["queries"], document["samples"]) == ("offline", 7, 28)
    assert document["bytes"] == 28 * 5000
    assert document["running_seconds"] >= 7 * 0.0002
    assert document["deadline"] is None
    assert "  batches             7 in" in text_of_inference(document)


@pytest.mark.parametrize("format_", ["npz", "npy", "tfrecord", "indexed_binary"])
@pytest.mark.parametrize("mode", ["server", "offline"])
def test_formats_are_read(tmp_path: Path, format_: str, mode: str) -> None:
    spec = workload(f"dataset.format={format_}", "dataset.num_samples_per_file=3", mode=mode, batch_size=2)
    document = ran(spec, tmp_path)
    assert document["samples"] == 40
    assert document["bytes"] >= 40 * 5000


def test_several_ranks_load_the_model_answer_and_log(tmp_path: Path) -> None:
    spec = workload(LOG, model_size_bytes=3_000_000, queries=5)
    document = ran(spec, tmp_path, ranks=2)
    assert document["queries"] == 10
    assert document["load"]["bytes"] == 6_000_000
    assert document["log"]["records"] == 10
    assert document["log"]["syncs"] == 2  # at the end of each
    logs = Path(document["logs"])
    assert sorted(path.name for path in logs.iterdir()) == ["rank00000.log", "rank00001.log"]
    assert [path.stat().st_size for path in logs.iterdir()] == [500, 500]


def test_logs_are_kept_unless_they_are_to_be_removed(tmp_path: Path) -> None:
    spec = workload(LOG)
    first = ran(spec, tmp_path)
    second = run(spec, [tmp_path], remove=True)
    assert second["logs"] is None
    assert [path.name for path in (tmp_path / "inference-logs").iterdir()] == ["000001"]
    assert first["logs"] == str(tmp_path / "inference-logs" / "000001")
    assert (first["log"]["records"], first["log"]["bytes"], first["log"]["syncs"]) == (20, 2000, 3)
    assert "20 records, 2 kB, 3 times made durable (group)" in text_of_inference(first)
    assert ", removed" in text_of_inference(second)


def test_nothing_is_left_of_a_log_folder_that_was_not_there(tmp_path: Path) -> None:
    ran(workload(LOG), tmp_path, remove=True)
    assert not (tmp_path / "inference-logs").exists()


def test_a_run_that_fails_leaves_no_logs(tmp_path: Path) -> None:
    spec = workload("dataset.format=tfrecord", LOG, queries=200)
    generate(spec, [tmp_path])
    for damaged in tmp_path.rglob("img_*_of_12.tfrecord"):
        data = bytearray(damaged.read_bytes())
        data[100] ^= 1
        damaged.write_bytes(data)
    with pytest.raises(Corrupt, match="img_"):
        run(spec, [tmp_path])
    assert not (tmp_path / "inference-logs").exists()


@pytest.mark.parametrize(
    ("logging", "seconds", "syncs"),
    [
        (Logging(10, "each", 0, 0.0), [0] * 6, [1, 2, 3, 4, 5, 6, 6]),
        (Logging(10, "group", 4, 0.0), [0] * 6, [0, 0, 0, 1, 1, 1, 2]),
        (Logging(10, "interval", 0, 3.0), [1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 1, 2, 2]),
        (Logging(10, "off", 0, 0.0), [0] * 6, [0] * 7),
    ],
)
def test_when_records_are_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logging: Logging, seconds: list[int], syncs: list[int]
) -> None:
    calls: list[int] = []
    clock = iter([0])
    monkeypatch.setattr(os, "fdatasync", calls.append)
    monkeypatch.setattr(_inference_log.time, "monotonic", lambda: next(clock))
    log = InferenceLog(logging, tmp_path / "log", 1)
    found = []
    for second in seconds:
        clock = repeat(second)
        log.append(1)
        found.append(len(calls))
    counts = log.finish()
    log.close()
    assert [*found, len(calls)] == syncs
    assert (counts["records"], counts["bytes"], counts["syncs"]) == (6, 60, syncs[-1])
    assert (tmp_path / "log").stat().st_size == 60
    with pytest.raises(FileExistsError):
        InferenceLog(logging, tmp_path / "log", 1)


def test_the_model_is_written_once_and_compared(tmp_path: Path) -> None:
    spec = workload(model_size_bytes=3_000_001, queries=1)
    document = ran(spec, tmp_path)
    assert document["load"]["bytes"] == 3_000_001
    path = tmp_path / "model" / "weights.safetensors"
    before = path.stat()
    generate(spec, [tmp_path])
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(FileExistsError, match="is not a model of 9000000 bytes, and is not replaced"):
        generate(workload(model_size_bytes=9_000_000), [tmp_path])
    with pytest.raises(ValueError, match="has 3000001 bytes of weights, and inference.model_size_bytes is 4"):
        run(workload(model_size_bytes=4, queries=1), [tmp_path])
    path.unlink()
    with pytest.raises(FileNotFoundError, match="write it with `trunkline workload generate`"):
        run(spec, [tmp_path])


def test_a_model_of_another_seed_is_found(tmp_path: Path) -> None:
    spec = workload(model_size_bytes=3_000_000, queries=1)
    generate(spec, [tmp_path])
    other = workload("train.seed=5", model_size_bytes=3_000_000, queries=1)
    with pytest.raises(OSError, match=r"weights.safetensors: byte 0 of layer00000 is not what was written"):
        run(other, [tmp_path])


def test_without_torch_no_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unsupported, match="models that are loaded require the package torch"):
        generate(workload(model_size_bytes=1000), [tmp_path / "data"])
    assert not (tmp_path / "data").exists()
    assert ran(workload(), tmp_path)["queries"] == 20


def test_what_does_not_fit_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(workload(), [tmp_path])
    with pytest.raises(ValueError, match="12 samples, and 14 are needed for a batch of each of 2 ranks"):
        run(workload(mode="offline", batch_size=7), [tmp_path], 2)
    with pytest.raises(ValueError, match="runs inference, which needs its data set"):
        run(workload(), None)
    with pytest.raises(ValueError, match="scale_bytes: tiny saves no checkpoints"):
        run(workload(), [tmp_path], scale_bytes=1000)
    monkeypatch.setattr(_batch_memory, "free_memory_bytes", lambda: 10_000)
    with pytest.raises(OSError, match="the model and the batches of tiny need 0.01 GB of memory"):
        run(workload(model_size_bytes=10**7), [tmp_path])


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("inference.mode=batch", "overrides: inference.mode=batch: must be one of server, offline"),
        (
            "inference.arrival_rate=0",
            "arrival_rate=0: must be more than 0 queries a second, not 0",
        ),
        ("inference.arrival_rate=null", "arrival_rate is missing; write a number"),
        ("inference.percentile=101", "overrides: inference.percentile=101: must be at most 100, not 101"),
        ("inference.computation_time=null", "computation_time is missing"),
        ("inference.logging={fsync: always}", "logging.fsync: must be one of each, group, interval, off"),
        ("inference.queris=5", "there is no key inference.queris"),
        ("workflow.checkpoint=true", "workflow.inference is a workload of its own"),
        ("workflow.train=true", "workflow.inference is a workload of its own"),
        ("dataset.format=parquet", "reads single samples, which Parquet does not support"),
    ],
)
def test_what_is_wrong_is_named(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(key)


def test_keys() -> None:
    inference = workload("inference.computation_time={mean: 0.1, stdev: 0.01}", deadline=0.5).inference
    assert inference is not None
    assert inference.compute_seconds == Normal(0.1, 0.01)
    assert (inference.deadline_seconds, inference.percentile) == (0.5, 99)
    offline = workload(mode="offline")
    assert [(each.key, each.effect) for each in offline.ignored] == [
        ("inference.arrival_rate", "ignored: is about server mode")
    ]


def counts(**changes: Any) -> dict[str, Any]:
    """Counts of a rank: 4 queries, of which one took 300 ms instead of 100."""
    base = {"queries": 4, "samples": 8, "bytes": 4_000_000_000, "compute_ns": 400_000_000, "in_time": 3}
    base |= {"running_ns": 2_000_000_000, "late_ns": 1000}
    times = [(100_000_000, 3), (300_000_000, 1)]
    named = dict.fromkeys(("latency", "queue", "read", "log", "late_start"), times)
    return {**base, "times": named, "load": {"bytes": 100, "ns": 50}, "log": None, **changes}


def test_ranks_are_added_up() -> None:
    slow = counts(running_ns=4_000_000_000, load={"bytes": 100, "ns": 100})
    document = inference_document(workload(deadline=0.2, percentile=75), [counts(), slow])
    assert (document["queries"], document["running_seconds"]) == (8, 4.0)
    assert (document["queries_per_second"], document["samples_per_second"], document["gb_s"]) == (2, 4, 2)
    assert document["utilization"] == pytest.approx((0.2 + 0.1) / 2)
    assert document["latency_histogram_ns"] == [[100_000_000, 6], [300_000_000, 2]]
    deadline = document["deadline"]
    assert (deadline["within"], deadline["reached"], deadline["latency_seconds"]) == (0.75, True, 0.1)
    assert document["load"] == {"bytes": 200, "seconds": 1e-7, "gb_s": 2.0}
    assert document["bounded_by_emulator"] is False
    late = inference_document(workload(), [counts(late_ns=7_000_000)])
    assert late["bounded_by_emulator"] is True  # 7 of 600 ms


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(TEXT)
    data = ["--data", str(tmp_path / "data")]
    assert cli.main(["workload", "generate", str(file), *data]) == 0
    capsys.readouterr()
    assert cli.main(["workload", "run", str(file), *data, "--json", "--set", LOG, "--remove"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["queries"]) == ("workload run", 20)
    assert cli.main(["workload", "run", str(file), *data]) == 0
    assert "tiny, inference in server mode on 1 accelerator" in capsys.readouterr().out
    assert cli.main(["workload", "run", str(file), "--null-device"]) == 2
