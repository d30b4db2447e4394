"""Devices that stop answering: Ctrl-C ends every wait, memory under way is kept, and the process can exit."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

RunScript = Callable[..., str]

# Reads are sent and never come back: one lane, four at a time, and a queue that holds 4096 more.
HUNG = """
import os, signal, sys, threading
import trunkline as tl

faults = tl.Faults()
engine = tl.Engine(faults=faults, queue_depth=4, lanes=1)
with open("file", "wb") as made:
    made.write(b"x" * 4096)
file = tl.open("file", "r+", engine=engine)
sent = faults.commands("read")
faults.hold("read", sent, 1 << 40)

def interrupt_when_hung():
    # Ctrl-C, once, when the device has taken all that it takes.
    def watch():
        while faults.commands("read") < sent + 4:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=watch, daemon=True).start()

def is_used(buffer):
    # Whether an operation has hold of a bytearray, which then cannot grow.
    try:
        buffer.append(0)
    except BufferError:
        return True
    buffer.pop()
    return False
"""


def script(body: str) -> str:
    return HUNG + textwrap.dedent(body)


def test_ctrl_c_ends_a_submit_that_waits_for_room(run_script: RunScript) -> None:
    printed = run_script(
        script("""
        buffers = [bytearray(1) for _ in range(6000)]
        interrupt_when_hung()
        try:
            engine.submit([tl.Read(file, buffer) for buffer in buffers])
        except KeyboardInterrupt:
            print("interrupted")
        used = [is_used(buffer) for buffer in buffers]
        taken = used.index(False)
        assert taken >= 4096 and not any(used[taken:])
        faults.release()
        engine.close()  # when all that was taken is over
        assert all(buffer == b"x" for buffer in buffers[:taken])
        assert not any(buffer == b"x" for buffer in buffers[taken:])
        print(faults.commands("read") - sent == taken)
        """)
    )
    assert printed == "interrupted\nTrue\n"


@pytest.mark.parametrize(
    "call",
    [
        "file.async_pread(bytearray(1))",
        "file.async_pwrite(b'1')",
        "file.pread(bytearray(1))",
        "file.pwrite(bytes(3_000_000))",
        "engine.submit([tl.Write(file, bytes(8_000_000), 4096)])",
        "tl.wait_all([first])",
        "file.close()",
        "engine.close()",
    ],
)
def test_ctrl_c_ends_every_wait_for_a_full_queue(run_script: RunScript, call: str) -> None:
    printed = run_script(
        script(f"""
        first = file.async_pread(bytearray(1))
        interrupt_when_hung()
        try:
            engine.submit([tl.Read(file, bytearray(1)) for _ in range(6000)])
        except KeyboardInterrupt:
            pass  # the queue is full, and stays so
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            {call}
        except KeyboardInterrupt:
            print("interrupted")
        assert not first.done()
        faults.release()
        print(first.result())
        """)
    )
    assert printed == "interrupted\n1\n"


def test_an_interrupted_read_keeps_the_memory_that_is_still_written_to(run_script: RunScript) -> None:
    printed = run_script(
        script("""
        big = tl.open("big", "w", engine=engine)
        big.pwrite(b"y" * 8_000_000)
        target = bytearray(8_000_000)
        interrupt_when_hung()
        try:
            big.pread(target)
        except KeyboardInterrupt:
            print("interrupted", is_used(target))
        faults.release()
        engine.close()
        print(set(target) <= {0, ord("y")})
        """).replace('faults.commands("read") < sent + 4', 'faults.commands("read") < sent + 2')
    )
    assert printed == "interrupted True\nTrue\n"


@pytest.mark.parametrize(
    "call",
    [
        "volume.open('striped')",
        "tl.open([*directories, 'striped'])",
        "file.truncate(10)",
        "file.async_pwrite(b'1', 900_000)",
    ],
)
def test_ctrl_c_ends_a_system_call_that_blocks(run_script: RunScript, call: str) -> None:
    printed = run_script(f"""
        import fcntl, os, signal, struct, sys, threading
        import trunkline as tl

        directories = ["one", "two"]
        for directory in directories:
            os.mkdir(directory)
        volume = tl.Volume(directories, stripe_bytes=4096)
        file = volume.open("striped", "w")
        file.pwrite(bytes(500_000))
        # Opening or growing the file waits for this lock.
        holder = os.open("one/striped.0", os.O_RDWR)
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, (1 << 63) - 2, 1, 0)
        fcntl.fcntl(holder, fcntl.F_OFD_SETLK, lock)
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            {call}
            print("was not held up")
        except KeyboardInterrupt:
            print("interrupted")
        os.close(holder)
        """)
    assert printed == "interrupted\n"


# Memory whose pages never come: who writes to it waits for ever, as for a device that does not answer.
ABSENT_MEMORY = """
import ctypes, fcntl, mmap, os, struct, sys
import trunkline as tl

SYS_USERFAULTFD, UFFDIO_API, UFFDIO_REGISTER = 323, 0xC018AA3F, 0xC020AA00
handler = ctypes.CDLL(None, use_errno=True).syscall(SYS_USERFAULTFD, os.O_CLOEXEC)
if handler < 0:
    sys.exit(77)
fcntl.ioctl(handler, UFFDIO_API, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
memory = mmap.mmap(-1, 1 << 20)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(handler, UFFDIO_REGISTER, bytearray(struct.pack("QQQQ", address, 1 << 20, 1, 0)))
with open("file", "wb") as made:
    made.write(b"x" * 100_000)
"""


def end_of(body: str, directory: Path, timeout: str, *, interrupt: bool = False) -> tuple[int, str]:
    """Run a script with a hung read until it ends: its exit code and what it wrote to stderr."""
    child = subprocess.Popen(
        [sys.executable, "-c", ABSENT_MEMORY + textwrap.dedent(body)],
        cwd=directory,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRUNKLINE_EXIT_TIMEOUT": timeout},
    )
    try:
        assert child.stderr is not None
        text = ""
        if interrupt:
            text = child.stderr.readline()  # when it says what it waits for
            child.send_signal(signal.SIGINT)
        text += child.communicate(timeout=60)[1]
    finally:
        child.kill()
        child.wait()
    if child.returncode == 77:
        pytest.skip("no userfaultfd (root only) to make memory that never arrives")
    return child.returncode, text


@pytest.mark.parametrize("keep", ["future = ", ""])
@pytest.mark.parametrize("engine", ["None", "tl.Engine('threads')"])
def test_the_exit_gives_up_what_makes_no_progress(tmp_path: Path, keep: str, engine: str) -> None:
    code, text = end_of(
        f"""
        file = tl.open("file", engine={engine})
        {keep}file.async_pread(memoryview(memory)[:100_000])
        """,
        tmp_path,
        "0.5",
    )
    assert code == 1, text
    waits, gave_up = text.splitlines()
    assert waits == ("trunkline: the exit waits for reading 100000 bytes at 0 of file; Ctrl-C ends the wait")
    assert gave_up.startswith("trunkline: no progress for 0.5 s: gave up reading 100000 bytes at 0 of file;")


def test_ctrl_c_ends_the_wait_at_the_exit(tmp_path: Path) -> None:
    code, text = end_of(
        """
        file = tl.open("file")
        future = file.async_pread(memoryview(memory)[:100_000])
        """,
        tmp_path,
        "1000",
        interrupt=True,
    )
    assert code == -signal.SIGINT, text
    assert text.startswith("trunkline: the exit waits for reading 100000 bytes at 0 of file;")


@pytest.mark.parametrize("call", ["tl.save(state, 'a.pt', engine=engine)", "checkpointer.load()"])
def test_ctrl_c_ends_a_call_that_moves_tensors_and_the_exit_gives_up(tmp_path: Path, call: str) -> None:
    code = f"""
import os, signal, threading
import torch
import trunkline as tl
faults = tl.Faults()
engine = tl.Engine(faults=faults)
state = {{"w": torch.ones(1_000_000)}}
checkpointer = tl.Checkpointer("run", engine=engine, process_group=False)
checkpointer.save(1, state, block=True)
for operation in ("read", "write"):
    faults.hold(operation, faults.commands(operation), 1 << 40)
ended = threading.Event()
def interrupt():
    while not ended.wait(0.5):
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    {call}
    print("was not held up")
except KeyboardInterrupt:
    ended.set()
    print("interrupted")
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "TRUNKLINE_EXIT_TIMEOUT": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.stdout == "interrupted\n", result.stderr
    assert "gave up waiting for interrupted reads and writes" in result.stderr
    assert result.returncode == 1
