"""What the manifests of one save without collectives have in common, and those of two saves have not."""

import re
import secrets
from collections import Counter

import torch.distributed as dist

_TOKEN = re.compile(r"[0-9a-f]{32}-[1-9][0-9]*")
_KEY = "trunkline/dcp/job"

_saves: Counter[str] = Counter()  # begun by this process, by directory


def new_save_token(directory: str) -> str | None:
    """Return the token of the save into `directory` that begins now; None where ranks cannot agree on one.

    Its first part is the same for all ranks of a process group, and for no others. The second counts saves
    into the directory: ranks that had an error in another one of these have no token in common.
    """
    _saves[directory] += 1
    job = _job()
    return None if job is None else f"{job}-{_saves[directory]}"


def is_save_token(text: str | None) -> bool:
    """Whether a save_id is a token; that of an earlier version differs for each rank."""
    return text is not None and _TOKEN.fullmatch(text) is not None


def _job() -> str | None:
    proposed = secrets.token_hex(16)
    if not dist.is_available() or not dist.is_initialized():
        return proposed
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:  # MPI has none
        return None
    try:  # the first rank sets it; waits for none
        return str(store.compare_set(_KEY, "", proposed).decode("ascii"))
    except NotImplementedError:
        return None
