"""Checkpoints of trunkline.dcp that go out again: to one file of torch, and with the command line."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import support_warm
import torch
import torch.distributed.checkpoint as dcp
from support_dcp import assert_same, nested, numbers, save, shards
from test_dcp_ranks import run_ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import trunkline as tl
from trunkline._export.stored import SourceFile
from trunkline.dcp.stored_state import Box, Boxes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def export(*arguments: "str | Path", expect: int = 0) -> dict[str, Any]:
    """Run `trunkline checkpoint export`; return its document."""
    command = ["-m", "trunkline", "checkpoint", "export", *arguments, "--json"]
    result = support_warm.run(command, modules=support_warm.TORCH_DCP)
    assert result.returncode == expect, result.stdout + result.stderr
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_what_torch_writes_of_its_own_format_is_what_we_write_of_ours(tmp_path: Path) -> None:
    state = nested(3)
    save(state, tmp_path / "ours")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    dcp_to_torch_save(tmp_path / "theirs", tmp_path / "theirs.pt")
    tl.dcp.to_torch_save(tmp_path / "ours", tmp_path / "ours.pt")
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert_same(ours, torch.load(tmp_path / "theirs.pt", weights_only=True))
    assert_same(ours, state)
    tl.dcp.to_torch_save(tmp_path / "ours", tmp_path / "model.pt", key="model")
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), state["model"])
    # And back, with torch's own function, to a directory of its format.
    torch_save_to_dcp(tmp_path / "ours.pt", tmp_path / "again")
    dcp_to_torch_save(tmp_path / "again", tmp_path / "again.pt")
    assert_same(torch.load(tmp_path / "again.pt", weights_only=True), state)


def test_errors_say_what_to_use_instead(tmp_path: Path) -> None:
    save(nested(1), tmp_path / "ours")
    with pytest.raises(tl.FileNotFoundError, match=r"trunkline\.dcp\.to_torch_save"):
        tl.load(tmp_path / "ours")
    dcp.save({"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    error = export(tmp_path / "theirs", tmp_path / "out.pt", expect=1)["error"]
    assert "torch's FileSystemWriter wrote it" in error["message"]
    assert "dcp_to_torch_save" in error["message"]
    with pytest.raises(tl.FileNotFoundError, match="holds no checkpoint"):
        tl.dcp.to_torch_save(tmp_path / "theirs", tmp_path / "out.pt")
    with pytest.raises(ValueError, match="has no 'modle'; there are 'model', 'optimizer'"):
        tl.dcp.to_torch_save(tmp_path / "ours", tmp_path / "out.pt", key="modle")
    (tmp_path / "taken.pt").touch()
    with pytest.raises(FileExistsError, match="exists already"):
        tl.dcp.to_torch_save(tmp_path / "ours", tmp_path / "taken.pt")


def test_tensors_of_many_ranks_become_whole(tmp_path: Path) -> None:
    run_ranks(tmp_path, "write_first/4")
    tl.dcp.to_torch_save(tmp_path / "ckpt", tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    reference = torch.load(tmp_path / "reference.pt")
    assert_same(loaded["model"], reference["model"])
    assert_same(loaded["optimizer"], reference["optimizer"])
    assert (loaded["step"], loaded["names"]) == (3, ["a", "b"])
    dcp_ranks = pytest.importorskip("dcp_ranks")
    for name, value in loaded["odd"].items():
        seed = int(name.partition(".")[0])
        assert torch.equal(value, numbers(*dcp_ranks.shapes()[seed], seed=seed)), name
    done = export(tmp_path / "ckpt", tmp_path / "model.safetensors", "--key", "model")
    assert done["verified"] is True
    assert_same(safetensors.torch.load_file(tmp_path / "model.safetensors"), reference["model"])


def boxes_of(shape: list[int], draw: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into boxes along each dimension."""
    cuts = [sorted({0, extent, *(draw.randint(0, extent) for _ in range(2))}) for extent in shape]
    spans = [list(itertools.pairwise(each)) for each in cuts]
    return [
        (tuple(begin for begin, _ in each), tuple(end - begin for begin, end in each))
        for each in itertools.product(*spans)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_any_boxes_and_any_window(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randint(1, 7) for _ in range(draw.randint(0, 4))]
    whole = numpy.arange(int(numpy.prod(shape)) * 4, dtype=numpy.uint32).view(numpy.uint8)
    whole = whole[: int(numpy.prod(shape)) * 4]
    array = whole.view(numpy.uint32).reshape(shape)
    data = b""
    boxes = []
    file = SourceFile("file", 0, 1 << 20, [])
    for offsets, sizes in boxes_of(shape, draw):
        part = array[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        boxes.append(Box(offsets, sizes, file, len(data)))
        data += part.tobytes()
    stored = Boxes(shape, 4, boxes)
    assert (stored.nbytes, stored.has_gaps) == (whole.nbytes, False)
    for _ in range(20):
        begin, end = sorted(draw.randint(0, whole.nbytes) for _ in range(2))
        found = numpy.zeros(end - begin, numpy.uint8)
        covered = 0
        for runs in stored.runs(begin, end):
            for at, offset, nbytes in zip(runs.at, runs.begin, runs.nbytes, strict=True):
                found[at - begin : at - begin + nbytes] = numpy.frombuffer(data, numpy.uint8, nbytes, offset)
                covered += nbytes
        assert covered == end - begin
        assert numpy.array_equal(found, whole[begin:end])


class Custom:
    """What weights_only does not allow."""


def test_objects_of_other_types_are_refused_by_name(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(3)}, "extra": Custom()}, tmp_path / "ckpt")
    with pytest.raises(tl.Unsupported, match=r"the object 'extra' is of a type .*add_safe_globals"):
        tl.dcp.to_torch_save(tmp_path / "ckpt", tmp_path / "all.pt")
    tl.dcp.to_torch_save(tmp_path / "ckpt", tmp_path / "model.pt", key="model")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)["w"], torch.ones(3))


def test_damage_is_found_and_leaves_nothing(tmp_path: Path) -> None:
    save({"a": numbers(1000, 1000), "b": torch.ones(5)}, tmp_path / "ckpt")
    (shard,) = shards(tmp_path / "ckpt")
    data = bytearray(shard.read_bytes())
    data[2 << 20] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tl.Corrupt, match=f"{shard} is corrupt: chunk 2 .*, of the tensor 'a'"):
        tl.dcp.to_torch_save(tmp_path / "ckpt", tmp_path / "all.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["ckpt"]


def test_a_part_of_one_rank_is_refused(tmp_path: Path) -> None:
    run_ranks(tmp_path, "save_apart/2/1")
    (directory,) = {each.parent for each in tmp_path.rglob("dcp-rank00000.manifest")}
    with pytest.raises(tl.Unsupported, match="use_collectives=False"):
        tl.dcp.to_torch_save(directory, tmp_path / "all.pt")
