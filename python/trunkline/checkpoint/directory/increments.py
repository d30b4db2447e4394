"""What a save writes of its tensors, and what it references in shards of an earlier checkpoint.

docs/formats/checkpoint.md describes the feature "incremental". Tensors are compared unit by unit, by digests.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy
import numpy.typing

from trunkline import _core
from trunkline._core import CheckpointManifest
from trunkline._tensor_io.tensors import bytes_of, contiguous
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.directory.shards import ALIGNMENT, MAX_HEAD_BYTES, TensorRecord, head_bytes
from trunkline.checkpoint.directory.shares import Piece

# The feature that a reader must support (docs/formats/checkpoint.md).
INCREMENTAL = "incremental"
UNIT_BYTES = 1 << 17

Digests: TypeAlias = "numpy.typing.NDArray[numpy.uint64]"  # one row of two numbers for each unit
Mask: TypeAlias = "numpy.typing.NDArray[numpy.bool_]"
Integers: TypeAlias = "numpy.typing.NDArray[numpy.int64]"

# Where the units are that show whether a tensor changes everywhere: not at its ends, since the first rows of
# an embedding are those of frequent tokens.
_SAMPLES = (0.3, 0.6, 0.9)
_SPARE_BYTES = 1 << 20  # that linked shards may have without need, besides half of what a writer saves
_MAX_LINKS = 64  # shards that a writer references
_FEW_PIECES = 10_000  # whose entries fit into the head of a shard, whatever their names are
_WINDOW_BYTES = 64 << 20  # of the memory of a device, copied to the host at a time


class Reference(NamedTuple):
    """Bytes [begin, end) of a tensor that are in a linked shard.

    link: the number of the shard among those that were linked; offset: of the bytes in it.
    """

    tensor: int
    begin: int
    end: int
    link: int
    offset: int


@dataclass
class Increment:
    """What a writer saves.

    changed, steady: pieces that it writes, of each of its parts: those that changed, and those that did not
    (or are new) and are written nevertheless. They go to separate shards, so that the latter can be linked as
    a whole later. digests: by tensor, runs of them with the index of their first unit.
    """

    changed: list[list[Piece]] = field(default_factory=list)
    steady: list[list[Piece]] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    digests: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)

    @property
    def bytes_referenced(self) -> int:
        """Bytes that are not written."""
        return sum(each.end - each.begin for each in self.references)


class Base:
    """A checkpoint that a save refers to, with the shards of it that are linked."""

    def __init__(self, manifest: CheckpointManifest, links: Mapping[int, int]) -> None:
        """`links`: by the number of a shard in the manifest, its number among the links."""
        self._manifest = manifest
        self.links = links
        self.shard_bytes = [nbytes for _, _, nbytes, _ in manifest.shards()]
        self._tensors = {
            name: (index, dtype, shape) for index, (name, dtype, shape, _) in enumerate(manifest.tensors())
        }

    def units_of(self, about: TensorRecord) -> "tuple[Mask, Digests] | None":
        """Return which units of a tensor have a digest, and these; None: the base has no such tensor."""
        index = self._index_of(about)
        if index is None:
            return None
        count = -(-about.nbytes // UNIT_BYTES)
        known = numpy.zeros(count, bool)
        digests = numpy.zeros((count, 2), numpy.uint64)
        for first, run in self._manifest.digests(index):
            values = numpy.frombuffer(run, numpy.uint64).reshape(-1, 2)
            known[first : first + len(values)] = True
            digests[first : first + len(values)] = values
        return known, digests

    def places_of(self, about: TensorRecord) -> "tuple[Integers, Integers]":
        """Return in which shard each unit of a tensor is, and where; -1: not in one piece of a linked one."""
        index = self._index_of(about)
        assert index is not None
        count = -(-about.nbytes // UNIT_BYTES)
        shards = numpy.full(count, -1, numpy.int64)
        offsets = numpy.zeros(count, numpy.int64)
        at = 0
        for shard, offset, nbytes in self._manifest.pieces(index):
            end = at + nbytes
            first = -(-at // UNIT_BYTES)
            last = count if end == about.nbytes else end // UNIT_BYTES
            if first < last and shard in self.links:
                shards[first:last] = shard
                offsets[first:last] = offset - at + numpy.arange(first, last) * UNIT_BYTES
            at = end
        return shards, offsets

    def _index_of(self, about: TensorRecord) -> int | None:
        found = self._tensors.get(about.name)
        return found[0] if found is not None and found[1:] == (about.dtype, tuple(about.shape)) else None


@dataclass
class _Compared:
    """A piece of a tensor, its units, and what is known of them."""

    piece: Piece
    first: int  # unit of the tensor
    base: "tuple[Mask, Digests] | None"  # of these units
    wanted: Integers = field(default_factory=lambda: numpy.zeros(0, numpy.int64))  # of which digests are made
    found: Mask = field(default_factory=lambda: numpy.zeros(0, bool))
    digests: Digests = field(default_factory=lambda: numpy.zeros((0, 2), numpy.uint64))
    changes_everywhere: bool = False
    places: "tuple[Integers, Integers] | None" = None  # of its units in the base, once they are known

    @classmethod
    def of(cls, piece: Piece, base: "tuple[Mask, Digests] | None") -> "_Compared":
        """Begin with nothing known of its own units."""
        first = piece.begin // UNIT_BYTES
        count = -(-(piece.end - piece.begin) // UNIT_BYTES)
        of_units = None if base is None else tuple(each[first : first + count] for each in base)
        made = cls(piece, first, of_units)  # type: ignore[arg-type]
        made.found = numpy.zeros(count, bool)
        made.digests = numpy.zeros((count, 2), numpy.uint64)
        return made

    def sample(self) -> Integers:
        count = len(self.found)
        return numpy.unique((numpy.array(_SAMPLES) * count).astype(numpy.int64))

    def rest(self) -> Integers:
        return numpy.flatnonzero(~self.found)

    def add(self, units: Integers, digests: Digests) -> None:
        self.found[units] = True
        self.digests[units] = digests

    def same(self) -> Mask:
        """Return which units are those of the base."""
        if self.base is None:
            return numpy.zeros(len(self.found), bool)
        known, digests = self.base
        same: Mask = self.found & known & (self.digests == digests).all(axis=1)
        return same

    def is_new(self) -> bool:
        """Whether the base has no digest that its samples can be compared with."""
        return self.base is None or not self.base[0][self.sample()].any()

    def bytes_of(self, unit: int) -> tuple[int, int]:
        """Return where a unit begins and ends in the tensor."""
        begin = self.piece.begin + unit * UNIT_BYTES
        return begin, min(begin + UNIT_BYTES, self.piece.end)

    def runs(self, units: Mask) -> Iterable[tuple[int, int]]:
        """Yield [first, last) of each run of units."""
        edges = numpy.flatnonzero(numpy.diff(numpy.concatenate(([0], units.astype(numpy.int8), [0]))))
        return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)

    def pieces(self, units: Mask) -> list[Piece]:
        """Return the pieces of these units."""
        return [
            Piece(self.piece.tensor, self.bytes_of(first)[0], self.bytes_of(last - 1)[1])
            for first, last in self.runs(units)
        ]


class Comparison:
    """Compares the tensors of a writer with its base, and decides what it writes."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        described: Sequence[TensorRecord],
        streams: "Mapping[torch.device, torch.cuda.Stream]",
        base: Base | None,
    ) -> None:
        """`streams`: tensors on GPUs are read in order on these."""
        self._tensors = tensors
        self._described = described
        self._streams = streams
        self._base = base
        self._units: dict[int, tuple[Mask, Digests] | None] = {}

    def compare(self, parts: Sequence[Sequence[Piece]]) -> Increment:
        """Return what to write of these pieces, which are cut at units, and what to reference."""
        compared = [[_Compared.of(piece, self._base_of(piece.tensor)) for piece in part] for part in parts]
        every = [each for part in compared for each in part]
        old = [each for each in every if not each.is_new()]
        for each in old:
            each.wanted = each.sample()
        self._digest(old)
        for each in old:
            each.changes_everywhere = not each.same().any()
        others = [each for each in every if not each.changes_everywhere]
        for each in others:
            each.wanted = each.rest()
        self._digest(others)
        return self._decide(compared)

    def _base_of(self, tensor: int) -> "tuple[Mask, Digests] | None":
        if self._base is None:
            return None
        if tensor not in self._units:
            self._units[tensor] = self._base.units_of(self._described[tensor])
        return self._units[tensor]

    def _digest(self, compared: Sequence[_Compared]) -> None:
        """Make the digests that are wanted."""
        addresses: list[int] = []
        sizes: list[int] = []
        made = []
        held = []
        for each in compared:
            if not len(each.wanted):
                continue
            tensor = self._tensors[each.piece.tensor]
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                tensor = contiguous(tensor)
                held.append(tensor)
            if not tensor.is_cpu:
                each.add(each.wanted, self._digests_on_device(tensor, each))
                continue
            memory = tensor.data_ptr()
            wanted = numpy.zeros(len(each.found), bool)
            wanted[each.wanted] = True
            for first, last in each.runs(wanted):
                begin, end = each.bytes_of(first)[0], each.bytes_of(last - 1)[1]
                addresses.append(memory + begin)
                sizes.append(end - begin)
            made.append(each)
        digests = _as_digests(_core.digests_of(addresses, sizes, UNIT_BYTES))
        at = 0
        for each in made:
            each.add(each.wanted, digests[at : at + len(each.wanted)])
            at += len(each.wanted)
        held.clear()

    def _digests_on_device(self, tensor: torch.Tensor, each: _Compared) -> Digests:
        """Copy the units that are wanted to the host, a window at a time."""
        found = []
        memory = bytes_of(tensor)
        wanted = numpy.zeros(len(each.found), bool)
        wanted[each.wanted] = True
        with torch.cuda.stream(self._streams[tensor.device]):
            for first, last in each.runs(wanted):
                begin, end = each.bytes_of(first)[0], each.bytes_of(last - 1)[1]
                for at in range(begin, end, _WINDOW_BYTES):
                    window = memory[at : min(at + _WINDOW_BYTES, end)].cpu()
                    found.append(
                        _as_digests(_core.digests_of([window.data_ptr()], [window.nbytes], UNIT_BYTES))
                    )
        return numpy.concatenate(found)

    def _decide(self, compared: Sequence[Sequence[_Compared]]) -> Increment:
        increment = Increment()
        accepted = self._accepted([each for part in compared for each in part])
        for part in compared:
            changed, steady, references = self._of_part(part, accepted)
            if len(changed) + len(steady) > _FEW_PIECES and not self._fits(changed, steady):
                changed, steady, references = [each.piece for each in part], [], []
            increment.changed.append(changed)
            increment.steady.append(steady)
            increment.references += references
        for part in compared:
            for each in part:
                runs = [
                    (each.first + first, each.digests[first:last].tobytes())
                    for first, last in each.runs(each.found)
                ]
                increment.digests.setdefault(each.piece.tensor, []).extend(runs)
        return increment

    def _of_part(
        self, part: Sequence[_Compared], accepted: set[int]
    ) -> tuple[list[Piece], list[Piece], list[Reference]]:
        changed: list[Piece] = []
        steady: list[Piece] = []
        references: list[Reference] = []
        for each in part:
            same = each.same()
            if not same.any():
                # New ones may stay as they are. On a first save everything is new, and goes to one shard.
                is_steady = self._base is not None and not each.changes_everywhere
                (steady if is_steady else changed).append(each.piece)
                continue
            shards, offsets = self._places(each)
            linked = same & numpy.isin(shards, list(accepted))
            references += self._references(each, linked, shards, offsets)
            # Of those that were not digested before, it is not known whether they change.
            may_stay = same if each.base is None else same | ~each.base[0]
            steady += each.pieces(may_stay & ~linked)
            changed += each.pieces(~may_stay)
        return changed, steady, references

    def _places(self, each: _Compared) -> "tuple[Integers, Integers]":
        if each.places is None:
            assert self._base is not None
            shards, offsets = self._base.places_of(self._described[each.piece.tensor])
            end = each.first + len(each.found)
            each.places = shards[each.first : end], offsets[each.first : end]
        return each.places

    def _references(
        self, each: _Compared, linked: Mask, shards: Integers, offsets: Integers
    ) -> list[Reference]:
        """Return the references to these units: one for those that are adjacent in a shard as well."""
        assert self._base is not None
        found: list[Reference] = []
        for first, last in each.runs(linked):
            breaks = (numpy.diff(shards[first:last]) != 0) | (numpy.diff(offsets[first:last]) != UNIT_BYTES)
            edges = [first, *(first + 1 + numpy.flatnonzero(breaks)).tolist(), last]
            for begin, end in itertools.pairwise(edges):
                found.append(
                    Reference(
                        each.piece.tensor,
                        each.bytes_of(begin)[0],
                        each.bytes_of(end - 1)[1],
                        self._base.links[int(shards[begin])],
                        int(offsets[begin]),
                    )
                )
        return found

    def _accepted(self, every: Sequence[_Compared]) -> set[int]:
        """Return which shards of the base are worth their room."""
        live: dict[int, int] = {}
        total = 0
        for each in every:
            total += each.piece.end - each.piece.begin
            same = each.same()
            if not same.any():
                continue
            shards, _ = self._places(each)
            for shard in numpy.unique(shards[same]).tolist():
                units = numpy.flatnonzero(same & (shards == shard))
                begin, end = each.bytes_of(int(units[-1]))
                # With the room up to where the next tensor may begin.
                last = -(-(end - begin) // ALIGNMENT) * ALIGNMENT
                live[shard] = live.get(shard, 0) + (len(units) - 1) * UNIT_BYTES + last
        live.pop(-1, None)
        if self._base is None:
            return set()
        nbytes = self._base.shard_bytes
        accepted: set[int] = set()
        room = total // 2 + _SPARE_BYTES
        for shard in sorted(live, key=lambda shard: nbytes[shard] / live[shard]):
            room -= max(0, nbytes[shard] - live[shard])
            if room < 0 or len(accepted) == _MAX_LINKS:
                break
            accepted.add(shard)
        return accepted

    def _fits(self, *pieces: Sequence[Piece]) -> bool:
        """Whether the heads of shards hold an entry for each piece."""
        costs = head_bytes(self._described)
        return all(sum(costs[piece.tensor] for piece in part) <= MAX_HEAD_BYTES for part in pieces)


def _as_digests(text: bytes) -> Digests:
    return numpy.frombuffer(text, numpy.uint64).reshape(-1, 2)


def linkable(manifest: CheckpointManifest, full_every: int | None) -> list[int]:
    """Return the shards of a base that the next commit may reference.

    None if it has few digests, since everything changed: making links and removing them would be in vain.
    """
    tensors = manifest.tensors()
    units = sum(-(-nbytes // UNIT_BYTES) for _, _, _, nbytes in tensors)
    digests = sum(len(run) // 16 for index in range(len(tensors)) for _, run in manifest.digests(index))
    if 8 * digests < units:
        return []
    return [
        index
        for index, (_, _, _, commit) in enumerate(manifest.shards())
        if full_every is None or manifest.commit + 1 - commit < full_every
    ]


def in_json(digests: Mapping[int, Sequence[tuple[int, bytes]]]) -> list[list[Any]]:
    """Return digests as one rank sends them to another."""
    return [[tensor, [[first, run.hex()] for first, run in runs]] for tensor, runs in digests.items()]


def from_json(digests: Sequence[Sequence[Any]]) -> dict[int, list[tuple[int, bytes]]]:
    """Undo in_json()."""
    return {tensor: [(first, bytes.fromhex(run)) for first, run in runs] for tensor, runs in digests}
