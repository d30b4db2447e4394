"""Placeholders for weights that are not in memory, and what the model they belong to cannot do."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from trunkline._errors import Unsupported

# These are meaningful for a tensor without memory; anything else would compute with garbage.
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
_NO_COPY = "a model whose weights are streamed cannot be copied; load it again with from_pretrained"
_NO_PICKLE = (
    "a model whose weights are streamed cannot be pickled; load it from its folder with from_pretrained "
    "instead"
)
_CONVERSIONS = {
    "float": torch.float32,
    "half": torch.float16,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
}

_MOVES = {"to", "cpu", "cuda", "type", *_CONVERSIONS}


class NotCopied:
    """Keeps the model that holds it from being copied and pickled."""

    def __deepcopy__(self, memo: Any) -> Any:
        """Raise Unsupported."""
        raise Unsupported(None, _NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise Unsupported."""
        raise Unsupported(None, _NO_PICKLE)


class StateGuard(NotCopied):
    """Keeps a streamed model from being saved, and its weights from being replaced, through torch's hooks.

    Parameters that are added to the model later, such as PEFT adapters, are loaded and saved as usual.
    """

    def __init__(self, module: nn.Module, own: WeakIdKeyDictionary) -> None:
        """`own`: the weights with which the model was loaded, in memory or not."""
        self._own = own
        module.register_load_state_dict_pre_hook(self.before_load)  # type: ignore[no-untyped-call]
        module.register_state_dict_pre_hook(self.before_save)  # type: ignore[no-untyped-call]

    def before_load(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Raise Unsupported for values of weights with which the model was loaded."""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in self._own and prefix + name in state_dict:
                raise Unsupported(
                    None,
                    f"cannot load {prefix + name} by load_state_dict: the model's weights are streamed; save "
                    "the new weights into a folder, and load that with from_pretrained",
                )

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raise Unsupported, unless the module is a wrapper with its own parameters, which can be saved.

        Weights that are not in memory are OffloadedWeight in the result, which cannot be saved.
        """
        if prefix and any(parameter not in self._own for parameter in module.parameters()):
            return
        raise cannot_save()


def cannot_save() -> Unsupported:
    """Make the error for saving a model whose weights are streamed."""
    return Unsupported(
        None,
        "a model whose weights are streamed has no state_dict, and cannot be saved; its weights are in "
        "its folder: load that with transformers",
    )


class OffloadedWeight(nn.Parameter):
    """A parameter on the meta device; computing with it raises an error that names it.

    torch itself computes with some tensors that have no memory, and returns garbage.
    """

    path: str
    compute_device: torch.device
    # What trunkline.save and Checkpointer.save say.
    saving_objection = (
        "is a weight of a streamed model, in memory only while its module runs. All weights are in the "
        "model's folder: copy that, or save what trunkline.load returns for it"
    )

    @classmethod
    def of(cls, path: str, parameter: nn.Parameter, compute_device: torch.device) -> "OffloadedWeight":
        """Return a placeholder for `parameter`, called `path` in its model and used on `compute_device`."""
        made = cls(parameter.data.to("meta"), requires_grad=False)
        made.path = path
        made.compute_device = compute_device
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Allow calls that ask about the weight; raise Unsupported for calls that use it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", name)
            if name == "device":  # adapters are created there: on meta they would hold garbage
                return args[0].compute_device
            harmless = name in _KNOWN_PROPERTIES or (name == "data" and args[0] is args[-1] and len(args) > 1)
        else:
            harmless = name in _KNOWN_METHODS
        if harmless:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], cls) and _changes_nothing(args[0], name, args[1:], kwargs):
            return args[0]
        if args and isinstance(args[0], cls) and name in _MOVES:
            raise Unsupported(
                None,
                f'cannot call "{name}" on {args[0].path}, a weight of a streamed model: such a model cannot '
                "be moved or converted; pass device= or dtype= to from_pretrained. If the model's own code "
                "does this within its layer, pass unit_bytes of a whole layer",
            )
        absent = next((value.path for value in _flat((args, kwargs)) if isinstance(value, cls)), "a weight")
        raise Unsupported(
            None,
            f'cannot call "{name}" on {absent}: it is streamed, and in memory only while its module runs. '
            "Load the model with transformers; or, if the model's own code uses the weight elsewhere in its "
            "layer, pass unit_bytes of a whole layer",
        )

    def __deepcopy__(self, memo: Any) -> Any:
        """Raise Unsupported."""
        raise Unsupported(None, _NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise Unsupported."""
        raise Unsupported(None, _NO_PICKLE)


def _changes_nothing(
    weight: OffloadedWeight, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether the call would return the weight as it is in memory."""
    if name == "detach":
        return True
    if name in ("cpu", "cuda"):
        given = kwargs.get("device", args[0] if args else None) if name == "cuda" else None
        return _is_on(weight, name if given is None else given)
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
        _is_on(weight, device) for device in devices
    )


def _is_on(weight: OffloadedWeight, name: Any) -> bool:
    device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
    return device.type == weight.compute_device.type and (
        device.type != "cuda" or _index_of(device) == _index_of(weight.compute_device)
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
