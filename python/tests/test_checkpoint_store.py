"""The directory of checkpoints, as the package's Checkpointer uses it."""

import errno
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import trunkline as tl
from trunkline._core import CheckpointStore

if TYPE_CHECKING:
    from conftest import CheckpointWriter, RunScript


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(directory: Path) -> CheckpointStore:
    return CheckpointStore(directory)


def flip(path: str | Path, offset: int) -> None:
    contents = bytearray(Path(path).read_bytes())
    contents[offset] ^= 0x10
    Path(path).write_bytes(contents)


def test_what_was_committed_is_read(store: CheckpointStore, checkpoint_writer: "CheckpointWriter") -> None:
    assert store.steps() == []
    assert store.latest() is None
    save, manifest = checkpoint_writer.write(store, 12)
    assert save.step == 12
    assert save.commit(manifest) == 1
    save.release()
    assert "commit" not in manifest
    read = CheckpointStore(store.directory, create=False).read_manifest(12)
    assert read.pop("commit") == 1
    assert read.pop("time").startswith("20")
    assert read == manifest
    assert list(read["state"]["order"]) == ["z", "a"]
    assert read["state"]["big"] == 2**70
    assert store.steps() == [12]
    assert store.latest() == 12


def test_volumes(tmp_path: Path, directory: Path, checkpoint_writer: "CheckpointWriter") -> None:
    volumes = [tmp_path / "a", tmp_path / "b"]
    store = CheckpointStore(directory, volumes)
    assert store.volumes == [f"{volume}/run-{store.id}" for volume in volumes]
    checkpoint_writer.save(store, 3)
    manifest = store.read_manifest(3)
    paths = store.shard_paths(manifest)
    assert [Path(path).parent.parent for path in paths] == [
        Path(each) for each in store.volumes for _ in "ab"
    ]
    assert all(Path(path).is_file() for path in paths)
    assert CheckpointStore(directory).volumes == store.volumes
    assert CheckpointStore(directory, []).volumes == []


def test_retention_and_replacement(store: CheckpointStore, checkpoint_writer: "CheckpointWriter") -> None:
    for step in (10, 20, 30):
        checkpoint_writer.save(store, step, keep=2)
    assert store.steps() == [20, 30]
    assert checkpoint_writer.save(store, 30) == 4
    assert store.latest() == 30
    save, manifest = checkpoint_writer.write(store, 40)
    save.commit(manifest)
    swept = save.retain(1)
    assert store.steps() == [40]
    assert swept["busy"] is False
    assert swept["problems"] == []
    assert {Path(each["path"]).parent.name for each in swept["removed"] if each["bytes"]} == {
        "step-00000020",
        "step-00000030",
    }
    assert swept["bytes"] == sum(each["bytes"] for each in swept["removed"])


def test_debris_is_collected(store: CheckpointStore, checkpoint_writer: "CheckpointWriter") -> None:
    checkpoint_writer.save(store, 1)
    save, _ = checkpoint_writer.write(store, 2)
    assert store.collect()["busy"] is True
    save.release()
    dry = store.collect(dry_run=True)
    assert len(dry["removed"]) == 3
    assert store.collect() == dry
    assert store.collect()["removed"] == []
    save, _ = checkpoint_writer.write(store, 2)
    assert len(save.abandon()["removed"]) == 3
    assert store.steps() == [1]


def test_a_save_that_is_dropped_is_released(
    store: CheckpointStore, checkpoint_writer: "CheckpointWriter"
) -> None:
    save, manifest = checkpoint_writer.write(store, 1)
    assert store.collect()["busy"] is True
    del save
    assert len(store.collect()["removed"]) == 3
    save, manifest = checkpoint_writer.write(store, 1)
    del store
    assert save.commit(manifest) == 1


def test_damage_is_reported_and_left_alone(
    directory: Path, store: CheckpointStore, checkpoint_writer: "CheckpointWriter"
) -> None:
    checkpoint_writer.save(store, 1)
    (manifest,) = directory.glob("step-*/manifest-*")
    flip(manifest, 200)
    with pytest.raises(tl.Corrupt, match="CRC-32C") as caught:
        store.read_manifest(1)
    assert caught.value.filename == str(manifest)
    (problem,) = store.collect()["problems"]
    assert isinstance(problem, tl.Corrupt)
    manifest.write_text("trunkline checkpoint 9 from the future\n")
    with pytest.raises(tl.Format, match="newer version"):
        store.read_manifest(1)


def test_verify(store: CheckpointStore, checkpoint_writer: "CheckpointWriter", engine: tl.Engine) -> None:
    if engine.backend == "memory":
        pytest.skip("checkpoints lie on disk, the memory backend's files do not")
    checkpoint_writer.save(store, 1)
    calls: list[tuple[int, int]] = []
    report = store.verify(1, engine=engine, progress=lambda done, total: calls.append((done, total)))
    total = sum(shard["bytes"] for shard in store.read_manifest(1)["shards"])
    assert report == {"bytes": total, "mismatches": []}
    assert calls[-1] == (total, total)
    paths = store.shard_paths(store.read_manifest(1))
    flip(paths[0], 0)
    flip(paths[1], 9000)
    Path(paths[1]).write_bytes(Path(paths[1]).read_bytes() + b"x")
    header, size, chunk = store.verify(1)["mismatches"]
    assert (header["kind"], header["path"], header["chunk"]) == ("checksum", paths[0], 0)
    assert (size["kind"], size["path"], size["chunk"]) == ("size", paths[1], None)
    assert chunk == {
        "kind": "checksum",
        "errno": 0,
        "path": paths[1],
        "shard": 1,
        "chunk": 2,
        "offset": 8192,
        "bytes": chunk["bytes"],
        "tensors": ["layer.1.weight"],
        "message": chunk["message"],
    }


def test_what_progress_raises_ends_verification(
    store: CheckpointStore, checkpoint_writer: "CheckpointWriter"
) -> None:
    checkpoint_writer.save(store, 1)

    def stop(_done: int, _total: int) -> None:
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        store.verify(1, progress=stop)
    assert store.verify(1)["mismatches"] == []


def test_one_saves_at_a_time(store: CheckpointStore, checkpoint_writer: "CheckpointWriter") -> None:
    save, _ = checkpoint_writer.write(store, 1)
    other = CheckpointStore(store.directory)
    with pytest.raises(tl.Error, match="another process") as caught:
        other.begin(2, [1])
    assert caught.value.errno == errno.EBUSY
    save.release()
    other.begin(2, [1])


def test_a_killed_process_leaves_no_lock(store: CheckpointStore, run_script: "RunScript") -> None:
    run_script(
        """
        import os, signal, sys
        from trunkline._core import CheckpointStore
        save = CheckpointStore(sys.argv[1]).begin(1, [1])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        store.directory,
        expect=-9,
    )
    assert [Path(each["path"]).name for each in store.collect()["removed"]] == ["step-00000001"]
    store.begin(1, [1])


def test_calls_from_threads(store: CheckpointStore, checkpoint_writer: "CheckpointWriter") -> None:
    checkpoint_writer.save(store, 1)
    seen: list[Any] = []

    def read() -> None:
        seen.extend((store.steps(), store.read_manifest(1)["step"]) for _ in range(50))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        checkpoint_writer.save(store, 1)
    for thread in threads:
        thread.join()
    assert seen == [([1], 1)] * 200


def test_arguments(tmp_path: Path, store: CheckpointStore) -> None:
    with pytest.raises(FileNotFoundError, match="not a directory of checkpoints"):
        CheckpointStore(tmp_path / "none", create=False)
    with pytest.raises(TypeError, match="^volumes: "):
        CheckpointStore(tmp_path / "x", "volume")
    with pytest.raises(ValueError, match="^volumes: .* twice"):
        CheckpointStore(tmp_path / "x", ["/a", "/a"])
    with pytest.raises(FileNotFoundError):
        store.read_manifest(4)
    with pytest.raises(ValueError, match="^step: "):
        store.begin(-1, [1])
    with pytest.raises(TypeError, match="^shards: "):
        store.begin(1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^shards: "):
        store.begin(1, [1, 1])
    save = store.begin(1, [0])
    with pytest.raises(ValueError, match="nothing was committed"):
        save.retain(1)
    with pytest.raises(ValueError, match="^keep: "):
        save.retain(0)
    save.commit(_empty(1))
    with pytest.raises(ValueError, match="step 1 was committed before"):
        save.commit(_empty(1))
    save.release()
    with pytest.raises(ValueError, match="has ended"):
        save.commit(_empty(1))


def _empty(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "chunk_bytes": 1 << 20,
        "world_size": 1,
        "volumes": ["."],
        "shards": [],
        "tensors": [],
        "state": None,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "colour"),
        ({"world_size": 0}, "world_size"),
        ({"step": "1"}, "step"),
        ({"volumes": ["relative"]}, "volume"),
        ({"state": float("nan")}, "Out of range float"),
        ({"state": "\ud800"}, "surrogates"),
        ({"step": 2}, "the save of 1"),
    ],
)
def test_manifests_that_readers_would_refuse(
    store: CheckpointStore, change: dict[str, Any], message: str
) -> None:
    save = store.begin(1, [0])
    with pytest.raises(ValueError, match=message):
        save.commit(_empty(1) | change)
    assert save.commit(_empty(1)) == 1
    with pytest.raises(TypeError, match="^manifest: "):
        save.commit([])  # type: ignore[arg-type]
