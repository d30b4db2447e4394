"""A Trainer saves the adapters of a model of PEFT, and not its frozen base."""

from __future__ import annotations

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
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
from test_transformers import EPOCH, assert_same_weights, new_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
LORA: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["c_attn"], "lora_dropout": 0.1}


def adapted(names: tuple[str, ...] = ("default",), **options: Any) -> Any:
    model = peft.get_peft_model(new_model(), peft.LoraConfig(**LORA, **options))
    for name in names[1:]:
        model.add_adapter(name, peft.LoraConfig(**LORA, **options))
    return model


def trained(directory: Path, model: Any, steps: int, resume: Any = None, **options: Any) -> Any:
    tokens = torch.randint(64, (2 * EPOCH, 12), generator=torch.Generator().manual_seed(1))
    trainer = tl.transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            str(directory),
            **{
                "max_steps": steps,
                "save_steps": 1,
                "eval_steps": 1,
                "per_device_train_batch_size": 2,
                "learning_rate": 1e-1,
                "lr_scheduler_type": "constant",  # the same for any number of steps
                "report_to": "none",
                "use_cpu": True,
                "disable_tqdm": True,
                **options,
            },
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        eval_dataset=[{"input_ids": row, "labels": row} for row in tokens[:2]],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("names", [("default",), ("default", "other")])
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}])
def test_adapters_are_saved_and_resumed_without_their_base(
    tmp_path: Path, names: tuple[str, ...], options: dict[str, Any]
) -> None:
    whole = trained(tmp_path / "whole", adapted(names, **options), 4)
    state = whole.checkpointer.load(4)
    assert state["model"] == {}
    assert sorted(state["adapters"]) == sorted(names)
    expected = peft.get_peft_model_state_dict(whole.model)
    assert state["adapters"]["default"].keys() == expected.keys()
    saved = sum(each.nbytes for adapter in state["adapters"].values() for each in adapter.values())
    assert saved < sum(each.nbytes for each in whole.model.parameters()) / 2
    trained(tmp_path / "run", adapted(names, **options), 2)
    resumed = trained(tmp_path / "run", adapted(names, **options), 4, resume=True)
    assert_same_weights(resumed, whole)


def test_an_adapter_is_loaded_with_peft(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", adapted(), 2)
    adapter = tl.Checkpointer(tmp_path / "run" / "checkpoints").load(2)["adapters"]["default"]
    model = adapted()
    peft.set_peft_model_state_dict(model, adapter)
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(new_model(), tmp_path / "adapter").eval()
    trainer.model.eval()
    ids = torch.arange(8).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model(ids).logits)
        assert not torch.equal(loaded(ids).logits, new_model().eval()(ids).logits)


def test_a_base_that_is_trained_is_saved(tmp_path: Path) -> None:
    """So are checkpoints of all weights resumed from, as earlier versions saved them of every model."""

    def model() -> Any:
        made = adapted()
        made.base_model.model.transformer.wpe.weight.requires_grad_(True)
        return made

    whole = trained(tmp_path / "whole", model(), 4)
    state = whole.checkpointer.load(2)
    assert "adapters" not in state
    assert "base_model.model.transformer.wpe.weight" in state["model"]
    trained(tmp_path / "run", model(), 2)
    assert_same_weights(trained(tmp_path / "run", model(), 4, resume=True), whole)


def test_the_best_adapter_is_loaded_at_the_end(tmp_path: Path) -> None:
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_total_limit": 1}
    trainer = trained(tmp_path, adapted(), 4, metric_for_best_model="eval_loss", **options)
    best = trainer.state.best_global_step
    saved = trainer.checkpointer.load(best)["adapters"]["default"]
    now = peft.get_peft_model_state_dict(trainer.model)
    assert all(torch.equal(now[name], saved[name]) for name in saved)


def test_another_kind_of_model_is_told_so(tmp_path: Path) -> None:
    trained(tmp_path, adapted(), 1)
    with pytest.raises(tl.Format, match=r"holds adapters of PEFT \(default\), and this model does not have"):
        trained(tmp_path, new_model(), 2, resume=True)


@pytest.mark.parametrize(
    ("modules", "lacking"), [([], "this model"), (["c_attn", "c_fc", "c_proj"], "the checkpoint")]
)
def test_adapters_of_other_modules_are_not_dropped_silently(
    modules: list[str], lacking: str, tmp_path: Path
) -> None:
    """PEFT ignores weights of modules that have no adapter."""

    def covering(modules: list[str]) -> Any:
        return peft.get_peft_model(new_model(), peft.LoraConfig(**LORA | {"target_modules": modules}))

    trained(tmp_path, covering(["c_attn", "c_fc"]), 1, save_only_model=True)
    with pytest.raises(tl.Format, match=rf"covers other modules .*\({lacking} does not have base_model"):
        trained(tmp_path, covering(modules or ["c_attn"]), 2, resume=True, save_only_model=True)


def test_what_cannot_be_resumed_from_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match="resume_from_checkpoint: must be True, the number of a step or a path"
    ):
        trained(tmp_path, adapted(), 1, resume=2.0)
    assert trained(tmp_path, adapted(), 1, resume="").state.global_step == 1  # as a stock Trainer
