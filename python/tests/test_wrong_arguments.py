"""Arguments of a wrong type or value: the error names the argument, and nothing has been created."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trunkline as tl

STATE = {"x": torch.arange(6)}
NOT_BOOL = ("no", "", None, 2, [], 1.0)
NOT_ENGINE = ("threads", 0, True)
NOT_DEVICE = ("apple", None, [], 1.5)
NOT_BYTES = ("1 apple", "", -1, 1.5, True, [], 2**70)
NOT_SECONDS = ("3", b"3", [], None, math.nan, True, 1j)


def checkpointer(here: Path, **arguments: Any) -> None:
    tl.Checkpointer(here / "run", **arguments)


def checkpoint_save(here: Path, **arguments: Any) -> None:
    tl.Checkpointer(here / "run").save(**({"step": 1, "state": STATE} | arguments)).wait()


def save(here: Path, **arguments: Any) -> None:
    tl.save(STATE, **({"path": here / "a.safetensors"} | arguments))


def save_async(here: Path, **arguments: Any) -> None:
    tl.save_async(STATE, **({"path": here / "a.safetensors"} | arguments)).wait()


def load(here: Path, **arguments: Any) -> None:
    tl.load(here / "missing.pt", **arguments)


def writer(here: Path, **arguments: Any) -> None:
    tl.dcp.StorageWriter(**({"path": here / "dcp"} | arguments))


def reader(here: Path, **arguments: Any) -> None:
    tl.dcp.StorageReader(**({"path": here / "dcp"} | arguments))


def request(here: Path, **arguments: Any) -> None:
    with tl.open(__file__) as file:
        tl.Read(**({"file": file, "buffer": bytearray(9)} | arguments))


WRONG: list[tuple[Callable[..., None], str, tuple[Any, ...]]] = [
    (checkpointer, "fresh", NOT_BOOL),
    (checkpointer, "keep", (0, -1, True, "3", 1.5, [])),
    (checkpointer, "timeout", (*NOT_SECONDS, 0, -1)),
    (checkpointer, "staging_bytes", NOT_BYTES),
    (checkpointer, "volumes", (0, 3.5, True, [0], [None], "a", b"a", Path("a"), ["a\0b"])),
    (checkpointer, "writers", (0, None, [], "apple", b"rank", [1], ["a"], [0.0])),
    (checkpointer, "process_group", (0, True, "gloo", object())),
    (checkpointer, "engine", NOT_ENGINE),
    (checkpointer, "tiers", (0, "a", [0], ["a"], tl.Tier("a"))),
    (checkpoint_save, "block", NOT_BOOL),
    (checkpoint_save, "step", (-1, 2**63, True, None, "1", 1.5, torch.tensor(1.5))),
    (save, "durable", NOT_BOOL),
    (save, "checksum", NOT_BOOL),
    (save, "engine", NOT_ENGINE),
    (save, "path", (0, None, [], "a\0b.pt", "no_suffix")),
    (save_async, "durable", NOT_BOOL),
    (save_async, "checksum", NOT_BOOL),
    (save_async, "staging_bytes", NOT_BYTES),
    (save_async, "engine", NOT_ENGINE),
    (load, "device", NOT_DEVICE),
    (load, "mmap", NOT_BOOL),
    (load, "verify", ("no", None, 2)),
    (load, "engine", NOT_ENGINE),
    (writer, "path", (0, b"a", "", "a\0b")),
    (writer, "durable", NOT_BOOL),
    (writer, "overwrite", ("no", "", 2, [])),
    (writer, "volumes", (0, "a", [0], [])),
    (writer, "engine", NOT_ENGINE),
    (reader, "path", (0, b"a", "", "a\0b")),
    (reader, "verify", NOT_BOOL),
    (reader, "engine", NOT_ENGINE),
    (request, "file", (None, "a", 3)),
    (request, "offset", (torch.ones(2), 1.5, -1)),
]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A directory in which nothing is created."""
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "argument", "values"), WRONG, ids=[f"{call.__name__}-{name}" for call, name, _ in WRONG]
)
def test_the_argument_is_named(
    here: Path, call: Callable[..., None], argument: str, values: tuple[Any, ...]
) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(here, **{argument: value})
        message = str(caught.value)
        assert message.startswith((f"{argument}: ", f"{argument}[0]: ")), (value, message)
        assert "__init__" not in message


@pytest.mark.parametrize("value", ["3", [], math.nan, True])
def test_the_timeout_of_a_save(tmp_path: Path, value: Any) -> None:
    handle = tl.save_async(STATE, tmp_path / "a.pt")
    for wait in (handle.wait, handle.wait_staged):
        with pytest.raises((TypeError, ValueError), match="timeout: must be a number of seconds"):
            wait(value)
    handle.wait()
    assert torch.equal(tl.load(tmp_path / "a.pt")["x"], STATE["x"])


ARRAYS = {
    "a negative stride": lambda: np.zeros(12)[::-2],
    "is not contiguous": lambda: np.zeros(12)[::2],
    "read-only": lambda: np.frombuffer(bytes(48)),
    "not aligned": lambda: np.zeros(49, np.uint8)[1:].view(np.float64),
}


@pytest.mark.parametrize("why", ARRAYS)
def test_arrays_that_cannot_be_filled(tmp_path: Path, why: str) -> None:
    checkpoints = tl.Checkpointer(tmp_path)
    checkpoints.save(1, {"deep": [np.arange(6.0)]}, block=True)
    with pytest.raises(ValueError, match=rf"into: state\['deep'\]\[0\] is .*{why}.*; load into a contiguous"):
        checkpoints.load(into={"deep": [ARRAYS[why]()]})


def test_tensors_with_freed_storage(tmp_path: Path) -> None:
    freed = torch.ones(10)
    freed.untyped_storage().resize_(0)
    checkpoints = tl.Checkpointer(tmp_path / "run")
    for save in (
        lambda: checkpoints.save(1, {"w": freed}, block=True),
        lambda: tl.save({"w": freed}, tmp_path / "a.safetensors"),
    ):
        with pytest.raises(tl.Unsupported, match=r"'w'.* resized .*get_model_state_dict\(\)") as caught:
            save()
        assert ".pt" not in str(caught.value)  # which would hold nothing of it either


def test_a_volume_in_place_of_directories(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    volume = tl.Volume([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(
        TypeError, match=rf"not Volume; pass its directories: volumes=\['{tmp_path}/a', '{tmp_path}/b'\]"
    ):
        tl.Checkpointer(tmp_path / "run", volumes=volume)  # type: ignore[arg-type]


def test_what_is_passed_in_place_of_a_step(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run")
    state: Any = {"secret": list(range(100_000))}
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: checkpoints.save(state, 1), "not dict; the order is save(step, state)"),  # type: ignore[arg-type]
        (lambda: checkpoints.load(state), "not dict; pass a state to fill as into="),
        (lambda: checkpoints.load("1"), "not '1'; leave it out for the last one"),  # type: ignore[arg-type]
        (lambda: checkpoints.delete("1" * 41), "not str"),  # type: ignore[arg-type]
        (lambda: checkpoints.verify(state), "not dict"),
        (lambda: checkpoints.verify(1.5), "not 1.5"),  # type: ignore[arg-type]
    ]
    for call, said in calls:
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == f"step: must be an integer from 0 to 2^63 - 1, {said}"
    with pytest.raises(ValueError, match="not -1$"):
        checkpoints.load(-1)
    for keep, error in (("3", TypeError), (state, TypeError), (0, ValueError)):
        with pytest.raises(error, match=r"^keep: .* not ('3'|dict|0)$"):
            tl.Checkpointer(tmp_path / "run", keep=keep)
    assert not (tmp_path / "run").exists()


def test_arguments_of_torch_load(tmp_path: Path) -> None:
    tl.save(STATE, tmp_path / "a.pt")
    for location in ("cpu", torch.device("cpu")):
        loaded = tl.load(tmp_path / "a.pt", map_location=location, weights_only=True)
        assert set(loaded) == set(STATE)
    for unsupported in ([], 1.5):
        with pytest.raises(TypeError, match="^map_location: must be a str, an int or a torch.device, not"):
            tl.load(tmp_path / "a.pt", map_location=unsupported)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="""^device: must be "cpu" or "cuda" .*, not 'gpu'$"""):
        tl.load(tmp_path / "a.pt", device="gpu")
    with pytest.raises(ValueError, match="^device, map_location: differ"):
        tl.load(tmp_path / "a.pt", device="cuda", map_location="cpu")
    with pytest.raises(
        ValueError, match=r"^weights_only: must be True, not False: .*torch\.load\(path, weights"
    ):
        tl.load(tmp_path / "a.pt", weights_only=False)  # type: ignore[arg-type]
    with (tmp_path / "a.pt").open("rb") as file, pytest.raises(TypeError, match="not an open file"):
        tl.load(file)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="devise"):
        tl.load(tmp_path / "a.pt", devise="cpu")  # type: ignore[call-arg]


def test_writers_of_one_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^writers: cannot be \[1\] with one process .*; omit it$"):
        tl.Checkpointer(tmp_path, writers=[1], process_group=False)
    tl.Checkpointer(tmp_path, writers=[0], process_group=False)


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: tl.Engine(foo=1), "Engine(): unexpected keyword argument 'foo'"),
    (
        lambda: tl.Engine("threads", lane=2),
        "Engine(): unexpected keyword argument 'lane'; did you mean 'lanes'?",
    ),
    (lambda: tl.Engine("threads", backend="threads"), "Engine(): multiple values for argument 'backend'"),
    (lambda: tl.Engine(*range(9)), "Engine(): too many positional arguments"),
    (lambda: tl.Volume(), "Volume(): missing a required argument: 'directories'"),
    (
        lambda: tl.Read(None, bytearray(9), ofset=3),
        "Read(): unexpected keyword argument 'ofset'; did you mean 'offset'?",
    ),
    (lambda: tl.open(), "open(): missing a required argument: 'path'"),
    (
        lambda: tl.open(__file__, engin=None),
        "open(): unexpected keyword argument 'engin'; did you mean 'engine'?",
    ),
    (lambda: tl.open(__file__).pread(), "File.pread(): missing a required argument: 'buffer'"),
    (lambda: tl.Faults().fail("read", 0), "Faults.fail(): missing a required argument: 'code'"),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_calls_that_do_not_match_the_parameters(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == message


BOUND = [
    pytest.param(function, id=f"{of.__name__}.{name}")
    for of in (tl, *(each for each in vars(tl).values() if isinstance(each, type)))
    for name, function in vars(of).items()
    if hasattr(function, "__nb_signature__") and (name == "__init__" or not name.startswith("_"))
]


@pytest.mark.parametrize("function", BOUND)
def test_every_bound_function_names_an_unknown_argument(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"^[\w.]+\(\): unexpected keyword argument 'no_such_argument'$"):
        function(no_such_argument=1)
