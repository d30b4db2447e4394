"""What a run of tests or checks came to: counts, reasons, and the closing lines of scripts/run_tests.py and
lint.py.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """One stage's tests. `failures` are names or messages; `skips` are (test, reason)."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skips: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return len(self.failures)

    @property
    def skipped(self) -> int:
        return len(self.skips)

    @property
    def total(self) -> int:
        return self.passed + self.failed + self.skipped

    def fail(self, what: str) -> None:
        self.failures.append(what)

    def skip(self, test: str, reason: str) -> None:
        self.skips.append((test, reason))


def write_results(path: Path, outcomes: dict[str, Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1) + "\n"
    )


def read_results(path: Path) -> dict[str, Outcome]:
    return {name: Outcome(**fields) for name, fields in json.loads(path.read_text()).items()}


def closing_line(outcomes: dict[str, Outcome]) -> str:
    values = outcomes.values()
    passed, failed, skipped = (
        sum(getattr(o, what) for o in values) for what in ("passed", "failed", "skipped")
    )
    return f"{passed} passed, {failed} failed, {skipped} skipped"


def report(outcomes: dict[str, Outcome]) -> int:
    """Prints the table, the skips, the failures and the closing line. Returns the exit status."""
    print(f"\n{'stage':<14}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>10}")
    for name, outcome in outcomes.items():
        counts = f"{outcome.passed:>8}{outcome.failed:>8}{outcome.skipped:>9}"
        print(f"{name:<14}{counts}{outcome.seconds:>10.1f}")
    reasons = Counter((name, reason) for name, outcome in outcomes.items() for _, reason in outcome.skips)
    if reasons:
        print("\nskipped:")
        for (name, reason), count in reasons.items():
            print(f"  {name}: {count} x {reason}")
    failures = [(name, what) for name, outcome in outcomes.items() for what in outcome.failures]
    if failures:
        print("\nfailed:")
        for name, what in failures:
            print(f"  {name}: {what}")
    print(f"\n{closing_line(outcomes)}", flush=True)
    return 1 if failures or not any(outcome.passed for outcome in outcomes.values()) else 0
