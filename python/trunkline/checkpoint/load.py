"""Loading one file, or a folder of shards: trunkline.load."""

import os
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
    map_location: None = None,
    weights_only: None = None,
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

    map_location and weights_only of torch.load raise a TypeError that says what to use instead.

    Raises Corrupt, which names file, tensor and chunk, if bytes contradict their checksum or the file is
    truncated; Format for a file in none of these formats; Unsupported for types that weights_only forbids.
    Thread-safe.
    """
    if map_location is not None:
        raise TypeError("map_location: not an argument of trunkline.load; use device=")
    if weights_only is not None:
        raise TypeError(
            "weights_only: not an argument of trunkline.load, where it is always on; to allow other "
            "types, use torch.serialization.add_safe_globals"
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
