"""Maps the tensors of a checkpoint to the weights of a model, by the rules of transformers itself."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from trunkline._errors import Format
from trunkline._streaming.stored import FileTensor
from trunkline.transformers._quantised import check_scales

_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}

Fetch = Callable[[FileTensor], torch.Tensor]


@dataclass
class Conversion:
    """Weights that are computed from several tensors (for example experts that are stored one by one)."""

    first: str  # the first of the weights, as transformers names the group
    converter: Any
    sources: list[tuple[str, str]]  # of the checkpoint: name, and the pattern that it matched

    @property
    def dequantises(self) -> bool:
        """Whether it takes the tensors as they are stored, not in the dtype of the model."""
        return any(getattr(each, "hf_quantizer", None) is not None for each in self.converter.operations)

    def run(self, model: Any, fetch: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights by name; `fetch` gives the tensors of the checkpoint."""
        converter = deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.first, name, pattern, lambda name=name: fetch(name))
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class Weights:
    """The weights of a model: stored as they are, or computed."""

    stored: dict[str, FileTensor]  # by name of the weight
    computed: dict[str, Conversion]
    converter: str  # what decides how they are computed: library and version; "" if none are


def find(model: Any, checkpoint: Mapping[str, FileTensor], source: str, quantiser: Any = None) -> Weights:
    """Return where the weights of `model`, on the meta device, come from.

    `quantiser`: dequantises them. Of tied weights one must exist. Raises Format for any other weight that is
    missing, and for other shapes, and Unsupported for scales of weights that nothing uses; other tensors that
    the model does not use are ignored.
    """
    wanted = model.state_dict()
    mapping = get_model_conversion_mapping(model, hf_quantizer=quantiser) or []
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    stored: dict[str, FileTensor] = {}
    groups: dict[str, Conversion] = {}
    unused: list[str] = []
    for name in sorted(checkpoint, key=dot_natural_key):
        weight, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if weight not in wanted and name in wanted:
            weight, pattern = rename_source_key(
                name, [], [], base_model_prefix=model.base_model_prefix, meta_state_dict=wanted
            )
        if weight not in wanted:
            unused.append(name)
            continue
        if pattern is None:
            stored.setdefault(weight, checkpoint[name])  # the first of two names that mean the same
        else:
            group = groups.setdefault(weight, Conversion(weight, by_pattern[pattern], []))
            group.sources.append((name, pattern))
    check_scales(unused, checkpoint.keys() - set(unused), quantiser, source)
    ties = _ties(model)
    _leave_unscaled(model, groups, stored, checkpoint, ties)

    computed: dict[str, Conversion] = {}
    shapes = {weight: place.shape for weight, place in stored.items()}
    outcomes = _Outcomes(model, checkpoint, source)
    for group in groups.values():
        made = outcomes.of(group)
        computed.update(dict.fromkeys(made, group))
        if group.dequantises:  # others are converted to the dtype that the model gives them
            for weight, (_, dtype) in made.items():
                _set_dtype(model, ties.get(weight, [weight]), dtype)
        shapes.update({weight: shape for weight, (shape, _) in made.items()})
    _check(model, shapes, source)
    version = f"transformers {transformers.__version__}" if computed else ""
    return Weights(stored, computed, version)


class _Outcomes:
    """Shapes and dtypes of what conversions make, tried on the meta device.

    That takes a millisecond for each tensor, of which there are tens of thousands in mixtures of experts. So
    what is known of a layer is used for layers whose tensors have the same shapes and dtypes.
    """

    def __init__(self, model: Any, checkpoint: Mapping[str, FileTensor], source: str) -> None:
        self._source = source
        self._model = model
        self._checkpoint = checkpoint
        self._dtypes = {name: value.dtype for name, value in model.state_dict().items()}
        self._known: dict[object, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}

    def of(self, group: Conversion) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each weight, by name. Raises Format if they cannot be computed."""
        module = group.first.rpartition(".")[0]
        of_sources = tuple(
            (pattern, self._checkpoint[name].shape, self._checkpoint[name].dtype)
            for name, pattern in group.sources
        )
        key = id(group.converter), self._dtypes.get(group.first), group.first[len(module) :], of_sources
        found = self._known.get(key)
        if found is not None:
            return {module + rest: outcome for rest, outcome in found.items()}
        try:
            values = group.run(self._model, self._empty)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            why = str(error).partition("\n")[0]
            raise self._error(group, f"cannot be computed ({why}); is a tensor missing?") from None
        made = {name: (tuple(value.shape), value.dtype) for name, value in values.items()}
        if group.dequantises and any(dtype in _FP8 for _, dtype in made.values()):
            raise self._error(group, "would stay quantised: some have no scales; is a tensor missing?")
        if all(name.startswith(module) for name in made):
            self._known[key] = {name[len(module) :]: outcome for name, outcome in made.items()}
        return made

    def _error(self, group: Conversion, why: str) -> Format:
        names = f"the {len(group.sources)} tensors {group.sources[0][0]} .. {group.sources[-1][0]}"
        return Format(None, f"{self._source}: {group.first}, made from {names}, {why}", self._source)

    def _empty(self, name: str) -> torch.Tensor:
        stored = self._checkpoint[name]
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _leave_unscaled(
    model: Any,
    groups: dict[str, Conversion],
    stored: dict[str, FileTensor],
    checkpoint: Mapping[str, FileTensor],
    ties: Mapping[str, list[str]],
) -> None:
    """Move weights without scales from `groups` to `stored`: a dequantiser returns them as they are.

    The model uses them in the dtype in which they are stored, as transformers does.
    """
    for weight, group in list(groups.items()):
        operations = group.converter.operations
        if len(group.sources) != 1 or len(operations) != 1 or not group.dequantises:
            continue
        del groups[weight]
        place = stored[weight] = checkpoint[group.sources[0][0]]
        _set_dtype(model, ties.get(weight, [weight]), place.dtype)


def _ties(model: Any) -> dict[str, list[str]]:
    """Return all names of each tied weight, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tied for tied in names.values() if len(tied) > 1 for name in tied}


def _set_dtype(model: Any, names: Sequence[str], dtype: torch.dtype) -> None:
    """Give a weight another dtype, under all of its names."""
    made: nn.Parameter | None = None
    for name in names:
        module, _, leaf = name.rpartition(".")
        parameters = model.get_submodule(module)._parameters
        parameter = parameters.get(leaf)
        if parameter is None or parameter.dtype == dtype:
            continue
        if made is None:
            made = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), requires_grad=False)
        parameters[leaf] = made


def _why_missing(model: Any) -> str:
    saved, wanted = getattr(model.config, "architectures", None) or [], type(model).__name__
    if saved and wanted not in saved:
        return f"it was saved from {', '.join(map(str, saved))}, but only a {wanted} can be streamed"
    return "is it the checkpoint of another model, or an incomplete copy?"


def _check(model: Any, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    wanted = model.state_dict()
    by_memory: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        by_memory.setdefault(id(value), []).append(name)
    missing = [names[0] for names in by_memory.values() if not any(name in shapes for name in names)]
    if missing:
        raise Format(
            None,
            f"{source} lacks {len(missing)} of the model's weights: {', '.join(missing[:4])}"
            f"{', ...' if len(missing) > 4 else ''}; {_why_missing(model)}",
            source,
        )
    for name, shape in shapes.items():
        if name in wanted and tuple(wanted[name].shape) != tuple(shape):
            raise Format(
                None,
                f"{source}: {name} has the shape {list(shape)}, but the model's config requires "
                f"{list(wanted[name].shape)}; is config.json that of another model?",
                source,
            )
