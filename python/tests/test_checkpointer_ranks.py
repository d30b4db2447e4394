"""trunkline.Checkpointer on many ranks: processes with a gloo group on the CPU, some of which die."""

import errno
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from rank_processes import PHASES, Failed, RankProcesses, debris, make_state, same

import trunkline as tl
from trunkline import _core

TIMEOUT = 1.5  # of a rank that is silent, in tests where one is
LONG = 60.0  # where none may be
MOMENTS = int(os.environ.get("TRUNKLINE_TEST_KILLS", "100"))
BLOCK = 1 << 20


@pytest.fixture(scope="module")
def crew() -> Iterator[RankProcesses]:
    """Three ranks for tests in which nobody dies."""
    with RankProcesses(3) as ranks:
        yield ranks
        ranks.finish()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def save_alone(directory: Path, step: int, seed: int, **options: Any) -> None:
    """A checkpoint that is there before."""
    tl.Checkpointer(directory, process_group=False, **options).save(step, make_state(seed), block=True)


def save_alone_again(directory: Path, step: int, seed: int) -> None:
    """Another job that goes on from what is there."""
    other = tl.Checkpointer(directory, process_group=False, keep=None)
    other.load()
    other.save(step, make_state(seed), block=True)


def assert_only(directory: Path, seeds: dict[int, int], volumes: Any = ()) -> None:
    """These are the checkpoints, whole, and there is nothing else."""
    assert debris(directory, volumes) == []
    checkpointer = tl.Checkpointer(directory, process_group=False)
    assert checkpointer.steps() == sorted(seeds)
    for step, seed in seeds.items():
        checkpointer.verify(step)
        assert same(checkpointer.load(step), make_state(seed)), step


def assert_named(failed: dict[int, Failed], rank: int, expected: int) -> None:
    """All that were expected to fail did, with an error of ours that names the rank."""
    assert len(failed) == expected
    for error in failed.values():
        assert error.is_ours, error
        assert f"rank {rank}" in error.message, error


def check_shards(directory: Path, step: int, state: dict[str, Any]) -> list[int]:
    """Shards are stock files, with all tensors in them right; their sizes."""
    store = _core.CheckpointStore(os.fspath(directory))
    manifest = store.read_manifest(step)
    paths = store.shard_paths(manifest)
    whole = {}
    for path in paths:
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if "[" not in name:
                    assert name not in whole
                    whole[name] = file.get_tensor(name)
    assert whole
    by_name = {**state["model"], "bias": state["bias"]}
    for name, tensor in whole.items():
        assert torch.equal(tensor, by_name[name.rsplit(".")[-1]]), name
    return [Path(path).stat().st_size for path in paths]


@pytest.mark.parametrize("volumes", [0, 3])
@pytest.mark.parametrize(
    ("writers", "count"), [("rank", 3), ("node", 1), ([2], 1), ([2, 0], 2), ([1, 2, 0], 3)]
)
def test_replicated_state_is_written_once_in_equal_shares(
    crew: RankProcesses, directory: Path, tmp_path: Path, writers: Any, count: int, volumes: int
) -> None:
    disks = [tmp_path / f"disk{i}" for i in range(volumes)]
    for disk in disks:
        disk.mkdir()
    crew.all("open", str(directory), volumes=[str(disk) for disk in disks] or None, writers=writers)
    state = {"seed": 5, "kilobytes": 3500}
    crew.all("save", 7, state, block=True)
    sizes = check_shards(directory, 7, make_state(**state))
    total = sum(tensor.nbytes for tensor in make_state(**state)["model"].values())
    assert total <= sum(sizes) <= total + 10 * 8 + len(sizes) * 16384
    assert len(sizes) == count * max(1, volumes)
    assert max(sizes) - min(sizes) <= BLOCK
    # One shard of each rank is on each volume, and they come rank by rank.
    each = max(1, volumes)
    shares = [sum(sizes[at : at + each]) for at in range(0, len(sizes), each)]
    assert max(shares) - min(shares) <= BLOCK
    assert all(crew.all("loads", state))
    assert same(tl.Checkpointer(directory, process_group=False).load(), make_state(**state))


@pytest.mark.parametrize("saved_by", [1, 2, 3])
def test_any_number_of_ranks_loads_what_another_has_saved(
    crew: RankProcesses, directory: Path, saved_by: int
) -> None:
    state = {"seed": saved_by, "kilobytes": 2000}
    for size in (saved_by, 1, 2, 3):
        group = list(range(size))
        # All take part in making groups, and those that are in it then open.
        crew.all("make_group", group)
        for rank in group:
            crew.tell(rank, "open", str(directory), group=group, name=f"{size}")
        for rank in group:
            crew.reply(rank)
        if not tl.Checkpointer(directory, process_group=False).steps():
            crew.collect([])
            for rank in group:
                crew.tell(rank, "save", 1, state, block=True, name=f"{size}")
            assert crew.collect(group) == {}
            assert _core.CheckpointStore(str(directory)).read_manifest(1)["world_size"] == size
        for rank in group:
            crew.tell(rank, "loads", state, name=f"{size}")
        assert [crew.reply(rank) for rank in group] == [True] * size


def test_groups_of_other_ranks_number_them_anew(crew: RankProcesses, directory: Path) -> None:
    group = [1, 2]
    crew.all("make_group", group)
    for rank in group:
        crew.tell(rank, "open", str(directory), group=group)
    assert crew.collect(group) == {}
    for rank in group:
        crew.tell(rank, "save", 3, {"seed": 1})
    assert crew.collect(group) == {}
    assert crew.failures("wait", ranks=group) == {}
    assert_only(directory, {3: 1})
    crew.tell(1, "save", 4, {"seed": 4}, block=True)
    crew.tell(2, "save_object", 4)
    assert "rank 1 failed: state['object']" in crew.collect(group)[1].message  # 1 of the group
    (failed,) = crew.failures("open", str(directory), group=group, ranks=[0]).values()
    assert failed.kind == "ValueError"


@pytest.mark.parametrize("state", [{}, {"a": 1}, [], {"empty": torch.empty(0, 3)}, {"one": torch.ones(1)}])
def test_states_of_next_to_nothing(crew: RankProcesses, directory: Path, tmp_path: Path, state: Any) -> None:
    """Most ranks have no shard."""
    crew.all("open", str(directory), volumes=[str(tmp_path / "a"), str(tmp_path / "b")])
    crew.all("save", 1, state, block=True)
    assert same(tl.Checkpointer(directory, process_group=False).load(), state)
    assert debris(directory) == []


def test_one_tensor_cut_among_ranks_and_volumes(crew: RankProcesses, directory: Path, tmp_path: Path) -> None:
    disks = [str(tmp_path / f"disk{i}") for i in range(3)]
    crew.all("open", str(directory), volumes=disks)
    state = {"one": torch.randint(0, 256, (11_000_003,), dtype=torch.uint8)}
    crew.all("save", 1, state, block=True)
    manifest = _core.CheckpointStore(str(directory)).read_manifest(1)
    sizes = [shard["bytes"] for shard in manifest["shards"]]
    assert len(sizes) == 9
    assert max(sizes) - min(sizes) <= BLOCK
    assert same(tl.Checkpointer(directory, process_group=False).load(), state)


def test_writers_per_node(directory: Path) -> None:
    with RankProcesses(3) as ranks:
        for rank, node in enumerate(["0", "1", "1"]):
            ranks.one(rank, "set_environment", GROUP_RANK=node)
        ranks.all("open", str(directory), writers="node")
        ranks.all("save", 1, {"seed": 1}, block=True)
        assert len(check_shards(directory, 1, make_state(1))) == 2


def test_every_step_in_the_background(crew: RankProcesses, directory: Path) -> None:
    crew.all("open", str(directory), keep=2)
    steps = list(range(30))
    crew.all("save_many", steps, 300)
    assert crew.all("latest_loaded") == [29] * 3
    checkpointer = tl.Checkpointer(directory, process_group=False)
    assert checkpointer.steps() == [28, 29]
    for step in (28, 29):
        assert same(checkpointer.load(step), make_state(step, 300))
    assert debris(directory) == []


def test_two_checkpointers_at_once(crew: RankProcesses, tmp_path: Path) -> None:
    """In another order on each rank: they do not wait for one another."""
    for name in ("a", "b"):
        crew.all("open", str(tmp_path / name), name=name, timeout=LONG)
    for rank in range(3):
        for name in ("ab", "ba")[rank % 2]:
            crew.one(rank, "save", 1, {"seed": ord(name)}, name=name)
    for name in ("a", "b"):
        crew.all("wait", name=name)
        assert_only(tmp_path / name, {1: ord(name)})


def test_collectives_go_on_meanwhile(crew: RankProcesses, directory: Path) -> None:
    crew.all("open", str(directory))
    for step in range(5):
        crew.all("save", step, {"seed": step})
        assert crew.all("collective") == [3, 3, 3]
    crew.all("wait")
    assert crew.all("latest_loaded") == [4] * 3


def test_many_loads_in_a_row(crew: RankProcesses, directory: Path) -> None:
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG)
    for rank in range(3):
        for _ in range(4):
            crew.tell(rank, "latest_loaded")
    for rank in range(3):
        assert [crew.reply(rank) for _ in range(4)] == [1] * 4


@pytest.mark.parametrize("odd", [1, 2])
def test_a_step_that_is_replaced_while_ranks_load_it(crew: RankProcesses, directory: Path, odd: int) -> None:
    """All get the same one, though one opened it later than the others."""
    save_alone(directory, 0, 0)
    crew.all("open", str(directory), timeout=LONG)
    for times, seed in ((1, 100), (3, 102)):
        crew.one(odd, "replaced_before_opening", str(directory), 0, times)
        assert crew.all("latest_loaded") == [seed] * 3
    crew.one(odd, "replaced_before_opening", str(directory), 0, 1000)
    failed = crew.failures("latest_loaded")
    # Where the other job replaces the step for rank 2, rank 1 may open it before or after that, and be named.
    assert len(failed) == 3
    for error in failed.values():
        assert error.is_ours, error
        assert re.search(f"rank (1|{odd}) finds a different checkpoint of step 0", error.message), error
        assert "another process is saving into the directory" in error.message, error


@pytest.mark.parametrize("there", ["nothing", "an older copy"])
def test_rank_0_that_finds_fewer_checkpoints_than_others(
    crew: RankProcesses, directory: Path, tmp_path: Path, there: str
) -> None:
    """As where its machine has not mounted the directory: the others do not follow it back in time."""
    save_alone(directory, 1, 1)
    elsewhere = tmp_path / "elsewhere"
    if there == "an older copy":
        shutil.copytree(directory, elsewhere)
    crew.all("open", str(directory), timeout=LONG, keep=None)
    save_alone_again(directory, 2, 2)
    crew.one(0, "look_into", str(elsewhere))
    failed = crew.failures("latest_loaded")
    assert_named(failed, 1, 3)
    finds = "no checkpoint" if there == "nothing" else "step 1 as the last one"
    assert all(f"rank 1 finds step 2, and rank 0 {finds}" in error.message for error in failed.values())
    assert {error.kind for error in failed.values()} == {"RankError"}  # nobody starts over on that
    crew.one(0, "look_into", str(directory))
    assert crew.all("latest_loaded") == [2] * 3


@pytest.mark.parametrize("first", [0, None])
def test_a_step_that_is_saved_once_rank_0_has_looked(
    crew: RankProcesses, directory: Path, first: int | None
) -> None:
    """It decides again, since a rank has found the new one."""
    if first is not None:
        save_alone(directory, first, first)
    crew.all("open", str(directory), timeout=LONG)
    crew.one(1, "saved_before_looking", str(directory), 100)
    assert crew.all("latest_loaded") == [100] * 3


def test_a_step_that_is_removed_while_one_rank_verifies(crew: RankProcesses, directory: Path) -> None:
    """verify() concerns each rank by itself, and takes the last checkpoint that is left."""
    crew.all("open", str(directory), timeout=LONG, keep=None)
    for step in (1, 2):
        crew.all("save", step, {"seed": step}, block=True)
    crew.one(1, "verify_while_removed", str(directory), 2)
    assert crew.all("latest_loaded") == [1] * 3


def test_ranks_that_loaded_different_checkpoints_save_no_mixture(
    crew: RankProcesses, directory: Path
) -> None:
    save_alone(directory, 1, 1)
    save_alone(directory, 2, 2)
    crew.all("open", str(directory), timeout=LONG)
    for rank, step in ((0, 1), (1, 2), (2, 1)):
        assert crew.one(rank, "loads", {"seed": step}, step)
    failed = crew.failures("save", 3, {"seed": 3}, block=True)
    assert_named(failed, 1, 3)
    assert "rank 1 has loaded step 2 last, and rank 0 step 1" in failed[1].message
    assert crew.all("latest_loaded") == [2] * 3
    crew.all("save", 3, {"seed": 3}, block=True)
    # From here on rank 0 alone may load what it broadcasts.
    assert crew.one(0, "loads", {"seed": 3}, 3)
    crew.all("save", 4, {"seed": 4}, block=True)
    assert_only(directory, {2: 2, 3: 3, 4: 4})


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_loads_another_checkpoint_after_all_loaded_one(
    crew: RankProcesses, directory: Path, odd: int
) -> None:
    """What counts is what each has loaded last."""
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG, keep=None)
    save_alone_again(directory, 2, 2)
    assert crew.all("latest_loaded") == [2] * 3
    assert crew.one(odd, "loads", {"seed": 1}, 1)
    failed = crew.failures("save", 3, {"seed": 3}, block=True)
    assert_named(failed, 0, 3)
    ours, theirs = (1, 2) if odd == 1 else (2, 1)
    for error in failed.values():
        assert f" has loaded step {ours} last, and rank 0 step {theirs}" in error.message
        assert (
            f"Call load({theirs}) to continue from step {theirs}, or load({ours}), the same on all"
            in error.message
        )
        assert "Checkpointer(..., process_group=False)" in error.message
    assert crew.one(odd, "loads", {"seed": 2}, 2)  # as the others
    crew.all("save", 3, {"seed": 3}, block=True)
    assert crew.all("latest_loaded") == [3] * 3
    assert crew.one(odd, "loads", {"seed": 1}, 1)
    assert len(crew.failures("save", 4, {"seed": 4}, block=True)) == 3
    assert crew.all("latest_loaded") == [3] * 3
    crew.all("save", 4, {"seed": 4}, block=True)
    assert_only(directory, {1: 1, 2: 2, 3: 3, 4: 4})


def test_rank_0_loads_an_earlier_step_for_all_after_all_loaded_the_last(
    crew: RankProcesses, directory: Path
) -> None:
    """The others cannot be asked whether it was broadcast: they load it as well, as the error says."""
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG, keep=None)
    save_alone_again(directory, 2, 2)
    assert crew.all("latest_loaded") == [2] * 3
    assert crew.one(0, "loads", {"seed": 1}, 1)
    for _ in range(2):
        failed = crew.failures("save", 3, {"seed": 1}, block=True)
        assert len(failed) == 3
        assert all("Call load(1) to continue from step 1" in error.message for error in failed.values())
    for rank in (1, 2):
        assert crew.one(rank, "loads", {"seed": 1}, 1)
    crew.all("save", 3, {"seed": 1}, block=True)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("how", ["fails_to_read", "interrupted_load"])
@pytest.mark.parametrize("before", [False, True])
def test_a_load_that_failed_on_one_rank(
    crew: RankProcesses, directory: Path, odd: int, how: str, before: bool
) -> None:
    """What the others loaded is not saved together with what that rank had before, whatever it had loaded."""
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG)
    if before:
        assert crew.all("latest_loaded") == [1] * 3
    for again in ("load()", "load(1)"):
        for _ in range(3):
            crew.all("collective")  # all loads that succeed count anew from here
        for rank in range(3):
            crew.tell(rank, *((how,) if rank == odd else ("latest_loaded",)))
        assert [crew.reply(rank) for rank in range(3)] == [True if rank == odd else 1 for rank in range(3)]
        for _ in range(2):
            failed = crew.failures("save", 2, {"seed": 2}, block=True)
            assert_named(failed, odd, 3)
            for error in failed.values():
                assert f"load() of step 1 failed on rank {odd}" in error.message
                assert "Call load() on all ranks, or load(1) on all ranks on which it failed" in error.message
        if again == "load()":
            assert crew.all("latest_loaded") == [1] * 3
        else:
            assert crew.one(odd, "loads", {"seed": 1}, 1)
    crew.all("save", 2, {"seed": 2}, block=True)
    assert_only(directory, {1: 1, 2: 2})


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_fails_hears_of_others_after_its_load_failed(
    crew: RankProcesses, directory: Path, odd: int
) -> None:
    """Ranks that count from different loads take no new failure for an old one."""
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG)
    crew.all("collective")
    for rank in range(3):
        crew.tell(rank, "interrupted_load" if rank == odd else "latest_loaded")
    assert [crew.reply(rank) for rank in range(3)] == [True if rank == odd else 1 for rank in range(3)]
    crew.tell(0, "save_object", 2)
    for rank in (1, 2):
        crew.tell(rank, "save", 2, {"seed": 2}, block=True)
    failed = crew.collect(range(3))
    assert len(failed) == 3
    assert all("object" in error.message for error in failed.values())


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("before", [False, True])
def test_a_load_that_failed_on_one_rank_and_then_on_all(
    crew: RankProcesses, directory: Path, odd: int, before: bool
) -> None:
    """They have different tensors: those of the first load, or of before, when they may have been trained."""
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG)
    if before:
        assert crew.all("latest_loaded") == [1] * 3
    for rank in range(3):
        crew.tell(rank, "fails_to_read" if rank == odd else "latest_loaded")
    assert [crew.reply(rank) for rank in range(3)] == [True if rank == odd else 1 for rank in range(3)]
    assert all(crew.all("fails_to_read"))
    failed = crew.failures("save", 2, {"seed": 2}, block=True)
    assert len(failed) == 3
    assert all("Call load() on all ranks" in error.message for error in failed.values())
    for rank in range(3):
        assert crew.one(rank, "loads", {"seed": 1}, 1)
    crew.all("save", 2, {"seed": 2}, block=True)
    assert_only(directory, {1: 1, 2: 2})


@pytest.mark.parametrize("step", [None, 1])
def test_a_load_that_failed_on_all_ranks(crew: RankProcesses, directory: Path, step: int | None) -> None:
    """They continue with the same state: the one that they had before."""
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG, keep=None)
    crew.all("collective")
    assert all(crew.all("fails_to_read", step))
    crew.all("save", 2, {"seed": 2}, block=True)
    crew.all("collective")
    assert crew.all("latest_loaded") == [2] * 3
    assert all(crew.all("fails_to_read", step))
    crew.all("save", 3, {"seed": 3}, block=True)
    assert_only(directory, {1: 1, 2: 2, 3: 3})


def test_a_step_that_failed_to_load_on_one_rank(crew: RankProcesses, directory: Path) -> None:
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG)
    for rank in (0, 2):
        assert crew.one(rank, "loads", {"seed": 1}, 1)
    assert crew.one(1, "fails_to_read", 1)
    failed = crew.failures("save", 2, {"seed": 2}, block=True)
    assert_named(failed, 1, 3)
    assert "load() of step 1 failed on rank 1, and rank 0 has loaded step 1" in failed[0].message
    assert crew.one(1, "loads", {"seed": 1}, 1)
    crew.all("save", 2, {"seed": 2}, block=True)
    assert_only(directory, {1: 1, 2: 2})


def test_ranks_that_loaded_the_same_step_of_different_saves(crew: RankProcesses, directory: Path) -> None:
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG)
    assert crew.one(0, "loads", {"seed": 1}, 1)
    other = tl.Checkpointer(directory, process_group=False)
    other.load()
    other.save(1, make_state(2), block=True)
    assert crew.one(2, "loads", {"seed": 2}, 1)
    failed = crew.failures("save", 2, {"seed": 3}, block=True)
    assert_named(failed, 2, 3)
    assert "rank 0 another checkpoint of that step" in failed[2].message
    assert "Call load(1), the same on all ranks" in failed[2].message
    assert crew.all("latest_loaded") == [2] * 3
    crew.all("save", 2, {"seed": 3}, block=True)


@pytest.mark.parametrize("again", ["open", "load"])
def test_operations_that_ranks_count_differently(crew: RankProcesses, directory: Path, again: str) -> None:
    """They do no harm before opening and loading, which count anew."""
    crew.all("monitored_barrier")
    crew.all("open", str(directory), timeout=LONG)
    crew.all("save", 1, {"seed": 1}, block=True)
    crew.all("monitored_barrier")
    failed = crew.failures("save", 2, {"seed": 2}, block=True)
    assert all("monitored_barrier" in error.message for error in failed.values())
    assert len(failed) == 3
    if again == "open":
        crew.all("open", str(directory), timeout=LONG)
    else:
        assert crew.all("latest_loaded") == [1] * 3
    crew.all("save", 2, {"seed": 2}, block=True)
    assert_only(directory, {1: 1, 2: 2})


def test_no_checkpoint_yet_on_all_ranks(crew: RankProcesses, directory: Path) -> None:
    crew.all("open", str(directory))
    failed = crew.failures("latest_loaded")
    assert len(failed) == 3
    assert all("no checkpoint yet" in error.message for error in failed.values())


DIFFERENT = {
    "another step": ((2, {"seed": 1}), (3, {"seed": 1})),
    "another shape": ((2, {"seed": 1}), (2, {"seed": 1, "kilobytes": 2900})),
    "more tensors": ((2, {"seed": 1}), (2, {"seed": 1, "tensors": 4})),
    "fewer tensors": ((2, {"seed": 1}), (2, {"seed": 1, "tensors": 1})),
    "another value": ((2, {"seed": 1}), (2, {"seed": 2})),
    "next to nothing": ((2, {"seed": 1}), (2, {})),
    "not nothing": ((2, {}), (2, {"seed": 1})),
    "no step": ((2, {"seed": 1}), (-1, {"seed": 1})),
}


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("difference", DIFFERENT)
def test_ranks_that_differ(crew: RankProcesses, directory: Path, difference: str, odd: int) -> None:
    save_alone(directory, 1, 1)
    crew.all("open", str(directory), timeout=LONG)
    usual, other = DIFFERENT[difference]
    for rank in range(3):
        crew.tell(rank, "save", *(other if rank == odd else usual), block=True)
    failed = crew.collect(range(3))
    assert len(failed) == 3
    ours = {rank: error for rank, error in failed.items() if error.kind != "ValueError"}
    for error in ours.values():
        if difference == "another value":
            assert "strides, which tensors share memory, types, or values" in error.message
            assert "first at state['seed']" in error.message
        # With an odd rank 0 it is one of the others that differs from it.
        assert f"rank {odd}" in error.message, error
    crew.all("save", 4, {"seed": 4}, block=True)
    assert_only(directory, {1: 1, 4: 4})


def test_an_object_that_one_rank_cannot_save(crew: RankProcesses, directory: Path) -> None:
    crew.all("open", str(directory), timeout=LONG)
    for rank in range(3):
        if rank == 1:
            crew.tell(rank, "save_object", 1)
        else:
            crew.tell(rank, "save", 1, {"seed": 1}, block=True)
    failed = crew.collect([0, 1, 2])
    assert failed.pop(1).kind == "Unsupported"
    assert_named(failed, 1, 2)
    crew.all("save", 2, {"seed": 2}, block=True)
    assert_only(directory, {2: 2})


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("option", ["writers", "volumes", "keep", "keep_every", "keep_best"])
def test_ranks_whose_options_differ(
    crew: RankProcesses, directory: Path, tmp_path: Path, option: str, odd: int
) -> None:
    (tmp_path / "disk").mkdir()
    values: dict[str, Any] = {
        "writers": [0],
        "volumes": [str(tmp_path / "disk")],
        "keep": 1,
        "keep_every": 5,
        "keep_best": ("loss", "min", 1),
    }
    for rank in range(3):
        other = {option: values[option]} if rank == odd else {}
        crew.tell(rank, "open", str(directory), timeout=LONG, **other)
    failed = crew.collect(range(3))
    # With an odd rank 0 it is the first of the others that differs from it.
    assert_named(failed, odd or 1, 3)
    assert all(f"{option} differs from rank 0" in error.message for error in failed.values())
    assert not directory.exists() or not list(directory.iterdir())
    assert list((tmp_path / "disk").iterdir()) == []


def test_metrics_are_the_same_on_all_ranks(crew: RankProcesses, directory: Path) -> None:
    crew.all("open", str(directory), timeout=LONG, keep=1, keep_best=("loss", "min", 1))
    for step, loss in enumerate([0.5, 0.1, float("nan"), 0.3]):
        crew.all("save", step, {"seed": step}, block=True, metrics={"loss": loss})
    assert_only(directory, {1: 1, 3: 3})
    for rank in range(3):
        crew.tell(rank, "save", 4, {"seed": 4}, block=True, metrics={"loss": float(rank == 2)})
    failed = crew.collect(range(3))
    assert_named(failed, 2, 3)
    assert all("metrics differs from rank 0" in error.message for error in failed.values())
    assert_only(directory, {1: 1, 3: 3})


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_opens_alone(directory: Path, odd: int) -> None:
    """It waits as long as the process group does."""
    with RankProcesses(2) as ranks:
        ranks.all("make_group", [0, 1], TIMEOUT)
        (failed,) = ranks.failures("open", str(directory), group=[0, 1], ranks=[odd]).values()
    assert failed.kind == "RankError"
    assert f"cannot open {directory} on rank {odd}: " in failed.message
    assert f"rank {1 - odd} did not come to Checkpointer({directory})" in failed.message
    assert "not all opened a Checkpointer (is it inside `if rank == 0:`?)" in failed.message
    assert "process_group=False" in failed.message


def test_volumes_that_are_given_on_all_ranks(crew: RankProcesses, directory: Path, tmp_path: Path) -> None:
    """Each time anew, while rank 0 collects what a crash left: nobody else needs the directory's lock."""
    disks = [str(tmp_path / f"disk{number}") for number in range(2)]
    for disk in disks:
        Path(disk).mkdir()
    for step, volumes in enumerate([disks[:1], disks, disks[1:], None]):
        crew.all("open", str(directory), timeout=LONG, volumes=volumes)
        crew.all("save", step, {"seed": step}, block=True)
    assert_only(directory, {0: 0, 1: 1, 2: 2, 3: 3})


def test_a_failed_clean_up_fails_the_opening_on_no_rank(
    crew: RankProcesses, directory: Path, tmp_path: Path
) -> None:
    save_alone(directory, 1, 1, volumes=[tmp_path / "v"])
    (home,) = tmp_path.glob("v/*/home")
    home.write_bytes(home.read_bytes()[:-1] + b"x")
    begun = time.monotonic()
    assert crew.all("open", str(directory), timeout=LONG) == [[1]] * 3
    assert crew.all("latest_loaded") == [1] * 3
    assert time.monotonic() - begun < LONG / 2


def test_an_error_that_one_rank_has_seen_and_the_others_not(crew: RankProcesses, directory: Path) -> None:
    """They go on together: none waits for the next save alone."""
    crew.all("open", str(directory), timeout=LONG)
    for rank in range(3):
        crew.tell(rank, "save", 1, {"seed": 1 if rank else 2})
    assert crew.collect(range(3)) == {}
    assert len(crew.failures("wait", ranks=[2])) == 1
    assert len(crew.failures("save", 2, {"seed": 2}, block=True)) == 3
    assert crew.failures("save", 3, {"seed": 3}, block=True) == {}
    assert_only(directory, {3: 3})


@pytest.fixture
def fragile(directory: Path) -> Iterator[RankProcesses]:
    """Three ranks that may die, with a checkpoint that is there before."""
    save_alone(directory, 1, 1)
    with RankProcesses(3) as ranks:
        ranks.all("open", str(directory), timeout=LONG)
        ranks.all("set_timeout", TIMEOUT)
        yield ranks


@pytest.mark.parametrize(
    ("rank", "phase"),
    [(0, phase) for phase in PHASES if phase != "reported"]
    + [(1, phase) for phase in PHASES if not phase.startswith("commit")],
)
def test_a_rank_that_dies(fragile: RankProcesses, directory: Path, phase: str, rank: int) -> None:
    fragile.one(rank, "cut", phase, random.Random(phase).choice(["kill", "exit"]))
    begun = time.monotonic()
    fragile.tell(rank, "save", 2, {"seed": 2}, block=True)
    others = [other for other in range(3) if other != rank]
    failed = fragile.failures("save", 2, {"seed": 2}, block=True, ranks=others)
    # A rank that has told that its share is durable is not needed any more.
    assert_named(failed, rank, 0 if phase == "reported" else 2)
    assert time.monotonic() - begun < LONG / 2
    with pytest.raises(EOFError):
        fragile.reply(rank)
    assert_only(directory, {1: 1, 2: 2} if phase in ("committed", "reported") else {1: 1})


@pytest.mark.parametrize(("rank", "phase"), [(0, "placed"), (0, "commit"), (1, "begin"), (1, "durable")])
def test_a_rank_that_stops(fragile: RankProcesses, directory: Path, rank: int, phase: str) -> None:
    """Also when it goes on after the others gave up."""
    fragile.one(rank, "cut", phase, "stop")
    fragile.tell(rank, "save", 2, {"seed": 2}, block=True)
    others = [other for other in range(3) if other != rank]
    assert_named(fragile.failures("save", 2, {"seed": 2}, block=True, ranks=others), rank, 2)
    assert same(tl.Checkpointer(directory, process_group=False).load(), make_state(1))
    os.kill(fragile.processes[rank].pid or 0, signal.SIGCONT)
    failed = fragile.collect([rank])
    assert all(error.is_ours for error in failed.values()), failed
    # Rank 0 had heard from all: the checkpoint is whole, though it came too late for the others.
    assert len(failed) == (0 if phase == "commit" else 1)
    assert_only(directory, {1: 1, 2: 2} if phase == "commit" else {1: 1})


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_never_saves(fragile: RankProcesses, directory: Path, rank: int) -> None:
    others = [other for other in range(3) if other != rank]
    assert_named(fragile.failures("save", 2, {"seed": 2}, block=True, ranks=others), rank, 2)
    assert_only(directory, {1: 1})
    # When it comes after all, it fails as well, and they are together again.
    assert len(fragile.failures("save", 2, {"seed": 2}, block=True, ranks=[rank])) == 1
    fragile.all("save", 3, {"seed": 3}, block=True)
    assert_only(directory, {1: 1, 3: 3})


@pytest.mark.parametrize(
    ("rank", "phase"),
    [(rank, phase) for rank in (0, 1) for phase in ("begin", "placed", "writing", "durable")]
    + [(0, "commit")],
)
def test_a_rank_that_raises(directory: Path, phase: str, rank: int) -> None:
    save_alone(directory, 1, 1)
    with RankProcesses(2) as ranks:
        ranks.all("open", str(directory), timeout=LONG)
        ranks.one(rank, "cut", phase, "raise")
        failed = ranks.failures("save", 2, {"seed": 2}, block=True)
        assert len(failed) == 2
        assert "injected failure" in failed[rank].message
        assert_named({1 - rank: failed[1 - rank]}, rank, 1)
        assert "injected failure" in failed[1 - rank].message
    assert_only(directory, {1: 1})


@pytest.mark.parametrize("what", ["fail_writes", "fail_syncs"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_disk_fails(directory: Path, rank: int, what: str) -> None:
    save_alone(directory, 1, 1)
    with RankProcesses(3) as ranks:
        ranks.all("open", str(directory), timeout=LONG)
        ranks.one(rank, what, errno.ENOSPC)
        failed = ranks.failures("save", 2, {"seed": 2}, block=True)
        assert_named({other: failed[other] for other in failed if other != rank}, rank, 2)
        assert "ENOSPC" in failed[rank].message or os.strerror(errno.ENOSPC) in failed[rank].message
    assert_only(directory, {1: 1})


def test_what_fails_after_the_commit_fails_no_save(directory: Path) -> None:
    with RankProcesses(2) as ranks:
        ranks.all("open", str(directory), timeout=LONG, keep=1)
        ranks.one(0, "fail_retention")
        for step in (1, 2):  # the directory is not left locked
            ranks.all("save", step, {"seed": step}, block=True)
        assert_only(directory, {1: 1, 2: 2})


def test_a_slow_disk_is_no_dead_rank(directory: Path) -> None:
    with RankProcesses(2) as ranks:
        ranks.all("open", str(directory), timeout=TIMEOUT)
        for slow in (1, 0):
            ranks.one(slow, "hold_writes")
            ranks.all("save", 2 + slow, {"seed": 2})
            begun = time.monotonic()
            while time.monotonic() - begun < 1.5 * TIMEOUT:
                assert not any(pipe.poll(TIMEOUT / 8) for pipe in ranks.pipes)
                assert 2 + slow not in tl.Checkpointer(directory, process_group=False).steps()
            ranks.one(slow, "release")
            ranks.all("wait")
    assert_only(directory, {2: 2, 3: 2})


def test_a_slow_disk_and_the_next_save(directory: Path) -> None:
    """Who waits in save() for the one before shows that it is alive."""
    with RankProcesses(2) as ranks:
        ranks.all("open", str(directory), timeout=TIMEOUT)
        ranks.one(1, "hold_writes")
        ranks.all("save", 1, {"seed": 1})
        for rank in range(2):
            ranks.tell(rank, "save", 2, {"seed": 2})
        assert not ranks.pipes[0].poll(2 * TIMEOUT)
        os.kill(ranks.processes[1].pid or 0, signal.SIGUSR1)
        assert ranks.collect(range(2)) == {}
        ranks.all("wait")
    assert_only(directory, {1: 1, 2: 2})


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_rank_0_that_has_the_store(directory: Path, how: str) -> None:
    save_alone(directory, 1, 1)
    with RankProcesses(3, host="rank 0") as ranks:
        # Opening has to succeed within the same time, also on a busy machine.
        ranks.all("open", str(directory), timeout=2 * TIMEOUT)
        ranks.one(0, "cut", "writing", how)
        ranks.tell(0, "save", 2, {"seed": 2}, block=True)
        assert_named(ranks.failures("save", 2, {"seed": 2}, block=True, ranks=[1, 2]), 0, 2)
    assert_only(directory, {1: 1})


def test_rank_0_leaves_first_and_takes_the_store_along(directory: Path) -> None:
    """The others hear what became of their save for all that."""
    for step in range(5):
        with RankProcesses(3, host="rank 0") as ranks:
            ranks.all("open", str(directory), timeout=LONG)
            ranks.one(1, "slow_to_read", "committed", 0.3)
            for rank in range(3):
                ranks.tell(rank, "save_then_destroy_group", step, {"seed": step})
            assert ranks.collect(range(3)) == {}
            ranks.pipes[0].send(None)
            assert ranks.failures("wait", ranks=[1, 2]) == {}
            ranks.processes[0].join(LONG)
            assert ranks.processes[0].exitcode == 0
    assert_only(directory, {step: step for step in range(5)})


@contextmanager
def opened_with_store_in_rank_0(directory: Path, group: bool) -> Iterator[RankProcesses]:
    with RankProcesses(2, host="rank 0") as ranks:
        ranks.all("make_group", [0, 1])
        ranks.all("open", str(directory), timeout=LONG, group=[0, 1] if group else None)
        yield ranks
        ranks.finish()


@pytest.mark.parametrize("group", [False, True])
def test_a_checkpointer_outlives_its_process_group_and_the_store(directory: Path, group: bool) -> None:
    """The next group in these processes would meet the store, with what the group before has left there."""
    with opened_with_store_in_rank_0(directory, group) as ranks:
        ranks.all("save", 1, {"seed": 1})
        ranks.one(1, "slow_to_read", "committed", 0.3)
        ranks.all("wait")
        assert ranks.all("destroy_group") == [True, True]
        for call in (("save", 2, {"seed": 2}), ("latest_loaded",)):
            failed = ranks.failures(*call)
            assert len(failed) == 2
            for error in failed.values():
                assert error.is_ours
                assert "is destroyed (destroy_process_group)" in error.message
                assert "open a new Checkpointer" in error.message
        assert ranks.all("loads", {"seed": 1}, 1) == [True, True]
        assert ranks.failures("wait") == {}
    assert_only(directory, {1: 1})


def test_a_save_under_way_keeps_the_store_of_a_destroyed_group(directory: Path) -> None:
    with opened_with_store_in_rank_0(directory, False) as ranks:
        ranks.one(0, "hold_writes")
        ranks.all("save", 1, {"seed": 1})
        assert ranks.all("destroy_group") == [False, False]
        os.kill(ranks.processes[0].pid or 0, signal.SIGUSR1)
        assert ranks.failures("wait") == {}
    assert_only(directory, {1: 1})


def test_saves_after_the_end_of_a_group_whose_store_is_elsewhere(directory: Path) -> None:
    """As under torchrun, whose agent has it."""
    with RankProcesses(2) as ranks:
        ranks.all("open", str(directory), timeout=LONG)
        ranks.all("save", 1, {"seed": 1}, block=True)
        assert ranks.all("destroy_group", await_store=True) == [True, True]
        ranks.all("save", 2, {"seed": 2}, block=True)
        assert ranks.all("latest_loaded") == [2, 2]
        ranks.finish()
    assert_only(directory, {1: 1, 2: 2})


def kill_at_random(directory: Path, seed: int) -> str:
    """One round: rank and moment are random; what is there afterwards is the old or the new checkpoint."""
    moment = random.Random(seed)
    save_alone(directory, 1, 1)
    with RankProcesses(3) as ranks:
        ranks.all("open", str(directory), timeout=LONG)
        ranks.all("set_timeout", 0.8)
        victim = moment.randrange(3)
        for rank in range(3):
            ranks.tell(rank, "save", 2, {"seed": 2, "kilobytes": 700}, block=True)
        time.sleep(moment.uniform(0, 0.15) ** 1.3)
        ranks.processes[victim].kill()
        failed = ranks.collect([rank for rank in range(3) if rank != victim])
        try:
            ranks.reply(victim)
            came = "after its end"
        except (EOFError, Failed):
            came = "during"
    assert all(error.is_ours for error in failed.values()), failed
    assert debris(directory) == []
    checkpointer = tl.Checkpointer(directory, process_group=False)
    steps = checkpointer.steps()
    assert steps in ([1], [1, 2])
    if len(failed) < 2:
        assert steps == [1, 2], failed  # somebody was told that it is saved
    assert same(checkpointer.load(1), make_state(1))
    if 2 in steps:
        assert same(checkpointer.load(2), make_state(2, 700))
    checkpointer.verify()
    return f"{came}, steps {steps}"


def test_a_random_rank_is_killed_at_a_random_moment(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda seed: kill_at_random(tmp_path / f"run{seed}", seed), range(MOMENTS)))
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    print(f"{len(outcomes)} kills: {counts}", file=sys.stderr)
    if len(outcomes) >= 50:
        assert counts.get("during, steps [1]", 0) > len(outcomes) / 10
