"""Lets other ranks of torch.distributed wait for a save that the first rank makes in the background.

For integrations in which the first rank alone saves. No collective operation is used: a rank that failed, or
never arrives, would block the others. The first rank posts each save and its outcome in the store of the
default process group, where the others read them.

Saves are identified by a number, which all ranks count alike: all ranks enter common_save() before the first
one saves, and none reads the store before the first one has left it. So entries that processes before a
restart left in the store are replaced before anyone reads them.

What the first rank saves afterwards, such as the weights that Lightning's launchers return, has no number and
is not posted: nobody waits for it, and ranks that wait for an earlier save must find the outcome of that one.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trunkline._errors import RankError
from trunkline._logging import Log
from trunkline._tensor_io.background import start_thread
from trunkline._tensor_io.flag import Flag
from trunkline._waits import Wait
from trunkline.checkpoint.ranks.store import RankStore, rank_error, value_of
from trunkline.checkpoint.save import SaveHandle

_TIMEOUT_SECONDS = 1800.0  # torch's default for a rank
_STORE_SECONDS = 60.0
_READERS_SECONDS = 5.0  # for ranks that are a little behind; dead ones never read it
_MAX_PAUSE_SECONDS = 0.1
_RUNNING, _SAVED, _FAILED = "running", "saved", "failed: "

_log = Log("checkpoint")


class _Saves:
    def __init__(self) -> None:
        self.begun = 0  # as all ranks count
        self.is_open = False  # whether the last one of these is being begun
        self.posted = 0  # of these, the last one that the first rank has posted
        self.last_post: object = None  # identifies the save whose outcome is posted for the number
        self.awaited = 0  # of these, the last one that this rank has waited for
        self.store: tuple[weakref.ref[Any], RankStore] | None = None


_saves = _Saves()


@contextmanager
def common_save() -> Iterator[None]:
    """Count a save on all ranks; a save of the first rank within the context is posted under this number."""
    _saves.begun += 1
    _saves.is_open = True
    try:
        yield
    finally:
        _saves.is_open = False


def post_save(saving: SaveHandle | None, error: BaseException | None = None) -> None:
    """Post, on the first rank, a save within common_save(); None: it has ended, with `error` if it failed.

    If there are several within one context, the last one counts. Outside of it, a save is posted only if its
    number has none yet, as when another plugin saves from a thread.
    """
    store = _store(on_first_rank=True)
    number = _saves.begun
    if store is None or (number == _saves.posted and not _saves.is_open):
        return
    this_post = object()

    def post(value: str) -> None:
        def set_unless_replaced(each: Any) -> None:  # one at a time, in the store's thread
            if _saves.last_post is this_post or _saves.posted != number:
                each.set(str(number), value)

        with suppress(RankError):  # then nobody can wait for it; the save goes on
            store.do(set_unless_replaced)

    if _saves.posted != number:
        with suppress(RankError):
            store.do(lambda each: each.set(_readers_key(number), "0"))
    _saves.posted, _saves.last_post = number, this_post
    if saving is None:
        post(_outcome_of(error))
        return
    post(_RUNNING)

    def post_outcome() -> None:
        saving._join()
        post(_outcome_of(saving._error))

    start_thread(post_outcome, Flag())  # the exit waits for it: other ranks wait for the outcome


def _outcome_of(error: BaseException | None) -> str:
    return _SAVED if error is None else f"{_FAILED}{error}"


def _readers_key(number: int) -> str:
    return f"{number} readers"


def await_first_rank() -> None:
    """Wait, on other ranks, until the save that was counted last has ended.

    Raises RankError if it failed, if the store is lost, and after half an hour. Returns immediately on the
    first rank, and without a process group.
    """
    number = _saves.begun
    store = _store(on_first_rank=False)
    if store is None or number == _saves.awaited:
        return
    end = time.monotonic() + _TIMEOUT_SECONDS
    pause = 0.001
    with Wait(_log, "wait for other ranks", "the save of rank 0", _TIMEOUT_SECONDS / 2) as wait:
        while (outcome := store.do(lambda each: value_of(each, str(number)))) == _RUNNING.encode():
            if time.monotonic() > end:
                text = f"rank 0 has not finished its save after {_TIMEOUT_SECONDS:g} s; see its log"
                raise rank_error(0, text)
            wait.check(lambda: "rank 0, which saves in the background")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
    _saves.awaited = number
    if outcome is not None:
        with suppress(RankError):  # the first rank has not waited for this one
            store.do(lambda each: each.add(_readers_key(number), 1))
    text = (outcome or b"").decode()
    if text.startswith(_FAILED):
        raise rank_error(0, f"rank 0 failed: {text.removeprefix(_FAILED)}")


def await_other_ranks() -> None:
    """Wait, on the first rank, until the others have read the outcome of the save that was counted last.

    They lose the store when the process that serves it exits, which may be this one. Waits a few seconds at
    most, since a rank may have died. Returns immediately on other ranks, and without a process group.
    """
    number = _saves.begun
    store = _store(on_first_rank=True)
    if store is None or number != _saves.posted or number == _saves.awaited:
        return
    import torch.distributed as dist

    _saves.awaited = number  # once is enough if a rank never comes
    others = dist.get_world_size() - 1
    end = time.monotonic() + _READERS_SECONDS
    pause = 0.001
    with suppress(RankError), Wait(_log, "wait for other ranks", "to read the outcome of a save") as wait:
        # An error: then no other rank can read it.
        while store.do(lambda each: each.add(_readers_key(number), 0)) < others and time.monotonic() < end:
            wait.check(lambda: "other ranks, to read the outcome of the save of rank 0")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)


def _store(*, on_first_rank: bool) -> RankStore | None:
    """Return the store of the default process group; None without other ranks, or on the wrong rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_world_size() == 1 or (dist.get_rank() == 0) != on_first_rank:
        return None
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import _get_default_store

    default = _get_default_store()
    if default is None:  # MPI has none
        return None
    if _saves.store is None or _saves.store[0]() is not default:
        store = default
        if hasattr(store, "clone"):
            with suppress(NotImplementedError, RuntimeError):
                store = store.clone()  # a separate connection, not blocked by other waits
        # Weakly: a reference to the store of a process group keeps its port in use.
        _saves.store = (
            weakref.ref(default),
            RankStore(PrefixStore("trunkline/first_rank", store), _STORE_SECONDS),
        )
    return _saves.store[1]
