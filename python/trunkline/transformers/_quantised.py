"""Checkpoints with quantised weights: those that transformers dequantises while it loads them."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from trunkline._errors import Unsupported

# Transformers dequantises these on a CPU, tensor by tensor, with rules for their names.
_DEQUANTISED = ("fp8", "mxfp8", "mxfp4")
_DEQUANTISE_ONCE = "AutoModelForCausalLM.from_pretrained(MODEL{}){}.save_pretrained(NEW_FOLDER)"
# What to do about others, besides using the checkpoint that they were made from.
_ADVICE = {
    "bitsandbytes": "dequantise this one once, on a GPU: " + _DEQUANTISE_ONCE.format("", ".dequantize()"),
    "compressed-tensors": "dequantise this one once: "
    + _DEQUANTISE_ONCE.format(", quantization_config=CompressedTensorsConfig(dequantize=True)", ""),
    "gptq": "load this one with transformers and gptqmodel",
    "awq": "load this one with transformers and gptqmodel",
    "gguf": "dequantise this one once: " + _DEQUANTISE_ONCE.format(", gguf_file=FILE", ""),
}
# Of a tensor's last name: what it scales ("weight", "gate_up_proj", "input" or ""), and that it does.
_SCALE = re.compile(
    r"^(?P<of>.*?)_?(?:q?scales?|scale_inv|scale_\d|global_scale|blocks|zeros?|zero_points?|absmax|SCB|qweight"
    r"|packed|quant_map|quant_state\b.*|g_idx|qscale_.*)$"
)
# Scales of what is computed, not of weights: without effect on dequantised weights.
_OF_ACTIVATIONS = frozenset(
    ("input", "activation", "output", "qscale_act", "k", "v", "q", "k_proj", "v_proj")
)


def take_quantiser(config: Any, path: Path) -> Any:
    """Return transformers' quantizer, set to dequantise; None for a checkpoint that is not quantised.

    The config is changed to that of the dequantised model. Raises Unsupported for methods whose weights
    cannot be dequantised tensor by tensor.
    """
    text = config.get_text_config(decoder=True)
    settings = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if settings is None:
        return None
    document = settings if isinstance(settings, dict) else settings.to_dict()
    method = document.get("quant_method")
    method = str(getattr(method, "value", method or "unknown method"))
    if method not in _DEQUANTISED:
        advice = _ADVICE.get(method, "load this one with transformers")
        raise Unsupported(
            None,
            f"{path}: streaming does not support weights quantised by this method ({method}), only fp8 and "
            f"mxfp4; use the model's bf16, fp16 or fp32 checkpoint, or {advice}",
            str(path),
        )
    try:
        made = AutoQuantizationConfig.from_dict(dict(document))
    except Exception as error:  # as for any other invalid config
        raise Unsupported(
            None, f"{path}: the quantization_config is not valid: {type(error).__name__}: {error}", str(path)
        ) from error
    made.dequantize = True
    for each in (config, text):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return AutoHfQuantizer.from_config(made, pre_quantized=True)


def check_scales(unused: Iterable[str], used: Collection[str], quantiser: Any, source: str) -> None:
    """Raise Unsupported if any tensor that the model does not use scales one that it does use.

    `unused`, `used`: names of tensors in the files. The weights would have other values than they should.
    """
    for name in unused:
        module, _, leaf = name.rpartition(".")
        match = _SCALE.match(leaf)
        if match is None or (quantiser is not None and match["of"] in _OF_ACTIVATIONS):
            continue
        prefix = f"{module}." if module else ""
        scaled = next((each for each in _scaled_by(prefix, match["of"]) if each in used), None)
        if scaled is not None:
            raise Unsupported(
                None,
                f"{source}: {name} belongs to the quantised weight {scaled}, but the config does not say "
                "how it is quantised (quantization_config); restore that in config.json, or use the model's "
                "bf16, fp16 or fp32 checkpoint",
                source,
            )


def _scaled_by(prefix: str, name: str) -> list[str]:
    """Return the names that the tensor which is scaled may have."""
    if not name:
        return [f"{prefix}weight", prefix.removesuffix(".")]
    kinds = ("", "_blocks", "_packed", ".weight", "_proj.weight")
    return [f"{prefix}weight", *(f"{prefix}{name}{kind}" for kind in kinds)]
