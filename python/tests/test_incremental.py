"""Checkpointer(incremental=True): what did not change is linked, and every step is whole on its own."""

import errno
import json
import os
import random
import shutil
import subprocess
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import support_warm
import torch
from support_program import PROGRAM

import trunkline as tl
from trunkline import _core
from trunkline.checkpoint.directory.increments import UNIT_BYTES

MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def opened(directory: Path, keep: int | None = None, **options: Any) -> tl.Checkpointer:
    """An incremental Checkpointer that goes on from what is there."""
    checkpoints = tl.Checkpointer(directory, keep=keep, incremental=True, process_group=False, **options)
    if checkpoints.latest() is not None:
        checkpoints.load()
    return checkpoints


def save(checkpoints: tl.Checkpointer, step: int, state: Any) -> float:
    """The share that was written."""
    handle = checkpoints.save(step, state)
    handle.wait()
    share = handle.written_share()
    assert share is not None
    return share


def cloned(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    return {key: cloned(value) for key, value in state.items()} if isinstance(state, dict) else state


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    return bool(found == expected)


def manifest_of(directory: Path, step: int) -> dict[str, Any]:
    return _core.CheckpointStore(directory).read_manifest(step)


def new_bytes(directory: Path, step: int) -> int:
    """Bytes of the shards that a step does not share with an older one."""
    return sum(shard["bytes"] for shard in manifest_of(directory, step)["shards"] if "commit" not in shard)


def assert_no_debris(directory: Path) -> None:
    """Each step has what its manifest names and nothing else."""
    for folder in directory.glob("step-*"):
        names = {shard["file"] for shard in manifest_of(directory, int(folder.name[5:]))["shards"]}
        assert {each.name for each in folder.iterdir() if "manifest" not in each.name} == names, folder


def lora_state(adapters: int = 0) -> dict[str, Any]:
    """A frozen base of 16 MB, an adapter of 80 kB with its optimizer."""
    generator = torch.Generator().manual_seed(7)
    base = {f"layer{i}": torch.randn(500, 800, generator=generator) for i in range(10)}
    torch.manual_seed(adapters)
    lora = {f"layer{i}.A": torch.randn(4, 512) for i in range(10)}
    adam = {f"{name}.{moment}": torch.randn(4, 512) for name in lora for moment in "mv"}
    return {"base": base, "lora": lora, "adam": adam, "step": adapters}


def test_a_lora_run_writes_what_changed(directory: Path) -> None:
    checkpoints = opened(directory)
    states = [lora_state(step) for step in range(6)]
    changed = sum(each.nbytes for part in ("lora", "adam") for each in states[0][part].values())
    assert save(checkpoints, 0, states[0]) == 1.0
    for step in range(1, 6):
        share = save(checkpoints, step, states[step])
        assert new_bytes(directory, step) <= 1.05 * changed + MIB / 8, "headers, and room between tensors"
        assert share <= 1.05 * changed / 16e6
    for step in range(6):
        assert same(checkpoints.load(step), states[step])
        checkpoints.verify(step)
    assert_no_debris(directory)


def test_embeddings_are_compared_by_units(directory: Path) -> None:
    table = torch.randn(64_000, 64)  # 16 MB
    checkpoints = opened(directory)
    save(checkpoints, 0, {"table": table})
    before = table.clone()
    for row in (10, 11, 30_000, 63_999):
        table[row] += 1
    share = save(checkpoints, 1, {"table": table})
    assert share == pytest.approx(3 * UNIT_BYTES / table.nbytes, rel=0.2)
    assert torch.equal(checkpoints.load(0)["table"], before)
    assert torch.equal(checkpoints.load(1)["table"], table)
    with tl.open_tensors(directory / "step-00000001") as tensors:
        for part in (slice(5, 15), slice(29_990, 30_010), slice(63_990, 64_000)):
            assert torch.equal(tensors.get_slice("table")[part], table[part])
        assert torch.equal(tensors.get_tensor("table"), table)


def test_where_everything_changes_everything_is_written_to_one_shard(directory: Path) -> None:
    checkpoints = opened(directory, keep=2)
    for step in range(4):
        torch.manual_seed(step)
        state = {f"w{i}": torch.randn(500_000) for i in range(8)}
        assert save(checkpoints, step, state) == 1.0
        assert len(manifest_of(directory, step)["shards"]) == 1
        tensors = manifest_of(directory, step)["tensors"]
        if step > 0:  # no more digests than the samples
            assert all(sum(len(run[1]) // 32 for run in each["digests"]) <= 3 for each in tensors)
        assert same(checkpoints.load(), state)


def test_what_stops_changing_is_referenced_two_saves_later(directory: Path) -> None:
    checkpoints = opened(directory)
    changing = {f"w{i}": torch.randn(500_000) for i in range(4)}
    for step in range(3):
        for tensor in changing.values():
            tensor += 1
        assert save(checkpoints, step, changing) == 1.0
    assert save(checkpoints, 3, changing) > 0.5, "the samples show it, and everything gets digests"
    assert save(checkpoints, 4, changing) == 0.0
    assert same(checkpoints.load(4), changing)


def test_a_shard_of_which_little_is_needed_is_not_kept(directory: Path) -> None:
    """Steps take at most half more room than their states; what stays is then in a shard of its own."""
    checkpoints = opened(directory)
    frozen = torch.randn(1_000_000)
    for step in range(4):
        changing = {f"w{i}": torch.randn(1_000_000) for i in range(5)}
        share = save(checkpoints, step, {"frozen": frozen, **changing})
        expected = 1.0 if step < 2 else 5 / 6
        assert share == pytest.approx(expected), step
        used = sum(shard["bytes"] for shard in manifest_of(directory, step)["shards"])
        assert used < 1.5 * 24_000_000 + MIB
    assert torch.equal(checkpoints.load()["frozen"], frozen)


@pytest.mark.parametrize("gone", range(3))
@pytest.mark.parametrize("how", ["delete", "rm"])
def test_each_step_outlives_the_others(directory: Path, gone: int, how: str) -> None:
    checkpoints = opened(directory)
    states = [lora_state(step) for step in range(3)]
    for step, state in enumerate(states):
        save(checkpoints, step, state)
    if how == "delete":
        checkpoints.delete(gone)
    else:
        shutil.rmtree(directory / f"step-{gone:08}")
    again = opened(directory)
    assert again.steps() == [step for step in range(3) if step != gone]
    for step in again.steps():
        again.verify(step)
        assert same(again.load(step), states[step])
    assert save(again, 3, lora_state(3)) < 0.1
    _core.CheckpointStore(directory).collect()
    for step in again.steps():
        again.verify(step)


def test_retention_takes_nothing_from_steps_that_stay(directory: Path) -> None:
    checkpoints = opened(directory, keep=1)
    for step in range(5):
        state = lora_state(step)
        share = save(checkpoints, step, state)
        assert step == 0 or share < 0.1
        assert checkpoints.steps() == [step]
        assert same(checkpoints.load(), state)
    assert_no_debris(directory)


@pytest.mark.parametrize("copy", ["cp -a", "cp -r"])
def test_copies_are_right(directory: Path, tmp_path: Path, copy: str) -> None:
    checkpoints = opened(directory)
    for step in range(2):
        save(checkpoints, step, lora_state(step))
    target = tmp_path / "copy"
    subprocess.run([*copy.split(), directory, target], check=True)
    shutil.rmtree(directory)
    other = opened(target)
    assert [same(other.load(step), lora_state(step)) for step in range(2)] == [True, True]
    assert save(other, 2, lora_state(2)) < 0.1
    other.delete(0)
    other.verify(2)


def test_a_step_that_is_copied_is_whole(directory: Path, tmp_path: Path) -> None:
    checkpoints = opened(directory)
    for step in range(2):
        save(checkpoints, step, lora_state(step))
    best = tmp_path / "best"
    best.mkdir()
    shutil.copytree(directory / "step-00000001", best / "step-00000001")
    shutil.rmtree(directory)
    assert same(tl.Checkpointer(best, process_group=False).load(), lora_state(1))


def test_full_every_bounds_how_many_share_a_shard(directory: Path) -> None:
    checkpoints = opened(directory, full_every=3)
    shares = [save(checkpoints, step, lora_state(step)) for step in range(7)]
    assert [share == 1.0 for share in shares] == [step % 3 == 0 for step in range(7)]
    for step in range(7):
        manifest = manifest_of(directory, step)
        ages = [manifest["commit"] - each.get("commit", manifest["commit"]) for each in manifest["shards"]]
        assert max(ages) < 3
    assert same(checkpoints.load(), lora_state(6))


def test_a_full_save_without_the_option_ends_the_sharing(directory: Path) -> None:
    save(opened(directory), 0, lora_state(0))
    plain = tl.Checkpointer(directory, keep=None, process_group=False)
    plain.load()
    handle = plain.save(1, lora_state(1), block=True)
    assert handle.written_share() is None
    assert "features" not in manifest_of(directory, 1)
    again = opened(directory)
    assert save(again, 2, lora_state(2)) == 1.0, "there are no digests to compare with"
    assert save(again, 3, lora_state(3)) < 0.1


def test_volumes_share_what_is_on_each(directory: Path, tmp_path: Path) -> None:
    volumes = [tmp_path / "v0", tmp_path / "v1"]
    for each in volumes:
        each.mkdir()
    checkpoints = opened(directory, keep=2, volumes=volumes)
    for step in range(4):
        share = save(checkpoints, step, lora_state(step))
        assert step == 0 or share < 0.1
    for step in (2, 3):
        assert same(checkpoints.load(step), lora_state(step))
    checkpoints.delete(2)
    checkpoints.verify(3)
    # What lies on a volume that is not used any more is written again.
    other = opened(directory, volumes=[volumes[0]])
    assert 0.3 < save(other, 4, lora_state(4)) < 0.7
    assert same(other.load(4), lora_state(4))


def test_other_dtypes_views_and_shapes(directory: Path) -> None:
    whole = torch.randn(300, 1000)
    state: dict[str, Any] = {
        "whole": whole,
        "view": whole[10:20],
        "columns": torch.randn(40, 50).t(),
        "conj": torch.randn(10, dtype=torch.complex64).conj(),
        "half": torch.randn(1_000_001).to(torch.bfloat16),
        "fp8": torch.randn(999).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "text": "x",
    }
    checkpoints = opened(directory)
    save(checkpoints, 0, state)
    assert save(checkpoints, 1, state) == 0.0
    state["view"][0, 0] = 7
    assert 0 < save(checkpoints, 2, state) < 0.5
    found = checkpoints.load(2)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(_bytes(found[name]), _bytes(value)), name
    assert found["view"].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()
    assert checkpoints.load(1)["view"][0, 0] != 7
    # The same names with other shapes and dtypes are other tensors.
    state.update(scalar=torch.tensor([3]), fp8=state["fp8"].view(torch.uint8))
    save(checkpoints, 3, state)
    assert checkpoints.load(3)["scalar"].shape == (1,)
    assert checkpoints.load(3)["fp8"].dtype == torch.uint8
    assert checkpoints.load(2)["fp8"].dtype == torch.float8_e4m3fn


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def test_states_without_bytes_and_new_tensors(directory: Path) -> None:
    checkpoints = opened(directory)
    assert save(checkpoints, 0, {"step": 1}) == 1.0
    assert save(checkpoints, 1, {"empty": torch.empty(0)}) == 1.0
    tensor = torch.randn(500_000)
    save(checkpoints, 2, {"a": tensor})
    assert save(checkpoints, 3, {"a": tensor, "b": torch.zeros(500_000)}) == 0.5
    assert save(checkpoints, 4, {"b": torch.zeros(500_000)}) < 1.0
    assert save(checkpoints, 5, {"step": 1}) == 1.0
    assert torch.equal(checkpoints.load(3)["a"], tensor)
    assert torch.equal(checkpoints.load(4)["b"], torch.zeros(500_000))


class _WithoutLinks:
    """A store on a filesystem without hard links, or one of its saves."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        if name == "begin":
            return lambda *arguments: _WithoutLinks(self._of.begin(*arguments))
        if name == "link":
            return lambda _, wanted: ([None] * len(wanted), OSError(errno.EPERM, "injected", "shard"))
        return getattr(self._of, name)


def test_where_nothing_can_be_linked_everything_is_written(directory: Path) -> None:
    checkpoints = opened(directory)
    save(checkpoints, 0, lora_state(0))
    whole = checkpoints._context.store
    checkpoints._context.store = _WithoutLinks(whole)  # type: ignore[assignment]
    with pytest.warns(RuntimeWarning, match="incremental=True needs a filesystem with hard links"):
        assert save(checkpoints, 1, lora_state(1)) == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so once
        assert save(checkpoints, 2, lora_state(2)) == 1.0
    assert same(checkpoints.load(2), lora_state(2))
    checkpoints._context.store = whole
    assert save(checkpoints, 3, lora_state(3)) < 0.1


def test_a_damaged_base_is_not_linked(directory: Path) -> None:
    checkpoints = opened(directory)
    save(checkpoints, 0, lora_state(0))
    shard = next(directory.glob("step-*/*.safetensors"))
    os.truncate(shard, 5 * MIB)
    with pytest.warns(RuntimeWarning, match="written again"):
        assert save(checkpoints, 1, lora_state(1)) == 1.0
    checkpoints.verify(1)
    manifest = next(directory.glob("step-00000001/manifest-*"))
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert save(checkpoints, 2, lora_state(2)) == 1.0
    checkpoints.verify(2)


def test_damage_is_found_in_each_step_that_shares_it(directory: Path) -> None:
    checkpoints = opened(directory)
    for step in range(2):
        save(checkpoints, step, lora_state(step))
    shard = next(directory.glob("step-00000000/*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(10 * MIB)
        file.write(b"damaged")
    for step in range(2):
        with pytest.raises(tl.Corrupt, match="base.layer"):
            checkpoints.load(step)
        with pytest.raises(tl.Corrupt):
            checkpoints.verify(step)


def test_the_command_line_shows_what_was_written(directory: Path, tmp_path: Path) -> None:
    checkpoints = opened(directory)
    for step in range(2):
        save(checkpoints, step, lora_state(step))

    def run(*arguments: "str | Path") -> Any:
        command = ["checkpoint", *map(str, arguments), "--json"]
        if arguments[0] == "diff":
            done = support_warm.run(["-m", "trunkline", *command])
        else:
            done = subprocess.run([PROGRAM, *command], capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout)

    first, second = run("ls", directory)["checkpoints"]
    assert first["bytes_written"] == first["bytes"]
    assert second["bytes_written"] == new_bytes(directory, 1) < second["bytes"] / 10
    shown = run("show", directory)
    assert shown["bytes_written"] == second["bytes_written"]
    assert sorted(each["commit"] for each in shown["shards"]) == [1, 2]
    assert run("verify", directory, "--all")
    assert run("gc", directory)["removed"] == []
    difference = run("diff", directory / "step-00000000", directory / "step-00000001")
    assert {each["name"].split(".")[0] for each in difference["tensors"]} == {"lora", "adam"}
    target = tmp_path / "exported.safetensors"
    command = ["-m", "trunkline", "checkpoint", "export", directory, target, "--key", "base"]
    support_warm.run(command, check=True)
    assert same(dict(sorted(tl.load(target).items())), dict(sorted(lora_state()["base"].items())))


def test_a_later_build_without_the_feature_rejects_the_step(directory: Path) -> None:
    """What an earlier version does with a feature that it does not know; the gate is older than this one."""
    checkpoints = opened(directory)
    save(checkpoints, 0, lora_state(0))
    path = next(directory.glob("step-*/manifest-*"))
    line, _, text = path.read_bytes().partition(b"\n")
    assert line.startswith(b"trunkline checkpoint 2 ")
    text = text.replace(b'"features":["incremental"]', b'"features":["incrementaL"]')
    line = b"trunkline checkpoint 2 crc32c=%08x bytes=%d" % (_core.crc32c(text), len(text))
    path.write_bytes(line + b"\n" + text)
    files = sorted(directory.rglob("*"))
    plain = tl.Checkpointer(directory, process_group=False)
    with pytest.raises(tl.Format, match='needs the feature "incrementaL", which this build does not have'):
        plain.load()
    _core.CheckpointStore(directory).collect()
    assert sorted(directory.rglob("*")) == files


def test_two_processes_take_turns(directory: Path) -> None:
    code = """
        import sys, torch
        from test_incremental import lora_state, opened, save
        step = int(sys.argv[2])
        print(save(opened(sys.argv[1]), step, lora_state(step)))
    """
    shares = []
    for step in range(3):
        command = ["-c", textwrap.dedent(code), directory, str(step)]
        done = support_warm.run(command, check=True, cwd=Path(__file__).parent)
        shares.append(float(done.stdout))
    assert shares[0] == 1.0
    assert all(share < 0.1 for share in shares[1:])
    assert same(opened(directory).load(), lora_state(2))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"incremental": "yes"}, TypeError, "incremental: must be True or False"),
        ({"full_every": 3}, ValueError, "full_every: has no effect without incremental=True"),
        ({"incremental": True, "full_every": 0}, ValueError, "full_every"),
        ({"incremental": True, "full_every": 1.5}, TypeError, "full_every"),
    ],
)
def test_wrong_arguments(directory: Path, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        tl.Checkpointer(directory, process_group=False, **options)
    assert not directory.exists()


class _Run:
    """Random saves, deletions, crashes and collections, beside a dictionary of what must be there."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.directory = directory
        self.expected: dict[int, Any] = {}
        self.state: dict[str, Any] = {}
        self.step = 0
        self.keep: int | None = None
        self.checkpoints = self.reopen()

    def reopen(self) -> tl.Checkpointer:
        self.keep = self.rng.choice([None, None, 2, 4])
        self.checkpoints = opened(self.directory, keep=self.keep, full_every=self.rng.choice([None, 2, 5]))
        return self.checkpoints

    def change(self) -> None:
        """Change some tensors: rows, wholes, names, shapes."""
        for _ in range(self.rng.randint(0, 4)):
            name = f"t{self.rng.randint(0, 6)}"
            how = self.rng.random()
            if name not in self.state or how < 0.2:
                shape = (self.rng.choice([1, 10, 1000, 70_000, 300_001]),)
                self.state[name] = torch.randint(0, 100, shape, dtype=torch.int32)
            elif how < 0.3:
                del self.state[name]
            elif how < 0.5:
                self.state[name] += 1
            else:
                tensor = self.state[name]
                tensor[self.rng.randrange(len(tensor))] += 1

    def save(self, cancel: bool = False) -> None:
        self.change()
        self.step += self.rng.random() < 0.8
        before = dict(self.expected)
        handle = self.checkpoints.save(self.step, self.state, block=False)
        if cancel:
            handle.cancel()
        try:
            handle.wait()
        except tl.Cancelled:
            return
        self.expected.pop(self.step, None)
        self.expected[self.step] = cloned(self.state)  # the last committed comes last
        if self.keep is not None:
            last = list(self.expected)[-self.keep :]
            found = set(self.checkpoints.steps())
            assert set(last) <= found
            self.expected = {step: its for step, its in self.expected.items() if step in found}
        assert set(before) >= set(self.expected) - {self.step}

    def crash(self) -> None:
        """What a process leaves that dies when it has linked, and written a part."""
        store = _core.CheckpointStore(self.directory)
        step = store.latest()
        if step is None:
            return
        store.continue_from(store.position())
        save = store.begin(self.rng.choice([step, self.step + 1]), [2])
        manifest = store.open_manifest(step)
        save.link(manifest, list(range(len(manifest.shards()))))
        Path(save.placement["shards"][0]["path"]).write_bytes(b"a part")
        save.release()

    def check(self) -> None:
        assert set(self.checkpoints.steps()) == set(self.expected)
        for step, state in self.expected.items():
            assert same(self.checkpoints.load(step), state), step
            self.checkpoints.verify(step)
        if self.expected:
            _core.CheckpointStore(self.directory).collect()
            assert_no_debris(self.directory)

    def round(self) -> None:
        do = self.rng.choices(
            ["save", "delete", "rm", "reopen", "cancel", "gc", "crash"], [10, 2, 1, 2, 1, 1, 1]
        )[0]
        if do in ("save", "cancel"):
            self.save(cancel=do == "cancel")
        elif do == "reopen":
            self.reopen()
        elif do == "crash":
            self.crash()
        elif do == "gc":
            _core.CheckpointStore(self.directory).collect()
        elif self.expected:
            step = self.rng.choice(list(self.expected))
            if do == "delete":
                self.checkpoints.delete(step)
            else:
                shutil.rmtree(self.directory / f"step-{step:08}")
            del self.expected[step]


@pytest.fixture(params=[1, 2, 3, random.SystemRandom().getrandbits(32)], ids=["1", "2", "3", "random"])
def random_run(request: pytest.FixtureRequest, directory: Path) -> Iterator[_Run]:
    torch.manual_seed(request.param % 1000)
    run = _Run(directory, request.param)
    try:
        yield run
    finally:
        print("seed", request.param)


def test_random_operations_agree_with_a_dictionary(random_run: _Run) -> None:
    for number in range(60):
        random_run.round()
        if number % 6 == 0:
            random_run.check()
    random_run.check()
