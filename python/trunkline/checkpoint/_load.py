"""Loading one file, or a folder of shards: trunkline.load."""

import os
from typing import Any, Literal

from trunkline._core import Engine
from trunkline._errors import Unsupported
from trunkline._types import Path
from trunkline.checkpoint._transfer import path_name

Verify = Literal["auto"] | bool


def load(
    path: Path,
    *,
    device: str = "cpu",
    verify: Verify = "auto",
    mmap: bool = False,
    engine: Engine | None = None,
) -> Any:
    """Read what torch.save, safetensors or save() wrote: the object of a .pt file, or a dict of tensors.

    `path`: a .safetensors file; a Hugging Face folder of such (or its *.safetensors.index.json), whose shards
    are merged; otherwise a zip file of torch >= 1.6, whatever its suffix. Pickles run no code: only what
    torch.load(weights_only=True) allows is loaded (torch.serialization.add_safe_globals widens it).

    Tensors own their memory, page-aligned where they are large. `verify`: "auto" checks the checksums that
    the file has, True refuses a file without, False checks none. `mmap`: tensors are views of the mapped
    file, read when they are first touched and not verified. `device`: "cpu".

    Raises Corrupt, which names file, tensor and chunk, where bytes contradict their checksum or the file is
    cut off; Format where it is none of these; Unsupported for what weights_only forbids. Thread-safe.
    """
    name = path_name(path)
    if verify not in ("auto", True, False):
        raise ValueError(f'verify: must be "auto", True or False, not {verify!r}')
    if str(device) != "cpu":
        raise Unsupported(
            None, f'device: {device} is not supported by this build; load to "cpu" and move from there', name
        )
    is_folder = os.path.isdir(name)  # noqa: PTH112
    if name.endswith((".safetensors", ".safetensors.index.json")) or is_folder:
        from trunkline.checkpoint import _safetensors

        if name.endswith(".safetensors") and not is_folder:
            return _safetensors.load(name, engine=engine, verify=verify, mmap=mmap)
        return _safetensors.load_folder(name, engine=engine, verify=verify, mmap=mmap)
    from trunkline.checkpoint import _pt

    return _pt.load(name, engine=engine, verify=verify, mmap=mmap)
