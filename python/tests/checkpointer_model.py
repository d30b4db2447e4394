"""What a directory of checkpoints promises, as plain Python: the model for test_checkpointer_model.py.

A Model is what is on disk and what each open Checkpointer knows of it. advance() takes one operation one step
further, as the documents describe it (docs/checkpoints.md, docs/formats/checkpoint.md): a reader may look
between any two steps of a save, and a crash may come there. explore() follows all orders in which the
operations of several processes can have happened, and returns every Model that fits what they returned.
Checkpoints are identified by the numbers of their states (random_states.py), no two of which are equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

Op: TypeAlias = dict[str, Any]  # "do" and arguments: made by checkpointer_rounds.py
Result: TypeAlias = tuple[str, Any]  # ("ok", value) or ("error", kind)
Phase: TypeAlias = tuple[Any, ...]

START: Phase = ("start",)
FAILED_WITH = {"fault": "io", "cancel": "cancelled"}  # keys of a save that may fail, and how


@dataclass(frozen=True)
class Entry:
    """A checkpoint in a directory."""

    step: int
    state: int
    shards: str  # a key of Model.shards; "" where there is none
    on_volumes: bool
    has_bad_manifest: bool = False


@dataclass(frozen=True)
class Directory:
    """A directory of checkpoints; also one that does not exist yet."""

    run: str | None = None  # the id of its descriptor; "?1": one that was not looked at yet
    entries: tuple[Entry, ...] = ()  # in the order of their commits
    volumes: tuple[str, ...] = ()
    had_volumes: bool = False
    is_copy: bool = False  # and the original is still there
    is_half_aside: bool = False  # a run was set aside in it, and its volumes may not be the folder's

    def entry(self, step: int) -> Entry | None:
        """Return the checkpoint of a step."""
        return next((each for each in self.entries if each.step == step), None)

    def without(self, *entries: Entry) -> "Directory":
        """Return it without some checkpoints."""
        return replace(self, entries=tuple(each for each in self.entries if each not in entries))

    def belongs_to_another(self) -> bool:
        """Whether its shards on volumes are those of the original."""
        return self.is_copy and self.had_volumes

    def may_belong_to_another(self) -> bool:
        """Whether they may be: the last of setting aside is that they become those of the folder."""
        return self.is_half_aside and self.had_volumes


@dataclass(frozen=True)
class Opened:
    """A Checkpointer."""

    path: str
    keep: int | None
    fresh: bool
    volumes: tuple[str, ...] | None
    incremental: bool = False
    seen_volumes: tuple[str, ...] = ()
    run: str | None = None  # of which `known` is
    known: frozenset[int] = frozenset()  # states that it loaded or saved


@dataclass
class Model:
    """All directories and Checkpointers."""

    dirs: dict[str, Directory] = field(default_factory=dict)
    opened: dict[str, Opened] = field(default_factory=dict)
    shards: dict[str, str] = field(default_factory=dict)  # "whole", "damaged" or "gone"
    lock: dict[str, str] = field(default_factory=dict)  # by the path of a directory: who has it
    runs: int = 0

    def copy(self) -> "Model":
        """Return one that can be changed."""
        return Model(dict(self.dirs), dict(self.opened), dict(self.shards), dict(self.lock), self.runs)

    def key(self) -> str:
        """Return a text that is equal for equal models."""
        known = [(slot, each, sorted(each.known)) for slot, each in sorted(self.opened.items())]
        return repr((sorted(self.dirs.items()), known, sorted(self.shards.items()), self.lock))

    def new_run(self) -> str:
        """Return an id that no descriptor has."""
        self.runs += 1
        return f"?{self.runs}"

    def directory(self, path: str) -> Directory:
        """Return what is at a path."""
        return self.dirs.get(path, Directory())

    def change(self, slot: str, **changes: Any) -> None:
        """Change what a Checkpointer knows."""
        self.opened[slot] = replace(self.opened[slot], **changes)

    def remove(self, path: str, entry: Entry) -> None:
        """Remove a checkpoint with its shards."""
        self.dirs[path] = self.dirs[path].without(entry)
        if entry.shards:
            self.shards[entry.shards] = "gone"

    def refuses(self, slot: str, step: int) -> bool:
        """Whether a save of the step meets checkpoints that the Checkpointer neither loaded nor saved."""
        opened = self.opened[slot]
        found = self.directory(opened.path)
        if opened.fresh:
            return False
        if opened.run != found.run and opened.known:
            return bool(found.entries)
        return any(
            entry.step >= step and (opened.run != found.run or entry.state not in opened.known)
            for entry in found.entries
        )

    def doomed(self, slot: str, saved: int) -> list[Entry]:
        """Return what retention removes after a save of the step `saved`, in this order."""
        opened = self.opened[slot]
        counted = [
            entry
            for entry in self.dirs[opened.path].entries
            if not entry.has_bad_manifest and entry.state in opened.known
        ]
        counted.sort(key=lambda entry: entry.step <= saved)  # otherwise as they are
        return [] if opened.keep is None else counted[: -opened.keep]


Step: TypeAlias = tuple[Model, Phase, Result | None]  # after a step; the result if it was the last


def advance(model: Model, op: Op, phase: Phase, who: str, racing: bool) -> Iterator[Step]:
    """Yield what can come of the next step of an operation; nothing while it waits for a lock."""
    path = op["path"] if "path" in op else model.opened[op["slot"]].path
    holder = model.lock.get(path)
    may_wait = holder is not None and holder != who
    steps = _STEPS[op["do"]]
    if may_wait and steps in (_save, _delete, _gc) and phase != START:
        if racing:
            yield model, phase, ("ok" if steps is _gc else "error", "busy")
        return
    for step in steps(model.copy(), op, phase, path, who):
        if step[2] is not None:
            step[0].lock = {each: its for each, its in step[0].lock.items() if its != who}
        yield step
    if op.get("fds") is not None and steps is not _open:
        stopped = model.copy()
        stopped.lock = {each: its for each, its in stopped.lock.items() if its != who}
        yield stopped, phase, ("error", "fds")


def _save(model: Model, op: Op, phase: Phase, path: str, who: str) -> Iterator[Step]:
    """start: looked at without the lock. lock: looked at again, and described. commit. retain: one by one."""
    slot, step = op["slot"], op["step"]
    found = model.directory(path)
    opened = model.opened[slot]
    if phase[0] == "start":
        if model.refuses(slot, step):
            yield model, phase, ("error", "exists")
        yield model, ("lock",), None
    elif phase[0] == "lock":
        if model.refuses(slot, step):
            yield model, phase, ("error", "exists")
        elif found.belongs_to_another():
            yield model, phase, ("error", "unsupported")
        else:
            if found.may_belong_to_another():
                yield model.copy(), phase, ("error", "unsupported")
            model.lock[path] = who
            if opened.fresh and found.entries:
                yield model, ("aside", f"{path}/aside-{model.new_run()}"), None
            else:
                yield model, ("forget" if opened.run != found.run else "describe",), None
    elif phase[0] == "aside":
        yield from _set_aside(model, phase, path, opened)
    elif phase[0] == "aside is whole":
        folder = model.dirs[phase[1]]
        # Which shards on volumes are its own, a damaged manifest does not say.
        is_unclear = any(entry.has_bad_manifest for entry in folder.entries)
        model.dirs[phase[1]] = replace(folder, is_half_aside=is_unclear)
        yield model, ("forget",), None
    elif phase[0] == "forget":
        model.change(slot, known=frozenset())
        yield model, ("describe",), None
    elif phase[0] == "describe":
        volumes = opened.volumes
        if volumes is None:
            volumes = found.volumes if found.run is not None else opened.seen_volumes
        run = found.run or model.new_run()
        had = found.had_volumes or bool(found.volumes) or bool(volumes)
        model.dirs[path] = replace(found, run=run, volumes=volumes, had_volumes=had)
        yield model, ("begin",), None
    elif phase[0] == "begin":
        model.change(slot, run=found.run, fresh=False, seen_volumes=found.volumes)
        yield model, ("commit",), None
    elif phase[0] == "commit":
        yield from _commit(model, op, phase, path, found)
    else:
        yield from _retain(model, op, phase, path)


def _set_aside(model: Model, phase: Phase, path: str, opened: Opened) -> Iterator[Step]:
    """The folder; another id for the directory; then each step moves."""
    folder, found = phase[1], model.dirs[path]
    if len(phase) == 2:
        run = found.run or model.new_run()
        model.dirs[folder] = Directory(run, (), found.volumes, found.had_volumes, is_half_aside=True)
        yield model, (*phase, found.entries), None
    elif len(phase) == 3:
        volumes = found.volumes if opened.volumes is None else opened.volumes
        run = model.new_run()
        model.dirs[path] = replace(found, run=run, volumes=volumes, had_volumes=bool(volumes))
        yield model, (*phase, *(entry.step for entry in found.entries)), None
    else:
        entry = found.entry(phase[3])
        moved = (*model.dirs[folder].entries, entry)
        in_order = tuple(each for each in phase[2] if each in moved)
        model.dirs[folder] = replace(model.dirs[folder], entries=in_order)
        model.dirs[path] = replace(found, entries=tuple(each for each in found.entries if each != entry))
        if len(phase) > 4:
            yield model, (*phase[:3], *phase[4:]), None
            return
        yield model.copy(), ("aside is whole", folder), None


def _commit(model: Model, op: Op, phase: Phase, path: str, found: Directory) -> Iterator[Step]:
    for key, kind in FAILED_WITH.items():
        if op.get(key):
            failed = model.copy()
            yield failed, phase, ("error", kind)
    shards = f"{op['state']}" if op["has_shards"] else ""
    entry = Entry(op["step"], op["state"], shards, bool(found.volumes))
    replaced = found.entry(op["step"])
    may_link_damage = bool(shards) and _links_damage(model, op["slot"], found)
    if shards:
        model.shards[shards] = "whole"
    if replaced is not None:
        found = found.without(replaced)
        if replaced.shards:
            model.shards[replaced.shards] = "gone"
    model.dirs[path] = replace(found, entries=(*found.entries, entry))
    model.change(op["slot"], known=model.opened[op["slot"]].known | {op["state"]})
    if may_link_damage:
        damaged = model.copy()
        damaged.shards[shards] = "damaged"
        yield damaged, ("retain", *damaged.doomed(op["slot"], op["step"])), None
    yield model, ("retain", *model.doomed(op["slot"], op["step"])), None


def _links_damage(model: Model, slot: str, found: Directory) -> bool:
    """Whether a save may link a damaged shard: it does not read what the last one has written."""
    if not model.opened[slot].incremental or not found.entries:
        return False
    base = found.entries[-1]
    return not base.has_bad_manifest and model.shards.get(base.shards) == "damaged"


def _retain(model: Model, op: Op, phase: Phase, path: str) -> Iterator[Step]:
    if len(phase) == 1:
        yield model, phase, ("ok", None)
        return
    entry, rest = phase[1], ("retain", *phase[2:])
    if op.get("fds") is not None:
        yield model.copy(), rest, None
        kept = model.copy()
        kept.dirs[path] = kept.dirs[path].without(entry)
        yield kept, rest, None
    model.remove(path, entry)
    yield model, rest, None


def _load(model: Model, op: Op, phase: Phase, path: str, who: str) -> Iterator[Step]:
    """choose a step, and remember what there is at that moment; read."""
    found = model.directory(path)
    if phase[0] == "start":
        step = op.get("step")
        if step is None:
            if not found.entries:
                yield model, phase, ("error", "missing")
                return
            step = found.entries[-1].step
        states = tuple(entry.state for entry in found.entries)
        yield model, ("read", step, found.run, states), None
    else:
        entry = found.entry(phase[1])
        if entry is None and op.get("step") is None:
            yield model, START, None
        elif entry is None:
            yield model, phase, ("error", "missing")
        else:
            before = model.copy()
            result = _readable(model, entry, op.get("verify", True))
            if result[0] == "ok":
                model.change(op["slot"], run=phase[2], known=frozenset(phase[3]), fresh=False)
            yield model, phase, result
            if (
                result[0] == "ok"
                and op.get("verify") is False
                and model.shards.get(entry.shards) == "damaged"
            ):
                yield model.copy(), phase, ("ok", "damaged")
            if op.get("fault"):
                yield before, phase, ("error", "io")


def _readable(model: Model, entry: Entry, verify: Any) -> Result:
    shards = model.shards.get(entry.shards, "whole")
    if entry.has_bad_manifest or shards == "gone" or (shards == "damaged" and verify):
        return "error", "corrupt"
    return "ok", entry.state


def _verify(model: Model, op: Op, phase: Phase, path: str, who: str) -> Iterator[Step]:
    entry = model.directory(path).entry(op["step"])
    result = ("error", "missing") if entry is None else _readable(model, entry, True)
    yield model, phase, ("ok", None) if result[0] == "ok" else result


def _steps(model: Model, op: Op, phase: Phase, path: str, who: str) -> Iterator[Step]:
    yield model, phase, ("ok", sorted(entry.step for entry in model.directory(path).entries))


def _latest(model: Model, op: Op, phase: Phase, path: str, who: str) -> Iterator[Step]:
    entries = model.directory(path).entries
    yield model, phase, ("ok", entries[-1].step if entries else None)


def _delete(model: Model, op: Op, phase: Phase, path: str, who: str) -> Iterator[Step]:
    found = model.directory(path)
    entry = found.entry(op["step"])
    if phase == START:
        if entry is None:
            yield model, phase, ("error", "missing")
        else:
            yield model, ("lock",), None
    elif phase[0] == "clean":  # with the lock, and to others the checkpoint has gone
        yield model, phase, ("ok", None)
    elif entry is None:
        yield model, phase, ("error", "missing")
    elif found.belongs_to_another():
        yield model, phase, ("error", "unsupported")
    else:
        if found.may_belong_to_another():
            yield model.copy(), phase, ("error", "unsupported")
        if op.get("fds") is not None:
            kept = model.copy()
            kept.dirs[path] = kept.dirs[path].without(entry)
            yield kept, ("lock",), ("error", "fds")
        model.lock[path] = who
        model.remove(path, entry)
        yield model, ("clean",), None


def _gc(model: Model, op: Op, phase: Phase, path: str, who: str) -> Iterator[Step]:
    if phase == START:
        yield model, ("lock",), None
        return
    found = model.directory(path)
    if not found.belongs_to_another():
        yield model, phase, ("ok", None)
    if found.belongs_to_another() or found.may_belong_to_another():
        yield model, phase, ("error", "unsupported")


def _open(model: Model, op: Op, phase: Phase, path: str, who: str) -> Iterator[Step]:
    found = model.directory(path)
    volumes = None if op["volumes"] is None else tuple(op["volumes"])
    seen = found.volumes if found.run is not None or volumes is None else volumes
    model.opened.pop(op["slot"], None)
    if volumes is not None and volumes != found.volumes:
        if found.belongs_to_another() or found.may_belong_to_another():
            yield model.copy(), phase, ("error", "unsupported")
        if found.belongs_to_another():
            return
    if op.get("fds") is not None:
        yield model.copy(), phase, ("error", "fds")
    model.opened[op["slot"]] = Opened(
        path, op["keep"], op["fresh"], volumes, op.get("incremental", False), seen
    )
    yield model, phase, ("ok", None)


_STEPS = {
    "save": _save,
    "load": _load,
    "verify": _verify,
    "steps": _steps,
    "latest": _latest,
    "delete": _delete,
    "gc": _gc,
    "open": _open,
}

# What a process has done: operations with their results. None: it was ended in the midst of that one.
Done: TypeAlias = Sequence[tuple[Op, Result | None]]


def explore(models: Sequence[Model], *processes: Done) -> list[Model]:
    """Return the models that can come of what processes have done at the same time."""
    found: dict[str, Model] = {}
    for model in models:
        start = (model, tuple((0, START) for _ in processes))
        seen: set[Any] = set()
        stack = [start]
        while stack:
            model, at = stack.pop()
            key = (model.key(), at)
            if key in seen:
                continue
            seen.add(key)
            if all(index == len(done) for (index, _), done in zip(at, processes, strict=True)):
                over = model.copy()
                over.lock = {}
                found.setdefault(over.key(), over)
            for number, done in enumerate(processes):
                stack.extend(_next(model, at, number, done, len(processes) > 1))
    return list(found.values())


def _next(
    model: Model, at: tuple[Any, ...], number: int, done: Done, racing: bool
) -> Iterator[tuple[Model, tuple[Any, ...]]]:
    index, phase = at[number]
    if index == len(done):
        return
    op, result = done[index]
    if result is None:
        ended = model.copy()
        ended.lock = {path: who for path, who in ended.lock.items() if who != str(number)}
        yield ended, (*at[:number], (index + 1, START), *at[number + 1 :])
    for after, then, its in advance(model, op, phase, str(number), racing):
        if its is None:
            there = (index, then)
        elif result is None or its == result:
            there = (index + 1, START)
        else:
            continue
        yield after, (*at[:number], there, *at[number + 1 :])
