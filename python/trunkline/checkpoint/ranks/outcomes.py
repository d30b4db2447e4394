"""How ranks that save together tell each other what came of it, so that an error of one is heard by all."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trunkline._errors import Cancelled, Error, RankError
from trunkline.checkpoint.ranks.group import Exchange, rank_error

_NOT_SAVED = "the checkpoint was not saved"


def publish_result(exchange: Exchange, topic: str, make: Callable[[], Any]) -> Any:
    """Make something, and tell the others what came of it.

    Only a dict is passed on; of anything else the others hear that it was made.
    """
    try:
        value = make()
    except BaseException as error:
        exchange.post(topic, _failure(exchange, error))
        raise
    exchange.post(topic, {"value": value if isinstance(value, dict) else None})
    return value


def _failure(exchange: Exchange, error: BaseException) -> dict[str, Any]:
    about = str(error) or type(error).__name__
    rank = getattr(error, "rank", None)
    return {
        "error": about,
        "rank": exchange.rank if rank is None else rank,
        "earlier": getattr(error, "earlier", False),
        "cancelled": isinstance(error, Cancelled) or getattr(error, "is_cancellation", False),
    }


def mark_earlier(error: BaseException) -> None:
    """Note that a save was given up to raise the error of an earlier one.

    Other ranks need not raise that again: each error would make the next save fail on all, which would make
    the one after it fail, without end.
    """
    with suppress(AttributeError):
        error.earlier = True  # type: ignore[attr-defined]


def root_cause(exchange: Exchange, error: BaseException) -> BaseException:
    """What made this rank fail: files that rank 0 removed from under it failed because it gave up before."""
    if exchange.rank == 0 or isinstance(error, RankError | Cancelled):
        return error
    try:
        outcome = exchange.look("committed", 0)
    except Error:
        return error
    return error if outcome is None or "error" not in outcome else _failed_elsewhere(outcome)


def give_up(exchange: Exchange, error: BaseException) -> None:
    """Tell the others that this rank failed, and end the exchange, unless it is over."""
    if (
        exchange.is_over
    ):  # they know what came of it: a save may have succeeded when its caller is interrupted
        return
    failure = _failure(exchange, error)
    exchange.fail(failure)
    try:
        if exchange.has_met:
            for topic in ("placed", "committed") if exchange.rank == 0 else ("written",):
                exchange.post(topic, failure)
    except Error:
        pass  # the connection is lost: the others find that out for themselves
    finally:
        exchange.__exit__(None, None, None)


def together(exchange: Exchange, work: Callable[[], Any]) -> Any:
    """Return work() in an exchange that begins and ends with it."""
    try:
        exchange.__enter__()  # no `with`: that does not end what fails as it begins
        value = work()
        exchange.__exit__(None, None, None)
        return value
    except BaseException as error:
        give_up(exchange, error)
        raise


def join(exchange: Exchange, but: str = _NOT_SAVED) -> None:
    """Wait, on another rank than 0, until all are in this call; `but`: as for await_result()."""
    failure = exchange.meet()
    if failure is not None:
        raise _failed_elsewhere(failure, but)


def await_result(exchange: Exchange, topic: str, but: str = _NOT_SAVED) -> Any:
    """Wait for what came of it at rank 0; `but`: what to say did not happen if it failed."""
    outcome = exchange.read(topic, 0)
    if "error" in outcome:
        raise _failed_elsewhere(outcome, but)
    return outcome["value"]


def _failed_elsewhere(outcome: dict[str, Any], but: str = _NOT_SAVED) -> Error:
    rank, why = outcome["rank"], outcome["error"]
    named = why if why.startswith((f"rank {rank} ", f"rank {rank}: ")) else f"rank {rank}: {why}"
    error = rank_error(rank, f"{but}: {named}")
    if outcome["earlier"]:
        mark_earlier(error)
    error.is_cancellation = outcome["cancelled"]
    return error
