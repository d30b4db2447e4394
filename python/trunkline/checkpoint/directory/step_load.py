"""Reads the state of one step."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from trunkline._core import CheckpointManifest, Engine, GcPause
from trunkline._errors import Corrupt
from trunkline._tensor_io.partly_filled import partly_filled
from trunkline._tensor_io.transfer import read_layouts
from trunkline.checkpoint.directory import shards
from trunkline.checkpoint.directory.part import Part, Wanted
from trunkline.checkpoint.state.tree import restore, restore_into


def load_state(
    manifest: CheckpointManifest,
    where: str,
    into: Any,
    wanted: Wanted,
    engine: Engine | None,
    verify_first: Callable[[], None],
) -> Any:
    """Return the state of a checkpoint, read into `into` if that is not None.

    where: the directory and the step, for messages. verify_first: verifies all of the checkpoint, and raises
    FileNotFoundError if it was replaced since its manifest was read.
    """
    verify = wanted.verify
    with GcPause():
        part = Part.of(manifest, into, wanted.selection, where)
        if into is None:
            state = None
            tensors = shards.empty_tensors(manifest, where, wanted.device, part.names)
        else:
            state, tensors, finish = restore_into(part.skeleton, into, part.whole)
    if into is not None and verify == "first":
        verify_first()
    with GcPause():
        read = shards.targets(
            manifest,
            where,
            tensors,
            verify=bool(verify),
            fresh=into is None,
            is_part=part.whole is not None,
        )
    filling = partly_filled("`into`", '; verify="first" finds damage before any of them changes')
    with nullcontext() if into is None else filling:
        try:
            read_layouts(read.layouts, engine=engine, verify=bool(verify))
        except Corrupt as error:
            index, checksum = getattr(error, "layout", None), getattr(error, "checksum", None)
            if index is None or checksum is None:
                raise
            raise shards.corrupt_chunk(manifest, read, index, checksum) from error
        if into is not None:
            finish()
    with GcPause():
        return restore(part.skeleton, tensors, part.whole) if into is None else state
