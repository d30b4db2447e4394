"""What the ranks of a trunkline.dcp.Checkpointer tell each other, before and after they call torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from trunkline._arguments import started_ranks
from trunkline._errors import RankError
from trunkline.checkpoint.ranks.gloo_group import new_gloo_group
from trunkline.checkpoint.ranks.store import rank_error


class RunRanks:
    """The ranks of a process group. Their collective operations go through a group of their own (gloo).

    So they do not meet those of the training. The group is made by the first of them, and waits as long as
    the given one.
    """

    def __init__(self, process_group: Any) -> None:
        """`process_group`: None is the default group, if there is one."""
        self._given = process_group
        self._own: Any = None
        self.rank, self.size = _rank_in(process_group)

    def how(self) -> dict[str, Any]:
        """Return the arguments that tell torch's functions who takes part."""
        return {"no_dist": True} if self.size == 1 else {"process_group": self.group()}

    def agree(self, call: str, decide: Callable[[], Any]) -> Any:
        """Call `decide` on rank 0, and return its result on all ranks, or raise its error.

        `call`: what the user has called, such as "save(3)". If ranks have called different things, all raise
        RankError, and nothing is decided.
        """
        if self.size == 1:
            return decide()
        self._compare(call)
        outcome: list[Any] = [None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                outcome = [(decide(), None)]
            except Exception as failed:
                error, outcome = failed, [(None, str(failed))]
        with self._explained(call):
            dist.broadcast_object_list(outcome, group_src=0, group=self.group())
        if error is not None:
            raise error
        value, why = outcome[0]
        if why is not None:
            raise rank_error(0, f"rank 0 failed: {why}")
        return value

    def together(self, call: str, act: Callable[[], Any]) -> Any:
        """Call `act`, which talks to nobody, on all ranks. If it fails on one, all raise an error."""
        if self.size == 1:
            return act()
        error: BaseException | None = None
        result = None
        try:
            result = act()
        except BaseException as failed:
            error = failed
        whys: list[Any] = [None] * self.size
        with self._explained(call):
            why = None if error is None else str(error) or type(error).__name__
            dist.all_gather_object(whys, why, group=self.group())
        if error is not None:
            raise error
        for rank, why in enumerate(whys):
            if why is not None:
                raise rank_error(rank, f"rank {rank} failed: {why}")
        return result

    def _compare(self, call: str) -> None:
        calls: list[Any] = [None] * self.size
        with self._explained(call):
            dist.all_gather_object(calls, call, group=self.group())
        for rank, other in enumerate(calls):
            if other != calls[0]:
                raise rank_error(
                    rank,
                    f"rank 0 has called {calls[0]}, and rank {rank} {other}: all ranks must make the same "
                    "calls in the same order",
                )

    def group(self) -> Any:
        """Return the ranks' own group; the first call makes it, on all ranks together."""
        if self._own is None:
            self._own = new_gloo_group(self._given)
        return self._own

    @contextmanager
    def _explained(self, call: str) -> Iterator[None]:
        """Say what it means if the other ranks cannot be reached."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                None,
                f"rank {self.rank} has called {call}, and another rank has ended, or did not make the same "
                f"call in time: {error}",
            ) from error


def _rank_in(process_group: Any) -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(process_group), dist.get_world_size(process_group)
    if process_group is not None:
        raise ValueError("process_group: torch.distributed is not initialized; call init_process_group first")
    ranks = started_ranks()
    if ranks > 1:
        raise ValueError(
            f"process_group: {ranks} processes were started together (WORLD_SIZE), but there is no process "
            "group; call torch.distributed.init_process_group first"
        )
    return 0, 1
