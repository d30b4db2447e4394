"""One rank that saves and restores its share of a model through trunkline.dcp, as a training does."""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trunkline._errors import Cancelled, Corrupt
from trunkline.workload._checkpoint_folder import CheckpointFolder
from trunkline.workload._model_shape import ModelShape, rank_tensors
from trunkline.workload._pattern import Pattern
from trunkline.workload._phase import Rank
from trunkline.workload._rank_progress import Report

if TYPE_CHECKING:
    import numpy
    import torch
    from numpy.typing import NDArray

_MEETING_TIMEOUT = timedelta(days=7)  # waiting for a slow rank is what is measured
_SLEEP_SECONDS = 0.2  # between looks at whether to go on


@dataclass(frozen=True)
class CheckpointPlan:
    """What all ranks know of the checkpoints."""

    shape: ModelShape
    seed: int
    durable: bool
    folder: CheckpointFolder
    meeting: str  # the URL where the ranks find each other, if there are several


class RankState:
    """The tensors of one rank, and the process group of all. Not thread-safe."""

    def __init__(self, plan: CheckpointPlan, rank: Rank) -> None:
        """Allocate the tensors, and meet the other ranks."""
        import torch

        # This import takes seconds, for which a training would stop at its first save.
        from trunkline.workload._timed_storage import timed_restore, timed_save

        self._timed_save, self._timed_restore = timed_save, timed_restore
        self._plan = plan
        self._rank = rank
        dtypes = _torch_dtypes()
        self._tensors: dict[str, torch.Tensor] = {
            f"rank{rank.number}.{each.name}": torch.empty(each.elements, dtype=dtypes[each.dtype])
            for each in rank_tensors(plan.shape, rank.number)
        }
        self._pattern = Pattern(plan.seed)
        if rank.count > 1:
            torch.set_num_threads(1)
            _meet(plan.meeting, rank)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def save(self, number: int) -> tuple[int, int]:
        """Save as that checkpoint; return the nanoseconds of the whole save, and those of own writing."""
        for index, tensor in enumerate(self._tensors.values()):
            self._pattern.fill(_bytes(tensor), number, self._rank.number, index)
        plan, folder = self._plan, self._plan.folder
        with self._together() as alone:
            place, volumes = folder.path(number), folder.volumes(number)
            return self._timed_save(self._tensors, place, volumes, plan.durable, alone)

    def restore(self, number: int) -> tuple[int, int]:
        """Restore that checkpoint, and compare every byte; return nanoseconds as save() does, of reading.

        Raises Corrupt if a byte differs from what was saved.
        """
        for tensor in self._tensors.values():
            tensor.zero_()
        path = self._plan.folder.path(number)
        with self._together() as alone:
            times = self._timed_restore(self._tensors, path, alone)
        for index, (name, tensor) in enumerate(self._tensors.items()):
            at = self._pattern.first_difference(_bytes(tensor), number, self._rank.number, index)
            if at is not None:
                raise Corrupt(errno.EBADMSG, f"{path}: byte {at} of {name} is not what was saved", str(path))
        return times

    def close(self) -> None:
        """Leave the process group. Idempotent."""
        import torch.distributed as dist

        self._tensors.clear()
        if self._rank.count > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def _together(self) -> Iterator[bool]:
        """Begin when all ranks do, and raise the error of this rank; yield whether it is the only one."""
        import torch.distributed as dist

        with _own_errors(self._rank):
            if self._rank.count > 1:
                dist.barrier()
            yield self._rank.count == 1


@dataclass(frozen=True)
class CheckpointJob:
    """What every rank of a workload of checkpoints does: first all saves, then all restores."""

    plan: CheckpointPlan
    saves: tuple[int, ...]  # their numbers
    restores: tuple[int, ...]
    pause_seconds: float

    end_seconds = 1.0  # for ranks to end when the run ends early: they may wait for each other

    def run(self, rank: Rank, report: Report) -> dict[str, Any]:
        """Run it on one rank; `report` gets the number of what is done, and may raise. Return its times."""
        state = RankState(self.plan, rank)
        try:
            counts: dict[str, Any] = {"bytes": state.nbytes, "saves": [], "restores": []}
            for kind, numbers, action in (
                ("saves", self.saves, state.save),
                ("restores", self.restores, state.restore),
            ):
                for number in numbers:
                    done = len(counts["saves"]) + len(counts["restores"])
                    _pause(self.pause_seconds, lambda done=done: report(done))  # type: ignore[misc]
                    counts[kind].append((number, *action(number)))
            report(len(self.saves) + len(self.restores))
            return counts
        finally:
            state.close()


def _pause(seconds: float, report: Callable[[], object]) -> None:
    end = time.monotonic() + seconds
    report()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _SLEEP_SECONDS))
        report()


def _meet(url: str, rank: Rank) -> None:
    import torch.distributed as dist

    if url.startswith("file:"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    dist.init_process_group(
        "gloo",
        init_method=url,
        rank=rank.number,
        world_size=rank.count,
        timeout=_MEETING_TIMEOUT,  # the process that started the ranks sees when one ends
    )


def _bytes(tensor: "torch.Tensor") -> "NDArray[numpy.uint8]":
    import torch

    return tensor.view(torch.uint8).numpy()


def _torch_dtypes() -> dict[str, Any]:
    import torch

    return {
        "int8": torch.int8,
        "uint8": torch.uint8,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }


@contextlib.contextmanager
def _own_errors(rank: Rank) -> Iterator[None]:
    """Raise the error of this rank out of those that torch collects; Cancelled if others failed alone."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        own = error.failures.get(rank.number)
        if own is None:
            raise Cancelled(errno.ECANCELED, "another rank failed") from error
        raise own[0] from None
    except RuntimeError as error:
        if rank.count == 1:
            raise
        # Of the network between the ranks: one of them has ended.
        raise Cancelled(errno.ECANCELED, f"the other ranks do not answer: {error}") from error
