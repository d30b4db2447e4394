"""Load formats."""

from __future__ import annotations

from collections.abc import Callable

loaders: dict[str, type] = {}


def register_model_loader(load_format: str) -> Callable[[type], type]:
    def register(loader: type) -> type:
        loaders[load_format] = loader
        return loader

    return register
