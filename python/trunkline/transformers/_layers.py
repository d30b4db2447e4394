"""The decoder layers of a model, and what of them is streamed in which units."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from trunkline._errors import Unsupported

# What is less than this share of its layer stays in memory: norms, biases, routers.
_SMALL_SHARE = 1 / 256
_MIN_DIMENSIONS = 2
# Layers are cut into units of about this, or of their largest module: two of them must fit beside what stays,
# and the smaller they are, the more stays.
UNIT_BYTES = 16 << 20


@dataclass
class Weight:
    """A parameter that is streamed: `name` in its module, `path` in the model's state."""

    path: str
    name: str
    nbytes: int


@dataclass
class Part:
    """A module of a layer and its weights."""

    module: nn.Module
    weights: list[Weight]

    @property
    def nbytes(self) -> int:
        """Bytes that are streamed for it."""
        return sum(weight.nbytes for weight in self.weights)


@dataclass
class Unit:
    """What is read and used as a whole: neighbouring modules of one layer."""

    layer: int
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def weights(self) -> list[Weight]:
        """The weights of all of its modules, in their order."""
        return [weight for part in self.parts for weight in part.weights]


def find_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the list of the model's decoder layers, and its path.

    Raises Unsupported for a model that has none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not found:
        raise Unsupported(
            None,
            f"{type(model).__name__} has no list of {count} decoder layers that could be streamed; load it "
            "with transformers",
        )
    return max(found, key=lambda each: sum(parameter.nbytes for parameter in each[1].parameters()))


def cut(model: Any, unit_bytes: int | None = None) -> tuple[nn.ModuleList, list[Unit]]:
    """Return the decoder layers, and their streamed weights in units, in the order of their modules.

    What is tied to anything else stays in memory, as everything outside of the layers does.
    """
    path, layers = find_layers(model)
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    by_layer = [
        _parts(f"{path}.{index}", layer, {key for key, count in uses.items() if count == 1})
        for index, layer in enumerate(layers)
    ]
    largest = max((part.nbytes for parts in by_layer for part in parts), default=0)
    bound = max(UNIT_BYTES if unit_bytes is None else unit_bytes, largest)
    units: list[Unit] = []
    for index, parts in enumerate(by_layer):
        units += _grouped(index, parts, bound)
    return layers, units


def _parts(path: str, layer: nn.Module, streamable: set[int]) -> list[Part]:
    total = sum(parameter.nbytes for parameter in layer.parameters())
    parts = []
    for inner, module in layer.named_modules():
        prefix = f"{path}.{inner}" if inner else path
        weights = [
            Weight(f"{prefix}.{name}", name, parameter.nbytes)
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in streamable
            and parameter.dim() >= _MIN_DIMENSIONS
            and parameter.nbytes >= total * _SMALL_SHARE
        ]
        if weights:
            parts.append(Part(module, weights))
    return parts


def _grouped(layer: int, parts: Sequence[Part], bound: int) -> list[Unit]:
    units: list[Unit] = []
    for part in parts:
        if not units or units[-1].nbytes + part.nbytes > bound:
            units.append(Unit(layer))
        units[-1].parts.append(part)
    return units
