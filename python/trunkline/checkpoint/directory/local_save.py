"""One save of one rank into directories of checkpoints that one node each sees.

The steps are those of nodes/agreement.py. The first rank of each node locks the directory of the node, and
writes its record and manifest; all ranks of the node write its share.
"""

import errno
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trunkline._core import CheckpointSave, FileSet, GcPause
from trunkline._errors import Corrupt, Error, Unsupported, exception_of
from trunkline._logging import Log
from trunkline._warnings import warn_without_failing
from trunkline.checkpoint.directory import shards as shard_files
from trunkline.checkpoint.directory.node_tiers import NodeTiers, plan_tasks
from trunkline.checkpoint.directory.shares import Piece, divide, limited, spread
from trunkline.checkpoint.directory.step_save import FEW_TENSORS, SaveContext, StepSave
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.nodes.agreement import Conflict, Diverged, Inventory
from trunkline.checkpoint.nodes.copies import KeptBy, shares_kept_by
from trunkline.checkpoint.nodes.detection import Nodes
from trunkline.checkpoint.nodes.node_directory import (
    NodeDirectory,
    inventory_in_json,
    inventory_of,
    state_of_share,
)
from trunkline.checkpoint.nodes.record import entry_of, json_of
from trunkline.checkpoint.nodes.run import NewSave, Refused, Run, after_failure, plan_save
from trunkline.checkpoint.ranks.group import Exchange
from trunkline.checkpoint.ranks.outcomes import combine, join, together
from trunkline.checkpoint.retention import metrics_in_manifest
from trunkline.checkpoint.state.difference import marks_of

_log = Log("checkpoint")


@dataclass
class LocalContext(SaveContext):
    """What all saves and loads of a Checkpointer with local=True share.

    nodes: which ranks share a directory. node: the directory, on the first rank of each node. kept_by: which
    nodes keep the share of each; empty: each its own. domains: of the nodes. run: None
    before the first save or load. attempt: what it is if the save counts that was begun last, and has not
    succeeded. fresh: the first save starts over. must_read: the directory may
    have changed, as when a save has failed. must_collect: it may have shards that no manifest names.
    node_tiers: where saves are copied to.
    """

    nodes: Nodes = field(default_factory=lambda: Nodes((0,)))
    node: NodeDirectory | None = None
    kept_by: KeptBy = ()
    domains: list[str] = field(default_factory=list)
    path: str = ""
    run: Run | None = None
    attempt: Run | None = None
    fresh: bool = False
    must_read: bool = True
    must_collect: bool = True
    node_tiers: NodeTiers = field(default_factory=lambda: NodeTiers([], None, 0, None, fresh=False))

    @property
    def directory(self) -> str:
        """The directory, as this rank names it."""
        return self.path

    @property
    def own_node(self) -> int:
        """The index of the node of this rank."""
        return self.nodes.node_of[self.ranks.rank]

    def together(self, call: str, but: str, work: Callable[[Exchange | None], Any]) -> Any:
        """Return work(), in an exchange of all ranks for `call`. but: what has not happened if it fails."""
        exchange = self.ranks.exchange(call, self.collectives())
        if exchange is None:
            return work(None)

        def met() -> Any:
            exchange.meet() if exchange.rank == 0 else join(exchange, but)
            return work(exchange)

        return together(exchange, met)

    def of_nodes(self, values: Sequence[Any]) -> list[Any]:
        """Return those of the values of all ranks that the first ranks of nodes have sent."""
        return [values[rank] for rank in self.nodes.first_ranks()]

    def planned(
        self, offered: Sequence[Any], plan: Callable[[list[Inventory]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return plan() of what the nodes have, on rank 0; or the "problem" for which it refuses.

        Raises Error if the nodes do not see the same tiers.
        """
        of_nodes = self.of_nodes(offered)
        if all("tiers" in each for each in of_nodes):
            self.node_tiers.check_same(
                [each["tiers"] for each in of_nodes], [each["node"] for each in of_nodes]
            )
        try:
            return plan([inventory_of(each) for each in self.of_nodes(offered)])
        except (Refused, Conflict, Diverged) as error:
            return _problem_of(error)


def refusal(context: LocalContext, problem: Mapping[str, str], doing: str) -> Exception:
    """Make the error for what the coordinator has refused."""
    text = f"{doing}: {problem['text']}"
    if problem["kind"] == "exists":
        return exception_of("system", errno.EEXIST, text, context.directory)
    if problem["kind"] == "missing":
        return exception_of("system", errno.ENOENT, text, context.directory)
    if problem["kind"] == "latest":
        return Unsupported(None, text, context.directory)
    if problem["kind"] == "damaged":
        return Corrupt(None, text, context.directory)
    if problem["kind"] == "incomplete" and context.ranks.size == 1:
        text += ". This process is alone: start one on each node, with torchrun"
    return Error(None, text, context.directory)


def _problem_of(error: Exception) -> dict[str, dict[str, str]]:
    """Return what the coordinator sends instead of a plan."""
    text = str(error)
    if isinstance(error, Diverged):
        text = (
            "runs of different nodes went on without knowing of each other, and nobody but you can say which "
            f"one to use: {text}. Move the directory away on the nodes of the others"
        )
    return {"problem": {"kind": getattr(error, "kind", "conflict"), "text": text}}


class LocalSave(StepSave):
    """One save of one rank, whose node has a directory of its own."""

    _context: LocalContext
    _owners: list[int]  # of each shard: the node whose share it is of
    _costs: list[int]  # of each tensor: bytes in the head of a shard; empty: not needed yet

    def begin(self) -> FileSet:
        """Step 1 of a save, and the files of this rank."""
        exchange, context = self._exchange, self._context
        if exchange is not None:
            exchange.meet() if exchange.rank == 0 else join(exchange)
        try:
            offered = self._offer()
            self._placement = combine(exchange, "entries", offered, self._plan)
        except BaseException:
            if context.node is not None:
                context.must_read = True
                context.node.unlock_again()
            raise
        if context.ranks.rank > 0:
            self._compare(context.ranks.rank)
        if "problem" in self._placement:
            raise refusal(context, self._placement["problem"], self._what())
        self._entry = entry_of(self._placement["entry"])
        volumes = combine(exchange, "volumes", self._volumes(), context.of_nodes)[context.own_node]
        self._lay_out(volumes)
        located = combine(exchange, "located", self._place(), context.of_nodes)[context.own_node]
        self._located = located
        self._placement = {**self._placement, "paths": located["paths"], "replaced": []}
        writer = context.nodes.ranks_of(context.own_node).index(context.ranks.rank)
        self._mine = [at for at, (each, _) in enumerate(self._writer_and_volume) if each == writer]
        return self._lay_out_files()

    def commit(self) -> float | None:
        """Steps 3 to 8, once the files of this rank are durable."""
        exchange, context = self._exchange, self._context
        with GcPause():
            report = [
                {**self._written(number, index), **self._copy_of(index)}
                for number, index in enumerate(self._mine)
            ]
        assembled = combine(exchange, "written", report, self._assemble)
        self._entry = replace(self._entry, digest=assembled["digest"])
        self._prepare(assembled["whole"])
        combine(exchange, "prepared", None, lambda _: None)
        if context.node is not None:
            context.node.commit([self._entry.id, *self._placement["counting"]])
        combine(exchange, "marked", None, lambda _: None)
        if exchange is not None:
            self._exchange = None  # errors from now on are not published
            exchange.__exit__(None, None, None)
        context.run, context.attempt = Run.of(self._entry), None  # what it has left behind is removed below
        context.fresh = False
        if context.loaded is self._loaded:
            context.forget_loads()
        self._clean_up()
        context.node_tiers.assign(self._placement["to_copy"])
        return None

    def _offer(self) -> Any:
        """Return the entries of this node, on its first rank."""
        node = self._context.node
        if node is None:
            return None
        node.lock()
        node.is_used = True
        node.take_over()
        if self._context.must_read or node.is_changed:
            node.read()
            self._context.must_read = False
        if self._context.must_collect:
            node.store.collect()
            self._context.must_collect = False
        node.make_id()
        tiers = self._context.node_tiers
        about = {**tiers.seen_first(), "not_copied": tiers.failures()}
        return {**inventory_in_json(node.inventory()), **about}

    def _plan(self, offered: list[Any]) -> dict[str, Any]:
        """Choose the entry, on rank 0."""
        context = self._context
        compared = {
            "digest": {} if self._exchange is None else self._digest(),
            "marks": [] if self._exchange is None else marks_of(self._skeleton),
            "collectives": self._collectives,
            "loaded": self._loaded,
        }
        context.node_tiers.note_failures([each["not_copied"] for each in context.of_nodes(offered)[1:]])
        return {**compared, **context.planned(offered, self._plan_entry)}

    def _plan_entry(self, found: list[Inventory]) -> dict[str, Any]:
        context, tiers = self._context, self._context.node_tiers
        measured = tuple(metrics_in_manifest(self._metrics).items())
        run = after_failure(found, context.run, context.attempt)
        new = NewSave(self._step, context.kept_by, measured)
        waiting = tiers.waiting(found) if tiers and run is not None else []
        plan = plan_save(
            found,
            run,
            context.fresh,
            new,
            context.rules,
            first_number=tiers.first_number(),
            held=tiers.held(waiting),
        )
        tiers.check(plan.entry)
        left = () if run is None else run.left
        context.attempt = Run(plan.entry.branch, plan.entry.history, left=left)
        stays = [each for each in waiting if each.id not in plan.removable]
        to_copy = [each for each in stays if plan.entry.continues(each)]
        return {
            "entry": json_of(plan.entry),
            "counting": plan.counting,
            "removable": plan.removable,
            "to_copy": plan_tasks(found, to_copy, plan.entry) if tiers else [],
        }

    def _volumes(self) -> int | None:
        node = self._context.node
        return None if node is None else max(1, len(node.store.volumes))

    def _lay_out(self, volumes: int) -> None:
        """Divide what this node keeps among its ranks, and that of each rank among the volumes.

        The copies come after the node's own share, in shards of their own.
        """
        context = self._context
        sizes = [about.nbytes for about in self._described]
        with GcPause():
            shares = divide(sizes, context.nodes.count) if sum(sizes) else [[]] * context.nodes.count
            self._parts, self._writer_and_volume, self._owners, self._costs = [], [], [], []
            for owner in shares_kept_by(context.own_node, self._entry):
                self._lay_out_share(shares[owner], volumes)
                self._owners += [owner] * (len(self._parts) - len(self._owners))

    def _lay_out_share(self, share: list[Piece], volumes: int) -> None:
        nbytes = [piece.end - piece.begin for piece in share]
        own_ranks = self._context.nodes.ranks_of(self._context.own_node)
        layout = spread(sum(nbytes), len(own_ranks), max(1, volumes))
        parts = divide(nbytes, layout.writers * layout.volumes) if share else []
        for number, part in enumerate(parts):
            pieces = [
                Piece(share[at].tensor, share[at].begin + begin, share[at].begin + end)
                for at, begin, end in part
            ]
            self._add_shards(pieces, *divmod(number, layout.volumes))

    def _add_shards(self, pieces: list[Piece], writer: int, volume: int) -> None:
        """Let a rank of this node write pieces: into one shard, unless its head would be too large."""
        several = [pieces]
        if len(pieces) > FEW_TENSORS:
            self._costs = self._costs or shard_files.head_bytes(self._described)
            several = limited(pieces, self._costs, shard_files.MAX_HEAD_BYTES)
        self._parts += several
        self._writer_and_volume += [(writer, volume)] * len(several)

    def _copy_of(self, index: int) -> dict[str, int]:
        """Return what says of which node's share a shard is a copy; nothing if it is of this node's own."""
        owner = self._owners[index]
        return {} if owner == self._context.own_node else {"copy_of": owner}

    def _place(self) -> Any:
        """Begin the save in the directory of this node, on its first rank."""
        node = self._context.node
        if node is None:
            return None
        per_volume = [0] * max(1, len(node.store.volumes))
        for _, volume in self._writer_and_volume:
            per_volume[volume] += 1
        node.store.continue_from(node.store.position())
        self._save: CheckpointSave | None = retry_while_locked(
            lambda: node.store.begin(self._entry.number, per_volume)
        )
        placement = self._save.placement
        by_volume: dict[int, list[int]] = {}
        for index, shard in enumerate(placement["shards"]):
            by_volume.setdefault(shard["volume"], []).append(index)
        of_volumes = [iter(by_volume[volume]) for volume in sorted(by_volume)]
        order = [next(of_volumes[volume]) for _, volume in self._writer_and_volume]
        return {
            "paths": [placement["shards"][index]["path"] for index in order],
            "shards": [
                {key: placement["shards"][index][key] for key in ("volume", "file")} for index in order
            ],
        }

    def _assemble(self, reports: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Describe the whole, on rank 0: what there is, and which node has which bytes.

        The digest is made once: the entries that all nodes have must be equal.
        """
        whole = self._describe_whole(reports)
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
        return {"whole": whole, "digest": digest}

    def _describe_whole(self, reports: list[list[dict[str, Any]]]) -> dict[str, Any]:
        nodes = self._context.nodes
        if self._entry.kept_by:
            self._warn_of_different_copies(reports)
        return {
            "state": self._skeleton,
            "tensors": [[each.name, each.dtype, list(each.shape), each.nbytes] for each in self._described],
            "world_size": self._context.ranks.size,
            "metrics": metrics_in_manifest(self._metrics),
            "features": self._features,
            "shares": [
                {
                    "node": self._entry.nodes[node],
                    "shards": sorted(
                        (shard for rank in nodes.ranks_of(node) for shard in reports[rank]),
                        key=lambda shard: int(shard["index"]),
                    ),
                }
                for node in range(nodes.count)
            ],
        }

    def _warn_of_different_copies(self, reports: list[list[dict[str, Any]]]) -> None:
        """Warn if what ranks on two nodes have written of one share differs: the state is not the same there.

        Only shards that were divided alike can be compared.
        """
        rank_of: dict[str, tuple[int, Any]] = {}
        for rank, report in enumerate(reports):
            for shard in report:
                node = self._context.nodes.node_of[rank]
                key = json.dumps([shard.get("copy_of", node), shard["pieces"]])
                other, checksums = rank_of.setdefault(key, (rank, shard["crc32c"]))
                if checksums != shard["crc32c"]:
                    names = sorted({self._described[piece[0]].name for piece in shard["pieces"]})
                    warn_without_failing(
                        f"{self._what()}: the states of ranks {other} and {rank} differ, in one or more of "
                        f"{', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}. With "
                        "local=True all ranks must pass the same state; a load may read either",
                        self._caller,
                    )
                    return

    def _prepare(self, whole: dict[str, Any]) -> None:
        """Step 4: commit the share in the directory of this node, on its first rank."""
        node = self._context.node
        if node is None:
            return
        assert self._save is not None
        own = self._context.own_node
        located = [self._located["shards"][each["index"]] for each in whole["shares"][own]["shards"]]
        commit_share(self._save, own, whole, located, state_of_share(self._entry, whole))
        node.add_save(self._entry)

    def _clean_up(self) -> None:
        """Step 8, on the first rank of each node. Errors do not make the save fail."""
        node = self._context.node
        if node is None:
            return
        assert self._save is not None
        self._save.release()
        node.is_used = False
        try:
            node.remove(self._placement["removable"])
        except OSError as error:
            warn_without_failing(
                f"could not remove old checkpoints of {node.directory}: {error}", self._caller
            )

    def abandon(self, error: BaseException) -> BaseException:
        """Publish that this rank failed, and remove what was written."""
        self._context.must_read = self._context.must_collect = True
        try:
            return super().abandon(error)
        finally:
            self._end_use()

    def _end_use(self) -> None:
        if self._context.node is not None:
            self._context.node.is_used = False

    def _mention_set_aside_run(self, error: BaseException) -> None:
        """Nothing was set aside: what a run with fresh=True leaves behind stays in its place."""


def commit_share(
    save: CheckpointSave,
    node: int,
    whole: Mapping[str, Any],
    located: Sequence[Mapping[str, Any]],
    state: Mapping[str, Any],
) -> None:
    """Commit what a node keeps of a save. located: the volume and file of each of its shards, in order."""
    shards = whole["shares"][node]["shards"]
    save.commit(
        {
            "step": save.step,
            "chunk_bytes": shard_files.CHUNK_BYTES,
            "world_size": whole["world_size"],
            "volumes": save.placement["volumes"],
            "shards": [
                {**place, "bytes": each["bytes"], "crc32c": each["crc32c"]}
                for place, each in zip(located, shards, strict=True)
            ],
            "state": state,
        },
        [
            (name, "U8", (piece.end - piece.begin,), [(shard, offset, piece.end - piece.begin)])
            for name, piece, shard, offset, _ in pieces_kept_by(node, whole)
        ],
    )


class KeptPiece(NamedTuple):
    """Bytes of a tensor that a node keeps.

    name: in the manifest of the node; shard, offset: where they are; owner: the node whose share they are of.
    """

    name: str
    piece: Piece
    shard: int
    offset: int
    owner: int


def pieces_kept_by(node: int, whole: Mapping[str, Any]) -> list[KeptPiece]:
    """Return all pieces that a node keeps."""
    found: list[KeptPiece] = []
    names: set[str] = set()
    for shard, about in enumerate(whole["shares"][node]["shards"]):
        for tensor, begin, end, offset in about["pieces"]:
            name = f"{whole['tensors'][tensor][0]}[{begin}:{end}]"
            while name in names:
                name += "~"
            names.add(name)
            owner = about.get("copy_of", node)
            found.append(KeptPiece(name, Piece(tensor, begin, end), shard, offset, owner))
    return found
