"""Generation with weights that do not fit into memory, beside the roofline, accelerate's disk offload, and
DeepSpeed's ZeRO-Inference where it is installed.

The roofline of a step of decoding: the weights that the memory budget has no room for, by what the disks
allow. Each run is a process of its own, in a memory control group that is too small for the page cache to
hold the weights; its time is the median step after the first two tokens. Everybody's tokens are compared
with those of the model in memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from measurement import Comparison, interleave
from paced_disks import PacedDisks
from page_cache import make_cold
from workbench import Disks, Workbench

SCRIPT = Path(__file__).resolve().parent / "generate.py"
SHAPE = {  # Llama's, 2.5 GB in bf16
    "vocab_size": 8000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 28,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SPARE = 300_000_000  # of the disks, beside what they must hold
GROUP_SPARE = 900_000_000  # beside the weights in memory: interpreter, torch, activations, some page cache
BATCH = 4
LARGE_BATCHES = 32, 128, 512
COMPUTE_BOUND = 2  # computing takes so many times as long as reading
TOKENS = 6
LEAST = 0.1  # share of the weights that fits into memory
MOST_CPU = 0.08  # s/GB
GROUPS = Path("/sys/fs/cgroup")
# OpenMP's threads spin while they wait for work, and would count as what the storage costs.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
LEAST_WAY, HALF_WAY, SINGLE_WAY = "least memory", "half of the weights", "least memory, batch 1"
SLOWER = 2  # times as slow as the limit: several disks that leave time for computing batches
ACCELERATE, DEEPSPEED = "accelerate", "DeepSpeed"

Job = dict[str, Any]
Run = dict[str, Any]


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        section = _Section(bench, Path(folder))
        rows = [
            row for part in (section.one_disk, section.several_disks, section.unthrottled) for row in part()
        ]
    return sorted(rows, key=lambda row: [*dict.fromkeys(each.section for each in rows)].index(row.section))


class _Section:
    def __init__(self, bench: Workbench, folder: Path) -> None:
        self._bench = bench
        self._model = _make_model(folder / "model", SHAPE)
        self._tiny = _make_model(folder / "tiny", TINY)
        self._weights = sum(path.stat().st_size for path in self._model.glob("*.safetensors"))
        self._least = int(self._weights * LEAST)
        self._expected: dict[tuple[int, int], Run] = {}  # of the model in memory, by batch and prompt
        self._one_disk_single: list[float] = []  # steps

    def one_disk(self) -> list[Comparison]:
        with self._disks(1, packs=True, copies=2) as disks:
            ours = self._ours(disks.directories)
            ways = {
                LEAST_WAY: self._job(ours, self._least),
                HALF_WAY: self._job(ours, self._weights // 2),
                SINGLE_WAY: self._job(ours, self._least, batch=1) | {"environment": PASSIVE},
                **self._peers(disks.directories[0], BATCH),
            }
            runs = self._measure("one disk", disks, ways)
        self._one_disk_single = _steps(runs[SINGLE_WAY])
        rows = [
            self._beside_roofline("one disk, least memory", runs[LEAST_WAY], 1, BATCH, self._least, 0.97),
            self._beside_roofline(
                "one disk, half of the weights", runs[HALF_WAY], 1, BATCH, self._weights // 2, 0.95
            ),
            *self._beside_peers("one disk, least memory", runs, LEAST_WAY, BATCH),
        ]
        return [*rows, *self._costs(runs)]

    def several_disks(self) -> list[Comparison]:
        count = len(self._bench.disks.directories)
        if count < 2:
            return []
        place = f"{count} disks"
        with self._disks(count, packs=True) as disks, self._disks(count, copies=2, raid0=True) as striped:
            ours = self._ours(disks.directories)
            ways = {
                LEAST_WAY: self._job(ours, self._least),
                SINGLE_WAY: self._job(ours, self._least, batch=1),
                **self._peers(striped.directories[0], 1),
            }
            runs = self._measure(place, disks, ways, striped)
            slower = {}
            if self._bench.limit_mb_s:
                slower = self._measure(
                    f"{place} of half the speed", disks, {LEAST_WAY: ways[LEAST_WAY]}, slower=SLOWER
                )
        single = f"{place}, least memory, batch 1"
        return [
            self._beside_roofline(single, runs[SINGLE_WAY], count, 1, self._least, 0.93),
            Comparison(
                *("streaming", single, "tokens/s", "one disk"),
                _rates(_steps(runs[SINGLE_WAY]), 1),
                _rates(self._one_disk_single, 1),
                at_least=0.925 * count,
            ),
            *self._beside_peers(single, runs, SINGLE_WAY, 1, ", btrfs RAID-0"),
            self._beside_roofline(f"{place}, least memory", runs[LEAST_WAY], count, BATCH, self._least, 0.93),
            *(
                self._beside_roofline(
                    f"{place} of half the speed, {name}", each, count / SLOWER, BATCH, self._least, 0.93
                )
                for name, each in slower.items()
            ),
        ]

    def unthrottled(self) -> list[Comparison]:
        """Beside the model in memory, up to the first batch that takes much longer to compute than to read.

        Less would not do: the processors that compute are also those that the "disk" copies with.
        """
        rows = []
        for batch in LARGE_BATCHES:
            with self._disks(1, packs=True) as disks, self._bench.without_limit():
                disks.limit(0)
                # A prompt of one token: so many longer ones would take this section's time.
                job = self._job(self._ours(disks.directories), self._least, batch=batch) | {"prompt": 1}
                ways = {"ours": job, "in memory": {**job, "way": "resident", "group": False}}
                runs = self._measure(f"no limit, batch {batch}", disks, ways)
            read = median(
                run["stats"]["streamed_bytes"] / (run["stats"]["storage_gb_s"] * 1e9) for run in runs["ours"]
            )
            is_bound = median(_steps(runs["in memory"])) > COMPUTE_BOUND * read
            rows.append(
                Comparison(
                    *("streaming", f"no limit, least memory, batch {batch}", "tokens/s", "all in memory"),
                    _rates(_steps(runs["ours"]), batch),
                    _rates(_steps(runs["in memory"]), batch),
                    at_least=0.85 if is_bound else None,
                )
            )
            if is_bound:
                break
        return rows

    def _costs(self, runs: dict[str, list[Run]]) -> list[Comparison]:
        rounds, limit = self._bench.rounds, self._bench.limit_mb_s * 1e6
        streamed = runs[SINGLE_WAY][0]["stats"]["streamed_bytes"]
        resident = [
            median(run(self._resident(1) | {"environment": PASSIVE})["cpu"][1:]) for _ in range(rounds)
        ]
        cpu = [median(run["cpu"][1:]) for run in runs[SINGLE_WAY]]
        base = run(self._resident(BATCH) | {"model": str(self._tiny)})["peak"]
        rows = [
            Comparison(
                *(
                    "streaming: processor time beside computing",
                    "one disk, batch 1",
                    "CPU s/GB",
                    "no streaming",
                ),
                [used / streamed * 1e9 for used in cpu],
                [used / streamed * 1e9 for used in resident],
                compared="difference",
                at_most=MOST_CPU,
            ),
            *(
                Comparison(
                    *(
                        "streaming: memory beside that of a tiny model",
                        f"one disk, {name}",
                        "GB",
                        "the budget",
                    ),
                    [(run["peak"] - base) / 1e9 for run in runs[name]],
                    [budget / 1e9] * rounds,
                    compared="difference",
                    at_most=0.1,
                )
                for name, budget in ((LEAST_WAY, self._least), (HALF_WAY, self._weights // 2))
            ),
        ]
        if limit:
            start = Comparison(
                *("streaming: start to first token", "one disk, batch 1", "s", "reading all weights once"),
                [run["load"] + run["first"] for run in runs[SINGLE_WAY]],
                [self._weights / limit] * rounds,
                at_most=1.25,
            )
            rows.insert(0, start)
        return rows

    def _beside_roofline(
        self, case: str, runs: list[Run], count: float, batch: int, budget: int, goal: float
    ) -> Comparison:
        """Where no limit is known, the model in memory is the roofline."""
        limit = self._bench.limit_mb_s * 1e6 * count
        if not limit:
            resident = _steps([self._in_memory(batch, runs[0]["prompt"])]) * len(runs)
            peers = "all in memory", _rates(resident, batch)
        else:
            peers = "the roofline", [batch * limit / (self._weights - budget)] * len(runs)
        ours = _rates(_steps(runs), batch)
        return Comparison(
            "streaming", case, "tokens/s", peers[0], ours, peers[1], at_least=goal if limit else None
        )

    def _beside_peers(
        self, case: str, runs: dict[str, list[Run]], name: str, batch: int, where: str = ""
    ) -> list[Comparison]:
        ours = _rates(_steps(runs[name]), batch)
        rows = []
        for peer in (ACCELERATE, DEEPSPEED):
            theirs = _rates(_steps(runs[peer]), batch) if peer in runs else []
            rows.append(
                Comparison(
                    *("streaming", case, "tokens/s", peer + where, ours, theirs),
                    why_not="" if theirs else "it is not installed",
                )
            )
        return rows

    # Jobs for generate.py.

    def _resident(self, batch: int) -> Job:
        return {"way": "resident", "model": str(self._model), "batch": batch, "prompt": 4, "tokens": TOKENS}

    def _ours(self, directories: list[Path]) -> Job:
        return {"way": "trunkline", "volumes": list(map(str, directories))}

    def _job(self, way: Job, budget: int, batch: int = BATCH) -> Job:
        return self._resident(batch) | way | {"budget": budget}

    def _peers(self, directory: Path, batch: int) -> dict[str, Job]:
        """Those that are installed, with a copy of the model's files on the disk."""
        shutil.copytree(self._model, directory / "model", dirs_exist_ok=True)
        job = self._resident(batch) | {"model": str(directory / "model"), "budget": self._least}
        names = {ACCELERATE: "accelerate", DEEPSPEED: "deepspeed"}
        return {
            # DeepSpeed needs more memory while it starts; it reads past the page cache.
            name: {**job, "way": way, "offload": str(directory / way), "group": name != DEEPSPEED}
            for name, way in names.items()
            if importlib.util.find_spec(way) is not None
        }

    # Runs.

    def _measure(
        self, label: str, disks: Disks, ways: dict[str, Job], *more: Disks, slower: int = 1
    ) -> dict[str, list[Run]]:
        results: dict[str, list[Run]] = {name: [] for name in ways}
        for each in (disks, *more):
            each.limit(0)
        for job in ways.values():
            if job["way"] == "trunkline":  # makes the pack, or finds it
                run({**job, "tokens": 1})
        for each in (disks, *more):
            each.limit(self._bench.limit_mb_s // slower)

        def way(name: str) -> Callable[[], float]:
            def once() -> float:
                disks.rest()
                make_cold([Path(ways[name]["model"])])
                result = run(ways[name]) | {"prompt": ways[name]["prompt"]}
                expected = self._in_memory(ways[name]["batch"], ways[name]["prompt"])
                if result["tokens"] != expected["tokens"]:
                    raise SystemExit(
                        f"bench: {label}, {name}: other tokens than those of the model in memory"
                    )
                results[name].append(result)
                seconds: float = median(result["steps"])
                return seconds

            return once

        interleave(
            self._bench.rounds, {name: way(name) for name in ways}, f"streaming, {label}", warm_up=False
        )
        return results

    def _in_memory(self, batch: int, prompt: int) -> Run:
        if (batch, prompt) not in self._expected:
            self._expected[batch, prompt] = run(self._resident(batch) | {"prompt": prompt})
        return self._expected[batch, prompt]

    @contextmanager
    def _disks(
        self, count: int, *, packs: bool = False, copies: int = 0, raid0: bool = False
    ) -> Iterator[Disks]:
        """New disks, without a limit so far, or the directories that the benchmark was given."""
        if not self._bench.limit_mb_s:
            yield self._bench.disks
            return
        share = self._weights * (copies + packs) // count + SPARE
        with PacedDisks([share] * count, limit_mb_s=0, raid0=raid0) as disks:
            yield disks


def run(job: Job) -> Run:
    """What a process of generate.py prints; in a memory control group if the job says so."""
    environment = {**os.environ, **job.get("environment", {})}
    is_limited = job.get("group", "budget" in job)
    limit = job.get("budget", 0) + job.get("spare", GROUP_SPARE) if is_limited else None
    with _memory_group(limit) as group:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), json.dumps({**job, "group": group})],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
    if done.returncode != 0:
        raise SystemExit(f"bench: generating failed ({done.returncode}): {job}\n{done.stderr[-2000:]}")
    result: Run = json.loads(done.stdout.splitlines()[-1])
    return result


def _make_model(folder: Path, shape: dict[str, int]) -> Path:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@contextmanager
def _memory_group(limit_bytes: int | None) -> Iterator[str | None]:
    """A memory control group; None where none is wanted, or none can be had and the page cache takes part."""
    version_1 = GROUPS / "memory"
    path = (version_1 if version_1.is_dir() else GROUPS) / f"trunkline-bench-{os.getpid()}"
    limit = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
    if limit_bytes is None:
        yield None
        return
    try:
        path.mkdir()
        (path / limit).write_text(str(limit_bytes))
    except OSError:
        yield None
        return
    try:
        yield str(path)
    finally:
        path.rmdir()


def _steps(runs: list[Run]) -> list[float]:
    return [median(run["steps"][1:]) for run in runs]


def _rates(steps: list[float], batch: int) -> list[float]:
    return [batch / seconds for seconds in steps]
