"""Ctrl-C, and waiting, while the interpreter exits and a save is under way."""

import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import support_warm
import torch
from torch.distributed import TCPStore

import trunkline as tl
from trunkline import _core

RunScript = Callable[..., str]

# `saving()` begins a save whose writes are held. When the main thread is at its end, `at_exit()` is called in
# a thread of its own; what is held is released as soon as the save was cancelled, or by `faults.release()`.
PRELUDE = """
import os, signal, sys, threading
import torch
import trunkline as tl
from trunkline.checkpoint import save as saving
from trunkline._tensor_io.flag import Flag

faults = tl.Faults()
engine = tl.Engine("threads", faults=faults)
state = {"x": torch.ones(3_000_000)}

def beside_the_exit(body):
    def run():
        threading.main_thread().join()  # ends when the interpreter begins to exit
        body()
    threading.Thread(target=run, daemon=True).start()

cancelled = Flag()

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def interrupt_until(flag):
    # One that comes just before the main thread waits for a lock is only seen with the next.
    while not flag.is_set():
        interrupt()
        flag.wait(2)

def saving(way):
    if way == "pt":
        handle = tl.save_async(state, "big.pt", engine=engine)
    else:
        handle = tl.Checkpointer("steps", process_group=False, engine=engine).save(2, state)
    handle.wait_staged()
    cancel = handle.cancel
    # Started now: the handler may come while the interpreter holds a lock that starting a thread takes.
    threading.Thread(target=lambda: cancelled.wait() and faults.release(), daemon=True).start()
    def cancel_and_release():
        cancel()
        cancelled.set()
    handle.cancel = cancel_and_release
    return handle
"""


def run(directory: Path, code: str) -> "subprocess.CompletedProcess[str]":
    return support_warm.run(["-c", PRELUDE + textwrap.dedent(code)], cwd=directory)


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


SAID = {
    "pt": "saving big.pt was abandoned because of the interrupt; big.pt is as it was before",
    "checkpoint": "saving step 2 to steps was abandoned because of the interrupt; "
    "the checkpoints in steps are as they were before",
}


@pytest.mark.parametrize("way", ["pt", "checkpoint"])
def test_ctrl_c_during_the_exit_abandons_the_save(tmp_path: Path, way: str) -> None:
    old: dict[str, Any] = {"x": torch.zeros(5)}
    if way == "pt":
        tl.save(old, tmp_path / "big.pt")
    else:
        tl.Checkpointer(tmp_path / "steps", process_group=False).save(1, old, block=True)
    before = names(tmp_path)
    done = run(
        tmp_path,
        f"""
        import atexit
        atexit.register(lambda: print("exit handler", flush=True))
        faults.hold("write", 0, 1 << 40)
        saving("{way}")
        beside_the_exit(lambda: interrupt_until(cancelled))
        """,
    )
    lines = [line for line in done.stderr.splitlines() if "finishing" not in line]  # on a slow machine
    assert lines == [f"trunkline: {SAID[way]}"]
    assert done.stdout == "exit handler\n"
    assert done.returncode == -signal.SIGINT
    assert names(tmp_path) == before
    if way == "pt":
        assert torch.equal(tl.load(tmp_path / "big.pt")["x"], old["x"])
    else:
        checkpointer = tl.Checkpointer(tmp_path / "steps", process_group=False)
        assert checkpointer.steps() == [1]
        assert torch.equal(checkpointer.load()["x"], old["x"])


def test_ctrl_c_that_a_worker_process_gets_during_its_exit(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import multiprocessing.util
        def work():
            global engine
            faults = tl.Faults()
            globals()["faults"] = faults
            engine = tl.Engine("threads", faults=faults)
            faults.hold("write", 0, 1 << 40)
            saving("pt")
            interrupting = threading.Thread(target=interrupt_until, args=(cancelled,), daemon=True)
            multiprocessing.util.Finalize(None, interrupting.start, exitpriority=0)  # when it exits
        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        print(process.exitcode)
        """,
    )
    assert f"trunkline: {SAID['pt']}\n" in done.stderr
    assert int(done.stdout) != 0
    assert names(tmp_path) == set()


# joining_ended: set when the main thread waits for saves itself: a handler ended the joining of threads.
JOINING_ENDED = """
from trunkline._tensor_io import at_exit
joining_ended, report_later = Flag(), at_exit._report_later
def report(saves, can_abandon):
    if threading.current_thread() is threading.main_thread():
        joining_ended.set()
    report_later(saves, can_abandon)
at_exit._report_later = report
"""


@pytest.mark.parametrize("base", ["BaseException", "SystemExit"])
def test_a_handler_of_the_programs_own_that_raises(tmp_path: Path, base: str) -> None:
    done = run(
        tmp_path,
        f"""
        class Stop({base}): pass
        def handle_signal(number, frame):
            raise Stop
        signal.signal(signal.SIGINT, handle_signal)
        faults.hold("write", 0, 1 << 40)
        saving("pt")
        exec({JOINING_ENDED!r})
        def twice():
            interrupt_until(joining_ended)
            interrupt_until(cancelled)
        beside_the_exit(twice)
        """,
    )
    assert f"trunkline: {SAID['pt']}\n" in done.stderr
    assert done.returncode == -signal.SIGINT
    assert names(tmp_path) == set()


@pytest.mark.parametrize("way", ["pt", "checkpoint"])
def test_signals_whose_handler_exits_do_not_abandon_the_save(tmp_path: Path, way: str) -> None:
    done = run(
        tmp_path,
        f"""
        handled = Flag()
        def handle_signal(number, frame):
            handled.set()
            sys.exit(3)
        signal.signal(signal.SIGTERM, handle_signal)
        faults.hold("write", 0, 1 << 40)
        saving("{way}")
        exec({JOINING_ENDED!r})
        def terminate_until(is_over):
            while not (is_over() or cancelled.is_set()):
                os.kill(os.getpid(), signal.SIGTERM)
                handled.wait(2)
        def often():
            global handled
            terminate_until(joining_ended.is_set)
            for _ in range(5):
                handled = Flag()
                terminate_until(handled.is_set)
            faults.release()
        beside_the_exit(often)
        sys.exit(4)
        """,
    )
    assert "abandoned" not in done.stderr
    assert done.returncode == 4  # of the first exit
    if way == "pt":
        assert torch.equal(tl.load(tmp_path / "big.pt")["x"], torch.ones(3_000_000))
    else:
        assert tl.Checkpointer(tmp_path / "steps", process_group=False).steps() == [2]


@pytest.mark.parametrize("way", ["pt", "checkpoint"])
def test_an_exit_that_takes_long_says_what_it_waits_for(tmp_path: Path, way: str) -> None:
    done = run(
        tmp_path,
        f"""
        faults.hold("write", 1, 1 << 40)
        saving("{way}")
        class Stderr:
            def write(self, text):
                sys.__stderr__.write(text)
                if "finishing" in text:
                    faults.release()
            def flush(self):
                sys.__stderr__.flush()
        sys.stderr = Stderr()
        beside_the_exit(lambda: None)
        """,
    )
    assert done.returncode == 0
    subject = "big.pt" if way == "pt" else "step 2 to steps"
    line = (
        rf"trunkline: finishing the save of {subject} \([0-9.]+ of 12\.0 MB written\); Ctrl-C abandons it\n"
    )
    assert re.fullmatch(line, done.stderr), done.stderr
    if way == "pt":
        assert torch.equal(tl.load(tmp_path / "big.pt")["x"], torch.ones(3_000_000))
    else:
        assert tl.Checkpointer(tmp_path / "steps", process_group=False).steps() == [2]


def test_an_exit_promises_no_ctrl_c_that_the_program_handles_itself(tmp_path: Path) -> None:
    """In an exit handler, where nothing has joined threads before."""
    done = run(
        tmp_path,
        """
        import atexit, time
        signal.signal(signal.SIGINT, lambda number, frame: None)
        faults.hold("write", 1, 1 << 40)
        class Stderr:
            def write(self, text):
                sys.__stderr__.write(text)
                if "finishing" in text:
                    interrupt()
                    faults.release()
            def flush(self):
                sys.__stderr__.flush()
        def late():
            saving("checkpoint")
            sys.stderr = Stderr()
        atexit.register(late)
        """,
    )
    assert done.returncode == 0
    assert "finishing the save of step 2 to steps" in done.stderr
    assert "Ctrl-C" not in done.stderr
    assert tl.Checkpointer(tmp_path / "steps", process_group=False).steps() == [2]


def test_a_message_that_fails_ends_no_save(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        from trunkline._tensor_io import at_exit
        def fail(save):
            faults.release()
            raise AttributeError("progress")
        at_exit._progress_of = fail
        faults.hold("write", 1, 1 << 40)
        saving("checkpoint")
        beside_the_exit(lambda: None)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "abandoned" not in done.stderr
    assert tl.Checkpointer(tmp_path / "steps", process_group=False).steps() == [2]


@pytest.mark.parametrize("count", [3, 100])
def test_an_exit_that_waits_for_many_saves_names_the_first(tmp_path: Path, count: int) -> None:
    done = run(
        tmp_path,
        f"""
        faults.hold("write", 0, 1 << 40)
        for number in range({count}):
            tl.save_async({{"x": torch.ones(10)}}, f"{{number}}.pt", engine=engine)
        class Stderr:
            def write(self, text):
                sys.__stderr__.write(text)
                if "finishing" in text:
                    faults.release()
            def flush(self):
                sys.__stderr__.flush()
        sys.stderr = Stderr()
        """,
    )
    assert done.returncode == 0
    named = " and of ".join(rf"{number}\.pt( \([0-9.]+ of [0-9.]+ MB written\))?" for number in range(3))
    more = " and 97 more" if count == 100 else ""
    line = rf"trunkline: finishing the save of {named}{more}; Ctrl-C abandons them\n"
    assert re.fullmatch(line, done.stderr), done.stderr
    assert names(tmp_path) == {f"{number}.pt" for number in range(count)}


def test_after_ctrl_c_in_wait_the_save_is_finished(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        faults.hold("write", 0, 1 << 40)
        handle = saving("pt")
        threading.Timer(0.05, interrupt).start()
        beside_the_exit(faults.release)
        handle.wait()
        """,
    )
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr
    assert "abandoned" not in done.stderr
    assert torch.equal(tl.load(tmp_path / "big.pt")["x"], torch.ones(3_000_000))


def test_an_exit_that_is_quick_says_nothing(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        from trunkline._tensor_io import at_exit
        at_exit._NOTICE_SECONDS = 60.0
        faults.hold("write", 0, 1 << 40)
        saving("pt")
        beside_the_exit(faults.release)
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert names(tmp_path) == {"big.pt"}


def test_interrupts_are_left_alone_before_the_exit() -> None:
    assert threading.main_thread().is_alive()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("way", ["pt", "checkpoint"])
def test_a_save_that_fails_during_the_exit_makes_the_status_1(tmp_path: Path, way: str) -> None:
    done = run(
        tmp_path,
        f"""
        import atexit
        atexit.register(lambda: sys.stdout.write("exit handler"))  # flushed later
        faults.fail("sync", 0, 5, 1 << 40)
        faults.hold("write", 0, 1 << 40)
        saving("{way}")
        beside_the_exit(faults.release)
        """,
    )
    subject = "big.pt" if way == "pt" else "step 2 to steps"
    assert f"trunkline: saving {subject} failed: " in done.stderr
    assert "EIO" in done.stderr
    assert (done.returncode, done.stdout) == (1, "exit handler")


@pytest.mark.parametrize(("ending", "status"), [("handle.wait()", 1), ("pass", 0), ("os._exit(3)", 3)])
def test_the_status_where_no_failure_is_left_to_report(tmp_path: Path, ending: str, status: int) -> None:
    done = run(
        tmp_path,
        f"""
        faults.fail("write", 0, 28, 1 << 40)
        handle = tl.save_async(state, "big.pt", engine=engine)
        try:
            handle.wait()
        except OSError:
            {ending}
        """,
    )
    assert done.returncode == status
    assert "trunkline: saving" not in done.stderr


# When the handler that saves is registered: at the exit, handlers run in the opposite order.
MOMENTS = {
    "before the package is imported": """
import atexit
atexit.register(lambda: save())
import torch, trunkline as tl
{prepare}
""",
    "before saving is imported": """
import atexit
import torch, trunkline as tl
atexit.register(lambda: save())
{prepare}
""",
    "as an object is watched": """
import weakref
import torch, trunkline as tl
class Watched: pass
watched = Watched()
weakref.finalize(watched, lambda: save())
{prepare}
""",
    "with the package imported in it": """
import atexit, torch
def import_and_save():
    global tl
    import trunkline as tl
    {prepare}
    save()
atexit.register(import_and_save)
""",
}
# With these, torch is imported before the handler comes: it may as well be imported before all else.
TORCH_FIRST = ("before saving is imported", "with the package imported in it")
WAYS = {
    "tl.save": ("pass", 'tl.save(state(), "big.pt")'),
    "tl.save_async": ("pass", 'tl.save_async(state(), "big.pt")'),
    "Checkpointer": ("global c; c = tl.Checkpointer('run', process_group=False)", "c.save(7, state())"),
    "Checkpointer, blocking": (
        "global c; c = tl.Checkpointer('run', process_group=False)",
        "c.save(7, state(), block=True)",
    ),
}


def exit_with(directory: Path, moment: str, prepare: str, save: str) -> "subprocess.CompletedProcess[str]":
    code = f"""
def state():
    return {{"x": torch.ones(3_000_000)}}
def save():
    {save}
{MOMENTS[moment].format(prepare=prepare)}
"""
    return run_code(moment, code, directory)


def run_code(moment: str, code: str, directory: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    if moment in TORCH_FIRST:
        return support_warm.run(["-c", code, *arguments], cwd=directory)
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("moment", "way"),
    [
        *[("before the package is imported", way) for way in WAYS],
        *[("before saving is imported", way) for way in ("tl.save_async", "Checkpointer")],
        *[("as an object is watched", way) for way in ("Checkpointer", "Checkpointer, blocking")],
        *[("with the package imported in it", way) for way in ("tl.save_async", "Checkpointer")],
    ],
)
def test_what_exit_handlers_save(tmp_path: Path, moment: str, way: str) -> None:
    done = exit_with(tmp_path, moment, *WAYS[way])
    assert (done.returncode, done.stderr) == (0, "")
    if way.startswith("Checkpointer"):
        saved = tl.Checkpointer(tmp_path / "run", process_group=False).load(7)
    else:
        assert names(tmp_path) == {"big.pt"}
        saved = tl.load(tmp_path / "big.pt")
    assert torch.equal(saved["x"], torch.ones(3_000_000))


OF_RANKS = """
    global c
    import torch.distributed as dist
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    c = tl.Checkpointer("run", timeout=30.0)
"""


def exits_of_ranks(directory: Path, moment: str, prepare: str, save: str) -> list[tuple[int, str]]:
    """Have two ranks exit; return the status and the messages of each."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    prepare = textwrap.dedent(prepare)
    if moment == "with the package imported in it":
        prepare = textwrap.indent(prepare, "    ").lstrip()
    code = f"""
import sys
def state():
    return {{"x": torch.ones(3_000_000)}}
def save():
    {save}
{MOMENTS[moment].format(prepare=prepare)}
"""
    with ThreadPoolExecutor(2) as pool:
        ranks = [
            pool.submit(run_code, moment, code, directory, str(rank), str(server.port)) for rank in range(2)
        ]
    return [(rank.result().returncode, rank.result().stderr) for rank in ranks]


@pytest.mark.parametrize("destroyed", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_exit_handlers_of_ranks_save(tmp_path: Path, moment: str, destroyed: bool) -> None:
    """Also where the process group is destroyed by then: the store of the Checkpointer outlives it."""
    prepare = OF_RANKS + ("    dist.destroy_process_group()\n" if destroyed else "")
    done = exits_of_ranks(tmp_path, moment, prepare, "c.save(7, state())")
    assert done == [(0, "")] * 2
    checkpointer = tl.Checkpointer(tmp_path / "run", process_group=False)
    assert torch.equal(checkpointer.load(7)["x"], torch.ones(3_000_000))
    assert _core.CheckpointStore(str(tmp_path / "run")).read_manifest(7)["world_size"] == 2


def test_an_exit_handler_may_load(tmp_path: Path) -> None:
    tl.save({"x": torch.ones(3)}, tmp_path / "small.pt")
    moment = "before the package is imported"
    done = exit_with(tmp_path, moment, "pass", 'print(tl.load("small.pt")["x"].tolist())')
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1.0, 1.0, 1.0]\n", "")


FAILING = """
    faults = tl.Faults()
    engine = tl.Engine("threads", faults=faults)
    faults.fail("write", 0, 28, 1 << 40)
"""


@pytest.mark.parametrize("way", ["tl.save_async", "Checkpointer"])
def test_a_save_that_fails_in_an_exit_handler(tmp_path: Path, way: str) -> None:
    if way == "Checkpointer":
        save = "tl.Checkpointer('run', process_group=False, engine=engine).save(7, state())"
    else:
        save = "tl.save_async(state(), 'big.pt', engine=engine)"
    done = exit_with(tmp_path, "before the package is imported", "pass", FAILING + f"    {save}")
    assert done.returncode == 1
    assert "ENOSPC" in done.stderr.splitlines()[-1]
    assert not [name for name in names(tmp_path) if "big.pt" in name or "manifest" in name or "tmp" in name]


def test_ctrl_c_while_an_exit_handler_saves(tmp_path: Path) -> None:
    tl.save({"x": torch.zeros(5)}, tmp_path / "big.pt")
    save = """
    import os, signal, threading
    faults = tl.Faults()
    engine = tl.Engine("threads", faults=faults)
    faults.hold("write", 0, 1 << 40)
    def interrupt_the_save():
        turn = threading.Event()
        while signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
            turn.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt_the_save, daemon=True).start()
    tl.save_async(state(), "big.pt", engine=engine)
"""
    done = exit_with(tmp_path, "before the package is imported", "pass", save)
    assert done.returncode == -signal.SIGINT
    assert torch.equal(tl.load(tmp_path / "big.pt")["x"], torch.zeros(5))


@pytest.mark.parametrize("save", WAYS)
def test_a_thread_of_an_exit_handler_that_comes_too_late(tmp_path: Path, save: str) -> None:
    prepare, call = WAYS[save]
    in_thread = f"""
    import threading
    def report():
        try:
            {call}
        except tl.Error as error:
            print(error)
    thread = threading.Thread(target=report)
    thread.start()
    thread.join()
"""
    done = exit_with(tmp_path, "before the package is imported", prepare, in_thread)
    assert (done.returncode, done.stderr) == (0, "")
    what = f"step 7 to {tmp_path}/run" if "Checkpointer" in save else "big.pt"
    assert done.stdout.startswith(f"cannot save {what} in this thread: the interpreter is exiting")
    assert names(tmp_path) == set()


@pytest.mark.parametrize("save", WAYS)
@pytest.mark.parametrize("main_is_kept", [False, True])
def test_an_object_that_saves_when_the_interpreter_is_gone(
    tmp_path: Path, save: str, main_is_kept: bool
) -> None:
    """If something keeps __main__, as dill does, modules are emptied first, and no code of ours can run."""
    prepare, call = WAYS[save]
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "faulthandler",
            "-c",
            f"""
import builtins, sys
sys.modules["dill"] = None  # which torch imports where it is installed
if {main_is_kept}:
    builtins.kept = sys.modules["__main__"]
import torch
import trunkline as tl
{prepare}
tl.save, tl.save_async
saved = {{"x": torch.ones(3)}}
class Last:
    def __del__(self, tl=tl, state=lambda saved=saved: saved, c=globals().get("c")):
        {call}
last = Last()
""",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if main_is_kept:
        assert "Exception ignored in: <function Last.__del__" in done.stderr
    else:
        assert re.search(
            r"Error: cannot (save|use trunkline\.save).*: the interpreter is shutting down", done.stderr
        )
    assert done.returncode == 0
    assert names(tmp_path) == set()


# Loading, and tl.dcp, start threads without what saves are made with.
WITHOUT_SAVES = """
import sys, threading
from trunkline._tensor_io.background import start_thread, unfinished
from trunkline._tensor_io.flag import Flag
assert "trunkline.checkpoint.save" not in sys.modules
"""


def test_an_exit_waits_for_threads_where_nothing_was_saved(run_script: RunScript, tmp_path: Path) -> None:
    run_script(
        WITHOUT_SAVES
        + """
import time
def run():
    threading.main_thread().join()  # ends when the interpreter begins to exit
    for _ in range(20):
        time.sleep(0.01)
    open("done", "w").close()
start_thread(run, Flag())
"""
    )
    assert (tmp_path / "done").exists()


def test_a_child_does_not_wait_for_threads_of_its_parent(run_script: RunScript) -> None:
    run_script(
        WITHOUT_SAVES
        + """
import os, signal
over = Flag()
start_thread(over.wait, Flag())
child = os.fork()
if child == 0:
    signal.alarm(60)  # instead of hanging
    assert not unfinished
    sys.exit(7)
_, status = os.waitpid(child, 0)
over.set()
assert os.waitstatus_to_exitcode(status) == 7, status
"""
    )


@pytest.mark.parametrize(
    ("method", "end"),
    [
        ("fork", "returns"),
        ("fork", "exits with 0"),
        ("fork", "exits with 3"),
        ("fork", "raises"),
        ("forkserver", "returns"),
        ("spawn", "returns"),
    ],
)
def test_a_failed_save_of_a_process_of_multiprocessing(tmp_path: Path, method: str, end: str) -> None:
    """Forked ones end by os._exit, without exit handlers."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, shutil, sys
            import torch
            import trunkline as tl

            def child(directory, end):
                checkpoints = tl.Checkpointer(directory, process_group=False)
                checkpoints.save(1, {"x": torch.ones(3)}, block=True)
                shutil.rmtree(directory)
                open(directory, "w").close()  # where nothing can be saved
                checkpoints.save(2, {"x": torch.ones(3)})
                if end == "raises":
                    raise KeyError("of the program")
                if end != "returns":
                    sys.exit(int(end[-1]))

            if __name__ == "__main__":
                method, directory, end = sys.argv[1:]
                process = multiprocessing.get_context(method).Process(target=child, args=(directory, end))
                process.start()
                process.join()
                print("exit code", process.exitcode)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script), method, str(tmp_path / "run"), end],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"exit code {3 if end.endswith('3') else 1}\n", done.stderr
    assert done.stderr.count("trunkline: saving step 2") == 1, done.stderr
    assert ("KeyError: 'of the program'" in done.stderr) == (end == "raises")
