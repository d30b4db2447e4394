"""What checkpointer_rounds.py is to do: random operations, each a dict, the same for the same seed."""

import errno
import random
from typing import Any

from checkpointer_model import Op
from random_states import seeds

LENGTH = 30  # operations of a round
_VOLUMES = (None, None, None, [], ["v0"], ["v0", "v1"], ["v1"])


def make_plan(seed: int, length: int = LENGTH) -> list[Op]:
    """Return operations; where one makes no sense when it is its turn, it is left out then."""
    return _Planner(seed).plan(length)


class _Planner:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"plan {seed}")
        self._incremental = random.Random(f"incremental {seed}")
        self._states = seeds(self._rng)

    def plan(self, length: int) -> list[Op]:
        ops = [self._open("a", path=0)]
        makers = {
            self._save: 34,
            self._load: 13,
            self._look: 10,
            self._delete: 6,
            self._reopen: 9,
            self._gc: 4,
            self._structure: 6,
            self._starved: 8,
            self._child: 12,
            self._check: 5,
        }
        while len(ops) < length:
            made = self._rng.choices(list(makers), list(makers.values()))[0]()
            ops += made if isinstance(made, list) else [made]
        return ops

    def _slot(self) -> str:
        return self._rng.choice("aaab")

    def _step(self) -> Any:
        return self._rng.choices(
            ["next", "same", self._rng.randint(0, 9), self._rng.randint(10, 19)], [6, 2, 2, 1]
        )[0]

    def _open(self, slot: str, path: int | None = None) -> Op:
        rng = self._rng
        incremental = self._incremental.random() < 0.6
        return {
            "incremental": incremental,
            "full_every": self._incremental.choice([None, None, 2]) if incremental else None,
            "do": "open",
            "slot": slot,
            "path": rng.choice([0, 0, rng.randint(0, 9)]) if path is None else path,
            "keep": rng.choice([1, 2, 3, 4, None]),
            "fresh": rng.random() < 0.15,
            "volumes": rng.choice(_VOLUMES),
        }

    def _reopen(self) -> list[Op]:
        opened = self._open(self._slot())
        load = {"do": "load", "slot": opened["slot"], "step": None}
        return [opened, load] if self._rng.random() < 0.75 else [opened]

    def _save(self, slot: str | None = None) -> Op:
        rng = self._rng
        op: Op = {
            "do": "save",
            "slot": slot or self._slot(),
            "step": self._step(),
            "state": next(self._states),
        }
        op["how"] = rng.choice(["block", "block", "wait", "pending"])
        special = rng.random()
        if special < 0.08:
            op.update(how="wait", cancel=True)
        elif special < 0.2:
            code = rng.choice([errno.EIO, errno.ENOSPC])
            fault = [rng.choice(["write", "write", "sync"]), rng.choice([0, 0, 1, 2, 5]), code]
            op.update(how=rng.choice(["block", "wait"]), fault=fault)
        elif special < 0.26:
            op.update(disturb=rng.getrandbits(30), how=rng.choice(["block", "wait"]))
        return op

    def _load(self, slot: str | None = None) -> Op:
        rng = self._rng
        op: Op = {"do": "load", "slot": slot or self._slot(), "step": rng.choice([None, self._step()])}
        if rng.random() < 0.4:
            op["into"] = True
        op["verify"] = rng.choice([True, True, True, False, "first"])
        if rng.random() < 0.1:
            op["fault"] = ["read", rng.randint(0, 3), errno.EIO]
        return op

    def _look(self, slot: str | None = None) -> Op:
        do = self._rng.choice(["steps", "latest", "verify"])
        return {"do": do, "slot": slot or self._slot(), "step": self._step()}

    def _delete(self, slot: str | None = None) -> Op:
        return {"do": "delete", "slot": slot or self._slot(), "step": self._step()}

    def _gc(self) -> Op:
        return {"do": "gc", "path": self._rng.randint(0, 9), "program": self._rng.random() < 0.5}

    def _check(self) -> Op:
        return {"do": "check"}

    def _structure(self) -> Op:
        rng = self._rng
        do = rng.choice(["copy", "rename", "damage", "lose", "cut"])
        return {"do": do, "path": rng.randint(0, 9), "which": rng.randint(0, 9), "at": rng.random()}

    def _starved(self) -> Op:
        rng = self._rng
        op = rng.choice([self._save, self._load, self._look, self._delete])()
        op.pop("fault", None)
        op.pop("cancel", None)
        op.pop("disturb", None)
        if op["do"] == "save":
            op["how"] = "block"
        return {**op, "fds": rng.randint(0, 12)}

    def _child(self) -> Op:
        rng = self._rng
        inherit = rng.random() < 0.3
        script: list[Op] = [] if inherit else [self._open("x", 0)]
        if not inherit and rng.random() < 0.6:
            script.append({"do": "load", "slot": "x", "step": None})
        makers = [self._save, self._save, self._load, self._look, self._delete]
        for _ in range(rng.randint(1, 4)):
            script.append(rng.choice(makers)("x"))
            if rng.random() < 0.1:
                script.append(self._gc())
        op: Op = {"do": "child", "script": script, "inherit": self._slot() if inherit else None}
        how = rng.random()
        if how < 0.35:
            op["end"] = {"kill": rng.uniform(0, 0.08)}
        elif how < 0.5 and not inherit:
            call = rng.choice(["begin", "link", "commit", "retain", "release", "abandon", "remove"])
            op["end"] = {"exit": [call, rng.choice(["before", "after"])]}
        if rng.random() < 0.6:
            maker = rng.choice([self._save, self._save, self._load, self._look, self._delete])
            op["meanwhile"] = maker()
        for each in [*script, op.get("meanwhile")]:
            if each is not None:
                each["racing"] = True
                each.pop("into", None)
                if each.get("how") == "pending":
                    each["how"] = "wait"
        return op
