"""trunkline.save, save_async and load: formats by suffix, files that appear whole, errors that surface."""

import os
import pickle
import subprocess
import textwrap
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import support_warm
import torch

import trunkline as tl
from trunkline.checkpoint import save as saving


def make_state(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(1500, 1000, generator=generator),
        "half": torch.randn(300, 1001, generator=generator).to(torch.bfloat16),
        "small": torch.arange(7),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("name", ["m.pt", "m.pth", "m.bin", "m.ckpt"])
def test_torch_reads_what_is_saved_and_the_other_way_round(tmp_path: Path, name: str) -> None:
    state = {"model": make_state(), "step": 3, "rest": [1.5, None, "x"]}
    tl.save(state, tmp_path / name)
    for options in ({}, {"mmap": True}):
        stock = torch.load(tmp_path / name, weights_only=True, **options)  # type: ignore[arg-type]
        assert_same(stock["model"], state["model"])  # type: ignore[arg-type]
        assert stock["rest"] == state["rest"]
    with zipfile.ZipFile(tmp_path / name) as archive:
        assert archive.testzip() is None
    torch.save(state, tmp_path / "stock.pt")
    for path in (tmp_path / name, tmp_path / "stock.pt"):
        for mmap in (False, True):
            ours = tl.load(path, mmap=mmap)
            assert_same(ours["model"], state["model"])  # type: ignore[arg-type]
            assert ours["rest"] == state["rest"]


def test_safetensors_reads_what_is_saved_and_the_other_way_round(tmp_path: Path) -> None:
    state = make_state()
    tl.save(state, tmp_path / "m.safetensors")
    assert_same(safetensors.torch.load_file(tmp_path / "m.safetensors"), state)
    safetensors.torch.save_file(state, tmp_path / "stock.safetensors")
    for name in ("m.safetensors", "stock.safetensors"):
        for mmap in (False, True):
            assert_same(tl.load(tmp_path / name, mmap=mmap), state)
    assert_same(tl.load(tmp_path / "m.safetensors", verify=True), state)
    with pytest.raises(tl.Format):
        tl.load(tmp_path / "stock.safetensors", verify=True)


def drop_page_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors", "steps"])
def test_what_the_page_cache_holds_is_not_read_from_the_disk(tmp_path: Path, name: str) -> None:
    state = make_state()
    if name == "steps":
        tl.Checkpointer(tmp_path / name).save(1, state, block=True)
        paths = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
    else:
        tl.save(state, tmp_path / name)
        paths = [tmp_path / name]
    if not tl.default_engine().explain(paths[0])["direct"]:
        pytest.skip("no direct I/O here")

    def loaded() -> dict[str, int]:
        with tl.Engine() as engine:
            if name == "steps":
                assert_same(tl.Checkpointer(tmp_path / name, engine=engine).load(), state)
            else:
                assert_same(tl.load(tmp_path / name, engine=engine), state)
            return dict(engine.stats()["bytes"])

    for path in paths:
        drop_page_cache(path)
    cold = loaded()
    assert cold["direct"] + cold["bounced"] > 6_000_000
    for path in paths:
        path.read_bytes()
    largest = max(paths, key=lambda path: path.stat().st_size)
    with tl.Engine() as engine, tl.open(largest, engine=engine, direct="unless_cached") as file:
        file.pread(bytearray(file.size))
        if engine.stats()["bytes"]["buffered"] == 0:
            pytest.skip("the kernel does not report the contents of the page cache for this filesystem")
    warm = loaded()
    assert warm["direct"] + warm["bounced"] < 100_000
    assert warm["buffered"] > 6_000_000


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, name: str) -> None:
    tl.save({"first": torch.zeros(10), "second": torch.ones(700_000)}, tmp_path / name)
    data = bytearray((tmp_path / name).read_bytes())
    at = data.find(torch.ones(1000).numpy().tobytes()) + 2_200_000
    data[at] ^= 4
    (tmp_path / name).write_bytes(data)
    with pytest.raises(tl.Corrupt) as caught:
        tl.load(tmp_path / name)
    assert caught.value.filename == str(tmp_path / name)
    assert caught.value.tensor == "second"
    if name.endswith("safetensors"):
        assert caught.value.chunk == 2
    assert not torch.equal(tl.load(tmp_path / name, verify=False)["second"], torch.ones(700_000))


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_tensors_may_change_once_they_are_staged(tmp_path: Path, name: str) -> None:
    faults = tl.Faults()
    engine = tl.Engine(faults=faults, pinned_budget_bytes="256MiB")
    faults.hold("write", 0, 1000)  # the disk does not take a byte until all has changed
    state = make_state()
    expected = {key: tensor.clone() for key, tensor in state.items()}
    handle = tl.save_async(state, tmp_path / name, engine=engine)
    handle.wait_staged(timeout=60)
    assert handle.staged()
    assert not handle.done()
    assert not (tmp_path / name).exists()
    for tensor in state.values():
        tensor.fill_(9)
    faults.release()
    handle.wait(timeout=60)
    assert handle.done()
    assert handle.progress()[0] == handle.progress()[1] > 0
    assert_same(tl.load(tmp_path / name), expected)


def test_a_state_larger_than_the_staging_memory_streams_through_it(tmp_path: Path) -> None:
    engine = tl.Engine(pinned_budget_bytes="64MiB", lanes=1, block_bytes="64KiB")
    state = {str(i): torch.full((1 << 20,), i, dtype=torch.float32) for i in range(24)}
    handle = tl.save_async(state, tmp_path / "m.safetensors", engine=engine, staging_bytes="16MiB")
    handle.wait_staged()
    for tensor in state.values():
        tensor.zero_()
    handle.wait()
    assert engine.stats()["peak_pinned_bytes"] <= 64 << 20
    got = tl.load(tmp_path / "m.safetensors", verify=True)
    assert all(bool((got[str(i)] == i).all()) for i in range(24))


def test_a_failed_save_leaves_the_old_file_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    tl.save(make_state(1), path)
    for operation in ("write", "sync"):
        faults = tl.Faults()
        engine = tl.Engine(faults=faults)
        faults.fail(operation, 0, 28 if operation == "write" else 5, 1000)  # type: ignore[arg-type]
        with pytest.raises(tl.Error) as caught:
            tl.save(make_state(2), path, engine=engine)
        assert caught.value.errno in (5, 28)
        handle = tl.save_async(make_state(2), path, engine=engine)
        with pytest.raises(tl.Error):
            handle.wait()
        with pytest.raises(tl.Error):
            handle.wait()
        tl.save(make_state(3), tmp_path / "other.pt")  # an error that was seen is not raised again
        assert_same(tl.load(path), make_state(1))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.pt", "other.pt"]


def test_the_error_of_a_dropped_handle_surfaces_at_the_next_save(tmp_path: Path) -> None:
    faults = tl.Faults()
    engine = tl.Engine(faults=faults)
    faults.fail("write", 0, 5, 1000)
    handle = tl.save_async(make_state(), tmp_path / "lost.pt", engine=engine)
    while not handle.done():
        threading.Event().wait(0.001)
    del handle
    with pytest.raises(tl.Error, match="lost.pt"):
        tl.save(make_state(), tmp_path / "next.pt")
    tl.save(make_state(), tmp_path / "next.pt")
    assert not (tmp_path / "lost.pt").exists()


@pytest.mark.parametrize("count", [2, 13])
def test_all_errors_of_dropped_handles_surface_in_one(tmp_path: Path, count: int) -> None:
    faults = tl.Faults()
    engine = tl.Engine(faults=faults)
    faults.fail("sync", 0, 5, 1000)
    faults.hold("write", 0, 1 << 40)
    handles = [tl.save_async({"x": torch.ones(3)}, tmp_path / f"{i}.pt", engine=engine) for i in range(count)]
    faults.release()
    for handle in handles:
        handle._join()
    names = [handle._what for handle in saving._failed]
    del handles
    with pytest.raises(tl.Error, match=f"^{count} earlier saves failed, and nobody waited for") as caught:
        tl.save(make_state(), tmp_path / "next.pt")
    assert caught.value.errno == 5
    message = str(caught.value)
    assert f"{names[0]}: cannot f" in message  # fsync, or fdatasync
    assert all(name in message for name in names[1:11])
    assert ("and 2 more" in message) == (count == 13)
    tl.save(make_state(), tmp_path / "next.pt")  # what the documents advise
    assert_same(tl.load(tmp_path / "next.pt"), make_state())


def run_script(script: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    return support_warm.run(["-c", textwrap.dedent(script), directory])


def test_what_is_being_saved_at_exit_is_saved(tmp_path: Path) -> None:
    script = """
        import sys, torch, trunkline as tl
        for i in range(3):
            tl.save_async({"x": torch.full((4 << 20,), i)}, f"{sys.argv[1]}/{i}.pt")
    """
    done = run_script(script, tmp_path)
    assert done.returncode == 0, done.stderr
    for i in range(3):
        assert bool((tl.load(tmp_path / f"{i}.pt")["x"] == i).all())


def test_what_failed_unseen_is_reported_at_exit(tmp_path: Path) -> None:
    script = """
        import sys, torch, trunkline as tl
        faults = tl.Faults()
        faults.fail("sync", 0, 5)
        tl.save_async({"x": torch.ones(4)}, f"{sys.argv[1]}/a.pt", engine=tl.Engine(faults=faults))
    """
    done = run_script(script, tmp_path)
    assert "a.pt failed" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["save", "load"])
def test_ctrl_c_ends_it_and_cleans_up(tmp_path: Path, call: str) -> None:
    script = """
        import os, signal, sys, threading, torch, trunkline as tl
        path = sys.argv[1] + "/m.safetensors"
        state = {"x": torch.ones(8 << 20)}
        tl.save(state, path)
        faults = tl.Faults()
        engine = tl.Engine(faults=faults)
        operation = "write" if "CALL" == "save" else "read"
        faults.hold(operation, 0, 1000)
        def interrupt():
            while not faults.commands(operation):
                pass
            os.kill(os.getpid(), signal.SIGINT)
            faults.release()
        threading.Thread(target=interrupt).start()
        try:
            tl.save(state, path, engine=engine) if operation == "write" else tl.load(path, engine=engine)
        except KeyboardInterrupt:
            print("interrupted", os.listdir(sys.argv[1]))
    """.replace("CALL", call)
    done = run_script(script, tmp_path)
    assert done.stdout == "interrupted ['m.safetensors']\n", done.stderr
    assert bool((tl.load(tmp_path / "m.safetensors")["x"] == 1).all())


def test_bad_arguments(tmp_path: Path) -> None:
    for name, what in (("weights.xyz", "has the unknown suffix .xyz"), ("weights", "has no suffix")):
        with pytest.raises(ValueError, match=f"^path: .*{name} {what}; the suffix chooses the format: use"):
            tl.save({}, tmp_path / name)
    (tmp_path / "folder").mkdir()
    with pytest.raises(tl.IsADirectoryError, match="folder is a directory; name a file, such as .*model"):
        tl.save({}, tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    with pytest.raises(ValueError, match="suffix"):
        tl.save({}, tmp_path / "model")
    with pytest.raises(TypeError, match="path"):
        tl.save({}, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="path"):
        tl.load(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verify"):
        tl.load(tmp_path / "m.pt", verify="never")  # type: ignore[arg-type]
    with pytest.raises(tl.Unsupported, match="device"):
        tl.load(tmp_path / "m.pt", device="cuda")
    with pytest.raises(FileNotFoundError):
        tl.load(tmp_path / "m.pt")
    with pytest.raises(FileNotFoundError):
        tl.save({}, tmp_path / "none" / "m.pt")
    with pytest.raises(TypeError):
        tl.save([torch.ones(1)], tmp_path / "m.safetensors")
    (tmp_path / "d.pt").mkdir()
    with pytest.raises(IsADirectoryError):
        tl.save({}, tmp_path / "d.pt")


@pytest.mark.parametrize("name", ["a.SafeTensors", "A.SAFETENSORS", "a.PT", "a.Ckpt", "a.BIN", "a.pTh"])
def test_suffixes_in_any_case(tmp_path: Path, name: str) -> None:
    """What is saved under a name is loaded by it, alone and as the file of a folder."""
    state = {"x": torch.arange(5)}
    tl.save(state, tmp_path / name)
    assert torch.equal(tl.load(tmp_path / name)["x"], state["x"])
    if name.lower().endswith("safetensors"):
        assert torch.equal(tl.load(tmp_path)["x"], state["x"])


def test_a_file_of_torch_save_that_is_named_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    torch.save({"w": torch.ones(3)}, path)
    with pytest.raises(tl.Format, match=r"is not a safetensors file but a zip file.*\.pt") as caught:
        tl.load(path)
    assert caught.value.filename == str(path)


def test_what_a_handle_offers() -> None:
    offered = {name for name in dir(tl.SaveHandle) if not name.startswith("_")}
    assert offered == {"cancel", "done", "progress", "staged", "wait", "wait_staged", "written_share"}


@pytest.mark.parametrize("save", [tl.save, tl.save_async])
@pytest.mark.parametrize(
    ("suffix", "held", "error"),
    [
        ("pt", threading.Lock(), TypeError),
        ("pt", lambda: None, pickle.PicklingError),
        ("safetensors", threading.Lock(), TypeError),
        ("safetensors", torch.eye(3).to_sparse(), tl.Unsupported),
    ],
)
def test_what_cannot_be_saved_raises_at_once(
    tmp_path: Path, save: Any, suffix: str, held: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        save({"held": held}, tmp_path / f"a.{suffix}")
    assert list(tmp_path.iterdir()) == []
