"""A process that forks while it saves."""

from collections.abc import Callable
from pathlib import Path

import torch

import trunkline as tl

RunScript = Callable[..., str]

PRELUDE = """
import os, signal, sys
import torch
import trunkline as tl

faults = tl.Faults()
engine = tl.Engine("threads", faults=faults)
checkpointer = tl.Checkpointer("steps", keep=None, process_group=False, engine=engine)
checkpointer.save(1, {"x": torch.ones(1000)}, block=True)
faults.hold("write", faults.commands("write"), 1 << 40)
handle = checkpointer.save(2, {"x": torch.full((1000,), 2.0)})
handle.wait_staged()

def in_child(body):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # instead of hanging
        body()
        sys.exit(7)  # through atexit and destructors
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 7:
        faults.release()
        raise AssertionError(status)

def finish():
    other = tl._core.CheckpointStore("steps")
    assert other.collect()["busy"]  # it is still this process that saves
    faults.release()
    handle.wait(60)
    assert checkpointer.steps() == [1, 2]
    assert torch.equal(checkpointer.load()["x"], torch.full((1000,), 2.0))
    print("saved")
"""


def test_a_child_that_does_nothing(run_script: RunScript) -> None:
    assert run_script(PRELUDE + "in_child(lambda: None)\nfinish()\n") == "saved\n"


def test_a_child_does_not_wait_for_its_parents_save(run_script: RunScript) -> None:
    printed = run_script(
        PRELUDE
        + """
def body():
    for wait in (handle.wait, handle.wait_staged, checkpointer.wait):
        try:
            wait()
            raise AssertionError("it waited for its parent's save")
        except tl.Error as error:
            assert "fork" in str(error), error
    assert handle.done()
    handle.cancel()  # nothing to give up here
    handle.progress()
in_child(body)
finish()
"""
    )
    assert printed == "saved\n"


def test_a_child_loads_and_saves_elsewhere(run_script: RunScript, tmp_path: Path) -> None:
    printed = run_script(
        PRELUDE
        + """
def body():
    reader = tl.Checkpointer("steps", process_group=False)
    assert torch.equal(reader.load(1)["x"], torch.ones(1000))
    assert reader.steps() == [1]
    own = tl.Checkpointer("others", process_group=False)
    own.save(5, {"x": torch.zeros(1000)}).wait()
    tl.save({"x": torch.zeros(10)}, "file.pt")
in_child(body)
finish()
"""
    )
    assert printed == "saved\n"
    assert tl.Checkpointer(tmp_path / "others", process_group=False).latest() == 5
    assert not tl.load(tmp_path / "file.pt")["x"].any()


def test_a_child_that_outlives_its_parent_holds_no_lock(run_script: RunScript, tmp_path: Path) -> None:
    # As workers of a data loader do for a while, when a training is killed.
    run_script(
        PRELUDE
        + """
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.close(writing)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    open("child", "w").write(str(os.getpid()))
    while not os.path.exists("over"):
        signal.sigtimedwait([signal.SIGUSR1], 0.01)
    os._exit(0)
while not os.path.exists("child") or not open("child").read():
    pass
os.kill(os.getpid(), signal.SIGKILL)
""",
        expect=-9,
    )
    try:
        checkpointer = tl.Checkpointer(tmp_path / "steps", keep=None, process_group=False)
        assert checkpointer.steps() == [1]
        checkpointer.save(3, {"x": torch.ones(3)}).wait()
        assert checkpointer.steps() == [1, 3]
        assert not (tmp_path / "steps" / "step-00000002").exists()  # debris
    finally:
        (tmp_path / "over").touch()
