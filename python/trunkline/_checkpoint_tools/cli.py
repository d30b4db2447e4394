"""The commands of `trunkline checkpoint` that are in Python."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trunkline._arguments import started_ranks
from trunkline._checkpoint_tools.plan_cli import OPTIONS as _PLAN_OPTIONS
from trunkline._checkpoint_tools.plan_cli import add_plan
from trunkline._checkpoint_tools.torchrun import is_first_rank, joined_ranks
from trunkline._command import FAILED, OK, Parser, run_command
from trunkline._core import CheckpointStore
from trunkline._errors import Unsupported, reword
from trunkline._formats.dcp_names import is_dcp_directory
from trunkline._formats.node_names import ALL_NODES, is_node_directory
from trunkline._sizes import size


def make_parser() -> Parser:
    """Return the parser of `trunkline checkpoint`; a command's defaults have `run`."""
    parser = Parser(prog="trunkline checkpoint")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    _add_export(commands)
    _add_import(commands)
    _add_rm(commands)
    _add_diff(commands)
    add_plan(commands)
    for each in commands.choices.values():
        each.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def make_dcp_parser() -> Parser:
    """Return the parser of the commands that the program has for other directories than those of DCP."""
    parser = Parser(prog="trunkline checkpoint")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, act in (("ls", _dcp_ls), ("show", _dcp_show), ("verify", _dcp_verify), ("gc", _dcp_gc)):
        command = commands.add_parser(name)
        command.add_argument("directory", metavar="DIR", help="a directory of trunkline.dcp.Checkpointer")
        command.add_argument("--json", action="store_true", help="print one JSON document")
        command.set_defaults(run=act)
    for name in ("show", "verify"):
        _add_step(commands.choices[name])
    commands.choices["verify"].add_argument("--all", action="store_true", help="verify every step")
    commands.choices["gc"].add_argument(
        "--dry-run", action="store_true", help="report what would be removed, and remove nothing"
    )
    commands.choices["gc"].add_argument("--orphaned", action="store_true", help="no effect: links show them")
    return parser


def _add_step(command: argparse.ArgumentParser) -> None:
    command.add_argument("--step", type=int, metavar="N", help="number of a step (default: the latest)")


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint as a .safetensors or .pt file, or as a folder for transformers",
        description="Write a checkpoint, or a part of it, to files that other programs read. Every byte is "
        "compared with its checksum; memory is bounded however large the checkpoint is.",
    )
    export.add_argument(
        "directory", metavar="DIR", help="a directory of checkpoints, one of its steps, or a directory of DCP"
    )
    export.add_argument(
        "out", metavar="OUT", help="what to write: FILE.safetensors, FILE.pt, or a new folder (FOLDER/)"
    )
    _add_step(export)
    export.add_argument("--key", help="export only what is below this key of the state, such as model")
    export.add_argument(
        "--max-shard-size", metavar="SIZE", help="the most bytes of a file in the folder OUT (default: 5GB)"
    )
    export.add_argument(
        "--from",
        dest="from_folder",
        metavar="FOLDER",
        help="a Hugging Face folder whose configuration and tokenizer are copied into the folder OUT",
    )
    export.add_argument(
        "--overwrite",
        "--force",
        dest="force",
        action="store_true",
        help="replace OUT if it is a file that exists",
    )
    export.set_defaults(run=_export)


def _add_import(commands: Any) -> None:
    command = commands.add_parser(
        "import",
        help="save a file or folder of other programs as a step",
        description="Save a .safetensors file, a Hugging Face folder, a file of torch.save, or a "
        "directory of torch.distributed.checkpoint as a step of a directory of checkpoints. Needs memory for "
        "all of it.",
    )
    command.add_argument("source", metavar="SOURCE", help="a file, or a folder")
    command.add_argument("directory", metavar="DIR", help="a directory of checkpoints, or a new one")
    command.add_argument("step", metavar="STEP", type=int, help="number of the step")
    command.add_argument("--key", help="put it below this key of the state, such as model")
    command.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read directories of torch's FileSystemWriter, which runs the pickles in them",
    )
    command.set_defaults(run=_import)


def _add_rm(commands: Any) -> None:
    remove = commands.add_parser(
        "rm",
        help="remove the checkpoint of one step",
        description="Remove the checkpoint of one step, durably, and nothing else.",
    )
    remove.add_argument("directory", metavar="DIR", help="a directory of checkpoints")
    remove.add_argument("step", metavar="STEP", type=int, help="number of the step")
    remove.set_defaults(run=_remove)


def _add_diff(commands: Any) -> None:
    diff = commands.add_parser(
        "diff",
        help="compare two checkpoints or files: which tensors differ, and by how much",
        description="Compare two checkpoints or files. The exit status is 1 if they differ, and 2 if they "
        "could not be compared.",
    )
    for side in ("a", "b"):
        diff.add_argument(
            side,
            metavar=side.upper(),
            help="a directory of checkpoints (its latest), a step of one (DIR/step-00000100), a directory of "
            "DCP, or a .safetensors or .pt file",
        )
    diff.add_argument("--key", help="compare only what is below this key of the state, such as model")
    diff.set_defaults(run=_diff)


def _export(options: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    if options.out == "-":
        raise ValueError(
            "OUT: cannot be standard output, since checksums at the beginning of a file are written last; "
            "name a file, or ./- for a folder of that name"
        )
    # With torchrun, a node that has lost the directory takes part.
    is_lost_node = started_ranks() > 1 and not os.path.exists(options.directory)  # noqa: PTH110 - a str
    if not is_lost_node and not is_node_directory(options.directory):
        return _exported(options)
    with joined_ranks() as rank:
        document, text = _exported(options, local=True)
        return document, text if rank == 0 else None


def _exported(options: argparse.Namespace, *, local: bool = False) -> tuple[dict[str, Any], str]:
    from trunkline._checkpoint_tools.export import export_checkpoint

    done = export_checkpoint(
        options.directory,
        options.out,
        step=options.step,
        key=options.key,
        force=options.force,
        max_shard_size=options.max_shard_size,
        from_folder=options.from_folder,
        show_progress=True,
        local=local,
    )
    lines = [f"{name} is tied to {kept}; only {kept} is written" for name, kept in done.dropped.items()]
    if os.path.isdir(done.path) and options.from_folder is None:  # noqa: PTH112 - a str
        lines.append(
            "the folder has no config.json: --from FOLDER copies that of the model, for from_pretrained"
        )
    verified = "every byte verified" if done.verified else "NOT verified: the source has no checksums"
    lines.append(
        f"exported {done.source} to {done.path}: {_counted(done.tensors, 'tensor')}, "
        f"{size(done.bytes)}, {verified}"
    )
    return {"command": "checkpoint export", "schema": 1, **done.document()}, "\n".join(lines)


def _import(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from trunkline._torch_or_numpy import require_torch

    require_torch("importing a checkpoint", "import it where torch is")
    from trunkline._checkpoint_tools.importing import import_checkpoint

    try:
        done = import_checkpoint(
            options.source,
            options.directory,
            step=options.step,
            key=options.key,
            allow_pickle=options.allow_pickle,
        )
    except Unsupported as error:
        if "add_safe_globals" in str(error):  # which is a function of Python
            reword(error, f"{error}. To do so, load it in Python, and save it with trunkline.Checkpointer")
        raise
    text = f"imported {done.source} as step {done.step} of {done.directory}: {size(done.bytes)}"
    return {"command": "checkpoint import", "schema": 1, **done.document()}, text


def _remove(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    left = _remove_step(options.directory, options.step)
    document = {
        "command": "checkpoint rm",
        "schema": 1,
        "directory": options.directory,
        "removed": options.step,
        "steps": left,
    }
    rest = f"left: {', '.join(map(str, left))}" if left else "no step is left"
    return document, f"removed step {options.step} of {options.directory}; {rest}"


def _remove_step(directory: str, step: int) -> list[int]:
    """Remove the checkpoint of a step; return those that are left."""
    if not is_dcp_directory(directory):
        from trunkline.checkpoint.nodes.node_directory import check_not_of_node

        check_not_of_node(directory, "remove a step from")
        store = CheckpointStore(directory, create=False)
        store.remove(step)
        return store.steps()
    from trunkline.dcp import run_directory

    path = Path(directory).absolute()
    run_directory.step_directory(path, step)
    with run_directory.locked(path):
        run_directory.remove_step(path, step)
    return run_directory.steps_of(path)


def _dcp_document(options: argparse.Namespace, document: dict[str, Any]) -> dict[str, Any]:
    named = {"command": f"checkpoint {options.command}", "schema": 1, "directory": options.directory}
    return {**named, **document}


def _dcp_ls(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from trunkline._checkpoint_tools import dcp_directory

    document = dcp_directory.list_checkpoints(options.directory)
    lines = [f"{'step':<10}{'commit':>8}  {'time':<20}{'ranks':>7}{'shards':>8}{'tensors':>9}{'size':>12}"]
    for each in document["checkpoints"]:
        step = "" if each["step"] is None else each["step"]
        if "error" in each:
            lines.append(f"{step:<10}  {each['error']['message']}")
            continue
        marks = ["latest"] if each["step"] == document["latest"] else []
        marks += [] if each["is_complete"] else ["incomplete"]
        lines.append(
            f"{step:<10}{each['commit']:>8}  {each['time']:<20}{each['world_size']:>7}{each['shards']:>8}"
            f"{each['tensors']:>9}{each['bytes'] / 1e6:>9.2f} MB  {', '.join(marks)}".rstrip()
        )
    text = "\n".join(lines) if document["checkpoints"] else f"{options.directory} has no checkpoints"
    return _dcp_document(options, document), text


def _dcp_show(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from trunkline._checkpoint_tools import dcp_directory

    [checkpoint] = dcp_directory.find(options.directory, options.step)
    document = dcp_directory.show(checkpoint)
    lines = [
        f"{checkpoint.folder}, saved {document['time']} by {_counted(document['world_size'], 'rank')}",
        "",
    ]
    lines += [f"shard {number}: {each['path']}" for number, each in enumerate(document["shards"])]
    lines += [
        f"{each['name']}: {each['dtype']} {each['shape']}, {each['bytes'] / 1e6:.3g} MB, "
        f"shards {','.join(map(str, each['shards']))}"
        for each in document["tensors"]
    ]
    lines.append(f"{document['bytes'] / 1e6:.4g} MB in {_counted(len(document['tensors']), 'tensor')}")
    return _dcp_document(options, document), "\n".join(lines)


def _dcp_verify(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from trunkline._checkpoint_tools import dcp_directory

    if options.all and options.step is not None:
        raise ValueError("--step and --all cannot be combined")
    found = dcp_directory.find(options.directory, options.step, every=options.all)
    results = [dcp_directory.verify(each, may_be_gone=options.all) for each in found]
    lines = []
    for checkpoint, each in zip(found, results, strict=True):
        what = str(checkpoint.folder) if checkpoint.step is None else f"step {checkpoint.step}"
        if "removed" in each:
            lines.append(f"{what}: not verified, another process removed it meanwhile")
            continue
        problems = [m["message"] for m in each.get("mismatches", ())]
        problems += [each["error"]["message"]] if "error" in each else []
        nbytes = f", {each['bytes'] / 1e6:.4g} MB" if "bytes" in each else ""
        state = "verified" if each["ok"] else f"damaged, {_counted(len(problems), 'problem')}"
        lines += [f"{what}: {state}{nbytes}", *(f"  {problem}" for problem in problems)]
    ok = bool(results) and all(each["ok"] for each in results)
    return _dcp_document(options, {"ok": ok, "checkpoints": results}), "\n".join(
        lines or [f"{options.directory} has no checkpoints"]
    )


def _dcp_gc(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from trunkline._checkpoint_tools import dcp_directory

    document = dcp_directory.collect(options.directory, dry_run=options.dry_run)
    if document["busy"]:
        return _dcp_document(
            options, document
        ), f"a save into {options.directory} is in progress; try again when it has ended"
    would = "would remove" if options.dry_run else "removed"
    lines = [f"{would} {each['path']}" for each in document["removed"]]
    lines += [f"left in place: {each['message']}" for each in document["problems"]]
    return _dcp_document(options, document), "\n".join(lines or ["nothing to remove"])


def _status_of(document: dict[str, Any]) -> int:
    """Return the exit status, as the program has it."""
    bad = document.get("same") is False or document.get("ok") is False
    bad = bad or bool(document.get("busy")) or bool(document.get("problems"))
    if document["command"] == "checkpoint ls":
        bad = not all(each.get("is_complete", False) for each in document["checkpoints"])
        bad = bad or document.get("lost") is not None
    return FAILED if bad else OK


def _diff(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from trunkline._torch_or_numpy import require_torch

    require_torch("comparing checkpoints", "compare them where torch is")
    from trunkline._checkpoint_tools.difference import compare

    found = compare(options.a, options.b, key=options.key)
    lines = [f"only in {found.a}: {name}" for name in found.only_a]
    lines += [f"only in {found.b}: {name}" for name in found.only_b]
    lines += [f"{name}: the values differ" for name in found.values]
    for each in found.tensors:
        lines.append(f"{each.name}: {_described(each)}")
    if found.is_same:
        lines = [f"the same: {_counted(found.compared, 'tensor')}"]
    else:
        lines.append(_summary(found))
    return {"command": "checkpoint diff", "schema": 1, **found.document()}, "\n".join(lines)


def _summary(found: Any) -> str:
    only = [
        f"{_counted(len(names), 'tensor or value')} only in {side}"
        for names, side in ((found.only_a, found.a), (found.only_b, found.b))
        if names
    ]
    common = "common " if only else ""
    differing = f"{len(found.tensors)} of {found.compared} {common}tensors differ"
    return "; ".join([differing if found.compared else "no tensor is in both", *only])


def _described(each: Any) -> str:
    parts = []
    if each.shapes[0] != each.shapes[1]:
        parts.append(f"shape {each.shapes[0]} and {each.shapes[1]}")
    if each.dtypes[0] != each.dtypes[1]:
        parts.append(f"dtype {each.dtypes[0]} and {each.dtypes[1]}")
    if each.elements is not None:
        most = "" if each.max_abs is None else f", by at most {each.max_abs:.6g}"
        parts.append(f"{each.elements} of {_counted(each.total, 'element')} differ{most}")
    return ", ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


_NOT_COMPARED = 2  # as of diff and cmp
_OPTIONS = {
    "out": "OUT",
    "key": "--key",
    "force": "--overwrite",
    "max_shard_size": "--max-shard-size",
    "from_folder": "--from",
    "allow_pickle": "--allow-pickle",
}  # by the arguments of export_checkpoint() and import_checkpoint()


def _parser_for(arguments: Sequence[str]) -> Parser:
    if arguments[0] not in ("ls", "show", "verify", "gc"):
        return make_parser()
    if ALL_NODES not in arguments and not any(map(is_node_directory, arguments[1:])):
        return make_dcp_parser()
    from trunkline._checkpoint_tools import node_cli

    return node_cli.make_parser()


def main(arguments: Sequence[str]) -> int:
    """Run a command; `arguments` begin with its name. Returns the exit status."""
    return run_command(
        f"checkpoint {arguments[0]}",
        _parser_for(arguments),
        arguments,
        interrupted=lambda options: "" if options.command == "rm" else "; nothing was changed",
        status_of=_status_of,
        option_names={
            "step": "STEP" if arguments[0] in ("rm", "import") else "--step",
            **(_PLAN_OPTIONS if arguments[0] == "plan" else _OPTIONS),
        },
        usage_errors=(FileNotFoundError, NotADirectoryError),
        failed=_NOT_COMPARED if arguments[0] == "diff" else FAILED,
        is_first=is_first_rank() or not (arguments[0] == "export" or ALL_NODES in arguments),
    )
