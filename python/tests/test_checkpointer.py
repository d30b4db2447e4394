"""trunkline.Checkpointer in one process: steps, what is kept, what is found on load."""

import copy
import errno
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import trunkline as tl
from trunkline import _core


def make_state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {f"layer{i}": torch.randn(300, 1000, generator=generator) for i in range(4)},
        "step": step,
        "history": [step / 3, None, "text", (1, 2)],
    }


def assert_is(state: dict[str, Any], step: int) -> None:
    expected = make_state(step)
    assert state["step"] == step
    assert state["history"] == expected["history"]
    for name, tensor in expected["model"].items():
        assert torch.equal(state["model"][name], tensor), name


@pytest.fixture
def checkpointer(tmp_path: Path) -> tl.Checkpointer:
    return tl.Checkpointer(tmp_path / "run", keep=2)


@pytest.mark.parametrize("block", [False, True])
def test_steps_are_saved_and_the_last_ones_kept(checkpointer: tl.Checkpointer, block: bool) -> None:
    assert checkpointer.latest() is None
    assert checkpointer.steps() == []
    with pytest.raises(FileNotFoundError):
        checkpointer.load()
    for step in (10, 20, 30):
        state = make_state(step)
        handle = checkpointer.save(step, state, block=block)
        handle.wait_staged()
        for tensor in state["model"].values():
            tensor.zero_()
    checkpointer.wait()
    assert checkpointer.steps() == [20, 30]
    assert checkpointer.latest() == 30
    assert_is(checkpointer.load(), 30)
    assert_is(checkpointer.load(20), 20)
    assert_is(tl.Checkpointer(checkpointer.directory).load(), 30)
    with pytest.raises(FileNotFoundError):
        checkpointer.load(10)


def test_a_run_that_went_back_goes_on_from_there(checkpointer: tl.Checkpointer) -> None:
    for step in (1, 2, 3):
        checkpointer.save(step, make_state(step), block=True)
    checkpointer.save(2, make_state(20), block=True)
    assert checkpointer.latest() == 2
    assert_is(checkpointer.load(), 20)
    assert checkpointer.steps() == [2, 3]


def test_loading_into_a_state_needs_no_second_one(checkpointer: tl.Checkpointer) -> None:
    checkpointer.save(5, make_state(5), block=True)
    into = make_state(6)
    memory = {name: tensor.data_ptr() for name, tensor in into["model"].items()}
    state = checkpointer.load(into=into)
    assert_is(state, 5)
    assert {name: tensor.data_ptr() for name, tensor in state["model"].items()} == memory
    assert state["model"]["layer0"] is into["model"]["layer0"]
    into["model"]["layer1"] = torch.zeros(3)
    with pytest.raises(ValueError, match="layer1"):
        checkpointer.load(into=into)


def test_bytes_are_spread_over_volumes_in_stock_shards(tmp_path: Path) -> None:
    volumes = [tmp_path / f"disk{i}" for i in range(3)]
    for volume in volumes:
        volume.mkdir()
    checkpointer = tl.Checkpointer(tmp_path / "run", volumes=volumes)
    state = {"large": torch.arange(3 << 20), "small": torch.ones(10)}
    checkpointer.save(1, state, block=True)
    shards = [list(volume.rglob("*.safetensors")) for volume in volumes]
    assert [len(each) for each in shards] == [1, 1, 1]
    sizes = [each[0].stat().st_size for each in shards]
    assert max(sizes) - min(sizes) <= 1 << 20
    loaded: dict[str, torch.Tensor] = {}
    for each in shards:
        loaded |= safetensors.torch.load_file(each[0])
    assert torch.equal(loaded["small"], state["small"])
    pieces = [loaded[name] for name in loaded if name.startswith("large[")]
    assert sum(piece.numel() for piece in pieces) == state["large"].nbytes
    for reader in (checkpointer, tl.Checkpointer(tmp_path / "run")):
        got = reader.load()
        assert torch.equal(got["large"], state["large"])
        assert torch.equal(got["small"], state["small"])
    # The manifests' directory may move; the volumes stay.
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert torch.equal(tl.Checkpointer(tmp_path / "moved").load()["large"], state["large"])


def test_modules_and_optimizers_come_back_bit_for_bit(checkpointer: tl.Checkpointer) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 5, dtype=torch.float32)
    )
    model[2].weight.data = model[2].weight.data.t().contiguous().t()  # not contiguous
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).sum().backward()
        optimizer.step()
    checkpointer.save(1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, block=True)
    state = checkpointer.load()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state["model"][name], tensor)
    assert state["model"]._metadata == model.state_dict()._metadata
    again = torch.optim.AdamW(model.parameters(), amsgrad=True)
    again.load_state_dict(state["optimizer"])
    for key, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(again.state_dict()["state"][key][name], value)


def test_tied_weights_are_written_once_and_stay_tied(checkpointer: tl.Checkpointer) -> None:
    shared = torch.randn(1000, 1000)
    checkpointer.save(1, {"embedding": shared, "head": shared}, block=True)
    written = sum(path.stat().st_size for path in checkpointer.directory.rglob("*.safetensors"))
    assert written < 1.1 * shared.nbytes
    state = checkpointer.load()
    assert state["embedding"].data_ptr() == state["head"].data_ptr()


def test_verify_does_not_call_damaged_what_cannot_be_read(tmp_path: Path) -> None:
    checkpointer = tl.Checkpointer(tmp_path, process_group=False)
    checkpointer.save(1, {"x": torch.arange(3 << 20)}, block=True)
    (shard,) = tmp_path.glob("step-*/shard-*")
    shard.unlink()
    shard.symlink_to(shard)  # a loop: nobody can open it
    with pytest.raises(tl.Error, match="ELOOP") as raised:
        checkpointer.verify(1)
    assert not isinstance(raised.value, tl.Corrupt)
    assert (raised.value.errno, raised.value.filename) == (errno.ELOOP, str(shard))


def test_every_flipped_bit_is_found_by_load_and_verify(tmp_path: Path) -> None:
    checkpointer = tl.Checkpointer(tmp_path)
    checkpointer.save(1, {"first": torch.zeros(400_000), "second": torch.ones(400_000)}, block=True)
    checkpointer.verify()
    (shard,) = tmp_path.rglob("*.safetensors")
    data = shard.read_bytes()
    for at, tensor in ((3, None), (len(data) // 3, "first"), (len(data) - 1, "second")):
        shard.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        for check in (checkpointer.load, checkpointer.verify):
            with pytest.raises(tl.Corrupt) as caught:
                check()
            assert caught.value.filename == str(shard)
            assert caught.value.chunk == at >> 20
            end = min((at >> 20) + 1 << 20, len(data))
            if check == checkpointer.load:
                assert f"chunk {at >> 20} (bytes {at >> 20 << 20} to {end})" in str(caught.value)
            # A chunk may hold parts of several tensors: the first of them is named.
            assert tensor is None or caught.value.tensor in ("first", "second")
    shard.write_bytes(data[:-1])
    for check in (checkpointer.load, checkpointer.verify):
        with pytest.raises(tl.Corrupt):
            check()
    shard.unlink()
    for check in (checkpointer.load, checkpointer.verify):
        with pytest.raises(tl.Corrupt, match="is missing"):
            check()


def test_a_failed_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path).save(1, make_state(1), block=True)
    for operation in ("write", "sync"):
        faults = tl.Faults()
        checkpointer = tl.Checkpointer(tmp_path, engine=tl.Engine(faults=faults))
        faults.fail(operation, 0, 5)  # type: ignore[arg-type]
        with pytest.raises(tl.Error):
            checkpointer.save(2, make_state(2), block=True)
        handle = checkpointer.save(3, make_state(3))
        handle.wait()
        assert_is(checkpointer.load(), 3)
        shutil.rmtree(tmp_path / "step-00000003")
        assert checkpointer.steps() == [1]
        assert_is(checkpointer.load(), 1)
        assert not (tmp_path / "step-00000002").exists()


def test_the_error_of_a_background_save_surfaces_at_the_next(tmp_path: Path) -> None:
    faults = tl.Faults()
    checkpointer = tl.Checkpointer(tmp_path, engine=tl.Engine(faults=faults))
    faults.fail("write", 0, 28)
    checkpointer.save(1, make_state(1))
    with pytest.raises(tl.Error) as caught:
        checkpointer.save(2, make_state(2))
    assert caught.value.errno == 28
    assert "step 2 was not saved, because the one before it failed; call save() again" in str(caught.value)
    assert "step-00000001" in str(caught.value)
    checkpointer.save(2, make_state(2), block=True)
    assert_is(checkpointer.load(), 2)


def test_after_an_earlier_step_was_loaded_the_later_ones_go_first(tmp_path: Path) -> None:
    run = tl.Checkpointer(tmp_path, keep=3)
    for step in (50, 100, 101):
        run.save(step, make_state(step), block=True)
    run = tl.Checkpointer(tmp_path, keep=2)
    run.load(50)
    run.save(51, make_state(51), block=True)
    assert run.steps() == [50, 51]
    assert_is(run.load(50), 50)


def test_debris_is_collected_but_not_of_a_save_under_way(tmp_path: Path) -> None:
    faults = tl.Faults()
    checkpointer = tl.Checkpointer(tmp_path, engine=tl.Engine(faults=faults))
    checkpointer.save(1, make_state(1), block=True)
    faults.hold("write", faults.commands("write"), 1000)
    handle = checkpointer.save(2, make_state(2))
    handle.wait_staged()
    assert _core.CheckpointStore(tmp_path).collect()["busy"]
    faults.release()
    handle.wait()
    assert_is(checkpointer.load(2), 2)
    debris = tmp_path / "step-00000007"
    debris.mkdir()
    (debris / "shard-00000-of-00001-0123456789abcdef.safetensors").write_bytes(b"x" * 100)
    tl.Checkpointer(tmp_path)
    assert not debris.exists()
    assert checkpointer.steps() == [1, 2]


def test_what_cannot_be_cleaned_up_is_told(checkpointer: tl.Checkpointer) -> None:
    checkpointer.save(1, make_state(1), block=True)
    next(checkpointer.directory.glob("step-00000001/manifest-*")).write_text("{")
    with pytest.warns(RuntimeWarning, match=r"step-00000001.*manifest"):
        checkpointer.save(2, make_state(2), block=True)
    assert_is(checkpointer.load(), 2)
    with pytest.warns(RuntimeWarning, match=r"step-00000001.*manifest"):
        tl.Checkpointer(checkpointer.directory)


def test_states_without_tensors_and_without_anything(checkpointer: tl.Checkpointer) -> None:
    for step, state in enumerate([{"a": [1, 2]}, {}, None, {"e": torch.empty(0, 3)}]):
        checkpointer.save(step, state, block=True)
        got = checkpointer.load()
        if step == 3:
            assert got["e"].shape == (0, 3)
        else:
            assert got == state


def test_objects_are_refused_with_their_place(checkpointer: tl.Checkpointer) -> None:
    with pytest.raises(tl.Unsupported, match=r"state\['a'\]\[1\] is a .*object, which cannot be saved"):
        checkpointer.save(1, {"a": [1, object()]})
    assert checkpointer.steps() == []


def test_processes_that_do_not_know_of_each_other_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group"):
        tl.Checkpointer(tmp_path)
    tl.Checkpointer(tmp_path, process_group=False)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(
        ValueError, match="environment variable WORLD_SIZE: must be a number of processes, not"
    ):
        tl.Checkpointer(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "")
    tl.Checkpointer(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    tl.Checkpointer(tmp_path)


def test_bad_arguments(tmp_path: Path) -> None:
    for options in ({"keep": 0}, {"keep": True}, {"timeout": 0}, {"writers": "nobody"}, {"writers": [1]}):
        with pytest.raises(
            TypeError if options == {"keep": True} else ValueError, match=f"{next(iter(options))}:"
        ):
            tl.Checkpointer(tmp_path, **options)  # type: ignore[arg-type]
    checkpointer = tl.Checkpointer(tmp_path)
    for step in (-1, 1 << 63, True, 1.5):
        with pytest.raises((TypeError, ValueError), match="step:"):
            checkpointer.save(step, {})  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    with pytest.raises(tl.Error):
        tl.Checkpointer(tmp_path / "file")


class Whole:
    """A number that is not an int."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


@pytest.mark.parametrize("number", [np.int64, np.uint8, torch.tensor, Whole])
def test_whole_numbers_of_any_type_are_steps(tmp_path: Path, number: Any) -> None:
    checkpointer = tl.Checkpointer(tmp_path / "run", keep=number(2))
    for step in (1, 2, 3):
        checkpointer.save(number(step), make_state(step), block=True)
    assert checkpointer.steps() == [2, 3]
    assert_is(checkpointer.load(number(2)), 2)
    checkpointer.verify(number(2))
    checkpointer.delete(number(2))
    assert checkpointer.steps() == [3]


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 1.0, np.float64(1), "1", -1, 1 << 63])
def test_what_is_no_step_is_refused_everywhere(checkpointer: tl.Checkpointer, value: Any) -> None:
    error = ValueError if type(value) is int else TypeError
    for call in (
        lambda: checkpointer.save(value, {}),
        lambda: checkpointer.load(value),
        lambda: checkpointer.verify(value),
        lambda: checkpointer.delete(value),
    ):
        with pytest.raises(error, match="^step: "):
            call()
    if type(value) is not int or value < 1:
        with pytest.raises(error, match="^keep: "):
            tl.Checkpointer(checkpointer.directory, keep=value)
    assert not checkpointer.directory.exists()


def test_a_step_is_deleted(checkpointer: tl.Checkpointer) -> None:
    for step in (1, 2):
        checkpointer.save(step, make_state(step), block=True)
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 5; it has steps 1, 2"):
        checkpointer.delete(5)
    checkpointer.save(3, make_state(3))
    checkpointer.delete(3)  # waits for it
    assert checkpointer.steps() == [2]
    next(checkpointer.directory.glob("step-00000002/manifest-*")).write_text("{")
    checkpointer.delete(2)
    assert checkpointer.latest() is None
    assert not list(checkpointer.directory.glob("step-*"))


def test_a_file_that_comes_between_is_said_at_once(tmp_path: Path) -> None:
    """Not by the handle of a save that ran in the background."""
    checkpoints = tl.Checkpointer(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text("{}")
    with pytest.raises(tl.Error, match=r"holds args\.json") as caught:
        checkpoints.save(1, make_state(1))
    assert caught.value.errno == errno.ENOTEMPTY
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["args.json"]


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_checkpointer_is_not_copied(
    checkpointer: tl.Checkpointer, copied: Callable[[object], object]
) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled or copied; open the directory again instead"):
        copied(checkpointer)
