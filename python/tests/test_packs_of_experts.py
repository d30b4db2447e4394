"""Packs of mixtures whose files have a tensor for each expert: made in memory for a few experts."""

from pathlib import Path
from typing import Any

import pytest
from support_experts import FAMILIES, small_config
from support_models import save_model, stored_model_of
from test_kept_quantised_experts import _FP8_FAMILIES, _folder

import trunkline as tl
from trunkline.transformers import _expert_records, _packing
from trunkline.transformers._expert_slices import ExpertSlices

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# Families whose files have one tensor of all experts, as the model has.
_STORED_AS_USED = {
    *("aria_text", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    *("hy_v4", "inkling_text", "minimax_m3_vl_text", "zaya"),
}


def packed(folder: Path, directory: Path, **options: Any) -> bytes:
    directory.mkdir()
    assert tl.transformers.pack(folder, [directory], **options)["made"]
    [weights] = directory.glob("*.safetensors")
    return weights.read_bytes()


def check(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """Compare packs that are made expert by expert, in all ways, with one that is made at once."""
    found = []
    make, at_a_time = ExpertSlices.of, _packing.experts_at_a_time

    def counted(*arguments: Any) -> Any:
        found.append(make(*arguments))
        return found[-1]

    monkeypatch.setattr(ExpertSlices, "of", lambda *_: None)
    monkeypatch.setattr(_packing, "experts_at_a_time", lambda count, _: [range(count)])
    expected = packed(folder, tmp_path / "at-once", **options)
    monkeypatch.setattr(ExpertSlices, "of", counted)
    monkeypatch.setattr(_packing, "experts_at_a_time", at_a_time)
    for number, nbytes in enumerate((1, 20_000)):
        monkeypatch.setattr(_expert_records, "_CHUNK_BYTES", nbytes)
        assert packed(folder, tmp_path / f"pack-{number}", **options) == expected
    return sum(each is not None for each in found)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packs_are_the_same_expert_by_expert(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(small_config(kind), tmp_path)
    sliced = check(folder, tmp_path, monkeypatch)
    assert (sliced > 0) == (kind not in _STORED_AS_USED)


@pytest.mark.parametrize("kind", [*_FP8_FAMILIES, "gpt_oss"])
def test_quantised_experts_are_dequantised_a_few_at_a_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(_folder(kind, tmp_path), tmp_path, monkeypatch) > 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "granitemoe", "gpt_oss"])
def test_no_more_than_a_few_experts_are_in_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_expert_records, "_CHUNK_BYTES", 1)
    model = stored_model_of(save_model(small_config(kind), tmp_path))
    assert model.routed is not None
    paths = {weight.path for each in model.routed.experts for weight in each.weights}
    found: dict[str, list[int]] = {}
    for each in _packing._contents(model, _packing._source(model)):
        if each.name in paths:
            assert len(each.tensor) == 1
            assert each.first is not None
            found.setdefault(each.name, []).append(each.first)
    assert found == {path: list(range(8)) for path in paths}
