"""Engines: what they are made of, what they say, when they end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trunkline as tl


def test_options_come_back(backend: str) -> None:
    with tl.Engine(
        backend,  # type: ignore[arg-type]
        lanes=2,
        queue_depth=7,
        block_bytes="128KiB",
        pinned_budget_bytes="64MB",
    ) as engine:
        assert engine.backend == backend
        assert engine.lanes == 2
        assert engine.queue_depth == 7
        assert engine.block_bytes == 128 << 10
        assert engine.pinned_budget_bytes == 64_000_000
        assert all(isinstance(feature, str) for feature in engine.features)
        assert backend in repr(engine)


@pytest.mark.parametrize(
    ("options", "exception", "argument"),
    [
        ({"backend": "floppy"}, ValueError, "backend"),
        ({"backend": None}, TypeError, "backend"),
        ({"lanes": 0}, ValueError, "lanes"),
        ({"lanes": "4"}, TypeError, "lanes"),
        ({"lanes": True}, TypeError, "lanes"),
        ({"lanes": 1 << 40}, ValueError, "lanes: must be from 1 to 64, not 1099511627776"),
        ({"lanes": -1}, ValueError, "lanes: must be from 1 to 64, not -1"),
        ({"queue_depth": 100_000}, ValueError, "queue_depth: must be from 1 to 4096, not 100000"),
        ({"queue_depth": np.int64(0)}, ValueError, "queue_depth: must be from 1 to 4096, not 0"),
        ({"block_bytes": "1 furlong"}, ValueError, "block_bytes"),
        ({"block_bytes": 5000}, ValueError, "block_bytes"),
        ({"block_bytes": 4096.0}, TypeError, "block_bytes"),
        ({"pinned_budget_bytes": []}, TypeError, 'a size such as "20GB"'),
        ({"pinned_budget_bytes": "20 gigs"}, ValueError, '"20 gigs" is not a size: .* such as 20GB or'),
        ({"pinned_budget_bytes": 1}, ValueError, "must be 0 or at least 4096, not 1"),
        ({"pinned_budget_bytes": "1000TB"}, ValueError, "1000 TB is more than the memory of this machine"),
        ({"faults": 3}, TypeError, "faults"),
    ],
)
def test_options_are_checked(options: dict[str, Any], exception: type[Exception], argument: str) -> None:
    with pytest.raises(exception, match=argument):
        tl.Engine(**options)


def test_explain(engine: tl.Engine, tmp_path: Path) -> None:
    explanation = engine.explain(tmp_path)
    assert explanation["backend"] == engine.backend
    assert isinstance(explanation["direct"], bool)
    assert explanation["why"]
    assert explanation["alignment"]["memory"] >= 1
    assert explanation["alignment"]["offset"] >= 1
    assert {"device", "filesystem", "mount"} <= set(explanation)
    assert all({"what", "why"} == set(refusal) for refusal in explanation["refused"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TypeError, match="^path: "):
        engine.explain(3)  # type: ignore[arg-type]


def test_stats(engine: tl.Engine, tmp_path: Path) -> None:
    data = np.ones(1_000_000, np.uint8)
    with tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(data)
        file.async_pread(data).result()
    stats = engine.stats()
    assert sum(stats["bytes"].values()) == 2_000_000  # type: ignore[arg-type]
    assert stats["operations"] == 2
    assert stats["transfers"] >= 2
    assert stats["errors"] == 0
    assert stats["read_latency"]["count"] >= 1
    assert 0 < stats["read_latency"]["p50_ns"] <= stats["read_latency"]["p99_ns"]
    assert stats["write_latency"]["mean_ns"] > 0
    assert stats["pinned_bytes"] <= stats["peak_pinned_bytes"]


def test_small_blocking_reads_stay_on_the_calling_thread(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    with tl.Engine() as engine, tl.open(path, engine=engine) as file:
        file.pread(bytearray(4096))
        assert engine.stats()["inline_operations"] == 1


def test_close(new_engine: Callable[..., tl.Engine], tmp_path: Path) -> None:
    engine = new_engine(block_bytes=4096)
    file = tl.open(tmp_path / "file", "w", engine=engine)
    pending = [file.async_pwrite(bytes(100_000), i * 100_000) for i in range(5)]
    engine.close()
    assert all(future.done() for future in pending)
    assert tl.wait_all(pending) == 500_000
    engine.close()
    with pytest.raises(tl.Error, match="closed"):
        file.pread(bytearray(5))
    with pytest.raises(tl.Error, match="closed"):
        tl.open(tmp_path / "file", engine=engine)


def test_dropped_engines_finish_their_work(new_engine: Callable[..., tl.Engine], tmp_path: Path) -> None:
    path = tmp_path / "file"
    engine: tl.Engine | None = new_engine(block_bytes=4096)
    assert engine is not None
    is_memory = engine.backend == "memory"
    file: tl.File | None = tl.open(path, "w", engine=engine)
    assert file is not None
    future = file.async_pwrite(b"x" * 500_000)
    engine = file = None
    assert future.result() == 500_000
    if not is_memory:
        assert path.read_bytes() == b"x" * 500_000


def test_default_engine(tmp_path: Path) -> None:
    engine = tl.default_engine()
    before = engine.stats()["operations"]
    with tl.open(tmp_path / "file", "w") as file:
        file.pwrite(b"abc")
    assert tl.default_engine().stats()["operations"] == before + 1


def test_environment_names_the_default_backend(run_script: Callable[..., str]) -> None:
    printed = run_script("""
        import os
        os.environ["TRUNKLINE_BACKEND"] = "threads"
        import trunkline as tl
        print(tl.default_engine().backend)
    """)
    assert printed == "threads\n"
