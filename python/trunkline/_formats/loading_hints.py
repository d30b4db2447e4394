"""What a file or folder is that trunkline.load cannot read alone, and what loads it."""

import os

from trunkline._formats.checkpoint_names import DESCRIPTOR, is_manifest, step_of
from trunkline._formats.dcp_names import MANIFEST, is_data_file_name, is_rank_manifest_name


def step_reader(path: str) -> str:
    """Return the call that loads the step in a folder."""
    directory, name = os.path.split(path.rstrip("/"))
    step = step_of(name)
    number = "STEP" if step is None else step
    return f"trunkline.Checkpointer({directory or '.'!r}).load({number})"


def part_of_checkpoint(path: str) -> str | None:
    """Return what a file is, by its name, and how to load it, if it is a part of a checkpoint; else None."""
    folder, name = os.path.split(path)
    if is_manifest(name):
        return f"is the manifest of a step of a Checkpointer; use {step_reader(folder or '.')}"
    if name == DESCRIPTOR:
        return f"describes a directory of checkpoints; use trunkline.Checkpointer({folder or '.'!r}).load()"
    if name == MANIFEST or is_rank_manifest_name(name) or is_data_file_name(name):
        return (
            "is one file of a checkpoint of trunkline.dcp; load the whole with dcp.load and "
            f"trunkline.dcp.StorageReader({folder or '.'!r})"
        )
    return None
