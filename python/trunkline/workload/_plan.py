"""What storage a training needs on any number of accelerators: computed, not measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trunkline._checkpoint_interval import daly_interval, longest_save, lost_share, young_interval
from trunkline._numbers import check_count, check_not_negative, check_positive, check_share
from trunkline._sizes import size
from trunkline.workload._demand import READ_BYTES, Demand, demand_of
from trunkline.workload._spec import Workload, check_workload
from trunkline.workload._storage import Disk, Needs, Server, disks_for, servers_for
from trunkline.workload._totals import totals_of

USUAL_TARGET = 0.9
_ENOUGH_STEPS = 500  # in an epoch, as MLPerf Storage requires


@dataclass(frozen=True)
class CheckpointBudget:
    """Checkpoints of a training on accelerators that fail.

    The default for `mtbf_hours` is from "The Llama 3 Herd of Models" (2024): 419 unexpected interruptions in
    54 days on 16,384 accelerators are one in 50,700 hours of an accelerator.
    """

    nbytes: float
    """Size of one, of all ranks together."""
    share: float = 0.05
    """Share of the time that saving, computing again and restarting may lose."""
    mtbf_hours: float = 50_700.0
    """Mean time between failures of one accelerator, with all that it depends on."""
    restart_seconds: float = 300.0
    """From a failure until computation goes on, with loading."""
    kept: int = 2
    """Checkpoints that are stored at a time."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of its range."""
        check_positive("CheckpointBudget.nbytes", self.nbytes)
        check_share("CheckpointBudget.share", self.share, with_one=False)
        check_positive("CheckpointBudget.mtbf_hours", self.mtbf_hours)
        check_not_negative("CheckpointBudget.restart_seconds", self.restart_seconds)
        check_count("CheckpointBudget.kept", self.kept)


def _check_kind(name: str, value: object, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise TypeError(
            f"{name}: must be a trunkline.workload.{kind.__name__}, such as {example}, not "
            f"{type(value).__name__}"
        )


def plan(
    workload: Workload,
    accelerators: int,
    *,
    target: float | None = None,
    disk: Disk | None = None,
    server: Server | None = None,
    checkpoints: CheckpointBudget | None = None,
    inference_ratio: float = 10.0,
) -> dict[str, Any]:
    """Compute the storage that a training needs on so many accelerators, and inference with the same model.

    target: utilization of the accelerators, above 0 and at most 1; None: that of the workload, else 0.9.
    disk, server: to compute how many are needed.
    checkpoints: to compute how fast they must be saved.
    inference_ratio: inference reads so many times the bytes per second that training of the same model reads.

    Returns the document that `trunkline workload plan --json` prints; bandwidth is in 10^9 bytes per second.
    "scaling" has the same for smaller numbers of accelerators. Raises ValueError if the workload has no
    training or an argument is out of its range, TypeError for an argument of another type.
    """
    check_workload(workload)
    check_count("accelerators", accelerators)
    _check_kind("disk", disk, Disk, "Disk(read_gb_s=5)")
    _check_kind("server", server, Server, "Server(gb_s=25)")
    _check_kind("checkpoints", checkpoints, CheckpointBudget, "CheckpointBudget(nbytes=1e12)")
    if target is None:
        target = workload.target_utilization or USUAL_TARGET
    check_share("target", target, with_one=True)
    check_not_negative("inference_ratio", inference_ratio)
    one = demand_of(workload)
    disk = disk or Disk()
    rows = [
        _row(workload, one.times(count * target), count, disk, server, checkpoints, inference_ratio)
        for count in counts_up_to(accelerators)
    ]
    return {
        "workload": workload.name,
        "source": workload.source,
        "target_utilization": target,
        "read_bytes": READ_BYTES,
        "accelerator": {**one.__dict__, "utilization": 1.0},
        "disk": {**disk.__dict__, "sources": dict(disk.sources)},
        "server": None if server is None else dict(server.__dict__),
        "inference_ratio": inference_ratio,
        "checkpoint_budget": None if checkpoints is None else dict(checkpoints.__dict__),
        **rows[-1],
        "scaling": rows,
        "warnings": _warnings(rows[-1], totals_of(workload).samples, disk),
    }


def counts_up_to(accelerators: int) -> list[int]:
    """Return 1, 2, 5, 10, ... and the number itself."""
    counts = [factor * 10**power for power in range(len(str(accelerators))) for factor in (1, 2, 5)]
    return [*(count for count in counts if count < accelerators), accelerators]


def _row(
    workload: Workload,
    demand: Demand,
    accelerators: int,
    disk: Disk,
    server: Server | None,
    checkpoints: CheckpointBudget | None,
    inference_ratio: float,
) -> dict[str, Any]:
    """Return the plan for one number of accelerators."""
    totals = totals_of(workload, accelerators)
    saving = None if checkpoints is None else _saving(checkpoints, accelerators)
    kept = 0.0 if checkpoints is None else checkpoints.nbytes * checkpoints.kept
    needs = Needs(demand, totals.bytes + kept, (saving and saving["gb_s"]) or 0.0)
    training = _part(needs, disk, server)
    training["steps_per_epoch"] = totals.steps_per_epoch
    training["epoch_seconds"] = totals.samples / demand.samples_per_second
    if checkpoints is not None and saving is not None and training["disks"] and disk.write_gb_s is not None:
        gb_s = training["disks"]["needed"] * disk.write_gb_s
        saving["on_these_disks"] = _saving_at(checkpoints, saving["mtbf_seconds"], gb_s)
    return {
        "accelerators": accelerators,
        "training": training,
        "inference": _part(Needs(demand.times(inference_ratio), totals.bytes), disk, server),
        "checkpoints": saving,
    }


def _part(needs: Needs, disk: Disk, server: Server | None) -> dict[str, Any]:
    disks = disks_for(needs, disk)
    busiest = max(needs.demand.gb_s, needs.write_gb_s)
    return {
        **needs.demand.__dict__,
        "capacity_bytes": needs.capacity_bytes,
        "disks": disks,
        "servers": servers_for(busiest, None if disks is None else disks["needed"], server),
    }


def _saving(checkpoints: CheckpointBudget, accelerators: int) -> dict[str, Any]:
    """Return how long a save may take, and how often to save; None where restarts alone lose the budget."""
    mtbf = checkpoints.mtbf_hours * 3600 / accelerators
    save = longest_save(checkpoints.share, mtbf, checkpoints.restart_seconds)
    interval = None if save is None else daly_interval(save, mtbf)
    return {
        "mtbf_seconds": mtbf,
        "save_seconds": save,
        "gb_s": None if save is None else checkpoints.nbytes / save / 1e9,
        "interval_seconds": interval,
        "young_interval_seconds": None if save is None else young_interval(save, mtbf),
        "lost_share": 1 - math.exp(-checkpoints.restart_seconds / mtbf)
        if save is None or interval is None
        else lost_share(interval, save, mtbf, checkpoints.restart_seconds),
        "on_these_disks": None,
    }


def _saving_at(checkpoints: CheckpointBudget, mtbf: float, gb_s: float) -> dict[str, float]:
    """Return how long a save takes at this bandwidth, how often is best, and what that loses."""
    save = checkpoints.nbytes / gb_s / 1e9
    interval = daly_interval(save, mtbf)
    lost = lost_share(interval, save, mtbf, checkpoints.restart_seconds)
    return {"gb_s": gb_s, "save_seconds": save, "interval_seconds": interval, "lost_share": lost}


def _warnings(row: dict[str, Any], samples: int, disk: Disk) -> Sequence[str]:
    said = []
    read_bytes = row["training"]["gb_s"] * 1e9 / row["training"]["reads_per_second"]
    if disk.iops_block_bytes is not None and disk.iops_block_bytes > 2 * read_bytes:
        kib = max(4, -(-round(read_bytes) // 4096) * 4)
        said.append(
            f"reads/s were measured with blocks of {disk.iops_block_bytes // 1024} KiB, but the training "
            f"reads {size(read_bytes)} at a time, and a disk may do more of them; measure "
            f"with `trunkline bench DIR --read --random --block {kib}KiB --json`"
        )
    steps, saving = row["training"]["steps_per_epoch"], row["checkpoints"]
    if steps < _ENOUGH_STEPS:
        said.append(
            f"steps per epoch: {steps}, as the data set has {samples} samples; below {_ENOUGH_STEPS}, waits "
            "at the beginning of an epoch matter, which the plan leaves out"
        )
    if saving is not None and saving["save_seconds"] is None:
        said.append(
            f"no storage is fast enough for the budget of checkpoints: restarts alone lose "
            f"{saving['lost_share']:.1%} of the time; allow more, or make failures rarer or restarts shorter"
        )
    return said
