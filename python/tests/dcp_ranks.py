"""What ranks do in test_dcp_ranks.py: python dcp_ranks.py DIRECTORY PROGRAM/WORLD[/ARGUMENT] ...

Runs one program after the other, each on as many ranks, which are forked: importing torch takes longer than
all else. Prints a line of their exit statuses for each program; what they say is in files of the directory.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import trunkline as tl
from trunkline.dcp import _writer

DIED = 9  # exit status of a rank that dies on purpose


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=tl.dcp.StorageWriter(path, **options))


def load(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=tl.dcp.StorageReader(path, **options))


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shapes() -> list[tuple[int, ...]]:
    """Shapes that few numbers of ranks divide."""
    draw = torch.Generator().manual_seed(5)
    made: list[tuple[int, ...]] = [(1,), (2, 3), (0, 4), (5, 1, 2), (1200, 7)]
    for _ in range(6):
        dims = int(torch.randint(1, 4, (), generator=draw))
        made.append(tuple(torch.randint(1, 30, (dims,), generator=draw).tolist()))
    return made


class Model(torch.nn.Module):
    """A small state whose sizes are multiples of nothing in particular."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, 37)
        self.second = torch.nn.Sequential(torch.nn.Linear(37, 11, bias=False), torch.nn.LayerNorm(11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def one_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def two_meshes() -> DeviceMesh:
    """Two by as many as there are."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def by_fsdp2(model: Model, mesh: DeviceMesh) -> torch.nn.Module:
    fully_shard(model.second, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def by_fsdp1(model: Model, mesh: DeviceMesh) -> torch.nn.Module:
    strategy = ShardingStrategy.FULL_SHARD if mesh.ndim == 1 else ShardingStrategy.HYBRID_SHARD
    wrapped = FullyShardedDataParallel(
        model, device_mesh=mesh, sharding_strategy=strategy, device_id=torch.device("cpu")
    )
    FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
    return wrapped


def trained(
    steps: int,
    wrap: Callable[[Model, DeviceMesh], torch.nn.Module] = by_fsdp2,
    mesh: Callable[[], DeviceMesh] = one_mesh,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wrap(Model(), mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(numbers(4, 5, seed=step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def sharded(fill: bool) -> dict[str, torch.Tensor]:
    """DTensors of odd shapes, sharded along each dimension, and replicated."""
    mesh = one_mesh()
    state = {}
    for seed, shape in enumerate(shapes()):
        full = numbers(*shape, seed=seed)
        for dim in range(len(shape)):
            placed = distribute_tensor(full if fill else torch.zeros(shape), mesh, [Shard(dim)])
            state[f"{seed}.{dim}"] = placed
        state[f"{seed}.all"] = distribute_tensor(full if fill else torch.zeros(shape), mesh, [Replicate()])
    return state


def assert_full(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_full(found[key], value)
    elif isinstance(expected, torch.Tensor):
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert torch.equal(found, expected)
    else:
        assert found == expected


def full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: full(element) for key, element in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def write_first(rank: int, path: Path, argument: str) -> None:
    """FSDP2 model and optimizer after training, and DTensors; what they hold goes into a file of torch's."""
    model, optimizer = trained(3)
    weights, moments = get_state_dict(model, optimizer)
    state = {
        "model": weights,
        "optimizer": moments,
        "odd": sharded(fill=True),
        "step": 3,
        "names": ["a", "b"],
    }
    reference = {"model": full(weights), "optimizer": full(moments)}
    save(state, path / "ckpt", volumes=[path / "v0", path / "v1"])
    if rank == 0:
        torch.save(reference, path / "reference.pt")


def read_and_write_again(rank: int, path: Path, argument: str) -> None:
    """Load into as many ranks as there are, compare, and save from them over what was loaded."""
    model, optimizer = trained(0)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "odd": sharded(fill=False), "step": 0, "names": []}
    load(state, path / "ckpt")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    reference = torch.load(path / "reference.pt")
    weights, moments = get_state_dict(model, optimizer)
    assert_full(weights, reference["model"])
    assert_full(moments, reference["optimizer"])
    for name, value in state["odd"].items():
        seed = int(name.partition(".")[0])
        assert torch.equal(value.full_tensor(), numbers(*shapes()[seed], seed=seed)), name
    assert (state["step"], state["names"]) == (3, ["a", "b"])
    dist.barrier()  # all have read
    save({**state, "model": weights, "optimizer": moments}, path / "ckpt")


def wrapped_models(rank: int, path: Path, argument: str) -> None:
    """FSDP2, FSDP1, and each with replicas (HSDP), every one to every other, with their optimizers."""
    ways = [(wrap, mesh) for wrap in (by_fsdp2, by_fsdp1) for mesh in (one_mesh, two_meshes)]
    for saved_by in ways:
        model, optimizer = trained(2, *saved_by)
        weights, moments = get_state_dict(model, optimizer)
        expected = full({"model": weights, "optimizer": moments})
        save({"model": weights, "optimizer": moments}, path / "ckpt")
        for loaded_by in ways:
            model, optimizer = trained(0, *loaded_by)
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            load(state, path / "ckpt")
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            weights, moments = get_state_dict(model, optimizer)
            assert_full(weights, expected["model"])
            assert_full(moments, expected["optimizer"])
            dist.barrier()


def placements(rank: int, path: Path, argument: str) -> None:
    """DTensors on two dimensions of ranks and on one, every placement to every other."""
    whole = numbers(13, 7, seed=4)
    each: list[Placement] = [Shard(0), Shard(1), Replicate()]
    placed = [(two_meshes(), [first, second]) for first in each for second in each]
    placed += [(one_mesh(), [only]) for only in each]
    for number, (mesh, where) in enumerate(placed):
        save({"t": distribute_tensor(whole, mesh, where)}, path / f"placed{number}")
        into = {
            str(other): distribute_tensor(torch.zeros(13, 7), mesh, where)
            for other, (mesh, where) in enumerate(placed)
        }
        for tensor in into.values():
            load({"t": tensor}, path / f"placed{number}")
            assert torch.equal(tensor.full_tensor(), whole), (where, tensor.placements)


def specs(length: int, rest: list[int]) -> list[Any]:
    """Ways to cut a tensor along its first dimension over two ranks."""

    def at(begin: int, end: int, rank: int) -> ShardMetadata:
        return ShardMetadata([begin, *[0] * len(rest)], [end - begin, *rest], f"rank:{rank}/cpu")

    return [
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]),
        ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"]),
        EnumerableShardingSpec([at(0, 2, 0), at(2, 3, 1), at(3, 6, 0), at(6, 9, 1), at(9, length, 0)]),
        EnumerableShardingSpec([at(0, 8, 1), at(8, length, 0)]),
    ]


def gathered(tensor: Any, shape: list[int]) -> torch.Tensor:
    out = torch.zeros(shape) if dist.get_rank() == 0 else None
    tensor.gather(out=out)
    return torch.zeros(0) if out is None else out


def sharded_tensors(rank: int, path: Path, argument: str) -> None:
    """ShardedTensor: every spec to every other, rows to columns, and between sharded and whole tensors."""
    rows = specs(10, [20])
    for old in rows:
        stored = sharded_tensor.rand(old, 10, 20)
        whole = numbers(32, seed=1)
        cut = sharded_tensor.rand(specs(32, [])[3], 32)
        save({"t": stored, "whole": whole, "cut": cut}, path / "st")
        dist.barrier()
        expected = gathered(stored, [10, 20])
        expected_cut = gathered(cut, [32])
        for new in [*rows, ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"])]:
            into = {
                "t": sharded_tensor.zeros(new, 10, 20),
                "whole": sharded_tensor.zeros(specs(32, [])[1], 32),
            }
            load(into, path / "st")
            assert torch.equal(gathered(into["t"], [10, 20]), expected)
            whole_again = gathered(into["whole"], [32])
            assert rank != 0 or torch.equal(whole_again, whole)
        plain = {"t": torch.zeros(10, 20), "cut": torch.zeros(32)}
        load(plain, path / "st")
        assert rank != 0 or torch.equal(plain["t"], expected)
        assert rank != 0 or torch.equal(plain["cut"], expected_cut)
        dist.barrier()
    blobs: dict[str, Any] = {"zero": [1], "one": "text"}
    save(blobs, path / "bytes")
    blobs = {"zero": None, "one": None}
    load(blobs, path / "bytes")
    assert blobs == {"zero": [1], "one": "text"}


def saving(rank: int, path: Path, argument: str) -> None:
    """Asynchronously in a thread and in a process; without collectives."""
    mesh = one_mesh()
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        for step in range(2):
            tensor = numbers(301, 40, seed=step)
            state = {"t": distribute_tensor(tensor.clone(), mesh, [Shard(0)]), "step": step}
            writer = tl.dcp.StorageWriter(path / kind.name)
            future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
            state["t"].to_local().fill_(-1)
            future.result(timeout=90)
            into = {"t": distribute_tensor(torch.zeros(301, 40), mesh, [Shard(1)]), "step": -1}
            load(into, path / kind.name)
            assert torch.equal(into["t"].full_tensor(), tensor)
            assert into["step"] == step
            dist.barrier()
    mine = {"mine": numbers(9, seed=rank)}
    dcp.save(mine, storage_writer=tl.dcp.StorageWriter(path / "each"), use_collectives=False)
    again = {"mine": torch.zeros(9)}
    load(again, path / "each")
    assert torch.equal(again["mine"], mine["mine"])


def sharing_a_group(rank: int, path: Path, argument: str) -> None:
    """async_save over the group of the training warns, at its line, once."""

    def warned(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            future = dcp.async_save(
                {"a": torch.ones(9)},
                storage_writer=tl.dcp.StorageWriter(path / f"group-{rank if 'no_dist' in options else 0}"),
                **options,
            )
            future.result(timeout=90)
            dist.barrier()
        ours = [each for each in caught if "async_save communicates" in str(each.message)]
        assert {each.filename for each in ours} <= {__file__}
        return [str(each.message) for each in ours]

    assert warned(process_group=dist.new_group(backend="gloo")) == []
    assert warned(no_dist=True) == []
    assert warned(async_checkpointer_type=AsyncCheckpointerType.PROCESS) == []
    checkpoints = tl.dcp.Checkpointer(path / "run")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="async_save communicates")
        checkpoints.async_save(1, {"a": torch.ones(9)}).result(timeout=90)
    dist.barrier()
    (text,) = warned()
    assert "process_group=torch.distributed.new_group(backend='gloo')" in text
    assert warned() == []


def failing(rank: int, path: Path, argument: str) -> None:
    """An error of one rank is an error of all, and the old checkpoint stays."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    old, new = numbers(50, 3, seed=1), numbers(50, 3, seed=2)
    save({"t": distribute_tensor(old, mesh, [Shard(0)])}, path / "ckpt")

    def breaks(*args: Any, **kwargs: Any) -> Any:
        raise tl.Error(5, "the disk is gone", "/disk")

    for who, function in (
        (1, "prepare_local_plan"),
        (1, "write_data"),
        (1, "write_data"),
        (0, "prepare_global_plan"),
        (0, "finish"),
    ):
        writer = tl.dcp.StorageWriter(path / "ckpt")
        if rank == who:
            setattr(writer, function, breaks)
        try:
            dcp.save({"t": distribute_tensor(new, mesh, [Shard(0)])}, storage_writer=writer)
        except CheckpointException as error:
            failures = error.failures
        else:
            raise AssertionError(f"{function} of rank {who} failed unnoticed")
        assert list(failures) == [who]
        assert "the disk is gone" in str(failures[who][0])
        assert failures[who][0].filename == "/disk"
        into = {"t": distribute_tensor(torch.zeros(50, 3), mesh, [Shard(1)])}
        load(into, path / "ckpt")
        assert torch.equal(into["t"].full_tensor(), old)
    assert len(list((path / "ckpt").glob(f"rank{rank:05d}-*"))) == 2  # of old, and of the last that failed
    dist.barrier()
    save({"t": distribute_tensor(new, mesh, [Shard(0)])}, path / "ckpt")
    assert len(list((path / "ckpt").iterdir())) == 1 + dist.get_world_size()
    dist.barrier()
    if rank == 0:  # damage what rank 1 reads
        for shard in (path / "ckpt").glob("rank00001*"):
            shard.write_bytes(bytes(shard.stat().st_size))
    dist.barrier()
    try:
        load({"t": distribute_tensor(torch.zeros(50, 3), mesh, [Shard(0)])}, path / "ckpt")
    except CheckpointException as error:
        failures = error.failures
    else:
        raise AssertionError("damage went unnoticed")
    assert list(failures) == [1]
    cause = failures[1][0]
    assert isinstance(cause, tl.Corrupt)
    assert (cause.tensor, cause.chunk) == ("t", 0)


def dying(rank: int, path: Path, argument: str) -> None:
    """Save once, then die in the phase that is asked for, on the rank that is asked for."""
    path = path / argument
    who, function, when = argument.split(":")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    save({"t": distribute_tensor(numbers(50, 3, seed=1), mesh, [Shard(0)])}, path / "ckpt")
    writer = tl.dcp.StorageWriter(path / "ckpt")
    if rank == int(who):
        owner: Any = _writer if function == "write_layouts" else writer
        original = getattr(owner, function)

        def dies(*args: Any, **kwargs: Any) -> Any:
            if when == "after":
                original(*args, **kwargs)
            os._exit(DIED)

        setattr(owner, function, dies)
    try:
        dcp.save({"t": distribute_tensor(numbers(50, 3, seed=2), mesh, [Shard(0)])}, storage_writer=writer)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}")
        sys.stdout.flush()
        os._exit(0)  # the process group cannot be ended in order
    raise AssertionError("the death of a rank went unnoticed")


def save_parts(rank: int, path: Path, argument: str) -> None:
    """Each rank its part of a DTensor, without collectives; then all over each other, with no_dist."""
    state = {"t": distribute_tensor(numbers(128, 6, seed=1), one_mesh(), [Shard(0)])}
    dcp.save(state, storage_writer=tl.dcp.StorageWriter(path / "parts"), use_collectives=False)
    into = {"t": distribute_tensor(torch.zeros(128, 6), one_mesh(), [Shard(0)])}
    load(into, path / "parts")
    assert torch.equal(into["t"].full_tensor(), numbers(128, 6, seed=1))
    try:
        dcp.save(state, storage_writer=tl.dcp.StorageWriter(path / "alone"), no_dist=True)
    except CheckpointException as error:
        print(error.failures[0][0])
    assert not list((path / "alone").glob("*.manifest"))


def save_beside_a_failure(rank: int, path: Path, argument: str) -> None:
    """Each rank saves alone into a new directory; rank 0, which made it, fails before rank 1 writes."""
    writer = tl.dcp.StorageWriter(path / "ckpt")
    prepare = writer.prepare_local_plan

    def prepare_in_order(*args: Any) -> Any:
        if rank == 1:
            dist.barrier()  # rank 0 has made the directory
        plan = prepare(*args)
        if rank == 0:
            dist.barrier()
        dist.barrier()  # rank 1 has found it
        if rank == 1:
            dist.barrier()  # the save of rank 0 has failed
        return plan

    setattr(writer, "prepare_local_plan", prepare_in_order)  # noqa: B010 - a method
    part = {"t": distribute_tensor(numbers(128, 6, seed=1), one_mesh(), [Shard(0)])}
    try:
        dcp.save(part if rank == 0 else {"t": torch.ones(9)}, storage_writer=writer, no_dist=True)
        print("saved")
    except CheckpointException as error:
        print(error.failures[0][0])
        dist.barrier()


def load_parts(rank: int, path: Path, argument: str) -> None:
    """Load what the ranks of save_parts have written, divided along dimension DIM, or by each rank alone."""
    dims = [int(argument)] if argument.isdigit() else []
    local = torch.full((128, 6), -7.0)
    into = {"t": distribute_tensor(local, one_mesh(), [Shard(dim) for dim in dims] or [Replicate()])}
    try:
        load(into, path / "parts")
    except (CheckpointException, tl.Error) as error:
        print(getattr(error, "failures", {0: (error,)})[0][0])
    assert bool((into["t"].to_local() == -7).all())  # nothing is changed before the error


def save_stages(rank: int, path: Path, argument: str) -> None:
    """Two groups of two ranks save into one directory at once; group 1 ends once group 0 has."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = rank // 2
    writer = tl.dcp.StorageWriter(path / "ckpt")
    write_data = writer.write_data

    def write_late(*args: Any) -> Any:
        dist.barrier()  # both have begun
        if stage == 1:
            dist.barrier()  # the other has ended
        return write_data(*args)

    setattr(writer, "write_data", write_late)  # noqa: B010 - a method
    try:
        dcp.save({f"stage{stage}": torch.ones(9)}, storage_writer=writer, process_group=groups[stage])
        print("saved")
    except CheckpointException as error:
        print(type(error.failures[0][0]).__name__)
    if stage == 0:
        dist.barrier()


def value_of(run: int, rank: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(10 * run + rank))}


def wait_for_files(directory: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(directory.glob(pattern))) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def wait_for_nobody(*args: Any, **kwargs: Any) -> None:
    """In place of the barrier that ends a save without collectives."""


def save_apart(rank: int, path: Path, argument: str) -> None:
    """Save without collectives as run RUN:RANKS; these RANKS die once they have written, uncommitted."""
    run, _, dying = argument.partition(":")
    dist.barrier = wait_for_nobody
    writer = tl.dcp.StorageWriter(path / "ckpt")

    def leave(status: int) -> None:
        """End at once: the process group cannot be ended in order. Rank 0, which has the store, is last."""
        sys.stdout.flush()
        (path / f"left-{run}-{rank}").touch()
        if rank == 0:
            wait_for_files(path, f"left-{run}-*", dist.get_world_size())
        os._exit(status)

    if str(rank) in dying:
        setattr(writer, "finish", lambda *_, **__: leave(DIED))  # noqa: B010 - a method
    try:
        dcp.save(value_of(int(run), rank), storage_writer=writer, use_collectives=False)
        print("saved")
    except FileExistsError as error:
        print(f"refused: {error}")
    leave(0)


def load_apart(rank: int, path: Path, argument: str) -> None:
    """Load what was saved without collectives: all values of run RUN, or an error."""
    into: dict[str, Any] = {"w": torch.zeros(1000)}
    if argument == "dtensor":
        into["w"] = DTensor.from_local(torch.zeros(4), one_mesh(), [Shard(0)])
    try:
        load(into, path / "ckpt")
    except CheckpointException as error:
        print(f"refused: {next(iter(error.failures.values()))[0]}")
        return
    assert torch.equal(into["w"], value_of(int(argument), rank)["w"]), into["w"][0]
    print("loaded")


def retry_apart(rank: int, path: Path, argument: str) -> None:
    """Save twice without collectives: the first time with an error of rank 0, which it survives."""
    barrier, dist.barrier = dist.barrier, wait_for_nobody

    def breaks(*args: Any, **kwargs: Any) -> Any:
        raise tl.Error(5, "the disk is gone", "/disk")

    for run in (1, 2):
        writer = tl.dcp.StorageWriter(path / "ckpt")
        if (rank, run) == (0, 1):
            setattr(writer, "write_data", breaks)  # noqa: B010 - a method
        try:
            dcp.save(value_of(run, rank), storage_writer=writer, use_collectives=False)
            print("saved")
        except OSError as error:
            print(type(error).__name__)
        barrier()
    dist.barrier = barrier


def miss_apart(rank: int, path: Path, argument: str) -> None:
    """Save twice without collectives into a directory; rank ARGUMENT misses the first save: WHO-HOW."""
    who, _, how = argument.partition("-")
    barrier, dist.barrier = dist.barrier, wait_for_nobody

    def breaks(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("bad batch")

    for moment in (1, 2):
        planner = DefaultSavePlanner()
        try:
            if (str(rank), moment) == (who, 1):
                setattr(planner, "create_local_plan", breaks)  # noqa: B010 - a method
                if how == "batch":
                    breaks()
            local = torch.full((4,), float(moment))
            state = {"w": DTensor.from_local(local, one_mesh(), [Shard(0)]), "step": moment}
            writer = tl.dcp.StorageWriter(path / "ckpt")
            dcp.save(state, storage_writer=writer, planner=planner, use_collectives=False)
            print("saved")
        except (ValueError, FileExistsError) as error:
            print(type(error).__name__)
        barrier()
    dist.barrier = barrier


def repeat_apart(rank: int, path: Path, argument: str) -> None:
    """Save three times without collectives into a directory; the first save is kept."""
    for moment in (1, 2, 3):
        writer = tl.dcp.StorageWriter(path / "ckpt")
        try:
            dcp.save(value_of(moment, rank), storage_writer=writer, use_collectives=False)
            print("saved")
        except FileExistsError as error:
            print(type(error).__name__)


def save_by_groups(rank: int, path: Path, argument: str) -> None:
    """Of two groups of two ranks, rank 0 of the one and then rank 1 of the other save without collectives."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    barrier, dist.barrier = dist.barrier, wait_for_nobody
    for turn in (0, 3):
        if rank == turn:
            writer, group = tl.dcp.StorageWriter(path / "ckpt"), groups[rank // 2]
            try:
                dcp.save(value_of(1, rank), storage_writer=writer, use_collectives=False, process_group=group)
                print("saved")
            except FileExistsError as error:
                print(type(error).__name__)
        barrier()
    dist.barrier = barrier


def checkpointer_calls(rank: int, directory: Path, argument: str) -> None:
    """Ranks make different calls: all learn of it, and nothing is read, written or removed."""
    run = directory / f"run-{argument}"
    checkpoints = tl.dcp.Checkpointer(run)
    for step in (1, 2):
        checkpoints.save(step, {"w": torch.full((3,), float(step))})
    into = {"w": torch.zeros(3)}
    acts: dict[str, Callable[[], Any]] = {
        "load(1)": lambda: checkpoints.load(into, 1),
        "load(2)": lambda: checkpoints.load(into, 2),
        "load()": lambda: checkpoints.load(into),
        "delete(1)": lambda: checkpoints.delete(1),
        "save(3)": lambda: checkpoints.save(3, into),
        "save(4)": lambda: checkpoints.save(4, into),
        "async_save(3)": lambda: checkpoints.async_save(3, into),
    }
    pairs = [("load(1)", "load(2)"), ("delete(1)", "load()"), ("load()", "save(3)"), ("save(3)", "save(4)")]
    for calls in (*pairs, ("async_save(3)", "save(3)")):
        with pytest.raises(tl.RankError) as caught:
            acts[calls[rank]]()
        assert f"rank 0 has called {calls[0]}, and rank 1 {calls[1]}" in str(caught.value)
        assert caught.value.rank == 1
        assert torch.equal(into["w"], torch.zeros(3))
        assert checkpoints.steps() == [1, 2]
        assert sorted(each.name for each in run.iterdir()) == ["step-00000001", "step-00000002"]
    assert checkpoints.load(into) == 2


class Uncopyable:
    """Fails where a state is copied."""

    def __deepcopy__(self, memo: object) -> object:
        raise ValueError("this cannot be copied")


def checkpointer_fails_to_copy(rank: int, directory: Path, argument: str) -> None:
    """async_save() fails on one rank before its part in the background begins."""
    checkpoints = tl.dcp.Checkpointer(directory / "run-copy")
    state = {"w": torch.zeros(3), "other": Uncopyable() if rank == 1 else 0}
    expected = tl.RankError if rank == 0 else ValueError
    with pytest.raises(expected, match="this cannot be copied"):
        checkpoints.async_save(1, state)
    checkpoints.async_save(2, {"w": torch.zeros(3)})
    checkpoints.wait()
    assert checkpoints.steps() == [2]


def checkpointer_alone(rank: int, directory: Path, argument: str) -> None:
    """One rank does not come to the save, within the timeout of the process group."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    checkpoints = tl.dcp.Checkpointer(directory / "run-alone", process_group=group)
    checkpoints.save(1, {"w": torch.zeros(3)})
    if rank == 0:
        with pytest.raises(tl.RankError, match=r"rank 0 has called save\(2\), and another rank"):
            checkpoints.save(2, {"w": torch.zeros(3)})


PROGRAMS: list[Callable[[int, Path, str], None]] = [
    write_first,
    read_and_write_again,
    wrapped_models,
    placements,
    sharded_tensors,
    saving,
    sharing_a_group,
    failing,
    dying,
    save_stages,
    save_parts,
    save_beside_a_failure,
    load_parts,
    save_apart,
    load_apart,
    retry_apart,
    miss_apart,
    repeat_apart,
    save_by_groups,
    checkpointer_calls,
    checkpointer_fails_to_copy,
    checkpointer_alone,
]


def run_rank(name: str, rank: int, world: int, directory: Path, argument: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store-{name}-{world}-{argument}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    # A program may end its process at once, which must not happen while another rank still connects to it.
    joined = f"joined-{name}-{world}-{argument}"
    (directory / f"{joined}-{rank}").touch()
    wait_for_files(directory, f"{joined}-*", world)
    {program.__name__: program for program in PROGRAMS}[name](rank, directory, argument)
    dist.barrier()
    dist.destroy_process_group()


def fork_rank(name: str, rank: int, world: int, directory: Path, argument: str) -> int:
    child = os.fork()
    if child != 0:
        return child
    status = 1
    try:
        output = os.open(directory / f"output-{name}-{world}-{argument}-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        run_rank(name, rank, world, directory, argument)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    for step in sys.argv[2:]:
        name, world, argument = (*step.split("/"), "")[:3]
        ranks = [fork_rank(name, rank, int(world), directory, argument) for rank in range(int(world))]
        print(*(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks), flush=True)


if __name__ == "__main__":
    main()
