"""What a saving process does until it is cut off, and what must be there afterwards."""

import random
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import trunkline as tl

KEEP = 2
FILES = ("file.pt", "file.safetensors")


@dataclass(frozen=True)
class Places:
    """Where is saved: a directory of checkpoints, volumes of it, and a directory of single files."""

    directory: Path
    volumes: Sequence[Path] | None
    files: Path
    incremental: bool = False


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """Tensors that no other version has: aligned and odd sizes, several dtypes, an empty one; 8 MB."""
    ramp = torch.arange(400_000, dtype=torch.int32)
    return {
        "version": torch.tensor([version]),
        "weight": (ramp * 31 + version * 1_000_003).reshape(400, 1000),
        "odd": (ramp[:123_457] * 7 + version).to(torch.uint8),
        "half": (ramp[:500_000] % 1009 + version % 7).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        # As in other versions, or in part.
        "frozen": ramp + version // 8 % 2,
        "rows": torch.where(ramp == version * 7919 % 400_000, version, 0),
    }


def state_of(step: int, version: int) -> dict[str, Any]:
    """Return a state of tensors and of everything else that a checkpoint takes."""
    return {"step": step, "version": version, "model": tensors_of(version), "rest": [1.5, "text", None]}


def assert_same(found: Any, expected: Any, where: str) -> None:
    """Compare two states, bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    else:
        assert found == expected, where


def run_saver(connection: Connection, places: Places, seed: int, step: int, version: int) -> None:
    """Save until killed, and report each save that began or ended; runs in a separate process."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    try:
        saver = _Saver(connection, places, step, version)
        connection.send(("ready",))
        while True:
            saver.save_something(rng)
    except BaseException as error:
        connection.send(("failed", isinstance(error, tl.Error), traceback.format_exc()))


class _Saver:
    def __init__(self, connection: Connection, places: Places, step: int, version: int) -> None:
        self._connection = connection
        self._places = places
        self._step, self._version = step, version
        self._checkpointer = tl.Checkpointer(
            places.directory,
            keep=KEEP,
            volumes=places.volumes,
            process_group=False,
            incremental=places.incremental,
        )
        if self._checkpointer.latest() is not None:
            self._checkpointer.load()  # what it goes on from

    def save_something(self, rng: random.Random) -> None:
        what = rng.random()
        if what < 0.2:
            self._save_file(FILES[0])
        elif what < 0.4:
            self._save_file(FILES[1])
        else:
            again = self._step > 1 and rng.random() < 0.2  # replaces the last one
            self._save_step(again, block=rng.random() < 0.3, file_meanwhile=rng.random() < 0.2)

    def _save_file(self, name: str) -> None:
        self._version += 1
        tensors = tensors_of(self._version)
        self._connection.send(("begin", name, 0, self._version))
        tl.save(tensors, self._places.files / name)
        self._connection.send(("done", name))

    def _save_step(self, again: bool, block: bool, file_meanwhile: bool) -> None:
        self._step += not again
        self._version += 1
        state = state_of(self._step, self._version)
        self._connection.send(("begin", "checkpoint", self._step, self._version))
        handle = self._checkpointer.save(self._step, state, block=block)
        handle.wait_staged()
        if not block:
            for tensor in state["model"].values():
                tensor.zero_()
        if file_meanwhile:
            self._save_file(FILES[0])
        handle.wait()
        self._connection.send(("done", "checkpoint"))


@dataclass
class History:
    """What a saver has reported, and with it what may and what must be found."""

    commits: dict[int, int] = field(default_factory=dict)  # version of each step, in the order of commits
    retired: dict[int, int] = field(default_factory=dict)  # by the last of them
    files: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(FILES))
    begun: dict[str, tuple[int, int]] = field(default_factory=dict)  # step and version
    failed: str | None = None
    failed_typed: bool = False
    ready: bool = False
    reports: int = 0
    linked: int = 0  # steps that were found with shards of earlier commits

    def hear(self, message: tuple[Any, ...]) -> None:
        """Take a message of the saver."""
        if message[0] == "ready":
            self.ready = True
        elif message[0] == "begin":
            self.begun[message[1]] = (message[2], message[3])
        elif message[0] == "done":
            self.reports += 1
            step, version = self.begun.pop(message[1])
            if message[1] == "checkpoint":
                after = committed(self.commits, step, version)
                self.retired = {each: its for each, its in self.commits.items() if each not in after}
                self.commits = after
            else:
                self.files[message[1]] = version
        else:
            self.failed_typed, self.failed = message[1], message[2]

    def check(self, places: Places) -> None:
        """Assert that what must be there is, whole, and nothing else; what was found is the new past."""
        self._check_checkpoints(places)
        self._check_files(places)
        self.begun.clear()
        self.failed, self.ready = None, False

    def next_numbers(self) -> tuple[int, int]:
        """Return a step and a version that are at least all before."""
        versions = [*self.commits.values(), *(version or 0 for version in self.files.values())]
        return max(self.commits, default=0), max(versions, default=0) + 1_000

    def _check_checkpoints(self, places: Places) -> None:
        checkpointer = tl.Checkpointer(
            places.directory, keep=KEEP, volumes=places.volumes, process_group=False
        )
        found = {step: checkpointer.load(step) for step in checkpointer.steps()}
        for step, state in found.items():
            assert state["step"] == step
            assert_same(state, state_of(step, state["version"]), f"step {step}")
        versions = {step: state["version"] for step, state in found.items()}
        outcomes = [self.commits]
        if "checkpoint" in self.begun:
            outcomes.append(committed(self.commits, *self.begun["checkpoint"]))
        # Retention may have been cut off: some that were to go may still be there, also after the last save
        # that was reported, since it is saved all the same.
        before = {**self.retired, **self.commits}
        met = [
            outcome
            for outcome in outcomes
            if outcome.items() <= versions.items()
            and versions.items() <= {**before, **outcome}.items()
            and checkpointer.latest() == (list(outcome)[-1] if outcome else None)
        ]
        assert met, f"found {versions}, latest {checkpointer.latest()}; possible were {outcomes}"
        last = checkpointer.latest()
        self.commits = {step: its for step, its in {**before, **met[-1]}.items() if step in found}
        self.retired = {}
        if last is not None:
            checkpointer.verify()
            assert_same(checkpointer.load(), found[last], "latest")
        _assert_no_debris(places, sorted(found))
        self.linked += _count_linked(places, sorted(found))

    def _check_files(self, places: Places) -> None:
        for name in FILES:
            allowed = {self.files[name]}
            if name in self.begun:
                allowed.add(self.begun[name][1])
            path = places.files / name
            version = None
            if path.exists():
                tensors = tl.load(path)
                version = int(tensors["version"])
                if name.endswith(".safetensors"):  # the format stores tensors in another order
                    tensors = {key: tensors[key] for key in tensors_of(version)}
                assert_same(tensors, tensors_of(version), name)
            assert version in allowed, f"{name}: found version {version}, possible were {allowed}"
            self.files[name] = version
        for path in places.files.glob(".trunkline-*.tmp"):
            path.unlink()  # the next save there would, too


def committed(commits: dict[int, int], step: int, version: int) -> dict[int, int]:
    """Return the checkpoints that are there once one more is."""
    kept = {each: its for each, its in commits.items() if each != step}
    return dict([*kept.items(), (step, version)][-KEEP:])


def _count_linked(places: Places, steps: list[int]) -> int:
    if not steps:
        return 0
    store = tl._core.CheckpointStore(str(places.directory))
    manifests = [store.open_manifest(step) for step in steps]
    return sum(any(its[3] < each.commit for its in each.shards()) for each in manifests)


def _assert_no_debris(places: Places, steps: list[int]) -> None:
    if not places.directory.exists():  # no save came so far
        assert steps == []
        return
    names = {path.name for path in places.directory.iterdir()}
    assert names - {f"step-{step:08}" for step in steps} <= {"trunkline-checkpoints.json", "lock"}
    store = tl._core.CheckpointStore(str(places.directory))
    known = {Path(path) for step in steps for path in store.shard_paths(store.read_manifest(step))}
    roots = [places.directory, *map(Path, store.volumes)]
    shards = {path for root in roots for path in root.glob("step-*/*") if "manifest-" not in path.name}
    assert shards == known
    for root in filter(Path.exists, roots[1:]):
        assert {path.name for path in root.iterdir()} <= {"home", *(f"step-{step:08}" for step in steps)}
    for step in steps:
        assert len(list((places.directory / f"step-{step:08}").glob("manifest-*"))) == 1
