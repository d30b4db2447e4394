"""An open step of a Checkpointer, whose tensors are read one by one."""

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy

from trunkline import _core
from trunkline._core import CheckpointManifest, Engine
from trunkline._errors import Corrupt
from trunkline._formats.tensor_reader import Description
from trunkline._tensor_io.tensors import dtype_named, stored_as
from trunkline._tensor_io.transfer import read_layouts
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.directory import shards
from trunkline.checkpoint.state.parts import leaves
from trunkline.checkpoint.state.restore import restore

if TYPE_CHECKING:
    from trunkline._formats.slices import Runs


class StepSource:
    """The tensors of a step, under names such as "model.0.weight"."""

    def __init__(
        self,
        path: str,
        manifest: CheckpointManifest,
        *,
        device: torch.device,
        engine: Engine | None,
        verify: bool,
    ) -> None:
        """Open all shards. Raises FileNotFoundError for a missing one."""
        self.path = path
        self.metadata = {
            "step": str(manifest.step),
            "commit": str(manifest.commit),
            "time": manifest.time,
            "world_size": str(manifest.world_size),
            **{f"metric.{name}": repr(value) for name, value in manifest.metrics.items()},
        }
        self._manifest = manifest
        self._device = device
        self._engine = engine
        self._verify = verify
        self._whole = json.loads(manifest.state)
        named = [
            (name, node)
            for name, node in leaves(self._whole)  # arrays of numpy are tensors here, too
            if isinstance(node, dict) and ("tensor" in node or "ndarray" in node)
        ]
        self._names = [name for name, _ in named]
        self._nodes: dict[str, dict[str, Any]] = dict(named)
        self._stored = {
            name: (index, dtype, nbytes) for index, (name, dtype, _, nbytes) in enumerate(manifest.tensors())
        }
        with ExitStack() as stack:
            self._files = [
                stack.enter_context(_core.open(shard, engine=engine, direct="unless_cached"))
                for shard in manifest.shard_paths()
            ]
            self._stack = stack.pop_all()

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._names)

    def describe(self, name: str) -> Description:
        """Return the description of a tensor."""
        node = self._nodes[name]
        shape = tuple(node["shape"])
        if "ndarray" in node:
            read = self.read(name)
            return Description(read.dtype, tuple(read.shape), is_plain=False)
        dtype = dtype_named(node["dtype"])
        return Description(dtype, shape, "stride" not in node and stored_as(dtype, shape) == (dtype, shape))

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        node = self._nodes[name]
        stored = str(node["tensor"] if "tensor" in node else node["ndarray"])
        tensors = shards.empty_tensors(self._manifest, self.path, self._device, {stored})
        read = shards.targets(
            self._manifest, self.path, tensors, verify=self._verify, fresh=True, is_part=True
        )
        for layout, shard in zip(read.layouts, read.shards, strict=True):
            layout.read_from(self._files[shard], keep_open=True)
        try:
            read_layouts(read.layouts, engine=self._engine, verify=self._verify)
        except Corrupt as error:
            index, checksum = getattr(error, "layout", None), getattr(error, "checksum", None)
            if index is None or checksum is None:
                raise
            raise shards.corrupt_chunk(self._manifest, read, index, checksum) from error
        value = restore(node, tensors, self._whole)
        tensor = torch.from_numpy(value) if isinstance(value, numpy.ndarray) else value
        shares = "storage" in node  # memory that is not all its own
        return tensor.clone() if shares else tensor

    def read_runs(self, name: str, runs: "Runs", target: torch.Tensor) -> None:
        """Read ranges of the bytes of a plain tensor."""
        index, _, _ = self._stored[self._nodes[name]["tensor"]]
        pieces = self._manifest.pieces(index)
        at = 0
        ends = runs.offsets + runs.nbytes
        positions = numpy.arange(len(runs.offsets), dtype=numpy.int64) * runs.nbytes
        for shard, offset, nbytes in pieces:
            begins = numpy.clip(runs.offsets, at, at + nbytes)
            lengths = numpy.clip(ends, at, at + nbytes) - begins
            some = lengths > 0
            if some.any():
                where = (begins - runs.offsets + positions)[some]
                self._files[shard].read_ranges(target, (begins - at + offset)[some], lengths[some], where)
            at += nbytes

    def close(self) -> None:
        """Close the shards."""
        self._stack.close()
