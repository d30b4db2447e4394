"""Ranks that meet by reductions: threads as ranks, over a stand-in for the communicator of MPI."""

import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from trunkline import Cancelled
from trunkline.workload._data_files import PARTS
from trunkline.workload._parse import parse_text
from trunkline.workload._phase import Rank
from trunkline.workload._ranks import run_ranks
from trunkline.workload._step_reduction import StepReduction
from trunkline.workload._training import Job

RANKS = 3


class Communicator:
    """Completes a reduction once all ranks have begun it."""

    def __init__(self, ranks: int = RANKS) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._values: list[list[int]] = []
        self._begun = [0] * ranks

    def of(self, rank: int) -> StepReduction:
        return StepReduction(lambda own, largest: self._begin(rank, own, largest))

    def all_complete(self) -> bool:
        return all(len(values) == self._ranks for values in self._values)

    def _begin(self, rank: int, own: "array[int]", largest: "array[int]") -> "_Request":
        with self._lock:
            number = self._begun[rank]
            self._begun[rank] += 1
            if number == len(self._values):
                self._values.append([])
            self._values[number].append(own[0])
            return _Request(self._values[number], self._ranks, largest)


class _Request:
    def __init__(self, values: list[int], ranks: int, largest: "array[int]") -> None:
        self._values = values
        self._ranks = ranks
        self._largest = largest

    def Test(self) -> bool:  # noqa: N802
        if len(self._values) < self._ranks:
            return False
        self._largest[0] = max(self._values)
        return True


def on_all(run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def met(reduction: StepReduction) -> int:
    while (value := reduction.poll()) is None:
        pass
    return value


def test_all_get_the_largest_value() -> None:
    communicator = Communicator()

    def run(rank: int) -> list[int]:
        reduction = communicator.of(rank)
        largest = []
        for step in range(20):
            reduction.begin((step * 7 + rank * 5) % 11)
            largest.append(met(reduction))
        assert reduction.finish(failed=False)
        return largest

    expected = [max((step * 7 + rank * 5) % 11 for rank in range(RANKS)) for step in range(20)]
    assert on_all(run) == [expected] * RANKS
    assert communicator.all_complete()


@pytest.mark.parametrize("in_step", [False, True], ids=["before a step", "within a step"])
@pytest.mark.parametrize("failing_step", [2, 4])
def test_a_rank_that_fails_ends_all_others(failing_step: int, in_step: bool) -> None:
    communicator, steps = Communicator(), 5

    def run(rank: int) -> bool:
        reduction = communicator.of(rank)
        failed = False
        try:
            for step in range(steps):
                if rank == 1 and step == failing_step:
                    if in_step:
                        reduction.begin(0)
                    failed = True
                    break
                reduction.begin(0)
                met(reduction)
        except Cancelled:
            failed = True
        assert reduction.finish(failed, None)
        return failed

    # After the last step nothing is left that others could be kept from.
    others = not (in_step and failing_step == steps - 1)
    assert on_all(run) == [others, True, others]
    assert communicator.all_complete()


def test_waiting_for_others_ends_in_time() -> None:
    reduction = Communicator().of(0)
    reduction.begin(0)
    assert not reduction.finish(failed=True, seconds=0.01)
    assert not Communicator().of(1).finish(failed=True, seconds=0.01)


def training() -> Job:
    spec = parse_text(
        '{"dataset": {"format": "jpeg", "num_files_train": 600, "num_files_eval": 60, '
        '"record_length_bytes": 10}, "reader": {"batch_size": 2, "batch_size_eval": 2}, '
        '"train": {"computation_time": 0.0001, "epochs": 2}, "evaluation": {"eval_time": 0.0001}, '
        '"workflow": {"evaluation": true}}',
        "tiny.yaml",
    )
    return Job(spec, None)


def test_a_training_counts_as_with_processes_of_one_machine() -> None:
    communicator, job = Communicator(), training()

    def run(rank: int) -> dict[str, Any]:
        reduction = communicator.of(rank)
        counts = job.run(Rank(rank, RANKS, dict.fromkeys(PARTS, reduction)), lambda *_: None)
        assert reduction.finish(failed=False)
        return counts

    ranks, expected = on_all(run), run_ranks(job, RANKS)
    assert communicator.all_complete()
    for own, other in zip(ranks, expected, strict=True):
        for phase in ("train", "evaluation"):
            same = ("steps", "samples", "bytes", "busy_ns", "first_busy_ns")
            assert [own[phase][key] for key in same] == [other[phase][key] for key in same]
            assert own[phase].keys() == other[phase].keys()
    # All lose the same time after the first step of a phase, whose beginning each sees by itself.
    waits = [each["train"]["running_ns"] - each["train"]["first_running_ns"] for each in ranks]
    assert min(waits) > 0


@pytest.mark.parametrize("method", ["begin", "poll"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("MPI_ERR_COMM")], ids=type)
def test_exceptions_of_a_reduction_end_the_loop(method: str, error: BaseException) -> None:
    class Failing:
        def begin(self, value: int) -> None:
            if method == "begin":
                raise error

        def poll(self) -> int | None:
            raise error

    barriers: Any = dict.fromkeys(PARTS, Failing())
    with pytest.raises(type(error)) as raised:
        training().run(Rank(0, RANKS, barriers), lambda *_: None)
    assert raised.value is error
