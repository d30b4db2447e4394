"""What a plan of saves can find out itself: from a directory of checkpoints, or from measured saves."""

import datetime
import itertools
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trunkline._core import CheckpointStore
from trunkline._errors import errno_reason
from trunkline._formats.dcp_names import is_dcp_directory

_LAST = 10  # commits that are examined
_EXPECTED = "give the output of `trunkline workload run --json` of a workload that saves checkpoints"


class _Saved(NamedTuple):
    """A committed checkpoint."""

    commit: int
    step: int
    time: datetime.datetime


@dataclass(frozen=True)
class Found:
    """What a directory of checkpoints says of its run."""

    step: int
    nbytes: int
    """Size of its latest step."""
    cycle_seconds: float | None
    """Median time from one commit to the next; None if there are no two in a row."""
    step_seconds: float | None
    """The same, of one step of the training."""


class Measured(NamedTuple):
    """Measured saves: the mean time of one, its bytes, and how many there were."""

    seconds: float
    nbytes: int
    saves: int


def found_in(directory: str) -> Found:
    """Examine a directory of checkpoints. Raises FileNotFoundError, and Error if it cannot be read."""
    step, nbytes, saves = _of_dcp(directory) if is_dcp_directory(directory) else _of_store(directory)
    pairs = [(a, b) for a, b in itertools.pairwise(saves) if b.commit == a.commit + 1]
    # A pause of the run between two of them is in the mean, but hardly in the median.
    times = [(b.time - a.time).total_seconds() for a, b in pairs]
    steps = [time / (b.step - a.step) for time, (a, b) in zip(times, pairs, strict=True) if b.step > a.step]
    return Found(step, nbytes, _median(times), _median(steps))


def _median(values: list[float]) -> float | None:
    found = statistics.median(values) if values else 0.0
    return found if found > 0 else None  # times of commits are whole seconds


def _of_store(directory: str) -> tuple[int, int, list[_Saved]]:
    store = CheckpointStore(directory, create=False)
    _, latest, commits = store.position()
    if latest is None:
        raise ValueError(f"{directory} has no checkpoint yet; pass --bytes instead")
    last = sorted(commits, key=lambda each: each[1])[-_LAST:]
    manifests = [store.read_manifest(step) for step, _, _ in last]
    saves = [_Saved(each["commit"], each["step"], _time(each["time"])) for each in manifests]
    return latest, sum(shard["bytes"] for shard in manifests[-1]["shards"]), saves


def _of_dcp(directory: str) -> tuple[int, int, list[_Saved]]:
    from trunkline._checkpoint_tools.dcp_directory import list_checkpoints

    document = list_checkpoints(directory)
    listed = [each for each in document["checkpoints"] if "error" not in each and each["step"] is not None]
    listed.sort(key=lambda each: each["commit"])
    if not listed:
        raise ValueError(f"{directory} has no steps; pass --bytes instead")
    saves = [_Saved(each["commit"], each["step"], _time(each["time"])) for each in listed[-_LAST:]]
    return listed[-1]["step"], listed[-1]["bytes"], saves


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.timezone.utc)


def measured_in(path: str) -> Measured:
    """Return the measured saves in a file of results. Raises ValueError with the path if it has none."""
    try:
        document = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"--results: cannot read {path}: {errno_reason(error.errno or 0)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {_EXPECTED}") from error
    saves = document if isinstance(document, Mapping) else {}
    saves = _member(_member(saves, "checkpoints") or saves, "save")  # of a training, or of checkpoints alone
    seconds, nbytes, count = (_positive(saves.get(key)) for key in ("mean_seconds", "bytes", "count"))
    if seconds is None or nbytes is None or count is None:
        raise ValueError(f"{path} has no measured saves; {_EXPECTED}")
    return Measured(seconds, int(nbytes), int(count))


def _member(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key)
    return found if isinstance(found, Mapping) else {}


def _positive(value: Any) -> float | None:
    """Return a number above 0; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value < math.inf else None
