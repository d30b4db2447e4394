"""What trunkline.dcp keeps whole: checkpoints that are replaced, and those that a crash or damage meets."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import pickle
import random
import shutil
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trunkline as tl

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support_dcp import assert_same, blank, failure, load, nested, numbers, save, shards  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystem  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # noqa: E402

from trunkline.dcp import (  # noqa: E402
    _coverage,
    _directory,
    _owner,
    _request,
    _save_token,
    _saves,
    _shard_layout,
    _writer,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")

MIB = 1 << 20


def test_saving_again_replaces(tmp_path: Path) -> None:
    for seed in range(3):
        save(nested(seed), tmp_path)
        assert len(shards(tmp_path)) == 1
        assert_same(load(blank(nested(0)), tmp_path), nested(seed))
    with pytest.raises(CheckpointException, match="already exists") as caught:
        save(nested(9), tmp_path, overwrite=False)
    assert isinstance(failure(caught), FileExistsError)
    with pytest.raises(tl.Error, match="without collectives"):
        dcp.save(nested(9), storage_writer=tl.dcp.StorageWriter(tmp_path), use_collectives=False)
    assert_same(load(blank(nested(0)), tmp_path), nested(2))


def save_in_another_process(path: Path, run_script: Callable[..., str]) -> None:
    run_script(
        "import sys, warnings, torch, trunkline as tl, torch.distributed.checkpoint as dcp\n"
        "warnings.simplefilter('ignore')\n"
        "writer = tl.dcp.StorageWriter(sys.argv[1], overwrite=True)\n"
        "dcp.save({'a': torch.ones(9)}, storage_writer=writer, no_dist=True)",
        str(path),
    )


def test_replacing_the_checkpoint_of_another_process_warns_once(
    tmp_path: Path, run_script: Callable[..., str]
) -> None:
    save_in_another_process(tmp_path, run_script)
    with pytest.raises(CheckpointException, match="already exists"):
        save({"a": numbers(9)}, tmp_path, overwrite=False)
    with pytest.warns(RuntimeWarning, match=r"already holds.*replaces.*separate directory.*overwrite=False"):
        save({"a": numbers(9)}, tmp_path)
    save({"a": numbers(9, seed=1)}, tmp_path)  # warnings are errors
    assert_same(load({"a": torch.zeros(9)}, tmp_path), {"a": numbers(9, seed=1)})


def save_without_collectives_in_another_process(
    path: Path, run_script: Callable[..., str], *volumes: Path
) -> None:
    run_script(
        "import sys, warnings, torch, trunkline as tl, torch.distributed.checkpoint as dcp\n"
        "warnings.simplefilter('ignore')\n"
        "writer = tl.dcp.StorageWriter(sys.argv[1], volumes=sys.argv[2:] or None)\n"
        "dcp.save({'a': torch.ones(9)}, storage_writer=writer, use_collectives=False)",
        str(path),
        *map(str, volumes),
    )


def test_replacing_what_ranks_saved_without_collectives_warns_once(
    tmp_path: Path, run_script: Callable[..., str]
) -> None:
    save_without_collectives_in_another_process(tmp_path, run_script)
    held = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointException, match=r"already exists: .*dcp-rank00000\.manifest"):
        save({"a": numbers(9)}, tmp_path, overwrite=False)
    assert sorted(tmp_path.iterdir()) == held
    with pytest.warns(RuntimeWarning, match="already holds a checkpoint"):
        save({"a": numbers(9)}, tmp_path)
    save({"a": numbers(9, seed=1)}, tmp_path)  # warnings are errors
    assert_same(load({"a": torch.zeros(9)}, tmp_path), {"a": numbers(9, seed=1)})
    assert not set(held) & set(tmp_path.iterdir())


def test_replacing_on_purpose_or_again_does_not_warn(tmp_path: Path, run_script: Callable[..., str]) -> None:
    save_in_another_process(tmp_path, run_script)
    save({"a": numbers(9)}, tmp_path, overwrite=True)
    save({"a": numbers(9)}, tmp_path)
    save({"a": numbers(9)}, tmp_path / "new")
    save({"a": numbers(9)}, tmp_path / "new")


class Failing(DefaultSavePlanner):
    """Fails in the middle of its data."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "seed":
            raise RuntimeError("no more")
        return super().resolve_data(write_item)


def test_an_error_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shard_layout, "MAX_COPIED_BYTES", 1000)  # some files are written before the error
    save(nested(1), tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointException, match="no more"):
        save(nested(2), tmp_path, Failing())
    assert sorted(tmp_path.iterdir()) == before
    assert_same(load(blank(nested(0)), tmp_path), nested(1))


def test_a_save_that_fails_leaves_no_directory_behind(tmp_path: Path) -> None:
    state, path = {"a": numbers(9), "seed": 1}, tmp_path / "new"
    with pytest.raises(CheckpointException, match="no more"):
        save(state, path, Failing())
    assert not path.exists()
    writer, planner = tl.dcp.StorageWriter(path), DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    writer.set_up_storage_writer(True, rank=0)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    written = writer.write_data(planner.finish_plan(plans[0]), planner).value()
    chunks = metadata.state_dict_metadata["a"].chunks
    chunks[0] = replace(chunks[0], sizes=torch.Size([4]))  # as a rank that saves its part alone
    with pytest.raises(tl.Error, match="4 of the 9 elements"):
        writer.finish(metadata, [written])
    assert not path.exists()
    path.mkdir()
    with pytest.raises(CheckpointException, match="no more"):
        save(state, path, Failing())
    assert list(path.iterdir()) == []


def test_of_two_saves_at_once_one_fails(tmp_path: Path, run_script: Callable[..., str]) -> None:
    writer, planner = tl.dcp.StorageWriter(tmp_path), DefaultSavePlanner()
    planner.set_up_planner({"a": numbers(9)}, None, True)
    writer.set_up_storage_writer(True, rank=0)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    written = writer.write_data(planner.finish_plan(plans[0]), planner).value()
    save_in_another_process(tmp_path, run_script)
    with pytest.raises(tl.Error, match="another save into the directory") as caught:
        writer.finish(metadata, [written])
    assert caught.value.filename == str(tmp_path / written[0].storage_data.file.name)
    assert_same(load({"a": torch.zeros(9)}, tmp_path), {"a": torch.ones(9)})


def test_ranks_that_find_different_checkpoints(tmp_path: Path) -> None:
    """Another job saves between the moments at which two ranks read the manifest."""
    plans: list[Any] = []
    readers = []
    for is_replaced in (True, False, True):
        if is_replaced:
            save({"a": numbers(9)}, tmp_path)
        reader, planner = tl.dcp.StorageReader(tmp_path), DefaultLoadPlanner()
        metadata = reader.read_metadata()
        planner.set_up_planner({"a": torch.zeros(9)}, metadata, True)
        reader.set_up_storage_reader(metadata, True, rank=len(plans), use_collectives=True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        readers.append(reader)
    assert readers[0].prepare_global_plan(plans[:2]) == plans[:2]
    with pytest.raises(tl.Error, match=r"rank 2 finds a different checkpoint than rank 0.*load again"):
        readers[0].prepare_global_plan(plans)


def test_volumes(tmp_path: Path) -> None:
    volumes = [tmp_path / f"disk{i}" for i in range(3)]
    foreign = volumes[0] / "foreign"
    for seed in range(2):
        state = {f"t{i}": numbers(1000 * (i + 1), seed=seed + i) for i in range(8)}
        save(state, tmp_path / "ckpt", volumes=volumes)
        found = [list(volume.glob("*.shard")) for volume in volumes]
        assert [len(files) for files in found] == [1, 1, 1]
        sizes = [files[0].stat().st_size for files in found]
        assert max(sizes) - min(sizes) <= 20_000
        assert all(path.is_symlink() for path in shards(tmp_path / "ckpt"))
        assert_same(load(blank(state), tmp_path / "ckpt"), state)
        foreign.write_bytes(b"mine")
        link = tmp_path / "ckpt" / f"rank00000-0-{'0' * 32}.shard"
        link.symlink_to(foreign)
    save(state, tmp_path / "ckpt", volumes=tl.Volume(volumes[:2]))
    assert foreign.read_bytes() == b"mine"
    assert not link.is_symlink()
    assert not list(volumes[2].glob("*.shard"))
    (tmp_path / "ckpt").rename(tmp_path / "moved")
    assert_same(load(blank(state), tmp_path / "moved"), state)
    save({"a": numbers(5)}, tmp_path / "moved", volumes=[tmp_path / "moved"], overwrite=True)
    assert not shards(tmp_path / "moved")[0].is_symlink()
    (tmp_path / "link").symlink_to("moved")
    save({"a": numbers(6)}, tmp_path / "moved", volumes=[tmp_path / "link"], overwrite=True)
    assert not shards(tmp_path / "moved")[0].is_symlink()
    assert_same(load({"a": torch.zeros(6)}, tmp_path / "moved"), {"a": numbers(6)})


def skip_without_births(path: Path) -> None:
    if _owner._birth_of(path) is None:
        pytest.skip("the filesystem does not record when directories are made")


def files_of(volume: Path) -> set[Path]:
    return set(volume.iterdir())


@pytest.mark.parametrize("in_its_place", [False, True])
def test_saving_over_a_copy_leaves_the_files_of_the_original(tmp_path: Path, in_its_place: bool) -> None:
    """As `cp -a`, which copies links; or `mv run run.bak; cp -a run.bak run`."""
    skip_without_births(tmp_path)
    run, volume = tmp_path / "run", tmp_path / "volume"
    save({"a": numbers(9)}, run, volumes=[volume])
    original, copy = (tmp_path / "run.bak", run) if in_its_place else (run, tmp_path / "copy")
    if in_its_place:
        run.rename(original)
    shutil.copytree(original, copy, symlinks=True)
    of_original = files_of(volume)
    with pytest.warns(RuntimeWarning, match=r"may not own files .* is a copy") as caught:
        save({"a": numbers(9, seed=1)}, copy, volumes=[volume], overwrite=True)
    assert all(any(str(file) in str(warning.message) for warning in caught) for file in of_original)
    assert_same(load({"a": torch.zeros(9)}, original), {"a": numbers(9)})
    assert_same(load({"a": torch.zeros(9)}, copy), {"a": numbers(9, seed=1)})
    assert len(shards(copy)) == 1
    # What each has made, each removes.
    save({"a": numbers(9, seed=2)}, copy, volumes=[volume])
    assert len(files_of(volume)) == 2
    save({"a": numbers(9, seed=3)}, original, volumes=[volume], overwrite=True)
    assert len(files_of(volume)) == 2
    assert not files_of(volume) & of_original
    assert_same(load({"a": torch.zeros(9)}, copy), {"a": numbers(9, seed=2)})


@pytest.mark.parametrize("overwrite", [None, True])
@pytest.mark.parametrize("with_volume", [False, True])
def test_the_manifest_behind_a_link_stays(tmp_path: Path, overwrite: bool | None, with_volume: bool) -> None:
    """As `ln -s ../step-1/* best/`, and the next best is saved there."""
    step, best = tmp_path / "step-1", tmp_path / "best"
    volumes = [tmp_path / "volume"] if with_volume else None
    save({"a": numbers(9)}, step, volumes=volumes)
    best.mkdir()
    for each in step.iterdir():
        (best / each.name).symlink_to(f"../step-1/{each.name}")
    before = sorted(path.name for path in best.iterdir())
    with pytest.raises(
        CheckpointException, match=r"symbolic link to \.\./step-1/dcp\.manifest, whose checkpoint"
    ):
        save({"a": numbers(9, seed=1)}, best, volumes=volumes, overwrite=overwrite)
    assert sorted(path.name for path in best.iterdir()) == before
    for directory in (step, best):
        assert_same(load({"a": torch.zeros(9)}, directory), {"a": numbers(9)})


def test_files_on_volumes_of_an_earlier_version_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells whose they are; so too where the filesystem does not record the birth of directories."""
    skip_without_births(tmp_path)
    run, volume = tmp_path / "run", tmp_path / "volume"
    monkeypatch.setattr(_owner, "_birth_of", lambda _: None)
    save({"a": numbers(9)}, run, volumes=[volume])
    before = files_of(volume)
    with pytest.warns(RuntimeWarning, match="may not own files"):
        save({"a": numbers(9)}, run, volumes=[volume])
    assert before < files_of(volume)
    monkeypatch.undo()
    with pytest.warns(RuntimeWarning, match="may not own files"):
        save({"a": numbers(9)}, run, volumes=[volume])
    assert len(files_of(volume)) == 3
    assert len(shards(run)) == 1
    save({"a": numbers(9)}, run, volumes=[volume])
    assert len(files_of(volume)) == 3


def test_files_of_a_save_that_fails_go_whoever_is_known_to_own_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_owner, "_birth_of", lambda _: None)
    with pytest.raises(CheckpointException, match="no more"):
        save(nested(2), tmp_path / "run", Failing(), volumes=[tmp_path / "volume"])
    assert not files_of(tmp_path / "volume")
    assert not shards(tmp_path / "run")


def test_a_directory_owns_its_files_after_a_move_or_a_restart_not_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices may have other numbers after a restart."""
    skip_without_births(tmp_path)
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    made = _owner.new_file_id(run)
    assert len({_owner.new_file_id(run) for _ in range(1000)}) == 1000
    assert _owner.owns(run, made)
    run.rename(moved)
    assert _owner.owns(moved, made)
    run.mkdir()
    assert not _owner.owns(run, made)
    run.rmdir()
    monkeypatch.setattr(_owner, "_boot_id", lambda: "another")
    assert not _owner.owns(moved, made)
    moved.rename(run)
    assert _owner.owns(run, made)


def test_a_volume_that_is_not_mounted(tmp_path: Path) -> None:
    """Its checkpoint is neither given up by a save, nor called damaged."""
    mount, path = tmp_path / "mnt", tmp_path / "ckpt"
    volume = mount / "volume"
    state = {"a": numbers(9)}
    save(state, path, volumes=[volume])
    mount.rename(tmp_path / "unmounted")
    mount.mkdir()
    before = sorted(path.iterdir())
    for volumes in ([volume], None):
        with pytest.raises(CheckpointException, match="mount its disk, or pass overwrite=True") as caught:
            save({"a": numbers(9, seed=1)}, path, volumes=volumes)
        assert f"is missing in {volume}; mount its disk" in str(failure(caught))
    assert sorted(path.iterdir()) == before
    assert list(mount.iterdir()) == []
    with pytest.raises(CheckpointException, match="mount the disk of that volume") as caught:
        load(blank(state), path)
    assert isinstance(failure(caught), tl.Corrupt)
    assert str(volume) in str(failure(caught))
    mount.rmdir()
    (tmp_path / "unmounted").rename(mount)
    assert_same(load(blank(state), path), state)
    # What a crashed save left leads nowhere as well.
    (path / f"rank00000-0-{'0' * 32}.shard").symlink_to(volume / f"rank00000-0-{'0' * 32}.shard")
    save(state, path, volumes=[volume])
    assert_same(load(blank(state), path), state)
    shutil.rmtree(mount)
    save(state, path, overwrite=True)
    assert_same(load(blank(state), path), state)
    assert len(list(path.iterdir())) == 2


@pytest.mark.parametrize("manifest", ["dcp.manifest", "dcp-rank00000.manifest"])
@pytest.mark.parametrize("damaged", [False, True])
def test_whatever_manifest_names_a_volume_that_is_not_mounted(
    tmp_path: Path, run_script: Callable[..., str], manifest: str, damaged: bool
) -> None:
    """A manifest that is damaged may come back from a backup: what it may name is kept as well."""
    volume, path, state = tmp_path / "volume", tmp_path / "ckpt", {"a": torch.ones(9)}
    if manifest == "dcp.manifest":
        save(state, path, volumes=[volume])
    else:
        save_without_collectives_in_another_process(path, run_script, volume)
    contents = (path / manifest).read_bytes()
    volume.rename(tmp_path / "unmounted")
    if damaged:
        (path / manifest).write_bytes(contents[:-1])
    before = sorted(path.iterdir())
    with pytest.raises(CheckpointException, match="mount its disk, or pass overwrite=True"):
        save({"a": numbers(9)}, path)
    assert sorted(path.iterdir()) == before
    assert not volume.exists()
    (path / manifest).write_bytes(contents)
    (tmp_path / "unmounted").rename(volume)
    assert_same(load(blank(state), path), state)
    shutil.rmtree(volume)
    save(state, path, overwrite=True)
    assert len(list(path.iterdir())) == 2


# A function, how often it is called until the process dies in it, and what is loaded then.
PHASES = {
    "nothing written": ("trunkline.dcp._writer", "write_layouts", "before 1", "old"),
    "data written": ("trunkline.dcp._writer", "write_layouts", "before 2", "old"),
    "committed": ("trunkline.dcp._writer", "write_layouts", "after 2", "new"),
    "half removed": ("trunkline.dcp._directory", "remove_file", "before 2", "new"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_crash_leaves_the_old_or_the_new(
    tmp_path: Path, run_script: Callable[..., str], phase: str
) -> None:
    module, function, when, expected = PHASES[phase]
    volumes = [tmp_path / "v0", tmp_path / "v1"]
    state = {"a": numbers(2000), "b": numbers(2000, seed=1).t(), "n": [1]}
    save(state, tmp_path / "ckpt", volumes=volumes)
    run_script(
        """
        import importlib, os, sys, warnings
        import torch
        import torch.distributed.checkpoint as dcp
        import trunkline as tl
        warnings.simplefilter("ignore")
        root, module, function, when, call = sys.argv[1:]
        calls, module = int(call), importlib.import_module(module)
        original = getattr(module, function)
        def dies(*args, **kwargs):
            global calls
            calls -= 1
            if calls == 0 and when == "before":
                os._exit(9)
            done = original(*args, **kwargs)
            if calls == 0:
                os._exit(9)
            return done
        setattr(module, function, dies)
        state = {"a": torch.ones(2000), "b": torch.ones(2000), "n": [2]}
        writer = tl.dcp.StorageWriter(f"{root}/ckpt", volumes=[f"{root}/v0", f"{root}/v1"])
        dcp.save(state, storage_writer=writer)
        os._exit(0)
        """,
        str(tmp_path),
        module,
        function,
        *when.split(),
        expect=9,
    )
    new = {"a": torch.ones(2000), "b": torch.ones(2000), "n": [2]}
    loaded = load({"a": torch.zeros(2000), "b": torch.zeros(2000), "n": None}, tmp_path / "ckpt")
    assert_same(loaded, state if expected == "old" else new)
    save(state, tmp_path / "ckpt", volumes=volumes)
    assert_same(load(blank(state), tmp_path / "ckpt"), state)
    assert len(list((tmp_path / "ckpt").iterdir())) == 3
    assert [len(list(volume.iterdir())) for volume in volumes] == [1, 1]


@pytest.mark.parametrize("has_its_name", [False, True])
def test_a_manifest_that_could_not_be_made_durable_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_its_name: bool
) -> None:
    """It may have replaced the one before, so that what it names must stay."""
    old, new = {"a": numbers(2000)}, {"a": numbers(2000, seed=1)}
    save(old, tmp_path)
    write_layouts = _writer.write_layouts

    def write(layouts: Any, **options: Any) -> Any:
        if not layouts[0].path.endswith(".manifest"):
            return write_layouts(layouts, **options)
        if has_its_name:
            write_layouts(layouts, **options)
        raise OSError(errno.EIO, "fsync")

    with monkeypatch.context() as patch:
        patch.setattr(_writer, "write_layouts", write)
        with pytest.raises(CheckpointException, match="fsync"):
            save(new, tmp_path)
    assert_same(load(blank(old), tmp_path), new if has_its_name else old)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    state = {"a": numbers(20), "b": {"c": numbers(30)}, "n": "text"}
    save(state, tmp_path)
    reader = tl.dcp.StorageReader(tmp_path)
    names = {index.fqn for index in reader.read_metadata().storage_data}
    (shard,) = shards(tmp_path)
    whole = shard.read_bytes()
    for at in range(len(whole)):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        reader.set_up_storage_reader(reader.read_metadata(), True)
        planner = DefaultLoadPlanner()
        planner.set_up_planner(blank(state), reader.read_metadata(), True)
        with pytest.raises(tl.Corrupt) as caught:
            reader.read_data(planner.create_local_plan(), planner)
        assert caught.value.file == str(shard)
        assert caught.value.tensor in names
        assert caught.value.chunk == 0


def test_the_damaged_chunk_is_named(tmp_path: Path) -> None:
    state = {"first": numbers(MIB // 2), "second": numbers(MIB // 2, seed=1), "third": numbers(9)}
    save(state, tmp_path)
    (shard,) = shards(tmp_path)
    with shard.open("r+b") as file:
        file.seek(3 * MIB + 5)
        file.write(b"?!")
    with pytest.raises(CheckpointException) as caught:
        load(blank(state), tmp_path)
    error = failure(caught)
    assert isinstance(error, tl.Corrupt)
    assert (error.file, error.tensor, error.chunk) == (str(shard), "second", 3)
    copy = pickle.loads(pickle.dumps(error))  # as it goes to other ranks
    assert (copy.file, copy.tensor, copy.chunk, str(copy)) == (str(shard), "second", 3, str(error))
    assert_same(load({"first": torch.zeros(MIB // 2)}, tmp_path), {"first": state["first"]})
    load(blank(state), tmp_path, verify=False)


@pytest.mark.parametrize(("unknown", "changed"), [("c", False), ("d", True)])
def test_an_item_that_is_not_stored_where_tensors_are_filled_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str, changed: bool
) -> None:
    """Two tensors are held at once: the first two are filled when the fourth is looked up."""
    monkeypatch.setattr(_request, "MAX_BUFFERED_BYTES", 100_000)
    state = {name: numbers(100, 100).t() for name in "abcd"}
    save(state, tmp_path)
    into = blank(state)
    reader, planner = tl.dcp.StorageReader(tmp_path), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(into, metadata, True)
    plan = planner.create_local_plan()
    plan.items.sort(key=lambda item: item.storage_index.fqn)
    (index,) = (index for index in metadata.storage_data if index.fqn == unknown)
    del metadata.storage_data[index]
    reader.set_up_storage_reader(metadata, True)
    with pytest.raises(tl.Corrupt, match=f"no file contains '{unknown}'") as caught:
        reader.read_data(plan, planner)
    assert torch.equal(into["a"], state["a"]) == changed
    assert ("may now hold a mixture" in str(caught.value)) == changed


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer"])
def test_files_that_are_not_whole(tmp_path: Path, damage: str) -> None:
    save({"a": numbers(5000)}, tmp_path)
    (shard,) = shards(tmp_path)
    if damage == "missing":
        shard.unlink()
    else:
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] if damage == "shorter" else data + b"\0")
    for verify in (True, False):
        with pytest.raises(CheckpointException) as caught:
            load({"a": torch.zeros(5000)}, tmp_path, verify=verify)
        error = failure(caught)
        assert isinstance(error, tl.Corrupt)
        assert (error.file, error.tensor) == (str(shard), "a")


def test_no_checkpoint(tmp_path: Path) -> None:
    for path, why in ((tmp_path, "no complete checkpoint"), (tmp_path / "none", "no such directory")):
        with pytest.raises(FileNotFoundError, match=why) as caught:
            tl.dcp.StorageReader(path).read_metadata()
        assert isinstance(caught.value, tl.Error)
    dcp.save({"a": numbers(2)}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(FileNotFoundError, match="FileSystemReader"):
        tl.dcp.StorageReader(tmp_path).read_metadata()


@pytest.mark.parametrize("use_collectives", [True, False])
def test_torchs_checkpoint_is_not_saved_over(tmp_path: Path, use_collectives: bool) -> None:
    """Its readers would go on loading the old one."""
    old, new = nested(1), nested(2)
    dcp.save(old, storage_writer=dcp.FileSystemWriter(tmp_path), use_collectives=use_collectives)
    before = sorted(tmp_path.iterdir())
    for overwrite in (None, False):
        with pytest.raises(CheckpointException, match="torch's FileSystemWriter") as caught:
            save(new, tmp_path, overwrite=overwrite)
        assert isinstance(failure(caught), FileExistsError)
        assert "another directory" in str(failure(caught))
    with pytest.raises(tl.Error, match="remove that one first"):
        dcp.save(
            new,
            storage_writer=tl.dcp.StorageWriter(tmp_path, overwrite=True),
            use_collectives=False,
        )
    with pytest.raises(CheckpointException, match="torch's FileSystemWriter"):
        dcp.async_save(new, storage_writer=tl.dcp.StorageWriter(tmp_path)).result(60)
    assert sorted(tmp_path.iterdir()) == before
    if use_collectives:
        into = blank(old)
        dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path))
        assert_same(into, old)
    data = sorted(tmp_path.glob("*.distcp"))
    save(new, tmp_path, overwrite=True)
    assert_same(load(blank(old), tmp_path), new)
    assert sorted(tmp_path.glob("*.distcp")) == data
    with pytest.raises(CheckpointException):
        dcp.load(blank(old), storage_reader=dcp.FileSystemReader(tmp_path))


def test_torchs_checkpoint_that_was_saved_over_ours(tmp_path: Path) -> None:
    ours, torchs, last = nested(1), nested(2), nested(3)
    save(ours, tmp_path)
    dcp.save(torchs, storage_writer=dcp.FileSystemWriter(tmp_path))
    with pytest.raises(CheckpointException, match="two checkpoints"):
        load(blank(ours), tmp_path)
    with pytest.raises(tl.Format, match="load torch's with FileSystemReader"):
        tl.dcp.StorageReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointException, match="torch's FileSystemWriter"):
        save(last, tmp_path)
    into = blank(ours)
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_same(into, torchs)
    save(last, tmp_path, overwrite=True)
    assert_same(load(blank(ours), tmp_path), last)


@pytest.mark.parametrize("kind", ["whole", "sharded", "consolidated"])
def test_safetensors_of_torch_and_ours_in_one_directory(tmp_path: Path, kind: str) -> None:
    """Whichever is saved last: neither is loaded, or saved over, as if it were alone."""
    options = {"save_distributed": kind != "whole", "enable_consolidation": kind == "consolidated"}
    old, new = {"a": numbers(9)}, {"a": numbers(9, seed=1)}
    torchs = tmp_path / "torchs"
    torchs.mkdir()
    dcp.save(old, storage_writer=dcp.HuggingFaceStorageWriter(str(torchs), **options))
    before = sorted(torchs.rglob("*"))
    for overwrite in (None, True):
        with pytest.raises(CheckpointException, match="HuggingFaceStorageWriter.*remove") as caught:
            save(new, torchs, overwrite=overwrite)
        assert isinstance(failure(caught), FileExistsError)
    assert sorted(torchs.rglob("*")) == before
    with pytest.raises(CheckpointException, match="load it with HuggingFaceStorageReader"):
        load(blank(new), torchs)
    ours = tmp_path / "ours"
    save(old, ours)
    dcp.save(new, storage_writer=dcp.HuggingFaceStorageWriter(str(ours), **options))
    with pytest.raises(CheckpointException, match="two checkpoints.*HuggingFaceStorageReader"):
        load(blank(old), ours)
    with pytest.raises(CheckpointException, match="HuggingFaceStorageWriter"):
        save(new, ours)


def test_a_model_beside_it_is_no_checkpoint_of_torch(tmp_path: Path) -> None:
    """As transformers.save_pretrained() writes it."""
    state = {"a": numbers(9)}
    tl.save(state, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    save(state, tmp_path)
    assert_same(load(blank(state), tmp_path), state)


def test_a_crash_while_torchs_checkpoint_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it comes, nothing that is loaded is the old one in place of the new one."""
    old, new = nested(1), nested(2)
    dcp.save(old, storage_writer=dcp.FileSystemWriter(tmp_path))

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_writer, "write_layouts", stop)
        with pytest.raises(CheckpointException):
            save(new, tmp_path, overwrite=True)
    into = blank(old)
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_same(into, old)
    with monkeypatch.context() as patch:
        patch.setattr(_writer._directory, "remove_torch_metadata", stop)
        with pytest.raises(CheckpointException):
            save(new, tmp_path, overwrite=True)
    with pytest.raises(CheckpointException, match="two checkpoints"):
        load(blank(old), tmp_path)
    (tmp_path / ".metadata").unlink()
    assert_same(load(blank(old), tmp_path), new)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("rank", [None, 0])
def test_a_save_of_torch_that_was_cut_off_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    """It has removed the file by which torch's newer checkpoint counted; its own has no final name yet."""
    states = [nested(step) for step in range(4)]
    save(states[1], tmp_path)

    def save_with_torch(step: int) -> None:
        writer = dcp.FileSystemWriter(tmp_path)
        if rank is not None:
            dcp.save(states[step], storage_writer=writer, use_collectives=False)
        else:
            dcp.save(states[step], storage_writer=writer)

    save_with_torch(2)
    name = ".metadata" if rank is None else f"__{rank}.metadata"
    assert (tmp_path / name).exists()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "rename", stop)
        with pytest.raises((CheckpointException, KeyboardInterrupt)):
            save_with_torch(3)
    assert not (tmp_path / name).exists()
    todo = rf"dcp.manifest of trunkline, and {name}.tmp .*remove {name}.tmp .*rename the file to {name}, "
    with pytest.raises(CheckpointException, match=todo):
        load(blank(states[0]), tmp_path)
    with pytest.raises(CheckpointException, match=rf"an unfinished save .*{name}.tmp.*overwrite=True"):
        save(states[0], tmp_path)
    copy = tmp_path.with_name(f"{tmp_path.name}-copy")
    shutil.copytree(tmp_path, copy)
    save(states[0], copy, overwrite=True)  # gives up all of torch's
    assert not list(copy.glob("*metadata*"))
    assert_same(load(blank(states[0]), copy), states[0])
    if rank is None:
        (tmp_path / f"{name}.tmp").rename(tmp_path / name)
        into = blank(states[0])
        dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path))
        assert_same(into, states[3])
        (tmp_path / name).rename(tmp_path / f"{name}.tmp")
    (tmp_path / f"{name}.tmp").unlink()
    assert_same(load(blank(states[0]), tmp_path), states[1])


def test_a_first_save_of_torch_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / ".metadata.tmp").write_bytes(b"")
    with pytest.raises(CheckpointException, match="no complete checkpoint"):
        load({"a": torch.zeros(9)}, tmp_path)
    with pytest.raises(CheckpointException, match="an unfinished save of torch's FileSystemWriter"):
        save({"a": numbers(9)}, tmp_path)
    save({"a": numbers(9)}, tmp_path, overwrite=True)
    assert_same(load({"a": torch.zeros(9)}, tmp_path), {"a": numbers(9)})


def test_without_collectives_each_rank_has_a_manifest(tmp_path: Path) -> None:
    state = nested(3)
    dcp.save(state, storage_writer=tl.dcp.StorageWriter(tmp_path), use_collectives=False)
    assert [path.name for path in tmp_path.glob("*manifest")] == ["dcp-rank00000.manifest"]
    assert_same(load(blank(state), tmp_path), state)
    save(state, tmp_path)
    assert [path.name for path in tmp_path.glob("*manifest")] == ["dcp.manifest"]
    (tmp_path / "dcp.manifest").write_bytes(b"?")
    with pytest.raises(tl.Format):
        tl.dcp.StorageReader(tmp_path).read_metadata(rank=0)


class FirstHalf(DefaultSavePlanner):
    """Saves the first half of vectors, as one of two ranks does."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return replace(plan, items=[self.halved(item) for item in plan.items])

    def halved(self, item: Any) -> Any:
        chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((item.tensor_data.size[0] // 2,)))
        return replace(item, tensor_data=replace(item.tensor_data, chunk=chunk))

    def resolve_data(self, write_item: Any) -> Any:
        return super().resolve_data(write_item)[: write_item.tensor_data.chunk.sizes[0]]


class WithoutB(DefaultLoadPlanner):
    """Leaves out b on purpose."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if item.dest_index.fqn != "b"])


def test_a_part_of_a_tensor_is_not_saved_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": numbers(100), "b": numbers(20)}
    save(state, tmp_path)
    held = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointException, match=r"50 of the 100 elements of 'a'.*no_dist") as caught:
        save(blank(state), tmp_path, FirstHalf())
    assert isinstance(failure(caught), tl.Error)
    assert sorted(tmp_path.iterdir()) == held
    assert_same(load(blank(state), tmp_path), state)
    with monkeypatch.context() as patch:  # as earlier versions did
        patch.setattr(_writer, "find_partly_saved", lambda _: None)
        save(state, tmp_path, FirstHalf())
    into = blank(state)
    with pytest.raises(CheckpointException, match=r"50 of the 100 elements of 'a'.*was not saved") as caught:
        load(into, tmp_path)
    assert isinstance(failure(caught), tl.Format)
    assert_same(into, blank(state))


def test_what_a_planner_leaves_out_on_purpose(tmp_path: Path) -> None:
    state = {"a": numbers(100), "b": numbers(20)}
    save(state, tmp_path)
    assert_same(load(blank(state), tmp_path, WithoutB()), {"a": state["a"], "b": blank(state["b"])})


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offsets = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    return offsets, draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))


def region(box: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))


@settings(max_examples=300, deadline=None)
@given(boxes(), st.lists(boxes(), max_size=6))
def test_what_chunks_do_not_cover(box: Any, chunks: list[Any]) -> None:
    expected = torch.zeros(12, 12, dtype=torch.int64)
    expected[region(box)] = 1
    for chunk in chunks:
        expected[region(chunk)] = 0
    found = torch.zeros_like(expected)
    for rest in _coverage._without([box], chunks):
        found[region(rest)] += 1
    assert torch.equal(found, expected)


def test_a_directory_that_something_else_keeps_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `flock DIR python train.py`."""
    path, volume = tmp_path / "run", tmp_path / "volume"
    save({"a": numbers(9)}, path, volumes=[volume])
    before = sorted(path.iterdir()), sorted(volume.iterdir())
    monkeypatch.setattr(_directory, "LOCK_SECONDS", 0.0)
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with pytest.raises(CheckpointException, match=r"another process has held a lock .* on that") as caught:
        save({"a": numbers(9, seed=1)}, path, volumes=[volume])
    error = failure(caught)
    assert isinstance(error, tl.Error)
    assert (error.errno, error.filename) == (errno.EBUSY, str(path))
    assert (sorted(path.iterdir()), sorted(volume.iterdir())) == before
    assert_same(load({"a": torch.zeros(9)}, path), {"a": numbers(9)})
    os.close(descriptor)
    save({"a": numbers(9, seed=1)}, path, volumes=[volume])
    assert_same(load({"a": torch.zeros(9)}, path), {"a": numbers(9, seed=1)})


def test_a_lock_that_is_released_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    save({"a": numbers(9)}, path)
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try_lock, tries = _directory._try_lock, []

    def released_after_the_first(directory: int) -> bool:
        tries.append(try_lock(directory))
        if len(tries) == 1:
            os.close(descriptor)
        return tries[-1]

    monkeypatch.setattr(_directory, "_try_lock", released_after_the_first)
    save({"a": numbers(9, seed=1)}, path)
    assert tries == [False, True]
    assert_same(load({"a": torch.zeros(9)}, path), {"a": numbers(9, seed=1)})


@pytest.mark.parametrize("overwrite", [None, False, True])
def test_of_two_saves_at_once_the_later_finds_the_checkpoint_of_the_other(
    tmp_path: Path, run_script: Callable[..., str], overwrite: bool | None
) -> None:
    """Neither finds a checkpoint when it begins, and neither has written when the other begins."""
    path = tmp_path / "new"
    writer, planner = tl.dcp.StorageWriter(path, overwrite=overwrite), DefaultSavePlanner()
    planner.set_up_planner({"a": numbers(9, seed=1)}, None, True)
    writer.set_up_storage_writer(True, rank=0)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    save_in_another_process(path, run_script)
    before = sorted(path.iterdir())
    written = writer.write_data(planner.finish_plan(plans[0]), planner).value()
    if not overwrite:
        why = "overwrite is False" if overwrite is False else "has written since this one began"
        with pytest.raises(FileExistsError, match=rf"already exists: .*dcp\.manifest.*{why}"):
            writer.finish(metadata, [written])
        assert sorted(path.iterdir()) == before
        assert_same(load({"a": torch.zeros(9)}, path), {"a": torch.ones(9)})
        return
    writer.finish(metadata, [written])
    assert_same(load({"a": torch.zeros(9)}, path), {"a": numbers(9, seed=1)})


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_manifest_that_is_touched_during_a_save_is_still_the_same(tmp_path: Path, is_copied: bool) -> None:
    """As a backup or a scan of the directory does it."""

    def touch() -> None:
        manifest, copy = tmp_path / "dcp.manifest", tmp_path / "copy"
        if is_copied:
            shutil.copy(manifest, copy)
            copy.rename(manifest)
        os.utime(manifest, (1e9, 1e9))

    class Touching(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            touch()
            return super().resolve_data(write_item)

    save({"a": numbers(9)}, tmp_path)
    save({"a": numbers(9, seed=1)}, tmp_path, Touching())
    assert_same(load({"a": torch.zeros(9)}, tmp_path), {"a": numbers(9, seed=1)})


class Waiting(DefaultSavePlanner):
    """Reports where it begins to write, and waits there."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.has_begun.set()
        assert self.may_go_on.wait(60)
        return super().resolve_data(write_item)


def test_saves_of_one_writer_that_overlap(tmp_path: Path) -> None:
    writer, planners = tl.dcp.StorageWriter(), [Waiting() for _ in range(3)]
    saves = []
    for number, planner in enumerate(planners):
        state, path = {"a": torch.full((9,), float(number))}, tmp_path / str(number)
        saves.append(dcp.async_save(state, storage_writer=writer, checkpoint_id=path, planner=planner))
        assert planner.has_begun.wait(60)
    for planner, future in reversed(list(zip(planners, saves, strict=True))):
        planner.may_go_on.set()
        future.result(60)
    for number in range(3):
        found = load({"a": torch.zeros(9)}, tmp_path / str(number))
        assert_same(found, {"a": torch.full((9,), float(number))})
    dcp.save({"a": numbers(9)}, storage_writer=writer, checkpoint_id=tmp_path / "last")
    assert_same(load({"a": torch.zeros(9)}, tmp_path / "last"), {"a": numbers(9)})
    assert writer.checkpoint_id == str(tmp_path / "last")


def test_saves_that_overlap_with_cached_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner gives the same metadata object to all of them."""

    def save_to(name: str, value: float) -> None:
        state, planner = {"a": torch.full((9,), value)}, DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=tl.dcp.StorageWriter(tmp_path / name), planner=planner, no_dist=True)

    def while_another_commits(layouts: Any, **options: Any) -> Any:
        writes.append(layouts)
        if len(writes) == 2:  # that of the manifest
            other = threading.Thread(target=save_to, args=("2", 2.0))
            other.start()
            other.join()
        return write_layouts(layouts, **options)

    write_layouts, writes = _writer.write_layouts, []
    save_to("0", 0.0)
    monkeypatch.setattr(_writer, "write_layouts", while_another_commits)
    save_to("1", 1.0)
    for number in range(3):
        found = load({"a": torch.zeros(9)}, tmp_path / str(number))
        assert_same(found, {"a": torch.full((9,), float(number))})


@pytest.mark.parametrize("overwrite", [None, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_saves_of_one_process_that_overlap_the_last_begun_stays(
    tmp_path: Path, order: tuple[int, ...], overwrite: bool | None
) -> None:
    """In whatever order they come to their commits; those that come too late say so."""
    path, volume = tmp_path / "run", tmp_path / "volume"
    save({"a": torch.full((9,), -1.0)}, path, volumes=[volume])
    planners, saves = [Waiting() for _ in range(3)], []
    for number, planner in enumerate(planners):
        writer = tl.dcp.StorageWriter(path, volumes=[volume], overwrite=overwrite)
        state = {"a": torch.full((9,), float(number))}
        saves.append(dcp.async_save(state, storage_writer=writer, planner=planner))
        assert planner.has_begun.wait(60)
    newest = -1
    for number in order:
        is_late = number < newest
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            planners[number].may_go_on.set()
            saves[number].result(60)
        said = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
        assert len(said) == is_late
        assert all("began later" in text and str(path) in text for text in said)
        newest = max(number, newest)
        assert_same(load({"a": torch.zeros(9)}, path), {"a": torch.full((9,), float(newest))})
    assert newest == 2
    (shard,) = shards(path)
    assert list(volume.iterdir()) == [shard.resolve()]


def test_a_save_that_waits_for_its_state_began_before_one_that_does_not(tmp_path: Path) -> None:
    """As async_save() stages it in the background: what it saves is older."""
    staged = Future[Any]()

    class Stager:
        should_synchronize_after_execute = False

        def stage(self, state: Any) -> Any:
            return staged

        def synchronize_staging(self) -> None:
            pass

        def close(self) -> None:
            pass

    writer = tl.dcp.StorageWriter(tmp_path)
    response = dcp.async_save({}, storage_writer=writer, async_stager=Stager(), no_dist=True)
    save({"a": torch.full((9,), 2.0)}, tmp_path)
    staged.set_result({"a": torch.full((9,), 1.0)})
    with pytest.warns(RuntimeWarning, match="began later"):
        response.upload_completion.result(60)
    assert_same(load({"a": torch.zeros(9)}, tmp_path), {"a": torch.full((9,), 2.0)})
    assert len(shards(tmp_path)) == 1


def test_storage_that_hangs_holds_up_no_save_into_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_leftovers, hangs, goes_on = _directory.list_leftovers, threading.Event(), threading.Event()

    def hanging(directory: Path) -> list[str]:
        if directory.name == "hanging":
            hangs.set()
            assert goes_on.wait(60)
        return list_leftovers(directory)

    monkeypatch.setattr(_directory, "list_leftovers", hanging)
    state = {"a": numbers(9)}
    writers = [tl.dcp.StorageWriter(tmp_path / name) for name in ("hanging", "other")]
    first = dcp.async_save(state, storage_writer=writers[0])
    assert hangs.wait(60)
    second = dcp.async_save(state, storage_writer=writers[1])
    try:
        second.result(30)
    finally:
        goes_on.set()
    first.result(60)
    assert_same(load(blank(state), tmp_path / "other"), state)


def write_as_rank(path: Path, rank: int, value: float, **options: Any) -> tuple[Any, list[Any]]:
    """Write as a rank that does not commit: the metadata, and what it hands to the one that does."""
    writer, planner = tl.dcp.StorageWriter(path, **options), DefaultSavePlanner()
    planner.set_up_planner({"a": torch.full((9,), value)}, None, True)
    writer.set_up_storage_writer(False, rank=rank)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    return metadata, writer.write_data(planner.finish_plan(plans[0]), planner).value()


def test_a_rank_removes_what_its_saves_left_that_others_made_fail(tmp_path: Path) -> None:
    """Nothing that a manifest refers to, or may refer to as it is damaged, and nothing of others."""
    path, volume = tmp_path / "run", tmp_path / "volume"

    def write(rank: int, value: float) -> tuple[Any, list[Any], Path]:
        metadata, written = write_as_rank(path, rank, value, volumes=[volume])
        return metadata, written, path / written[0].storage_data.file.name

    _, _, of_another = write(2, 0.0)
    _saves._forget_parent()  # as if another process had made it
    for value in (1.0, 2.0):
        metadata, written, held = write(1, value)
        assert set(shards(path)) == {of_another, held}
        assert set(volume.iterdir()) == {of_another.resolve(), held.resolve()}
    writer = tl.dcp.StorageWriter(path, volumes=[volume])
    writer.set_up_storage_writer(True, rank=0)
    writer._save.begun = _saves.begin(path, _saves.next_number(), [])
    writer.finish(metadata, [written])
    for _ in range(2):
        _, _, last = write(1, 3.0)
        assert set(shards(path)) == {of_another, held, last}
    assert_same(load({"a": torch.zeros(9)}, path), {"a": torch.full((9,), 2.0)})
    data = (path / "dcp.manifest").read_bytes()
    (path / "dcp.manifest").write_bytes(data[:-1] + b"?")
    _, _, newest = write(1, 4.0)
    assert set(shards(path)) == {of_another, held, last, newest}


def test_a_rank_removes_nothing_on_network_filesystems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest of another machine that refers to it may not be seen yet."""
    monkeypatch.setattr(_writer, "is_on_local_filesystem", lambda _: False)
    for count in (1, 2):
        write_as_rank(tmp_path, 1, 1.0)
        assert len(shards(tmp_path)) == count


def test_a_directory_that_takes_the_place_of_another_keeps_its_files(tmp_path: Path) -> None:
    """They are links to files of that one; a copy may even lack the manifest."""
    path, volume = tmp_path / "run", tmp_path / "volume"
    _, written = write_as_rank(path, 1, 1.0, volumes=[volume])
    name = written[0].storage_data.file.name
    path.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", path, symlinks=True)
    write_as_rank(path, 1, 2.0, volumes=[volume])
    assert (tmp_path / "moved" / name).exists()
    assert (path / name).exists()


def begin_apart(path: Path, rank: int, value: int) -> Callable[[], None]:
    """Write what one rank of a save without collectives writes; what is returned commits it."""
    writer, planner = tl.dcp.StorageWriter(path), DefaultSavePlanner()
    planner.set_up_planner({"a": torch.full((9,), value)}, None, True)
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    written = writer.write_data(planner.finish_plan(plans[0]), planner).value()
    return lambda: writer.finish(metadata, [written])


@pytest.mark.parametrize("rank", [0, 1])
def test_two_saves_without_collectives_at_once(tmp_path: Path, rank: int) -> None:
    """Neither finds a manifest when it begins; the second to end must not add to the first, or replace it."""
    first, second = begin_apart(tmp_path, 0, 1), begin_apart(tmp_path, rank, 2)
    first()
    held = {path: path.read_bytes() for path in tmp_path.glob("*manifest")}
    with pytest.raises(FileExistsError, match=r"dcp-rank00000\.manifest.*another directory"):
        second()
    assert {path: path.read_bytes() for path in tmp_path.glob("*manifest")} == held
    assert len(shards(tmp_path)) == 1
    assert_same(load({"a": torch.zeros(9)}, tmp_path), {"a": torch.full((9,), 1.0)})


def test_processes_that_torchrun_starts_anew_choose_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store outlives them, and with it what the processes before had chosen."""
    store = torch.distributed.HashStore()
    first = _save_token._choose(store)
    assert _save_token._choose(store) == first
    with monkeypatch.context() as patch:
        patch.setattr(_save_token, "seconds_since_start", lambda: -1.0)  # later than the choice
        second = _save_token._choose(store)
    assert second != first
    assert _save_token._choose(store) == second


def on_machine(monkeypatch: pytest.MonkeyPatch, name: str, clock: float, age: float = 60.0) -> None:
    """Go on as a process of another machine, which is `age` old."""
    monkeypatch.setattr(_save_token, "_machine", lambda: name, raising=False)
    monkeypatch.setattr(_save_token, "_now", lambda: clock, raising=False)
    monkeypatch.setattr(_save_token.time, "time", lambda: clock)
    monkeypatch.setattr(_save_token, "seconds_since_start", lambda: age)


def test_machines_whose_clocks_differ_choose_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    store, chosen = torch.distributed.HashStore(), set()
    for moment in (0.0, 1000.0):
        for name, clock in (("b", 500.0), ("a", 90_000.0), ("c", 100.0)) * 2:
            on_machine(monkeypatch, name, clock + moment, 60.0 + moment)
            chosen.add(_save_token._choose(store))
    assert len(chosen) == 1


@pytest.mark.parametrize("first", ["a", "b"])
def test_processes_that_start_anew_on_two_machines_choose_another_token(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Whichever of them chose before, and whichever comes first now."""
    store, clocks, chosen = torch.distributed.HashStore(), {"a": 90_000.0, "b": 500.0}, []
    for start in range(3):
        for name in sorted(clocks, reverse=(first == "b")) * 2:
            on_machine(monkeypatch, name, clocks[name] + 100.0 * start)
            chosen.append(_save_token._choose(store))
        first = "b" if first == "a" else "a"
    assert [len(set(chosen[at : at + 4])) for at in (0, 4, 8)] == [1, 1, 1]
    assert len(set(chosen)) == 3


def test_a_manifest_older_than_this_process_is_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its token is: its rank is not there any more."""
    monkeypatch.setattr(_writer, "new_save_token", lambda _: f"{'0' * 32}-1")
    begin_apart(tmp_path, 0, 1)()
    begin_apart(tmp_path, 1, 1)()
    second = begin_apart(tmp_path, 2, 1)
    os.utime(tmp_path / "dcp-rank00000.manifest", (1e9, 1e9))
    with pytest.raises(FileExistsError, match=r"dcp-rank00000\.manifest.*another directory"):
        second()
    assert len(shards(tmp_path)) == 2


def test_manifests_of_ranks_that_say_nothing_of_their_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote these: they are loaded as before, and not added to."""
    with monkeypatch.context() as patch:
        patch.setattr(_writer, "new_save_token", lambda _: None)
        for rank in range(2):
            begin_apart(tmp_path, rank, rank)()
    readers = [tl.dcp.StorageReader(tmp_path) for _ in range(2)]
    plans: list[Any] = []
    for rank, reader in enumerate(readers):
        metadata = reader.read_metadata(rank=rank)
        planner = DefaultLoadPlanner()
        planner.set_up_planner({"a": torch.zeros(9)}, metadata, True)
        reader.set_up_storage_reader(metadata, True, rank=rank, use_collectives=False)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    assert readers[0].prepare_global_plan(plans) == plans
    with pytest.raises(FileExistsError, match=r"dcp-rank00000\.manifest.*another directory"):
        begin_apart(tmp_path, 2, 2)


def test_random_garbage_beside_it_stays(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(100)
    for name in ("notes.txt", "rank0.shard", "dcp.manifest.old", ".trunkline-x.tmp"):
        (tmp_path / name).write_bytes(noise)
    save({"a": numbers(3)}, tmp_path)
    save({"a": numbers(3)}, tmp_path)
    assert len(list(tmp_path.iterdir())) == 6
