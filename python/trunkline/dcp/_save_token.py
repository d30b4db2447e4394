"""Tokens that identify a save without collectives: the same on all ranks, different for each save."""

import hashlib
import os
import re
import secrets
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trunkline._boot_id import boot_id

_TOKEN = re.compile(r"[0-9a-f]{32}-[1-9][0-9]*")
_KEY = "trunkline/dcp/choice"
_UNKNOWN = secrets.token_hex(16)  # stands for an unknown machine, which no other process shares

_saves: Counter[str] = Counter()  # begun by this process, by directory


def count_save(directory: str) -> None:
    """Count a save without collectives into `directory` that this process begins."""
    _saves[directory] += 1


def new_save_token(directory: str) -> str | None:
    """Return the token of the save into `directory` counted last; None if ranks cannot agree on one.

    Its first part is the same for all ranks of a process group, but differs for any others, also for the
    processes with which torchrun replaces them. The second counts saves into the directory: ranks that failed
    in different ones of these share no token.

    How many collective operations a rank has begun is not part of it: point-to-point operations count as well
    (gloo, and batches of NCCL), so that the stages of a pipeline differ at the same point of a training.
    """
    job = _job()
    return None if job is None else f"{job}-{max(1, _saves[directory])}"


def is_save_token(text: str | None) -> bool:
    """Whether a save_id is a token; save_ids of earlier versions differ for each rank."""
    return text is not None and _TOKEN.fullmatch(text) is not None


def is_of_same_job(token: str | None, other: str) -> bool:
    """Whether two save_ids are tokens of the same ranks, between two starts of the processes."""
    return token is not None and is_save_token(token) and token.partition("-")[0] == other.partition("-")[0]


def seconds_since_start() -> float:
    """Return the age of this process."""
    # The name of the program, in parentheses, may hold anything.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return _now() - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _job() -> str | None:
    if not dist.is_available() or not dist.is_initialized():
        return secrets.token_hex(16)
    is_shared, group = _group_of_save()
    if not is_shared:
        return secrets.token_hex(16)
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:  # MPI has none
        return None
    try:
        chosen = _choose(store)
    except NotImplementedError:
        return None
    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    return hashlib.sha256(f"{chosen} {ranks}".encode()).hexdigest()[:32]


def _choose(store: Any) -> str:
    """Return the choice that the first of the processes that share the store proposed; waits for none.

    A store that outlives a restart by torchrun contains the choice of the processes before: all processes of
    a start exist before one of them can choose, so an older choice is not theirs. The clocks of two machines
    may differ, so each machine records by its own clock when one of its processes proposed the choice, or
    first saw it. A machine that joins after the restart cannot know: it uses the old choice until another
    machine makes a new one, and the save is rejected if there are manifests of the old choice.

    TORCHELASTIC_RESTART_COUNT says less: restarts because of another machine do not count.
    """
    machine = _machine()
    proposed = f"{secrets.token_hex(16)} {machine} {_now():.3f}"
    chosen = store.compare_set(_KEY, "", proposed).decode("ascii")
    if _since_when(store, chosen, machine) < _now() - seconds_since_start():
        chosen = store.compare_set(_KEY, chosen, proposed).decode("ascii")
        _since_when(store, chosen, machine)
    return str(chosen)


def _since_when(store: Any, chosen: str, machine: str) -> float:
    """Return when this machine made a choice, or first saw it, by its own clock; records that."""
    nonce, chooser, moment = chosen.split(" ")
    if chooser == machine:
        return float(moment)
    key, seen = f"{_KEY}/{machine}", f"{nonce} {_now():.3f}"
    found = store.compare_set(key, "", seen).decode("ascii")
    if not found.startswith(f"{nonce} "):  # of an earlier choice
        found = store.compare_set(key, found, seen).decode("ascii")
    return float(found.partition(" ")[2])


def _machine() -> str:
    """Return a name, without spaces, that is the same for processes whose _now() uses the same clock."""
    try:
        name = boot_id()
        namespace = Path("/proc/self/ns/time")  # a container may have a separate clock
        return f"{name}/{os.readlink(namespace)}" if namespace.is_symlink() else name  # noqa: PTH115
    except OSError:
        return _UNKNOWN


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _group_of_save() -> tuple[bool, Any]:
    """Return whether several ranks take part in the running save, and their group (None: the default one).

    torch.distributed.checkpoint does not pass it to a storage writer, and two groups may have the same ranks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        wrapper = frame.f_locals.get("distW") if frame.f_code.co_name == "_save_state_dict" else None
        if wrapper is not None:
            return bool(wrapper.use_dist), wrapper.group
        frame = frame.f_back  # type: ignore[assignment]
    return True, None
