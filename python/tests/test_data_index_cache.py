"""Cache files of tl.data.index."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import sample_files

import trunkline as tl
from trunkline import _core
from trunkline.data import _cache, _table
from trunkline.data._info import IndexInfo


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are scanned."""
    names: list[str] = []
    native = _table.native_scan

    def counting(name: str) -> object:
        scan, stop = native(name)

        def scan_and_count(path: str, size: int, skip: bool) -> object:
            names.append(Path(path).name)
            return scan(path, size, skip)

        return scan_and_count, stop

    monkeypatch.setattr("trunkline.data._build.native_scan", counting)
    return names


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for each in range(3):
        sample_files.tfrecords(tmp_path / "data" / f"{each}.tfrecord", 10 + each)
    return tmp_path / "data"


def cache_file(folder: Path) -> Path:
    (found,) = folder.glob(".trunkline-index-*")
    return found


def same(one: tl.data.Index, other: tl.data.Index) -> bool:
    return one._info == other._info and all(
        numpy.array_equal(array, other._arrays[name]) for name, array in one._arrays.items()
    )


def test_an_index_is_kept_beside_the_data(data: Path, scanned: list[str]) -> None:
    first = tl.data.index(data)
    assert sorted(scanned) == ["0.tfrecord", "1.tfrecord", "2.tfrecord"]
    again = tl.data.index(data)
    assert len(scanned) == 3
    assert same(first, again)
    assert same(again, tl.data.index(data, cache=None))
    assert len(scanned) == 6
    cache_file(data)
    assert sorted(path.name for path in data.iterdir() if path.name.endswith(".tmp")) == []


def test_other_arguments_have_another_cache_file(data: Path, scanned: list[str]) -> None:
    tl.data.index(data)
    tl.data.index(data, on_error="skip")
    assert len(scanned) == 6
    assert len(list(data.glob(".trunkline-index-*"))) == 2


def test_parts_of_one_folder_have_cache_files_of_their_own(data: Path, scanned: list[str]) -> None:
    train, test = [data / "0.tfrecord", data / "1.tfrecord"], data / "2.tfrecord"
    for _ in range(2):
        assert len(tl.data.index(train)) == 21
        assert len(tl.data.index(reversed(train))) == 21
        assert len(tl.data.index(test)) == 12
    assert len(scanned) == 3


def test_an_index_is_immutable(data: Path) -> None:
    for index in (tl.data.index(data), tl.data.index(data), tl.data.index(data, cache=None)):
        assert not any(array.flags.writeable for array in index._arrays.values())


def test_only_changed_files_are_scanned_again(data: Path, scanned: list[str]) -> None:
    tl.data.index(data)
    scanned.clear()
    sample_files.tfrecords(data / "1.tfrecord", 5)
    sample_files.tfrecords(data / "0a.tfrecord", 2)
    (data / "2.tfrecord").unlink()
    index = tl.data.index(data)
    assert sorted(scanned) == ["0a.tfrecord", "1.tfrecord"]
    assert same(index, tl.data.index(data, cache=None))
    assert len(index) == 10 + 2 + 5
    scanned.clear()
    tl.data.index(data)
    assert scanned == []


@pytest.mark.parametrize("change", ["time", "inode", "size"])
def test_every_change_of_a_file_is_noticed(data: Path, scanned: list[str], change: str) -> None:
    tl.data.index(data)
    scanned.clear()
    path = data / "1.tfrecord"
    status = path.stat()
    if change == "time":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    elif change == "inode":
        shutil.copy2(path, data / "copy")
        (data / "copy").replace(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        path.write_bytes(path.read_bytes() + sample_files.tfrecord(b"x"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    tl.data.index(data)
    assert scanned == ["1.tfrecord"]


def test_skipped_samples_are_kept(data: Path, scanned: list[str]) -> None:
    (data / "1.tfrecord").write_bytes((data / "1.tfrecord").read_bytes()[:-1])
    first = tl.data.index(data, on_error="skip")
    assert len(first.skipped) == 1
    assert tl.data.index(data, on_error="skip").skipped == first.skipped
    assert len(scanned) == 3
    sample_files.tfrecords(data / "0.tfrecord", 1)
    assert tl.data.index(data, on_error="skip").skipped == first.skipped
    assert len(scanned) == 4


def test_any_damaged_byte_of_a_cache_file_is_noticed(data: Path, scanned: list[str]) -> None:
    good = tl.data.index(data, cache=None)
    tl.data.index(data)
    path = cache_file(data)
    contents = path.read_bytes()
    used = numpy.flatnonzero(numpy.frombuffer(contents, numpy.uint8)).tolist()
    for place in [*used[:60:2], *used[60::37]]:
        damaged = bytearray(contents)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        scanned.clear()
        assert same(tl.data.index(data), good)
        assert len(scanned) == 3, place
        assert path.read_bytes() == contents


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:30], lambda data: b"{}"]
)
def test_truncated_and_foreign_cache_files_are_replaced(
    data: Path, scanned: list[str], damage: Callable[[bytes], bytes]
) -> None:
    tl.data.index(data)
    path = cache_file(data)
    contents = path.read_bytes()
    path.write_bytes(damage(contents))
    tl.data.index(data)
    assert len(scanned) == 6
    assert path.read_bytes() == contents


def test_the_cache_folder_is_used_if_the_data_are_read_only(
    data: Path, scanned: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    write = _cache._write

    def refusing(path: str, *arguments: object) -> None:
        if path.startswith(str(data)):
            raise OSError(30, "read-only")
        write(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_cache, "_write", refusing)
    first = tl.data.index(data)
    assert list(data.glob(".trunkline-index-*")) == []
    assert len(list((tmp_path / "caches" / "trunkline").iterdir())) == 1
    assert same(tl.data.index(data), first)
    assert len(scanned) == 3


@pytest.mark.parametrize("home", ["relative", "~"])
def test_no_folder_is_made_for_a_user_without_a_home(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    write = _cache._write

    def refusing(path: str, *arguments: object) -> None:
        if path.startswith(str(data)):
            raise OSError(30, "read-only")
        write(path, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_cache, "_write", refusing)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert len(tl.data.index(data)) == 33
    assert list((tmp_path / "work").iterdir()) == []


def test_no_place_for_a_cache_file_is_no_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(path: str, *arguments: object) -> None:
        raise OSError(30, "read-only")

    monkeypatch.setattr(_cache, "_write", refusing)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert len(tl.data.index(data)) == 33
    with pytest.raises(OSError, match="read-only"):
        tl.data.index(data, cache=tmp_path / "index")


def test_a_path_for_the_cache_file(data: Path, tmp_path: Path, scanned: list[str]) -> None:
    tl.data.index(data, cache=tmp_path / "deep" / "index")
    assert list(data.glob(".*")) == []
    tl.data.index(data, cache=tmp_path / "deep" / "index")
    assert len(scanned) == 3
    # Of other data: made again, never trusted.
    shutil.copytree(data, tmp_path / "other")
    assert (
        tl.data.index(tmp_path / "other", cache=tmp_path / "deep" / "index")
        .paths[0]
        .startswith(str(tmp_path / "other"))
    )
    assert len(scanned) == 6


def test_a_mapped_index_is_pickled_by_its_path(data: Path) -> None:
    tl.data.index(data)
    index = tl.data.index(data)
    pickled = pickle.dumps(index)
    assert len(pickled) < 500
    assert same(pickle.loads(pickled), index)
    sample_files.tfrecords(data / "0.tfrecord", 1)
    tl.data.index(data)
    with pytest.raises(tl.Error, match="was replaced"):
        pickle.loads(pickled)
    cache_file(data).unlink()
    with pytest.raises(tl.Error, match="no longer exists"):
        pickle.loads(pickled)


def test_small_folders_of_files_get_no_cache_file(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path, {"a": 3})
    tl.data.index(tmp_path)
    assert list(tmp_path.glob(".*")) == []
    index = tl.data.index(tmp_path, cache=tmp_path / ".index")
    assert (tmp_path / ".index").exists()
    assert same(index, tl.data.index(tmp_path, cache=tmp_path / ".index"))


def test_uniform_samples_need_no_cache_file(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    tl.data.index(tmp_path, record_bytes=10)
    assert list(tmp_path.glob(".*")) == []


def test_large_tables_are_mapped(tmp_path: Path) -> None:
    """A million records, scanned and opened."""
    record = sample_files.tfrecord(b"12345678")
    (tmp_path / "a.tfrecord").write_bytes(record * 1_000_000)
    index = tl.data.index(tmp_path)
    assert (len(index), index.nbytes) == (1_000_000, 16_000_000)
    assert index._offsets is not None
    assert not index._offsets.flags.writeable
    assert int(index._offsets[-1]) == len(record) * 999_999
    assert bytes(sample_files.view(index, 0)) == b"12345678"
    again = tl.data.index(tmp_path)
    assert (again._offsets == index._offsets).all()
    assert len(pickle.dumps(again)) < 500


def test_an_index_can_be_made_from_arrays() -> None:
    count = 1_000_000
    path = b"/data/a.bin"
    arrays = {
        "path_blob": numpy.frombuffer(path, numpy.uint8),
        "path_ends": [len(path)],
        "sizes": [count * 10],
        "mtimes_ns": [0],
        "inodes": [1],
        "first_samples": [0, count],
        "class_files": [],
        "class_ids": [],
        "offsets": numpy.arange(count) * 10,
        "lengths": numpy.full(count, 10),
    }
    index = tl.data.Index(IndexInfo("files", len(b"/data/")), arrays)  # type: ignore[arg-type]
    assert (len(index), index.nbytes, index._offsets.dtype) == (count, 16 * count, numpy.uint64)  # type: ignore[union-attr]
    assert len(index.fingerprint) == 32


def test_crc_of_an_array_larger_than_a_piece(tmp_path: Path) -> None:
    contents = os.urandom(9_000_001)
    (tmp_path / "a").write_bytes(contents)
    with (tmp_path / "a").open("rb", buffering=0) as file:
        assert _cache._checksum_of(file, 1, 9_000_000) == _core.crc32c(contents[1:])


@pytest.mark.parametrize("contents", [b"", b"trunkline", b"PK\3\4 the only copy of a model"])
def test_another_file_is_never_replaced_by_an_index(
    data: Path, tmp_path: Path, scanned: list[str], contents: bytes
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(contents)
    (tmp_path / "link").symlink_to(path)
    for given in (path, tmp_path / "link"):
        with pytest.raises(FileExistsError, match=rf"^cache: {given} exists and is not an index .* remove"):
            tl.data.index(data, cache=given)
    assert path.read_bytes() == contents
    assert scanned == []


def test_a_file_that_comes_while_data_are_scanned_is_not_replaced(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(FileExistsError, match=r"^cache: .*model.pt exists"):
        tl.data.index(data, cache=path, progress=lambda done, total: path.write_bytes(b"a model"))
    assert path.read_bytes() == b"a model"


def test_a_data_file_is_never_replaced_by_an_index(data: Path, tmp_path: Path, scanned: list[str]) -> None:
    contents = (data / "1.tfrecord").read_bytes()
    (tmp_path / "link").symlink_to(data / "1.tfrecord")
    for given in (data / "1.tfrecord", tmp_path / "link"):
        with pytest.raises(ValueError, match=rf"^cache: {given} is one of the data files"):
            tl.data.index(data, cache=given)
    assert (data / "1.tfrecord").read_bytes() == contents
    assert scanned == []


@pytest.mark.parametrize("given", ["folder", "folder/", "missing/"])
def test_a_folder_is_no_name_for_an_index(data: Path, tmp_path: Path, scanned: list[str], given: str) -> None:
    (tmp_path / "folder").mkdir()
    folder = f"{tmp_path}/{given}"
    with pytest.raises(
        IsADirectoryError, match=rf"^cache: {folder} is a folder; name a file in it"
    ) as caught:
        tl.data.index(data, cache=folder)
    assert caught.value.filename == folder
    assert scanned == []
    assert not (tmp_path / "missing").exists()


def test_a_folder_at_the_automatic_place_is_no_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    tl.data.index(data)
    path = cache_file(data)
    path.unlink()
    path.mkdir()
    assert len(tl.data.index(data)) == 33
    assert len(list((tmp_path / "caches" / "trunkline").iterdir())) == 1
    (cached,) = (tmp_path / "caches" / "trunkline").iterdir()
    cached.unlink()
    cached.mkdir()
    assert len(tl.data.index(data)) == 33


def test_a_link_at_the_automatic_place_does_not_lose_the_file_behind_it(data: Path, tmp_path: Path) -> None:
    tl.data.index(data)
    path = cache_file(data)
    path.unlink()
    (tmp_path / "precious").write_bytes(b"precious")
    path.symlink_to(tmp_path / "precious")
    assert len(tl.data.index(data)) == 33
    assert (tmp_path / "precious").read_bytes() == b"precious"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:30] + bytes(100)])
def test_an_index_that_is_replaced_keeps_its_mode_and_links(
    data: Path, tmp_path: Path, damage: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, link = tmp_path / "index", tmp_path / "link"
    tl.data.index(data, cache=index)
    contents = index.read_bytes()
    index.write_bytes(damage(contents))
    index.chmod(0o600)
    link.symlink_to("index")
    modes = []
    create = _core.ReplacementFile

    def watching(path: str) -> object:
        file = create(path)
        modes.extend(each.stat().st_mode & 0o777 for each in tmp_path.glob(".trunkline-*.tmp"))
        return file

    monkeypatch.setattr(_core, "ReplacementFile", watching)
    tl.data.index(data, cache=link)
    assert link.is_symlink()
    assert index.read_bytes() == contents
    assert index.stat().st_mode & 0o777 == 0o600
    assert modes == [0o600]
    tl.data.index(data, cache=tmp_path / "other")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o666 & ~umask


def test_temporary_files_of_killed_processes_are_removed(data: Path, tmp_path: Path) -> None:
    """And neither those of living ones, nor others."""
    code = (
        "import os, sys; from trunkline import _core; file = _core.ReplacementFile(sys.argv[1]); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "index")], check=False)
    (killed,) = tmp_path.glob(".trunkline-*.tmp")
    living = _core.ReplacementFile(tmp_path / "another")
    (used,) = set(tmp_path.glob(".trunkline-*.tmp")) - {killed}
    (tmp_path / ".trunkline-mine.tmp").touch()
    tl.data.index(data, cache=tmp_path / "index")
    assert set(tmp_path.glob(".trunkline-*.tmp")) == (
        {used, tmp_path / ".trunkline-mine.tmp"}
        if _core.is_on_local_filesystem(tmp_path)
        else {killed, used, tmp_path / ".trunkline-mine.tmp"}
    )
    living.finish()
    assert (tmp_path / "another").read_bytes() == b""
    assert not used.exists()
    with pytest.raises(ValueError, match="finished"):
        living.fileno()


def test_an_index_that_cannot_be_written_leaves_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> int:
        raise MemoryError

    tl.data.index(data, cache=tmp_path / "a" / "index")
    (tmp_path / "a" / "index").unlink()
    monkeypatch.setattr(_cache, "_HEAD", types.SimpleNamespace(pack=failing, size=_cache._HEAD.size))
    with pytest.raises(MemoryError):
        tl.data.index(data, cache=tmp_path / "a" / "index")
    assert list((tmp_path / "a").iterdir()) == []


def paths_in(folder: Path) -> list[Path]:
    return sorted(each for each in folder.glob("*") if not each.is_dir())


def test_index_files_never_become_samples(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline.data._build._WORTH_SAVING", 0)
    first = tl.data.index(paths_in(data), format="files")
    file = _core.ReplacementFile(data / "unfinished")
    for _ in range(3):
        index = tl.data.index(paths_in(data), format="files")
        assert len(index) == 3
        assert index.fingerprint == first.fingerprint
        assert len(list(data.glob(".trunkline-index-*"))) == 1
    file.discard()
    # A temporary file that is gone again before it is looked at.
    assert (
        len(tl.data.index([*paths_in(data), data / ".trunkline-0123456789abcdef.tmp"], format="files")) == 3
    )


def test_an_index_that_is_kept_within_the_data_is_not_a_sample(data: Path) -> None:
    for _ in range(3):
        assert len(tl.data.index(data, format="files", cache=data / "mine")) == 3
    # Listed by its path, from a call with another cache, and damaged.
    assert len(tl.data.index(paths_in(data), format="files", cache=None)) == 3
    assert len(tl.data.index(data, format="files", cache=None)) == 3
    (data / "mine").write_bytes((data / "mine").read_bytes()[:-1])
    assert len(tl.data.index(data, format="files", cache=data / "mine")) == 3
    for given in (data / "mine", cache_file_name(data)):
        with pytest.raises(ValueError, match="own files"):
            tl.data.index(given)


def cache_file_name(folder: Path) -> Path:
    return folder / ".trunkline-index-0123456789abcdef"


def test_the_automatic_cache_is_named_as_before(data: Path) -> None:
    """By the paths that were given: caches of earlier versions stay valid."""
    tl.data.index(data)
    key = {
        "format": "tfrecord",
        "columns": None,
        "skip": False,
        "root": f"{data}/",
        "paths": hashlib.sha256(b"").hexdigest()[:16],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    assert cache_file(data).name == f".trunkline-index-{digest}"
