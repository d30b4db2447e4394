"""The commands of `trunkline checkpoint` for the directory of a node (Checkpointer with local=True)."""

import argparse
from typing import Any, NoReturn

from trunkline._arguments import started_ranks
from trunkline._checkpoint_tools.node_directory import NodeShares
from trunkline._checkpoint_tools.torchrun import joined_ranks
from trunkline._command import Parser
from trunkline._errors import Unsupported
from trunkline._formats.node_names import ALL_NODES
from trunkline._sizes import size


def make_parser() -> Parser:
    """Return the parser of the commands that the program has for other directories."""
    parser = Parser(prog="trunkline checkpoint")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, act in (("ls", _ls), ("show", _show), ("verify", _verify), ("gc", _gc)):
        command = commands.add_parser(name)
        command.add_argument("directory", metavar="DIR", help="the directory of a node")
        command.add_argument("--json", action="store_true", help="print one JSON document")
        command.set_defaults(run=act)
    for name in ("show", "verify"):
        commands.choices[name].add_argument("--step", type=int, metavar="N", help="number of a step")
    verify = commands.choices["verify"]
    verify.add_argument("--all", action="store_true", help="verify every step")
    verify.add_argument(
        ALL_NODES, action="store_true", help="verify on all nodes at once; start it with torchrun on each"
    )
    for option in ("--dry-run", "--orphaned"):
        commands.choices["gc"].add_argument(option, action="store_true", help="no effect")
    return parser


def _document(options: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    named = {"command": f"checkpoint {options.command}", "schema": 1, "directory": options.directory}
    return {**named, **found}


def _ls(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    found = NodeShares(options.directory).listed()
    lines = [f"node {found['node']}: its share of each step, with the copies that it keeps"]
    if found["checkpoints"]:
        lines.append(f"{'step':<10}{'time':>20}{'nodes':>7}{'copies':>8}{'ranks':>7}{'size':>10}{'here':>10}")
    for each in found["checkpoints"]:
        step = "" if each["step"] is None else each["step"]
        if "error" in each:
            lines.append(f"{step:<10}  {each['error']['message']}")
            continue
        marks = [] if each["is_committed"] else ["not committed"]
        marks += [] if each["is_complete"] else ["incomplete"]
        marks += [f"in place of {each['in_place_of']}"] if each["in_place_of"] else []
        lines.append(
            f"{step:<10}{each['time']:>20}{len(each['nodes']):>7}{each['copies']:>8}{each['world_size']:>7}"
            f"{size(each['bytes']):>10}{size(each['bytes_here']):>10}  {', '.join(marks)}".rstrip()
        )
    if found["lost"] is not None:
        lines.append(f"the share of step {found['lost']}, which was committed last here, is gone")
    if not found["checkpoints"]:
        lines.append(f"{options.directory} has no checkpoints")
    for tier in found.get("tiers", []):
        steps = ", ".join(map(str, tier.get("steps", []))) or "no checkpoints yet"
        lines.append(f"tier {tier['directory']}: {tier['error']['message'] if 'error' in tier else steps}")
    return _document(options, found), "\n".join(lines)


def _show(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    found = NodeShares(options.directory).shown(options.step)
    lines = [
        f"step {found['step']}, saved {found['time']}; ranks: {found['world_size']}, nodes: "
        f"{len(found['nodes'])}, copies: {found['copies']}"
        + ("" if found["is_committed"] else "; not known here to be committed")
        + (f"; here in place of node {found['in_place_of']}" if found["in_place_of"] else ""),
        "",
    ]
    lines += [
        f"share of node {each['node']}: kept by {', '.join(each['kept_by'])}" for each in found["shares"]
    ]
    lines += [f"here: {each['path']}, {size(each['bytes'])}" for each in found["shards"]]
    lines += [
        f"{each['name']}: {each['dtype']} {each['shape']}, {size(each['bytes'])}" for each in found["tensors"]
    ]
    lines.append(f"{size(found['bytes'])} on all nodes, {size(found['bytes_here'])} here")
    return _document(options, found), "\n".join(lines)


def _verify(options: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    if options.all and options.step is not None:
        raise ValueError("--step and --all cannot be combined")
    if options.all_nodes:
        return _verify_all_nodes(options)
    results = NodeShares(options.directory).verified(options.step, options.all)
    lines = []
    for each in results:
        problems = [found["message"] for found in each.get("mismatches", ())]
        problems += [each["error"]["message"]] if "error" in each else []
        what = f"entry {each['entry']}" if each["step"] is None else f"step {each['step']}"
        state = "verified" if each["ok"] else "damaged"
        lines += [f"{what}: {state}, {size(each.get('bytes', 0))} here", *(f"  {text}" for text in problems)]
    ok = bool(results) and all(each["ok"] for each in results)
    text = "\n".join(lines or [f"{options.directory} has no checkpoints"])
    return _document(options, {"ok": ok, "checkpoints": results}), text


def _verify_all_nodes(options: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    from trunkline.checkpoint.directory.local_checkpointer import LocalCheckpointer

    with joined_ranks() as rank:
        checkpointer = LocalCheckpointer(options.directory, keep=None)
        found = checkpointer.verify_all_nodes(options.step, options.all)
    document = _document(options, found)
    if rank > 0:
        return document, None
    lines = []
    for each in found["checkpoints"]:
        lines += _lines_of_verified(each)
    lines += [f"node {each['node']}: {each['error']['message']}" for each in found["problems"]]
    absent = any(not each["is_here"] for save in found["checkpoints"] for each in save["nodes"])
    if absent and started_ranks() == 1:
        lines.append("this process is alone: start one on each node, with torchrun")
    return document, "\n".join(lines or [f"{options.directory} has no checkpoints on any node"])


def _lines_of_verified(save: dict[str, Any]) -> list[str]:
    if "removed" in save:
        return [f"step {save['step']}: not verified, it was removed meanwhile"]
    nodes = save["nodes"]
    nbytes = size(sum(each["bytes"] for each in nodes))
    if save["ok"]:
        return [
            f"step {save['step']}: verified, {nbytes} on {len(nodes)} node{'' if len(nodes) == 1 else 's'}"
        ]
    if save["lost_shares"]:
        verdict = f"no node has an intact share of {', '.join(save['lost_shares'])}: it cannot be loaded"
    else:
        verdict = "each share is intact on some node, so it can be loaded"
    lines = [f"step {save['step']}: damaged or incomplete, {nbytes} verified. {verdict}"]
    for each in nodes:
        problems = [found["message"] for found in each["mismatches"]]
        problems += [each["error"]["message"]] if "error" in each else []
        problems += [] if each["is_here"] else ["is not here, or has lost its share"]
        lines += [f"  node {each['node']}: {text}" for text in problems]
    return lines


def _gc(options: argparse.Namespace) -> NoReturn:
    raise Unsupported(
        None,
        f"{options.directory} is the directory of a node. What a save that failed has left there is "
        "removed by the first save of the next run",
        options.directory,
    )
