"""What is loaded does not depend on the modes of torch around the call."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import trunkline as tl


@contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "with meta": lambda: torch.device("meta"),
    "with cpu": lambda: torch.device("cpu"),
    "default device meta": lambda: _default_device("meta"),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": _deterministic,
}


@pytest.mark.parametrize(
    ("mode", "packed"), [*((mode, False) for mode in MODES), ("inference_mode", True), ("with meta", True)]
)
def test_a_streamed_model_is_the_same_in_every_mode(mode: str, packed: bool, tmp_path: Path) -> None:
    models = pytest.importorskip("support_models")
    from test_streaming import generated, least, logits

    folder = models.make_folder(tmp_path / "model")
    options: dict[str, Any] = {"pack_dir": tmp_path / "pack"} if packed else {}
    expected = models.stock(folder)
    budget = least(folder, **options)
    with MODES[mode]():
        model = tl.transformers.from_pretrained(folder, memory_budget=budget, **options)
    values = dict([*model.named_parameters(), *model.named_buffers()])
    assert not any(value.is_inference() for value in values.values())
    for name, buffer in expected.named_buffers():
        assert (values[name].dtype, values[name].device) == (buffer.dtype, buffer.device)
        assert torch.equal(values[name], buffer)
    tokens, scores = generated(expected, do_sample=False), logits(expected)
    for around in (torch.enable_grad, torch.inference_mode, torch.no_grad, torch.enable_grad):
        with around():
            assert torch.equal(model(**models.prompt()).logits, scores)
    assert torch.equal(generated(model, do_sample=False), tokens)


@pytest.mark.parametrize("mode", ["with meta", "default device meta", "inference_mode"])
def test_packing_and_planning_in_every_mode(mode: str, tmp_path: Path) -> None:
    models = pytest.importorskip("support_models")
    folder = models.make_folder(tmp_path / "model")
    with MODES[mode]():
        assert tl.transformers.pack(folder, [tmp_path / "pack"], dtype="float32")["made"]
        planned = tl.stream.plan(folder, memory_budget="1GB", bandwidth=1e9)
    assert not tl.transformers.pack(folder, [tmp_path / "pack"], dtype="float32")["made"]
    assert planned["compute_seconds"] > 0


def _load_into_new_model(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600))
    model.load_state_dict(state, assign=True)
    return model


@pytest.mark.parametrize("source", ["pt", "pt, mapped", "safetensors", "safetensors, mapped", "step"])
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "with meta", "default device meta"])
def test_what_is_loaded_in_a_mode_can_be_trained_outside_of_it(
    mode: str, source: str, tmp_path: Path
) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600)).state_dict()
    if source == "step":
        tl.Checkpointer(tmp_path / "run").save(1, state, block=True)
        with MODES[mode]():
            loaded = tl.Checkpointer(tmp_path / "run").load()
    else:
        path = tmp_path / f"state.{source.partition(',')[0]}"
        tl.save(state, path)
        with MODES[mode]():
            loaded = tl.load(path, mmap="mapped" in source)
    for name, value in state.items():
        assert torch.equal(loaded[name], value)
        assert not loaded[name].is_inference()
    model = _load_into_new_model(loaded)
    model(torch.randn(3, 600)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model[1].bias, state["1.bias"])


def test_a_mode_of_the_caller_is_left_as_it_was(tmp_path: Path) -> None:
    tl.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with torch.inference_mode():
        tl.load(tmp_path / "a.pt")
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        with pytest.raises(FileNotFoundError):
            tl.load(tmp_path / "b.pt")
        assert torch.is_inference_mode_enabled()
    with torch.no_grad():
        tl.load(tmp_path / "a.pt")
        assert not torch.is_grad_enabled()
    tl.load(tmp_path / "a.pt")
    assert torch.is_grad_enabled()
