"""What tests and benchmarks of others' servers share: the package in their environments, and models."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import trunkline as tl

ROOT = Path(__file__).resolve().parents[2]

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # with smaller weights all tokens are alike
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_COMMON, head_dim=64)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2)
    ),
}


def save_served_model(family: str, folder: Path) -> None:
    """Save a small model with random weights of llama, qwen3 or mixtral."""
    torch.manual_seed(0)
    _FAMILIES[family]().save_pretrained(folder)


def link_package(folder: Path) -> Path:
    """Fill a folder for PYTHONPATH with links to the installed package and its entry points; return it."""
    folder.mkdir(exist_ok=True)
    for each in Path(tl.__file__).resolve().parents[1].glob("trunkline*"):
        (folder / each.name).symlink_to(each)
    return folder


def find_sglang() -> str | None:
    """The interpreter of the environment with SGLang; None if scripts/sglang_environment.py has made none."""
    script = ROOT / "scripts/sglang_environment.py"
    found = subprocess.run([sys.executable, script, "--offline"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


def sglang_path(folder: Path) -> str:
    """What PYTHONPATH must have: the package, linked into this folder, and modules that a CPU lacks."""
    return f"{link_package(folder)}:{ROOT / 'python/tests/sglang_environment'}"
