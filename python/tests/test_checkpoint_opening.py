"""Opening a directory of checkpoints creates nothing, and is refused where it would be a mistake."""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rank_processes import RankProcesses

import trunkline as tl

STATE = {"x": torch.ones(1000)}


def opened(directory: Path, **options: object) -> tl.Checkpointer:
    return tl.Checkpointer(directory, process_group=False, **options)  # type: ignore[arg-type]


def everything(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture(scope="module")
def crew() -> Iterator[RankProcesses]:
    with RankProcesses(2) as ranks:
        yield ranks
        ranks.finish()


def test_a_mistyped_directory_is_named_and_not_created(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path / "checkpints" / "run", volumes=[tmp_path / "v0"])
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    for call in (checkpointer.load, lambda: checkpointer.load(5), checkpointer.verify):
        with pytest.raises(FileNotFoundError, match=r"checkpints/run .*does not exist.*mistyped"):
            call()
    assert everything(tmp_path) == []


def test_disks_that_are_not_there_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "nvme0").mkdir()
    volumes = [tmp_path / "nvme0" / "run", tmp_path / "nmve1" / "run"]
    with pytest.warns(
        RuntimeWarning, match=r"^volumes: /.*/nmve1 does not exist, and saving creates"
    ) as seen:
        opened(tmp_path / "run", volumes=volumes)
    assert len(seen) == 1
    assert "nvme0" not in str(seen[0].message)
    assert everything(tmp_path) == ["nvme0"]


def test_an_empty_directory_has_no_checkpoint_yet(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint yet$"):
        opened(tmp_path).load()
    assert everything(tmp_path) == []


def test_a_foreign_directory_is_refused_at_opening(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "src", "train.py"):
        (tmp_path / name).write_text("x")
    before = everything(tmp_path)
    with pytest.raises(tl.Error, match=r"holds config.json, model.safetensors, src and 1 more") as caught:
        opened(tmp_path)
    assert caught.value.errno == errno.ENOTEMPTY
    assert f"{tmp_path}/checkpoints" in str(caught.value)
    assert everything(tmp_path) == before
    opened(tmp_path / "checkpoints").save(1, STATE, block=True)
    assert opened(tmp_path / "checkpoints").steps() == [1]


def test_a_directory_that_became_foreign_is_refused_at_the_first_save(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes").write_text("x")
    with pytest.raises(tl.Error, match="holds notes"):
        checkpointer.save(1, STATE, block=True)
    assert everything(tmp_path) == ["run", "run/notes"]
    (tmp_path / "run" / "notes").unlink()
    checkpointer.save(1, STATE, block=True)
    assert checkpointer.steps() == [1]


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(NotADirectoryError, match="it is a file"):
        opened(tmp_path / "run")


@pytest.mark.parametrize("damage", [lambda run: run.rename(run.with_name("moved")), lambda _run: None])
def test_given_volumes_take_effect_at_the_next_save(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    opened(tmp_path / "run", volumes=[tmp_path / "v0"]).save(1, STATE, block=True)
    checkpointer = opened(tmp_path / "run", volumes=[tmp_path / "v1"])
    assert not (tmp_path / "v1").exists()
    damage(tmp_path / "run")
    checkpointer.save(2, STATE, block=True)
    assert list((tmp_path / "v1").rglob("*.safetensors"))
    assert torch.equal(opened(tmp_path / "run").load()["x"], STATE["x"])


def test_ranks_open_a_new_directory_without_creating_it(crew: RankProcesses, tmp_path: Path) -> None:
    volumes = [str(tmp_path / f"v{i}") for i in range(2)]
    assert crew.all("open", str(tmp_path / "run"), volumes=volumes) == [[], []]
    assert everything(tmp_path) == []
    state = {"seed": 3, "kilobytes": 1500}
    crew.all("save", 1, state, block=True)
    assert all(crew.all("loads", state))
    for volume in volumes:
        (own,) = Path(volume).iterdir()
        assert len(list(own.rglob("*.safetensors"))) == 2, "one of each rank"


def test_ranks_follow_volumes_that_another_process_changed(crew: RankProcesses, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    crew.all("open", str(directory))
    crew.all("save", 1, {"seed": 1}, block=True)
    other = opened(directory, volumes=[tmp_path / "v0", tmp_path / "v1"])
    other.load()
    other.save(2, STATE, block=True)
    crew.all("save", 3, {"seed": 3}, block=True)
    assert all(crew.all("loads", {"seed": 3}))
    assert len(list((tmp_path / "v1").rglob("step-00000003/*.safetensors"))) == 2


def test_all_ranks_hear_that_a_directory_is_foreign(crew: RankProcesses, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    failed = crew.failures("open", str(tmp_path))
    assert len(failed) == 2
    assert all("holds notes" in error.message and error.is_ours for error in failed.values())
    assert everything(tmp_path) == ["notes"]


def test_ctrl_c_ends_opening_while_other_ranks_do_not_come(crew: RankProcesses, tmp_path: Path) -> None:
    crew.tell(0, "open_until_interrupted", str(tmp_path / "run"), 0.5)
    assert crew.reply(0, 10) is True
    assert crew.all("open", str(tmp_path / "run")) == [[], []]
