"""Quantised experts as they are stored: a record of bytes for each, from which its matrix is computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from trunkline._streaming.layers import QuantisedWeight
from trunkline._streaming.stored import TENSOR_ALIGNMENT, FileTensor
from trunkline.transformers._dequantise import Dequantise, dequantise_mxfp4
from trunkline.transformers._weights import Conversion

_OF_ACTIVATIONS = ".activation_scale"
_SCALES = "_scale_inv"  # what transformers appends to the name of a matrix of fp8
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"  # of mxfp4
_DIMENSIONS = 2
_CHUNK_BYTES = 16 << 20  # of experts that are converted at once, but always one

Method = Callable[[Sequence[torch.Tensor], torch.Tensor], None]


@dataclass(frozen=True)
class Part:
    """A tensor of each expert, from byte `begin` of its record on.

    `pattern`: of transformers, which the names in the files match. `places`: where each expert has it.
    `is_slice`: whether they are slices of one tensor of all experts.
    """

    pattern: str
    begin: int
    places: tuple[FileTensor, ...]
    is_slice: bool

    @property
    def end(self) -> int:
        """The first byte after it in the record."""
        return self.begin + self.places[0].nbytes

    def view(self, record: torch.Tensor) -> torch.Tensor:
        """Return the tensor within a record."""
        first = self.places[0]
        return record[self.begin : self.end].view(first.dtype).reshape(first.shape)


def parts_of(conversion: Conversion, tensors: Mapping[str, FileTensor], count: int) -> list[Part] | str:
    """Return the tensors of each of `count` experts, or why they cannot be read one by one.

    `conversion`: how transformers computes the weight of all of them. `tensors`: those in the files, by name.
    """
    by_pattern: dict[str, list[FileTensor]] = {}
    for name, pattern in conversion.sources:
        if not pattern.endswith(_OF_ACTIVATIONS):
            by_pattern.setdefault(pattern, []).append(tensors[name])
    parts: list[Part] = []
    end = 0
    for pattern, found in by_pattern.items():
        is_slice = len(found) == 1 and found[0].shape[:1] == (count,)
        places = [found[0].slice(index) for index in range(count)] if is_slice else found
        if len(places) != count:
            return f"of {count} experts, the files have {len(places)} tensors {found[0].name}, ..."
        other = next((each for each in places if _kind(each) != _kind(places[0])), None)
        if other is not None:
            return f"{other.name} is {_kind(other)}, but {places[0].name} is {_kind(places[0])}"
        parts.append(Part(pattern, _aligned(end), tuple(places), is_slice))
        end = parts[-1].end
    return parts


def experts_at_a_time(count: int, nbytes: int) -> Iterator[range]:
    """Divide so many experts, of `nbytes` each, into those that are converted at once."""
    few = max(1, _CHUNK_BYTES // max(1, nbytes))
    return (range(first, min(first + few, count)) for first in range(0, count, few))


class ExpertRecords:
    """How the matrices of one weight of a module with experts are stored, and computed."""

    def __init__(self, path: str, conversion: Conversion, parts: Sequence[Part], model: Any) -> None:
        """`path`: of the weight in `model`, which is on the meta device."""
        weight = model.get_parameter(path)
        self.path = path
        self.count = len(parts[0].places)
        self.record_bytes = _aligned(parts[-1].end)
        self._parts = tuple(parts)
        self._conversion = conversion
        self._model = ref(model)  # which refers to this
        self._dtype = weight.dtype
        self._method = next(filter(self._is_right, self._methods()), None)
        matrix_bytes = weight.dtype.itemsize * torch.Size(weight.shape[1:]).numel()
        self.quantised = QuantisedWeight((path,), self.dequantise, matrix_bytes)

    def places(self) -> Iterator[FileTensor]:
        """Yield what records() fetches, in that order."""
        for index in range(self.count):
            for part in self._parts:
                yield part.places[index]

    @property
    def layout(self) -> str:
        """What a record consists of, as text: another layout has another text."""
        return f"{self.path}: " + ", ".join(
            f"{part.pattern} {part.places[0].dtype} {part.places[0].shape} at {part.begin}"
            for part in self._parts
        )

    def records(self, fetch: Callable[[FileTensor], torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the records of a few experts at a time: the first, and uint8 (experts, record_bytes)."""
        for few in experts_at_a_time(self.count, self.record_bytes):
            made = torch.zeros(len(few), self.record_bytes, dtype=torch.uint8, device="cpu")
            for row, index in enumerate(few):
                for part in self._parts:
                    data = fetch(part.places[index]).reshape(-1).view(torch.uint8)
                    made[row, part.begin : part.end].copy_(data)
            yield few[0], made

    def dequantise(self, stored: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the matrix of an expert into `out`; `stored`: its record, alone."""
        (record,) = stored
        tensors = [part.view(record) for part in self._parts]
        if self._method is None:
            out.copy_(self._by_converter(tensors))
        else:
            self._method(tensors, out)

    def _by_converter(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the matrix of an expert, computed by transformers itself."""
        model = self._model()
        assert model is not None  # it is running, or being loaded
        first = self._conversion.first
        converter = deepcopy(self._conversion.converter)
        for part, tensor in zip(self._parts, tensors, strict=True):
            given = tensor[None] if part.is_slice else tensor
            converter.add_tensor(first, part.places[0].name, part.pattern, lambda given=given: given)
        value = converter.convert(first, model=model, config=model.config)[self.path]
        matrix: torch.Tensor = (value[0] if isinstance(value, list) else value)[0]
        return matrix

    def _methods(self) -> Iterator[Method]:
        """Yield faster ways to compute what may be the same."""
        index = {part.pattern: number for number, part in enumerate(self._parts)}
        pairs = [(index[name], index[name + _SCALES]) for name in index if name + _SCALES in index]
        if 2 * len(pairs) == len(self._parts):
            convert = Dequantise(self._conversion.converter.operations[0], self._dtype)

            def by_rows(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
                begin = 0
                for matrix, scales in pairs:
                    rows = tensors[matrix].shape[0]
                    convert((tensors[matrix], tensors[scales]), out[begin : begin + rows])
                    begin += rows

            yield by_rows
        first, *others = index
        if first.endswith(_BLOCKS) and others == [first.removesuffix(_BLOCKS) + _BLOCK_SCALES]:
            yield lambda tensors, out: dequantise_mxfp4(tensors[0], tensors[1], out)

    def _is_right(self, method: Method) -> bool:
        """Whether a method computes what transformers does: tried with small tensors of the same kinds."""
        tensors = [_small(part, number) for number, part in enumerate(self._parts)]
        try:
            expected = self._by_converter(tensors)
            found = torch.full_like(expected, -1)
            method(tensors, found)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return False
        return torch.equal(found, expected)


def _small(part: Part, number: int) -> torch.Tensor:
    """Return a small tensor of the kind, with different values; the shapes of all parts fit together.

    `number`: of the part; the values of others differ.
    """
    first = part.places[0]
    shape: tuple[int, ...] = first.shape
    if part.pattern.endswith(_BLOCKS):
        shape = 3, 2, 16
    elif part.pattern.endswith(_BLOCK_SCALES):
        shape = 3, 2
    elif len(shape) >= _DIMENSIONS:
        shape = (*shape[:-2], 2, 3) if part.pattern.endswith(_SCALES) else (4, 6)
    numbers = torch.arange(torch.Size(shape).numel(), device="cpu") + 3 * number
    if first.dtype.itemsize > 1:
        return (0.01 + numbers / 10).to(first.dtype).reshape(shape)
    if part.pattern.endswith((_SCALES, _BLOCK_SCALES)):  # exponents of which no product is 0 in fp16
        codes = 123 + numbers % 8
    else:  # of both signs; the largest may stand for NaN
        codes = numbers * 5 % 120 + 128 * (numbers % 2)
    return codes.to(torch.uint8).view(first.dtype).reshape(shape)


def _kind(tensor: FileTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % TENSOR_ALIGNMENT
