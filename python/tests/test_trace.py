"""tl.trace and TRUNKLINE_TRACE."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_scripts import run_code

import trunkline as tl

_MIB = 1 << 20


def _events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return events


def _of(events: Iterable[dict[str, Any]], category: str, name: str | None = None) -> list[dict[str, Any]]:
    return [
        event
        for event in events
        if category in event.get("cat", "").split(",")
        and event["ph"] in "Xb"
        and name in (None, event["name"])
    ]


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_bytes_of_transfers_are_those_of_the_statistics(tmp_path: Path, direct: str) -> None:
    data = tmp_path / "data"
    data.write_bytes(os.urandom(8 * _MIB))
    faults = tl.Faults()
    engine = tl.Engine(block_bytes=_MIB, faults=faults)
    with (
        tl.open(data, "r+", engine=engine, direct=direct) as file,
        tl.trace(tmp_path / "trace.json") as trace,
    ):
        before = engine.stats()["bytes"]
        file.pread(bytearray(4096), 100)
        file.pread(bytearray(8 * _MIB), 0)
        faults.hold("read", faults.commands("read"))
        reading = file.async_pread(bytearray(3 * _MIB + 17), 5)
        assert not reading.wait(0.01)  # so that something is waited for, however fast the disk is
        faults.release()
        reading.result()
        file.async_pwrite(bytes(2 * _MIB), 4096).result()
        file.sync()
        after = engine.stats()["bytes"]
    events = _events(tmp_path / "trace.json")
    assert trace.events > 0
    assert trace.dropped_events == 0
    moved = dict.fromkeys(after, 0)
    for event in _of(events, "transfer"):
        if "path" in event["args"]:
            moved[event["args"]["path"]] += event["args"]["bytes"]
    assert moved == {path: after[path] - before[path] for path in after}
    reads = _of(events, "operation", "read")
    assert sum(event["args"]["bytes"] for event in reads) == 4096 + 8 * _MIB + 3 * _MIB + 17
    assert all(event["args"]["result"] == event["args"]["bytes"] for event in reads if event["ph"] == "b")
    assert all(event["args"]["of"] == str(data) for event in reads)
    assert _of(events, "transfer", "fsync")
    assert _of(events, "wait")


def test_transfers_on_a_track_do_not_overlap(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(16 * _MIB))
    with tl.open(data, engine=tl.Engine(block_bytes=64 << 10)) as file, tl.trace(tmp_path / "trace.json"):
        file.pread(bytearray(16 * _MIB), 0)
    ends: dict[tuple[int, int], float] = {}
    events = _events(tmp_path / "trace.json")
    for event in sorted(_of(events, "transfer"), key=lambda each: each["ts"]):
        track = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(track, 0) - 0.0015
        ends[track] = event["ts"] + event["dur"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert any(name.startswith("lane ") for name in names)


def test_saving_and_loading_show_their_steps(tmp_path: Path) -> None:
    state = {"weight": torch.ones(3 * _MIB)}
    with tl.trace(tmp_path / "trace.json"):
        tl.save(state, tmp_path / "model.safetensors")
        tl.load(tmp_path / "model.safetensors")
        checkpoints = tl.Checkpointer(tmp_path / "run", keep=1)
        for step in (1, 2):
            checkpoints.save(step, state, block=True)
        checkpoints.load()
    events = _events(tmp_path / "trace.json")
    names = {event["name"] for event in events}
    assert {"stage", "copy and checksum", "write, sync and name the files", "fsync"} <= names
    assert {"begin the save", "commit", "retain"} <= names
    assert len(_of(events, "checkpoint", "commit")) == 2


def test_a_failed_operation_has_its_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(10))
    with tl.trace(tmp_path / "trace.json"), tl.open(tmp_path / "data") as file:
        error = file.async_pread(bytearray(100), 0).exception()
    assert isinstance(error, tl.EndOfFile)
    (operation,) = _of(_events(tmp_path / "trace.json"), "operation", "read")
    assert operation["args"]["result"] == "ENODATA"


def test_a_second_trace_is_rejected(tmp_path: Path) -> None:
    first, second = tl.trace(tmp_path / "one.json"), tl.trace(tmp_path / "two.json")
    with first, pytest.raises(ValueError, match=r"one\.json is being recorded"):
        second.__enter__()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json"]


def test_a_place_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(tl.Error, match="missing"):
        tl.trace(tmp_path / "missing" / "trace.json").__enter__()


def _interrupted(path: Path) -> None:
    with tl.trace(path):
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """Nor a device: TRUNKLINE_TRACE=/dev/null must leave it there."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(tl.Unsupported, match="it exists and is not a regular file"), tl.trace(pipe):
        pass
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    trace = tmp_path / "trace.json"
    with pytest.raises(tl.Unsupported, match="not a regular file"), tl.trace(trace):
        os.mkfifo(trace)  # meanwhile
    assert stat.S_ISFIFO(trace.lstat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "trace.json"]


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/stderr", "run.log"])
def test_the_output_of_the_program_is_not_replaced(tmp_path: Path, target: str) -> None:
    """`TRUNKLINE_TRACE=/dev/stdout python program.py > run.log` must not lose what the program prints."""
    log = tmp_path / "run.log"
    with log.open("w") as file:
        file.write("of an earlier run\n")
        file.flush()
        subprocess.run(
            [sys.executable, "-c", "import trunkline as tl; tl.Engine(); print('printed')"],
            env=os.environ | {"TRUNKLINE_TRACE": target},
            cwd=tmp_path,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=120,
            check=False,
        )
    said = log.read_text()
    assert said.startswith("of an earlier run\n")
    assert "printed\n" in said
    assert "the output of this process goes there" in said


def test_a_link_is_followed_and_a_mode_is_kept(tmp_path: Path) -> None:
    (tmp_path / "target.json").write_text("")
    (tmp_path / "target.json").chmod(0o600)
    (tmp_path / "link.json").symlink_to("target.json")
    with tl.trace(tmp_path / "link.json"):
        pass
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "target.json").read_text())["traceEvents"] is not None
    assert stat.S_IMODE((tmp_path / "target.json").stat().st_mode) == 0o600


def test_an_interrupt_in_the_block_still_gives_a_trace(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted(tmp_path / "trace.json")
    assert _events(tmp_path / "trace.json")


def _failing_where_the_folder_goes(folder: Path) -> None:
    with tl.trace(folder / "trace.json"):
        folder.rmdir()
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore:the trace is lost")
def test_an_error_in_the_block_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(ZeroDivisionError):
        _failing_where_the_folder_goes(folder)


_READ = """
import os, sys, trunkline as tl
with tl.open(__file__ if "__file__" in globals() else sys.executable) as file:
    file.pread(bytearray(4096), 0)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import atexit; atexit.register(tl.open, sys.executable)", 0),
    ],
)
def test_the_variable_traces_the_whole_process(tmp_path: Path, end: str, status: int) -> None:
    result = run_code(_READ + end, check=False, TRUNKLINE_TRACE=str(tmp_path / "trace.json"))
    assert result.returncode == status, result.stderr
    assert _of(_events(tmp_path / "trace.json"), "transfer", "read")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_forked_child_leaves_the_trace_alone(tmp_path: Path) -> None:
    code = """
child = os.fork()
if child == 0:
    with tl.open(sys.executable) as file:
        file.pread(bytearray(4096), 0)
    sys.exit(0)
os.waitpid(child, 0)
"""
    run_code(_READ + code, TRUNKLINE_TRACE=str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_bytes())
    assert len(_of(trace["traceEvents"], "transfer", "read")) == 1


def test_the_variable_can_have_the_process_id(tmp_path: Path) -> None:
    run_code(_READ, TRUNKLINE_TRACE=str(tmp_path / "trace-%p.json"))
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("trace-")
    assert "%" not in path.name


def test_a_variable_that_cannot_be_followed_is_one_line(tmp_path: Path) -> None:
    result = run_code(_READ, TRUNKLINE_TRACE=str(tmp_path / "missing" / "trace.json"))
    assert result.stderr.startswith("trunkline: TRUNKLINE_TRACE: ")


def test_bench_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    data = tmp_path / "data"
    data.mkdir()
    command = [sys.executable, "-m", "trunkline", "bench", str(data), "--read", "--size", "8MB"]
    subprocess.run([*command, "--trace", str(trace)], check=True, capture_output=True, timeout=120)
    assert _of(_events(trace), "transfer", "read")


def test_a_forked_child_leaves_the_block_in_peace(tmp_path: Path) -> None:
    """Whether it comes to its end or raises."""
    path = tmp_path / "trace.json"
    script = """
import os, sys
import trunkline as tl
with tl.trace(sys.argv[1]):
    for end in ("end", "raise"):
        child = os.fork()
        if child == 0 and end == "raise":
            sys.exit(7)
        if child == 0:
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=100)
    assert (done.stdout.split(), done.returncode) == (["0", "7"], 0), done.stderr
    assert json.loads(path.read_text())["traceEvents"]
