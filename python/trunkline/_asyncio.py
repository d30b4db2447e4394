"""Awaiting a Future in asyncio code."""

import asyncio

from trunkline._core import Future


async def completion(future: Future) -> int:
    """Wait for `future` without blocking the event loop, and return its result.

    Cancelling the task cancels the operation.
    """
    if not future.done():
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def on_done(_: Future) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:
                if not loop.is_closed():  # a closed loop waits for nothing
                    raise

        future.add_done_callback(on_done)
        try:
            await waiter
        except asyncio.CancelledError:
            future.cancel()
            raise
    return future.result()
