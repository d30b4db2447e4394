"""What a node has on its disk."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trunkline as tl
from trunkline._checkpoint_tools.cli import _remove_step
from trunkline.checkpoint.nodes.agreement import Entry, Inventory
from trunkline.checkpoint.nodes.node_directory import (
    RECORD,
    NodeDirectory,
    inventory_in_json,
    inventory_of,
    share_of,
    state_of_share,
)
from trunkline.checkpoint.nodes.record import _checksum


def entry(name: str, number: int, base: str | None = None) -> Entry:
    return Entry(name, number, "b1", (("b0", 3),), ("n1", "n2"), step=10 * number, digest="d", base=base)


def save(node: NodeDirectory, made: Entry) -> None:
    node.store.continue_from(node.store.position())
    transaction = node.store.begin(made.number, [0])
    about = {"step": made.number, "chunk_bytes": 1 << 20, "world_size": 1, "volumes": [], "shards": []}
    about["volumes"] = transaction.placement["volumes"]
    transaction.commit({**about, "state": state_of_share(made, {"of": made.id})}, [])
    transaction.release()
    node.add_save(made)


def test_opening_creates_nothing(tmp_path: Path) -> None:
    node = NodeDirectory(str(tmp_path / "run"))
    assert node.inventory() == Inventory("")
    assert not (tmp_path / "run").exists()


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    node = NodeDirectory(str(tmp_path / "run"))
    node.lock()
    node.make_id()
    one, load, two = entry("one", 1), entry("load", 2, "one"), entry("two", 3)
    save(node, one)
    node.commit(["one"])
    node.add_continuation(load)
    save(node, two)
    found = node.inventory()
    committed = frozenset({"one"})
    assert found == Inventory(node.id, (one, load, two), committed, marked=committed)
    again = NodeDirectory(str(tmp_path / "run"))
    assert again.inventory() == found
    assert inventory_of(json.loads(json.dumps(inventory_in_json(found)))) == found
    assert share_of(again.store, 3)["whole"] == {"of": "two"}
    node.remove(["one", "load", "never was"])
    assert node.inventory() == Inventory(node.id, (two,))
    assert NodeDirectory(str(tmp_path / "run")).inventory() == node.inventory()


def test_the_id_stays(tmp_path: Path) -> None:
    node = NodeDirectory(str(tmp_path))
    node.make_id()
    first = node.id
    node.make_id()
    assert len(first) == 16
    assert NodeDirectory(str(tmp_path)).id == node.id == first


def test_what_could_not_be_written_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeDirectory(str(tmp_path))
    node.make_id()
    node.add_continuation(entry("one", 1, "base"))
    before = node.inventory()

    def fail(_: str) -> None:
        raise OSError(errno.ENOSPC, "a full disk")

    monkeypatch.setattr("trunkline._core.ReplacementFile", fail)
    for change in (
        lambda: node.commit(["one"]),
        lambda: node.add_continuation(entry("two", 2, "base")),
        lambda: node.remove(["one"]),
    ):
        with pytest.raises(tl.Error, match="no space left"):
            change()
        assert node.inventory() == before


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_record_is_not_believed(tmp_path: Path, damage: str) -> None:
    node = NodeDirectory(str(tmp_path))
    node.make_id()
    record = tmp_path / RECORD
    text = record.read_bytes()
    record.write_bytes(
        {"flip": text.replace(node.id.encode(), b"0" * 16), "cut": text[:-9], "empty": b""}[damage]
    )
    with pytest.raises(tl.Corrupt, match="is damaged"):
        NodeDirectory(str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"id": None, "continuations": 7},
        {"continuations": [{"id": "x"}]},
        {"continuations": [[]]},
        {"committed": None},
    ],
)
def test_a_record_with_wrong_values_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    NodeDirectory(str(tmp_path)).make_id()
    about = json.loads((tmp_path / RECORD).read_text())
    del about["crc32c"]
    about.update(change)
    (tmp_path / RECORD).write_text(json.dumps({**about, "crc32c": _checksum(about)}))
    with pytest.raises(tl.Format, match="is not as trunkline writes it"):
        NodeDirectory(str(tmp_path))


def test_a_record_of_a_newer_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trunkline.checkpoint.nodes.record._VERSION", 2)
        NodeDirectory(str(tmp_path)).make_id()
    with pytest.raises(tl.Format, match="version 2 is not supported"):
        NodeDirectory(str(tmp_path))


def test_a_checkpoint_that_is_no_share_is_as_a_damaged_one(tmp_path: Path) -> None:
    node = NodeDirectory(str(tmp_path))
    node.lock()
    node.make_id()
    tl.Checkpointer(tmp_path / "other").save(1, {"a": 1}, block=True)
    (tmp_path / "other").rename(tmp_path / "saves")
    [(number, why)] = NodeDirectory(str(tmp_path)).inventory().damaged
    assert number == 1
    assert "step 1 is not the share of a node" in why


def test_a_share_is_not_loaded_as_a_state(tmp_path: Path) -> None:
    node = NodeDirectory(str(tmp_path))
    node.lock()
    save(node, entry("one", 1))
    with pytest.raises(tl.Format):
        tl.Checkpointer(tmp_path / "saves").load()


def test_only_the_node_changes_its_shares(tmp_path: Path) -> None:
    made = tl.Checkpointer(tmp_path, local=True, process_group=False)
    made.save(1, {"a": 1}, block=True)
    with pytest.raises(tl.Unsupported, match=r"holds the shares of a node.*local=True"):
        tl.Checkpointer(tmp_path / "saves", process_group=False).save(9, {"a": 9}, block=True)
    with pytest.raises(tl.Unsupported, match="cannot remove a step from"):
        _remove_step(str(tmp_path / "saves"), 1)
    assert tl.Checkpointer(tmp_path, local=True, process_group=False).steps() == [1]


LOCKS = """
import sys
from trunkline.checkpoint.nodes.node_directory import NodeDirectory
NodeDirectory(sys.argv[1]).lock()
"""


def test_one_process_locks_it_until_it_ends(tmp_path: Path) -> None:
    def lock_elsewhere() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", LOCKS, str(tmp_path)], capture_output=True, text=True, check=False
        )

    assert lock_elsewhere().returncode == 0
    for _ in range(2):  # the same process may open it again
        node = NodeDirectory(str(tmp_path))
        node.lock()
        del node
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    NodeDirectory(str(tmp_path)).lock()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    shutil.copytree(tmp_path, tmp_path / "copy")  # opens and closes all files
    child = os.fork()
    if child == 0:  # has none of its parent's locks
        try:
            NodeDirectory(str(tmp_path)).lock()
        except tl.Error as error:
            os._exit(error.errno or 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EBUSY
    refused = lock_elsewhere()
    assert refused.returncode == 1
    assert "another process saves there" in refused.stderr
