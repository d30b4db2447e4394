"""Threads that tests wait for."""

import threading


def await_saves() -> None:
    """Wait for all saves in the background, also those that nobody has a handle to."""
    for thread in threading.enumerate():
        # Those whose start was interrupted are listed for good.
        if thread.name.startswith("trunkline-") and thread.is_alive():
            thread.join(60)
