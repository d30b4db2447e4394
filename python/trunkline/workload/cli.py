"""The command `trunkline workload`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from trunkline._command import Parser, run_command
from trunkline._core import parse_size
from trunkline.workload._builtin import builtin_description, builtin_names, load
from trunkline.workload._checkpoint_results import model_document, text_of_checkpoints
from trunkline.workload._generate import generate
from trunkline.workload._inference_results import text_of_inference
from trunkline.workload._readable import size
from trunkline.workload._results import text_of
from trunkline.workload._run import run
from trunkline.workload._spec import Workload
from trunkline.workload._totals import scaled, totals_of


def main(arguments: Sequence[str]) -> int:
    """Run `workload ...`; return the exit status."""

    def interrupted(options: argparse.Namespace) -> str:
        return "; call it again to go on" if options.command == "generate" else ""

    return run_command("workload", make_parser(), arguments[1:], interrupted)


def make_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog="trunkline workload",
        description="Emulate trainings, checkpoints and inferences: how busy storage keeps the accelerators. "
        "Workloads are files as DLIO and MLPerf Storage have them, or built in",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser(
        "list",
        help="list the built-in workloads, and what each needs",
        description="List the built-in workloads: their size, and the bandwidth that an accelerator needs to "
        "compute all the time",
    )
    listed.set_defaults(run=_list)
    generate = commands.add_parser(
        "generate",
        help="write the data set of a workload",
        description="Write the data set of a workload: each file depends on the workload and its seed alone. "
        "Files that an earlier call finished are kept, so it may be interrupted and called again. It never "
        "replaces a file that it did not write",
    )
    _add_workload(generate)
    generate.add_argument(
        "--scale",
        metavar="SIZE",
        help='size of the data set, such as "10GB": fewer or more files, not samples',
    )
    generate.add_argument(
        "--workers", type=int, metavar="N", help="files written at a time (twice the cores)"
    )
    generate.set_defaults(run=_generate)
    running = commands.add_parser(
        "run",
        help="emulate a workload, and report how busy storage keeps the accelerators",
        description="Emulate the training of a workload: batches are read as trunkline.data.Loader reads "
        "them, and computation takes the declared time. Before that, the emulator proves on a null device "
        "that it can drive accelerators that fast. Checkpoints are saved and restored as trunkline.dcp does, "
        "in the folder `checkpoints` of the directories. An inference answers queries, and logs them",
    )
    _add_workload(running, data_required=False)
    running.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="accelerators, a process each (1; for checkpoints alone, all ranks of the model). Fewer than "
        "the model has are its first ones",
    )
    running.add_argument(
        "--scale", metavar="SIZE", help='size of a checkpoint of all ranks, such as "10GB": a smaller model'
    )
    running.add_argument(
        "--remove", action="store_true", help="at the end, remove the checkpoints and logs of this run"
    )
    running.add_argument(
        "--null-device", action="store_true", help="read nothing: what the emulator itself can reach"
    )
    running.set_defaults(run=_run)
    for each in (listed, generate, running):
        each.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_workload(parser: argparse.ArgumentParser, data_required: bool = True) -> None:
    parser.add_argument("workload", metavar="NAME_OR_FILE", help="a built-in workload, or a file of one")
    parser.add_argument(
        "--data",
        metavar="DIR",
        nargs="+",
        required=data_required,
        help="directories of the data set, best one on each disk: its files are spread over them",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a key of the workload, such as train.epochs=1; may be repeated",
    )


def _load(options: argparse.Namespace) -> Workload:
    """Read the workload, and say on stderr what of it has no effect."""
    workload = load(options.workload, options.set)
    effects: dict[str, list[str]] = {}
    for each in workload.ignored:
        effects.setdefault(each.effect, []).append(each.key)
    for effect, keys in effects.items():
        print(f"{options.workload}: {', '.join(keys)}: {effect}", file=sys.stderr)
    return workload


def _head(options: argparse.Namespace) -> dict[str, Any]:
    return {"command": f"workload {options.command}", "schema": 1}


def _ignored(workload: Workload) -> list[dict[str, Any]]:
    return [{"key": each.key, "line": each.line, "effect": each.effect} for each in workload.ignored]


def _generate(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    workload = _load(options)
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers: must be at least 1, not {options.workers}")
    if options.scale is not None:
        workload = scaled(workload, parse_size(options.scale, "--scale"))
    document = generate(workload, options.data, options.workers)
    kept = f", kept {document['files_kept']} that were there" if document["files_kept"] else ""
    made = size(document["bytes_made"])
    model = f", and a model of {size(document['model_bytes'])}" if document["model_bytes"] else ""
    text = (
        f"wrote {document['files_made']} files of {workload.name}, {made}{kept}{model}: "
        f"{', '.join(document['directories'])}"
    )
    return {**_head(options), **document, "ignored": _ignored(workload)}, text


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if options.null_device == bool(options.data):
        raise ValueError("give the directories of the data set with --data, or --null-device, and not both")
    if options.ranks is not None and options.ranks < 1:
        raise ValueError(f"--ranks: must be at least 1, not {options.ranks}")
    scale = None if options.scale is None else parse_size(options.scale, "--scale")
    workload = _load(options)
    document = run(workload, options.data, options.ranks, scale_bytes=scale, remove=options.remove)
    text = text_of_checkpoints if workload.train is None else text_of
    if workload.inference is not None:
        text = text_of_inference
    return {**_head(options), **document, "ignored": _ignored(workload)}, text(document)


def _list(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    workloads = {name: load(name) for name in builtin_names()}
    trainings = [_summary(name, each) for name, each in workloads.items() if each.train is not None]
    checkpoints = [_checkpoint_summary(name, each) for name, each in workloads.items() if each.train is None]
    rows = sorted(trainings + checkpoints, key=lambda row: row["name"])
    lines = [*_training_lines(trainings), "", *_checkpoint_lines(checkpoints)]
    lines += ["", "GB/s: what one accelerator needs to compute all the time. --json has descriptions."]
    return {**_head(options), "workloads": rows}, "\n".join(lines)


def _training_lines(rows: list[dict[str, Any]]) -> list[str]:
    widths = {"size": 10, "files": 10, "sample": 10, "batch": 7, "step": 10, "GB/s": 9}
    lines = [f"{'name':<16}{'format':<10}" + "".join(f"{head:>{width}}" for head, width in widths.items())]
    return lines + [
        f"{row['name']:<16}{row['format']:<10}{size(row['totals']['bytes']):>10}"
        f"{row['totals']['files']:>10}{size(row['record_bytes']):>10}{row['batch_size']:>7}"
        f"{row['compute_seconds'] * 1e3:>7.4g} ms{row['totals']['gb_s_per_accelerator']:>9.3g}"
        for row in rows
    ]


def _checkpoint_lines(rows: list[dict[str, Any]]) -> list[str]:
    widths = {"checkpoint": 12, "ranks": 7, "weights of a rank": 19, "optimizer": 11}
    lines = [f"{'name':<16}" + "".join(f"{head:>{width}}" for head, width in widths.items())]
    return lines + [
        f"{row['name']:<16}{size(row['checkpoint_bytes']):>12}{row['ranks']:>7}"
        f"{size(row['rank_bytes']['model']):>19}{size(row['rank_bytes']['optimizer']):>11}"
        for row in rows
    ]


def _checkpoint_summary(name: str, workload: Workload) -> dict[str, Any]:
    assert workload.checkpoint is not None
    shape = workload.checkpoint.shape
    model = model_document(shape, shape, shape.parallelism.ranks)
    kept = {key: model[key] for key in ("ranks", "parallelism", "checkpoint_bytes", "rank_bytes")}
    return {"name": name, "description": builtin_description(name), **kept}


def _summary(name: str, workload: Workload) -> dict[str, Any]:
    assert workload.reader is not None
    assert workload.train is not None
    return {
        "name": name,
        "description": builtin_description(name),
        "format": workload.dataset.format,
        "record_bytes": workload.dataset.record_bytes.mean,
        "batch_size": workload.reader.batch_size,
        "compute_seconds": workload.train.compute_seconds.mean,
        "epochs": workload.train.epochs,
        "totals": totals_of(workload).to_json(),
    }
