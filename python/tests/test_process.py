"""Processes: Ctrl-C, forks, exits with operations pending, and what an import brings with it."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

RunScript = Callable[..., str]

HELD = """
import os, signal, sys, threading
import trunkline as tl

faults = tl.Faults()
engine = tl.Engine(faults=faults, block_bytes=65536, queue_depth=4, lanes=1)
file = tl.open("file", "w", engine=engine)
file.pwrite(bytes(1_000_000))

armed = False
caught = threading.Event()

def on_interrupt(*_):
    global armed
    if armed:
        armed = False
        caught.set()
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, on_interrupt)

def interrupt_when_sent(op, count):
    # Sends Ctrl-C once `count` more commands were sent, until one comes after `armed` was set.
    target = faults.commands(op) + count
    def watch():
        while faults.commands(op) < target:
            os.sched_yield()
        while not caught.wait(0.01):
            os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=watch).start()
"""


def script(body: str, prelude: str = HELD) -> str:
    return prelude + textwrap.dedent(body)


@pytest.mark.parametrize(
    "call", ["future.result()", "future.wait()", "tl.wait_all([future])", "future.exception(100)"]
)
def test_ctrl_c_ends_a_wait_and_not_the_operation(run_script: RunScript, call: str) -> None:
    printed = run_script(
        script(f"""
        faults.hold("read", faults.commands("read"))
        interrupt_when_sent("read", 1)
        future = file.async_pread(bytearray(100))
        try:
            armed = True
            {call}
        except KeyboardInterrupt:
            assert not future.done()
            faults.release()
            print("interrupted", future.result())
        """)
    )
    assert printed == "interrupted 100\n"


def test_ctrl_c_cancels_a_large_blocking_read(run_script: RunScript) -> None:
    printed = run_script(
        script("""
        def release_and_raise(*arguments):
            try:
                on_interrupt(*arguments)
            except KeyboardInterrupt:
                print("commands", faults.commands("read") - before, flush=True)
                faults.release()
                raise
        signal.signal(signal.SIGINT, release_and_raise)
        before = faults.commands("read")
        faults.hold("read", before, 4)
        interrupt_when_sent("read", 4)
        try:
            armed = True
            file.pread(bytearray(1_000_000))
        except KeyboardInterrupt:
            print("interrupted after", engine.stats()["operations"] - 1)
        """)
    )
    # Of 16 blocks the queue took 4; the call raised only when the operation was over.
    assert printed == "commands 4\ninterrupted after 1\n"


@pytest.mark.parametrize("call", ["file.sync()", "file.close()", "engine.close()"])
def test_ctrl_c_ends_sync_and_close(run_script: RunScript, call: str) -> None:
    printed = run_script(
        script(f"""
        faults.hold("write", faults.commands("write"))
        interrupt_when_sent("write", 1)
        future = file.async_pwrite(bytes(100))
        try:
            armed = True
            {call}
        except KeyboardInterrupt:
            print("interrupted")
        faults.release()
        print(future.result())
        """)
    )
    assert printed == "interrupted\n100\n"


def test_a_forked_child_uses_the_default_engine(run_script: RunScript) -> None:
    printed = run_script("""
        import os, sys
        import trunkline as tl
        file = tl.open("file", "w")
        file.pwrite(b"parent")
        file.async_pread(bytearray(6)).add_done_callback(lambda _: None)
        engine = tl.Engine("threads")
        explicit = tl.open("file", engine=engine)
        for _ in range(3):
            child = os.fork()
            if child == 0:
                import threading
                target = bytearray(6)
                assert file.pread(target) == 6 and target == b"parent"
                assert file.async_pread(target).result() == 6
                called = threading.Event()
                file.async_pread(target).add_done_callback(lambda _: called.set())
                assert called.wait(60)
                with tl.open("other", "w") as other:
                    other.pwrite(b"child")
                try:
                    explicit.pread(target)
                    raise AssertionError("an engine of the parent worked")
                except tl.Error as error:
                    assert error.errno
                sys.exit(7)  # through atexit
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 7, status
        target = bytearray(6)
        assert file.pread(target) == 6
        assert explicit.pread(target) == 6
        print("parent", target.decode())
    """)
    assert printed == "parent parent\n"


def test_a_forked_child_does_not_wait_for_its_parent(run_script: RunScript) -> None:
    printed = run_script(
        script("""
        faults.hold("read", faults.commands("read"))
        future = file.async_pread(bytearray(100))
        child = os.fork()
        if child == 0:
            assert not future.done()
            try:
                future.result()
            except tl.Error as error:
                assert "fork" in str(error)
            del future, file
            sys.exit(5)
        _, status = os.waitpid(child, 0)
        faults.release()
        print(os.waitstatus_to_exitcode(status), future.result())
        """)
    )
    assert printed == "5 100\n"


def test_a_forked_child_cannot_touch_the_operations_of_its_parent(run_script: RunScript) -> None:
    printed = run_script(
        script("""
        faults.hold("read", faults.commands("read"), 1000)
        future = file.async_pread(bytearray(100))
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            assert not future.cancel()
            try:
                future.add_done_callback(print)
            except tl.Error as error:
                assert "fork" in str(error)
                sys.exit(5)
        _, status = os.waitpid(child, 0)
        faults.release()
        print(os.waitstatus_to_exitcode(status), future.result())
        """)
    )
    assert printed == "5 100\n"


def test_no_thread_to_be_had(run_script: RunScript) -> None:
    printed = run_script(
        script("""
        import resource
        if os.geteuid() == 0:  # the limit does not hold for root
            os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        file.async_pwrite(bytes(100_000))  # dropped: its memory is kept all the same
        try:
            file.async_pread(bytearray(100)).add_done_callback(print)
        except tl.Error as error:
            print("EAGAIN" in str(error))
        file.sync()
        file.close()
        """)
    )
    assert printed == "True\n"


def test_spawned_processes(run_script: RunScript, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        textwrap.dedent("""
        import trunkline as tl

        def size(path):
            with tl.open(path) as file:
                return file.size
        """)
    )
    printed = run_script("""
        import multiprocessing, sys
        import trunkline as tl
        sys.path.insert(0, ".")
        import worker
        with tl.open("file", "w") as file:
            file.pwrite(bytes(123))
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            print(pool.map(worker.size, ["file"] * 4))
    """)
    assert printed.strip() == "[123, 123, 123, 123]"


@pytest.mark.parametrize("keep", ["futures = ", ""])
def test_exit_finishes_pending_writes(run_script: RunScript, keep: str) -> None:
    printed = run_script(
        f"""
        import trunkline as tl
        file = tl.open("file", "w")
        {keep}[file.async_pwrite(bytearray(b"x" * 100_000), i * 100_000) for i in range(50)]
        """
    )
    assert printed == ""
    check = run_script("""
        import os
        print(os.path.getsize("file"), open("file", "rb").read() == b"x" * 5_000_000)
    """)
    assert check == "5000000 True\n"


def test_exit_with_held_operations(run_script: RunScript) -> None:
    printed = run_script(
        script("""
        faults.hold("read", faults.commands("read"), 1000)
        futures = [file.async_pread(bytearray(100_000)) for _ in range(4)]
        futures[0].add_done_callback(lambda future: print("called", future.result()))
        futures[1] = None
        """)
    )
    assert printed == "called 100000\n"


@pytest.mark.parametrize("threads", [1, 8])
def test_exit_while_daemon_threads_read(run_script: RunScript, threads: int) -> None:
    printed = run_script(
        script(f"""
        def read_on():
            buffer = bytearray(100)
            while True:
                file.pread(buffer)
                file.async_pread(buffer).result()

        sent = faults.commands("read")
        faults.hold("read", sent)
        for _ in range({threads}):
            threading.Thread(target=read_on, daemon=True).start()
        while faults.commands("read") == sent:
            os.sched_yield()
        print("ends")
        """)
    )
    assert printed == "ends\n"


def test_exit_handlers_may_still_write(run_script: RunScript) -> None:
    printed = run_script("""
        import atexit
        @atexit.register
        def save():
            with tl.open("late", "w") as file:
                print(file.async_pwrite(b"late").result())
        import trunkline as tl
    """)
    assert printed == "4\n"


def test_a_tensor_of_pinned_memory_may_be_alive_at_exit(run_script: RunScript) -> None:
    run_script("""
        import torch
        import trunkline as tl
        tensor = tl.torch.empty_pinned(1000)
    """)


def test_import_brings_neither_torch_nor_numpy(run_script: RunScript) -> None:
    printed = run_script("""
        import sys
        import trunkline as tl
        print([name for name in ("torch", "numpy", "asyncio") if name in sys.modules])
    """)
    assert printed == "[]\n"


def test_it_works_without_torch(run_script: RunScript) -> None:
    printed = run_script("""
        import sys
        sys.modules["torch"] = None  # import torch fails
        import numpy as np
        import trunkline as tl
        with tl.open("file", "w") as file:
            file.pwrite(np.arange(1000.0))
            target = np.empty(1000)
            file.async_pread(target).result()
        assert (target == np.arange(1000.0)).all()
        try:
            tl.torch
        except ImportError:
            print("no torch")
        assert not hasattr(tl, "nonsense")
    """)
    assert printed == "no torch\n"


def test_an_exit_timeout_that_is_no_number_is_warned_of(
    run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        import os, warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import trunkline
        print([str(each.message) for each in caught], caught[0].filename if caught else "")
    """
    for value in ("soon", "-1", "nan"):
        monkeypatch.setenv("TRUNKLINE_EXIT_TIMEOUT", value)
        printed = run_script(code)
        assert f"TRUNKLINE_EXIT_TIMEOUT: must be a number of seconds from 0, not '{value}'" in printed
        assert printed.endswith("<string>\n")
    monkeypatch.setenv("TRUNKLINE_EXIT_TIMEOUT", "2.5")
    assert run_script(code) == "[] \n"
