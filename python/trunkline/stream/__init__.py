"""Models whose weights are larger than memory: predict their speed, and measure it.

trunkline.stream.plan("path/of/model", batch_size=32, memory_budget="8GB")
model = trunkline.transformers.from_pretrained("path/of/model", memory_budget="8GB")
model.generate(...)
trunkline.stream.stats(model)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trunkline._streaming.streaming import stats
    from trunkline.stream._plan import plan

__all__ = ["plan", "stats"]

_MODULES = {"plan": "trunkline.stream._plan", "stats": "trunkline._streaming.streaming"}


def __getattr__(name: str) -> Any:
    """Import at first use: torch and transformers take seconds, which `trunkline pack --help` need not."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
