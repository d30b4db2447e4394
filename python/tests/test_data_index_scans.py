"""tl.data.index of formats whose files are scanned: TFRecord, WebDataset."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import sample_files
from support_log import logged

import trunkline as tl
from trunkline import _core


def test_records_of_tfrecord_files_are_their_data(tmp_path: Path) -> None:
    records = sample_files.tfrecords(tmp_path / "a.tfrecord", 30)
    records += sample_files.tfrecords(tmp_path / "b.tfrecords-00001-of-00002", 20)
    sample_files.tfrecords(tmp_path / "c.tfrec", 0)
    index = tl.data.index(tmp_path, cache=None)
    assert (len(index), index.format, index.nbytes, index._framing) == (50, "tfrecord", 800, "tfrecord")
    assert [bytes(sample_files.view(index, each)) for each in range(50)] == records


def test_a_damaged_length_ends_a_tfrecord_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [b"a" * 10, b"b" * 10, b"c" * 10]
    data = bytearray(b"".join(map(sample_files.tfrecord, records)))
    data[26] ^= 1
    path = tmp_path / "a.tfrecord"
    path.write_bytes(data)
    sample_files.tfrecords(tmp_path / "b.tfrecord", 4)
    with pytest.raises(tl.Corrupt, match=r"a\.tfrecord: at byte 26: the length") as raised:
        tl.data.index(tmp_path)
    assert 'again, or pass on_error="skip" to leave out what is damaged' in str(raised.value)
    assert raised.value.file == str(path)
    with logged(caplog, "WARNING") as logs:
        index = tl.data.index(tmp_path, on_error="skip", cache=None)
    assert len(index) == 5
    assert [each[:2] for each in index.skipped] == [(str(path), 26)]
    assert len(logs) == 1
    assert logs[0].startswith(f"WARNING data: skipped from byte 26 of {path}")


def test_files_of_another_kind_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(b"this is not a TFRecord file")
    with pytest.raises(tl.Format, match="not a TFRecord file"):
        tl.data.index(tmp_path, cache=None)
    (tmp_path / "a.tfrecord").write_bytes(b"\x1f\x8b" + bytes(50))
    with pytest.raises(tl.Unsupported, match="gzip"):
        tl.data.index(tmp_path, cache=None)
    (tmp_path / "b.tar").write_bytes(b"x" * 1024)
    with pytest.raises(tl.Format, match=r"b\.tar: at byte 0: not a tar archive"):
        tl.data.index(tmp_path / "b.tar", cache=None)


def test_concatenated_archives_are_all_read(tmp_path: Path) -> None:
    samples = sample_files.random_samples(6)
    keys = list(samples)
    for name, part in (("a", keys[:3]), ("b", keys[3:])):
        sample_files.webdataset(tmp_path / name, {key: samples[key] for key in part})
    path = tmp_path / "both.tar"
    path.write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    index = tl.data.index(path, cache=None)
    assert [
        sample["__key__"] for batch in tl.data.Loader(index, 2, shuffle=False) for sample in batch.samples
    ] == keys
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(tl.Corrupt, match=r"both\.tar: at byte \d+: after the end of the archive"):
        tl.data.index(path, cache=None)


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_links_in_an_archive_are_not_left_out(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    for key in "ab":
        (folder / f"{key}.jpg").write_bytes(b"image")
    (folder / "a.cls").write_bytes(b"1")
    link(folder / "a.cls", folder / "b.cls")
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for file in ("a.jpg", "a.cls", "b.jpg", "b.cls"):
            archive.add(folder / file, file)
    with pytest.raises(tl.Unsupported, match=r"the member \"b\.cls\" is a link.*--hard-dereference"):
        tl.data.index(path, cache=None)
    index = tl.data.index(path, cache=None, on_error="skip")
    assert len(index) == 1
    assert len(index.skipped) == 1


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_of_archives_are_dicts(tmp_path: Path, tar_format: int) -> None:
    samples = sample_files.random_samples(20)
    prefix = "folder/" * (10 if tar_format == tarfile.USTAR_FORMAT else 40)
    samples |= sample_files.random_samples(5, prefix)
    sample_files.webdataset(tmp_path / "a.tar", samples, tar_format)
    more = sample_files.random_samples(3, "\u00e9")
    sample_files.webdataset(tmp_path / "b.tar", more, tar_format)
    index = tl.data.index(tmp_path, cache=None)
    assert (len(index), index.format, index.nbytes) == (28, "webdataset", 28 * 16)
    seen = [sample_files.view(index, each) for each in range(28)]
    for sample, (key, members) in zip(seen, {**samples, **more}.items(), strict=True):
        assert isinstance(sample, dict)
        assert sample.pop("__key__") == key
        assert {extension: bytes(part) for extension, part in sample.items()} == members
        assert all(isinstance(part, memoryview) for part in sample.values())


def test_a_truncated_archive_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    sample_files.webdataset(path, sample_files.random_samples(4))
    whole = tl.data.index(path, cache=None)
    assert whole._offsets is not None
    data = path.read_bytes()
    # Where the third sample begins: no member is cut.
    path.write_bytes(data[: int(whole._offsets[2])])
    with pytest.raises(tl.Corrupt, match=rf"a\.tar: at byte {whole._offsets[2]}: .*probably truncated"):
        tl.data.index(path, cache=None)
    index = tl.data.index(path, cache=None, on_error="skip")
    assert len(index) == 1  # the second sample may have had more members
    assert index.skipped[0][1] == whole._offsets[1]


def test_modified_archives_are_noticed_in_views(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    sample_files.webdataset(path, sample_files.random_samples(4))
    index = tl.data.index(path, cache=None)
    data = bytearray(path.read_bytes())
    begin = int(index._offsets[1])  # type: ignore[index]
    data[begin] ^= 1
    path.write_bytes(data)
    with pytest.raises((tl.Corrupt, tl.Format), match=r"a\.tar"):
        sample_files.view(index, 1)


def test_scanners_can_be_stopped(tmp_path: Path) -> None:
    sample_files.tfrecords(tmp_path / "a.tfrecord", 3)
    sample_files.webdataset(tmp_path / "a.tar", sample_files.random_samples(2))
    stop = _core.ScanStop()
    stop.stop()
    with pytest.raises(tl.Cancelled):
        _core.scan_tfrecords(tmp_path / "a.tfrecord", stop=stop)
    with pytest.raises(tl.Cancelled):
        _core.scan_tar(tmp_path / "a.tar", stop=stop)
    with pytest.raises(tl.FileNotFoundError, match="gone"):
        _core.scan_tar(tmp_path / "gone")


def test_crc32_is_that_of_zlib() -> None:
    assert _core.crc32(b"123456789") == 0xCBF43926
    assert _core.crc32(b"6789", _core.crc32(b"12345")) == 0xCBF43926


def test_ctrl_c_ends_indexing(tmp_path: Path) -> None:
    for each in range(4):
        sample_files.tfrecords(tmp_path / f"{each}.tfrecord", 3)
    code = """
        import sys, trunkline as tl
        def report(done, total):
            if done == 2:
                print("indexing", flush=True)
                sys.stdin.read()
        try:
            tl.data.index(sys.argv[1], progress=report, cache=None)
        except KeyboardInterrupt:
            print("interrupted")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "indexing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert process.returncode == 0


def test_an_error_in_progress_ends_indexing(tmp_path: Path) -> None:
    sample_files.tfrecords(tmp_path / "a.tfrecord", 3)

    def report(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        tl.data.index(tmp_path, progress=report, cache=None)
