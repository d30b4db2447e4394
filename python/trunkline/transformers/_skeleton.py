"""Stock models of transformers without their weights."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from trunkline._errors import Unsupported

_META = torch.device("meta")


def make(model_dir: Path, dtype: torch.dtype | None) -> Any:
    """Return the causal language model that the directory's config describes, all of it on the meta device.

    `dtype`: None is that of the config. Raises Unsupported for quantised weights and for models that need
    code of their own.
    """
    config = AutoConfig.from_pretrained(model_dir)
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        raise Unsupported(
            None,
            f"{model_dir}: quantised weights ({_method_of(quantisation)}) are not supported by streaming; "
            "use a checkpoint of bf16, fp16 or fp32, or transformers itself",
            str(model_dir),
        )
    kept = {} if dtype is None else {"dtype": dtype}
    with _META:
        model = AutoModelForCausalLM.from_config(config, **kept)
    model.tie_weights()
    return model


def finish(model: Any, model_dir: Path) -> None:
    """Make what no file stores (buffers of rotary embeddings, say) as transformers makes it.

    Every parameter and stored buffer must be there already, or on the meta device for good.
    """
    for value in (*model.parameters(), *model.buffers()):
        value._is_hf_initialized = True
    for name, buffer in model.named_non_persistent_buffers():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    model.eval()
    model.config.name_or_path = str(model_dir)
    if model.can_generate() and (model_dir / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(model_dir)
    missing = [name for name, buffer in model.named_buffers() if buffer.device == _META]
    if missing:
        raise Unsupported(
            None, f"{model_dir}: the buffers {missing[:4]} cannot be made without the stock loader"
        )


def _method_of(quantisation: Any) -> str:
    if isinstance(quantisation, dict):
        return str(quantisation.get("quant_method", "of an unnamed method"))
    return str(getattr(quantisation, "quant_method", "of an unnamed method"))
