"""Waiting for the saves of this process into a directory of checkpoints."""

import os

from trunkline._formats.checkpoint_names import step_of
from trunkline.checkpoint.directory.turn import Turn
from trunkline.checkpoint.save import saves_into


def await_saves_into(directory: str, but: object = None) -> None:
    """Wait for saves of Checkpointers of `directory`, except for those of the Checkpointer `but`.

    Does not wait for a call that a signal handler of this thread interrupted: it would never end.
    """
    for handle, owner in saves_into(directory):
        turn = getattr(owner, "_turn", None)
        is_interrupted = isinstance(turn, Turn) and turn.is_within_call()
        if not is_interrupted and (owner is None or owner is not but):
            handle._join()


def await_saves_at(path: str) -> None:
    """Wait for saves of Checkpointers into the directory at `path`, or the one whose step is at `path`."""
    await_saves_into(path)
    directory, name = os.path.split(os.path.abspath(path))  # noqa: PTH100
    if step_of(name) is not None:
        await_saves_into(directory)
