"""Small models that read images, and inputs for them."""

import inspect
from typing import Any

import torch
from support_models import transformers
from transformers import PreTrainedConfig

# Those of the attributes that a config or a part of one has are set.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "out_hidden_size", "projection_dim"), 64),
    **dict.fromkeys(("vision_output_dim", "output_dim", "mm_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "mlp_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth"), 3),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("image_token_id", "image_token_index"), 290),
    "vocab_size": 300,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "image_size": 32,
    "patch_size": 8,
    "sliding_window": 16,
    "video_token_id": 291,
    "vision_start_token_id": 292,
    "vision_end_token_id": 293,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
# What parts of some families need besides: by their names, "" for the config itself.
FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "aya_vision": {},
    "cohere2_vision": {},
    "gemma3": {"": {"mm_tokens_per_image": 4}},
    "glm4v": {"text_config": _MROPE},
    "glm4v_moe": {
        "text_config": {"rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [2, 1, 1]}}
    },
    "idefics3": {},
    "internvl": {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}},
    "llama4": {
        "vision_config": {
            "intermediate_size": 256,
            **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64),
        }
    },
    "llava": {},
    "llava_next": {"": {"image_grid_pinpoints": [[32, 64], [64, 32]]}},
    "llava_onevision": {"": {"image_grid_pinpoints": [[32, 64], [64, 32]]}},
    "mistral3": {},
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            "num_global_layers": 1,
            "attention_heads": 4,
            "vision_output_dim": 128,
            "intermediate_layers_indices": [1],
        },
    },
    "paligemma": {},
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"text_config": _MROPE},
    "qwen3_vl": {"text_config": _MROPE},
    "qwen3_vl_moe": {"text_config": _MROPE},
    "smolvlm": {},
}


def vision_config(kind: str) -> Any:
    """Return the config of a small model that reads images."""
    return _small(transformers.CONFIG_MAPPING[kind], FAMILIES[kind], "")


def _small(config_class: Any, changes: dict[str, dict[str, Any]], name: str) -> Any:
    kept: dict[str, Any] = {}
    for key, value in config_class().__dict__.items():
        if isinstance(value, PreTrainedConfig):
            kept[key] = _small(type(value), changes, key)
        elif key in _SMALL and value is not None and not isinstance(value, list | tuple | dict):
            kept[key] = _SMALL[key]
    return config_class(**{**kept, **changes.get(name, {})})


def with_image(model: Any) -> dict[str, torch.Tensor]:
    """Return inputs of some tokens and an image; `model`: the fully loaded one."""
    config = model.config
    if config.model_type == "mllama":
        return _tiles()
    for pixels in _pixels(getattr(config, "vision_config", config)):
        try:
            with torch.no_grad():
                found = model.get_image_features(**pixels)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            continue  # the model takes images in another layout
        features = getattr(found, "pooler_output", None)
        features = getattr(found, "last_hidden_state", found) if features is None else features
        each = features if isinstance(features, list | tuple) else [features]
        count = sum(value.numel() // value.shape[-1] for value in each)
        return _inputs(model, pixels, count)
    raise AssertionError(f"no layout of images fits {type(model).__name__}")


def _pixels(vision: Any) -> list[dict[str, torch.Tensor]]:
    """Return an image in each of the layouts that models take."""
    generator = torch.Generator().manual_seed(5)
    size, patch = 32, 8
    patches = 3 * getattr(vision, "temporal_patch_size", 1) * patch**2

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    sizes = {"image_sizes": torch.tensor([[size, size]])}
    return [
        {"pixel_values": made(1, 3, size, size)},
        {"pixel_values": made(16, patches), "image_grid_thw": torch.tensor([[1, 4, 4]])},
        {"pixel_values": made(1, 1, 3, size, size)},
        {"pixel_values": made(1, 3, 3, size, size), "image_sizes": torch.tensor([[size, 2 * size]])},
        {"pixel_values": made(1, 3, size, size), **sizes},
    ]


def _tiles() -> dict[str, torch.Tensor]:
    """Return inputs for layers that attend to the image instead of having it among the tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.tensor([[5, 6, 290, 7, 8, 9]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 1, 4, 3, 32, 32, generator=generator).to(torch.bfloat16),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]),
        "cross_attention_mask": torch.ones(1, ids.shape[1], 1, 4, dtype=torch.int64),
    }


def _inputs(model: Any, pixels: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    config = model.config
    token = config.image_token_index if hasattr(config, "image_token_index") else config.image_token_id
    ids = torch.tensor([[5, 6, *[token] * count, 7, 8, 9]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    for name in {"token_type_ids", "mm_token_type_ids"} & {*inspect.signature(model.forward).parameters}:
        inputs[name] = (ids == token).long()
    return inputs
