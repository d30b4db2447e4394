#!/usr/bin/env python3
"""Speed and cost of the engine, of checkpoints and of streamed weights, each number beside its peer in the
same run, medians. What moved is checked: all of it where files move as a whole, the last batches of random
reads, the last of the small reads, every token that is generated.

    make bench                                          on disks with a known limit (root)
    make bench ARGS="--dir /mnt/nvme0 /mnt/nvme1"       on the disks of these directories
    make bench ARGS="--only cpu,latency --rounds 9 --json"

Sections: sequential, cpu, unthrottled, random, latency (the engine); samples (training data); saving,
loading, memory, filling, overlap, nodes, tiers (checkpoints); streaming, experts, quantised (models larger
than memory); serving (SGLang); many (a million tensors); workloads (emulated training jobs). The head of
each file says what it measures.
The numbers are also written to build/bench/bench.json. Those of a run of all sections are kept in
benchmarks/results, from which make_tables.py makes the tables of docs/performance.md; `--keep FILE` puts
those of some sections in the place of what FILE has of them. compare.py says what became slower.
Memory needed: seven times --size, and for disks with a known limit room for nine times --size in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cpu_cost
import expert_models
import filling
import fio_peer
import kept_results
import larger_models
import latency
import loading
import many_tensors
import new_memory
import nodes
import overlap
import quantised_experts
import random_reads
import samples
import saving
import sequential
import serving
import tiers
import unthrottled
import workloads
from guest_memory import free_memory_kept
from measurement import Comparison, Results, progress
from paced_disks import PacedDisks, PacedDisksError
from workbench import MIB, Disks, Workbench

ROOT = Path(__file__).resolve().parent.parent
SECTIONS: dict[str, Callable[[Workbench], list[Comparison]]] = {
    "sequential": sequential.measure,
    "cpu": cpu_cost.measure,
    "unthrottled": unthrottled.measure,
    "random": random_reads.measure,
    "samples": samples.measure,
    "latency": latency.measure,
    "saving": saving.measure,
    "loading": loading.measure,
    "memory": new_memory.measure,
    "filling": filling.measure,
    "overlap": overlap.measure,
    "nodes": nodes.measure,
    "tiers": tiers.measure,
    "streaming": larger_models.measure,
    "experts": expert_models.measure,
    "quantised": quantised_experts.measure,
    "serving": serving.measure,
    "many": many_tensors.compare,
    "workloads": workloads.measure,
}
RESULTS = ROOT / "benchmarks/results"
WRITTEN = ROOT / "build/bench/bench.json"


class Directories:
    """Disks as they are: no limit can be set, and what was made in them is removed at the end."""

    def __init__(self, parents: list[Path]) -> None:
        self.directories = [
            Path(tempfile.mkdtemp(prefix="trunkline-bench-", dir=parent)) for parent in parents
        ]

    def limit(self, mb_s: int) -> None:
        pass

    def rest(self) -> None:
        pass


@contextmanager
def open_disks(options: argparse.Namespace) -> Iterator[tuple[Disks, str]]:
    """The disks to measure, and what to call them."""
    if options.dir:
        plain = Directories(options.dir)
        try:
            yield plain, f"{', '.join(map(str, options.dir))} as they are"
        finally:
            for directory in plain.directories:
                shutil.rmtree(directory, ignore_errors=True)
        return
    # On one disk: a file of each format and fio's, on the others their shares of a volume, or those of nodes
    # with copies, new and old.
    share = -(-options.size // options.disks)
    sizes = [int(4.4 * options.size), *[int(6.3 * share)] * (options.disks - 1)]
    with PacedDisks([size + 128 * MIB for size in sizes], options.limit_mb_s) as disks:
        yield (
            disks,
            f"{options.disks} loop devices over tmpfs, {options.limit_mb_s} MB/s each where not unthrottled",
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed and cost, beside fio and others.")
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help="sections, separated by commas (default: all)"
    )
    parser.add_argument(
        "--dir", type=Path, nargs="+", help="measure on these directories instead of paced disks"
    )
    parser.add_argument("--disks", type=int, default=4, help="number of paced disks (default: 4)")
    parser.add_argument(
        "--limit-mb-s", type=int, default=1000, help="of each paced disk, 10^6 bytes/s (default: 1000)"
    )
    parser.add_argument(
        "--size", type=int, default=10**9, help="bytes of a sequential transfer (default: 10^9)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of every measurement (default: 5)")
    parser.add_argument(
        "--keep",
        type=Path,
        help="results to update (default, if all ran: benchmarks/results/DATE-COMMIT.json)",
    )
    parser.add_argument(
        "--machine", help="this machine in words, for the results (default: what it says itself)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := [name for name in options.only if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if options.rounds < 1 or options.size < 1:
        parser.error("--rounds and --size must be at least 1")
    return options


def write(results: Results) -> None:
    WRITTEN.parent.mkdir(parents=True, exist_ok=True)
    WRITTEN.write_text(json.dumps(results.as_json(), indent=1) + "\n")


def keep(results: Results, options: argparse.Namespace) -> None:
    """Leave the results in a file of their own, or with what an earlier run measured of other sections."""
    document = results.as_json()
    path = options.keep
    if path is None:
        if set(options.only) != set(SECTIONS):
            return
        path = RESULTS / f"{results.date}-{results.commit or 'unknown'}.json"
    elif path.exists():
        document = kept_results.merge(json.loads(path.read_text()), document)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    progress(f"kept {path}; benchmarks/make_tables.py brings the documents up to date\n")


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that disks and files are removed
    try:
        with open_disks(options) as (disks, about), free_memory_kept(6 * options.size) as memory:
            count = len(disks.directories)
            # Whole blocks on each disk, so that fio moves the same number of bytes.
            size = -(-options.size // (MIB * count)) * MIB * count
            bench = Workbench(
                disks=disks,
                limit_mb_s=0 if options.dir else options.limit_mb_s,
                rounds=options.rounds,
                fio_engine=fio_peer.best_engine(),
                bytes=size,
            )
            where = "; ".join(filter(None, (about, memory)))
            results = Results(where, shlex.join(["make", "bench", f"ARGS={shlex.join(sys.argv[1:])}"]))
            if options.machine:
                results.machine = options.machine
            for name in options.only:
                disks.limit(bench.limit_mb_s)
                results.comparisons += SECTIONS[name](bench)
                write(results)  # a later section may fail
    except (PacedDisksError, fio_peer.FioError) as error:
        print(f"\nbench: {error}; --dir DIRECTORY measures on a disk as it is", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench: interrupted; disks and files are removed", file=sys.stderr)
        return 130
    progress("")
    keep(results, options)
    if options.json:
        print(json.dumps(results.as_json(), indent=1))
    else:
        print(results.markdown() if options.markdown else results.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
