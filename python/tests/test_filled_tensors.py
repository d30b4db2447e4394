"""Tensors of the user's that are read into: autograd knows, and an error says what they hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
MIB = 1 << 20


def fill_by_pread(target: torch.Tensor, directory: Path) -> None:
    with tl.open(directory / "raw", "w") as file:
        file.pwrite(torch.zeros_like(target))
        file.pread(target)


def fill_by_async_pread(target: torch.Tensor, directory: Path) -> None:
    with tl.open(directory / "raw", "w") as file:
        file.pwrite(torch.zeros_like(target))
        file.async_pread(target).result()


def fill_by_checkpointer(target: torch.Tensor, directory: Path) -> None:
    checkpoints = tl.Checkpointer(directory / "run", process_group=False)
    checkpoints.save(1, {"x": torch.zeros_like(target)}, block=True)
    checkpoints.load(into={"x": target})


def fill_by_dcp(target: torch.Tensor, directory: Path) -> None:
    where = directory / "sharded"
    dcp.save({"x": torch.zeros_like(target)}, storage_writer=tl.dcp.StorageWriter(where), no_dist=True)
    dcp.load({"x": target}, storage_reader=tl.dcp.StorageReader(where), no_dist=True)


FILLS = [fill_by_pread, fill_by_async_pread, fill_by_checkpointer, fill_by_dcp]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("elements", [5, MIB])
def test_gradients_of_values_that_are_gone_are_an_error(
    tmp_path: Path, fill: Callable[[torch.Tensor, Path], None], elements: int
) -> None:
    weight = torch.ones(elements, requires_grad=True)
    target = torch.ones(elements)
    loss = (weight * target).sum()
    fill(target, tmp_path)
    assert not target.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("fill", FILLS)
def test_leaves_that_require_gradients_are_filled_as_under_no_grad(
    tmp_path: Path, fill: Callable[[torch.Tensor, Path], None]
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    fill(parameter, tmp_path)
    assert parameter.tolist() == [0, 0, 0]
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    (parameter + 1).sum().backward()
    assert parameter.grad is not None


def test_tensors_of_inference_mode_are_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        target = torch.ones(3)
    fill_by_pread(target, tmp_path)
    assert target.tolist() == [0, 0, 0]


def damaged(directory: Path) -> tl.Checkpointer:
    """A checkpoint whose last chunk is damaged."""
    checkpoints = tl.Checkpointer(directory / "run", process_group=False)
    checkpoints.save(1, {f"part{i}": torch.zeros(MIB) for i in range(4)}, block=True)
    [shard] = (directory / "run").glob("step-*/*.safetensors")
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    return checkpoints


def target_state() -> dict[str, torch.Tensor]:
    return {f"part{i}": torch.ones(MIB) for i in range(4)}


def test_an_error_says_that_tensors_are_filled_in_part(tmp_path: Path) -> None:
    checkpoints = damaged(tmp_path)
    says = 'do not use them before all are loaded again.*verify="first"'
    with pytest.raises(tl.Corrupt, match=says) as caught:
        checkpoints.load(into=target_state())
    assert caught.value.tensor is not None
    with pytest.raises(tl.Corrupt) as plain:
        checkpoints.load()
    assert "mixture" not in str(plain.value)


def test_verifying_first_leaves_the_tensors_as_they_are(tmp_path: Path) -> None:
    checkpoints = damaged(tmp_path)
    into = target_state()
    versions = [tensor._version for tensor in into.values()]
    with pytest.raises(tl.Corrupt) as caught:
        checkpoints.load(into=into, verify="first")
    assert "mixture" not in str(caught.value)
    assert all(bool((tensor == 1).all()) for tensor in into.values())
    assert [tensor._version for tensor in into.values()] == versions
    checkpoints.save(2, target_state(), block=True)
    state = checkpoints.load(2, into=into, verify="first")
    assert state["part0"] is into["part0"]


def test_what_does_not_fit_is_found_before_anything_changes(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    checkpoints.save(1, {f"part{i}": torch.zeros(MIB) for i in range(4)}, block=True)
    into: dict[str, Any] = target_state()
    into["part3"] = torch.ones(3)
    for verify in (True, "first", False):
        with pytest.raises(ValueError, match="part3"):
            checkpoints.load(into=into, verify=verify)  # type: ignore[arg-type]
    assert all(bool((tensor == 1).all()) for tensor in into.values())


def test_verify_is_one_of_three(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    with pytest.raises(ValueError, match='verify: must be True, False or "first"'):
        checkpoints.load(verify="last")  # type: ignore[arg-type]


def test_a_pt_file_keeps_memory_formats_and_a_safetensors_file_the_values(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    for name in ("a.pt", "a.safetensors"):
        tl.save({"weight": weight}, tmp_path / name)
        loaded = tl.load(tmp_path / name)["weight"]
        assert torch.equal(loaded, weight)
        assert loaded.is_contiguous(memory_format=torch.channels_last) is (name == "a.pt")
