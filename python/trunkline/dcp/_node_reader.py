"""Reads a sharded state whose bytes are on the disks of several nodes, with the planners of torch.

Each rank reads what is on its own node from the disk, into its tensors if they are contiguous. The rest it
asks other ranks for, which read just these bytes and send them over the process group.

After the ranks have agreed on a save (local_load.py), they talk to each other in this order, in its exchange:

  1. each learns what it is to read, "plans", and that all can take it, "ready": until then no tensor changes
  2. each reads from its own disk, and says what it needs from others, "asked"
  3. the bytes, over the process group; "sent"
  4. each says what it could not read, "read"; if some rank needs that, again from 2, from another node

Where a rank may raise: as in _node_save.py.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.futures import Future

from trunkline._core import CheckpointManifest, CheckpointStore
from trunkline._logging import Log
from trunkline._tensor_io.memory import CPU, empty_bytes
from trunkline._tensor_io.partly_filled import partly_filled
from trunkline._tensor_io.tensors import bytes_of
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory.local_load import raise_failure, share_of_save
from trunkline.checkpoint.directory.local_save import LocalContext, pieces_kept_by
from trunkline.checkpoint.nodes.agreement import Entry
from trunkline.checkpoint.nodes.copies import Reader, choose_readers, readers_of, shares_of
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine, scatter
from trunkline.dcp._manifest import bytes_of_checksums
from trunkline.dcp._node_items import items_in, metadata_in, packed, stored_items, unpacked
from trunkline.dcp._reader import StorageReader
from trunkline.dcp._request import Request, groups, make_request, overlapping
from trunkline.dcp._stored import DataFile
from trunkline.dcp._transfers import SLICE_BYTES, Batch, Transfer, Transport

_log = Log("checkpoint")
_BUT = "nothing was loaded"
_BUT_NOT_ALL = "not all was loaded"


class SavedStep(NamedTuple):
    """A save whose bytes are on nodes. there: the nodes that have it, as LoadPlan.places."""

    entry: Entry
    whole: Mapping[str, Any]
    there: Mapping[str, list[int]]


def load_items(
    reader: StorageReader,
    metadata: Metadata,
    exchange: Exchange | None,
    state: dict[str, Any],
    planner: LoadPlanner | None,
) -> None:
    """Fill a state as torch.distributed.checkpoint.load() does. Collective, in an exchange that has begun."""
    values = {
        key: state[key].state_dict() if isinstance(state[key], Stateful) else state[key]
        for key in sorted(state)
    }
    planner = DefaultLoadPlanner() if planner is None else planner
    is_first = exchange is None or exchange.rank == 0
    planner.set_up_planner(values, metadata, is_first)
    reader.set_up_storage_reader(metadata, is_first)

    def divide(plans: list[str]) -> list[str]:
        return [packed(each) for each in planner.create_global_plan([unpacked(each) for each in plans])]

    mine = scatter(exchange, "plans", packed(planner.create_local_plan()), divide, _BUT)
    reader.read_data(planner.finish_plan(unpacked(mine)), planner)
    with partly_filled("the state that is loaded into", ""):
        for key, value in values.items():
            if isinstance(state[key], Stateful):
                state[key].load_state_dict(value)
            else:
                state[key] = value


class _ShardPosition(NamedTuple):
    """Where the bytes of an item are: in which shard of a node."""

    shard: int
    offset: int


class _RemoteRead(NamedTuple):
    """What one rank asks another one for: bytes [begin, end) of an item."""

    reader: Reader
    sender: int
    item: int
    begin: int
    end: int


class NodeReader(StorageReader):
    """Reads one save. read_data() is collective."""

    _instead = "load another step"

    def __init__(
        self, context: LocalContext, saved: SavedStep, exchange: Exchange | None, group: Callable[[], Any]
    ) -> None:
        """`exchange`: of this load; group: returns the process group of all ranks."""
        super().__init__(Path(context.path), engine=context.engine)
        self._context = context
        self._saved = saved
        self._exchange = exchange
        self._group = group
        self._where = f"step {saved.entry.step} of {context.path}"
        self._places: dict[str, dict[int, _ShardPosition]] = {}
        parts: dict[tuple[int, int], int] = {}  # their numbers, by owner and shard
        self._part_of_item: dict[int, int] = {}
        for index, node in enumerate(saved.entry.nodes):
            kept = pieces_kept_by(index, saved.whole)
            self._places[node] = {each.piece.tensor: _ShardPosition(each.shard, each.offset) for each in kept}
            for each in kept:
                if each.owner == index:
                    part = parts.setdefault((index, each.shard), len(parts))
                    self._part_of_item[each.piece.tensor] = part
        self._owners = [owner for owner, _ in parts]  # of each part
        self._manifest: CheckpointManifest | None = None
        self._shared: dict[int, Request] = {}  # by the id of each: what has been read for it
        self._files: dict[tuple[str, int], DataFile] = {}  # of this node
        self._bytes_here = self._bytes_sent_here = 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the nodes have said of the save. Its items are in no file yet."""
        whole = self._saved.whole
        metadata = metadata_in(whole["state"], self._where)
        items = items_in(whole["state"], self._where)
        metadata.storage_data = stored_items(items, [each[3] for each in whole["tensors"]], {}, self._where)
        self._keys = [item.key for item in items]
        self._number_of = {key: number for number, key in enumerate(self._keys)}
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read the items of this rank into the planner's tensors; the future that is returned is done."""
        with self._step("read_data"):
            requests = self._requests(plan, planner)
            # Until here no tensor has changed on any rank.
            combine(self._exchange, "ready", None, lambda _: None, _BUT)
            with partly_filled("the state that is loaded into", ""):
                self._read_all(requests, planner)
        _log.info(
            "%s: read %d bytes on this node, and got %d from other nodes",
            self._where,
            self._bytes_here,
            self._bytes_sent_here,
        )
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _requests(self, plan: LoadPlan, planner: LoadPlanner) -> list[Request]:
        self._reject_partly_loaded(plan, planner)
        return [make_request(item, self._stored, planner, self._where) for item in plan.items]

    def _read_all(self, requests: list[Request], planner: LoadPlanner) -> None:
        """Read, ask and serve until all ranks have all that they need.

        A part, which is what one shard holds, is read on another node that keeps it where one cannot.
        """
        shares = shares_of(self._saved.entry)
        able = [readers_of(shares[owner], self._saved.there) for owner in self._owners]
        # These are handed over in the order of the plan, so that the last one wins.
        self._shared = {id(each): each for each in overlapping(requests)}
        for each in self._shared.values():
            each.direct = False
        left = [each for each in requests if each.nbytes > 0]
        for each in requests:
            if each.nbytes == 0:
                each.hand_over(planner)
        for attempt in itertools.count():
            failed = self._attempt(attempt, able, left, planner)
            told = [(part, reader, str(error)) for (part, reader), error in failed.items()]
            everyone = self._gather(f"read, {attempt}", (told, bool(left)))
            lost: dict[int, tuple[int, str]] = {}  # parts that no node can read any more: a rank, and why
            for rank, (theirs, _) in enumerate(everyone):
                for part, reader, text in theirs:
                    if Reader(*reader) in able[part]:
                        able[part].remove(Reader(*reader))
                    if not able[part]:
                        lost.setdefault(part, (rank, text))
            if not any(is_left for _, is_left in everyone):
                break
            for (part, _), error in failed.items():
                if part in lost:
                    raise error
                warn_without_failing(f"{error}. It is read on another node that has a copy", caller())
            if lost:
                raise_failure([dict(lost.values()).get(rank) for rank in range(len(everyone))], None)
        for each in requests:
            if id(each) in self._shared:
                self._shared[id(each)].hand_over(planner)

    def _hand_over(self, request: Request, read: Request, planner: LoadPlanner) -> None:
        """Pass what was read for a request to the planner; later, if its target is that of others too."""
        if id(request) in self._shared:
            self._shared[id(request)] = read
        else:
            read.hand_over(planner)

    def _gather(self, topic: str, value: Any) -> Any:
        """Return the values of all ranks, as JSON. A rank may take as long as it is alive."""
        return combine(self._exchange, topic, value, lambda values: values, _BUT_NOT_ALL)

    def _attempt(
        self,
        attempt: int,
        able: Sequence[Sequence[Reader]],
        left: list[Request],
        planner: LoadPlanner,
    ) -> dict[tuple[int, Reader], Exception]:
        """Read what is left, and take from it what has been; return which parts cannot be read here."""
        failed: dict[tuple[int, Reader], Exception] = {}
        own_place = self._context.own_node
        readable = [part for part, readers in enumerate(able) if readers]
        chosen = dict(zip(readable, choose_readers([able[part] for part in readable]), strict=True))
        by_part: dict[int, list[Request]] = {}
        for each in left:
            by_part.setdefault(self._part_of_item[self._item_of(each)], []).append(each)
        asks: list[tuple[Request, _RemoteRead]] = []
        done: list[Request] = []
        for part, wanted in by_part.items():
            here = next((reader for reader in able[part] if reader.place == own_place), None)
            if here is not None:
                done += self._read_here(wanted, part, here, planner, failed)
            else:
                asks += [(each, asked) for each in wanted for asked in self._asked(each, chosen[part])]
        done += self._ask(attempt, asks, planner, failed)
        taken = set(map(id, done))
        left[:] = [each for each in left if id(each) not in taken]
        return failed

    def _item_of(self, request: Request) -> int:
        return self._number_of[request.item.storage_index]

    def _asked(self, request: Request, reader: Reader) -> Iterator[_RemoteRead]:
        """Yield what to ask for, in slices: a sender has no more than some of them in memory."""
        item = self._item_of(request)
        ranks = self._context.nodes.ranks_of(reader.place)
        sender = ranks[self._places[reader.node][item].shard % len(ranks)]
        for begin in range(request.begin, request.end, SLICE_BYTES):
            yield _RemoteRead(reader, sender, item, begin, min(begin + SLICE_BYTES, request.end))

    def _read_here(
        self,
        wanted: Sequence[Request],
        part: int,
        reader: Reader,
        planner: LoadPlanner,
        failed: dict[tuple[int, Reader], Exception],
    ) -> list[Request]:
        """Read requests of one part from the disk of this node; return those that have been."""
        done: list[Request] = []
        try:
            placed = [(each, self._placed(each, reader)) for each in wanted]
        except OSError as error:
            failed[part, reader] = error
            return done
        originals = {id(copy): each for each, copy in placed}
        for group in groups(copy for _, copy in placed):
            try:
                self._read_group(group)
            except OSError as error:
                failed[part, reader] = error
                break
            for each in group:
                self._hand_over(originals[id(each)], each, planner)
                done.append(originals[id(each)])
                self._bytes_here += each.nbytes
        return done

    def _placed(self, request: Request, reader: Reader) -> Request:
        """Return a request for the same bytes, in a file of this node."""
        file, offset = self._file_of(self._item_of(request), reader)
        stored = replace(request.stored, file=file, offset=offset)
        placed = Request(request.item, stored, request.target)
        placed.direct = request.direct
        placed.begin, placed.end = offset + request.begin, offset + request.end
        return placed

    def _file_of(self, item: int, reader: Reader) -> tuple[DataFile, int]:
        """Return the file of this node that has an item, and where. Raises OSError."""
        place = self._places[reader.node][item]
        file = self._files.get((reader.node, place.shard))
        if file is None:
            shards = self._saved.whole["shares"][self._saved.entry.nodes.index(reader.node)]["shards"]
            about = shards[place.shard]
            path = self._opened().shard_paths()[place.shard]
            file = DataFile(path, about["bytes"], bytes_of_checksums(about["crc32c"]))
            self._files[reader.node, place.shard] = file
        return file, place.offset

    def _opened(self) -> CheckpointManifest:
        """Return the manifest of what this node has. Raises OSError."""
        if self._manifest is None:
            store = CheckpointStore(f"{self._context.path}/saves", create=False)
            manifest = store.open_manifest(self._saved.entry.number)
            share_of_save(store, self._saved.entry)
            self._manifest = manifest
        return self._manifest

    def _names_in(self, file: DataFile, begin: int, end: int) -> list[str]:
        node, shard = next(where for where, each in self._files.items() if each == file)
        tensors = self._saved.whole["tensors"]
        return [
            tensors[item][0]
            for item, place in self._places[node].items()
            if place.shard == shard and place.offset < end and place.offset + tensors[item][3] > begin
        ]

    def _ask(
        self,
        attempt: int,
        asks: Sequence[tuple[Request, _RemoteRead]],
        planner: LoadPlanner,
        failed: dict[tuple[int, Reader], Exception],
    ) -> list[Request]:
        """Ask other ranks, and send them what they ask for; return the requests that have been answered."""
        everyone = self._gather(f"asked, {attempt}", [asked for _, asked in asks])
        all_asked = [
            (rank, _RemoteRead(Reader(*reader), *rest))
            for rank, of_rank in enumerate(everyone)
            for reader, *rest in of_rank
        ]
        if not all_asked:  # on all ranks
            return []
        first = sum(len(of_rank) for of_rank in everyone[: self._context.ranks.rank])
        memory: dict[int, torch.Tensor] = {}  # by the id of a request, until all of it is here
        missing: Counter[int] = Counter(id(request) for request, _ in asks)
        done: list[Request] = []

        def memory_for(number: int) -> torch.Tensor:
            request, asked = asks[number - first]
            if id(request) not in memory:
                memory[id(request)] = _memory_of(request)
            return memory[id(request)][asked.begin - request.begin : asked.end - request.begin]

        def on_arrival(number: int, arrived: torch.Tensor) -> None:
            request = asks[number - first][0]
            missing[id(request)] -= 1
            self._bytes_sent_here += arrived.numel()
            if missing[id(request)] == 0:
                del memory[id(request)]
                self._hand_over(request, request, planner)
                done.append(request)

        def read(numbers: list[int]) -> Batch:
            return self._read_asked({number: all_asked[number][1] for number in numbers})

        unreadable = Transport(self._context, self._exchange, self._group).run_transfers(
            f"sent, {attempt}",
            [Transfer(asked.sender, rank, asked.end - asked.begin) for rank, asked in all_asked],
            read,
            memory_for,
            on_arrival,
            _BUT_NOT_ALL,
        )
        for number, error in unreadable.items():
            asked = all_asked[number][1]
            failed.setdefault((self._part_of_item[asked.item], asked.reader), error)
        return done

    def _read_asked(self, wanted: Mapping[int, _RemoteRead]) -> Batch:
        """Return the bytes of parts of items, from the disk of this node; of each shard all or nothing."""
        by_part: dict[tuple[int, Reader], list[int]] = {}
        for number, asked in wanted.items():
            by_part.setdefault((self._part_of_item[asked.item], asked.reader), []).append(number)
        found = Batch({}, {})
        for numbers in by_part.values():
            try:
                requests = [self._request_of(wanted[number]) for number in numbers]
                self._read_group(requests)
            except OSError as error:
                found.failed.update(dict.fromkeys(numbers, error))
                continue
            for number, request in zip(numbers, requests, strict=True):
                assert request.memory is not None
                found.memory[number] = request.memory
        return found

    def _request_of(self, asked: _RemoteRead) -> Request:
        index = self._keys[asked.item]
        file, offset = self._file_of(asked.item, asked.reader)
        stored = replace(self._stored[index], file=file, offset=offset)
        return Request.of_bytes(index, stored, asked.begin, asked.end)


def _memory_of(request: Request) -> torch.Tensor:
    """Return memory into which the bytes of a request are received: its target if that is possible."""
    if request.direct and request.target is not None and request.target.device == CPU:
        return bytes_of(request.target)
    request.direct = False
    request.memory = empty_bytes(request.nbytes)
    return request.memory
