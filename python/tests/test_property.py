"""A file behaves as a bytearray does, whatever the offsets, sizes, alignments and disturbances below."""

import itertools
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trunkline as tl

LIMIT = 400_000
BLOCK_BYTES = 16384

near_a_boundary = st.builds(
    lambda multiple, unit, delta: max(0, multiple * unit + delta),
    st.integers(0, 40),
    st.sampled_from([512, 4096, BLOCK_BYTES]),
    st.sampled_from([-1, 0, 0, 0, 1]),
)
offsets = near_a_boundary.filter(lambda offset: offset < LIMIT) | st.integers(0, LIMIT - 1)
sizes = near_a_boundary.filter(lambda size: size < LIMIT // 4) | st.integers(0, LIMIT // 4)


class Step(NamedTuple):
    """One operation; `misalignment` is where in a page its buffer starts."""

    kind: str
    offset: int
    size: int
    misalignment: int


steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(
            ["write", "write", "async write", "read", "read", "async read", "batch", "truncate", "sync"]
        ),
        offsets,
        sizes,
        st.sampled_from([0, 0, 64, 512, 1, 4095]),
    ),
    min_size=1,
    max_size=12,
)

# Names of files, so that no example sees what another left.
names = map("example{}".format, itertools.count())


class Memory:
    """One page-aligned area from which buffers of any alignment are cut."""

    def __init__(self) -> None:
        self.area = memoryview(mmap.mmap(-1, LIMIT + 8192))

    def cut(self, size: int, misalignment: int) -> memoryview:
        return self.area[misalignment : misalignment + size]


def content(step: Step, number: int) -> bytes:
    pattern = bytes((number * 37 + i) % 251 for i in range(251))
    return (pattern * (step.size // 251 + 1))[: step.size]


def run_step(
    engine: tl.Engine, file: tl.File, model: bytearray, memory: Memory, step: Step, number: int
) -> None:
    buffer = memory.cut(step.size, step.misalignment)
    if "write" in step.kind or step.kind == "batch":
        data = content(step, number)
        buffer[:] = data
        if step.kind == "write":
            assert file.pwrite(buffer, step.offset) == step.size
        elif step.kind == "async write":
            assert file.async_pwrite(buffer, step.offset).result() == step.size
        else:
            half = step.size // 2
            writes = [
                tl.Write(file, buffer[:half], step.offset),
                tl.Write(file, buffer[half:], step.offset + half),
            ]
            assert tl.wait_all(engine.submit(writes)) == step.size
        if step.size:
            model.extend(bytes(max(0, step.offset + step.size - len(model))))
            model[step.offset : step.offset + step.size] = data
    elif step.kind == "truncate":
        file.truncate(step.offset)
        del model[step.offset :]
        model.extend(bytes(step.offset - len(model)))
    elif step.kind == "sync":
        file.sync()
    else:
        offset = min(step.offset, len(model))
        buffer = buffer[: len(model) - offset]
        buffer[:] = b"\xff" * len(buffer)
        if step.kind == "read":
            assert file.pread(buffer, offset) == len(buffer)
        else:
            assert file.async_pread(buffer, offset).result() == len(buffer)
        assert buffer == model[offset : offset + len(buffer)]


def check(engine: tl.Engine, path: Path, plan: list[Step]) -> None:
    model = bytearray()
    memory = Memory()
    with tl.open(path, "w", engine=engine) as file:
        for number, step in enumerate(plan):
            run_step(engine, file, model, memory, step, number)
            assert file.size == len(model)
        whole = bytearray(len(model))
        file.pread(whole)
        assert whole == model
    if engine.backend != "memory":
        assert path.read_bytes() == model
        path.unlink()


relaxed = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@relaxed
@given(plan=steps)
def test_a_file_is_a_bytearray(
    new_engine: Callable[..., tl.Engine], tmp_path: Path, plan: list[Step]
) -> None:
    with new_engine(block_bytes=BLOCK_BYTES, queue_depth=3) as engine:
        check(engine, tmp_path / next(names), plan)


@relaxed
@given(plan=steps, seed=st.integers(0, 1 << 32))
def test_a_disturbed_file_is_a_bytearray(
    new_engine: Callable[..., tl.Engine], tmp_path: Path, plan: list[Step], seed: int
) -> None:
    faults = tl.Faults()
    faults.disturb(seed, 0.2, 0.3)
    with new_engine(block_bytes=BLOCK_BYTES, queue_depth=3, faults=faults) as engine:
        check(engine, tmp_path / next(names), plan)
