"""What stands for a weight while it is not in memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trunkline._errors import Unsupported

# Of a tensor without memory these say something; anything else would compute with garbage.
_KNOWN_PROPERTIES = {
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "names", "grad", "grad_fn"),
    *("requires_grad", "is_leaf", "is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_quantized"),
    *("is_sparse", "is_sparse_csr", "is_mkldnn", "is_nested", "output_nr", "_version", "_backward_hooks"),
    *("_base", "retains_grad", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "is_xla"),
}
_KNOWN_METHODS = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_shared"),
    *("data_ptr", "untyped_storage", "get_device", "requires_grad_", "__len__", "__repr__"),
    *("__hash__", "__format__", "_is_view", "is_pinned", "_has_compatible_shallow_copy_type"),
}
_NO_COPY = "a model whose weights are streamed cannot be copied; load it once more with from_pretrained"
_NO_PICKLE = (
    "a model whose weights are streamed cannot be pickled; its folder holds the weights, load it again with "
    "from_pretrained"
)
_CONVERSIONS = {
    "float": torch.float32,
    "half": torch.float16,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}


class NotCopied:
    """Keeps what it belongs to from being copied and pickled."""

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse."""
        raise Unsupported(None, _NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse."""
        raise Unsupported(None, _NO_PICKLE)


class StateGuard(NotCopied):
    """Keeps a streamed model from being saved, and its weights from being replaced, by the hooks of torch.

    What others add to the model later, as PEFT does its adapters, is loaded and saved as ever.
    """

    def __init__(self, module: nn.Module, own: WeakIdKeyDictionary) -> None:
        """`own`: the weights that the model had when it was loaded, in memory or not."""
        self._own = own
        module.register_load_state_dict_pre_hook(self.before_load)  # type: ignore[no-untyped-call]
        module.register_state_dict_pre_hook(self.before_save)  # type: ignore[no-untyped-call]

    def before_load(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Refuse weights for what the model came with."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in self._own and prefix + name in state_dict:
                raise Unsupported(
                    None,
                    "a model whose weights are streamed takes no others by load_state_dict; save them into a "
                    f"folder, and load that with from_pretrained ({prefix + name} is one of its own)",
                )

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Refuse, unless it is a wrapper with parameters of its own that wants those.

        Weights that are not in memory are OffloadedWeight in the result, which nothing can save.
        """
        if prefix and any(parameter not in self._own for parameter in module.parameters()):
            return
        raise Unsupported(
            None,
            "a model whose weights are streamed has no state_dict, and cannot be saved: its weights "
            "are in its folder; load that with transformers to get them",
        )


class OffloadedWeight(nn.Parameter):
    """A parameter on the meta device that refuses to be computed with, by its name.

    torch itself computes with some tensors that have no memory, and returns garbage.
    """

    path: str
    home: torch.device

    @classmethod
    def of(cls, path: str, parameter: nn.Parameter, home: torch.device) -> "OffloadedWeight":
        """Return what stands for `parameter`, called `path` in its model, which comes to `home` for use."""
        made = cls(parameter.data, requires_grad=False)
        made.path = path
        made.home = home
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let through what asks about the weight, not what uses it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            if name == "device":  # where adapters that compute with it belong: on meta they would be garbage
                return args[0].home
            harmless = name in _KNOWN_PROPERTIES or (name == "data" and args[0] is args[-1] and len(args) > 1)
        else:
            harmless = name in _KNOWN_METHODS
        if harmless:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], cls) and _changes_nothing(args[0], name, args[1:], kwargs):
            return args[0]
        absent = next((value.path for value in _flat((args, kwargs)) if isinstance(value, cls)), "a weight")
        raise Unsupported(
            None,
            f"{absent} is streamed, and in memory only while its module runs: {name} of it is not supported. "
            "Load the model with transformers for that; or, where the model's own code uses the weight "
            "elsewhere in its layer, give unit_bytes of a whole layer",
        )

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse."""
        raise Unsupported(None, _NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse."""
        raise Unsupported(None, _NO_PICKLE)


def _changes_nothing(
    weight: OffloadedWeight, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether the result is what the weight is when it is in memory."""
    if name == "detach":
        return True
    if name in ("cpu", "cuda"):
        given = kwargs.get("device", args[0] if args else None) if name == "cuda" else None
        return _is_home(weight, name if given is None else given)
    if name in _CONVERSIONS:
        return weight.dtype == _CONVERSIONS[name]
    if name != "to":
        return False
    wanted = [value for value in (*args, *kwargs.values()) if value is not None]
    if any(isinstance(value, torch.Tensor) for value in wanted):
        return False
    dtypes = [value for value in wanted if isinstance(value, torch.dtype)]
    devices = [
        value
        for value in wanted
        if isinstance(value, str | torch.device | int) and not isinstance(value, bool)
    ]
    return all(dtype == weight.dtype for dtype in dtypes) and all(
        _is_home(weight, device) for device in devices
    )


def _is_home(weight: OffloadedWeight, name: Any) -> bool:
    device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    return device.type == weight.home.type and (
        device.type != "cuda" or _index_of(device) == _index_of(weight.home)
    )


def _index_of(device: torch.device) -> int:
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _flat(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _flat(each)
    else:
        yield value
