"""A model on disk as Hugging Face stores one: Llama's tensor names and shapes, bf16, random weights, in a few
shards.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

BYTES_PER_WEIGHT = 2  # bf16


@dataclass(frozen=True)
class Shape:
    """The numbers of a Llama configuration that decide its tensors."""

    hidden: int
    intermediate: int
    key_value: int  # width of the key and value projections: key/value heads x head size
    vocabulary: int

    def tensors(self, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order in which transformers builds them."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.self_attn.q_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (self.key_value, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (self.key_value, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.hidden)
            yield f"{prefix}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.intermediate)
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    def bytes(self, layers: int) -> int:
        return sum(int(np.prod(shape)) for _, shape in self.tensors(layers)) * BYTES_PER_WEIGHT


# Widths of Llama 3 8B, Llama 3.2 3B and TinyLlama 1.1B, then ever smaller ones of the same proportions.
SHAPES = (
    Shape(4096, 14336, 1024, 128256),
    Shape(3072, 8192, 1024, 128256),
    Shape(2048, 5632, 256, 32000),
    Shape(1024, 2816, 256, 16000),
    Shape(512, 1408, 128, 4000),
    Shape(256, 704, 64, 1000),
)


def choose(size_bytes: int) -> tuple[Shape, int]:
    """The widest shape that leaves room for four layers in `size_bytes`, and the number of layers that comes
    nearest.
    """
    shape = next((shape for shape in SHAPES if shape.bytes(4) <= size_bytes), SHAPES[-1])
    per_layer = shape.bytes(1) - shape.bytes(0)
    return shape, max(1, round((size_bytes - shape.bytes(0)) / per_layer))


def random_weights(generator: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """bf16 numbers of random sign and mantissa, between 2^-7 and 2^-6 in size: finite, and incompressible
    enough.
    """
    bits = generator.integers(0, 1 << 16, size=shape, dtype=np.uint16)
    bits &= 0x807F
    bits |= 0x3C00
    return torch.from_numpy(bits).view(torch.bfloat16)


def write(
    directory: Path, size_bytes: int, shards: int, progress: Callable[[float], None]
) -> tuple[list[Path], str]:
    """Writes the model into `directory`. Returns its shard files and a line that describes it."""
    shape, layers = choose(size_bytes)
    total = shape.bytes(layers)
    generator = np.random.default_rng(20)
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, dimensions in shape.tensors(layers):
        if groups[-1] and filled >= total * len(groups) / shards:
            groups.append([])
        groups[-1].append((name, dimensions))
        filled += int(np.prod(dimensions)) * BYTES_PER_WEIGHT

    directory.mkdir(parents=True)
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = directory / f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file(
            {name: random_weights(generator, dimensions) for name, dimensions in group},
            file,
            {"format": "pt"},
        )
        weight_map |= {name: file.name for name, _ in group}
        files.append(file)
        progress(number / len(groups))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    weights = f"{len(weight_map)} tensors, {total / 1e9:.2f} GB of bf16 in {len(files)} files"
    return files, f"Llama-shaped model: {layers} layers x {shape.hidden}, {weights}"
