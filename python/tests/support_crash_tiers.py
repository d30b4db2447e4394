"""A process that saves, and copies steps to a tier, until it is killed."""

import random
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from support_tiers import state_of

import trunkline as tl

EVERY = 2
KEEP = 2  # in both directories
ELEMENTS = 400_000


def open_run(root: Path) -> tl.Checkpointer:
    """Open the directory with its tier."""
    tier = tl.Tier(root / "tier", every=EVERY, keep=KEEP, bytes_per_second="60MB")
    return tl.Checkpointer(root / "run", keep=KEEP, tiers=[tier], process_group=False)


def run_saver(connection: Connection, root: Path, seed: int) -> None:
    """Save until killed; report ("saved", step), and ("copied", step) for the last one in the tier."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    try:
        checkpoints = open_run(root)
        step = 0
        if checkpoints.latest() is not None:
            step = checkpoints.load()["step"]
        connection.send(("ready", step))
        while True:
            step += 1
            connection.send(("begins", step))
            checkpoints.save(step, state_of(step, ELEMENTS), block=True)
            connection.send(("saved", step))
            if rng.random() < 0.3:
                checkpoints.wait_drained()
                connection.send(("copied", step // EVERY * EVERY))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
