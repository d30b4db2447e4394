"""Adapters of PEFT on streamed models: as on stock ones bit for bit, or refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors_save
from support_models import make_folder, prompt, stock
from test_streaming import generated, logits, streamed

import trunkline as tl

peft = pytest.importorskip("peft", reason="the package peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_LORA = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False}
ADAPTERS: dict[str, Any] = {
    "lora": peft.LoraConfig(**_LORA, target_modules="all-linear"),
    "lora and a head": peft.LoraConfig(**_LORA, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "ia3": peft.IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def adapted(model: Any, kind: str) -> Any:
    torch.manual_seed(5)
    return peft.get_peft_model(model, copy.deepcopy(ADAPTERS[kind])).eval()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_as_on_the_fully_loaded_model(kind: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    expected = adapted(stock(folder), kind)
    plain = logits(stock(folder))
    expected.save_pretrained(tmp_path / "adapter")
    made = adapted(streamed(folder, unit_bytes=1), kind)
    loaded = peft.PeftModel.from_pretrained(streamed(folder), tmp_path / "adapter").eval()
    for model in (made, loaded):
        assert not any("default" in name and each.is_meta for name, each in model.named_parameters())
        assert torch.equal(logits(model), logits(expected))
        assert torch.equal(generated(model, do_sample=False), generated(expected, do_sample=False))
        assert tl.stream.stats(model.get_base_model())["streamed_bytes"] > 0
    assert not torch.equal(logits(expected), plain)


def test_an_adapter_in_fp32_and_without_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", dtype=torch.float32)
    expected, model = adapted(stock(folder), "lora"), adapted(streamed(folder), "lora")
    assert torch.equal(logits(model), logits(expected))
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(stock(folder)))
    assert torch.equal(model.unload()(**prompt()).logits, logits(stock(folder)))


def test_an_adapter_is_saved_and_the_model_is_not(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    model = adapted(streamed(folder), "lora")
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(stock(folder), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), logits(model))

    adapter = peft.get_peft_model_state_dict(model)
    assert adapter
    assert all("lora" in name for name in adapter)
    tl.save(adapter, tmp_path / "adapter.safetensors")
    tl.Checkpointer(tmp_path / "run").save(1, {"adapter": adapter}, block=True)
    other = adapted(streamed(folder), "lora")
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora" in name:
                parameter.zero_()
    assert not torch.equal(logits(other), logits(model))
    peft.set_peft_model_state_dict(other, tl.Checkpointer(tmp_path / "run").load()["adapter"])
    assert torch.equal(logits(other), logits(model))
    state = tl.load(tmp_path / "adapter.safetensors")
    assert all(torch.equal(state[name], value) for name, value in adapter.items())

    whole = model.state_dict()
    for save in (
        lambda: tl.save(whole, tmp_path / "whole.pt"),
        lambda: tl.save(whole, tmp_path / "whole.safetensors"),
        lambda: torch.save(whole, tmp_path / "whole.bin"),
        lambda: tl.Checkpointer(tmp_path / "whole").save(1, whole, block=True),
        lambda: safetensors_save(whole),
        lambda: model.get_base_model().state_dict(),
        lambda: model.get_base_model().save_pretrained(tmp_path / "model"),
    ):
        with pytest.raises(Exception, match=r"streamed|OffloadedWeight|Error while serializing"):
            save()


def test_weights_of_the_model_are_not_replaced(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    model, other = adapted(streamed(folder), "lora"), adapted(stock(folder), "lora")
    before = logits(model)
    for state in (
        other.state_dict(),
        {name: value for name, value in other.state_dict().items() if "embed" in name},
        {name: value for name, value in other.state_dict().items() if "base_layer" in name},
    ):
        with pytest.raises(tl.Unsupported, match="by load_state_dict: the model.s weights are streamed"):
            model.load_state_dict(state, strict=False)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["up_proj"]}], ids=str
)
def test_adapters_that_need_the_weights_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path))
    config = peft.LoraConfig(**{**_LORA, **options}, target_modules=["q_proj"])
    with pytest.raises(tl.Unsupported, match="streamed"):
        peft.get_peft_model(model, config)


def test_merging_and_training_are_refused(tmp_path: Path) -> None:
    model = adapted(streamed(make_folder(tmp_path)), "lora")
    with pytest.raises(tl.Unsupported, match="is streamed"):
        model.merge_and_unload()
    with pytest.raises(tl.Unsupported, match="training a model whose weights are streamed"):
        model(**prompt())  # its adapters require gradients
    model.train()
    with pytest.raises(tl.Unsupported, match="training a model whose weights are streamed"):
        model(**prompt(), labels=prompt()["input_ids"]).loss.backward()
