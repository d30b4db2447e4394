"""load_best_model_at_end, save_only_model and get_last_checkpoint with the background checkpoints."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its imports
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
from test_transformers import BEST, assert_same_weights, best_at_first, new_trainer, stock_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the Trainer's advice
OURS = tl.transformers.Trainer
OPTIONS: dict[str, Any] = {"save_steps": 1, "max_steps": 4, "load_best_model_at_end": True, **BEST}


def weights_of(checkpointer: tl.Checkpointer, step: int) -> dict[str, Any]:
    weights: dict[str, Any] = checkpointer.load(step)["model"]
    return weights


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path, limit: int | None) -> None:
    """Whatever the limit; folders of a stock Trainer stay."""
    stock = stock_folder(tmp_path, 1)
    trainer = best_at_first(new_trainer(OURS, tmp_path, save_total_limit=limit, **OPTIONS))
    seen: list[Any] = []

    class Note(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append({name: value.clone() for name, value in trainer.model.state_dict().items()})

    trainer.add_callback(Note())
    trainer.train()
    assert trainer.checkpointer.steps() == {None: [1, 2, 3, 4], 1: [1, 4], 2: [1, 3, 4]}[limit]
    best = weights_of(trainer.checkpointer, 1)
    last = weights_of(trainer.checkpointer, 4)
    assert any(not torch.equal(best[name], last[name]) for name in best)
    for state in (trainer.model.state_dict(), *seen):
        assert all(torch.equal(state[name], best[name]) for name in best)
    assert len(seen) == 1
    assert stock.exists()
    again = best_at_first(new_trainer(OURS, tmp_path, save_total_limit=limit, **OPTIONS | {"max_steps": 5}))
    again.train(resume_from_checkpoint=4)
    assert_same_weights(again, trainer)  # the best is still that of step 1


def test_it_is_the_model_of_a_stock_trainer(tmp_path: Path) -> None:
    trainers = []
    for kind in (OURS, transformers.Trainer):
        trainers.append(best_at_first(new_trainer(kind, tmp_path / kind.__module__, **OPTIONS)))
        trainers[-1].train()
    assert_same_weights(*trainers)


def test_a_checkpointer_that_may_remove_the_best_is_rejected(tmp_path: Path) -> None:
    last = tl.Checkpointer(tmp_path / "last", keep=2)
    with pytest.raises(tl.Unsupported, match=r"keep=2.*pass keep_best=\('eval_loss', 'min', 1\) to it"):
        new_trainer(OURS, tmp_path, checkpointer=last, **OPTIONS)
    for options in ({"keep": None}, {"keep": 2, "keep_best": ("eval_loss", "min", 1)}):
        kept = tl.Checkpointer(tmp_path / f"kept-{options['keep']}", **options)  # type: ignore[arg-type]
        trainer = best_at_first(new_trainer(OURS, tmp_path, checkpointer=kept, **OPTIONS))
        trainer.train()
        best = weights_of(kept, 1)
        assert all(torch.equal(trainer.model.state_dict()[name], best[name]) for name in best)


def test_only_the_model_is_saved_and_exported(tmp_path: Path) -> None:
    options = {"save_steps": 2, "max_steps": 4, "save_only_model": True}
    trainer = new_trainer(OURS, tmp_path, **options)
    trainer.train()
    state = trainer.checkpointer.load(4)
    assert sorted(state) == ["files", "model"]
    assert sorted(state["files"]) == ["trainer_state.json"]
    tl.export_checkpoint(tmp_path / "checkpoints", tmp_path / "model.safetensors", step=4, key="model")
    exported = tl.load(tmp_path / "model.safetensors")
    ours = trainer.model.state_dict()
    assert exported
    assert all(torch.equal(exported[name], ours[name]) for name in exported)
    again = new_trainer(OURS, tmp_path, **options | {"max_steps": 6})
    with pytest.warns(RuntimeWarning, match="saved with save_only_model; the optimizer, .* start over"):
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6


def test_the_last_checkpoint_of_ours_and_of_a_stock_trainer(tmp_path: Path) -> None:
    assert tl.transformers.get_last_checkpoint(tmp_path / "nowhere") is None
    assert tl.transformers.get_last_checkpoint(tmp_path) is None
    trainer = new_trainer(OURS, tmp_path, save_steps=2, max_steps=4)
    trainer.train(resume_from_checkpoint=tl.transformers.get_last_checkpoint(tmp_path))
    (tmp_path / "checkpoints" / "step-00000009").mkdir()  # that a crash has left
    last = tl.transformers.get_last_checkpoint(tmp_path)
    assert last == str(tmp_path / "checkpoints" / "step-00000004")
    assert tl.transformers.get_last_checkpoint(tmp_path / "checkpoints") == last
    again = new_trainer(OURS, tmp_path, save_steps=2, max_steps=6)
    again.train(resume_from_checkpoint=last)
    assert again.checkpointer.steps() == [2, 4, 6]
    stock = stock_folder(tmp_path, 1)
    os.utime(stock / "trainer_state.json", (1, 1))
    assert str(tl.transformers.get_last_checkpoint(tmp_path)).endswith("step-00000006")
    later = stock_folder(tmp_path, 8)
    os.utime(later / "trainer_state.json", (1e10, 1e10))
    assert tl.transformers.get_last_checkpoint(str(tmp_path)) == str(later)
    os.utime(stock / "trainer_state.json", (2e10, 2e10))
    with pytest.raises(FileExistsError, match=r"checkpoint-8 with the highest step, and checkpoint-1, which"):
        tl.transformers.get_last_checkpoint(tmp_path)


def test_the_last_checkpoint_of_a_copy_without_times_is_the_last_committed(tmp_path: Path) -> None:
    original = tmp_path / "run" / "checkpoints"
    with tl.Checkpointer(original, keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"a": torch.ones(3)})
    shutil.copytree(original, tmp_path / "copy" / "checkpoints")
    for step in (1, 2, 3):  # the first was copied last
        for file in (tmp_path / "copy" / "checkpoints" / f"step-0000000{step}").iterdir():
            os.utime(file, (1e10 - step, 1e10 - step))
    last = tl.transformers.get_last_checkpoint(tmp_path / "copy")
    assert last == str(tmp_path / "copy" / "checkpoints" / "step-00000003")


def test_a_training_that_would_start_over_names_the_function(tmp_path: Path) -> None:
    new_trainer(OURS, tmp_path, save_steps=2, max_steps=2).train()
    last = transformers.trainer_utils.get_last_checkpoint(str(tmp_path))
    with pytest.raises(FileExistsError, match=r"that of trunkline\.transformers finds these"):
        new_trainer(OURS, tmp_path, save_steps=2, max_steps=2).train(resume_from_checkpoint=last)
