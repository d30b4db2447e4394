"""A step that nodes have copied to a tier, which is one of a directory of checkpoints, for StorageReader."""

from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from trunkline._core import CheckpointStore
from trunkline._formats.checkpoint_names import step_of
from trunkline.checkpoint.directory.sharded import parts_in
from trunkline.dcp._manifest import bytes_of_checksums
from trunkline.dcp._node_items import items_in, metadata_in, stored_items
from trunkline.dcp._stored import DataFile, checkpointer_file


def read_copied_step(directory: Path) -> Metadata | None:
    """Return the metadata of a step that nodes have copied; None for a directory of another kind.

    Raises Corrupt and Format.
    """
    step = step_of(directory.name)
    if step is None or checkpointer_file(directory) is None:
        return None
    store = CheckpointStore(str(directory.parent), create=False)
    try:
        manifest = store.read_manifest(step)
    except FileNotFoundError:
        return None
    if parts_in(manifest["state"]) is None:
        return None
    where = str(directory)
    metadata = metadata_in(manifest["state"], where)
    files = [
        DataFile(path, shard["bytes"], bytes_of_checksums(shard["crc32c"]))
        for path, shard in zip(store.shard_paths(manifest), manifest["shards"], strict=True)
    ]
    tensors = manifest["tensors"]
    places = {
        number: (files[shard], offset)
        for number, each in enumerate(tensors)
        for shard, offset, _ in each["pieces"][:1]
    }
    nbytes = [sum(piece[2] for piece in each["pieces"]) for each in tensors]
    metadata.storage_data = stored_items(items_in(manifest["state"], where), nbytes, places, where)
    return metadata
