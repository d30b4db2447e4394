"""Plans of storage: their numbers against ones computed by hand, and against the emulator."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support_replaced import each_value_replaced

from trunkline._checkpoint_interval import daly_interval, longest_save, lost_share, young_interval
from trunkline.workload import CheckpointBudget, Disk, Server, Workload, builtin_names, cli, load, plan, run
from trunkline.workload._builtin import name_of_kind
from trunkline.workload._demand import Demand, demand_of
from trunkline.workload._disk_numbers import measured_disk, with_given
from trunkline.workload._parse import parse_text
from trunkline.workload._plan import counts_up_to
from trunkline.workload._storage import Needs, disks_for, servers_for


def spec(**dataset: Any) -> Workload:
    """1000 samples of 1 MB, four of which are a batch that computes for 10 ms."""
    document = {
        "model": {"name": "tiny"},
        "dataset": {"format": "jpeg", "num_files_train": 1000, "record_length_bytes": 1_000_000, **dataset},
        "reader": {"batch_size": 4},
        "train": {"computation_time": 0.01},
    }
    return parse_text(json.dumps(document), "tiny.yaml")


# By hand: samples/s = batch / seconds; GB/s = samples/s x bytes that are read; reads of at most 4 MiB.
@pytest.mark.parametrize(
    ("name", "gb_s", "samples", "reads"),
    [
        ("unet3d_h100", 3.17708, 7 / 0.323, 7 / 0.323 * 35),  # 146,600,628 bytes are 34.95 x 4 MiB
        ("resnet50_h100", 0.204750, 400 / 0.224, 400 / 0.224),
        ("cosmoflow_a100", 0.513337, 1 / 0.00551, 1 / 0.00551),
        ("bert", 0.000123967, 48 / 0.968, 48 / 0.968),
        # Of a row group of 6144 rows, the 40 columns lie in 29 places, none larger than 4 MiB.
        ("dlrm_b200", 6.99051, 16384 / 0.000375, 16384 / 0.000375 * 29 / 6144),
    ],
)
def test_the_demand_of_an_accelerator(name: str, gb_s: float, samples: float, reads: float) -> None:
    demand = demand_of(load(name))
    assert demand.gb_s == pytest.approx(gb_s, rel=1e-5)
    assert demand.samples_per_second == pytest.approx(samples)
    assert demand.reads_per_second == pytest.approx(reads)


def test_reads_of_row_groups() -> None:
    columns = [
        {"name": "a", "size": 1000, "dtype": "uint8"},
        {"name": "b", "size": 5000, "dtype": "uint8", "read": False},
        {"name": "c", "size": 3000, "dtype": "uint8"},
        {"name": "d", "size": 3000, "dtype": "uint8"},
    ]
    parquet = {"columns": columns, "row_group_size": 1000}
    workload = spec(format="parquet", parquet=parquet, num_samples_per_file=1000, num_files_train=1)
    # a: 1 MB, 1 read; c and d: 6 MB side by side, 2 reads; for 1000 samples, of which there are 400 a second.
    assert demand_of(workload).reads_per_second == pytest.approx(3 * 400 / 1000)


def test_every_built_in_workload_has_a_plan_for_100000_accelerators() -> None:
    for name in builtin_names():
        workload = load(name)
        if workload.train is None:  # checkpoints alone
            with pytest.raises(ValueError, match="has no training"):
                plan(workload, 1)
            continue
        document = plan(workload, 100_000)
        assert document["scaling"][-1]["accelerators"] == 100_000
        assert math.isfinite(document["training"]["gb_s"])


def test_a_plan_by_hand() -> None:
    document = plan(
        spec(),
        8,
        target=0.5,
        disk=Disk(read_gb_s=0.5, iops=1000, capacity_bytes=400_000_000),
        server=Server(gb_s=0.9, disks=10),
        inference_ratio=10,
    )
    training, inference = document["training"], document["inference"]
    assert training["gb_s"] == pytest.approx(8 * 0.5 * 0.4)
    assert training["samples_per_second"] == pytest.approx(1600)
    assert training["reads_per_second"] == pytest.approx(1600)
    assert training["capacity_bytes"] == 1e9
    assert training["steps_per_epoch"] == 31  # 1000 / 32
    assert training["epoch_seconds"] == pytest.approx(1000 / 1600)
    assert training["disks"] == {
        "bandwidth": 4,
        "reads": 2,
        "writes": None,
        "capacity": 3,
        "needed": 4,
        "bound_by": "bandwidth",
    }
    assert training["servers"] == 2  # 1.6 GB/s
    assert inference["gb_s"] == pytest.approx(16)
    assert inference["disks"]["needed"] == 32
    assert inference["servers"] == 18  # 16 GB/s, and 32 disks would fit into 4
    assert [row["accelerators"] for row in document["scaling"]] == [1, 2, 5, 8]
    assert [row["training"]["disks"]["needed"] for row in document["scaling"]] == [3, 3, 3, 4]
    assert document["warnings"] == [
        "steps per epoch: 31, as the data set has 1000 samples; below 500, waits at the beginning of an "
        "epoch matter, which the plan leaves out"
    ]


def test_checkpoints_count_for_capacity_and_writing() -> None:
    budget = CheckpointBudget(nbytes=1e12, share=0.05, mtbf_hours=50_000, restart_seconds=60, kept=3)
    document = plan(spec(), 1000, disk=Disk(write_gb_s=0.5), checkpoints=budget)
    saving = document["checkpoints"]
    assert saving["mtbf_seconds"] == pytest.approx(180_000)
    # To first order, sqrt(2 x save / mtbf) is lost beside the restarts: save = mtbf x 0.0497^2 / 2.
    assert saving["save_seconds"] == pytest.approx(180_000 * (0.05 - 60 / 180_000) ** 2 / 2, rel=0.04)
    assert saving["gb_s"] == pytest.approx(1000 / saving["save_seconds"])
    assert saving["lost_share"] == pytest.approx(0.05, rel=1e-6)
    assert document["training"]["capacity_bytes"] == 1e9 + 3e12
    disks = document["training"]["disks"]["needed"]
    assert disks == document["training"]["disks"]["writes"] == math.ceil(saving["gb_s"] / 0.5)
    on_disks = saving["on_these_disks"]
    assert on_disks["save_seconds"] == pytest.approx(1000 / (disks * 0.5))
    # To first order: sqrt(2 x save x mtbf) between saves.
    assert on_disks["interval_seconds"] == pytest.approx(
        math.sqrt(2 * on_disks["save_seconds"] * 180_000), rel=0.05
    )
    assert 0.045 < on_disks["lost_share"] <= 0.05
    without = plan(spec(), 1000, disk=Disk(read_gb_s=1), checkpoints=budget)
    assert without["checkpoints"]["on_these_disks"] is None


def paced(ranks: int, target: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a plan, and a run on a device that is as fast as the plan says."""
    document = {
        "model": {"name": "tiny"},
        "dataset": {"format": "jpeg", "num_files_train": 200 * ranks, "record_length_bytes": 1_000_000},
        "reader": {"batch_size": 4, "read_threads": 2},
        "train": {"computation_time": 0.01},
    }
    workload = parse_text(json.dumps(document), "tiny.yaml")
    planned = plan(workload, ranks, target=target)
    return planned, run(workload, None, ranks, device_gb_s=planned["training"]["gb_s"])


@pytest.mark.parametrize(("ranks", "target"), [(1, 0.5), (1, 0.8), (2, 0.5)])
def test_the_emulator_reaches_the_target_on_the_planned_bandwidth(ranks: int, target: float) -> None:
    """While storage is the limit, a step that begins late delays no later one: a busy machine changes little.

    The device is never faster than it should be.
    """
    planned, ran = paced(ranks, target)
    assert ran["steps"] == 50
    assert ran["bytes"] == ranks * 200 * 1_000_000
    assert 0.75 * target < ran["utilization"] < 1.02 * target
    if ranks == 1:  # of several, GB/s includes the time until all processes have started
        assert ran["gb_s"] == pytest.approx(ran["utilization"] * 0.4, rel=0.1)
    assert planned["training"]["gb_s"] == pytest.approx(target * 0.4 * ranks)


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, 1e6])
@pytest.mark.parametrize("save", [0.1, 10.0, 200.0])
def test_the_interval_loses_the_least(save: float, mtbf: float) -> None:
    best = daly_interval(save, mtbf)
    losses = [lost_share(best * factor, save, mtbf, 30) for factor in (1, 0.5, 0.8, 1.25, 2)]
    assert min(losses[1:]) > losses[0]
    exact = min(lost_share(best * factor / 1000, save, mtbf, 30) for factor in range(700, 1400))
    assert losses[0] == pytest.approx(exact, rel=1e-3)


def test_intervals_by_young_and_daly() -> None:
    # Young's example values: 2 x 600 x 86400 is 10182^2.
    assert young_interval(600, 86_400) == pytest.approx(10_182.3, rel=1e-5)
    # sqrt(2dM)(1 + sqrt(d/2M)/3 + (d/2M)/9) - d, by hand: 10182.3 x (1 + 0.019642 + 0.000386) - 600.
    assert daly_interval(600, 86_400) == pytest.approx(9_786.2, rel=1e-4)
    assert daly_interval(100, 40) == 40
    assert lost_share(1, 1, 1e-3, 0) == 1


def test_restarts_may_lose_the_budget_alone() -> None:
    assert longest_save(0.05, 3000, 300) is None
    assert longest_save(0.1, 3000, 300) is not None
    document = plan(spec(), 100_000, checkpoints=CheckpointBudget(1e13))
    assert document["checkpoints"]["save_seconds"] is None
    assert document["checkpoints"]["lost_share"] == pytest.approx(1 - math.exp(-300 / (50_700 * 0.036)))
    assert any("restarts alone lose 15.2% of the time" in each for each in document["warnings"])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("mtbf", [1000.0, 1e5, 1e8])
def test_the_longest_save_uses_the_budget_up(share: float, mtbf: float) -> None:
    save = longest_save(share, mtbf, 1)
    assert save is not None
    assert lost_share(daly_interval(save, mtbf), save, mtbf, 1) == pytest.approx(share, rel=1e-6)


def test_numbers_of_disks_and_servers() -> None:
    needs = Needs(Demand(0.3, 10, 50), 100, 0.0)
    assert disks_for(needs, Disk()) is None
    found = disks_for(needs, Disk(read_gb_s=0.1, iops=5))
    assert found is not None
    assert (found["bandwidth"], found["reads"], found["needed"], found["bound_by"]) == (3, 10, 10, "reads")
    assert disks_for(Needs(Demand(0, 0, 0), 0), Disk(read_gb_s=1)) is not None
    assert servers_for(5, 100, None) is None
    assert servers_for(5, 100, Server(gb_s=2)) == 3
    assert servers_for(5, 100, Server(disks=24)) == 5
    assert servers_for(5, None, Server(disks=24)) is None


def test_counts() -> None:
    assert counts_up_to(1) == [1]
    assert counts_up_to(5) == [1, 2, 5]
    assert counts_up_to(100) == [1, 2, 5, 10, 20, 50, 100]
    assert counts_up_to(120) == [1, 2, 5, 10, 20, 50, 100, 120]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accelerators": 0}, "accelerators: must be at least 1, not 0"),
        ({"target": 0}, "target: must be above 0 and at most 1, not 0"),
        ({"target": 90}, "target: must be above 0 and at most 1, not 90"),
        ({"target": math.nan}, "target: must be above 0"),
        ({"inference_ratio": -1}, "inference_ratio: must not be below 0, not -1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(spec(), **{"accelerators": 1, **arguments})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Disk(read_gb_s=0), "Disk.read_gb_s: must be above 0, not 0"),
        (lambda: Server(disks=-1), "Server.disks: must be at least 1, not -1"),
        (lambda: CheckpointBudget(0), "CheckpointBudget.nbytes: must be above 0, not 0"),
        (lambda: CheckpointBudget(1, share=1), "CheckpointBudget.share: must be above 0 and below 1, not 1"),
        (lambda: CheckpointBudget(1, restart_seconds=-1), "restart_seconds: must not be below 0"),
        (lambda: CheckpointBudget(1, kept=0), "CheckpointBudget.kept: must be at least 1, not 0"),
    ],
)
def test_wrong_numbers_of_storage(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_arguments_of_other_types() -> None:
    for arguments, message in (
        ({"accelerators": 2.5}, "accelerators: must be a whole number, not 2.5"),
        ({"accelerators": "8"}, "accelerators: must be a whole number, not '8'"),
        ({"target": "90%"}, "target: must be a number, not '90%'"),
        (
            {"disk": {"read_gb_s": 5}},
            r"disk: must be a trunkline.workload.Disk, such as Disk\(read_gb_s=5\), not dict",
        ),
        ({"server": 25}, r"server: must be a trunkline.workload.Server, such as Server\(gb_s=25\), not int"),
        (
            {"checkpoints": 1e12},
            "checkpoints: must be a trunkline.workload.CheckpointBudget, such as .* not float",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            plan(spec(), **{"accelerators": 1, **arguments})
    with pytest.raises(TypeError, match="Disk.iops: must be a number, not '1M'"):
        Disk(iops="1M")  # type: ignore[arg-type]


def test_workloads_without_a_demand() -> None:
    document: dict[str, Any] = {"dataset": {"format": "jpeg", "num_files_train": 1, "record_length_bytes": 9}}
    document |= {"reader": {"batch_size": 1}, "workflow": {"train": False}}
    with pytest.raises(ValueError, match=r"has no training: workflow.train is false in w.yaml"):
        plan(parse_text(json.dumps(document), "w.yaml"), 1)
    document |= {"workflow": {}, "train": {"computation_time": 0}}
    with pytest.raises(ValueError, match="computation_time is 0, so no bandwidth is enough"):
        plan(parse_text(json.dumps(document), "w.yaml"), 1)


def bench(block: int, gb_s: float, paths: int = 1, **row: Any) -> dict[str, Any]:
    """Output of `trunkline bench --json`, as far as it is read."""
    result = {"name": "read", "operation": "read", "order": "random", "gb_s": gb_s, **row}
    document: dict[str, Any] = {"command": "bench", "options": {"block_bytes": block}, "results": [result]}
    return {**document, "paths": [{}] * paths}


def test_disks_as_they_were_measured(tmp_path: Path) -> None:
    write = {"name": "write", "operation": "write", "order": "sequential", "gb_s_with_sync": 1.5}
    tuned = {"random read": 2e9, "sequential write": 6e9, "sequential read": 9e9}
    documents = {
        "large": bench(1 << 20, 6.0, 2),
        "small": bench(4096, 0.4096),
        "write": bench(1 << 20, 9.0, 1, **write),
        "tune": {"command": "tune", "paths": ["/a", "/b"], "best": {"bytes_per_second": tuned}},
    }
    for name, document in documents.items():
        (tmp_path / name).write_text(json.dumps(document))
    disk = measured_disk([f"{tmp_path}/{name}" for name in documents])
    assert (disk.read_gb_s, disk.iops, disk.write_gb_s) == (3.0, pytest.approx(100_000), 3.0)
    assert disk.sources["read_gb_s"] == f"{tmp_path}/large: read, random, blocks of 1024 KiB, of 2 disks"
    assert disk.sources["iops"] == f"{tmp_path}/small: read, random, blocks of 4 KiB"
    assert disk.sources["write_gb_s"] == f"{tmp_path}/tune: sequential write, tuned, of 2 disks"
    assert disk.iops_block_bytes == 4096  # of the file that it is from
    assert with_given(disk, {"iops": 5.0}).iops_block_bytes is None
    given = with_given(disk, {"iops": 5.0, "read_gb_s": None})
    assert (given.read_gb_s, given.iops, given.sources["iops"]) == (3.0, 5.0, "given")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "has no measurements of disks; give the output of `trunkline bench --json`"),
        ('{"command": "bench", "error": {}}', "`trunkline bench` failed there; measure again"),
        ('{"command": "bench"}', "incomplete, or of another version of trunkline"),
        (json.dumps(bench(0, 1.0)), "incomplete, or of another version of trunkline"),
        (json.dumps({**bench(1, 1.0), "results": []}), "has no measurement of reading or writing"),
    ],
)
def test_files_without_measurements(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        measured_disk([str(file)])


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_measurements_with_any_value_replaced(tmp_path: Path, command: str) -> None:
    """Each is read, or rejected with an error that names the file."""
    rates = {"random read": 2e9, "sequential write": 6e9}
    tuned = {"command": "tune", "paths": ["/a"], "best": {"bytes_per_second": rates}}
    file = tmp_path / "m.json"
    changed = list(each_value_replaced(bench(4096, 1.0) if command == "bench" else tuned))
    assert len(changed) > 50
    for document in changed:
        file.write_text(json.dumps(document))
        try:
            disk = measured_disk([str(file)])
        except ValueError as error:
            assert str(error).startswith(str(file))  # noqa: PT017
        else:
            assert disk.read_gb_s or disk.write_gb_s


def test_kinds_of_accelerators() -> None:
    assert name_of_kind("unet3d", "b200") == "unet3d_b200"
    assert name_of_kind("unet3d_h100", "b200") == "unet3d_b200"
    assert name_of_kind("retinanet", "mi355") == "retinanet_mi355"
    for name in ("retinanet", "unet3d_h100", "some.yaml"):
        assert name_of_kind(name, None) == name
    with pytest.raises(ValueError, match="unet3d is built in for a100, b200, h100; choose one with --accele"):
        name_of_kind("unet3d", None)
    with pytest.raises(ValueError, match="unet3d is not built in for x9; it is for a100, b200, h100"):
        name_of_kind("unet3d_h100", "x9")
    with pytest.raises(ValueError, match="bert has no variants for kinds"):
        name_of_kind("bert", "h100")


def test_reads_that_were_measured_with_large_blocks_are_a_warning() -> None:
    small = spec(record_length_bytes=20_000)
    [warning] = plan(small, 1, disk=Disk(iops=600, iops_block_bytes=1 << 20))["warnings"][:1]
    assert "measured with blocks of 1024 KiB, but the training reads 20 kB at a time" in warning
    assert "--read --random --block 20KiB --json" in warning
    for disk in (Disk(iops=600), Disk(iops=600, iops_block_bytes=20 << 10)):
        assert not [each for each in plan(small, 1, disk=disk)["warnings"] if "measured" in each]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = tmp_path / "bench.json"
    measured.write_text(json.dumps(bench(1 << 20, 3.0)))
    command = ["workload", "plan", "unet3d", "--accelerator-kind", "h100", "--accelerators", "8"]
    command += ["--bench", str(measured), "--disk-capacity", "4TB", "--server-disks", "4"]
    command += ["--checkpoint-size", "500GB", "--target", "0.9"]
    assert cli.main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["command"], document["schema"]) == ("workload plan", 1)
    assert document["training"]["disks"]["needed"] == 8  # 22.9 GB/s
    assert document["training"]["servers"] == 2
    assert document["disk"]["sources"]["capacity_bytes"] == "given"
    for name in ("plan.svg", "plan.html"):
        assert cli.main([*command, "--plot", str(tmp_path / name)]) == 0
    text = capsys.readouterr().out
    assert "unet3d (unet3d_h100) on 8 accelerators, 90% of the time computing" in text
    assert f"a disk reads 3 GB/s ({measured}: read, random, blocks of 1024 KiB)" in text
    assert "checkpoints of 500 GB: a failure every" in text
    lines = ElementTree.parse(tmp_path / "plan.svg").findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3  # training, inference, checkpoints
    page = (tmp_path / "plan.html").read_text()
    assert "<svg" in page
    assert "<script" not in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plot", "x.png"], "--plot: x.png must end with .svg (a chart) or .html (a page)"),
        (["--mtbf-hours", "5"], "options of checkpoints have no effect without --checkpoint-size"),
        (["--disk-capacity", "much"], "--disk-capacity"),
        (["--disk-gb-s", "-1"], "workload plan: --disk-gb-s: must be above 0, not -1.0"),
        (["--target", "2"], "workload plan: --target: must be above 0 and at most 1"),
        (["--bench", "/nowhere/a"], "--bench: cannot read /nowhere/a: no such file"),
        (["--plot", "/nowhere/a.svg"], "--plot: cannot write /nowhere/a.svg: no such file"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["workload", "plan", "bert", "--accelerators", "1", *options]) == 2
    assert message in capsys.readouterr().err
