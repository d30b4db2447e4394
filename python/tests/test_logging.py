"""The logger "trunkline" and TRUNKLINE_LOG."""

import logging
import threading
from pathlib import Path

import pytest
from support_scripts import run_code

import trunkline as tl
from trunkline import _core


def test_the_choice_of_a_backend_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trunkline.engine"):
        tl.Engine(backend="memory")
        _core.deliver_log()
    records = [record for record in caplog.records if record.name == "trunkline.engine"]
    assert any("backend memory" in record.getMessage() for record in records)
    assert all(record.levelno == logging.INFO for record in records)


def test_levels_are_of_components(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.DEBUG, logger="trunkline.checkpoint"):
        tl.Engine(backend="memory")
        _core.deliver_log()
        assert not [record for record in caplog.records if record.name == "trunkline.engine"]


def test_records_of_lanes_arrive_without_a_call(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(1 << 16))
    code = f"""
import logging, threading
arrived = threading.Event()
class Handler(logging.Handler):
    def emit(self, record):
        print(record.getMessage())
        if "repeated" in record.getMessage(): arrived.set()
logging.getLogger("trunkline").addHandler(Handler())
logging.getLogger("trunkline").setLevel(logging.INFO)
import trunkline as tl
import errno
faults = tl.Faults()
engine = tl.Engine(backend="threads", faults=faults)
with tl.open({str(tmp_path / "data")!r}, engine=engine) as file:
    faults.fail("read", 0, errno.EAGAIN)
    file.async_pread(bytearray(1 << 16), 0).result()
    assert arrived.wait(30)
"""
    run_code(code)


def test_nothing_is_printed_without_the_variable() -> None:
    result = run_code("import trunkline as tl; tl.Engine(backend='memory')", TRUNKLINE_LOG="")
    assert result.stdout == result.stderr == ""


def test_the_variable_prints_to_stderr() -> None:
    result = run_code("import trunkline as tl; tl.Engine(backend='memory')", TRUNKLINE_LOG="info")
    assert "info  engine [" in result.stderr
    assert "backend memory" in result.stderr
    assert result.stdout == ""


def test_the_variable_names_components() -> None:
    result = run_code("import trunkline as tl; tl.Engine(backend='memory')", TRUNKLINE_LOG="debug,checkpoint")
    assert result.stderr == ""


def test_an_application_that_configured_logging_prints_it_once() -> None:
    code = """
import trunkline as tl, logging
logging.basicConfig(format="APP %(name)s")
tl.Engine(backend="memory")
"""
    lines = run_code(code, TRUNKLINE_LOG="info").stderr.splitlines()
    assert lines
    assert set(lines) == {"APP trunkline.engine"}


@pytest.mark.parametrize("value", ["loud", "info,motor"])
def test_a_wrong_value_is_one_line_on_stderr(value: str) -> None:
    result = run_code("import trunkline", TRUNKLINE_LOG=value)
    assert len(result.stderr.splitlines()) == 1
    assert f"TRUNKLINE_LOG={value} is ignored" in result.stderr


def test_importing_starts_no_thread() -> None:
    code = """
import logging, os, numpy  # which the package imports, and whose threads are not ours
before = set(os.listdir("/proc/self/task"))
import trunkline
print(len(set(os.listdir("/proc/self/task")) - before))
"""
    assert run_code(code, TRUNKLINE_LOG="debug").stdout == "0\n"


def test_a_handler_that_raises_stops_nothing() -> None:
    code = """
import logging
class Bad(logging.Filter):
    def filter(self, record): raise RuntimeError("no")
logging.getLogger("trunkline.engine").addFilter(Bad())
logging.getLogger("trunkline").setLevel(logging.INFO)
import trunkline as tl
tl.Engine(backend="memory"); tl.Engine(backend="memory")
print("done")
"""
    result = run_code(code)
    assert result.stdout == "done\n"
    assert "RuntimeError: no" in result.stderr


def test_a_handler_may_use_the_package() -> None:
    code = """
import logging, trunkline as tl
class Handler(logging.Handler):
    def emit(self, record):
        print("record")
        tl.open(__import__("sys").executable).pread(bytearray(10))
logging.getLogger("trunkline").addHandler(Handler())
logging.getLogger("trunkline").setLevel(logging.INFO)
tl.Engine(backend="memory")
"""
    assert "record" in run_code(code).stdout.splitlines()


def test_a_forked_child_logs_its_own() -> None:
    code = """
import os, sys, trunkline as tl
from trunkline import _core
tl.Engine(backend="memory")
_core.deliver_log()
child = os.fork()
if child == 0:
    tl.Engine(backend="memory")
    _core.deliver_log()
    sys.stderr.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    assert run_code(code, TRUNKLINE_LOG="info").stderr.count("backend memory") == 2


def test_no_fork_copies_a_handler_that_is_writing() -> None:
    """Its stream would stay locked in the child."""
    code = """
import logging, os, threading, trunkline as tl
writing = threading.Event()
class Stream:
    lock = threading.Lock()  # as the stream of a file has one, which is not renewed after a fork
    def write(self, text):
        with self.lock:
            if threading.current_thread() is not threading.main_thread():
                writing.set()
                threading.Event().wait(0.3)
    def flush(self):
        pass
logging.basicConfig(level=logging.INFO, stream=Stream())
tl.Engine(backend="memory")
assert writing.wait(60)
child = os.fork()
if child == 0:
    os._exit(0 if Stream.lock.acquire(timeout=20) else 7)
assert os.waitpid(child, 0)[1] == 0
"""
    run_code(code)


def test_a_fork_does_not_wait_for_a_handler_that_waits_for_it() -> None:
    code = """
import logging, os, threading, trunkline as tl
from trunkline import _core
handling, forked = threading.Event(), threading.Event()
class Handler(logging.Handler):
    def emit(self, record):
        handling.set()
        assert forked.wait(60)
        child = os.fork()  # a handler may itself fork
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("handled")
logging.getLogger("trunkline").addHandler(Handler())
logging.getLogger("trunkline").setLevel(logging.INFO)
tl.Engine(backend="memory")
assert handling.wait(60)
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
forked.set()
_core.deliver_log()
"""
    assert "handled" in run_code(code).stdout


def test_a_fork_that_began_before_its_gate_leaves_the_gate_open() -> None:
    code = """
import os, signal
from trunkline import _fork_gate
_fork_gate._TIMEOUT_SECONDS = 600
gates = []
os.register_at_fork(before=lambda: gates or gates.append(_fork_gate.ForkGate()))
child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
signal.alarm(60)  # ends this if the gate stays closed
with gates[0]:
    pass
"""
    run_code(code)


def test_a_child_that_goes_on_with_a_fork_of_its_parent_leaves_the_gate_open() -> None:
    code = """
import os, signal, threading
from trunkline import _fork_gate
_fork_gate._TIMEOUT_SECONDS = 0.1
gate = _fork_gate.ForkGate()
inside, done = threading.Event(), threading.Event()
children = []
def stay():
    with gate:
        inside.set()
        done.wait()
def fork_in_handler(*_):
    children.append(os.fork())  # this child returns, too, and makes the fork that was interrupted
threading.Thread(target=stay).start()
assert inside.wait(60)
wait_for = threading.Condition.wait_for
def interrupted(self, predicate, timeout=None):
    threading.Condition.wait_for = wait_for
    signal.raise_signal(signal.SIGUSR1)
    return wait_for(self, predicate, timeout)
signal.signal(signal.SIGUSR1, fork_in_handler)
threading.Condition.wait_for = interrupted
children.append(os.fork())
_fork_gate._TIMEOUT_SECONDS = 600
signal.alarm(60)  # ends this, or a child, if the gate stays closed
if children[-1] == 0:
    os._exit(0)
if children[0] == 0:
    with gate:
        pass
for child in filter(None, children):
    assert os.waitpid(child, 0)[1] == 0
done.set()
"""
    run_code(code)


def test_records_are_delivered_at_the_exit() -> None:
    """Those that the log's own thread has not delivered: its handler is busy until the exit has begun."""
    code = """
import atexit, logging, threading, trunkline as tl
busy = threading.Event()
class Handler(logging.Handler):
    def emit(self, record):
        busy.set()
        threading.main_thread().join()  # returns once the interpreter has begun to exit
        print("at the exit:", record.getMessage())
logging.getLogger("trunkline").addHandler(Handler())
logging.getLogger("trunkline").setLevel(logging.INFO)
tl.Engine(backend="memory")
assert busy.wait(60)
tl.Engine(backend="memory")
atexit.register(tl.Engine, backend="memory")
"""
    result = run_code(code)
    assert result.stdout.count("at the exit: backend memory") == 3
    assert result.stderr == ""


def test_the_exit_does_not_wait_for_a_handler_that_never_returns() -> None:
    code = """
import logging, threading, trunkline as tl
class Handler(logging.Handler):
    def createLock(self):
        self.lock = None  # else logging itself would wait for it
    def emit(self, record):
        threading.Event().wait()
logging.getLogger("trunkline").addHandler(Handler())
logging.getLogger("trunkline").setLevel(logging.DEBUG)
for _ in range(3):
    tl.Engine(backend="memory")
"""
    result = run_code(code)  # for ten seconds
    assert "a handler of logging has not returned in time" in result.stderr


def test_removals_of_checkpoints_say_why(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", keep=1)
    with caplog.at_level(logging.INFO, logger="trunkline.checkpoint"):
        for step in (1, 2):
            checkpoints.save(step, {"a": step}, block=True)
        _core.deliver_log()
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "step 2 is saved" in text
    assert "removing step 1: keep=1" in text
    assert "the checkpoint is removed" in text


def test_opening_a_striped_file_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.DEBUG, logger="trunkline.volume"), tl.Engine() as engine:
        volume = tl.Volume([tmp_path / "a", tmp_path / "b"])
        volume.open("file", "w", engine=engine).close()
        _core.deliver_log()
    messages = [record.getMessage() for record in caplog.records if record.name == "trunkline.volume"]
    assert [message for message in messages if "file" in message and "in 2 directories" in message]


def test_a_save_waits_for_no_lock_of_logging(tmp_path: Path) -> None:
    """A signal handler that saves may have interrupted the owner of any of them."""
    release = threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            release.wait(60)

    handler = Stuck(logging.INFO)
    logger = logging.getLogger("trunkline")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with handler.lock, logging._lock:  # type: ignore[attr-defined, union-attr]
            checkpoints = tl.Checkpointer(tmp_path / "run", keep=1, process_group=False)
            for step in (1, 2):
                checkpoints.save(step, {"a": step}).wait(60)
        assert checkpoints.steps() == [2]
    finally:
        release.set()
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        _core.deliver_log()
