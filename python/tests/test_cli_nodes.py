"""`trunkline checkpoint` on the directory of a node."""

import json
import shutil
from pathlib import Path

import pytest
from rank_processes import RankProcesses
from support_cli import command, document
from test_local_checkpoints import directories, open_all, state
from test_local_copies import damage, shards_of

import trunkline as tl
from trunkline._formats.node_names import RECORD


@pytest.fixture
def nodes(tmp_path: Path) -> list[str]:
    """Two nodes, which have saved the steps 10 and 20 with copies."""
    paths = directories(tmp_path, range(2))
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, copies=2)
        for step in (10, 20):
            ranks.all("save", step, state(step), block=True, metrics={"loss": 0.5})
        ranks.finish()
    return paths


def test_what_a_node_has(nodes: list[str]) -> None:
    ids = [json.loads(Path(path, RECORD).read_text())["id"] for path in nodes]
    total = 3 * 700 * 1024 + 10 * 8
    for node, path in enumerate(nodes):
        listed = document("ls", path)
        assert (listed["node"], listed["lost"]) == (ids[node], None)
        assert [each["step"] for each in listed["checkpoints"]] == [10, 20]
        for each in listed["checkpoints"]:
            assert (each["nodes"], each["copies"], each["is_committed"]) == (ids, 2, True)
            assert (each["bytes"], each["metrics"], each["is_complete"]) == (total, {"loss": 0.5}, True)
            assert total < each["bytes_here"] < total + 50_000
        text = command("ls", path)
        assert f"node {ids[node]}" in text
        assert [line.split()[0] for line in text.splitlines()[2:]] == ["10", "20"]

    shown = document("show", nodes[0], "--step", "10")
    assert shown["shares"] == [{"node": ids[0], "kept_by": ids}, {"node": ids[1], "kept_by": ids[::-1]}]
    assert [each["path"] for each in shown["shards"]] == list(map(str, shards_of(nodes[0], 1)))
    assert {each["name"]: each["shape"] for each in shown["tensors"]}["model.layer0"] == [700, 1024]
    assert f"share of node {ids[1]}: kept by {ids[1]}, {ids[0]}" in command("show", nodes[0])
    assert "it has those of 10, 20" in command("show", nodes[0], "--step", "7", expect=2)
    assert "is the directory of a node" in command("gc", nodes[0], expect=1)


def test_damage_on_a_node(nodes: list[str]) -> None:
    assert document("verify", nodes[0], "--all")["ok"] is True
    damage(shards_of(nodes[0], 2)[:1])
    found = document("verify", nodes[0], "--all", expect=1)["checkpoints"]
    assert [(each["step"], each["ok"]) for each in found] == [(10, True), (20, False)]
    assert found[1]["mismatches"][0]["kind"] == "checksum"
    assert document("verify", nodes[0], "--step", "10")["ok"] is True
    assert "step 20: damaged" in command("verify", nodes[0], expect=1)
    assert document("verify", nodes[1])["ok"] is True

    shards_of(nodes[1], 2)[0].unlink()
    assert [each["is_complete"] for each in document("ls", nodes[1], expect=1)["checkpoints"]] == [
        True,
        False,
    ]
    shutil.rmtree(Path(nodes[1], "saves/step-00000002"))
    assert document("ls", nodes[1], expect=1)["lost"] == 20
    assert "share of step 20, which was committed last here, is gone" in command("ls", nodes[1], expect=1)
    for arguments in ([], ["--all"], ["--step", "20"]):
        found = document("verify", nodes[1], *arguments, expect=1)
        assert found["ok"] is False
        assert [each["ok"] for each in found["checkpoints"]] == [True, False][arguments[:1] == ["--step"] :]
        assert (
            "step-00000002 is gone, which was committed last here"
            in found["checkpoints"][-1]["error"]["message"]
        )
    assert document("verify", nodes[1], "--step", "10")["ok"] is True

    [manifest] = Path(nodes[0], "saves/step-00000001").glob("manifest*")
    manifest.write_bytes(b"")
    listed = document("ls", nodes[0], expect=1)["checkpoints"]
    assert (listed[0]["step"], listed[0]["entry"], listed[0]["error"]["kind"]) == (None, 1, "corrupt")
    assert listed[0]["error"]["path"] == str(manifest)
    assert document("verify", nodes[0], "--all", expect=1)["checkpoints"][-1]["error"]["kind"] == "corrupt"
    assert document("show", nodes[0])["step"] == 20
    [latest] = Path(nodes[0], "saves/step-00000002").glob("manifest*")
    latest.write_bytes(b"")
    assert str(latest) in command("show", nodes[0], expect=1)


def test_a_node_without_checkpoints(tmp_path: Path) -> None:
    made = tl.Checkpointer(tmp_path, local=True, keep=None)
    made.save(1, {"a": 1}, block=True)
    shutil.rmtree(tmp_path / "saves")
    assert document("ls", tmp_path, expect=1)["checkpoints"] == []
    assert "has no checkpoints" in command("ls", tmp_path, expect=1)
    assert "has no share of any step" in command("show", tmp_path, expect=2)
    assert document("verify", tmp_path, "--all", expect=1)["ok"] is False
    Path(tmp_path, RECORD).unlink()
    assert document("ls", tmp_path)["checkpoints"] == []


def test_a_node_without_its_record(nodes: list[str]) -> None:
    Path(nodes[0], RECORD).unlink()
    for each in ("ls", "show", "verify"):
        assert f"{RECORD} is missing" in command(each, nodes[0], expect=1)
