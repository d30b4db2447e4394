"""A model's weights saved durably (fsync included): to .pt, .safetensors and a directory of checkpoints,
beside fio's write and fsync of as many bytes, and beside torch.save, safetensors and
torch.distributed.checkpoint. What was saved is loaded and compared once each.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import model_state
import safetensors.torch
import torch
from measurement import Comparison, interleave
from timed import Timed
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_by_dcp
from workbench import Workbench

import trunkline as tl

Way = Callable[[], None]
MOST_CPU = 0.15  # seconds per GB, checksums included


def measure(bench: Workbench) -> list[Comparison]:
    bench.free_transfer_memory()
    rows = one_disk(bench, "one disk", limited=True)
    if len(bench.disks.directories) > 1:
        rows += several_disks(bench)
    with bench.without_limit():
        rows += one_disk(bench, "one disk, unthrottled", limited=False)
    return rows


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def one_disk(bench: Workbench, place: str, limited: bool) -> list[Comparison]:
    state, directory = bench.state, bench.first
    timed = Timed(bench)
    pt, st, stock = directory / "m.pt", directory / "m.safetensors", directory / "stock"
    checkpointer = tl.Checkpointer(directory / "steps", keep=1)
    step = 0

    def checkpoint() -> None:
        nonlocal step
        step += 1
        checkpointer.save(step, state, block=True)

    def save_stock(save: Callable[[Path], object]) -> Way:
        def run() -> None:
            save(stock)
            fsync(stock)

        return run

    def remove_stock(_: None) -> None:
        if stock.is_dir():
            shutil.rmtree(stock)
        else:
            stock.unlink()

    def to_dcp() -> None:
        save_by_dcp(state, storage_writer=FileSystemWriter(stock, sync_files=True), no_dist=True)

    ways = {
        ".pt": timed(".pt", lambda: tl.save(state, pt), after=lambda _: pt.unlink()),
        "torch.save": timed(
            *("torch.save", save_stock(lambda path: torch.save(state, path))), after=remove_stock
        ),
        ".safetensors": timed(".safetensors", lambda: tl.save(state, st), after=lambda _: st.unlink()),
        "safetensors": timed(
            *("safetensors", save_stock(lambda path: safetensors.torch.save_file(state, path))),
            after=remove_stock,
        ),
        "Checkpointer": timed("Checkpointer", checkpoint),
        "DCP": timed("DCP", to_dcp, after=remove_stock),
        "fio": lambda: bench.fio([directory / "fio"], "write")[0],
    }
    check_saved(bench, pt, st, checkpoint, checkpointer)
    got = interleave(bench.rounds, ways, f"saving, {place}")
    (directory / "fio").unlink()
    shutil.rmtree(directory / "steps")
    pairs = {".pt": "torch.save", ".safetensors": "safetensors", "Checkpointer": "DCP"}
    rows = [
        Comparison(
            *("saving", f"{place}, {ours}", "GB/s", peer, got[ours], got[peer]),
            at_least=(0.97 if peer == "fio" else None)
            if limited
            else (3.0 if peer == "torch.save" else None),
        )
        for ours, stock_peer in pairs.items()
        for peer in ("fio", stock_peer)
        if limited or peer != "fio"
    ]
    if limited:
        rows += [
            Comparison(
                *("saving: processor time", f"{place}, {ours}", "CPU s/GB", peer),
                *(timed.cpu_of(ours), timed.cpu_of(peer)),
                compared="ours",
                at_most=MOST_CPU,
            )
            for ours, peer in pairs.items()
        ]
    return rows


def check_saved(bench: Workbench, pt: Path, st: Path, checkpoint: Way, checkpointer: tl.Checkpointer) -> None:
    with bench.without_limit():
        tl.save(bench.state, pt)
        tl.save(bench.state, st)
        checkpoint()
        for what, got in (
            (".pt", torch.load(pt, weights_only=True)),
            (".safetensors", safetensors.torch.load_file(st)),
            ("the checkpoint", checkpointer.load()),
        ):
            if not model_state.same(got, bench.state):
                raise SystemExit(f"bench: what was saved to {what} differs from the state")
        pt.unlink()
        st.unlink()


def several_disks(bench: Workbench) -> list[Comparison]:
    directories = bench.disks.directories
    timed = Timed(bench)
    volumes = [directory / "steps" for directory in directories]
    for volume in volumes:
        volume.mkdir()
    checkpointer = tl.Checkpointer(directories[0] / "run", keep=1, volumes=volumes)
    step = 0

    def checkpoint() -> None:
        nonlocal step
        step += 1
        checkpointer.save(step, bench.state, block=True)

    files = [directory / "fio" for directory in directories]
    ways = {
        "Checkpointer": timed("Checkpointer", checkpoint),
        "fio": lambda: bench.fio(files, "write")[0],
    }
    got = interleave(bench.rounds, ways, f"saving, {len(files)} disks")
    if not model_state.same(checkpointer.load(), bench.state):
        raise SystemExit("bench: the checkpoint on several disks differs from the state")
    for path in (*files, directories[0] / "run", *volumes):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [
        Comparison(
            *("saving", f"{len(files)} disks, Checkpointer", "GB/s", peer, got["Checkpointer"], theirs),
            at_least=goal,
        )
        for peer, theirs, goal in bench.peers_of(len(files), got["fio"], 0.95)
    ]
