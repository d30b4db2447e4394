"""iter_tensors: all tensors in their order, read ahead in bounded memory."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

import trunkline as tl
from trunkline._core import parse_size
from trunkline._formats.safetensors import read_header
from trunkline._formats.safetensors.read_ahead import batches_of

KIB = 1 << 10
MIB = 1 << 20


def make_tensors(seed: int, count: int = 40) -> dict[str, torch.Tensor]:
    """Small and large ones, of several dtypes, one without elements."""
    generator = torch.Generator().manual_seed(seed)
    made = {f"{seed}.empty": torch.empty(0, 3)}
    for number in range(count):
        size = [1, 77, 5000, 300_000, 700_000][number % 5]
        dtype = [torch.float32, torch.bfloat16, torch.uint8][number % 3]
        made[f"{seed}.{number}"] = torch.randint(0, 200, (size,), generator=generator).to(dtype)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two files with an index, the second with checksums."""
    files = {"model-1.safetensors": make_tensors(1), "model-2.safetensors": make_tensors(2)}
    safetensors.torch.save_file(files["model-1.safetensors"], tmp_path / "model-1.safetensors")
    tl.save(files["model-2.safetensors"], tmp_path / "model-2.safetensors")
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


EXPECTED = make_tensors(1) | make_tensors(2)


def read_bytes(engine: tl.Engine) -> int:
    read: dict[str, int] = engine.stats()["bytes"]  # type: ignore[assignment]
    return sum(read.values())


def drop_from_cache(folder: Path) -> None:
    """What is in the page cache is not read by an engine."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def order_in(*files: Path) -> list[str]:
    return [stored.name for file in files for stored in read_header(file).tensors]


@pytest.mark.parametrize("memory", [1, "100KiB", "8MiB", "1GiB"])
def test_all_tensors_come_in_the_order_of_their_bytes(folder: Path, memory: int | str) -> None:
    found = list(tl.iter_tensors(folder, memory_bytes=memory))
    assert [name for name, _ in found] == order_in(*sorted(folder.glob("*.safetensors")))
    assert len(found) == len(EXPECTED)
    for name, tensor in found:
        assert tensor.dtype is EXPECTED[name].dtype
        assert torch.equal(tensor, EXPECTED[name])


def test_files_are_read_in_the_order_of_the_list(folder: Path) -> None:
    files = [folder / "model-2.safetensors", folder / "model-1.safetensors"]
    assert [name for name, _ in tl.iter_tensors(files)] == order_in(*files)


def test_only_selected_tensors_come(folder: Path) -> None:
    found = dict(tl.iter_tensors(folder, keys=["1.3", "2.4"]))
    assert found.keys() == {"1.3", "2.4"}
    with pytest.raises(ValueError, match=r"keys: .*1\.99"):
        tl.iter_tensors(folder, keys="1.99")


@pytest.mark.parametrize("batch_bytes", [1, 10 * KIB, MIB, 1 << 40])
def test_batches_have_all_tensors_and_at_most_so_many_bytes(folder: Path, batch_bytes: int) -> None:
    headers = [read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    batches = batches_of(headers, batch_bytes)
    assert [each.name for batch in batches for each in batch.header.tensors] == [
        each.name for header in headers for each in header.tensors
    ]
    assert all(batch.nbytes <= batch_bytes or len(batch.header.tensors) == 1 for batch in batches)
    assert all(batch.header.path == headers[batch.file].path for batch in batches)


def test_no_more_is_read_ahead_than_the_memory_allows(folder: Path) -> None:
    """While the first tensor is used, the rest waits."""
    memory = parse_size("4MiB", "memory")
    drop_from_cache(folder)
    with tl.Engine() as engine:
        tensors = tl.iter_tensors(folder, memory_bytes=memory, engine=engine)
        next(tensors)
        time.sleep(0.3)
        read = read_bytes(engine)
        assert (
            0 < read <= memory + len(EXPECTED) * 2 * 4096 + 2 * MIB
        )  # headers, and ends of blocks and chunks
        for _ in tensors:
            pass
        assert read_bytes(engine) > 2 * memory


def test_an_iterator_that_is_dropped_leaves_no_thread_and_no_open_file(folder: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for consumed in (0, 1, 30):
        tensors = tl.iter_tensors(folder, memory_bytes="1MiB")
        for _ in range(consumed):
            next(tensors)
        del tensors
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before


def test_damage_is_found_where_the_tensor_would_come(folder: Path) -> None:
    second = folder / "model-2.safetensors"
    with second.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([EXPECTED[order_in(second)[-1]].view(torch.uint8).tolist()[-1] ^ 1]))
    found: dict[str, torch.Tensor] = {}
    with pytest.raises(tl.Corrupt, match=r"model-2\.safetensors is corrupt: chunk"):
        found.update(tl.iter_tensors(folder, memory_bytes="1MiB"))
    assert len(found) > len(make_tensors(1))
    assert all(torch.equal(tensor, EXPECTED[name]) for name, tensor in found.items())
    assert len(dict(tl.iter_tensors(folder, verify=False))) == len(EXPECTED)
    with pytest.raises(tl.Format, match="has no checksums"):
        list(tl.iter_tensors(folder, verify=True))


def test_a_failed_read_ends_the_iteration_with_its_error(folder: Path, faults: tl.Faults) -> None:
    drop_from_cache(folder)
    with tl.Engine(faults=faults) as engine:
        tensors = tl.iter_tensors(folder, memory_bytes="1MiB", engine=engine)
        next(tensors)
        faults.fail("read", faults.commands("read") + 3, errno.EIO)
        with pytest.raises(OSError, match="model-") as error:
            list(tensors)
        assert error.value.errno == errno.EIO


def test_what_cannot_be_read_is_an_error_at_once(tmp_path: Path) -> None:
    tl.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(
        tl.Unsupported, match=r"a\.pt: iter_tensors reads \.safetensors files; use trunkline\.load"
    ):
        tl.iter_tensors(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError, match="none"):
        tl.iter_tensors(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="path: the list is empty"):
        tl.iter_tensors([])
    with pytest.raises(ValueError, match="verify: must be"):
        tl.iter_tensors(tmp_path / "a.safetensors", verify="yes")  # type: ignore[arg-type]


def test_tensors_of_inference_mode_and_another_default_device_are_ordinary(folder: Path) -> None:
    with torch.inference_mode(), torch.device("meta"):
        found = dict(tl.iter_tensors(folder, memory_bytes="1MiB"))
    assert not any(tensor.is_inference() or tensor.is_meta for tensor in found.values())
