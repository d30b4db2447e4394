"""Finds the step to load, in a directory or its tiers, alone or with the other ranks, and reads it."""

import errno
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from trunkline._core import CheckpointManifest
from trunkline._errors import Error
from trunkline._logging import Log
from trunkline.checkpoint.directory import shards
from trunkline.checkpoint.directory.part import Wanted
from trunkline.checkpoint.directory.step_reader import StepReader
from trunkline.checkpoint.directory.step_save import SaveContext
from trunkline.checkpoint.ranks.group import rank_error

_log = Log("checkpoint")

# How often ranks try to agree on a checkpoint while another process saves; the pauses double.
_MAX_AGREEMENTS = 8
_FIRST_PAUSE_SECONDS = 0.005


class Found(NamedTuple):
    """A step to load: its number (None: there is no checkpoint), and what reads it."""

    step: int | None
    position: Any  # of the directory, when the step was chosen
    source: int  # index of the reader
    manifest: CheckpointManifest | None = None


class Loading:
    """Loads steps for a Checkpointer."""

    def __init__(
        self,
        directory: str,
        context: SaveContext,
        readers: Sequence[StepReader],
    ) -> None:
        """`readers`: of the directory itself, then of each tier."""
        self._directory = directory
        self._context = context
        self._ranks = context.ranks
        self._tiers = context.tiers
        self._readers = readers

    def choose(self, step: int | None) -> Found:
        """Find a step (None: the last), without reading it.

        The directory is read once for the step and what is there beside it: checkpoints that another job
        saves later are not this run's.
        """
        position = self._context.store.position()
        if not self._tiers:
            return Found(position[1] if step is None else step, position, 0)
        self._tiers.begin_load()
        if step is not None:
            return Found(step, position, self._tiers.source_of(step))
        newest = self._tiers.newest()
        return Found(None, position, 0) if newest is None else Found(newest[1].step, position, newest[0])

    def load(self, step: int | None, into: Any, wanted: Wanted, agree: Callable[..., Any]) -> tuple[int, Any]:
        """Load a step (None: the last); return its number and the state. agree: Checkpointer._agree."""
        together = step is None and self._ranks.size > 1
        # Checkpoints that another process saves from now on are not loaded.
        agreed = self._open_same(agree) if together else None
        begun = False
        while True:
            found = self.choose(step) if agreed is None else agreed
            chosen, manifest = found.step, found.manifest
            if chosen is None:
                raise self._readers[0].nothing_yet()
            reader = self._readers[found.source]
            try:
                if manifest is None:
                    manifest = reader.open_manifest(chosen)
                if self._ranks.size > 1 and not begun:
                    self._context.begin_load(chosen)  # another rank may succeed
                    begun = True
                state = reader.load(chosen, manifest, into, wanted)
            except (FileNotFoundError, NotADirectoryError) as error:
                why = f"{error.filename} is missing ({errno.errorcode.get(error.errno or 0)})"
                _log.info("%s: step %d is read again unless it is damaged: %s", reader.directory, chosen, why)
                self._check_replaced(found._replace(manifest=manifest), error.filename, why, step is None)
                if together:
                    raise self._differs_on(self._ranks.rank, chosen) from None
                continue
            self._context.store.continue_from(found.position)
            self._tiers.end_load()
            if self._ranks.size > 1:
                self._context.complete_load(chosen, shards.identity(manifest))
            why = "the last one" if step is None else "as requested"
            _log.info("%s: step %d is loaded (%s)", reader.directory, chosen, why)
            return chosen, state

    def _check_replaced(self, found: Found, path: str, why: str, any_step: bool) -> None:
        """As StepReader.check_replaced(). Ranks that load together cannot load another step."""
        assert found.step is not None
        together = any_step and self._ranks.size > 1
        try:
            self._readers[found.source].check_replaced(
                found.step, found.manifest, path, why, any_step and not together
            )
        except FileNotFoundError:
            if together:
                raise self._missing_on(self._ranks.rank, found.step) from None
            raise

    def _missing_on(self, rank: int, step: int) -> Error:
        return rank_error(
            rank,
            f"{self._directory}: step {step}, which the ranks load, does not exist on rank {rank}; check "
            "that the directory is mounted on its machine, and that no other process saves into it meanwhile",
        )

    def _differs_on(self, rank: int, step: int | None) -> Error:
        return rank_error(
            rank,
            f"{self._directory}: rank {rank} finds a different checkpoint of step {step} than the ranks "
            "agreed to load; another process is saving into the directory, or it is a different directory on "
            "that rank's machine. Stop the other process, and load again on all ranks",
        )

    def _newest(self) -> tuple[int, int | None]:
        """Return the index of the reader of the last step, and its number; None: there is none."""
        if not self._tiers:
            return 0, self._context.store.latest()
        found = self._tiers.newest()
        return (0, None) if found is None else (found[0], found[1].step)

    def _newer_than(self, step: int | None, commit: int) -> str | None:
        """Return why the last checkpoint of rank 0 (None: it finds none) is not the last one, or None."""
        while (found := self._newest())[1] not in (None, step):
            source, newest = found
            assert newest is not None
            with suppress(FileNotFoundError):  # another process removed it: there is a later one, or none
                if self._readers[source].store.open_manifest(newest).commit <= commit:
                    return None
                theirs = "no checkpoint" if step is None else f"step {step} as the last one"
                return (
                    f"{self._directory}: rank {self._ranks.rank} finds step {newest}, and rank 0 {theirs}; "
                    "check that the directory is mounted on the machine of rank 0 and is the same one on all "
                    "ranks, and that no other process saves into it meanwhile, then load again on all ranks"
                )
        return None

    def _open_same(self, agree: Callable[..., Any]) -> Found:
        """Open the last checkpoint on all ranks, the same one."""
        begun = self._ranks.collectives()
        for attempt in range(_MAX_AGREEMENTS):
            opened: list[Found] = []
            if attempt > 0 and self._ranks.rank == 0:
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)  # a network filesystem may be behind

            def decide(opened: list[Found] = opened) -> dict[str, Any]:
                while (found := self.choose(None)).step is not None:
                    assert found.step is not None
                    with suppress(FileNotFoundError):
                        manifest = self._readers[found.source].open_manifest(found.step)
                        opened[:] = [found._replace(manifest=manifest)]
                        return {
                            "step": found.step,
                            "source": found.source,
                            "identity": shards.identity(manifest),
                            "commit": manifest.commit,
                        }
                opened[:] = [found]
                return {"step": None, "source": 0, "identity": "", "commit": -1}

            def check(decided: dict[str, Any], opened: list[Found] = opened) -> str | None:
                step = decided["step"]
                opened[:] = [Found(step, None, 0)]
                if step is None:
                    return self._newer_than(None, decided["commit"])
                position = self.choose(step).position
                try:
                    manifest = self._readers[decided["source"]].open_manifest(step)
                except FileNotFoundError:
                    return str(self._missing_on(self._ranks.rank, step))
                opened[:] = [Found(step, position, decided["source"], manifest)]
                if shards.identity(manifest) != decided["identity"]:
                    return str(self._differs_on(self._ranks.rank, step))
                return self._newer_than(step, decided["commit"])

            try:
                differs = agree(decide, check=check)
            except BaseException:
                if opened and opened[0].step is not None:  # other ranks may know that all agree, and load it
                    self._context.begin_load(opened[0].step, begun)
                raise
            if differs is None:
                self._context.rebase(begun)
                return opened[0]
        raise rank_error(differs["rank"], differs["why"])
