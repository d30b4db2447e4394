"""A Trainer whose Checkpointer copies steps to a tier, and writes only what has changed."""

from __future__ import annotations

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
from test_transformers import Crash, assert_same_weights, new_trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the Trainer's advice
OURS = tl.transformers.Trainer


def checkpointer_of(folder: Path) -> tl.Checkpointer:
    tiers = [tl.Tier(folder / "shared", every=2)]
    return tl.Checkpointer(folder / "local", tiers=tiers, incremental=True)


def test_a_training_goes_on_from_the_tier_on_another_machine(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_steps": 1, "max_steps": 5}
    whole = new_trainer(OURS, tmp_path / "whole", **options)
    whole.train()

    checkpointer = checkpointer_of(tmp_path)
    with pytest.raises(RuntimeError, match="crash"):
        new_trainer(
            OURS, tmp_path / "out", checkpointer=checkpointer, callbacks=[Crash(4)], **options
        ).train()
    checkpointer.wait_drained()
    shutil.rmtree(tmp_path / "local")  # the machine is lost

    trainer = new_trainer(OURS, tmp_path / "out", checkpointer=checkpointer_of(tmp_path), **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.checkpointer.steps() == [2, 3, 4, 5]
    assert_same_weights(trainer, whole)
    trainer.checkpointer.wait_drained()
    assert tl.Checkpointer(tmp_path / "shared").steps() == [2, 4]
