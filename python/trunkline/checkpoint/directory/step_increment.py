"""The incremental part of a save: which shards of an earlier checkpoint it links, and what it references."""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from trunkline import _core
from trunkline._arguments import bool_argument, count_argument
from trunkline._core import CheckpointManifest, CheckpointSave
from trunkline._logging import Log
from trunkline._torch_or_numpy import torch
from trunkline._trace import span
from trunkline._warnings import warn_without_failing
from trunkline.checkpoint.directory.increments import (
    UNIT_BYTES,
    Base,
    Comparison,
    Increment,
    Reference,
    from_json,
    in_json,
    linkable,
)
from trunkline.checkpoint.directory.shards import TensorRecord, identity
from trunkline.checkpoint.directory.shares import Piece

_log = Log("checkpoint")

# What link(2) fails with where a filesystem has no hard links, or does not allow this one.
_CANNOT_LINK = (errno.EPERM, errno.EACCES, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)


@dataclass
class IncrementRules:
    """The arguments of an incremental Checkpointer."""

    full_every: int | None
    has_warned: bool = False  # that the filesystem has no hard links

    @classmethod
    def of(cls, incremental: bool, full_every: SupportsIndex | None) -> "IncrementRules | None":
        """Check the arguments; None: not incremental. Raises TypeError and ValueError."""
        wanted = bool_argument(incremental, "incremental")
        every = None if full_every is None else count_argument(full_every, "full_every")
        if every is not None and not wanted:
            raise ValueError("full_every: has no effect without incremental=True")
        return cls(every) if wanted else None


@dataclass
class Written:
    """What a writer reports beside its shards."""

    references: list[Reference]
    digests: dict[int, list[tuple[int, bytes]]]

    def in_json(self) -> dict[str, Any]:
        """Return it as one rank sends it to another."""
        return {"references": [list(each) for each in self.references], "digests": in_json(self.digests)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Written":
        """Undo in_json()."""
        return cls([Reference(*each) for each in value["references"]], from_json(value["digests"]))


class StepIncrement:
    """What one save of one rank does to write only what changed."""

    def __init__(self, rules: IncrementRules, store: _core.CheckpointStore) -> None:
        """Begin with nothing known."""
        self._rules = rules
        self._store = store
        self._manifest: CheckpointManifest | None = None
        self._increment = Increment()
        self.links: list[dict[str, Any]] = []  # as the manifest has them; on rank 0

    def shards_of_a_part(self) -> int:
        """Return how many shards each part may need: with a base, what changed and what did not."""
        return 1 if self._store.latest() is None else 2

    def offer(self, save: CheckpointSave, stack_caller: Any) -> dict[str, Any]:
        """Link what may be referenced, on rank 0 with the directory locked.

        Returns what the placement says of it: the base, and the numbers of its shards that are linked.
        """
        nothing: dict[str, Any] = {"step": None, "identity": "", "links": []}
        step = self._store.latest()
        if step is None:
            return nothing
        try:
            manifest = self._store.open_manifest(step)
        except OSError as error:
            _log.info("%s: step %d is not a base: %s", self._store.directory, step, error)
            return nothing
        if manifest.unit_bytes != UNIT_BYTES:  # 0: that save was not incremental
            return nothing
        wanted = linkable(manifest, self._rules.full_every)
        made, problem = save.link(manifest, wanted)
        if problem is not None:
            self._say(problem, stack_caller)
        self._manifest = manifest
        self.links = [entry for entry in made if entry is not None]
        shards = [shard for shard, entry in zip(wanted, made, strict=True) if entry is not None]
        return {"step": step, "identity": identity(manifest), "links": shards}

    def _say(self, problem: OSError, stack_caller: Any) -> None:
        if problem.errno in _CANNOT_LINK and self._rules.has_warned:
            return
        text = f"{self._store.directory}: shards of the checkpoint before are written again: {problem}"
        if problem.errno in _CANNOT_LINK:
            text += "; incremental=True needs a filesystem with hard links"
            self._rules.has_warned = True
        warn_without_failing(text, stack_caller)

    def compare(
        self,
        tensors: Sequence[torch.Tensor],
        described: Sequence[TensorRecord],
        streams: "Mapping[torch.device, torch.cuda.Stream]",
        parts: Sequence[Sequence[Piece]],
        offered: Mapping[str, Any],
    ) -> Increment:
        """Decide what this rank writes of its parts."""
        if not parts:  # it writes nothing
            return self._increment
        base = self._base(offered)
        with span("checkpoint", "compare with the checkpoint before"):
            self._increment = Comparison(tensors, described, streams, base).compare(parts)
        return self._increment

    def _base(self, offered: Mapping[str, Any]) -> Base | None:
        step = offered["step"]
        if step is None:
            return None
        if self._manifest is None:  # on other ranks than 0
            try:
                self._manifest = self._store.open_manifest(step)
            except OSError as error:
                _log.info("%s: step %d is not a base here: %s", self._store.directory, step, error)
                return None
            if identity(self._manifest) != offered["identity"]:
                return None
        return Base(self._manifest, {shard: number for number, shard in enumerate(offered["links"])})

    def written(self) -> Written:
        """Return what this rank reports."""
        return Written(self._increment.references, self._increment.digests)


@dataclass
class Assembled:
    """What all writers have written and referenced, for the manifest."""

    shards: list[dict[str, Any]]
    pieces: list[list[tuple[int, int, int]]]  # of each tensor
    digests: list[list[tuple[int, bytes]]]  # likewise
    bytes_referenced: int


def assemble(
    tensors: int,
    placed: Sequence[Mapping[str, Any]],
    shards: Sequence[Mapping[str, Any]],
    links: Sequence[Mapping[str, Any]],
    reports: Sequence[Written],
) -> Assembled:
    """Put the reports of all writers together.

    placed: the shards of the placement; `shards`: what was written, each with its "index" in that. links:
    entries of the manifest.
    """
    entries: list[dict[str, Any]] = [
        {**placed[shard["index"]], "bytes": shard["bytes"], "crc32c": shard["crc32c"]} for shard in shards
    ]
    found: list[list[tuple[int, int, int, int]]] = [[] for _ in range(tensors)]
    for number, shard in enumerate(shards):
        for tensor, begin, end, offset in shard["pieces"]:
            found[tensor].append((begin, number, offset, end - begin))
    references = [each for report in reports for each in report.references]
    used = {link: len(entries) + at for at, link in enumerate(sorted({each.link for each in references}))}
    entries += [dict(links[link]) for link in used]
    for each in references:
        found[each.tensor].append((each.begin, used[each.link], each.offset, each.end - each.begin))
    digests: list[list[tuple[int, bytes]]] = [[] for _ in range(tensors)]
    for report in reports:
        for tensor, runs in report.digests.items():
            digests[tensor] += runs
    return Assembled(
        entries,
        [[(shard, offset, nbytes) for _, shard, offset, nbytes in sorted(pieces)] for pieces in found],
        [sorted(runs) for runs in digests],
        sum(each.end - each.begin for each in references),
    )
