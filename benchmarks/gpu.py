#!/usr/bin/env python3
"""Transfers between files and the memory of a GPU, each beside its peers in the same run, as one JSON.

    python benchmarks/gpu.py --dir /mnt/nvme0            (and --memory-dir, a tmpfs: /dev/shm)

Needs a CUDA GPU, torch with CUDA, transformers and safetensors; kvikio, gdsio, fastsafetensors and accelerate
are peers where they are installed, and named where they are not. No network. Under eight minutes.

    disk         reads and writes between the disk and the GPU, beside the same between the disk and the CPU
    ways         GPUDirect Storage beside our pinned buffers, and which of them is chosen
    bus          the same on a file in main memory, beside plain copies of pinned memory: the bus's limit
    load         a model's weights from a file, cold and warm, beside safetensors, fastsafetensors, torch
    save         a state of the GPU to .pt and .safetensors, beside torch.save
    snapshot     what an asynchronous save holds a training up, beside a plain copy to pinned memory
    generation   tokens of a Llama shape that is streamed, beside its limit, and beside accelerate

What moved is compared each time, and all tokens. Medians over rounds; "compared" is the median of the ratios
of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GB = 1e9
MIB = 1 << 20


@dataclass
class Row:
    """One thing that was measured, `ours` and `peer` in `unit`, round by round."""

    section: str
    name: str
    unit: str  # "GB/s": more is better; "s": less is
    peer_name: str
    goal: float | None
    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def compared(self) -> float | None:
        """Ours by the peer's: of rates, and of times."""
        ratios = [ours / peer for ours, peer in zip(self.ours, self.peer, strict=False) if peer]
        return statistics.median(ratios) if ratios else None

    def met(self) -> bool | None:
        """Whether the goal is reached; None without one, or without the peer."""
        ratio = self.compared()
        if ratio is None or self.goal is None:
            return None
        return ratio >= self.goal if self.unit == "GB/s" else ratio <= self.goal

    def as_json(self) -> dict[str, Any]:
        """With medians and verdict."""
        median = {
            side: statistics.median(values) if values else None
            for side, values in (("ours_median", self.ours), ("peer_median", self.peer))
        }
        return {**asdict(self), **median, "compared": self.compared(), "met": self.met()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes until the GPU is done too."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def make_cold(*paths: Path) -> None:
    """Write the files back, and drop them from the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


class Benchmark:
    """All sections."""

    def __init__(self, disk: Path, memory: Path, size: int, rounds: int) -> None:
        self.disk = disk
        self.memory = memory
        self.size = size - size % MIB
        self.rounds = rounds
        self.rows: list[Row] = []
        self.chosen: dict[str, object] | None = None
        self.absent = [name for name in ("kvikio", "fastsafetensors", "accelerate") if not has(name)]
        tools = "/usr/local/cuda/gds/tools"
        self.gdsio = shutil.which("gdsio") or shutil.which("gdsio", path=tools)
        if self.gdsio is None:
            self.absent.append("gdsio")

    def row(self, section: str, name: str, unit: str, peer: str, goal: float | None = None) -> Row:
        made = Row(section, name, unit, peer, goal)
        self.rows.append(made)
        return made

    def disk_and_gpu(self) -> None:
        """Between the disk and the GPU, and the same with main memory."""
        import torch

        import trunkline as tl

        path = self.disk / "disk"
        host = tl.torch.empty_pinned(self.size, torch.uint8)
        host.random_()
        device = host.to("cuda")
        back = torch.empty_like(device)
        read = self.row("disk", "read into HBM", "GB/s", "the same into main memory", 0.97)
        write = self.row("disk", "write from HBM", "GB/s", "the same from main memory", 0.97)
        with tl.open(path, "w") as file:

            def written(tensor: Any) -> None:
                file.pwrite(tensor)
                file.sync()

            written(host)
            for _ in range(self.rounds):
                host.add_(1)  # other bytes each time
                write.peer.append(self.size / GB / seconds(lambda: written(host)))
                device.add_(2)
                write.ours.append(self.size / GB / seconds(lambda: written(device)))
                make_cold(path)
                read.peer.append(self.size / GB / seconds(lambda: file.pread(host)))
                assert torch.equal(host.to("cuda"), device), "what was written from HBM is not what it held"
                back.zero_()
                make_cold(path)
                read.ours.append(self.size / GB / seconds(lambda: file.pread(back)))
                assert torch.equal(back, device), "what was read into HBM is not what was written"
            if "kvikio" not in self.absent:
                self._kvikio(path, back, device, read.ours)
            if self.gdsio is not None:
                self._gdsio(self.gdsio, path, read.ours)
        path.unlink()

    def ways(self) -> None:
        """By GPUDirect Storage, where there is none in cuFile's compatibility mode, and by our way."""
        import torch

        import trunkline as tl

        path = self.disk / "ways"
        device = torch.randint(0, 256, (self.size,), dtype=torch.uint8, device="cuda")
        back = torch.empty_like(device)
        with tl.open(path, "w") as file:
            file.pwrite(device)
        engines = {"gds": tl.Engine(gpu="gds"), "bounce": tl.Engine(gpu="bounce"), "auto": tl.Engine()}
        way = engines["auto"].explain(path)["gpu"]
        self.chosen = dict(way)
        say(f"  chosen: {way['path']}: {way['why']}")
        row = self.row("ways", f"read into HBM as chosen ({way['path']})", "GB/s", "the other way", 1.0)
        other = "bounce" if way["path"] == "gds" else "gds"
        with tl.pin(back):
            for _ in range(self.rounds):
                for name, rates in ((other, row.peer), ("auto", row.ours)):
                    back.zero_()
                    make_cold(path)
                    try:
                        with tl.open(path, engine=engines[name]) as file:
                            rates.append(self.size / GB / seconds(functools.partial(file.pread, back)))
                    except tl.Unsupported as error:
                        say(f"  {name}: {error}")
                        if other not in self.absent:
                            self.absent.append(other)
                        continue
                    assert torch.equal(back, device), f"{name} read something else"
        path.unlink()

    def _kvikio(self, path: Path, back: Any, expected: Any, ours: list[float]) -> None:
        import torch

        kvikio: Any = importlib.import_module("kvikio")

        threads = 8  # its default is one
        if hasattr(kvikio.defaults, "set"):
            kvikio.defaults.set({"num_threads": threads})
        else:  # before 25.02
            kvikio.defaults.num_threads_reset(threads)
        row = self.row("disk", "read into HBM", "GB/s", f"kvikio, {threads} threads")
        row.ours = ours
        for _ in range(self.rounds):
            back.zero_()
            make_cold(path)
            with kvikio.CuFile(str(path), "r") as file:
                row.peer.append(self.size / GB / seconds(functools.partial(file.read, back)))
            assert torch.equal(back, expected), "kvikio read something else"

    def _gdsio(self, program: str, path: Path, ours: list[float]) -> None:
        row = self.row("disk", "read into HBM", "GB/s", "gdsio")
        row.ours = ours
        for _ in range(self.rounds):
            make_cold(path)
            options = f"-f {path} -d 0 -w 4 -s {self.size} -i 1M -x 0 -I 0"
            done = subprocess.run([program, *options.split()], capture_output=True, text=True, check=False)
            found = re.search(r"Throughput:\s*([\d.]+)\s*GiB/sec", done.stdout)
            if done.returncode != 0 or found is None:
                say(f"  gdsio failed: {(done.stderr or done.stdout).strip()[-300:]}")
                self.absent.append("gdsio")
                return
            row.peer.append(float(found[1]) * (1 << 30) / GB)

    def bus_and_gpu(self) -> None:
        """Between a file in main memory and the GPU."""
        import torch

        import trunkline as tl

        path = self.memory / "bus"
        host = torch.empty(self.size, dtype=torch.uint8, pin_memory=True).random_()
        device = host.to("cuda")
        back = torch.empty_like(device)
        read = self.row("bus", "read a file in memory into HBM", "GB/s", "a copy of pinned memory", 0.85)
        write = self.row("bus", "write HBM to a file in memory", "GB/s", "a copy to pinned memory", 0.85)
        with tl.open(path, "w") as file:
            file.pwrite(device)
            for _ in range(self.rounds):
                read.peer.append(self.size / GB / seconds(lambda: back.copy_(host, non_blocking=True)))
                back.zero_()
                read.ours.append(self.size / GB / seconds(lambda: file.pread(back)))
                assert torch.equal(back, device), "what was read into HBM is not what was written"
                write.peer.append(self.size / GB / seconds(lambda: host.copy_(device, non_blocking=True)))
                write.ours.append(self.size / GB / seconds(lambda: file.pwrite(device)))
        path.unlink()

    def state(self) -> dict[str, Any]:
        """Weights of a model, some of them small."""
        import torch

        generator = torch.Generator("cuda").manual_seed(0)
        made: dict[str, Any] = {}
        while sum(tensor.nbytes for tensor in made.values()) < self.size:
            layer = len(made) // 2
            made[f"layers.{layer}.weight"] = torch.randn(
                4096, 8192, device="cuda", dtype=torch.bfloat16, generator=generator
            )
            made[f"layers.{layer}.norm"] = torch.ones(8192, device="cuda", dtype=torch.bfloat16)
        return made

    def load(self) -> None:
        """A model's weights into HBM."""
        import safetensors.torch
        import torch

        import trunkline as tl

        expected = self.state()
        nbytes = sum(tensor.nbytes for tensor in expected.values())
        path, pickled = self.disk / "model.safetensors", self.disk / "model.pt"
        tl.save(expected, path)
        torch.save(expected, pickled)

        def fast(*, nogds: bool) -> Any:
            with importlib.import_module("fastsafetensors").fastsafe_open(
                [str(path)], nogds=nogds, device="cuda:0"
            ) as file:
                return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118

        peers: dict[str, tuple[Path, Callable[[], Any]]] = {
            "safetensors": (path, lambda: safetensors.torch.load_file(path, device="cuda")),
            "torch.load": (pickled, lambda: torch.load(pickled, map_location="cuda", weights_only=True)),
            "torch.load, mmap": (
                pickled,
                lambda: torch.load(pickled, map_location="cuda", weights_only=True, mmap=True),
            ),
        }
        if "fastsafetensors" not in self.absent:
            peers["fastsafetensors"] = (path, functools.partial(fast, nogds=True))
            if tl.default_engine().explain(path)["gpu"]["path"] == "gds":
                peers["fastsafetensors, GDS"] = (path, functools.partial(fast, nogds=False))
        for cold in (True, False):
            rows = {
                peer: self.row("load", f"model into HBM, {'cold' if cold else 'warm'}", "GB/s", peer, 1.0)
                for peer in peers
            }
            for _ in range(self.rounds):
                for peer, (file, how) in peers.items():
                    rows[peer].peer.append(nbytes / GB / self._loaded(how, file, expected, cold=cold))
                took = self._loaded(lambda: tl.load(path, device="cuda"), path, expected, cold=cold)
                for row in rows.values():
                    row.ours.append(nbytes / GB / took)
        for each in (path, pickled):
            each.unlink()

    def _loaded(self, how: Callable[[], Any], file: Path, expected: dict[str, Any], *, cold: bool) -> float:
        import torch

        make_cold(file)
        if not cold:
            file.read_bytes()
        loaded: list[Any] = []
        took = seconds(lambda: loaded.append(how()))
        assert loaded[0].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(loaded[0][name], tensor), name
        return took

    def save(self) -> None:
        """A state of the GPU, durable."""
        import torch

        import trunkline as tl

        state = self.state()
        nbytes = sum(tensor.nbytes for tensor in state.values())
        path = self.disk / "saved.pt"

        def stock() -> None:
            torch.save(state, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())

        row = self.row("save", "state of the GPU to .pt", "GB/s", "torch.save and fsync", 1.0)
        other = self.row("save", "state of the GPU to .safetensors", "GB/s", "torch.save and fsync", 1.0)
        for _ in range(self.rounds):
            row.peer.append(nbytes / GB / seconds(stock))
            path.unlink()
            row.ours.append(nbytes / GB / seconds(lambda: tl.save(state, path)))
            loaded = torch.load(path, weights_only=True)
            assert all(torch.equal(loaded[name], state[name]) for name in state), "it was not saved right"
            path.unlink()
            named = path.with_suffix(".safetensors")
            other.ours.append(nbytes / GB / seconds(functools.partial(tl.save, state, named)))
            loaded = tl.load(named, device="cuda")
            assert all(torch.equal(loaded[name], state[name]) for name in state), "it was not saved right"
            named.unlink()
        other.peer = row.peer

    def snapshot(self) -> None:
        """How long an asynchronous save holds up a training."""
        import torch

        import trunkline as tl

        state = self.state()
        nbytes = sum(tensor.nbytes for tensor in state.values())
        pinned = {name: torch.empty_like(tensor, device="cpu").pin_memory() for name, tensor in state.items()}
        engine = tl.Engine(pinned_budget_bytes=2 * nbytes + (1 << 30))
        checkpointer = tl.Checkpointer(
            self.disk / "steps", keep=1, staging_bytes=nbytes + 64 * MIB, engine=engine
        )
        row = self.row("snapshot", "until the tensors may change", "s", "a copy to pinned memory", 1.1)

        def copy() -> None:
            for name, tensor in state.items():
                pinned[name].copy_(tensor, non_blocking=True)

        for step in range(self.rounds + 1):  # the first one makes the staging memory
            held: list[Any] = []

            def begin(step: int = step, held: list[Any] = held) -> None:
                held.append(checkpointer.save(step, state))
                held[0].wait_staged()

            took = seconds(begin)
            held[0].wait()
            plain = seconds(copy)  # on a machine that does nothing else, too
            if step > 0:
                row.ours.append(took)
                row.peer.append(plain)
        loaded = checkpointer.load(device="cuda")
        assert all(torch.equal(loaded[name], state[name]) for name in state), "it was not saved right"
        shutil.rmtree(self.disk / "steps")

    def generation(self) -> None:
        """A Llama shape streamed, beside its limit."""
        import torch
        import transformers

        import trunkline as tl

        transformers.logging.set_verbosity_error()
        rates = {
            section: next((row.peer for row in self.rows if row.section == section), [])
            for section in ("bus", "disk")
        }
        if not all(rates.values()):
            raise RuntimeError(
                "the limit of generation is that of the sections disk and bus; measure them too"
            )
        bus, disk = (statistics.median(rates[section]) * GB for section in ("bus", "disk"))
        folder = self.disk / "llama"
        config = transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            dtype="bfloat16",
        )
        torch.manual_seed(0)
        with torch.device("cuda"):
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        folder.mkdir()
        config.save_pretrained(folder)
        tl.save(made.state_dict(), folder / "model.safetensors")
        del made
        # As every model is loaded: what is computed rather than stored is the CPU's to the last bit.
        stock = (
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to("cuda")
        )
        layers = sum(parameter.nbytes for parameter in stock.model.layers.parameters())
        ids = torch.randint(3, 31000, (32, 16), device="cuda")
        tokens = 8

        def run(model: Any) -> tuple[float, Any]:  # a pass a token
            model.generate(ids, max_new_tokens=2, do_sample=False)
            out: list[Any] = []
            took = seconds(
                lambda: out.append(
                    model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False)
                )
            )
            return took, out[0]

        resident, expected = run(stock)
        del stock
        torch.cuda.empty_cache()
        for name, host in (("main memory", "1TB"), ("the disk", "1GB")):
            model = tl.transformers.from_pretrained(
                folder, device="cuda", memory_budget="2GB", host_memory=host
            )
            took, found = run(model)
            assert torch.equal(found, expected), "the streamed model gives other tokens"
            stats = tl.stream.stats(model)
            copied, read = stats["streamed_bytes"], stats["storage_bytes"]
            row = self.row("generation", f"streamed from {name}", "s", "the limit", 1 / 0.95)
            row.ours.append(took)
            row.peer.append(max(tokens * copied / bus, tokens * read / disk, resident))
            say(
                f"  {copied / GB:.2f} of {layers / GB:.2f} GB pass by, {read / GB:.2f} GB of it from the disk"
            )
            del model
            torch.cuda.empty_cache()
        if "accelerate" not in self.absent:
            self._accelerate(folder, run, expected)
        shutil.rmtree(folder)

    def _accelerate(self, folder: Path, run: Callable[[Any], tuple[float, Any]], expected: Any) -> None:
        import torch
        import transformers

        ours = {row.name: row.ours for row in self.rows if row.section == "generation"}
        for name, limits in (
            ("streamed from main memory", {0: "2GB", "cpu": "1000GB"}),
            ("streamed from the disk", {0: "2GB", "cpu": "1GB"}),
        ):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, device_map="auto", max_memory=limits, offload_folder=self.disk / "offload"
            ).eval()
            took, found = run(model)
            row = self.row("generation", name, "s", "accelerate", 1.0)
            row.ours, row.peer = list(ours[name]), [took]
            if not torch.equal(found, expected):
                say("  accelerate gives other tokens")
            del model
            torch.cuda.empty_cache()
        shutil.rmtree(self.disk / "offload", ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="a directory on the disk to measure")
    parser.add_argument("--memory-dir", type=Path, default=Path("/dev/shm"), help="one in main memory")
    parser.add_argument("--size", type=float, default=4e9, help="bytes of each transfer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="sections, separated by commas")
    options = parser.parse_args()
    try:
        import torch
    except ModuleNotFoundError:
        parser.error("torch is not installed; install it with CUDA")
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU; run it on a machine with one, and with a torch for CUDA")

    import trunkline as tl

    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0),
        "machine": platform.platform(),
        "torch": torch.__version__,
        "trunkline": tl.__version__,
        "explain": tl.default_engine().explain(str(options.dir)),
        "errors": {},
    }
    with (
        tempfile.TemporaryDirectory(prefix="trunkline-gpu-", dir=options.dir) as disk,
        tempfile.TemporaryDirectory(prefix="trunkline-gpu-", dir=options.memory_dir) as memory,
    ):
        bench = Benchmark(Path(disk), Path(memory), int(options.size), options.rounds)
        sections = {
            "disk": bench.disk_and_gpu,
            "ways": bench.ways,
            "bus": bench.bus_and_gpu,
            "load": bench.load,
            "save": bench.save,
            "snapshot": bench.snapshot,
            "generation": bench.generation,
        }
        chosen = options.only.split(",") if options.only else list(sections)
        for name in chosen:
            if name not in sections:
                parser.error(f"--only: {name} is none of {', '.join(sections)}")
        for name in chosen:
            say(f"{name} ...")
            began = time.perf_counter()
            try:
                sections[name]()
            except Exception as error:  # the others are measured all the same
                found["errors"][name] = f"{type(error).__name__}: {error}"
                say(f"  failed: {found['errors'][name]}")
            say(f"  {time.perf_counter() - began:.0f} s")
        found["absent"] = bench.absent
        found["chosen"] = bench.chosen
        found["rows"] = [row.as_json() for row in bench.rows]
    json.dump(found, sys.stdout, indent=1)
    print()
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
