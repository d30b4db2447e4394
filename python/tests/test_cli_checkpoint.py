"""`trunkline checkpoint`, run as users run it: the package's program, or the one that TRUNKLINE_CLI names."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest
from support_program import PROGRAM

import trunkline
from trunkline._core import CheckpointStore

if TYPE_CHECKING:
    from conftest import CheckpointWriter


def run(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `trunkline checkpoint`; its exit status must be `expect`."""
    result = subprocess.run(
        [str(PROGRAM), "checkpoint", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def document(*arguments: str | Path, expect: int = 0) -> dict[str, Any]:
    """What it prints with --json."""
    parsed: dict[str, Any] = json.loads(run(*arguments, "--json", expect=expect).stdout)
    assert parsed["command"] == f"checkpoint {arguments[0]}"
    assert parsed["schema"] == 1
    return parsed


def test_what_a_run_removes_while_it_is_listed_is_not_damaged(tmp_path: Path) -> None:
    saves = """
    import sys, torch, trunkline as tl
    checkpoints = tl.Checkpointer(sys.argv[1], keep=2)
    for step in range(1_000_000):
        checkpoints.save(step, {"x": torch.ones(20_000)}, block=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(saves), str(tmp_path / "run")]
    with subprocess.Popen(command) as saving:
        try:
            while not (tmp_path / "run" / "step-00000003").exists():
                assert saving.poll() is None
            for _ in range(200):
                run("ls", tmp_path / "run")
        finally:
            saving.kill()


def flip(path: str | Path, offset: int, bit: int = 4) -> None:
    contents = bytearray(Path(path).read_bytes())
    contents[offset] ^= 1 << bit
    Path(path).write_bytes(contents)


@pytest.fixture
def store(tmp_path: Path, checkpoint_writer: "CheckpointWriter") -> CheckpointStore:
    """Steps 20 and, committed after it, 10; shards on two volumes."""
    made = CheckpointStore(tmp_path / "run", [tmp_path / "v0", tmp_path / "v1"])
    for step in (20, 10):
        checkpoint_writer.save(made, step)
    return made


def without_checkpoints(directory: Path) -> Path:
    """A directory whose first save was given up."""
    store = CheckpointStore(directory)
    store.begin(1, [0]).abandon()
    return directory


def manifest_of(store: CheckpointStore, step: int) -> Path:
    (path,) = Path(store.directory).glob(f"step-{step:08}/manifest-*")
    return path


def test_what_is_missing_from_a_step_of_one_shard(tmp_path: Path) -> None:
    trunkline.Checkpointer(tmp_path / "run").save(1, {"a": numpy.ones(3)}, block=True)
    (shard,) = (tmp_path / "run" / "step-00000001").glob("*.safetensors")
    shard.unlink()
    assert (
        "step 1 is incomplete: its only shard is missing or truncated;"
        in run("ls", tmp_path / "run", expect=1).stderr
    )
    assert "damaged, 1 problem, 0 B in 1 shard\n" in run("verify", tmp_path / "run", expect=1).stdout


def test_other_directories_are_answered_with_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    message = run("ls", tmp_path, expect=2).stderr
    assert (
        "name a directory of checkpoints; to save new ones, name a directory of their own, for example"
        in message
    )


# ls and show ------------------------------------------------------------------------------------------------


def test_ls(store: CheckpointStore) -> None:
    listed = document("ls", store.directory)
    assert listed["latest"] == 10
    assert [each["step"] for each in listed["checkpoints"]] == [10, 20]
    first = listed["checkpoints"][0]
    manifest = store.read_manifest(10)
    assert first["commit"] == 2
    assert first["time"] == manifest["time"]
    assert first["bytes"] == sum(shard["bytes"] for shard in manifest["shards"])
    assert (first["shards"], first["tensors"], first["world_size"]) == (4, 4, 1)
    lines = run("ls", store.directory).stdout.splitlines()
    assert first["bytes_written"] == first["bytes"]
    assert lines[0].split() == ["step", "commit", "time", "ranks", "shards", "tensors", "size", "written"]
    assert lines[1].startswith("10 ")
    assert lines[1].endswith("latest")
    assert not lines[2].endswith("latest")


def test_ls_lists_the_steps_of_tiers(tmp_path: Path) -> None:
    tiers = [trunkline.Tier(tmp_path / "tier", every=2), trunkline.Tier(tmp_path / "far", every=100)]
    with trunkline.Checkpointer(tmp_path / "run", tiers=tiers) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, {"step": step})
        checkpoints.wait_drained()
    assert document("ls", tmp_path / "run")["tiers"] == [
        {"directory": str(tmp_path / "tier"), "steps": [2, 4]},
        {"directory": str(tmp_path / "far"), "steps": []},
    ]
    lines = run("ls", tmp_path / "run").stdout.splitlines()
    assert lines[-2:] == [
        f"tier {tmp_path / 'tier'}: steps 2, 4",
        f"tier {tmp_path / 'far'}: no checkpoints yet",
    ]
    assert "tiers" not in document("ls", tmp_path / "tier")
    run("verify", tmp_path / "tier", "--all")
    shutil.rmtree(tmp_path / "tier")  # not mounted
    [tier, _] = document("ls", tmp_path / "run")["tiers"]
    assert "does not exist" in tier["error"]["message"]
    (tmp_path / "run" / "trunkline-tiers.json").write_text("{}")
    assert "does not describe tiers" in run("ls", tmp_path / "run", expect=1).stderr


def test_ls_of_an_empty_and_a_damaged_directory(tmp_path: Path, store: CheckpointStore) -> None:
    without_checkpoints(tmp_path / "new")
    assert document("ls", tmp_path / "new")["checkpoints"] == []
    assert f"{tmp_path / 'new'} has no checkpoints" in run("ls", tmp_path / "new").stdout
    manifest = manifest_of(store, 10)
    flip(manifest, 100)
    listed = document("ls", store.directory, expect=1)
    assert listed["latest"] == 10
    assert listed["checkpoints"][0]["error"]["kind"] == "corrupt"
    assert listed["checkpoints"][1]["step"] == 20
    result = run("ls", store.directory, expect=1)
    assert "damaged" in result.stdout
    assert str(manifest) in result.stderr


def test_ls_calls_nothing_damaged_that_it_cannot_read(store: CheckpointStore) -> None:
    manifest_of(store, 10).chmod(0)
    # Without what lets root read everything.
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command = [*drop, str(PROGRAM), "checkpoint", "ls", str(store.directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert result.stdout.splitlines()[1].endswith(" latest, could not be read")
    assert "EACCES" in result.stderr


def test_ls_marks_what_lacks_a_shard(store: CheckpointStore) -> None:
    assert [each["is_complete"] for each in document("ls", store.directory)["checkpoints"]] == [True, True]
    missing, short = (Path(store.shard_paths(store.read_manifest(step))[1]) for step in (20, 10))
    missing.unlink()
    os.truncate(short, short.stat().st_size - 1)
    listed = document("ls", store.directory, expect=1)
    assert [each["is_complete"] for each in listed["checkpoints"]] == [False, False]
    text = run("ls", store.directory, expect=1)
    assert text.stdout.splitlines()[1].endswith(" latest, incomplete")
    assert text.stdout.splitlines()[2].endswith("kB          incomplete")
    for step in (10, 20):
        assert f"step {step} is incomplete: 1 of its 4 shards" in text.stderr


def test_show_has_the_metrics_of_a_step(tmp_path: Path) -> None:
    with trunkline.Checkpointer(tmp_path / "run", keep_best=("loss", "min", 1)) as checkpoints:
        checkpoints.save(1, {"a": 1}, metrics={"loss": 0.25, "perplexity": float("inf")})
        checkpoints.save(2, {"a": 1})
    shown = document("show", tmp_path / "run", "--step", "1")
    assert shown["metrics"] == {"loss": 0.25, "perplexity": "inf"}
    assert document("show", tmp_path / "run", "--step", "2")["metrics"] == {}
    lines = run("show", tmp_path / "run", "--step", "1").stdout.splitlines()
    assert lines[1:4] == ["loss: 0.25", "perplexity: inf", ""]


def test_show(store: CheckpointStore) -> None:
    shown = document("show", store.directory, "--step", "20")
    manifest = store.read_manifest(20)
    assert shown["step"] == 20
    assert [each["path"] for each in shown["shards"]] == store.shard_paths(manifest)
    assert shown["shards"][0]["chunks"] == 3
    assert shown["tensors"][1] == {
        "name": "layer.1.weight",
        "dtype": "U8",
        "shape": [10_000],
        "bytes": 10_000,
        "shards": [1],
    }
    assert document("show", store.directory)["step"] == 10
    text = run("show", store.directory).stdout
    for part in ("step 10, commit 2", "layer.3.weight", "U8", "[10000]", store.volumes[0], "4 tensors"):
        assert part in text


def test_names_do_not_reach_the_terminal_as_commands(
    tmp_path: Path, checkpoint_writer: "CheckpointWriter"
) -> None:
    store = CheckpointStore(tmp_path / "run")
    save, manifest = checkpoint_writer.write(store, 1)
    manifest["tensors"][0]["name"] = "\x1b[2Jcleared"
    save.commit(manifest)
    save.release()
    assert "\x1b" not in run("show", store.directory).stdout
    assert document("show", store.directory)["tensors"][0]["name"] == "\x1b[2Jcleared"


# verify -----------------------------------------------------------------------------------------------------


def test_verify(store: CheckpointStore) -> None:
    verified = document("verify", store.directory)
    assert verified["ok"] is True
    (only,) = verified["checkpoints"]
    assert (only["step"], only["ok"], only["mismatches"]) == (10, True, [])
    assert only["bytes"] == document("ls", store.directory)["checkpoints"][0]["bytes"]
    every = document("verify", store.directory, "--all")
    assert [each["step"] for each in every["checkpoints"]] == [10, 20]
    result = run("verify", store.directory, "--all")
    assert result.stdout.count(": verified, ") == 2
    assert result.stderr == ""


def test_a_flipped_bit_anywhere_is_found(store: CheckpointStore) -> None:
    shard = store.shard_paths(store.read_manifest(20))[1]
    size = Path(shard).stat().st_size
    descriptor = Path(store.directory) / "trunkline-checkpoints.json"
    # Length and text of the shard's header, data, the edges of a chunk, the last byte.
    for offset in (0, 7, 8, 30, 5000, 4095, 4096, size - 1):
        flip(shard, offset)
        (found,) = document("verify", store.directory, "--step", "20", expect=1)["checkpoints"]
        (mismatch,) = found["mismatches"]
        assert mismatch["path"] == shard
        assert mismatch["chunk"] == offset // 4096
        assert mismatch["tensors"] == ["layer.1.weight"]
        text = run("verify", store.directory, "--step", "20", expect=1).stdout
        assert f"{shard}, chunk {offset // 4096}" in text
        assert "layer.1.weight" in text
        flip(shard, offset)
    manifest = manifest_of(store, 20)
    for offset in (0, 20, 25, 40, 60, 300, manifest.stat().st_size - 1):
        flip(manifest, offset)
        (found,) = document("verify", store.directory, "--step", "20", expect=1)["checkpoints"]
        assert found["error"]["path"] == str(manifest)
        assert str(manifest) in run("verify", store.directory, "--step", "20", expect=1).stdout
        flip(manifest, offset)
    for offset in range(0, descriptor.stat().st_size, 17):
        flip(descriptor, offset)
        assert str(descriptor) in run("verify", store.directory, expect=1).stderr
        flip(descriptor, offset)
    assert document("verify", store.directory, "--all")["ok"] is True


def test_all_damage_is_listed(store: CheckpointStore) -> None:
    paths = store.shard_paths(store.read_manifest(10))
    flip(paths[0], 10)
    flip(paths[0], 9000)
    Path(paths[1]).unlink()
    Path(paths[2]).write_bytes(Path(paths[2]).read_bytes()[:-1])
    flip(manifest_of(store, 20), 77)
    verified = document("verify", store.directory, "--all", expect=1)
    assert verified["ok"] is False
    first, second = verified["checkpoints"]
    kinds = [(each["shard"], each["kind"], each["chunk"]) for each in first["mismatches"]]
    assert kinds == [(0, "checksum", 0), (0, "checksum", 2), (1, "missing", None), (2, "size", None)]
    assert second["error"]["kind"] == "corrupt"
    text = run("verify", store.directory, "--all", expect=1).stdout
    assert "damaged, 4 problems" in text
    for path in paths[:3]:
        assert path in text


@pytest.mark.parametrize("command", [("show",), ("verify",), ("verify", "--all")])
def test_without_checkpoints_there_is_nothing_to_show_or_verify(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    directory = without_checkpoints(tmp_path / "new")
    name, *options = command
    result = run(name, directory, *options, expect=1)
    assert f"{directory} has no checkpoint yet" in result.stderr
    assert result.stdout == ""
    assert "has no checkpoint yet" in document(name, directory, *options, expect=1)["error"]["message"]


@pytest.fixture
def long_verify(store: CheckpointStore) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A verification that takes long, of a large and empty file, on a separate terminal."""
    manifest = store.read_manifest(10)
    nbytes = 1 << 40
    save = store.begin(30, [1, 0])
    directory = Path(store.volumes[0]) / "step-00000030"
    with (directory / "large.safetensors").open("wb") as file:
        file.truncate(nbytes)
    save.commit(
        manifest
        | {
            "step": 30,
            "chunk_bytes": 64 << 20,
            "tensors": [],
            "shards": [
                {
                    "volume": 0,
                    "file": "large.safetensors",
                    "bytes": nbytes,
                    "crc32c": "00000000" * (nbytes // (64 << 20)),
                }
            ],
        }
    )
    save.release()
    controller, terminal = pty.openpty()
    command = [str(PROGRAM), "checkpoint", "verify", store.directory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    try:
        yield process, controller
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        os.close(controller)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_end_verification(
    long_verify: tuple[subprocess.Popen[bytes], int], signum: signal.Signals
) -> None:
    process, terminal = long_verify
    seen = ""
    deadline = time.monotonic() + 60
    while "step 30: [" not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 4096).decode()
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -signum
    assert output == b""


# gc ---------------------------------------------------------------------------------------------------------


def test_gc(store: CheckpointStore, checkpoint_writer: "CheckpointWriter") -> None:
    save, _ = checkpoint_writer.write(store, 30)
    assert document("gc", store.directory, expect=1)["busy"] is True
    assert "is in progress" in run("gc", store.directory, expect=1).stderr
    save.release()
    dry = document("gc", store.directory, "--dry-run")
    assert dry["dry_run"] is True
    assert len(dry["removed"]) == 7
    assert dry["bytes"] > 40_000
    assert "would remove" in run("gc", store.directory, "--dry-run").stdout
    wet = document("gc", store.directory)
    assert wet["removed"] == dry["removed"]
    assert not any(Path(each["path"]).exists() for each in wet["removed"])
    assert "nothing to remove" in run("gc", store.directory).stdout
    assert document("verify", store.directory, "--all")["ok"] is True


def test_a_step_that_was_dropped_by_hand_leaves_its_shards_to_gc(store: CheckpointStore) -> None:
    shards = store.shard_paths(store.read_manifest(10))
    shutil.rmtree(Path(store.directory) / "step-00000010")
    left = document("gc", store.directory, expect=1)
    assert left["removed"] == []
    assert "--orphaned" in left["problems"][0]["message"]
    removed = [each["path"] for each in document("gc", store.directory, "--orphaned")["removed"]]
    assert set(shards) <= set(removed)
    assert document("ls", store.directory)["latest"] == 20
    assert document("verify", store.directory, "--all")["ok"] is True


def test_gc_leaves_what_it_cannot_judge(store: CheckpointStore) -> None:
    manifest = manifest_of(store, 20)
    flip(manifest, 77)
    stray = Path(store.volumes[0]) / "step-00000020" / "shard-00000-of-00001-0123456789abcdef.safetensors"
    stray.write_bytes(b"x")
    collected = document("gc", store.directory, expect=1)
    assert collected["removed"] == []
    assert collected["problems"][0]["path"] == str(manifest)
    assert "left in place" in run("gc", store.directory, expect=1).stderr
    assert stray.exists()


# Usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc", "adopt"])
def test_what_is_not_there_exits_2(tmp_path: Path, command: str) -> None:
    assert "not a directory of checkpoints" in run(command, tmp_path / "missing", expect=2).stderr
    assert document(command, tmp_path, expect=2)["error"]["path"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    assert "ENOTDIR" in run(command, tmp_path / "file", expect=2).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["list", "."],
        ["ls"],
        ["show", ".", "--step", "latest"],
        ["show", ".", "--step", "-1"],
        ["show", ".", "--step=-1"],
        ["verify", ".", "--step", "-1"],
        ["verify", ".", "--step", "9223372036854775808"],
        ["verify", ".", "--step", "1", "--all"],
        ["gc", ".", "--step", "1"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    run(*arguments, expect=2)


def test_a_step_that_is_not_there_exits_2(store: CheckpointStore) -> None:
    for command in ("show", "verify"):
        told = run(command, store.directory, "--step", "15", expect=2).stderr
        assert "no checkpoint of step 15; it has steps 10, 20" in told


def test_a_subcommand_that_there_is_not_is_named(tmp_path: Path) -> None:
    done = run("measure", str(tmp_path), expect=2)
    assert "unknown subcommand 'measure'; there are ls, show, verify, gc, adopt" in done.stderr


def test_verify_all_while_steps_are_removed(tmp_path: Path) -> None:
    """A step that is removed between listing and reading does not count as damaged."""
    directory = tmp_path / "run"
    checkpointer = trunkline.Checkpointer(directory, process_group=False, keep=None)
    for step in range(150):
        checkpointer.save(step, {"x": step}, block=True)
    found = subprocess.Popen(
        [str(PROGRAM), "checkpoint", "verify", str(directory), "--all", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    for step in range(149, 1, -1):
        checkpointer.delete(step)
    printed, _ = found.communicate(timeout=120)
    assert found.returncode == 0, printed
    assert all(each["ok"] for each in json.loads(printed)["checkpoints"])


def test_ls_and_show_say_which_share_of_a_step_was_written(tmp_path: Path) -> None:
    frozen = numpy.arange(1_000_000, dtype=numpy.float32)
    with trunkline.Checkpointer(tmp_path, incremental=True) as checkpoints:
        for step in (1, 2):
            adapter = numpy.full(100_000, step, numpy.float32)
            checkpoints.save(step, {"frozen": frozen, "adapter": adapter}, block=True)
    first, second = document("ls", tmp_path)["checkpoints"]
    assert (first["bytes_written"], first["written_share"]) == (first["bytes"], 1)
    assert 0.05 < second["written_share"] < 0.2
    assert second["written_share"] == pytest.approx(second["bytes_written"] / second["bytes"])
    assert document("show", tmp_path)["written_share"] == second["written_share"]
    percent = f"({100 * second['written_share']:.3g}%)"
    lines = run("ls", tmp_path).stdout.splitlines()
    assert "(100%)" in lines[1]
    assert percent in lines[2]
    assert percent in run("show", tmp_path).stdout.splitlines()[-1]
