"""Sharded checkpoints on disks that one node each sees: trunkline.dcp.Checkpointer(..., local=True)."""

import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from rank_processes import LOCAL_PHASES, Failed, RankProcesses
from sharded_states import holds, make_sharded, make_whole
from support_cli import document
from test_cli_nodes import on_all_nodes
from torch.distributed.checkpoint.api import CheckpointException

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TWO_BY_TWO = (0, 1, 0, 1)  # the node of each rank


def directories(tmp_path: Path, nodes: Sequence[int]) -> list[str]:
    return [str(tmp_path / f"node-{node}" / "run") for node in nodes]


def open_all(ranks: RankProcesses, paths: Sequence[str], **options: Any) -> list[Any]:
    for rank, path in enumerate(paths):
        ranks.tell(rank, "sharded", "open", path, **options)
    return [ranks.reply(rank) for rank in range(ranks.size)]


def shards(tmp_path: Path, node: int) -> list[Path]:
    return sorted((tmp_path / f"node-{node}").rglob("*.safetensors"))


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 40)
        before = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([before[0] ^ 1]))


def test_one_process(tmp_path: Path) -> None:
    made = tl.dcp.Checkpointer(tmp_path / "run", local=True, keep=2, volumes=[tmp_path / "a", tmp_path / "b"])
    assert made.latest() is None
    assert made.steps() == []
    into = make_sharded(1, zeros=True)
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        made.load(into)
    assert not (tmp_path / "run").exists()
    for step in range(1, 4):
        made.save(step, make_sharded(step))
    made.async_save(4, make_sharded(4)).result()
    assert made.steps() == [3, 4]
    again = tl.dcp.Checkpointer(tmp_path / "run", local=True, keep=2)
    with pytest.raises(FileExistsError, match=r"up to step 4; call load\(\) first"):
        again.save(5, make_sharded(5))
    assert again.load(into) == 4
    assert holds(into, 4)
    assert again.load(into, 3) == 3
    assert holds(into, 3)
    again.load(into)
    again.delete(3)
    assert again.steps() == [4]
    assert all(list((tmp_path / name).rglob("*.safetensors")) for name in ("a", "b"))


def test_each_rank_writes_what_it_has(tmp_path: Path) -> None:
    paths = directories(tmp_path, TWO_BY_TWO)
    with RankProcesses(4) as ranks:
        assert open_all(ranks, paths, keep=2) == [[]] * 4
        for step in range(1, 4):
            ranks.all("sharded", "save", step, step)
        assert ranks.all("sharded", "ask", "steps") == [[2, 3]] * 4
        assert ranks.all("sharded", "loads", 3) == [3] * 4
        assert ranks.all("sharded", "loads", 2, 2) == [2] * 4
        ranks.all("sharded", "load_model", 3)
        assert ranks.all("sharded", "ask", "latest") == [3] * 4
        ranks.finish()
    nbytes = [sum(path.stat().st_size for path in shards(tmp_path, node)) for node in (0, 1)]
    state = sum(each.nbytes for each in make_sharded(1)["model"].values())
    assert sum(nbytes) < 2 * state * 1.1  # two steps, nothing twice
    assert min(nbytes) > 0.8 * max(nbytes)


def test_in_the_background(tmp_path: Path) -> None:
    paths = directories(tmp_path, TWO_BY_TWO)
    with RankProcesses(4) as ranks:
        open_all(ranks, paths, copies=2)
        ranks.all("sharded", "save_changing", 7, 7)
        assert ranks.all("sharded", "loads", 7) == [7] * 4
        ranks.finish()


def test_what_is_sent_in_slices(tmp_path: Path) -> None:
    with RankProcesses(2) as ranks:
        ranks.all("sharded", "slice_at", 1000)
        open_all(ranks, directories(tmp_path, (0, 1)), copies=2)
        ranks.all("sharded", "save", 1, 1)
        ranks.finish()
    shutil.rmtree(tmp_path / "node-1")
    with RankProcesses(2) as ranks:
        ranks.all("sharded", "slice_at", 1000)
        open_all(ranks, directories(tmp_path, (1, 0)), copies=2)
        assert ranks.all("sharded", "loads", 1) == [1] * 2
        ranks.finish()


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    """On the node that has them, and on another one."""
    with RankProcesses(2) as ranks:
        open_all(ranks, directories(tmp_path, (0, 1)))
        ranks.all("sharded", "save_others", 1)
        assert ranks.all("sharded", "loads_others") == [True] * 2
        ranks.all("sharded", "save_three", 2)
        assert ranks.all("sharded", "loads_tied") == [[3.0] * 2 + [2.0] * 6] * 2
        ranks.finish()


def test_nothing_stays_in_the_store(tmp_path: Path) -> None:
    with RankProcesses(4) as ranks:
        open_all(ranks, directories(tmp_path, TWO_BY_TWO), copies=2)
        for step in (1, 2):
            ranks.all("sharded", "save", step, step)
            ranks.all("sharded", "loads", step)
        assert ranks.one(0, "sharded", "messages_left") == []
        ranks.finish()


@pytest.mark.parametrize("call", ["commit_tensor", "finish_plan"])
def test_a_planner_that_fails_on_one_rank(tmp_path: Path, call: str) -> None:
    """All ranks learn of it at once: also where they are sending to each other."""
    with RankProcesses(3) as ranks:
        open_all(ranks, directories(tmp_path, (0, 1, 2)))
        ranks.all("sharded", "save", 1, 1)
        ranks.finish()
    with RankProcesses(3) as ranks:
        open_all(ranks, directories(tmp_path, (1, 2, 0)))
        began = time.monotonic()
        failed = ranks.failures("sharded", "load_failing", call)
        assert time.monotonic() - began < 30  # the timeout is 300
        assert [failed[rank].kind for rank in range(3)] == ["RankError", "ValueError", "RankError"]
        assert all("rank 1" in failed[rank].message for rank in (0, 2))
        assert ranks.all("sharded", "loads", 1) == [1] * 3
        ranks.finish()


@pytest.mark.parametrize("nodes", [(0, 1), (1, 0, 0), (2, 1, 0, 0), (1, 1, 0, 1, 0)])
def test_other_numbers_of_ranks(tmp_path: Path, nodes: tuple[int, ...]) -> None:
    """What another node has is sent; a node that has nothing of a step loads it too, and goes on."""
    with RankProcesses(4) as ranks:
        open_all(ranks, directories(tmp_path, TWO_BY_TWO))
        ranks.all("sharded", "save", 1, 1)
        ranks.all("sharded", "save", 2, 2)
        ranks.finish()
    with RankProcesses(len(nodes)) as ranks:
        assert open_all(ranks, directories(tmp_path, nodes)) == [[1, 2]] * len(nodes)
        assert ranks.all("sharded", "loads", 2) == [2] * len(nodes)
        ranks.all("sharded", "save", 3, 3)
        assert ranks.all("sharded", "loads", 3) == [3] * len(nodes)
        ranks.finish()


def test_a_missing_node(tmp_path: Path) -> None:
    with RankProcesses(4) as ranks:
        open_all(ranks, directories(tmp_path, TWO_BY_TWO))
        ranks.all("sharded", "save", 1, 1)
        ranks.finish()
    with RankProcesses(2) as ranks:
        assert open_all(ranks, directories(tmp_path, (0, 0))) == [[]] * 2
        failed = ranks.failures("sharded", "loads", 1)
        assert "step 1 cannot be loaded: its bytes on" in failed[0].message
        assert ranks.all("sharded", "ask", "latest") == [1] * 2


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_copies_survive_the_loss_of_any_node(tmp_path: Path, lost: int) -> None:
    nodes = (0, 1, 2, 0, 1, 2)
    paths = directories(tmp_path, nodes)
    with RankProcesses(6) as ranks:
        open_all(ranks, paths, copies=2)
        ranks.all("sharded", "save", 1, 1)
        ranks.all("sharded", "save", 2, 2)
        ranks.finish()
    copied = sum(path.stat().st_size for node in (0, 1, 2) for path in shards(tmp_path, node))
    shutil.rmtree(tmp_path / f"node-{lost}")
    with RankProcesses(6) as ranks:
        assert open_all(ranks, paths, copies=2) == [[1, 2]] * 6
        said = ranks.all("sharded", "loads", 2, warns=True)
        assert "on fewer nodes than when saved" in "\n".join(said[0])
        assert ranks.all("sharded", "ask", "restore_copies") == [[1, 2]] * 6
        assert sum(path.stat().st_size for node in (0, 1, 2) for path in shards(tmp_path, node)) == copied
        ranks.finish()
    shutil.rmtree(tmp_path / f"node-{(lost + 1) % 3}")
    with RankProcesses(6) as ranks:
        open_all(ranks, paths, copies=2)
        assert ranks.all("sharded", "loads", 2) == [2] * 6
        assert ranks.all("sharded", "loads", 1, 1) == [1] * 6
        ranks.all("sharded", "save", 3, 3)
        assert ranks.all("sharded", "loads", 3) == [3] * 6
        ranks.finish()


def test_a_damaged_shard_without_copies(tmp_path: Path) -> None:
    """Ranks that need it raise; none starts over, and none waits for ever."""
    paths = directories(tmp_path, TWO_BY_TWO)
    with RankProcesses(4) as ranks:
        open_all(ranks, paths)
        ranks.all("sharded", "save", 1, 1)
        for path in shards(tmp_path, 1):
            damage(path)
        failed = ranks.failures("sharded", "loads", 1)
        assert set(failed) == {0, 1, 2, 3}
        assert {failed[rank].kind for rank in (1, 3)} == {"Corrupt"}
        assert {failed[rank].kind for rank in (0, 2)} == {"RankError"}
        assert all("does not match" in each.message for each in failed.values())
        ranks.all("sharded", "save", 2, 2)  # the training goes on
        assert ranks.all("sharded", "loads", 2) == [2] * 4
        ranks.finish()


@pytest.mark.parametrize("nodes", [TWO_BY_TWO, (0, 1), (1, 2, 0)])
def test_a_damaged_shard_is_read_from_its_copy(tmp_path: Path, nodes: tuple[int, ...]) -> None:
    with RankProcesses(4) as ranks:
        open_all(ranks, directories(tmp_path, TWO_BY_TWO), copies=2)
        ranks.all("sharded", "save", 1, 1)
        ranks.finish()
    damage(shards(tmp_path, 1)[0])
    damage(shards(tmp_path, 0)[-1])
    with RankProcesses(len(nodes)) as ranks:
        open_all(ranks, directories(tmp_path, nodes), copies=2)
        said = ranks.all("sharded", "loads", 1, warns=True)
        assert any("It is read on another node that has a copy" in text for texts in said for text in texts)
        ranks.finish()


def test_an_error_on_one_rank(tmp_path: Path) -> None:
    paths = directories(tmp_path, TWO_BY_TWO)
    with RankProcesses(4) as ranks:
        open_all(ranks, paths)
        ranks.all("sharded", "save", 1, 1)
        failed = ranks.failures("sharded", "save_an_object", 2, 3)
        assert set(failed) == {0, 1, 2, 3}
        assert {failed[rank].kind for rank in (0, 1, 2)} == {"RankError"}
        assert "rank 3" in failed[0].message
        ranks.all("sharded", "save", 2, 2)
        ranks.one(1, "fail_writes", 28)
        failed = ranks.failures("sharded", "save", 3, 3)
        assert set(failed) == {0, 1, 2, 3}
        assert "keep=3 needs room for 4" in failed[1].message
        ranks.one(1, "release")
        assert ranks.all("sharded", "loads", 2) == [2] * 4
        ranks.finish()


def test_ranks_in_different_calls(tmp_path: Path) -> None:
    paths = directories(tmp_path, TWO_BY_TWO)
    with RankProcesses(4) as ranks:
        open_all(ranks, paths)
        ranks.all("sharded", "save", 1, 1)
        for rank in range(4):
            ranks.tell(rank, "sharded", "save", 2 if rank else 3, 2)
        assert {each.kind for each in ranks.collect(range(4)).values()} == {"RankError"}
        ranks.all("sharded", "save", 4, 4)
        assert ranks.all("sharded", "loads", 4) == [4] * 4
        ranks.finish()


def test_directories_of_other_kinds(tmp_path: Path) -> None:
    sharded = tl.dcp.Checkpointer(tmp_path / "sharded", local=True)
    sharded.save(1, make_sharded(1))
    plain = tl.Checkpointer(tmp_path / "plain", local=True)
    plain.save(1, {"weight": torch.zeros(3)}).wait()
    with pytest.raises(tl.Format, match=r"saved with trunkline\.dcp\.Checkpointer\(\.\.\., local=True\)"):
        tl.Checkpointer(tmp_path / "sharded", local=True).load()
    with pytest.raises(tl.Format, match=r"saved with trunkline\.Checkpointer, all"):
        tl.dcp.Checkpointer(tmp_path / "plain", local=True).load({"weight": torch.zeros(3)})
    with pytest.raises(tl.Error, match="local=True"):
        tl.dcp.Checkpointer(tmp_path / "sharded").save(2, make_sharded(2))
    tl.dcp.Checkpointer(tmp_path / "shared").save(1, make_sharded(1))
    with pytest.raises(tl.Error, match="without local=True"):
        tl.dcp.Checkpointer(tmp_path / "shared", local=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"copies": 2}, "copies: needs local=True"),
        ({"domain": "a"}, "domain: needs local=True"),
        ({"local": True, "durable": False}, "durable: must be True with local=True"),
        ({"local": True, "copies": 0}, "copies: must be"),
        ({"local": "yes"}, "local: must be"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        tl.dcp.Checkpointer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


# Of the ranks of two nodes: who dies, and when.
_KILLS = ((0, "collect"), (1, "send"), (1, "writing"), (0, "prepare"), (1, "prepared"), (0, "mark"))


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """At any moment: all ranks load the same afterwards, and no save is lost that had succeeded on any."""
    paths = directories(tmp_path, TWO_BY_TWO)
    saved, possible = 0, [0]
    for killed, phase in _KILLS:
        with RankProcesses(4) as ranks:
            open_all(ranks, paths, copies=2, timeout=5)
            if saved:
                found = ranks.all("sharded", "latest_seed")
                assert len(set(found)) == 1
                assert found[0] in possible
                saved = found[0]
            saved += 1
            ranks.all("sharded", "save", saved, saved)
            ranks.one(
                killed,
                *(("cut_local",) if phase in LOCAL_PHASES else ("sharded", "die_at")),
                phase,
                *(("kill",) if phase in LOCAL_PHASES else ()),
            )
            for rank in range(4):
                ranks.tell(rank, "sharded", "save", saved + 1, saved + 1)
            succeeded = any([_has_saved(ranks, rank) for rank in range(4)])  # noqa: C419 - all have to answer
            possible = [saved + 1] if succeeded else [saved, saved + 1]
    with RankProcesses(4) as ranks:
        open_all(ranks, paths, copies=2, timeout=5)
        found = ranks.all("sharded", "latest_seed")
        assert len(set(found)) == 1
        assert found[0] in possible
        ranks.one(1, "sharded", "die_at", "send")
        shutil.rmtree(tmp_path / "node-0/run/saves")  # node 1 has to send
        for rank in range(4):
            ranks.tell(rank, "sharded", "latest_seed")
        assert not any([_has_saved(ranks, rank) for rank in range(4)])  # noqa: C419 - as above


def _has_saved(ranks: RankProcesses, rank: int) -> bool:
    try:
        ranks.reply(rank)
    except (EOFError, Failed):
        return False
    return True


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRUNKLINE_TEST_KILLS", "1"))))
def test_nodes_that_are_killed_and_lost_at_random(tmp_path: Path, seed: int) -> None:
    """All ranks of a node, at a random moment, and sometimes its disk. What any rank has saved stays."""
    chance = random.Random(seed)
    nodes = (0, 1, 2, 0, 1, 2)
    paths = directories(tmp_path, nodes)
    records = [tmp_path / f"rank-{rank}" for rank in range(6)]
    least = 0
    for _ in range(3):
        with RankProcesses(6) as ranks:
            open_all(ranks, paths, copies=2)
            if least:
                found = ranks.all("sharded", "latest_seed")
                assert len(set(found)) == 1
                assert found[0] >= least
                least = found[0]
            for rank in range(6):
                ranks.tell(rank, "sharded", "save_until_killed", least + 1, str(records[rank]))
            killed = chance.randrange(3)
            time.sleep(chance.uniform(0.1, 1.5))
            for rank in chance.sample([rank for rank in range(6) if nodes[rank] == killed], 2):
                ranks.processes[rank].kill()
        least = max([least, *(int(each.read_text() or 0) for each in records if each.exists())])
        if chance.random() < 0.5:
            shutil.rmtree(tmp_path / f"node-{killed}", ignore_errors=True)


def test_the_command_line_and_exporting(tmp_path: Path) -> None:
    paths = directories(tmp_path, (0, 1))
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, copies=2)
        ranks.all("sharded", "save", 10, 10)
        ranks.all("sharded", "save", 20, 20)
        ranks.finish()
    assert [each["step"] for each in document("ls", paths[0])["checkpoints"]] == [10, 20]
    shown = {each["name"]: each["shape"] for each in document("show", paths[0])["tensors"]}
    assert shown["model.rows"] == [51, 7]
    assert shown["model.rows@51,0"] == [50, 7]
    assert document("verify", paths[1], "--all")["ok"] is True
    damage(shards(tmp_path, 0)[-1])
    found = json.loads(on_all_nodes(paths, "verify", "run", "--all-nodes", "--json", expect=1)[0])
    assert [(each["step"], each["ok"], each["lost_shares"]) for each in found["checkpoints"]] == [
        (20, False, [])
    ]
    whole, model = tmp_path / "whole.pt", tmp_path / "model.safetensors"
    text, _ = on_all_nodes(paths, "export", "run", whole)
    assert f"exported step 20 of run of all nodes to {whole}" in text
    assert holds(torch.load(whole, weights_only=True), 20)
    shutil.rmtree(paths[0])  # each has a copy of what the other has
    printed, _ = on_all_nodes(paths, "export", "run", model, "--step", "10", "--key", "model", "--json")
    assert json.loads(printed)["step"] == 10
    assert torch.equal(tl.load(model)["columns"], make_whole(10)["columns"])


def test_steps_are_copied_to_a_tier(tmp_path: Path) -> None:
    """Without the nodes, with other ranks, and by a new job on new nodes, which goes on there."""
    tier = tmp_path / "shared/run"
    options: dict[str, Any] = {"keep": 1, "tiers": [tl.Tier(tier, every=2, keep=2)]}
    paths = directories(tmp_path, TWO_BY_TWO)
    with RankProcesses(4) as ranks:
        open_all(ranks, paths, **options)
        for step in range(1, 6):
            ranks.all("sharded", "save", step, step)
        ranks.all("sharded", "ask", "wait_drained")
        where = ranks.all("sharded", "ask", "locations")
        assert {step: each[-1] for step, each in where[0].items()} == {
            2: str(tier),
            4: str(tier),
            5: paths[0],
        }
        assert ranks.all("sharded", "loads", 4, 4) == [4] * 4
        ranks.finish()
    for step in (2, 4):
        tl.Checkpointer(tier).verify(step)
    into = make_sharded(0, zeros=True)
    torch_dcp.load(into, storage_reader=tl.dcp.StorageReader(tier / "step-00000004"), no_dist=True)
    assert holds(into, 4)
    with pytest.raises(tl.Format, match=r"load it with trunkline\.dcp"):
        tl.Checkpointer(tier).load()
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"node-{node}")
    with RankProcesses(3) as ranks:
        assert open_all(ranks, directories(tmp_path, (2, 3, 3)), **options) == [[2, 4]] * 3
        assert ranks.all("sharded", "loads", 4) == [4] * 3
        ranks.all("sharded", "save", 6, 6)
        ranks.all("sharded", "ask", "wait_drained")
        assert ranks.all("sharded", "ask", "steps") == [[4, 6]] * 3
        ranks.finish()
    for step in (4, 6):
        tl.Checkpointer(tier).verify(step)


def test_a_damaged_copy_in_a_tier(tmp_path: Path) -> None:
    made = tl.dcp.Checkpointer(tmp_path / "run", local=True, tiers=[tl.Tier(tmp_path / "tier")])
    made.save(1, make_sharded(1))
    made.wait_drained()
    [shard] = (tmp_path / "tier").rglob("*.safetensors")
    damage(shard)
    shutil.rmtree(tmp_path / "run")
    again = tl.dcp.Checkpointer(tmp_path / "run", local=True, tiers=[tl.Tier(tmp_path / "tier")])
    with pytest.raises(tl.Corrupt, match="which holds '") as caught:
        again.load(make_sharded(0, zeros=True))
    assert str(shard) in str(caught.value)


def test_other_directories_of_torch(tmp_path: Path) -> None:
    """A node's directory is neither written by StorageWriter nor read by StorageReader."""
    tl.dcp.Checkpointer(tmp_path / "run", local=True).save(1, make_sharded(1))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointException, match="belongs to a trunkline.Checkpointer"):
        torch_dcp.save({}, storage_writer=tl.dcp.StorageWriter(tmp_path / "run"), no_dist=True)
    with pytest.raises(CheckpointException, match="is the directory of a node"):
        torch_dcp.load({}, storage_reader=tl.dcp.StorageReader(tmp_path / "run"), no_dist=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_part_without_objects_is_exported(tmp_path: Path) -> None:
    made = tl.dcp.Checkpointer(tmp_path / "run", local=True)
    made.save(1, {"model": {"w": torch.ones(3)}, "other": Fraction(1, 2)})
    with pytest.raises(tl.Unsupported, match="the object 'other' is of a type"):
        tl.export_checkpoint(tmp_path / "run", tmp_path / "all.pt")
    tl.export_checkpoint(tmp_path / "run", tmp_path / "model.safetensors", key="model")
    assert torch.equal(tl.load(tmp_path / "model.safetensors")["w"], torch.ones(3))
    with pytest.raises(ValueError, match="has no 'x'; there are 'model', 'other'"):
        tl.export_checkpoint(tmp_path / "run", tmp_path / "x.pt", key="x")
