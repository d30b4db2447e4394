"""The least memory_budget that an error names is enough whatever pack there is by then; nothing less is."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import prompt, save_model, stock, transformers

import trunkline as tl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

_UNIT_BYTES = (None, 1, 3_000, 20_000, 100_000)


def named(call: Any) -> int:
    """Return the number that the error of `call` names."""
    with pytest.raises(tl.OutOfBudget) as caught:
        call(1)
    found = re.search(r"the least is (\d+) bytes", str(caught.value))
    assert found
    return int(found[1])


def random_model(folder: Path, seed: int) -> Path:
    """Save a model whose weights are not multiples of a page."""
    rng = random.Random(seed)
    heads = rng.choice([1, 2, 4])
    config: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": heads * rng.choice([4, 10, 26]),
        "intermediate_size": rng.choice([33, 96, 201]),
        "num_hidden_layers": rng.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    if rng.random() < 0.3:
        made: Any = transformers.MixtralConfig(**config, num_local_experts=3)
    else:
        made = transformers.LlamaConfig(**config, tie_word_embeddings=rng.random() < 0.5)
    return save_model(made, folder, rng.choice([torch.bfloat16, torch.float32]), seed)


@pytest.mark.parametrize("seed", range(8))
def test_the_named_least_holds_for_every_pack(seed: int, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", seed)
    rng = random.Random(seed)
    for number in range(3):
        unit_bytes, other = rng.choice(_UNIT_BYTES), rng.choice(_UNIT_BYTES)
        places: dict[str, Any] = {"pack_dir": tmp_path / f"pack{number}"}
        if number == 2:
            places = {"volumes": [tmp_path / "v0", tmp_path / "v1"]}

        def load(budget: int, places: Any = places, unit_bytes: Any = unit_bytes) -> Any:
            return tl.transformers.from_pretrained(
                folder, memory_budget=budget, unit_bytes=unit_bytes, **places
            )

        least = named(load)
        tl.transformers.from_pretrained(folder, unit_bytes=other, **places)  # makes the pack, for other units
        assert named(load) == least
        with pytest.raises(tl.OutOfBudget):
            load(least - 1)
        model = load(least)
        assert tl.stream.stats(model)["memory_bytes"] <= least
    if "Mixtral" not in type(model).__name__:  # whose kernel wants sizes that are multiples of 16 bytes
        with torch.no_grad():
            assert torch.equal(model(**prompt()).logits, stock(folder)(**prompt()).logits)


@pytest.mark.parametrize("seed", range(4))
def test_the_least_that_a_plan_names_is_that_of_the_model(seed: int, tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model", seed)

    def plan(budget: int) -> dict[str, Any]:
        return tl.stream.plan(folder, memory_budget=budget, bandwidth=1e9, flops=1e12)

    least = named(plan)
    assert plan(least)["least_budget"] == least
    with pytest.raises(tl.OutOfBudget):
        plan(least - 1)
    assert named(lambda budget: tl.transformers.from_pretrained(folder, memory_budget=budget)) == least
    tl.transformers.from_pretrained(folder, pack_dir=tmp_path / "pack", unit_bytes=1)
    tl.transformers.from_pretrained(folder, pack_dir=tmp_path / "pack", memory_budget=least)
