"""Ctrl-C while something is saved or loaded: prompt, and nothing is left behind."""

import logging
import random
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support_threads import await_saves

import trunkline as tl
from trunkline.checkpoint import save as saving
from trunkline.checkpoint.directory import checkpointer as checkpointer_module
from trunkline.checkpoint.save_order import OrderedFileSet

ALL = 1 << 40  # commands


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch that spin on busy cores make the making of tensors what takes longest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Interrupt(BaseException):  # as KeyboardInterrupt
    """What the signal handler raises."""


def was_interrupted(error: BaseException | None) -> bool:
    """Whether it is an Interrupt, or came of one: torch.save raises others while it handles one."""
    while error is not None and not isinstance(error, Interrupt):
        error = error.__context__
    return error is not None


@contextmanager
def interrupted_by(signum: int, before: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise Interrupt at the first `signum`; later ones do nothing."""
    armed = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            before()
            raise Interrupt

    old = signal.signal(signum, on_signal)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signum, old)


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    return {
        "version": torch.tensor([version]),
        "weight": torch.arange(1_000_000, dtype=torch.int32) + version,
    }


def version_of(found: dict[str, torch.Tensor]) -> int:
    version = int(found["version"])
    assert torch.equal(found["weight"], tensors_of(version)["weight"])
    return version


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.mark.parametrize("way", ["pt", "safetensors", "checkpoint"])
def test_ctrl_c_ends_a_blocking_save(tmp_path: Path, way: str) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        checkpointer = tl.Checkpointer(tmp_path / "steps", process_group=False, engine=engine)

        def save(version: int) -> None:
            if way == "checkpoint":
                checkpointer.save(version, tensors_of(version), block=True)
            else:
                tl.save(tensors_of(version), tmp_path / f"file.{way}", engine=engine)

        def load() -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = (
                checkpointer.load() if way == "checkpoint" else dict(tl.load(tmp_path / f"file.{way}"))
            )
            return found

        save(1)
        before = names(tmp_path)
        sent = faults.commands("write")
        faults.hold("write", sent, ALL)

        def interrupt() -> None:
            while faults.commands("write") == sent:
                pass
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        with interrupted_by(signal.SIGINT, faults.release):
            thread.start()
            with pytest.raises(Interrupt) as caught:
                save(2)
        thread.join()
        # While the exception is still held. It may have ended well: the handler lets the writes go on.
        found = version_of(load())
        assert found == 1 or (found == 2 and way != "checkpoint") or checkpointer.steps() == [1, 2]
        if found == 1 or way != "checkpoint":
            assert names(tmp_path) == before
        assert caught.value is not None
        save(3)
        assert version_of(load()) == 3


@pytest.mark.parametrize("way", ["pt", "safetensors", "checkpoint"])
def test_ctrl_c_ends_a_load(tmp_path: Path, way: str) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults, block_bytes="64KiB", queue_depth=4, lanes=1) as engine:
        checkpointer = tl.Checkpointer(tmp_path / "steps", process_group=False, engine=engine)
        path = tmp_path / f"file.{way}"
        if way == "checkpoint":
            checkpointer.save(1, tensors_of(1), block=True)
        else:
            tl.save(tensors_of(1), path, engine=engine)

        def load() -> dict[str, torch.Tensor]:
            found: dict[str, torch.Tensor] = (
                checkpointer.load() if way == "checkpoint" else dict(tl.load(path, engine=engine))
            )
            return found

        begun = faults.commands("read")
        load()
        reads = faults.commands("read") - begun
        sent = faults.commands("read")
        last = sent + reads - 1  # whatever is read before it, the tensors come last
        faults.hold("read", last, ALL)

        def interrupt() -> None:
            while faults.commands("read") <= last:
                pass
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        with interrupted_by(signal.SIGINT, faults.release):
            thread.start()
            with pytest.raises(Interrupt):
                load()
        thread.join()
        assert version_of(load()) == 1


Wait = Callable[[tl.SaveHandle, tl.Checkpointer], None]
WAITS: dict[str, Wait] = {
    "wait_staged": lambda handle, _: handle.wait_staged(),
    "wait": lambda handle, _: handle.wait(60),
    "checkpointer": lambda _, checkpointer: checkpointer.wait(),
    "next save": lambda _, checkpointer: checkpointer.save(9, {}).wait(),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C nothing waits for the copying of tensors."""
    monkeypatch.setattr(saving, "_NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(saving, "_STAGING_SECONDS", 0.0)


class Slow:
    """Saves whose tensors are copied only as fast as writes go, which are held."""

    def __init__(self, root: Path, way: str, engine: tl.Engine, faults: tl.Faults) -> None:
        self.checkpointer = tl.Checkpointer(
            root / "steps", process_group=False, engine=engine, staging_bytes="16MiB"
        )
        self._way, self._path, self._engine = way, root / f"file.{way}", engine
        self.large = torch.zeros(40 << 20, dtype=torch.uint8)
        self.begin(1).wait()
        faults.hold("write", faults.commands("write"), ALL)

    def begin(self, version: int) -> tl.SaveHandle:
        state = {"large": self.large.fill_(version)}
        if self._way == "checkpoint":
            return self.checkpointer.save(version, state)
        return tl.save_async(state, self._path, engine=self._engine, staging_bytes="16MiB")

    def load(self) -> int:
        found = self.checkpointer.load() if self._way == "checkpoint" else tl.load(self._path)
        (version,) = set(found["large"].unique().tolist())
        return int(version)


def interrupt(wait: Callable[[], object], faults: tl.Faults, seconds: float) -> BaseException:
    """Return what ends `wait`: a signal; writes that are held go on `seconds` after that."""
    with interrupted_by(signal.SIGALRM, threading.Timer(seconds, faults.release).start):
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupt) as caught:
            wait()
    return caught.value


# What comes next may change the tensors, as where a cell of a notebook is run again.
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("way", "wait"),
    [("pt", "wait_staged"), ("safetensors", "wait"), *(("checkpoint", wait) for wait in WAITS)],
)
def test_ctrl_c_before_tensors_are_copied_cancels_the_save(tmp_path: Path, way: str, wait: str) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        slow = Slow(tmp_path, way, engine, faults)
        handle = slow.begin(2)
        error = interrupt(lambda: WAITS[wait](handle, slow.checkpointer), faults, 0.1)
        assert handle.done()
        slow.large.fill_(3)
        if hasattr(error, "__notes__"):
            assert error.__notes__ == [f"{handle._what} was cancelled: its tensors were not copied yet"]
        # Another wait for it raises that it is not there; another save warns.
        for wait_again in [handle.wait, *([slow.checkpointer.wait] if way == "checkpoint" else [])]:
            with pytest.raises(tl.Cancelled, match="a wait for it was interrupted before its tensors"):
                wait_again()
        assert slow.load() == 1
        slow.begin(4).wait()
        assert slow.load() == 4


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", ["pt", "checkpoint"])
def test_a_save_that_ctrl_c_cancelled_is_told_once(tmp_path: Path, way: str) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        slow = Slow(tmp_path, way, engine, faults)
        handle = slow.begin(2)
        interrupt(handle.wait_staged, faults, 0.1)
        with pytest.warns(RuntimeWarning, match="was cancelled: a wait for it was interrupted"):
            after = slow.begin(3)
        after.wait()
        slow.begin(4).wait()
        assert slow.load() == 4


@pytest.mark.parametrize("way", ["pt", "checkpoint"])
def test_after_ctrl_c_tensors_are_still_copied(
    tmp_path: Path, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        slow = Slow(tmp_path, way, engine, faults)
        handle = slow.begin(2)
        interrupt(handle.wait_staged, faults, 1.5)
        assert handle.staged()
        slow.large.fill_(3)
        handle.wait()
        assert slow.load() == 2
    assert "waiting until the tensors are copied" in capfd.readouterr().err


@pytest.mark.parametrize("second", [SystemExit, TimeoutError])
def test_what_else_comes_while_tensors_are_copied_is_raised(
    tmp_path: Path, second: type[BaseException]
) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        slow = Slow(tmp_path, "checkpoint", engine, faults)
        handle = slow.begin(2)
        errors: list[BaseException] = [second("now"), KeyboardInterrupt()]

        def on_signal(number: int, frame: FrameType | None) -> None:
            if len(errors) == 1:
                threading.Timer(0.1, faults.release).start()
            raise errors.pop()

        old = signal.signal(signal.SIGALRM, on_signal)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.3)
            with pytest.raises(second, match="now") as caught:
                handle.wait_staged()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert isinstance(caught.value.__context__, KeyboardInterrupt)
        if second is SystemExit:  # the exit waits for it
            handle.wait(60)
            assert slow.load() == 2
        else:
            with pytest.raises(tl.Cancelled):
                handle.wait(60)


def test_ctrl_c_in_another_thread_lets_the_save_go_on(tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        slow = Slow(tmp_path, "checkpoint", engine, faults)
        handles: list[tl.SaveHandle] = []
        training = threading.Thread(target=lambda: handles.append(slow.begin(2)))
        training.start()
        training.join()
        with interrupted_by(signal.SIGALRM):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Interrupt):
                tl.Checkpointer(tmp_path / "steps", process_group=False)
        faults.release()
        handles[0].wait(60)
        assert slow.load() == 2


def test_the_exit_after_a_signal_handler_leaves_the_save_alone(tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", 0, ALL)
        path = tmp_path / "file.pt"
        handle = tl.save_async(
            torch.zeros(40 << 20, dtype=torch.uint8), path, engine=engine, staging_bytes="16MiB"
        )
        with interrupted_by(signal.SIGALRM, sys.exit):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(SystemExit):
                handle.wait_staged()
        faults.release()
        handle.wait(60)
        assert not tl.load(path).any()


@pytest.mark.parametrize(
    ("name", "by"),
    [
        *((name, by) for name in ("file.pt", "file.safetensors") for by in ("path", "link", "mapped")),
        ("file.safetensors", "folder"),
    ],
)
def test_loading_waits_for_saves_in_the_background(tmp_path: Path, name: str, by: str) -> None:
    faults = tl.Faults()
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / name
    (tmp_path / "link").symlink_to(folder)
    with tl.Engine("threads", faults=faults) as engine:
        tl.save(tensors_of(1), path, engine=engine)
        faults.hold("write", faults.commands("write"), ALL)
        tl.save_async(tensors_of(2), path, engine=engine)
        thread = threading.Timer(0.1, faults.release)
        thread.start()
        where = {"link": tmp_path / "link" / name, "folder": folder}.get(by, path)
        found = tl.load(where, mmap=by == "mapped")
        thread.join()
        assert version_of(dict(found)) == 2


def test_loading_does_not_wait_for_a_save_that_this_thread_carries_out(tmp_path: Path) -> None:
    """As in a signal handler that interrupts a save in an exit handler, which runs in the same thread."""
    path = tmp_path / "file.safetensors"
    tl.save(tensors_of(1), path)
    files = OrderedFileSet(saving.lay_out(tensors_of(2), path, checksum=True), stage_all=True)
    files.stage()
    assert version_of(tl.load(path)) == 1
    files.finish()
    assert version_of(tl.load(path)) == 2


def test_a_handler_that_loads_does_not_wait_for_the_save_it_interrupts(tmp_path: Path) -> None:
    faults = tl.Faults()
    path = tmp_path / "file.safetensors"
    found = []
    with tl.Engine("threads", faults=faults) as engine:
        tl.save(tensors_of(1), path, engine=engine)
        faults.hold("write", faults.commands("write"), ALL)

        def on_signal(number: int, frame: FrameType | None) -> None:
            found.append(version_of(tl.load(path)))
            faults.release()

        old = signal.signal(signal.SIGALRM, on_signal)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            tl.save(tensors_of(2), path, engine=engine)
        finally:
            signal.signal(signal.SIGALRM, old)
        assert found == [1]
        assert version_of(tl.load(path)) == 2


# One that comes while a destructor runs is swallowed by the interpreter.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(5)
    checkpointer = tl.Checkpointer(tmp_path / "steps", keep=2, process_group=False)
    pt, safetensors = tmp_path / "file.pt", tmp_path / "file.safetensors"
    tl.save(tensors_of(0), pt)
    tl.save(tensors_of(0), safetensors)
    checkpointer.save(0, tensors_of(0), block=True)
    interruptions = 0
    for version in range(1, 201):
        ways: list[Callable[[], object]] = [
            lambda: tl.save(tensors_of(version), pt),  # noqa: B023
            lambda: tl.save(tensors_of(version), safetensors),  # noqa: B023
            lambda: tl.save_async(tensors_of(version), pt),  # noqa: B023
            lambda: checkpointer.save(version, tensors_of(version), block=True),  # noqa: B023
            lambda: checkpointer.save(version, tensors_of(version)),  # noqa: B023
            lambda: checkpointer.save(version, tensors_of(version)).wait(),  # noqa: B023
            lambda: checkpointer.load(),
            lambda: tl.load(pt),
        ]
        try:
            with interrupted_by(signal.SIGALRM):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-2))
                rng.choice(ways)()
        except BaseException as error:
            if not was_interrupted(error):
                raise
            interruptions += 1
        if version % 2:  # or go on at once, whatever is still under way
            await_saves()
            assert names(tmp_path) <= {"steps", "file.pt", "file.safetensors"} | {
                str(path.relative_to(tmp_path)) for path in (tmp_path / "steps").rglob("*")
            }
            version_of(tl.load(pt))
            version_of(tl.load(safetensors))
            version_of(checkpointer.load())
    assert interruptions > 20
    await_saves()
    checkpointer.save(1000, tensors_of(1000), block=True)
    assert version_of(checkpointer.load()) == 1000
    store = tl._core.CheckpointStore(str(tmp_path / "steps"))
    assert store.collect()["removed"] == []


def test_handlers_that_raise_wherever_a_save_can_be_interrupted(tmp_path: Path) -> None:
    """Python runs signal handlers after calls and at the start of functions, which a profiler sees."""
    checkpointer = tl.Checkpointer(tmp_path, keep=2, process_group=False)
    checkpointer.save(0, tensors_of(0), block=True)
    modules = ("/checkpointer.py", "/turn.py", "/step_save.py", "/checkpoint/save.py")
    left = 0

    def interrupt(frame: FrameType, event: str, what: object) -> None:
        nonlocal left
        if event == "c_call" or not frame.f_code.co_filename.endswith(modules):
            return
        left -= 1
        if left == 0:
            sys.setprofile(None)
            raise Interrupt

    points = 0
    for point in range(1, 2000):
        left = point
        try:
            sys.setprofile(interrupt)
            checkpointer.save(point, tensors_of(point)).wait()
        except Interrupt:
            points = point
        finally:
            sys.setprofile(None)
        if left > 0:
            break
        assert checkpointer.load()["version"] <= point
    assert points > 30
    checkpointer.save(points + 2, tensors_of(points + 2), block=True)
    assert version_of(checkpointer.load()) == points + 2


def test_an_interrupt_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = tl.Checkpointer(tmp_path, process_group=False)

    def interrupted(*_: object) -> None:
        raise Interrupt

    monkeypatch.setattr(saving, "start_thread", interrupted)
    with pytest.raises(Interrupt):
        checkpointer.save(1, tensors_of(1))
    monkeypatch.undo()
    checkpointer.wait()
    checkpointer.save(2, tensors_of(2)).wait()
    assert checkpointer.steps() == [2]


def test_a_save_whose_wait_for_the_one_before_was_interrupted(tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        checkpointer = tl.Checkpointer(tmp_path, keep=None, process_group=False, engine=engine)
        faults.hold("write", 0, ALL)
        first = checkpointer.save(1, tensors_of(1))
        with interrupted_by(signal.SIGALRM):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupt):
                checkpointer.save(2, tensors_of(2))
        assert not first.done()
        threading.Timer(0.05, faults.release).start()
        checkpointer.save(3, tensors_of(3), block=True)  # waits for the first as well
        assert first.done()
        assert checkpointer.steps() == [1, 3]


def test_threads_that_save_to_one_checkpointer_take_turns(tmp_path: Path) -> None:
    checkpointer = tl.Checkpointer(tmp_path, keep=None, process_group=False)
    errors: list[BaseException] = []

    def save(numbers: range) -> None:
        try:
            for number in numbers:
                checkpointer.save(number, {"x": torch.full((1000,), float(number))}).wait()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(range(first, 100, 4),)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert checkpointer.steps() == list(range(100))
    for number in range(100):
        assert torch.equal(checkpointer.load(number)["x"], torch.full((1000,), float(number)))


def test_the_error_of_a_time_limit_is_raised_wherever_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TimeoutError, as a handler of SIGALRM raises it, is an OSError."""

    def expire(*_: Any) -> None:
        raise TimeoutError("time limit")

    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("trunkline.engine"), "getEffectiveLevel", expire)
        with pytest.raises(TimeoutError, match="time limit"):
            tl.Engine()
    with pytest.raises(TimeoutError, match="time limit"):
        checkpointer_module._collect(types.SimpleNamespace(collect_if_used=expire, directory=tmp_path))
