"""tl.data.Loader: what its batches hold, their order, states, and what ends reading ahead."""

import concurrent.futures
import contextlib
import errno
import gc
import io
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import pytest

import trunkline as tl
from trunkline._processors import available_processors
from trunkline.data import Batch, Index, Loader, _loader, _stream

Array: TypeAlias = "numpy.ndarray[Any, Any]"

RECORD = 1000
COUNT = 203


@pytest.fixture
def contents() -> Array:
    return numpy.random.default_rng(5).integers(0, 256, (COUNT, RECORD), dtype=numpy.uint8)


@pytest.fixture
def index(tmp_path: Path, contents: Array) -> Index:
    """Records in two files."""
    contents[:100].tofile(tmp_path / "a.bin")
    contents[100:].tofile(tmp_path / "b.bin")
    return tl.data.index([tmp_path / "a.bin", tmp_path / "b.bin"], format="records", record_bytes=RECORD)


def indices_of(batches: Iterator[Batch] | Loader) -> list[list[int]]:
    return [batch.indices.tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def loader_threads() -> list[str]:
    """The threads of all loaders: of the library, and of Python."""
    names = [thread.name for thread in threading.enumerate()]
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    ours = ("trunkline-data", "trunkline-feed", "trunkline-decode", "trunkline-collate")
    return [name for name in names if name.startswith(ours)]


def assert_no_threads(*context: object) -> None:
    """Wait for them: a thread that was joined is still listed for a moment."""
    deadline = time.monotonic() + 20
    while loader_threads() and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert loader_threads() == [], context


def test_every_epoch_has_every_sample_once_in_another_order(index: Index, contents: Array) -> None:
    loader = Loader(index, 16)
    assert len(loader) == 13
    orders = []
    for epoch in range(3):
        assert loader.epoch == epoch
        order: list[int] = []
        for batch in loader:
            assert batch.epoch == epoch
            for sample, memory in zip(batch.indices, batch.samples, strict=True):
                assert bytes(memory) == contents[sample].tobytes()
            assert numpy.array_equal(batch.array(), contents[batch.indices])
            order += batch.indices.tolist()
        assert sorted(order) == list(range(COUNT))
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
    assert flat(indices_of(Loader(index, 16))) == orders[0]
    assert flat(indices_of(Loader(index, 16, seed=1))) != orders[0]
    assert flat(indices_of(Loader(index, 16, shuffle=False))) == list(range(COUNT))


def test_batch_says_where_its_samples_are(index: Index, contents: Array) -> None:
    batch = next(iter(Loader(index, 8)))
    assert len(batch) == 8
    assert batch.memory.dtype == numpy.uint8
    assert batch.lengths.tolist() == [RECORD] * 8
    for sample, offset, length in zip(batch.indices, batch.offsets, batch.lengths, strict=True):
        assert numpy.array_equal(batch.memory[offset : offset + length], contents[sample])
    assert batch.array("<u4").shape == (8, RECORD // 4)
    with pytest.raises(ValueError, match="do not consist of whole"):
        batch.array([("a", "u1", 3)])
    assert "8 samples" in repr(batch)
    again = pickle.loads(pickle.dumps(batch))
    assert numpy.array_equal(again.array(), batch.array())


@pytest.mark.parametrize("dtype", ["float64", "float32", "int16", ">f4"])
def test_rows_of_npy_files_have_their_own_dtype(tmp_path: Path, dtype: str) -> None:
    """Bytes of another dtype would be numbers that nobody saved."""
    rows = numpy.arange(60).reshape(10, 3, 2).astype(dtype)
    numpy.save(tmp_path / "rows.npy", rows)
    batch = next(iter(Loader(tl.data.index(tmp_path / "rows.npy"), 4)))
    expected = rows[batch.indices].reshape(4, 6)
    for array in (
        batch.array(),
        batch.array(dtype),
        batch.copy().array(),
        pickle.loads(pickle.dumps(batch)).array(),
    ):
        assert array.dtype == numpy.dtype(dtype)
        assert numpy.array_equal(array, expected)
    for other in ("uint8", "int64", "complex64"):
        with pytest.raises(
            ValueError, match=rf"^array: the rows of the .npy files are {numpy.dtype(dtype)}, not"
        ):
            batch.array(other)


def test_blocks_are_shuffled_and_stay_together(index: Index) -> None:
    order = flat(indices_of(Loader(index, 20, shuffle=10)))
    assert sorted(order) == list(range(COUNT))
    starts = order[:200:10]
    assert starts != sorted(starts)
    for block in range(20):
        first = order[block * 10]
        assert order[block * 10 : block * 10 + 10] == [(first + place) % COUNT for place in range(10)]


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_divide_every_step(index: Index, ranks: int) -> None:
    alone = flat(indices_of(Loader(index, 1)))
    loaders = [Loader(index, 4, rank=rank, world_size=ranks) for rank in range(ranks)]
    assert len({len(loader) for loader in loaders}) == 1
    batches = [indices_of(loader) for loader in loaders]
    assert {len(each) for each in batches} == {len(loaders[0])}
    steps = [flat(list(step)) for step in zip(*batches, strict=True)]
    assert flat(steps)[:COUNT] == alone
    whole = [
        indices_of(Loader(index, 4, rank=rank, world_size=ranks, drop_last=True)) for rank in range(ranks)
    ]
    assert {len(batch) for each in whole for batch in each} == {4}
    assert {len(each) for each in whole} == {COUNT // (4 * ranks)}


def test_a_state_goes_on_with_the_same_rest(index: Index) -> None:
    loader = Loader(index, 9, seed=3)
    for batches in (0, 1, 7, 22, 23, 30):
        loader = Loader(index, 9, seed=3)
        seen: list[list[int]] = []
        while len(seen) < batches:
            for batch in loader:
                seen.append(batch.indices.tolist())
                if len(seen) == batches:
                    state = json.loads(json.dumps(loader.state_dict()))
                    break
        if batches == 0:
            state = loader.state_dict()
        rest = Loader(index, 9, seed=77)
        rest.load_state_dict(state)
        after = indices_of(rest)
        every = Loader(index, 9, seed=3)
        expected = indices_of(every) + indices_of(every)
        epoch_end = 23 if batches < 23 else 46
        assert seen == expected[:batches]
        assert after == expected[batches:epoch_end], batches
        assert rest.epoch == (1 if batches < 23 else 2)


def test_a_state_names_shuffles_as_they_are_passed(index: Index) -> None:
    for was, now in ((True, False), (False, True), (16, True), (True, 16)):
        state = Loader(index, 4, shuffle=was).state_dict()
        with pytest.raises(ValueError, match=f"saved with shuffle={was}, and this loader has shuffle={now}$"):
            Loader(index, 4, shuffle=now).load_state_dict(state)


def test_a_loader_follows_ranks_that_come_later(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [
        [batch.indices.tolist() for batch in Loader(index, 4, rank=rank, world_size=3)] for rank in range(3)
    ]
    early = pickle.dumps(Loader(index, 4))
    given = Loader(index, 4, rank=0, world_size=1)
    for rank in range(3):
        loader = pickle.loads(early)
        monkeypatch.setattr(_loader, "initialized_ranks", lambda rank=rank: (rank, 3))
        assert len(loader) == len(expected[rank])
        assert [batch.indices.tolist() for batch in loader] == expected[rank]
        assert sum(len(batch.indices) for batch in given) == len(index)
    monkeypatch.setattr(_loader, "initialized_ranks", lambda: None)
    few = Loader(index, len(index), drop_last=True)
    monkeypatch.setattr(_loader, "initialized_ranks", lambda: (0, 2))
    with pytest.raises(ValueError, match="no batch is left"):
        next(iter(few))


def test_a_state_goes_on_with_other_ranks(index: Index) -> None:
    alone = flat(indices_of(Loader(index, 1)))
    loaders = [Loader(index, 4, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(5):
        for iterator in iterators:
            next(iterator)
    states = [loader.state_dict() for loader in loaders]
    assert states[0] == states[1]
    assert states[0]["samples"] == 40
    rest = []
    for rank in range(3):
        loader = Loader(index, 7, rank=rank, world_size=3)
        loader.load_state_dict(states[0])
        rest.append(indices_of(loader))
    assert flat([flat(list(step)) for step in zip(*rest, strict=True)])[: COUNT - 40] == alone[40:]


def test_a_state_of_other_data_is_rejected(index: Index, tmp_path: Path) -> None:
    state = Loader(index, 4).state_dict()
    (tmp_path / "c.bin").write_bytes(bytes(5 * RECORD))
    other = Loader(tl.data.index(tmp_path / "c.bin", format="records", record_bytes=RECORD), 4)
    with pytest.raises(ValueError, match="belongs to other data"):
        other.load_state_dict(state)
    loader = Loader(index, 4)
    for wrong, match in (
        ({}, r"must be what Loader.state_dict\(\) returned, not {}"),
        ({**state, "version": 2}, "newer release"),
        ({**state, "samples": COUNT + 1}, "at sample 204 of 203"),
        ({**state, "epoch": "1"}, "lacks numbers"),
        ({**state, "shuffle": 0}, "shuffle=False"),
    ):
        with pytest.raises(ValueError, match=match):
            loader.load_state_dict(wrong)


def test_the_next_loop_after_a_break_is_the_next_epoch(index: Index) -> None:
    loader = Loader(index, 16)
    for _ in loader:
        break
    assert loader.state_dict()["samples"] == 16
    assert indices_of(loader) == (indices_of(every := Loader(index, 16)), indices_of(every))[1]


def test_another_loop_ends_the_first(index: Index) -> None:
    loader = Loader(index, 16)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="another one began"):
        next(first)
    assert loader.epoch == 1


def test_loading_a_state_in_a_loop_ends_it(index: Index) -> None:
    loader = Loader(index, 16)
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="a state was loaded"):
        next(batches)
    assert indices_of(loader) == indices_of(Loader(index, 16))


def test_kept_batches_are_an_error_that_says_so_not_overwritten(
    index: Index, contents: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stream.RawBatches.next, "__defaults__", (0.3,))
    loader = Loader(index, 8)
    kept: list[Batch] = []
    with pytest.raises(tl.OutOfBudget, match=r"copy what is to be kept \(batch\.copy\(\)\)"):
        kept.extend(loader)
    assert len(kept) == 2
    for each in kept:
        assert numpy.array_equal(each.array(), contents[each.indices])
    seen = len(kept)
    kept.clear()
    assert len(indices_of(loader)) == len(loader) - seen  # goes on with the batch that there was no room for
    copies = [each.copy() for each in loader]
    for each in copies:
        assert numpy.array_equal(each.array(), contents[each.indices])


def test_views_keep_the_memory(index: Index, contents: Array) -> None:
    loader = Loader(index, 8, prefetch=3)
    batch = next(iter(loader))
    samples, numbers = batch.samples, batch.indices
    array = batch.array()
    del batch
    for _ in loader:
        pass
    loader.close()
    gc.collect()
    for sample, number in zip(samples, numbers, strict=True):
        assert bytes(sample) == contents[number].tobytes()
    assert numpy.array_equal(array, contents[numbers])


def test_decode_and_collate(index: Index, contents: Array) -> None:
    def total(sample: memoryview) -> int:
        return int(numpy.frombuffer(sample, numpy.uint8).sum())

    order = indices_of(Loader(index, 16))
    expected = [[int(contents[sample].sum()) for sample in batch] for batch in order]
    for workers in (1, 3):
        assert list(Loader(index, 16, decode=total, workers=workers)) == expected
    assert list(Loader(index, 16, decode=total, collate=sum)) == [sum(batch) for batch in expected]
    assert list(Loader(index, 16, collate=len)) == [len(batch) for batch in order]


def test_decode_in_processes(tmp_path: Path) -> None:
    numpy.save(tmp_path / "rows.npy", numpy.arange(60.0).reshape(30, 2))
    index = tl.data.index(tmp_path / "rows.npy")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        sums = flat(list(Loader(index, 8, decode=numpy.sum, workers=pool)))
    order = flat(indices_of(Loader(index, 8)))
    assert sums == [4.0 * row + 1 for row in order]


def repr_of_types(sample: Any) -> str:
    parts = sample.values() if isinstance(sample, dict) else [sample]
    return " ".join(f"{type(part).__name__}={bytes(part)!r}" for part in parts if not isinstance(part, str))


def test_bytes_are_decoded_in_processes(tmp_path: Path) -> None:
    (tmp_path / "records.bin").write_bytes(b"abcdef")
    with tarfile.open(tmp_path / "archive.tar", "w") as archive:
        for name, data in (("0.x", b"gh"), ("0.y", b"i")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        for name, options, expected in (
            ("records.bin", {"record_bytes": 3}, ["memoryview=b'abc'", "memoryview=b'def'"]),
            ("archive.tar", {}, ["memoryview=b'gh' memoryview=b'i'"]),
        ):
            index = tl.data.index(tmp_path / name, **options)  # type: ignore[arg-type]
            loader = Loader(index, 2, shuffle=False, decode=repr_of_types, workers=pool)
            assert list(loader) == [expected]


def test_an_error_in_decode_names_the_sample_and_ends_reading(index: Index, contents: Array) -> None:
    def decode(sample: memoryview) -> bytes:
        if bytes(sample) == damaged:
            raise ValueError("not an image")
        return bytes(sample)

    order = flat(indices_of(Loader(index, 16)))
    damaged = contents[order[40]].tobytes()
    loader = Loader(index, 16, decode=decode)
    batches = iter(loader)
    next(batches)
    next(batches)
    with pytest.raises(ValueError, match="not an image") as caught:
        next(batches)
    if sys.version_info >= (3, 11):
        assert f"sample {order[40]} of" in caught.value.__notes__[0]
    assert loader.state_dict()["samples"] == 32
    lenient = Loader(index, 16, decode=decode, on_error="skip")
    sizes = [len(batch) for batch in lenient]
    assert sizes[2] == 15
    assert sum(sizes) == COUNT - 1
    assert lenient.skipped == 1


def test_skipping_every_sample_is_an_error(index: Index) -> None:
    def decode(sample: memoryview) -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        next(iter(Loader(index, 16, decode=decode, on_error="skip")))


def test_nothing_stays_after_a_break_or_an_error(index: Index) -> None:
    gc.collect()
    assert_no_threads()
    for options in ({}, {"decode": bytes}, {"decode": bytes, "collate": len}):
        loader = Loader(index, 16, prefetch=4, **options)  # type: ignore[arg-type]
        for _ in loader:
            break
        assert_no_threads(options)
        with contextlib.suppress(ZeroDivisionError):
            for _ in loader:
                raise ZeroDivisionError
        del _
        assert_no_threads(options)
        with loader:
            for _ in loader:
                pass
            assert loader_threads()
        assert_no_threads(options)


def test_no_memory_stays_after_a_break(tmp_path: Path) -> None:
    (tmp_path / "zeros.bin").touch()
    os.truncate(tmp_path / "zeros.bin", 100_000_000)
    index = tl.data.index(tmp_path / "zeros.bin", format="records", record_bytes=1_000_000)
    engine = tl.Engine(lanes=1, queue_depth=4)
    loader = Loader(index, 20, engine=engine)
    for _ in loader:
        break
    assert engine.stats()["pinned_bytes"] >= 20_000_000
    del _
    assert engine.stats()["pinned_bytes"] < 20_000_000


def test_nothing_stays_after_garbage_collection(index: Index) -> None:
    gc.collect()
    assert_no_threads()
    for options in ({}, {"decode": bytes}):
        loader = Loader(index, 16, **options)  # type: ignore[arg-type]
        for _ in loader:
            pass
        del loader, _
        gc.collect()
        assert_no_threads(options)


def test_the_next_epoch_is_read_ahead(index: Index) -> None:
    faults = tl.Faults()
    engine = tl.Engine(faults=faults)
    loader = Loader(index, 64, engine=engine, prefetch=3)
    for _ in loader:
        pass
    del _
    deadline = time.monotonic() + 20
    commands = -1
    while commands != faults.commands("read") and time.monotonic() < deadline:
        commands = faults.commands("read")
        threading.Event().wait(2)
    faults.hold("read", faults.commands("read"), 1000)  # nothing more can be read
    first = next(iter(loader))
    assert first.epoch == 1
    faults.release()
    del first
    loader.close()


def test_a_file_that_changed_is_an_error(index: Index) -> None:
    with Path(index.paths[0]).open("ab") as file:
        file.write(b"x")
    with pytest.raises(tl.Corrupt, match="has changed since it was indexed"):
        for _ in Loader(index, 8):
            pass


def test_a_read_that_fails_ends_the_loop_which_goes_on_there(tmp_path: Path) -> None:
    (tmp_path / "zeros.bin").touch()
    os.truncate(tmp_path / "zeros.bin", 5_000_000)
    # Records that are not read together: those of a read that fails are read again, one by one.
    index = tl.data.index(tmp_path / "zeros.bin", format="records", record_bytes=50_000)
    faults = tl.Faults()
    loader = Loader(index, 8, engine=tl.Engine(faults=faults, lanes=1), seed=1)
    faults.fail("read", 11, 5, 1)
    seen: list[list[int]] = []
    with pytest.raises(tl.Error, match="EIO"):
        seen.extend(batch.indices.tolist() for batch in loader)
    assert len(seen) == 1
    seen += indices_of(loader)
    assert seen == indices_of(Loader(index, 8, seed=1))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"batch_size": 0}, ValueError, "batch_size: must be at least 1"),
        ({"batch_size": 1.5}, TypeError, "batch_size: must be an integer"),
        ({"rank": 1}, ValueError, "must be given together"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank: must be from 0"),
        ({"on_error": "ignore"}, ValueError, "on_error"),
        ({"decode": 3}, TypeError, "decode: must be callable"),
        ({"shuffle": -1}, ValueError, "shuffle"),
        ({"batch_size": 300, "drop_last": True}, ValueError, "no batch is left"),
        ({"labels": True, "decode": bytes}, ValueError, "no classes"),
        ({"device": "meta"}, ValueError, "device"),
        ({"device": 1.5}, TypeError, "^device: must be a str, an int or a torch.device, not float$"),
        ({"shuffle": "yes"}, TypeError, "^shuffle: must be True, False, or the number of samples that stay"),
        ({"workers": "a"}, TypeError, "^workers: must be a number of threads, an Executor or None, not str$"),
    ],
)
def test_invalid_arguments(
    index: Index, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Loader(index, **{"batch_size": 8, **arguments})


def test_a_gpu_that_is_not_there_is_a_typed_error(index: Index) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(tl.Unsupported, match="^device: cuda is not available: torch sees no CUDA GPU"):
        Loader(index, 8, device="cuda")


def test_many_processes_without_torch_distributed_are_warned_of(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match="this process gets all samples"):
        next(iter(Loader(index, 8)))
    next(iter(Loader(index, 8, rank=1, world_size=4)))


def test_a_forked_child_reads_on_its_own(index: Index) -> None:
    loader = Loader(index, 16)
    iterator = iter(loader)
    next(iterator)
    expected = indices_of(Loader(index, 16))
    state = loader.state_dict()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            inherited = Loader(index, 16)
            inherited.load_state_dict(state)
            loader.load_state_dict(state)
            status = 0 if indices_of(inherited) == expected[1:] == indices_of(loader) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [batch.indices.tolist() for batch in iterator] == expected[1:]


def test_an_executor_that_was_used_before_a_fork_is_an_error(index: Index) -> None:
    """Its threads are the parent's: what is submitted to it would never be done."""
    with concurrent.futures.ThreadPoolExecutor(1) as used, concurrent.futures.ThreadPoolExecutor(1) as unused:
        decode = bytes
        loaders = [Loader(index, 16, decode=decode, workers=each) for each in (used, unused)]
        next(iter(loaders[0]))
        loaders[0].set_epoch(0)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                next(iter(loaders[1]))
                with pytest.raises(tl.Unsupported, match="forked after the executor had been used"):
                    next(iter(loaders[0]))
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_state_of_one_of_several_workers_is_for_as_many(index: Index) -> None:
    worker = Loader(index, 16)
    batches = worker._epoch(0, 3)
    next(batches)
    state = worker.state_dict()
    expected = [batch.indices.tolist() for batch in batches]
    again = Loader(index, 16)
    again.load_state_dict(state)
    assert [batch.indices.tolist() for batch in again._epoch(0, 3)] == expected
    for shares in (1, 2, 4):
        again.load_state_dict(state)
        with pytest.raises(ValueError, match="was taken in one of 3 workers of a DataLoader"):
            next(again._epoch(0, shares))


@pytest.mark.parametrize("wrong", [{"epoch": 2**64}, {"samples": True}, {"seed": -1}])
def test_numbers_of_a_state_are_checked(index: Index, wrong: dict[str, int]) -> None:
    loader = Loader(index, 16)
    with pytest.raises(ValueError, match="state: lacks numbers"):
        loader.load_state_dict(loader.state_dict() | wrong)


def test_pickles(index: Index) -> None:
    loader = Loader(index, 16)
    next(iter(loader))
    again = pickle.loads(pickle.dumps(loader))
    assert again.state_dict() == loader.state_dict()


CTRL_C = """
import os, signal, sys, threading
import trunkline as tl
faults = tl.Faults()
engine = tl.Engine(faults=faults)
loader = tl.data.Loader(tl.data.index(sys.argv[1], format="records", record_bytes=1000), 8, engine=engine,
                        decode=bytes if sys.argv[2] == "decode" else None)
batches = iter(loader)
next(batches)
faults.hold("read", faults.commands("read"), 10_000)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        next(batches)
except KeyboardInterrupt:
    print("interrupted", loader.state_dict()["samples"] > 0)
faults.release()
"""


@pytest.mark.parametrize("how", ["raw", "decode"])
def test_ctrl_c_ends_the_wait_for_a_batch(index: Index, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C, index.paths[0], how], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "interrupted True"


def test_the_exit_of_a_program_with_a_loader(index: Index) -> None:
    program = (
        "import sys, trunkline as tl\n"
        "index = tl.data.index(sys.argv[1], format='records', record_bytes=1000)\n"
        "loader = tl.data.Loader(index, 8, decode=bytes)\n"
        "batches = iter(loader)\n"
        "next(batches)\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, index.paths[0]], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_labels_of_a_folder(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(5):
            (tmp_path / name / f"{number}.jpg").write_bytes(f"{name} {number}".encode())
    index = tl.data.index(tmp_path)
    for batch in Loader(index, 3):
        for sample, label in zip(batch.samples, batch.labels, strict=True):
            assert bytes(sample).decode().startswith(index.classes[label])
    pairs = flat(list(Loader(index, 3, decode=bytes, labels=True)))  # type: ignore[arg-type]
    assert len(pairs) == 10
    assert all(text.decode().startswith(index.classes[label]) for text, label in pairs)  # type: ignore[misc]


def set_old_time(path: Path) -> None:
    """Let the file have been written long ago, so that its time says whether it is written again."""
    os.utime(path, (1_000_000_000, 1_000_000_000))


def test_a_file_that_is_rewritten_while_it_is_open(tmp_path: Path, contents: Array) -> None:
    path = tmp_path / "tokens.bin"
    contents.tofile(path)
    set_old_time(path)
    index = tl.data.index(path, record_bytes=RECORD)
    loader, items = Loader(index, 10), tl.data.SampleDataset(index)
    for batch in loader:
        assert numpy.array_equal(batch.array(), contents[batch.indices])
    items[0]
    with path.open("r+b") as file:
        file.write(bytes([contents[0, 0] ^ 1]))

    def read_on() -> None:
        for _ in range(3):  # what was read ahead is as it was
            for batch in loader:
                assert numpy.array_equal(batch.array(), contents[batch.indices])

    with pytest.raises(tl.Corrupt, match=r"tokens\.bin has changed since it was indexed"):
        read_on()
    with pytest.raises(tl.Corrupt, match="has changed since it was indexed"):
        items[5]
    os.truncate(path, 100_000)
    set_old_time(path)
    with pytest.raises(tl.Corrupt, match="it has 100000 bytes, and had 203000"):
        items[202]


def test_a_volume_file_that_is_replaced(tmp_path: Path, contents: Array) -> None:
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    volume = tl.Volume([tmp_path / "0", tmp_path / "1"], stripe_bytes=4096)
    with volume.open("set", "w") as file:
        file.pwrite(contents)
    for member in tmp_path.glob("*/set*"):
        set_old_time(member)
    index = tl.data.index("set", volume=volume, format="records", record_bytes=RECORD)
    assert len(list(Loader(index, COUNT))) == 1
    volume.remove("set")
    with volume.open("set", "w") as file:
        file.pwrite(255 - contents)
    with pytest.raises(tl.Corrupt, match="has changed since it was indexed"):
        list(Loader(index, COUNT))


def test_a_batch_of_more_files_than_may_be_open(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03d}.img").write_bytes(bytes([number % 256]) * (5_000 + 100 * number))
    code = """
import resource, sys
import trunkline as tl
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
index = tl.data.index(sys.argv[1], cache=None)
for loader in (tl.data.Loader(index, 280), [tl.data.SampleDataset(index).__getitems__(list(range(300)))]):
    count = 0
    for batch in loader:
        samples = zip(batch.indices, batch.samples) if isinstance(batch, tl.data.Batch) else enumerate(batch)
        for number, sample in samples:
            assert bytes(sample) == bytes([number % 256]) * (5_000 + 100 * number), number
            count += 1
    assert count == 300
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=300)


def test_records_on_a_volume(tmp_path: Path, contents: Array) -> None:
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    volume = tl.Volume([tmp_path / "0", tmp_path / "1"], stripe_bytes=4096)
    with volume.open("set", "w") as file:
        file.pwrite(contents)
    index = tl.data.index("set", volume=volume, format="records", record_bytes=RECORD)
    assert len(index) == COUNT
    assert list(index.paths) == ["set"]
    for each in (index, pickle.loads(pickle.dumps(index))):
        for batch in Loader(each, 16):
            assert numpy.array_equal(batch.array(), contents[batch.indices])
    with pytest.raises(tl.Unsupported, match='are read as format "records": pass record_bytes'):
        tl.data.index("set", volume=volume, format="tfrecord")
    with pytest.raises(tl.FileNotFoundError):
        tl.data.index("other", volume=volume, format="records", record_bytes=RECORD)


def test_a_sandbox_that_does_not_show_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> set[int]:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert available_processors() == os.cpu_count()
