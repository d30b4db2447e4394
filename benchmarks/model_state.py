"""The weights of a model to save and load: Llama's proportions, bf16, random."""

from __future__ import annotations

import torch

_HIDDEN, _INTERMEDIATE, _VOCABULARY = 2048, 5632, 32000


def make(nbytes: int) -> dict[str, torch.Tensor]:
    """Tensors of `nbytes` in all, but for less than one row of the last."""
    generator = torch.Generator().manual_seed(2)
    state: dict[str, torch.Tensor] = {}
    left = nbytes // 2  # elements

    def add(name: str, rows: int, columns: int) -> None:
        nonlocal left
        rows = min(rows, left // columns)
        if rows:
            # Random bits below the exponent's highest: no infinities, which would make comparisons lie.
            bits = torch.randint(0, 1 << 14, (rows, columns), dtype=torch.int16, generator=generator)
            state[name] = bits.view(torch.bfloat16).clone()
            left -= rows * columns

    add("model.embed_tokens.weight", _VOCABULARY, _HIDDEN)
    layer = 0
    while left >= _HIDDEN:
        prefix = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            add(f"{prefix}.self_attn.{name}_proj.weight", _HIDDEN, _HIDDEN)
        for name in ("gate", "up", "down"):
            add(f"{prefix}.mlp.{name}_proj.weight", _INTERMEDIATE, _HIDDEN)
        add(f"{prefix}.input_layernorm.weight", 1, _HIDDEN)
        layer += 1
    return state


def total_bytes(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(
        torch.equal(got[name], tensor) for name, tensor in expected.items()
    )
