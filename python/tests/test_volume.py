"""Several directories as one."""

import random
from pathlib import Path

import pytest

import trunkline as tl


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"disk{i}" for i in range(3)]
    for directory in made:
        directory.mkdir()
    return made


def test_striped_files(engine: tl.Engine, directories: list[Path]) -> None:
    if engine.backend == "memory":
        pytest.skip("volumes keep descriptors on disk, the memory backend does not")
    data = random.Random(0).randbytes(1_000_003)
    volume = tl.Volume(directories, stripe_bytes="64KiB")
    assert volume.stripe_bytes == 64 << 10
    assert volume.directories == [str(directory) for directory in directories]
    assert "stripe_bytes=65536" in repr(volume)
    assert volume.list() == []
    with volume.open("weights", "w", engine=engine) as file:
        assert file.pwrite(data) == len(data)
        assert file.size == len(data)
        file.sync()
    assert volume.list() == ["weights"]
    for directory in directories:
        assert len(list(directory.iterdir())) == 2
    with volume.open("weights", engine=engine) as file:
        target = bytearray(300_000)
        assert file.pread(target, 500_001) == 300_000
        assert target == data[500_001:800_001]
    volume.remove("weights")
    assert volume.list() == []
    with pytest.raises(FileNotFoundError):
        volume.remove("weights")


def test_open_takes_directories_and_a_name(directories: list[Path]) -> None:
    data = random.Random(1).randbytes(5_000_000)
    with tl.open([*directories, "weights"], "w") as file:
        file.pwrite(data)
    target = bytearray(len(data))
    with tl.open((directories, "weights")) as file:
        file.pread(target)
    assert target == data
    target = bytearray(len(data))
    with tl.Engine("threads") as engine, tl.Volume(directories).open("weights", engine=engine) as file:
        file.pread(target)
    assert target == data


def test_a_missing_member_is_corrupt(directories: list[Path]) -> None:
    volume = tl.Volume(directories, "4KiB")
    with volume.open("weights", "w") as file:
        file.pwrite(bytes(100_000))
    (directories[1] / "weights.1").unlink()
    with pytest.raises(tl.Corrupt) as caught:
        volume.open("weights")
    assert "weights" in str(caught.value.file)


def test_arguments(directories: list[Path]) -> None:
    with pytest.raises(TypeError, match="^directories: "):
        tl.Volume("/tmp")
    with pytest.raises(TypeError, match="^directories: "):
        tl.Volume([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="stripe"):
        tl.Volume(directories, stripe_bytes=5)
    with pytest.raises(ValueError, match="^path: "):
        tl.open([])
    with pytest.raises(ValueError, match="^path: "):
        tl.open(["name"])
    with pytest.raises(TypeError, match="^path: "):
        tl.open([3, "name"])  # type: ignore[list-item]
    with pytest.raises(FileNotFoundError):
        tl.Volume(directories).open("missing")
