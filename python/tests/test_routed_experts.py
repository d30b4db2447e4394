"""Models of routed experts read those that their tokens use, and compute what fully loaded ones do."""

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support_experts import FAMILIES, small_config
from support_models import make_folder, pack_directory, prompt, save_model, stock, transformers
from test_streaming import generated, least, logits

import trunkline as tl
from trunkline._streaming.layers import find_layers
from trunkline._streaming.streaming import streaming_of
from trunkline.transformers import meta_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")


def routed(folder: Path, more: int = 0, **options: Any) -> Any:
    """Load with the least budget, and `more` bytes; experts are read as tokens are routed to them."""
    model = tl.transformers.from_pretrained(folder, memory_budget=least(folder, **options) + more, **options)
    assert streaming_of[model].experts is not None
    return model


def of_experts(model: Any) -> dict[str, Any]:
    """Return what stats() says about experts."""
    found: dict[str, Any] = tl.stream.stats(model)["experts"]
    return found


def decoded(model: Any, steps: int = 5) -> torch.Tensor:
    """Return the scores of a prompt and of some further tokens, with the cache that the model makes."""
    inputs, scores, cache = prompt(), [], None
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        for _ in range(steps):
            new = ids if cache is None else ids[:, -1:]
            output = model(input_ids=new, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            scores.append(output.logits[:, -1:])
            ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return torch.cat(scores, dim=1)


def several_passes(model: Any) -> None:
    for _ in range(12):
        logits(model)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_is_equal_to_the_fully_loaded_model(kind: str, tmp_path: Path) -> None:
    folder = save_model(small_config(kind), tmp_path)
    expected = stock(folder)
    usual = expected.get_experts_implementation()
    more = 0
    for _ in range(2):
        model = routed(folder, more)
        more = of_experts(model)["total_bytes"] // 2
        assert model.get_experts_implementation() == usual
        for implementation in _IMPLEMENTATIONS:
            for each in (model, expected):
                each.set_experts_implementation(implementation)
            assert torch.equal(logits(model), logits(expected)), implementation
            assert torch.equal(decoded(model), decoded(expected)), implementation
    stats = of_experts(model)
    assert stats["hits"] > 0
    assert stats["misses"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "mixtral", "nemotron_h", "deepseek_v3"])
def test_every_dtype(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(small_config(kind), tmp_path, dtype)
    expected, model = stock(folder), routed(folder, 50_000)
    for implementation in _IMPLEMENTATIONS:
        for each in (model, expected):
            each.set_experts_implementation(implementation)
        assert torch.equal(decoded(model), decoded(expected)), implementation


def test_layers_that_the_config_counts_otherwise_are_found(tmp_path: Path) -> None:
    transformers.LongcatFlashConfig(num_layers=2, hidden_size=64, vocab_size=97).save_pretrained(tmp_path)
    path, layers = find_layers(meta_model.make(tmp_path, None))
    assert path == "model.layers"
    assert len(layers) == 2


def test_convolutions_that_a_model_uses_outside_of_their_modules_stay(tmp_path: Path) -> None:
    folder = save_model(small_config("qwen3_next"), tmp_path)
    model = tl.transformers.from_pretrained(folder, memory_budget="1GB", unit_bytes=1)
    assert streaming_of[model].streamed_bytes == 0
    assert torch.equal(logits(model), logits(stock(folder)))


def test_a_token_reads_the_experts_that_it_uses_and_that_are_not_in_memory(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    for more, slots in ((0, 2), (120_000, 6)):
        model = routed(folder, more)
        cache = streaming_of[model].experts
        assert cache is not None
        assert min(cache.placement["slots"]) >= slots
        with torch.no_grad():
            for token in range(7):
                model(torch.tensor([[token]]))
            before = cache.stats()
            model(torch.tensor([[50]]))
        after = {name: value - before[name] for name, value in cache.stats().items()}
        layers, per_token, matrices = 4, 2, 2
        assert after["requests"] == layers
        assert after["hits"] + after["misses"] == layers * per_token * matrices
        assert after["acquired"] == layers * per_token * matrices
        assert after["units_read"] == after["misses"]
        nbytes = {64 * 48 * 2: 0, 2 * 64 * 48 * 2: 0}  # of a matrix in bf16
        assert after["bytes_read"] <= after["misses"] * max(nbytes)
        assert after["bytes_read"] >= after["misses"] * min(nbytes)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_long_prompt_reads_each_expert_once(implementation: str, tmp_path: Path) -> None:
    folder = save_model(small_config("qwen3_moe", experts=16, num_hidden_layers=3), tmp_path)
    expected, model = stock(folder), routed(folder)
    ids = torch.randint(3, 90, (4, 40), generator=torch.Generator().manual_seed(2))
    for each in (model, expected):
        each.set_experts_implementation(implementation)
    for passes in (1, 2):
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected(ids).logits)
        stats = of_experts(model)
        # And what is read ahead for the next pass.
        assert stats["bytes_read"] <= passes * stats["total_bytes"] + stats["cached_bytes"]
    assert stats["cached_bytes"] < stats["total_bytes"] / 4


def test_a_model_that_fits_is_not_routed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    model = tl.transformers.from_pretrained(folder, memory_budget="1GB")
    assert streaming_of[model].experts is None
    assert "experts" not in tl.stream.stats(model)
    assert torch.equal(logits(model), logits(stock(folder)))


def test_the_least_budget_has_room_for_two_experts_and_not_for_a_layer(tmp_path: Path) -> None:
    config = small_config("qwen3_moe", experts=64)
    folder = save_model(config, tmp_path)
    budget = least(folder)
    layer = 64 * 3 * 64 * 32 * 2
    model = routed(folder)
    assert tl.stream.stats(model)["memory_bytes"] <= budget < layer
    assert torch.equal(logits(model), logits(stock(folder)))


@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"do_sample": False, "num_beams": 3}, {"do_sample": False}], ids=str
)
def test_every_way_to_generate(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "mixtral")
    assert torch.equal(generated(routed(folder), **options), generated(stock(folder), **options))


def test_a_compiled_model_is_equal(tmp_path: Path) -> None:
    folder = save_model(small_config("qwen3_moe"), tmp_path)
    expected = logits(stock(folder))
    torch.compiler.reset()
    model: Any = torch.compile(routed(folder), backend="eager")
    for _ in range(2):
        assert torch.equal(logits(model), expected)


def test_a_damaged_expert_is_named_and_read_again_when_it_is_repaired(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    model = routed(folder)
    expected = stock(folder)
    manifest = json.loads((pack_directory(folder) / "pack.json").read_text())
    stored = next(each for each in manifest["tensors"] if each["name"].endswith("2.mlp.experts.down_proj"))
    assert len(stored["slices_crc32c"]) == 4
    with (pack_directory(folder) / "weights.safetensors").open("r+b") as weights:
        weights.seek(stored["offset"] + 64 * 48 * 2 + 77)  # of expert 1
        byte = weights.read(1)
        weights.seek(-1, 1)
        weights.write(bytes([byte[0] ^ 1]))
    with pytest.raises(tl.Corrupt, match=r"layers\.2\.mlp\.experts\.down_proj\[1\].*remove .* to rebuild"):
        several_passes(model)
    with (pack_directory(folder) / "weights.safetensors").open("r+b") as weights:
        weights.seek(stored["offset"] + 64 * 48 * 2 + 77)
        weights.write(byte)
    for _ in range(2):
        assert torch.equal(logits(model), logits(expected))


def test_a_pack_without_checksums_of_experts_is_made_anew(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    routed(folder)
    path = pack_directory(folder) / "pack.json"
    manifest = json.loads(path.read_text())
    for tensor in manifest["tensors"]:
        tensor.pop("slices_crc32c", None)
    path.write_text(json.dumps(manifest))
    assert torch.equal(logits(routed(folder)), logits(stock(folder)))
    assert "slices_crc32c" in path.read_text()


def test_a_manifest_with_checksums_of_too_few_experts_is_rejected(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    routed(folder)
    path = pack_directory(folder) / "pack.json"
    manifest = json.loads(path.read_text())
    next(each for each in manifest["tensors"] if "slices_crc32c" in each)["slices_crc32c"].pop()
    path.write_text(json.dumps(manifest))
    with pytest.raises(tl.Format, match=r"experts\..*does not have 3 slices"):
        routed(folder)


def test_files_are_read_in_place(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = make_folder(tmp_path / "model", "qwen3-moe", torch.float32)
    routed(folder)
    weights = load_file(pack_directory(folder) / "weights.safetensors")
    fused = tmp_path / "fused"
    fused.mkdir()
    (fused / "config.json").write_bytes((folder / "config.json").read_bytes())
    tl.save(
        {name: value for name, value in weights.items() if "padding" not in name},
        fused / "model.safetensors",
    )
    model = routed(fused, 30_000)
    assert tl.stream.stats(model)["source"] == str(fused)
    assert torch.equal(decoded(model), decoded(stock(fused)))


def test_after_an_interrupt_the_model_works(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    model = routed(folder)
    expected = logits(stock(folder))
    experts = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    rng = random.Random(4)

    class Interrupt(BaseException):
        pass

    for _ in range(12):
        left = rng.randint(1, 12)

        def interrupt(*_: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Interrupt

        handles = [module.act_fn.register_forward_pre_hook(interrupt) for module in experts]
        with pytest.raises(Interrupt):
            several_passes(model)
        for handle in handles:
            handle.remove()
        assert torch.equal(logits(model), expected)


def test_one_thread_at_a_time(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    model = routed(folder)
    expected = logits(stock(folder))
    found: list[bool] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: found.append(torch.equal(logits(model), expected)))
        thread.start()
        thread.join()
    assert found == [True] * 3


def test_other_uses_of_the_experts_are_refused(tmp_path: Path) -> None:
    model = routed(make_folder(tmp_path, "qwen3-moe"))
    experts = next(module for module in model.modules() if hasattr(module, "_is_expert_parallel"))
    weight = experts.gate_up_proj
    assert tuple(weight.shape) == (4, 96, 64)
    assert weight.device == torch.device("cpu")
    for use in (
        lambda: weight + 1,
        lambda: weight.sum(),
        lambda: weight[:2],
        lambda: weight[None],
        lambda: torch.bmm(torch.zeros(4, 1, 96), weight),
        lambda: weight.transpose(0, 1),
        lambda: weight.transpose(1, 2)[0],
        lambda: weight[0],  # the module does not run: its memory is that of other experts
        lambda: weight[torch.tensor([0, 1])],
        lambda: weight[0].add_(1),
        lambda: torch.nn.functional.grouped_mm(
            torch.zeros(1, 64), weight.transpose(1, 2), offs=torch.ones(4, dtype=torch.int32)
        ),
    ):
        with pytest.raises(tl.Unsupported, match=r"experts\.gate_up_proj"):
            use()
    with pytest.raises(tl.Unsupported):
        model.state_dict()


def test_matrices_of_experts_are_refused_outside_of_their_modules_forward(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    model, expected = routed(folder), logits(stock(folder))
    assert torch.equal(logits(model), expected)
    modules = [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]
    weight = modules[0].gate_up_proj
    uses = (
        lambda: weight[0],
        lambda: weight[torch.tensor(0)],
        lambda: weight[torch.tensor([0, 1])],
        lambda: weight[0].add_(1),
        lambda: weight[0].data.zero_(),
        lambda: torch.nn.functional.grouped_mm(
            torch.zeros(4, 64, dtype=torch.bfloat16), weight.transpose(1, 2), offs=torch.tensor([1, 2, 3, 4])
        ),
    )

    def refused() -> None:
        for use in uses:
            with pytest.raises(tl.Unsupported, match=r"experts\.gate_up_proj: it is streamed"):
                use()

    refused()
    # The forward of another module does not make them usable, and neither does one that was interrupted.
    handle = modules[1].act_fn.register_forward_pre_hook(lambda *_: refused())
    assert torch.equal(logits(model), expected)
    handle.remove()

    def interrupt(*_: Any) -> None:
        with pytest.raises(IndexError):
            weight[4]
        raise KeyboardInterrupt

    handle = modules[0].act_fn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    handle.remove()
    refused()
    assert torch.equal(logits(model), expected)


def test_a_plan_knows_routing(tmp_path: Path) -> None:
    folder = save_model(small_config("qwen3_moe", experts=32), tmp_path)
    model = routed(folder)
    budget = least(folder)
    planned = tl.stream.plan(folder, memory_budget=budget, bandwidth=1e9, flops=1e12)
    stats = tl.stream.stats(model)
    assert planned["least_budget"] == budget
    assert planned["streamed_bytes"] == stats["streamed_bytes"]
    experts = planned["experts"]
    assert experts["total_bytes"] == stats["experts"]["total_bytes"]
    expert, layers = 3 * 64 * 32 * 2, 2
    assert experts["used_bytes"] == 2 * layers * expert
    assert planned["storage_seconds"] == pytest.approx(
        (planned["streamed_bytes"] + experts["read_bytes"]) / 1e9, rel=1e-3
    )
    # More memory, more skew and smaller batches read less for each token.
    more = budget + 300_000

    def read(**options: Any) -> float:
        options = {"memory_budget": more, **options}
        plan = tl.stream.plan(folder, bandwidth=1e9, flops=1e12, **options)
        return float(plan["experts"]["read_bytes"])

    assert read() < experts["read_bytes"]
    assert read(skew=1.0) < read()
    assert read() < read(batch_size=8) < 8 * read()
    with pytest.raises(ValueError, match="skew: must be a number from 0"):
        read(skew=-1)
    assert "experts" not in tl.stream.plan(folder, memory_budget="1GB", bandwidth=1e9, flops=1e12)


def test_a_token_computes_with_the_experts_that_it_uses_also_if_all_are_in_memory(tmp_path: Path) -> None:
    folder = save_model(small_config("qwen3_moe"), tmp_path)
    options: dict[str, Any] = {"bandwidth": 1e9, "flops": 1e12}
    fits = tl.stream.plan(folder, memory_budget="1GB", **options)
    routed = tl.stream.plan(folder, memory_budget=fits["least_budget"], **options)
    assert "experts" not in fits
    assert "experts" in routed
    assert fits["compute_seconds"] == routed["compute_seconds"]
    assert fits["weight_bytes"] == routed["weight_bytes"]


def test_layers_are_in_the_statistics_on_request_only(tmp_path: Path) -> None:
    model = routed(make_folder(tmp_path, "qwen3-moe"))
    assert "layers" not in of_experts(model)
    fresh = tl.stream.stats(model, per_layer=True)["experts"]["layers"]
    assert [(each["steps"], each["hit_rate"], each["used_per_step"]) for each in fresh] == [
        (0, None, None)
    ] * 4
    several_passes(model)
    experts = tl.stream.stats(model, per_layer=True)["experts"]
    for key in ("hits", "misses", "bytes_read", "evictions", "steps"):
        assert sum(layer[key] for layer in experts["layers"]) == experts[key] > 0
    assert {layer["steps"] for layer in experts["layers"]} == {12}
    assert experts["layers"][2]["name"] == "model.layers.2.mlp.experts"
    whole = tl.transformers.from_pretrained(tmp_path, memory_budget="1GB")
    assert "experts" not in tl.stream.stats(whole, per_layer=True)
    with pytest.raises(TypeError, match="per_layer: must be True or False"):
        tl.stream.stats(model, per_layer="yes")  # type: ignore[arg-type]
