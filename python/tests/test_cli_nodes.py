"""`trunkline checkpoint` on the directory of a node."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import support_warm
import torch
from rank_processes import RankProcesses, make_state, same
from support_cli import command, document
from test_local_checkpoints import directories, open_all, state
from test_local_copies import damage, shards_of

import trunkline as tl
from trunkline._checkpoint_tools import torchrun
from trunkline._formats.node_names import RECORD
from trunkline.checkpoint.directory import local_verify
from trunkline.checkpoint.nodes.node_directory import NodeDirectory


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


_COMMAND_OF_A_NODE = """
import os, sys
os.chdir(os.path.join(sys.argv[1], "node-" + os.environ["RANK"]))
from trunkline.cli import main
sys.exit(main(["checkpoint", *sys.argv[2:]]))
"""


def on_all_nodes(
    nodes: list[str], *arguments: "str | Path", expect: int = 0, size: int = 2
) -> tuple[str, str]:
    """Run `trunkline checkpoint` as torchrun does, one process on each node; return what rank 0 printed."""
    command = ["-c", _COMMAND_OF_A_NODE, str(Path(nodes[0]).parent.parent), *map(str, arguments)]
    done = support_warm.run_ranks(command, size=size)
    statuses = [each.returncode for each in done]
    assert statuses[0] == expect, done
    assert all(bool(each) == bool(expect) for each in statuses), done
    assert [each.stdout for each in done[1:]] == [""] * (size - 1)
    return done[0].stdout, done[0].stderr


def ids_of(nodes: list[str]) -> list[str]:
    return [json.loads(Path(path, RECORD).read_text())["id"] for path in nodes]


def verify_all(nodes: list[str], *arguments: str, expect: int = 0) -> dict[str, Any]:
    printed, _ = on_all_nodes(nodes, "verify", "run", "--all-nodes", "--json", *arguments, expect=expect)
    found: dict[str, Any] = json.loads(printed)
    return found


def test_all_nodes_verify_what_they_have(nodes: list[str]) -> None:
    ids = ids_of(nodes)
    found = verify_all(nodes, "--all")
    assert (found["command"], found["ok"], found["problems"]) == ("checkpoint verify", True, [])
    assert [(each["step"], each["ok"], each["lost_shares"]) for each in found["checkpoints"]] == [
        (10, True, []),
        (20, True, []),
    ]
    assert [[each["node"] for each in save["nodes"]] for save in found["checkpoints"]] == [ids, ids]
    total = 3 * 700 * 1024 + 10 * 8
    assert all(total < each["bytes"] < total + 50_000 for each in found["checkpoints"][0]["nodes"])
    text, _ = on_all_nodes(nodes, "verify", "run", "--all-nodes")
    assert text == "step 20: verified, 4.32 MB on 2 nodes\n"

    damaged = shards_of(nodes[1], 2)[:1]
    damage(damaged)
    [save] = verify_all(nodes, expect=1)["checkpoints"]
    assert (save["step"], save["ok"], save["lost_shares"]) == (20, False, [])
    assert [each["ok"] for each in save["nodes"]] == [True, False]
    assert save["nodes"][1]["mismatches"][0]["path"] == str(damaged[0])
    assert verify_all(nodes, "--step", "10")["ok"] is True
    text, _ = on_all_nodes(nodes, "verify", "run", "--all-nodes", expect=1)
    assert "step 20: damaged or incomplete" in text
    assert "each share is intact on some node" in text
    assert f"  node {ids[1]}: {damaged[0]}" in text

    shutil.rmtree(Path(nodes[0], "saves/step-00000002"))
    found = verify_all(nodes, expect=1)
    [save] = found["checkpoints"]
    assert save["lost_shares"] == ids
    assert [each["is_here"] for each in save["nodes"]] == [False, True]
    assert [each["node"] for each in found["problems"]] == ids[:1]
    text, _ = on_all_nodes(nodes, "verify", "run", "--all-nodes", expect=1)
    assert f"no node has an intact share of {', '.join(ids)}: it cannot be loaded" in text
    assert f"node {ids[0]}: is not here, or has lost its share" in text
    _, said = on_all_nodes(nodes, "verify", "run", "--all-nodes", "--step", "7", expect=2)
    assert "no node has a share of step 7; there are those of 10, 20" in said


def test_a_step_is_exported_from_all_nodes(nodes: list[str], tmp_path: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns for node in nodes for path in Path(node).rglob("*") if path.is_file()
    }
    whole = tmp_path / "whole.pt"
    text, _ = on_all_nodes(nodes, "export", "run", whole)
    assert f"exported step 20 of run of all nodes to {whole}: 4 tensors, 2.15 MB, every byte verified" in text
    assert same(torch.load(whole, weights_only=True), make_state(**state(20)))
    model = tmp_path / "model.safetensors"
    lost = ids_of(nodes)[0]
    shutil.rmtree(nodes[0])  # each has a copy of what the other has
    printed, said = on_all_nodes(nodes, "export", "run", model, "--step", "10", "--key", "model", "--json")
    [warned] = said.splitlines()
    assert warned.startswith(f"trunkline checkpoint export: warning: {nodes[0]}: steps 10, 20 are on fewer")
    assert f"without {lost}" in warned
    assert json.loads(printed)["step"] == 10
    assert same(tl.load(model), make_state(**state(10))["model"])
    assert {path: path.stat().st_mtime_ns for path in before if path.exists()} == {
        path: time for path, time in before.items() if path.exists()
    }
    assert not Path(nodes[0]).exists()
    assert tl.Checkpointer(nodes[1], local=True).load()["seed"] == 20


def test_errors_of_exporting_from_nodes(tmp_path: Path) -> None:
    nodes = directories(tmp_path, range(2))
    with RankProcesses(2) as ranks:
        open_all(ranks, nodes)
        ranks.all("save", 10, state(10), block=True)
        ranks.finish()
    out = tmp_path / "out.pt"
    said = command("export", nodes[0], out, expect=1)
    assert f"its bytes on {ids_of(nodes)[1]} are not here" in said
    assert "This process is alone: start one on each node, with torchrun" in said
    assert "this process is alone: start one" in command("verify", nodes[0], "--all-nodes", expect=1)
    out.touch()
    _, said = on_all_nodes(nodes, "export", "run", out, expect=1)
    assert f"{out}" in said
    assert "--overwrite" in said
    printed, _ = on_all_nodes(nodes, "export", "run", out, "--json", expect=1)
    assert json.loads(printed)["error"]["path"] == str(out)
    for node in nodes:
        within = Path(node, "out.pt")
        _, said = on_all_nodes(nodes, "export", "run", within, expect=2)
        assert f"OUT: {within} is in the directory of a node" in said
    absent = tmp_path / "absent"
    _, said = on_all_nodes(nodes, "export", "run", absent / "out.pt", expect=2)
    assert f"{absent} does not exist: create it (mkdir -p {absent})" in said
    _, said = on_all_nodes(nodes, "export", "run", tmp_path / "new.pt", "--key", "none", expect=2)
    assert "has no 'none'; there are 'model'" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node-0", "node-1", "out.pt"]


def test_one_node_alone_is_exported(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path / "run", local=True).save(1, make_state(seed=1), block=True)
    assert "1 node" in command("verify", tmp_path / "run", "--all-nodes")
    done = tl.export_checkpoint(tmp_path / "run", tmp_path / "model.safetensors", key="model")
    assert (done.step, done.tensors, done.verified) == (1, 3, True)
    assert same(tl.load(done.path), make_state(seed=1)["model"])


def test_a_step_that_a_training_removes_while_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tl.Checkpointer(tmp_path / "run", local=True, keep=None)
    for step in (1, 2):
        made.save(step, {"a": torch.ones(1000)}, block=True)

    def remove_before(name: str) -> None:
        function = getattr(local_verify, name)

        def removed(*arguments: Any) -> Any:
            shutil.rmtree(tmp_path / "run/saves/step-00000001")
            return function(*arguments)

        monkeypatch.setattr(local_verify, name, removed)

    damage(shards_of(str(tmp_path / "run"), 1))
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    for moment in ("_is_removed", "_verified_here"):  # after it was verified, and before
        with monkeypatch.context():
            remove_before(moment)
            text = command("verify", tmp_path / "run", "--all-nodes", "--all")
        assert text.splitlines()[0] == "step 1: not verified, it was removed meanwhile"
        assert text.splitlines()[1].startswith("step 2: verified")
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "kept", tmp_path / "run")


def test_a_save_that_comes_after_a_node_was_read_is_verified(tmp_path: Path) -> None:
    made = tl.Checkpointer(tmp_path / "run", local=True, keep=None)
    made.save(1, {"a": torch.ones(1000)}, block=True)
    node = NodeDirectory(str(tmp_path / "run"))
    made.save(2, {"a": torch.ones(1000)}, block=True)
    [later] = [each for each in NodeDirectory(str(tmp_path / "run")).inventory().prepared if each.step == 2]
    [share] = local_verify._verified_here(node, [later.id], None, False)["shares"]
    assert (share["save"]["step"], share["ok"]) == (2, True)


def test_a_command_that_is_alone_in_the_environment_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tl.Checkpointer(tmp_path / "run", local=True).save(1, {"a": torch.ones(10)}, block=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    of_training = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in of_training.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "_JOIN_SECONDS", 1.0)
    for arguments in (
        ["export", tmp_path / "run", tmp_path / "a.pt"],
        ["export", tmp_path / "mistyped", "a.pt"],
    ):
        said = command(*arguments, expect=1)
        assert "cannot join the 2 processes that the environment variable WORLD_SIZE says" in said
        assert "unset WORLD_SIZE to use what this node alone has" in said
    monkeypatch.delenv("MASTER_ADDR")
    assert "MASTER_ADDR expected" in command("verify", tmp_path / "run", "--all-nodes", expect=1)
    monkeypatch.delenv("WORLD_SIZE")
    assert "exported step 1" in command("export", tmp_path / "run", tmp_path / "a.pt")
