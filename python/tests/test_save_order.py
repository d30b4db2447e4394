"""Saves of one process to one file: the file holds what was saved by the last call."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_threads import await_saves

import trunkline as tl
from trunkline.checkpoint import save_order

RunScript = Callable[..., str]
ALL = 1 << 40  # commands


@pytest.fixture
def engine(faults: tl.Faults) -> Iterator[tl.Engine]:
    with tl.Engine("threads", faults=faults) as made:
        yield made
        faults.release()
        await_saves()


def state(version: int) -> dict[str, Any]:
    return {"weight": torch.full((30_000,), version, dtype=torch.int32)}


def version_of(path: Path) -> int:
    weight = tl.load(path)["weight"]
    version = int(weight[0])
    assert torch.equal(weight, state(version)["weight"])
    return version


def assert_waits(handle: tl.SaveHandle) -> None:
    with pytest.raises(tl.Timeout):
        handle.wait(0.3)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_save_in_the_background_waits_for_the_one_before(
    tmp_path: Path, faults: tl.Faults, engine: tl.Engine, suffix: str
) -> None:
    path = tmp_path / f"last.{suffix}"
    faults.hold("write", 0, 1)
    first = tl.save_async(state(1), path, engine=engine)
    first.wait_staged(60)
    second = tl.save_async(state(2), path, engine=engine)
    assert_waits(second)
    faults.release()
    second.wait(60)
    assert first.done()
    assert version_of(path) == 2
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_saves_whose_handles_are_dropped(run_script: RunScript, tmp_path: Path) -> None:
    run_script(
        """
        import torch
        import trunkline as tl
        weight = torch.zeros(30_000)
        for epoch in range(20):
            weight.fill_(epoch)
            tl.save_async({"weight": weight, "epoch": epoch}, "last.pt").wait_staged()
        """
    )
    found = tl.load(tmp_path / "last.pt")
    assert found["epoch"] == 19
    assert bool((found["weight"] == 19).all())


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_save_waits_for_one_in_the_background(
    tmp_path: Path, faults: tl.Faults, engine: tl.Engine, in_main_thread: bool
) -> None:
    path = tmp_path / "last.pt"
    faults.hold("write", 0, 1)
    first = tl.save_async(state(1), path, engine=engine)
    first.wait_staged(60)
    releasing = threading.Timer(0.3, faults.release)
    releasing.start()
    saving = threading.Thread(target=lambda: tl.save(state(2), path, engine=engine))
    if in_main_thread:
        saving.run()
    else:
        saving.start()
        saving.join(60)
    assert first.done()
    first.wait(60)
    releasing.join()
    assert version_of(path) == 2


@pytest.mark.parametrize("other", ["link.pt", "directory/file.pt", "../NAME/file.pt"])
def test_one_file_by_several_paths(tmp_path: Path, faults: tl.Faults, engine: tl.Engine, other: str) -> None:
    path = tmp_path / "file.pt"
    (tmp_path / "link.pt").symlink_to("file.pt")
    (tmp_path / "directory").symlink_to(".")
    faults.hold("write", 0, 1)
    tl.save_async(state(1), tmp_path / other.replace("NAME", tmp_path.name), engine=engine).wait_staged(60)
    second = tl.save_async(state(2), path, engine=engine)
    assert_waits(second)
    faults.release()
    second.wait(60)
    assert version_of(path) == 2
    assert (tmp_path / "link.pt").is_symlink()


def test_a_link_that_is_changed_during_a_save(tmp_path: Path, faults: tl.Faults, engine: tl.Engine) -> None:
    """The file comes where the path led to when it was given."""
    for name in ("exp1", "exp2"):
        (tmp_path / name).mkdir()
    current = tmp_path / "cur"
    current.symlink_to("exp1")
    faults.hold("write", 0, 1)
    handle = tl.save_async(state(1), current / "file.pt", engine=engine)
    handle.wait_staged(60)
    current.unlink()
    current.symlink_to("exp2")
    faults.release()
    handle.wait(60)
    assert version_of(tmp_path / "exp1" / "file.pt") == 1
    assert [*(tmp_path / "exp1").iterdir(), *(tmp_path / "exp2").iterdir()] == [tmp_path / "exp1" / "file.pt"]


def test_other_files_wait_for_nothing(tmp_path: Path, faults: tl.Faults, engine: tl.Engine) -> None:
    (tmp_path / "other").mkdir()
    faults.hold("write", 0, 1)
    first = tl.save_async(state(1), tmp_path / "file.pt", engine=engine)
    first.wait_staged(60)
    tl.save(state(2), tmp_path / "file2.pt", engine=engine)
    tl.save_async(state(3), tmp_path / "other" / "file.pt", engine=engine).wait(60)
    assert not first.done()


def test_earlier_saves_that_fail_or_are_cancelled(
    tmp_path: Path, faults: tl.Faults, engine: tl.Engine
) -> None:
    path = tmp_path / "last.pt"
    faults.hold("write", 0, 1)
    faults.fail("sync", 0, 5, 1)
    handles = [tl.save_async(state(version), path, engine=engine) for version in range(4)]
    handles[1].cancel()
    handles[2].cancel()
    for handle in handles[1:3]:
        with pytest.raises(tl.Cancelled):
            handle.wait(60)  # while the first one is still under way
    assert_waits(handles[3])
    faults.release()
    handles[3].wait(60)
    with pytest.raises(tl.Error) as caught:
        handles[0].wait(60)
    assert caught.value.errno == 5
    assert version_of(path) == 3
    assert save_order._turns == {}


def test_one_that_is_cancelled_while_it_writes(tmp_path: Path, faults: tl.Faults, engine: tl.Engine) -> None:
    path = tmp_path / "last.pt"
    faults.hold("write", 0, 1)
    first = tl.save_async(state(1), path, engine=engine)
    first.wait_staged(60)
    second = tl.save_async(state(2), path, engine=engine)
    first.cancel()
    faults.release()
    second.wait(60)
    with pytest.raises(tl.Cancelled):
        first.wait(60)
    assert version_of(path) == 2


class Interrupt(BaseException):
    """What the signal handler raises."""


def signal_once_two_save() -> None:
    """Send SIGUSR1 to the main thread, once a second save waits for the first."""

    def send() -> None:
        while not any(place._later for place in list(save_order._turns)):
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    threading.Thread(target=send).start()


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Install a handler of SIGUSR1."""
    old = signal.getsignal(signal.SIGUSR1)

    def install(handler: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: handler())

    yield install
    signal.signal(signal.SIGUSR1, old)


def test_ctrl_c_ends_the_wait(
    tmp_path: Path, faults: tl.Faults, engine: tl.Engine, on_signal: Callable[[Callable[[], object]], None]
) -> None:
    def interrupt() -> None:
        raise Interrupt

    path = tmp_path / "last.pt"
    on_signal(interrupt)
    faults.hold("write", 0, 1)
    first = tl.save_async(state(1), path, engine=engine)
    first.wait_staged(60)
    signal_once_two_save()
    with pytest.raises(Interrupt):
        tl.save(state(2), path, engine=engine)
    assert not first.done()
    faults.release()
    first.wait(60)
    assert version_of(path) == 1
    assert save_order._turns == {}


def test_a_handler_that_saves_while_save_waits(
    tmp_path: Path, faults: tl.Faults, engine: tl.Engine, on_signal: Callable[[Callable[[], object]], None]
) -> None:
    path = tmp_path / "last.pt"

    def save() -> None:
        faults.release()
        tl.save(state(3), path, engine=engine)

    on_signal(save)
    faults.hold("write", 0, 1)
    first = tl.save_async(state(1), path, engine=engine)
    first.wait_staged(60)
    signal_once_two_save()
    tl.save(state(2), path, engine=engine)
    assert first.done()
    assert version_of(path) == 3


@pytest.mark.parametrize(("when", "last"), [("before its thread", 1), ("after its thread", 2), ("after", 2)])
def test_a_handler_that_saves_in_the_midst_of_save_async(
    tmp_path: Path, engine: tl.Engine, monkeypatch: pytest.MonkeyPatch, when: str, last: int
) -> None:
    """The call has its place in the order as soon as it or its thread has taken one."""
    path = tmp_path / "last.pt"
    enter, stage = save_order.OrderedFileSet.enter, save_order.OrderedFileSet.stage
    begun, may_stage, has_entered = threading.Event(), threading.Event(), threading.Event()

    def stage_later(self: save_order.OrderedFileSet) -> None:
        begun.set()
        may_stage.wait(60)
        enter(self)
        has_entered.set()
        stage(self)

    def interrupted(self: save_order.OrderedFileSet) -> None:
        assert begun.wait(60)
        monkeypatch.undo()  # what the handler saves is not held
        if when != "before its thread":
            may_stage.set()
            assert has_entered.wait(60)
        if when == "after":
            enter(self)
        tl.save(state(2), path, engine=engine)
        may_stage.set()
        enter(self)

    monkeypatch.setattr(save_order.OrderedFileSet, "stage", stage_later)
    monkeypatch.setattr(save_order.OrderedFileSet, "enter", interrupted)
    tl.save_async(state(1), path, engine=engine).wait(60)
    assert version_of(path) == last
    tl.save(state(3), path, engine=engine)
    assert version_of(path) == 3
    assert save_order._turns == {}


def test_a_child_does_not_wait_for_its_parents_save(run_script: RunScript, tmp_path: Path) -> None:
    run_script(
        """
        import os, signal
        import torch
        import trunkline as tl
        faults = tl.Faults()
        faults.hold("write", 0, 1 << 40)
        handle = tl.save_async({"x": torch.ones(10)}, "last.pt", engine=tl.Engine("threads", faults=faults))
        handle.wait_staged()
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # instead of hanging
            tl.save({"x": torch.zeros(10)}, "last.pt")
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        assert not torch.load("last.pt")["x"].any()  # tl.load would wait for this process's save
        faults.release()
        handle.wait()
        assert tl.load("last.pt")["x"].all()
        """
    )
    assert [each.name for each in tmp_path.iterdir()] == ["last.pt"]


def test_ctrl_c_during_the_exit_abandons_both(run_script: RunScript, tmp_path: Path) -> None:
    run_script(
        """
        import os, signal, threading
        import torch
        import trunkline as tl
        faults = tl.Faults()
        faults.hold("write", 0, 1 << 40)
        engine = tl.Engine("threads", faults=faults)
        first = tl.save_async({"x": torch.ones(10)}, "last.pt", engine=engine)
        first.wait_staged()
        second = tl.save_async({"x": torch.ones(10)}, "last.pt", engine=engine)
        def interrupt():
            threading.main_thread().join()  # ends when the interpreter begins to exit
            while not second._cancelled:  # one that comes just before a wait is only seen with the next
                os.kill(os.getpid(), signal.SIGINT)
                second._done.wait(1)
            faults.release()
        threading.Thread(target=interrupt, daemon=True).start()
        """,
        expect=-signal.SIGINT,
    )
    assert list(tmp_path.iterdir()) == []
