"""Budgets of checkpoints: against a simulation of failures, by hand, and on the command line."""

import json
import random
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

import trunkline as tl
from trunkline._checkpoint_tools import cli, plan_sources
from trunkline._checkpoint_tools.plan import SavePlan, Tier, plan_saves
from trunkline._checkpoint_tools.plan_sources import found_in, measured_in

ROOT = Path(__file__).resolve().parents[2]


def simulated(given: SavePlan, interval: float, failures: int) -> tuple[float, float]:
    """Train with random failures; return the share of the time that is lost, and the work lost in each."""
    chance = random.Random(1)
    clock = done = durable = 0.0
    saving: tuple[float, float] | None = None  # the work that is being saved, seconds until it is durable
    lost: list[float] = []
    left = chance.expovariate(1 / given.mtbf)  # until the next failure
    computes = True
    while len(lost) < failures:
        span = min(interval if computes else given.stall, left)
        clock, left = clock + span, left - span
        if computes:
            done += span
            saving = (saving[0], saving[1] - span) if saving else None
        elif left > 0:
            saving = (done, given.in_background)
        if saving and saving[1] <= 0:
            durable, saving = saving[0], None
        computes = not computes
        if left > 0:
            continue
        lost.append(done - durable)
        done, saving, computes = durable, None, True
        while (left := chance.expovariate(1 / given.mtbf)) < given.restart_seconds:
            clock += left
        clock, left = clock + given.restart_seconds, left - given.restart_seconds
    return 1 - durable / clock, sum(lost) / len(lost)


@pytest.mark.parametrize(
    "given",
    [
        SavePlan(60, nodes=256),
        SavePlan(600, nodes=2048),  # a third of the time is lost
        SavePlan(60, stall_seconds=2, nodes=2048),
        SavePlan(600, stall_seconds=60, nodes=1024),
    ],
)
def test_a_plan_is_what_failures_do(given: SavePlan) -> None:
    plan = plan_saves(given)
    share, work = simulated(given, plan["interval_seconds"], 20_000)
    assert plan["lost_share"] == pytest.approx(share, rel=0.02)
    assert plan["lost_work_seconds"] == pytest.approx(work, rel=0.05)
    for row in plan["intervals"]:  # no other interval is better
        assert row["lost_share"] >= plan["lost_share"] * 0.9999, row


def test_a_plan_by_hand() -> None:
    # Failures are rare: by Young, sqrt(2 x 10 s x 2,000,000 s) = 6325 s; half of it is lost at a failure.
    given = SavePlan(
        10, nbytes=1e12, nodes=10, node_mtbf_hours=2e7 / 3600, keep=2, step_seconds=2, tier=Tier(1e9, keep=5)
    )
    plan = plan_saves(given, cycle_now=1010)
    assert plan["mtbf_seconds"] == pytest.approx(2e6)
    rows = {row["name"]: row for row in plan["intervals"]}
    assert list(rows) == ["now", "half", "best", "young", "double"]
    assert rows["young"]["interval_seconds"] == pytest.approx(6324.555)
    assert plan["interval_seconds"] == pytest.approx(6324.555, rel=0.002)
    assert plan["interval_steps"] == round(plan["interval_seconds"] / 2)
    assert plan["lost_work_seconds"] == pytest.approx(6324.555 / 2, rel=0.002)
    assert rows["now"]["interval_seconds"] == 1000
    assert rows["now"]["saving_share"] == pytest.approx(10 / 1010)
    # Saving 10 of 6335 s, and the rate of failures times what each costs.
    assert plan["lost_share"] == pytest.approx(10 / 6335 + (3162 + 300) / 2e6, rel=0.01)
    assert plan["capacity_bytes"] == 4e12  # two, one that is saved, one that is copied
    tier = plan["tier"]
    assert tier["copy_seconds"] == 2000
    assert (tier["every"], tier["every_steps"]) == (1, plan["interval_steps"])
    assert tier["capacity_bytes"] == 6e12
    assert tier["lost_work_seconds"] == pytest.approx(plan["lost_work_seconds"] + 2000)
    slow = plan_saves(replace(given, tier=Tier(1e8)))["tier"]
    assert (slow["copy_seconds"], slow["every"]) == (20_000, 4)  # a copy takes 3.2 intervals
    assert slow["every_seconds"] == pytest.approx(4 * 6335, rel=0.002)


def test_saves_in_the_background_do_not_overlap() -> None:
    plan = plan_saves(SavePlan(1000, stall_seconds=0.001, nodes=1000))
    assert plan["interval_seconds"] == pytest.approx(999.999)
    assert "half" not in [row["name"] for row in plan["intervals"]]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "one of --save-seconds, --bandwidth, --results is required"),
        (["--save-seconds", "0"], "--save-seconds: must be above 0, not 0.0"),
        (["--save-seconds", "5", "--nodes", "0"], "--nodes: must be at least 1, not 0"),
        (
            ["--save-seconds", "5", "--stall-seconds", "6"],
            "--stall-seconds: must be at most the time of a save",
        ),
        (["--save-seconds", "5", "--keep", "0"], "--keep: must be at least 1"),
        (["--save-seconds", "5", "--mtbf-hours", "inf"], "--mtbf-hours: must be above 0"),
        (["--bandwidth", "1GB"], "--bandwidth needs a size: pass --bytes or DIR"),
        (["--bandwidth", "1GB", "--save-seconds", "3"], "--bandwidth and --save-seconds cannot be combined"),
        (["--save-seconds", "5", "--tier-bandwidth", "1GB"], "--bytes: needed for a tier"),
        (["--save-seconds", "5", "--tier-keep", "2"], "--tier-keep has no effect without --tier-bandwidth"),
        (["--results", "no.json"], "--results: cannot read no.json"),
        (["no-such-run", "--save-seconds", "5"], "no-such-run"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert cli.main(["plan", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def planned(capsys: pytest.CaptureFixture[str], *arguments: "str | Path") -> dict[str, Any]:
    """Return what `trunkline checkpoint plan --json` prints."""
    assert cli.main(["plan", *map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (document["command"], document["schema"]) == ("checkpoint plan", 1)
    return document


def test_a_directory_gives_the_size_and_the_pace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tl.Checkpointer(tmp_path / "run", keep=None) as checkpoints:
        for step in (10, 20, 30, 45):
            checkpoints.save(step, {"data": numpy.zeros(1000)}, block=True)
    found = found_in(str(tmp_path / "run"))
    assert (found.step, found.cycle_seconds) == (45, None)  # all within one or two seconds
    plan = planned(capsys, tmp_path / "run", "--save-seconds", "5")
    assert plan["bytes"] == found.nbytes >= 8000
    assert plan["sources"]["bytes"] == f"step 45 of {tmp_path / 'run'}"

    # The same with commits at other times; of step 30 the commit is missing.
    store = plan_sources.CheckpointStore
    times = {10: "00:00:00", 20: "00:01:40", 30: "00:20:00", 45: "00:05:10"}

    class Paused(store):  # type: ignore[misc, valid-type]
        def read_manifest(self, step: int) -> dict[str, Any]:
            manifest: dict[str, Any] = super().read_manifest(step)
            return manifest | {"time": f"2026-01-01T{times[step]}Z"}

    checkpoints.delete(30)
    monkeypatch.setattr(plan_sources, "CheckpointStore", Paused)
    found = found_in(str(tmp_path / "run"))
    assert (found.cycle_seconds, found.step_seconds) == (100, 10)
    plan = planned(capsys, tmp_path / "run", "--save-seconds", "5")
    [now] = [row for row in plan["intervals"] if row["name"] == "now"]
    assert (now["interval_seconds"], now["interval_steps"]) == (95, 10)
    assert plan["sources"]["step_seconds"] == f"median in {tmp_path / 'run'}"


def test_a_directory_without_checkpoints_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run")
    checkpoints.save(1, {}, block=True)
    checkpoints.delete(1)
    assert cli.main(["plan", str(tmp_path / "run"), "--save-seconds", "5"]) == 2
    assert "has no checkpoint yet; pass --bytes instead" in capsys.readouterr().err


def test_measured_saves_are_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = {"mean_seconds": 4.0, "bytes": 10**9, "count": 5}
    alone, training = tmp_path / "alone.json", tmp_path / "training.json"
    alone.write_text(json.dumps({"command": "workload run", "save": save}))
    training.write_text(json.dumps({"command": "workload run", "checkpoints": {"save": save}}))
    assert measured_in(str(alone)) == measured_in(str(training)) == (4.0, 10**9, 5)
    plan = planned(capsys, "--results", alone)
    assert (plan["save_seconds"], plan["bytes"]) == (4.0, 1e9)
    plan = planned(capsys, "--results", alone, "--bytes", "10GB")
    assert plan["save_seconds"] == 40.0
    assert plan["sources"]["save_seconds"].endswith("mean of 5 saves, of 1 GB, in proportion")
    for text in ("{", "[]", '{"save": null}', '{"save": {"mean_seconds": "4", "bytes": 1, "count": 1}}'):
        alone.write_text(text)
        with pytest.raises(ValueError, match=re.escape(str(alone))):
            measured_in(str(alone))


def examples() -> list[tuple[str, str]]:
    """Return the commands of the documentation, and what they print there."""
    text = (ROOT / "docs/checkpoints-cluster.md").read_text(encoding="utf-8")
    found = re.findall(r"(?m)^    ```text\n    \$ trunkline (checkpoint plan .*)\n((?:.*\n)*?)    ```$", text)
    return [(command, textwrap.dedent(printed)) for command, printed in found]


@pytest.mark.parametrize(("command", "printed"), examples())
def test_the_examples_of_the_documentation(command: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trunkline", *shlex.split(command)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_there_are_examples() -> None:
    assert len(examples()) == 2
