"""Tools that read checkpoints and files wait for saves of this process to them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import pytest
import torch
from support_threads import await_saves

import trunkline as tl
from trunkline._checkpoint_tools.difference import compare
from trunkline._checkpoint_tools.importing import import_checkpoint


@pytest.fixture
def faults() -> tl.Faults:
    return tl.Faults()


@pytest.fixture
def engine(faults: tl.Faults) -> Iterator[tl.Engine]:
    with tl.Engine("threads", faults=faults) as made:
        yield made
        faults.release()
        await_saves()


def state(version: int) -> dict[str, Any]:
    return {"weight": torch.full((30_000,), version, dtype=torch.int32)}


def after_the_save(faults: tl.Faults, call: Callable[[], Any]) -> Any:
    """Return what a call returns that begins while a save is held, which must end first."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        wait_for([running], timeout=0.3)
        faults.release()
        return running.result(60)


def save_held(directory: Path, step: int, faults: tl.Faults, engine: tl.Engine) -> tl.Checkpointer:
    checkpoints = tl.Checkpointer(directory, engine=engine)
    if step > 1:
        checkpoints.save(1, state(1), block=True)
    faults.hold("write", faults.commands("write"), 1000)
    checkpoints.save(step, state(step)).wait_staged(60)
    return checkpoints


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("folder", ["", "step"])
def test_export(folder: str, step: int, tmp_path: Path, faults: tl.Faults, engine: tl.Engine) -> None:
    run = tmp_path / "run"
    kept = save_held(run, step, faults, engine)
    source = run / f"step-{step:08}" if folder else run
    exported = after_the_save(faults, lambda: tl.export_checkpoint(source, tmp_path / "out.safetensors"))
    assert exported.step == step
    assert torch.equal(tl.load(tmp_path / "out.safetensors")["weight"], state(step)["weight"])
    assert kept.latest() == step


def test_export_to_a_folder(tmp_path: Path, faults: tl.Faults, engine: tl.Engine) -> None:
    kept = save_held(tmp_path / "run", 2, faults, engine)
    exported = after_the_save(faults, lambda: tl.export_checkpoint(tmp_path / "run", tmp_path / "out/"))
    assert exported.step == kept.latest() == 2


def test_open_tensors(tmp_path: Path, faults: tl.Faults, engine: tl.Engine) -> None:
    kept = save_held(tmp_path, 2, faults, engine)
    assert after_the_save(faults, lambda: tl.open_tensors(tmp_path).metadata()["step"]) == "2"
    assert kept.latest() == 2


def test_difference(tmp_path: Path, faults: tl.Faults, engine: tl.Engine) -> None:
    tl.save(state(2), tmp_path / "two.pt")
    kept = save_held(tmp_path / "run", 2, faults, engine)
    assert after_the_save(faults, lambda: compare(tmp_path / "run", tmp_path / "two.pt").is_same)
    assert kept.latest() == 2


def test_import_of_a_new_file(tmp_path: Path, faults: tl.Faults, engine: tl.Engine) -> None:
    faults.hold("write", 0, 1)
    tl.save_async(state(1), tmp_path / "new.pt", engine=engine).wait_staged(60)
    after_the_save(faults, lambda: import_checkpoint(tmp_path / "new.pt", tmp_path / "run", step=1))
    assert torch.equal(tl.Checkpointer(tmp_path / "run").load()["weight"], state(1)["weight"])
