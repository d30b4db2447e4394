"""The part of a checkpoint that is loaded."""

import json
from typing import Any, Literal, NamedTuple, TypeAlias

from trunkline._core import CheckpointManifest
from trunkline._formats.selection import Selection
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.directory.sharded import check_is_whole
from trunkline.checkpoint.state.parts import part_for, selected_part, tensor_names

Verify: TypeAlias = bool | Literal["first"]


class Wanted(NamedTuple):
    """How a state is loaded."""

    device: torch.device
    verify: Verify
    selection: Selection | None


class Part(NamedTuple):
    """The part of a state to load: its skeleton, and the tensors that it needs (None: all).

    whole: the skeleton of the whole state; None if that is to be loaded.
    """

    skeleton: Any
    names: set[str] | None
    whole: Any

    @classmethod
    def of(cls, manifest: CheckpointManifest, into: Any, selection: Selection | None, where: str) -> "Part":
        """Return what is selected and, of that, what `into` has. Raises ValueError for unknown keys."""
        whole = json.loads(manifest.state)
        check_is_whole(whole, where)
        skeleton = whole if selection is None else selected_part(whole, selection, where)
        if into is not None:
            skeleton = part_for(skeleton, into)
        if skeleton == whole:
            return cls(whole, None, None)
        return cls(skeleton, tensor_names(skeleton), whole)
