"""What the ranks of a Checkpointer do together: opening the directory, and agreeing on a result."""

from collections.abc import Callable, Sequence
from typing import Any

from trunkline import _core
from trunkline.checkpoint.directory.step_increment import IncrementRules
from trunkline.checkpoint.ranks.group import Ranks, rank_error
from trunkline.checkpoint.ranks.outcomes import await_result, join, publish_result, together
from trunkline.checkpoint.retention import Rules
from trunkline.checkpoint.tiers.tier import Tier


def open_store(
    ranks: Ranks,
    directory: str,
    volumes: list[str] | None,
    writers: list[int],
    rules: Rules,
    fresh: bool,
    increments: IncrementRules | None = None,
    tiers: Sequence[Tier] = (),
) -> Any:
    """Open the directory on rank 0 first: the others then find what it created and recorded."""
    exchange = ranks.exchange("Checkpointer()")
    if exchange is None:
        return _core.CheckpointStore(directory, volumes=volumes, fresh=fresh)
    options = {
        "directory": directory,
        "fresh": fresh,
        "writers": writers,
        "volumes": volumes,
        "keep": rules.keep,
        "keep_every": rules.every,
        "keep_best": None if rules.best is None else list(rules.best),
        "incremental": increments is not None,
        "full_every": None if increments is None else increments.full_every,
        "tiers": [tier.options() for tier in tiers],
    }

    def opened() -> Any:
        exchange.meet()
        for rank in range(1, exchange.size):
            theirs = exchange.read("options", rank)
            if "error" in theirs:
                raise rank_error(rank, f"rank {rank} failed: {theirs['error']}")
            if theirs["directory"] != directory:
                raise rank_error(
                    rank,
                    f"rank {rank} opens {theirs['directory']} and rank 0 opens {directory}; pass the "
                    "same absolute path on all ranks (a relative one depends on the working directory)",
                )
            for option, ours in options.items():
                if theirs[option] != ours:
                    raise rank_error(
                        rank,
                        f"rank {rank}: {option} differs from rank 0; pass the same on all ranks",
                    )
        return _core.CheckpointStore(directory, volumes=volumes, fresh=fresh)

    def open_together() -> Any:
        if exchange.rank == 0:
            return publish_result(exchange, "opened", opened)
        but = f"{directory} was not opened"
        join(exchange, but)
        exchange.post("options", options)
        await_result(exchange, "opened", but)
        return _core.CheckpointStore(directory)

    return together(exchange, open_together)


def agree(
    ranks: Ranks,
    collectives: int | None,
    decide: Callable[[], Any],
    call: str,
    check: Callable[[Any], str | None] | None,
) -> Any:
    """Call `decide` on rank 0 once all ranks have made this call, and return its result on all.

    With `check`, which returns on the other ranks why the result is wrong there, or None: return None, or
    the first such reason with its rank.
    """
    exchange = ranks.exchange(call, collectives)
    if exchange is None:
        return decide()
    but = "nothing was loaded" if call == "load()" else f"{call} failed"

    def decided() -> Any:
        exchange.meet()
        return {"this": decide()}

    def agreed() -> Any:
        for rank in range(1, exchange.size):
            found = exchange.read("found", rank)
            if "error" in found:
                raise rank_error(rank, f"rank {rank} failed: {found['error']}")
            if found["value"]["why"] is not None:
                return {"this": {"rank": rank, "why": found["value"]["why"]}}
        return {"this": None}

    def agree_together() -> Any:
        if exchange.rank == 0:
            this = publish_result(exchange, "decided", decided)["this"]
            return this if check is None else publish_result(exchange, "agreed", agreed)["this"]
        join(exchange, but)
        this = await_result(exchange, "decided", but)["this"]
        if check is None:
            return this
        publish_result(exchange, "found", lambda: {"why": check(this)})
        return await_result(exchange, "agreed", but)["this"]

    return together(exchange, agree_together)
