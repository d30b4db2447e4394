"""Exports a step whose bytes are on the disks of several nodes (Checkpointer with local=True)."""

from pathlib import Path
from typing import Any, Protocol

from trunkline._errors import Corrupt, Format, reword
from trunkline._export.exported import Exported
from trunkline._export.lazy_state import LazyState, at_key
from trunkline._export.placeholders import Placeholders
from trunkline._formats.node_names import is_node_directory
from trunkline._progress import progress_to
from trunkline.checkpoint.directory.local_checkpointer import LocalCheckpointer
from trunkline.checkpoint.directory.local_load import no_progress
from trunkline.checkpoint.directory.sharded import says_sharded
from trunkline.checkpoint.directory.shards import WHAT_TO_LOAD
from trunkline.checkpoint.state.tree import flatten


class Target(Protocol):
    """What is written."""

    @property
    def path(self) -> str:
        """Its path."""

    @property
    def show_progress(self) -> bool:
        """Whether to show on the terminal how far it is."""

    def check(self) -> None:
        """Raise an error if it cannot be written."""

    def write(self, state: LazyState) -> Exported:
        """Write a state."""


def export_from_nodes(directory: str, step: int | None, key: str | None, target: Target) -> Exported:
    """Write a step (None: the latest), or the part of it below `key`, on rank 0. Collective."""

    def check() -> None:
        if any(is_node_directory(str(each)) for each in Path(target.path).resolve().parents):
            raise ValueError(f"out: {target.path} is in the directory of a node; name a path outside of it")
        target.check()

    def write(number: int, value: Any) -> dict[str, Any]:
        source = f"step {number} of {directory} of all nodes"
        state = LazyState(at_key(value, key, source), Placeholders([]), [], [], source, number)
        done = target.write(state)
        done.tensors = done.tensors or len(flatten(state.value)[1])  # .pt: none is in a file yet
        return done.document()

    with progress_to(f"reading {directory} of all nodes") as show:
        on_progress = show if target.show_progress else no_progress
        try:
            try:
                done = LocalCheckpointer(directory, keep=None).export(step, check, write, on_progress)
            except Format as error:
                if not says_sharded(error):
                    raise
                from trunkline.dcp import local_checkpointer as sharded

                done = sharded.export(directory, step, key, check, write, on_progress)
        except Corrupt as error:
            reword(error, str(error).removesuffix(WHAT_TO_LOAD) + "; export another step")
            raise
    return Exported(**done)
