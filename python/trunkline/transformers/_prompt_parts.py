"""The parts of a model that only the prompt uses: vision towers, encoders, and what leads from them."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def prompt_modules(model: Any, layers_path: str) -> Iterator[nn.Module]:
    """Yield the modules that hold such weights themselves; none of a model that is only a decoder.

    `layers_path`: of the decoder layers. What surrounds them, and the head, is used by every token.
    """
    config = model.config
    is_decoder = config.get_text_config(decoder=True) is config and not config.is_encoder_decoder
    if is_decoder:
        return
    decoder, _, _ = layers_path.rpartition(".")
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if path and module is not head and not f"{path}.".startswith(f"{decoder}."):
            yield module


def prompt_weights(model: Any, layers_path: str) -> set[int]:
    """Return the ids of the parameters that only the prompt uses; one tied to another weight is not one."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return {
        id(parameter)
        for module in prompt_modules(model, layers_path)
        for parameter in module.parameters(recurse=False)
        if uses[id(parameter)] == 1
    }
