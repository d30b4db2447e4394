"""Which ranks share a directory, and so are one node."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trunkline.checkpoint.nodes import detection
from trunkline.checkpoint.nodes.detection import Nodes, Place, SharedDirectory, find_nodes, group_ranks


class Ranks:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def found_by(directories: list[Path]) -> list[Any]:
    """What ranks with these directories find: their nodes, or what was raised."""
    ranks, found = Ranks(len(directories)), [None] * len(directories)

    def find(rank: int) -> None:
        try:
            found[rank] = find_nodes(str(directories[rank]), lambda value: ranks.gather(rank, value))  # type: ignore[call-overload]
        except Exception as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=find, args=(rank,)) for rank in range(len(directories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def nodes_of(directories: list[Path]) -> tuple[int, ...]:
    """What all of them agree on."""
    found = found_by(directories)
    assert all(each == found[0] for each in found)
    nodes: Nodes = found[0]
    return nodes.node_of


@pytest.fixture(params=["there", "missing"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Path]]:
    """Two directories, which exist or do not; nothing is left in or beside them."""
    made = [tmp_path / "one" / "run", tmp_path / "two" / "run"]
    if request.param == "there":
        for each in made:
            each.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    yield made
    assert sorted(tmp_path.rglob("*")) == before


def test_ranks_with_one_directory_are_one_node(folders: list[Path]) -> None:
    assert nodes_of([folders[0]] * 3) == (0, 0, 0)


def test_ranks_with_directories_of_their_own_are_nodes(folders: list[Path]) -> None:
    one, two = folders
    assert nodes_of([one, two, one, two, two]) == (0, 1, 0, 1, 1)


def test_two_paths_of_one_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    assert nodes_of([tmp_path / "run", tmp_path / "link"]) == (0, 0)


def test_directories_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then their numbers count."""
    monkeypatch.setattr(detection, "_create_file", lambda folder: "")
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert nodes_of([one, two, one]) == (0, 1, 0)
    assert nodes_of([one / "run", two / "run", one / "other", one / "run"]) == (0, 1, 2, 0)


def test_one_directory_on_several_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kernels = iter(range(100))
    monkeypatch.setattr(detection, "boot_id", lambda: str(next(kernels)))
    for error in found_by([tmp_path, tmp_path]):
        assert isinstance(error, SharedDirectory)
        assert (error.rank, error.other) == (0, 1)


def test_clones_of_a_machine_are_nodes() -> None:
    """Virtual machines made from one snapshot have the same id of the kernel, and the same inodes."""
    place = Place("kernel", 8, 2, "", "file a")
    assert group_ranks([place, replace(place, file="file b")], [[True, False], [False, True]]).node_of == (
        0,
        1,
    )


def test_what_only_one_of_two_sees_is_not_shared() -> None:
    place = Place("kernel", 8, 2, "", "file")
    assert group_ranks([place, place], [[True, True], [False, True]]).node_of == (0, 1)


def test_the_ranks_of_nodes() -> None:
    nodes = Nodes((0, 1, 0, 2, 1))
    assert nodes.count == 3
    assert [nodes.ranks_of(node) for node in range(3)] == [[0, 2], [1, 4], [3]]
    assert nodes.first_ranks() == [0, 1, 3]


def test_the_folder_is_not_left_with_files_when_gathering_fails(tmp_path: Path) -> None:
    def fail(value: Any) -> list[Any]:
        raise RuntimeError("a rank has died")

    with pytest.raises(RuntimeError, match="has died"):
        find_nodes(str(tmp_path), fail)
    assert os.listdir(tmp_path) == []  # noqa: PTH208
