"""Files of other programs that become steps, as users import them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import trunkline as tl
from trunkline._checkpoint_tools.importing import import_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(30, 20, generator=torch.Generator().manual_seed(1)), "b": torch.ones(3)}


def assert_holds(directory: Path, step: int, key: str) -> None:
    loaded: dict[str, Any] = tl.Checkpointer(directory).load(step)[key]
    assert loaded.keys() == model().keys()
    for name, tensor in model().items():
        assert torch.equal(loaded[name], tensor)


def test_files_and_folders_become_steps(tmp_path: Path) -> None:
    safetensors.torch.save_file(model(), tmp_path / "model.safetensors")
    torch.save({"model": model(), "step": 7}, tmp_path / "all.pt")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "trunkline", "checkpoint", "import", "--json", "--key", "model"]
    command += [str(tmp_path / "model.safetensors"), str(run), "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["step"] == 1
    assert_holds(run, 1, "model")
    import_checkpoint(tmp_path / "all.pt", run, step=2)
    assert_holds(run, 2, "model")
    assert tl.Checkpointer(run).load(2)["step"] == 7
    (tmp_path / "folder").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "folder" / "model.safetensors")
    import_checkpoint(tmp_path / "folder", run, step=3, key="ema")
    assert_holds(run, 3, "ema")
    assert tl.Checkpointer(run).steps() == [1, 2, 3]


def test_directories_of_dcp_become_steps(tmp_path: Path) -> None:
    state = {"model": model(), "step": 7}
    dcp.save(state, storage_writer=tl.dcp.StorageWriter(tmp_path / "ours"), no_dist=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    import_checkpoint(tmp_path / "ours", tmp_path / "run", step=1)
    with pytest.raises(tl.Unsupported, match="runs the pickles in it.*allow_pickle=True"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "run", step=2)
    import_checkpoint(tmp_path / "theirs", tmp_path / "run", step=2, allow_pickle=True)
    for step in (1, 2):
        assert_holds(tmp_path / "run", step, "model")
        assert tl.Checkpointer(tmp_path / "run").load(step)["step"] == 7


def test_nothing_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tl.Checkpointer(run).save(5, {"a": 1}, block=True)
    torch.save(model(), tmp_path / "model.pt")
    for step in (3, 5):
        with pytest.raises(
            FileExistsError, match="cannot import step .* it has steps up to 5; pass a higher number"
        ):
            import_checkpoint(tmp_path / "model.pt", run, step=step)
    assert tl.Checkpointer(run).load() == {"a": 1}
    with pytest.raises(tl.Unsupported, match="one of a Checkpointer already"):
        import_checkpoint(run, tmp_path / "other", step=1)
    assert not (tmp_path / "other").exists()
