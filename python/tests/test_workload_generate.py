"""Data sets that `trunkline workload generate` writes."""

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

import trunkline as tl
from trunkline import workload as workloads
from trunkline.workload import Workload, _generate, cli
from trunkline.workload._content import Content, sample_sizes
from trunkline.workload._data_files import DataFile, data_files, files_in
from trunkline.workload._generate import generate
from trunkline.workload._parse import parse_text
from trunkline.workload._spec import Normal


def workload(
    fmt: str = "npz", files: int = 6, samples: int = 1, record: str = "5000", **more: Any
) -> Workload:
    """A small one."""
    dataset = {"format": fmt, "num_files_train": files, "num_samples_per_file": samples}
    dataset |= {"record_length_bytes": record, **more}
    document = {
        "model": {"name": "tiny"},
        "dataset": dataset,
        "reader": {"batch_size": 2},
        "train": {"computation_time": 0.001, "seed": 7},
    }
    return parse_text(json.dumps(document), "tiny.yaml")


def contents(*directories: Path) -> dict[str, bytes]:
    """All files, by their paths below the directories."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for directory in directories
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def data_of(*directories: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(*directories).items() if name != "trunkline-workload.json"}


def test_npz_files_have_the_declared_names_sizes_and_arrays(tmp_path: Path) -> None:
    made = generate(workload(record_length_bytes_stdev=1000, num_files_eval=2), [tmp_path])
    assert (made["files_made"], made["files_kept"]) == (8, 0)
    names = [f"train/img_{number}_of_6.npz" for number in range(6)]
    assert list(data_of(tmp_path)) == [*names, "valid/img_0_of_2.npz", "valid/img_1_of_2.npz"]
    sizes = set()
    for name in names:
        arrays = numpy.load(tmp_path / name)
        assert arrays["x"].dtype == numpy.uint8
        assert arrays["x"].shape[1:] == (1, 1)
        assert arrays["y"].shape == (1,)
        sizes.add(len(arrays["x"]))
    assert len(sizes) == 6
    assert made["bytes_made"] == sum(len(data) for data in data_of(tmp_path).values())


def test_npy_files_of_several_samples(tmp_path: Path) -> None:
    generate(workload("npy", 1, 5, "3000"), [tmp_path])
    [(name, data)] = data_of(tmp_path).items()
    assert name == "train/img_0_of_1.npy"
    array = numpy.load(io.BytesIO(data))
    assert array.shape == (3000, 1, 5)
    assert array[:, 0, 2].tobytes() == data[128 + 2 * 3000 : 128 + 3 * 3000]


def test_tfrecords_are_valid_and_have_the_declared_number(tmp_path: Path) -> None:
    generate(workload("tfrecord", 3, 20, "1e3", record_length_bytes_stdev=200), [tmp_path])
    index = tl.data.index(tmp_path / "train", cache=None)
    assert len(index) == 60
    for batch in tl.data.Loader(index, 60):  # verifies the checksums
        lengths = [len(sample) for sample in batch.samples]
        assert len(set(lengths)) > 10
        assert 900 < numpy.mean(lengths) < 1100


def test_images_are_files_of_the_declared_size(tmp_path: Path) -> None:
    for fmt in ("jpeg", "png"):
        generate(workload(fmt, 2, record="1_500"), [tmp_path / fmt])
        assert [len(data) for data in data_of(tmp_path / fmt).values()] == [1500, 1500]


def test_indexed_binary_has_offsets_and_sizes(tmp_path: Path) -> None:
    generate(workload("indexed_binary", 1, 4, "100"), [tmp_path])
    files = data_of(tmp_path)
    name = "train/img_0_of_1.indexed_binary"
    assert len(files[name]) == 400
    assert numpy.frombuffer(files[f"{name}.off.idx"], "<u8").tolist() == [0, 100, 200, 300]
    assert numpy.frombuffer(files[f"{name}.sz.idx"], "<u8").tolist() == [100] * 4


def test_parquet_has_the_declared_columns_and_row_groups(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns: list[dict[str, Any]] = [{"name": "a", "dtype": "float16"}, {"name": "c", "dtype": "int8"}]
    columns.append({"name": "b", "size": 100, "read": False})
    more = {"parquet": {"row_group_size": 30, "columns": columns}}
    generate(workload("parquet", 2, 100, "403", **more), [tmp_path])
    for name in data_of(tmp_path):
        found = parquet.ParquetFile(tmp_path / name)
        assert found.metadata.num_rows == 100
        assert [found.metadata.row_group(each).num_rows for each in range(4)] == [30, 30, 30, 10]
        table = found.read()
        assert [str(field.type) for field in table.schema] == [
            "halffloat",
            "fixed_size_binary[1]",
            "fixed_size_binary[400]",
        ]
        group = found.metadata.row_group(0)
        for number, size in enumerate((2, 1, 400)):
            assert 30 * size <= group.column(number).total_compressed_size < 30 * size + 50


def test_samples_without_columns_are_one_in_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    generate(workload("parquet", 1, 3, "77"), [tmp_path])
    [name] = data_of(tmp_path)
    assert [len(row.as_py()) for row in parquet.read_table(tmp_path / name)["data"]] == [77] * 3


@pytest.mark.parametrize("fmt", ["npz", "npy", "tfrecord", "jpeg", "parquet"])
def test_every_file_is_a_function_of_the_seed_alone(tmp_path: Path, fmt: str) -> None:
    if fmt == "parquet":
        pytest.importorskip("pyarrow")
    generate(workload(fmt), [tmp_path / "one"], workers=1)
    generate(workload(fmt), [tmp_path / "two", tmp_path / "other"], workers=4)
    one = data_of(tmp_path / "one")
    assert one == dict(sorted(data_of(tmp_path / "two", tmp_path / "other").items()))
    assert len(set(one.values())) == len(one)
    alone = tmp_path / "one/train" / f"img_4_of_6.{fmt}"
    alone.unlink()
    assert generate(workload(fmt), [tmp_path / "one"])["files_made"] == 1
    assert data_of(tmp_path / "one") == one


def test_files_are_spread_over_directories_and_subfolders(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    generate(workload("png", 5, num_subfolders_train=3), directories)
    assert list(data_of(directories[0])) == [
        "train/0/img_0_of_5.png",
        "train/1/img_4_of_5.png",
        "train/2/img_2_of_5.png",
    ]
    assert list(data_of(directories[1])) == ["train/0/img_3_of_5.png", "train/1/img_1_of_5.png"]


def test_an_unfinished_file_is_written_again_and_a_finished_one_kept(tmp_path: Path) -> None:
    generate(workload("indexed_binary", 3, 4), [tmp_path])
    expected = contents(tmp_path)
    first = tmp_path / "train/img_0_of_3.indexed_binary"
    stamp = first.stat().st_mtime_ns
    second = tmp_path / "train/img_1_of_3.indexed_binary"
    second.unlink()  # as if killed after the indexes were there
    second.with_name(f".{second.name}.partial").write_bytes(b"half")
    made = generate(workload("indexed_binary", 3, 4), [tmp_path])
    assert (made["files_made"], made["files_kept"]) == (1, 2)
    assert contents(tmp_path) == expected
    assert first.stat().st_mtime_ns == stamp


def test_other_files_are_never_replaced(tmp_path: Path) -> None:
    own = tmp_path / "train/img_0_of_6.npz"
    own.parent.mkdir()
    own.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="has files that were not generated here; choose a different"):
        generate(workload(), [tmp_path / "new", tmp_path])
    assert contents(tmp_path) == {"train/img_0_of_6.npz": b"mine"}


def test_a_file_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_intrude(source: Any, file: DataFile, out: Any, index: Any) -> None:
        out.write(b"ours")
        file.path.write_bytes(b"mine")

    monkeypatch.setattr(_generate, "write_file", write_and_intrude)
    with pytest.raises(FileExistsError, match="appeared meanwhile, and is not replaced"):
        generate(workload(files=1), [tmp_path])
    assert data_of(tmp_path) == {"train/img_0_of_6.npz".replace("6", "1"): b"mine"}


def test_a_link_under_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    own = tmp_path / "mine"
    own.write_bytes(b"mine")
    data = tmp_path / "data"
    data.mkdir()
    (data / ".trunkline-workload.json.partial").symlink_to(own)
    generate(workload(files=1), [data])
    assert own.read_bytes() == b"mine"
    assert (data / "trunkline-workload.json").is_file()
    assert not (data / "trunkline-workload.json").is_symlink()


def test_another_data_set_is_not_mixed_in(tmp_path: Path) -> None:
    generate(workload(), [tmp_path])
    before = contents(tmp_path)
    for other, what in (
        (workload(files=7), "6 training files there, 7 requested"),
        (workload(record="6000"), "record_bytes is 5000 there, 6000 requested"),
    ):
        with pytest.raises(FileExistsError, match=what):
            generate(other, [tmp_path])
    with pytest.raises(FileExistsError, match="directories 1, not 2"):
        generate(workload(), [tmp_path, tmp_path / "more"])
    assert contents(tmp_path) == before


def test_it_refuses_to_fill_the_disk(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    huge = str(free.f_bavail * free.f_frsize // 4)
    with pytest.raises(
        OSError, match=r"tiny needs .* GB in .*; choose another directory, or a smaller"
    ) as raised:
        generate(workload("jpeg", 6, record=huge), [tmp_path])
    assert raised.value.errno == 28
    assert not list(tmp_path.rglob("*.json"))
    generate(workload("jpeg", 1, record="500"), [tmp_path])  # as the message advises: a smaller one
    assert len(data_of(tmp_path)) == 1


def test_room_is_checked_before_files_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*arguments: Any) -> None:
        raise AssertionError("files were listed")

    monkeypatch.setattr(_generate, "data_files", listed)
    with pytest.raises(OSError, match="tiny needs"):
        generate(workload("jpeg", 10**12, num_files_eval=5), [tmp_path / "a", tmp_path / "b", tmp_path / "c"])


def test_files_of_each_directory_are_counted_as_they_are_placed() -> None:
    for train, valid in ((1, 0), (7, 5), (3, 2), (6, 6)):
        dataset = workload(files=train, num_files_eval=valid).dataset
        places = [Path(name) for name in ("a", "b", "c")]
        parents = [file.path.parts[0] for file in data_files(dataset, places)]
        assert files_in(dataset, 3) == [parents.count(str(place)) for place in places]


def test_a_truncated_file_is_not_kept(tmp_path: Path) -> None:
    generate(workload("jpeg"), [tmp_path])
    damaged = tmp_path / "train/img_3_of_6.jpeg"
    os.truncate(damaged, 100)
    message = "img_3_of_6.jpeg has 100 bytes instead of 5000; remove it, and run"
    for call in (generate, workloads.run):
        with pytest.raises(tl.CutOff, match=message):
            call(workload("jpeg"), [tmp_path])
    damaged.unlink()
    assert generate(workload("jpeg"), [tmp_path])["files_made"] == 1
    assert workloads.run(workload("jpeg"), [tmp_path])["samples"] == 6


def test_two_at_a_time_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = _generate.write_file

    def slow(*arguments: Any) -> None:
        begun.set()
        go_on.wait()
        real(*arguments)

    monkeypatch.setattr(_generate, "write_file", slow)
    thread = threading.Thread(target=generate, args=(workload(), [tmp_path]))
    thread.start()
    try:
        begun.wait()
        with pytest.raises(tl.Error, match="another process is generating a data set"):
            generate(workload(), [tmp_path])
    finally:
        go_on.set()
        thread.join()
    assert len(data_of(tmp_path)) == 6


def test_a_failure_leaves_finished_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = _generate.write_file

    def fail_at_third(source: Any, file: DataFile, out: Any, index: Any) -> None:
        if file.number == 3:
            out.write(b"part")
            raise OSError(5, "broken")
        real(source, file, out, index)

    monkeypatch.setattr(_generate, "write_file", fail_at_third)
    with pytest.raises(tl.Error, match=r"^cannot write .*img_3_of_6.npz: input/output error \(EIO\)$"):
        generate(workload(), [tmp_path], workers=1)
    assert [name for name in contents(tmp_path) if "partial" in name] == []
    monkeypatch.undo()
    again = generate(workload(), [tmp_path])
    assert again["files_kept"] >= 1
    assert again["files_kept"] + again["files_made"] == 6


def test_sizes_follow_the_distribution() -> None:
    file = DataFile("train", 3, Path("x"))
    sizes = sample_sizes(Normal(146600628, 68341808), 1, file, 100_000)
    assert sizes.min() >= 1
    assert sizes.max() <= 2 * 146600628
    assert abs(sizes.mean() / 146600628 - 1) < 0.005
    assert 0.85 < sizes.std() / 68341808 < 0.95  # the tails are cut off
    narrow = sample_sizes(Normal(2828486, 71311), 1, file, 100_000)
    assert abs(narrow.std() / 71311 - 1) < 0.01
    assert (sizes == sample_sizes(Normal(146600628, 68341808), 1, file, 100_000)).all()
    assert set(sample_sizes(Normal(114660.07), 1, file, 5)) == {114660}


def test_content_is_the_same_however_it_is_taken() -> None:
    file = DataFile("train", 3, Path("x"))
    whole = Content(5).reader(file).take(3_000_000)
    parts = Content(5).reader(file)
    assert b"".join(parts.take(size) for size in (1, 999_999, 1_500_000, 500_000)) == whole
    assert Content(6).reader(file).take(100) != whole[:100]
    assert Content(5).reader(DataFile("valid", 3, Path("x"))).take(100) != whole[:100]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "w.yaml"
    file.write_text(
        "model: {name: tiny}\nframework: pytorch\nreader: {batch_size: 2, colour: red}\n"
        "train: {computation_time: 0.1}\n"
        "dataset: {format: jpeg, num_files_train: 1000, record_length: 500}\n"
    )
    arguments = ["workload", "generate", str(file), "--data", str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main([*arguments, "--scale", "5KB", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["files_made"] == 10
    assert document["bytes_made"] == 5000
    assert {each["key"] for each in document["ignored"]} == {"framework", "reader.colour"}
    assert "reader.colour: not supported: unknown key" in captured.err
    assert f"generating tiny: 10 files, 5 kB, in {tmp_path / 'a'}, {tmp_path / 'b'}" in captured.err
    assert len(data_of(tmp_path / "a")) == len(data_of(tmp_path / "b")) == 5
    assert cli.main([*arguments, "--scale", "5KB", "--set", "dataset.record_length=500"]) == 0
    assert "wrote 0 files of tiny, 0 B, kept 10 that were there" in capsys.readouterr().out
    assert cli.main([*arguments, "--scale", "100"]) == 2
    assert "--scale: one file of tiny has" in capsys.readouterr().err
    assert cli.main([*arguments, "--scale", "6KB"]) == 1
    assert "has a different data set (10 training files there, 12 requested)" in capsys.readouterr().err
    assert cli.main([*arguments, str(tmp_path / "a")]) == 2
    assert "--directories: one is given twice" in capsys.readouterr().err


def test_a_failure_is_reported_as_the_library_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(tl.NotADirectoryError, match="^directories: .*/file is a file; name a directory$"):
        generate(workload(), [file])
    assert cli.main(["workload", "generate", "bert", "--data", str(file), "--json"]) == 2
    captured = capsys.readouterr()
    message = f"--directories: {file} is a file; name a directory"
    assert json.loads(captured.out)["error"]["message"] == message
    assert captured.err.endswith(f"trunkline workload generate: {message}\n")
    assert "generating" not in captured.err
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").touch()
    with pytest.raises(tl.NotADirectoryError, match="/data/train is not a directory; choose a different"):
        generate(workload(), [tmp_path / "data"])


def test_an_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from trunkline.workload import _generate, cli\n"
        "real = _generate.write_file\n"
        "def interrupt(source, file, out, index):\n"
        "    if file.number == 1:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        while True: source.check()\n"
        "    real(source, file, out, index)\n"
        "_generate.write_file = interrupt\n"
        "sys.exit(cli.main(['workload', 'generate', 'retinanet', '--data', sys.argv[1], '--scale', '1MB']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 130, done.stderr
    assert "interrupted; run the same command again to continue" in done.stderr
    assert not [name for name in contents(tmp_path) if "partial" in name or "_1_" in name]


def test_what_is_not_a_workload_or_a_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"directories: must be a list of paths, not str; put it into a list"):
        workloads.generate(workloads.load("retinanet"), "here")
    with pytest.raises(TypeError, match=r"directories: must be a list of paths, not PosixPath"):
        workloads.run(workloads.load("retinanet"), tmp_path)  # type: ignore[arg-type]
    for call in (workloads.generate, workloads.run):
        with pytest.raises(
            TypeError, match=r"must be a Workload, not str; trunkline.workload.load\('retinanet'\)"
        ):
            call("retinanet", [tmp_path])  # type: ignore[arg-type, operator]
    with pytest.raises(ValueError, match="ranks: must be at least 1, not 0"):
        workloads.run(workloads.load("retinanet"), [tmp_path], ranks=0)
    with pytest.raises(ValueError, match=r"there is no key train\.epoch; did you mean train\.epochs"):
        workloads.load("retinanet", ["train.epoch=1"])
    assert not list(tmp_path.iterdir())
