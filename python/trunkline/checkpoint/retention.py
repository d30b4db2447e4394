"""Which checkpoints a Checkpointer keeps, and the measurements that this depends on."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, cast

from trunkline._arguments import count_argument, keep_argument

Order: TypeAlias = Literal["min", "max"]
KeepBest: TypeAlias = tuple[str, Order, int]
Metrics: TypeAlias = Mapping[str, SupportsFloat]
Key = TypeVar("Key")  # of a checkpoint: its step, or its id

# The feature that a reader must support for a manifest with metrics (docs/formats/checkpoint.md).
METRICS = "metrics"

# What JSON has no numbers for, as manifests have it.
_NO_NUMBERS = {math.inf: "Infinity", -math.inf: "-Infinity"}
_BEST = 'keep_best: must be (metric, "min" or "max", how many), such as ("loss", "min", 3)'


class Rules(NamedTuple):
    """The rules that each keep some checkpoints; a checkpoint that none of them keeps is removed."""

    keep: int | None  # the last ones; None: all
    every: int | None  # those whose step is a multiple of it
    best: KeepBest | None

    @classmethod
    def of(cls, keep: SupportsIndex | None, every: SupportsIndex | None, best: Any) -> "Rules":
        """Check the arguments keep, keep_every and keep_best. Raises TypeError and ValueError."""
        rules = cls(
            keep_argument(keep),
            None if every is None else count_argument(every, "keep_every"),
            None if best is None else _best_argument(best),
        )
        for name, value in (("keep_every", every), ("keep_best", best)):
            if rules.keep is None and value is not None:
                raise ValueError(
                    f"{name}: has no effect with keep=None, which keeps all checkpoints; pass keep=1 to keep "
                    "only the last one beside those"
                )
        return rules

    def __str__(self) -> str:
        more = [f", keep_every={self.every}"] if self.every is not None else []
        more += [f", keep_best={self.best}"] if self.best is not None else []
        return f"keep={self.keep}{''.join(more)}"

    def room(self) -> str:
        """Return how much room they need, for an error about a full disk; empty if that is unlimited."""
        if self.keep is None:
            return ""
        more = [
            name for name, rule in (("keep_every", self.every), ("keep_best", self.best)) if rule is not None
        ]
        beside = (
            f", beside those that {' and '.join(more)} keep{'s' if len(more) == 1 else ''}" if more else ""
        )
        return f"keep={self.keep} needs room for {self.keep + 1}{beside}"

    def best_of(self, measured: "Sequence[tuple[Key, Mapping[str, float]]]") -> "Key | None":
        """Return the best of checkpoints in the order of their commits, given their metrics; None: none."""
        return next(iter(self.ranking_of(measured)), None)

    def ranking_of(self, measured: "Sequence[tuple[Key, Mapping[str, float]]]") -> "list[Key]":
        """Return those that have a value of the metric, the best first; of equal ones the first is better."""
        assert self.best is not None
        metric, order, _ = self.best
        sign = 1 if order == "min" else -1
        values = [(sign * of.get(metric, math.nan), key) for key, of in measured]
        numbers = [each for each in values if not math.isnan(each[0])]
        return [key for _, key in sorted(numbers, key=lambda each: each[0])]


def _best_argument(best: Any) -> KeepBest:
    if not isinstance(best, tuple | list):
        raise TypeError(f"{_BEST}, not {type(best).__name__}")
    if len(best) == 2 and isinstance(best[0], str):
        raise ValueError(f'{_BEST}; {tuple(best)!r} does not say whether "min" or "max" is best')
    if len(best) != 3 or not isinstance(best[0], str) or not best[0] or best[1] not in ("min", "max"):
        raise ValueError(f"{_BEST}, not {tuple(best)!r}")
    return best[0], cast("Order", best[1]), count_argument(best[2], "keep_best: how many")


def metrics_argument(metrics: Metrics | None, rules: Rules) -> dict[str, float]:
    """Return metrics as floats; raises TypeError and ValueError."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics: must be a dict of numbers by name, not {type(metrics).__name__}")
    result: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"metrics: its keys must be names, not {name!r}")
        if isinstance(value, str | bytes | bytearray | complex):  # float() would parse the former
            raise TypeError(f"metrics: {name!r} must be a number, not {value!r}")
        try:
            result[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(
                f"metrics: {name!r} must be a number, not {type(value).__name__}: {error}"
            ) from None
    if rules.best is not None and rules.best[0] not in result:
        raise ValueError(
            f"metrics: has no {rules.best[0]!r}, by which keep_best={rules.best} chooses, only "
            f"{', '.join(map(repr, result)) or 'none'}; leave metrics out for a step that was not measured"
        )
    return result


def metrics_in_manifest(metrics: Mapping[str, float]) -> "dict[str, float | str]":
    """Return metrics as a manifest has them."""
    return {
        name: "NaN" if math.isnan(value) else _NO_NUMBERS.get(value, value) for name, value in metrics.items()
    }
