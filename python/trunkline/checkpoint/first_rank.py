"""What the first rank of torch.distributed saves in the background, for the other ranks to wait for.

For integrations in which it alone saves. No collective operation takes part: a rank that comes from an error,
or never comes, would hold up the others. The first rank posts each save in the store of the default process
group, and what became of it; the others look there.

Saves are known by their number, which all ranks count alike: common_save() is entered by all before the first
one saves, and none looks for a save before the first one has left it. So what processes before a restart have
left in the store is replaced before anyone looks.

What the first rank saves afterwards, such as the weights that Lightning's launchers return, has no number and
is not posted: nobody waits for it, and those who wait for an earlier save must find the outcome of that one.
"""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trunkline._errors import RankError
from trunkline._tensor_io.background import start_thread
from trunkline.checkpoint.ranks.store import RankStore, rank_error, value_of
from trunkline.checkpoint.save import SaveHandle

_LONGEST_SECONDS = 1800.0  # as torch waits for a rank by default
_STORE_SECONDS = 60.0
_READERS_SECONDS = 5.0  # for ranks that are a little behind; those that died never come
_LONGEST_PAUSE_SECONDS = 0.1
_RUNNING, _SAVED, _FAILED = "running", "saved", "failed: "


class _Saves:
    def __init__(self) -> None:
        self.begun = 0  # as all ranks count
        self.is_open = False  # whether the last one of these is being begun
        self.posted = 0  # of these, the last one that the first rank has posted
        self.last_post: object = None  # identifies the save whose outcome becomes that of the number
        self.awaited = 0  # of these, up to which this rank has waited
        self.store: tuple[weakref.ref[Any], RankStore] | None = None


_saves = _Saves()


@contextmanager
def common_save() -> Iterator[None]:
    """Count a save that all ranks know of; what the first one saves within is posted under this number."""
    _saves.begun += 1
    _saves.is_open = True
    try:
        yield
    finally:
        _saves.is_open = False


def post_save(saving: SaveHandle | None, error: BaseException | None = None) -> None:
    """Post, on the first rank, a save within common_save(); None: it is over, and failed with `error`.

    Of several within one, the last one counts. Elsewhere it is posted only if its number has no save yet, as
    where another plugin passes it on from a thread.
    """
    store = _store(on_first_rank=True)
    number = _saves.begun
    if store is None or (number == _saves.posted and not _saves.is_open):
        return
    this_post = object()

    def post(value: str) -> None:
        def set_unless_replaced(each: Any) -> None:  # one at a time, in the thread of the store
            if _saves.last_post is this_post or _saves.posted != number:
                each.set(str(number), value)

        with suppress(RankError):  # then nobody can wait for it, and the save goes on
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

    start_thread(post_outcome)


def _outcome_of(error: BaseException | None) -> str:
    return _SAVED if error is None else f"{_FAILED}{error}"


def _readers_key(number: int) -> str:
    return f"{number} readers"


def await_first_rank() -> None:
    """Wait, on other ranks, until the save that was counted last is over.

    Raises RankError if it failed, if the store is lost, and after half an hour. Returns at once on the first
    rank, and without a process group.
    """
    number = _saves.begun
    store = _store(on_first_rank=False)
    if store is None or number == _saves.awaited:
        return
    end = time.monotonic() + _LONGEST_SECONDS
    pause = 0.001
    while (outcome := store.do(lambda each: value_of(each, str(number)))) == _RUNNING.encode():
        if time.monotonic() > end:
            raise rank_error(0, f"rank 0 has not ended its save after {_LONGEST_SECONDS:g} s; see its log")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    _saves.awaited = number
    if outcome is not None:
        with suppress(RankError):  # the first rank has not waited for this one
            store.do(lambda each: each.add(_readers_key(number), 1))
    text = (outcome or b"").decode()
    if text.startswith(_FAILED):
        raise rank_error(0, f"rank 0 failed: {text.removeprefix(_FAILED)}")


def await_other_ranks() -> None:
    """Wait, on the first rank, until the others have read the outcome of the save that was counted last.

    The store is lost to them when the process that holds it exits, which may be this one. Waits a few seconds
    at most, since a rank may have died. Returns at once on other ranks, and without a process group.
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
    with suppress(RankError):  # then no other rank can read it
        while store.do(lambda each: each.add(_readers_key(number), 0)) < others and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _store(*, on_first_rank: bool) -> RankStore | None:
    """Return the store of the default process group; None without other ranks, and on the wrong rank."""
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
        # Who holds the store of a process group keeps its port.
        _saves.store = (
            weakref.ref(default),
            RankStore(PrefixStore("trunkline/first_rank", store), _STORE_SECONDS),
        )
    return _saves.store[1]
