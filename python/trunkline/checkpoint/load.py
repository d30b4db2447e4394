"""Loading one file, or a folder of shards: trunkline.load."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from trunkline._core import Engine
from trunkline._modes import makes_ordinary_tensors
from trunkline._paths import path_name
from trunkline._trace import span
from trunkline._types import Path

if TYPE_CHECKING:
    import torch

Verify = Literal["auto"] | bool


@makes_ordinary_tensors
def load(
    path: Path,
    *,
    device: "str | int | torch.device" = "cpu",
    verify: Verify = "auto",
    mmap: bool = False,
    engine: Engine | None = None,
    map_location: "str | int | torch.device | None" = None,
    weights_only: Literal[True] | None = True,
) -> Any:
    """Read what torch.save, safetensors or save() wrote: the object of a .pt file, or a dict of tensors.

    `path`: a .safetensors file; a Hugging Face folder of such files (or its *.safetensors.index.json), whose
    shards are merged; otherwise a zip file of torch >= 1.6, whatever its suffix. Pickles run no code: only
    types that torch.load(weights_only=True) allows are loaded (torch.serialization.add_safe_globals adds to
    them).

    Tensors own their memory, page-aligned if they are large, and are ordinary tensors even when they are
    loaded under torch.inference_mode(). `verify`: "auto" verifies the checksums that the file has, True
    rejects a file without checksums, False verifies none. `mmap`: tensors are views of the mapped file, read
    when they are first touched and not verified. Truncating that file in place, or losing its device, kills
    the process (SIGBUS) when such a tensor is touched; save() replaces files and is safe. `device`: "cpu", or
    a CUDA GPU ("cuda", "cuda:1"), whose tensors are read into their final memory, ordered after its current
    stream. A file that is in the page cache is read from there; any other is read past it.

    Waits for a save_async() of this process to `path` that is still running, so that this returns what it
    saved; if that save failed, the next save raises its error.

    `map_location`: the device, as torch.load names it; dicts and functions are not supported (TypeError).
    `weights_only`: can only be True (ValueError), since loading runs no code of the file.

    Raises Corrupt, which names file, tensor and chunk, if bytes contradict their checksum or the file is
    truncated; Format for a file in none of these formats; Unsupported for types that weights_only forbids.
    Thread-safe.
    """
    device = _device_of(device, map_location)
    if weights_only not in (None, True):
        raise ValueError(
            f"weights_only: must be True, not {weights_only!r}: trunkline.load runs no code of the file. "
            "For a file that you trust use torch.load(path, weights_only=False); to allow single types, "
            "torch.serialization.add_safe_globals"
        )
    if hasattr(path, "read"):
        raise TypeError(
            f"path: must be the path of a file, not an open file ({type(path).__name__}): pass its "
            "name, or use torch.load for files that have none"
        )
    name = path_name(path)
    if verify not in ("auto", True, False):
        raise ValueError(f'verify: must be "auto", True or False, not {verify!r}')
    from trunkline._arguments import bool_argument, check_engine
    from trunkline._tensor_io.memory import device_argument

    mmap = bool_argument(mmap, "mmap")
    check_engine(engine)
    target = device_argument(device, name)
    with span("checkpoint", "load", name):
        return _load(name, target, engine, verify, mmap)


def _device_of(device: "str | int | torch.device", map_location: Any) -> "str | int | torch.device":
    """Return the one of both that is given. Raises TypeError for what only torch.load supports."""
    if map_location is None:
        return device
    if callable(map_location) or isinstance(map_location, Mapping):
        raise TypeError(
            f'map_location: must be a device, such as "cpu" or "cuda:1", not {type(map_location).__name__}: '
            "all tensors are loaded to one device"
        )
    if device not in ("cpu", map_location):
        raise ValueError(f"device, map_location: differ ({device} and {map_location}); pass only one")
    result: str | int | torch.device = map_location
    return result


def _load(name: str, target: "torch.device", engine: Engine | None, verify: Verify, mmap: bool) -> Any:
    from trunkline.checkpoint.save_order import await_saves_of

    lower = name.lower()  # as save() reads suffixes
    await_saves_of(os.path.dirname(name) or "." if lower.endswith(".index.json") else name)  # noqa: PTH120
    is_folder = os.path.isdir(name)  # noqa: PTH112
    if lower.endswith((".safetensors", ".safetensors.index.json")) or is_folder:
        from trunkline._formats import safetensors

        if lower.endswith(".safetensors") and not is_folder:
            return safetensors.load(name, device=target, engine=engine, verify=verify, mmap=mmap)
        return safetensors.load_folder(name, device=target, engine=engine, verify=verify, mmap=mmap)
    from trunkline._formats import pt

    return pt.load(name, device=target, engine=engine, verify=verify, mmap=mmap)
