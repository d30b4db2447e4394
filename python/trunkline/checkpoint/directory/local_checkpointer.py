"""A Checkpointer whose directory lies on disks that one node each sees: tl.Checkpointer(..., local=True)."""

import errno
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeVar, cast

from trunkline._arguments import bool_argument, count_argument, seconds_argument, step_argument
from trunkline._core import Engine
from trunkline._errors import Corrupt, Error, Unsupported, exception_of
from trunkline._formats.checkpoint_names import step_name
from trunkline._formats.tensor_reader import TensorReader
from trunkline._paths import absolute_path, path_name
from trunkline._tensor_io.memory import Device
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory.arguments import checked_options, names_of, ranks_of
from trunkline.checkpoint.directory.checkpointer import Checkpointer, register
from trunkline.checkpoint.directory.local_delete import delete
from trunkline.checkpoint.directory.local_export import Check, Write, export
from trunkline.checkpoint.directory.local_load import Listed, LocalLoading, OnProgress
from trunkline.checkpoint.directory.local_refill import restore_copies
from trunkline.checkpoint.directory.local_save import LocalContext, LocalSave
from trunkline.checkpoint.directory.local_verify import verify
from trunkline.checkpoint.directory.node_copies import NodeCopies
from trunkline.checkpoint.directory.node_tiers import NodeTiers
from trunkline.checkpoint.directory.part import Wanted
from trunkline.checkpoint.directory.step_save import StepSave
from trunkline.checkpoint.directory.turn import Turn
from trunkline.checkpoint.nodes.copies import KeptBy, about_copies, place_copies
from trunkline.checkpoint.nodes.detection import Nodes, SharedDirectory, find_nodes
from trunkline.checkpoint.nodes.node_directory import NodeDirectory
from trunkline.checkpoint.ranks.group import Exchange, GroupRanks, rank_error
from trunkline.checkpoint.retention import KeepBest
from trunkline.checkpoint.save import SaveHandle
from trunkline.checkpoint.tiers.drain import DrainStatus
from trunkline.checkpoint.tiers.tier import Tier, tiers_argument
from trunkline.checkpoint.tiers.tiers import Tiers

_T = TypeVar("_T")

# Options of Checkpointer that have no meaning here yet, and their defaults.
_UNSUPPORTED = {
    "writers": "rank",
    "incremental": False,
    "full_every": None,
}


class LocalCheckpointer(Checkpointer):
    """Checkpoints of a training whose nodes have disks of their own; see Checkpointer."""

    def __init__(
        self,
        directory: "str | os.PathLike[str]",
        *,
        local: bool = True,
        keep: SupportsIndex | None = 3,
        keep_every: SupportsIndex | None = None,
        keep_best: KeepBest | None = None,
        fresh: bool = False,
        volumes: "Sequence[str | os.PathLike[str]] | None" = None,
        copies: SupportsIndex = 1,
        domain: str | None = None,
        process_group: Any = None,
        timeout: float = 300.0,
        staging_bytes: "int | str | None" = None,
        tiers: "Sequence[Tier] | None" = None,
        engine: Engine | None = None,
        **others: Any,
    ) -> None:
        """Open the directory of this node. Collective. Raises the errors of Checkpointer."""
        for name, value in others.items():
            if name not in _UNSUPPORTED:
                raise TypeError(f"Checkpointer() got an unexpected keyword argument {name!r}")
            if value != _UNSUPPORTED[name]:
                raise ValueError(f"{name}: is not supported with local=True")
        assert bool_argument(local, "local")
        number_of_copies = count_argument(copies, "copies")
        if not isinstance(domain, str | None):
            raise TypeError(f"domain: must be a str, not {type(domain).__name__}")
        rules, fresh, timeout = checked_options(
            keep, keep_every, keep_best, fresh, timeout, staging_bytes, engine
        )
        self.directory = Path(path_name(directory, "directory"))
        self._engine = engine
        names = names_of(volumes)
        self._absolute = absolute_path(directory, "directory").rstrip("/") or "/"
        self._ranks = ranks_of(process_group, timeout, self.directory)
        self._last: SaveHandle | None = None
        self._turn = Turn()
        register(self)
        self._wants_fresh = fresh
        self._has_saved = False
        self._must_check_early = False
        self._wait_for_others()
        copied_to = tiers_argument(tiers, self._absolute)
        self._tiers = Tiers([], cast("Any", None), fresh, engine)  # those of nodes are node_tiers
        options: dict[str, Any] = {"keep": rules.keep, "keep_every": rules.every, "keep_best": rules.best}
        options |= {"fresh": fresh, "copies": number_of_copies}
        options |= {"tiers": [each.options() for each in copied_to]}
        nodes, node = self._open_node(names, options)
        domains = self._domains(nodes, number_of_copies, domain)
        self._context: LocalContext = LocalContext(
            cast("Any", None),  # other ranks than the first of a node have no store
            self._ranks,
            list(range(self._ranks.size)),
            rules,
            staging_bytes,
            engine,
            self._tiers,
            nodes=nodes,
            node=node,
            kept_by=self._place_copies(domains, number_of_copies),
            domains=domains,
            path=self._absolute,
            fresh=fresh,
            node_tiers=NodeTiers(copied_to, node, nodes.node_of[self._ranks.rank], engine, fresh),
        )
        self._context.rebase(self._ranks.collectives())
        self._local = self._make_loading()
        if node is not None:
            self._warn_of_shares(node)

    def _warn_of_shares(self, node: NodeDirectory) -> None:
        lost = node.lost_save()
        if lost is not None:
            warn_without_failing(
                f"the share of step {lost.step}, which this node has committed last, is gone: "
                f"{self._absolute}/saves/{step_name(lost.number)}. If it was not you who removed it, restore "
                "it before anything is saved. Without it, and without copies on other nodes, the run goes on "
                "from an earlier step",
                caller(),
            )
        for number, error in sorted(node.damaged.items()):
            warn_without_failing(
                f"{error}. A load reads it on other nodes, if those have copies. If it cannot be restored, "
                f"remove {self._absolute}/saves/{step_name(number)}",
                caller(),
            )

    def _open_node(
        self, volumes: list[str] | None, options: dict[str, Any]
    ) -> tuple[Nodes, NodeDirectory | None]:
        """Find the nodes, and open the directory of this one on its first rank. All ranks raise alike."""
        ranks = self._ranks
        if ranks.size == 1:
            return Nodes((0,)), NodeDirectory(self._absolute, volumes)
        try:
            nodes = find_nodes(self._absolute, self._gather)
        except SharedDirectory as error:
            raise ValueError(
                f"local: {self._absolute} is not on a local disk: {error}. Omit local=True for a directory "
                "that all machines share"
            ) from None
        node, failure = None, None
        if ranks.rank in nodes.first_ranks():
            try:
                node = NodeDirectory(self._absolute, volumes)
            except Exception as error:
                failure = error
        theirs = self._gather((options, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        for rank, (chosen, why) in enumerate(theirs):
            if why is not None:
                raise rank_error(rank, f"rank {rank} could not open its directory: {why}")
            for option, value in chosen.items():
                if value != theirs[0][0][option]:
                    text = f"rank {rank}: {option} differs from rank 0; pass the same on all ranks"
                    raise rank_error(rank, text)
        return nodes, node

    def _domains(self, nodes: Nodes, copies: int, domain: str | None) -> list[str]:
        """Return the domain of each node. Collective, if there are to be copies."""
        given: list[str | None] = [None] * self._ranks.size
        if copies > 1:
            given = [domain] if self._ranks.size == 1 else self._gather(domain)
        for rank, theirs in enumerate(given):
            first = nodes.ranks_of(nodes.node_of[rank])[0]
            if theirs != given[first]:
                raise rank_error(
                    rank,
                    f"domain: rank {rank} has {theirs!r}, rank {first} {given[first]!r}; pass the same on "
                    "all ranks of a node",
                )
        of_nodes = [given[rank] for rank in nodes.first_ranks()]
        # A node without a domain is one by itself.
        return [f"node {node}" if each is None else f"domain {each}" for node, each in enumerate(of_nodes)]

    def _place_copies(self, domains: list[str], copies: int) -> KeptBy:
        """Return which nodes keep which shares; empty: each its own."""
        if copies == 1:
            return ()
        kept_by = place_copies(domains, copies)
        if self._ranks.rank == 0:
            problem = about_copies(domains, copies)
            if problem is not None:
                warn_without_failing(f"copies={copies}: {problem}", caller())
        return kept_by

    def _gather(self, value: Any) -> list[Any]:
        try:
            return self._ranks.gather(value)
        except RuntimeError as error:
            raise Error(
                None,
                f"cannot open {self._absolute} on rank {self._ranks.rank}: the ranks of the process group "
                f"could not reach each other; one has died: {error}",
            ) from error

    def _make_loading(self) -> LocalLoading:
        return LocalLoading(self._context, self._process_group)

    def _process_group(self) -> Any:
        return cast("GroupRanks", self._ranks).process_group()

    def latest(self) -> int | None:
        """Return the step that load() returns; None if there is none. Collective. Waits for running saves."""
        return self._listed("latest()").latest

    def steps(self) -> list[int]:
        """Return the steps that can be loaded, ascending. Collective. Waits for running saves."""
        return self._listed("steps()").steps

    def metrics(self, step: SupportsIndex) -> dict[str, float]:
        """Return the metrics that the checkpoint of `step` was saved with. Collective.

        Raises FileNotFoundError if there is no such checkpoint that can be loaded. Waits for running saves.
        """
        chosen = step_argument(step)
        found = dict(self._listed(f"metrics({chosen})").saves)
        if chosen not in found:
            text = f"there is no checkpoint of step {chosen} that can be loaded; steps() lists them"
            raise exception_of("system", errno.ENOENT, text, self._absolute)
        return found[chosen]

    def best(self) -> int | None:
        """Return the step with the best value of the metric of keep_best; None if none has one. Collective.

        Of the steps that can be loaded. Raises ValueError without keep_best. Waits for running saves.
        """
        return self._rules_with_best().best_of(self._listed("best()").saves)

    def wait_drained(self, timeout: float | None = None) -> None:
        """As Checkpointer.wait_drained(), but collective: all ranks wait until all nodes have copied.

        Raises RankError if another node cannot copy its part.
        """
        deadline = math.inf if timeout is None else time.monotonic() + seconds_argument(timeout)
        self.wait()
        if not self._context.node_tiers:
            return
        copies = NodeCopies(self._context, self._local)
        self._collective("wait_drained()", copies.begin)

        def are_done() -> bool:
            return copies.are_done(is_late=time.monotonic() > deadline)

        while not self._collective("wait_drained()", are_done):
            copies.pause()

    def drains(self) -> list[DrainStatus]:
        """Return how far copying from this node is, on its first rank: as Checkpointer.drains()."""
        return self._context.node_tiers.status()

    def locations(self) -> dict[int, list[str]]:
        """As Checkpointer.locations(), but collective: of the steps that can be loaded."""
        return self._listed("locations()").where

    def _raise_failed_copies(self, more: str) -> None:
        self._context.node_tiers.raise_failure(more)

    def _listed(self, call: str) -> Listed:
        return self._collective(call, lambda: self._local.listed(call))

    def _collective(self, call: str, work: Callable[[], _T]) -> _T:
        """Return work(), the collective call of all ranks that `call` names."""
        self._turn.check(call.partition("(")[0], self._absolute)
        self._wait_for_saves()
        with self._turn.lock:
            self._turn.begin(call)
            try:
                return work()
            finally:
                self._turn.end()

    def verify(self, step: SupportsIndex | None = None) -> None:
        """Compare every byte that this node has of a checkpoint (None: of all) with its checksum.

        Raises as for other directories. Concerns this rank alone; on the first rank of each node, it verifies
        what this node has, on others nothing.
        """
        chosen = None if step is None else step_argument(step)
        self._wait_for_saves()
        node = self._context.node
        if node is None:
            return
        if chosen is None and node.damaged:
            raise next(iter(node.damaged.values()))
        for entry in node.inventory().prepared:
            if entry.base is None and chosen in (None, entry.step):
                found = node.store.verify(entry.number, engine=self._engine)["mismatches"]
                if found:
                    raise Corrupt(
                        None, f"step {entry.step} is damaged: {found[0]['message']}", found[0]["path"]
                    )

    def verify_all_nodes(self, step: int | None, every: bool) -> dict[str, Any]:
        """Verify what all nodes have, as local_verify.verify(). Collective."""
        return self._collective("verify()", lambda: verify(self._context, step, every))

    def export(self, step: int | None, check: Check, write: Write, on_progress: OnProgress) -> dict[str, Any]:
        """Write a step on rank 0, as local_export.export(). Collective."""
        return self._collective(
            "export()", lambda: export(self._context, self._local, step, check, write, on_progress)
        )

    def restore_copies(self) -> list[int]:
        """As Checkpointer.restore_copies()."""
        self._turn.check("restore_copies", self._absolute)
        self._wait_for_saves()
        if self._context.run is None:
            raise ValueError("restore_copies() needs the latest checkpoint: call load() first")
        if self._ranks.size == 1:
            return []
        with self._turn.lock:
            self._turn.begin("restore_copies()")
            try:
                return restore_copies(self._context, self._local, self._process_group)
            finally:
                self._turn.end()

    def delete(self, step: SupportsIndex) -> None:
        """Remove the checkpoint of `step` from all nodes that are there, durably. Collective.

        Raises FileNotFoundError if there is no such checkpoint, and Unsupported for the latest one; Error
        with EBUSY while another process saves there. Waits for running saves.
        """
        chosen = step_argument(step)
        self._collective("delete()", lambda: delete(self._context, chosen))

    def open_tensors(
        self,
        step: SupportsIndex | None = None,
        *,
        device: Device = "cpu",
        verify: Literal["auto"] | bool = "auto",
    ) -> TensorReader:
        """Raise Unsupported: not with local=True yet."""
        raise Unsupported(None, "open_tensors() is not supported with local=True", self._absolute)

    def _load_call(self, step: SupportsIndex | None) -> str:
        return f"load({'' if step is None else step})"

    def _load_step(self, step: SupportsIndex | None, into: Any, wanted: Wanted) -> Any:
        self._wait_for_saves()
        if wanted.verify == "first":
            raise ValueError('verify: "first" is not supported with local=True')
        chosen = None if step is None else step_argument(step, "; pass a state to fill as into=")
        self._turn.check("load", self._absolute)
        with self._turn.lock:
            self._turn.begin("load()")
            try:
                loaded, state = self._local.load(chosen, into, wanted)
            finally:
                self._turn.end()
        if self._wants_fresh and not self._has_saved and self._ranks.rank == 0:
            warn_without_failing(
                f"{self._absolute}: fresh=True has no effect, since load() continues from step {loaded}; to "
                "start over, do not load; to continue, omit fresh=True",
                caller(),
            )
        return state

    def _check_continues(self, step: int) -> None:
        """The save itself checks, on all nodes."""

    def _make_job(
        self, step: int, state: Any, metrics: dict[str, float], stage_all: bool, exchange: Exchange | None
    ) -> StepSave:
        self._has_saved = True
        return LocalSave(step, state, metrics, self._context, stage_all, exchange)
