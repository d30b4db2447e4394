"""All of a sharded state in the memory of one rank, for exporting it."""

import io
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from trunkline._tensor_io.memory import empty_bytes
from trunkline.dcp.stored_state import nested, paths_below, unpickled


def empty_state(metadata: Metadata, key: str | None, where: str) -> dict[str, Any]:
    """Return memory for each tensor below a key, and None for objects, by the names that torch gives them.

    Raises ValueError for a key that the state does not have.
    """
    state: dict[str, Any] = {}
    for name in paths_below(metadata, key, where):
        entry = metadata.state_dict_metadata[name]
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            state[name] = empty_bytes(entry.size.numel() * dtype.itemsize).view(dtype).reshape(entry.size)
        else:
            state[name] = None
    return state


class WholePlanner(DefaultLoadPlanner):
    """Loads a state by the names that torch gives its parts; objects only as weights_only allows."""

    def __init__(self, where: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._where = where

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object. Raises Unsupported for one of another type."""
        name = read_item.dest_index.fqn
        self.state_dict[name] = unpickled(value.getvalue(), name, self._where)


def nested_state(metadata: Metadata, state: dict[str, Any], where: str) -> Any:
    """Return what empty_state() made, filled, nested as it was saved."""
    paths = paths_below(metadata, None, where)
    return nested({name: (path, state[name]) for name, path in paths.items() if name in state})
