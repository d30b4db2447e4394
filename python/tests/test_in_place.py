"""Models whose files are read in place, whatever their alignment, and how that is chosen."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support_log import logged
from support_models import make_folder, pack_directory, prompt, shift, stock

import trunkline as tl
from trunkline._streaming import room

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**prompt()).logits
    return result


def in_place(folder: Path, **options: Any) -> Any:
    return tl.transformers.from_pretrained(folder, **{"memory_budget": "600KB", "pack": False, **options})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_files_of_any_alignment_are_read_in_place(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The bits are those of the stock model, for a batch and for one row, which other kernels compute."""
    folder = make_folder(tmp_path / "model", kind, dtype)
    before = {path.name for path in folder.iterdir()}
    row = torch.arange(7).reshape(1, -1)
    least = tl.stream.plan(folder, bandwidth=1e9, flops=1e12)["least_budget"]
    for nbytes in (8, 62, 61):  # at 61 no view can lie: elements are moved as they are read
        for path in folder.glob("*.safetensors"):
            shift(path, nbytes)
        expected = stock(folder)
        model = in_place(folder, memory_budget=least)
        assert tl.stream.stats(model)["streamed_bytes"] > 0
        assert tl.stream.stats(model)["source"] == str(folder)
        if nbytes % dtype.itemsize:  # a stock model has copies of these, anywhere
            expected = tl.transformers.from_pretrained(folder, memory_budget="600KB")
            assert tl.stream.stats(expected)["source"] != str(folder)
        with torch.no_grad():
            for ids in (row, row[:, :1], prompt()["input_ids"]):
                for _ in range(2):
                    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert {path.name for path in folder.iterdir()} == before


def test_experts_are_read_in_place(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "qwen3-moe")
    stocks = stock(folder)
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    tl.save(stocks.state_dict(), folder / "model.safetensors")  # one tensor for all experts of a layer
    for nbytes in (8, 61):
        shift(folder / "model.safetensors", nbytes)
        model = in_place(folder, memory_budget="400KB")
        assert tl.stream.stats(model)["experts"]["steps"] == 0
        assert torch.equal(logits(model), logits(stocks))


def test_the_default_is_a_pack_and_pack_true_requires_one(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    pack = pack_directory(folder)
    in_place(folder)
    assert not pack.exists()
    for wanted in (None, True):
        model = in_place(folder, pack=wanted)
        assert tl.stream.stats(model)["source"] == str(pack / "weights.safetensors")
    expected = stock(folder)
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    tl.save(expected.state_dict(), folder / "model.safetensors")
    assert tl.stream.stats(in_place(folder, pack=None))["source"] == str(folder)  # aligned
    model = in_place(folder, pack=True)
    assert tl.stream.stats(model)["source"].endswith("/weights.safetensors")
    assert torch.equal(logits(model), logits(expected))


def test_what_cannot_be_read_in_place(tmp_path: Path) -> None:
    mixture = make_folder(tmp_path / "mixture", "mixtral")
    with pytest.raises(tl.Unsupported, match="pack: False, but .*is not stored as such, but converted; omit"):
        in_place(mixture)
    folder = make_folder(tmp_path / "model")
    with pytest.raises(tl.Unsupported, match=r"stored as torch.bfloat16, and used as torch.float32; omit"):
        in_place(folder, dtype=torch.float32)
    with pytest.raises(ValueError, match="pack: False cannot be combined with pack_dir or volumes"):
        in_place(folder, pack_dir=tmp_path / "p")
    with pytest.raises(TypeError, match="pack: must be True, False or None, not str"):
        in_place(folder, pack="yes")


def limit_room(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let filesystems have so many free bytes."""
    status = os.statvfs("/")
    free = nbytes // status.f_frsize

    class Status:
        f_bavail = free
        f_frsize = status.f_frsize

    monkeypatch.setattr(room.os, "statvfs", lambda path: Status)


def test_without_room_for_a_pack_the_files_are_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_folder(tmp_path / "model")
    monkeypatch.setenv("TRUNKLINE_CACHE", str(tmp_path / "cache"))
    limit_room(monkeypatch, 100_000)
    with logged(caplog) as records:
        model = in_place(folder, pack=None)
    assert tl.stream.stats(model)["source"] == str(folder)
    assert torch.equal(logits(model), logits(stock(folder)))
    [line] = [record for record in records if "read in place instead" in record]
    assert line.startswith(f"WARNING transformers: cannot make a pack of {folder}: it needs ")
    assert not (tmp_path / "cache").exists()


def test_a_pack_that_is_required_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before anything is written."""
    folder = make_folder(tmp_path / "model")
    monkeypatch.setenv("TRUNKLINE_CACHE", str(tmp_path / "cache"))
    disks = [tmp_path / "a", tmp_path / "b"]
    limit_room(monkeypatch, 100_000)
    free = 100_000 // os.statvfs("/").f_frsize * os.statvfs("/").f_frsize
    calls: list[Any] = [
        lambda: in_place(folder, pack=True),
        lambda: in_place(folder, pack=None, pack_dir=tmp_path / "a"),
        lambda: in_place(folder, pack=None, volumes=disks),
        lambda: tl.transformers.pack(folder),
        lambda: tl.transformers.pack(folder, disks),
    ]
    for call in calls:
        with pytest.raises(
            tl.Error, match=rf"it needs \d+ bytes .* where {free} bytes .* are free; choose"
        ) as e:
            call()
        assert e.value.errno == 28  # ENOSPC
        assert type(e.value).__name__ == "Error"
        assert str(e.value).endswith("or pass pack=False to read the model's files in place")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    mixture = make_folder(tmp_path / "mixture", "mixtral")
    with pytest.raises(tl.Error, match="this model cannot be read in place: .* converted") as caught:
        in_place(mixture, pack=None)
    assert "pack=False" not in str(caught.value)


def test_the_pack_before_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "model", dtype=torch.float32)
    made = tl.transformers.pack(folder, [tmp_path / "a"])
    limit_room(monkeypatch, 0)
    again = tl.transformers.pack(folder, [tmp_path / "a"], dtype=torch.bfloat16)  # half the size
    assert again["made"]
    assert again["bytes"] < made["bytes"]
    with pytest.raises(tl.Error, match="cannot make a pack"):
        tl.transformers.pack(folder, [tmp_path / "a"], dtype=torch.float32)
