"""Finds saves that begin within another save of the same thread, as in a signal handler."""

from collections.abc import Collection
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_SAVE_STATE_DICT = "_save_state_dict"
_FUNCTIONS = frozenset(("save", "save_state_dict", _SAVE_STATE_DICT))  # of torch: one call is one save


@dataclass(frozen=True)
class OuterSaves:
    """The saves of this thread within which another one begins."""

    is_within_method: bool  # of a storage writer, which may hold locks and be in the middle of a change
    writers: list[Any]  # storage writers of any kind


def find_outer_saves(frame: FrameType, methods: Collection[CodeType], *, is_method: bool) -> OuterSaves:
    """Find saves on the stack of `frame`, other than the one that `frame` belongs to.

    `methods`: the code of the storage writers' methods that torch calls one after another. `is_method`:
    whether `frame` is of one of them. If not, it may be called by one, for the same save.

    Only the stack shows which saves are running, because a save may end without calling us: by an exception
    between any two steps, or an error of another rank. A record of it would remain, and block the next save.
    """
    saves = 0
    is_within_method = is_of_same_save = False
    writers = []
    caller = frame.f_back
    while caller is not None:
        if caller.f_code in methods and (is_method or saves > 0):
            is_within_method = True
        module = caller.f_globals.get("__name__", "")
        if module == _SAVER and caller.f_code.co_name in _FUNCTIONS:
            if not is_of_same_save:
                saves += 1
                if saves > 1:  # the first is the save that begins
                    writers.append(caller.f_locals.get("storage_writer"))
            is_of_same_save = caller.f_code.co_name == _SAVE_STATE_DICT  # save() calls it
        elif not str(module).startswith("torch."):
            is_of_same_save = False
        caller = caller.f_back
    return OuterSaves(is_within_method, writers)
