"""Checkpoints that are saved within an emulated training: when, and that they count apart from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from trunkline.workload import Workload
from trunkline.workload._generate import generate
from trunkline.workload._parse import parse_text
from trunkline.workload._phase import Phase
from trunkline.workload._results import text_of
from trunkline.workload._run import run
from trunkline.workload._spec import Checkpoint
from trunkline.workload._training import save_steps, total_saves

TEXT = """\
model: {name: tiny, model_size: 100000}
workflow: {checkpoint: true}
dataset: {format: jpeg, num_files_train: 12, num_files_eval: 4, record_length_bytes: 500}
reader: {batch_size: 2, sample_shuffle: seed}
train: {computation_time: 0.0002, epochs: 4}
evaluation: {eval_time: 0.0001}
"""


def workload(*overrides: str, **checkpoint: Any) -> Workload:
    overrides += tuple(f"checkpoint.{key}={value}" for key, value in checkpoint.items())
    return parse_text(TEXT, "tiny.yaml", overrides)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {epoch: [6] for epoch in (1, 2, 3, 4)}),
        ({"checkpoint_after_epoch": 2, "epochs_between_checkpoints": 2}, {1: [], 2: [6], 3: [], 4: [6]}),
        ({"steps_between_checkpoints": 4}, {epoch: [4] for epoch in (1, 2, 3, 4)}),
        ({"steps_between_checkpoints": 3}, {epoch: [3, 6] for epoch in (1, 2, 3, 4)}),
        ({"steps_between_checkpoints": -1, "checkpoint_after_epoch": 5}, {1: [], 4: []}),
        ({"steps_between_checkpoints": 7}, {1: []}),
    ],
)
def test_when_checkpoints_are_saved(keys: dict[str, int], wanted: dict[int, list[int]]) -> None:
    checkpoint = workload(**keys).checkpoint
    assert {epoch: save_steps(checkpoint, epoch, 6) for epoch in wanted} == wanted
    assert save_steps(None, 1, 6) == []


def test_saves_are_counted_with_the_bound_on_steps() -> None:
    spec = workload("train.total_training_steps=14", steps_between_checkpoints=3)
    assert total_saves(spec, 6) == 4  # the last epoch has two steps
    assert isinstance(spec.checkpoint, Checkpoint)


def test_a_training_waits_for_its_saves(tmp_path: Path) -> None:
    spec = workload("workflow.evaluation=true", steps_between_checkpoints=4)
    generate(spec, [tmp_path])
    document = run(spec, [tmp_path])
    assert (document["steps"], document["samples"]) == (24, 48)
    assert document["evaluation"]["steps"] == 16
    saved = document["checkpoints"]["save"]
    assert (saved["count"], saved["bytes"]) == (4, 100000)
    assert [each["checkpoint"] for each in saved["checkpoints"]] == [1, 2, 3, 4]
    assert len(list((tmp_path / "checkpoints").glob("*/dcp.manifest"))) == 4
    # 4 steps, and 2: the first step of each part has none before it
    assert sum(count for _, count in document["step_histogram_ns"]) == 4 * (3 + 1)
    assert "  saved               4 times at" in text_of(json.loads(json.dumps(document)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_time_line_has_saves_and_reads_in_flight(tmp_path: Path, ranks: int) -> None:
    spec = workload("workflow.evaluation=true", "train.epochs=2", "checkpoint.fsync=false")
    generate(spec, [tmp_path])
    document = run(spec, [tmp_path], ranks)
    line, saved = document["time_line"], document["checkpoints"]["save"]
    spans = line["checkpoint_spans"]
    assert len(spans) == saved["count"] == 2
    for (begin, end), save in zip(spans, saved["checkpoints"], strict=True):
        # From the first rank that begins to the last that ends: at least as long as the slowest took.
        assert save["seconds"] <= end - begin + 1e-9 < save["seconds"] + 1
    assert 0 < spans[0][0] < spans[0][1] < spans[1][0]
    assert spans[0][1] < len(line["bytes"]) * line["bucket_seconds"] + line["bucket_seconds"]
    assert document["evaluation"]["time_line"]["checkpoint_spans"]
    # While a checkpoint is saved no accelerator runs.
    width = line["bucket_seconds"]
    inside = [
        number
        for number in range(len(line["bytes"]))
        if spans[0][0] <= number * width and (number + 1) * width <= spans[0][1]
    ]
    assert all(line["utilization"][number] is None for number in inside)
    for phase in (document, document["evaluation"]):
        each = phase["time_line"]
        assert len(each["reads_in_flight"]) == len(each["bytes_in_flight"]) == len(each["bytes"])
        assert all(value >= 0 for key in ("reads_in_flight", "bytes_in_flight") for value in each[key])


def test_reads_in_flight_are_those_of_the_samples(tmp_path: Path) -> None:
    """Each sample is one read, whose bytes are all in flight as long as it is."""
    spec = workload(
        "workflow.checkpoint=false", "dataset.record_length_bytes=65536", "train.computation_time=0"
    )
    generate(spec, [tmp_path])
    line = run(spec, [tmp_path])["time_line"]
    assert sum(line["reads_in_flight"]) > 0
    assert sum(line["bytes_in_flight"]) == pytest.approx(65536 * sum(line["reads_in_flight"]))
    null = run(spec, None)["time_line"]
    assert null["reads_in_flight"] is null["bytes_in_flight"] is None
    assert null["checkpoint_spans"] == []


def test_an_epoch_pauses_for_each_save() -> None:
    """What happens in a pause counts nowhere: src/workload/accelerator_test.cpp."""
    calls: list[Any] = []

    class Loop:
        def begin_epoch(self) -> None:
            calls.append("begin")

        def advance(self, steps: int) -> bool:
            calls.append(steps)
            return True

        def pause(self) -> None:
            calls.append("pause")

    phase = Phase.__new__(Phase)
    phase._loop = Loop()  # type: ignore[assignment]
    phase.run_epoch(7, lambda: None, [3, 6], lambda: calls.append("save"))
    phase.run_epoch(6, lambda: None, [6], lambda: calls.append("save"))
    phase.run_epoch(6, lambda: None)
    first = ["begin", 3, "pause", "save", 6, "pause", "save", 7]
    assert calls == [*first, "begin", 6, "pause", "save", "begin", 6]


def test_ranks_save_what_the_model_is_divided_into(tmp_path: Path) -> None:
    model = ["model.model_size=0", "model.num_layers=2", "model.parallelism.tensor=2"]
    spec = workload(*model, "model.transformer.hidden_size=64", "train.epochs=1")
    generate(spec, [tmp_path])
    document = run(spec, [tmp_path], 2, scale_bytes=500_000, remove=True)
    checkpoints = document["checkpoints"]
    assert (document["steps"], checkpoints["save"]["count"], checkpoints["model"]["ranks"]) == (3, 1, 2)
    assert checkpoints["save"]["bytes"] == checkpoints["model"]["model_bytes"] <= 500_000
    assert checkpoints["model"]["scaled"]["hidden"][0] == 64
    assert not (tmp_path / "checkpoints").exists()


def test_a_rank_with_nothing_to_save_waits_for_the_others(tmp_path: Path) -> None:
    """By default rank 0 saves alone what is not divided."""
    spec = workload("train.epochs=1", "workflow.evaluation=true")
    generate(spec, [tmp_path])
    document = run(spec, [tmp_path], 2)
    saved = document["checkpoints"]["save"]
    assert [each["bytes"] for each in saved["per_rank"]] == [100000, 0]
    assert saved["gb_s_slowest_rank"] == saved["checkpoints"][0]["gb_s_slowest_rank"] > 0


def test_the_null_device_saves_nothing(tmp_path: Path) -> None:
    document = run(workload(), None)
    assert document["checkpoints"] is None


def test_without_a_save_no_folder_is_made(tmp_path: Path) -> None:
    spec = workload(checkpoint_after_epoch=5)
    generate(spec, [tmp_path])
    assert run(spec, [tmp_path])["checkpoints"] is None
    assert not (tmp_path / "checkpoints").exists()
