"""The error of workload files."""


class SpecError(ValueError):
    """A workload file is not valid. The message says in which line and key, and what to write."""

    def __init__(self, source: str, line: int | None, key: str, problem: str) -> None:
        """`key`: its path, as in "reader.batch_size"; empty for the whole file."""
        where = source if line is None else f"{source}:{line}"
        colon = "" if problem.startswith("is ") and (key or line is None) else ":"
        super().__init__(f"{where}: {key}{colon} {problem}" if key else f"{where}{colon} {problem}")
