"""Workload files: public ones unchanged, their totals by hand, and what wrong ones say."""

import re
from typing import Any

import pytest

from trunkline.workload import builtin_names, load, totals_of
from trunkline.workload._builtin import builtin_description
from trunkline.workload._parse import parse_text
from trunkline.workload._spec import Normal
from trunkline.workload._totals import expected_utilization, scaled

# In the spelling of the public files, with keys that change nothing here.
UNET3D = """\
model:
  name: unet3d
  type: cnn
  model_size: 499153191

framework: pytorch

workflow:
  generate_data: False
  train: True
  checkpoint: True

dataset:
  data_folder: data/unet3d/
  format: npz
  num_files_train: 168
  num_samples_per_file: 1
  record_length_bytes: 146600628
  record_length_bytes_stdev: 68341808
  record_length_bytes_resize: 2097152

reader:
  data_loader: pytorch
  batch_size: 7
  read_threads: 4
  file_shuffle: seed
  sample_shuffle: seed

train:
  epochs: 5
  computation_time: 0.323

checkpoint:
  checkpoint_folder: checkpoints/unet3d
  checkpoint_after_epoch: 5
  epochs_between_checkpoints: 2

metric:
  au: 0.90
"""


def test_a_public_file_is_parsed_unchanged() -> None:
    workload = parse_text(UNET3D, "unet3d.yaml")
    assert workload.name == "unet3d"
    assert workload.dataset.record_bytes == Normal(146600628, 68341808)
    assert workload.reader is not None
    assert (workload.reader.batch_size, workload.reader.threads) == (7, 4)
    assert workload.train is not None
    assert workload.train.compute_seconds == Normal(0.323)
    assert workload.target_utilization == 0.9
    assert workload.checkpoint is not None
    assert workload.checkpoint.shape.flat_bytes == 499153191
    assert (workload.checkpoint.after_epoch, workload.checkpoint.every_epochs) == (5, 2)
    assert workload == parse_text(UNET3D.replace("_length_bytes", "_length"), "unet3d.yaml")


def test_every_key_without_effect_is_listed_with_its_line() -> None:
    workload = parse_text(UNET3D + "reader2: 1\n", "unet3d.yaml")
    effects = {each.key: each.effect for each in workload.ignored}
    lines = UNET3D.splitlines()
    for each in workload.ignored[:-1]:
        assert each.key.rpartition(".")[2] in lines[each.line - 1]
    assert "checkpoint.checkpoint_after_epoch" not in effects
    assert (
        effects["checkpoint.checkpoint_folder"]
        == "ignored: the directories of the run say where checkpoints are saved"
    )
    assert effects["framework"].startswith("ignored")
    assert effects["reader2"] == "not supported: unknown key; check its spelling"
    read = {"dataset.format", "reader.batch_size", "train.epochs", "metric.au", "workflow.train"}
    assert not read & set(effects)


def test_sections_that_the_workflow_leaves_out_are_said_to_be() -> None:
    text = UNET3D.replace("train: True", "train: False").replace("checkpoint: True", "checkpoint: False")
    workload = parse_text(text, "unet3d.yaml")
    assert workload.train is None
    effects = {each.key: each.effect for each in workload.ignored}
    assert effects["reader.batch_size"] == "ignored: workflow.train is false"
    assert effects["checkpoint.checkpoint_folder"] == "ignored: workflow.checkpoint is false"


def test_spellings_of_hydra_and_of_numbers() -> None:
    text = """\
workload:
  model: {name: flat}
  dataset.format: npy
  ++workload.dataset.num_files_train: "1_000"
  dataset:
    record_length: "2e3"
    num_samples_per_file: 1_0
  reader: {batch_size: 4.0, sample_shuffle: off}
  train:
    computation_time: {mean: 1e-3, stdev: 1e-4}
"""
    workload = parse_text(text, "flat.yaml", ["++workload.reader.batch_size=8", "train.epochs=2"])
    assert workload.dataset.train.files == 1000
    assert workload.dataset.samples_per_file == 10
    assert workload.dataset.record_bytes == Normal(2000)
    assert workload.reader is not None
    assert workload.reader.batch_size == 8
    assert workload.reader.sample_shuffle == "off"
    assert workload.train is not None
    assert workload.train.compute_seconds == Normal(1e-3, 1e-4)
    assert workload.train.epochs == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  batch_size: 7\n", "", "x.yaml:22: reader.batch_size is missing; write a number"),
        ("computation_time: 0.323", "time: 1", "train.computation_time is missing"),
        ("  record_length_bytes: 146600628\n", "", "record_length_bytes is missing (or record_length)"),
        (
            "computation_time: 0.323",
            "computation_time: 1e300",
            "computation_time: must be at most 1e+06, not 1e+300",
        ),
        ("batch_size: 7", "batch_size: seven", "x.yaml:24: reader.batch_size: must be a number, not 'seven'"),
        ("batch_size: 7", "batch_size: 0", "reader.batch_size: must be at least 1, not 0"),
        ("batch_size: 7", "batch_size: 7.5", "reader.batch_size: must be a whole number"),
        ("batch_size: 7", "batch_size: .nan", "reader.batch_size: must be a number"),
        ("batch_size: 7", "batch_size: 1" + 400 * "0", "reader.batch_size: must be a number"),
        ("batch_size: 7", "batch_size: 1" + 5000 * "0", "x.yaml:24: not a valid value: 1000000000"),
        ("batch_size: 7", "batch_size: 2001-99-99", "x.yaml:24: not a valid value: 2001-99-99"),
        ("batch_size: 7", "batch_size: 2001-09-09", "reader.batch_size: must be a number"),
        ("batch_size: 7", "batch_size: true", "reader.batch_size: must be a number"),
        ("batch_size: 7", "batch_size: ${other}", "references such as ${other} are not supported"),
        (
            "batch_size: 7",
            "batch_size: 7\n  batch_size: 8",
            "batch_size is duplicated; it is first in line 24",
        ),
        ("batch_size: 7", "batch_size: [7]", "reader.batch_size: must be a single value"),
        ("format: npz", "format: hdf5", "dataset.format: must be one of npz, npy"),
        ("file_shuffle: seed", "file_shuffle: maybe", "must be one of off, seed, random, not 'maybe'"),
        ("au: 0.90", "au: 90", "metric.au: must be a share of 1, such as 0.9, not 90"),
        ("  train: True", "  train: perhaps", "workflow.train: must be true or false"),
        ("record_length_bytes_resize", "record_length", "is the same as record_length_bytes"),
        ("framework: pytorch", "dataset.format.x: 1", "format is duplicated; it is first in line 6"),
        ("framework: pytorch", "framework: [", "x.yaml:9: not valid YAML"),
        ("framework: pytorch", "a: 1\na.b: 1", "x.yaml:7: a.b: a is a value, not a section"),
        ("epochs: 5", "epochs: 1e20", "must be a whole number"),
        ("format: npz", "format: npz\n  file_prefix: ../x", "must be the beginning of a file name"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, message: str) -> None:
    assert old in UNET3D
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_text(UNET3D.replace(old, new, 1), "x.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reader:", "readr:", "reader.batch_size is missing; line 22 has readr: did you mean reader?"),
        ("batch_size:", "batchsize:", "line 24 has reader.batchsize: did you mean reader.batch_size?"),
    ],
)
def test_misspelled_keys_are_recognized(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_text(UNET3D.replace(old, new, 1), "x.yaml")


def test_wrong_overrides_are_named_as_they_were_given() -> None:
    for override, message in (
        ("reader.batch_size=x", "overrides: reader.batch_size=x: must be a number, not 'x'"),
        ("reader=x", "overrides: reader=x: must be a section with keys below it"),
        ("reader.batchsize=1", "there is no key reader.batchsize; did you mean reader.batch_size?"),
        ("batch", "overrides: batch: must be KEY=VALUE"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            parse_text(UNET3D, "x.yaml", [override])


def test_overrides_are_a_list() -> None:
    wrong: Any
    for wrong, message in (
        (
            "train.epochs=1",
            r'must be a list of KEY=VALUE, such as \["train.epochs=1"\], not str; put it into',
        ),
        ({"train.epochs": 1}, "not dict; put it into a list"),
        ([("train.epochs", 1)], r"and \('train.epochs', 1\) is not a str"),
    ):
        with pytest.raises(TypeError, match=f"^overrides: .*{message}"):
            load("retinanet", wrong)


def test_images_are_files_of_one_sample() -> None:
    images = UNET3D.replace("format: npz", "format: jpeg").replace(
        "samples_per_file: 1", "samples_per_file: 2"
    )
    with pytest.raises(ValueError, match="dataset.num_samples_per_file: must be 1 for jpeg"):
        parse_text(images, "x.yaml")


def test_documents_that_are_not_workloads() -> None:
    for text in ("", "[]", "- a\n- b", "just text", "dataset: 5", "\0", "a: &x [*x]", "? [a]\n: b"):
        with pytest.raises(ValueError, match=r"x\.yaml"):
            parse_text(text, "x.yaml")
    with pytest.raises(ValueError, match="no such built-in workload; there are bert, "):
        load("no-such-workload")
    with pytest.raises(ValueError, match="unet3d_h10: no such file, .*Did you mean unet3d_h100\\?"):
        load("unet3d_h10")
    with pytest.raises(ValueError, match="must be KEY=VALUE"):
        load("unet3d_h100", ["reader.batch_size"])


# Numbers by hand, from the public tables.
@pytest.mark.parametrize(
    ("name", "files", "bytes_", "steps", "seconds", "gb_s"),
    [
        # 168 x 146600628; 168 / 7 = 24 steps x 5; 120 x 0.636; 7 x 146600628 / 0.636
        ("unet3d_a100", 168, 24_628_905_504, 120, 76.32, 1.6135),
        ("unet3d_h100", 168, 24_628_905_504, 120, 38.76, 3.1771),
        ("unet3d_b200", 7200, 1_055_524_521_600, 5140, 832.68, 6.3346),
        # 1024 x 1251 = 1281024 samples; // 400 = 3202 x 5
        ("resnet50_a100", 1024, 146_882_301_512, 16010, 6964.35, 0.10543),
        ("resnet50_h100", 1024, 146_882_301_512, 16010, 3586.24, 0.20475),
        ("cosmoflow_a100", 524288, 1_482_941_267_968, 2_621_440, 14444.13, 0.51334),
        ("cosmoflow_h100", 524288, 1_482_941_267_968, 2_621_440, 9175.04, 0.80814),
        # 1170301 // 24 = 48762 x 8
        ("retinanet_b200", 1_170_301, 377_956_900_057, 390_096, 18549.06, 0.16301),
        ("retinanet_mi355", 1_170_301, 377_956_900_057, 292_568, 18548.81, 0.16301),
        # 4296 x 288 = 1237248 samples; // 48
        ("flux_b200", 4296, 2_678_434_062_336, 25776, 34797.6, 0.076972),
        ("flux_mi355", 4296, 2_678_434_062_336, 17184, 34797.6, 0.076972),
        # 1024 x 4718592 samples of 761 bytes; 16384 x 160 / 0.000375
        ("dlrm_b200", 1024, 3_677_028_876_288, 294_912, 110.592, 6.9905),
        ("dlrm_mi355", 1024, 3_677_028_876_288, 294_912, 165.888, 4.6603),
        # 500 x 10800 records of 2500 bytes; // 48
        ("bert", 500, 13_500_000_000, 112_500, 108_900.0, 0.00012397),
    ],
)
def test_totals_of_built_in_workloads(
    name: str, files: int, bytes_: int, steps: int, seconds: float, gb_s: float
) -> None:
    workload = load(name)
    totals = totals_of(workload)
    assert totals.files == files
    assert totals.bytes == bytes_
    assert totals.steps == steps
    assert totals.compute_seconds == pytest.approx(seconds)
    assert totals.gb_s_per_accelerator == pytest.approx(gb_s, rel=1e-4)
    assert expected_utilization(workload, gb_s / 4) == pytest.approx(0.25, rel=1e-4)
    assert expected_utilization(workload, gb_s * 2) == 1.0


def test_totals_of_the_public_bert() -> None:
    text = """\
model: {name: bert, model_size_bytes: 4034713312}
dataset:
  {format: tfrecord, num_files_train: 500, num_samples_per_file: 313532, record_length_bytes: 2500}
train: {seed_change_epoch: False, computation_time: 0.968, total_training_steps: 1000}
reader: {read_threads: 1, transfer_size: 262144, batch_size: 48, file_shuffle: seed, sample_shuffle: seed}
"""
    totals = totals_of(parse_text(text, "bert_v100.yaml"))
    assert totals.samples == 156_766_000
    assert totals.bytes == 391_915_000_000
    assert (totals.steps_per_epoch, totals.steps) == (3_265_958, 1000)  # the file bounds them
    assert totals.compute_seconds == pytest.approx(968)
    assert totals.read_bytes == 1000 * 48 * 2500


def test_totals_of_several_ranks_and_a_bound_on_steps() -> None:
    totals = totals_of(load("unet3d_h100"), ranks=2)
    assert (totals.steps_per_epoch, totals.steps) == (12, 60)
    assert totals.read_bytes == 60 * 2 * 7 * 146600628
    assert totals.compute_seconds == pytest.approx(60 * 0.323)
    assert totals_of(load("unet3d_h100", ["train.total_training_steps=30"])).steps == 30


def test_checkpoints_alone_need_no_data_set() -> None:
    text = UNET3D.replace("  train: True", "  train: False")
    workload = parse_text(text, "unet3d.yaml")
    assert workload.train is None
    assert workload.dataset.train.files == 0
    effects = {each.key: each.effect for each in workload.ignored}
    assert effects["dataset.format"] == "ignored: workflow.train is false"
    assert effects["checkpoint.checkpoint_after_epoch"] == "ignored: is about workloads with a training"
    text = UNET3D.replace("checkpoint_after_epoch: 5", "num_checkpoints_write: 5")
    effects = {each.key: each.effect for each in parse_text(text, "unet3d.yaml").ignored}
    assert effects["checkpoint.num_checkpoints_write"] == "ignored: is about workloads without a training"


def test_built_in_workloads_have_the_sizes_of_their_training_sets() -> None:
    sizes = {"bert": 13.5, "open_catalyst": 23, "rnnt": 30, "retinanet": 38, "resnet50": 160, "deepcam": 8000}
    sizes |= {"cosmoflow": 10_000, "dlrm": 23_000}
    assert sizes.keys() <= set(builtin_names())
    for name, gigabytes in sizes.items():
        assert totals_of(load(name)).bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    for name in builtin_names():
        assert load(name).ignored == ()
        assert builtin_description(name).endswith(".")


def test_scaling_keeps_the_size_of_samples() -> None:
    unet = load("unet3d_h100", ["dataset.num_files_eval=10"])
    small = scaled(unet, 10_000_000_000)
    assert (small.dataset.train.files, small.dataset.valid.files) == (68, 4)
    assert small.dataset.record_bytes == unet.dataset.record_bytes
    with pytest.raises(ValueError, match=r"one file of dlrm has 3\.59 GB"):
        scaled(load("dlrm_b200"), 10_000_000)
