"""Quantised experts that are read as they are stored, and dequantised when tokens are routed to them."""

import dataclasses
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support_warm
import torch
from safetensors.torch import load_file, save_file
from support_models import stock
from test_in_place import limit_room
from test_kept_quantised import least, load
from test_quantised_models import experts_in_fp8, fp8_folder, gpt_oss_folder
from test_routed_experts import _IMPLEMENTATIONS, decoded, of_experts, several_passes
from test_streaming import logits
from transformers.integrations.mxfp4 import dequantize_convertops

import trunkline as tl
from trunkline._streaming.pack_cache import cached_packs
from trunkline._streaming.streaming import streaming_of
from trunkline.transformers import _kept_quantised
from trunkline.transformers._dequantise import dequantise_mxfp4
from trunkline.transformers._expert_records import ExpertRecords
from trunkline.transformers._routed_weights import RoutedWeight

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_FP8_FAMILIES = (
    *("deepseek_v3", "deepseek_v4", "glm4_moe", "minimax_m2", "mixtral", "nemotron_h", "qwen3_moe"),
    "qwen3_next",
)


def _folder(kind: str, path: Path) -> Path:
    return gpt_oss_folder(path) if kind == "gpt_oss" else experts_in_fp8(path, kind)


def _stored_bytes(folder: Path) -> int:
    """Return the bytes of the experts' quantised matrices and their scales in the files."""
    tensors = load_file(folder / "model.safetensors")
    return sum(
        each.nbytes
        for name, each in tensors.items()
        if ".experts." in name and (each.dtype.itemsize == 1 or name.endswith("_scale_inv"))
    )


def _records(model: Any) -> list[ExpertRecords]:
    found = []
    for weight in model.parameters():
        if isinstance(weight, RoutedWeight) and weight.matrices._quantised is not None:
            records = weight.matrices._quantised.weight.dequantise.__self__  # type: ignore[attr-defined]
            found.append(records)
    return found


@pytest.mark.parametrize("kind", [*_FP8_FAMILIES, "gpt_oss"])
def test_is_equal_to_what_stock_dequantises(kind: str, tmp_path: Path) -> None:
    folder = _folder(kind, tmp_path)
    expected, budget = stock(folder), least(folder)
    for memory in (budget, 2 * budget, 10**9):
        model = load(folder, memory)
        assert tl.stream.stats(model)["memory_bytes"] <= memory
        found = _records(model)
        assert found
        assert all(each._method is not None for each in found)
        for implementation in _IMPLEMENTATIONS:
            for each in (model, expected):
                each.set_experts_implementation(implementation)
            assert torch.equal(logits(model), logits(expected)), implementation
            assert torch.equal(decoded(model), decoded(expected)), implementation


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_other_dtypes(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = _folder(kind, tmp_path)
    model = load(folder, least(folder, dtype=dtype), dtype=dtype)
    assert torch.equal(logits(model), logits(stock(folder, dtype=dtype)))


def test_all_weights_of_a_model(tmp_path: Path) -> None:
    """Experts and others, with a pack of both."""
    folder = fp8_folder(tmp_path, "qwen3-moe")
    expected = stock(folder)
    for memory in (least(folder), "1GB"):
        model = load(folder, memory)
        assert torch.equal(logits(model), logits(expected))
        assert torch.equal(decoded(model), decoded(expected))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_without_a_faster_way_transformers_dequantises(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExpertRecords, "_methods", lambda *_: iter(()))
    folder = _folder(kind, tmp_path)
    model = load(folder)
    assert all(each._method is None for each in _records(model))
    assert torch.equal(logits(model), logits(stock(folder)))


def test_a_faster_way_with_other_results_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(tensors: Any, out: torch.Tensor) -> None:
        out.zero_()

    monkeypatch.setattr(ExpertRecords, "_methods", lambda *_: iter((wrong,)))
    folder = _folder("gpt_oss", tmp_path)
    assert torch.equal(logits(load(folder)), logits(stock(folder)))


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_reads_the_stored_bytes(kind: str, tmp_path: Path) -> None:
    folder = _folder(kind, tmp_path)
    stored = _stored_bytes(folder)
    model = load(folder)
    several_passes(model)
    found = of_experts(model)
    padding = 128 * 8 * len(_records(model))  # of each tensor in a record, and of the record
    assert stored <= found["total_bytes"] <= stored + padding
    assert found["misses"] > 0
    experts = 8 * len(_records(model))
    assert found["bytes_read"] == pytest.approx(found["misses"] * found["total_bytes"] / experts, rel=0.5)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_the_least_budget_is_exact(kind: str, tmp_path: Path) -> None:
    folder = _folder(kind, tmp_path)
    enough = least(folder)
    with pytest.raises(tl.OutOfBudget):
        load(folder, enough - 1)
    assert tl.stream.stats(load(folder, enough))["memory_bytes"] <= enough
    assert least(folder) == enough


@pytest.mark.parametrize("share", [1.0, 1.5, 100.0])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_the_plan_is_that_of_the_model(kind: str, share: float, tmp_path: Path) -> None:
    folder = _folder(kind, tmp_path)
    budget = int(least(folder) * share)
    planned = tl.stream.plan(folder, keep="quantised", memory_budget=budget, bandwidth=1e9, flops=1e12)
    model = load(folder, budget)
    found = tl.stream.stats(model)
    assert planned["least_budget"] == least(folder)
    assert planned["streamed_bytes"] == found["streamed_bytes"]
    assert planned["experts"]["total_bytes"] == found["experts"]["total_bytes"]
    default = tl.stream.plan(folder, memory_budget=10**9, bandwidth=1e9, flops=1e12)
    assert planned["compute_seconds"] == default["compute_seconds"]
    assert planned["pack"]["bytes"] < 0.9 * default["pack"]["bytes"]


def test_a_pack_is_found_again_and_another_choice_replaces_it(tmp_path: Path) -> None:
    folder, pack = _folder("gpt_oss", tmp_path / "model"), tmp_path / "pack"
    made = tl.transformers.pack(folder, [pack], keep="quantised")
    assert made["made"]
    assert not tl.transformers.pack(folder, [pack], keep="quantised")["made"]
    assert torch.equal(logits(load(folder, "1GB", pack_dir=pack)), logits(stock(folder)))
    assert tl.transformers.pack(folder, [pack])["bytes"] > made["bytes"]
    dequantised = tl.transformers.from_pretrained(folder, pack_dir=pack)
    assert torch.equal(logits(dequantised), logits(stock(folder)))


def test_packs_in_the_cache_say_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_CACHE", str(tmp_path / "cache"))
    folder = _folder("gpt_oss", tmp_path / "model")
    for keep in ("quantised", "dequantised"):
        tl.transformers.pack(folder, keep=keep)
    assert sorted(each.form for each in cached_packs()) == ["converted", "quantised experts"]
    limit_room(monkeypatch, 1000)
    with pytest.raises(
        tl.Error, match=r'TRUNKLINE_CACHE\); on a CPU, keep="quantised" takes about [\d.e-]+ GB$'
    ):
        tl.transformers.pack(folder, [tmp_path / "other"])


def test_a_pack_of_other_records_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same size, but in another order: their bytes would be taken for others."""
    folder, pack = _folder("qwen3_moe", tmp_path / "model"), tmp_path / "pack"
    with monkeypatch.context() as patch:
        stock_parts = _kept_quantised.parts_of
        patch.setattr(_kept_quantised, "parts_of", lambda *given: _turned(stock_parts(*given)))
        assert tl.transformers.pack(folder, [pack], keep="quantised")["made"]
    model = load(folder, pack_dir=pack)
    assert torch.equal(logits(model), logits(stock(folder)))
    assert not tl.transformers.pack(folder, [pack], keep="quantised")["made"]


def _turned(parts: Any) -> Any:
    """Swap the first two tensors of equal size in a record, and the patterns that they belong to."""
    halves = [number for number, part in enumerate(parts) if not part.pattern.endswith("_scale_inv")]
    if len(halves) == 2:
        one, other = halves
        parts[one], parts[other] = (
            dataclasses.replace(parts[other], begin=parts[one].begin),
            dataclasses.replace(parts[one], begin=parts[other].begin),
        )
    return parts


def test_a_damaged_expert_is_named(tmp_path: Path) -> None:
    folder, pack = _folder("qwen3_moe", tmp_path / "model"), tmp_path / "pack"
    tl.transformers.pack(folder, [pack], keep="quantised")
    manifest = json.loads((pack / "pack.json").read_text())
    stored = next(each for each in manifest["tensors"] if each["name"].endswith("1.mlp.experts.down_proj"))
    count, nbytes = stored["shape"]
    assert len(stored["slices_crc32c"]) == count
    with (pack / "weights.safetensors").open("r+b") as weights:
        weights.seek(stored["offset"] + nbytes + 7)  # of expert 1
        byte = weights.read(1)
        weights.seek(-1, 1)
        weights.write(bytes([byte[0] ^ 1]))
    model = load(folder, pack_dir=pack)
    with pytest.raises(tl.Corrupt, match=r"layers\.1\.mlp\.experts\.down_proj\[1\].*remove .* to rebuild"):
        several_passes(model)


def test_files_cannot_be_read_in_place(tmp_path: Path) -> None:
    with pytest.raises(tl.Unsupported, match=r"pack: False, but .*stored in parts .* omit pack"):
        load(_folder("qwen3_moe", tmp_path), "1GB", pack=False)


def _changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Change the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_experts_of_different_dtypes_are_rejected_by_name(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
        tensors[name] = tensors[name].to(torch.bfloat16)

    folder = _changed(_folder("qwen3_moe", tmp_path), change)
    with pytest.raises(tl.Unsupported, match=r"experts\.3\.up_proj.*is bfloat16 .* is float32.*omit keep"):
        load(folder, "1GB")


@pytest.mark.parametrize("keep", ["quantised", "dequantised"])
def test_missing_scales_are_rejected_by_name(keep: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if each.endswith("gate_proj.weight_scale_inv")]:
            del tensors[name]

    folder = _changed(_folder("qwen3_moe", tmp_path), change)
    with pytest.raises(tl.Format, match=r"layers\.0\.mlp\.experts\.gate_up_proj, made from .*missing"):
        tl.transformers.from_pretrained(folder, keep=keep, memory_budget="1GB")


def test_a_layer_of_another_shape_is_named(tmp_path: Path) -> None:
    """What is known of the layer before does not hide it."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        tensors[name] = tensors[name][:-1].contiguous()

    folder = _changed(_folder("qwen3_moe", tmp_path), change)
    with pytest.raises(
        tl.Format, match=r"layers\.1\.mlp\.experts\.gate_up_proj, made from .*cannot be computed"
    ):
        load(folder, "1GB")


def test_halves_in_another_order_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if transformers put the second half first."""
    folder = _folder("qwen3_moe", tmp_path)
    usual = ExpertRecords._by_converter

    def turned(self: ExpertRecords, tensors: Any) -> torch.Tensor:
        found = usual(self, tensors)
        return torch.cat(found.chunk(2)[::-1]) if "gate_up" in self.path else found

    monkeypatch.setattr(ExpertRecords, "_by_converter", turned)
    found = _records(load(folder, "1GB"))
    assert {each.path.rpartition(".")[2]: each._method is None for each in found} == {
        "gate_up_proj": True,
        "down_proj": False,
    }


def test_the_model_is_freed_with_the_last_reference(tmp_path: Path) -> None:
    model = load(_folder("gpt_oss", tmp_path))
    found = _records(model)
    assert streaming_of[model].experts is not None
    del model
    gc.collect()
    assert all(each._model() is None for each in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (64, 3), (700, 90)])
def test_mxfp4_is_what_transformers_computes(dtype: torch.dtype, rows: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8, generator=generator)
    for least_scale, most in ((110, 130), (0, 255), (255, 256)):  # with infinity, and NaN for 0 times it
        scales = torch.randint(least_scale, most, (rows, groups), dtype=torch.uint8, generator=generator)
        found = torch.empty(32 * groups, rows, dtype=dtype)
        dequantise_mxfp4(blocks, scales, found)
        expected = dequantize_convertops(blocks[None], scales[None], dtype)[0]
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(0.5, 7, -7), expected.nan_to_num(0.5, 7, -7))


@pytest.mark.parametrize("keep", ["quantised", "dequantised"])
def test_saving_is_refused_before_the_config_is_written(keep: str, tmp_path: Path) -> None:
    """Without its quantization_config, transformers would take the stored bytes for weights."""
    folder = _folder("qwen3_moe", tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = tl.transformers.from_pretrained(folder, keep=keep, pack_dir=tmp_path / "pack")
    for target in (folder, tmp_path / "new"):
        with pytest.raises(tl.Unsupported, match="has no state_dict, and cannot be saved"):
            model.save_pretrained(target)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("keep", ["quantised", "dequantised"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tied_head_has_the_dtype_of_the_embedding(keep: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Which transformers keeps as it is stored, where the model is quantised."""
    folder = experts_in_fp8(tmp_path / "model", "qwen3_moe", tie_word_embeddings=True)
    model = tl.transformers.from_pretrained(folder, keep=keep, dtype=dtype, pack_dir=tmp_path / "pack")
    expected = stock(folder, dtype=dtype)
    assert model.lm_head.weight.dtype == expected.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(logits(model), logits(expected))


_LOAD_AND_TRIM = """
import ctypes, sys
from pathlib import Path
import trunkline as tl

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

folder, pack = sys.argv[1:]
model = tl.transformers.from_pretrained(folder, keep="quantised", memory_budget="30MB", pack_dir=pack)
loaded = anonymous_bytes()
ctypes.CDLL(None).malloc_trim(0)
print(loaded - anonymous_bytes())
"""


def test_memory_in_which_a_pack_was_made_is_given_back(tmp_path: Path) -> None:
    """It is freed, but glibc would keep tens of megabytes of it, beside the budget."""
    folder = gpt_oss_folder(tmp_path / "model", hidden_size=512, intermediate_size=1024, num_local_experts=16)
    kept = support_warm.run(["-c", _LOAD_AND_TRIM, folder, tmp_path / "pack"], check=True).stdout
    assert int(kept) < 8 << 20
