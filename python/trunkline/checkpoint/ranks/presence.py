"""Waiting until all ranks of a process group are in a call, before its collective operations.

Those wait in C++, where no signal ends them: Ctrl-C has no effect while a rank does not come.

The n-th wait of a rank sets its n-th key in the store of the process group, and ends when all ranks have set
theirs. A rank whose wait is interrupted removes its key, and its next wait is the n-th again. Once all have
set their n-th keys, nobody looks at those before.
"""

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from trunkline._logging import Log
from trunkline._waits import Wait
from trunkline.checkpoint.ranks.gloo_group import timeout_of
from trunkline.checkpoint.ranks.meeting import names_of
from trunkline.checkpoint.ranks.store import rank_error

_POLL_SECONDS = (0.0005, 0.02)  # the first pause, and the longest
_DEFAULT_SECONDS = 1800.0  # torch's, for gloo

_log = Log("checkpoint")


class _Waits:
    """The waits of this process for the ranks of one group."""

    def __init__(self, group: Any) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.distributed_c10d import _get_default_store

        store = _get_default_store()
        if hasattr(store, "clone"):
            with suppress(NotImplementedError, RuntimeError):
                store = store.clone()  # a separate connection, which other waits do not block
        self._store: Any = PrefixStore(f"trunkline/present/{group.group_name}", store)
        self._number = 1

    def wait(self, rank: int, size: int, call: str, seconds: float) -> None:
        keys = [f"{self._number}/{each}" for each in range(size)]
        self._store.set(keys[rank], "")
        try:
            with Wait(_log, "wait for other ranks", call) as wait:
                self._poll(keys, call, seconds, wait)
        except BaseException:
            with suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(keys[rank])
            raise
        with suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(f"{self._number - 1}/{rank}")
        self._number += 1

    def _poll(self, keys: list[str], call: str, seconds: float, wait: Wait) -> None:
        def missing() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

        deadline = time.monotonic() + seconds
        pause, longest = _POLL_SECONDS
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                absent = missing()
                raise rank_error(
                    absent[0] if absent else 0,
                    f"{names_of(absent)} did not come to {call} within {seconds:g} s; all ranks of the group "
                    "must make the same call",
                )
            wait.check(lambda: names_of(missing()))
            time.sleep(pause)
            pause = min(2 * pause, longest)


_waits: "WeakKeyDictionary[Any, _Waits]" = WeakKeyDictionary()


def await_ranks(group: Any, call: str, timeout: timedelta | None = None) -> None:
    """Wait until all ranks of the group are in the call; signals are handled meanwhile.

    Raises RankError, which names those that have not come, after `timeout` (None: that of the group); also
    once the store of the group does not answer any more. All ranks of the group must wait equally often. Not
    thread-safe for one group.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    if group not in _waits:
        _waits[group] = _Waits(group)
    limit = timeout_of(group) if timeout is None else timeout
    seconds = _DEFAULT_SECONDS if limit is None else limit.total_seconds()
    rank = dist.get_rank(group)
    try:
        _waits[group].wait(rank, size, call, seconds)
    except RuntimeError as error:  # torch's, of its store
        raise rank_error(
            0,
            f"rank {rank} cannot wait for the other ranks in {call}: the store of the process group does not "
            "answer; the process that has it, often rank 0, may have ended: "
            f"{str(error).partition(chr(10))[0]}",
        ) from error
