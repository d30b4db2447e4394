"""A run that starts over does not end an earlier one in the same directory."""

import errno
import shutil
import stat
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_processes import RankProcesses

import trunkline as tl


def opened(directory: Path, **options: object) -> tl.Checkpointer:
    return tl.Checkpointer(directory, process_group=False, **options)  # type: ignore[arg-type]


def state_of(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((10_000,), step)}


def assert_whole(directory: Path, *steps: int) -> None:
    checkpointer = opened(directory)
    assert checkpointer.steps() == list(steps)
    for step in steps:
        assert torch.equal(checkpointer.load(step)["x"], state_of(step)["x"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with the steps 100 and 101."""
    checkpointer = opened(tmp_path / "run", keep=2, volumes=[tmp_path / "v0", tmp_path / "v1"])
    for step in (100, 101):
        checkpointer.save(step, state_of(step), block=True)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def crew() -> Iterator[RankProcesses]:
    with RankProcesses(2) as ranks:
        yield ranks
        ranks.finish()


@pytest.mark.parametrize("step", [1, 100, 101])
@pytest.mark.parametrize("block", [False, True])
def test_starting_over_without_load_is_refused_by_the_first_save(run: Path, step: int, block: bool) -> None:
    checkpointer = opened(run, keep=2)
    with pytest.raises(FileExistsError) as caught:
        checkpointer.save(step, state_of(step), block=block)
    assert isinstance(caught.value, tl.Error)
    assert caught.value.errno == errno.EEXIST
    for part in (str(run), "101", "load()", "another directory", "fresh=True"):
        assert part in str(caught.value)
    assert_whole(run, 100, 101)


def test_the_refusal_says_what_to_do_in_each_number(tmp_path: Path) -> None:
    for step, held in ((1, "step 1"), (2, "steps 1, 2")):
        earlier = opened(tmp_path / "run")
        if step > 1:
            earlier.load()
        earlier.save(step, state_of(step), block=True)
        with pytest.raises(FileExistsError) as caught:
            opened(tmp_path / "run").save(0, state_of(0))
        assert str(caught.value).startswith(
            f"cannot save step 0 into {tmp_path / 'run'}: it already holds {held}, which this run did not "
            "load. To continue the earlier run, call load() before saving; to start over, use another "
            "directory, or fresh=True"
        )


def test_looking_is_not_loading_and_a_failed_load_neither(run: Path) -> None:
    checkpointer = opened(run, keep=2)
    assert checkpointer.latest() == 101
    assert checkpointer.steps() == [100, 101]
    checkpointer.verify()
    (shard, *_) = run.parent.rglob("step-00000101/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(tl.Corrupt):
        checkpointer.load()
    with pytest.raises(FileExistsError):
        checkpointer.save(1, state_of(1), block=True)
    assert checkpointer.steps() == [100, 101]


def test_a_run_that_loaded_an_earlier_step_goes_on_from_there(run: Path) -> None:
    checkpointer = opened(run, keep=2)
    checkpointer.load(100)
    checkpointer.save(101, state_of(101), block=True)
    checkpointer.save(50, state_of(50), block=True)
    assert_whole(run, 50, 101)


def test_later_steps_need_no_load_and_remove_nothing_of_others(run: Path) -> None:
    checkpointer = opened(run, keep=1)
    with pytest.warns(RuntimeWarning, match=r"keep=1 does not count or remove steps 100, 101, which this"):
        checkpointer.save(102, state_of(102), block=True)
    for step in (103, 104):  # says so once
        checkpointer.save(step, state_of(step), block=True)
    assert_whole(run, 100, 101, 104)
    checkpointer.load(100)
    checkpointer.save(105, state_of(105), block=True)
    assert_whole(run, 105)


def test_two_jobs_in_turn_keep_their_last_checkpoints(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "run", keep=1), opened(tmp_path / "run", keep=1)
    one.save(1, state_of(1), block=True)
    for step in range(2, 7):  # says so each time, for it is a new one of the other job
        with pytest.warns(RuntimeWarning, match=rf"keep=1 does not count or remove step {step - 1}, "):
            (one if step % 2 else other).save(step, state_of(step), block=True)
    assert_whole(tmp_path / "run", 5, 6)


def test_another_job_in_the_same_directory_is_found(tmp_path: Path) -> None:
    one, other = opened(tmp_path / "run"), opened(tmp_path / "run")
    one.save(1, state_of(1), block=True)
    other.load()
    for step in (2, 3):
        other.save(step, state_of(step), block=True)
    with pytest.raises(FileExistsError, match=r"steps 2, 3, which this run has neither loaded nor saved"):
        one.save(2, state_of(2), block=True)
    assert_whole(tmp_path / "run", 1, 2, 3)


def test_after_a_save_that_failed_the_next_one_looks_first_again(tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        one = opened(tmp_path / "run", engine=engine)
        faults.fail("write", faults.commands("write"), errno.EIO)
        with pytest.raises(tl.Error, match="EIO"):
            one.save(1, state_of(1)).wait()
        opened(tmp_path / "run").save(1, state_of(2), block=True)
        with pytest.raises(FileExistsError, match="step 1, which this run"):
            one.save(1, state_of(1))  # this call itself, not its handle
    assert torch.equal(opened(tmp_path / "run").load()["x"], state_of(2)["x"])


def save_held(one: tl.Checkpointer, faults: tl.Faults, step: int, fails: bool = False) -> tl.SaveHandle:
    """Begin a save that goes on only in a moment."""
    faults.hold("write", faults.commands("write"), 1000)
    if fails:
        faults.fail("write", faults.commands("write"), errno.EIO)
    handle = one.save(step, state_of(step))
    handle.wait_staged()
    threading.Timer(0.1, faults.release).start()
    return handle


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_new_one_waits_for_the_saves_of_earlier_ones(tmp_path: Path, is_gone: bool, fails: bool) -> None:
    """As where the cells of a notebook are run again."""
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        one = opened(tmp_path / "run", engine=engine)
        one.save(1, state_of(1), block=True)
        handle = save_held(one, faults, 2, fails)
        if is_gone:
            del one
        (tmp_path / "link").symlink_to("run")
        new = opened(tmp_path / "link", engine=engine)
        assert handle.done()
        assert new.latest() == (1 if fails else 2)
        if fails:
            with pytest.raises(tl.Error, match="EIO"):
                handle.wait()
        new.load()
        new.save(3, state_of(3), block=True)
    assert_whole(tmp_path / "run", *((1, 3) if fails else (1, 2, 3)))


def test_that_there_is_no_checkpoint_is_said_once_none_is_under_way(tmp_path: Path) -> None:
    """Who hears so starts over, as in a cell of a notebook that is run again."""
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        one = opened(tmp_path / "run", engine=engine)
        save_held(one, faults, 99)
        assert one.latest() == 99
        save_held(one, faults, 100)
        assert one.latest() == 99  # at once
        one.wait()
        other = opened(tmp_path / "other", engine=engine)
        save_held(other, faults, 99)
        assert other.steps() == [99]


def test_load_waits_for_the_saves_of_others(tmp_path: Path) -> None:
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine:
        reader = opened(tmp_path / "run")
        one = opened(tmp_path / "run", engine=engine)
        one.save(1, state_of(1), block=True)
        handle = save_held(one, faults, 2)
        assert torch.equal(reader.load()["x"], state_of(2)["x"])
        handle.wait()


def test_fresh_sets_the_earlier_run_aside(run: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    checkpointer = opened(run, keep=1, fresh=True)
    assert checkpointer.latest() == 101
    assert sorted(path.name for path in run.iterdir()) == before
    for step in (1, 2):
        checkpointer.save(step, state_of(step), block=True)
    assert_whole(run, 2)
    (aside,) = run.glob("aside-*")
    assert_whole(aside, 100, 101)
    earlier = opened(aside, keep=2)
    earlier.verify()
    earlier.load()
    earlier.save(102, state_of(102), block=True)
    assert_whole(aside, 101, 102)
    assert_whole(run, 2)


def test_fresh_and_load_continue(run: Path) -> None:
    checkpointer = opened(run, keep=2, fresh=True)
    with pytest.warns(RuntimeWarning, match=r"fresh=True has no effect, .* continues from step 101"):
        checkpointer.load()
    checkpointer.load()  # says so once
    checkpointer.save(102, state_of(102), block=True)
    assert list(run.glob("aside-*")) == []
    assert_whole(run, 101, 102)


def test_fresh_in_a_new_directory_sets_nothing_aside(tmp_path: Path) -> None:
    opened(tmp_path / "run", fresh=True).save(1, state_of(1), block=True)
    assert list((tmp_path / "run").glob("aside-*")) == []
    assert_whole(tmp_path / "run", 1)


def test_all_ranks_are_refused(crew: RankProcesses, run: Path) -> None:
    crew.all("open", str(run), keep=2)
    failed = crew.failures("save", 1, {"seed": 1}, block=True)
    assert len(failed) == 2
    assert all(error.is_ours and "steps 100, 101" in error.message for error in failed.values())
    assert_whole(run, 100, 101)


def test_ranks_set_aside_together(crew: RankProcesses, run: Path) -> None:
    crew.all("open", str(run), keep=1, fresh=True)
    for step in (1, 2):
        crew.all("save", step, {"seed": step}, block=True)
    assert all(crew.all("loads", {"seed": 2}))
    (aside,) = run.glob("aside-*")
    assert_whole(aside, 100, 101)


def test_a_directory_whose_path_leads_elsewhere_is_warned_of(tmp_path: Path) -> None:
    """As with `cur -> exp1`, which is pointed to exp2 for the next job while this one goes on."""
    for name in ("exp1", "exp2"):
        (tmp_path / name).mkdir()
    current = tmp_path / "cur"
    current.symlink_to("exp1")
    checkpoints = opened(current / "run")
    checkpoints.save(1, state_of(1), block=True)
    current.unlink()
    current.symlink_to("exp2")
    with pytest.warns(RuntimeWarning, match=r"cur/run has none of the checkpoints .* Step 2 is saved there"):
        checkpoints.save(2, state_of(2), block=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.save(3, state_of(3), block=True)
    assert opened(tmp_path / "exp2" / "run").steps() == [2, 3]
    assert opened(tmp_path / "exp1" / "run").steps() == [1]


def test_a_directory_that_was_moved_and_linked_is_not_warned_of(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path / "run")
    checkpoints.save(1, state_of(1), block=True)
    shutil.copytree(tmp_path / "run", tmp_path / "larger")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").symlink_to("larger")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.save(2, state_of(2), block=True)
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("mode", [0o700, 0o2750])
def test_new_directories_on_volumes_are_as_private_as_those_before(
    run: Path, tmp_path: Path, mode: int
) -> None:
    before = sorted(tmp_path.glob("v*/*"))
    for directory in before:
        directory.chmod(mode)
    opened(run, fresh=True, volumes=[tmp_path / "v0", tmp_path / "v1"]).save(1, state_of(1), block=True)
    made = sorted({*tmp_path.glob("v*/*")} - {*before})
    assert [stat.S_IMODE(directory.stat().st_mode) for directory in made] == [mode, mode]
    assert_whole(run, 1)
