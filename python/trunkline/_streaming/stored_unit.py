"""Where the weights of a unit are, in a file and in the memory they are used in."""

from dataclasses import dataclass

from trunkline import _core
from trunkline._streaming.bound_unit import WeightView
from trunkline._streaming.layers import Unit
from trunkline._streaming.stored import FileTensor, StreamUnit


@dataclass(frozen=True)
class StoredUnit:
    """A unit, its description for WeightStream, and the offset of each of its tensors in memory, in order."""

    unit: Unit
    described: StreamUnit
    offsets: list[tuple[int, FileTensor]]

    @classmethod
    def of(cls, unit: Unit, places: dict[str, FileTensor]) -> "StoredUnit":
        """Lay the unit out so that it is read from the file without a copy, where that is possible."""
        offsets, at = [], 0
        for tensor in unit.tensors:
            stored = places[tensor]
            at = stored.next_begin(at)
            offsets.append((at, stored))
            at += stored.nbytes
        parts = [(each.file, each.offset, each.nbytes, begin, each.checksum) for begin, each in offsets]
        name = unit.weights[0].path
        if len(unit.weights) > 1:
            name += f" .. {unit.weights[-1].path}"
        return cls(unit, (name, at, parts), offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of main memory that it needs."""
        return self.described[1]

    def views(self, on_gpu: bool) -> list[WeightView]:
        """Return the tensors' offsets in the memory they are used in, their dtypes and shapes."""
        begins = _core.device_layout(self.described) if on_gpu else [at for at, _ in self.offsets]
        return [
            WeightView(begin, stored.dtype, stored.shape)
            for begin, (_, stored) in zip(begins, self.offsets, strict=True)
        ]
