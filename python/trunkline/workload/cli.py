"""The command `trunkline workload`."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline._cli_errors import report_error
from trunkline._command import FAILED, Parser, run_command
from trunkline._core import parse_size
from trunkline._errors import Unsupported
from trunkline._html import check_page_name, check_writable, why_not_writable
from trunkline._sizes import size
from trunkline.workload._builtin import builtin_description, builtin_names, load
from trunkline.workload._checkpoint_results import model_document, text_of_checkpoints
from trunkline.workload._compare import compare, comparison_text
from trunkline.workload._data_files import check_no_files, directories_of
from trunkline.workload._documents import read_results
from trunkline.workload._generate import generate
from trunkline.workload._inference_results import text_of_inference
from trunkline.workload._launcher import Launcher, LocalLauncher
from trunkline.workload._mpi_ranks import MpiRanks, started_rank, started_ranks
from trunkline.workload._plan_cli import DESCRIPTION, PLAN_OPTIONS, add_options, run_plan
from trunkline.workload._report import write_report
from trunkline.workload._results import text_of
from trunkline.workload._run import run_with
from trunkline.workload._samples import found_workload
from trunkline.workload._spec import Workload
from trunkline.workload._totals import mean_file_bytes, scaled, totals_of

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[Parser]


_COMMANDS = ("list", "generate", "run", "compare", "plan")
_OPTIONS = {
    "overrides": "--set",
    "directories": "--directories",
    "scale_bytes": "--scale",
    "checkpoint_directory": "--checkpoint-dir",
    "remove": "--remove",
    "ranks": "--ranks",
    "device_gb_s": "--device-gb-s",
    "workers": "--workers",
    **PLAN_OPTIONS,
}  # by the arguments of load(), run(), generate(), scaled() and plan()


def main(arguments: Sequence[str]) -> int:
    """Run `workload ...`; return the exit status."""
    command = arguments[1] if len(arguments) > 1 and arguments[1] in _COMMANDS else ""
    name = f"workload {command}".strip()
    if command == "run" and started_ranks() > 1:
        return _run_under_mpi(name, arguments[1:])
    return _run_command(name, arguments[1:], LocalLauncher())


def _run_command(name: str, arguments: Sequence[str], launcher: Launcher) -> int:
    def interrupted(options: argparse.Namespace) -> str:
        return "; run the same command again to continue" if options.command == "generate" else ""

    parser = make_parser()
    parser.set_defaults(launcher=launcher)
    return run_command(
        name,
        parser,
        arguments,
        interrupted,
        _write_report,
        _OPTIONS,
        usage_errors=(NotADirectoryError,),
    )


def _run_under_mpi(name: str, arguments: Sequence[str]) -> int:
    """Run the command on rank 0, which the other ranks help; return the same exit status on all."""
    try:
        ranks = MpiRanks()
    except Unsupported as error:
        if started_rank() == 0:
            report_error(name, error, "--json" in arguments)
        return FAILED
    status = FAILED
    try:
        status = ranks.serve() if ranks.rank > 0 else _run_command(name, arguments, ranks)
    except SystemExit as ended:  # of --help
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        ranks.abort()
    if ranks.rank == 0:
        ranks.end(status)
    sys.stdout.flush()
    sys.stderr.flush()
    ranks.close()
    os._exit(status)  # as _rank_process.run() does: threads of torch's process group


def make_parser() -> Parser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog="trunkline workload",
        description="Measure whether storage is fast enough for a training job, its checkpoints, or "
        "inference, without the accelerators: real files are read and written, and computation is a wait. "
        "The job is described by a workload: a built-in one, or a YAML file of DLIO or MLPerf Storage.",
        epilog="First `generate` the data set of a workload, then `run` the workload on it.",
    )
    commands = parser.add_subparsers(dest="command", metavar="SUBCOMMAND", required=True)
    for add in (_add_list, _add_generate, _add_run, _add_compare, _add_plan):
        add(commands).add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_list(commands: "_Commands") -> Parser:
    parser = commands.add_parser(
        "list",
        help="list the built-in workloads, and the bandwidth that each requires",
        description="List the built-in workloads: the size of the data set, and the read bandwidth that "
        "keeps one accelerator fully busy.",
    )
    parser.set_defaults(run=_list)
    return parser


def _add_generate(commands: "_Commands") -> Parser:
    parser = commands.add_parser(
        "generate",
        help="write the data set of a workload",
        description="Write the data set of a workload. It can be interrupted: run the same command again, "
        "and it keeps the files that are complete. It never replaces a file that it did not write.",
    )
    _add_workload(parser)
    _add_data(parser, required=True)
    parser.add_argument(
        "--scale",
        metavar="SIZE",
        help="size of the data set, such as 10GB: changes the number of files, not the size of samples",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="how many files are written at the same time (default: twice the number of cores)",
    )
    parser.set_defaults(run=_generate)
    return parser


def _add_run(commands: "_Commands") -> Parser:
    parser = commands.add_parser(
        "run",
        help="emulate a workload, and report how busy storage keeps the accelerators",
        description="Emulate the training job of a workload: batches are read as trunkline.data.Loader reads "
        "them, and the computation is a wait of the time that the workload declares. Before that, the same "
        "loop runs for up to a second without reading, to show that the emulator itself is fast enough. "
        "Checkpoints are saved and restored as trunkline.dcp does, in the folder `checkpoints` of the "
        "directories or in --checkpoint-dir. Inference answers queries, and logs them.",
    )
    _add_workload(parser)
    _add_data(parser, required=False)
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="how many accelerators to emulate, one process per emulated accelerator (default: 1; for "
        "checkpoints alone, all ranks of the model). With fewer ranks than the model has, the first N are "
        "run. Under mpirun, each of its processes is one accelerator, and --ranks is an error",
    )
    parser.add_argument(
        "--scale",
        metavar="SIZE",
        help='size of a checkpoint of all ranks, such as "10GB": the model is made smaller',
    )
    parser.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="directory for the checkpoints of the job, for example on another disk; it must have no other "
        "files (default: the folder `checkpoints` of --directories). For checkpoints alone, pass it instead "
        "of --directories",
    )
    parser.add_argument(
        "--remove",
        action="store_true",
        help="at the end, remove the checkpoints and logs that this run has written",
    )
    parser.add_argument(
        "--null-device",
        action="store_true",
        help="read nothing, to measure the emulator and not the storage",
    )
    parser.add_argument(
        "--device-gb-s",
        type=float,
        metavar="X",
        help="with --null-device: take the time of a device that reads X GB/s, shared by all accelerators",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="write the results as a page of HTML with charts, which needs no network",
    )
    parser.set_defaults(run=_run)
    return parser


def _add_compare(commands: "_Commands") -> Parser:
    parser = commands.add_parser(
        "compare",
        help="compare two runs",
        description="Show the figures of two runs side by side, and their ratio. Warns where they differ in "
        "more than the storage: in the workload, its size, or the number of accelerators.",
    )
    parser.add_argument("a", metavar="A.json", help="output of `trunkline workload run --json`")
    parser.add_argument("b", metavar="B.json", help="output of another run")
    parser.set_defaults(run=_compare)
    return parser


def _add_plan(commands: "_Commands") -> Parser:
    parser = commands.add_parser(
        "plan", help="compute the storage that any number of accelerators needs", description=DESCRIPTION
    )
    _add_workload(parser)
    add_options(parser)
    parser.set_defaults(run=_plan)
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        metavar="NAME_OR_FILE",
        help="a built-in workload (see `trunkline workload list`), or a YAML file that describes one",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change a key of the workload, such as train.epochs=1; may be given several times",
    )


def _add_data(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument(
        "--directories",
        "--data",
        dest="data",
        metavar="DIR",
        nargs="+",
        required=required,
        help="the directory of the data set; several, for example one on each disk, share its files",
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
    places = directories_of(options.data)
    check_no_files(places)
    directories = [str(each) for each in places]
    files = workload.dataset.train.files + workload.dataset.valid.files
    if workload.has_dataset:
        print(
            f"generating {workload.name}: {files} files, {size(files * mean_file_bytes(workload))}, in "
            f"{', '.join(directories)}",
            file=sys.stderr,
            flush=True,
        )
    document = generate(workload, directories, options.workers)
    kept = f", kept {document['files_kept']} that were there" if document["files_kept"] else ""
    made = size(document["bytes_made"])
    model = f", and a model of {size(document['model_bytes'])}" if document["model_bytes"] else ""
    text = (
        f"wrote {document['files_made']} files of {workload.name}, {made}{kept}{model}: "
        f"{', '.join(document['directories'])}"
    )
    return {**_head(options), **document, "ignored": _ignored(workload)}, text


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    _check_places(options)
    if options.device_gb_s is not None and not options.null_device:
        raise ValueError("--device-gb-s has no effect without --null-device")
    launcher: Launcher = options.launcher
    if options.ranks is not None and launcher.ranks is not None:
        raise ValueError(
            f"--ranks cannot be combined with mpirun, which has started {launcher.ranks} ranks; leave it "
            "out, and set their number with mpirun -n"
        )
    if options.ranks is not None and options.ranks < 1:
        raise ValueError(f"--ranks: must be at least 1, not {options.ranks}")
    workload = _load(options)
    if options.report is not None:
        _check_report(options.report, workload)
    _warn_of_files(options, workload)
    scale = None if options.scale is None else parse_size(options.scale, "--scale")
    document = run_with(
        launcher,
        workload,
        options.data,
        launcher.ranks or options.ranks,
        device_gb_s=options.device_gb_s,
        scale_bytes=scale,
        remove=options.remove,
        checkpoint_directory=options.checkpoint_dir,
    )
    text = text_of_checkpoints if workload.train is None else text_of
    if workload.inference is not None:
        text = text_of_inference
    return {**_head(options), **document, "ignored": _ignored(workload)}, text(document)


def _check_places(options: argparse.Namespace) -> None:
    """Raise ValueError unless it is clear where to read and to save."""
    if options.null_device and options.checkpoint_dir is not None:
        raise ValueError("--checkpoint-dir has no effect with --null-device: nothing is saved")
    if options.null_device and options.data:
        raise ValueError("pass either --directories DIR, the directory of the data set, or --null-device")
    if not (options.null_device or options.data or options.checkpoint_dir is not None):
        raise ValueError("pass either --directories DIR, the directory of the data set, or --null-device")


def _warn_of_files(options: argparse.Namespace, workload: Workload) -> None:
    """Say on stderr if a number of files has no effect, as others were generated."""
    if not options.data or not workload.has_dataset:
        return
    found = found_workload(workload, directories_of(options.data)).dataset
    for key, there, wanted in (
        ("dataset.num_files_train", found.train.files, workload.dataset.train.files),
        ("dataset.num_files_eval", found.valid.files, workload.dataset.valid.files),
    ):
        if there != wanted and any(key in each.partition("=")[0] for each in options.set):
            print(
                f"--set {key}={wanted} has no effect: {there} files were generated in "
                f"{', '.join(options.data)}, and all are read",
                file=sys.stderr,
            )


def _check_report(path: str, workload: Workload) -> None:
    """Raise ValueError, before anything runs, if no report can be written."""
    if workload.train is None or workload.inference is not None:
        raise ValueError(f"--report is for training jobs, and {workload.name} is not one; use --json")
    check_page_name(path)
    try:
        check_writable(Path(path))
    except OSError as error:
        why = why_not_writable(error, Path(path))
        raise ValueError(f"--report: cannot write {path}: {why}") from error


def _write_report(options: argparse.Namespace, document: dict[str, Any]) -> None:
    """After the results are printed: a page that cannot be written must not lose them."""
    if getattr(options, "report", None) is not None:
        write_report(document, options.report)
        print(f"report: {options.report}", file=sys.stderr)


def _compare(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    names = (options.a, options.b)
    runs = (read_results(options.a), read_results(options.b))
    comparison = compare(*runs)
    document = {**_head(options), "files": list(names), **comparison}
    return document, comparison_text(names, runs, comparison)


def _plan(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    document, text = run_plan(options, _load)
    return {**_head(options), **document}, text


def _list(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    workloads = {name: load(name) for name in builtin_names()}
    trainings = [_summary(name, each) for name, each in workloads.items() if each.train is not None]
    checkpoints = [_checkpoint_summary(name, each) for name, each in workloads.items() if each.train is None]
    rows = sorted(trainings + checkpoints, key=lambda row: row["name"])
    lines = [*_training_lines(trainings), "", *_checkpoint_lines(checkpoints)]
    lines += ["", "GB/s: the read bandwidth that keeps one accelerator fully busy. --json adds descriptions."]
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
