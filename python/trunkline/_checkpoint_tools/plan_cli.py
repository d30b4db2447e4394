"""The command `trunkline checkpoint plan`: its options, and the plan as text."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from trunkline._checkpoint_tools.plan import NODE_MTBF_HOURS, SavePlan, Tier, plan_saves
from trunkline._checkpoint_tools.plan_sources import Found, Measured, found_in, measured_in
from trunkline._core import parse_size
from trunkline._readable import duration, quantity
from trunkline._sizes import size

DESCRIPTION = (
    "Compute how often to save checkpoints on machines that fail, what saving and failures cost then, and "
    "how much the directories must hold. How long a save takes is given: as --save-seconds, as --bandwidth "
    "with a size, or as measured saves in --results. Nothing is written."
)
OPTIONS = {
    "SavePlan.save_seconds": "--save-seconds",
    "SavePlan.stall_seconds": "--stall-seconds",
    "SavePlan.nbytes": "--bytes",
    "SavePlan.nodes": "--nodes",
    "SavePlan.node_mtbf_hours": "--mtbf-hours",
    "SavePlan.restart_seconds": "--restart-seconds",
    "SavePlan.keep": "--keep",
    "SavePlan.step_seconds": "--step-seconds",
    "Tier.bytes_per_second": "--tier-bandwidth",
    "Tier.keep": "--tier-keep",
}  # by the fields of SavePlan and Tier
_NAMES = {
    "best": "best (Daly)",
    "young": "Young",
    "half": "half of it",
    "double": "twice",
    "now": "as now",
}


def add_plan(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "plan",
        help="compute how often to save on machines that fail, and what that costs",
        description=DESCRIPTION,
    )
    command.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        help="a directory of checkpoints: the size of its latest step, and how often it saves now",
    )
    _add_saves(command)
    _add_failures(command)
    command.add_argument(
        "--keep", type=int, default=3, metavar="N", help="checkpoints that are kept (default: 3)"
    )
    command.add_argument(
        "--tier-bandwidth",
        metavar="RATE",
        help="bytes per second of a tier, such as 2GB: also compute which checkpoints to copy there",
    )
    command.add_argument(
        "--tier-keep", type=int, metavar="N", help="checkpoints that are kept in the tier (default: 3)"
    )
    command.set_defaults(run=run_plan)


def _add_saves(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--bytes", metavar="SIZE", help="size of a checkpoint, such as 1.2TB (default: that of DIR or FILE)"
    )
    times = command.add_mutually_exclusive_group(required=True)
    times.add_argument(
        "--save-seconds", type=float, metavar="X", help="how long a save takes until it is durable"
    )
    times.add_argument(
        "--bandwidth", metavar="RATE", help="bytes per second of saving, such as 20GB, instead of the time"
    )
    times.add_argument(
        "--results",
        metavar="FILE",
        help="time and size of measured saves: output of `trunkline workload run --json`",
    )
    command.add_argument(
        "--stall-seconds",
        type=float,
        metavar="X",
        help="for how long the training stops at each save, if the rest goes on in the background "
        "(default: for all of the save)",
    )
    command.add_argument(
        "--step-seconds",
        type=float,
        metavar="X",
        help="time of a step of the training, for intervals in steps (default: that of DIR)",
    )


def _add_failures(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes of the training (default: 1)"
    )
    command.add_argument(
        "--mtbf-hours",
        type=float,
        default=NODE_MTBF_HOURS,
        metavar="X",
        help="mean time between failures of one node (default: 6340, as of nodes in Llama 3's training)",
    )
    command.add_argument(
        "--restart-seconds",
        type=float,
        default=300.0,
        metavar="X",
        help="from a failure until computation goes on (default: 300)",
    )


def run_plan(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Compute the plan; return the document and the text."""
    found = None if options.directory is None else found_in(options.directory)
    measured = None if options.results is None else measured_in(options.results)
    nbytes, sources = _bytes(options, found, measured)
    seconds = _seconds(options, nbytes, measured, sources)
    step_seconds = options.step_seconds
    if step_seconds is None and found is not None and found.step_seconds is not None:
        step_seconds = found.step_seconds
        sources["step_seconds"] = f"median in {options.directory}"
    given = SavePlan(
        seconds,
        stall_seconds=options.stall_seconds,
        nbytes=nbytes,
        nodes=options.nodes,
        node_mtbf_hours=options.mtbf_hours,
        restart_seconds=options.restart_seconds,
        keep=options.keep,
        step_seconds=step_seconds,
        tier=_tier(options),
    )
    document = plan_saves(given, None if found is None else found.cycle_seconds)
    return {
        "command": "checkpoint plan",
        "schema": 1,
        "directory": options.directory,
        **document,
        "sources": sources,
    }, plan_text(document, sources)


def _bytes(
    options: argparse.Namespace, found: Found | None, measured: Measured | None
) -> tuple[float | None, dict[str, str]]:
    """Return the size of a checkpoint, and where it is from."""
    if options.bytes is not None:
        return parse_size(options.bytes, "--bytes"), {"bytes": "given"}
    if found is not None and found.nbytes:  # a state may have no tensors
        return found.nbytes, {"bytes": f"step {found.step} of {options.directory}"}
    if measured is not None:
        return measured.nbytes, {"bytes": options.results}
    return None, {}


def _seconds(
    options: argparse.Namespace,
    nbytes: float | None,
    measured: Measured | None,
    sources: dict[str, str],
) -> float:
    """Return how long a save takes; add where that is from to the sources."""
    if measured is not None:
        share = (nbytes or measured.nbytes) / measured.nbytes
        scaled = "" if share == 1 else f", of {size(measured.nbytes)}, in proportion"
        count = f"{measured.saves} save{'' if measured.saves == 1 else 's'}"
        sources["save_seconds"] = f"{options.results}, mean of {count}{scaled}"
        return measured.seconds * share
    if options.bandwidth is not None:
        if nbytes is None:
            raise ValueError("--bandwidth needs a size: pass --bytes or DIR")
        rate = parse_size(options.bandwidth, "--bandwidth")
        if rate == 0:
            raise ValueError("--bandwidth: must be above 0")
        sources["save_seconds"] = f"at {size(rate)}/s, given"
        return nbytes / rate
    sources["save_seconds"] = "given"
    return float(options.save_seconds)


def _tier(options: argparse.Namespace) -> Tier | None:
    if options.tier_bandwidth is None:
        if options.tier_keep is not None:
            raise ValueError("--tier-keep has no effect without --tier-bandwidth")
        return None
    keep = {} if options.tier_keep is None else {"keep": options.tier_keep}
    return Tier(parse_size(options.tier_bandwidth, "--tier-bandwidth"), **keep)


def plan_text(plan: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Return the plan as text."""
    return "\n".join(
        [
            *_basis(plan, sources),
            "",
            *_aligned(_table(plan)),
            "",
            *_advice(plan),
            *_capacities(plan),
        ]
    )


def _basis(plan: Mapping[str, Any], sources: Mapping[str, str]) -> list[str]:
    what = "a save" if plan["bytes"] is None else f"a save of {size(plan['bytes'])} ({sources['bytes']})"
    lines = [f"{what} takes {duration(plan['save_seconds'])} ({sources['save_seconds']})"]
    if plan["stall_seconds"] != plan["save_seconds"]:
        lines[0] += f"; the training stops for {duration(plan['stall_seconds'])} of that"
    nodes = f"{plan['nodes']:,} node{'' if plan['nodes'] == 1 else 's'}"
    each = "" if plan["nodes"] == 1 else " each"
    lines.append(
        f"{nodes} with a failure every {quantity(plan['node_mtbf_hours'])} hours{each}: one every "
        f"{duration(plan['mtbf_seconds'])}; {duration(plan['restart_seconds'])} to restart"
    )
    return lines


def _table(plan: Mapping[str, Any]) -> list[list[str]]:
    with_steps = plan["step_seconds"] is not None
    rows = [
        ["interval", "compute for", *(["steps"] * with_steps), "saving", "work lost per failure", "time lost"]
    ]
    for each in plan["intervals"]:
        row = [_NAMES[each["name"]], duration(each["interval_seconds"])]
        row += [f"{each['interval_steps']:,}"] if with_steps else []
        row += [f"{each['saving_share']:.2%}", duration(each["lost_work_seconds"])]
        rows.append([*row, f"{each['lost_share']:.2%}"])
    return rows


def _advice(plan: Mapping[str, Any]) -> list[str]:
    steps = "" if plan["interval_steps"] is None else f" ({plan['interval_steps']:,} steps)"
    lines = [
        f"save every {duration(plan['interval_seconds'])} of computing{steps}: saving, lost work and "
        f"restarts cost {plan['lost_share']:.2%} of the time"
    ]
    tier = plan["tier"]
    if tier is None:
        return lines
    which = "every checkpoint" if tier["every"] == 1 else f"one checkpoint in {tier['every']:,}"
    steps = "" if tier["every_steps"] is None else f" (every={tier['every_steps']:,} where steps are counted)"
    lines.append(
        f"tier: a copy takes {duration(tier['copy_seconds'])}, to write and to read back at "
        f"{size(tier['bytes_per_second'])}/s: copy {which}{steps}, one every "
        f"{duration(tier['every_seconds'])}"
    )
    lines.append(
        f"a failure after which only the tier is left loses {duration(tier['lost_work_seconds'])} of work; "
        f"if all were like that, {tier['lost_share']:.2%} of the time"
    )
    return lines


def _capacities(plan: Mapping[str, Any]) -> list[str]:
    if plan["capacity_bytes"] is None:
        return []
    more = " and one that is being saved"
    if plan["tier"] is not None:
        more = ", one that is being saved and one that is being copied"
    lines = [f"capacity: {size(plan['capacity_bytes'])} for keep={plan['keep']}{more}"]
    if plan["tier"] is not None:
        tier = plan["tier"]
        lines.append(
            f"capacity of the tier: {size(tier['capacity_bytes'])} for keep={tier['keep']} and one that is "
            "being copied"
        )
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
