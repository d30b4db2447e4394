"""Workloads of checkpoints: what is saved and restored, what is left, and what is wrong with it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from trunkline import Corrupt, OutOfBudget, Unsupported
from trunkline._flock import DirectoryLock
from trunkline.workload import Workload, _batch_memory, cli, compare, generate, load, scaled, write_report
from trunkline.workload._checkpoint_folder import CheckpointFolder
from trunkline.workload._checkpoint_results import text_of_checkpoints, transfer_results
from trunkline.workload._model_shape import rank_bytes
from trunkline.workload._parse import parse_text
from trunkline.workload._pattern import Pattern
from trunkline.workload._run import run

TEXT = """\
model:
  name: tiny
  num_layers: 3
  parallelism: {tensor: 2, pipeline: 1, data: 2, zero_stage: 1}
  transformer:
    {vocab_size: 500, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_kv_heads: 2}
workflow: {train: false, checkpoint: true}
checkpoint: {num_checkpoints_write: 3, num_checkpoints_read: 2, fsync: false}
"""


def workload(*overrides: str, **checkpoint: Any) -> Workload:
    overrides += tuple(f"checkpoint.{key}={value}" for key, value in checkpoint.items())
    return parse_text(TEXT, "tiny.yaml", overrides)


def saved(place: Path) -> list[str]:
    return sorted(path.parent.name for path in (place / "checkpoints").glob("*/dcp.manifest"))


def test_saves_and_restores_of_one_rank(tmp_path: Path) -> None:
    document = run(workload(), [tmp_path], 1)
    shape = workload().checkpoint.shape  # type: ignore[union-attr]
    nbytes = sum(rank_bytes(shape, 0))
    assert (document["ranks"], document["model"]["model_ranks"]) == (1, 4)
    assert document["model"]["checkpoint_bytes"] == nbytes
    assert document["model"]["scaled"] is None
    save, restore = document["save"], document["restore"]
    assert (save["count"], restore["count"], save["bytes"]) == (3, 2, nbytes)
    assert [each["checkpoint"] for each in save["checkpoints"]] == [1, 2, 3]
    assert [each["checkpoint"] for each in restore["checkpoints"]] == [1, 2]
    assert save["gb_s"] == pytest.approx(
        3 * nbytes / sum(each["seconds"] for each in save["checkpoints"]) / 1e9
    )
    assert 0 < save["per_rank"][0]["own_seconds"] < save["per_rank"][0]["seconds"]
    assert sum(count for _, count in restore["histogram_ns"]) == 2
    assert saved(tmp_path) == ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003"]
    json.dumps(document)
    assert "1 of 4 ranks (tensor 2 x pipeline 1 x data 2, ZeRO 1)" in text_of_checkpoints(document)


def test_runs_are_compared_and_have_no_page(tmp_path: Path) -> None:
    runs = [run(workload(), [tmp_path], 1) for _ in range(2)]
    figures = {each["figure"]: each for each in compare(*runs)["figures"]}
    for figure in ("save.gb_s", "restore.gb_s", "save.mean_seconds"):
        assert figures[figure]["ratio"] == pytest.approx(figures[figure]["b"] / figures[figure]["a"])
    with pytest.raises(ValueError, match="pages are only of training jobs"):
        write_report(runs[0], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_all_ranks_save_and_a_part_of_them_restores(tmp_path: Path) -> None:
    places, halves = [tmp_path / "a", tmp_path / "b"], "model.parallelism.data=1"
    document = run(workload(halves, num_checkpoints_write=1, num_checkpoints_read=1), places)
    shape = workload(halves).checkpoint.shape  # type: ignore[union-attr]
    sizes = [sum(rank_bytes(shape, rank)) for rank in range(2)]
    save = document["save"]
    assert [each["bytes"] for each in save["per_rank"]] == sizes
    assert document["model"]["checkpoint_bytes"] == document["model"]["model_bytes"] == sum(sizes)
    assert save["checkpoints"][0]["gb_s_slowest_rank"] == min(each["gb_s"] for each in save["per_rank"])
    assert document["restore"]["bytes"] == sum(sizes)
    for place in places:  # spread over both
        shards = [path for path in place.rglob("*.shard") if not path.is_symlink()]
        assert sum(path.stat().st_size for path in shards) > 0.3 * sum(sizes)
    part = run(workload(halves, num_checkpoints_write=0, num_checkpoints_read=3), places, ranks=1)
    assert part["save"] is None
    assert [each["checkpoint"] for each in part["restore"]["checkpoints"]] == [1, 1, 1]
    assert [each["bytes"] for each in part["restore"]["per_rank"]] == sizes[:1]


def test_a_later_run_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    run(workload(num_checkpoints_write=1), [tmp_path], 1)
    again = run(workload(num_checkpoints_write=2), [tmp_path], 1, remove=True)
    assert [each["checkpoint"] for each in again["save"]["checkpoints"]] == [2, 3]
    assert again["removed"] is True
    assert saved(tmp_path) == ["checkpoint-000001"]
    assert (tmp_path / "mine").exists()


def test_remove_leaves_nothing_of_a_first_run(tmp_path: Path) -> None:
    (tmp_path / "b" / "checkpoints").mkdir(parents=True)
    run(workload(), [tmp_path / "a", tmp_path / "b"], 1, remove=True)
    assert not (tmp_path / "a" / "checkpoints").exists()
    assert (tmp_path / "b" / "checkpoints").is_dir()  # was there before
    assert not saved(tmp_path / "b")


def test_files_of_others_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="has files that were not saved by a workload"):
        run(workload(), [tmp_path], 1, remove=True)
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["mine"]


def test_two_at_a_time_are_refused_also_where_they_share_one_directory(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    (places[1] / "checkpoints").mkdir(parents=True)
    with DirectoryLock(places[1] / "checkpoints") as lock:
        assert lock.try_lock()
        with pytest.raises(OSError, match="another process saves checkpoints in .*/b/"):
            run(workload(), places, 1, remove=True)


def test_ranks_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calendar.py").write_text("raise SystemExit('the calendar of the working directory')")
    (tmp_path / "json.py").write_text("raise SystemExit('the json of the working directory')")
    monkeypatch.chdir(tmp_path)
    overrides = ("model.parallelism.data=1",)
    document = run(workload(*overrides, num_checkpoints_write=1, num_checkpoints_read=0), [tmp_path / "a"])
    assert document["ranks"] == 2


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with DirectoryLock(tmp_path / "checkpoints") as lock:
        assert lock.try_lock()
        with pytest.raises(OSError, match="another process saves checkpoints in") as caught:
            run(workload(), [tmp_path], 1)
    assert caught.value.errno == errno.EBUSY


def test_only_checkpoints_of_the_same_model_are_restored(tmp_path: Path) -> None:
    nothing = workload(num_checkpoints_write=0)
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint to restore; save some first with"):
        run(nothing, [tmp_path], 1)
    assert not (tmp_path / "checkpoints").exists()
    other = parse_text(TEXT.replace("hidden_size: 64", "hidden_size: 32"), "tiny.yaml")
    run(other, [tmp_path], 1)
    with pytest.raises(FileNotFoundError, match=r"of this model and 1 ranks; it has some of another transf"):
        run(nothing, [tmp_path], 1)
    run(workload(num_checkpoints_write=1), [tmp_path], 1)
    with pytest.raises(FileNotFoundError, match=r"it has some of 1 ranks and of another transformer; save"):
        run(nothing, [tmp_path])
    document = run(nothing, [tmp_path], 1)
    assert [each["checkpoint"] for each in document["restore"]["checkpoints"]] == [4, 4]


def test_bytes_that_differ_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the checksums agree: the pattern is compared."""
    run(workload(num_checkpoints_write=2), [tmp_path], 1)
    folder = CheckpointFolder.below([tmp_path])
    monkeypatch.setattr(CheckpointFolder, "path", lambda *_: tmp_path / "checkpoints" / "checkpoint-000002")
    assert folder.is_complete(1)
    with pytest.raises(Corrupt, match=r"byte 0 of rank0.model.0.0 is not what was saved"):
        run(workload(num_checkpoints_write=0, num_checkpoints_read=1), [tmp_path], 1)


def test_a_damaged_checkpoint_is_named_by_the_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(workload(num_checkpoints_write=1), [tmp_path], 2)
    [shard] = (tmp_path / "checkpoints").rglob("rank00001-*.shard")
    with shard.open("r+b") as file:
        file.seek(5000)
        file.write(b"\0\1\2\3")
    with pytest.raises(OSError, match="rank 1 failed with exit status 1; the run is not complete"):
        run(workload(num_checkpoints_write=0, num_checkpoints_read=1), [tmp_path], 2)
    assert f"rank 1: {shard}" in capfd.readouterr().err


def test_what_does_not_fit_is_rejected_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = workload(num_checkpoints_write=10**12)
    with pytest.raises(OSError, match="GB left; choose another directory, a smaller scale_bytes") as caught:
        run(many, [tmp_path], 1)
    assert str(caught.value).startswith("the checkpoints need ")  # not "[Errno 28] ..."
    monkeypatch.setattr(_batch_memory, "free_memory_bytes", lambda: 10_000)
    with pytest.raises(OutOfBudget, match="the tensors of 1 rank of tiny need 0.30 GB of memory, and 0.00"):
        run(workload(), [tmp_path], 1)
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(ValueError, match="5 is not a multiple of 2, the ranks of a copy of the model"):
        run(workload(), [tmp_path], 5)
    with pytest.raises(ValueError, match="tiny has no data set"):
        generate(workload(), [tmp_path])
    with pytest.raises(
        ValueError, match="scale_bytes: tiny has no data set; scale its checkpoints with `run`"
    ):
        scaled(workload(), 1000)
    with pytest.raises(ValueError, match="saves checkpoints, which needs a directory"):
        run(workload(), None)
    with pytest.raises(ValueError, match="remove: unet3d saves no checkpoints"):
        run(load("unet3d_h100"), [tmp_path], remove=True)


SLOW = """\
import os, signal, sys
from trunkline.workload import cli, _checkpoint_rank
from trunkline.dcp import StorageWriter
real, calls = StorageWriter.finish, []
def finish(self, **arguments):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGINT)
    real(self, **arguments)
StorageWriter.finish = finish
sys.exit(cli.main(['workload', 'run', *sys.argv[1:]]))
"""


@pytest.mark.parametrize("options", [[], ["--remove"]])
def test_an_interrupt_leaves_no_half_of_a_checkpoint(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "w.yaml").write_text(TEXT)
    command = [sys.executable, "-c", SLOW, str(tmp_path / "w.yaml"), "--data", str(tmp_path / "data")]
    done = subprocess.run(
        [*command, "--ranks", "1", *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 130, done.stderr
    folder = tmp_path / "data" / "checkpoints"
    if options:
        assert not folder.exists()
    else:
        assert saved(tmp_path / "data") == [each.name for each in sorted(folder.glob("checkpoint-*"))]
        assert len(saved(tmp_path / "data")) in (1, 2)


def test_a_killed_rank_leaves_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(TEXT)
    command = [sys.executable, "-m", "trunkline", "workload", "run", str(tmp_path / "w.yaml")]
    command += [
        "--data",
        str(tmp_path / "data"),
        "--ranks",
        "2",
        "--set",
        "checkpoint.num_checkpoints_write=5000",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not saved(tmp_path / "data"):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        [ranks] = (path.read_text().split() for path in Path(f"/proc/{process.pid}/task").glob("*/children"))
        os.kill(int(ranks[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the run is not complete" in errors
    folder = tmp_path / "data" / "checkpoints"
    assert saved(tmp_path / "data") == [each.name for each in sorted(folder.glob("checkpoint-*"))]


def test_a_checkpoint_of_a_killed_run_is_reported(tmp_path: Path) -> None:
    run(workload(num_checkpoints_write=2), [tmp_path], 1)
    (tmp_path / "checkpoints" / "checkpoint-000002" / "dcp.manifest").unlink()
    document = run(workload(num_checkpoints_write=1), [tmp_path], 1)
    assert document["incomplete"] == ["checkpoint-000002"]
    assert [each["checkpoint"] for each in document["save"]["checkpoints"]] == [3]
    assert "checkpoint-000002: an earlier run was killed; remove them" in text_of_checkpoints(document)


def test_without_torch_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unsupported, match="checkpoints require the package torch: pip install torch"):
        run(workload(), [tmp_path], 1)
    assert not (tmp_path / "checkpoints").exists()


def test_times_are_those_of_the_slowest_rank() -> None:
    results = transfer_results([8_000, 2_000, 0], [[(1, 400, 300)], [(1, 1000, 10)], [(1, 2000, 0)]])
    assert results is not None
    assert results["gb_s"] == 5.0  # 10,000 bytes in 2,000 ns
    assert results["gb_s_slowest_rank"] == 2.0
    assert results["per_rank"][0] == {"bytes": 8000, "seconds": 4e-7, "gb_s": 20.0, "own_seconds": 3e-7}
    assert transfer_results([1], [[]]) is None


def test_the_pattern_differs_everywhere_it_should() -> None:
    pattern = Pattern(7)
    memory = numpy.zeros(3 * 2**20 + 5, dtype=numpy.uint8)
    pattern.fill(memory, 1, 2, 3)
    assert pattern.first_difference(memory, 1, 2, 3) is None
    assert len({memory[at : at + 5].tobytes() for at in range(0, len(memory), 2**20)}) == 4
    memory[2**20 + 17] ^= 1
    assert pattern.first_difference(memory, 1, 2, 3) == 2**20 + 17
    assert pattern.first_difference(memory, 2, 1, 3) is not None
    assert Pattern(8).first_difference(memory, 1, 2, 3) is not None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", str(tmp_path), "--set", "checkpoint.time_between_checkpoints=0"]
    data += ["--set", "checkpoint.num_checkpoints_write=1", "--set", "checkpoint.num_checkpoints_read=1"]
    command = ["workload", "run", "llama3-8b", *data, "--ranks", "1", "--scale", "8MB", "--remove"]
    assert cli.main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"]["scaled"]["hidden"][0] == 4096
    assert document["model"]["model_bytes"] <= 8_000_000
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "llama3-8b, 1 of 8 ranks" in shown
    assert "SCALED DOWN         112 GB -> " in shown
    assert "every restored byte is as it was saved" in shown
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["workload", "run", "llama3-8b", *data, "--scale", "1"]) == 2
