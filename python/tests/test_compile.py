"""Models that torch.compile wraps: streamed, loaded and trained with checkpoints.

Not by inductor, which is slow and rounds otherwise; what matters here is what dynamo and autograd trace.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
_BACKEND = "aot_eager"  # traces as inductor does, and rounds as uncompiled code


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend=_BACKEND, **options)


def test_a_compiled_streamed_model_is_as_the_fully_loaded_one(tmp_path: Path) -> None:
    models = pytest.importorskip("support_models")
    from test_streaming import logits, streamed

    config = models.ARCHITECTURES["llama"]()
    config.num_hidden_layers = 2
    folder = models.save_model(config, tmp_path)
    expected = models.stock(folder)
    torch.compiler.reset()
    model: Any = torch.compile(streamed(folder, unit_bytes=1), backend="eager")
    scores = logits(expected)
    for _ in range(3):  # each pass has the weights elsewhere
        assert torch.equal(logits(model), scores)
    assert tl.stream.stats(model)["passes"] == 3
    with pytest.raises(tl.Unsupported, match="has no state_dict"):
        model.state_dict()
    with pytest.raises(Exception, match="weights of a streamed model between its modules.*fullgraph=False"):
        logits(compiled(streamed(folder, unit_bytes=1), fullgraph=True))


def small(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 8), 1.0 + step)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_training_goes_on_from_its_checkpoint(in_place: bool, tmp_path: Path) -> None:
    model = compiled(small(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert all(name.startswith("_orig_mod.") for name in state["model"])
    tl.Checkpointer(tmp_path).save(1, state, block=True)
    train(model, optimizer, 3)

    other = compiled(small(1))
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    if in_place:
        train(other, again, 1)  # so that there is a state to load into
        into = {"model": other.state_dict(), "optimizer": again.state_dict()}
        loaded = tl.Checkpointer(tmp_path).load(into=into)
    else:
        loaded = tl.Checkpointer(tmp_path).load()
        other.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    train(other, again, 3)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_states_of_compiled_and_plain_models_are_not_mixed_up(tmp_path: Path) -> None:
    plain, wrapped = small(0), compiled(small(1))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    tl.Checkpointer(tmp_path / "wrapped").save(1, wrapped.state_dict(), block=True)
    tl.Checkpointer(tmp_path / "plain").save(1, plain.state_dict(), block=True)
    for saved, into in (("wrapped", plain), ("plain", wrapped)):
        with pytest.raises(ValueError, match=r"lacks the keys? .*compiled\._orig_mod"):
            tl.Checkpointer(tmp_path / saved).load(into=into.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        plain.load_state_dict(tl.Checkpointer(tmp_path / "wrapped").load())
    assert all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    plain.load_state_dict(wrapped._orig_mod.state_dict())
    tl.Checkpointer(tmp_path / "wrapped").load(into=wrapped.state_dict())
    assert torch.equal(plain(torch.ones(1, 8)), wrapped(torch.ones(1, 8)))


@pytest.mark.parametrize("mmap", [False, True])
def test_loaded_weights_can_be_compiled_and_trained(mmap: bool, tmp_path: Path) -> None:
    expected = small(0)
    tl.save(expected.state_dict(), tmp_path / "a.pt")
    with torch.device("meta"):
        model = small(1)
    with torch.inference_mode():
        state = tl.load(tmp_path / "a.pt", mmap=mmap)
    model.load_state_dict(state, assign=True)
    wrapped = compiled(model)
    assert torch.equal(wrapped(torch.ones(3, 8)), expected(torch.ones(3, 8)))
    train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.1), 1)
    assert not torch.equal(wrapped(torch.ones(3, 8)), expected(torch.ones(3, 8)))
