"""What traces show of saves, loads, waits and models: the slices of the threads that call and work."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from support_dcp import blank, nested
from support_models import make_folder, prompt
from torch.distributed import HashStore, PrefixStore

import trunkline as tl
from trunkline._waits import Wait
from trunkline.checkpoint import save_order
from trunkline.checkpoint.ranks.group import Exchanges

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is .*single process"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
LONG = 60.0


def slices(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The slices of threads, by their names."""
    found: dict[str, list[dict[str, Any]]] = {}
    for event in json.loads(path.read_bytes())["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault(event["name"], []).append(event)
    return found


def is_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    """Whether a slice is on the same track as another, and during it."""
    tracks = [(each["pid"], each["tid"]) for each in (inner, outer)]
    ends = inner["ts"] + inner["dur"], outer["ts"] + outer["dur"]
    return tracks[0] == tracks[1] and outer["ts"] <= inner["ts"] and ends[0] <= ends[1] + 0.001


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    state = {"weight": torch.ones(1 << 20)}
    with tl.trace(tmp_path / "trace.json"):
        tl.save(state, path)
        tl.load(path)
    found = slices(tmp_path / "trace.json")
    assert [each["args"]["of"] for each in (*found["save"], *found["load"])] == [str(path)] * 2
    assert all(each["cat"] == "checkpoint" for each in (*found["save"], *found["load"]))
    (stage,), (write,), (read,) = (
        found[name] for name in ("stage", "write, sync and name the files", "read the files")
    )
    assert stage["ts"] <= write["ts"] <= read["ts"]
    assert len(found["copy and checksum"]) >= 2


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_new_memory_of_loads_is_made_resident_by_the_workers(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    state = {name: torch.randn(1 << 20) for name in "abc"} | {"small": torch.ones(7)}
    if suffix == ".pt":
        torch.save(state, path)
    else:
        safetensors.torch.save_file(state, path)
    with tl.trace(tmp_path / "trace.json"):
        loaded = tl.load(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    populated = slices(tmp_path / "trace.json")["populate new memory"]
    assert sum(each["args"]["bytes"] for each in populated) == 3 * 4 << 20


def test_saves_in_the_background(tmp_path: Path) -> None:
    with tl.trace(tmp_path / "trace.json"):
        tl.save_async({"weight": torch.ones(1 << 20)}, tmp_path / "a.pt").wait(LONG)
    found = slices(tmp_path / "trace.json")
    (whole,), (stage,), (commit,) = (
        found[name] for name in ("save in the background", "stage", "commit the save")
    )
    assert is_within(stage, whole)
    assert is_within(commit, whole)
    assert found["begin a save in the background"][0]["tid"] != whole["tid"]
    assert found["wait for a save"][0]["cat"] == "wait"


def test_a_save_that_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    class Noticed(Wait):
        def until(self, *arguments: Any) -> bool:
            waits.set()
            return super().until(*arguments)

    monkeypatch.setattr(save_order, "Wait", Noticed)
    faults = tl.Faults()
    with tl.Engine("threads", faults=faults) as engine, tl.trace(tmp_path / "trace.json"):
        faults.hold("write", 0, 1)
        first = tl.save_async({"a": torch.ones(1 << 16)}, tmp_path / "a.pt", engine=engine)
        first.wait_staged(LONG)
        second = tl.save_async({"a": torch.zeros(1 << 16)}, tmp_path / "a.pt", engine=engine)
        assert waits.wait(LONG)
        faults.release()
        second.wait(LONG)
    assert slices(tmp_path / "trace.json")["wait for an earlier save"]


def test_directories_of_checkpoints(tmp_path: Path) -> None:
    with tl.trace(tmp_path / "trace.json"):
        checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
        checkpoints.save(7, {"weight": torch.ones(100)}, block=True)
        checkpoints.load()
        checkpoints.verify()
    found = slices(tmp_path / "trace.json")
    (save,), (load,) = found["Checkpointer.save"], found["Checkpointer.load"]
    assert save["args"]["of"] == f"step 7 to {tmp_path / 'run'}"
    assert load["args"]["of"] == str(tmp_path / "run")
    assert is_within(found["describe the state"][0], save)
    (whole,) = found["save in the background"]
    for step in ("begin the save", "stage", "write, sync and name the files", "commit the save"):
        assert is_within(found[step][0], whole)
    assert found["Checkpointer.verify"]


def test_distributed_checkpoints(tmp_path: Path) -> None:
    state, path = nested(1), tmp_path / "step"
    with tl.trace(tmp_path / "trace.json"):
        dcp.save(state, storage_writer=tl.dcp.StorageWriter(path))
        dcp.load(blank(state), storage_reader=tl.dcp.StorageReader(path))
    found = slices(tmp_path / "trace.json")
    for method in ("prepare_local_plan", "write_data", "finish"):
        assert found[f"StorageWriter.{method}"][0]["args"]["of"] == str(path)
    for method in ("read_metadata", "read_data"):
        assert found[f"StorageReader.{method}"][0]["args"]["of"] == str(path)


def test_waits_for_other_ranks(tmp_path: Path) -> None:
    store = HashStore()
    zero, one = (Exchanges(PrefixStore("test", store), rank, 2, LONG) for rank in range(2))

    def other() -> None:
        with one.begin("save(5)") as exchange:
            exchange.meet()
            exchange.post("written", {})

    with tl.trace(tmp_path / "trace.json"):
        thread = threading.Thread(target=other)
        thread.start()
        with zero.begin("save(5)") as exchange:
            exchange.meet()
            exchange.read("written", 1)
        thread.join(LONG)
    about = {each["args"]["of"] for each in slices(tmp_path / "trace.json")["wait for other ranks"]}
    assert about == {"save(5)", "save(5): rank 1, written"}


def test_models(tmp_path: Path) -> None:
    folder, pack = make_folder(tmp_path / "model"), tmp_path / "pack"
    with tl.trace(tmp_path / "trace.json"):
        model = tl.transformers.from_pretrained(
            folder, memory_budget="400KB", unit_bytes="16KB", pack_dir=pack
        )
        with torch.no_grad():
            model(**prompt())
    found = slices(tmp_path / "trace.json")
    (whole,) = found["from_pretrained"]
    assert whole["args"]["of"] == str(folder)
    for step in ("read config and headers", "look for a pack", "make a pack", "read the weights that stay"):
        assert is_within(found[step][0], whole), step
    assert found["make a pack"][0]["args"]["of"] == str(pack)
    assert [each["args"]["of"] for each in found["layer"]] == [f"layer {number}" for number in range(4)]
    waits = found.get("wait for a unit", [])
    assert all(any(is_within(wait, layer) for layer in found["layer"]) for wait in waits)


def test_slices_of_python_code_take_any_text(tmp_path: Path) -> None:
    with tl.trace(tmp_path / "trace.json"):
        tl.save({"a": 1}, tmp_path / "\udcff.pt")
    (save,) = slices(tmp_path / "trace.json")["save"]
    assert save["args"]["of"] == f"{tmp_path}/\\udcff.pt"
