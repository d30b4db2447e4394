"""The tiers of one Checkpointer: what is where, what is copied, and whose the directories are."""

import _thread
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from trunkline import _exit_hook
from trunkline._core import CheckpointStore, Engine
from trunkline._errors import Error, Timeout, exception_of
from trunkline._logging import Log
from trunkline._waits import Wait
from trunkline.checkpoint.lock_wait import retry_while_locked
from trunkline.checkpoint.tiers.drain import Drain, DrainStatus, raise_failures
from trunkline.checkpoint.tiers.hung import read_beside
from trunkline.checkpoint.tiers.listing import committed_in, last_number_in
from trunkline.checkpoint.tiers.origin import (
    NAME,
    identity_of,
    is_damaged,
    origin_id,
    origin_of,
    origins_of,
    write_origins,
)
from trunkline.checkpoint.tiers.plan import Commit, newest_of, source_of
from trunkline.checkpoint.tiers.tier import Tier, about_missing_tier, missing_tier

_log = Log("checkpoint")

_Result = TypeVar("_Result")
_Position = tuple[str, int | None, list[tuple[int, int, bytes]]]

_MAX_NAMED = 6  # steps in an error
_POLL_SECONDS = 0.1


def named_steps(steps: Sequence[int]) -> str:
    """Return the steps in words."""
    named = [str(each) for each in steps]
    if len(named) > _MAX_NAMED:
        named[3:-3] = ["..."]
    return f"{'step' if len(steps) == 1 else 'steps'} {', '.join(named)}"


class _Place:
    """A tier, and what this process knows of it."""

    def __init__(self, drain: Drain, fresh: bool) -> None:
        self.drain = drain
        self.fresh = fresh  # what is there goes aside before the first save
        self.is_ours = False  # this process has loaded from it, or saved beside it
        self.origin: str | None = None  # origin_of() it when this process loaded from it, or copied to it

    @property
    def directory(self) -> str:
        return self.drain.tier.directory

    @property
    def store(self) -> CheckpointStore:
        return self.drain.store


class Tiers:
    """The tiers of a Checkpointer, in their order. Without any, all that is here is the directory itself.

    Copies in a tier are this run's if the tier names the directory as its origin (origin.py), if the
    directory's record names the tier (CheckpointStore.tiers), or if this process has loaded from it. If the
    directory itself has no step, the run can go on from those of any tier, as on another machine.
    """

    def __init__(
        self, tiers: Sequence[Tier], store: CheckpointStore, fresh: bool, engine: Engine | None
    ) -> None:
        """Open the tiers, which need not exist. Raises the errors of opening a directory of checkpoints."""
        self._store = store
        self._places = [
            _Place(Drain(tier, CheckpointStore(tier.directory, fresh=fresh), store, engine), fresh)
            for tier in tiers
        ]
        for place in self._places:
            place.drain.connect(
                check_place=lambda place=place: self._check_mounted(place),  # type: ignore[misc]
                check_run=lambda place=place: self._check_run(place),  # type: ignore[misc]
                before_commit=lambda place=place: self._take(place),  # type: ignore[misc]
            )
        self._reading = ""  # what is being read, for a message if that hangs
        self._is_prepared = False
        self._is_recorded = False  # by this process
        self._positions: list[tuple[_Place, str, _Position]] = []
        self._recording = _thread.allocate_lock()  # taken by the threads that save and copy alone
        self.first_number = 1  # of commits: above those of all tiers

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._places)

    def stores(self) -> list[CheckpointStore]:
        """Return the stores of the directory itself, and of all tiers: what indices of sources refer to."""
        return [self._store, *(place.store for place in self._places)]

    # What is where.

    def _beside(self, read: Callable[[], _Result]) -> _Result:
        """Return what read() returns, which only reads. Ctrl-C ends the wait for a tier that hangs."""
        return read_beside(read, lambda: self._reading) if self._places else read()

    def _each_place(self) -> Iterator[_Place]:
        """Yield the tiers, noting which one is being read."""
        for place in self._places:
            self._reading = f"the tier {place.directory}"
            yield place

    def sources(self) -> list[list[Commit]]:
        """Return what is committed in the directory, and in each tier whose copies are this run's."""
        return self._beside(self._list_sources)

    def _list_sources(self) -> list[list[Commit]]:
        self._reading = self._store.directory
        local = committed_in(self._store.directory)
        found = [local]
        for place in self._each_place():
            is_visible = not local or self._has_steps_of_this_run(place)
            found.append(committed_in(place.directory) if is_visible else [])
        return found

    def newest(self) -> tuple[int, Commit] | None:
        """Return the latest step, and the index of its source."""
        return newest_of(self.sources())

    def source_of(self, step: int) -> int:
        """Return the index of the source of a step; 0, the directory itself, if there is no such step."""
        found = source_of(self.sources(), step)
        return 0 if found is None else found[0]

    def steps(self) -> list[int]:
        """Return the steps that are anywhere, ascending."""
        return sorted({each.step for source in self.sources() for each in source})

    def locations(self) -> dict[int, list[str]]:
        """Return the directories that have each step: that of the run first, then the tiers, in order."""
        directories = [store.directory for store in self.stores()]
        found: dict[int, list[str]] = {}
        for directory, source in zip(directories, self.sources(), strict=True):
            for each in source:
                found.setdefault(each.step, []).append(directory)
        return dict(sorted(found.items()))

    # Loading and saving.

    def begin_load(self) -> None:
        """Note what is where, before anything is read.

        Raises FileExistsError if a tier holds steps of another run.
        """
        self._positions = self._beside(self._find_positions)

    def _find_positions(self) -> list[tuple[_Place, str, _Position]]:
        positions = []
        for place, source in zip(self._each_place(), self._list_sources()[1:], strict=True):
            if source:
                positions.append((place, origin_of(place.directory), place.store.position()))
                self._warn_of_other_line(place, source)
                continue
            steps = sorted(each.step for each in committed_in(place.directory))
            if steps and not place.fresh:
                raise self._of_another_run(place, steps)
            if self._is_missing(place):
                _log.warn("%s", about_missing_tier(place.directory))
        return positions

    def _warn_of_other_line(self, place: _Place, source: Sequence[Commit]) -> None:
        """Warn where another run has gone on from the copies in a tier, and this one is further."""
        if self._goes_on_from(place):
            return
        newest = max((each.number for each in committed_in(self._store.directory)), default=0)
        last = max(source, key=lambda each: each.number)
        if newest > last.number:
            _log.warn(
                "another run has gone on from the copies in %s, to step %d; the latest step of %s is newer. "
                "If this run goes on there, its copies count as newer, and those of the other run are "
                "removed as keep= of the tier says; to keep both, name another directory for the tier",
                place.directory,
                last.step,
                self._store.directory,
            )

    def end_load(self) -> None:
        """Note that the run goes on from what begin_load() has found."""
        for place, origin, position in self._positions:
            place.store.continue_from(position)
            place.is_ours, place.origin, place.fresh = True, origin, False
        self._is_prepared = self._is_recorded = False

    def start_over(self, fresh: bool) -> None:
        """Forget what was loaded and saved, as CheckpointStore.start_over()."""
        for place in self._places:
            place.store.start_over(fresh)
            place.is_ours, place.origin, place.fresh = False, None, fresh
        self._is_prepared = self._is_recorded = False

    def check_continues(self, step: int) -> None:
        """Raise FileExistsError if a tier holds steps of another run, or ones that `step` competes with."""

        def check() -> None:
            for place in self._each_place():
                place.store.check_continues(step)
                if not place.is_ours and not place.fresh:
                    self._check_run(place)

        self._beside(check)

    def before_save(self) -> None:
        """Set aside earlier runs with fresh=True; find out above which numbers commits have to be.

        Called by the thread of a save of rank 0 before it locks the directory; does this once for a run.
        """
        if self._is_prepared:
            return
        for place in self._places:
            if place.is_ours:
                continue
            if place.fresh and committed_in(place.directory):
                self._set_aside(place)
            self._check_run(place)
        self.first_number = 1 + max((last_number_in(place.directory) for place in self._places), default=0)
        for place in self._places:
            place.is_ours, place.fresh = True, False
            place.drain.look()  # so that retention does not wait for what was copied before
        self._is_prepared = True

    def after_begin(self) -> None:
        """Put the tiers on record, now that the save has made the directory.

        Does this once: later saves must not depend on the disks of tiers.
        """
        if self._is_recorded:
            return
        self._go_on_here()
        if self._places or self._store.has_copied_tiers():
            self._record()
        self._is_recorded = True

    def after_commit(self) -> None:
        """Let copies begin."""
        for place in self._places:
            place.drain.request()

    def held(self) -> list[int]:
        """Return the steps that retention must leave in the directory, because they are to be copied."""
        return sorted({step for place in self._places for step in place.drain.held()})

    # Copying.

    def status(self) -> list[DrainStatus]:
        """Return how far copying to each tier is."""
        return [place.drain.status() for place in self._places]

    def raise_failure(self, more: str = "") -> None:
        """Raise the error of a copy that has failed, if it was not raised before. more: what to do."""
        raise_failures([place.drain for place in self._places], more)

    def wait(self, timeout: float | None = None) -> None:
        """Copy what is to be copied, and wait for it; raise the first error. Raises Timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._begin_copies()
        if _exit_hook.has_passed():
            self._check_copied()
        for place in self._places:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wait_for(place, left):
                raise Timeout(
                    None,
                    f"copying to {place.directory}: not finished after {timeout} s; it goes on, wait again",
                )
        self.raise_failure()

    def _check_copied(self) -> None:
        """Raise Error if something is still to be copied, and no thread will do so any more."""
        for place in self._places:
            steps = place.drain.to_copy()
            if steps:
                raise Error(
                    None,
                    f"cannot copy {named_steps(steps)} to {place.directory}: the interpreter is exiting. "
                    "Call wait_drained() earlier: exit handlers registered before trunkline was imported run "
                    "too late",
                )

    def _wait_for(self, place: _Place, timeout: float | None) -> bool:
        what = f"copies to {place.directory}"
        with Wait(_log, "wait for copies to a tier", place.directory) as wait:
            return wait.until(place.drain.wait, lambda: what, timeout)

    def _begin_copies(self) -> None:
        """Begin to copy also if this process has neither loaded nor saved: an earlier one has not finished.

        Raises FileExistsError if a tier holds steps of another run.
        """
        if not all(place.is_ours for place in self._places) and committed_in(self._store.directory):
            self.begin_load()
            for place, origin, position in self._positions:
                if not place.fresh and not place.is_ours:
                    self._reading = f"the tier {place.directory}"
                    self._beside(lambda place=place: self._check_run(place))  # type: ignore[misc]
                    place.store.continue_from(position)
                    place.is_ours, place.origin = True, origin
        for place in self._each_place():
            place.drain.raise_again()
            if place.is_ours or not self._beside(lambda place=place: committed_in(place.directory)):  # type: ignore[misc]
                place.drain.request()

    def wait_for_step(self, step: int) -> None:
        """Wait until a step need not stay for a tier; raise the error if copying it fails."""
        if step not in self.held():
            return
        self._begin_copies()
        for place in self._places:
            while step in place.drain.held() and not place.drain.wait(_POLL_SECONDS):
                pass
        self.raise_failure("; the step was not removed: call delete() again to remove it nevertheless")

    # Whose the directories are.

    def _set_aside(self, place: _Place) -> None:
        """Let a save begin and end: before anything else, it moves what is there into a folder."""
        store = place.store
        retry_while_locked(lambda: store.begin(0, [0] * max(1, len(store.volumes)))).abandon()

    def _has_steps_of_this_run(self, place: _Place) -> bool:
        """Whether the steps of a tier were copied from the directory, or continue those that were."""
        own, origins = origin_id(self._store.directory), origins_of(place.directory)
        if own and own in origins:
            return True
        if self._goes_on_from(place):
            return True
        recorded = self._recorded(place)
        if recorded and is_damaged(place.directory):
            return True  # the directory's own record names the tier
        # A copy of a directory that goes on from the tier, such as one that was restored from a backup, and
        # that has not been saved to since.
        return bool(recorded) and recorded == identity_of(place.directory)

    def _goes_on_from(self, place: _Place) -> bool:
        """Whether the newest steps of a tier were copied from the directory, or loaded by this run."""
        origin = origin_of(place.directory)
        if origin and origin == origin_id(self._store.directory):
            return True
        if place.origin is not None and origin == place.origin:
            return True
        recorded = self._recorded(place)
        if not recorded or recorded != identity_of(place.directory):
            return False
        return not self._store.has_copied_tiers()  # a copy of the directory has a copy of its record

    def _recorded(self, place: _Place) -> str:
        """Return identity_of() the tier when the directory's record was written; empty if it is not there."""
        return dict(self._store.tiers()).get(place.directory, "")

    def _check_run(self, place: _Place) -> None:
        """Raise FileExistsError if a tier holds steps that this run does not go on from."""
        steps = sorted(each.step for each in committed_in(place.directory))
        if steps and not self._goes_on_from(place):
            raise self._of_another_run(place, steps)

    def _go_on_here(self) -> None:
        """If the directory is itself a tier of another run, let that one notice that this save goes on."""
        directory = self._store.directory
        before, own = origins_of(directory), origin_id(directory)
        if before and before[-1] != own:
            write_origins(directory, [*(each for each in before if each != own), own])

    def _take(self, place: _Place) -> None:
        """Make the tier this run's, before the first copy is committed. The caller has locked the tier.

        Raises FileExistsError if it holds steps of another run.
        """
        self._check_run(place)
        own = origin_id(self._store.directory)
        if origin_of(place.directory) != own:
            before = origins_of(place.directory) if committed_in(place.directory) else []
            write_origins(place.directory, [*(each for each in before if each != own), own])
        place.origin = own
        self._record()

    def _record(self) -> None:
        with self._recording:
            before, is_copied = self._store.tiers(), self._store.has_copied_tiers()
            # From here on, a copy of a directory is a separate run, whose steps may differ from the tiers.
            known = {} if is_copied else dict(before)
            tiers = [
                (
                    place.directory,
                    (self._goes_on_from(place) and identity_of(place.directory))
                    or known.get(place.directory, ""),
                )
                for place in self._places
            ]
            if tiers != before or is_copied:
                self._store.record_tiers(tiers)

    def _is_missing(self, place: _Place) -> bool:
        return bool(self._recorded(place)) and not os.path.isdir(place.directory)  # noqa: PTH112

    def _check_mounted(self, place: _Place) -> None:
        if self._is_missing(place):
            raise missing_tier(place.directory)

    def _of_another_run(self, place: _Place, steps: list[int]) -> Exception:
        which = "which was" if len(steps) == 1 else "which were"
        why = f"{which} not copied from {self._store.directory}, or another run has gone on from there"
        if is_damaged(place.directory):
            why = f"and {place.directory}/{NAME}, which says whose they are, is damaged"
        return exception_of(
            "system",
            errno.EEXIST,
            f"the tier {place.directory} holds {named_steps(steps)}, {why}; {self._other_run_advice(place)}",
            place.directory,
        )

    def _other_run_advice(self, place: _Place) -> str:
        is_related = not committed_in(self._store.directory) or self._has_steps_of_this_run(place)
        go_on = (
            "call load() first, to go on from them"
            if is_related
            else f"open Checkpointer({place.directory!r}) to load them"
        )
        return (
            "name another directory for the tier, pass fresh=True, which moves them into a separate folder "
            f"and deletes nothing, or {go_on}"
        )
