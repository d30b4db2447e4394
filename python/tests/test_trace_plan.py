"""What plan() and the command line say about a trace of routing."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from support_experts import small_config
from support_models import make_folder, save_model
from test_routing_trace import recorded
from test_streaming import least

import trunkline as tl
from trunkline import cli
from trunkline._streaming.cache_sizes import CacheSizes
from trunkline._streaming.roofline import ExpertSizes, Sizes, expert_bytes_read
from trunkline._streaming.routing_trace import RoutingTrace, Step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

NUMBERS = {"bandwidth": 1e9, "flops": 1e12}


@pytest.mark.parametrize("more", [0, 60_000, 150_000])
def test_a_replay_predicts_the_hits_of_the_run(more: int, tmp_path: Path) -> None:
    folder = save_model(small_config("qwen3_moe", experts=32, num_hidden_layers=3), tmp_path / "model")
    stats, _ = recorded(folder, tmp_path / "trace", more)
    experts = stats["experts"]
    budget = least(folder) + more
    planned = tl.stream.plan(folder, memory_budget=budget, routing_trace=tmp_path / "trace", **NUMBERS)
    assert planned["experts"]["hit_rate"] == pytest.approx(experts["hit_rate"], abs=0.03)
    passes = stats["passes"]
    assert planned["experts"]["read_bytes"] == pytest.approx(experts["bytes_read"] / passes, rel=0.15)
    assert planned["storage_seconds"] == pytest.approx(
        (planned["streamed_bytes"] + planned["experts"]["read_bytes"]) / 1e9, rel=1e-3
    )
    assert [row["batch_size"] for row in planned["batch_sizes"]] == [1]
    sizes = planned["trace"]["sizes"]
    cached = [row["cached_bytes"] for row in sizes]
    assert cached == sorted(set(cached))
    assert sizes[-1]["cached"] == pytest.approx(1)
    assert sizes[-1]["hit_rate"] == pytest.approx(1 - planned["trace"]["first_uses"])
    assert sizes[-1]["lru"] == sizes[-1]["lfu"] == sizes[-1]["hit_rate"]
    assert sizes[-1]["static"] == 1
    for row in sizes[:: max(1, len(sizes) // 3)]:
        again = tl.stream.plan(
            folder, memory_budget=row["memory_budget"], routing_trace=tmp_path / "trace", **NUMBERS
        )
        if "experts" in again:  # not if all of the model fits
            assert again["experts"]["hit_rate"] == pytest.approx(row["hit_rate"], abs=0.03)


def test_a_trace_of_another_model_or_batch_is_rejected(tmp_path: Path) -> None:
    folder = save_model(small_config("qwen3_moe", experts=16), tmp_path / "model")
    path = tmp_path / "trace"
    recorded(folder, path)
    other = save_model(small_config("qwen3_moe", experts=8), tmp_path / "other")

    def plan(folder: Path, **options: Any) -> None:
        tl.stream.plan(folder, memory_budget="1GB", routing_trace=path, **{**NUMBERS, **options})

    with pytest.raises(
        ValueError, match=r"routing_trace: .*2 layers of 16 experts, not .*2 layers of 8 experts"
    ):
        plan(other)
    with pytest.raises(ValueError, match="routing_trace: .*has no steps of 4 tokens; it has 1, 3"):
        plan(folder, batch_size=4)
    with pytest.raises(ValueError, match="routing_trace: .* has no experts"):
        plan(make_folder(tmp_path / "dense"))
    with pytest.raises(ValueError, match="routing_trace: only for a model on the CPU"):
        plan(folder, device="cuda", bus_bandwidth=1e9)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(tl.CutOff, match=r"line \d+ is cut off; remove that line"):
        plan(folder)


def test_the_command_line_shows_and_draws_the_hit_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(small_config("qwen3_moe", experts=16), tmp_path / "model")
    trace = tmp_path / "trace"
    recorded(folder, trace)

    def run(*arguments: object, expect: int = 0) -> Any:
        numbers = ("--bandwidth", "1GB", "--flops", "1e12", "--memory-budget", least(folder))
        assert cli.main(list(map(str, ("plan", folder, *numbers, *arguments)))) == expect
        return capsys.readouterr()

    shown = run("--trace", trace).out
    assert f"trace {trace}: 80 steps of {folder}" in shown
    heads = next(line for line in shown.splitlines() if "memory for experts" in line and "tokens/s" in line)
    assert [heads.find(each) for each in ("LRU", "LFU", "static")] == sorted(
        heads.find(each) for each in ("LRU", "LFU", "static")
    )
    document = json.loads(run("--trace", trace, "--json").out)
    assert shown.count("%") >= 4 * len(document["trace"]["sizes"])
    for name, begins in (("page.html", "<!DOCTYPE html>"), ("chart.svg", "<svg ")):
        assert f"plot: {tmp_path / name}" in run("--trace", trace, "--plot", tmp_path / name).err
        drawn = (tmp_path / name).read_text()
        assert drawn.startswith(begins)
        assert drawn.count("<polyline") == (5 if name == "page.html" else 4)
        assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
    assert "--plot requires --trace" in run("--plot", tmp_path / "page.html", expect=2).err
    assert "must end with .svg" in run("--trace", trace, "--plot", tmp_path / "x.pdf", expect=2).err
    assert "--trace: " in run("--trace", trace, "--batch", 7, expect=2).err
    trace.write_bytes(trace.read_bytes().replace(b"[0,", b"[1,", 1))
    assert "trace: line 2 is damaged" in run("--trace", trace, expect=1).err


def routed_by(skew: float, tokens: int, rows: int) -> RoutingTrace:
    """Return a trace of a router that chooses by Zipf's law."""
    rng = numpy.random.default_rng(3)
    ranks = [rng.permutation(EXPERTS) for _ in range(LAYERS)]
    steps = []
    for _ in range(tokens):
        for layer in range(LAYERS):
            # Gumbel's trick: the largest are a draw without replacement.
            keys = rng.gumbel(size=(rows, EXPERTS)) - skew * numpy.log(ranks[layer] + 1.0)
            chosen = numpy.argsort(-keys, axis=1)[:, :PER_TOKEN]
            counts = numpy.bincount(chosen.reshape(-1), minlength=EXPERTS)
            uses = tuple((expert, int(counts[expert])) for expert in numpy.flatnonzero(counts).tolist())
            steps.append(Step(layer, rows, uses))
    return RoutingTrace("made up", "none", tuple((str(n), EXPERTS) for n in range(LAYERS)), tuple(steps))


LAYERS, EXPERTS, PER_TOKEN = 4, 64, 4


@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize("rows", [1, 4])
def test_an_assumed_skew_predicts_what_the_schedule_reads(skew: float, rows: int) -> None:
    experts = (ExpertSizes(EXPERTS, PER_TOKEN, (65536, 32768)),) * LAYERS
    replays = CacheSizes(routed_by(skew, 2000, rows), experts, rows)
    sizes = Sizes(0, (), experts=experts)
    for share in (0.25, 0.5):
        cached = int(share * LAYERS * EXPERTS * experts[0].expert_bytes)
        read, used = expert_bytes_read(sizes, cached, rows, skew)
        replayed = replays.at(cached)
        assert used == pytest.approx(replayed.used_bytes, rel=0.02)
        assert 1 - read / used == pytest.approx(replayed.hit_rate, rel=0.2)
        assert read == pytest.approx(replayed.read_bytes, rel=0.15)
