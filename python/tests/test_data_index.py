"""tl.data.index: which samples there are, and where."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy
import pytest
import sample_files
from support_log import logged

import trunkline as tl


def test_files_of_folders_are_samples_in_the_order_of_their_paths(tmp_path: Path) -> None:
    contents = sample_files.class_folders(tmp_path, {"cat": 3, "dog": 2, "cat.d": 1})
    index = tl.data.index(tmp_path)
    assert (len(index), index.format, index.nbytes) == (6, "files", 6 * 16)
    assert list(index.paths) == sorted(contents)
    assert [bytes(sample_files.view(index, each)) for each in range(6)] == list(contents.values())
    assert index.paths[-1] == max(contents)
    assert index.paths[1:3] == sorted(contents)[1:3]


def test_paths_are_sorted_as_text_although_folders_are_walked(tmp_path: Path) -> None:
    for name in ("a/x", "a.txt", "a-b/x", "a/b/c", "ab"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    index = tl.data.index(tmp_path)
    assert list(index.paths) == sorted(index.paths)
    assert len(index) == 5


def test_classes_are_the_first_folders(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path, {"b/deep": 2, "a": 1, "c": 2})
    index = tl.data.index(tmp_path)
    assert index.classes == ["a", "b", "c"]
    labels = index.labels(numpy.arange(5))
    assert (labels.dtype, labels.tolist()) == (numpy.int64, [0, 1, 1, 2, 2])
    assert index.labels([[4, 0]]).tolist() == [[2, 0]]
    assert index.labels([]).tolist() == []
    with pytest.raises(IndexError, match="5 is not the number of a sample"):
        index.labels([5])
    with pytest.raises(IndexError, match="-1"):
        index.labels([-1])
    with pytest.raises(TypeError, match="samples"):
        index.labels([0.5])


def test_classes_of_several_folders_are_merged(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path / "one", {"b": 1, "c": 1})
    sample_files.class_folders(tmp_path / "two", {"a": 1, "b": 1})
    index = tl.data.index([tmp_path / "two", tmp_path / "one"])
    assert index.classes == ["a", "b", "c"]
    assert index.labels(range(4)).tolist() == [1, 2, 0, 1]


def test_files_outside_of_folders_have_no_class(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path, {"a": 1, ".": 1})
    index = tl.data.index(tmp_path)
    assert index.classes == []
    with pytest.raises(ValueError, match="no classes"):
        index.labels([0])


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path, {"a": 1, ".git": 2})
    (tmp_path / "a" / ".DS_Store").write_bytes(b"x")
    assert len(tl.data.index(tmp_path)) == 1
    assert len(tl.data.index(tmp_path / "a" / ".DS_Store")) == 1  # asked for


def test_names_of_any_bytes_are_supported(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\xc3.bin"
    with open(name, "wb") as file:  # noqa: PTH123
        file.write(b"abc")
    index = tl.data.index(tmp_path)
    assert os.fsencode(index.paths[0]) == name
    assert bytes(sample_files.view(index, 0)) == b"abc"
    assert len(index.fingerprint) == 32


def test_links_and_dots_are_followed_as_the_kernel_does(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path, {"x/y": 1, "z": 1})
    (tmp_path / "link").symlink_to(tmp_path / "x" / "y")
    (tmp_path / "x" / "here").write_bytes(b"1")
    index = tl.data.index([f"{tmp_path}/./link/../here", f"{tmp_path}//z//"])
    assert Path(index.paths[0]).read_bytes() == b"1"
    assert len(index) == 2
    assert index.fingerprint == tl.data.index([f"{tmp_path}/link/../here", f"{tmp_path}/z"]).fingerprint


def test_loops_of_links_are_an_error(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path, {"a": 1})
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    with pytest.raises(tl.Error, match="leads to a folder that it is in"):
        tl.data.index(tmp_path)


def test_a_dangling_link_is_not_silently_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.bin").symlink_to(tmp_path / "gone")
    with pytest.raises(tl.FileNotFoundError, match=r"a\.bin"):
        tl.data.index(tmp_path)


def test_records_take_no_table(tmp_path: Path) -> None:
    data = os.urandom(1000)
    (tmp_path / "a.bin").write_bytes(data[:508])
    (tmp_path / "b.bin").write_bytes(data[:208])
    index = tl.data.index(tmp_path, record_bytes=100, header_bytes=8)
    assert (len(index), index.format, index.nbytes) == (7, "records", 0)
    assert [bytes(sample_files.view(index, each)) for each in (0, 4, 5)] == [
        data[8:108],
        data[408:508],
        data[8:108],
    ]


def test_records_may_overlap(tmp_path: Path) -> None:
    tokens = numpy.arange(100, dtype="<u2")
    tokens.tofile(tmp_path / "tokens.bin")
    index = tl.data.index(tmp_path / "tokens.bin", record_bytes=20, stride_bytes=2)
    assert len(index) == 91
    assert numpy.frombuffer(sample_files.view(index, 90), "<u2").tolist() == list(range(90, 100))  # type: ignore[call-overload]
    spaced = tl.data.index(tmp_path / "tokens.bin", record_bytes=20, stride_bytes=60)
    assert [sample_files.ranges_of(spaced, each)[1] for each in range(len(spaced))] == [
        [(0, 20)],
        [(60, 20)],
        [(120, 20)],
        [(180, 20)],
    ]


def test_ten_billion_samples_cost_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "huge.bin", "wb") as file:  # noqa: PTH123
        file.truncate(10**13)
    index = tl.data.index(tmp_path / "huge.bin", record_bytes=4096, stride_bytes=1000)
    assert len(index) == (10**13 - 4096) // 1000 + 1
    assert index.nbytes == 0
    assert len(pickle.dumps(index)) < 3000


def test_a_truncated_record_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(250))
    (tmp_path / "b.bin").write_bytes(bytes(3))
    with pytest.raises(tl.CutOff, match=r"a\.bin is truncated: it has .*byte 200; check record"):
        tl.data.index(tmp_path, record_bytes=100)
    with logged(caplog, "WARNING") as records:
        index = tl.data.index(tmp_path, record_bytes=100, on_error="skip")
    assert len(index) == 2
    assert [(Path(path).name, offset) for path, offset, _ in index.skipped] == [("a.bin", 200), ("b.bin", 0)]
    assert len(records) == 2
    assert "a.bin" in records[0]


def test_rows_of_npy_files_are_arrays(tmp_path: Path) -> None:
    first = sample_files.npy_rows(tmp_path / "a.npy", 4)
    second = sample_files.npy_rows(tmp_path / "b.npy", 3)
    sample_files.npy_rows(tmp_path / "c.npy", 0)
    index = tl.data.index(tmp_path)
    assert (len(index), index.format, index.nbytes) == (7, "npy", 0)
    for sample, row in enumerate([*first, *second]):
        seen = sample_files.view(index, sample)
        assert isinstance(seen, numpy.ndarray)
        assert (seen.dtype, seen.shape) == (row.dtype, row.shape)
        assert (seen == row).all()
        assert not seen.flags.owndata


@pytest.mark.parametrize("dtype", [">i4", "|b1", "<M8[s]", "<c16", "<U3", "|S5"])
def test_rows_of_any_plain_dtype(tmp_path: Path, dtype: str) -> None:
    array = numpy.arange(6).astype("<i8").reshape(6).astype(dtype)
    numpy.save(tmp_path / "a.npy", array)
    index = tl.data.index(tmp_path / "a.npy")
    assert [sample_files.view(index, each) for each in range(6)] == list(array)  # type: ignore[comparison-overlap]


def test_rows_of_structured_dtypes(tmp_path: Path) -> None:
    array = numpy.zeros((2, 3), numpy.dtype([("x", "<f4"), ("y", "<i2", (2,))]))
    array["y"][1, 2] = (5, 6)
    numpy.save(tmp_path / "a.npy", array)
    index = pickle.loads(pickle.dumps(tl.data.index(tmp_path / "a.npy")))
    assert (sample_files.view(index, 1) == array[1]).all()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("array", "kind", "why"),
    [
        (numpy.asfortranarray(numpy.zeros((3, 2))), tl.Unsupported, "Fortran order"),
        (numpy.array([{}, 1]), tl.Unsupported, "Python objects"),
        (numpy.float32(3), tl.Unsupported, "scalar"),
        (numpy.zeros((3, 0)), tl.Unsupported, "no bytes"),
    ],
)
def test_arrays_without_rows_in_place_are_unsupported(
    tmp_path: Path, array: numpy.ndarray, kind: type[tl.Error], why: str
) -> None:
    numpy.save(tmp_path / "bad.npy", array)
    with pytest.raises(kind, match=f"bad.npy.*{why}"):
        tl.data.index(tmp_path)
    sample_files.npy_rows(tmp_path / "good.npy", 2)
    index = tl.data.index(tmp_path, on_error="skip")
    assert (len(index), len(index.skipped)) == (2, 1)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda data: data[:-1], tl.CutOff),
        (lambda data: data[:40], tl.CutOff),
        (lambda data: data[:5], tl.CutOff),
        (lambda data: b"", tl.CutOff),
        (lambda data: b"x" + data[1:], tl.Format),
        (lambda data: data[:6] + b"\x09" + data[7:], tl.Unsupported),
        (lambda data: data[:6] + b"\x02\0\xff\xff\xff\x7f" + data[12:], tl.Format),
        (lambda data: data.replace(b"descr", b"descx"), tl.Format),
        (lambda data: data.replace(b"(2, 3, 2)", b"(9, 3, 2)"), tl.CutOff),
        (lambda data: data.replace(b"(2, 3, 2)", b"(2, -3,2)"), tl.Format),
        (lambda data: data.replace(b"(2, 3, 2)", b"(2, True)"), tl.Format),
        (lambda data: data.replace(b"'shape'", b"#shape'"), tl.Format),
        (lambda data: data.replace(b"'<f4'", b"'3f4'"), tl.Format),
        (lambda data: data.replace(b"(2, 3, 2)", b"((((((((("), tl.Format),
    ],
)
def test_damaged_npy_files_are_named(tmp_path: Path, damage: object, kind: type[tl.Error]) -> None:
    path = tmp_path / "a.npy"
    sample_files.npy_rows(path, 2)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(kind, match=r"a\.npy"):
        tl.data.index(path)


def test_columns_of_other_formats_are_an_error(tmp_path: Path) -> None:
    sample_files.npy_rows(tmp_path / "a.npy", 2)
    with pytest.raises(ValueError, match="columns: only format \"parquet\" supports them, not 'npy'"):
        tl.data.index(tmp_path, columns=["a"])


def test_rows_of_different_shapes_are_an_error(tmp_path: Path) -> None:
    sample_files.npy_rows(tmp_path / "a.npy", 2, (3,))
    sample_files.npy_rows(tmp_path / "b.npy", 2, (4,))
    with pytest.raises(tl.Format, match=r"b\.npy: has rows of float32 \[4\], but those of .*a\.npy"):
        tl.data.index(tmp_path)


def test_mixed_formats_are_named(tmp_path: Path) -> None:
    sample_files.npy_rows(tmp_path / "a.npy", 2)
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(ValueError, match=r"files are of several formats: .*1 of format 'npy'"):
        tl.data.index(tmp_path)
    assert len(tl.data.index(tmp_path, format="npy")) == 2
    assert len(tl.data.index(tmp_path, format="files")) == 2
    with pytest.raises(tl.Format, match=r"b\.txt"):
        tl.data.index([tmp_path / "a.npy", tmp_path / "b.txt"], format="npy")


def test_a_folder_without_the_suffix_of_the_format_is_of_that_format(tmp_path: Path) -> None:
    sample_files.npy_rows(tmp_path / "a.npy", 2)
    (tmp_path / "a.npy").rename(tmp_path / "part-0")
    assert len(tl.data.index(tmp_path, format="npy")) == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "what"),
    [
        ({"format": "csv"}, ValueError, "format"),
        ({"format": "records"}, ValueError, "record_bytes"),
        ({"record_bytes": 0}, ValueError, "record_bytes"),
        ({"record_bytes": "1"}, TypeError, "record_bytes"),
        ({"record_bytes": True}, TypeError, "record_bytes"),
        ({"stride_bytes": 3}, ValueError, "stride_bytes"),
        ({"format": "files", "header_bytes": 3}, ValueError, "header_bytes"),
        ({"record_bytes": 1, "columns": ["a"]}, ValueError, "columns"),
        ({"columns": "a"}, TypeError, "columns"),
        ({"columns": []}, ValueError, "columns"),
        ({"columns": ["a", "a"]}, ValueError, "columns"),
        ({"columns": [1]}, TypeError, "columns"),
        ({"on_error": "ignore"}, ValueError, "on_error"),
        ({"progress": 1}, TypeError, "progress"),
        ({"workers": 0}, ValueError, "workers"),
        ({"cache": 3}, TypeError, "cache"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, arguments: dict[str, object], kind: type[Exception], what: str
) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(kind, match=f"^{what}: "):
        tl.data.index(tmp_path, **arguments)


def test_wrong_arguments_say_what_to_pass(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match='^stride_bytes: requires record_bytes= as well .format "records".$'):
        tl.data.index(tmp_path, stride_bytes=4)
    with pytest.raises(ValueError, match='where each file is one sample, such as an image, it is "files"$'):
        tl.data.index(tmp_path, format="jpeg")  # type: ignore[arg-type]


def test_wrong_paths_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(tl.FileNotFoundError, match="gone"):
        tl.data.index(tmp_path / "gone")
    with pytest.raises(ValueError, match="at least one"):
        tl.data.index([])
    with pytest.raises(ValueError, match="given twice"):
        tl.data.index([tmp_path / "a.bin", str(tmp_path / "a.bin")])
    with pytest.raises(ValueError, match="which is given too"):
        tl.data.index([tmp_path / "a.bin", tmp_path])
    with pytest.raises(TypeError, match="^paths: "):
        tl.data.index(3)
    with pytest.raises(TypeError, match="paths"):
        tl.data.index([3])
    with pytest.raises(ValueError, match="URL"):
        tl.data.index("s3://bucket/data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(tl.FileNotFoundError, match="empty/ has no files to index"):
        tl.data.index(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        tl.data.index(tmp_path / "pipe")


def test_a_fingerprint_is_that_of_a_copy(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path / "one", {"a": 2, "b": 1})
    shutil.copytree(tmp_path / "one", tmp_path / "else" / "two")
    one = tl.data.index(tmp_path / "one")
    assert one.fingerprint == tl.data.index(tmp_path / "else" / "two").fingerprint
    assert one.fingerprint != tl.data.index(tmp_path / "one", record_bytes=1).fingerprint
    (tmp_path / "one" / "a" / "000.bin").write_bytes(b"other size")
    assert one.fingerprint != tl.data.index(tmp_path / "one").fingerprint


def test_record_sizes_are_in_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    made = [
        tl.data.index(tmp_path, record_bytes=10),
        tl.data.index(tmp_path, record_bytes=10, stride_bytes=5),
        tl.data.index(tmp_path, record_bytes=20),
        tl.data.index(tmp_path, record_bytes=10, header_bytes=10),
    ]
    assert len({index.fingerprint for index in made}) == 4


def test_an_index_survives_pickling(tmp_path: Path) -> None:
    sample_files.class_folders(tmp_path, {"a": 2, "b": 1})
    index = tl.data.index(tmp_path)
    again = pickle.loads(pickle.dumps(index))
    assert (again.fingerprint, list(again.paths)) == (index.fingerprint, list(index.paths))
    assert again.labels(range(3)).tolist() == [0, 0, 1]
    assert repr(again) == "<Index of 3 samples in 3 files, format 'files'>"
    assert repr(tl.data.index(again.paths[0])) == "<Index of 1 sample in 1 file, format 'files'>"


def test_progress_is_reported(tmp_path: Path) -> None:
    for each in range(5):
        sample_files.npy_rows(tmp_path / f"{each}.npy", 1)
    seen: list[tuple[int, int]] = []
    tl.data.index(tmp_path, progress=lambda done, total: seen.append((done, total)), workers=2)
    assert seen == [(each, 5) for each in range(1, 6)]


def test_importing_data_imports_no_torch(tmp_path: Path, run_script: object) -> None:
    code = "import sys, trunkline as tl; tl.data.index; assert 'torch' not in sys.modules; print(tl.data)"
    assert "trunkline.data" in run_script(code)  # type: ignore[operator]
    assert "trunkline" in sys.modules
