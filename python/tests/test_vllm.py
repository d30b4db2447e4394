"""vLLM with --load-format trunkline: the same weights and tokens as with its own loading.

vLLM (3.4 GB) is not installed for these tests: they use a stand-in with its names. With the variable
TRUNKLINE_VLLM_PYTHON, the interpreter of an environment with vLLM, the last test serves a model with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support_log import logged
from support_serving import link_package, save_served_model

import trunkline as tl

HERE = Path(__file__).resolve().parent
SECONDS = 600.0


@pytest.fixture
def loader_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of vLLM's default loader, after our plugin has been registered twice."""
    monkeypatch.syspath_prepend(str(HERE / "vllm_stand_in"))
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    from trunkline.vllm import _loader, register

    _loader.loader_class.cache_clear()
    register()
    register()
    from vllm.model_executor.model_loader import default_loader

    yield default_loader
    _loader.loader_class.cache_clear()
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def make_loader(loader_module: Any, **extra: Any) -> Any:
    from vllm.model_executor.model_loader import loaders

    return loaders["trunkline"](loader_module.LoadConfig("trunkline", extra))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for file in (1, 2):
        tensors = {f"layers.{file}.experts.{n}.weight": torch.full((300, 7), float(n)) for n in range(4)}
        tl.save(tensors | {f"norm.{file}": torch.ones(3)}, tmp_path / f"model-{file}.safetensors")
    return tmp_path


def test_weights_are_those_of_the_files_with_the_prefix(loader_module: Any, folder: Path) -> None:
    loader = make_loader(loader_module)
    weights = dict(loader._get_weights_iterator(loader_module.Source(str(folder), "model.")))
    stored = tl.load(folder / "model-1.safetensors") | tl.load(folder / "model-2.safetensors")
    assert weights.keys() == {f"model.{name}" for name in stored}
    assert all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in stored.items())


def test_a_rank_reads_only_its_own_experts(loader_module: Any, folder: Path) -> None:
    loader = make_loader(loader_module)
    loader.local_expert_ids = {1, 3}
    weights = dict(loader._get_weights_iterator(loader_module.Source(str(folder))))
    experts = {name for name in weights if "experts" in name}
    assert {int(name.split(".")[3]) for name in experts} == {1, 3}
    assert len(weights) == 2 * 2 + 2


def test_vllm_reads_for_other_load_formats_afterwards(loader_module: Any, folder: Path) -> None:
    dict(make_loader(loader_module)._get_weights_iterator(loader_module.Source(str(folder))))
    stock = loader_module.DefaultModelLoader(loader_module.LoadConfig())
    with pytest.raises(AssertionError, match="vLLM's own reading"):
        stock._get_weights_iterator(loader_module.Source(str(folder)))


def test_a_model_without_safetensors_is_an_error(loader_module: Any, tmp_path: Path) -> None:
    with pytest.raises(tl.Unsupported, match=r"has no \.safetensors files.*use --load-format auto"):
        make_loader(loader_module)._get_weights_iterator(loader_module.Source(str(tmp_path)))


def test_options_of_other_loaders_are_errors(loader_module: Any) -> None:
    with pytest.raises(ValueError, match="--model-loader-extra-config: num_threads: has no effect"):
        make_loader(loader_module, num_threads=4)


def test_another_vllm_keeps_its_other_load_formats(
    loader_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM would not start if register() raised."""
    from vllm.model_executor.model_loader import loaders

    from trunkline.vllm import _loader, register

    loaders.clear()
    _loader.loader_class.cache_clear()
    monkeypatch.delattr(loader_module, "safetensors_weights_iterator")
    with logged(caplog) as lines:
        register()
    assert loaders == {}
    assert any("--load-format trunkline is not available in this vLLM" in line for line in lines)


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of an environment with vLLM."""
    found = os.environ.get("TRUNKLINE_VLLM_PYTHON")
    if not found:
        pytest.skip("TRUNKLINE_VLLM_PYTHON is not set: it names the Python of an environment with vLLM")
    return found


GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

model, load_format = sys.argv[1:]
engine = LLM(model=model, load_format=load_format, skip_tokenizer_init=True, dtype="float32",
             enforce_eager=True, max_model_len=256, max_num_seqs=4)
prompts = [{"prompt_token_ids": each} for each in ([1, 2, 3], [7] * 9, list(range(20, 50)))]
sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
results = engine.generate(prompts, sampling)
print("generated:", json.dumps([list(each.outputs[0].token_ids) for each in results]))
"""


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tokens_are_those_of_stock_vllm(python: str, family: str, tmp_path: Path) -> None:
    save_served_model(family, tmp_path / "model")
    packages = link_package(tmp_path / "packages")
    environment = os.environ | {
        "PYTHONPATH": str(packages),
        "TRUNKLINE_LOG": "info",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    generated = {}
    for load_format in ("auto", "trunkline"):
        result = subprocess.run(
            [python, "-c", GENERATE, tmp_path / "model", load_format],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        found = re.search(r"^generated: (.*)$", result.stdout, re.MULTILINE)
        assert found is not None, result.stderr[-3000:]
        generated[load_format] = json.loads(found[1])
        assert ("GB of weights in" in result.stderr) == (load_format == "trunkline")
    assert generated["trunkline"] == generated["auto"]
    assert len({token for each in generated["auto"] for token in each}) > 10
