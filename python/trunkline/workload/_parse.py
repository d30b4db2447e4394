"""Workload files in the format of DLIO and MLPerf Storage."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from trunkline._errors import system_error
from trunkline._paths import absolute_path
from trunkline.workload._known_keys import effect_of, is_unknown
from trunkline.workload._parse_checkpoint import parse_checkpoint
from trunkline.workload._parse_inference import parse_inference
from trunkline.workload._section import Section
from trunkline.workload._spec import (
    DTYPE_BYTES,
    FORMATS,
    NO_DATASET,
    SHUFFLES,
    Column,
    Dataset,
    Evaluation,
    Format,
    Ignored,
    Normal,
    Part,
    Reader,
    Shuffle,
    Train,
    Workload,
)
from trunkline.workload._spec_error import SpecError
from trunkline.workload._yaml import Node, insert, parse_yaml

_DEFAULT_SEED = 123  # DLIO's
_MAX_SECONDS = 1e6  # of a step: the sum over all steps must fit into nanoseconds
_OF_TRAININGS = ("reader", "data_reader", "train")


def parse_file(path: str, overrides: Sequence[str] = ()) -> Workload:
    """Read a workload file. `overrides`: KEY=VALUE, with keys as in "reader.batch_size".

    Raises SpecError if it is not valid, OSError if it cannot be read.
    """
    try:
        text = Path(absolute_path(path, "path")).read_text(encoding="utf-8")
    except OSError as error:
        raise system_error(error, f"read the workload file {path}", path) from None
    except UnicodeDecodeError as error:
        raise SpecError(path, None, "", "is not UTF-8 text") from error
    return parse_text(text, path, overrides)


def parse_text(text: str, source: str, overrides: Sequence[str] = ()) -> Workload:
    """Parse a workload file; `source` is its name for messages. Raises SpecError."""
    document = parse_yaml(text, source)
    for override in overrides:
        _override(document, override)
    root = Section(source, "", document)
    model, workflow = _model(root), root.section("workflow")
    dataset_section, train_section = root.section("dataset"), root.section("train")
    infers = workflow.flag("inference", False)
    is_training = workflow.flag("train", not infers)
    reader_section, evaluation_section = _reader_section(root), root.section("evaluation")
    evaluates = workflow.flag("evaluation", False) and is_training
    checkpoints = workflow.flag("checkpoint", False)
    if infers and (is_training or checkpoints):
        workflow.fail("inference", "is a workload of its own; set train and checkpoint to false")
    dataset = _dataset(dataset_section, evaluates) if is_training or not checkpoints else NO_DATASET
    metric, output = root.section("metric"), root.section("output")
    skipped = output.section("metric").integer("exclude_start_steps", default=1)
    seed = train_section.integer("seed", default=_DEFAULT_SEED)
    target = metric.number("au", default=0.0)
    if target > 1:
        metric.fail("au", f"must be a share of 1, such as 0.9, not {target:g}")
    reader = _reader(reader_section, dataset) if is_training else None
    train = _train(train_section, seed) if is_training else None
    evaluation = _evaluation(evaluation_section) if evaluates else None
    checkpoint = None
    if checkpoints:
        checkpoint = parse_checkpoint(_model_section(root), root.section("checkpoint"), is_training)
    inference = parse_inference(root.section("inference"), dataset) if infers else None
    is_on = dict.fromkeys(_OF_TRAININGS, is_training)
    is_on |= {"dataset": dataset is not NO_DATASET, "evaluation": evaluates}
    is_on |= {"checkpoint": checkpoints, "inference": infers}
    ignored = _ignored(root, is_on)
    _reject_unknown_overrides(overrides, ignored)
    return Workload(
        name=model,
        source=source,
        dataset=dataset,
        reader=reader,
        train=train,
        evaluation=evaluation,
        inference=inference,
        checkpoint=checkpoint,
        target_utilization=target or None,
        skipped_steps=skipped,
        seed=seed,
        ignored=ignored,
    )


def _override(document: Node, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key.strip("+"):
        raise SpecError(f"overrides: {override}", None, "", "must be KEY=VALUE, such as reader.batch_size=4")
    changed = Node({}, 1, override)
    node = parse_yaml(f"value: {value}", f"overrides: {override}").value["value"]
    insert(changed, key, Node(node.value, node.line, override), f"overrides: {override}")
    _replace(document, changed)


def _reject_unknown_overrides(overrides: Sequence[str], ignored: Sequence[Ignored]) -> None:
    unknown = {each.key: each.effect for each in ignored if is_unknown(each.effect)}
    for override in overrides:
        key = override.partition("=")[0].lstrip("+").removeprefix("workload.")
        if key in unknown:
            raise SpecError(
                f"overrides: {override}",
                None,
                "",
                f"there is no key {key}; {unknown[key].rpartition('; ')[2]}",
            )


def _replace(place: Node, changed: Node) -> None:
    for key, node in changed.value.items():
        present = place.value.get(key)
        both = (present, node)
        if present is not None and all(isinstance(each.value, dict) for each in both):
            _replace(present, node)
        else:
            place.value[key] = node


def _model(root: Section) -> str:
    if root.is_section("model"):
        return root.section("model").text("name", default="workload")
    return root.text("model", default="workload")


def _model_section(root: Section) -> Section:
    return root.section("model") if root.is_section("model") else Section("", "model", Node({}, 1))


def _reader_section(root: Section) -> Section:
    return root.section("data_reader" if root.is_section("data_reader") else "reader")


def _dataset(section: Section, evaluates: bool) -> Dataset:
    chosen = cast("Format", section.choice("format", FORMATS))
    samples = section.integer("num_samples_per_file", default=1, least=1)
    columns: tuple[Column, ...] = ()
    rows = 1024
    parquet = section.section("parquet")
    if chosen == "parquet":
        columns = _columns(parquet)
        rows = parquet.integer("row_group_size", default=rows, least=1)
    record = _record(section, columns)
    if chosen in ("indexed_binary", "parquet") and record.stdev:
        section.fail("record_length_bytes_stdev", f"must be 0 for {chosen}, whose samples have one size")
    if chosen in ("jpeg", "png") and samples > 1:
        section.fail("num_samples_per_file", f"must be 1 for {chosen}, of which each sample is a file")
    if chosen == "npy" and record.stdev and samples > 1:
        section.fail("record_length_bytes_stdev", "must be 0 for npy files with several samples")
    if section.holds("compression", "none"):
        section.value("compression")  # else it counts as ignored
    files_valid = section.integer("num_files_eval", default=0, least=1 if evaluates else 0)
    return Dataset(
        format=chosen,
        train=Part(
            section.integer("num_files_train", least=1), section.integer("num_subfolders_train", default=0)
        ),
        valid=Part(files_valid, section.integer("num_subfolders_eval", default=0)),
        samples_per_file=samples,
        record_bytes=record,
        prefix=_prefix(section),
        columns=columns,
        rows_per_group=min(rows, samples),
    )


def _prefix(section: Section) -> str:
    prefix = section.text("file_prefix", default="img")
    if not prefix or "/" in prefix or "\0" in prefix or prefix.startswith("."):
        section.fail("file_prefix", f"must be the beginning of a file name, not {prefix!r}")
    return prefix


def _record(section: Section, columns: tuple[Column, ...]) -> Normal:
    size = section.number(
        "record_length_bytes",
        "record_length",
        default=float(sum(column.sample_bytes for column in columns)) if columns else None,
        least=1,
    )
    stdev = section.number("record_length_bytes_stdev", "record_length_stdev", default=0.0)
    if columns:  # they say exactly what is stored
        return Normal(float(sum(column.sample_bytes for column in columns)))
    return Normal(size, stdev)


def _columns(parquet: Section) -> tuple[Column, ...]:
    columns = tuple(
        Column(
            each.text("name"),
            each.choice("dtype", tuple(DTYPE_BYTES), "float32"),
            each.integer("size", default=1, least=1),
            each.flag("read", True),
        )
        for each in parquet.sections("columns")
    )
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        parquet.fail("columns", "a name is given twice")
    if columns and not any(column.is_read for column in columns):
        parquet.fail("columns", "none is read; write read: true for one")
    return columns


def _reader(section: Section, dataset: Dataset) -> Reader:
    batch = section.integer("batch_size", least=1)
    return Reader(
        batch_size=batch,
        batch_size_eval=section.integer("batch_size_eval", default=1, least=1),
        threads=section.integer("read_threads", default=1),
        prefetch=section.integer("prefetch_size", default=2) or 2,
        file_shuffle=cast("Shuffle", section.choice("file_shuffle", SHUFFLES, "off")),
        sample_shuffle=cast("Shuffle", section.choice("sample_shuffle", SHUFFLES, "off")),
    )


def _train(section: Section, seed: int) -> Train:
    steps = section.number("total_training_steps", default=-1.0, least=-1)
    if steps != int(steps):
        section.fail("total_training_steps", f"must be a whole number, not {steps:g}")
    return Train(
        epochs=section.integer("epochs", default=1, least=1),
        compute_seconds=_duration(section, "computation_time"),
        total_steps=int(steps) if steps > 0 else None,
        seed=seed,
    )


def _evaluation(section: Section) -> Evaluation:
    return Evaluation(
        compute_seconds=_duration(section, "eval_time"),
        after_epoch=section.integer("eval_after_epoch", default=1, least=1),
        every_epochs=section.integer("epochs_between_evals", default=1, least=1),
    )


def _duration(section: Section, key: str) -> Normal:
    """Seconds."""
    if not section.is_section(key):
        return Normal(
            section.number(key, most=_MAX_SECONDS),
            section.number(f"{key}_stdev", default=0.0, most=_MAX_SECONDS),
        )
    distribution = section.section(key)
    distribution.choice("type", ("normal",), "normal")
    return Normal(
        distribution.number("mean", most=_MAX_SECONDS),
        distribution.number("stdev", default=0.0, most=_MAX_SECONDS),
    )


def _ignored(root: Section, is_on: dict[str, bool]) -> tuple[Ignored, ...]:
    """What nothing asked for. `is_on`: of what sections describe, whether the workflow has it."""
    found = []
    for key, line in root.unknown():
        section = key.partition(".")[0]
        if is_on.get(section, True):
            found.append(Ignored(key, line, effect_of(key, root.suggestion(key))))
        else:
            flag = "train" if section in (*_OF_TRAININGS, "dataset") else section
            found.append(Ignored(key, line, f"ignored: workflow.{flag} is false"))
    return tuple(sorted(found, key=lambda each: each.line))
