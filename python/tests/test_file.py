"""Any request works: sizes, offsets, modes, sparse files, batches."""

import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

import trunkline as tl


def random_bytes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


@pytest.mark.parametrize("count", [0, 1, 511, 512, 4095, 4096, 4097, 65536, 65537, 1_000_003])
def test_what_is_written_is_read(engine: tl.Engine, tmp_path: Path, count: int) -> None:
    data = random_bytes(count)
    with tl.open(tmp_path / "file", "w", engine=engine) as file:
        assert file.pwrite(data) == count
        assert file.size == count
        target = bytearray(count)
        assert file.pread(target) == count
        assert target == data


@pytest.mark.parametrize("offset", [0, 1, 511, 4096, 65535, 300_001])
@pytest.mark.parametrize("count", [1, 5000, 200_000])
def test_unaligned_write_keeps_the_bytes_around_it(
    engine: tl.Engine, tmp_path: Path, offset: int, count: int
) -> None:
    before = random_bytes(600_001, 1)
    data = random_bytes(count, 2)
    with tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(before)
        assert file.pwrite(data, offset) == count
        expected = bytearray(before)
        expected[offset : offset + count] = data
        target = bytearray(len(before))
        file.pread(target)
        assert target == expected
        assert file.size == len(before)


def test_write_mode_leaves_no_stale_tail(engine: tl.Engine, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with tl.open(path, "w", engine=engine) as file:
        file.pwrite(b"a" * 100_000)
    with tl.open(path, "w", engine=engine) as file:
        file.pwrite(b"b" * 10)
        assert file.size == 10


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        tl.open(path)
    with pytest.raises(FileNotFoundError):
        tl.open(path, "r+")
    with tl.open(path, "x") as file:
        assert file.mode == "x"
        file.pwrite(b"one")
    with pytest.raises(FileExistsError):
        tl.open(path, "x")
    with tl.open(path, "r+") as file:
        file.pwrite(b"T", 0)
    with tl.open(path, "rb") as file:
        target = bytearray(3)
        file.pread(target)
        assert target == b"Tne"
        assert file.mode == "r"
        with pytest.raises(tl.Error):
            file.pwrite(b"x")
    assert path.read_bytes() == b"Tne"
    with pytest.raises(ValueError, match="^mode: "):
        tl.open(path, "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^mode: "):
        tl.open(path, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("direct", ["auto", "never", False, "unless_cached"])
def test_direct_choices_read_the_same(tmp_path: Path, direct: object) -> None:
    path = tmp_path / "file"
    path.write_bytes(random_bytes(200_001))
    with tl.open(path, direct=direct) as file:  # type: ignore[arg-type]
        target = bytearray(200_001)
        file.pread(target)
    assert target == random_bytes(200_001)


@pytest.mark.parametrize("direct", ["always", True])
def test_direct_always_is_direct_or_unsupported(tmp_path: Path, direct: object) -> None:
    path = tmp_path / "file"
    path.write_bytes(random_bytes(1 << 20))
    with tl.Engine() as engine:
        try:
            file = tl.open(path, direct=direct, engine=engine)  # type: ignore[arg-type]
        except tl.Unsupported:
            return
        buffer = tl.pinned_empty(1 << 20, engine=engine)
        assert file.pread(buffer) == 1 << 20
        assert engine.stats()["bytes"]["direct"] == 1 << 20


def test_direct_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^direct: "):
        tl.open(tmp_path / "file", "w", direct="maybe")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^direct: "):
        tl.open(tmp_path / "file", "w", direct=None)  # type: ignore[arg-type]


def test_read_past_the_end(engine: tl.Engine, tmp_path: Path) -> None:
    with tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(b"x" * 1000)
        assert file.pread(bytearray(0), 1000) == 0
        with pytest.raises(tl.EndOfFile, match="1000"):
            file.pread(bytearray(10), 995)
        with pytest.raises(tl.EndOfFile):
            file.pread(bytearray(300_000))
        future = file.async_pread(bytearray(10), 2000)
        assert isinstance(future.exception(), tl.EndOfFile)


def test_truncate_and_holes(engine: tl.Engine, tmp_path: Path) -> None:
    with tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.truncate("1MiB")
        assert file.size == 1 << 20
        file.pwrite(b"end", (1 << 20) - 3)
        target = bytearray(b"x" * (1 << 20))
        file.pread(target)
        assert target == bytes((1 << 20) - 3) + b"end"
        file.truncate(5)
        assert file.size == 5
        file.sync()
    with pytest.raises(tl.Error):
        _ = file.size


def test_overlapping_reads(engine: tl.Engine, tmp_path: Path) -> None:
    data = random_bytes(500_000)
    with tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(data)
        targets = [bytearray(300_000) for _ in range(16)]
        futures = [file.async_pread(target, 7 * i) for i, target in enumerate(targets)]
        assert tl.wait_all(futures) == 16 * 300_000
        for i, target in enumerate(targets):
            assert target == data[7 * i : 7 * i + 300_000]


def test_batch_over_many_files(engine: tl.Engine, tmp_path: Path) -> None:
    files = [tl.open(tmp_path / f"file{i}", "w", engine=engine) for i in range(20)]
    blocks = [random_bytes(20_000 + i, i) for i in range(20)]
    writes = [tl.Write(file, block, 13) for file, block in zip(files, blocks, strict=True)]
    assert tl.wait_all(engine.submit(writes)) == sum(map(len, blocks))
    targets = [np.empty(len(block), np.uint8) for block in blocks]
    reads = [tl.Read(file, target, offset=13) for file, target in zip(files, targets, strict=True)]
    futures = engine.submit(reads)
    assert [future.result() for future in futures] == [len(block) for block in blocks]
    for target, block in zip(targets, blocks, strict=True):
        assert target.tobytes() == block
    assert reads[3].file is files[3]
    assert reads[3].buffer is targets[3]
    assert reads[3].offset == 13
    for file in files:
        file.close()


def test_batch_arguments(engine: tl.Engine, tmp_path: Path) -> None:
    assert engine.submit([]) == []
    with tl.open(tmp_path / "file", "w", engine=engine) as file:
        with pytest.raises(TypeError, match="^requests: item 1 "):
            engine.submit([tl.Write(file, b"a"), "no"])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="^requests: "):
            engine.submit(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^requests\[1\]\.buffer: .*read-only"):
            engine.submit([tl.Write(file, b"a"), tl.Read(file, b"a")])
        assert file.size == 0  # nothing of it was submitted
        with pytest.raises(ValueError, match="^offset: "):
            tl.Read(file, bytearray(1), -1)
        futures = engine.submit([tl.Write(file, b"abc"), tl.Read(file, bytearray(3), 100)])
        assert futures[0].result() == 3
        assert isinstance(futures[1].exception(), tl.EndOfFile)


def test_offsets_are_checked(tmp_path: Path) -> None:
    with tl.open(tmp_path / "file", "w") as file:
        for wrong, exception in [(-1, ValueError), (1 << 63, ValueError), ("0", TypeError), (1.0, TypeError)]:
            for call in (file.pread, file.pwrite, file.async_pread, file.async_pwrite):
                with pytest.raises(exception, match="^offset: "):
                    call(bytearray(1), wrong)  # type: ignore[arg-type]
        assert file.pwrite(b"a", np.int64(3)) == 1  # type: ignore[arg-type]
        assert file.size == 4


def test_paths(tmp_path: Path) -> None:
    tl.open(str(tmp_path / "a"), "w").close()
    tl.open(os.fsencode(tmp_path / "b"), "w").close()
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe name")
    with tl.open(odd, "w") as file:
        assert file.path == odd
        assert "mode='w'" in repr(file)
    assert Path(odd).exists()
    with pytest.raises(FileExistsError) as caught:
        tl.open(odd, "x")
    assert caught.value.filename == odd
    assert "name" in str(caught.value)
    with pytest.raises(ValueError, match="^path: .*null"):
        tl.open("a\0b")
    with pytest.raises(TypeError, match="^path: .*not int"):
        tl.open(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^engine: "):
        tl.open(tmp_path / "a", engine="io_uring")  # type: ignore[arg-type]


def test_close_refuses_what_comes_later(engine: tl.Engine, tmp_path: Path) -> None:
    file = tl.open(tmp_path / "file", "w", engine=engine)
    pending = file.async_pwrite(random_bytes(300_000))
    file.close()
    file.close()
    assert pending.done()
    assert pending.result() == 300_000
    with pytest.raises(tl.Error, match="closed"):
        file.pwrite(b"x")
    assert isinstance(file.async_pread(bytearray(1)).exception(), tl.Error)


def test_many_threads_share_a_file(engine: tl.Engine, tmp_path: Path) -> None:
    data = random_bytes(800_000)
    mismatches: list[int] = []
    with tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(data)

        def read_some(seed: int) -> None:
            chooser = random.Random(seed)
            for _ in range(30):
                count = chooser.choice([10, 4096, 100_000])
                offset = chooser.randrange(len(data) - count)
                target = bytearray(count)
                if chooser.random() < 0.5:
                    file.pread(target, offset)
                else:
                    file.async_pread(target, offset).result()
                if target != data[offset : offset + count]:
                    mismatches.append(offset)

        threads = [threading.Thread(target=read_some, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert mismatches == []


@pytest.mark.parametrize("offset", [900, 1000, 5000])
def test_the_end_of_the_file_is_named_wherever_a_read_begins(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(1000))
    with tl.open(path) as file, pytest.raises(tl.EndOfFile, match="the file ends at 1000;"):
        file.pread(bytearray(200), offset)
