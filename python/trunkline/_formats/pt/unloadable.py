"""Finds the parts of an object that torch.save writes, but that weights_only does not allow to load."""

import collections
import io
import pickle
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import _weights_only_unpickler

from trunkline._warnings import caller, warn_without_failing

# Types that pickle does not know and weights_only allows: a state of these need not be checked.
LOADABLE: set[type] = {collections.OrderedDict, collections.Counter, torch.Size, torch.dtype, torch.device}
_MODULES = ("torch", "torch._utils", "torch.storage", "torch._tensor", "torch.nn.parameter")  # of tensors
_CONTAINERS = (dict, collections.OrderedDict, list, tuple)
_PLAIN = (str, int, float, bool, type(None), bytes, complex, torch.Tensor, torch.nn.Parameter, torch.Size)
_MAX_SHOWN = 5


def is_of_tensors(value: Any) -> bool:
    """Whether the value is a class or function by which torch pickles tensors, or the class OrderedDict."""
    if not isinstance(value, type | types.FunctionType):
        return False
    return value.__module__ in _MODULES or value is collections.OrderedDict


def is_loadable(pickled: bytes) -> bool:
    """Whether torch.load(weights_only=True) allows all that a pickle does. Needs no memory for tensors."""
    unpickler: Any = _weights_only_unpickler.Unpickler(io.BytesIO(pickled), encoding="utf-8")
    unpickler.persistent_load = _outline
    try:
        unpickler.load()
    except pickle.UnpicklingError:
        return False
    except Exception:
        pass
    return True


def _outline(identity: Any) -> Any:
    _, kind, _, _, elements = identity
    dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
    memory = torch.UntypedStorage(elements * dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
    return torch.storage.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def unloadable_parts(root: object, objects_to: Callable[[object], bool]) -> str:
    """Return the places and types of the parts that `objects_to` objects to, as text.

    Places are Python code that begins with `obj`. Each type is checked once.
    """
    known: dict[type, bool] = {}
    found: list[str] = []
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("obj", root)]
    while pending:
        place, value = pending.pop()
        kind = type(value)
        if kind in _CONTAINERS:
            if id(value) not in seen:
                seen.add(id(value))
                children: Iterable[Any] = list(value.items()) if isinstance(value, dict) else enumerate(value)
                pending.extend(reversed([(f"{place}[{key!r}]", child) for key, child in children]))
        elif kind not in _PLAIN:
            if kind not in known:
                known[kind] = objects_to(value)
            if known[kind]:
                found.append(f"{place} (a {kind.__module__}.{kind.__qualname__})")
    more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    return ", ".join(found[:_MAX_SHOWN]) + more if found else "obj"


def warn_of_unloadable(parts: str | None, path: str) -> None:
    """Warn, at the line that saves, of parts that cannot be loaded."""
    if parts is None:
        return
    text = (
        f"saving {path}: {parts} cannot be loaded with weights_only=True, so trunkline.load and torch.load "
        "reject the file; save dicts, lists, numbers, strings and tensors instead (of a model its "
        "state_dict()), or load it with torch.load(path, weights_only=False), which runs code of the file"
    )
    warn_without_failing(text, caller())
