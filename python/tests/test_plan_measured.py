"""What plan() predicts from a trace of routing is what a paced disk then shows."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_experts import small_config
from support_models import save_model
from test_streaming import least

import trunkline as tl

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from paced_disks import PacedDisks, why_unavailable

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_MB_S = 1
_TOKENS = 20


@pytest.fixture
def disks() -> Iterator[PacedDisks]:
    """One disk without a limit, until it is set."""
    if why := why_unavailable():
        pytest.skip(f"no paced disk: {why}")
    with PacedDisks([48_000_000], limit_mb_s=0) as made:
        yield made


def decoded(model: Any) -> float:
    """Read a prompt, and decode tokens; return how many seconds the model took for each of these."""
    # Not those that the model would generate: with random weights, it soon repeats itself.
    ids = torch.randint(3, 97, (1, 3 + _TOKENS), generator=torch.Generator().manual_seed(1))
    cache, seconds = None, []
    with torch.no_grad():
        for new in (ids[:, :3], *ids[:, 3:].split(1, dim=1)):
            cache = model(input_ids=new, past_key_values=cache, use_cache=True).past_key_values
            seconds.append(tl.stream.stats(model)["seconds"])
    return (seconds[-1] - seconds[0]) / _TOKENS


def test_hit_rate_and_speed_are_predicted_within_15_percent(disks: PacedDisks, tmp_path: Path) -> None:
    config = small_config(
        "qwen3_moe",
        experts=32,
        num_hidden_layers=4,
        hidden_size=128,
        moe_intermediate_size=128,
        num_experts_per_tok=4,
    )
    folder = save_model(config, tmp_path / "model")
    trace = tmp_path / "trace"
    budget = least(folder) + 4_000_000
    decoded(tl.transformers.from_pretrained(folder, memory_budget="1GB", routing_trace=trace))
    planned = tl.stream.plan(
        folder, memory_budget=budget, routing_trace=trace, bandwidth=_MB_S * 1e6, flops=1e12
    )
    assert planned["bound"] == "storage"
    assert 0.2 < planned["experts"]["hit_rate"] < 0.8

    pack = disks.directories[0] / "pack"
    model = tl.transformers.from_pretrained(folder, memory_budget=budget, pack_dir=pack)
    disks.limit(_MB_S)
    disks.rest()
    seconds = decoded(model)
    disks.limit(0)
    hit_rate = tl.stream.stats(model)["experts"]["hit_rate"]
    del model  # its files are on the disk
    assert planned["experts"]["hit_rate"] == pytest.approx(hit_rate, rel=0.15)
    assert planned["tokens_per_second"] == pytest.approx(1 / seconds, rel=0.15)
