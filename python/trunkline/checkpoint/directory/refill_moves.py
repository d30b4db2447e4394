"""Which bytes go where, so that a node is given the shards that a lost one had. Pure functions."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from trunkline._errors import Format
from trunkline.checkpoint.directory.local_save import KeptPiece, pieces_kept_by
from trunkline.checkpoint.nodes.agreement import Entry
from trunkline.checkpoint.nodes.copies import Reader

_SLICE_BYTES = 16 << 20  # at most, of a move


class Move(NamedTuple):
    """Bytes that one rank reads in a shard of its node, and another writes into a shard of the new node.

    owner: the node of the save whose share they are of; source: the node that has it.
    """

    owner: int
    source: Reader
    reader: int
    from_shard: int
    from_offset: int
    writer: int
    to_shard: int
    to_offset: int
    nbytes: int


def plan_moves(
    save: Entry,
    whole: Mapping[str, Any],
    lost: str,
    chosen: Mapping[int, Reader],
    ranks_of: Callable[[int], Sequence[int]],
    writers: Sequence[int],
) -> list[Move]:
    """Return how the shards of a lost node are rebuilt.

    chosen: who reads the share of which node; ranks_of: of a place; writers: the ranks of the new node.
    """
    target = pieces_kept_by(save.nodes.index(lost), whole)
    by_tensor: dict[tuple[int, int], list[tuple[Reader, KeptPiece]]] = {}
    for owner, source in chosen.items():
        for have in pieces_kept_by(save.nodes.index(source.node), whole):
            if have.owner == owner:
                by_tensor.setdefault((owner, have.piece.tensor), []).append((source, have))
    moves: dict[int, list[Move]] = {owner: [] for owner in chosen}
    for kept in target:
        left = kept.piece.end - kept.piece.begin
        for source, have in by_tensor.get((kept.owner, kept.piece.tensor), ()):
            begin = max(kept.piece.begin, have.piece.begin)
            end = min(kept.piece.end, have.piece.end)
            left -= max(0, end - begin)
            readers = ranks_of(source.place)
            moves[kept.owner] += [
                Move(
                    kept.owner,
                    source,
                    readers[have.shard % len(readers)],
                    have.shard,
                    have.offset + at - have.piece.begin,
                    writers[kept.shard % len(writers)],
                    kept.shard,
                    kept.offset + at - kept.piece.begin,
                    min(_SLICE_BYTES, end - at),
                )
                for at in range(begin, end, _SLICE_BYTES)
            ]
        if left != 0:
            raise Format(None, f"step {save.step}: the nodes have not written the whole of {kept.name}")
    # In turn, so that several nodes read at a time.
    return [move for move in chain(*zip_longest(*moves.values())) if move is not None]
