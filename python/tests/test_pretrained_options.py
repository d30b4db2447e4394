"""Arguments of transformers' from_pretrained: with the same meaning, or rejected with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import ARCHITECTURES, make_folder, prompt, stock, transformers

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("options") / "model")


def load(folder: Path, **options: Any) -> Any:
    return tl.transformers.from_pretrained(folder, memory_budget="600KB", **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**prompt()).logits
    return result


ACCEPTED: dict[str, dict[str, Any]] = {
    "torch_dtype": {"torch_dtype": torch.float32},
    "torch_dtype auto": {"torch_dtype": "auto"},
    "dtype before torch_dtype": {"dtype": torch.float32, "torch_dtype": torch.float16},
    "eager attention": {"attn_implementation": "eager"},
    "sdpa attention": {"attn_implementation": "sdpa"},
    "without effect": {
        "low_cpu_mem_usage": True,
        "use_safetensors": True,
        "local_files_only": True,
        "token": None,
        "trust_remote_code": True,
        "weights_only": True,
        "proxies": None,
    },
    "unset": {"quantization_config": None, "force_download": False, "variant": None},
    "attributes of the config": {"use_cache": False, "rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_the_same_meaning_as_in_transformers(folder: Path, kind: str) -> None:
    options = ACCEPTED[kind]
    model, expected = load(folder, **options), stock(folder, **options)
    assert torch.equal(logits(model), logits(expected))
    assert model.dtype == expected.dtype
    for name in ("_attn_implementation", "use_cache", "rms_norm_eps", "dtype"):
        assert getattr(model.config, name) == getattr(expected.config, name)


def test_a_config_may_be_given(folder: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rms_norm_eps = 0.5
    model = load(folder, config=config)
    assert torch.equal(logits(model), logits(stock(folder, config=config)))
    model.config.rms_norm_eps = 1.0
    assert config.rms_norm_eps == 0.5
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert load(folder, config=path).config.rms_norm_eps == 0.5
    with pytest.raises(TypeError, match="config: must be a config of transformers, or a path, not int"):
        load(folder, config=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rms_norm_eps'"):
        load(folder, config=config, rms_norm_eps=0.25)  # as in transformers


def test_a_config_of_other_layers_has_a_pack_of_its_own(folder: Path) -> None:
    sources = set()
    for layers in (4, 2, 4):
        model = load(folder, num_hidden_layers=layers)
        assert torch.equal(logits(model), logits(stock(folder, num_hidden_layers=layers)))
        sources.add(tl.stream.stats(model)["source"])
    assert len(sources) == 2
    assert tl.stream.stats(load(folder, use_cache=False))["source"] in sources


def test_a_generation_config_may_be_given(folder: Path) -> None:
    given = transformers.GenerationConfig(max_new_tokens=3, do_sample=False)
    model = load(folder, generation_config=given)
    inputs = prompt()
    assert model.generate(**inputs).shape[1] == inputs["input_ids"].shape[1] + 3


def test_the_implementation_of_experts_may_be_given(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mixture", "qwen3-moe")
    for name in ("eager", "batched_mm"):
        model = tl.transformers.from_pretrained(folder, memory_budget="2MB", experts_implementation=name)
        assert model.config._experts_implementation == name
        assert torch.equal(logits(model), logits(stock(folder, experts_implementation=name)))


@pytest.mark.parametrize("device_map", ["auto", "cpu", torch.device("cpu"), {"": "cpu"}, "balanced", None])
def test_maps_of_one_device(folder: Path, device_map: Any) -> None:
    if device_map in ("auto", "balanced") and torch.cuda.is_available():
        pytest.skip("chooses the GPU here")
    model = load(folder, device_map=device_map)
    assert torch.equal(logits(model), logits(stock(folder)))


def test_other_maps_of_devices(folder: Path) -> None:
    for device_map in ({"model": "cpu", "lm_head": "cuda:0"}, "disk"):
        with pytest.raises(tl.Unsupported, match="device_map: .*memory_budget bounds those in the memory"):
            load(folder, device_map=device_map)
    with pytest.raises(ValueError, match="device_map: 'cpu' contradicts device='cuda:0'; pass one of them"):
        load(folder, device_map="cpu", device="cuda:0")
    for device_map in (0, "cuda:0"):  # of a GPU
        if not torch.cuda.is_available():
            with pytest.raises(tl.Error, match="cuda"):
                load(folder, device_map=device_map)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config: .*use a bf16, fp16 or fp32"),
        ({"load_in_8bit": True}, "load_in_8bit: .*quantised weights"),
        ({"load_in_4bit": True}, "load_in_4bit: .*quantised weights"),
        ({"use_safetensors": False}, "use_safetensors: .*only safetensors files; omit it"),
        ({"variant": "fp16"}, "variant: .*use dtype= to convert"),
        ({"gguf_file": "a.gguf"}, "gguf_file: .*convert the file once"),
        ({"max_memory": {0: "1GB"}}, "max_memory: .*pass these instead"),
        ({"offload_folder": "o"}, "offload_folder: .*memory_budget"),
        ({"tp_plan": "auto"}, "tp_plan: .*one device"),
        ({"state_dict": {"a": 1}}, "state_dict: .*save_pretrained"),
        ({"force_download": True}, r"force_download: .*snapshot_download\(..., force_download=True\)"),
        ({"output_loading_info": True}, "output_loading_info: .*omit it"),
        ({"attn_implementation": "flash_attention_2"}, "[Ff]lash"),
        ({"attn_implementation": "nothing"}, "nothing"),
    ],
)
def test_what_streaming_cannot_honour_is_rejected(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(tl.Unsupported, match=message) as caught:
        load(folder, **options)
    assert "the config is not valid" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("revison", "revision"),
        ("attn_implementaton", "attn_implementation"),
        ("memry", ""),
        ("memory", "memory_budget"),
    ],
)
def test_unknown_arguments(folder: Path, name: str, meant: str) -> None:
    hint = f"; did you mean {meant}\\?" if meant else ""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'{hint}"):
        load(folder, **{name: 1})


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    config = ARCHITECTURES["llama"]()
    config.auto_map = {"AutoModelForCausalLM": "own.Model"}
    folder = tmp_path / "model"
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    config.save_pretrained(folder)
    assert load(folder) is not None  # by the class of transformers
    with pytest.raises(
        tl.Unsupported, match="trust_remote_code: .*runs no code from folders; omit it to use"
    ):
        load(folder, trust_remote_code=True)
