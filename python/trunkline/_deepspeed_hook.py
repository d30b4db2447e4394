"""Calls trunkline.deepspeed.install() when a program imports DeepSpeed, for TRUNKLINE_DEEPSPEED=1.

trunkline_deepspeed.pth imports the package at the start of the interpreter if the variable is set, and the
package this module: programs that use DeepSpeed need not import trunkline.
"""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_WATCHED = "deepspeed"


class _Finder(MetaPathFinder):
    """Finds DeepSpeed as the interpreter does, with a loader that installs afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    """Loads DeepSpeed, then installs.

    Only then it removes the finder: accelerate and transformers look for DeepSpeed, by find_spec, before it
    is imported.
    """

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        with suppress(ValueError):  # an earlier import removed it
            sys.meta_path.remove(self._finder)
        _install()

    def __getattr__(self, name: str) -> object:  # get_resource_reader, get_source and others
        return getattr(self._loader, name)


def _install() -> None:
    importlib.import_module("trunkline.deepspeed").install()  # imports torch: only now


def watch() -> None:
    """Install as soon as DeepSpeed is imported; at once if it already is. Idempotent."""
    if _WATCHED in sys.modules:
        _install()
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
