"""Quantised mixtures of experts, streamed as they are stored and dequantised at use, beside a pack of the
dequantised weights in the same memory: for a quarter of the dequantised experts.

The routers' choices are uniform (skewed_routing.py). The roofline of a token is that of expert_models.py,
with the computing of a model whose dequantised weights are all in memory.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import larger_models
import torch
import transformers
from expert_models import PROCESS_BYTES, RESIDENT, SHARE, bytes_of_a_token, runs_of, step_seconds
from measurement import Comparison
from paced_disks import PacedDisks
from safetensors.torch import load_file, save_file
from workbench import Workbench

STORED, DEQUANTISED = "quantised", "dequantised"
TOKENS = {STORED: 40, DEQUANTISED: 40, RESIDENT: 16}
WARM_UP = {STORED: 20, DEQUANTISED: 20, RESIDENT: 4}
BLOCK = 128  # rows and columns that share a scale of fp8
GROUP = 32  # values that share a scale of mxfp4
SPARE = 300_000_000  # of the disk
# Of 2.3 to 2.5 GB in bf16: experts as large as those of Qwen3-235B and gpt-oss, but few of them.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 3,
        "num_experts": 20,
        "num_experts_per_tok": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 3,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
}
COMMON = {"vocab_size": 8000, "head_dim": 64, "max_position_embeddings": 512}
_SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["self_attn", "lm_head", "mlp.gate"],
    },
    "gpt_oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}

Run = dict[str, Any]


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        return [row for name in _SETTINGS for row in _of_shape(bench, name, Path(folder) / name)]


def _of_shape(bench: Workbench, name: str, folder: Path) -> list[Comparison]:
    nbytes, budget = _make_folder(name, folder)
    kind = _SETTINGS[name]["quant_method"]
    label = f"{name}, {kind}"
    with PacedDisks([int(1.8 * nbytes) + SPARE], limit_mb_s=0) as disks:
        jobs = {way: _job(way, folder, budget, disks.directories[0]) for way in TOKENS}
        for way in (STORED, DEQUANTISED):  # makes the packs, for which all experts of a layer are in memory
            larger_models.run({**jobs[way], "tokens": 1, "group": False})
        runs = runs_of(bench, disks, jobs, WARM_UP, f"quantised, {label}")
    rates = {way: [1 / step_seconds(run, WARM_UP[way]) for run in each] for way, each in runs.items()}
    rows = [
        Comparison("quantised", label, "tokens/s", "a dequantised pack", rates[STORED], rates[DEQUANTISED])
    ]
    if bench.limit_mb_s:
        read = [bytes_of_a_token(run, WARM_UP[STORED]) / (bench.limit_mb_s * 1e6) for run in runs[STORED]]
        peers = [1 / max(each, 1 / median(rates[RESIDENT])) for each in read]
        rows.append(Comparison("quantised", label, "tokens/s", "the roofline", rates[STORED], peers))
    return rows


def _job(way: str, folder: Path, budget: int, disk: Path) -> Run:
    return {
        "way": RESIDENT if way == RESIDENT else "trunkline",
        "model": str(folder),
        "budget": budget,
        "group": way != RESIDENT,
        "spare": PROCESS_BYTES,
        "pack_dir": str(disk / way),
        "keep": way,
        "zipf": 0.0,
        "batch": 1,
        "prompt": 4,
        "tokens": TOKENS[way],
    }


def _make_folder(name: str, folder: Path) -> tuple[int, int]:
    """Write a model with random, quantised experts; return its bytes in bf16, and the memory for it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **COMMON, **SHAPES[name], dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    sizes = {each: value.nbytes for each, value in model.state_dict().items()}
    experts = sum(size for each, size in sizes.items() if ".experts." in each)
    nbytes = sum(sizes.values())
    model.save_pretrained(folder, max_shard_size="100GB")
    del model
    file = folder / "model.safetensors"
    tensors = load_file(file)
    quantise = _to_mxfp4 if name == "gpt_oss" else _to_fp8
    save_file(
        dict(pair for each in list(tensors) for pair in quantise(each, tensors.pop(each)).items()), file
    )
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"] = _SETTINGS[name]
    (folder / "config.json").write_text(json.dumps(document))
    return nbytes, int(nbytes - experts + SHARE * experts)


def _to_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if ".experts." not in name:
        return {name: tensor}
    rows, columns = tensor.shape
    blocks = tensor.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}


def _to_mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random codes with scales that give values of the usual size."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, columns, rows = tensor.shape
    shape = (experts, rows, columns // GROUP)
    return {
        f"{name}_blocks": torch.randint(0, 256, (*shape, GROUP // 2), dtype=torch.uint8),
        f"{name}_scales": torch.randint(118, 122, shape, dtype=torch.uint8),
    }
