"""States of which each rank has a part, for the tests of trunkline.dcp on the disks of nodes."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import trunkline as tl
from trunkline.dcp import _node_reader, _node_save, _transfers, local_checkpointer


def make_whole(seed: int, kilobytes: int = 300) -> dict[str, torch.Tensor]:
    """Return the tensors of a state, whole."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "rows": made(101, 7),
        "columns": made(16, 33).bfloat16(),
        "one row": made(1, 5),  # most ranks have nothing of it
        "large": made(kilobytes * 4, 64),
        "everywhere": made(9, 3),
    }


def make_sharded(seed: int, kilobytes: int = 300, *, zeros: bool = False) -> dict[str, Any]:
    """Return a state of all ranks: tensors in rows and columns, replicated and ordinary ones, and values."""
    whole = {
        name: torch.zeros_like(each) if zeros else each for name, each in make_whole(seed, kilobytes).items()
    }
    plain = whole["everywhere"].clone()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        places = {"columns": Shard(1), "everywhere": Replicate()}
        model: dict[str, Any] = {
            name: distribute_tensor(each, mesh, [places.get(name, Shard(0))]) for name, each in whole.items()
        }
    else:
        model = dict(whole)
    return {
        "model": model,
        "plain": plain,
        "seed": -1 if zeros else seed,
        "text": "" if zeros else f"of {seed}",
        "empty": torch.zeros(0, 3),
    }


def holds(state: dict[str, Any], seed: int, kilobytes: int = 300) -> bool:
    """Whether a state is that of a seed."""
    whole = make_whole(seed, kilobytes)
    full = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each
        for name, each in state["model"].items()
    }
    return (
        all(torch.equal(full[name], each) for name, each in whole.items())
        and torch.equal(state["plain"], whole["everywhere"])
        and (state["seed"], state["text"]) == (seed, f"of {seed}")
    )


class ShardedCalls:
    """What a rank does with a trunkline.dcp.Checkpointer."""

    def __init__(self, engine: tl.Engine) -> None:
        self._engine = engine
        self.made: tl.dcp.Checkpointer | None = None

    def open(self, directory: str, **options: Any) -> list[int]:
        self.made = tl.dcp.Checkpointer(directory, engine=self._engine, **{"local": True, **options})
        return self.made.steps()

    @property
    def it(self) -> tl.dcp.Checkpointer:
        assert self.made is not None
        return self.made

    def save(self, step: int, seed: int, **about: Any) -> None:
        self.it.save(step, make_sharded(seed, **about))

    def save_changing(self, step: int, seed: int) -> None:
        """Save in the background, and change everything as soon as that is allowed."""
        state = make_sharded(seed)
        future = self.it.async_save(step, state)
        for tensor in (*state["model"].values(), state["plain"]):
            tensor.zero_()
        state["seed"] = -2
        future.result()

    def loads(self, seed: int, step: int | None = None, kilobytes: int = 300) -> int:
        """Load, and check that it is the state of a seed; return the step."""
        state = make_sharded(seed, kilobytes, zeros=True)
        loaded = self.it.load(state, step)
        assert holds(state, seed, kilobytes)
        return loaded

    def latest_seed(self) -> int:
        """Load the latest step, check that it is all of one state, and return its seed."""
        state = make_sharded(0, zeros=True)
        self.it.load(state)
        seed: int = state["seed"]
        assert holds(state, seed)
        return seed

    def load_model(self, seed: int) -> None:
        """Load a part of a state."""
        state = {"model": make_sharded(seed, zeros=True)["model"]}
        self.it.load(state)
        assert torch.equal(state["model"]["rows"].full_tensor(), make_whole(seed, 300)["rows"])

    def save_an_object(self, step: int, on_rank: int) -> None:
        """Save a state that cannot be pickled on one rank."""
        state = make_sharded(step)
        if dist.get_rank() == on_rank:
            state["text"] = lambda: None
        self.it.save(step, state)

    def save_until_killed(self, first: int, record: str) -> None:
        """Save steps from `first` on, and keep the last that has succeeded in a file."""
        step = first
        while True:
            self.save(step, step)
            with open(record, "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(str(step))
            step += 1

    def die_at(self, phase: str) -> None:
        """Be killed at a phase of the next save or load."""

        def die(*arguments: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        if phase == "collect":
            local_checkpointer.collect = die
        else:
            assert phase == "send"
            _transfers.run_transfers = die

    def slice_at(self, nbytes: int) -> None:
        """Send larger parts of a state in slices of so many bytes."""
        _node_reader.SLICE_BYTES = _node_save.SLICE_BYTES = nbytes

    def loads_tied(self) -> list[float]:
        """Load two tensors into the same memory, and a third into a part of it."""
        memory = torch.zeros(8)
        self.it.load({"a": memory, "b": memory, "c": memory[:2]})
        return memory.tolist()

    def save_three(self, step: int) -> None:
        self.it.save(
            step, {"a": torch.full((8,), 1.0), "b": torch.full((8,), 2.0), "c": torch.full((2,), 3.0)}
        )

    def save_others(self, step: int) -> None:
        """Save tensors of dtypes, shapes and strides that need care."""
        self.it.save(step, self._others())

    def loads_others(self) -> bool:
        state = {name: torch.zeros_like(each) for name, each in self._others().items()}
        self.it.load(state)
        return all(torch.equal(state[name], each) for name, each in self._others().items())

    def _others(self) -> dict[str, torch.Tensor]:
        matrix = torch.arange(60.0).reshape(6, 10)
        return {
            "complex": torch.arange(5).to(torch.complex128) * 1j,
            "flags": torch.tensor([True, False]),
            "scalar": torch.tensor(3.5),
            "columns": matrix[:, 1:4],
            "turned": matrix.t(),
            "row": matrix[2],
            "empty": torch.zeros(0, 5),
            "a@0,1": torch.ones(2),
            "\u00e9 [0:1]~": torch.ones(1),
        }

    def load_failing(self, call: str) -> None:
        """Load with a planner that fails in a call, on ranks where it gets to it."""

        class Planner(DefaultLoadPlanner):
            def commit_tensor(self, *arguments: Any) -> None:
                if call == "commit_tensor":
                    raise ValueError("the planner does not like it")

            def finish_plan(self, plan: Any) -> Any:
                if call == "finish_plan":
                    raise ValueError("the planner does not like it")
                return super().finish_plan(plan)

        self.it.load(make_sharded(0, zeros=True), planner=Planner() if dist.get_rank() == 1 else None)

    def messages_left(self) -> list[str]:
        """Return the messages of calls that stay in the store of the process group."""
        store: Any = _get_default_store()
        kept = ("/call/", "/at/", "/alive/", "/seen/", "/present/", "//cpu//")
        deadline = time.monotonic() + 15
        while True:
            keys = [str(key) for key in store.list_keys()]
            left = [key for key in keys if "trunkline" in key and not any(each in key for each in kept)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def ask(self, what: str, *arguments: Any) -> Any:
        return getattr(self.it, what)(*arguments)
