"""A rank of test_group_reading.py.

group_read_ranks.py RANK SIZE STORE CASE FOLDER: prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trunkline as tl
from trunkline.checkpoint.group_pt import _Records


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of names, dtypes, shapes and bytes, in their order."""
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run(case: str, folder: Path, rank: int) -> object:
    group = dist.group.WORLD
    if case == "all":
        with tl.Engine() as engine:
            found = digest(tl.iter_tensors(folder, memory_bytes="12MiB", engine=engine, group=group))
            nbytes: dict[str, int] = engine.stats()["bytes"]  # type: ignore[assignment]
            return [found, sum(nbytes.values())]
    if case == "load":
        loaded = tl.load(folder, group=group, dtype="float32")
        again = tl.load(folder, group=group, keys="1")
        return [digest(sorted(loaded.items())), digest(sorted(again.items()))]
    if case == "two at a time":
        first = tl.iter_tensors(folder, group=group, memory_bytes="6MiB")
        second = tl.iter_tensors(folder, group=group, memory_bytes="6MiB")
        pairs = list(zip(first, second, strict=True))
        return [digest(one for one, _ in pairs), digest(two for _, two in pairs)]
    if case == "other files":
        path = folder / f"model-{1 + rank % 2}.safetensors"
        return digest(tl.iter_tensors(path, group=group))
    if case == "interrupted":
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                tl.load(folder, group=group)
                return "not interrupted"
            except KeyboardInterrupt:
                store.set("interrupted", "")
        else:
            store.wait(["interrupted"])
        return [digest(sorted(tl.load(folder, group=group).items())) for _ in range(2)]
    if case == "never comes":
        if rank == 1:
            dist.distributed_c10d._get_default_store().wait(["raised"])
            return "did not call"
        try:
            return digest(tl.iter_tensors(folder, group=group))
        finally:
            dist.distributed_c10d._get_default_store().set("raised", "")
    if case == "other versions":
        path = folder / f"version-{rank % 2}" / "model.safetensors"
        return digest(tl.iter_tensors(path, group=group))
    if case == "missing on one":
        path = folder / ("none.safetensors" if rank == 1 else "model-1.safetensors")
        return digest(tl.iter_tensors(path, group=group))
    if case == "no folder on one":
        return digest(tl.load(folder if rank == 0 else folder / "none", group=group).items())
    if case == "ends early":
        for _name, _tensor in tl.iter_tensors(folder, group=group, memory_bytes="6MiB"):
            if rank == 1:
                break
        dist.barrier()  # the process is alive while the other ranks find out
        return "ended"
    if "pt" in case.split():
        return run_pt(case, folder, rank)
    if case == "dies":
        tensors = tl.iter_tensors(folder, group=group, memory_bytes="6MiB")
        next(tensors)
        if rank == 1:
            print(json.dumps("dead"), flush=True)
            sys.stdout.flush()
            os._exit(0)
        return digest(tensors)
    raise AssertionError(case)


def pt_digest(state: dict[str, Any]) -> str:
    flat = [*state["model"].items(), ("whole", state["whole"]), ("part", state["part"])]
    return digest([*flat, *((str(number), tensor) for number, tensor in enumerate(state["small"]))])


def run_pt(case: str, folder: Path, rank: int) -> object:
    group, path = dist.group.WORLD, folder / "model.pt"
    if case == "pt":
        with tl.Engine() as engine:
            state = tl.load(path, engine=engine, group=group)
            nbytes: dict[str, int] = engine.stats()["bytes"]  # type: ignore[assignment]
        is_shared = state["whole"].untyped_storage().data_ptr() == state["part"].untyped_storage().data_ptr()
        return [[pt_digest(state), is_shared, state["step"]], sum(nbytes.values())]
    if case == "part of pt":
        return digest(tl.load(path, keys="model", group=group)["model"].items())
    if case == "pt of objects":
        loaded = tl.load(path, group=group)
        return [digest([("a", loaded["a"].detach())]), loaded["b"].to_dense().tolist()]
    if case == "other pt":
        return pt_digest(tl.load(folder / f"version-{rank % 2}" / "model.pt", group=group))
    if case == "pt missing on one":
        return pt_digest(tl.load(folder / "none.pt" if rank == 1 else path, group=group))
    if case == "pt fails in use":
        use = _Records.use
        if rank == 1:
            _Records.use = fail  # type: ignore[method-assign]
        try:
            tl.load(path, group=group)
            text = "no error"
        except (MemoryError, tl.RankError) as error:
            text = str(error)
        _Records.use = use  # type: ignore[method-assign]
        return [text, pt_digest(tl.load(path, group=group))]
    raise AssertionError(case)


def fail(*_: object) -> None:
    raise MemoryError("no memory")


def main() -> None:
    rank, size, store, case, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    limit = timedelta(seconds=2) if case == "never comes" else None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    try:
        result = run(case, Path(folder), rank)
    except Exception as error:
        result = {"error": type(error).__name__, "text": str(error)}
    if case == "ends early" and rank != 1:
        dist.barrier()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
