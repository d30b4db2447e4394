"""Computes the weights of all experts a few experts at a time, where each is computed by itself.

The files have most mixtures as a tensor for each expert, and the model has one weight of all experts of a
layer, which may be larger than the memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

from trunkline._streaming.stored import FileTensor
from trunkline.transformers._expert_records import Part, experts_at_a_time, parts_of
from trunkline.transformers._weights import Conversion

# What dequantises a list of tensors one by one, or all slices of one; by name, as modules of quantisers
# import what may not be installed.
_DEQUANTISE = ("Fp8Dequantize", "Mxfp4Dequantize")
_DIMENSIONS = (1, 2)  # of a weight (experts, rows, columns): those within an expert


class ExpertSlices:
    """How a weight of `count` experts is computed from what the files have of each."""

    def __init__(self, conversion: Conversion, parts: Sequence[Part], count: int, nbytes: int) -> None:
        """`nbytes`: of an expert, in the weight."""
        self._conversion = conversion
        self._parts = parts
        self._count = count
        self._nbytes = nbytes

    @classmethod
    def of(
        cls, conversion: Conversion, tensors: Mapping[str, FileTensor], shape: Sequence[int], nbytes: int
    ) -> "ExpertSlices | None":
        """Return how a weight of this shape and size is computed; None: not expert by expert."""
        count = shape[0]
        parts = parts_of(conversion, tensors, count)
        if isinstance(parts, str) or not _is_by_expert(conversion.converter.operations, parts):
            return None
        return cls(conversion, parts, count, nbytes // max(1, count))

    def places(self) -> Iterator[FileTensor]:
        """Yield what slices() fetches, in that order."""
        for few in experts_at_a_time(self._count, self._nbytes):
            for part in self._parts:
                for index in few:
                    yield part.places[index]

    def slices(
        self, model: Any, fetch: Callable[[FileTensor], torch.Tensor]
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield the weights of a few experts at a time: name, the first of them, and their slices."""
        for few in experts_at_a_time(self._count, self._nbytes):
            converter = deepcopy(self._conversion.converter)
            first = self._conversion.first
            for part in self._parts:
                given = [fetch(part.places[index]) for index in few]
                for tensor in [torch.stack(given)] if part.is_slice else given:
                    converter.add_tensor(
                        first, part.places[0].name, part.pattern, lambda tensor=tensor: tensor
                    )
            del given
            made = converter.convert(first, model=model, config=model.config)
            for name, value in made.items():
                yield name, few[0], value[0] if isinstance(value, list) else value


def _is_by_expert(operations: Sequence[Any], parts: Sequence[Part]) -> bool:
    """Whether operations compute each expert by itself, and put the experts into the first dimension."""
    left = [each for each in operations if type(each).__name__ not in _DEQUANTISE]
    if not all(part.is_slice for part in parts):
        if any(part.is_slice for part in parts) or not left:
            return False
        merge, *left = left
        if type(merge) is not MergeModulelist or merge.dim != 0:
            return False
    return all(_is_within_experts(each) for each in left)


def _is_within_experts(operation: Any) -> bool:
    if type(operation) is Concatenate:
        return operation.dim in _DIMENSIONS
    if type(operation) is Transpose:
        return {operation.dim0, operation.dim1} == set(_DIMENSIONS) and not operation.check_dims
    return False
