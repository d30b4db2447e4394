#!/usr/bin/env python3
"""Bring the table of docs/which-model.md up to date: how fast well-known models are, as predicted.

    .venv/bin/python benchmarks/which_model.py [--check]

No weights are needed: the models' files are made with headers of their tensors, and without data. --check
writes nothing, and fails if the table is not current.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from make_tables import replaced

DOCUMENT = Path(__file__).resolve().parent.parent / "docs/which-model.md"
NAME = "which models"
DISK = 7e9  # bytes per second
FLOPS = 1e11  # of one token: weights of bf16 pass through the processor at 10^11 bytes per second
MEMORY = (16, 32, 64, 128)  # GB
SKEW = 1.0  # of the router
BLOCK = 128  # rows and columns that share a scale of fp8
GROUP = 32  # values that share a scale of mxfp4
HEAD = (
    f"| model | files (GB) | least memory (GB) | {' | '.join(f'tokens/s in {each} GB' for each in MEMORY)} |"
)


@dataclass(frozen=True)
class Model:
    """`kind`: the model type of transformers. `quantised`: how its files are, "" for bf16."""

    name: str
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    quantised: str = ""


def _llama(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }


MODELS = (
    Model("Llama-3.1-8B", "llama", _llama(4096, 14336, 32, 32)),
    Model("Llama-3.1-70B", "llama", _llama(8192, 28672, 80, 64)),
    Model("Llama-3.1-405B", "llama", _llama(16384, 53248, 126, 128)),
    Model(
        "Mixtral-8x7B",
        "mixtral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000},
    ),
    Model("Qwen3-30B-A3B", "qwen3_moe", _qwen3(2048, 768, 48, 32)),
    Model("Qwen3-30B-A3B-FP8", "qwen3_moe", _qwen3(2048, 768, 48, 32), "fp8"),
    Model("Qwen3-235B-A22B", "qwen3_moe", _qwen3(4096, 1536, 94, 64)),
    Model("Qwen3-235B-A22B-FP8", "qwen3_moe", _qwen3(4096, 1536, 94, 64), "fp8"),
    Model("gpt-oss-20b", "gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, "mxfp4"),
    Model("gpt-oss-120b", "gpt_oss", {"num_hidden_layers": 36, "num_local_experts": 128}, "mxfp4"),
    Model("DeepSeek-V3", "deepseek_v3", {}, "fp8"),
)


def row(model: Model) -> str:
    """The model's row of the table."""
    import trunkline as tl

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored = _make_folder(model, folder)

        def planned(memory: int, disks: int) -> dict[str, Any] | None:
            try:
                return tl.stream.plan(
                    folder,
                    keep="quantised" if model.quantised else "dequantised",
                    memory_budget=memory,
                    bandwidth=DISK * disks,
                    flops=FLOPS,
                    skew=SKEW,
                )
            except tl.OutOfBudget:
                return None

        most = planned(10**13, 1)
        assert most is not None
        cells = [model.name, f"{stored / 1e9:.0f}", f"{most['least_budget'] / 1e9:.1f}"]
        for memory in MEMORY:
            found = [planned(memory * 10**9, disks) for disks in (1, 4)]
            cells.append(" / ".join("-" if each is None else _rate(each) for each in found))
    return f"| {' | '.join(cells)} |"


def _rate(planned: dict[str, Any]) -> str:
    rate = planned["tokens_per_second"]
    return f"{rate:.2g}" if rate < 10 else f"{rate:.0f}"


def _make_folder(model: Model, folder: Path) -> int:
    """Write config.json and a file of weights that takes no room; return its size in bytes."""
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    config = transformers.AutoConfig.for_model(model.kind, **model.config, dtype="bfloat16")
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(made).__name__]
    document = config.to_dict()
    if model.quantised == "fp8":
        document["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        }
    elif model.quantised:
        document["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(document))
    stored = revert_weight_conversion(made, dict(made.state_dict()))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in stored.items():
        for stored_name, dtype, shape, nbytes in _tensors(model.quantised, name, tuple(tensor.shape)):
            header[stored_name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def _tensors(
    quantised: str, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield name, dtype, shape and bytes of what is stored of a weight."""
    count = 1
    for extent in shape:
        count *= extent
    in_layers = ".layers." in name and len(shape) == 2 and name.endswith("_proj.weight")
    if quantised == "fp8" and (in_layers or ".kv_a_proj_with_mqa." in name):
        grid = tuple(-(-extent // BLOCK) for extent in shape)
        if all(extent % BLOCK == 0 for extent in shape):
            yield name, "F8_E4M3", shape, count
            yield f"{name}_scale_inv", "F32", grid, 4 * grid[0] * grid[1]
            return
    if quantised == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        experts, columns, rows = shape
        groups = columns // GROUP
        yield f"{name}_blocks", "U8", (experts, rows, groups, GROUP // 2), count // 2
        yield f"{name}_scales", "U8", (experts, rows, groups), count // GROUP
        return
    yield name, "BF16", shape, 2 * count


def table() -> str:
    """All rows."""
    lines = [HEAD, "|---" * (len(MEMORY) + 3) + "|"]
    for model in MODELS:
        print(model.name, file=sys.stderr)
        lines.append(row(model))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Predict how fast well-known models are.")
    parser.add_argument("--check", action="store_true", help="fail if the table is not current")
    options = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    made = replaced(text, NAME, table(), "which_model.py")
    if options.check:
        return int(made != text)
    DOCUMENT.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
