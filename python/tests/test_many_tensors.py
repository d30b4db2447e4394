"""States of very many small tensors: the work is so much for each tensor, however many there are."""

import gc
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import trunkline as tl  # noqa: E402
from trunkline import _core  # noqa: E402
from trunkline._tensor_io import transfer  # noqa: E402
from trunkline.checkpoint import save as saving  # noqa: E402
from trunkline.checkpoint.directory import shards as shard_files  # noqa: E402
from trunkline.checkpoint.directory import step_save  # noqa: E402

State = dict[Any, Any]
Operation = Callable[[Path, State], object]


def many(count: int) -> State:
    return {f"layers.{index}.weight": torch.full((4,), float(index)) for index in range(count)}


def nested(count: int) -> State:
    """A state as optimizers have it: dicts of a few tensors and numbers each."""
    return {index: {"m": torch.full((4,), float(index)), "step": index} for index in range(count)}


def saved_pt(path: Path, state: State) -> None:
    tl.save(state, path / "a.pt")


def saved_safetensors(path: Path, state: State) -> None:
    tl.save(state, path / "a.safetensors")


def loaded_pt(path: Path, state: State) -> object:
    return tl.load(path / "a.pt")


def loaded_safetensors(path: Path, state: State) -> object:
    return tl.load(path / "a.safetensors")


def step_saved(path: Path, state: State) -> None:
    tl.Checkpointer(path / "run").save(1, state, block=True)


def step_loaded(path: Path, state: State) -> object:
    return tl.Checkpointer(path / "run").load()


def step_loaded_into(path: Path, state: State) -> object:
    return tl.Checkpointer(path / "run").load(into=state)


# Each with what must have been done before, on which states.
OPERATIONS: list[tuple[Operation, Operation | None, Callable[[int], State]]] = [
    (saved_pt, None, many),
    (saved_pt, None, nested),
    (loaded_pt, saved_pt, many),
    (loaded_pt, saved_pt, nested),
    (saved_safetensors, None, many),
    (loaded_safetensors, saved_safetensors, many),
    (step_saved, None, many),
    (step_saved, None, nested),
    (step_loaded, step_saved, many),
    (step_loaded, step_saved, nested),
    (step_loaded_into, step_saved, many),
    (step_loaded_into, step_saved, nested),
]
each_operation = pytest.mark.parametrize(
    ("operation", "before", "made"),
    OPERATIONS,
    ids=[f"{operation.__name__}-{made.__name__}" for operation, _, made in OPERATIONS],
)


@pytest.fixture(autouse=True)
def in_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do here what is otherwise done in the background, so that it is counted."""
    for module in (saving, transfer):
        monkeypatch.setattr(module, "start_thread", lambda run, done: (run(), done.set()))


def calls_of(work: Callable[[], object]) -> int:
    """Count the calls of Python's and of C's functions, in this thread."""
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@contextmanager
def collections_counted() -> Iterator[list[int]]:
    """Collect what the collector does: the generation of each collection."""
    seen: list[int] = []

    def see(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            seen.append(about["generation"])

    gc.callbacks.append(see)
    try:
        yield seen
    finally:
        gc.callbacks.remove(see)


@each_operation
def test_twice_as_many_tensors_are_twice_the_calls(
    operation: Operation, before: Operation | None, made: Callable[[int], State], tmp_path: Path
) -> None:
    counts = []
    for count in (50, 50, 100, 200):  # the first: what is imported and made once
        path = tmp_path / f"{len(counts)}"
        path.mkdir()
        state = made(count)
        if before is not None:
            before(path, state)
        counts.append(calls_of(partial(operation, path, state)))
    _, of_50, of_100, of_200 = counts
    assert of_100 > of_50
    assert of_200 - of_100 < 2.1 * (of_100 - of_50), counts


@each_operation
def test_the_collector_does_not_run_for_each_few_tensors(
    operation: Operation, before: Operation | None, made: Callable[[int], State], tmp_path: Path
) -> None:
    for count in (2, 1000):  # the first: what is imported and made once
        path = tmp_path / f"{count}"
        path.mkdir()
        state = made(count)
        if before is not None:
            before(path, state)
        if count == 2:
            operation(path, state)
    former = gc.get_threshold()
    gc.collect()
    gc.set_threshold(50, 5, 5)
    try:
        with collections_counted() as seen:
            operation(path, state)
    finally:
        gc.set_threshold(*former)
    assert gc.isenabled()
    assert len(seen) < 12, len(seen)


def test_a_pause_of_the_collector_ends_with_its_block() -> None:
    assert gc.isenabled()
    with _core.GcPause():
        assert not gc.isenabled()
        with _core.GcPause():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), _core.GcPause():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with _core.GcPause():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def pausing_thread() -> tuple[threading.Thread, threading.Event, threading.Event]:
    """Return a thread that pauses the collector, what it sets then, and what ends the pause."""
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with _core.GcPause():
            entered.set()
            leave.wait()

    return threading.Thread(target=pause), entered, leave


def test_pauses_of_several_threads_may_overlap() -> None:
    other, entered, leave = pausing_thread()
    with _core.GcPause():
        other.start()
        entered.wait()
    assert not gc.isenabled()  # the other one goes on
    leave.set()
    other.join()
    assert gc.isenabled()


def test_a_forked_child_collects_though_another_thread_of_the_parent_has_paused() -> None:
    other, entered, leave = pausing_thread()
    other.start()
    entered.wait()
    with _core.GcPause():
        child = os.fork()
        if child == 0:
            collects = gc.isenabled()
    if child == 0:
        with _core.GcPause():
            collects = collects and not gc.isenabled()
        os._exit(0 if collects and gc.isenabled() else 1)
    leave.set()
    other.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_save_that_fails_leaves_the_collector_on(suffix: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        tl.save({"a": lambda: 0}, tmp_path / f"a{suffix}")
    assert gc.isenabled()


@pytest.mark.parametrize("volumes", [0, 2])
def test_names_that_no_head_has_room_for_are_spread_over_more_shards(
    volumes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format allows a head of 100 MB: a million tensors with names of some length need more."""
    limit = 8000
    monkeypatch.setattr(shard_files, "MAX_HEAD_BYTES", limit)
    monkeypatch.setattr(step_save, "FEW_TENSORS", 0)
    state = {
        **{f"layers.{index}.weight": torch.full((4,), float(index)) for index in range(100)},
        "large": torch.arange(1 << 20),
        **{'"\\Ж' * 30 + str(index): torch.full((1, 1, 1), float(index)) for index in range(100)},
        "empty": torch.empty(0),
    }
    paths = [tmp_path / f"volume{index}" for index in range(volumes)]
    for path in paths:
        path.mkdir()
    tl.Checkpointer(tmp_path / "run", volumes=paths or None).save(1, state, block=True)
    shards = list(tmp_path.rglob("*.safetensors"))
    heads = [int.from_bytes(shard.read_bytes()[:8], "little") for shard in shards]
    assert max(heads) <= limit + 4096
    assert len(shards) > 4
    loaded = tl.Checkpointer(tmp_path / "run").load()
    assert list(loaded) == list(state)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
