"""The metrics of a Trainer's evaluations, by which keep_best of its Checkpointer chooses."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trunkline.checkpoint.retention import Rules


class Measurements:
    """The metrics of the last evaluation, for a checkpoint of the same step."""

    def __init__(self, rules: Rules) -> None:
        """`rules`: those of the Checkpointer; without keep_best no metrics are recorded."""
        self._rules = rules
        self._step: int | None = None
        self._metrics: dict[str, float] = {}

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of an evaluation at `step`; all ranks call it.

        Raises ValueError if they lack the metric of keep_best, so that no checkpoint is removed for that.
        """
        best = self._rules.best
        if best is None:
            return
        numbers = _of_first_rank(_numbers(metrics))
        if best[0] not in numbers:
            raise ValueError(
                f"keep_best: {best[0]!r} is not among the metrics of the evaluation, only "
                f"{', '.join(map(repr, numbers)) or 'none'}; name one of these in keep_best of the "
                "Checkpointer (the Trainer's metrics begin with eval_)"
            )
        self._step, self._metrics = step, numbers

    def of(self, step: int) -> dict[str, float] | None:
        """Return the metrics for Checkpointer.save; None for a step that was not evaluated."""
        return self._metrics if step == self._step else None

    def forget(self) -> None:
        """Forget the evaluation, as another training begins."""
        self._step = None


def warn_without_evaluation(rules: Rules, strategy: str) -> None:
    """Warn of a keep_best that has no effect, since the Trainer does not evaluate."""
    if rules.best is not None and strategy == "no":
        warnings.warn(
            f"keep_best={rules.best} has no effect: the Trainer does not evaluate (eval_strategy='no'), so "
            "its checkpoints have no metrics; set eval_strategy, or remove keep_best from the Checkpointer",
            RuntimeWarning,
            stacklevel=3,
        )


def keeps_best_of(rules: Rules, metric: str) -> bool:
    """Whether keep_best is by this metric_for_best_model, which may lack its prefix eval_."""
    return rules.best is not None and rules.best[0] in (metric, f"eval_{metric}")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(value, str | bytes | bytearray):  # which float() would parse
            with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                found[name] = float(value)
    return found


def _of_first_rank(metrics: dict[str, float]) -> dict[str, float]:
    """Return the first rank's, on all ranks: times of evaluations differ, and metrics must be the same."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return metrics
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, metrics)
    first: dict[str, float] = every[0]
    return first
