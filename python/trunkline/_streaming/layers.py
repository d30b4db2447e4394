"""The decoder layers of a model, and how their weights are grouped into units."""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trunkline._errors import Unsupported
from trunkline._streaming.roofline import max_unit_bytes
from trunkline._streaming.stored import TENSOR_ALIGNMENT

# Weights smaller than this share of their layer stay in memory: norms, biases, routers. So do convolutions of
# single channels, of any size.
_SMALL_SHARE = 1 / 256
_MIN_DIMENSIONS = 2
# Layers are cut into units of about this size, or that of their largest module: two of them must fit beside
# the resident weights, and the smaller they are, the more weights can be resident.
UNIT_BYTES = 16 << 20


@dataclass(frozen=True)
class QuantisedWeight:
    """How a weight is stored that is dequantised at each use.

    `tensors`: the names of those that are stored. `dequantise`: called with them and the tensor to write to.
    `dequantised_bytes`: the size of that.
    """

    tensors: tuple[str, ...]
    dequantise: Callable[[Sequence[torch.Tensor], torch.Tensor], None]
    dequantised_bytes: int


@dataclass
class Weight:
    """A parameter that is streamed: `name` in its module, `path` in the model's state.

    `nbytes`: as it is stored. `quantised`: None if it is used as it is stored.
    """

    path: str
    name: str
    nbytes: int
    quantised: QuantisedWeight | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors that are stored."""
        return (self.path,) if self.quantised is None else self.quantised.tensors

    @property
    def scratch_bytes(self) -> int:
        """Memory for its dequantised values; 0 if it is used as it is stored."""
        nbytes = 0 if self.quantised is None else self.quantised.dequantised_bytes
        return nbytes + -nbytes % TENSOR_ALIGNMENT


@dataclass
class Part:
    """A module of a layer and its weights."""

    module: nn.Module
    weights: list[Weight]

    @property
    def nbytes(self) -> int:
        """Bytes of its streamed weights."""
        return sum(weight.nbytes for weight in self.weights)


@dataclass
class Unit:
    """Neighbouring modules of one layer, whose weights are read and used as a whole."""

    layer: int
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def max_bytes(self) -> int:
        """The most memory that it can need, whatever the offsets of its weights in the files."""
        return max_unit_bytes(self.nbytes, len(self.tensors))

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors that are stored, in their order."""
        return [name for weight in self.weights for name in weight.tensors]

    @property
    def scratch_bytes(self) -> int:
        """Memory for the dequantised values of its quantised weights."""
        return sum(weight.scratch_bytes for weight in self.weights)

    @property
    def weights(self) -> list[Weight]:
        """The weights of all of its modules, in their order."""
        return [weight for part in self.parts for weight in part.weights]


def find_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the list of the model's decoder layers, and its path.

    Raises Unsupported for a model without decoder layers.
    """
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    decoder = _decoder_path(model)
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    within = [each for each in lists if f"{each[0]}.".startswith(decoder)]
    for found in (
        [each for each in within if len(each[1]) == count],
        [each for each in within if len({type(layer) for layer in each[1]}) == 1],  # counted otherwise
        [each for each in lists if len(each[1]) == count],
    ):
        if found:
            return max(found, key=lambda each: sum(parameter.nbytes for parameter in each[1].parameters()))
    raise Unsupported(
        None,
        f"{type(model).__name__} has no list of decoder layers that could be streamed; load it "
        "with transformers",
    )


def _decoder_path(model: Any) -> str:
    """Return the path of the module that generates text, which ends with a dot; "" for the whole model."""
    decoder = model.get_decoder()
    return next((f"{path}." for path, module in model.named_modules() if path and module is decoder), "")


def streamable_weights(model: Any) -> set[int]:
    """Return the ids of the parameters that are not tied: those may be out of memory."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return {key for key, count in uses.items() if count == 1}


def cut(
    model: Any, unit_bytes: int | None = None, apart: Set[int] = frozenset()
) -> tuple[nn.ModuleList, list[Unit]]:
    """Return the decoder layers, and their streamed weights in units, in the order of their modules.

    Tied weights stay in memory, as everything outside of the layers does. `apart`: ids of parameters that are
    neither streamed nor stay.
    """
    path, layers = find_layers(model)
    return layers, cut_layers(path, layers, streamable_weights(model), unit_bytes, apart)


def cut_layers(
    path: str,
    layers: Iterable[nn.Module],
    streamable: Set[int],
    unit_bytes: int | None = None,
    apart: Set[int] = frozenset(),
) -> list[Unit]:
    """Return the streamed weights of these layers, a list that is called `path`, as cut() does."""
    by_layer = [_parts(f"{path}.{index}", layer, streamable, apart) for index, layer in enumerate(layers)]
    largest = max((_bytes(parts) for groups in by_layer for parts in groups), default=0)
    bound = max(UNIT_BYTES if unit_bytes is None else unit_bytes, largest)
    units: list[Unit] = []
    for index, groups in enumerate(by_layer):
        units += _grouped(index, groups, bound)
    return units


def _parts(path: str, layer: nn.Module, streamable: Set[int], apart: Set[int]) -> list[list[Part]]:
    """Return the modules with streamed weights, in groups: a module and those within it.

    The outer module needs its weights while the inner ones run: separate units would all be in use at once.
    """
    total = sum(parameter.nbytes for parameter in layer.parameters() if id(parameter) not in apart)
    groups: list[list[Part]] = []
    outer: str | None = None
    for inner, module in layer.named_modules():
        prefix = f"{path}.{inner}" if inner else path
        weights = [
            Weight(f"{prefix}.{name}", name, parameter.nbytes)
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in streamable
            and id(parameter) not in apart
            and parameter.dim() >= _MIN_DIMENSIONS
            and parameter.nbytes >= total * _SMALL_SHARE
            and not _is_depthwise(module)
        ]
        if weights and outer is not None and inner.startswith(outer):
            groups[-1].append(Part(module, weights))
        elif weights:
            groups.append([Part(module, weights)])
            outer = f"{inner}." if inner else ""
    return groups


def _is_depthwise(module: nn.Module) -> bool:
    """Whether it is a convolution of each channel by itself, whose weights are small.

    Models use those outside of the module, in kernels for convolutions.
    """
    return isinstance(module, nn.Conv1d | nn.Conv2d) and 1 < module.in_channels == module.groups


def _bytes(parts: Sequence[Part]) -> int:
    return sum(part.nbytes for part in parts)


def _grouped(layer: int, groups: Sequence[list[Part]], bound: int) -> list[Unit]:
    units: list[Unit] = []
    for parts in groups:
        if not units or units[-1].nbytes + _bytes(parts) > bound:
            units.append(Unit(layer))
        units[-1].parts += parts
    return units
