"""Checkpoints that go out as folders of shards, for transformers."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path

import pytest
import safetensors.torch
import support_warm
import torch

import trunkline as tl


def run(*arguments: str | Path, expect: int = 0) -> str:
    """Run `trunkline checkpoint export`; what it prints."""
    result = support_warm.run(["-m", "trunkline", "checkpoint", "export", *arguments])
    assert result.returncode == expect, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {f"layer.{number}": torch.randn(100, 50) for number in range(5)}  # 20,000 bytes each
    return {**made, "large": torch.randn(300, 50), "small": torch.ones(3, dtype=torch.bfloat16)}


@pytest.fixture
def checkpoint(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    tl.Checkpointer(tmp_path / "run").save(3, {"model": weights, "step": 3}, block=True)
    return tmp_path / "run"


def test_shards_and_their_index(checkpoint: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    printed = run(checkpoint, f"{out}/", "--key", "model", "--max-shard-size", "45kB", "--json")
    document = json.loads(printed)
    shards = [f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)]
    assert sorted(each.name for each in out.iterdir()) == [*shards, "model.safetensors.index.json"]
    assert document["files"] == [str(out / name) for name in [*shards, "model.safetensors.index.json"]]
    assert document["bytes"] == sum(each.stat().st_size for each in out.iterdir())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    stock: dict[str, torch.Tensor] = {}
    for name in shards:
        loaded = safetensors.torch.load_file(out / name)
        assert all(index["weight_map"][each] == name for each in loaded)
        assert len(loaded) == 1 or sum(each.nbytes for each in loaded.values()) <= 45_000
        stock |= loaded
    ours = tl.load(out, verify=True)
    for name, tensor in weights.items():
        assert torch.equal(stock[name], tensor)
        assert torch.equal(ours[name], tensor)
    assert [each.name for each in out.parent.iterdir()] == ["folder"]


def test_a_folder_without_a_configuration_is_named(checkpoint: Path, tmp_path: Path) -> None:
    said = "the folder has no config.json: --from FOLDER copies that of the model"
    assert said in run(checkpoint, f"{tmp_path / 'folder'}/", "--key", "model")
    assert said not in run(checkpoint, tmp_path / "a.safetensors", "--key", "model")


def test_one_shard_has_no_index(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    out.mkdir()  # empty
    done = tl.export_checkpoint(checkpoint, out, key="model")
    assert done.files == [str(out / "model.safetensors")]
    assert [each.name for each in out.iterdir()] == ["model.safetensors"]


def test_an_empty_folder_keeps_its_protection(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "private"
    out.mkdir()
    out.chmod(0o2700)
    os.setxattr(out, "user.project", b"secret")
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(out, 12, 34)
        out.chmod(0o2700)  # which the change of the owner has cleared
    tl.export_checkpoint(checkpoint, out, key="model")
    status = out.stat()
    assert stat.S_IMODE(status.st_mode) == 0o2700
    assert os.getxattr(out, "user.project") == b"secret"
    if is_root:
        assert (status.st_uid, status.st_gid) == (12, 34)
        assert (out / "model.safetensors").stat().st_gid == 34  # of the folder, which is setgid


def test_a_link_to_an_empty_folder_stays(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    tl.export_checkpoint(checkpoint, f"{tmp_path / 'link'}/", key="model")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.safetensors").is_file()


def test_a_mount_point_is_an_error_at_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mounted"
    out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)
    with pytest.raises(
        OSError, match="it is a mount point, which cannot be replaced; name a new folder in it"
    ):
        tl.export_checkpoint(checkpoint, out, key="model")
    assert list(out.iterdir()) == []


def test_a_folder_that_is_not_empty_stays(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    out.mkdir()
    (out / "mine").write_text("mine")
    printed = run(checkpoint, out, "--key", "model", "--force", expect=1)
    assert f"cannot write the folder {out}: it exists and is not empty" in printed
    assert [each.name for each in out.iterdir()] == ["mine"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(tl.NotADirectoryError, match="a file has that name"):
        tl.export_checkpoint(checkpoint, f"{tmp_path}/file/", key="model")
    with pytest.raises(ValueError, match="max_shard_size and from_folder are for folders"):
        tl.export_checkpoint(checkpoint, tmp_path / "x.safetensors", max_shard_size="1GB")


def test_an_error_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    before = sorted(each.name for each in tmp_path.iterdir())
    with pytest.raises(tl.Unsupported, match="'step'"):
        tl.export_checkpoint(checkpoint, tmp_path / "folder")
    [shard, *_] = sorted((checkpoint / "step-00000003").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-10] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tl.Corrupt):
        tl.export_checkpoint(checkpoint, tmp_path / "folder", key="model", max_shard_size="45kB")
    with pytest.raises(tl.FileNotFoundError, match="has no config.json"):
        tl.export_checkpoint(checkpoint, tmp_path / "folder", key="model", from_folder=tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == before


def test_what_a_killed_export_left_is_removed(checkpoint: Path, tmp_path: Path) -> None:
    abandoned = tmp_path / f".folder.trunkline-{'0' * 16}.tmp"
    running = tmp_path / f".folder.trunkline-{'1' * 16}.tmp"
    for each in (abandoned, running):
        each.mkdir()
        (each / "model.safetensors").write_text("part")
    descriptor = os.open(running, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        tl.export_checkpoint(checkpoint, tmp_path / "folder", key="model")
    finally:
        os.close(descriptor)
    assert not abandoned.exists()
    assert running.exists()


@pytest.mark.parametrize("kind", ["llama, tied", "qwen3"])
def test_transformers_loads_it(kind: str, tmp_path: Path) -> None:
    models = pytest.importorskip("support_models")
    base = models.make_folder(tmp_path / "base", kind)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"):
        (base / name).write_text("{}")
    for name in ("training_args.bin", "trainer_state.json", "README.md"):
        (base / name).write_text("not this")
    trained = models.make_folder(tmp_path / "trained", kind, seed=1)
    state = {"model": models.stock(trained).state_dict(), "step": 1}
    tl.Checkpointer(tmp_path / "run").save(1, state, block=True)
    out = tmp_path / "out"
    run(tmp_path / "run", out, "--key", "model", "--from", base, "--max-shard-size", "150KB")
    names = {each.name for each in out.iterdir() if not each.name.startswith("model")}
    copied = {"tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"}
    assert names == copied | {"config.json", "generation_config.json"}
    assert len(list(out.glob("model-*.safetensors"))) > 1
    prompt = models.prompt()
    with torch.no_grad():
        wanted = models.stock(trained)(**prompt).logits
        assert torch.equal(models.stock(out)(**prompt).logits, wanted)
        assert torch.equal(tl.transformers.from_pretrained(out)(**prompt).logits, wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
def test_directories_of_dcp(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    dcp.save({"model": weights}, storage_writer=tl.dcp.StorageWriter(tmp_path / "dcp"), no_dist=True)
    tl.export_checkpoint(tmp_path / "dcp", tmp_path / "out", key="model", max_shard_size="45kB")
    loaded = tl.load(tmp_path / "out")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
