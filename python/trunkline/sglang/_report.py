"""What streaming costs, in the log of the server."""

import logging
import threading
import time
import weakref
from typing import Any

from trunkline._streaming.streaming import stats

_logger = logging.getLogger("trunkline.sglang")

EVERY_SECONDS = 30.0


def log_regularly(model: Any) -> None:
    """Log, from a thread, what the passes since the last line took, as long as the model exists."""
    known = weakref.ref(model)
    threading.Thread(target=_work, args=(known,), name="trunkline-report", daemon=True).start()


def _work(known: "weakref.ref[Any]") -> None:
    before = {"passes": 0, "seconds": 0.0, "wait_seconds": 0.0, "bytes_read": 0}
    while True:
        time.sleep(EVERY_SECONDS)
        model = known()
        if model is None:
            return
        now = stats(model)
        del model
        if text := line_of(before, now):
            _logger.info("%s", text)
        before = now


def line_of(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the line for what happened between two results of stats(); "" if there was no pass."""
    passes, seconds, waited, read = (
        now[name] - before[name] for name in ("passes", "seconds", "wait_seconds", "bytes_read")
    )
    if not passes or seconds <= 0:
        return ""
    return (
        f"streamed weights: {passes} passes in {seconds:.1f} s, {read / 1e9:.2f} GB read at "
        f"{read / seconds / 1e9:.2f} GB/s (storage gives {now['storage_gb_s']:.2f}), "
        f"{100 * waited / seconds:.0f} % of the time waiting for storage"
    )
