"""How often experts are used is kept beside the pack, and never changes what a model computes."""

import gc
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import make_folder, pack_directory, stock
from test_routed_experts import routed, several_passes
from test_streaming import least, logits

from trunkline._errors import Format
from trunkline._streaming import expert_use
from trunkline._streaming.streaming import streaming_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def saved(folder: Path) -> Path:
    return pack_directory(folder) / expert_use.NAME


def used(folder: Path) -> list[float]:
    """Run a model until its statistics are saved; return them."""
    model = routed(folder)
    several_passes(model)
    rates: list[float] = rates_of(model)
    del model
    gc.collect()
    return rates


def rates_of(model: Any) -> list[float]:
    cache = streaming_of[model].experts
    assert cache is not None
    return cache.use_rates()


def test_the_next_start_knows_what_was_used(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    rates = used(folder)
    assert max(rates) > 0
    model = routed(folder)
    assert rates_of(model) == pytest.approx(rates, abs=1e-6)
    assert torch.equal(logits(model), logits(stock(folder)))
    weights = pack_directory(folder) / "weights.safetensors"
    assert stat.S_IMODE(saved(folder).stat().st_mode) == stat.S_IMODE(weights.stat().st_mode)


def test_a_process_that_exits_saves(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    assert max(rates_of(routed(folder))) == 0
    script = (
        "import sys, trunkline as tl, torch\n"
        "model = tl.transformers.from_pretrained(sys.argv[1], memory_budget=int(sys.argv[2]))\n"
        "model(input_ids=torch.tensor([[1, 2, 3]]))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder), str(least(folder))], check=True)
    assert max(rates_of(routed(folder))) > 0


def test_a_model_that_was_not_used_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    model = routed(folder)
    del model
    gc.collect()
    assert not saved(folder).exists()


def damaged(text: bytes) -> list[bytes]:
    other = json.loads(text)
    name = next(iter(other["modules"]))
    changes = ({"version": 2}, {"modules": {}}, {"modules": {name: [1e400]}}, {"crc32c": 1})
    versions = [json.dumps(other | change).encode() for change in changes]
    return [b"", text[:-20], text.replace(b"0.", b"0.1", 1), *versions]


def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    used(folder)
    text = saved(folder).read_bytes()
    expected = logits(stock(folder))
    for each in damaged(text):
        assert each != text
        saved(folder).write_bytes(each)
        with pytest.raises(Format, match=r"pack\.use\.json.*not valid statistics"):
            expert_use.parse(each, saved(folder))
        model = routed(folder)
        assert max(rates_of(model)) == 0
        assert torch.equal(logits(model), expected)
        del model
        gc.collect()
        expert_use.parse(saved(folder).read_bytes(), saved(folder))


def test_statistics_of_another_model_are_not_used(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    used(folder)
    weights = pack_directory(folder) / "weights.safetensors"
    expert_use.write(pack_directory(folder), weights, {"model.layers.0.mlp.experts": [1.0]})
    assert max(rates_of(routed(folder))) == 0


def test_a_file_of_somebody_else_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    routed(folder)
    saved(folder).write_bytes(b"mine")
    used(folder)
    assert saved(folder).read_bytes() == b"mine"
    expert_use.remove(pack_directory(folder))
    assert saved(folder).read_bytes() == b"mine"


def test_where_the_file_cannot_be_written_the_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, "qwen3-moe")
    used(folder)
    before = saved(folder).read_bytes()

    def denied(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("trunkline._core.ReplacementFile", denied)
    used(folder)
    assert saved(folder).read_bytes() == before


def test_removing_a_pack_removes_its_statistics(tmp_path: Path) -> None:
    from trunkline._streaming.pack_cache import remove_pack

    folder = make_folder(tmp_path, "qwen3-moe")
    used(folder)
    directory = pack_directory(folder)
    assert saved(folder).exists()
    remove_pack(str(directory))
    assert not directory.exists()
