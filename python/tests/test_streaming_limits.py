"""What streamed models refuse, as a whole; and odd models and folders, which are treated as stock does."""

import copy
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_models import make_folder, prompt, save_model, stock, transformers
from test_streaming import generated, least, logits, streamed

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4}
ODD_MODELS: dict[str, Callable[[], Any]] = {
    # Its weights stand before an operand, and its mixers have weights of their own beside those within.
    "mamba": lambda: transformers.MambaConfig(**_SMALL, state_size=8),
    # The modules of its layers run several times, and their weights are read in between.
    "dbrx": lambda: transformers.DbrxConfig(
        d_model=64,
        n_heads=4,
        n_layers=4,
        max_seq_len=128,
        vocab_size=97,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    # Some of its matrices stay in fp32 whatever the dtype is.
    "deepseek-v4": lambda: transformers.CONFIG_MAPPING["deepseek_v4"](
        **_SMALL,
        intermediate_size=96,
        num_attention_heads=4,
        max_position_embeddings=128,
        moe_intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ODD_MODELS)
def test_odd_models_are_equal_to_stock_ones(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(ODD_MODELS[kind](), tmp_path, dtype)
    expected = stock(folder)
    for unit_bytes in ("1GB", None) if kind == "dbrx" else (None, 1):
        model = tl.transformers.from_pretrained(
            folder, memory_budget=least(folder, unit_bytes=unit_bytes), unit_bytes=unit_bytes
        )
        assert torch.equal(logits(model), logits(expected))
        assert torch.equal(generated(model, do_sample=False), generated(expected, do_sample=False))
        dtypes = {name: parameter.dtype for name, parameter in expected.named_parameters()}
        assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes


@pytest.mark.parametrize("kind", ODD_MODELS)
def test_odd_models_are_planned_as_they_are(kind: str, tmp_path: Path) -> None:
    folder = save_model(ODD_MODELS[kind](), tmp_path)
    budget = least(folder) + 40_000
    planned = tl.stream.plan(folder, memory_budget=budget, bandwidth=1e9, flops=1e12)
    stats = tl.stream.stats(tl.transformers.from_pretrained(folder, memory_budget=budget))
    assert planned["least_budget"] == budget - 40_000
    assert planned["streamed_bytes"] == stats["streamed_bytes"]
    # In memory the weights of a unit begin within pages; plan() does not read the files.
    assert 0 <= stats["resident_bytes"] - planned["resident_bytes"] <= 4 * 4096


def test_nothing_is_lost_when_a_streamed_model_is_to_be_saved(tmp_path: Path) -> None:
    """save_pretrained() of transformers removes what is in the folder before it writes."""
    folder, other = make_folder(tmp_path / "a"), make_folder(tmp_path / "b", seed=1)
    model = streamed(folder)
    before = {
        path: path.read_bytes() for path in (*folder.glob("*.safetensors"), *other.glob("*.safetensors"))
    }
    for place in (folder, other):
        for each in (model, model.model):
            with pytest.raises(tl.Unsupported, match="cannot be saved"):
                each.save_pretrained(place)
    assert {path: path.read_bytes() for path in before} == before
    assert torch.equal(logits(model), logits(stock(folder)))


def test_saving_absent_weights_says_what_can_be_saved(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    weights = dict(streamed(folder).named_parameters())
    advice = r"is a weight of a streamed model.*save what trunkline\.load returns for it$"
    with pytest.raises(tl.Unsupported, match=advice):
        tl.save(weights, tmp_path / "weights.safetensors")
    with pytest.raises(tl.Unsupported, match=advice):
        tl.Checkpointer(tmp_path / "run").save(1, weights, block=True)
    for name in ("weights.safetensors", "weights.pt"):
        tl.save(tl.load(folder), tmp_path / name)
        saved = tl.load(tmp_path / name)
        assert all(torch.equal(tensor, saved[key]) for key, tensor in stock(folder).named_parameters())


def test_moving_absent_weights_to_where_they_come_to_changes_nothing() -> None:
    from trunkline._streaming.offloaded import OffloadedWeight

    def absent(home: str) -> Any:
        parameter = torch.nn.Parameter(torch.empty(4, device="meta", dtype=torch.bfloat16))
        return OffloadedWeight.of("a.weight", parameter, torch.device(home))

    on_gpu, on_cpu = absent("cuda:0"), absent("cpu")
    for same in (
        on_gpu.to("cuda"),
        on_gpu.to("cuda:0", torch.bfloat16),
        on_gpu.cuda(),
        on_gpu.cuda(0),
        on_gpu.to(0),
    ):
        assert same is on_gpu
    for same in (
        on_cpu.cpu(),
        on_cpu.to("cpu"),
        on_cpu.bfloat16(),
        on_cpu.to(torch.bfloat16, non_blocking=True),
    ):
        assert same is on_cpu
    for move in (
        on_gpu.cpu,
        lambda: on_gpu.to("cpu"),
        lambda: on_gpu.cuda(1),
        lambda: on_gpu.cuda(device=1),
        lambda: on_gpu.to(1),
        lambda: absent("cuda:1").to("cuda"),
        lambda: on_cpu.to("cuda"),
        on_cpu.cuda,
        lambda: on_cpu.to("meta"),
    ):
        with pytest.raises(
            tl.Unsupported, match=r"cannot call .* on a\.weight, a weight of a streamed model"
        ):
            move()


def test_no_copy_of_absent_weights_gets_out(tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path), unit_bytes=1)
    weight = model.model.layers[2].mlp.up_proj.weight
    row = torch.ones(1, 64, dtype=torch.bfloat16)
    for use in (
        model.state_dict,
        lambda: torch.nn.functional.linear(row, weight.detach()),
        lambda: row @ weight.detach().T,
        lambda: torch.zeros(96, 64).add_(weight.detach()),
        lambda: torch.nn.functional.linear(row, model.model.layers.state_dict()["2.mlp.up_proj.weight"]),
        lambda: torch.save(model.model.layers.state_dict(), tmp_path / "a.pt"),
        lambda: tl.save(model.model.layers.state_dict(), tmp_path / "b.pt"),
        lambda: torch.save(model, tmp_path / "c.pt"),
        lambda: pickle.dumps(model),
        lambda: copy.deepcopy(model),
    ):
        with pytest.raises(tl.Unsupported, match="streamed"):
            use()


def _plain_gradient(model: Any) -> None:
    row = torch.randn(1, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    model.model.layers[2].mlp(row)


def _gradient_by_keyword(model: Any) -> None:
    row = torch.randn(1, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    places = model.model.rotary_emb(row, torch.arange(5)[None])
    model.model.layers[1](hidden_states=row, position_embeddings=places)


def _gradient_of_a_hook(model: Any) -> None:
    added = torch.zeros(64, dtype=torch.bfloat16, requires_grad=True)
    hook = model.model.layers[3].self_attn.register_forward_hook(
        lambda _module, _arguments, output: (output[0] + added, *output[1:])
    )
    try:
        model(**prompt())
    finally:
        hook.remove()


def _gradient_of_the_cache(model: Any) -> None:
    cache = transformers.DynamicCache(config=model.config)
    for layer in range(4):
        keys = torch.randn(2, 2, 3, 16, dtype=torch.bfloat16).requires_grad_(layer == 3)
        cache.update(keys, keys, layer)
    model(input_ids=prompt()["input_ids"], past_key_values=cache)


@pytest.mark.parametrize(
    "use", [_plain_gradient, _gradient_by_keyword, _gradient_of_a_hook, _gradient_of_the_cache]
)
def test_gradients_through_streamed_weights_are_refused(use: Callable[[Any], None], tmp_path: Path) -> None:
    """Autograd would keep views of memory that other weights are read into by then."""
    model = streamed(make_folder(tmp_path), unit_bytes=1)
    expected = logits(model)
    with pytest.raises(tl.Unsupported, match="gradients"):
        use(model)
    assert torch.equal(logits(model), expected)


def test_modules_can_be_called_outside_of_their_layer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model, expected = streamed(folder, unit_bytes=1), stock(folder)
    row = torch.randn(1, 5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in range(4):
            for name in ("mlp", "self_attn.q_proj"):
                ours = model.model.layers[layer].get_submodule(name)(row)
                assert torch.equal(ours, expected.model.layers[layer].get_submodule(name)(row))
    assert torch.equal(logits(model), logits(expected))


def test_generation_settings_of_older_folders_are_kept(tmp_path: Path) -> None:
    """They are in config.json, and so they are where generation_config.json cannot be read."""
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "do_sample": True, "top_k": 3, "num_beams": 2, "max_length": 15})
    )
    (folder / "generation_config.json").write_text("{broken")
    for _ in range(2):
        model, expected = streamed(folder), stock(folder)
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
        assert model.generation_config.top_k == 3
        assert torch.equal(generated(model), generated(expected))
        (folder / "generation_config.json").unlink(missing_ok=True)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("in_fp32", ["lm_head", "embed", "model.layers.3", "model.norm"])
def test_the_dtype_of_a_config_without_one(in_fp32: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: value.float() if in_fp32 in name else value for name, value in _tensors(folder).items()}
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    # Two files, the one that the index names first being the second.
    names = sorted(tensors)
    shards = {"model-00002-of-00002.safetensors": names[20:], "model-00001-of-00002.safetensors": names[:20]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard, metadata={"format": "pt"})
    index = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    model, expected = streamed(folder), stock(folder)
    assert model.dtype == expected.dtype
    assert torch.equal(logits(model), logits(expected))


def test_a_weight_that_is_stored_under_two_names(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    tensors = _tensors(folder)
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    other = {name.removeprefix("model."): value * 2 for name, value in tensors.items() if "layers.1." in name}
    save_file({**tensors, **other}, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(streamed(folder)), logits(stock(folder)))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "mixtral")
    shard = next(
        path for path in sorted(folder.glob("*.safetensors")) if "experts.1.w1" in str(load_file(path))
    )
    tensors = load_file(shard)
    gone = next(name for name in tensors if "experts.1.w1" in name)
    del tensors[gone]
    save_file(tensors, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"][gone]
    index.write_text(json.dumps(document))
    with pytest.raises(tl.Format, match=r"experts.*missing"):
        tl.transformers.from_pretrained(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "bogus"},
        {"dtype": "nonsense"},
        {"dtype": "float8_e4m3fn"},
        {"num_hidden_layers": "4"},
        {"num_attention_heads": 0},
        {"hidden_size": 1 << 40},
    ],
    ids=str,
)
def test_configs_that_make_no_model_are_named(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {"model_type": "llama", "dtype": "bfloat16", "num_attention_heads": 4, **_SMALL, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((tl.Unsupported, tl.Format), match=os.fspath(tmp_path)):
        tl.stream.plan(tmp_path, memory_budget="1GB", bandwidth=1e9, flops=1e12)


def test_dtypes_that_no_model_can_have_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for dtype in ("float8_e4m3fn", torch.float8_e5m2, torch.int8, "complex64"):
        with pytest.raises(ValueError, match="dtype"):
            tl.transformers.from_pretrained(folder, dtype=dtype)


def test_what_stays_is_not_copied_for_each_row(tmp_path: Path) -> None:
    """Torch copies a matrix for each row of a batch unless it could have gradients."""
    model = tl.transformers.from_pretrained(make_folder(tmp_path / "model"))
    head = model.lm_head.weight
    seen: list[bool] = []
    model.lm_head.register_forward_pre_hook(lambda module, arguments: seen.append(head.requires_grad))
    with torch.no_grad():
        model(**prompt())
    assert not head.requires_grad
    model(**prompt())
    model.generate(**prompt(), max_new_tokens=2)
    assert seen == [True, False, True, True]
    head.requires_grad_(True)
    with torch.no_grad():
        model(**prompt())
    assert head.requires_grad  # what the caller set stays
