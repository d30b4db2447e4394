"""Refills nodes: a new one gets the shards that a lost one had, of every checkpoint that is kept.

They are rebuilt from the copies on other nodes, byte for byte: each piece of a tensor is read where it is,
sent over the process group, and written. The files are read back and compared with the checksums of the save
before the node has the checkpoint.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import chain, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from trunkline import _core
from trunkline._core import CheckpointSave, File
from trunkline._errors import Corrupt, Format
from trunkline._logging import Log
from trunkline._progress import Progress
from trunkline._tensor_io.memory import empty_bytes
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.directory import shards as shard_files
from trunkline.checkpoint.directory.local_load import LocalLoading, agree
from trunkline.checkpoint.directory.local_save import (
    LocalContext,
    commit_share,
    pieces_kept_by,
    problem_of,
    refusal,
)
from trunkline.checkpoint.directory.shares import Piece
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.nodes.agreement import Conflict, Diverged, Entry
from trunkline.checkpoint.nodes.copies import choose_readers, shares_of
from trunkline.checkpoint.nodes.node_directory import inventory_in_json, inventory_of, state_of_share
from trunkline.checkpoint.nodes.record import entry_of, json_of
from trunkline.checkpoint.nodes.run import Refused, places_of, plan_refill
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine

_log = Log("checkpoint")
_BUT = "not all copies were restored"
_SLICE_BYTES = 16 << 20
_ROUND_SLICES = 4  # that are on their way at a time


class Move(NamedTuple):
    """Bytes that one rank reads in a shard of its node, and another writes into a shard of the new node."""

    reader: int
    from_shard: int
    from_offset: int
    writer: int
    to_shard: int
    to_offset: int
    nbytes: int


def restore_copies(context: LocalContext, loading: LocalLoading, group: Callable[[], Any]) -> list[int]:
    """Refill nodes; return the steps that they were given. Collective, for several ranks."""
    call = "restore_copies()"

    def work(exchange: Exchange | None) -> list[int]:
        node = context.node
        offered = None
        if node is not None:
            node.lock()
            node.read()
            node.make_id()
            offered = inventory_in_json(node.inventory())
        found = combine(exchange, "entries", offered, lambda values: _plan(context.of_nodes(values)), _BUT)
        if "problem" in found:
            raise refusal(context, found["problem"], call)
        for number, about in enumerate(found["planned"]):
            refill = _Refill(context, exchange, about, f"{number + 1} of {len(found['planned'])}")
            whole = loading.whole_of(exchange, refill.save, list(about["there"].values()), refill.topic)
            refill.run(whole, group())
        return sorted({int(about["save"]["step"]) for about in found["planned"]})

    try:
        steps: list[int] = context.together(call, _BUT, work)
    except BaseException:
        context.must_read = True
        raise
    return steps


def _plan(offered: Sequence[Any]) -> dict[str, Any]:
    found = [inventory_of(each) for each in offered]
    try:
        planned = plan_refill(found)
    except (Refused, Conflict, Diverged) as error:
        return problem_of(error)
    return {
        "planned": [
            {
                "save": json_of(each.save),
                "lost": each.lost,
                "place": each.place,
                "there": places_of(found, each.save),
            }
            for each in planned
        ]
    }


def plan_moves(
    save: Entry,
    whole: Mapping[str, Any],
    lost: str,
    sources: Mapping[str, Sequence[int]],
    writers: Sequence[int],
) -> list[Move]:
    """Return how the shards of a lost node are rebuilt.

    sources: the nodes that have the save, with their ranks; writers: the ranks of the new node.
    """
    target = pieces_kept_by(save.nodes.index(lost), whole)
    shares = {share.owner: [node for node in share.nodes if node in sources] for share in shares_of(save)}
    owners = sorted({kept.owner for kept in target})
    chosen = dict(zip(owners, choose_readers([shares[save.nodes[each]] for each in owners]), strict=True))
    by_tensor: dict[tuple[int, int], list[tuple[str, Any]]] = {}
    for owner, node in chosen.items():
        for have in pieces_kept_by(save.nodes.index(node), whole):
            if have.owner == owner:
                by_tensor.setdefault((owner, have.piece.tensor), []).append((node, have))
    moves: dict[int, list[Move]] = {owner: [] for owner in owners}
    for kept in target:
        left = kept.piece.end - kept.piece.begin
        for node, have in by_tensor.get((kept.owner, kept.piece.tensor), ()):
            begin = max(kept.piece.begin, have.piece.begin)
            end = min(kept.piece.end, have.piece.end)
            left -= max(0, end - begin)
            moves[kept.owner] += [
                Move(
                    sources[node][have.shard % len(sources[node])],
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


class _Refill:
    """One checkpoint that one node is given."""

    def __init__(
        self, context: LocalContext, exchange: Exchange | None, about: Mapping[str, Any], topic: str
    ) -> None:
        self.save = entry_of(about["save"])
        self.topic = topic
        self._context = context
        self._exchange = exchange
        self._lost: str = about["lost"]
        self._place: int = about["place"]
        self._there: Mapping[str, int] = about["there"]
        self._transaction: CheckpointSave | None = None  # on the first rank of the new node
        self._failure: Exception | None = None  # of this rank, which the others do not know yet

    def run(self, whole: Mapping[str, Any], group: Any) -> None:
        """Make the files, and commit them. Raises the error of any rank on all."""
        nodes = self._context.nodes
        first = nodes.ranks_of(self._place)[0]
        is_first = self._context.ranks.rank == first
        shards = whole["shares"][self.save.nodes.index(self._lost)]["shards"]
        try:
            placed = combine(
                self._exchange,
                f"placed, {self.topic}",
                self._begin(len(shards)) if is_first else None,
                itemgetter(first),
                _BUT,
            )
            paths = [each["path"] for each in placed]
            ranks = self._make_ranks(group)
            try:
                self._copy(ranks, whole, shards, paths)
            finally:
                ranks.close()
            if is_first:
                self._commit(whole, placed)
            combine(self._exchange, f"refilled, {self.topic}", None, lambda _: None, _BUT)
        except BaseException:
            if self._transaction is not None:
                with suppress(OSError):
                    self._transaction.abandon()
            raise
        if is_first:
            _log.info(
                "%s: has what node %s had of step %d", self._context.directory, self._lost, self.save.step
            )

    def _make_ranks(self, group: Any) -> Any:
        from trunkline.checkpoint.reading_ranks import ReadingRanks

        seconds = self._context.ranks.timeout
        return ReadingRanks(group, None if seconds is None else timedelta(seconds=seconds))

    def _begin(self, shards: int) -> list[dict[str, Any]]:
        """Begin the save in the directory of the new node; return where each of its shards goes."""
        node = self._context.node
        assert node is not None
        volumes = max(1, len(node.store.volumes))
        node.store.continue_from(node.store.position())
        save: CheckpointSave = retry_while_locked(
            lambda: node.store.begin(
                self.save.number, [len(range(volume, shards, volumes)) for volume in range(volumes)]
            )
        )
        self._transaction = save
        return [{key: each[key] for key in ("path", "volume", "file")} for each in save.placement["shards"]]

    def _commit(self, whole: Mapping[str, Any], placed: Sequence[Mapping[str, Any]]) -> None:
        node, save = self._context.node, self._transaction
        assert node is not None
        assert save is not None
        lost = None if self._lost == node.id else self._lost
        located = [{key: each[key] for key in ("volume", "file")} for each in placed]
        index = self.save.nodes.index(self._lost)
        commit_share(save, index, whole, located, state_of_share(self.save, whole, lost))
        self._transaction = None
        save.release()
        node.add_save(self.save, lost)
        node.commit(self.save.id)

    def _copy(
        self,
        ranks: Any,
        whole: Mapping[str, Any],
        shards: Sequence[Mapping[str, Any]],
        paths: Sequence[str],
    ) -> None:
        """Read, send and write all bytes, and verify what was written."""
        nodes, own = self._context.nodes, self._context.ranks.rank
        writers = nodes.ranks_of(self._place)
        sources = {node: nodes.ranks_of(place) for node, place in self._there.items()}
        moves = plan_moves(self.save, whole, self._lost, sources, writers)
        mine = [number for number in range(len(shards)) if writers[number % len(writers)] == own]
        with ExitStack() as files:
            written: dict[int, File] = {}
            for number in mine:
                self._attempt(self._create, files, written, whole, shards, paths, number)
            read: dict[int, File] = {}
            progress = Progress(
                f"copying step {self.save.step} to a new node", sum(each.nbytes for each in moves), log=_log
            )
            for begin in range(0, len(moves), _ROUND_SLICES):
                batch = moves[begin : begin + _ROUND_SLICES]
                memory = [empty_bytes(each.nbytes * (own in (each.reader, each.writer))) for each in batch]
                self._attempt(self._read, files, read, batch, memory)
                agree(ranks, self._failure)
                _send(ranks, batch, memory)
                self._attempt(_write, own, written, batch, memory)
                progress.add(sum(each.nbytes for each in batch))
            progress.close()
            for file in written.values():
                self._attempt(file.sync)
        for number in mine:
            self._attempt(_verify, paths[number], shards[number])
        agree(ranks, self._failure)

    def _attempt(self, act: Callable[..., object], *arguments: Any) -> None:
        """Do what only this rank does, unless it has failed before."""
        if self._failure is None:
            try:
                act(*arguments)
            except Exception as error:
                self._failure = error

    def _create(
        self,
        files: ExitStack,
        written: dict[int, File],
        whole: Mapping[str, Any],
        shards: Sequence[Mapping[str, Any]],
        paths: Sequence[str],
        number: int,
    ) -> None:
        described = [
            shard_files.TensorRecord(name, dtype, tuple(shape), nbytes)
            for name, dtype, shape, nbytes in whole["tensors"]
        ]
        pieces = [Piece(tensor, begin, end) for tensor, begin, end, _ in shards[number]["pieces"]]
        head, _, nbytes = shard_files.head_of(described, pieces)
        if nbytes != shards[number]["bytes"]:
            raise Format(None, f"{paths[number]}: a version that lays out shards in another way has saved it")
        os.close(os.open(paths[number], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        file = files.enter_context(_core.open(paths[number], "r+", engine=self._context.engine))
        file.truncate(nbytes)
        file.pwrite(head, 0)
        written[number] = file

    def _read(
        self,
        files: ExitStack,
        read: dict[int, File],
        batch: Sequence[Move],
        memory: Sequence[torch.Tensor],
    ) -> None:
        for move, view in zip(batch, memory, strict=True):
            if move.reader != self._context.ranks.rank:
                continue
            if move.from_shard not in read:
                path = self._shard_path(move.from_shard)
                read[move.from_shard] = files.enter_context(_core.open(path, engine=self._context.engine))
            read[move.from_shard].pread(view, move.from_offset)

    def _shard_path(self, shard: int) -> str:
        store = _core.CheckpointStore(f"{self._context.path}/saves", create=False)
        paths: list[str] = store.open_manifest(self.save.number).shard_paths()
        return paths[shard]


def _send(ranks: Any, batch: Sequence[Move], memory: Sequence[torch.Tensor]) -> None:
    """Send what was read to the ranks that write it."""
    moved = [(move, view) for move, view in zip(batch, memory, strict=True) if move.reader != move.writer]
    ranks.transfer(
        [(view, move.writer) for move, view in moved if move.reader == ranks.rank],
        [(view, move.reader) for move, view in moved if move.writer == ranks.rank],
    )


def _write(
    own: int, written: Mapping[int, File], batch: Sequence[Move], memory: Sequence[torch.Tensor]
) -> None:
    for move, view in zip(batch, memory, strict=True):
        if move.writer == own:
            written[move.to_shard].pwrite(view, move.to_offset)


def _verify(path: str, shard: Mapping[str, Any]) -> None:
    """Read a file back, and compare it with the checksums of the shard that it is made like."""
    sums = [shard["crc32c"][at : at + 8] for at in range(0, len(shard["crc32c"]), 8)]
    window = empty_bytes(shard_files.CHUNK_BYTES)
    with _core.open(path) as file:
        for chunk, expected in enumerate(sums):
            begin = chunk * shard_files.CHUNK_BYTES
            part = window[: min(shard_files.CHUNK_BYTES, shard["bytes"] - begin)]
            file.pread(part, begin)
            if shard_files.format_crc32c([_core.crc32c(part)]) != expected:
                raise Corrupt(
                    None,
                    f"{path}: bytes {begin} to {begin + len(part)} were copied from another node, and do not "
                    "match the checksum they were saved with; verify() on each node finds the damaged one",
                    path,
                )
