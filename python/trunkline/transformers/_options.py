"""The keyword arguments of transformers' from_pretrained: accepted with the same meaning, or rejected."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import torch

from trunkline._errors import Unsupported

_SAFETENSORS_ONLY = "Trunkline reads only safetensors files"
_QUANTIZED = (
    "streaming does not support quantised weights; omit it, and use a bf16, fp16 or fp32 checkpoint, or "
    "load the model with transformers"
)
_PLACED = (
    "Trunkline places the weights itself: memory_budget bounds those in the memory of the device, "
    "host_memory those in main memory of a model on a GPU, and all others are streamed from the disk; pass "
    "these instead"
)
_ONE_DEVICE = "a model is streamed on one device; omit it, or load the model with transformers"
_WEIGHTS_IN_FILES = (
    "the weights are streamed from the files of the folder as they are; save a folder with the weights that "
    "you need (save_pretrained of transformers), and load that"
)
_DOWNLOADS_NOTHING = (
    "Trunkline downloads nothing; call huggingface_hub.snapshot_download(..., force_download=True) first"
)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != {} and value != ""


def _is_false(value: Any) -> bool:
    return value is False


# By argument: which values are rejected, and why.
_REJECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("quantization_config", "load_in_8bit", "load_in_4bit"), (_is_set, _QUANTIZED)),
    **dict.fromkeys(("max_memory", "offload_folder", "offload_buffers"), (_is_set, _PLACED)),
    **dict.fromkeys(("tp_plan", "tp_size", "device_mesh", "distributed_config"), (_is_set, _ONE_DEVICE)),
    **dict.fromkeys(("state_dict", "key_mapping", "ignore_mismatched_sizes"), (_is_set, _WEIGHTS_IN_FILES)),
    **dict.fromkeys(("from_tf", "from_flax"), (_is_set, f"{_SAFETENSORS_ONLY}; convert the weights once")),
    "force_download": (_is_set, _DOWNLOADS_NOTHING),
    "use_safetensors": (_is_false, f"{_SAFETENSORS_ONLY}; omit it"),
    "variant": (
        _is_set,
        "files of a variant (model.VARIANT.safetensors) are not supported; rename them in a copy of the "
        "folder, or use dtype= to convert the usual ones",
    ),
    "gguf_file": (
        _is_set,
        "GGUF files are not supported; convert the file once with transformers: "
        "AutoModelForCausalLM.from_pretrained(..., gguf_file=...).save_pretrained(NEW_FOLDER)",
    ),
    "adapter_kwargs": (
        _is_set,
        "load the base model, then add the adapter: peft.PeftModel.from_pretrained(model, adapter_folder)",
    ),
    "output_loading_info": (
        _is_set,
        "every weight of the model is required, so there is nothing to report; omit it",
    ),
    **dict.fromkeys(
        ("use_kernels", "kernel_config", "allow_all_kernels", "fusion_config"),
        (_is_set, "it replaces modules of the model, which streaming does not support; omit it"),
    ),
}

# Without effect here: about downloads, about pickles, or without effect in transformers as well.
_WITHOUT_EFFECT = frozenset(
    (
        *("token", "use_auth_token", "local_files_only", "proxies", "resume_download", "tqdm_class"),
        *("local_dir_use_symlinks", "mirror", "code_revision", "low_cpu_mem_usage", "weights_only"),
        *("offload_state_dict", "disable_mmap", "adapter_name"),
        *("_fast_init", "_commit_hash", "_from_auto", "_from_pipeline"),
    )
)
_ACCEPTED = ("attn_implementation", "experts_implementation", "generation_config", "trust_remote_code")
# Of these, device_map="auto" chooses the device; with one device the others choose the same.
_AUTOMATIC_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class ModelOptions:
    """How the model is made from its folder. `changes`: attributes of the config that are to be changed."""

    config: Any = None
    changes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    trust_remote_code: bool = False
    attn_implementation: Any = None
    experts_implementation: Any = None
    generation_config: Any = None
    text_only: bool = False
    keeps_quantised: bool = False  # whether quantised weights are streamed as they are stored
    known: tuple[str, ...] = ()  # the arguments of the function called, for errors

    @property
    def key(self) -> str:
        """A str that differs where the config does; "" for the config of the folder."""
        given = self.config.to_json_string() if hasattr(self.config, "to_json_string") else self.config
        if given is None and not self.changes:
            return ""
        return json.dumps([given, dict(self.changes)], default=str, sort_keys=True)


def model_options(
    options: dict[str, Any],
    config: Any,
    known: tuple[str, ...] = (),
    text_only: bool = False,
    keep: str = "dequantised",
) -> ModelOptions:
    """Resolve the arguments; Unsupported, with the reason, for those that streaming cannot honour.

    Arguments that transformers does not know either become `changes` of the config, as there.
    """
    check_text_only(text_only)
    changes = dict(options)
    for name, (is_rejected, why) in _REJECTED.items():
        if name in changes and is_rejected(changes.pop(name)):
            raise Unsupported(None, f"{name}: not supported: {why}")
    for name in _WITHOUT_EFFECT:
        changes.pop(name, None)
    accepted = {name: changes.pop(name, None) for name in _ACCEPTED}
    accepted["trust_remote_code"] = bool(accepted["trust_remote_code"])
    return ModelOptions(
        config,
        MappingProxyType(changes),
        text_only=text_only,
        keeps_quantised=keeps_quantised(keep),
        known=known,
        **accepted,
    )


def keeps_quantised(keep: object) -> bool:
    """Return whether the argument `keep` is "quantised". Raises ValueError unless it is one of its values."""
    if keep not in ("quantised", "dequantised"):
        raise ValueError(f'keep: must be "quantised" or "dequantised", not {keep!r}')
    return keep == "quantised"


def check_text_only(text_only: object) -> None:
    """Raise TypeError unless it is a bool."""
    if type(text_only) is not bool:
        raise TypeError(f"text_only: must be True or False, not {type(text_only).__name__}")


def dtype_option(dtype: Any, options: dict[str, Any]) -> Any:
    """Return the dtype: `dtype`, or torch_dtype, its earlier name, which is taken out of the options."""
    earlier = options.pop("torch_dtype", None)
    return earlier if dtype is None else dtype


def device_option(device: Any, device_map: Any) -> Any:
    """Return the device that `device` or device_map chooses; by default the CPU.

    Raises Unsupported for a map of several devices, ValueError if both are given and differ.
    """
    chosen = _device_of_map(device_map)
    if chosen is None:
        return "cpu" if device is None else device
    if device is not None and torch.device(device) != torch.device(chosen):
        raise ValueError(f"device_map: {device_map!r} contradicts device={device!r}; pass one of them")
    return chosen


def _device_of_map(device_map: Any) -> Any:
    if device_map is None:
        return None
    if isinstance(device_map, Mapping):
        devices = set(device_map.values())
        if len(devices) != 1:
            raise Unsupported(None, f"device_map: several devices are not supported: {_PLACED}")
        [device_map] = devices
    if device_map in _AUTOMATIC_MAPS:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device_map == "disk":
        raise Unsupported(None, f'device_map: "disk" is not supported: {_PLACED}')
    if isinstance(device_map, int) and not isinstance(device_map, bool):
        return f"cuda:{device_map}"
    return device_map


def unknown_argument(name: str, known: tuple[str, ...]) -> TypeError:
    """Return the error for an argument that neither we, nor transformers, nor the config knows."""
    accepted = [*known, *_ACCEPTED, "torch_dtype"]  # not those that have no effect, or are rejected
    close = [each for each in accepted if each.startswith(f"{name}_")] or get_close_matches(name, accepted, 1)
    hint = f"; did you mean {close[0]}?" if close else ", nor is it an attribute of the model's config"
    return TypeError(f"from_pretrained() got an unexpected keyword argument {name!r}{hint}")
