"""Checkpoints of a workload that are saved in a directory of their own: --checkpoint-dir."""

import json
from pathlib import Path

import pytest

from trunkline.workload import Workload, cli
from trunkline.workload._generate import generate
from trunkline.workload._parse import parse_text
from trunkline.workload._run import run

TRAINING = """\
model: {name: tiny, model_size: 100000}
workflow: {checkpoint: true}
dataset: {format: jpeg, num_files_train: 12, num_files_eval: 4, record_length_bytes: 500}
reader: {batch_size: 2, sample_shuffle: seed}
train: {computation_time: 0.0002}
checkpoint: {fsync: false}
"""
SAVES = """\
model: {name: tiny, model_size: 100000}
workflow: {train: false, checkpoint: true}
checkpoint: {num_checkpoints_write: 2, num_checkpoints_read: 1, fsync: false}
"""


def training(*overrides: str) -> Workload:
    return parse_text(TRAINING, "tiny.yaml", overrides)


def test_checkpoints_have_a_directory_of_their_own(tmp_path: Path) -> None:
    spec, data, place = training(), tmp_path / "data", tmp_path / "elsewhere" / "saves"
    generate(spec, [data])
    document = run(spec, [data], checkpoint_directory=place)
    assert document["checkpoints"]["folder"] == str(place)
    assert document["directories"] == [str(data)]
    assert [each.parent.name for each in place.glob("*/dcp.manifest")] == ["checkpoint-000001"]
    assert not (data / "checkpoints").exists()
    again = run(spec, [data], checkpoint_directory=str(place), remove=True)
    assert [each["checkpoint"] for each in again["checkpoints"]["save"]["checkpoints"]] == [2]
    assert [each.parent.name for each in place.glob("*/dcp.manifest")] == ["checkpoint-000001"]


def test_a_directory_for_checkpoints_that_cannot_be_used(tmp_path: Path) -> None:
    spec, data = training(), tmp_path / "data"
    generate(spec, [data])
    file, foreign = tmp_path / "file", tmp_path / "foreign"
    file.touch()
    foreign.mkdir()
    (foreign / "mine").touch()
    for place, error, message in (
        (file, NotADirectoryError, "^checkpoint_directory: .*/file is a file; name a directory"),
        (file / "below", NotADirectoryError, "^checkpoint_directory: .*/file is a file; name a directory"),
        (foreign, FileExistsError, r"foreign has files that were not saved by a workload \(mine\)"),
        (data, OSError, "data/trunkline-workload.json is not of checkpoints; choose another directory"),
        (data / "train", ValueError, "^checkpoint_directory: .* is in .*/data/train, which has the samples"),
        (data / "valid" / "below", ValueError, "^checkpoint_directory: .*/below is in .*/data/valid"),
        ("", FileNotFoundError, "checkpoint_directory"),
        (3, TypeError, "checkpoint_directory"),
        ("s3://bucket/run", ValueError, "checkpoint_directory"),
    ):
        with pytest.raises(error, match=message):
            run(spec, [data], checkpoint_directory=place)  # type: ignore[arg-type]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["data", "file", "foreign"]
    assert [each.name for each in foreign.iterdir()] == ["mine"]
    assert not (data / "checkpoints").exists()
    with pytest.raises(ValueError, match="checkpoint_directory: tiny saves no checkpoints"):
        run(training("workflow.checkpoint=false"), [data], checkpoint_directory=tmp_path / "new")
    with pytest.raises(ValueError, match="checkpoint_directory: on the null device nothing is saved"):
        run(spec, None, checkpoint_directory=tmp_path / "new")
    run(spec, [data], checkpoint_directory=data / "checkpoints")  # where they would be anyway


def test_a_directory_for_checkpoints_takes_the_place_of_one_for_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(SAVES)
    command = ["workload", "run", str(tmp_path / "tiny.yaml"), "--ranks", "1", "--checkpoint-dir"]
    assert cli.main([*command, str(tmp_path / "saves"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["directories"] == [document["folder"]] == [str(tmp_path / "saves")]
    assert len(list((tmp_path / "saves").glob("checkpoint-*/dcp.manifest"))) == 2
    assert cli.main([*command, str(tmp_path / "tiny.yaml")]) == 2
    assert "--checkpoint-dir: " + str(tmp_path / "tiny.yaml") + " is a file" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path)]) == 1
    assert "has files that were not saved by a workload (saves); choose" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path / "new"), "--data", str(tmp_path)]) == 2
    assert "pass either --checkpoint-dir or --directories" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path / "new"), "--null-device"]) == 2
    assert "--checkpoint-dir has no effect with --null-device" in capsys.readouterr().err
    command[2] = "unet3d_h100"
    assert cli.main([*command, str(tmp_path / "new")]) == 2
    assert "--checkpoint-dir: unet3d saves no checkpoints" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
