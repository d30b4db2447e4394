"""Small models of every family of transformers whose experts are routed to through its experts interface."""

from typing import Any

from support_models import transformers

# Those of the attributes that a family's config has are set.
_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 0),
    "shared_expert_intermediate_size": 48,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "qk_head_dim", "index_head_dim", "sliding_window"), 16),
    "index_n_heads": 2,
    "index_topk": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_FOUR_LAYERS = {"num_hidden_layers": 4}
# What some families need besides; None: left as it is by default.
_FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "aria_text": {},
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": {**_LATENT, **_FOUR_LAYERS, "layer_group_size": 2},
    "beam": _FOUR_LAYERS,
    "cohere2_moe": {},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": {},
    "dots1": {},
    "dots3_note_text": dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim")),
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": _FOUR_LAYERS,
    "glm4_moe": {},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["attention", "attention"]},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "inkling_text": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "mixtral": {},
    "nemotron_h": {},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": _FOUR_LAYERS,
    "qwen3_moe": {},
    "qwen3_next": _FOUR_LAYERS,
    "solar_open": {},
    "zaya": {"num_experts_per_tok": None},
}
FAMILIES = [kind for kind in _FAMILIES if kind in transformers.CONFIG_MAPPING]


def small_config(kind: str, experts: int = 8, **more: Any) -> Any:
    """Return the config of a small model."""
    default = transformers.CONFIG_MAPPING[kind]().get_text_config()
    wanted = {**_SMALL, **dict.fromkeys(_COUNTS, experts), **_FAMILIES[kind], **more}

    def has(name: str) -> bool:
        try:
            return hasattr(default, name)
        except Exception:  # an attribute of each layer, which is not to be asked for like this
            return False

    kept = {name: value for name, value in wanted.items() if value is not None and has(name)}
    return type(default)(**kept, **{name: value for name, value in more.items() if name not in kept})
