"""Whether from_pretrained reads a model from a pack, and where that is: for trunkline.stream.plan."""

from typing import Any

import torch

from trunkline._streaming.location import PackLocation
from trunkline._streaming.pack_cache import packs_directory
from trunkline._streaming.room import rooms_of
from trunkline.transformers._options import ModelOptions
from trunkline.transformers._packing import default_location, existing_pack, layout_of
from trunkline.transformers.hub import ModelFolder
from trunkline.transformers.stored_model import read_checkpoint


def planned_pack(
    found: ModelFolder, dtype: torch.dtype | str | None, weight_bytes: int, text_only: bool = False
) -> dict[str, Any]:
    """Return for plan() whether from_pretrained reads the model from a pack, where that is, and its size.

    `weight_bytes`: the size, about, where the weights are not there yet.
    """
    try:
        checkpoint = read_checkpoint(found, dtype, None, ModelOptions(text_only=text_only))
    except FileNotFoundError:  # only the config is there
        return {
            "needed": None,
            "exists": False,
            "directory": str(packs_directory()),
            "bytes": weight_bytes,
            "free_bytes": rooms_of(PackLocation((packs_directory(),)), weight_bytes)[0].free,
        }
    location = default_location(checkpoint)
    manifest = existing_pack(location, checkpoint)
    nbytes = layout_of(checkpoint).nbytes if manifest is None else manifest.nbytes
    return {
        "needed": checkpoint.why_pack() is not None,
        "exists": manifest is not None,
        "directory": str(location.directories[0]),
        "bytes": nbytes,
        "free_bytes": rooms_of(location, nbytes)[0].free,
    }
