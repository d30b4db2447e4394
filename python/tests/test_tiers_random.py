"""Random operations on a directory with a tier, compared after each with a model in a few lines."""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support_tiers import nothing_copied_to, state_of, steps_in

import trunkline as tl

SEEDS = int(os.environ.get("TRUNKLINE_TEST_TIER_SEEDS", "6"))
OPERATIONS = 25
ELEMENTS = 10


@dataclass
class Model:
    """Steps in the order of their commits. Copies are made in copy() alone."""

    keep: int
    every: int
    tier_keep: int
    local: list[int] = field(default_factory=list)
    tier: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def save(self, step: int) -> None:
        self.waiting = self.waiting[-self.tier_keep :]  # the first save of a process finds out
        self.local.append(step)
        if step % self.every == 0:
            self.waiting.append(step)
        last = self.local[-self.keep :]
        self.local = [each for each in self.local if each in last or each in self.waiting]

    def copy(self) -> None:
        self.tier = [*self.tier, *self.waiting][-self.tier_keep :]
        self.waiting = []

    def lose_directory(self) -> None:
        self.local, self.waiting = [], []

    def lose_tier(self) -> None:
        """What is still in the directory is copied again."""
        self.tier = []
        self.waiting = [each for each in self.local if each % self.every == 0]

    def steps(self) -> list[int]:
        return sorted({*self.local, *self.tier})


class World:
    """The real thing."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.run, self.tier = root / "run", root / "tier"
        self.rng = rng
        self.model = Model(rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3))
        self.reopen()

    def reopen(self) -> None:
        tier = tl.Tier(self.tier, every=self.model.every, keep=self.model.tier_keep)
        self.checkpoints = tl.Checkpointer(self.run, keep=self.model.keep, tiers=[tier])
        if self.model.steps():
            assert self.checkpoints.load()["step"] == self.model.steps()[-1]

    def save(self) -> None:
        step = max(self.model.steps(), default=0) + self.rng.randint(1, 2)
        self.checkpoints.save(step, state_of(step, ELEMENTS), block=True)
        self.model.save(step)

    def copy(self) -> None:
        self.checkpoints.wait_drained()
        self.model.copy()

    def lose_directory(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self.model.lose_directory()
        self.reopen()

    def lose_tier(self) -> None:
        shutil.rmtree(self.tier, ignore_errors=True)
        self.tier.mkdir()
        self.model.lose_tier()
        self.reopen()

    def check(self) -> None:
        assert self.checkpoints.steps() == self.model.steps()
        assert self.checkpoints.latest() == max(self.model.steps(), default=None)
        assert steps_in(self.tier) == sorted(self.model.tier)
        if self.run.exists():
            assert steps_in(self.run) == sorted(self.model.local)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_operations(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    world = World(tmp_path, rng)
    done: list[str] = []
    for _ in range(OPERATIONS):
        do = rng.choices(("save", "copy", "reopen", "lose_directory", "lose_tier"), weights=(10, 4, 2, 1, 1))[
            0
        ]
        done.append(do)
        if do == "copy":
            world.copy()
        else:
            with nothing_copied_to(world.tier):
                getattr(world, do)()
                for drain in [place.drain for place in world.checkpoints._tiers._places]:
                    drain.stop()
                    drain.wait()
            world.reopen()
        try:
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, after {', '.join(done)}") from error
