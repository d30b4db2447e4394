"""Signal handlers that save with trunkline.dcp in the midst of the main thread's dcp.save: none hangs.

A "handler" here is called by a function that the interrupted save calls: at that very moment, each time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from support_dcp import assert_same, load, shards  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402

from trunkline.dcp import _directory, _saves, _writer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")

REFUSED = (
    "a signal handler called this while a save of trunkline.dcp was running in the same thread; set a flag "
    "in the handler, and save in the training loop once dcp.save"
)


def state_of(value: float) -> dict[str, Any]:
    return {"a": torch.full((1000,), value)}


def load_from(path: Path) -> dict[str, Any]:
    return load(state_of(-1.0), path)


def once(function: Callable[..., Any], handler: Callable[[], None]) -> Callable[..., Any]:
    """`function`, which a signal interrupts at its beginning, the first time."""
    handlers = [handler]

    @functools.wraps(function)  # torch looks at the parameters of planners
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if handlers:
            handlers.pop()()
        return function(*args, **kwargs)

    return interrupted


class HeldLock:
    """A lock, and a handler that runs while it is held."""

    def __init__(self, handler: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._enter = once(lambda: None, handler)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._enter()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self, **options: float) -> bool:
        # The lock of a thread that waits for itself: as a test, an error instead of a hang.
        assert self._lock.acquire(timeout=5), "waits for its own thread"
        return True

    def release(self) -> None:
        self._lock.release()


def in_lock(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    patch.setattr(_saves, "_lock", HeldLock(handler))


def in_reset(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    patch.setattr(_saves, "next_number", once(_saves.next_number, handler))


def in_prepare(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    patch.setattr(_directory, "make_directory", once(_directory.make_directory, handler))


def in_write(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    patch.setattr(_writer, "lay_out", once(_writer.lay_out, handler))


def in_finish(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    patch.setattr(_writer, "format_manifest", once(_writer.format_manifest, handler))


def in_commit(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    """With the lock of the directory, and that of this process."""
    check = _writer.StorageWriter._is_superseded
    patch.setattr(_writer.StorageWriter, "_is_superseded", once(check, handler))


def before_reset(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    from torch.distributed.checkpoint import state_dict_saver

    patch.setattr(state_dict_saver, "_storage_setup", once(state_dict_saver._storage_setup, handler))


def after_reset(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
    from torch.distributed.checkpoint import state_dict_saver

    patch.setattr(
        state_dict_saver, "_stateful_to_state_dict", once(state_dict_saver._stateful_to_state_dict, handler)
    )


def in_planner(method: str) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    def at(patch: pytest.MonkeyPatch, handler: Callable[[], None]) -> None:
        patch.setattr(DefaultSavePlanner, method, once(getattr(DefaultSavePlanner, method), handler))

    return at


IN_METHODS = [in_reset, in_prepare, in_write, in_finish, in_commit, in_lock, in_planner("resolve_data")]
BETWEEN_METHODS = [
    before_reset,
    after_reset,
    in_planner("set_up_planner"),
    in_planner("create_local_plan"),
    in_planner("create_global_plan"),
    in_planner("finish_plan"),
]
At = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]


class Handler:
    """Saves state 2 when it is called, and keeps the error."""

    def __init__(self, path: Path, writer: Any, **options: Any) -> None:
        self.path, self.writer, self.options = path, writer, options
        self.error: BaseException | None = None
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        try:
            dcp.save(state_of(2.0), storage_writer=self.writer, no_dist=True, **self.options)
        except BaseException as error:
            self.error = error

    def assert_refused(self) -> None:
        assert self.calls == 1
        assert type(self.error) is tl.Error
        assert REFUSED in str(self.error)
        assert str(self.error).startswith(f"cannot save to {self.path}: ")
        assert self.error.filename == str(self.path)


@pytest.mark.parametrize("at", [*IN_METHODS, *BETWEEN_METHODS])
@pytest.mark.parametrize("locks", [True, False])
def test_one_writer_for_all_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: At, locks: bool
) -> None:
    if not locks:  # as on NFS
        monkeypatch.setattr(_directory, "_try_lock", lambda _: True)
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    writer = tl.dcp.StorageWriter()
    handler = Handler(inner, writer, checkpoint_id=inner)
    with monkeypatch.context() as patch:
        at(patch, handler)
        dcp.save(state_of(1.0), storage_writer=writer, checkpoint_id=outer, no_dist=True)
    handler.assert_refused()
    assert not inner.exists()
    assert_same(load_from(outer), state_of(1.0))
    assert len(shards(outer)) == 1
    for path, value in ((inner, 3.0), (outer, 4.0)):
        dcp.save(state_of(value), storage_writer=writer, checkpoint_id=path, no_dist=True)
        assert_same(load_from(path), state_of(value))
        assert len(shards(path)) == 1


@pytest.mark.parametrize("at", [*IN_METHODS[1:], *BETWEEN_METHODS])
def test_another_writer_of_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: At
) -> None:
    dcp.save(state_of(0.0), storage_writer=tl.dcp.StorageWriter(tmp_path), no_dist=True)
    handler = Handler(tmp_path, tl.dcp.StorageWriter(tmp_path))
    with monkeypatch.context() as patch:
        at(patch, handler)
        dcp.save(state_of(1.0), storage_writer=tl.dcp.StorageWriter(tmp_path), no_dist=True)
    handler.assert_refused()
    assert_same(load_from(tmp_path), state_of(1.0))
    assert len(shards(tmp_path)) == 1


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize("at", IN_METHODS[1:])
def test_another_writer_within_a_method_of_the_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: At, use_collectives: bool
) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    options = {"use_collectives": use_collectives}
    handler = Handler(inner, tl.dcp.StorageWriter(inner), **options)
    with monkeypatch.context() as patch:
        at(patch, handler)
        dcp.save(state_of(1.0), storage_writer=tl.dcp.StorageWriter(outer), no_dist=True, **options)
    handler.assert_refused()
    assert not inner.exists()
    assert_same(load_from(outer), state_of(1.0))


@pytest.mark.parametrize("at", BETWEEN_METHODS)
def test_another_writer_and_directory_between_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: At
) -> None:
    """They have nothing in common. What the interrupted save has made is still that of a save under way."""
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    handler = Handler(inner, tl.dcp.StorageWriter(inner))
    with monkeypatch.context() as patch:
        at(patch, handler)
        dcp.save(state_of(1.0), storage_writer=tl.dcp.StorageWriter(outer), no_dist=True)
    assert handler.calls == 1
    assert handler.error is None
    assert_same(load_from(outer), state_of(1.0))
    assert_same(load_from(inner), state_of(2.0))


def test_a_nested_save_does_not_end_the_one_that_it_interrupted(tmp_path: Path) -> None:
    first = _saves.begin(tmp_path, _saves.next_number(), [])
    nested = _saves.begin(tmp_path, _saves.next_number(), [], is_nested=True)
    assert first.is_under_way()
    assert nested.is_under_way()
    last = _saves.begin(tmp_path, _saves.next_number(), [])
    assert not first.is_under_way()
    assert not nested.is_under_way()
    last.is_over = True


def test_a_handler_during_torchs_own_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    handler = Handler(inner, tl.dcp.StorageWriter(inner))
    with monkeypatch.context() as patch:
        in_planner("resolve_data")(patch, handler)
        dcp.save(state_of(1.0), storage_writer=dcp.FileSystemWriter(outer), no_dist=True)
    assert handler.error is None
    assert_same(load_from(inner), state_of(2.0))


def test_a_handler_may_load_and_look_at_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    writer = tl.dcp.StorageWriter()
    dcp.save(state_of(2.0), storage_writer=writer, checkpoint_id=inner, no_dist=True)
    found = []
    for at in (in_commit, in_lock, in_planner("finish_plan")):
        with monkeypatch.context() as patch:
            at(patch, lambda: found.append((writer.checkpoint_id, load_from(inner))))
            dcp.save(state_of(1.0), storage_writer=writer, checkpoint_id=outer, no_dist=True)
    assert len(found) == 3
    for _, state in found:
        assert_same(state, state_of(2.0))
    assert found[0][0] == str(outer)


@pytest.mark.parametrize("at", [*IN_METHODS, *BETWEEN_METHODS])
def test_a_save_that_an_exception_ended_refuses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: At
) -> None:
    def handler() -> None:
        raise KeyboardInterrupt

    writer = tl.dcp.StorageWriter()
    with monkeypatch.context() as patch:
        at(patch, handler)
        # Held until the end: with its frames.
        with pytest.raises((KeyboardInterrupt, CheckpointException)) as caught:
            dcp.save(state_of(1.0), storage_writer=writer, checkpoint_id=tmp_path, no_dist=True)
    for value in (2.0, 3.0):
        dcp.save(state_of(value), storage_writer=writer, checkpoint_id=tmp_path, no_dist=True)
        assert_same(load_from(tmp_path), state_of(value))
    assert caught


def test_a_save_that_torch_did_not_finish_refuses_no_other(tmp_path: Path) -> None:
    """As where another rank had an error."""
    writer = tl.dcp.StorageWriter(tmp_path)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_of(1.0), is_coordinator=True)
    writer.set_up_storage_writer(True, rank=0)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    writer.write_data(planner.finish_plan(plans[0]), planner)
    dcp.save(state_of(2.0), storage_writer=writer, no_dist=True)
    assert_same(load_from(tmp_path), state_of(2.0))


def test_a_handler_that_waits_for_async_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread waits for locks of the interrupted one, which waits for that thread: not without an end."""
    monkeypatch.setattr(_directory, "LOCK_SECONDS", 0.0)
    monkeypatch.setattr(_directory, "_try_lock", lambda _: True)  # as on NFS
    monkeypatch.setattr(_saves, "LOCK_SECONDS", 0.01)
    errors: list[BaseException] = []

    def handler() -> None:
        writer = tl.dcp.StorageWriter(tmp_path)
        try:
            dcp.async_save(state_of(2.0), storage_writer=writer, no_dist=True).result(60)
        except BaseException as error:
            errors.append(error)

    with monkeypatch.context() as patch:
        in_commit(patch, handler)
        dcp.save(state_of(1.0), storage_writer=tl.dcp.StorageWriter(tmp_path), no_dist=True)
    assert_same(load_from(tmp_path), state_of(1.0))
    (error,) = errors
    assert isinstance(error, CheckpointException)
    ((cause, _),) = error.failures.values()
    assert isinstance(cause, tl.Error)
    assert "another save of this process has held a lock" in str(cause)
    assert len(shards(tmp_path)) == 1


def test_a_real_signal(run_script: Callable[..., str]) -> None:
    printed = run_script(
        """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp, trunkline as tl
from trunkline.dcp import _writer

writer = tl.dcp.StorageWriter()

def handler(*_):
    try:
        dcp.save({"a": torch.ones(9)}, storage_writer=writer, checkpoint_id="inner", no_dist=True)
    except tl.Error as error:
        print("in the same thread" in str(error))

signal.signal(signal.SIGUSR1, handler)
lay_out = _writer.lay_out

def interrupted(share):
    os.kill(os.getpid(), signal.SIGUSR1)
    return lay_out(share)

_writer.lay_out = interrupted
dcp.save({"a": torch.zeros(9)}, storage_writer=writer, checkpoint_id="outer", no_dist=True)
_writer.lay_out = lay_out
print(os.path.exists("inner"), sorted(os.listdir("outer"))[0])
"""
    )
    assert printed == "True\nFalse dcp.manifest\n"
