#!/usr/bin/env python3
"""Random operations on directories of checkpoints, compared with a model after each.

    python python/tests/checkpointer_rounds.py [--seconds N] [--seed N] [--directory DIR]
    python python/tests/checkpointer_rounds.py --replay FILE

Saves (blocking, in the background, cancelled, with failing disks and too few file descriptors), loads,
deletes, collections, reopenings, copies and damage, in one process and in a second one that works at the same
time, or is killed. What fails is printed with its seed, and as a list of operations that --replay takes, as
short as can be.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpointer_model import Directory, Model, Op, Result, explore
from checkpointer_plans import LENGTH, make_plan
from checkpointer_world import (
    World,
    copy_directory,
    manifest_in,
    newest_manifest,
    observe,
    shards_of,
    step_of,
)
from random_states import is_tensorless, state_of

_SHRINK_SECONDS = 120.0
_MOST_DIRECTORIES = 4


class Mismatch(AssertionError):
    """The library and the model differ."""


class Round:
    """Operations on directories of their own, and every model that fits what came of them so far."""

    def __init__(self, root: Path, counts: Counter[str]) -> None:
        self.world = World(root)
        self.models = [Model()]
        self.counts = counts
        self.log: list[str] = []
        self._root = root

    def run(self, plan: list[Op]) -> None:
        """Do all operations. Raises Mismatch."""
        for op in [*plan, {"do": "check"}]:
            resolved = self._resolve(op)
            if resolved is not None:
                self.log.append(json.dumps(resolved))
                self._do(resolved)
        for slot in list(self.world.slots):
            self.world.drop(slot)

    def _do(self, op: Op) -> None:
        do = op["do"]
        self.counts[do] += 1
        if do in ("copy", "rename", "damage", "lose", "cut", "check", "child"):
            self._settle()
            getattr(self, f"_{do}")(op)
            return
        slot = op.get("slot")
        for other in list(self.world.pending):
            if other != slot or do in ("open", "gc") or op.get("fds") is not None:
                self._settle(other)
        before = self.world.pending.pop(slot, None) if slot is not None else None
        if before is not None:
            op.pop("into", None)  # of which state is open
        result = self.world.perform(op)
        if before is None:
            if result != ("pending", None):
                self._compare([[(op, result)]])
            return
        self._compare_after(before[0], self.world.settled(before[1]), op, result)

    def _compare_after(self, earlier: Op, its: Result, op: Op, result: Result) -> None:
        """Compare what came of an operation during a save of the same Checkpointer in the background."""
        if op["do"] == "save":
            self._compare([[(earlier, its)]], on_disk=False)  # the later one may be there already
            if its[0] == "error" and result != its:
                raise Mismatch(f"save gave {result} after an earlier one failed with {its}")
            if its[0] == "ok" and result != ("pending", None):
                self._compare([[(op, result)]])
        elif op["do"] in ("load", "delete"):
            self._compare([[(earlier, its), (op, result)]])
        else:
            self._compare([[(earlier, its)], [(op, result)]])

    def _settle(self, *slots: str) -> None:
        for slot in slots or list(self.world.pending):
            op, handle = self.world.pending.pop(slot)
            self._compare([[(op, self.world.settled(handle))]])

    def _count(self, op: Op, result: Result | None) -> None:
        how = "ended" if result is None else result[0] if result[0] != "error" else str(result[1])[:20]
        self.counts[f"{op['do']}: {how}"] += 1

    def _compare(self, processes: list[Any], on_disk: bool = True) -> None:
        """Keep the models that fit what was returned, and what is on disk."""
        for op, result in (each for done in processes for each in done):
            self._count(op, result)
            self.log[-1] += f"\n      {op['do']} -> {result}"
        after = explore(self.models, *processes)
        trace = f"\n{self.world.trace}" if self.world.trace else ""
        if not after:
            raise Mismatch(f"the model has no such outcome{trace}")
        self.models = self._matching(after) if on_disk else after
        if on_disk:
            self._compare_api()

    def _matching(self, models: list[Model]) -> list[Model]:
        seen = {
            path.relative_to(self._root).as_posix(): observe(path)
            for pattern in ("d*", "d*/aside-*", "d*/aside-*/aside-*")
            for path in self._root.glob(pattern)
        }
        found = {}
        for model in models:
            same = matched(model, seen)
            if same is not None:
                found[same.key()] = same
        if not found:
            possible = "\n".join(sorted({repr(_shown(model)) for model in models})[:10])
            raise Mismatch(f"on disk is\n{seen}\npossible was\n{possible}\n{self.world.trace}")
        return list(found.values())

    def _compare_api(self) -> None:
        for slot, checkpointer in self.world.slots.items():
            if slot in self.world.pending:
                continue
            path = self.models[0].opened[slot].path
            entries = self.models[0].directory(path).entries
            steps, latest = checkpointer.steps(), checkpointer.latest()
            wanted = sorted(entry.step for entry in entries), entries[-1].step if entries else None
            if (steps, latest) != wanted:
                raise Mismatch(f"slot {slot}: steps() and latest() are {steps}, {latest}, not {wanted}")

    # What an operation means now.

    def _resolve(self, op: Op) -> Op | None:
        model = self.models[0]
        if op["do"] == "child":
            return self._resolve_child(op)
        op = dict(op)
        if isinstance(op.get("path"), int):
            paths = sorted(path for path, each in model.dirs.items() if each.run or each.entries)
            op["path"] = paths[op["path"] % len(paths)] if op["path"] and paths else "d0"
            if op["do"] == "gc" and op["path"] not in paths:
                return None
        if "slot" in op and op["do"] != "open":
            if op["slot"] not in model.opened and op["slot"] != "x":
                return None
            path = model.opened[op["slot"]].path if op["slot"] in model.opened else "d0"
            op["step"] = _step_now(op.get("step"), model.directory(path))
        if op["do"] == "save":
            op["has_shards"] = not is_tensorless(state_of(op["state"]))
        return op

    def _resolve_child(self, op: Op) -> Op | None:
        if op["inherit"] is not None and op["inherit"] not in self.models[0].opened:
            return None
        script = [self._resolve(each) for each in op["script"]]
        resolved = {**op, "script": [each for each in script if each is not None]}
        if op.get("meanwhile"):
            resolved["meanwhile"] = self._resolve(op["meanwhile"])
        return resolved

    # Operations that the library has no part in, or a second process.

    def _child(self, op: Op) -> None:
        if op["inherit"] is not None:
            self.world.slots["x"] = self.world.slots[op["inherit"]]
            for model in self.models:
                model.opened["x"] = model.opened[op["inherit"]]
        done, result = self.world.run_child(op["script"], op.get("end"), op.get("meanwhile"))
        self.world.slots.pop("x", None)
        for (each, its), number in zip(done, range(len(done)), strict=True):
            if each["do"] == "open" and its is not None and its[0] == "error":
                done = done[: number + 1]  # what followed had nothing to work with
                break
        processes = [done]
        if op.get("meanwhile"):
            processes.append([(op["meanwhile"], result)])
        slots = {slot: each for slot, each in self.world.slots.items() if slot != "x"}
        self.world.slots = slots
        self._compare(processes)
        for model in self.models:
            model.opened.pop("x", None)

    def _copy(self, op: Op) -> None:
        names = [f"d{number}" for number in range(_MOST_DIRECTORIES)]
        target = next((name for name in names if not (self._root / name).exists()), None)
        source = op["path"].split("/")[0]
        if not (self._root / source).exists() or target is None:
            return
        copy_directory(self._root / source, self._root / target)
        for model in self.models:
            for path, found in list(model.dirs.items()):
                if path == source or path.startswith(f"{source}/"):
                    _copy_in_model(model, path, found, target + path[len(source) :])

    def _rename(self, op: Op) -> None:
        source, model = op["path"].split("/")[0], self.models[0]
        has_copies = any(each.belongs_to_another() for each in model.dirs.values())
        target = f"{source}r"
        if not (self._root / source).exists() or has_copies or (self._root / target).exists():
            return
        (self._root / source).rename(self._root / target)
        for model in self.models:
            for path in list(model.dirs):
                if path == source or path.startswith(f"{source}/"):
                    model.dirs[target + path[len(source) :]] = model.dirs.pop(path)
            for slot, opened in list(model.opened.items()):
                if opened.path == source or opened.path.startswith(f"{source}/"):
                    model.opened.pop(slot)
                    self.world.drop(slot)

    def _damage(self, op: Op) -> None:
        """Flip a bit of a shard; "lose": remove it; "cut": cut its manifest off."""
        model = self.models[0]
        entries = [each for each in model.directory(op["path"]).entries if not each.has_bad_manifest]
        if op["do"] != "cut":
            entries = [each for each in entries if model.shards.get(each.shards) == "whole"]
        if not entries:
            return
        entry = entries[op["which"] % len(entries)]
        directory = self._root / op["path"]
        newest = newest_manifest(directory / f"step-{entry.step:08}")
        assert newest is not None
        if op["do"] == "cut":
            os.truncate(newest[1], newest[1].stat().st_size // 2)
            for model in self.models:
                found = model.dirs[op["path"]]
                bad = tuple(
                    replace(e, has_bad_manifest=e == entry or e.has_bad_manifest) for e in found.entries
                )
                model.dirs[op["path"]] = replace(found, entries=bad)
            return
        manifest = manifest_in(newest[1])
        shards = shards_of(directory, manifest)
        shard = shards[op["which"] % len(shards)]
        if op["do"] == "lose":
            shard.unlink()
        else:
            # Of shards of earlier commits, a step needs a part.
            own = [path for path, its in zip(shards, manifest["shards"], strict=True) if "commit" not in its]
            if not own:
                return
            shard = own[op["which"] % len(own)]
            contents = bytearray(shard.read_bytes())
            shard.unlink()  # other steps may share it
            contents[int(op["at"] * len(contents))] ^= 0x10
            shard.write_bytes(contents)
        for model in self.models:
            model.shards[entry.shards] = "gone" if op["do"] == "lose" else "damaged"

    _lose = _cut = _damage

    def _check(self, op: Op) -> None:
        """Load everything, and look for files that nothing needs."""
        for path, found in sorted(self.models[0].dirs.items()):
            if found.run is None and not found.entries:
                continue
            opened = {"do": "open", "slot": "z", "path": path, "keep": None, "fresh": False, "volumes": None}
            self._do_quietly(opened)
            for entry in found.entries:
                self._do_quietly({"do": "load", "slot": "z", "step": entry.step})
                self._do_quietly({"do": "verify", "slot": "z", "step": entry.step})
            self.world.drop("z")
            for model in self.models:
                model.opened.pop("z", None)
            if not (found.belongs_to_another() or found.may_belong_to_another()):
                if not (self._root / path / "lock").exists():  # then opening it collects nothing
                    self._do_quietly({"do": "gc", "path": path, "program": False})
                _check_no_debris(self._root / path, found)

    def _do_quietly(self, op: Op) -> None:
        self._compare([[(op, self.world.perform(op))]])


def _check_no_debris(directory: Path, found: Directory) -> None:
    """Nothing is there but what belongs to a checkpoint."""
    bad = {entry.step for entry in found.entries if entry.has_bad_manifest}
    for folder in directory.glob("step-*"):
        step, newest = step_of(folder), newest_manifest(folder)
        if step in bad:
            continue
        if newest is None:
            raise Mismatch(f"debris: {folder} holds {sorted(each.name for each in folder.iterdir())}")
        known = {newest[1], *shards_of(directory, manifest_in(newest[1]))}
        more = set(folder.iterdir()) - known
        if more:
            raise Mismatch(f"debris: {sorted(map(str, more))}")
    others = {each.name for each in directory.iterdir() if not each.name.startswith(("step-", "aside-"))}
    if others - {"lock", "trunkline-checkpoints.json"}:
        raise Mismatch(f"debris: {others} in {directory}")


def _copy_in_model(model: Model, path: str, found: Directory, target: str) -> None:
    entries = []
    for entry in found.entries:
        if entry.shards and not entry.on_volumes:
            copied = replace(entry, shards=f"{entry.shards}>{target}")
            model.shards[copied.shards] = model.shards[entry.shards]
            entry = copied
        entries.append(entry)
    is_copy = found.is_copy or found.had_volumes
    model.dirs[target] = replace(found, entries=tuple(entries), is_copy=is_copy)


def _step_now(wanted: Any, found: Directory) -> int | None:
    """Return the number of a step: "next", "same", 10 and more: that of a checkpoint, else itself."""
    steps = [entry.step for entry in found.entries]
    if wanted == "next":
        return max(steps, default=-1) + 1
    if wanted == "same":
        return steps[-1] if steps else 0
    if isinstance(wanted, int) and wanted >= 10 and steps:
        return steps[wanted % len(steps)]
    return wanted


def _shown(model: Model) -> Any:
    return {
        path: (each.run, [(e.step, None if e.has_bad_manifest else e.state) for e in each.entries])
        for path, each in model.dirs.items()
    }


def matched(model: Model, seen: dict[str, Any]) -> Model | None:
    """Return the model with the names that are on disk where it has "?"; None if it is another one."""
    names: dict[str, str] = {}
    rest = dict(seen)
    known = {each.run for each in model.dirs.values()}
    for path, (run, entries) in _shown(model).items():
        parent = path.rpartition("/")[0]
        there: str | None = path
        if "/aside-?" in path:
            there = next(
                (
                    each
                    for each, (_, its) in rest.items()
                    if each not in model.dirs and each.rpartition("/")[0] == parent and its == entries
                ),
                None,
            )
            if there is None and not entries:
                names[path] = ""
                continue
        if there is None:
            return None
        its_run, its_entries = rest.pop(there, (None, []))
        run = names.get(run, run) if run else run
        if its_entries != entries or (run is None) != (its_run is None):
            return None
        if run is not None and run.startswith("?"):
            if its_run in known or its_run in names.values():
                return None
            names[run] = its_run
        elif run != its_run:
            return None
        names[path] = there
    if any(entries for _, entries in rest.values()):
        return None
    return _renamed(model, names)


def _renamed(model: Model, names: dict[str, str]) -> Model:
    changed = model.copy()
    changed.dirs = {
        names[path]: replace(each, run=names.get(each.run or "", each.run))
        for path, each in model.dirs.items()
        if names[path]
    }
    changed.opened = {
        slot: replace(each, run=names.get(each.run or "", each.run)) for slot, each in model.opened.items()
    }
    return changed


def fails(plan: list[Op], directory: str | None, counts: Counter[str]) -> str | None:
    """Run a plan in a new directory, and say how it failed."""
    with tempfile.TemporaryDirectory(prefix="checkpointer-rounds-", dir=directory) as root:
        a_round = Round(Path(root), counts)
        try:
            a_round.run(plan)
        except AssertionError as error:
            numbered = [f"{number:4}  {line}" for number, line in enumerate(a_round.log)]
            return "\n".join([*numbered, f"{type(error).__name__}: {error}"])
    return None


def _why(failed: str | None) -> str | None:
    return failed and failed[failed.rindex("Mismatch") if "Mismatch" in failed else 0 :][:30]


def shrink(plan: list[Op], directory: str | None) -> list[Op]:
    """Leave out operations for as long as the rest fails."""
    deadline = time.monotonic() + _SHRINK_SECONDS
    why = _why(fails(plan, directory, Counter()))
    if why is None:  # it depends on who came first
        return plan
    size = max(1, len(plan) // 2)
    while size and time.monotonic() < deadline:
        at = 0
        while at < len(plan) and time.monotonic() < deadline:
            shorter = plan[:at] + plan[at + size :]
            if why == _why(fails(shorter, directory, Counter())):
                plan = shorter
            else:
                at += size
        size //= 2
    return plan


def run_seed(seed: int, directory: str | None, counts: Counter[str], length: int = LENGTH) -> None:
    """Run the plan of a seed. Raises Mismatch, which shows what to replay."""
    plan = make_plan(seed, length)
    failed = fails(plan, directory, counts)
    if failed is None:
        return
    shorter = shrink(plan, directory)
    again = fails(shorter, directory, Counter()) or f"(only sometimes; the first time it was)\n{failed}"
    raise Mismatch(f"seed {seed}:\n{again}\nto replay it:\n{json.dumps(shorter)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations on directories of checkpoints.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, help="so many rounds, instead of --seconds")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--length", type=int, default=LENGTH, help="operations in a round")
    parser.add_argument("--directory", help="where to save (default: a temporary directory)")
    parser.add_argument("--replay", help="a file with a list of operations in JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    if options.replay:
        failed = fails(json.loads(Path(options.replay).read_text()), options.directory, counts)
        print(failed or "passed")
        sys.exit(1 if failed else 0)
    begun = time.monotonic()
    rounds = failures = 0
    while rounds < options.rounds if options.rounds else time.monotonic() < begun + options.seconds:
        try:
            run_seed(options.seed + rounds, options.directory, counts, options.length)
        except Mismatch as error:
            failures += 1
            print(error, flush=True)
        rounds += 1
    seconds = round(time.monotonic() - begun, 1)
    print(json.dumps({"seed": options.seed, "rounds": rounds, "failures": failures, "seconds": seconds}))
    print(json.dumps(dict(sorted(counts.items()))))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
