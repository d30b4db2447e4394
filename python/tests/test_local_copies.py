"""Copies of what a node saves on other nodes: Checkpointer(..., local=True, copies=2)."""

import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_processes import RankProcesses
from test_local_checkpoints import directories, nbytes_in, open_all, state

import trunkline as tl
from trunkline._formats.node_names import RECORD

TOTAL = 3 * 700 * 1024  # bytes of a state


def shards_of(path: str, step: int) -> list[Path]:
    return sorted(Path(path, f"saves/step-{step:08}").glob("*.safetensors"))


def damage(shards: Sequence[Path]) -> None:
    for shard in shards:
        with shard.open("r+b") as file:
            file.seek(shard.stat().st_size - 1000)
            file.write(b"\xff" * 8)


def save_all(paths: Sequence[str], steps: Sequence[int], copies: int = 2) -> None:
    with RankProcesses(len(paths)) as ranks:
        open_all(ranks, paths, copies=copies, keep=None)
        for step in steps:
            ranks.all("save", step, state(step), block=True)
        ranks.finish()


def test_the_loss_of_any_node_loses_nothing(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(3))
    save_all(paths, [1, 2])
    ids = [json.loads(Path(path, RECORD).read_text())["id"] for path in paths]
    for node in range(3):
        assert abs(nbytes_in(tmp_path / f"node-{node}") - 2 * TOTAL * 2 / 3) < 200_000
    for lost in range(3):
        here = tmp_path / f"after-{lost}"
        for node in range(3):
            if node != lost:
                shutil.copytree(tmp_path / f"node-{node}", here / f"node-{node}")
        # An empty disk in its place, and the nodes in another order.
        paths = directories(here, [2, 0, 1])
        with RankProcesses(3) as ranks:
            assert open_all(ranks, paths, copies=2) == [[1, 2]] * 3
            for warned in ranks.all("load_warns", state(2)):
                assert len(warned) == 1
                assert f"steps 1, 2 are on fewer nodes than when saved: without {ids[lost]}" in warned[0]
            assert ranks.all("loads", state(1), 1) == [True] * 3
            assert ranks.all("loads", state(2), 2) == [True] * 3
            ranks.all("save", 3, state(3), block=True)
            for warned in ranks.all("load_warns", state(3)):
                assert [text for text in warned if "steps 1, 2 are on fewer nodes" not in text] == []
            ranks.all("ask", "delete", 1)
            ranks.all("ask", "delete", 2)
            assert ranks.all("load_warns", state(3)) == [[]] * 3
            ranks.finish()
        shutil.rmtree(paths[lost])
        left = [path for path in paths if path != paths[lost]]
        with RankProcesses(2) as ranks:
            assert open_all(ranks, left)[0][-1] == 3
            assert ranks.all("loads", state(3)) == [True] * 2
            ranks.finish()


def test_two_lost_nodes_are_too_many(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(3))
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=2)
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    with RankProcesses(1) as ranks:
        assert open_all(ranks, paths[:1]) == [[]]
        assert "step 1 cannot be loaded: its bytes on" in ranks.failures("loads", state(1))[0].message
        ranks.finish()
    with RankProcesses(3) as ranks:
        open_all(ranks, paths)
        assert ranks.all("loads", state(1)) == [True] * 3
        ranks.finish()


def test_three_copies_survive_two_lost_nodes(tmp_path: Path) -> None:
    paths = directories(tmp_path, [0, 0, 1, 2])
    with RankProcesses(4) as ranks:
        open_all(ranks, paths, copies=3)
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    for node in (0, 1, 2):
        with RankProcesses(2) as ranks:
            away = tmp_path / f"node-{(node + 1) % 3}"
            shutil.copytree(tmp_path / f"node-{node}", tmp_path / f"alone-{node}/node-0")
            alone = directories(tmp_path / f"alone-{node}", [0, 0])
            assert away.exists()
            assert open_all(ranks, alone) == [[1]] * 2
            assert ranks.all("loads", state(1)) == [True] * 2
            ranks.finish()


def test_racks_are_domains(tmp_path: Path) -> None:
    """All nodes of a rack are lost at once."""
    paths = directories(tmp_path, range(4))
    with RankProcesses(4) as ranks:
        for rank, path in enumerate(paths):
            ranks.tell(rank, "open_local", path, copies=2, domain=f"rack {rank // 2}")
        assert [ranks.reply(rank) for rank in range(4)] == [[]] * 4
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    for rack in (0, 1):
        here = tmp_path / f"rack-{rack}"
        for node in (2 * rack, 2 * rack + 1):
            shutil.copytree(tmp_path / f"node-{node}", here / f"node-{node}")
        with RankProcesses(2) as ranks:
            assert open_all(ranks, directories(here, [2 * rack, 2 * rack + 1])) == [[1]] * 2
            assert ranks.all("loads", state(1)) == [True] * 2
            ranks.finish()


def test_a_damaged_share_is_read_from_its_copy(tmp_path: Path) -> None:
    paths = directories(tmp_path, [0, 1, 1])
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=2)
        ranks.all("save", 1, state(1), block=True)
        damage(shards_of(paths[1], 1))
        warned = ranks.all("load_warns", state(1))
        assert warned[0] == []
        said = [text for texts in warned[1:] for text in texts]
        assert said
        assert all("does not match the checksum it was written with. It is read on" in text for text in said)
        assert all("on another node that has a copy" in text for text in said)
        for shard in shards_of(paths[1], 1):
            shard.unlink()
        assert ranks.all("loads", state(1)) == [True] * 3
        damage(shards_of(paths[0], 1))
        failed = ranks.failures("loads", state(1))
        assert failed[0].kind == "Corrupt"
        assert "node-0/run/saves/step-00000001/shard" in failed[0].message
        assert all("cannot open" in failed[rank].message for rank in (1, 2))
        ranks.all("save", 2, state(2), block=True)
        assert ranks.all("load_warns", state(2)) == [[]] * 3
        ranks.finish()


def test_two_of_three_copies_are_damaged(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(3))
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=3)
        ranks.all("save", 1, state(1), block=True)
        damage([*shards_of(paths[0], 1), *shards_of(paths[1], 1)])
        assert [len(warned) for warned in ranks.all("load_warns", state(1))] == [1, 2, 0]
        for shard in shards_of(paths[2], 1):
            shard.unlink()
        assert ranks.failures("loads", state(1)).keys() == {0, 1, 2}
        ranks.finish()


def test_every_node_has_a_damaged_share(tmp_path: Path) -> None:
    """So that at first none of them can be read."""
    paths = directories(tmp_path, range(2))
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, copies=2)
        ranks.all("save", 1, state(1), block=True)
        for path in paths:
            own, _ = shards_of(path, 1)
            damage([own])
        assert [len(warned) for warned in ranks.all("load_warns", state(1))] == [1, 1]
        ranks.finish()


def test_a_share_whose_manifest_is_gone_is_read_from_its_copy(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(2))
    save_all(paths, [1, 2])
    shutil.rmtree(Path(paths[0], "saves/step-00000001"))
    with RankProcesses(2) as ranks:
        assert open_all(ranks, paths, copies=2, keep=None) == [[1, 2]] * 2
        assert ranks.all("loads", state(1), 1) == [True] * 2
        ranks.finish()


def manifest_of(path: str, step: int) -> Path:
    [found] = Path(path, f"saves/step-{step:08}").glob("manifest*")
    return found


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("at", [0, 22, 200])  # bytes; two of the first line
def test_a_share_whose_manifest_is_damaged_is_read_from_its_copy(tmp_path: Path, node: int, at: int) -> None:
    """Also if it is the latest: the other node has committed it, and knows what it is."""
    paths = directories(tmp_path, range(2))
    save_all(paths, [1, 2])
    for step in (1, 2):
        manifest = manifest_of(paths[node], step)
        with manifest.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x10]))
    with RankProcesses(2) as ranks:
        for rank, path in enumerate(paths):
            ranks.tell(rank, "open_local_warns", path, copies=2)
        warned = [ranks.reply(rank) for rank in range(2)]
        assert [len(each) for each in warned] == [2 * (rank == node) for rank in range(2)]
        assert all("A load reads it on other nodes, if those have copies" in each for each in warned[node])
        assert ranks.all("steps") == [[1, 2]] * 2
        assert ranks.all("loads", state(1), 1) == [True] * 2
        assert ranks.all("loads", state(2)) == [True] * 2
        ranks.all("save", 3, state(3), block=True)
        assert ranks.all("steps") == [[1, 2, 3]] * 2
        assert ranks.all("loads", state(3)) == [True] * 2
        ranks.finish()
    with RankProcesses(1) as ranks:  # alone, this node cannot know what it was; 3 has come after it
        assert open_all(ranks, [paths[node]])[0] == [3]
        ranks.finish()


@pytest.mark.parametrize("cut", [[0, 1, 2], [0, 2]])
def test_a_step_that_was_cut_and_loaded_survives_the_loss_of_a_node(tmp_path: Path, cut: list[int]) -> None:
    """It counts only since all nodes had prepared it: the load notes that on each of them."""
    paths = directories(tmp_path, range(3))
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=2, keep=None, timeout=4)
        ranks.all("save", 1, state(1), block=True)
        for rank in cut:
            ranks.one(rank, "cut_local", "mark", "kill")
        for rank in range(3):
            ranks.tell(rank, "save", 2, state(2), block=True)
        for rank in cut:
            with pytest.raises(EOFError):
                ranks.reply(rank)
        ranks.collect(rank for rank in range(3) if rank not in cut)
    with RankProcesses(3) as ranks:
        assert open_all(ranks, paths, copies=2, keep=None) == [[1, 2]] * 3
        assert ranks.all("loads", state(2)) == [True] * 3
        ranks.all("save", 3, state(3), block=True)
        ranks.finish()
    (tmp_path / "node-1").rename(tmp_path / "away")
    with RankProcesses(3) as ranks:
        assert open_all(ranks, paths, copies=2, keep=None) == [[1, 2, 3]] * 3
        assert ranks.all("loads", state(2), 2) == [True] * 3
        ranks.finish()


def test_the_latest_step_is_named_also_if_it_cannot_be_loaded(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(3))
    save_all(paths, [1, 2])
    manifest_of(paths[0], 2).write_bytes(b"")
    with RankProcesses(2) as ranks:
        assert open_all(ranks, [paths[0], paths[2]], copies=2) == [[1]] * 2
        assert ranks.all("ask", "latest") == [2, 2]
        node = json.loads(Path(paths[0], RECORD).read_text())["id"]
        for failed in ranks.failures("loads", state(2)).values():
            assert "step 2 cannot be loaded" in failed.message
            assert f"restore what is damaged on {node}" in failed.message
        ranks.finish()


@pytest.mark.parametrize("lost", ["", "saves", "saves/step-00000002"])
def test_a_node_loses_its_share_while_it_runs(tmp_path: Path, lost: str) -> None:
    """The one that is asked first what the whole is."""
    paths = directories(tmp_path, range(3))
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=2)
        for step in (1, 2):
            ranks.all("save", step, state(step), block=True)
        first = min(range(3), key=lambda node: json.loads(Path(paths[node], RECORD).read_text())["id"])
        shutil.rmtree(Path(paths[first], lost))
        warned = ranks.all("load_warns", state(2))
        assert [len(each) for each in warned] == [2 * (node == first) for node in range(3)]
        assert "Another node is asked" in warned[first][0]
        assert "It is read on another node that has a copy" in warned[first][1]
        ranks.finish()


def test_saves_that_lost_nodes_have_cut_do_not_pile_up(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(3))
    step = 0
    for _ in range(2):
        with RankProcesses(3) as ranks:
            open_all(ranks, paths, copies=2, keep=1, timeout=4)
            if step:
                assert ranks.all("latest_loaded") == [step] * 3
            step += 1
            ranks.all("save", step, state(step), block=True)
            ranks.tell(2, "cut_local", "prepared", "kill")
            ranks.reply(2)
            for rank in range(3):
                ranks.tell(rank, "save", step + 1, state(step + 1), block=True)
            assert ranks.collect(range(2)).keys() == {0, 1}
        shutil.rmtree(tmp_path / "node-2")
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=2, keep=1)
        assert ranks.all("latest_loaded") == [step] * 3
        ranks.all("save", step + 1, state(step + 1), block=True)
        ranks.finish()
    for path in paths:
        assert len(list(Path(path, "saves").glob("step-*"))) == 1


def test_states_that_differ_are_warned_of(tmp_path: Path) -> None:
    with RankProcesses(2) as ranks:
        open_all(ranks, directories(tmp_path, range(2)), copies=2)
        assert ranks.all("save_warns", 1, state(1)) == [[], []]
        ranks.tell(0, "save_warns", 2, state(2))
        ranks.tell(1, "save_warns", 2, state(2), altered=True)
        warned = [ranks.reply(rank) for rank in range(2)]
        assert warned[1] == []
        assert len(warned[0]) == 1
        assert "saving step 2" in warned[0][0]
        assert "the states of ranks 0 and 1 differ" in warned[0][0]
        assert "'model.layer1'" in warned[0][0]
        ranks.finish()


def test_too_few_nodes_or_domains(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="copies=2: there is only one node"):
        made = tl.Checkpointer(tmp_path / "alone", local=True, copies=2)
    made.save(1, {"a": 1}, block=True)
    assert tl.Checkpointer(tmp_path / "alone", local=True).load() == {"a": 1}
    paths = directories(tmp_path, range(2))
    with RankProcesses(2) as ranks:
        for rank, path in enumerate(paths):
            ranks.tell(rank, "open_local_warns", path, copies=2, domain="the only one")
        warned = [ranks.reply(rank) for rank in range(2)]
        assert warned[1] == []
        assert "copies=2: domain the only one has 2 of 2 nodes" in warned[0][0]
        ranks.finish()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"copies": 0}, "copies: must be an integer of at least 1"),
        ({"copies": "2"}, "copies: must be an integer of at least 1"),
        ({"copies": 2, "domain": 3}, "domain: must be a str"),
        ({"copies": 2, "local": False}, "copies: needs local=True"),
        ({"domain": "r1", "local": False}, "domain: needs local=True"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        tl.Checkpointer(tmp_path / "run", **{"local": True, **options})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("option", "values"), [("copies", [2, 3, 2]), ("domain", ["a", "b", "c"])])
def test_ranks_that_differ(tmp_path: Path, option: str, values: list[Any]) -> None:
    paths = directories(tmp_path, [0, 1, 1])
    with RankProcesses(3) as ranks:
        for rank, path in enumerate(paths):
            ranks.tell(rank, "open_local", path, **{"copies": 2, option: values[rank]})
        failed = ranks.collect(range(3))
        assert all(option in each.message for each in failed.values())
        ranks.finish()


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRUNKLINE_TEST_KILLS", "3"))))
def test_a_node_is_lost_at_random(tmp_path: Path, seed: int) -> None:
    """At any moment of a save, with its disk. No step that any rank had saved is ever lost."""
    chance = random.Random(seed)
    paths = directories(tmp_path, [0, 1, 1, 2])
    records = [tmp_path / f"rank-{rank}" for rank in range(4)]
    least, saved = 0, set[int]()
    for _ in range(3):
        with RankProcesses(4) as ranks:
            steps = open_all(ranks, paths, copies=2, keep=None)[0]
            assert saved <= set(steps)
            if least:
                found = ranks.all("latest_loaded")
                assert len(set(found)) == 1
                assert found[0] >= least
                least = found[0]
                ranks.all("ask", "restore_copies")
            least += 1
            saved = {*steps, least}
            ranks.all("save", least, {"seed": least, "kilobytes": 50}, block=True)  # also on the new node
            for rank in range(4):
                ranks.tell(rank, "save_until_killed", least + 1, str(records[rank]))
            time.sleep(chance.uniform(0.05, 1.5))
            lost = chance.choice([[0], [1, 2], [3]])
            for rank in lost:
                ranks.processes[rank].kill()
        shutil.rmtree(paths[lost[0]], ignore_errors=True)
        least = max([least, *(int(each.read_text() or 0) for each in records if each.exists())])
    with RankProcesses(4) as ranks:
        found = open_all(ranks, paths, copies=2, keep=None)
        assert found == [found[0]] * 4
        assert saved <= set(found[0])
        for step in found[0]:
            assert ranks.all("loads", {"seed": step, "kilobytes": 50}, step) == [True] * 4
        assert not least or found[0][-1] >= least
        ranks.finish()
