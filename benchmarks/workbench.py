"""What the sections of benchmarks/bench.py share: disks, data, checks, and one-call transfers with their
peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import fio_peer
import model_state
import torch
from measurement import spent

import trunkline as tl

MIB = 1 << 20
DEPTH = 32
Mode: TypeAlias = Literal["r", "r+", "w"]
Open: TypeAlias = Callable[[Mode], tl.File]  # opens the file under test


class Disks(Protocol):
    """Where a benchmark runs: disks with a known limit, or any directories."""

    @property
    def directories(self) -> list[Path]: ...

    def limit(self, mb_s: int) -> None: ...

    def rest(self) -> None: ...


@dataclass
class Workbench:
    """Disks, and memory of one size, made when a section first asks for it: random bytes that files hold and
    results are checked against, two targets, and a model's state.
    """

    disks: Disks
    limit_mb_s: int
    rounds: int
    fio_engine: str
    bytes: int

    @cached_property
    def source(self) -> torch.Tensor:
        """The expected bytes."""
        memory = tl.torch.empty_pinned((self.bytes,), torch.uint8)
        memory.view(torch.int64).random_(generator=torch.Generator().manual_seed(1))
        return memory

    @cached_property
    def pinned(self) -> torch.Tensor:
        """Page-aligned."""
        return tl.torch.empty_pinned((self.bytes,), torch.uint8)

    @cached_property
    def ordinary(self) -> torch.Tensor:
        """As torch allocates it: 64 bytes into a page."""
        return torch.zeros(self.bytes, dtype=torch.uint8)

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """The weights of a model, bf16, about as many bytes, as torch allocates them."""
        return model_state.make(self.bytes)

    def free_transfer_memory(self) -> None:
        """For sections that use the state alone."""
        for name in ("source", "pinned", "ordinary"):
            self.__dict__.pop(name, None)

    def peers_of(
        self, count: int, fio: list[float], goal: float
    ) -> list[tuple[str, list[float], float | None]]:
        """What several disks are compared with: name, GB/s by round, and which of them the goal is for.

        That is their limit where it is known: fio's files, a `count`th as large, get more than that out of
        the 0.1 s that the throttle grants in advance.
        """
        peer = f"fio on {count} files"
        if not self.limit_mb_s:
            return [(peer, fio, goal)]
        limit = [self.limit_mb_s * count / 1e3] * self.rounds
        return [(peer, fio, None), ("the limit", limit, goal)]

    @property
    def first(self) -> Path:
        return self.disks.directories[0]

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """For what is not measured, filling files and checking them; and for what is measured without."""
        limit, self.limit_mb_s = self.limit_mb_s, 0
        self.disks.limit(0)
        try:
            yield
        finally:
            self.limit_mb_s = limit
            self.disks.limit(limit)

    def fill(self, open_file: Open) -> None:
        with self.without_limit(), open_file("w") as file:
            file.pwrite(self.source)
            file.sync()

    def check(self, got: torch.Tensor, what: str) -> None:
        if not torch.equal(got, self.source):
            raise SystemExit(f"bench: {what} differs from what was written")

    def read(self, open_file: Open, target: torch.Tensor, passes: int = 1) -> tuple[float, float]:
        """GB/s and CPU s/GB of one blocking read a pass into all of `target`; checked."""
        target.zero_()
        self.disks.rest()
        with spent() as time, open_file("r") as file:
            for _ in range(passes):
                file.pread(target)
        self.check(target, "what was read")
        return rates(self.bytes * passes, time.seconds, time.cpu_seconds)

    def write(
        self, open_file: Open, data: torch.Tensor, mode: Mode = "w", passes: int = 1
    ) -> tuple[float, float]:
        """GB/s and CPU s/GB of one blocking write a pass of all of `data`, and the final sync; checked."""
        data.copy_(self.source)
        self.disks.rest()
        with spent() as time, open_file(mode) as file:
            for _ in range(passes):
                file.pwrite(data)
            file.sync()
        data.zero_()
        with self.without_limit(), open_file("r") as file:
            file.pread(data)
        self.check(data, "what was written")
        return rates(self.bytes * passes, time.seconds, time.cpu_seconds)

    def transfer(
        self, rw: str, open_file: Open, memory: torch.Tensor, passes: int = 1
    ) -> tuple[float, float]:
        """read() or write() of kind `rw`, as fio() names them: "read", "write" (a new file), "overwrite"."""
        if rw == "read":
            return self.read(open_file, memory, passes)
        return self.write(open_file, memory, "r+" if rw == "overwrite" else "w", passes)

    def fio(self, files: list[Path], rw: str, **options: str | int) -> tuple[float, float]:
        """The same of fio over `files`, which hold as many bytes together; "write" makes them anew."""
        each = self.bytes // len(files)
        if rw == "write":
            for path in files:
                path.unlink(missing_ok=True)
        elif any(not path.exists() or path.stat().st_size < each for path in files):
            with self.without_limit():
                self.fio(files, "write")
        settings: dict[str, str | int] = {"engine": self.fio_engine, "depth": DEPTH}
        settings |= options
        self.disks.rest()
        run = fio_peer.run(
            *(files, "write" if rw == "overwrite" else rw),
            block_bytes=MIB,
            depth=int(settings.pop("depth")),
            engine=str(settings.pop("engine")),
            **({"file_bytes": each} | settings),  # type: ignore[arg-type]
        )
        return rates(run.bytes, run.seconds, run.cpu_seconds)


def rates(nbytes: int, seconds: float, cpu_seconds: float) -> tuple[float, float]:
    """GB/s, and seconds of processor time per GB."""
    return nbytes / seconds / 1e9, cpu_seconds / nbytes * 1e9
