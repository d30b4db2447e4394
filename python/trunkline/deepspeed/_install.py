"""Makes DeepSpeed's builders return this package in the place of the modules that they would compile."""

import sys
from types import ModuleType
from typing import Any

import torch

from trunkline._core import version
from trunkline._errors import Unsupported

_MODULE = "trunkline.deepspeed"
_BUILDERS = ("AsyncIOBuilder", "GDSBuilder", "PinMemoryBuilder")
_PACKAGES = ("deepspeed.ops.op_builder", "op_builder")
_PIN_MEMORY_CACHE = "_deepspeed_pin_memory_op_module"  # where DeepSpeed keeps the op for all of its builders

# What install() has replaced: objects and names, with what they had; None: they had none of their own.
_replaced: list[tuple[Any, str, Any]] = []
_ABSENT = object()


def install() -> None:
    """Make DeepSpeed's ops async_io, gds and pin_memory come from Trunkline, in this process. Idempotent.

    Call it before engines or handles are made; those that exist keep what they have. Imports deepspeed.
    Raises Unsupported if it is not installed, or has other builders than those of 0.19.
    """
    if _replaced:
        return
    try:
        import deepspeed.ops.op_builder
    except ImportError as error:
        message = f"install: cannot import deepspeed: {error}; pip install deepspeed"
        raise Unsupported(None, message) from error
    builders = _builders()
    if "AsyncIOBuilder" not in {each.__name__ for each in builders}:
        raise Unsupported(
            None,
            f"install: deepspeed {getattr(deepspeed, '__version__', '')} has no AsyncIOBuilder in "
            "deepspeed.ops.op_builder; use version 0.19, with which this was tried",
        )
    module = sys.modules[_MODULE]
    for builder in builders:
        _replace(builder, "load", lambda self, verbose=False: module)
        _replace(builder, "is_compatible", _is_compatible)
    _replace(sys, _PIN_MEMORY_CACHE, module)
    compatible = _known_compatible()
    for op in ("async_io", "pin_memory"):
        if op in compatible:
            _replaced.append((compatible, op, compatible[op]))
            compatible[op] = True


def uninstall() -> None:
    """Undo install(): handles that are made from now on are DeepSpeed's again. Idempotent."""
    while _replaced:
        owner, name, before = _replaced.pop()
        if isinstance(owner, dict):
            owner[name] = before
        elif before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _replace(owner: Any, name: str, value: Any) -> None:
    before = vars(owner).get(name, _ABSENT)
    _replaced.append((owner, name, before))
    setattr(owner, name, value)


def _builders() -> list[type]:
    """The builders of the ops, of all kinds of accelerators that are imported."""
    found: dict[type, None] = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not name.startswith(_PACKAGES):
            continue
        for builder in _BUILDERS:
            each = vars(module).get(builder)
            # Where an accelerator lacks an op, its name leads to a class that stands for all such ops.
            if isinstance(each, type) and each.__name__ == builder:
                found[each] = None
    return list(found)


def _known_compatible() -> dict[str, bool]:
    """Which ops DeepSpeed takes for compatible, if it has looked already: then it does not ask again."""
    known = vars(sys.modules["deepspeed.ops"]).get("__compatible_ops__")
    return known if isinstance(known, dict) else {}


def _is_compatible(builder: Any, verbose: bool = False) -> bool:
    """Whether the op works here. `verbose`, as `ds_report` passes it: also print where the op comes from."""
    compatible: bool = builder.NAME != "gds" or torch.cuda.is_available()
    if verbose and compatible:
        print(f"{builder.NAME}: provided by trunkline {version} instead of DeepSpeed's own op")
    return compatible
