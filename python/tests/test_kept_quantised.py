"""Quantised weights that are streamed as they are stored, and dequantised while the model runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_models import ARCHITECTURES, prompt, save_model, stock
from test_quantised_models import _FP8_SETTINGS, _fp8, _rewrite, fp8_folder
from test_streaming import generated, logits
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import trunkline as tl
from trunkline.transformers._dequantise import Dequantise, _is_equal, look_up

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def load(folder: Path, budget: int | str | None = None, **options: Any) -> Any:
    """Load a model that is dequantised at use; None: with the least memory."""
    if budget is None:
        budget = least(folder, **options)
    return tl.transformers.from_pretrained(folder, keep="quantised", memory_budget=budget, **options)


def least(folder: Path, **options: Any) -> int:
    """Return the least budget that the error names."""
    with pytest.raises(tl.OutOfBudget, match="memory to dequantise") as caught:
        load(folder, 1, **options)
    found = re.search(r"the least is (\d+) bytes", str(caught.value))
    assert found
    return int(found[1])


def per_tensor(folder: Path, shape: tuple[int, ...]) -> Path:
    """Give each quantised weight of a folder one scale, of this shape."""
    fp8_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if name.endswith("_scale_inv"):
            tensors[name] = tensors[name].amax().reshape(shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


def streamed_stored_bytes(folder: Path) -> int:
    """Return the bytes of the layers' quantised weights and their scales in the file."""
    tensors = load_file(folder / "model.safetensors")
    scales = [name for name in tensors if name.endswith("_scale_inv")]
    return sum(tensors[name].nbytes + tensors[name.removesuffix("_scale_inv")].nbytes for name in scales)


@pytest.mark.parametrize("pack", [None, True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama, tied"])
def test_is_equal_to_what_stock_dequantises(kind: str, pack: bool | None, tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path, kind)
    expected, model = stock(folder), load(folder, pack=pack, unit_bytes=1)
    assert tl.stream.stats(model)["streamed_bytes"] > 0
    for _ in range(2):
        assert torch.equal(logits(model), logits(expected))
    assert torch.equal(generated(model, do_sample=False), generated(expected, do_sample=False))
    assert {name: each.dtype for name, each in model.named_parameters()} == {
        name: each.dtype for name, each in expected.named_parameters()
    }


def test_scales_that_are_not_of_equal_blocks(tmp_path: Path) -> None:
    """Stock transformers cannot dequantise them either."""
    folder = fp8_folder(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = next(each for each in tensors if each.endswith("down_proj.weight_scale_inv"))
    rows = tensors[name.removesuffix("_scale_inv")].shape[0]
    uneven = next(count for count in range(2, rows) if rows % count)
    tensors[name] = torch.ones(uneven, tensors[name].shape[1])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        tl.Format, match="down_proj.weight, made from .* cannot be computed .*not divisible by scale grid"
    ):
        load(folder, 10**9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = _rewrite(save_model(ARCHITECTURES["qwen3"](), tmp_path, dtype), _fp8(), _FP8_SETTINGS)
    assert torch.equal(logits(load(folder)), logits(stock(folder)))


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.bfloat16])
def test_other_dtypes_of_scales(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path, scale_dtype=scale_dtype)
    assert torch.equal(logits(load(folder)), logits(stock(folder)))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_of_whole_tensors(shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = per_tensor(tmp_path, shape)
    assert torch.equal(logits(load(folder)), logits(stock(folder)))


@pytest.mark.parametrize("unit_bytes", [1, 10_000, "1MB"])
def test_any_size_of_units(unit_bytes: Any, tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    assert torch.equal(logits(load(folder, unit_bytes=unit_bytes)), logits(stock(folder)))
    assert torch.equal(logits(load(folder, "1GB", unit_bytes=unit_bytes)), logits(stock(folder)))


def test_reads_the_stored_bytes(tmp_path: Path) -> None:
    config = ARCHITECTURES["qwen3"]()
    config.hidden_size, config.intermediate_size = 256, 512
    folder = _rewrite(save_model(config, tmp_path), _fp8(), _FP8_SETTINGS)
    stored = streamed_stored_bytes(folder)
    model = load(folder, unit_bytes=1)
    before = tl.stream.stats(model)
    passes = 20
    for _ in range(passes):
        logits(model)
    after = tl.stream.stats(model)
    assert after["streamed_bytes"] <= stored
    per_pass = (after["bytes_read"] - before["bytes_read"]) / passes
    assert 0.5 * stored < per_pass <= 1.02 * after["streamed_bytes"]
    budget = after["memory_bytes"]
    dequantised = tl.transformers.from_pretrained(folder, memory_budget=budget, unit_bytes=1)
    assert tl.stream.stats(dequantised)["streamed_bytes"] > 1.9 * after["streamed_bytes"]


def test_the_least_budget_is_exact(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path / "model")
    for number, unit_bytes in enumerate((None, 1, 20_000)):
        options: dict[str, Any] = {"unit_bytes": unit_bytes, "pack_dir": tmp_path / f"pack{number}"}
        enough = least(folder, **options)
        with pytest.raises(tl.OutOfBudget):
            load(folder, enough - 1, **options)
        model = load(folder, enough, **options)
        assert tl.stream.stats(model)["memory_bytes"] <= enough
        assert least(folder, **options) == enough
    assert torch.equal(logits(model), logits(stock(folder)))


@pytest.mark.parametrize("share", [1.0, 1.3, 10.0])
def test_the_plan_is_that_of_the_model(share: float, tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    budget = int(least(folder) * share)
    planned = tl.stream.plan(folder, keep="quantised", memory_budget=budget, bandwidth=1e9, flops=1e12)
    found = tl.stream.stats(load(folder, budget))
    assert planned["least_budget"] == least(folder)
    assert planned["streamed_bytes"] == found["streamed_bytes"]
    assert planned["weight_bytes"] == sum(
        each.nbytes for each in load_file(folder / "model.safetensors").values()
    )
    default = tl.stream.plan(folder, memory_budget="1GB", bandwidth=1e9, flops=1e12)
    assert planned["compute_seconds"] == default["compute_seconds"]
    assert planned["pack"]["bytes"] < 0.8 * default["pack"]["bytes"]


def test_a_pack_is_found_again_and_another_choice_replaces_it(tmp_path: Path) -> None:
    folder, pack = fp8_folder(tmp_path / "model"), tmp_path / "pack"
    made = tl.transformers.pack(folder, [pack], keep="quantised")
    assert made["made"]
    assert not tl.transformers.pack(folder, [pack], keep="quantised")["made"]
    before = (pack / "pack.json").stat().st_ino
    model = load(folder, "1GB", pack_dir=pack)
    assert (pack / "pack.json").stat().st_ino == before
    assert torch.equal(logits(model), logits(stock(folder)))
    assert tl.transformers.pack(folder, [pack])["bytes"] > made["bytes"]
    dequantised = tl.transformers.from_pretrained(folder, pack_dir=pack)
    assert torch.equal(logits(dequantised), logits(stock(folder)))


def test_checkpoints_that_are_not_quantised_are_the_same(tmp_path: Path) -> None:
    folder = save_model(ARCHITECTURES["llama"](), tmp_path)
    assert torch.equal(logits(load(folder, "1GB")), logits(stock(folder)))


def test_other_values_and_gpus_are_rejected(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    with pytest.raises(ValueError, match='keep: must be "quantised" or "dequantised", not "int8"|int8'):
        tl.transformers.from_pretrained(folder, keep="int8")
    with pytest.raises(tl.Unsupported, match='keep: "quantised" is only supported for a model on the CPU'):
        tl.stream.plan(
            folder,
            device="cuda",
            keep="quantised",
            memory_budget="1GB",
            bandwidth=1e9,
            bus_bandwidth=1e9,
            flops=1e12,
        )


def test_modes_of_torch(tmp_path: Path) -> None:
    folder = fp8_folder(tmp_path)
    expected, model = stock(folder), load(folder, unit_bytes=1)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(model(**prompt()).logits, expected(**prompt()).logits.detach())


def test_the_default_device_is_ignored() -> None:
    _is_equal.cache_clear()
    matrix, found = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.zeros(4, 4)
    with torch.device("meta"):
        Dequantise(Fp8Dequantize(None), torch.float32)([matrix, torch.tensor([[0.5]], device="cpu")], found)
        assert _is_equal(Fp8Dequantize, torch.float8_e4m3fn, torch.float32, torch.float32)
    assert torch.equal(found, torch.full((4, 4), 0.5))


def test_a_unit_whose_scratch_was_taken_is_dequantised_again(tmp_path: Path) -> None:
    """Modules of two units that take turns each get their own values."""
    folder = fp8_folder(tmp_path)
    expected, model = stock(folder), load(folder, "1GB", unit_bytes=1)
    layer, of_stock = model.model.layers[0], expected.model.layers[0]
    rows = torch.ones(1, 3, model.config.hidden_size, dtype=model.dtype)
    found: list[torch.Tensor] = []

    def turns(module: Any, inputs: Any, output: Any) -> None:
        for each in (module.q_proj, module.k_proj, module.q_proj):
            with torch.no_grad():
                found.append(each(rows))

    layer.self_attn.register_forward_hook(turns)
    logits(model)
    with torch.no_grad():
        q, k = of_stock.self_attn.q_proj(rows), of_stock.self_attn.k_proj(rows)
    assert all(torch.equal(each, other) for each, other in zip(found[:3], (q, k, q), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "columns", "grid"), [(64, 48, (4, 3)), (2000, 1000, (2, 5)), (9, 7, (1, 1))]
)
def test_values_are_those_of_transformers(
    dtype: torch.dtype, rows: int, columns: int, grid: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    operation = Fp8Dequantize(None)
    for matrix in (codes, torch.where(codes % 128 == 127, 1, codes).to(torch.uint8)):  # with NaN, and without
        for scale_dtype in (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8):
            scales = torch.rand(grid, generator=generator)
            scales = (scales * 255).to(scale_dtype) if scale_dtype == torch.uint8 else scales.to(scale_dtype)
            stored, found = matrix.view(torch.float8_e4m3fn), torch.empty(rows, columns, dtype=dtype)
            Dequantise(operation, dtype)([stored, scales], found)
            expected = operation._dequantize_one(stored, scales, dtype)
            assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint8])
def test_scales_with_a_dimension_more(scale_dtype: torch.dtype) -> None:
    """Of a matrix that is dequantised in several chunks where it is not looked up."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 120, (2048, 512), dtype=torch.uint8, generator=generator)
    scales = torch.randint(120, 130, (1, 4, 2), generator=generator).to(scale_dtype)
    operation, found = Fp8Dequantize(None), torch.empty(2048, 512, dtype=torch.bfloat16)
    stored = [codes.view(torch.float8_e4m3fn), scales]
    expected = operation._dequantize_one(*stored, torch.bfloat16).reshape(2048, 512)
    Dequantise(operation, torch.bfloat16)(stored, found)
    assert torch.equal(found, expected)
    found.zero_()
    assert look_up(*stored, found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_values_of_packed_fp4(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Two in a byte, as experts of DeepSeek-V4 are stored, with a scale for 32 of them."""
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randint(-128, 128, (70, 48), dtype=torch.int8, generator=generator)
    scales = torch.randint(90, 160, (70, 3), dtype=torch.uint8, generator=generator).view(
        torch.float8_e8m0fnu
    )
    stored, found = [matrix, scales.to(scale_dtype)], torch.empty(70, 96, dtype=dtype)
    operation = Fp8Dequantize(None)
    Dequantise(operation, dtype)(stored, found)
    assert torch.equal(found, operation._dequantize_one(*stored, dtype))
    assert look_up(*stored, found) == (scale_dtype == torch.float8_e8m0fnu)
