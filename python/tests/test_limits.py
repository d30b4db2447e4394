"""Processes with tight limits on memory and descriptors, and processes that multiprocessing starts."""

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

RunScript = Callable[..., str]

# Root may lock what it likes: its capabilities go, and its files stay its own.
NO_CAPABILITIES = """
import ctypes, os, resource, struct

header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
if ctypes.CDLL(None, use_errno=True).capset(header, ctypes.create_string_buffer(24)) != 0:
    raise OSError(ctypes.get_errno(), "capset")
"""


@pytest.mark.parametrize(("limit", "backend"), [(0, "io_uring"), (65536, "libaio"), (0, "threads")])
def test_everything_works_without_locked_memory(run_script: RunScript, limit: int, backend: str) -> None:
    printed = run_script(
        NO_CAPABILITIES
        + textwrap.dedent(f"""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit}, {limit}))
        import torch
        import trunkline as tl

        try:
            engine = tl.Engine({backend!r})
        except tl.Unsupported as error:
            engine = tl.Engine("threads")  # not here, or not without locked memory
        data = bytes(range(256)) * 20_000
        with tl.open("file", "w", engine=engine) as file:
            file.pwrite(data)
            file.sync()
            for start, size in ((0, len(data)), (4096, 8192), (3, 5_000_001), (511, 1)):
                for target in (bytearray(size), tl.pinned_empty(size, engine=engine)):
                    assert file.async_pread(target, start).result() == size
                    assert bytes(memoryview(target)) == data[start : start + size]
        assert not tl.pinned_empty(200_000, engine=engine).locked
        assert tl.torch.empty_pinned((3, 5), engine=engine).sum() == 0
        refused = [each["what"] for each in engine.explain("file")["refused"]]
        assert "memory lock" in refused, refused
        state = {{"weight": torch.arange(100_000.0), "step": 3}}
        tl.save(state, "state.pt")
        assert torch.equal(tl.load("state.pt")["weight"], state["weight"])
        tl.save({{"weight": state["weight"]}}, "state.safetensors")
        assert torch.equal(tl.load("state.safetensors")["weight"], state["weight"])
        checkpoints = tl.Checkpointer("run")
        checkpoints.save(1, state)
        checkpoints.wait()
        assert torch.equal(checkpoints.load()["weight"], state["weight"])
        print("all")
        """)
    )
    assert printed == "all\n"


def test_no_descriptor_is_left(run_script: RunScript) -> None:
    printed = run_script("""
        import errno, os, resource
        import trunkline as tl
        with tl.open("file", "w") as file:
            file.pwrite(b"before")
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
        for opens in (tl.open, tl.Volume(["."]).open):
            try:
                opens("file", "w")
                raise AssertionError("it was opened")
            except tl.Error as error:
                assert error.errno == errno.EMFILE, error
                assert "ulimit -n" in str(error), error
        assert os.path.getsize("file") == 6
        try:
            tl.Engine("io_uring")
            raise AssertionError("an engine without descriptors")
        except tl.Unsupported as error:
            assert "io_uring" in str(error)
        for fd in taken:
            os.close(fd)
        with tl.open("file") as file:
            print(file.pread(bytearray(6)))
    """)
    assert printed == "6\n"


def test_no_address_space_is_left(run_script: RunScript) -> None:
    printed = run_script("""
        import errno, resource
        import trunkline as tl
        engine = tl.Engine(lanes=1, pinned_budget_bytes="8GiB")
        file = tl.open("file", "w", engine=engine)
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (16 << 20), -1))
        before = engine.stats()["pinned_bytes"]
        try:
            tl.pinned_empty("1GiB", engine=engine)
            raise AssertionError("memory beyond the limit")
        except tl.Error as error:
            assert error.errno == errno.ENOMEM, error
        assert engine.stats()["pinned_bytes"] == before
        try:
            tl.Engine("threads", lanes=64)  # the stacks of as many threads
            raise AssertionError("threads beyond the limit")
        except tl.Unsupported as error:
            assert "thread" in str(error), error
        file.pwrite(b"x" * 300_001, 7)  # bounces, or goes through the page cache
        print(file.async_pread(bytearray(300_001), 7).result())
    """)
    assert printed == "300001\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_that_others_start(run_script: RunScript, tmp_path: Path, method: str) -> None:
    (tmp_path / "work.py").write_text(
        textwrap.dedent("""
        import trunkline as tl

        def move(number):
            with tl.open("file") as source, tl.open(f"copy{number}", "w") as target:
                data = tl.pinned_empty(source.size)
                source.async_pread(data).result()
                target.pwrite(data)
            return bytes(memoryview(data)[:4])

        def fill(memory):  # of the parent, shared
            with tl.open("file") as source:
                source.async_pread(memory.buf[:8]).result()
        """)
    )
    printed = run_script(f"""
        import multiprocessing, sys
        from multiprocessing.shared_memory import SharedMemory
        import trunkline as tl
        sys.path.insert(0, ".")
        import work
        with tl.open("file", "w") as file:
            file.pwrite(b"data" * 100_000)
            pending = [file.async_pread(bytearray(100_000)) for _ in range(20)]  # while processes start
            context = multiprocessing.get_context({method!r})
            if {method!r} == "forkserver":
                context.set_forkserver_preload(["work"])
            memory = SharedMemory(create=True, size=4096)
            with context.Pool(2) as pool:
                print(pool.map(work.move, range(3)))
                pool.apply(work.fill, (memory,))
            print(bytes(memory.buf[:8]), tl.wait_all(pending))
            memory.close()
            memory.unlink()
    """)
    assert printed == "[b'data', b'data', b'data']\nb'datadata' 2000000\n"
