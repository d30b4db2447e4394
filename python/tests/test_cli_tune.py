"""`trunkline tune`, and the engines that follow what it found."""

import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support_log import logged
from support_program import PROGRAM

import trunkline as tl

QUICK = ["--budget", "5s", "--size", "64MiB"]
AIO = {
    "block_size": int,
    "queue_depth": int,
    "intra_op_parallelism": int,
    "single_submit": bool,
    "overlap_events": bool,
    "use_gds": bool,
}


@pytest.fixture(autouse=True)
def tuning_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's tuning file for a test: none yet."""
    config = tmp_path_factory.mktemp("config")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    monkeypatch.delenv("TRUNKLINE_TUNING")
    return config / "trunkline/tuning.json"


def run(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program; its exit status must be `expect`."""
    result = subprocess.run(
        [str(PROGRAM), *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def tune(*arguments: str | Path) -> dict[str, Any]:
    """The JSON of a tuning."""
    document: dict[str, Any] = json.loads(run("tune", *arguments, *QUICK, "--json").stdout)
    return document


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tuning file of the filesystem that tests write to, in its format."""
    file = tmp_path_factory.mktemp("tuned") / "tuning.json"
    environment = {**os.environ, "TRUNKLINE_TUNING": str(file)}
    command = [str(PROGRAM), "tune", str(file.parent), *QUICK]
    subprocess.run(command, capture_output=True, check=True, env=environment, timeout=120)
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def write_tuning(file: Path, tuned: dict[str, Any], **settings: object) -> None:
    """The tuning file, as if these settings had been found fastest."""
    (tuning,) = tuned["tunings"]
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(tuned | {"tunings": [tuning | {"settings": settings}]}))


def test_tune_measures_stores_and_is_found(tmp_path: Path, tuning_file: Path) -> None:
    document = tune(tmp_path)
    assert document["command"] == "tune"
    assert document["best"]["gain"] >= 1
    assert set(document["best"]["bytes_per_second"]) == {
        *("sequential read", "sequential write", "random read", "random write")
    }
    assert document["candidates"] > 10
    assert list(tmp_path.iterdir()) == []  # the scratch file is gone
    stored = json.loads(tuning_file.read_text())
    assert stored["format"] == "trunkline-tuning"
    assert len(stored["tunings"]) == 1
    tuning = tl.Engine(path=tmp_path).explain(tmp_path)["tuning"]
    assert tuning["in_effect"]
    assert tuning["time"] == stored["tunings"][0]["time"]
    assert f"in effect ({tuning['time']})" in run("doctor", tmp_path).stdout


def test_tune_prints_what_it_gains(tmp_path: Path) -> None:
    text = run("tune", tmp_path, *QUICK).stdout
    assert "random write" in text
    assert "candidates measured in" in text
    assert "tune --forget" in text


def test_tune_of_several_paths_is_for_a_volume(tmp_path: Path, tuning_file: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    document = tune(*directories)
    assert document["paths"] == [str(directory) for directory in directories]
    assert [list(directory.iterdir()) for directory in directories] == [[], []]
    assert tl.Engine(path=directories).explain(tmp_path)["tuning"]["in_effect"]


def test_engines_follow_a_tuning_and_arguments_win(
    tmp_path: Path, tuning_file: Path, tuned: dict[str, Any]
) -> None:
    write_tuning(tuning_file, tuned, backend="threads", lanes=3, queue_depth=5, block_bytes=65536)
    for engine in (tl.Engine(path=tmp_path), tl.Engine(path=[tmp_path]), tl.Engine()):
        assert (engine.backend, engine.lanes, engine.queue_depth) == ("threads", 3, 5)
        assert engine.explain(tmp_path)["tuning"]["in_effect"]
    assert tl.Engine(path=tmp_path).block_bytes == 65536
    assert tl.Engine(lanes=1, path=tmp_path).lanes == 1
    assert tl.Engine(block_bytes="1MiB", path=tmp_path).block_bytes == 1 << 20
    assert tl.Engine(path="/proc").lanes != 3
    with pytest.raises(TypeError, match="path"):
        tl.Engine(path=3)  # type: ignore[arg-type]


def test_a_path_that_is_not_there_is_warned_of(
    tmp_path: Path, tuning_file: Path, tuned: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write_tuning(tuning_file, tuned, lanes=3)
    with logged(caplog) as records:
        tl.Engine(path=tmp_path / "to be made")
        tl.Engine(path=tmp_path / "missing" / "run")
    said = [each for each in records if "saved settings are not used" in each]
    assert said == [
        f"WARNING engine: saved settings are not used: neither {tmp_path}/missing/run nor the directory that "
        "it would be in exists"
    ]


@pytest.mark.parametrize("text", ["{", '{"format": "trunkline-tuning", "version": 99}', "\0", ""])
def test_a_damaged_or_newer_file_changes_nothing(tmp_path: Path, tuning_file: Path, text: str) -> None:
    expected = (tl.Engine().backend, tl.Engine().lanes, tl.Engine().queue_depth)
    tuning_file.parent.mkdir()
    tuning_file.write_text(text)
    engine = tl.Engine(path=tmp_path)
    assert (engine.backend, engine.lanes, engine.queue_depth) == expected
    tuning = engine.explain(tmp_path)["tuning"]
    assert not tuning["in_effect"]
    assert str(tuning_file) in tuning["why"]
    assert str(tuning_file) in run("doctor", tmp_path).stdout


def test_a_file_of_a_newer_version_is_not_replaced(tmp_path: Path, tuning_file: Path) -> None:
    tuning_file.parent.mkdir()
    tuning_file.write_text('{"format": "trunkline-tuning", "version": 99}')
    error = run("tune", tmp_path, *QUICK, expect=1).stderr
    assert "version 99" in error
    assert '"version": 99' in tuning_file.read_text()


def test_off_ignores_it(
    tmp_path: Path, tuning_file: Path, tuned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tuning(tuning_file, tuned, lanes=3)
    monkeypatch.setenv("TRUNKLINE_TUNING", "off")
    engine = tl.Engine(path=tmp_path)
    assert engine.lanes != 3
    assert "TRUNKLINE_TUNING" in engine.explain(tmp_path)["tuning"]["why"]


def test_forget(tmp_path: Path, tuning_file: Path, tuned: dict[str, Any]) -> None:
    write_tuning(tuning_file, tuned)
    assert json.loads(run("tune", "--forget", "/proc", "--json").stdout)["forgotten"] == 0
    assert json.loads(run("tune", "--forget", tmp_path, "--json").stdout)["forgotten"] == 1
    assert json.loads(tuning_file.read_text())["tunings"] == []
    tuning_file.write_text("damaged")
    assert "holds no settings that can be read; it was renamed" in run("tune", "--forget").stdout
    assert "no settings of these paths are saved" in run("tune", "--forget", "/proc").stdout
    assert not tuning_file.exists()
    run("tune", "--forget")  # nothing there: nothing to do


def test_export_for_deepspeed(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    directory.mkdir()
    config = tmp_path / "deepspeed.json"
    best = tune(directory, "--export", config)["best"]["settings"]
    section = json.loads(config.read_text())["aio"]
    assert {key: type(value) for key, value in section.items()} == AIO
    assert section["block_size"] == best["block_bytes"]
    assert section["intra_op_parallelism"] == best["lanes"]
    # Found out before anything is measured.
    assert "--merge" in run("tune", directory, "--export", config, expect=2).stderr
    config.write_text('{"train_batch_size": 8, "aio": {"queue_depth": 1}}')
    tune(directory, "--export", config, "--merge")
    merged = json.loads(config.read_text())
    assert merged["train_batch_size"] == 8
    assert {key: type(value) for key, value in merged["aio"].items()} == AIO


def test_wrong_usage_is_reported(tmp_path: Path, tuning_file: Path) -> None:
    assert "PATH" in run("tune", expect=2).stderr
    assert "--budget" in run("tune", tmp_path, "--budget", "1s", expect=2).stderr
    assert "--merge" in run("tune", tmp_path, "--merge", expect=2).stderr
    assert "--size: must be at least" in run("tune", tmp_path, "--size", "10MB", expect=2).stderr
    assert "--forget" in run("tune", "--forget", "--export", "x", expect=2).stderr
    file = tmp_path / "file"
    file.touch()
    error = json.loads(run("tune", file, "--json", expect=2).stdout)["error"]
    assert "is not a directory" in error["message"]
    assert "mkdir -p" in run("tune", tmp_path / "absent", expect=2).stderr
    assert not tuning_file.exists()


def test_exhaustive_measures_all_and_stores_nothing(tmp_path: Path, tuning_file: Path) -> None:
    document = json.loads(run("tune", tmp_path, "--exhaustive", "1ms", "--size", "64MiB", "--json").stdout)
    assert len(document["measured"]) == document["candidates"] - 1
    assert document["stored"] is None
    assert not tuning_file.exists()


def test_interrupt_removes_the_scratch_file_and_stores_nothing(tmp_path: Path, tuning_file: Path) -> None:
    process = subprocess.Popen(
        [str(PROGRAM), "tune", str(tmp_path), "--size", "64MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)  # until it has begun
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert b"interrupted" in error
    assert list(tmp_path.iterdir()) == []
    assert not tuning_file.exists()


def test_terminal_gets_a_table(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [str(PROGRAM), "tune", str(tmp_path), *QUICK], stdout=subprocess.DEVNULL, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:
                break
            if not chunk:
                break
            seen += chunk
    os.close(ours)
    assert process.returncode == 0
    assert b"random write" in seen
    assert b"\x1b[J" in seen
