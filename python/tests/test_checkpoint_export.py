"""Checkpoints that go out again, as users take them out: with the command line and in Python."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.torch
import support_warm
import torch
from conftest import RunScript

import trunkline as tl
from trunkline._checkpoint_tools import difference
from trunkline._checkpoint_tools.difference import compare


def run(*arguments: "str | Path", expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `trunkline checkpoint`; its exit status must be `expect`."""
    result = support_warm.run(["-m", "trunkline", "checkpoint", *arguments])
    assert result.returncode == expect, result.stdout + result.stderr
    return result


def document(*arguments: "str | Path", expect: int = 0) -> dict[str, Any]:
    """What it prints with --json."""
    parsed: dict[str, Any] = json.loads(run(*arguments, "--json", expect=expect).stdout)
    assert parsed["command"] == f"checkpoint {arguments[0]}"
    return parsed


def training_state(step: int = 1) -> dict[str, Any]:
    """What a training saves: tied weights, an optimizer, numbers, in dtypes of all sizes."""
    torch.manual_seed(step)
    embedding = torch.randn(300, 200)
    model = {
        "embed.weight": embedding,
        "layer.weight": torch.randn(100, 50, dtype=torch.bfloat16),
        "layer.bias": torch.nn.Parameter(torch.randn(50)),
        "flags": torch.tensor([True, False]),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "head.weight": embedding,
    }
    moments = {0: {"exp_avg": torch.randn(300, 200), "step": torch.tensor(3.0)}}
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]},
        "transposed": torch.randn(20, 30).t(),
        "complex": torch.randn(3, dtype=torch.complex128),
        "history": numpy.arange(5.0),
        "step": step,
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory of checkpoints with steps 1 and 2."""
    checkpointer = tl.Checkpointer(tmp_path / "run")
    for step in (1, 2):
        checkpointer.save(step, training_state(step), block=True)
    return tmp_path / "run"


def assert_same(one: Any, other: Any) -> None:
    """Compare two states, with types, dtypes and values."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(one, numpy.ndarray):
        assert numpy.array_equal(one, other)
    else:
        assert one == other


def test_a_model_goes_to_safetensors(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    text = run("export", checkpoint, out, "--key", "model").stdout
    assert "head.weight is tied to embed.weight" in text
    assert "step 2" in text
    assert "every byte verified" in text
    model = training_state(2)["model"]
    stock = safetensors.torch.load_file(out)
    assert set(stock) == set(model) - {"head.weight"}
    for name, tensor in stock.items():
        assert_same(tensor, model[name].detach())
    with safetensors.safe_open(out, "pt") as file:
        assert file.metadata()["format"] == "pt"
    assert_same(tl.load(out, verify=True)["embed.weight"], model["embed.weight"])


def test_a_state_goes_to_pt(checkpoint: Path, tmp_path: Path) -> None:
    done = tl.export_checkpoint(checkpoint, tmp_path / "all.pt", step=1)
    assert (done.step, done.verified, done.dropped) == (1, True, {})
    loaded = torch.load(tmp_path / "all.pt", weights_only=False)
    assert_same(loaded, tl.Checkpointer(checkpoint).load(1))
    assert loaded["model"]["head.weight"] is loaded["model"]["embed.weight"]
    document("export", checkpoint, tmp_path / "part.pt", "--key", "optimizer.state")
    part = tl.load(tmp_path / "part.pt", verify=True)  # with weights_only, and the CRC-32 of each record
    assert_same(part, training_state(2)["optimizer"]["state"])


def test_views_of_shared_memory_stay_views(tmp_path: Path) -> None:
    memory = torch.arange(1000.0)
    state = {"whole": memory, "tail": memory[500:], "every_third": memory[::3], "apart": torch.ones(4)}
    tl.Checkpointer(tmp_path / "run").save(0, state, block=True)
    tl.export_checkpoint(tmp_path / "run", tmp_path / "views.pt")
    loaded = torch.load(tmp_path / "views.pt", weights_only=True)
    assert_same(loaded, state)
    loaded["whole"][600] = -1
    assert loaded["tail"][100] == -1
    assert loaded["every_third"][200] == -1
    with pytest.raises(tl.Unsupported, match=r"'every_third' .* name a file that ends with \.pt"):
        tl.export_checkpoint(tmp_path / "run", tmp_path / "views.safetensors")
    del state["every_third"]
    tl.Checkpointer(tmp_path / "two").save(0, state, block=True)
    with pytest.raises(tl.Unsupported, match="share a part of their memory"):
        tl.export_checkpoint(tmp_path / "two", tmp_path / "views.safetensors")
    assert not (tmp_path / "views.safetensors").exists()


def test_what_safetensors_cannot_hold_is_refused_by_its_keys(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    with pytest.raises(tl.Unsupported) as refused:
        tl.export_checkpoint(checkpoint, out)
    for part in ("'step'", "'history'", ".pt", 'key="model"'):
        assert part in str(refused.value)
    tl.Checkpointer(tmp_path / "wide").save(0, {"a": torch.ones(2, dtype=torch.complex128)}, block=True)
    with pytest.raises(tl.Unsupported, match=r"no torch\.complex128, the dtype of 'a'"):
        tl.export_checkpoint(tmp_path / "wide", out)
    tl.Checkpointer(tmp_path / "single").save(0, {"a": torch.ones(2)}, block=True)
    with pytest.raises(ValueError, match="has no 'modle'; there are 'model', "):
        tl.export_checkpoint(checkpoint, out, key="modle")
    with pytest.raises(tl.Unsupported, match="is one tensor without a name: pass the key above it"):
        tl.export_checkpoint(tmp_path / "single", out, key="a")
    with pytest.raises(ValueError, match="must end with one of .safetensors"):
        tl.export_checkpoint(checkpoint, tmp_path / "model.txt")
    with pytest.raises(tl.FileNotFoundError, match="no checkpoint of step 7"):
        tl.export_checkpoint(checkpoint, out, step=7)
    error = document("export", checkpoint, out, expect=1)["error"]["message"]
    assert error.endswith("or export only the tensors below one key: --key model")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "single", "wide"]


def test_nothing_is_replaced_unless_told_to(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    out.write_bytes(b"precious")
    error = document("export", checkpoint, out, expect=1)["error"]
    assert "exists already" in error["message"]
    assert error["message"].endswith("or replace it with --overwrite")
    with pytest.raises(FileExistsError, match="or replace it with force=True$"):
        tl.export_checkpoint(checkpoint, out)
    for option, message in (
        (["--max-shard-size", "5XB"], '--max-shard-size: "5XB" is not a size'),
        (["--max-shard-size", "5GB"], "--max-shard-size and --from are for folders"),
    ):
        assert message in document("export", checkpoint, out, *option, expect=2)["error"]["message"]
    assert out.read_bytes() == b"precious"
    run("export", checkpoint, out, "--overwrite")
    assert torch.load(out, weights_only=False)["step"] == 2
    error = document("export", checkpoint, tmp_path / "no" / "model.pt", expect=2)["error"]
    assert str(tmp_path / "no") in error["message"]


def test_standard_output_is_not_a_target(checkpoint: Path, tmp_path: Path) -> None:
    """Once this made a folder named "-"."""
    command = [sys.executable, "-m", "trunkline", "checkpoint", "export", checkpoint, "-"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "OUT: cannot be standard output" in done.stderr
    assert not (tmp_path / "-").exists()


def test_a_file_that_appears_meanwhile_is_not_replaced(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trunkline._export import output

    out = tmp_path / "model.pt"
    write = output._write_windows

    def write_late(*arguments: Any) -> list[int]:
        values = write(*arguments)
        out.write_bytes(b"of another process")
        return values

    monkeypatch.setattr(output, "_write_windows", write_late)
    with pytest.raises(FileExistsError, match="exists already"):
        tl.export_checkpoint(checkpoint, out)
    assert out.read_bytes() == b"of another process"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.pt", "run"]


def test_damage_is_found_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (shard,) = (checkpoint / "step-00000002").glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(tl.Corrupt, match=rf"{shard} is corrupt: chunk 0 .*, of the tensor '.*'"):
        tl.export_checkpoint(checkpoint, tmp_path / "all.pt")
    assert "is corrupt" in document("export", checkpoint, tmp_path / "all.pt", expect=1)["error"]["message"]
    shard.unlink()
    with pytest.raises(tl.Corrupt, match=f"{shard} is missing"):
        tl.export_checkpoint(checkpoint, tmp_path / "all.pt")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_step_that_is_removed_meanwhile_is_still_exported(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trunkline._export import output

    write = output._write_windows

    def remove_first(*arguments: Any) -> list[int]:
        tl.Checkpointer(checkpoint).delete(2)
        return write(*arguments)

    monkeypatch.setattr(output, "_write_windows", remove_first)
    tl.export_checkpoint(checkpoint, tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt", weights_only=False)["step"] == 2
    assert tl.Checkpointer(checkpoint).steps() == [1]


INTERRUPTED = """
    import os, signal, sys, threading
    import torch, trunkline as tl
    tl.Checkpointer("run").save(0, {"a": torch.randn(1 << 20)}, block=True)
    faults = tl.Faults()
    faults.hold("write", 0)
    engine = tl.Engine("threads", faults=faults)

    def interrupt():
        while not faults.commands("write"):
            pass
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        faults.release()

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        tl.export_checkpoint("run", "out.safetensors", engine=engine)
    except KeyboardInterrupt:
        print("interrupted", sorted(os.listdir()))
"""


def test_ctrl_c_leaves_nothing(run_script: RunScript) -> None:
    assert "interrupted ['run']" in run_script(INTERRUPTED, "SIGINT")


def test_what_a_killed_export_leaves_goes_with_the_next(run_script: RunScript, tmp_path: Path) -> None:
    run_script(INTERRUPTED, "SIGKILL", expect=-signal.SIGKILL)
    left = [each.name for each in tmp_path.iterdir() if each.name.startswith(".trunkline-")]
    assert len(left) == 1
    run("export", tmp_path / "run", tmp_path / "out.safetensors")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.safetensors", "run"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_memory_is_bounded(tmp_path: Path, run_script: RunScript, suffix: str) -> None:
    """A large checkpoint needs at most the two windows more than a small one, of the size of one."""
    small, large = 64 << 20, 448 << 20
    for name, nbytes in (("small", small), ("large", large)):
        state = {f"a{index}": torch.full((nbytes // 16,), float(index)) for index in range(4)}
        tl.Checkpointer(tmp_path / name).save(0, state, block=True)
    peaks = run_script(
        """
        import sys, trunkline as tl
        for name in ("small", "large"):
            open("/proc/self/clear_refs", "w").write("5")
            tl.export_checkpoint(name, name + sys.argv[1])
            print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
        """,
        suffix,
    ).split()
    assert (int(peaks[1]) - int(peaks[0])) << 10 < 160 << 20


def test_rm_removes_one_step(checkpoint: Path) -> None:
    assert "STEP is required" in run("rm", checkpoint, expect=2).stderr
    assert "no checkpoint of step 5; it has steps 1, 2" in run("rm", checkpoint, 5, expect=2).stderr
    assert tl.Checkpointer(checkpoint).steps() == [1, 2]
    assert document("rm", checkpoint, 2)["steps"] == [1]
    assert tl.Checkpointer(checkpoint).steps() == [1]
    assert_same(tl.Checkpointer(checkpoint).load(), tl.Checkpointer(checkpoint).load(1))


def test_diff_says_which_tensors_differ_and_by_how_much(tmp_path: Path) -> None:
    nan = float("nan")
    first = {
        "a": torch.tensor([1.0, 2.0, nan, 4.0]),
        "b": torch.ones(3, dtype=torch.int64),
        "c": torch.zeros(2, 2),
        "d": torch.ones(5),
        "gone": torch.ones(1),
        "lr": 0.1,
        "same": torch.arange(100_000),
    }
    second = {
        "a": torch.tensor([1.0, 2.5, nan, 1.0]),
        "b": torch.tensor([1, 1, -(2**62)]),
        "c": torch.zeros(4),
        "d": torch.ones(5, dtype=torch.bfloat16),
        "lr": 0.2,
        "same": torch.arange(100_000),
        "new": None,
    }
    for name, state in (("one", first), ("two", second)):
        tl.Checkpointer(tmp_path / name).save(3, {"state": state}, block=True)
    found = document("diff", tmp_path / "one", tmp_path / "two", "--key", "state", expect=1)
    assert (found["same"], found["compared"]) == (False, 5)
    assert (found["only_a"], found["only_b"], found["values"]) == (["gone"], ["new"], ["lr"])
    a, b, c, d = found["tensors"]
    assert (a["name"], a["elements"], a["total"], a["max_abs"]) == ("a", 2, 4, 3.0)
    assert (b["name"], b["elements"], b["max_abs"]) == ("b", 1, 2.0**62)
    assert (c["name"], c["shapes"], c["elements"]) == ("c", [[2, 2], [4]], None)
    assert (d["name"], d["dtypes"], d["elements"]) == ("d", ["F32", "BF16"], 0)
    text = run("diff", tmp_path / "one", tmp_path / "two", expect=1).stdout
    assert "state.a: 2 of 4 elements differ, by at most 3" in text
    assert "4 of 5 common tensors differ; 1 tensor or value only in " in text


def test_diff_that_compares_nothing(tmp_path: Path) -> None:
    """As diff and cmp do it, the exit status is 1 for a difference, and 2 for trouble."""
    tl.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "one.pt")
    tl.save({"c": torch.ones(2)}, tmp_path / "two.pt")
    text = run("diff", tmp_path / "one.pt", tmp_path / "two.pt", expect=1).stdout
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    assert f"no tensor is in both; 2 tensor or values only in {one}; 1 tensor or value only in {two}" in text
    (tmp_path / "text.pt").write_text("no file of tensors")
    failed = run("diff", one, tmp_path / "text.pt", expect=2)
    assert "is neither a file of torch.save (a zip archive) nor of safetensors" in failed.stderr


def test_diff_of_large_integers(tmp_path: Path) -> None:
    big, large = 2**62, 2**60
    pairs: list[Any] = [
        ([big, -big], [big + 1, -big], torch.int64, torch.int64, 1, 1.0),
        ([big, -big], [big, -big - 3], torch.int64, torch.int64, 1, 3.0),
        ([large + 2, 5], [large + 1, 5], torch.int64, torch.uint64, 1, 1.0),
        ([-1, 5], [2**64 - 1, 5], torch.int64, torch.uint64, 1, 2.0**64),
        ([-1, 5], [0, 5], torch.int32, torch.uint8, 1, 1.0),
        ([large + 2, 5], [large + 2, 5], torch.int64, torch.uint64, 0, None),
        ([1, 0], [0, 0], torch.bool, torch.int64, 1, 1.0),
    ]
    for name in (0, 1):
        state = {str(at): torch.tensor(pair[name], dtype=pair[2 + name]) for at, pair in enumerate(pairs)}
        tl.save(state, tmp_path / f"{name}.pt")
    found = compare(tmp_path / "0.pt", tmp_path / "1.pt")
    assert [(each.elements, each.max_abs) for each in found.tensors] == [pair[4:] for pair in pairs]


def test_diff_of_an_export_and_its_checkpoint_is_empty(checkpoint: Path, tmp_path: Path) -> None:
    for out, key in (("model.safetensors", "model"), ("optimizer.pt", "optimizer")):
        run("export", checkpoint, tmp_path / out, "--key", key)
    assert (
        "the same: 6 tensors"
        in run("diff", checkpoint, tmp_path / "model.safetensors", "--key", "model").stdout
    )
    tl.save({"optimizer": tl.load(tmp_path / "optimizer.pt")}, tmp_path / "nested.pt")
    run("diff", checkpoint, tmp_path / "nested.pt", "--key", "optimizer")
    found = document("diff", checkpoint / "step-00000001", checkpoint, "--key", "model", expect=1)
    assert {each["name"] for each in found["tensors"]} >= {"embed.weight", "layer.weight"}
    error = document("diff", checkpoint, tmp_path / "nothing", expect=2)["error"]
    assert "does not exist" in error["message"]


def test_a_folder_of_a_step_is_a_source(checkpoint: Path, tmp_path: Path) -> None:
    tl.export_checkpoint(checkpoint / "step-00000001", tmp_path / "one.pt")
    assert torch.load(tmp_path / "one.pt", weights_only=False)["step"] == 1
    with pytest.raises(ValueError, match="holds a single checkpoint"):
        tl.export_checkpoint(checkpoint / "step-00000001", tmp_path / "two.pt", step=2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(tl.Unsupported, match="is not a checkpoint that can be exported"):
        tl.export_checkpoint(tmp_path / "empty", tmp_path / "two.pt")


def test_a_running_save_is_awaited(tmp_path: Path) -> None:
    checkpoints = tl.Checkpointer(tmp_path / "run")
    for step in (1, 2):
        checkpoints.save(step, {"w": torch.full((1_000_000,), float(step))})
        tl.export_checkpoint(tmp_path / "run", tmp_path / f"{step}.pt")
        assert tl.load(tmp_path / f"{step}.pt")["w"][0] == step


@pytest.mark.parametrize("source", ["run", "run/step-00000001", "link"])
def test_the_folder_of_a_step_is_not_a_target(tmp_path: Path, source: str) -> None:
    """A shard of the checkpoint that is read would be replaced."""
    run = tmp_path / "run"
    tl.Checkpointer(run).save(1, {"w": torch.ones(3)}, block=True)
    (tmp_path / "link").symlink_to(run)
    [shard] = (run / "step-00000001").glob("shard-*.safetensors")
    before = shard.read_bytes()
    for out in (shard, run / "step-00000001/new.pt", run / "step-00000001/folder/"):
        with pytest.raises(FileExistsError, match="in the folder of a checkpoint"):
            tl.export_checkpoint(tmp_path / source, f"{out}{'/' if out.name == 'folder' else ''}", force=True)
    assert shard.read_bytes() == before
    assert not (run / "step-00000001/folder").exists()
    tl.export_checkpoint(tmp_path / source, run.with_name("outside.pt"))


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "base": lambda base: base,
    "transposed": lambda base: base.t(),
    "columns": lambda base: base[:, 2:5],
    "even": lambda base: base[::2],
    "expanded": lambda base: base[:1].expand(50, 6),
    "scalar": lambda base: base[7, 5],
    "diagonal": lambda base: base.diagonal(),
    "permuted": lambda base: base.view(2, 4, 6).permute(2, 0, 1),
    "empty": lambda base: base[3:3],
}


@pytest.mark.parametrize("window_bytes", [64, 1 << 20])
def test_diff_compares_views_by_their_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    """What is between them, and behind them, does not count, however small the windows are."""
    monkeypatch.setattr(difference, "_WINDOW_BYTES", window_bytes)
    base = torch.arange(48.0).reshape(8, 6)
    changed = base.clone()
    changed[1, 3] += 0.5
    for number, (here, there) in enumerate(((base, base), (base, changed))):
        ours = {name: view(here) for name, view in VIEWS.items()}
        theirs = {name: view(there) for name, view in VIEWS.items()}
        expected = {name: int((ours[name] != theirs[name]).sum()) for name in VIEWS}
        sources = [tmp_path / f"{number}-{each}" for each in ("ours", "theirs", "cloned", "theirs.pt")]
        cloned = {name: view.clone() for name, view in theirs.items()}
        for path, state in zip(sources, (ours, theirs, cloned), strict=False):
            tl.Checkpointer(path).save(1, state, block=True)
        tl.save(theirs, sources[3])
        for other in sources[1:]:
            found = compare(sources[0], other)
            assert {each.name: each.elements for each in found.tensors} == {
                name: count for name, count in expected.items() if count
            }
            assert {each.max_abs for each in found.tensors} <= {0.5}
        assert compare(sources[3], sources[3]).is_same


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_part_whose_tensors_overlap_with_those_of_another_part(tmp_path: Path, suffix: str) -> None:
    """Only both together say which bytes of the shared memory are stored."""
    columns = torch.arange(40.0).view(4, 10)
    state = {"model": {"q": columns[:, :5].t()}, "ema": {"k": columns[:, 4:8]}}
    tl.Checkpointer(tmp_path / "run").save(1, state, block=True)
    for key, part in state.items():
        out = tmp_path / f"{key}.{suffix}"
        tl.export_checkpoint(tmp_path / "run", out, key=key)
        found = tl.load(out)
        assert found.keys() == part.keys()
        assert all(torch.equal(found[name], part[name]) for name in part)
        assert compare(tmp_path / "run", tmp_path / "run", key=key).is_same


def test_errors_of_writing_name_the_output(run_script: RunScript) -> None:
    run_script(
        """
        import os, resource, signal, torch, trunkline as tl

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tl.Checkpointer("run").save(1, {"w": torch.zeros(1 << 20)}, block=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            tl.export_checkpoint("run", "out.pt")
        except OSError as error:
            assert error.filename == os.path.abspath("out.pt"), error.filename
            assert os.path.abspath("out.pt") in str(error) and "/proc/" not in str(error), error
        else:
            raise AssertionError("nothing was raised")
        assert os.listdir() == ["run"]
        """
    )
