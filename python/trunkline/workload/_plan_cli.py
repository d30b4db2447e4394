"""The command `trunkline workload plan`."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from trunkline._core import parse_size
from trunkline._html import check_plot
from trunkline.workload._builtin import name_of_kind
from trunkline.workload._disk_numbers import measured_disk, with_given
from trunkline.workload._plan import CheckpointBudget, plan
from trunkline.workload._plan_text import plan_text, write_plot
from trunkline.workload._spec import Workload
from trunkline.workload._storage import Disk, Server

DESCRIPTION = (
    "Compute how much bandwidth, how many reads per second and how much capacity the training of a workload "
    "needs on any number of accelerators, and inference with its model, and how many disks that is. Nothing "
    "is read or measured: what a disk can do is given, or comes from measurements."
)

PLAN_OPTIONS = {
    "accelerators": "--accelerators",
    "target": "--target",
    "inference_ratio": "--inference-ratio",
    "Disk.read_gb_s": "--disk-gb-s",
    "Disk.iops": "--disk-iops",
    "Disk.write_gb_s": "--disk-write-gb-s",
    "Disk.capacity_bytes": "--disk-capacity",
    "Server.gb_s": "--server-gb-s",
    "Server.disks": "--server-disks",
    "CheckpointBudget.nbytes": "--checkpoint-size",
    "CheckpointBudget.share": "--checkpoint-budget",
    "CheckpointBudget.mtbf_hours": "--mtbf-hours",
    "CheckpointBudget.restart_seconds": "--restart-seconds",
    "CheckpointBudget.kept": "--checkpoints-kept",
}  # by the arguments of plan()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options but the workload and --json."""
    parser.add_argument("--accelerators", type=int, required=True, metavar="N", help="how many there are")
    parser.add_argument(
        "--accelerator-kind",
        metavar="KIND",
        help="of a built-in workload, the variant for this accelerator: unet3d with b200 is unet3d_b200",
    )
    parser.add_argument(
        "--target",
        type=float,
        metavar="SHARE",
        help="share of the time that accelerators compute, such as 0.9 (default: the workload's, else 0.9)",
    )
    _add_storage(parser)
    _add_checkpoints(parser)
    parser.add_argument(
        "--inference-ratio",
        type=float,
        default=10.0,
        metavar="X",
        help="inference reads so many times the bytes per second of training (default: 10)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the bandwidth over the number of accelerators: as a chart (.svg), or a page (.html)",
    )


def _add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bench",
        metavar="FILE",
        nargs="+",
        default=[],
        help="what a disk can do: output of `trunkline bench --json` or `trunkline tune --json`",
    )
    for option, what in (
        ("--disk-gb-s", "GB/s that a disk reads"),
        ("--disk-iops", "reads per second of a disk"),
        ("--disk-write-gb-s", "GB/s that a disk writes"),
    ):
        parser.add_argument(option, type=float, metavar="X", help=f"{what} (default: what --bench measured)")
    parser.add_argument("--disk-capacity", metavar="SIZE", help="what a disk holds, such as 3.84TB")
    parser.add_argument("--server-gb-s", type=float, metavar="X", help="GB/s of a storage server's network")
    parser.add_argument("--server-disks", type=int, metavar="N", help="disks in a storage server")


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint-size",
        metavar="SIZE",
        help="size of a checkpoint of all ranks: also compute how fast saves must be",
    )
    parser.add_argument(
        "--checkpoint-budget",
        type=float,
        metavar="SHARE",
        help="share of the time that saving and failures may lose (default: 0.05)",
    )
    parser.add_argument(
        "--checkpoints-kept", type=int, metavar="N", help="checkpoints stored at a time (default: 2)"
    )
    parser.add_argument(
        "--mtbf-hours",
        type=float,
        metavar="X",
        help="mean time between failures of one accelerator (default: 50700, as in Llama 3's training)",
    )
    parser.add_argument(
        "--restart-seconds",
        type=float,
        metavar="X",
        help="from a failure until computation goes on (default: 300)",
    )


def run_plan(
    options: argparse.Namespace, load: Callable[[argparse.Namespace], Workload]
) -> tuple[dict[str, Any], str]:
    """Compute the plan, and draw it; return the document, and the text."""
    if options.plot is not None:
        check_plot(options.plot)
    options.workload = name_of_kind(options.workload, options.accelerator_kind)
    document = plan(
        load(options),
        options.accelerators,
        target=options.target,
        disk=_disk(options),
        server=_server(options),
        checkpoints=_checkpoints(options),
        inference_ratio=options.inference_ratio,
    )
    if options.plot is not None:
        write_plot(document, options.plot)
        print(f"plot: {options.plot}", file=sys.stderr)
    return document, plan_text(document)


def _disk(options: argparse.Namespace) -> Disk:
    capacity = options.disk_capacity
    return with_given(
        measured_disk(options.bench),
        {
            "read_gb_s": options.disk_gb_s,
            "iops": options.disk_iops,
            "write_gb_s": options.disk_write_gb_s,
            "capacity_bytes": None if capacity is None else parse_size(capacity, "--disk-capacity"),
        },
    )


def _server(options: argparse.Namespace) -> Server | None:
    if options.server_gb_s is None and options.server_disks is None:
        return None
    return Server(options.server_gb_s, options.server_disks)


def _checkpoints(options: argparse.Namespace) -> CheckpointBudget | None:
    given = {
        "share": options.checkpoint_budget,
        "kept": options.checkpoints_kept,
        "mtbf_hours": options.mtbf_hours,
        "restart_seconds": options.restart_seconds,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if options.checkpoint_size is None:
        if given:
            raise ValueError("options of checkpoints have no effect without --checkpoint-size")
        return None
    return CheckpointBudget(parse_size(options.checkpoint_size, "--checkpoint-size"), **given)
