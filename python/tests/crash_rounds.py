#!/usr/bin/env python3
"""Cuts saves off at random moments, many times, and looks at what is left.

    unshare --mount python crash_rounds.py {ext4,xfs,volumes,kill} [--incremental] [--rounds N] [--seed N]
        [--directory DIR]

ext4, xfs: the power of a filesystem on a loop device is cut (FS_IOC_SHUTDOWN), with its log written, with
everything written, or with nothing written; then it is mounted again. volumes: the same with the
checkpoints' directory and two volumes on three filesystems, all cut. kill: the saving process is killed with
SIGKILL. After each round every checkpoint that was reported must be there and verify, single files must be
old or new and whole, and saving must go on. Prints a line of counts; the exit status is 0 if all held.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support_crash import History, Places, run_saver
from support_loop import FLUSH_ALL, FLUSH_LOG, FLUSH_NOTHING, LoopFilesystem

_LAZY = [f"trunkline.checkpoint.{name}" for name in ("directory.checkpointer", "load", "save")]
_FLAGS = (FLUSH_NOTHING, FLUSH_LOG, FLUSH_ALL)
_LONGEST_SECONDS = 0.15  # from the first save to the cut: a few saves
_PATIENCE_SECONDS = 60.0


class Rounds:
    """Rounds in the same places, each going on from what the one before has left."""

    def __init__(self, places: Places, seed: int) -> None:
        self._places = places
        self._rng = random.Random(seed)
        # Saving processes are forks of one that has imported everything and started nothing.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["support_crash", *_LAZY])
        self.history = History()
        self.counts: Counter[str] = Counter()

    def one(self, cut: Callable[[random.Random], str], recover: Callable[[], None]) -> None:
        """Save, `cut` at a random moment (returns a word to count, "" to be counted as killed), and check."""
        here, there = self._processes.Pipe(duplex=False)
        step, version = self.history.next_numbers()
        saver = self._processes.Process(
            target=run_saver, args=(there, self._places, self._rng.getrandbits(32), step, version)
        )
        saver.start()
        there.close()
        try:
            self._listen(here, _PATIENCE_SECONDS, until_ready=True)
            self._listen(here, self._rng.uniform(0, _LONGEST_SECONDS))
            if self.history.failed is not None:
                raise AssertionError(f"failed before anything was cut:\n{self.history.failed}")
            how = cut(self._rng)
            if how and self._rng.random() < 0.5:
                self._await_failure(here)
            saver.kill()
            saver.join()
            self._listen(here, _PATIENCE_SECONDS)  # to the end of what it sent
        finally:
            saver.kill()
            saver.join()
            here.close()
        self.counts[how or "killed"] += 1
        self.counts["while_saving"] += bool(self.history.begun)
        recover()
        self.history.check(self._places)

    def _listen(self, connection: Connection, seconds: float, until_ready: bool = False) -> None:
        deadline = time.monotonic() + seconds
        try:
            while connection.poll(max(0.0, deadline - time.monotonic())):
                self.history.hear(connection.recv())
                if until_ready and (self.history.ready or self.history.failed):
                    return
        except EOFError:
            return
        if until_ready:
            raise AssertionError("the saving process did not begin")

    # On a filesystem that has failed, saves must raise a trunkline.Error, not hang.
    def _await_failure(self, connection: Connection) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self.history.failed is None:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError("saves go on, or hang, on a filesystem that is shut down")
            self.history.hear(connection.recv())
        assert self.history.failed_typed, self.history.failed
        self.counts["failed_by_itself"] += 1


def cut_power(filesystems: list[LoopFilesystem]) -> Callable[[random.Random], str]:
    """Make the function that cuts the power of all."""

    def cut(rng: random.Random) -> str:
        flag = rng.choice(_FLAGS)
        for each in rng.sample(filesystems, len(filesystems)):
            each.shut_down(flag)
        return ("flush_all", "flush_log", "flush_nothing")[flag]

    return cut


def remount(filesystems: list[LoopFilesystem]) -> Callable[[], None]:
    """Make the function that brings all back."""

    def recover() -> None:
        for each in filesystems:
            each.unmount()
        for each in filesystems:
            each.mount()

    return recover


def run(scenario: str, rounds: int, seed: int, directory: str | None, incremental: bool) -> dict[str, Any]:
    """Run all rounds, and return what to print."""
    with ExitStack() as stack:
        if scenario == "kill":
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
            places = Places(root / "steps", None, root, incremental)
            cut: Callable[[random.Random], str] = lambda rng: ""  # noqa: E731
            recover: Callable[[], None] = lambda: None  # noqa: E731
        else:
            kinds = {"volumes": ["ext4", "xfs", "ext4"]}.get(scenario, [scenario])
            filesystems = [stack.enter_context(LoopFilesystem(kind)) for kind in kinds]
            root = filesystems[0].path
            volumes = [each.path / "volume" for each in filesystems[1:]] or None
            for volume in volumes or []:
                volume.mkdir()
            places = Places(root / "steps", volumes, root, incremental)
            cut, recover = cut_power(filesystems), remount(filesystems)
            recover()  # so that what was made until here is not what is cut
        each = Rounds(places, seed)
        begun = time.monotonic()
        try:
            for _ in range(rounds):
                each.one(cut, recover)
        except BaseException:
            print(f"{scenario}: seed {seed}, after {dict(each.counts)}", file=sys.stderr)
            raise
        return {
            "scenario": scenario,
            "seed": seed,
            "rounds": rounds,
            "reported": each.history.reports,
            "linked": each.history.linked,
            **each.counts,
            "seconds": round(time.monotonic() - begun, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut saves off at random moments.")
    parser.add_argument("scenario", choices=["ext4", "xfs", "volumes", "kill"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--incremental", action="store_true", help="write only what changed")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--directory", help="where to save (kill; default: a temporary directory)")
    options = parser.parse_args()
    # So that filesystems are unmounted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # The process that saving processes are forked from finds this folder only so.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print(
        json.dumps(
            run(options.scenario, options.rounds, options.seed, options.directory, options.incremental)
        )
    )


if __name__ == "__main__":
    main()
