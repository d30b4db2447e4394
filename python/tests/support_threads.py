"""Threads that tests wait for."""

from trunkline._tensor_io.background import unfinished


def await_saves() -> None:
    """Wait for all saves in the background, also those that nobody has a handle to."""
    for done in list(unfinished):
        assert done.wait(60)
