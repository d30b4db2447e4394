"""Copies that are restored after the loss of a node: Checkpointer(..., local=True).restore_copies()."""

import json
import shutil
import time
from pathlib import Path

import pytest
from rank_processes import RankProcesses
from support_cli import command, document
from test_local_checkpoints import directories, open_all, state
from test_local_copies import damage, save_all, shards_of

import trunkline as tl
from trunkline._formats.node_names import RECORD


def contents(path: str, number: int) -> list[bytes]:
    """Return what the shards of a step have, however they are named."""
    return sorted(each.read_bytes() for each in shards_of(path, number))


def replace_node_1(tmp_path: Path, save: int | None = None) -> None:
    """Put an empty disk in the place of one of three nodes, which goes away as node 3, and restore step 1."""
    with RankProcesses(3) as ranks:
        (tmp_path / "node-1").rename(tmp_path / "node-3")
        open_all(ranks, directories(tmp_path, range(3)), copies=2, keep=None)
        ranks.all("loads", state(1))
        assert ranks.all("ask", "restore_copies") == [[1]] * 3
        if save is not None:
            ranks.all("save", save, state(save), block=True)
        ranks.finish()


@pytest.mark.parametrize("nodes", [[0, 1, 2], [0, 1, 1, 2, 2]])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_second_node_can_be_lost_once_the_copies_are_there_again(
    tmp_path: Path, nodes: list[int], lost: int
) -> None:
    paths = directories(tmp_path, nodes)
    save_all(paths, [1, 2])
    lost_path = f"{tmp_path}/node-{lost}/run"
    before = {number: contents(lost_path, number) for number in (1, 2)}
    lost_id = json.loads(Path(lost_path, RECORD).read_text())["id"]
    shutil.rmtree(tmp_path / f"node-{lost}")
    with RankProcesses(len(nodes)) as ranks:
        open_all(ranks, paths, copies=2, keep=None)
        assert all(
            "call load() first" in each.message for each in ranks.failures("ask", "restore_copies").values()
        )
        assert all(len(warned) == 1 for warned in ranks.all("load_warns", state(2)))
        assert ranks.all("ask", "restore_copies") == [[1, 2]] * len(nodes)
        assert {number: contents(lost_path, number) for number in (1, 2)} == before
        assert [each["in_place_of"] for each in document("ls", lost_path)["checkpoints"]] == [lost_id] * 2
        assert f"here in place of node {lost_id}" in command("show", lost_path)
        assert ranks.all("ask", "restore_copies") == [[]] * len(nodes)
        assert ranks.all("load_warns", state(2)) == [[]] * len(nodes)
        ranks.all("save", 3, state(3), block=True)
        ranks.finish()
    second = 2 - lost  # another one than the lost one, which had copies of it
    shutil.rmtree(tmp_path / f"node-{second}")
    with RankProcesses(len(nodes)) as ranks:
        assert open_all(ranks, paths, copies=2, keep=None) == [[1, 2, 3]] * len(nodes)
        for step in (1, 2, 3):
            assert ranks.all("loads", state(step), step) == [True] * len(nodes)
        ranks.all("ask", "verify")
        ranks.all("loads", state(3))
        assert ranks.all("ask", "restore_copies") == [[1, 2, 3]] * len(nodes)
        ranks.finish()
    # What is left are the node in the place of the second, and the one that was never lost.
    shutil.rmtree(tmp_path / f"node-{lost}")
    with RankProcesses(len(nodes)) as ranks:
        assert open_all(ranks, paths, copies=2, keep=None) == [[1, 2, 3]] * len(nodes)
        assert ranks.all("loads", state(1), 1) == [True] * len(nodes)
        ranks.finish()


def test_a_node_that_has_lost_some_steps_gets_them_again(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(2))
    save_all(paths, [1, 2])
    before = contents(paths[1], 1)
    shutil.rmtree(Path(paths[1], "saves/step-00000001"))
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, copies=2, keep=None)
        ranks.all("loads", state(2))
        assert ranks.all("ask", "restore_copies") == [[1]] * 2
        assert contents(paths[1], 1) == before
        ranks.finish()
    shutil.rmtree(tmp_path / "node-0")
    with RankProcesses(1) as ranks:
        assert open_all(ranks, paths[1:], keep=None) == [[1, 2]]
        assert ranks.all("loads", state(1), 1) == [True]
        ranks.finish()


def test_a_damaged_manifest_is_replaced(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(2))
    save_all(paths, [1, 2])
    before = contents(paths[1], 2)
    [manifest] = Path(paths[1], "saves/step-00000002").glob("manifest*")
    manifest.write_bytes(manifest.read_bytes()[:100])
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, copies=2, keep=None)
        ranks.all("loads", state(2))
        assert ranks.all("ask", "restore_copies") == [[2]] * 2
        assert ranks.all("load_warns", state(2)) == [[]] * 2
        ranks.all("save", 3, state(3), block=True)
        ranks.finish()
    assert contents(paths[1], 2) == before
    with RankProcesses(1) as ranks:
        assert ranks.all("open_local_warns", paths[1], keep=None) == [[]]
        assert ranks.all("loads", state(2), 2) == [True]
        ranks.finish()


def test_a_new_node_has_volumes(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(3))
    save_all(paths, [1])
    shutil.rmtree(tmp_path / "node-1")
    volumes = [str(tmp_path / f"node-1/volume-{number}") for number in range(2)]
    for each in volumes:
        Path(each).mkdir(parents=True)
    with RankProcesses(3) as ranks:
        for rank, path in enumerate(paths):
            ranks.tell(rank, "open_local", path, copies=2, volumes=volumes if rank == 1 else None)
        assert [ranks.reply(rank) for rank in range(3)] == [[1]] * 3
        ranks.all("loads", state(1))
        assert ranks.all("ask", "restore_copies") == [[1]] * 3
        assert all(list(Path(each).rglob("*.safetensors")) for each in volumes)
        ranks.finish()
    shutil.rmtree(tmp_path / "node-2")
    with RankProcesses(2) as ranks:
        assert open_all(ranks, paths[:2], copies=2) == [[1]] * 2
        assert ranks.all("loads", state(1)) == [True] * 2
        ranks.finish()


def test_a_damaged_copy_is_not_copied(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(3))
    save_all(paths, [1, 2])
    shutil.rmtree(tmp_path / "node-1")
    for node in (0, 2):
        damage(shards_of(paths[node], 2))
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=2, keep=None)
        assert ranks.all("loads", state(1), 1) == [True] * 3
        failed = ranks.failures("ask", "restore_copies")
        assert [failed[rank].kind for rank in range(3)] == ["Corrupt", "RankError", "Corrupt"]
        assert "step-00000002/shard" in failed[0].message
        assert "is corrupt: chunk 0" in failed[0].message
        assert [each.name for each in sorted(Path(paths[1], "saves").glob("step-*"))] == ["step-00000001"]
        assert ranks.all("loads", state(1), 1) == [True] * 3
        ranks.finish()


def test_a_copy_that_is_intact_is_read_instead_of_a_damaged_one(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(4))
    save_all(paths, [1, 2], copies=3)
    before = contents(paths[1], 1)
    shutil.rmtree(tmp_path / "node-1")
    damage(shards_of(paths[2], 1))
    with RankProcesses(4) as ranks:
        open_all(ranks, paths, copies=3, keep=None)
        ranks.all("loads", state(2))
        assert ranks.all("ask", "restore_copies") == [[1, 2]] * 4
        assert contents(paths[1], 1) == before
        assert ranks.all("loads", state(1), 1) == [True] * 4
        ranks.finish()


def test_new_nodes_get_copies_of_their_own_domains(tmp_path: Path) -> None:
    """Whatever the order of the ranks: each rack has all bytes again."""

    def opened(ranks: RankProcesses, paths: list[str], racks: list[int]) -> None:
        for rank, (path, rack) in enumerate(zip(paths, racks, strict=True)):
            ranks.tell(rank, "open_local", path, copies=2, keep=None, domain=f"rack {rack}")
        for rank in range(len(paths)):
            ranks.reply(rank)

    with RankProcesses(4) as ranks:
        opened(ranks, directories(tmp_path, range(4)), [0, 0, 1, 1])
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    for lost in (0, 3):
        shutil.rmtree(tmp_path / f"node-{lost}")
    for order in ([3, 1, 2, 0], [0, 1, 2, 3]):
        here = tmp_path / f"order-{order[0]}"
        for node in (1, 2):
            shutil.copytree(tmp_path / f"node-{node}", here / f"node-{node}")
        with RankProcesses(4) as ranks:
            opened(ranks, directories(here, order), [node // 2 for node in order])
            ranks.all("loads", state(1))
            assert ranks.all("ask", "restore_copies") == [[1]] * 4
            ranks.finish()
        for rack in (0, 1):
            with RankProcesses(2) as ranks:
                assert open_all(ranks, directories(here, [2 * rack, 2 * rack + 1]), keep=None) == [[1]] * 2
                assert ranks.all("loads", state(1), 1) == [True] * 2
                ranks.finish()


def test_a_stand_in_is_read_where_the_node_that_returned_is_damaged(tmp_path: Path) -> None:
    save_all(directories(tmp_path, range(3)), [1])
    replace_node_1(tmp_path)
    damage(shards_of(f"{tmp_path}/node-3/run", 1))
    for lost in (0, 2):
        with RankProcesses(3) as ranks:
            assert open_all(ranks, directories(tmp_path, [2 - lost, 1, 3]), keep=None) == [[1]] * 3
            assert ranks.all("loads", state(1), 1) == [True] * 3
            ranks.finish()


def test_a_damaged_manifest_of_a_stand_in_keeps_nobody_from_loading(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(2))
    save_all(paths, [1, 2])
    shutil.rmtree(tmp_path / "node-1")
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, copies=2, keep=None)
        ranks.all("loads", state(1), 1)
        assert ranks.all("ask", "restore_copies") == [[1, 2]] * 2
        ranks.finish()
    for step in (1, 2):
        [manifest] = Path(paths[1], f"saves/step-{step:08}").glob("manifest*")
        manifest.write_bytes(b"")
        with RankProcesses(2) as ranks:
            assert open_all(ranks, paths, copies=2, keep=None) == [[1, 2]] * 2
            assert ranks.all("loads", state(1), 1) == [True] * 2
            ranks.finish()


def test_the_node_that_was_lost_comes_back(tmp_path: Path) -> None:
    """Both it and the one in its place have the step then."""
    save_all(directories(tmp_path, range(3)), [1])
    replace_node_1(tmp_path, save=2)
    names = [json.loads(Path(tmp_path, f"node-{node}/run", RECORD).read_text())["id"] for node in (1, 3)]
    assert names[0] != names[1]
    shutil.rmtree(tmp_path / "node-0")
    paths = directories(tmp_path, [1, 2, 3])
    with RankProcesses(3) as ranks:
        assert open_all(ranks, paths, copies=2, keep=None) == [[1, 2]] * 3
        assert ranks.all("loads", state(1), 1) == [True] * 3
        assert ranks.all("loads", state(2)) == [True] * 3
        ranks.all("save", 3, state(3), block=True)
        ranks.all("ask", "delete", 1)
        assert ranks.all("steps") == [[2, 3]] * 3
        ranks.finish()
    for path in paths:
        assert not Path(path, "saves/step-00000001").exists()


@pytest.mark.parametrize(("killed", "moment"), [(1, "commit"), (0, 0.0), (1, 0.05), (2, 0.1), (0, 0.2)])
def test_a_rank_is_killed_while_copies_are_made(tmp_path: Path, killed: int, moment: "str | float") -> None:
    paths = directories(tmp_path, range(3))
    save_all(paths, [1, 2])
    shutil.rmtree(tmp_path / "node-1")
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, copies=2, keep=None, timeout=4)
        ranks.all("loads", state(2))
        if moment == "commit":
            ranks.one(1, "cut_local", "mark", "kill")
        for rank in range(3):
            ranks.tell(rank, "ask", "restore_copies")
        if isinstance(moment, float):
            time.sleep(moment)
            ranks.processes[killed].kill()
        ranks.collect([rank for rank in range(3) if rank != killed])
    with RankProcesses(3) as ranks:
        assert open_all(ranks, paths, copies=2, keep=None) == [[1, 2]] * 3
        for step in (1, 2):
            assert ranks.all("loads", state(step), step) == [True] * 3
        ranks.all("loads", state(2))
        ranks.all("ask", "restore_copies")
        assert ranks.all("load_warns", state(2)) == [[]] * 3
        ranks.finish()


def test_other_directories_have_no_copies(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs local=True"):
        tl.Checkpointer(tmp_path / "run").restore_copies()
    alone = tl.Checkpointer(tmp_path / "alone", local=True)
    alone.save(1, {"a": 1}, block=True)
    assert alone.restore_copies() == []
