"""The pack that from_pretrained reads a model from, and its stored sizes: for trunkline.stream.plan."""

from typing import Any

import torch

from trunkline._streaming.location import PackLocation
from trunkline._streaming.pack_cache import packs_directory
from trunkline._streaming.roofline import Sizes
from trunkline._streaming.room import rooms_of
from trunkline.transformers._kept_quantised import check_on_cpu
from trunkline.transformers._options import model_options
from trunkline.transformers._packing import default_location, existing_pack, layout_of
from trunkline.transformers.hub import ModelFolder
from trunkline.transformers.stored_model import read_stored_model


def planned_pack(
    found: ModelFolder, dtype: torch.dtype | str | None, weight_bytes: int, text_only: bool, keep: str
) -> dict[str, Any]:
    """Return for plan() whether from_pretrained reads the model from a pack, where that is, and its size.

    `weight_bytes`: the size, about, where the weights are not there yet.
    """
    try:
        stored_model = read_stored_model(
            found, dtype, None, model_options({}, None, text_only=text_only, keep=keep)
        )
    except FileNotFoundError:  # only the config is there
        return {
            "needed": None,
            "exists": False,
            "directory": str(packs_directory()),
            "bytes": weight_bytes,
            "free_bytes": rooms_of(PackLocation((packs_directory(),)), weight_bytes)[0].free,
        }
    location = default_location(stored_model)
    manifest = existing_pack(location, stored_model)
    nbytes = layout_of(stored_model).nbytes if manifest is None else manifest.nbytes
    return {
        "needed": stored_model.why_pack() is not None,
        "exists": manifest is not None,
        "directory": str(location.directories[0]),
        "bytes": nbytes,
        "free_bytes": rooms_of(location, nbytes)[0].free,
    }


def stored_sizes(
    found: ModelFolder, dtype: torch.dtype | str | None, text_only: bool, keep: str, device: torch.device
) -> tuple[Sizes, Sizes | None, Any] | None:
    """Return the sizes of a model whose quantised weights are streamed as they are stored, and the model.

    None if they are not, by the argument `keep`. The second sizes are those with experts that are read as
    tokens are routed to them. Raises as from_pretrained does.
    """
    options = model_options({}, None, text_only=text_only, keep=keep)
    if not options.keeps_quantised:
        return None
    stored_model = read_stored_model(found, dtype, None, options)
    check_on_cpu(device, bool(stored_model.quantised), str(found.path))
    config = stored_model.model.config
    routed = None if stored_model.routed is None else stored_model.routed.sizes(config)
    if routed is not None and stored_model.must_route:
        return routed, routed, stored_model.model
    return stored_model.whole.sizes(config), routed, stored_model.model
