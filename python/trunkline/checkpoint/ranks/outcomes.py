"""Exchanges the outcomes of steps between ranks that save together: an error on one is raised on all."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trunkline._errors import Cancelled, Error, RankError
from trunkline.checkpoint.ranks.group import Exchange, rank_error

NOT_SAVED = "the checkpoint was not saved"


def publish_result(exchange: Exchange, topic: str, make: Callable[[], Any]) -> Any:
    """Return make(), and publish its result or error to the other ranks.

    Only a dict is published; for any other value the others learn that make() succeeded.
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
    """Mark the error of a save that was not made because the error of an earlier one was raised instead.

    Other ranks must not raise it again: each error would make the next save fail on all ranks, which would
    make the one after it fail, and so on.
    """
    with suppress(AttributeError):
        error.earlier = True  # type: ignore[attr-defined]


def root_cause(exchange: Exchange, error: BaseException) -> BaseException:
    """Return why this rank failed: rank 0's error, if that failed first and removed this rank's files."""
    if exchange.rank == 0 or isinstance(error, RankError | Cancelled):
        return error
    try:
        outcome = exchange.look("committed", 0)
    except Error:
        return error
    return error if outcome is None or "error" not in outcome else _failed_elsewhere(outcome)


def give_up(exchange: Exchange, error: BaseException) -> None:
    """Publish the failure of this rank, and end the exchange, unless it has ended."""
    if exchange.is_over:  # the outcome is published: a save may have succeeded when its caller is interrupted
        return
    failure = _failure(exchange, error)
    exchange.fail(failure)
    try:
        if exchange.has_met:
            for topic in ("placed", "committed") if exchange.rank == 0 else ("written",):
                exchange.post(topic, failure)
    except Error:
        pass  # the connection is lost, which the others notice themselves
    finally:
        exchange.__exit__(None, None, None)


def together(exchange: Exchange, work: Callable[[], Any]) -> Any:
    """Return work(), called in an exchange that begins before it and ends after it."""
    try:
        exchange.__enter__()  # no `with`: that does not call __exit__() if __enter__() fails
        value = work()
        exchange.__exit__(None, None, None)
        return value
    except BaseException as error:
        give_up(exchange, error)
        raise


def join(exchange: Exchange, but: str = NOT_SAVED) -> None:
    """Wait, on a rank other than 0, until all ranks are in this call; `but`: as for await_result()."""
    failure = exchange.meet()
    if failure is not None:
        raise _failed_elsewhere(failure, but)


def await_result(exchange: Exchange, topic: str, but: str = NOT_SAVED) -> Any:
    """Wait for the result of rank 0; `but`: the beginning of the message if that failed."""
    outcome = exchange.read(topic, 0)
    if "error" in outcome:
        raise _failed_elsewhere(outcome, but)
    return outcome["value"]


def combine(
    exchange: Exchange | None, topic: str, value: Any, make: Callable[[list[Any]], Any], but: str = NOT_SAVED
) -> Any:
    """Return, on all ranks, what rank 0 makes of the values of all: make(values), as JSON.

    exchange: of ranks that have met; None: there are no others. Every rank that waits learns of an error.
    """
    if exchange is None:
        return make([value])
    if exchange.rank > 0:
        exchange.post(topic, {"value": value})
        return await_result(exchange, f"{topic}, of all ranks", but)["made"]

    def made() -> dict[str, Any]:
        values = [value]
        for rank in range(1, exchange.size):
            found = exchange.read(topic, rank)
            if "error" in found:
                raise _failed_elsewhere({**found, "rank": rank}, but)
            values.append(found["value"])
        return {"made": make(values)}

    return publish_result(exchange, f"{topic}, of all ranks", made)["made"]


def scatter(
    exchange: Exchange | None,
    topic: str,
    value: Any,
    make: Callable[[list[Any]], list[Any]],
    but: str = NOT_SAVED,
) -> Any:
    """Return, on each rank, its own one of the values that rank 0 makes of those of all, as JSON."""
    if exchange is None:
        return make([value])[0]

    def post_each(values: list[Any]) -> None:
        for rank, made in enumerate(make(values)):
            exchange.post(f"{topic}, for rank {rank}", made)

    combine(exchange, topic, value, post_each, but)
    return exchange.read(f"{topic}, for rank {exchange.rank}", 0)


def _failed_elsewhere(outcome: dict[str, Any], but: str = NOT_SAVED) -> Error:
    rank, why = outcome["rank"], outcome["error"]
    named = why if why.startswith((f"rank {rank} ", f"rank {rank}: ")) else f"rank {rank}: {why}"
    # A rank that passes on the error of another has put `but` before it.
    error = rank_error(rank, why if why.startswith(f"{but}: ") else f"{but}: {named}")
    if outcome["earlier"]:
        mark_earlier(error)
    error.is_cancellation = outcome["cancelled"]
    return error
