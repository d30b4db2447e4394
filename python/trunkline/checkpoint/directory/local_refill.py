"""Refills nodes: a new one gets the shards that a lost one had, of every checkpoint that is kept.

They are rebuilt from the copies on other nodes, byte for byte: each piece of a tensor is read where it is,
sent over the process group, and written. The files are read back and compared with the checksums of the save
before the node has the checkpoint.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from itertools import chain
from operator import itemgetter
from typing import Any

from trunkline import _core
from trunkline._core import CheckpointManifest, CheckpointSave, File
from trunkline._errors import Corrupt, Format
from trunkline._logging import Log
from trunkline._progress import Progress
from trunkline._tensor_io.memory import empty_bytes
from trunkline._torch_or_numpy import torch
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory import shards as shard_files
from trunkline.checkpoint.directory.local_load import LocalLoading, agree
from trunkline.checkpoint.directory.local_save import (
    LocalContext,
    commit_share,
    refusal,
)
from trunkline.checkpoint.directory.refill_moves import Move, plan_moves
from trunkline.checkpoint.directory.shares import Piece
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.nodes.agreement import Inventory
from trunkline.checkpoint.nodes.copies import Reader, choose_readers, readers_of, shares_of
from trunkline.checkpoint.nodes.node_directory import inventory_in_json, state_of_share
from trunkline.checkpoint.nodes.record import entry_of, json_of
from trunkline.checkpoint.nodes.run import Refill, crowded_shares, places_of, plan_refill
from trunkline.checkpoint.ranks.group import Exchange, rank_error
from trunkline.checkpoint.ranks.outcomes import combine

_log = Log("checkpoint")
_BUT = "not all copies were restored"
_ROUND_SLICES = 4  # that are on their way at a time


class _Unreadable(Exception):
    """Some nodes could not read shares; the same on all ranks."""

    def __init__(self, found: "set[tuple[int, Reader]]", why: dict[int, str]) -> None:
        """found: the owners of the shares, and who read them; why: of each rank that failed."""
        super().__init__("; ".join(why.values()))
        self.found, self.why = found, why


def restore_copies(context: LocalContext, loading: LocalLoading, group: Callable[[], Any]) -> list[int]:
    """Refill nodes; return the steps that they were given. Collective, for several ranks."""
    call = "restore_copies()"

    def plan(offered: list[Any]) -> dict[str, Any]:
        return context.planned(offered, lambda found: _plan(context, found))

    def work(exchange: Exchange | None) -> list[int]:
        node = context.node
        offered = None
        if node is not None:
            node.lock()
            node.read()
            node.make_id()
            offered = inventory_in_json(node.inventory())
        found = combine(exchange, "entries", offered, plan, _BUT)
        if "problem" in found:
            raise refusal(context, found["problem"], call)
        for text in found["warnings"]:
            warn_without_failing(text, caller())
        failed: list[Exception] = []
        steps = set()
        for number, about in enumerate(found["planned"]):
            refill = _Refill(context, exchange, about, f"{number + 1} of {len(found['planned'])}")
            whole = loading.whole_of(
                exchange, refill.save, list(chain(*about["there"].values())), refill.topic
            )
            error = refill.run(whole, group)
            if error is None:
                steps.add(refill.save.step)
            else:
                failed.append(error)
        if failed:
            raise failed[0]
        return sorted(steps)

    try:
        steps: list[int] = context.together(call, _BUT, work)
    except BaseException:
        context.must_read = True
        raise
    return steps


def _plan(context: LocalContext, found: Sequence[Inventory]) -> dict[str, Any]:
    planned = plan_refill(found, context.domains)
    return {
        "planned": [
            {
                "save": json_of(each.save),
                "lost": each.lost,
                "place": each.place,
                "there": places_of(found, each.save),
            }
            for each in planned
        ],
        "warnings": _about_domains(context, found, planned),
    }


def _about_domains(context: LocalContext, found: Sequence[Inventory], planned: Sequence[Refill]) -> list[str]:
    """Return a warning for each step of which a domain will have two copies."""
    texts = []
    for save in {each.save.id: each.save for each in planned}.values():
        places = {
            **places_of(found, save),
            **{each.lost: [each.place] for each in planned if each.save == save},
        }
        domains = {node: [context.domains[each] for each in there] for node, there in places.items()}
        if crowded_shares(save, domains):
            texts.append(
                f"{context.directory}: of step {save.step}, two copies are in one domain: no node of another "
                "one is free. The loss of that domain can lose bytes"
            )
    return texts


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
        self._there: Mapping[str, list[int]] = about["there"]
        self._transaction: CheckpointSave | None = None  # on the first rank of the new node
        self._failure: Exception | None = None  # of this rank, which the others do not know yet
        self._unreadable: set[tuple[int, Reader]] = set()  # shares, and who could not read them
        self._manifest: CheckpointManifest | None = None  # of this node

    def run(self, whole: Mapping[str, Any], group: Callable[[], Any]) -> Exception | None:
        """Make the files, and commit them; return why not, if the shares cannot be read on any node.

        A share that one node cannot read is read on another one that has it. Raises other errors.
        """
        able = {
            owner: readers_of(share, self._there)
            for owner, share in enumerate(shares_of(self.save))
            if self._lost in share.nodes
        }
        for attempt in itertools.count():
            chosen = dict(zip(able, choose_readers(list(able.values())), strict=True))
            failed = self._attempt_all(whole, chosen, group, f"{self.topic}, {attempt}")
            if failed is None:
                break
            own, self._failure = self._failure, None
            if own is not None:
                warn_without_failing(f"{own}. Another copy is read, if there is one", caller())
            for owner, reader in failed.found:
                able[owner].remove(reader)
            if not all(able.values()):
                rank, why = next(iter(failed.why.items()))
                return own if own is not None else rank_error(rank, f"rank {rank} failed: {why}")
        return None

    def _attempt_all(
        self, whole: Mapping[str, Any], chosen: Mapping[int, Reader], group: Callable[[], Any], topic: str
    ) -> _Unreadable | None:
        """Make the files once; return what could not be read."""
        try:
            self._run(whole, chosen, group, topic)
        except _Unreadable as error:
            return error
        return None

    def _run(
        self, whole: Mapping[str, Any], chosen: Mapping[int, Reader], group: Callable[[], Any], topic: str
    ) -> None:
        nodes = self._context.nodes
        first = nodes.ranks_of(self._place)[0]
        is_first = self._context.ranks.rank == first
        shards = whole["shares"][self.save.nodes.index(self._lost)]["shards"]
        try:
            placed = combine(
                self._exchange,
                f"placed, {topic}",
                self._begin(len(shards)) if is_first else None,
                itemgetter(first),
                _BUT,
            )
            moves = plan_moves(
                self.save, whole, self._lost, chosen, nodes.ranks_of, nodes.ranks_of(self._place)
            )
            ranks = self._make_ranks(group())
            try:
                self._copy(ranks, moves, whole, shards, [each["path"] for each in placed])
            finally:
                ranks.close()
            if is_first:
                self._commit(whole, placed)
            combine(self._exchange, f"refilled, {topic}", None, lambda _: None, _BUT)
        except BaseException:
            self._abandon()
            raise
        if is_first:
            _log.info(
                "%s: has what node %s had of step %d", self._context.directory, self._lost, self.save.step
            )

    def _abandon(self) -> None:
        save, self._transaction = self._transaction, None
        if save is not None:
            with suppress(OSError):
                save.abandon()

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
        self._context.must_collect = True  # what was damaged, and is replaced now
        node.add_save(self.save, lost)
        node.commit([self.save.id])

    def _copy(
        self,
        ranks: Any,
        moves: Sequence[Move],
        whole: Mapping[str, Any],
        shards: Sequence[Mapping[str, Any]],
        paths: Sequence[str],
    ) -> None:
        """Read, send and write all bytes, and verify what was written."""
        own, writers = self._context.ranks.rank, self._context.nodes.ranks_of(self._place)
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
                for move, view in zip(batch, memory, strict=True):
                    if move.reader == own:
                        self._attempt_to_read(files, read, move, view)
                self._check(ranks)
                _send(ranks, batch, memory)
                self._attempt(_write, own, written, batch, memory)
                progress.add(sum(each.nbytes for each in batch))
            progress.close()
            for file in written.values():
                self._attempt(file.sync)
        for number in mine:
            self._attempt(_verify, paths[number], shards[number])
        self._check(ranks)

    def _check(self, ranks: Any) -> None:
        """Raise on all ranks if one has failed: _Unreadable if another node may have what it should read."""
        failed, unreadable = self._failure, self._unreadable
        self._unreadable = set()
        theirs = ranks.gather((None if failed is None else str(failed), sorted(unreadable)))
        why = {rank: text for rank, (text, _) in enumerate(theirs) if text is not None}
        if not why:
            return
        if any(not theirs[rank][1] for rank in why):  # it is not that a share cannot be read
            agree(ranks, failed)
        found = {(owner, Reader(*reader)) for _, each in theirs for owner, reader in each}
        raise _Unreadable(found, why)

    def _attempt_to_read(
        self, files: ExitStack, read: dict[int, File], move: Move, view: torch.Tensor
    ) -> None:
        if self._failure is not None:
            return
        try:
            self._read(files, read, move, view)
        except OSError as error:
            self._failure = error
            self._unreadable.add((move.owner, move.source))

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

    def _read(self, files: ExitStack, read: dict[int, File], move: Move, view: torch.Tensor) -> None:
        """Read some bytes, and compare the chunks that have them with their checksums."""
        if self._manifest is None:
            store = _core.CheckpointStore(f"{self._context.path}/saves", create=False)
            self._manifest = store.open_manifest(self.save.number)
        manifest, shard = self._manifest, move.from_shard
        path = manifest.shard_paths()[shard]
        if shard not in read:
            read[shard] = files.enter_context(_core.open(path, engine=self._context.engine))
        size = manifest.chunk_bytes
        begin = move.from_offset // size * size
        end = min(-(-(move.from_offset + move.nbytes) // size) * size, manifest.shard_bytes()[shard])
        window = empty_bytes(end - begin)
        read[shard].pread(window, begin)
        sums = manifest.shard_checksums(shard)
        for at in range(begin, end, size):
            if _core.crc32c(window[at - begin : min(at + size, end) - begin]) != sums[at // size]:
                raise Corrupt(
                    None,
                    f"{path} is corrupt: chunk {at // size} (bytes {at} to {min(at + size, end)}) does not "
                    "match the checksum it was written with",
                    path,
                )
        view.copy_(window[move.from_offset - begin :][: move.nbytes])


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
                    f"{path}: bytes {begin} to {begin + len(part)} are read otherwise than they were "
                    "written; the disk of this node is at fault, or its memory",
                    path,
                )
