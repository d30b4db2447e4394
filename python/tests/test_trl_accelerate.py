"""Beside other libraries of Hugging Face: TRL's SFTTrainer, and the states that accelerate saves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their imports
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")


def new_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=64)
    return transformers.GPT2LMHeadModel(config)


def is_same(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return bool(ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours))


def sft_trainer(directory: Path, steps: int, *bases: Any) -> Any:
    trl = pytest.importorskip("trl", reason="the package trl is not installed")
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(number): number for number in range(64)}, unk_token="0")
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    rows = torch.randint(2, 64, (16, 12), generator=torch.Generator().manual_seed(1)).tolist()
    arguments = trl.SFTConfig(
        str(directory),
        max_steps=steps,
        save_steps=1,
        per_device_train_batch_size=2,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        max_length=12,
    )
    kind = type("Trainer", (*bases, trl.SFTTrainer), {})
    data = datasets.Dataset.from_dict({"input_ids": rows})
    return kind(model=new_model(), args=arguments, train_dataset=data, processing_class=tokenizer)


def test_sft_trainer_of_trl_resumes(tmp_path: Path) -> None:
    whole = sft_trainer(tmp_path / "whole", 4)  # stock
    whole.train()
    first = sft_trainer(tmp_path / "run", 2, tl.transformers.BackgroundCheckpoints)
    first.train()
    assert first.checkpointer.steps() == [1, 2]
    resumed = sft_trainer(tmp_path / "run", 4, tl.transformers.BackgroundCheckpoints)
    resumed.train(resume_from_checkpoint=True)
    assert is_same(resumed.model, whole.model)


def prepared() -> tuple[Any, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return (accelerator, *accelerator.prepare(model, optimizer))


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    rows = torch.arange(24).reshape(2, 12)
    accelerator.backward(model(input_ids=rows, labels=rows).loss)
    optimizer.step()
    optimizer.zero_grad()


def test_states_of_accelerate_with_weights_by_trunkline(tmp_path: Path) -> None:
    """As in docs/integrations.md: hooks save and load the weights, accelerate all else."""
    accelerator, model, optimizer = prepared()

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        for index in range(len(models)):
            tl.save(weights.pop(0), Path(folder) / f"model-{index}.safetensors")

    def load(models: list[Any], folder: str) -> None:
        for index in range(len(models)):
            state = tl.load(Path(folder) / f"model-{index}.safetensors")
            models.pop(0).load_state_dict(state, strict=False)  # tied weights are stored once

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    step(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path / "state"))
    assert {path.name for path in (tmp_path / "state").glob("*.safetensors")} == {"model-0.safetensors"}
    step(accelerator, model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.load_state(str(tmp_path / "state"))
    assert not all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)
    step(accelerator, model, optimizer)
    assert all(torch.equal(model.state_dict()[name], expected[name]) for name in expected)


def test_states_that_accelerate_saved_alone_are_read(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared()
    step(accelerator, model, optimizer)
    accelerator.save_state(str(tmp_path / "state"))
    loaded = tl.load(tmp_path / "state" / "model.safetensors")
    assert loaded
    assert all(torch.equal(model.state_dict()[name], loaded[name]) for name in loaded)
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    state = {"model": accelerator.get_state_dict(model), "optimizer": optimizer.state_dict()}
    checkpoints.save(1, state, block=True)
    _, again, optimizer = prepared()
    saved = checkpoints.load()
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert is_same(again, model)
