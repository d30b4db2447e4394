"""Names in a directory of torch.distributed.checkpoint: those of trunkline.dcp, and of torch's own writer.

src/checkpoint/own_directory.cpp recognizes them too, and similar names: it only needs to know which format a
directory belongs to.
"""

import os
import re

from trunkline._formats.checkpoint_names import step_of

MANIFEST = "dcp.manifest"
_RANK_MANIFEST = re.compile(r"dcp-rank[0-9]{5,}\.manifest")
_REFUSED = re.compile(r"dcp-rank[0-9]{5,}\.refused")
_DATA_FILE = re.compile(r"rank[0-9]{5,}-[0-9]+-([0-9a-f]{32})\.shard")
_TORCH_METADATA = re.compile(r"(__[0-9]+)?\.metadata")  # a checkpoint of FileSystemWriter is valid with it
# It is written under this name, and renamed once that of an older checkpoint is removed.
_TORCH_TEMPORARY_METADATA = re.compile(r"(__[0-9]+)?\.metadata\.tmp")
_TORCH_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def manifest_name(rank: int | None) -> str:
    """Return the name of the manifest of all ranks, or of one that was saved without collectives."""
    return MANIFEST if rank is None else f"dcp-rank{rank:05d}.manifest"


def is_rank_manifest_name(name: str) -> bool:
    """Whether it is the name of the manifest of one rank."""
    return _RANK_MANIFEST.fullmatch(name) is not None


def refused_name(rank: int) -> str:
    """Return the name of the record of a rank's saves that were rejected because of its manifest."""
    return f"dcp-rank{rank:05d}.refused"


def is_refused_name(name: str) -> bool:
    """Whether it is the name of such a record."""
    return _REFUSED.fullmatch(name) is not None


def is_data_file_name(name: str) -> bool:
    """Whether a save of trunkline.dcp may have made a file of this name."""
    return _DATA_FILE.fullmatch(name) is not None


def file_id_of(name: str) -> str:
    """Return the hexadecimal digits that are unique to the name of a data file."""
    found = _DATA_FILE.fullmatch(name)
    assert found is not None
    return found[1]


def is_torch_name(name: str) -> bool:
    """Whether torch's FileSystemWriter may have made a file of this name."""
    return is_torch_metadata(name) or _TORCH_DATA_FILE.fullmatch(name) is not None


def is_torch_metadata(name: str) -> bool:
    """Whether torch's FileSystemReader loads a checkpoint by a file of this name."""
    return _TORCH_METADATA.fullmatch(name) is not None


def is_torch_temporary_metadata(name: str) -> bool:
    """Whether torch's FileSystemWriter writes metadata to a file of this name, to rename it then."""
    return _TORCH_TEMPORARY_METADATA.fullmatch(name) is not None


def is_dcp_name(name: str) -> bool:
    """Whether a directory with this file belongs to torch.distributed.checkpoint, complete or not."""
    return name == MANIFEST or is_rank_manifest_name(name) or is_data_file_name(name) or is_torch_name(name)


def is_dcp_directory(path: str) -> bool:
    """Whether a directory holds a checkpoint of trunkline.dcp, or steps of its Checkpointer."""
    try:
        names = os.listdir(path)  # noqa: PTH208 - names, not paths
    except OSError:
        return False
    if MANIFEST in names or any(map(is_rank_manifest_name, names)):
        return True
    return any(_is_dcp_step(os.path.join(path, name)) for name in names if step_of(name) is not None)  # noqa: PTH118


def last_dcp_step(path: str) -> str | None:
    """Return the folder of the step with the highest number in the directory of a run; None: it has none."""
    try:
        steps = [(step, name) for name in os.listdir(path) if (step := step_of(name)) is not None]  # noqa: PTH208
    except OSError:
        return None
    folders = (os.path.join(path, name) for _, name in sorted(steps, reverse=True))  # noqa: PTH118
    return next((each for each in folders if os.path.exists(os.path.join(each, MANIFEST))), None)  # noqa: PTH110, PTH118


def _is_dcp_step(folder: str) -> bool:
    try:
        return any(name == MANIFEST or is_data_file_name(name) for name in os.listdir(folder))  # noqa: PTH208
    except OSError:
        return False
