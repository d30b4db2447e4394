"""Signal handlers that save, load and wait in the midst of the main thread's saves: none of them hangs."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import support_warm

import trunkline as tl

RunScript = Callable[..., str]

PRELUDE = """
import random, signal, sys, threading, time
import torch
import trunkline as tl

faults = tl.Faults()
engine = tl.Engine("threads", faults=faults)
checkpointer = tl.Checkpointer("steps", process_group=False, engine=engine)
state = {"x": torch.arange(1000)}

def on_alarm(handler, seconds=0.05):
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
"""


def test_a_handler_saves_while_save_waits_for_the_one_before(run_script: RunScript) -> None:
    printed = run_script(
        PRELUDE
        + """
def handler(*_):
    threading.Timer(0.05, faults.release).start()
    checkpointer.save(7, state, block=True)
    print("handler:", checkpointer.steps())

faults.hold("write", 0, 1 << 40)
checkpointer.save(1, state)
on_alarm(handler)
checkpointer.save(2, state, block=True)
print("loop:", checkpointer.steps())
assert torch.equal(checkpointer.load(7)["x"], state["x"])
"""
    )
    assert printed == "handler: [1, 7]\nloop: [1, 2, 7]\n"


def test_an_error_of_the_handlers_save_is_raised_by_the_one_that_waited(run_script: RunScript) -> None:
    printed = run_script(
        PRELUDE
        + """
def handler(*_):
    faults.fail("write", faults.commands("write"), 5, 1)
    failed = checkpointer.save(7, {"x": torch.ones(3_000_000)})
    assert not failed.done()

faults.hold("write", 0, 1)
first = checkpointer.save(1, state)
threading.Timer(0.2, faults.release).start()
on_alarm(lambda *_: (first.wait(), handler()))
try:
    checkpointer.save(2, state, block=True)
    raise AssertionError("the error was lost")
except tl.Error as error:
    assert error.errno == 5, error
checkpointer.save(3, state, block=True)
print(checkpointer.steps())
"""
    )
    assert printed == "[1, 3]\n"


def test_a_handler_that_leaves_the_program_once_it_has_saved(run_script: RunScript) -> None:
    printed = run_script(
        PRELUDE
        + """
def handler(*_):
    faults.release()
    checkpointer.save(7, state, block=True)
    print(checkpointer.steps(), flush=True)
    sys.exit(3)

faults.hold("write", 0, 1 << 40)
checkpointer.save(1, state)
on_alarm(handler)
checkpointer.save(2, state)
""",
        expect=3,
    )
    assert printed == "[1, 7]\n"


def test_in_the_midst_of_a_save_a_handler_is_told_so_at_once(run_script: RunScript, tmp_path: Path) -> None:
    printed = run_script(
        PRELUDE
        + """
from trunkline.checkpoint.directory import step_save
flatten = step_save.flatten_with_features
calls = {
    "save": lambda: checkpointer.save(7, state),
    "wait": checkpointer.wait,
    "load": checkpointer.load,
}
checkpointer.save(1, state, block=True)

def interrupted(state):  # as a handler that runs just now
    for name, call in calls.items():
        try:
            call()
            raise AssertionError(name)
        except tl.Error as error:
            print(error)
    tl.save(state, "file.pt")
    return flatten(state)

step_save.flatten_with_features = interrupted
checkpointer.save(2, state, block=True)
step_save.flatten_with_features = flatten
checkpointer.save(3, state, block=True)
assert torch.equal(tl.load("file.pt")["x"], state["x"])
print(checkpointer.steps())
"""
    )
    lines = printed.splitlines()
    assert lines[-1] == "[1, 2, 3]"
    for line, call in zip(lines[:-1], ("save step 7", "wait", "load"), strict=True):
        assert line == (
            f"cannot {call} in {tmp_path}/steps: a signal handler called it while save(2) was running in the "
            "same thread; set a flag in the handler, and save in the training loop "
            '("Preemption" in docs/checkpoints.md shows how)'
        )


# Until the main thread has been interrupted so often, at random moments.
HAMMER = """
rng = random.Random(6)
counts = {"done": 0, "rejected": 0}
checkpointer = tl.Checkpointer("steps", keep=2, process_group=False)
numbers = iter(range(10**9))
last = None

def calls(way):
    global last
    step = next(numbers)
    return (
        lambda: checkpointer.save(step, state),
        lambda: checkpointer.save(step, state, block=True),
        lambda: checkpointer.wait(),
        lambda: checkpointer.load(),
        lambda: tl.save(state, "file.pt"),
        lambda: tl.save(state, "file.safetensors"),
        lambda: tl.save_async(state, "async.pt"),
        lambda: tl.save_async(state, "async.safetensors").wait(),
        lambda: tl.load("file.pt"),
        lambda: [thread.name for thread in threading.enumerate()],
        lambda: tl.Checkpointer("steps", process_group=False).latest(),
    )[way]()

def arm():
    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 3e-3))

def handler(*_):
    try:
        calls(rng.randrange(11))
        counts["done"] += 1
    except tl.Error as error:
        if "running in the same thread" not in str(error):
            raise
        counts["rejected"] += 1
    arm()

def progress():
    handle = checkpointer._last
    while handle is not None and not handle.done():
        handle.progress()

for way in range(11):
    calls(way)
signal.signal(signal.SIGALRM, handler)
arm()
until = time.monotonic() + 3
while time.monotonic() < until or counts["done"] < 100:
    calls(rng.randrange(11))
    progress()
    other = threading.Thread(target=lambda: None)
    other.start()
    other.join()
signal.setitimer(signal.ITIMER_REAL, 0)
checkpointer.wait()
checkpointer.save(next(numbers), state, block=True)
assert torch.equal(checkpointer.load()["x"], state["x"])
print(counts["done"], counts["rejected"])
"""


def test_handlers_at_any_moment(tmp_path: Path) -> None:
    """With a stack of every thread where it hangs."""
    code = "import faulthandler\nfaulthandler.dump_traceback_later(100, exit=True)\n" + PRELUDE + HAMMER
    done = support_warm.run(["-c", textwrap.dedent(code)], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


def test_sigterm_during_the_exit_does_not_hang(tmp_path: Path) -> None:
    """A handler that saves also runs while the interpreter waits for the save before."""
    code = PRELUDE + textwrap.dedent(
        """
        import os
        def handler(*_):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            faults.release()
            checkpointer.save(7, state, block=True)
        signal.signal(signal.SIGTERM, handler)
        faults.hold("write", 0, 1 << 40)
        checkpointer.save(1, state)

        def terminate():
            threading.main_thread().join()  # ends when the interpreter begins to exit
            while not os.path.exists("steps/step-00000007"):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.05)
        threading.Thread(target=terminate, daemon=True).start()
        """
    )
    done = support_warm.run(["-c", code], cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert tl.Checkpointer(tmp_path / "steps", process_group=False).steps() == [1, 7]
