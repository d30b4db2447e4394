"""The results of a run, as they come back from a user or a file."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_EXPECTED = "give the output of `trunkline workload run --json`"


def read_results(path: str) -> dict[str, Any]:
    """Return the document of a run in a file. Raises ValueError with the path if it is not one."""
    try:
        document = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {_EXPECTED}") from error
    check_results(path, document)
    return dict(document)


def check_results(name: str, results: object) -> None:
    """Raise ValueError, with `name` for the results, if they are not those of a run."""
    command = results.get("command", "workload run") if isinstance(results, Mapping) else None
    if command == "workload run" and isinstance(results, Mapping) and "error" in results:
        error = results["error"]
        why = error.get("message") if isinstance(error, Mapping) else None
        raise ValueError(f"{name} is of a run that failed ({str(why)[:200]}); run it again")
    if command != "workload run" or not isinstance(results, Mapping):
        raise ValueError(f"{name} is not the result of a run; {_EXPECTED}")
    if results.get("schema", 1) != 1:
        raise ValueError(f"{name}: schema {results['schema']} is not supported; upgrade trunkline")
    for key, kind in (("workload", str), ("ranks", int)):
        if not isinstance(results.get(key), kind):
            raise ValueError(f"{name} is not the result of a run: it has no {key}; {_EXPECTED}")


def number_in(name: str, results: Mapping[str, Any], figure: str) -> float | None:
    """Return a figure such as "wait_seconds.p99", None without it; raise ValueError if it is not a number."""
    value: Any = results
    for key in figure.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return None
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{name}: {figure} is {str(value)[:40]}, not a number; {_EXPECTED}")


def run_text(results: Mapping[str, Any]) -> str:
    """Return what was run, for people: images, 2 accelerators, on /mnt/a."""
    accelerators = f"{results['ranks']} accelerator{'s' if results['ranks'] != 1 else ''}"
    directories = results.get("directories")
    where = ", ".join(map(str, directories)) if isinstance(directories, list) else "the null device"
    if results.get("device_gb_s") is not None:
        where = f"an imagined device of {results['device_gb_s']} GB/s"
    return f"{results['workload']}, {accelerators}, on {where}"
