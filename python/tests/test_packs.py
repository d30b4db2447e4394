"""Packs: making one never destroys existing files, whichever process makes it, and however that ends."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_forked import exit_codes, start_code
from support_models import make_folder, pack_directory, prompt, shift, stock, stored_model_of

import trunkline as tl
from trunkline._streaming import location as pack_location
from trunkline._streaming import pack as packing
from trunkline._streaming.location import PackLocation
from trunkline._streaming.stored import FileTensor
from trunkline._streaming.streaming import streaming_of
from trunkline.transformers import _packing, meta_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WEIGHTS = "weights.safetensors"


def contents(*directories: Path) -> dict[Path, bytes]:
    """Return all files in the directories."""
    return {path: path.read_bytes() for each in directories for path in each.rglob("*") if path.is_file()}


def made(folder: Path, directories: Sequence[Path]) -> bool:
    """Pack; return whether that was needed."""
    result: bool = tl.transformers.pack(folder, directories)["made"]
    return result


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**prompt()).logits
    return result


def is_right(folder: Path, directories: Sequence[Path]) -> bool:
    model = tl.transformers.from_pretrained(folder, memory_budget="400KB", volumes=directories)
    return torch.equal(logits(model), logits(stock(folder)))


def refused(folder: Path, directories: Sequence[Path], named: Path, at: Sequence[Path]) -> None:
    """Packing raises EEXIST, which names a file or directory, and changes nothing in the directories `at`."""
    before = contents(*at)
    with pytest.raises(FileExistsError, match="use (another|a separate) directory") as caught:
        tl.transformers.pack(folder, directories)
    assert str(caught.value.filename).startswith(str(named))
    assert contents(*at) == before


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in "abs"]
    for directory in made:
        directory.mkdir()
    return made


@pytest.mark.parametrize("count", [1, 3])
def test_a_pack_is_no_more_readable_than_the_weights(folder: Path, disks: list[Path], count: int) -> None:
    before = os.umask(0o022)
    try:
        for path in folder.glob("*.safetensors"):
            path.chmod(0o640)
        tl.transformers.pack(folder, disks[:count])
    finally:
        os.umask(before)
    members = [
        path for disk in disks[:count] for path in disk.glob(f"{WEIGHTS}*") if path.suffix != ".stripe"
    ]
    assert len(members) == count
    assert [path.stat().st_mode & 0o777 for path in members] == count * [0o640]


@pytest.mark.parametrize(("others", "expected"), [(0o640, 0o600), (0o644, 0o644)])
def test_a_pack_is_not_readable_by_a_group_that_may_not_read_the_weights(
    folder: Path, disks: list[Path], others: int, expected: int
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files to another group")
    before = os.umask(0o022)
    try:
        for path in folder.glob("*.safetensors"):
            os.chown(path, -1, 6001)
            path.chmod(others)
        tl.transformers.pack(folder, disks[:1])
    finally:
        os.umask(before)
    assert (disks[0] / WEIGHTS).stat().st_mode & 0o777 == expected


def test_striped_files_of_others_are_never_replaced(folder: Path, disks: list[Path]) -> None:
    a, b, s = disks
    # Of one stripe, which lies in the first directory only, and of several.
    for nbytes in (1000, 3 << 20):
        volume = tl.Volume([str(a), str(b)])
        with volume.open(WEIGHTS, "w") as file:
            file.pwrite(b"precious" * (nbytes // 8), 0)
        for directories, named in (([a, b], a), ([b, a], b), ([a, s], a), ([s, b], b), ([b], b), ([a], a)):
            refused(folder, directories, named, disks)
        with volume.open(WEIGHTS) as file:
            read = bytearray(file.size)
            file.pread(read, 0)
            assert read == b"precious" * (nbytes // 8)
        volume.remove(WEIGHTS)
    save_file({"mine": torch.ones(3)}, b / f"{WEIGHTS}.1")
    refused(folder, [a, b], b, disks)
    (b / f"{WEIGHTS}.1").unlink()
    assert made(folder, [a, b])
    assert not made(folder, [a, b])
    assert is_right(folder, [a, b])


def test_a_directory_that_has_lost_its_part_of_a_pack_is_named(folder: Path, disks: list[Path]) -> None:
    a, b, _ = disks
    assert made(folder, [a, b])
    for each in b.iterdir():
        each.unlink()
    with pytest.raises(
        FileExistsError, match=f"several directories, of which {b} has no part: that is another"
    ):
        made(folder, [a, b])


def test_a_directory_holds_one_pack_however_it_is_combined(
    folder: Path, disks: list[Path], tmp_path: Path
) -> None:
    a, b, s = disks
    other = make_folder(tmp_path / "other", "qwen3")
    assert made(folder, [a, s])
    for directories, named in (([b, s], s), ([s, b], s), ([s, a], a), ([s], s), ([b, a], a), ([a, s], a)):
        refused(other, directories, named, disks)
    # The same model in another arrangement is as much in the way.
    for directories, named in (([b, s], s), ([s, a], a), ([s], s), ([a, b], a)):
        refused(folder, directories, named, disks)
    assert not made(folder, [a, s])
    assert made(other, [b])
    refused(folder, [s, b], b, disks)
    assert is_right(folder, [a, s])
    assert is_right(other, [b])


def test_a_pack_that_changes_its_arrangement_leaves_nothing_behind(
    folder: Path, disks: list[Path], tmp_path: Path
) -> None:
    a, b, _ = disks
    assert made(folder, [a])
    assert made(folder, [a, b])
    assert not (a / WEIGHTS).exists()
    assert is_right(folder, [a, b])
    assert made(folder, [a])
    assert sorted(path.name for path in contents(a, b)) == ["pack.json", WEIGHTS]
    assert is_right(folder, [a])

    # Files that are not a pack's, or belong to a model, are not removed.
    linked = tmp_path / "linked"
    linked.mkdir()
    shutil.copy(folder / "config.json", linked)
    (linked / "model.safetensors").symlink_to(a / WEIGHTS)
    assert made(linked, [a, b])
    assert (a / WEIGHTS).exists()
    (a / WEIGHTS).write_bytes(b"precious")
    (a / "pack.json").unlink()
    shutil.rmtree(b)
    for path in a.glob(f"{WEIGHTS}.*"):
        path.unlink()
    (a / WEIGHTS).unlink()
    assert made(folder, [a])
    save_file({"mine": torch.ones(3)}, a / WEIGHTS)
    assert made(folder, [a, b])
    assert load_file(a / WEIGHTS).keys() == {"mine"}


def test_the_pack_of_a_copied_directory_is_its_own(folder: Path, tmp_path: Path) -> None:
    volumes = [tmp_path / "a", tmp_path / "b"]
    made(folder, volumes)
    before = contents(*volumes)
    copied = tmp_path / "copied"
    shutil.copytree(volumes[0], copied)
    refused(folder, [copied], copied, [*volumes, copied])
    assert contents(*volumes) == before
    assert not made(folder, volumes)


def test_a_file_that_begins_with_zeros_is_not_taken_for_a_pack(folder: Path, disks: list[Path]) -> None:
    a, b, _ = disks
    (a / WEIGHTS).write_bytes(bytes(16) + b"precious")
    refused(folder, [a], a, disks)
    with tl.Volume([str(a), str(b)]).open(WEIGHTS, "w") as file:
        file.pwrite(bytes(16) + b"precious", 0)
    refused(folder, [a, b], a, disks)
    (b / WEIGHTS).symlink_to(b / "nowhere")
    refused(folder, [b], b, disks)


def test_what_is_put_there_meanwhile_stays(
    folder: Path, disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody who takes no locks."""
    a = disks[0]
    remove = PackLocation.remove
    theirs = [b"precious"]

    def removed(location: PackLocation) -> None:
        remove(location)
        if theirs:
            (a / WEIGHTS).write_bytes(theirs.pop())

    monkeypatch.setattr(PackLocation, "remove", removed)
    with pytest.raises(FileExistsError):
        made(folder, [a])
    assert contents(a) == {a / WEIGHTS: b"precious"}


def killed(folder: Path, directories: Sequence[Path], where: str) -> None:
    """Pack in a process that ends at once when it comes to `where`."""
    code = f"""
import os
import trunkline as tl
from trunkline._streaming import pack as packing
{where}
tl.transformers.pack({str(folder)!r}, {list(map(str, directories))!r})
"""
    assert exit_codes([start_code(code)]) == [9]


@pytest.mark.parametrize(
    "where",
    [
        "packing._write = lambda *_: os._exit(9)",
        "sums = iter([packing.crc32c] * 5)\n"
        "packing.crc32c = lambda data: next(sums, lambda _: os._exit(9))(data)",
        "packing.Manifest.write = lambda *_: os._exit(9)",
    ],
    ids=["empty", "writing", "written"],
)
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_crash_leaves_is_known(folder: Path, disks: list[Path], where: str, count: int) -> None:
    killed(folder, disks[:count], where)
    assert not (disks[0] / "pack.json").exists()
    assert contents(*disks)
    assert made(folder, disks[:count])
    assert is_right(folder, disks[:count])


def test_what_an_interrupted_removal_leaves_is_known(folder: Path, disks: list[Path]) -> None:
    made(folder, disks)
    whole = contents(*disks)
    names = ["pack.json"] + [f"{WEIGHTS}.{index}" for index in (2, 1, 0)] + [f"{WEIGHTS}.stripe"] * 3
    owners = [0, 2, 1, 0, 2, 1, 0]
    for count in range(len(names) + 1):
        for path, data in whole.items():
            path.write_bytes(data)
        for name, owner in list(zip(names, owners, strict=True))[:count]:
            (disks[owner] / name).unlink()
        assert made(folder, disks) == (count > 0)
        assert not made(folder, disks)


def test_packers_with_a_directory_in_common_wait_for_each_other(disks: list[Path]) -> None:
    a, b, s = map(Path, disks)
    for first, second in (([a, s], [s, b]), ([a, b], [b, a]), ([a, b], [b]), ([s], [a, b, s])):
        with PackLocation(tuple(first)).lock() as locked:
            assert locked
            with PackLocation(tuple(second)).lock(wait=False) as also:
                assert not also
        with PackLocation(tuple(second)).lock(wait=False) as locked:
            assert locked


def test_a_packer_says_that_it_waits_for_a_lock(disks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `flock DIR python serve.py`, where it waits for what waits for it."""
    location = PackLocation((Path(disks[0]),))
    with location.lock():
        pass
    holder = os.open(disks[0], os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    warn = pack_location._warn_of_waiting

    def warned(directory: Path) -> None:
        warn(directory)
        os.close(holder)

    monkeypatch.setattr(pack_location, "_WARN_AFTER_SECONDS", -1.0)
    monkeypatch.setattr(pack_location, "_warn_of_waiting", warned)
    with (
        pytest.warns(RuntimeWarning, match=rf"waiting to make a pack in {disks[0]}"),
        location.lock() as locked,
    ):
        assert locked


def test_processes_that_pack_in_other_orders_do_not_harm_each_other(folder: Path, disks: list[Path]) -> None:
    code = """
import sys
import trunkline as tl
try:
    tl.transformers.pack(sys.argv[1], sys.argv[2:])
except FileExistsError:
    sys.exit(3)
"""
    orders = [[0, 1], [1, 0], [0, 2], [2, 1], [1, 2]]
    running = [start_code(code, folder, *(disks[index] for index in order)) for order in orders]
    ended = exit_codes(running)
    assert set(ended) <= {0, 3}
    assert ended.count(0) == 1
    assert is_right(folder, [disks[index] for index in orders[ended.index(0)]])


def test_a_pack_that_is_replaced_while_it_is_opened_is_not_mixed_with_the_other(
    folder: Path, disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = disks[0]
    made(folder, [a])
    find = packing.find
    others = [torch.float32]

    def found(*arguments: Any) -> Any:
        result = find(*arguments)
        if others:
            tl.transformers.pack(folder, [a], dtype=others.pop())
        return result

    monkeypatch.setattr(packing, "find", found)
    assert is_right(folder, [a])


def test_a_manifest_does_not_come_back(
    folder: Path, disks: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pack that another process removes while its source is compared."""
    a = disks[0]
    made(folder, [a])
    for path in folder.glob("*.safetensors"):
        os.utime(path, ns=(1, 1))
    location = PackLocation((a,))
    checkpoint = stored_model_of(folder)
    sums = packing.Source.data_checksums

    def removed(source: packing.Source) -> list[int]:
        location.remove()
        return sums(source)

    monkeypatch.setattr(packing.Source, "data_checksums", removed)
    packing.find(location, checkpoint.headers, _packing._recipe(checkpoint))
    assert contents(a) == {}
    monkeypatch.undo()
    made(folder, [a])
    before = contents(a)
    for path in folder.glob("*.safetensors"):
        os.utime(path, ns=(2, 2))
    holder = os.open(a, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)  # nor is a packer waited for
    assert not made(folder, [a])
    assert contents(a) == before
    os.close(holder)
    assert not made(folder, [a])
    assert contents(a) != before


def test_places_that_are_no_place_for_a_pack(folder: Path, disks: list[Path]) -> None:
    a, b, _ = disks
    load: Any = tl.transformers.from_pretrained
    for options, error, text in (
        ({"pack_dir": ""}, ValueError, "pack_dir: must not be empty"),
        ({"volumes": [""]}, ValueError, "volumes: must not be empty"),
        ({"volumes": [a, b""]}, ValueError, "volumes: must not be empty"),
        ({"volumes": {a}}, TypeError, "list, since its order matters, not set"),
        ({"volumes": {a: b}}, TypeError, "list, since its order matters, not dict"),
        ({"volumes": iter([a, b])}, TypeError, "list, since its order matters"),
        ({"volumes": [a, a]}, ValueError, "same directory"),
        ({"pack_dir": folder}, ValueError, "pack_dir: .* the model's own folder"),
        ({"volumes": [a, folder / ".." / folder.name]}, ValueError, "volumes: .* the model's own folder"),
    ):
        with pytest.raises(error, match=text):
            load(folder, **options)
    with pytest.raises(ValueError, match="own folder"):
        tl.transformers.pack(folder, [folder])
    assert contents(a, b) == {}
    run = a.parent / "run"
    tl.Checkpointer(run).save(1, {"step": 1}, block=True)
    before = contents(run)
    with pytest.raises(
        ValueError, match="pack_dir: .* is a directory of checkpoints, where a pack would lie"
    ):
        load(folder, pack_dir=run)
    assert contents(run) == before
    with pytest.warns(
        RuntimeWarning, match="^volumes: .*/nvme9 does not exist, .* check the spelling, and that"
    ):
        load(folder, volumes=[a, a.parent / "nvme9" / "packs"])
    assert not (folder / WEIGHTS).exists()
    # A directory of the usual name is a model's own in its folder only.
    named = a / "trunkline-pack"
    made(folder, [named])
    refused(make_folder(folder.parent / "other", "qwen3"), [named], named, [a])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_lie_as_transformers_maps_them(kind: str, tmp_path: Path) -> None:
    """Kernels for fp32 and one row round by the alignment of their operands."""
    folder = make_folder(tmp_path / "model", kind, torch.float32)
    row = torch.arange(7).reshape(1, -1)
    for nbytes in (0, 8, 24, 60, 61):
        for path in folder.glob("*.safetensors"):
            shift(path, nbytes)
        expected = stock(folder)
        model = tl.transformers.from_pretrained(folder, memory_budget="520KB", pack_dir=tmp_path / "pack")
        bound: dict[str, int] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(
                lambda module, *_, name=name, bound=bound: bound.update(
                    (f"{name}.{inner}", parameter.data_ptr() % 64)
                    for inner, parameter in module.named_parameters(recurse=False)
                )
            )
        with torch.no_grad():
            for ids in (row, row[:, :1]):
                same = torch.equal(model(ids).logits, expected(ids).logits)
                assert same or nbytes % 4  # no view can lie there
        assert streaming_of[model].streamed_bytes
        wanted = {name: parameter.data_ptr() % 64 for name, parameter in expected.named_parameters()}
        if nbytes % 4 == 0:
            assert {name: bound[name] for name in wanted} == wanted
            assert all(at % 64 == nbytes for at in wanted.values()) or kind == "gpt2"
        assert load_file(tmp_path / "pack" / WEIGHTS).keys() >= set(wanted) - {"lm_head.weight"}


def test_weights_that_are_made_lie_as_torch_makes_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "qwen3-moe", torch.float32)
    for path in folder.glob("*.safetensors"):
        shift(path, 24)

    def begin(dtype: torch.dtype) -> dict[str, int]:
        tl.transformers.pack(folder, [tmp_path / "pack"], dtype=dtype)
        manifest = json.loads((tmp_path / "pack" / "pack.json").read_text())
        return {tensor["name"]: tensor["offset"] % 64 for tensor in manifest["tensors"]}

    places = begin(torch.float32)
    assert places["model.embed_tokens.weight"] == 24
    assert {at for name, at in places.items() if "experts" in name} == {0}
    assert set(begin(torch.bfloat16).values()) == {0}


def test_small_elements_lie_where_they_are_read_best(tmp_path: Path) -> None:
    """No kernel rounds by where they begin."""
    folder = make_folder(tmp_path / "model")
    for path in folder.glob("*.safetensors"):
        shift(path, 24)
    model = tl.transformers.from_pretrained(folder)
    manifest = json.loads((pack_directory(folder) / "pack.json").read_text())
    assert {tensor["offset"] % 64 for tensor in manifest["tensors"]} == {0}
    row = torch.arange(7).reshape(1, -1)
    with torch.no_grad():
        for ids in (row, row[:, :1]):
            assert torch.equal(model(ids).logits, stock(folder)(ids).logits)


def test_a_pack_with_another_alignment_is_made_anew(tmp_path: Path, disks: list[Path]) -> None:
    folder = make_folder(tmp_path / "model", dtype=torch.float32)
    for path in folder.glob("*.safetensors"):
        shift(path, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileTensor, "misalignment", 0)
        assert made(folder, disks[:1])
    assert made(folder, disks[:1])
    assert not made(folder, disks[:1])


@pytest.fixture
def aligned(folder: Path) -> Path:
    """Make a model of two files that are read as they are."""
    state = stock(folder).state_dict()
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    parts = {"first.safetensors": list(state)[::2], "second.safetensors": list(state)[1::2]}
    for file, names in parts.items():
        tl.save({name: state[name] for name in names}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def change(path: Path) -> None:
    """Write other values into the file, which it begins and ends with."""
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        last = file.read(64)
        file.seek(-64, os.SEEK_END)
        file.write(bytes(byte ^ 1 for byte in last))
    os.utime(path, ns=(1, 1))  # whatever the clock of the kernel shows


def test_files_that_change_while_they_are_loaded_are_told(
    aligned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = meta_model.finish

    def finished(*arguments: Any) -> None:
        change(aligned / "second.safetensors")
        finish(*arguments)

    monkeypatch.setattr(meta_model, "finish", finished)
    with pytest.raises(tl.Corrupt, match=r"second\.safetensors was modified"):
        tl.transformers.from_pretrained(aligned, memory_budget="200KB", unit_bytes=1)
    monkeypatch.undo()
    model = tl.transformers.from_pretrained(aligned, memory_budget="200KB", unit_bytes=1)
    assert streaming_of[model].pack == str(aligned)
    assert torch.equal(logits(model), logits(stock(aligned)))


def test_a_time_that_is_compared_is_of_the_past(folder: Path) -> None:
    """What is written after the look, and in the same tick of the kernel's clock, would have the same one."""
    headers = stored_model_of(folder).headers
    for header in headers:
        os.utime(header.path)
    looked = packing.file_versions(headers)
    assert all(time.time_ns() - file.changed_ns >= 20_000_000 for file in looked)
