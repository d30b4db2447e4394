"""Dividing tensors into shards of equal bytes. Pure functions."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

# Shares differ by at most this: each of their ends is within a quarter of it from the exact place.
BLOCK_BYTES = 1 << 20
# Tensors of up to this size stay whole; larger ones may be cut, but into no tiny pieces.
WHOLE_BYTES = BLOCK_BYTES // 2
_MIN_PIECE_BYTES = BLOCK_BYTES // 8
# Where tensors are cut: at pages, and between elements of every dtype.
_CUT_BYTES = 4096


class Piece(NamedTuple):
    """Bytes [begin, end) of tensor `tensor` (its index)."""

    tensor: int
    begin: int
    end: int


class Spread(NamedTuple):
    """How many writers write how many shards each, one on each of as many volumes."""

    writers: int
    volumes: int


def spread(total_bytes: int, writers: int, volumes: int) -> Spread:
    """Return as many writers and volumes as there are blocks for."""
    blocks = max(1, -(-total_bytes // BLOCK_BYTES))
    used = min(writers, blocks)
    return Spread(used, max(1, min(volumes, blocks // used)))


def divide(sizes: Sequence[int], shards: int, *, cut_bytes: int = _CUT_BYTES) -> list[list[Piece]]:
    """Cut tensors of `sizes` bytes, end to end, into `shards` parts whose bytes differ by at most a block.

    cut_bytes: tensors are cut at multiples of this, from their start; at most a quarter of a block.
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    cuts = [0]
    for shard in range(1, shards):
        cuts.append(max(cuts[-1], _snap(total * shard // shards, sizes, ends, cut_bytes)))
    cuts.append(total)
    return [_between(cuts[shard], cuts[shard + 1], sizes, ends) for shard in range(shards)]


def limited(pieces: list[Piece], costs: Sequence[int], limit: int) -> list[list[Piece]]:
    """Split pieces into parts so that in each the sum of the tensors' costs is within a limit."""
    parts: list[list[Piece]] = [[]]
    used = 0
    for piece in pieces:
        used += costs[piece.tensor]
        if used > limit and parts[-1]:
            parts.append([])
            used = costs[piece.tensor]
        parts[-1].append(piece)
    return parts


def _snap(wanted: int, sizes: Sequence[int], ends: Sequence[int], cut_bytes: int) -> int:
    """Move a cut by at most a quarter of a block to an allowed place."""
    index = bisect_right(ends, wanted)
    if index == len(ends):
        return wanted
    begin, end = ends[index] - sizes[index], ends[index]
    if sizes[index] > WHOLE_BYTES:
        inside = begin + round((wanted - begin) / cut_bytes) * cut_bytes
        if begin + _MIN_PIECE_BYTES <= inside <= end - _MIN_PIECE_BYTES:
            return inside
    return begin if wanted - begin <= end - wanted else end


def _between(begin: int, end: int, sizes: Sequence[int], ends: Sequence[int]) -> list[Piece]:
    pieces: list[Piece] = []
    index = bisect_right(ends, begin)
    while index < len(sizes) and (first := ends[index] - sizes[index]) < end:
        if sizes[index]:
            pieces.append(Piece(index, max(0, begin - first), min(sizes[index], end - first)))
        index += 1
    return pieces
