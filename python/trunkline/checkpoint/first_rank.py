"""What the first rank of torch.distributed saves in the background, for the other ranks to wait for.

For integrations in which it alone saves. No collective operation takes part: a rank that comes from an error,
or never comes, would hold up the others. The first rank posts each save in the store of the default process
group, and what became of it; the others look there.

Saves are known by their number, which all ranks count alike: begin_common_save() is called by all before the
first one saves, and none looks for a save before the first one has posted it. So what processes before a
restart have left in the store is replaced before anyone looks.
"""

import time
import weakref
from contextlib import suppress
from typing import Any

from trunkline._errors import RankError
from trunkline._tensor_io.background import start_thread
from trunkline.checkpoint.ranks.store import RankStore, rank_error, value_of
from trunkline.checkpoint.save import SaveHandle

_LONGEST_SECONDS = 1800.0  # as torch waits for a rank by default
_STORE_SECONDS = 60.0
_RUNNING, _SAVED, _FAILED = "running", "saved", "failed: "


class _Saves:
    def __init__(self) -> None:
        self.begun = 0  # as all ranks count
        self.awaited = 0  # of these, up to which others have waited
        self.store: tuple[weakref.ref[Any], RankStore] | None = None


_saves = _Saves()


def begin_common_save() -> None:
    """Count a save that all ranks know of, and the first one makes."""
    _saves.begun += 1


def post_save(saving: SaveHandle | None, error: BaseException | None = None) -> None:
    """Post, on the first rank, the save that was counted last; None: it is over, and failed with `error`."""
    store = _store(on_first_rank=True)
    if store is None or not _saves.begun:
        return
    key = str(_saves.begun)

    def post(value: str) -> None:
        with suppress(RankError):  # then nobody can wait for it, and the save goes on
            store.do(lambda each: each.set(key, value))

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
        pause = min(2 * pause, 0.1)
    _saves.awaited = number
    text = (outcome or b"").decode()
    if text.startswith(_FAILED):
        raise rank_error(0, f"rank 0 failed: {text.removeprefix(_FAILED)}")


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
