"""Stock models of transformers without their weights."""

import errno
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from trunkline._errors import Format, Unsupported, exception_of

_META = torch.device("meta")


def make(model_dir: Path, dtype: torch.dtype | None, stored: torch.dtype | None = None) -> Any:
    """Return the causal language model that the directory's config describes, all of it on the meta device.

    `dtype`: None is that of the config, or `stored` where that has none. Raises FileNotFoundError where there
    is no config.json, Unsupported for quantised weights and for what is no causal language model of
    transformers.
    """
    config = _config(model_dir)
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        raise Unsupported(
            None,
            f"{model_dir}: quantised weights ({_method_of(quantisation)}) are not supported by streaming; "
            "use a checkpoint of bf16, fp16 or fp32, or transformers itself",
            str(model_dir),
        )
    if dtype is None and getattr(config.get_text_config(decoder=True), "dtype", None) is None:
        dtype = stored
    kept = {} if dtype is None else {"dtype": dtype}
    try:
        with _META:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **kept)
    except ValueError as error:
        raise Unsupported(None, f"{model_dir}: {_first_line(error)}", str(model_dir)) from error
    model.tie_weights()
    return model


def _config(model_dir: Path) -> Any:
    path = model_dir / "config.json"
    if not path.is_file():
        raise exception_of(
            "system",
            errno.ENOENT,
            f"{model_dir} is no folder with a config.json; give the path of a Hugging Face folder on this "
            "machine (nothing is downloaded)",
            str(model_dir),
        )
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    except ValueError as error:
        raise Unsupported(None, f"{path}: {_first_line(error)}", str(path)) from error
    except OSError as error:  # not of JSON
        raise Format(None, f"{path}: {_first_line(error)}", str(path)) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
