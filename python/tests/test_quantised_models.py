"""Checkpoints with quantised weights: dequantised into a pack as stock transformers does, or rejected."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_experts import small_config
from support_log import logged
from support_models import ARCHITECTURES, save_model, stock
from test_streaming import generated, logits, streamed

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_BLOCK = 16


def _rewrite(folder: Path, quantise: Any, settings: dict[str, Any] | None) -> Path:
    """Replace the tensors of a folder by what `quantise` yields for each, in one file."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found.update(quantise(name, tensor))
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    if settings is not None:
        document["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(document))
    return folder


def _fp8(scale_dtype: torch.dtype = torch.float32) -> Any:
    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith("proj.weight"):
            return {name: tensor}
        rows, columns = tensor.shape
        blocks = tensor.float().reshape(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        if scale_dtype == torch.float8_e8m0fnu:
            scale = torch.exp2(scale.log2().ceil())
        stored = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        return {name: stored, f"{name}_scale_inv": scale.to(scale_dtype)}

    return quantise


_FP8_SETTINGS = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK], "activation_scheme": "dynamic"}


def fp8_folder(folder: Path, kind: str = "qwen3", scale_dtype: torch.dtype = torch.float32) -> Path:
    return _rewrite(save_model(ARCHITECTURES[kind](), folder), _fp8(scale_dtype), _FP8_SETTINGS)


def experts_in_fp8(folder: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    """Save a model whose experts are quantised, each matrix by itself."""
    quantised = _fp8()

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        is_matrix = tensor.dim() == 2 and not any(extent % _BLOCK for extent in tensor.shape)
        if ".experts." not in name or not is_matrix:
            return {name: tensor}
        made = quantised("proj.weight", tensor)
        return {name: made["proj.weight"], f"{name}_scale_inv": made["proj.weight_scale_inv"]}

    return _rewrite(save_model(small_config(kind, **config), folder, dtype), quantise, _FP8_SETTINGS)


def gpt_oss_folder(folder: Path, **config: Any) -> Path:
    save_model(small_config("gpt_oss", num_hidden_layers=4, **config), folder)
    generator = torch.Generator().manual_seed(4)

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        experts, columns, rows = tensor.shape  # transposed in memory
        shape = (experts, rows, columns // 32)
        return {
            f"{name}_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator),
            f"{name}_scales": torch.randint(118, 123, shape, dtype=torch.uint8, generator=generator),
        }

    return _rewrite(
        folder, quantise, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    )


def _check_equal(folder: Path) -> Any:
    expected, model = stock(folder), streamed(folder)
    assert {each.dtype for each in expected.parameters()} <= {torch.bfloat16, torch.float32}
    assert torch.equal(logits(model), logits(expected))
    assert torch.equal(generated(model, do_sample=False), generated(expected, do_sample=False))
    assert model.config.to_dict() == expected.config.to_dict()
    assert {name: each.dtype for name, each in model.named_parameters()} == {
        name: each.dtype for name, each in expected.named_parameters()
    }
    return model


@pytest.mark.parametrize("kind", ["qwen3", "llama, tied", "qwen3-moe"])
def test_fp8_is_equal_to_what_stock_dequantises(kind: str, tmp_path: Path) -> None:
    _check_equal(fp8_folder(tmp_path, kind))


def test_other_weights_that_are_put_together_keep_the_dtype_of_stock(tmp_path: Path) -> None:
    """Convolutions that the config keeps in fp32, and that transformers puts together of bf16 parts."""
    _check_equal(experts_in_fp8(tmp_path, "bailing_hybrid"))


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    _check_equal(fp8_folder(tmp_path, scale_dtype=torch.float8_e8m0fnu))


def test_weights_without_scales_keep_their_dtype(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors")
    found, expected = (dict(each.named_parameters()) for each in (streamed(folder), stock(folder)))
    assert found["model.norm.weight"].dtype == torch.float32
    assert {name: each.dtype for name, each in found.items()} == {
        name: each.dtype for name, each in expected.items()
    }


def test_mxfp4_is_equal_to_what_stock_dequantises(tmp_path: Path) -> None:
    model = _check_equal(gpt_oss_folder(tmp_path))
    assert "experts" in tl.stream.stats(model)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_who_makes_a_large_pack_is_told_of_the_other_choice(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fp8_folder(tmp_path, kind)
    for keep, is_told in (("dequantised", True), ("quantised", False)):
        with logged(caplog) as records:
            tl.transformers.pack(folder, keep=keep)
        [said] = [record for record in records if "writing a pack of" in record]
        assert bool(re.search(r'keep="quantised" takes about [\d.]+ GB, and reads less', said)) == is_told


def test_quantised_files_are_not_read_in_place(tmp_path: Path) -> None:
    with pytest.raises(tl.Unsupported, match="pack: False, .*is not stored as such, but converted"):
        tl.transformers.from_pretrained(fp8_folder(tmp_path), pack=False)


def test_a_plan_needs_a_pack_of_the_dequantised_weights(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    planned = tl.stream.plan(folder, memory_budget="1GB", bandwidth=1e9, flops=1e12)
    weights = sum(each.nbytes for each in stock(folder).parameters())
    assert planned["weight_bytes"] == weights
    assert planned["pack"]["needed"]
    assert planned["pack"]["bytes"] >= weights


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "input_scale", "scales", "scale"])
def test_scales_that_nothing_uses_are_rejected(suffix: str, tmp_path: Path) -> None:
    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        scaled = (
            {name.removesuffix("weight") + suffix: torch.ones(1)} if name.endswith("q_proj.weight") else {}
        )
        return {name: tensor, **scaled}

    folder = _rewrite(save_model(ARCHITECTURES["llama"](), tmp_path), quantise, None)
    with pytest.raises(
        tl.Unsupported,
        match=rf"q_proj\.{suffix} belongs to the quantised weight .*q_proj\.weight.*quantization_config",
    ):
        tl.transformers.from_pretrained(folder)


def test_tensors_of_parts_that_are_not_loaded_are_ignored(tmp_path: Path) -> None:
    def more(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor, "vision.block.weight": torch.ones(1), "vision.block.layer_scale": torch.ones(1)}

    folder = _rewrite(save_model(ARCHITECTURES["llama"](), tmp_path), more, None)
    assert torch.equal(logits(streamed(folder)), logits(stock(folder)))


def test_static_scales_of_activations_change_nothing(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        name.replace("weight_scale_inv", "input_scale"): torch.ones(1)
        for name in list(tensors)
        if name.endswith("weight_scale_inv")
    }
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(logits(streamed(folder)), logits(stock(folder)))


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("gptq", "gptqmodel"),
        ("awq", "gptqmodel"),
        ("bitsandbytes", r"\.dequantize\(\)\.save_pretrained"),
        ("compressed-tensors", r"CompressedTensorsConfig\(dequantize=True\)"),
        ("hqq", "load this one with transformers"),
    ],
)
def test_other_methods_say_what_to_do(method: str, advice: str, tmp_path: Path) -> None:
    folder = save_model(ARCHITECTURES["llama"](), tmp_path)
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(document))
    for call in (
        lambda: tl.transformers.from_pretrained(folder),
        lambda: tl.stream.plan(folder, memory_budget="1GB", bandwidth=1e9, flops=1e12),
    ):
        with pytest.raises(
            tl.Unsupported, match=rf"\({method}\), only fp8 and mxfp4; use the model's bf16.*{advice}"
        ):
            call()


def test_an_invalid_description_of_quantisation(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"]["weight_block_size"] = [0]
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(tl.Unsupported, match="quantization_config is not valid"):
        tl.transformers.from_pretrained(folder)
