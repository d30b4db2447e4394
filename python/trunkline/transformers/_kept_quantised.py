"""Quantised weights that are streamed as they are stored, and dequantised at each use."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from trunkline._errors import Unsupported
from trunkline._streaming.layers import QuantisedWeight, Unit
from trunkline._streaming.manifest import EXPERTS
from trunkline._streaming.stored import FileTensor
from trunkline.transformers._dequantise import Dequantise
from trunkline.transformers._expert_records import ExpertRecords, parts_of
from trunkline.transformers._weights import Conversion, Weights
from trunkline.transformers.experts import Experts

_MATRIX, _SCALES, _OF_ACTIVATIONS = "weight", "weight_scale_inv", "activation_scale"
_DIMENSIONS = 2
_DIGITS = 16


def keep(
    weights: Weights,
    tensors: Mapping[str, FileTensor],
    units: Iterable[Unit],
    state: Mapping[str, Any],
    source: str,
    records: Mapping[str, ExpertRecords],
) -> list[FileTensor]:
    """Let the quantised weights among those of `units` be stored as they are in the files.

    Changes `weights` and `units`, and returns what is stored of those weights, named after them. `state`: the
    parameters of the model by name. `records`: what keep_experts() returned. Raises Unsupported if any can
    only be dequantised once.
    """
    kept: dict[str, tuple[QuantisedWeight, list[FileTensor]]] = {}
    for unit in units:
        for weight in unit.weights:
            conversion = weights.computed.get(weight.path)
            if conversion is not None and conversion.dequantises:
                stored = _stored(conversion, tensors, weight.path, state[weight.path].shape, source)
                operation = conversion.converter.operations[0]
                dequantise = Dequantise(operation, state[weight.path].dtype)
                names = tuple(each.name for each in stored)
                kept[weight.path] = QuantisedWeight(names, dequantise, weight.nbytes), stored
            if weight.path in kept:
                weight.quantised, stored = kept[weight.path]
                weight.nbytes = sum(each.nbytes for each in stored)
    found = [each for _, stored in kept.values() for each in stored]
    for path in kept:
        del weights.computed[path]
    weights.stored.update((each.name, each) for each in found)
    if not weights.computed and not records:
        weights.converter = ""
    return found


def keep_experts(
    weights: Weights, tensors: Mapping[str, FileTensor], experts: Iterable[Experts], model: Any, source: str
) -> dict[str, ExpertRecords]:
    """Let the quantised weights of routed experts be stored as they are in the files, expert by expert.

    Changes `weights` and `experts`, and returns how each weight is stored, by its path. Raises Unsupported if
    any can only be dequantised once.
    """
    made: dict[str, ExpertRecords] = {}
    for each in experts:
        for weight in each.weights:
            conversion = weights.computed.get(weight.path)
            if conversion is None or not conversion.dequantises:
                continue
            parts = parts_of(conversion, tensors, each.count)
            if isinstance(parts, str):
                raise _unsupported(weight.path, parts, source)
            records = made[weight.path] = ExpertRecords(weight.path, conversion, parts, model)
            weight.quantised = records.quantised
            weight.nbytes = records.count * records.record_bytes
            del weights.computed[weight.path]
    if made:
        layouts = "\n".join(each.layout for each in made.values())
        weights.converter += f"{EXPERTS}{hashlib.sha256(layouts.encode()).hexdigest()[:_DIGITS]}"
    return made


def _stored(
    conversion: Conversion,
    tensors: Mapping[str, FileTensor],
    path: str,
    shape: Sequence[int],
    source: str,
) -> list[FileTensor]:
    """Return the matrix and its scales, named after the weight. Raises Unsupported if there is more to it."""
    names = {pattern: name for name, pattern in conversion.sources if pattern != _OF_ACTIVATIONS}
    is_plain = (
        len(conversion.converter.operations) == 1
        and names.keys() == {_MATRIX, _SCALES}
        and len(shape) == _DIMENSIONS
        and tensors[names[_MATRIX]].shape[:1] == tuple(shape[:1])
        and len(tensors[names[_SCALES]].shape) <= _DIMENSIONS
    )
    if not is_plain:
        count = len(conversion.sources)
        raise _unsupported(path, f"it is made from {count} quantised tensors", source)
    return [
        replace(tensors[names[_MATRIX]], name=path),
        replace(tensors[names[_SCALES]], name=f"{path}_scale_inv"),
    ]


def _unsupported(path: str, why: str, source: str) -> Unsupported:
    return Unsupported(
        None,
        f'keep: "quantised" is not supported for {path} of {source}: {why}; omit keep, so that the weights '
        "are dequantised once, into a pack",
        source,
    )


def check_on_cpu(device: torch.device, has_quantised: bool, source: str) -> None:
    """Raise Unsupported for quantised weights that are to be streamed to a GPU."""
    if device.type != "cpu" and has_quantised:
        raise Unsupported(
            None,
            'keep: "quantised" is only supported for a model on the CPU; omit it, so that the weights are '
            "dequantised once, into a pack",
            source,
        )
