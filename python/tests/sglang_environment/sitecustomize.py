"""Stand-ins for packages that SGLang imports, and that a machine without a GPU does not have or need.

Python imports this module at start if its folder is in PYTHONPATH. Real packages come first.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

_NAMES = ("triton", "torchvision", "sgl_kernel", "datasets")
_ABSENT = ("driver",)  # of triton: its absence says that there is no GPU


class _Anything:
    """An object with every attribute, which decorates functions by returning them."""

    def __init__(self, name: str = "") -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _ABSENT:
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if len(arguments) == 1 and not named and callable(arguments[0]):
            return arguments[0]
        return _Anything()

    def __getitem__(self, key: object) -> Any:
        return _Anything()

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__


class _WithEverything(type):
    """Makes classes with every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)


def _ignore(self: object, *arguments: Any, **named: Any) -> None:
    pass


class _Module(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = "3.0.0"
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _ABSENT:
            raise AttributeError(name)
        is_class = name.lstrip("_")[:1].isupper()
        made: Any = _WithEverything(name, (), {"__init__": _ignore}) if is_class else _Anything(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in _NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
