"""Models that read images do what fully loaded ones do, bit for bit, while their text layers are streamed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import prompt, transformers
from support_vision import FAMILIES, vision_config, with_image
from test_streaming import least, streamed

import trunkline as tl
from trunkline._streaming.offloaded import OffloadedWeight
from trunkline.transformers import meta_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save_vision_model(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = vision_config(kind)
    config.dtype = torch.bfloat16
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB")
    return folder


def stock(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, **options).eval()


def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).logits
    return found


def generated(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    found: torch.Tensor = model.generate(**inputs, max_new_tokens=5, do_sample=False, **options)
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_equal_to_the_fully_loaded_model(kind: str, tmp_path: Path) -> None:
    folder = save_vision_model(kind, tmp_path)
    expected = stock(folder)
    image = with_image(expected)
    model = streamed(folder)
    assert type(model) is type(expected)
    assert model.config.to_dict() == expected.config.to_dict()
    for inputs in (image, prompt(), image):
        assert torch.equal(logits(model, inputs), logits(expected, inputs))
    assert torch.equal(generated(model, image), generated(expected, image))
    away = [name for name, each in model.named_parameters() if isinstance(each, OffloadedWeight)]
    assert away
    assert not any("vision" in name for name in away)
    stays = dict(expected.named_buffers())
    assert all(torch.equal(value, stays[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_features_of_images_are_equal_when_computed_alone(kind: str, tmp_path: Path) -> None:
    folder = save_vision_model(kind, tmp_path)
    expected, model = stock(folder), streamed(folder)
    pixels = {
        name: value for name, value in with_image(expected).items() if name.startswith(("pixel", "image"))
    }

    def features(each: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return list(each.get_image_features(**pixels).pooler_output)

    for ours, theirs in zip(features(model), features(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_a_plan_knows_what_stays(tmp_path: Path) -> None:
    folder = save_vision_model("llava", tmp_path)
    planned = tl.stream.plan(folder, memory_budget=least(folder), bandwidth=1e9, flops=1e12)
    assert planned["least_budget"] == least(folder)
    model = streamed(folder)
    stats = tl.stream.stats(model)
    assert stats["memory_bytes"] <= planned["least_budget"]
    assert stats["streamed_bytes"] == planned["streamed_bytes"]
    # Generated tokens do not use the vision tower.
    used = sum(
        each.nbytes
        for name, each in stock(folder).named_parameters()
        if "vision_tower" not in name and "multi_modal_projector" not in name
    )
    assert planned["compute_seconds"] == pytest.approx(2 * used / 2 / 1e12)


def test_the_text_model_alone(tmp_path: Path) -> None:
    folder = save_vision_model("llama4", tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = streamed(folder, text_only=True)
    assert type(model) is type(expected) is transformers.Llama4ForCausalLM
    assert torch.equal(logits(model, prompt()), logits(expected, prompt()))
    both, alone = (
        tl.stream.plan(folder, memory_budget="1GB", bandwidth=1e9, flops=1e12, text_only=text_only)[
            "weight_bytes"
        ]
        for text_only in (False, True)
    )
    assert alone < both
    made = [tl.transformers.pack(folder, text_only=text_only) for text_only in (True, False)]
    assert not made[0]["made"]
    assert made[1]["made"]


def test_models_without_a_text_model_of_their_own(tmp_path: Path) -> None:
    folder = save_vision_model("llava", tmp_path)
    with pytest.raises(tl.Unsupported, match=r"text_only: .*cannot load llava as a causal .*omit text_only"):
        tl.transformers.from_pretrained(folder, text_only=True)
    with pytest.raises(TypeError, match="text_only: must be True or False, not str"):
        tl.transformers.from_pretrained(folder, text_only="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("architectures", [["Llama4ForCausalLM"], ["Llama4ForConditionalGeneration"], None])
def test_the_config_names_the_class(architectures: list[str] | None, tmp_path: Path) -> None:
    vision_config("llama4").save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**document, "architectures": architectures}))
    expected = "Llama4ForCausalLM" if architectures is None else architectures[0]
    assert type(meta_model.make(tmp_path, None)).__name__ == expected


def test_a_tower_with_more_layers_than_the_text_model(tmp_path: Path) -> None:
    config = vision_config("llava")
    config.vision_config.hidden_size, config.vision_config.intermediate_size = 128, 512
    config.vision_config.num_hidden_layers = config.text_config.num_hidden_layers
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path)
    expected, model = stock(tmp_path), streamed(tmp_path)
    inputs = with_image(expected)
    assert torch.equal(logits(model, inputs), logits(expected, inputs))
    streamed_weights = [name for name, each in model.named_parameters() if isinstance(each, OffloadedWeight)]
    assert all("language_model" in name for name in streamed_weights)
