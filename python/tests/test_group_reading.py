"""Ranks that read files together: the same tensors as alone, and each byte is read once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch
from group_read_ranks import digest

import trunkline as tl
from trunkline._formats.safetensors import Header, StoredTensor
from trunkline._formats.safetensors.pieces import cut

HERE = Path(__file__).resolve().parent
SECONDS = 120.0
MIB = 1 << 20


def make_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of several dtypes and sizes, some larger than a piece, one without elements."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(3, 5), (0, 7), (1_300_000,), (), (40, 1000), (2_000_001,), (900, 1001), (1,)]
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
    return {
        f"{seed}.{number}": torch.randint(0, 200, size, generator=generator).to(dtypes[number % 4])
        for number, size in enumerate(sizes * 2)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two files with an index."""
    weight_map: dict[str, str] = {}
    for seed in (1, 2):
        tensors = make_tensors(seed)
        tl.save(tensors, tmp_path / f"model-{seed}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{seed}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for path in tmp_path.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return tmp_path


def run(case: str, folder: Path, size: int, machines: tuple[int, ...] = ()) -> list[Any]:
    """What each rank has printed. `machines`: by rank; those on machine 0 share memory, others do not."""
    store = folder / f"store-{uuid.uuid4().hex}"
    ranks = []
    for rank in range(size):
        script = str(HERE / "group_read_ranks.py")
        command = [sys.executable, script, str(rank), str(size), str(store), case, str(folder)]
        if machines and machines[rank]:
            command = ["unshare", "--pid", "--fork", "--mount-proc", *command]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    printed = [each.communicate(timeout=SECONDS) for each in ranks]
    for output, errors in printed:
        assert output, errors[-3000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in printed]


def can_unshare() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    command = [unshare, "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("machines", [(), (0, 0, 1)], ids=["one machine", "two machines"])
def test_all_ranks_get_all_tensors_and_each_reads_its_share(folder: Path, machines: tuple[int, ...]) -> None:
    if machines and not can_unshare():
        pytest.skip("needs the right to make namespaces (root)")
    results = run("all", folder, 3, machines)
    assert [found for found, _ in results] == [digest(tl.iter_tensors(folder))] * 3
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    share = total / 3
    for _, nbytes in results:  # headers and ends of blocks are read as well; a piece more or less
        assert share - 2.1 * MIB < nbytes < share + 2.5 * MIB


def test_load_returns_what_it_returns_alone(folder: Path) -> None:
    alone = tl.load(folder, dtype="float32"), tl.load(folder, keys="1")
    expected = [digest(sorted(each.items())) for each in alone]
    assert run("load", folder, 2) == [expected] * 2


def test_two_iterators_of_one_group_do_not_meet(folder: Path) -> None:
    expected = digest(tl.iter_tensors(folder))
    assert run("two at a time", folder, 2) == [[expected, expected]] * 2


def test_ranks_with_other_files_raise(folder: Path) -> None:
    for rank, result in enumerate(run("other files", folder, 2)):
        assert result["error"] == "RankError"
        assert f"rank {1 - rank} reads other files or tensors than rank {rank}" in result["text"]


def test_ctrl_c_ends_the_wait_for_a_rank_that_has_not_come(folder: Path) -> None:
    expected = digest(sorted(tl.load(folder).items()))
    assert run("interrupted", folder, 2) == [[expected] * 2] * 2


def test_a_rank_that_never_comes_is_named(folder: Path) -> None:
    first, second = run("never comes", folder, 2)
    assert second == "did not call"
    assert first["error"] == "RankError"
    assert "rank 1 did not come to the call that reads files together within 2 s" in first["text"]


def make_versions(folder: Path) -> list[Path]:
    """Two files of the safetensors library, with equal headers and other data."""
    paths = [folder / f"version-{number}" / "model.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        path.parent.mkdir()
        safetensors.torch.save_file({"a": torch.full((3 * MIB,), float(number))}, path)
    return paths


def test_ranks_with_other_versions_of_a_file_raise(tmp_path: Path) -> None:
    make_versions(tmp_path)
    for rank, result in enumerate(run("other versions", tmp_path, 2)):
        assert result["error"] == "RankError"
        assert f"rank {1 - rank} may read other data than rank {rank}" in result["text"]


def test_files_with_the_same_times_on_one_filesystem_are_not_the_same(tmp_path: Path) -> None:
    one, other = make_versions(tmp_path)
    os.utime(other, ns=(0, one.stat().st_mtime_ns))
    assert {each["error"] for each in run("other versions", tmp_path, 2)} == {"RankError"}


def test_ranks_read_one_file_by_two_names(tmp_path: Path) -> None:
    one, other = make_versions(tmp_path)
    other.unlink()
    os.link(one, other)
    assert run("other versions", tmp_path, 2) == [digest(tl.iter_tensors(one))] * 2


def test_an_error_of_one_rank_is_an_error_of_all(folder: Path) -> None:
    first, second = run("missing on one", folder, 2)
    assert second["error"] == "FileNotFoundError"
    assert first["error"] == "RankError"
    assert "rank 1 failed: " in first["text"]
    assert "none.safetensors" in first["text"]


def test_a_folder_that_one_rank_does_not_see_is_an_error_of_all_at_once(folder: Path) -> None:
    first, second = run("no folder on one", folder, 2)
    assert (first["error"], second["error"]) == ("RankError", "FileNotFoundError")
    assert "rank 1 failed: " in first["text"]


def test_damage_is_an_error_of_all_ranks(folder: Path) -> None:
    with (folder / "model-2.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    results = run("all", folder, 3)
    assert sorted(each["error"] for each in results) == ["Corrupt", "RankError", "RankError"]
    assert all("model-2.safetensors is corrupt: chunk" in each["text"] for each in results)


def test_a_rank_that_ends_its_loop_early_is_an_error_of_the_others(folder: Path) -> None:
    first, second = run("ends early", folder, 2)
    assert second == "ended"
    assert first["error"] == "RankError"
    assert "rank 1 failed" in first["text"]
    assert "ended early" in first["text"]


def test_a_rank_that_dies_is_an_error_of_the_others(folder: Path) -> None:
    first, second = run("dies", folder, 2)
    assert second == "dead"
    assert first["error"] == "RankError"


def make_pt(path: Path, save: Any = tl.save) -> dict[str, Any]:
    """A file with large and small storages, one shared by two tensors, and other values."""
    tensors = make_tensors(3) | make_tensors(4)
    shared = torch.arange(700_000, dtype=torch.float64)
    state = {
        "model": tensors,
        "whole": shared,
        "part": shared[5:9000],
        "small": [torch.full((number,), number) for number in range(200)],
        "step": 7,
    }
    save(state, path)
    return state


def pt_digest(state: dict[str, Any]) -> str:
    flat = [*state["model"].items(), ("whole", state["whole"]), ("part", state["part"])]
    return digest([*flat, *((str(number), tensor) for number, tensor in enumerate(state["small"]))])


@pytest.mark.parametrize("machines", [(), (0, 0, 1)], ids=["one machine", "two machines"])
@pytest.mark.parametrize("save", [tl.save, torch.save], ids=["trunkline", "torch"])
def test_pt_files_are_read_together(tmp_path: Path, machines: tuple[int, ...], save: Any) -> None:
    if machines and not can_unshare():
        pytest.skip("needs the right to make namespaces (root)")
    state = make_pt(tmp_path / "model.pt", save)
    results = run("pt", tmp_path, 3, machines)
    assert [found for found, _ in results] == [[pt_digest(state), True, 7]] * 3
    share = (tmp_path / "model.pt").stat().st_size / 3
    for _, nbytes in results:  # the directory and the pickle, which all read, are in the last MiB
        assert share - 1.1 * MIB < nbytes < share + 2.5 * MIB


def test_parts_of_pt_files_are_read_together(tmp_path: Path) -> None:
    state = make_pt(tmp_path / "model.pt")
    assert run("part of pt", tmp_path, 2) == [digest(state["model"].items())] * 2


def test_a_pt_file_with_other_objects_is_loaded_by_all_ranks(tmp_path: Path) -> None:
    """Its pickle does more than build tensors."""
    parameter = torch.nn.Parameter(torch.arange(300_000.0))
    values = {"a": parameter, "b": torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True)}
    torch.save(values, tmp_path / "model.pt")
    assert run("pt of objects", tmp_path, 2) == [[digest([("a", parameter.detach())]), [1.0, 0.0, 2.0]]] * 2


def test_damage_of_a_pt_file_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    make_pt(path)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"!?!?")
    results = run("pt", tmp_path, 3)
    assert [each["error"] for each in results] == ["Corrupt"] * 3
    assert all("model.pt: the bytes of tensor" in each["text"] for each in results)


def test_ranks_with_other_pt_files_raise(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"version-{number}").mkdir()
        tl.save({"a": torch.full((3 * MIB,), float(number))}, tmp_path / f"version-{number}" / "model.pt")
    for rank, result in enumerate(run("other pt", tmp_path, 2)):
        assert result["error"] == "RankError"
        assert f"rank {1 - rank} reads other files or tensors than rank {rank}" in result["text"]


def test_a_pt_file_without_checksums_must_be_the_same_on_all_ranks(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        for number in range(2):
            (tmp_path / f"version-{number}").mkdir()
            torch.save({"a": torch.full((MIB,), float(number))}, tmp_path / f"version-{number}" / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    for rank, result in enumerate(run("other pt", tmp_path, 2)):
        assert result["error"] == "RankError"
        assert f"rank {1 - rank} may read other data than rank {rank}" in result["text"]


def test_a_pt_file_that_one_rank_cannot_load_is_an_error_of_all(tmp_path: Path) -> None:
    make_pt(tmp_path / "model.pt")
    first, second = run("pt missing on one", tmp_path, 2)
    assert (first["error"], second["error"]) == ("RankError", "FileNotFoundError")
    assert "rank 1 failed: " in first["text"]


def test_a_rank_without_memory_is_an_error_of_all(tmp_path: Path) -> None:
    """It fails when it copies a piece, and the next read of the group is in step again."""
    state = make_pt(tmp_path / "model.pt")
    for rank, (text, after) in enumerate(run("pt fails in use", tmp_path, 2)):
        assert ("no memory" if rank else "rank 1 failed, which reads files with rank 0: no memory") in text
        assert after == pt_digest(state)


def test_the_group_is_checked(tmp_path: Path) -> None:
    tl.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    for path in (tmp_path / "a.pt", make_file(tmp_path)):
        with pytest.raises(TypeError, match=r"group: must be a torch.distributed.ProcessGroup"):
            tl.load(path, group=object())  # type: ignore[call-overload]
    with pytest.raises(tl.Unsupported, match=r"iter_tensors reads \.safetensors files"):
        tl.iter_tensors(tmp_path / "a.pt")


def make_file(folder: Path) -> Path:
    tl.save({"a": torch.ones(2)}, folder / "a.safetensors")
    return folder / "a.safetensors"


@pytest.mark.parametrize("seed", range(50))
def test_pieces_have_each_byte_of_each_tensor_once(seed: int) -> None:
    random = Random(seed)
    head = random.randrange(8, 100)
    grain = random.choice([1, 16])
    tensors, position = [], head
    for number in range(random.randrange(1, 30)):
        position += random.choice([0, 0, 3, 50])
        size = random.choice([0, 1, 10, 100, 300])
        tensors.append(StoredTensor(str(number), "U8", (size,), position, position + size))
        position += size
    header = Header("file", position + random.choice([0, 5]), bytes(head), {}, tensors, None)
    pieces = cut([header, header], 64, 16, [grain, grain])
    filled = [[False] * (each.end - each.begin) for each in tensors * 2]
    before: dict[int, int] = {}
    for piece in pieces:
        assert head <= piece.begin < piece.end <= header.file_bytes
        assert piece.nbytes <= 64 + 2 * grain
        assert (piece.begin - head) % grain == 0
        assert (piece.end - head) % grain == 0 or piece.end == header.file_bytes
        assert piece.begin >= before.get(piece.file, 0) or grain > 1
        before[piece.file] = piece.end
        for part in piece.parts:
            stored = tensors[part.tensor % len(tensors)]
            assert piece.file == part.tensor // len(tensors)
            assert stored.begin + part.begin == piece.begin + part.at
            assert part.at + part.nbytes <= piece.nbytes
            for at in range(part.begin, part.begin + part.nbytes):
                assert not filled[part.tensor][at]
                filled[part.tensor][at] = True
    assert all(all(each) for each in filled)
