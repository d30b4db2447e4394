"""Every kind of tensor is saved as torch.save saves it, or refused with its place in the state."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import trunkline as tl

VALUES = torch.arange(12.0).reshape(3, 4)


class OfTheUser(torch.Tensor):
    """A subclass."""


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def parts(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(float(size)) for size in sizes]


# How each is made, and what says why a .pt file cannot hold it; "": it can. Other files hold none of these.
KINDS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "nested": (lambda: torch.nested.nested_tensor(parts(2, 3)), ""),
    "jagged": (lambda: torch.nested.nested_tensor(parts(2, 3), layout=torch.jagged), ""),
    "coo": (VALUES.to_sparse, ""),
    "csr": (VALUES.to_sparse_csr, ""),
    "csc": (VALUES.to_sparse_csc, ""),
    "bsr": (lambda: torch.ones(4, 4).to_sparse_bsr((2, 2)), ""),
    "bsc": (lambda: torch.ones(4, 4).to_sparse_bsc((2, 2)), ""),
    "quantised": (lambda: torch.quantize_per_tensor(VALUES, 0.1, 3, torch.quint8), ""),
    "meta": (lambda: torch.empty(3, device="meta"), ""),
    "subclass": (lambda: VALUES.as_subclass(OfTheUser), ""),
    "uninitialised": (torch.nn.UninitializedParameter, ""),
    "mkldnn": (VALUES.to_mkldnn, "to_dense"),
    "fake": (lambda: FakeTensorMode().from_tensor(VALUES), "FakeTensorMode"),
}


def make(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes and of what is deprecated
        return KINDS[kind][0]()


def refused(tensor: torch.Tensor, directory: Path) -> None:
    """Save what no file but perhaps a .pt file can hold."""
    state = {"model": {"w": [torch.ones(2), tensor]}}
    with pytest.raises(tl.Unsupported, match="the tensor 'w' "):
        tl.save({"w": tensor}, directory / "a.safetensors")
    checkpoints = tl.Checkpointer(directory / "run", process_group=False)
    with pytest.raises(tl.Unsupported, match=r"state\['model'\]\['w'\]\[[01]\] "):
        checkpoints.save(1, state, block=True)
    assert not (directory / "a.safetensors").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_is_saved_or_refused_with_its_place(tmp_path: Path, kind: str) -> None:
    tensor, why = make(kind), KINDS[kind][1]
    state = {"model": {"w": [torch.ones(2), tensor]}}
    path, stock = tmp_path / "a.pt", tmp_path / "stock.pt"
    if why:
        with pytest.raises(tl.Unsupported, match=rf"obj\['model'\]\['w'\]\[1\] .*{why}"):
            tl.save(state, path)
        assert not path.exists()
    else:
        tl.save(state, path)
        torch.save(state, stock)
        loaded, expected = (torch.load(each, weights_only=False)["model"]["w"][1] for each in (path, stock))
        assert type(loaded) is type(expected)
        if kind == "jagged":  # its size has a symbol, another one each time
            loaded, expected = loaded.unbind(), expected.unbind()
        assert str(loaded) == str(expected)
    refused(tensor, tmp_path)


def test_nested_tensors_come_back(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.nested.nested_tensor(parts(2, 300_000))
    path = tmp_path / "a.pt"
    tl.save({"w": tensor}, path)
    loaded = tl.load(path)["w"]
    for one, other in zip(loaded.unbind(), tensor.unbind(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("view", [slice(None), slice(500, 600), slice(None, None, 2)])
def test_storage_that_ends_before_the_last_element(tmp_path: Path, view: slice) -> None:
    """Else it saved whatever lies behind, or the process crashed."""
    whole = torch.arange(1000.0)
    tensor = whole[view]
    whole.untyped_storage().resize_(2100)
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    checkpoints.save(1, {"x": torch.arange(1000.0)[view].clone()}, block=True)
    for use in (
        lambda: checkpoints.save(2, {"x": tensor}, block=True),
        lambda: checkpoints.load(1, into={"x": tensor}),
        lambda: tl.save({"x": tensor}, tmp_path / "a.safetensors"),
    ):
        with pytest.raises((tl.Unsupported, ValueError), match="lost its memory"):
            use()


def test_freed_memory_is_named(tmp_path: Path) -> None:
    refused(freed(), tmp_path)


WITH_STORAGE: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(3),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "view": lambda: torch.ones(3)[1:],
    "strided": lambda: torch.ones(3, 2)[1:, 1],
    "subclass": lambda: make("subclass").clone(),
    "quantised": lambda: make("quantised"),
}


@pytest.mark.parametrize("kind", WITH_STORAGE)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_freed_memory_does_not_replace_a_pt_file(tmp_path: Path, kind: str) -> None:
    """Else neither tl.load nor torch.load could read it."""
    tensor = WITH_STORAGE[kind]()
    path = tmp_path / "a.pt"
    tl.save({"w": VALUES}, path)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(tl.Unsupported, match=r"obj\['w'\]\[1\] has lost its memory"):
        tl.save({"big": VALUES, "w": [VALUES, tensor]}, path)
    assert torch.equal(tl.load(path)["w"], VALUES)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int1", "uint7"])
def test_elements_of_less_than_a_byte(tmp_path: Path, dtype: str) -> None:
    tensor = torch.arange(8, dtype=torch.uint8).view(getattr(torch, dtype))
    for name, place in (("a.pt", r"obj\['w'\]"), ("a.safetensors", "the tensor 'w'")):
        with pytest.raises(tl.Unsupported, match=rf"{place} has the dtype torch.{dtype}, .*view\("):
            tl.save({"w": tensor}, tmp_path / name)
        assert list(tmp_path.iterdir()) == []
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    checkpoints.save(1, {"w": tensor}, block=True)
    loaded = checkpoints.load()["w"]
    assert loaded.dtype is tensor.dtype
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("transform", [torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())])
def test_tensors_of_torch_func_are_named(tmp_path: Path, transform: Callable[..., Any]) -> None:
    def function(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(tl.Unsupported, match=r"obj\['w'\] is a tensor of torch.func"):
            tl.save({"w": tensor}, tmp_path / "a.pt")
        refused(tensor, tmp_path)
        return tensor

    transform(function)(VALUES)
