"""The loader of most load formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class LoadConfig:
    load_format: str = "auto"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Source:
    model_or_path: str
    prefix: str = ""


def safetensors_weights_iterator(
    hf_weights_files: list[str],
    use_tqdm_on_load: bool,
    safetensors_load_strategy: str | None = None,
    local_expert_ids: set[int] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    raise AssertionError("vLLM's own reading was used")


class DefaultModelLoader:
    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config
        self.local_expert_ids: set[int] | None = None

    def _get_weights_iterator(self, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
        if self.load_config.load_format not in ("auto", "safetensors"):
            raise ValueError(f"Unknown load_format: {self.load_config.load_format}")
        files = sorted(map(str, Path(source.model_or_path).glob("*.safetensors")))
        if not files:
            return iter(())  # vLLM reads .bin files then
        weights = safetensors_weights_iterator(files, True, None, local_expert_ids=self.local_expert_ids)
        return ((source.prefix + name, tensor) for name, tensor in weights)
