"""What cannot work with streamed weights, refused before anything is loaded."""

from typing import Any

from trunkline._errors import Unsupported
from trunkline.sglang._settings import VARIABLE


def check_options(runner: Any) -> None:
    """Raise Unsupported, which names the option to change, for what streaming does not support.

    `runner`: SGLang's ModelRunner.
    """
    from sglang.srt.runtime_context import get_exec, get_lora, get_model, get_parallel, get_spec

    offload, parallel, model = get_exec().offload, get_parallel(), runner.model_config
    refused = (
        (runner.device != "cpu", "--device", f"{runner.device} is not supported yet; use --device cpu"),
        (
            runner.is_draft_worker or _is_set(get_spec(), "speculative_algorithm"),
            "--speculative-algorithm",
            "a draft model is not streamed; omit it",
        ),
        (
            _is_set(get_lora(), "enable_lora") or _is_set(get_lora(), "lora_paths"),
            "--enable-lora",
            "adapters change weights that are not in memory; merge the adapter into the model, and omit it",
        ),
        (
            getattr(model, "quantization", None) is not None,
            "--quantization",
            f"{getattr(model, 'quantization', None)} weights are not supported; serve the unquantised model",
        ),
        (
            _is_set(offload, "cpu_offload_gb") or getattr(offload, "offload_group_size", -1) > 0,
            "--cpu-offload-gb",
            "SGLang's own offloading excludes ours; omit it",
        ),
        (parallel.pp_size > 1, "--pp-size", "pipeline parallelism is not supported; use --tp-size"),
        (
            _load_format(get_model()) not in ("auto", "safetensors"),
            "--load-format",
            "the weights are read from .safetensors files; omit it",
        ),
        (
            _is_set(get_exec(), "enable_torch_compile"),
            "--enable-torch-compile",
            "compiled layers would hold the memory of one pass; omit it",
        ),
    )
    for is_refused, option, why in refused:
        if is_refused:
            raise Unsupported(None, f"{option}: {why}, or unset {VARIABLE}")


def check_layers(layers: list[Any]) -> None:
    """Raise Unsupported for layers that keep tensors computed from their weights (MLA)."""
    import torch

    for layer in layers:
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.numel() > _MOST_KEPT:
                    raise Unsupported(
                        None,
                        f"{type(layer).__name__}: {path}.{name} is computed from weights when the model is "
                        f"loaded, which is not supported; unset {VARIABLE} to serve the model from memory",
                    )


_MOST_KEPT = 1 << 16  # elements: scales and tables of positions are smaller


def _is_set(bag: Any, name: str) -> bool:
    return bool(getattr(bag, name, None))


def _load_format(bag: Any) -> str:
    value = getattr(bag, "load_format", "auto")
    return str(getattr(value, "value", value)).lower()
