"""Which checkpoints stay: keep, keep_every and keep_best together; metrics, and the context manager."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support_log import logged

import trunkline as tl
from trunkline._core import CheckpointStore


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((100,), float(step)), "step": step}


def save_all(checkpoints: tl.Checkpointer, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        metrics = None if loss is None else {"loss": loss}
        checkpoints.save(step, state_of(step), metrics=metrics, block=True)


def test_the_best_stay_beside_the_last(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=2, keep_best=("loss", "min", 2))
    save_all(checkpoints, {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3, 5: 0.2, 6: 0.9, 7: 0.8})
    assert checkpoints.steps() == [2, 5, 6, 7]
    assert checkpoints.best() == 2
    assert checkpoints.metrics(5) == {"loss": 0.2}
    assert checkpoints.load(checkpoints.best())["step"] == 2
    save_all(checkpoints, {8: 0.05})
    assert checkpoints.steps() == [2, 7, 8]  # 5 is no longer among the best two


def test_the_highest_are_the_best_with_max(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_best=("accuracy", "max", 1))
    for step, accuracy in enumerate((0.2, 0.9, 0.5, 0.6)):
        checkpoints.save(step, state_of(step), metrics={"accuracy": accuracy, "loss": -1}, block=True)
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.best() == 1


def test_every_nth_stays(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_every=3)
    save_all(checkpoints, dict.fromkeys(range(8)))
    assert checkpoints.steps() == [0, 3, 6, 7]


def test_a_checkpoint_goes_only_if_no_rule_keeps_it(tmp_path: Path) -> None:
    """All rules together, compared with what each of them keeps alone."""
    losses = [0.9, 0.2, 0.7, math.nan, 0.1, 0.3, math.inf, 0.6, -math.inf, 0.4, 0.8]
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=2, keep_every=4, keep_best=("loss", "min", 3))
    expected: set[int] = set()
    for step, loss in enumerate(losses):
        expected.add(step)
        checkpoints.save(step, state_of(step), metrics={"loss": loss}, block=True)
        by_loss = sorted((losses[each], each) for each in expected if not math.isnan(losses[each]))
        best = {each for _, each in by_loss[:3]}
        expected = {each for each in expected if each > step - 2 or each % 4 == 0 or each in best}
        assert set(checkpoints.steps()) == expected, step
    assert checkpoints.best() == 8
    for step in checkpoints.steps():
        assert bool((checkpoints.load(step)["weights"] == step).all())


def test_steps_that_were_not_measured_or_are_not_numbers_are_not_best(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_best=("loss", "min", 5))
    save_all(checkpoints, {1: None, 2: math.nan, 3: 1.0, 4: None, 5: math.inf, 6: None})
    assert checkpoints.steps() == [3, 5, 6]
    assert checkpoints.metrics(6) == {}
    assert checkpoints.best() == 3
    save_all(checkpoints, {7: math.nan})
    assert math.isnan(checkpoints.metrics(7)["loss"])
    assert checkpoints.metrics(5)["loss"] == math.inf


def test_of_equal_values_the_first_stays(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_best=("loss", "min", 1))
    save_all(checkpoints, {1: 0.5, 2: 0.5, 3: 0.5})
    assert checkpoints.steps() == [1, 3]
    assert checkpoints.best() == 1


def test_a_continued_run_knows_the_metrics_of_the_one_before(tmp_path: Path) -> None:
    save_all(tl.Checkpointer(tmp_path / "run", keep=None), {1: 0.3, 2: 0.1, 3: 0.2, 4: None})
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_best=("loss", "min", 1))
    assert checkpoints.load()["step"] == 4
    save_all(checkpoints, {5: 0.4})
    assert checkpoints.steps() == [2, 5]
    # One that has not loaded removes nothing of another run, whatever its metrics.
    other = tl.Checkpointer(tmp_path / "run", keep=1, keep_best=("loss", "min", 1))
    with pytest.warns(RuntimeWarning, match="does not count or remove"):
        save_all(other, {6: 0.9, 7: 0.95})
    assert other.steps() == [2, 5, 6, 7]


def test_a_run_that_goes_back_keeps_what_the_rules_name(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_every=10, keep_best=("loss", "min", 1))
    save_all(checkpoints, {8: 0.5, 9: 0.1, 10: 0.6, 11: 0.7})
    assert checkpoints.steps() == [9, 10, 11]
    checkpoints.load(9)
    save_all(checkpoints, {9: 0.3})
    assert checkpoints.steps() == [9, 10]
    assert checkpoints.metrics(9) == {"loss": 0.3}  # of what replaced it


def test_a_step_that_is_saved_again_loses_its_metrics(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_best=("loss", "min", 1))
    save_all(checkpoints, {1: 0.1, 2: 0.2})
    assert checkpoints.steps() == [1, 2]
    save_all(checkpoints, {1: 0.9, 2: 0.2})
    assert checkpoints.steps() == [2]


def test_a_damaged_best_step_stays_and_does_not_count(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_best=("loss", "min", 1))
    save_all(checkpoints, {1: 0.1, 2: 0.2})
    [manifest] = (tmp_path / "run" / "step-00000001").glob("manifest-*")
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="step 1 of .* is damaged"):
        save_all(checkpoints, {3: 0.3})
    assert checkpoints.steps() == [1, 2, 3]
    assert checkpoints.best() == 2


def test_metrics_are_in_the_manifest_and_ask_for_a_reader_that_knows_them(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run")
    metrics = {
        "loss": 0.1,
        "größe": 3,
        'a"b': torch.tensor(2.5),
        "none": math.nan,
        "low": -math.inf,
        "big": 1e300,
    }
    checkpoints.save(1, state_of(1), metrics=metrics, block=True)
    checkpoints.save(2, state_of(2), block=True)
    found = checkpoints.metrics(1)
    assert math.isnan(found.pop("none"))
    assert found == {"loss": 0.1, "größe": 3.0, 'a"b': 2.5, "low": -math.inf, "big": 1e300}
    texts = []
    for step in (1, 2):
        [manifest] = (tmp_path / "run" / f"step-{step:08}").glob("manifest-*")
        texts.append(manifest.read_bytes())
    line, _, rest = texts[0].partition(b"\n")
    assert line.startswith(b"trunkline checkpoint 2 ")
    assert json.loads(rest)["features"] == ["metrics"]
    assert json.loads(rest)["metrics"]["none"] == "NaN"
    assert texts[1].startswith(b"trunkline checkpoint 1 ")  # as before, for older builds
    # In a copy of the step the metrics are there as well.
    shutil.copytree(tmp_path / "run" / "step-00000001", tmp_path / "copy" / "step-00000001")
    assert tl.Checkpointer(tmp_path / "copy").metrics(1)["loss"] == 0.1
    assert CheckpointStore(tmp_path / "copy").read_manifest(1)["metrics"]["big"] == 1e300


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"keep_best": ("loss", 3)}, ValueError, r"does not say whether .min. or .max. is best"),
        ({"keep_best": ("loss", "lowest", 3)}, ValueError, "^keep_best: must be"),
        ({"keep_best": ("", "min", 3)}, ValueError, "^keep_best: must be"),
        ({"keep_best": "loss"}, TypeError, "^keep_best: must be"),
        (
            {"keep_best": ("loss", "min", 0)},
            ValueError,
            "^keep_best: how many: must be an integer of at least 1",
        ),
        ({"keep_best": ("loss", "min", "3")}, TypeError, "^keep_best: how many"),
        ({"keep_every": 0}, ValueError, "^keep_every: must be an integer of at least 1"),
        ({"keep_every": 2.5}, TypeError, "^keep_every: must be an integer of at least 1"),
        ({"keep_every": 5, "keep": None}, ValueError, "^keep_every: has no effect with keep=None"),
        (
            {"keep_best": ("loss", "min", 1), "keep": None},
            ValueError,
            "^keep_best: has no effect with keep=None",
        ),
    ],
)
def test_wrong_rules(tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        tl.Checkpointer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_wrong_metrics(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, keep_best=("loss", "min", 1))
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"val_loss": 1.0}, ValueError, "has no 'loss', by which keep_best=.* chooses, only 'val_loss'"),
        ({"loss": "0.1"}, TypeError, "'loss' must be a number"),
        ({"loss": [1, 2]}, TypeError, "'loss' must be a number"),
        ({"loss": torch.ones(2)}, TypeError, "'loss' must be a number"),
        ({1: 2.0}, TypeError, "its keys must be names"),
        (0.5, TypeError, "must be a dict"),
    ]
    for metrics, error, said in wrong:
        with pytest.raises(error, match=f"^metrics: .*{said}"):
            checkpoints.save(1, state_of(1), metrics=metrics)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"^best\(\): needs keep_best"):
        tl.Checkpointer(tmp_path / "run").best()
    assert checkpoints.best() is None


def test_leaving_a_block_waits_for_the_save(tmp_path: Path) -> None:
    with tl.Checkpointer(tmp_path / "run") as checkpoints:
        handle = checkpoints.save(1, {"weights": torch.ones(1_000_000)})
    assert handle.done()
    assert checkpoints.steps() == [1]


def test_a_failed_save_is_raised_by_leaving_the_block(tmp_path: Path) -> None:
    def fail() -> None:
        with tl.Checkpointer(tmp_path / "run") as checkpoints:
            weights = torch.ones(1_000_000)
            handle = checkpoints.save(1, {"weights": weights})
            weights.untyped_storage().resize_(0)
            handle._done.wait()
            if handle._error is None:
                pytest.skip("the tensors were copied before they were freed")

    with pytest.raises(tl.Error, match="resized or freed"):
        fail()


def test_the_error_of_a_block_is_raised_once_the_save_is_over(tmp_path: Path) -> None:
    handles = []

    def fail() -> None:
        with tl.Checkpointer(tmp_path / "run") as checkpoints:
            handles.append(checkpoints.save(1, {"weights": torch.ones(1_000_000)}))
            raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake"):
        fail()
    assert handles[0].done()
    assert tl.Checkpointer(tmp_path / "run").steps() == [1]


def test_removing_many_at_once_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=None)
    save_all(checkpoints, dict.fromkeys(range(5, 108)))
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=2)
    checkpoints.load()
    with logged(caplog, "WARNING") as records:
        save_all(checkpoints, dict.fromkeys((108, 109)))
    [text] = [record for record in records if "keep=2 removes" in record]
    assert "keep=2 removes 102 checkpoints, of steps 5 to 106" in text
    assert checkpoints.steps() == [108, 109]
