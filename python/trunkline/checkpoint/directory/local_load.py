"""Loads a step whose bytes are on the disks of several nodes.

Each rank reads a part of what its node has, verified by the checksums of the chunks, and sends it to the
other ranks over the process group, in slices with a checksum each.
"""

import errno
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from trunkline._core import CheckpointManifest, CheckpointStore, GcPause, crc32c
from trunkline._errors import Corrupt, Error, Format, exception_of
from trunkline._logging import Log
from trunkline._tensor_io.memory import CPU, empty_bytes
from trunkline._tensor_io.partly_filled import partly_filled
from trunkline._tensor_io.tensors import bytes_of
from trunkline._tensor_io.transfer import read_layouts
from trunkline._torch_or_numpy import torch
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory import shards
from trunkline.checkpoint.directory.local_save import LocalContext, pieces_kept_by, refusal
from trunkline.checkpoint.directory.part import Part, Wanted
from trunkline.checkpoint.directory.sharded import check_is_whole
from trunkline.checkpoint.directory.shares import Piece
from trunkline.checkpoint.directory.step_reader import StepReader
from trunkline.checkpoint.nodes.agreement import Entry, Inventory
from trunkline.checkpoint.nodes.copies import choose_readers, readers_of, shares_of
from trunkline.checkpoint.nodes.node_directory import (
    inventory_in_json,
    inventory_of,
    share_of,
)
from trunkline.checkpoint.nodes.record import entry_of, json_of
from trunkline.checkpoint.nodes.run import (
    LoadPlan,
    Run,
    TierPlan,
    TierSaves,
    abandoned_steps,
    latest_step,
    loadable_saves,
    metrics_of,
    plan_continuation,
    plan_load,
    plan_tier_load,
    related_tiers,
    steps_with_lost_copies,
)
from trunkline.checkpoint.ranks.group import Exchange, rank_error
from trunkline.checkpoint.ranks.outcomes import combine
from trunkline.checkpoint.retention import METRICS
from trunkline.checkpoint.state.tree import VIEWS, restore, restore_into

_log = Log("checkpoint")
_BUT = "nothing was loaded"
_ATTEMPTS = 2  # to read what all nodes have, where that is not locked
_SLICE_BYTES = 16 << 20
_ROUND_SLICES = 4  # that are sent before their checksums are compared


class _Whole(NamedTuple):
    """What the parts of loading that know manifests need of a checkpoint of several nodes."""

    step: int
    state: str
    described: list[tuple[str, str, tuple[int, ...], int]]

    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Return name, dtype, shape and bytes of each tensor."""
        return self.described


# Called with how many bytes of the step this rank has got so far, and of how many.
OnProgress: TypeAlias = Callable[[int, int], None]


def no_progress(nbytes: int, total: int) -> None:
    """Show nothing."""


class _Slice(NamedTuple):
    """Bytes of a tensor that one rank has read."""

    piece: Piece
    reader: int


class Listed(NamedTuple):
    """What nodes have.

    latest: the latest step, whether or not it can be loaded; with tiers, what load() returns. saves: those
    that can be, in the order in which they were committed, with their metrics. where: the directories that
    have each of them.
    """

    latest: int | None
    saves: list[tuple[int, dict[str, float]]]
    where: dict[int, list[str]]

    @property
    def steps(self) -> list[int]:
        """The steps that can be loaded, ascending."""
        return sorted(step for step, _ in self.saves)


class LocalLoading:
    """Loads steps for a Checkpointer with local=True. Its calls are collective."""

    def __init__(self, context: LocalContext, group: Callable[[], Any]) -> None:
        """`group`: returns the process group of all ranks; called where there is more than one."""
        self._context = context
        self._group = group

    def listed(self, call: str) -> Listed:
        """Find out what there is."""

        def work(exchange: Exchange | None) -> Any:
            offered = self.entries(lock=False)
            return combine(exchange, "entries", offered, self._listed, f"{call} failed")

        found = self._context.together(call, _BUT, work)
        if "problem" in found:
            raise refusal(self._context, found["problem"], call)
        return Listed(
            found["latest"],
            [(each.step, metrics_of(each)) for each in map(entry_of, found["saves"])],
            self._where(found["here"], dict(found["in_tiers"])),
        )

    def _where(self, here: list[int], in_tiers: dict[int, list[int]]) -> dict[int, list[str]]:
        """Return the directories that have each step, as this rank names them."""
        where = {step: [self._context.directory] for step in here}
        for step, tiers in in_tiers.items():
            where.setdefault(step, []).extend(map(self._context.node_tiers.directory, tiers))
        return dict(sorted(where.items()))

    def load(self, step: int | None, into: Any, wanted: Wanted) -> tuple[int, Any]:
        """Load a step (None: the latest); return its number and the state."""
        call = f"load({'' if step is None else step})"
        try:
            loaded: tuple[int, Any] = self._context.together(
                call, _BUT, lambda exchange: self._load(exchange, step, into, wanted)
            )
        except BaseException:
            self._context.must_read = True
            raise
        finally:
            if self._context.node is not None:
                self._context.node.is_used = False
        return loaded

    def _load(
        self, exchange: Exchange | None, step: int | None, into: Any, wanted: Wanted
    ) -> tuple[int, Any]:
        context = self._context
        plans: list[LoadPlan | TierPlan] = []  # on rank 0: what is loaded
        try:
            found = self._found(exchange, step, plans, lock=True)
        except BaseException:
            if context.node is not None:
                context.node.unlock_again()
            raise
        save = self._chosen(found)
        if context.ranks.size > 1:
            context.begin_load(save.step)
        if "tier" in found:
            state = self._read_copy(exchange, found, save, into, wanted)
            self._go_on(plans[0].run if plans else Run(), save)
            return save.step, state
        state = self._read_save(exchange, save, found["there"], into, wanted)
        if found["is_latest"]:
            context.run = Run.of(self._commit(exchange, plans, found["counting"]))
        else:
            context.run = plans[0].run if plans else Run()
        self._go_on(context.run, save)
        return save.step, state

    def _go_on(self, run: Run | None, save: Entry) -> None:
        """Note that the run goes on from what was loaded."""
        context = self._context
        context.run, context.fresh, context.attempt = run, False, None
        context.node_tiers.go_on()
        if context.node is not None:
            context.node.take_over()
        if context.ranks.size > 1:
            context.complete_load(save.step, save.id)
        _log.info("%s: step %d is loaded", context.directory, save.step)

    def _read_copy(
        self, exchange: Exchange | None, found: dict[str, Any], save: Entry, into: Any, wanted: Wanted
    ) -> Any:
        """Return the state of a step in a tier, or `into` filled with it. Every rank reads by itself."""
        reader, manifest = self.open_copy(found["tier"], save)
        state = reader.load(save.step, manifest, into, wanted)
        combine(exchange, "loaded", None, lambda _: None, _BUT)
        return state

    def open_copy(self, tier: int, save: Entry) -> tuple[StepReader, CheckpointManifest]:
        """Return what reads a step in a tier. Raises Error if this rank does not see what rank 0 does."""
        reader = self._context.node_tiers.reader(tier)
        try:
            manifest = reader.open_manifest(save.step)
        except FileNotFoundError as error:
            raise Error(
                None,
                f"{reader.directory} has no step {save.step}, which rank 0 finds there; check that it is "
                "mounted on this node, and that nothing else changes it",
                reader.directory,
            ) from error
        if manifest.commit != save.number:
            raise Error(
                None,
                f"{reader.directory}: step {save.step} is another save's than rank 0 finds; check that it is "
                "the same directory on all nodes, and that nothing else changes it",
                reader.directory,
            )
        return reader, manifest

    def read(self, exchange: Exchange | None, step: int | None, on_progress: OnProgress) -> tuple[int, Any]:
        """Return a step (None: the latest) and its state; nothing is locked or changed to go on from it.

        Collective, in an exchange that has begun.
        """
        for attempt in range(_ATTEMPTS):
            self._context.must_read = True
            found = self._found(exchange, step, [], lock=False, topic=f"entries, {attempt}")
            # A training may save a step after some nodes were read, and before others were.
            if "problem" not in found:
                break
        save = self._chosen(found)
        wanted = Wanted(CPU, True, None)
        return save.step, self._read_save(exchange, save, found["there"], None, wanted, on_progress)

    # The agreement--------------------------------------------------

    def _found(
        self,
        exchange: Exchange | None,
        step: int | None,
        plans: list[LoadPlan | TierPlan],
        *,
        lock: bool,
        topic: str = "entries",
    ) -> dict[str, Any]:
        """Return what can be loaded of a step, and where it is, as _plan() has it; or why nothing can."""
        context = self._context
        found: dict[str, Any] = combine(
            exchange,
            topic,
            self.entries(lock=lock),
            lambda offered: context.planned(offered, lambda found: self._plan(found, step, plans)),
            _BUT,
        )
        return found

    def _chosen(self, found: dict[str, Any]) -> Entry:
        """Return the save to load, with warnings of what the nodes lack. Raises why there is none."""
        context = self._context
        what = f"loading from {context.directory}"
        if "problem" in found:
            raise refusal(context, found["problem"], what)
        if "nothing" in found:
            raise exception_of(
                "system", 2, f"{context.directory} has no checkpoint yet, on any node", context.directory
            )
        for text in found["warnings"]:
            warn_without_failing(text, caller())
        return entry_of(found["save"])

    def entries(self, *, lock: bool = False) -> Any:
        """Return what this node has, on its first rank."""
        node = self._context.node
        if node is None:
            return None
        if lock and os.path.isdir(node.directory):  # noqa: PTH112
            node.lock(to_load=True)
            node.is_used = True
        if node.is_replaced or node.is_changed:
            self._context.must_read = True
        if self._context.must_read:
            node.read()
            self._context.must_read = not lock  # another process may change it
        return {**inventory_in_json(node.inventory()), "tiers": self._context.node_tiers.seen()}

    def _listed(self, offered: list[Any]) -> dict[str, Any]:
        return self._context.planned(offered, self._list)

    def _list(self, found: list[Inventory]) -> dict[str, Any]:
        """Return, on rank 0, the latest step, and what can be loaded."""
        related = self._related_tiers(found)
        plan = plan_tier_load(found, None, related)
        here = loadable_saves(found)
        by_step = {each.step: each for each in here}
        in_tiers: dict[int, list[int]] = {}
        for tier, (_, saves) in enumerate(related):
            for each in saves:
                by_step.setdefault(each.step, each)
                in_tiers.setdefault(each.step, []).append(tier)
        return {
            "latest": latest_step(found) if plan is None else plan.save.step,
            "saves": [json_of(each) for each in sorted(by_step.values(), key=lambda each: each.number)],
            "here": [each.step for each in here],
            "in_tiers": sorted(in_tiers.items()),
        }

    def _related_tiers(self, found: list[Inventory]) -> list[TierSaves]:
        tiers = self._context.node_tiers
        there = [(tiers.directory(index), each) for index, each in enumerate(tiers.saves_in_tiers())]
        return related_tiers(found, there, fresh=tiers.fresh)

    def _plan(
        self, found: list[Inventory], step: int | None, plans: list[LoadPlan | TierPlan]
    ) -> dict[str, Any]:
        """Decide what is loaded, on rank 0."""
        copy = plan_tier_load(found, step, self._related_tiers(found))
        if copy is not None:
            plans.append(copy)
            return {
                "save": json_of(copy.save),
                "tier": copy.tier,
                "warnings": self._about_lost_steps(copy),
            }
        plan = plan_load(found, step)
        if plan is None:
            return {"nothing": True}
        plans.append(plan)
        return {
            "save": json_of(plan.save),
            "is_latest": plan.run is None,
            "there": plan.places,
            "counting": plan.counting,
            "warnings": [
                f"{self._context.directory}: step {number} on the nodes {nodes} was abandoned: the run went "
                "on without them. It is left as it is, and not used"
                for number, nodes in abandoned_steps(found)
            ]
            + self._about_lost_copies(found),
        }

    def _about_lost_steps(self, copy: TierPlan) -> list[str]:
        if copy.lost is None:
            return []
        return [
            f"{self._context.directory}: {copy.lost}. Step {copy.save.step} is loaded from the tier "
            f"{self._context.node_tiers.directory(copy.tier)} instead, and the run goes on from there. "
            "To load the later step, bring back those nodes (their ids are in trunkline-node.json) before "
            "anything is saved"
        ]

    def _about_lost_copies(self, found: list[Inventory]) -> list[str]:
        texts = []
        for steps, nodes in steps_with_lost_copies(found):
            what = f"step {steps[0]} is" if len(steps) == 1 else f"steps {', '.join(map(str, steps))} are"
            texts.append(
                f"{self._context.directory}: {what} on fewer nodes than when saved: without {nodes}. Another "
                "loss can take them: restore_copies() gives what is missing to nodes that have room for it"
            )
        return texts

    def whole_of(
        self, exchange: Exchange | None, save: Entry, there: list[int], topic: str = ""
    ) -> dict[str, Any]:
        """Return the description of the whole, from the first of the nodes that can read it. Collective.

        topic: differs for each save of which it is asked in one exchange.
        """
        context = self._context
        for place in there:
            sender = context.nodes.first_ranks()[place]
            found: dict[str, Any] | None = None
            if context.ranks.rank == sender:
                assert context.node is not None
                try:
                    found = {"whole": share_of_save(context.node.store, save)["whole"]}
                except OSError as error:
                    if place == there[-1]:
                        raise
                    found = {}
                    warn_without_failing(f"{error}. Another node is asked", caller())
            whole: dict[str, Any] | None
            whole = combine(exchange, f"whole, {place}, {topic}", found, itemgetter(sender), _BUT).get(
                "whole"
            )
            if whole is not None:
                return whole
        raise AssertionError("a save is on one node or more")

    def _commit(
        self, exchange: Exchange | None, plans: list[LoadPlan | TierPlan], counting: list[str]
    ) -> Entry:
        """Step 4 of a load: commit its entry on all nodes. counting: what is marked with it."""
        node = self._context.node
        if node is not None:
            node.lock(to_load=True)
            if not node.id:  # it was not locked before, since its directory did not exist
                node.read()
                if node.id:
                    raise Error(
                        errno.EBUSY,
                        f"{node.directory}: another job has saved on this node meanwhile; load again",
                        node.directory,
                    )
            node.make_id()
        offered = None if node is None else inventory_in_json(node.inventory())

        def planned(offers: list[Any]) -> Any:
            [plan] = plans
            assert isinstance(plan, LoadPlan)
            found = [inventory_of(each) for each in self._context.of_nodes(offers)]
            return json_of(plan_continuation(found, plan))

        entry = entry_of(combine(exchange, "node", offered, planned, _BUT))
        if node is not None:
            node.add_continuation(entry)
        combine(exchange, "prepared", None, lambda _: None, _BUT)
        if node is not None:
            node.commit([entry.id, *counting])
        combine(exchange, "marked", None, lambda _: None, _BUT)
        return entry

    # The bytes------------------------------------------------------

    def _read_save(
        self,
        exchange: Exchange | None,
        save: Entry,
        there: Mapping[str, list[int]],
        into: Any,
        wanted: Wanted,
        on_progress: OnProgress = no_progress,
    ) -> Any:
        """Return the state, or `into` filled with it. there: which nodes have it, as LoadPlan.places."""
        whole = self.whole_of(exchange, save, list(chain(*there.values())))
        where = f"step {save.step} of {self._context.directory}"
        check_is_whole(whole["state"], where)
        unknown = set(whole["features"]) - {VIEWS, METRICS}
        if unknown:
            raise Format(None, f"{where} needs {', '.join(sorted(unknown))}; use a newer trunkline")
        about = _Whole(
            save.step,
            json.dumps(whole["state"]),
            [(name, dtype, tuple(shape), nbytes) for name, dtype, shape, nbytes in whole["tensors"]],
        )
        with GcPause():
            part = Part.of(about, into, wanted.selection, where)  # type: ignore[arg-type]
            finish: Callable[[], None] = _nothing
            if into is None:
                state = None
                tensors = shards.empty_tensors(about, where, CPU, part.names)  # type: ignore[arg-type]
            else:
                state, tensors, finish = restore_into(part.skeleton, into, part.whole)
            memory = [_memory_of(tensors.get(name), nbytes) for name, _, _, nbytes in about.described]
        # A rank that cannot take the state has raised; the others must not wait for it in the process group.
        combine(exchange, "ready", None, lambda _: None, _BUT)
        with nullcontext() if into is None else partly_filled("`into`", ""):
            self._fill(exchange, save, whole, there, memory, on_progress, verify=bool(wanted.verify))
            for (name, _, _, _), filled in zip(about.described, memory, strict=True):
                if name in tensors and not _is_in_place(tensors[name]):
                    bytes_of(tensors[name]).copy_(filled)
            finish()
        if into is not None:
            return state
        if wanted.device != CPU:
            tensors = {name: tensor.to(wanted.device) for name, tensor in tensors.items()}
        with GcPause():
            return restore(part.skeleton, tensors, part.whole)

    def _fill(
        self,
        exchange: Exchange | None,
        save: Entry,
        whole: Mapping[str, Any],
        there: Mapping[str, list[int]],
        memory: list[torch.Tensor],
        on_progress: OnProgress,
        *,
        verify: bool,
    ) -> None:
        """Read the bytes of all tensors, on some node each, and let every rank have them.

        A share that one node cannot read is read on another one that keeps it.
        """
        able = [readers_of(share, there) for share in shares_of(save)]
        slices: list[_Slice] = []
        left = list(range(len(able)))
        for attempt in itertools.count():
            if not left:
                break
            chosen = choose_readers([able[share] for share in left])
            pieces = {
                share: self._pieces_to_read(save, whole, share, *reader)
                for share, reader in zip(left, chosen, strict=True)
            }
            failed = [
                (share, error)
                for share in left
                if (error := self._try_to_read(save, pieces[share], memory, verify)) is not None
            ]
            for share, error in failed:
                if len(able[share]) == 1:
                    raise error
                what = str(error).removesuffix(shards.WHAT_TO_LOAD)
                warn_without_failing(f"{what}. It is read on another node that has a copy", caller())
            # A rank may read for as long as it is alive. Only what comes now has a time limit.
            again = combine(exchange, f"read, {attempt}", [share for share, _ in failed], _distinct, _BUT)
            for share, reader in zip(left, chosen, strict=True):
                if share in again:
                    able[share].remove(reader)
                else:
                    slices += [part for _, piece, reader in pieces[share] for part in _slices(piece, reader)]
            left = again
        _check_complete(slices, memory, f"step {save.step} of {self._context.directory}")
        if exchange is None:
            return
        from trunkline.checkpoint.reading_ranks import ReadingRanks

        seconds = self._context.ranks.timeout
        ranks = ReadingRanks(self._group(), None if seconds is None else timedelta(seconds=seconds))
        try:
            _distribute(ranks, slices, memory, on_progress)
        finally:
            ranks.close()

    def _pieces_to_read(
        self, save: Entry, whole: Mapping[str, Any], share: int, node: str, place: int
    ) -> list[tuple[str, Piece, int]]:
        """Return the pieces of a share as the ranks of a node read them: name, tensor and bytes, reader.

        share: the number of the node whose it is, in the save; node, place: the id and number now of the one
        that reads.
        """
        readers = self._context.nodes.ranks_of(place)
        return [
            (kept.name, kept.piece, readers[kept.shard % len(readers)])
            for kept in pieces_kept_by(save.nodes.index(node), whole)
            if kept.owner == share
        ]

    def _try_to_read(
        self, save: Entry, pieces: list[tuple[str, Piece, int]], memory: list[torch.Tensor], verify: bool
    ) -> Exception | None:
        """Read those of the pieces that this rank is to read; return why it cannot."""
        own = {
            name: memory[piece.tensor][piece.begin : piece.end]
            for name, piece, reader in pieces
            if reader == self._context.ranks.rank
        }
        try:
            if own:
                self._read_own(save, own, verify)
        except OSError as error:
            return error
        return None

    def _read_own(self, save: Entry, own: Mapping[str, torch.Tensor], verify: bool) -> None:
        """Read what this rank reads of the share of its node."""
        store = CheckpointStore(f"{self._context.path}/saves", create=False)
        manifest = store.open_manifest(save.number)
        share_of_save(store, save)
        where = f"step {save.step} of {self._context.directory}"
        missing = own.keys() - {name for name, *_ in manifest.tensors()}
        if missing:
            raise Corrupt(
                None,
                f"{store.directory}: the share of step {save.step} lacks {len(missing)} parts of tensors "
                "that this node has written: it is that of another node. Put the nodes' directories back",
                str(store.directory),
            )
        read = shards.targets(manifest, where, own, verify=verify, fresh=False, is_part=True)
        try:
            read_layouts(read.layouts, engine=self._context.engine, verify=verify)
        except Corrupt as error:
            index, checksum = getattr(error, "layout", None), getattr(error, "checksum", None)
            if index is None or checksum is None:
                raise
            raise shards.corrupt_chunk(manifest, read, index, checksum) from error


def share_of_save(store: CheckpointStore, save: Entry) -> dict[str, Any]:
    """Return what a node has written of a save. Raises Error if that is gone, and another is in its place."""
    share = share_of(store, save.number)
    if share["entry"]["id"] != save.id:
        raise Error(None, f"{store.directory}: the share of step {save.step} is another save's")
    return share


def _nothing() -> None:
    """Finish a state that needs nothing more."""


def _is_in_place(tensor: torch.Tensor) -> bool:
    """Whether bytes can be read and received where the tensor has them."""
    return tensor.device == CPU and tensor.is_contiguous()


def _memory_of(tensor: torch.Tensor | None, nbytes: int) -> torch.Tensor:
    """Return the memory for a tensor's bytes: its own, or some for those that this rank cannot receive into.

    Every rank takes part in sending every tensor, also if it does not want it.
    """
    if tensor is None or not _is_in_place(tensor):
        return empty_bytes(nbytes)
    return bytes_of(tensor)


def _distinct(shares: list[list[int]]) -> list[int]:
    return sorted({share for each in shares for share in each})


def _check_complete(slices: list[_Slice], memory: list[torch.Tensor], where: str) -> None:
    """Raise Format unless every byte of every tensor has been read once: memory is not filled before."""
    ends = [0] * len(memory)
    for each in sorted(piece for piece, _ in slices):
        if each.begin != ends[each.tensor]:
            break
        ends[each.tensor] = each.end
    if ends != [tensor.numel() for tensor in memory]:
        raise Format(None, f"{where}: what the nodes have written is not the whole of each tensor")


def _slices(piece: Piece, reader: int) -> list[_Slice]:
    """Divide a piece into what is sent at a time."""
    return [
        _Slice(Piece(piece.tensor, begin, min(begin + _SLICE_BYTES, piece.end)), reader)
        for begin in range(piece.begin, piece.end, _SLICE_BYTES)
    ]


def agree(ranks: Any, error: BaseException | None) -> None:
    """Raise on all ranks if one has failed to read."""
    raise_failure(ranks.gather(reason(error)), error)


def reason(error: BaseException | None) -> str | None:
    """Return what the other ranks are told of an error."""
    return None if error is None else str(error) or type(error).__name__


def raise_failure(reasons: Sequence[str | None], error: BaseException | None) -> None:
    """Raise the error of this rank, or RankError if there is a reason on another one."""
    for rank, text in enumerate(reasons):
        if text is None:
            continue
        if error is not None:
            raise error
        raise rank_error(rank, f"rank {rank} failed to read its part: {text}")


def _distribute(
    ranks: Any, slices: list[_Slice], memory: list[torch.Tensor], on_progress: OnProgress
) -> None:
    """Let all ranks have what each has read, and compare the checksums of what they get."""
    done, total = 0, sum(tensor.numel() for tensor in memory)
    for first in range(0, len(slices), _ROUND_SLICES):
        sends: list[tuple[torch.Tensor, int]] = []
        receives: list[tuple[torch.Tensor, int]] = []
        sent: dict[int, int] = {}
        batch = slices[first : first + _ROUND_SLICES]
        views = [memory[each.piece.tensor][each.piece.begin : each.piece.end] for each in batch]
        for at, (each, view) in enumerate(zip(batch, views, strict=True)):
            if each.reader == ranks.rank:
                sent[at] = crc32c(view)
                sends += [(view, rank) for rank in range(ranks.size) if rank != ranks.rank]
            else:
                receives.append((view, each.reader))
        ranks.transfer(sends, receives)
        checksums = ranks.gather(sent)
        wrong = [
            at
            for at, (each, view) in enumerate(zip(batch, views, strict=True))
            if each.reader != ranks.rank and crc32c(view) != checksums[each.reader][at]
        ]
        agree(
            ranks, Error(None, f"bytes from rank {batch[wrong[0]].reader} arrived damaged") if wrong else None
        )
        done += sum(view.numel() for view in views)
        on_progress(done, total)
