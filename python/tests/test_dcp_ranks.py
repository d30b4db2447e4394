"""trunkline.dcp on several ranks: FSDP2, DTensor, ShardedTensor, resharding, ranks that fail or die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trunkline as tl

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch is built without gloo", allow_module_level=True)

import torch.distributed.checkpoint as dcp  # noqa: E402

PROGRAMS = Path(__file__).parent / "dcp_ranks.py"
LIMIT_S = 240


def run_ranks(directory: Path, *steps: str, statuses: list[list[int]] | None = None) -> None:
    """Run programs, each on so many ranks; all must succeed unless other statuses are given."""
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    command = [sys.executable, "-X", "faulthandler", str(PROGRAMS), str(directory), *steps]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        said = "a rank hangs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    expected = statuses or [[0] * int(step.split("/")[1]) for step in steps]
    if said.splitlines() != [" ".join(map(str, each)) for each in expected]:
        outputs = sorted(directory.glob("output-*"))
        shown = [f"--- {output.name}\n{output.read_text(errors='replace')}" for output in outputs]
        pytest.fail("\n".join([said, *shown]))


def said_by(directory: Path, step: str, rank: int) -> str:
    return (directory / f"output-{step.replace('/', '-')}-{rank}").read_text()


def test_four_ranks_then_two_then_three(tmp_path: Path) -> None:
    run_ranks(tmp_path, "write_first/4")
    names = {path.name.partition("-")[0] for path in (tmp_path / "ckpt").glob("*.shard")}
    assert names == {f"rank{rank:05d}" for rank in range(4)}
    assert all(list((tmp_path / volume).glob("*.shard")) for volume in ("v0", "v1"))
    run_ranks(tmp_path, "read_and_write_again/2", "read_and_write_again/3")
    assert not list((tmp_path / "v0").iterdir())
    assert len(list((tmp_path / "ckpt").iterdir())) == 4


def test_every_way_of_sharding_to_every_other(tmp_path: Path) -> None:
    run_ranks(tmp_path, "wrapped_models/4", "placements/4")


def test_sharded_tensors_and_ways_of_saving(tmp_path: Path) -> None:
    run_ranks(tmp_path, "sharded_tensors/2", "saving/2")


def test_a_save_in_the_background_over_the_group_of_the_training_warns(tmp_path: Path) -> None:
    run_ranks(tmp_path, "sharing_a_group/2")


def test_an_error_of_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    run_ranks(tmp_path, "failing/2")


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
def test_a_rank_that_dies_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    phases = {
        "1:prepare_local_plan:after": 1,
        "1:write_data:before": 1,
        "1:write_data:after": 1,
        "0:finish:before": 1,
        "0:finish:after": 2,
    }
    steps = [f"dying/2/{phase}" for phase in phases]
    run_ranks(tmp_path, *steps, statuses=[[9, 0] if phase[0] == "0" else [0, 9] for phase in phases])
    for (phase, seed), step in zip(phases.items(), steps, strict=True):
        survivor = 1 - int(phase[0])
        assert f"rank {survivor}: " in said_by(tmp_path, step, survivor), phase
        into = {"t": torch.zeros(50, 3)}
        path = tmp_path / phase / "ckpt"
        dcp.load(into, storage_reader=tl.dcp.StorageReader(path))
        expected = torch.randn(50, 3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(into["t"], expected), phase
        dcp.save(into, storage_writer=tl.dcp.StorageWriter(path, overwrite=True))
        assert len(list(path.iterdir())) == 2, phase


def last_lines(directory: Path, step: str) -> list[str]:
    """The last line that each rank said."""
    ranks = range(int(step.split("/")[1]))
    return [said_by(directory, step, rank).splitlines()[-1] for rank in ranks]


def test_parts_that_are_not_stored_are_no_silent_gaps(tmp_path: Path) -> None:
    loads = ["load_parts/1/0", "load_parts/2/1", "load_parts/2/all"]
    run_ranks(tmp_path, "save_parts/2/-", *loads)
    for rank in range(2):
        said = said_by(tmp_path, "save_parts/2/-", rank)
        assert "contains 384 of the 768 elements of 't'" in said
        assert "no_dist" in said
    for step, sizes in zip(loads, ("384 of the 768", "192 of the 384", "384 of the 768"), strict=True):
        for said in last_lines(tmp_path, step):
            assert f"it has only {sizes} elements of 't' that this rank loads" in said, step
            assert "without collectives" in said


def test_a_failed_save_leaves_the_directory_to_other_ranks(tmp_path: Path) -> None:
    run_ranks(tmp_path, "save_beside_a_failure/2/-")
    first, second = last_lines(tmp_path, "save_beside_a_failure/2/-")
    assert "contains 384 of the 768 elements" in first
    assert second == "saved"


@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4)])
def test_what_ranks_save_apart_is_not_added_to(tmp_path: Path, first: int, second: int) -> None:
    """A run without collectives, of which ranks die, and another one in the same directory."""
    dying = "01" if first == 4 else "0"
    steps = [f"save_apart/{first}/1:{dying}", f"save_apart/{second}/2"]
    died = [[9 if str(rank) in dying else 0 for rank in range(first)], [0] * second]
    run_ranks(tmp_path, *steps, statuses=died)
    for said in last_lines(tmp_path, steps[1]):
        assert "refused: Checkpoint already exists" in said
        assert "save into another directory" in said
    held = sorted(path.name for path in (tmp_path / "ckpt").glob("*manifest"))
    assert held == [f"dcp-rank{rank:05d}.manifest" for rank in range(first) if str(rank) not in dying]


def test_a_mixture_of_what_ranks_saved_apart_is_not_loaded(tmp_path: Path) -> None:
    """As where a filesystem shows one rank late what another one wrote."""
    run_ranks(tmp_path, "save_apart/3/1", "load_apart/3/1")
    assert last_lines(tmp_path, "load_apart/3/1") == ["loaded"] * 3
    (tmp_path / "ckpt").rename(tmp_path / "first")
    run_ranks(tmp_path, "save_apart/2/2")
    for path in (tmp_path / "first").glob("*rank00002*"):
        path.rename(tmp_path / "ckpt" / path.name)
    run_ranks(tmp_path, "load_apart/3/2", "load_apart/2/2")
    for said in last_lines(tmp_path, "load_apart/3/2"):
        assert "dcp-rank00002.manifest is of a different save than dcp-rank00000.manifest" in said
        assert "on as many ranks as the last save had" in said
    assert last_lines(tmp_path, "load_apart/2/2") == ["loaded"] * 2


def test_a_rank_that_survives_an_error_does_not_add_to_the_save_before(tmp_path: Path) -> None:
    run_ranks(tmp_path, "retry_apart/2/-")
    assert said_by(tmp_path, "retry_apart/2/-", 0).split() == ["Error", "FileExistsError"]
    assert said_by(tmp_path, "retry_apart/2/-", 1).split() == ["saved", "FileExistsError"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_misses_a_save_does_not_complete_it_later(tmp_path: Path, rank: int) -> None:
    """Where the planner fails the late save is refused; where the save is never called, the load is."""
    run_ranks(tmp_path, f"miss_apart/2/{rank}-planner")
    assert said_by(tmp_path, f"miss_apart/2/{rank}-planner", rank).split() == [
        "ValueError",
        "FileExistsError",
    ]
    (tmp_path / "ckpt").rename(tmp_path / "of-planner")
    steps = [f"miss_apart/2/{rank}-batch", "load_apart/2/dtensor"]
    run_ranks(tmp_path, *steps)
    assert said_by(tmp_path, steps[0], rank).split() == ["ValueError", "saved"]
    assert said_by(tmp_path, steps[0], 1 - rank).split() == ["saved", "FileExistsError"]
    for said in last_lines(tmp_path, steps[1]):
        assert "ranks 0 and 1 have not saved into the directory equally often" in said
        assert "remove dcp-rank*.refused if no rank missed a save" in said


def test_saves_that_all_ranks_repeat_leave_the_first(tmp_path: Path) -> None:
    run_ranks(tmp_path, "repeat_apart/2", "load_apart/2/1")
    for rank in range(2):
        assert said_by(tmp_path, "repeat_apart/2/", rank).split() == ["saved", *["FileExistsError"] * 2]
    assert last_lines(tmp_path, "load_apart/2/1") == ["loaded"] * 2


def test_groups_of_ranks_do_not_add_to_each_others_save(tmp_path: Path) -> None:
    run_ranks(tmp_path, "save_by_groups/4")
    assert said_by(tmp_path, "save_by_groups/4/", 0).split() == ["saved"]
    assert said_by(tmp_path, "save_by_groups/4/", 3).split() == ["FileExistsError"]


def test_of_two_groups_that_save_into_one_directory_one_fails(tmp_path: Path) -> None:
    run_ranks(tmp_path, "save_stages/4")
    said = [said_by(tmp_path, "save_stages/4/", rank).split()[-1] for rank in range(4)]
    assert said == ["saved", "saved", "FileExistsError", "FileExistsError"]
    names = tl.dcp.StorageReader(tmp_path / "ckpt").read_metadata().state_dict_metadata
    assert list(names) == ["stage0"]
    assert len(list((tmp_path / "ckpt").glob("*.shard"))) == 1


def test_checkpointers_compare_what_ranks_call(tmp_path: Path) -> None:
    run_ranks(tmp_path, "checkpointer_calls/2", "checkpointer_fails_to_copy/2", "checkpointer_alone/2")
