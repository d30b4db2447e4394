"""One save of one rank into a directory of checkpoints."""

import collections
import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trunkline import _core
from trunkline._core import CheckpointSave, Engine, FileSet, GcPause
from trunkline._errors import Cancelled, Corrupt, Error, Format, reword
from trunkline._formats.checkpoint_names import is_manifest, step_of
from trunkline._logging import Log
from trunkline._tensor_io.side_streams import side_streams
from trunkline._tensor_io.sources import CheckedFileSet, Sources
from trunkline._tensor_io.tensors import contiguous
from trunkline._torch_or_numpy import torch
from trunkline._warnings import caller, warn_without_failing
from trunkline.checkpoint.directory import shards as shard_files
from trunkline.checkpoint.directory.increments import INCREMENTAL, UNIT_BYTES
from trunkline.checkpoint.directory.shares import Piece, Spread, divide, limited, spread
from trunkline.checkpoint.directory.step_increment import (
    IncrementRules,
    StepIncrement,
    Written,
    assemble,
)
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.ranks.group import Exchange, Ranks, rank_error
from trunkline.checkpoint.ranks.outcomes import (
    await_result,
    give_up,
    join,
    mark_earlier,
    publish_result,
    root_cause,
)
from trunkline.checkpoint.retention import METRICS, Rules, metrics_in_manifest
from trunkline.checkpoint.state.difference import first_difference, marks_of
from trunkline.checkpoint.state.places import place_of_tensor
from trunkline.checkpoint.state.tree import flatten_with_features
from trunkline.checkpoint.tiers.tiers import Tiers

_log = Log("checkpoint")

# Prefix of a substitute for a checkpoint's identity: load() of it began on this rank, and has not succeeded.
# The number of failed loads follows, and what the rank had loaded before: only ranks that have these in
# common hold the same state.
_NOT_LOADED = "not loaded"

# So many tensors fit into the head of one shard, whatever their names and shapes.
FEW_TENSORS = 20_000


@dataclass
class SaveContext:
    """What all saves of a Checkpointer share: store, ranks and options; and what this rank has loaded."""

    store: _core.CheckpointStore
    ranks: Ranks
    writers: list[int]  # ranks
    rules: Rules
    staging_bytes: "int | str | None"
    engine: Engine | None
    tiers: Tiers
    increments: IncrementRules | None = None  # None: all is written
    # Identity (or _NOT_LOADED ...) and step of the checkpoint that this rank loaded last, since the last save
    # of all ranks.
    loaded: tuple[str, int] | None = None
    collectives_before: int = 0
    # The same for a load() that failed here, but that other ranks may complete, and count from.
    collectives_before_load: int | None = None
    _failed_loads: int = 0  # since the last successful load or save
    _has: str = ""  # identity of the checkpoint that it had loaded before those

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return str(self.store.directory)

    @property
    def keep(self) -> int | None:
        """How many of the last checkpoints are kept; None: all."""
        return self.rules.keep

    def rebase(self, begun: int | None) -> None:
        """Count collective operations from `begun`, the count when all ranks were in the same call."""
        self.collectives_before = begun or 0
        self.collectives_before_load = None

    def begin_load(self, step: int, begun: int | None = None) -> None:
        """Note that this rank begins to load a step; the load has failed unless complete_load() follows.

        begun: collective operations at the load() of all ranks, if that failed here before reading.
        """
        if self._failed_loads == 0:
            self._has = "" if self.loaded is None else self.loaded[0]
        self._failed_loads += 1
        self.loaded = f"{_NOT_LOADED} ({self._failed_loads}), but {self._has}", step
        if begun is not None:
            self.collectives_before_load = begun

    def complete_load(self, step: int, identity: str) -> None:
        """Note that this rank has loaded a step, as other ranks did in the same load()."""
        self.loaded = identity, step
        self._failed_loads = 0
        if self.collectives_before_load is not None:
            self.rebase(self.collectives_before_load)

    def forget_loads(self) -> None:
        """Note that all ranks have the same state now."""
        self.loaded = None
        self._failed_loads = 0
        self.collectives_before_load = None

    def collectives(self) -> int | None:
        """Return how many collective operations this rank has begun; None if they are not counted.

        For comparing calls: since the last load() that all ranks joined, also if it failed here.
        """
        before = self.collectives_before_load
        return self._begun_since(self.collectives_before if before is None else before)

    def collectives_of_state(self) -> int | None:
        """Return how many it has begun since it was opened, or completed a load() with the others."""
        return self._begun_since(self.collectives_before)

    def _begun_since(self, before: int) -> int | None:
        begun = self.ranks.collectives()
        return None if begun is None else begun - before


def _is_not_loaded(identity: str) -> bool:
    return identity.startswith(_NOT_LOADED)


def warnings_of(problems: Sequence[OSError], directory: str) -> list[str]:
    """Return warnings about files that could not be removed, and checkpoints that cannot be read."""
    return [_warning_of(problem, directory) for problem in problems]


def _warning_of(problem: OSError, directory: str) -> str:
    if problem.errno == errno.EEXIST:  # names the steps of other runs that stay, which is not a failure
        return str(problem)
    folder, name = os.path.split(os.fsdecode(problem.filename or ""))
    step = step_of(os.path.basename(folder))  # noqa: PTH119 - of a str
    if step is None or not is_manifest(name) or not isinstance(problem, Corrupt | Format):
        return f"while cleaning up {directory}: {problem}"
    if isinstance(problem, Corrupt):
        return f"step {step} of {directory} is damaged: {problem}; delete({step}) removes it"
    # Not for a valid manifest of a newer version.
    remove = f"; delete({step}) removes it" if "is not the manifest of a checkpoint" in str(problem) else ""
    return f"step {step} of {directory} cannot be read: {problem}{remove}"


# Which of them differs is not known: the rest of the tree has to be equal as well.
_STATE = (
    "state (names and their order, dtypes, shapes, strides, which tensors share memory, types, or values "
    "that are not tensors)"
)


class StepSave:
    """One save of one rank.

    With several ranks (1 to 4 as in the durability protocol of src/checkpoint/save_transaction.cpp):
    a. rank 0 waits until all ranks are in this save, locks the directory, creates that of the step, and
       publishes the paths of all shards;
    b. each writer writes its shards and makes them durable, then reports what it wrote (1 to 3);
    c. rank 0 waits for all (4), commits the manifest, publishes that, and removes old checkpoints.
    """

    def __init__(
        self,
        step: int,
        state: Any,
        metrics: dict[str, float],
        context: SaveContext,
        stage_all: bool,
        exchange: Exchange | None,
    ) -> None:
        """`exchange`: begun; ended by commit() or abandon()."""
        self._step = step
        self._metrics = metrics
        self._caller = caller()
        self._stage_all = stage_all
        self._context = context
        self._skeleton, tensors, self._features = self._flatten(state)
        if metrics:
            self._features = [*self._features, METRICS]
        rules = context.increments
        self._increment = None if rules is None else StepIncrement(rules, context.store)
        if rules is not None:
            self._features = [*self._features, INCREMENTAL]
        with GcPause():
            self._described = [shard_files.TensorRecord.of(name, tensor) for name, tensor in tensors.items()]
        # In this thread, whose current CUDA stream orders the copies.
        self._tensors = [contiguous(tensor) if tensor.is_cuda else tensor for tensor in tensors.values()]
        skeleton, names, place_of = self._skeleton, list(tensors), self._shown_name
        with GcPause():
            self._sources: Sources | None = Sources(
                [tensor.untyped_storage() for tensor in self._tensors],
                self._tensors,
                lambda index: place_of(skeleton, names[index]),
            )
        if stage_all:
            self._sources.watch()
        self._streams = side_streams(self._tensors)
        self._layout = Spread(1, 1)
        self._parts: list[list[Piece]] = []  # of each shard
        self._writer_and_volume: list[tuple[int, int]] = []  # of each shard
        self._exchange = exchange
        self._collectives = None if exchange is None else context.collectives_of_state()
        self._loaded = context.loaded
        self._save: CheckpointSave | None = None  # of rank 0
        self._placement: dict[str, Any] = {}
        self._mine: list[int] = []
        self._pieces_of: dict[int, list[shard_files.PlacedPiece]] = {}
        self._bytes: dict[int, int] = {}
        self._files: FileSet | None = None

    def _flatten(self, state: Any) -> tuple[Any, dict[str, torch.Tensor], list[str]]:
        """Return what is saved of a state beside tensors, these by name, and the features of the format."""
        return flatten_with_features(state)

    @staticmethod
    def _shown_name(skeleton: Any, name: str) -> str | None:
        """Return what errors call a tensor."""
        return place_of_tensor(skeleton, name)

    def begin(self) -> FileSet:
        """Step a, and the files of this rank."""
        if self._exchange is None:
            self._placement = self._begin()
        elif self._exchange.rank == 0:
            self._placement = publish_result(self._exchange, "placed", self._begin)
        else:
            join(self._exchange)
            self._placement = await_result(self._exchange, "placed")
            self._compare(self._exchange.rank)
            self._lay_out(len(self._placement["volumes"]))
            self._split(len(self._placement["shards"]) // max(1, len(self._parts)))
        rank = self._context.ranks.rank
        if rank in self._context.writers[: self._layout.writers]:
            own = self._context.writers.index(rank)
            self._mine = [index for index, (writer, _) in enumerate(self._writer_and_volume) if writer == own]
        return self._lay_out_files()

    def _lay_out_files(self) -> FileSet:
        """Return the files of this rank, whose shards are chosen."""
        rank = self._context.ranks.rank
        sources, self._sources = self._sources, None
        assert sources is not None
        context = self._context
        directory = context.directory
        what = self._what()
        problem = sources.problem(what, directory)
        if problem is not None:
            del sources
            self._tensors = []  # the traceback would keep them alive
            raise problem
        self._compare_with_base()
        layouts = []
        for index in self._mine:
            with GcPause():
                layout, self._pieces_of[index] = shard_files.lay_out(
                    self._placement["paths"][index],
                    self._tensors,
                    self._described,
                    self._parts[index],
                    self._streams,
                )
            self._bytes[index] = layout.nbytes
            layouts.append(layout)
        _log.debug(
            "%s: rank %d writes %d bytes into %d shards", what, rank, sum(self._bytes.values()), len(layouts)
        )
        self._tensors = []
        self._files = CheckedFileSet(
            layouts,
            sources,
            what,
            directory,
            engine=context.engine,
            replace=False,
            # A volume with the shard may be missing on this machine, but not the directory with the manifest.
            access_of=next((path for path in self._placement["replaced"] if os.path.exists(path)), None),  # noqa: PTH110
            stage_all=self._stage_all,
            staging_bytes=context.staging_bytes if self._stage_all else None,
        )
        return self._files

    def _split(self, shards_of_a_part: int) -> None:
        """Let each part have so many shards; _compare_with_base() divides its pieces among them."""
        self._whole_parts = len(self._parts)
        self._parts += [[] for _ in range(self._whole_parts * (shards_of_a_part - 1))]
        self._writer_and_volume *= shards_of_a_part

    def _compare_with_base(self) -> None:
        """For an incremental save: leave only what this rank writes in its parts, and drop empty shards."""
        if self._increment is None:
            return
        whole = [index for index in self._mine if index < self._whole_parts]
        increment = self._increment.compare(
            self._tensors,
            self._described,
            self._streams,
            [self._parts[index] for index in whole],
            self._placement["base"],
        )
        for index, changed, steady in zip(whole, increment.changed, increment.steady, strict=True):
            self._parts[index] = changed
            if steady:
                self._parts[index + self._whole_parts] = steady
        self._mine = [index for index in self._mine if self._parts[index]]

    def commit(self) -> float | None:
        """Steps b and c, once the files of this rank are durable. Returns which share was written."""
        with GcPause():
            report: dict[str, Any] = {
                "shards": [self._written(number, index) for number, index in enumerate(self._mine)]
            }
        if self._increment is not None:
            report["increment"] = self._increment.written().in_json()
        exchange = self._exchange
        if exchange is None:
            outcome = self._commit([report])
        elif exchange.rank == 0:
            outcome = publish_result(
                exchange, "committed", lambda: self._commit(self._gather(exchange, report))
            )
        else:
            exchange.post("written", report)
            outcome = self._await_commit(exchange)
        if exchange is not None:
            self._exchange = None  # errors from now on are not published
            exchange.__exit__(None, None, None)
        if self._context.loaded is self._loaded:  # the training goes on from this save
            self._context.forget_loads()
        if self._context.ranks.rank == 0:
            self._clean_up()
        share: float | None = outcome["share"]
        return share

    def _await_commit(self, exchange: Exchange) -> Any:
        try:
            return await_result(exchange, "committed")
        except Cancelled as error:
            # Rank 0 may have read this rank's report: the exception publishes the cancellation, maybe too
            # late.
            raise Cancelled(
                None,
                f"{error}, after this rank had written its share: rank 0 may still commit the checkpoint, "
                "which latest() tells",
            ) from None

    def cancel(self) -> None:
        """Stop waiting for other ranks."""
        exchange = self._exchange
        if exchange is not None:
            exchange.stop()

    def _clean_up(self) -> None:
        """Remove old checkpoints. The new one is durable, so errors here do not make the save fail."""
        assert self._save is not None
        try:
            rules = self._context.rules
            held = [] if rules.keep is None else self._context.tiers.held()
            problems = self._save.retain(rules.keep, every=rules.every, best=rules.best, steps=held)[
                "problems"
            ]
        except OSError as error:
            problems = [error]
        finally:
            self._save.release()
        self._context.tiers.after_commit()
        for text in warnings_of(problems, self._context.directory):
            warn_without_failing(text, self._caller)

    def abandon(self, error: BaseException) -> BaseException:
        """Publish that this rank failed, and remove what was written."""
        try:
            self._mention_set_aside_run(error)
            if self._exchange is not None:
                error = root_cause(self._exchange, error)
                give_up(self._exchange, error)
            self._name_save(error)
            return error
        finally:
            if self._save is not None:
                self._save.abandon()

    def _mention_set_aside_run(self, error: BaseException) -> None:
        """Add to the error of a first save with fresh=True where the earlier checkpoints are now."""
        aside = self._context.store.aside if self._context.ranks.rank == 0 else None
        if aside is None or not isinstance(error, Error):
            return
        reword(
            error,
            f"{error}; the earlier run had already been set aside, and is complete in {aside}: open that "
            f"directory to continue it, or save again to start over in {self._context.directory}",
        )

    def _name_save(self, error: BaseException) -> None:
        """Add to an error which save failed and, for a full disk, how much room is needed.

        Other ranks do this themselves, so it comes after the error is published.
        """
        if not isinstance(error, Error):
            return
        text = str(error)
        if not text.startswith(("saving step ", "cannot save step ")):
            text = f"{self._what()}: {text}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text += "; the checkpoints that were there before are intact"
            if room := self._context.rules.room():
                text += f"; {room}"
        if isinstance(error, FileExistsError):  # not from save() itself: another process saved meanwhile
            text += "; if the program makes a new Checkpointer for each save, make one and keep it"
        reword(error, text)

    def _what(self) -> str:
        return f"saving step {self._step} to {self._context.directory}"

    def _lay_out(self, volumes: int) -> None:
        """Divide the bytes among the writers, and those of each writer among the volumes.

        Rank 0 reads the number of volumes once the directory is locked, and publishes it.
        """
        sizes = [about.nbytes for about in self._described]
        total = sum(sizes)
        self._layout = spread(total, len(self._context.writers), max(1, volumes))
        cuts = {} if self._increment is None else {"cut_bytes": UNIT_BYTES}
        with GcPause():
            parts = divide(sizes, self._layout.writers * self._layout.volumes, **cuts) if total else []
            self._parts, self._writer_and_volume = [], []
            costs: list[int] = []
            for number, part in enumerate(parts):
                if len(part) > FEW_TENSORS and not costs:
                    costs = shard_files.head_bytes(self._described)
                shards = (
                    limited(part, costs, shard_files.MAX_HEAD_BYTES) if len(part) > FEW_TENSORS else [part]
                )
                self._parts += shards
                self._writer_and_volume += [divmod(number, self._layout.volumes)] * len(shards)

    def _shards_per_volume(self) -> list[int]:
        volumes = max(1, len(self._context.store.volumes))
        self._lay_out(volumes)
        self._split(1 if self._increment is None else self._increment.shards_of_a_part())
        used = collections.Counter(volume for _, volume in self._writer_and_volume)
        return [used[volume] for volume in range(volumes)]

    def _begin(self) -> Any:
        if self._exchange is not None:
            self._exchange.meet()
        self._context.tiers.before_save()
        self._save = self._lock()
        self._context.tiers.after_begin()
        placement = self._save.placement
        if placement["directory_was_replaced"]:
            warn_without_failing(
                f"{self._context.directory} has none of the checkpoints that this Checkpointer loaded "
                "or saved there: the directory was removed, or the path now leads to another one (a changed "
                f"link, a disk that is not mounted). Step {self._step} is saved there nevertheless",
                self._caller,
            )
        # Our shards are in the order of the writers, and of the volumes of each.
        by_volume: dict[int, list[int]] = {}
        for index, shard in enumerate(placement["shards"]):
            by_volume.setdefault(shard["volume"], []).append(index)
        of_volumes = [iter(by_volume[volume]) for volume in sorted(by_volume)]
        order = [next(of_volumes[volume]) for _, volume in self._writer_and_volume]
        return {
            "volumes": placement["volumes"],
            "shards": [
                {key: placement["shards"][index][key] for key in ("volume", "file")} for index in order
            ],
            "paths": [placement["shards"][index]["path"] for index in order],
            "replaced": [path for path in placement["replaced"] if path],
            "digest": {} if self._exchange is None else self._digest(),
            "marks": [] if self._exchange is None else marks_of(self._skeleton),
            "collectives": self._collectives,
            "loaded": self._loaded,
            "base": None if self._increment is None else self._increment.offer(self._save, self._caller),
        }

    def _lock(self) -> CheckpointSave:
        return retry_while_locked(lambda: self._context.store.begin(self._step, self._shards_per_volume()))

    def _written(self, number: int, index: int) -> dict[str, Any]:
        assert self._files is not None
        return {
            "index": index,
            "bytes": self._bytes[index],
            "crc32c": shard_files.format_crc32c(self._files.checksums(number)),
            "pieces": [[*placed.piece, placed.offset] for placed in self._pieces_of[index]],
        }

    def _digest(self) -> dict[str, str]:
        about = [[each.name, each.dtype, each.shape] for each in self._described]
        same = {
            "step": self._step,
            "writers": self._context.writers,
            "metrics": list(self._metrics.items()),
            _STATE: [self._skeleton, about],
        }
        return {what: hashlib.sha256(json.dumps(value).encode()).hexdigest() for what, value in same.items()}

    def _compare(self, rank: int) -> None:
        """Raise RankError, before anything is written, unless this rank saves the same as rank 0."""
        # First: if a rank failed to load, it also counts collective operations differently.
        loaded = self._placement["loaded"]
        if loaded and self._loaded and loaded[0] != self._loaded[0]:
            raise rank_error(rank, self._loaded_differently(rank, loaded))
        # A rank that skipped a save, and later saves the same step, would join the save that it skipped.
        theirs, ours = self._placement["collectives"], self._collectives
        if theirs is not None and ours is not None and theirs != ours:
            raise rank_error(
                rank,
                f"rank {rank} called save({self._step}) after {ours} collective operations of the process "
                f"group since it was opened or loaded, and rank 0 after {theirs}: they are at different "
                "points of the training, and the checkpoint would be a mixture of both. All ranks must make "
                "the same calls in the same order; avoid operations that ranks count differently "
                "(dist.monitored_barrier, send, recv); load() or a new Checkpointer on all ranks resets the "
                "count",
            )
        own = self._digest()
        other = [what for what, digest in self._placement["digest"].items() if own[what] != digest]
        if not other:
            return
        place = first_difference(self._skeleton, self._placement["marks"]) if other[0] == _STATE else None
        where = "" if place is None else f", first at {place}"
        raise rank_error(
            rank,
            f"rank {rank}: {other[0]} differs from rank 0{where}; it must be the same on ranks that save "
            "together (leave values that differ out of the state)",
        )

    def _loaded_differently(self, rank: int, loaded: Sequence[Any]) -> str:
        """Return what this rank and rank 0 (`loaded`) have loaded last, and what to do."""
        assert self._loaded is not None
        ours, theirs = self._loaded[1], loaded[1]
        failed_here, failed_there = _is_not_loaded(self._loaded[0]), _is_not_loaded(loaded[0])
        if failed_here and failed_there:
            return (
                f"load() failed on rank {rank} and on rank 0, which had loaded different checkpoints before: "
                "saving could mix both. Call load() on all ranks, then save"
            )
        if failed_here or failed_there:
            failed, step, other, has = (rank, ours, 0, theirs) if failed_here else (0, theirs, rank, ours)
            return (
                f"load() of step {step} failed on rank {failed}, and rank {other} has loaded step {has}: "
                "saving could mix both. Call load() on all ranks, or "
                f"load({has}) on all ranks on which it failed, then save"
            )
        if theirs == ours:
            other_one, choice = "another checkpoint of that step", f"load({ours})"
        else:
            other_one, choice = (
                f"step {theirs}",
                f"load({theirs}) to continue from step {theirs}, or load({ours})",
            )
        return (
            f"rank {rank} has loaded step {ours} last, and rank 0 {other_one}: saving could mix both. Call "
            f"{choice}, the same on all ranks (even if one of them broadcasts the state), then save; to read "
            "another checkpoint on one rank, use another Checkpointer(..., process_group=False)"
        )

    def _gather(self, exchange: Exchange, own: dict[str, Any]) -> list[dict[str, Any]]:
        reports = [own]
        for rank in range(1, exchange.size):
            report = exchange.read("written", rank)
            if "error" in report:
                why = report["error"].removeprefix(f"rank {rank}: ")
                failed = rank_error(rank, f"rank {rank} failed to save its share: {why}")
                if report["earlier"]:
                    mark_earlier(failed)
                failed.is_cancellation = report["cancelled"]
                raise failed
            reports.append(report)
        return reports

    def _commit(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        with GcPause():
            whole = assemble(
                len(self._described),
                self._placement["shards"],
                sorted(
                    (shard for report in reports for shard in report["shards"]),
                    key=lambda shard: int(shard["index"]),
                ),
                [] if self._increment is None else self._increment.links,
                [Written.from_json(report["increment"]) for report in reports if "increment" in report],
            )
        assert self._save is not None
        self._save.commit(
            {
                "step": self._step,
                "chunk_bytes": shard_files.CHUNK_BYTES,
                "world_size": self._context.ranks.size,
                "volumes": self._placement["volumes"],
                "shards": whole.shards,
                "state": self._skeleton,
                **({} if self._increment is None else {"unit_bytes": UNIT_BYTES}),
                **({"features": self._features} if self._features else {}),
                **({"metrics": metrics_in_manifest(self._metrics)} if self._metrics else {}),
            },
            [
                (about.name, about.dtype, about.shape, pieces, digests)
                for about, pieces, digests in zip(self._described, whole.pieces, whole.digests, strict=True)
            ],
            first_number=self._context.tiers.first_number,
        )
        return {"share": self._share_written(whole.bytes_referenced)}

    def _share_written(self, referenced: int) -> float | None:
        """Return which share of the state was written; None unless the save is incremental."""
        if self._increment is None:
            return None
        total = sum(about.nbytes for about in self._described)
        share = 1.0 - referenced / total if total else 1.0
        _log.info(
            "%s: wrote %d of %d bytes of tensors (%.1f %%); the rest is unchanged",
            self._what(),
            total - referenced,
            total,
            100 * share,
        )
        return share
