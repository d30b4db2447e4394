"""Names of steps, manifests and shards: Python recognizes those that the library does."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trunkline as tl
from trunkline._formats.checkpoint_names import is_manifest, is_shard, step_of

NUMBERS = [
    *("00000012", "00000000", "99999999", "100000000", "9223372036854775807"),
    *(
        "12",
        "0000012",
        "000000012",
        "9223372036854775808",
        "100000000000000000000",
        "",
        "-0000001",
        "+0000001",
    ),
    *(
        "0000001\u0662",
        "\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668",
        "00000012 ",
        "+0000012",
        "0000001a",
    ),
]
COMMITS = [
    *("0000000001", "9999999999", "10000000000", "9223372036854775807"),
    *("0000000000", "1", "00000000001", "9223372036854775808", "", "000000000\u0661", "000000000a"),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A step of a directory of checkpoints."""
    tl.Checkpointer(tmp_path / "run", process_group=False).save(12, {"x": torch.ones(3)}, block=True)
    return tmp_path / "run" / "step-00000012"


@pytest.mark.parametrize("number", NUMBERS)
def test_steps(saved: Path, number: str) -> None:
    checkpoints = tl.Checkpointer(saved.parent, process_group=False)
    saved.rename(saved.parent / f"step-{number}")
    step = step_of(f"step-{number}")
    assert checkpoints.steps() == ([] if step is None else [step])
    assert step_of(f"Step-{number}") is None
    assert step_of(f"step-{number}\n") is None


@pytest.mark.parametrize("number", COMMITS)
def test_manifests(saved: Path, number: str) -> None:
    checkpoints = tl.Checkpointer(saved.parent, process_group=False)
    (manifest,) = saved.glob("manifest-*")
    manifest.rename(saved / f"manifest-{number}")
    assert checkpoints.steps() == ([12] if is_manifest(f"manifest-{number}") else [])


@pytest.mark.parametrize(
    "name",
    [
        "shard-00000-of-00001-0123456789abcdef.safetensors",
        "shard-100000-of-100001-0123456789abcdef.safetensors",
        "shard-00003-of-00001-0123456789abcdef.safetensors",
        "shard-18446744073709551615-of-18446744073709551615-0123456789abcdef.safetensors",
        "shard-18446744073709551616-of-18446744073709551616-0123456789abcdef.safetensors",
        "shard-0000-of-00001-0123456789abcdef.safetensors",
        "shard-000000-of-00001-0123456789abcdef.safetensors",
        "shard-00000-of-1-0123456789abcdef.safetensors",
        "shard-0000\u0661-of-00001-0123456789abcdef.safetensors",
        "shard-+0000-of-00001-0123456789abcdef.safetensors",
        "shard-00000-of-00001-0123456789ABCDEF.safetensors",
        "shard-00000-of-00001-0123456789abcde.safetensors",
        "shard-00000-of-00001-0123456789abcdefa.safetensors",
        "shard-00000-of-00001-0123456789abcdeg.safetensors",
        "shard-00000-of-00001-0123456789abcdef.safetensors\n",
        "shard-00000-of-00001-0123456789abcdef.safetensors.bak",
        "shard-00000-of-00001-0123456789abcdef.pt",
        "shard-00000-of-00001.safetensors",
        "model-00000-of-00001-0123456789abcdef.safetensors",
        "shard-",
    ],
)
def test_shards(saved: Path, name: str) -> None:
    """The library removes shards that no manifest names, and leaves other files alone."""
    store = tl.Checkpointer(saved.parent, process_group=False)._context.store
    (saved / name).touch()
    store.collect()
    assert is_shard(name) == (not (saved / name).exists())


@pytest.mark.parametrize("number", ["00000", "18446744073709551615"])
def test_what_is_a_shard(number: str) -> None:
    assert is_shard(f"shard-{number}-of-{number}-0123456789abcdef.safetensors")


def test_shards_of_a_save(saved: Path) -> None:
    assert [is_shard(path.name) for path in saved.glob("shard-*")] == [True]


@pytest.mark.parametrize("name", ["step-300", "step_300", "step300", "step-000000300"])
def test_a_step_under_nearly_its_name_is_warned_of(tmp_path: Path, name: str) -> None:
    checkpoints = tl.Checkpointer(tmp_path, process_group=False)
    for step in (200, 300):
        checkpoints.save(step, {"step": step}, block=True)
    (tmp_path / "step-00000300").rename(tmp_path / name)
    (tmp_path / "step-400").mkdir()  # of something else
    shutil.copytree(tmp_path / "step-00000200", tmp_path / "step-200")  # which nobody misses
    says = f"{tmp_path}: {name} is ignored: rename it to step-00000300 to make it count"

    def warned(call: Callable[[], Any]) -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call()
            checkpoints.load()  # says it once
        assert [(str(each.message), each.filename) for each in found] == [(says, __file__)]

    warned(lambda: checkpoints.load())
    warned(lambda: tl.Checkpointer(tmp_path, process_group=False).load())
    assert checkpoints.load() == {"step": 200}
    (tmp_path / name).rename(tmp_path / "step-00000300")
    with warnings.catch_warnings(action="error"):
        assert tl.Checkpointer(tmp_path, process_group=False).load() == {"step": 300}


def test_a_step_that_is_a_link_to_a_disk_that_is_not_mounted(tmp_path: Path) -> None:
    """The step before it would be taken for the latest without a word."""
    run = tmp_path / "run"
    checkpoints = tl.Checkpointer(run, process_group=False)
    for step in (1, 2):
        checkpoints.save(step, {"x": torch.full((3,), step)}, block=True)
    disk = tmp_path / "disk"
    disk.mkdir()
    shutil.move(run / "step-00000002", disk)
    (run / "step-00000002").symlink_to(disk / "step-00000002")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tl.Checkpointer(run, process_group=False).latest() == 2
        opened = tl.Checkpointer(run, process_group=False)
    disk.rename(tmp_path / "elsewhere")
    told = r"step-00000002 is ignored: it is a symbolic link to .*disk/step-00000002, which does not exist"
    with pytest.warns(RuntimeWarning, match=told) as caught:
        assert torch.equal(opened.load()["x"], torch.full((3,), 1))
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match=told):
        tl.Checkpointer(run, process_group=False)
