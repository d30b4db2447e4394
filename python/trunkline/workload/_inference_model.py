"""The model that an inference loads at start: a safetensors file `model/weights.safetensors`."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline._errors import Corrupt, exception_of
from trunkline.workload._pattern import Pattern
from trunkline.workload._room import require_room

if TYPE_CHECKING:
    import torch

_TENSOR_BYTES = 256 << 20
_MOST_HEADER_BYTES = 1 << 20  # names, shapes, and the checksums of a small model
_NAME = "weights.safetensors"


def model_path(directory: Path) -> Path:
    """Return where the model is, in the first directory of the data set."""
    return directory / "model" / _NAME


def write_model(directory: Path, nbytes: int, seed: int) -> bool:
    """Write the model unless it is there; return whether it was written.

    Raises FileExistsError if there is another file of its name, OSError if there is not enough room.
    """
    from trunkline.checkpoint.save import save

    path = model_path(directory)
    if path.exists():
        if not nbytes <= path.stat().st_size <= nbytes + nbytes // 1000 + _MOST_HEADER_BYTES:
            raise exception_of(
                "system",
                errno.EEXIST,
                f"{path} is not a model of {nbytes} bytes, and is not replaced",
                str(path),
            )
        return False
    require_room(
        directory, nbytes, "the model needs", "set a smaller inference.model_size_bytes (overrides=)"
    )
    path.parent.mkdir(exist_ok=True)
    save(_tensors(nbytes, Pattern(seed).fill), path)
    return True


def load_model(directory: Path, nbytes: int) -> "dict[str, torch.Tensor]":
    """Load the model. Raises FileNotFoundError if it was not written, ValueError for another size."""
    from trunkline.checkpoint.load import load

    path = model_path(directory)
    if not path.exists():
        raise exception_of(
            "system", errno.ENOENT, f"no model {path}; write it with `trunkline workload generate`", str(path)
        )
    loaded: dict[str, torch.Tensor] = load(path)
    found = sum(tensor.nbytes for tensor in loaded.values())
    if found != nbytes:
        raise ValueError(
            f"{path} has {found} bytes of weights, and inference.model_size_bytes is {nbytes}; remove it, "
            "and write it again with `trunkline workload generate`"
        )
    return loaded


def check_model(loaded: "dict[str, torch.Tensor]", directory: Path, seed: int) -> None:
    """Raise Corrupt if a byte of the loaded model is not what was written."""
    pattern = Pattern(seed)
    for index, (name, tensor) in enumerate(sorted(loaded.items())):
        at = pattern.first_difference(tensor.numpy(), index)
        if at is not None:
            path = model_path(directory)
            raise Corrupt(errno.EBADMSG, f"{path}: byte {at} of {name} is not what was written", str(path))


def _tensors(nbytes: int, fill: Callable[..., None]) -> "dict[str, torch.Tensor]":
    import torch

    made = {}
    for index, begin in enumerate(range(0, nbytes, _TENSOR_BYTES)):
        tensor = torch.empty(min(_TENSOR_BYTES, nbytes - begin), dtype=torch.uint8)
        fill(tensor.numpy(), index)
        made[f"layer{index:05d}"] = tensor
    return made
