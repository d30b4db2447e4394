"""What is said of DTensors where they cannot be saved: what does save them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trunkline as tl

tensors = pytest.importorskip("torch.distributed.tensor")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """One rank is enough: a DTensor is one all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tensors.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("replicated", [False, True])
def test_what_to_do(tmp_path: Path, mesh: Any, replicated: bool, parameter: bool) -> None:
    placement = tensors.Replicate() if replicated else tensors.Shard(0)
    whole = torch.arange(12.0).reshape(4, 3)
    made = tensors.distribute_tensor(whole.clone(), mesh, [placement])
    state = {"x": torch.nn.Parameter(made) if parameter else made}
    advice = (
        "of which each rank holds a copy .*; use its to_local\\(\\), or torch.distributed.checkpoint with "
        "trunkline.dcp$"
        if replicated
        else "of which each rank holds a part .*; use torch.distributed.checkpoint with trunkline.dcp, or "
        "its full_tensor\\(\\), which all ranks call$"
    )
    checkpointer = tl.Checkpointer(tmp_path / "run", process_group=False)
    with pytest.raises(tl.Unsupported, match=f"the tensor 'x' is a .*{advice}"):
        tl.save(state, tmp_path / "file.safetensors")
    with pytest.raises(tl.Unsupported, match=rf"state\['x'\] is a .*{advice}"):
        checkpointer.save(1, state, block=True)
    # Following the advice.
    plain = made.to_local() if replicated else made.full_tensor()
    checkpointer.save(1, {"x": plain}, block=True)
    assert torch.equal(checkpointer.load()["x"], whole)
    with pytest.raises(ValueError, match=rf"into: state\['x'\] is a .*{advice}"):
        checkpointer.load(into={"x": made})
    if replicated:
        made.to_local().zero_()
        checkpointer.load(into={"x": made.to_local()})
        assert torch.equal(made.full_tensor(), whole)
