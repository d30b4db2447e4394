"""Makes stock models of transformers without their weights."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.core_model_loading import build_glob_alternation

from trunkline._errors import Format, Unsupported
from trunkline.transformers._auto_class import choose
from trunkline.transformers._folder import check_model_folder
from trunkline.transformers._options import ModelOptions, model_options, unknown_argument
from trunkline.transformers._quantised import take_quantiser
from trunkline.transformers.hub import find_model

_META = torch.device("meta")
_DEFAULTS = ModelOptions()


def make(
    model_dir: Path,
    dtype: torch.dtype | None,
    stored: torch.dtype | None = None,
    options: ModelOptions = _DEFAULTS,
) -> Any:
    """Return the model of make_with_quantiser()."""
    return make_with_quantiser(model_dir, dtype, stored, options)[0]


def make_with_quantiser(
    model_dir: Path, dtype: torch.dtype | None, stored: torch.dtype | None, options: ModelOptions
) -> tuple[Any, Any]:
    """Return the language model that the directory's config describes, all of it on the meta device.

    The second result is transformers' quantizer that dequantises its weights; None if they are not quantised.
    `dtype`: None is that of the config, or `stored` if the config has none. Raises as check_model_folder()
    does, and Unsupported for other quantised weights, and for models that do not generate text.
    """
    config = _config(model_dir, options)
    auto_class = choose(config, model_dir / "config.json", options.text_only)
    quantiser = take_quantiser(config, model_dir)
    if dtype is None and getattr(config.get_text_config(decoder=True), "dtype", None) is None:
        dtype = stored
    kept: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    for name in ("attn_implementation", "experts_implementation"):
        if (value := getattr(options, name)) is not None:
            kept[name] = value
    try:
        with _META:
            model = auto_class.from_config(config, trust_remote_code=False, **kept)
        model.tie_weights()
    except Exception as error:  # a model's code may raise anything for an invalid config
        says_why = isinstance(error, ValueError | ImportError)  # the latter: of attn_implementation
        what = "" if says_why else f"the config is not valid: {type(error).__name__}: "
        raise Unsupported(None, f"{model_dir}: {what}{_first_line(error)}", str(model_dir)) from error
    _keep_in_fp32(model)
    return model, quantiser


def make_for_plan(model_dir: Path, dtype: torch.dtype | None, text_only: bool) -> Any:
    """Return the model of make() as from_pretrained without further options loads it."""
    return make(model_dir, dtype, options=model_options({}, None, text_only=text_only))


def _keep_in_fp32(model: Any) -> None:
    """Give parameters and stored buffers the dtype that transformers does: some stay in fp32."""
    plan = model._get_dtype_plan(model.dtype)
    if not plan:
        return
    pattern, by_group, _ = build_glob_alternation(list(plan))
    made: dict[int, torch.Tensor] = {}  # by id() of the tensor that is replaced: tied weights stay tied
    for name, value in model.state_dict(keep_vars=True).items():
        match = pattern.search(name)
        if match is None or not value.is_floating_point():
            continue
        if id(value) not in made:
            other = torch.empty_like(value, dtype=plan[by_group[match.lastgroup]], requires_grad=False)
            is_parameter = isinstance(value, nn.Parameter)
            made[id(value)] = nn.Parameter(other, requires_grad=False) if is_parameter else other
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        (module._parameters if leaf in module._parameters else module._buffers)[leaf] = made[id(value)]


def _config(model_dir: Path, options: ModelOptions) -> Any:
    check_model_folder(model_dir)
    if isinstance(options.config, PreTrainedConfig):
        path, config = model_dir / "config.json", copy.deepcopy(options.config)
        unknown = dict(options.changes)
    else:
        path = _config_path(model_dir, options.config)
        config, unknown = _read_config(path, options)
    if unknown:
        raise unknown_argument(next(iter(unknown)), options.known)
    if options.trust_remote_code and AutoModelForCausalLM.__name__ in _auto_map(config):
        raise Unsupported(
            None,
            f"trust_remote_code: {path} names code for the model (auto_map), and Trunkline runs no code from "
            "folders; omit it to use the model's class in transformers, or load the model with transformers",
            str(path),
        )
    return config


def _auto_map(config: Any) -> dict[str, Any]:
    return getattr(config, "auto_map", None) or {}


def _config_path(model_dir: Path, config: Any) -> Path:
    """Return the file of the argument `config`, which may be a file, a folder, or a name on the hub."""
    if config is None:
        return model_dir / "config.json"
    try:
        found = find_model(config).path
    except TypeError:
        kinds = "a config of transformers, or a path"
        raise TypeError(f"config: must be {kinds}, not {type(config).__name__}") from None
    return found / "config.json" if found.is_dir() else found


def _read_config(path: Path, options: ModelOptions) -> tuple[Any, dict[str, Any]]:
    """Return the config with the changes, and the changes of attributes that it does not have."""
    try:
        config, unknown = AutoConfig.from_pretrained(
            path,
            trust_remote_code=False,
            local_files_only=True,
            return_unused_kwargs=True,
            **options.changes,
        )
    except ValueError as error:
        raise Unsupported(None, _why_no_config(path, error), str(path)) from error
    except Exception as error:  # OSError if it is not JSON; other errors for invalid values
        not_json = _why_not_json(path)
        if not_json is not None:
            raise Format(
                None, f"{path} is not valid JSON ({not_json}); download or copy it again", str(path)
            ) from None
        raise Format(None, f"{path}: {type(error).__name__}: {_first_line(error)}", str(path)) from error
    return config, unknown


def _why_not_json(path: Path) -> str | None:
    """Return what is wrong with the JSON in a file; None if it is valid, or cannot be read."""
    try:
        json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    except UnicodeDecodeError:
        return "it is not UTF-8 text"
    except (OSError, RecursionError):
        return None
    return None


def _why_no_config(path: Path, error: ValueError) -> str:
    """Return why transformers cannot load a config, and what to do."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        document = None
    kind = document.get("model_type") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        return f"{path} has no model_type; is it the config.json of a transformers model?"
    if "auto_map" in document:
        return (
            f"{path}: the model's code is in its folder (auto_map), and Trunkline runs no code from folders; "
            "use transformers with trust_remote_code=True, or a checkpoint whose model_type transformers has"
        )
    if kind not in CONFIG_MAPPING:
        return (
            f"{path}: transformers {transformers.__version__} does not have the model_type {kind!r}; update "
            "transformers, or check the spelling"
        )
    return f"{path}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def finish(
    model: Any, model_dir: Path, device: torch.device, called: str = "", generation_config: Any = None
) -> None:
    """Make the buffers that no file stores (those of rotary embeddings) as transformers does, on the device.

    Every parameter and stored buffer must have been set already, or stay on the meta device. `called`: the
    name of the model ("": the directory). `generation_config`: None is that of the directory.
    """
    for value in (*model.parameters(), *model.buffers()):
        value._is_hf_initialized = True
    for name, buffer in model.named_non_persistent_buffers():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    model.eval()
    model.config.name_or_path = model.name_or_path = called or str(model_dir)
    if model.can_generate():
        model.generation_config = (
            _generation_config(model_dir)
            if generation_config is None
            else model.generation_config.from_dict(generation_config.to_dict())
        )
    if device.type != "cpu":
        for module in model.modules():
            for name, value in module._buffers.items():
                if value is not None and value.device.type == "cpu":
                    module._buffers[name] = _moved(value, device)
    missing = [name for name, buffer in model.named_buffers() if buffer.device == _META]
    if missing:
        raise Unsupported(
            None,
            f"{model_dir}: the buffers {missing[:4]} are neither stored nor initialized by the model, which "
            "streaming does not support; load it with transformers",
        )


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device)


def _generation_config(model_dir: Path) -> GenerationConfig:
    """Return the config that transformers uses: from its own file or, in older checkpoints, config.json."""
    try:
        return GenerationConfig.from_pretrained(model_dir)
    except OSError:
        return GenerationConfig.from_pretrained(
            model_dir, config_file_name="config.json", _from_model_config=True
        )
