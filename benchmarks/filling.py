"""A model filled tensor by tensor from cold .safetensors files, as inference servers load theirs.

iter_tensors() is beside safetensors.safe_open (what SGLang and vLLM use), its files read by threads (SGLang's
default), the Run:ai streamer and fastsafetensors where they are installed, and fio's read of as many bytes.
The parameters are compared with the state after each.
"""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import model_state
import safetensors
import safetensors.torch
import torch
from guest_memory import touch_new_memory
from measurement import Comparison, interleave
from page_cache import make_cold
from timed import Timed
from workbench import Workbench

import trunkline as tl

Read: TypeAlias = Callable[[list[Path]], Iterable[tuple[str, torch.Tensor]]]
FILES = 4
OURS = "iter_tensors"


def by_safe_open(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def by_threads(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """8 threads and all files at once, as SGLang's buffered_multi_thread_safetensors_weights_iterator."""

    def load(path: Path) -> dict[str, torch.Tensor]:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    with ThreadPoolExecutor(8) as threads:
        for tensors in threads.map(load, files):
            yield from tensors.items()


def by_runai(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in files])
        yield from streamer.get_tensors()


def by_fastsafetensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    for path in files:
        loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
        try:
            loader.add_filenames({0: [str(path)]})
            buffer = loader.copy_files_to_device()
            try:
                for name in list(buffer.key_to_rank_lidx):
                    yield name, buffer.get_tensor(name)
            finally:
                buffer.close()
        finally:
            loader.close()


def measure(bench: Workbench) -> list[Comparison]:
    return one_process(bench) + two_ranks(bench)


def two_ranks(bench: Workbench) -> list[Comparison]:
    """Two processes that load the same model: its bytes by the time until both have it."""
    bench.free_transfer_memory()
    path = bench.first / "shared.safetensors"
    with bench.without_limit():
        safetensors.torch.save_file(bench.state, path)
    expected = sum(int(tensor.view(torch.uint8).sum()) for tensor in bench.state.values())

    def loaded(way: str) -> Callable[[], float]:
        def run() -> float:
            make_cold([path])
            bench.disks.rest()
            store = path.with_name(f"store-{uuid.uuid4().hex}")
            script = str(Path(__file__).with_name("rank_load.py"))
            ranks = [
                subprocess.Popen(
                    [sys.executable, script, str(rank), "2", str(store), way, str(path)],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for rank in range(2)
            ]
            results = [each.communicate()[0].split() for each in ranks]
            store.unlink(missing_ok=True)
            if any(len(each) != 2 or int(each[1]) != expected for each in results):
                raise SystemExit(f"bench: what two ranks have loaded ({way}) differs from the state")
            return bench.bytes / max(float(each[0]) for each in results) / 1e9

        return run

    names = {"together": "load(group=)", "alone": "load", "safetensors": "safetensors"}
    got = interleave(bench.rounds, {name: loaded(way) for way, name in names.items()}, "two ranks, one model")
    path.unlink()
    return [
        Comparison(
            *("filling a model", "two ranks, together", "GB/s", peer, got["load(group=)"], got[peer]),
            at_least=1.0,
        )
        for peer in ("load", "safetensors")
    ]


def one_process(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    directory, timed = bench.first, Timed(bench)
    files = [directory / f"part-{number}.safetensors" for number in range(FILES)]
    names = list(bench.state)
    with bench.without_limit():
        for number, path in enumerate(files):
            part = names[number * len(names) // FILES : (number + 1) * len(names) // FILES]
            safetensors.torch.save_file({name: bench.state[name] for name in part}, path)
    parameters = {name: torch.empty_like(tensor) for name, tensor in bench.state.items()}

    def fill(name: str, read: Read) -> Callable[[], float]:
        def before() -> None:
            for tensor in parameters.values():
                tensor.zero_()
            touch_new_memory(bench.bytes)
            make_cold(files)

        def load() -> dict[str, torch.Tensor]:
            for key, tensor in read(files):
                parameters[key].copy_(tensor)
            return parameters

        def check(filled: dict[str, torch.Tensor]) -> None:
            if not model_state.same(filled, bench.state):
                raise SystemExit(f"bench: what {name} has filled differs from the state")

        return timed(name, load, before=before, after=check)

    readers: dict[str, Read] = {
        OURS: tl.iter_tensors,
        "safe_open": by_safe_open,
        "safe_open, threads": by_threads,
    }
    if importlib.util.find_spec("runai_model_streamer") is not None:
        readers["Run:ai streamer"] = by_runai
    if importlib.util.find_spec("fastsafetensors") is not None:
        readers["fastsafetensors"] = by_fastsafetensors
    ways = {name: fill(name, read) for name, read in readers.items()}
    ways["fio"] = lambda: bench.fio([directory / "fio"], "read")[0]
    got = interleave(bench.rounds, ways, "filling a model")
    for path in (*files, directory / "fio"):
        path.unlink()
    peers = [name for name in readers if name != OURS]
    rows = [
        Comparison(
            *("filling a model", "one disk", "GB/s", peer, got[OURS], got[peer]),
            at_least=0.95 if peer == "fio" else 1.0,
        )
        for peer in itertools.chain(["fio"], peers)
    ]
    return rows + [
        Comparison(
            *("filling a model: processor time", "one disk", "CPU s/GB", peer),
            *(timed.cpu_of(OURS), timed.cpu_of(peer)),
        )
        for peer in peers
    ]
