"""Mutations of valid files never make the parsers in Python raise anything but typed errors."""

import random

import pytest
from fuzz_targets import TARGETS, mutated, seeds

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
_EXECUTIONS = 10_000


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_are_refused_or_read(name: str) -> None:
    corpus = seeds(name)
    assert all(map(TARGETS[name], corpus))
    was_read = 0
    for number in range(_EXECUTIONS):
        rng = random.Random(f"{name} {number}")
        data = mutated(rng.choice(corpus), rng)
        try:
            was_read += TARGETS[name](data)
        except Exception as error:
            pytest.fail(f"mutation {number}: {type(error).__name__}: {error}\n{data!r}")
    assert 0 < was_read < _EXECUTIONS
