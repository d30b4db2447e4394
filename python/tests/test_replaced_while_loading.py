"""Files that are replaced while they are loaded: what is loaded is of one moment."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import trunkline as tl
from trunkline._formats.pt import loader as pt_loader
from trunkline._formats.safetensors import folder as safetensors_folder
from trunkline._formats.safetensors import loader as safetensors_loader


def stock_file(path: Path, **tensors: torch.Tensor) -> None:
    """Write a file without checksums, in the given order."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


ONES, TWOS = torch.ones(1000), torch.full((1000,), 2.0)


def test_a_file_that_is_replaced_before_it_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    load_files = safetensors_loader.load_files
    loads = []

    def load_late(*args: Any, **options: Any) -> Any:
        loads.append(1)
        if len(loads) <= replacements:
            stock_file(other, b=TWOS, a=ONES)
            other.replace(path)
        return load_files(*args, **options)

    monkeypatch.setattr(safetensors_loader, "load_files", load_late)
    for replacements in (1, 3):
        loads.clear()
        stock_file(path, a=ONES, b=TWOS)
        loaded = tl.load(path, mmap=True)
        assert len(loads) == replacements + 1
        assert torch.equal(loaded["a"], ONES)
        assert torch.equal(loaded["b"], TWOS)
    replacements = 100
    loads.clear()
    with pytest.raises(tl.Error, match=f"{path} was replaced while it was loaded") as caught:
        tl.load(path, mmap=True)
    assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("moment", range(3))
def test_a_folder_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mmap: bool, moment: int
) -> None:
    folder, renewed = tmp_path / "export", tmp_path / "renewed"
    for value, path in (1.0, folder), (2.0, renewed):
        path.mkdir()
        weight_map = {}
        for index in range(3):
            weight_map[f"t{index}"] = name = f"model-{index}.safetensors"
            stock_file(path / name, **{f"t{index}": torch.full((1000,), value)})
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    header_of, opened = safetensors_folder.header_of, []

    def header_late(*args: Any) -> Any:
        opened.append(args)
        if len(opened) == moment + 1:
            folder.rename(tmp_path / "old")
            renewed.rename(folder)
        return header_of(*args)

    monkeypatch.setattr(safetensors_folder, "header_of", header_late)
    loaded = tl.load(folder, mmap=mmap)
    assert len(opened) == 6
    for index in range(3):
        assert torch.equal(loaded[f"t{index}"], torch.full((1000,), 2.0)), index


def read_all(path: Path, way: str) -> dict[str, torch.Tensor]:
    return dict(tl.iter_tensors(path)) if way == "iter_tensors" else tl.load(path)


@pytest.mark.parametrize("way", ["load", "iter_tensors"])
def test_a_file_that_is_overwritten_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    path = tmp_path / "model.safetensors"
    stock_file(path, a=ONES, b=ONES)
    target = safetensors_loader._target

    def target_late(*args: Any) -> Any:
        with path.open("r+b") as file:
            file.seek(-TWOS.nbytes, 2)
            file.write(TWOS.numpy().tobytes())
        return target(*args)

    with monkeypatch.context() as patched:
        patched.setattr(safetensors_loader, "_target", target_late)
        with pytest.raises(tl.Error, match="was written to while it was loaded") as caught:
            read_all(path, way)
        assert caught.value.errno == errno.ESTALE
        assert caught.value.filename == str(path)
    assert torch.equal(read_all(path, way)["b"], TWOS)


def test_a_file_that_is_overwritten_in_place_with_its_times_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    stock_file(path, a=ONES, b=ONES)
    target = safetensors_loader._target

    def target_late(*args: Any) -> Any:
        times = path.stat()
        with path.open("r+b") as file:
            file.seek(-TWOS.nbytes, 2)
            file.write(TWOS.numpy().tobytes())
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return target(*args)

    monkeypatch.setattr(safetensors_loader, "_target", target_late)
    with pytest.raises(tl.Error, match="was written to while it was loaded"):
        tl.load(path)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_an_open_file_that_is_overwritten_in_place(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch.save({"a": ONES, "b": ONES}, path)
    else:
        stock_file(path, a=ONES, b=ONES)
    with tl.open_tensors(path, verify=False) as tensors:
        assert torch.equal(tensors["a"], ONES)
        assert torch.equal(tensors.get_slice("a")[5:7], ONES[5:7])
        os.link(path, tmp_path / "link")  # changes no bytes
        assert torch.equal(tensors["b"], ONES)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"1234")
        with pytest.raises(tl.Error, match="was written to while it was loaded"):
            tensors["a"]
        with pytest.raises(tl.Error, match="was written to while it was loaded"):
            tensors.get_slice("a")[5:7]


def test_a_pt_file_that_is_overwritten_in_place_and_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": ONES}, path)
    fill = pt_loader.fill

    def fill_late(*args: Any, **options: Any) -> None:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"1234")
        fill(*args, **options)

    monkeypatch.setattr(pt_loader, "fill", fill_late)
    with pytest.raises(tl.Error, match="was written to while it was loaded") as caught:
        tl.load(path, verify=False)
    assert caught.value.errno == errno.ESTALE
