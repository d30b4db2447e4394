"""What is passed in place of a model's folder is named, with what to do about it."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support_models import ARCHITECTURES, save_model, transformers

import trunkline as tl

_GGUF = b"GGUF\3" + bytes(500)
_LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "hidden_size": 64,
    "architectures": ["LlamaForCausalLM"],
}


def folder_with(folder: Path, files: dict[str, Any]) -> Path:
    """Write files, of bytes or of JSON."""
    for name, contents in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents if isinstance(contents, bytes) else json.dumps(contents).encode())
    return folder


FOLDERS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    ".bin files": (
        {"config.json": _LLAMA, "pytorch_model-00001-of-00002.bin": b"PK"},
        tl.Unsupported,
        r"in \.bin files.*AutoModelForCausalLM.from_pretrained\('.*'\).save_pretrained\(NEW_FOLDER\)",
    ),
    "TensorFlow": ({"config.json": _LLAMA, "tf_model.h5": b"x"}, tl.Unsupported, "TensorFlow weights"),
    "GGUF": ({"model.gguf": _GGUF}, tl.Unsupported, "model.gguf is a GGUF file.*gguf_file='model.gguf'"),
    "GGUF and config": (
        {"config.json": _LLAMA, "m.gguf": _GGUF},
        tl.Unsupported,
        "m.gguf is a GGUF file, which is not supported; use the model's safetensors files",
    ),
    "adapter": (
        {"adapter_config.json": {"base_model_name_or_path": "org/base"}, "adapter_model.safetensors": b""},
        tl.Unsupported,
        r"a PEFT adapter, not a model; load the base model \(org/base\), then .*PeftModel.from_pretrained",
    ),
    "diffusers": ({"model_index.json": {}, "unet/config.json": {}}, tl.Unsupported, "diffusers pipeline"),
    "Meta's": (
        {"params.json": {}, "consolidated.00.pth": b""},
        tl.Unsupported,
        "Meta's original format; download the checkpoint in the format of transformers",
    ),
    "tokenizer": ({"tokenizer.json": {}}, FileNotFoundError, "it holds a tokenizer and no model"),
    "no weights": (
        {"config.json": _LLAMA},
        FileNotFoundError,
        "no weights .*; download or copy the whole model",
    ),
    "no config": (
        {"model.safetensors": b"x" * 2000},
        FileNotFoundError,
        "copy the model's config.json beside them",
    ),
    "cache of the hub": (
        {"snapshots/0123/config.json": _LLAMA, "refs/main": b"0123"},
        FileNotFoundError,
        "has no config.json; a folder in it has one: pass .*/snapshots/0123",
    ),
    "checkpoints": ({"trunkline-checkpoints.json": {}}, FileNotFoundError, r"Checkpointer\(path\)\.load"),
    "empty": ({}, FileNotFoundError, "pass a folder in the layout of save_pretrained"),
    "Git LFS": (
        {"config.json": _LLAMA, "model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid"},
        tl.Format,
        "model.safetensors is a Git LFS pointer, not the file itself; run `git lfs pull` in",
    ),
    "a shard is missing": (
        {"config.json": _LLAMA, "model.safetensors.index.json": {"weight_map": {"a": "b.safetensors"}}},
        FileNotFoundError,
        r"b\.safetensors is missing; the download or copy is incomplete",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_that_hold_no_streamable_model(kind: str, tmp_path: Path) -> None:
    files, error, message = FOLDERS[kind]
    (tmp_path / "given").mkdir()
    folder = folder_with(tmp_path / "given", files)
    for call in (
        tl.transformers.from_pretrained,
        lambda path: tl.transformers.pack(path, [tmp_path / "out"]),
    ):
        with pytest.raises(error, match=message) as caught:
            call(folder)
        assert os.fspath(folder) in str(caught.value)
    assert not (tmp_path / "out").exists()
    if "config.json" not in files:
        with pytest.raises(error, match=message):
            tl.stream.plan(folder, memory_budget="1GB", bandwidth=1e9, flops=1e12)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "code in the folder": (
        {"model_type": "own", "auto_map": {"AutoConfig": "a.B"}},
        r"code is in its folder .*trust_remote_code=True",
    ),
    "unknown": ({"model_type": "own"}, "does not have the model_type 'own'; update transformers"),
    "no model_type": ({"model_type": None}, "has no model_type"),
    "clip": ({"model_type": "clip"}, "clip is not a model that generates text.*load it with transformers"),
    **{
        method: ({"quantization_config": {"quant_method": method, "bits": 4}}, rf"\({method}\).*bf16")
        for method in ("gptq", "awq", "bitsandbytes")
    },
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_of_other_models(kind: str, tmp_path: Path) -> None:
    changes, message = CONFIGS[kind]
    folder_with(tmp_path, {"config.json": {**_LLAMA, **changes}})
    save_file({"a": torch.ones(600)}, tmp_path / "model.safetensors")
    calls: list[Callable[[], Any]] = [
        lambda: tl.transformers.from_pretrained(tmp_path),
        lambda: tl.stream.plan(tmp_path, memory_budget="1GB", bandwidth=1e9, flops=1e12),
    ]
    for call in calls:
        with pytest.raises(tl.Unsupported, match=message) as caught:
            call()
        assert os.fspath(tmp_path) in str(caught.value)


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    folder_with(tmp_path, {})
    save_file({"a": torch.ones(600)}, tmp_path / "model.safetensors")
    for contents, why in (
        (b'{"model_type":\n llama}', "line 2, column 2: Expecting value"),
        (b"{\xff\xff\xff", "it is not UTF-8 text"),
    ):
        (tmp_path / "config.json").write_bytes(contents)
        with pytest.raises(tl.Format) as caught:
            tl.transformers.from_pretrained(tmp_path)
        expected = f"{tmp_path}/config.json is not valid JSON ({why}); download or copy it again"
        assert str(caught.value) == expected


def test_weights_of_a_classifier(tmp_path: Path) -> None:
    transformers.LlamaForSequenceClassification(ARCHITECTURES["llama"]()).save_pretrained(tmp_path)
    with pytest.raises(
        tl.Format, match="saved from LlamaForSequenceClassification, but only a LlamaForCausal"
    ):
        tl.transformers.from_pretrained(tmp_path)


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/model-7b", "gpt2"):
        with pytest.raises(FileNotFoundError) as caught:
            tl.transformers.from_pretrained(name, cache_dir=tmp_path / "hub")
        call = f'huggingface_hub.snapshot_download("{name}", cache_dir="{tmp_path}/hub")'
        assert str(caught.value).endswith(call)
    with pytest.raises(FileNotFoundError, match="no such folder; check the path"):
        tl.transformers.from_pretrained(tmp_path / "nowhere")


def test_files_in_place_of_their_folder(tmp_path: Path) -> None:
    folder = save_model(ARCHITECTURES["llama"](), tmp_path / "model")
    for file in (
        *folder.glob("*.safetensors"),
        folder / "model.safetensors.index.json",
        folder / "config.json",
    ):
        with pytest.raises(NotADirectoryError, match=f"is a file; pass the folder .*: {folder}$"):
            tl.transformers.from_pretrained(file)
    (tmp_path / "a.gguf").write_bytes(_GGUF)
    for load in (tl.transformers.from_pretrained, tl.load):
        with pytest.raises(tl.Unsupported, match=r"a\.gguf is a GGUF file, which is not supported"):
            load(tmp_path / "a.gguf")
    with pytest.raises(TypeError, match="model_dir: must be str"):
        tl.transformers.from_pretrained(None)  # type: ignore[arg-type]


def test_files_of_checkpoints_say_what_loads_them(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    checkpoints.save(5, {"a": torch.ones(3)}, block=True)
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    with warnings.catch_warnings(action="ignore"):  # of torch: that there is one process
        dcp.save(
            {"a": torch.ones(3)}, storage_writer=tl.dcp.StorageWriter(tmp_path / "sharded"), no_dist=True
        )
    of_dcp = f"dcp.load and trunkline.dcp.StorageReader('{tmp_path}/sharded')"
    for pattern, says in (
        (
            "run/*/manifest-*",
            "is the manifest of a step of a Checkpointer; use "
            f"trunkline.Checkpointer('{tmp_path}/run').load(5)",
        ),
        ("run/trunkline-checkpoints.json", f"use trunkline.Checkpointer('{tmp_path}/run').load()"),
        ("sharded/*.shard", f"is one file of a checkpoint of trunkline.dcp; load the whole with {of_dcp}"),
        ("sharded/dcp.manifest", of_dcp),
    ):
        [path] = tmp_path.glob(pattern)
        with pytest.raises(tl.Format) as caught:
            tl.load(path)
        assert str(path) in str(caught.value)
        assert says in str(caught.value)
