"""Saves in the background: what is saved is what was there when it began; handles may be dropped."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support_threads import await_saves

import trunkline as tl

RunScript = Callable[..., str]
ALL = 1 << 40  # commands


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """Aligned and unaligned, large enough to be written without a copy where that is allowed."""
    ramp = torch.arange(1_500_000, dtype=torch.int32)
    return {
        "large": ramp * 31 + version,
        "odd": (ramp[:777_777] + version).to(torch.uint8),
        "small": torch.full((3,), float(version)),
        "transposed": (ramp[:600_000] + version).reshape(600, 1000).t(),
    }


def overwrite(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(99)


def assert_version(found: dict[str, torch.Tensor], version: int) -> None:
    for name, expected in tensors_of(version).items():
        assert torch.equal(found[name], expected), name


Begin = Callable[[dict[str, torch.Tensor], Path, tl.Engine, "str | None"], tl.SaveHandle]


def begin_steps(
    tensors: dict[str, torch.Tensor], root: Path, engine: tl.Engine, staging: "str | None"
) -> tl.SaveHandle:
    checkpointer = tl.Checkpointer(root / "steps", process_group=False, engine=engine, staging_bytes=staging)
    return checkpointer.save(1, tensors)


def begin_file(name: str) -> Begin:
    def begin(
        tensors: dict[str, torch.Tensor], root: Path, engine: tl.Engine, staging: "str | None"
    ) -> tl.SaveHandle:
        return tl.save_async(tensors, root / name, engine=engine, staging_bytes=staging)

    return begin


def begin_again(
    begin: Begin, tensors: dict[str, torch.Tensor], root: Path, engine: tl.Engine
) -> tl.SaveHandle:
    """Save after an earlier save, with little memory for staging."""
    if begin is not begin_steps:
        return begin(tensors, root, engine, "16MiB")
    checkpointer = tl.Checkpointer(root / "steps", process_group=False, engine=engine, staging_bytes="16MiB")
    checkpointer.load()
    return checkpointer.save(2, tensors)


def load(root: Path) -> dict[str, torch.Tensor]:
    steps = root / "steps"
    if steps.exists():
        found: dict[str, torch.Tensor] = tl.Checkpointer(steps, process_group=False).load()
        return found
    (path,) = root.glob("file.*")
    return dict(tl.load(path))


@pytest.mark.parametrize(
    "begin",
    [begin_steps, begin_file("file.pt"), begin_file("file.safetensors")],
    ids=["checkpoint", "pt", "safetensors"],
)
@pytest.mark.parametrize("backend_name", ["io_uring", "threads"])
def test_what_is_saved_is_what_was_there(
    tmp_path: Path, faults: tl.Faults, begin: Begin, backend_name: str
) -> None:
    try:
        engine = tl.Engine(backend_name, faults=faults)
    except tl.Unsupported as error:
        pytest.skip(str(error))
    with engine:
        tensors = tensors_of(1)
        faults.hold("write", 0, ALL)
        handle = begin(tensors, tmp_path, engine, None)
        handle.wait_staged(60)
        overwrite(tensors)
        assert not handle.done()  # nothing has been written yet
        faults.release()
        handle.wait(60)
        assert_version(load(tmp_path), 1)


@pytest.mark.parametrize(
    "begin",
    [begin_steps, begin_file("file.pt"), begin_file("file.safetensors")],
    ids=["checkpoint", "pt", "safetensors"],
)
def test_a_state_beyond_the_staging_memory_waits_for_the_disk(
    tmp_path: Path, faults: tl.Faults, begin: Begin
) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        tensors = tensors_of(2)
        tensors["more"] = torch.zeros(40 << 20, dtype=torch.uint8)
        faults.hold("write", 0, ALL)
        handle = begin(tensors, tmp_path, engine, "16MiB")
        with pytest.raises(tl.Timeout):
            handle.wait_staged(0.05)
        faults.release()
        handle.wait_staged(60)
        overwrite(tensors)
        handle.wait(60)
        found = load(tmp_path)
        assert_version(found, 2)
        assert not found["more"].any()


def test_a_dropped_handle_saves_all_the_same(tmp_path: Path, faults: tl.Faults) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        tensors = tensors_of(3)
        faults.hold("write", 0, ALL)
        tl.save_async(tensors, tmp_path / "file.pt", engine=engine).wait_staged(60)
        overwrite(tensors)
        faults.release()
        await_saves()
        assert_version(load(tmp_path), 3)


@pytest.mark.parametrize("drop", ["save_async", "checkpointer"])
@pytest.mark.parametrize("then", ["save", "save_async"])
def test_an_error_nobody_waited_for_is_raised_by_the_next_save(
    tmp_path: Path, faults: tl.Faults, drop: str, then: str
) -> None:
    with tl.Engine("threads", faults=faults) as engine:

        def begin(way: str, number: int) -> None:
            if way == "save":
                tl.save({"x": torch.ones(3)}, tmp_path / f"{number}.pt", engine=engine)
            elif way == "save_async":
                tl.save_async({"x": torch.ones(3)}, tmp_path / f"{number}.pt", engine=engine)
            else:
                checkpointer = tl.Checkpointer(tmp_path / f"{number}", process_group=False, engine=engine)
                checkpointer.save(number, {"x": torch.ones(3)})
                # It is gone when this returns, so that nobody else can raise the error.

        faults.fail("sync", faults.commands("sync"), 5)
        begin(drop, 1)
        await_saves()
        with pytest.raises(tl.Error, match="nobody waited") as caught:
            begin(then, 2)
        assert caught.value.errno == 5
        begin(then, 3)  # said once
        await_saves()


def test_a_checkpointer_raises_no_error_of_other_saves(tmp_path: Path, faults: tl.Faults) -> None:
    """The last save of a preempted training would be lost, or each save beside one whose disk is full."""
    with tl.Engine("threads") as engine, tl.Engine("threads", faults=faults) as failing:
        main = tl.Checkpointer(tmp_path / "main", process_group=False, engine=engine)
        best = tl.Checkpointer(tmp_path / "best", process_group=False, engine=failing)
        faults.fail("sync", 0, 5, ALL)
        tl.save_async({"x": torch.ones(3)}, tmp_path / "lost.pt", engine=failing)
        for step in range(1, 4):
            best.save(step, {"x": torch.ones(3)})
            await_saves()
            main.save(step, {"x": torch.ones(3)}, block=True)
            if step == 1:
                with pytest.raises(tl.Error, match=r"^an earlier save failed, .*saving .*lost\.pt: "):
                    tl.save({"x": torch.ones(3)}, tmp_path / "file.pt", engine=engine)
            tl.save({"x": torch.ones(3)}, tmp_path / "file.pt", engine=engine)
            with pytest.raises(tl.Error, match=f"^step {step} was not saved, because the one before it"):
                best.save(step, {"x": torch.ones(3)})
        assert main.steps() == [1, 2, 3]


def test_a_save_raises_what_failed_of_checkpointers_that_are_gone(tmp_path: Path, faults: tl.Faults) -> None:
    with tl.Engine("threads", faults=faults) as engine:

        def checkpointer() -> tl.Checkpointer:
            return tl.Checkpointer(tmp_path / "run", process_group=False, engine=engine)

        kept = checkpointer()
        faults.fail("sync", 0, 5, ALL)
        checkpointer().save(1, {"x": torch.ones(3)})
        await_saves()
        with pytest.raises(tl.Error, match=r"nobody waited for it: saving step 1 to .*; this call .* again$"):
            checkpointer().save(2, {"x": torch.ones(3)})
        kept.save(3, {"x": torch.ones(3)})
        await_saves()
        checkpointer().save(4, {"x": torch.ones(3)})
        await_saves()
        # Both in one error: the save may be tried again only once.
        with pytest.raises(
            tl.Error, match=r"^step 5 was not saved, .*step 3 .*; besides, an earlier .*step 4 "
        ):
            kept.save(5, {"x": torch.ones(3)})
        handle = kept.save(5, {"x": torch.ones(3)})
        with pytest.raises(tl.Error, match="step 5"):
            handle.wait()


def test_a_save_that_another_checkpointer_overtakes(tmp_path: Path, faults: tl.Faults) -> None:
    """Of a program that makes one for each save, which the error says what to do about."""
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", 0, ALL)
        one, other = (tl.Checkpointer(tmp_path, process_group=False, engine=engine) for _ in range(2))
        one.save(2, {"x": torch.ones(3)}).wait_staged()
        handle = other.save(1, {"x": torch.ones(3)})
        faults.release()
        with pytest.raises(FileExistsError, match=r"step 2.*make one and keep it$"):
            handle.wait()
        one.wait()
        with pytest.raises(FileExistsError) as caught:  # of save() itself: of an earlier run
            tl.Checkpointer(tmp_path, process_group=False, engine=engine).save(1, {"x": torch.ones(3)})
        assert "keep it" not in str(caught.value)


def test_what_failed_of_a_checkpointer_is_reported_at_exit(run_script: RunScript) -> None:
    printed = run_script(
        """
        import sys
        import torch
        import trunkline as tl
        sys.stderr = sys.stdout
        faults = tl.Faults()
        engine = tl.Engine("threads", faults=faults)
        faults.fail("sync", 0, 5, 1 << 40)
        kept = tl.Checkpointer("kept", process_group=False, engine=engine)
        for checkpointer in (kept, tl.Checkpointer("gone", process_group=False, engine=engine)):
            checkpointer.save(1, {"x": torch.ones(3)})._join()
        del checkpointer
        other = tl.Checkpointer("other", process_group=False)
        other.save(1, {"x": torch.ones(3)}, block=True)
    """,
        expect=1,
    )
    assert sorted(line.split(":")[1] for line in printed.splitlines()) == [
        " saving step 1 to gone failed",
        " saving step 1 to kept failed",
    ]


def test_a_checkpointer_raises_the_error_of_its_own_last_save(tmp_path: Path, faults: tl.Faults) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        checkpointer = tl.Checkpointer(tmp_path, process_group=False, engine=engine)
        faults.fail("sync", faults.commands("sync"), 5)
        checkpointer.save(1, {"x": torch.ones(3)})
        with pytest.raises(tl.Error) as caught:
            checkpointer.save(2, {"x": torch.ones(3)})
        assert caught.value.errno == 5
        assert checkpointer.steps() == []
        checkpointer.save(2, {"x": torch.ones(3)}).wait()
        assert checkpointer.steps() == [2]


def test_a_save_that_was_cancelled_is_no_failure(tmp_path: Path, faults: tl.Faults) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        checkpointer = tl.Checkpointer(tmp_path / "steps", process_group=False, engine=engine)
        for cancelled in (
            lambda: checkpointer.save(1, tensors_of(1)),
            lambda: tl.save_async(tensors_of(1), tmp_path / "file.pt", engine=engine),
        ):
            faults.hold("write", faults.commands("write"), ALL)
            handle = cancelled()
            handle.wait_staged(60)
            handle.cancel()
            faults.release()
            for _ in range(2):
                with pytest.raises(tl.Cancelled, match=rf"^saving [^:]*{tmp_path}[^:]* was cancelled$"):
                    handle.wait(60)
            checkpointer.wait()  # as scripts end
            assert checkpointer.steps() == []
            assert {path.name for path in tmp_path.iterdir()} == {"steps"}
        # Dropped on purpose: the next save has nothing to complain of.
        faults.hold("write", faults.commands("write"), ALL)
        dropped = checkpointer.save(2, tensors_of(2))
        dropped.wait_staged(60)
        dropped.cancel()
        faults.release()
        checkpointer.save(3, tensors_of(3)).wait(60)
        assert checkpointer.steps() == [3]


def test_a_save_under_way_at_the_exit_is_completed(run_script: RunScript, tmp_path: Path) -> None:
    printed = run_script("""
        import threading
        import torch
        import trunkline as tl
        faults = tl.Faults()
        engine = tl.Engine("threads", faults=faults)
        faults.hold("write", 0, 1 << 40)
        checkpointer = tl.Checkpointer("steps", process_group=False, engine=engine)
        checkpointer.save(1, {"x": torch.ones(3_000_000)})
        tl.save_async({"x": torch.ones(3_000_000)}, "file.pt", engine=engine)
        def at_exit():
            threading.main_thread().join()  # ends when the interpreter begins to exit
            print("exiting", flush=True)
            faults.release()
        threading.Thread(target=at_exit, daemon=True).start()
    """)
    assert printed == "exiting\n"
    assert {path.name for path in tmp_path.iterdir()} == {"steps", "file.pt"}
    assert torch.equal(tl.load(tmp_path / "file.pt")["x"], torch.ones(3_000_000))
    found = tl.Checkpointer(tmp_path / "steps", process_group=False).load()
    assert torch.equal(found["x"], torch.ones(3_000_000))


def test_an_error_nobody_waited_for_is_printed_at_exit(run_script: RunScript) -> None:
    printed = run_script(
        """
        import sys
        import torch
        import trunkline as tl
        sys.stderr = sys.stdout
        faults = tl.Faults()
        engine = tl.Engine("threads", faults=faults)
        faults.fail("write", 0, 28, 1 << 40)
        tl.save_async({"x": torch.ones(3)}, "file.pt", engine=engine)
    """,
        expect=1,
    )
    assert printed.startswith("trunkline: saving file.pt failed: ")
    assert "ENOSPC" in printed


@pytest.mark.parametrize(
    "begin",
    [begin_steps, begin_file("file.pt"), begin_file("file.safetensors")],
    ids=["checkpoint", "pt", "safetensors"],
)
@pytest.mark.parametrize("nbytes", [0, 3, 16_000])
def test_memory_that_is_resized_before_it_is_staged(
    tmp_path: Path, faults: tl.Faults, begin: Begin, nbytes: int
) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        begin(tensors_of(1), tmp_path, engine, None).wait(60)
        tensors = {"small": torch.ones(1000), "large": torch.zeros(40 << 20, dtype=torch.uint8)}
        faults.hold("write", faults.commands("write"), ALL)
        handle = begin_again(begin, tensors, tmp_path, engine)
        with pytest.raises(tl.Timeout):
            handle.wait_staged(0.05)  # it waits for the writes
        tensors["small"].untyped_storage().resize_(nbytes)
        faults.release()
        for wait in (handle.wait_staged, handle.wait):
            with pytest.raises(tl.Error, match="resized or freed before it was copied") as caught:
                wait(60)
            assert str(tmp_path) in str(caught.value.filename)
        assert_version(load(tmp_path), 1)
        assert list(tmp_path.rglob("*.tmp")) == []


def step_of_a_fused_optimizer(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()  # does not count as a change


def in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[weight.numel() // 3] += 1  # few bytes


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": in_place,
    "fused": step_of_a_fused_optimizer,
    "data": lambda weight: weight.data.add_(1),
    "numpy": lambda weight: weight.detach().numpy().fill(1),
}


@pytest.mark.parametrize(
    "begin",
    [begin_steps, begin_file("file.pt"), begin_file("file.safetensors")],
    ids=["checkpoint", "pt", "safetensors"],
)
@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_change_before_they_are_staged(
    tmp_path: Path, faults: tl.Faults, begin: Begin, change: str
) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        begin(tensors_of(1), tmp_path, engine, None).wait(60)
        faults.hold("write", faults.commands("write"), ALL)
        weight = torch.nn.Parameter(torch.zeros(10 << 20))
        state = {"small": torch.ones(3), "weight": weight.detach(), "last": weight.detach()[:5]}
        handle = begin_again(begin, state, tmp_path, engine)
        with pytest.raises(tl.Timeout):
            handle.wait_staged(0.05)  # it waits for the writes
        CHANGES[change](weight)
        faults.release()
        for wait in (handle.wait_staged, handle.wait):
            with pytest.raises(tl.Error, match="was changed before it was copied.*call wait_staged()"):
                wait(60)
        assert_version(load(tmp_path), 1)
        assert list(tmp_path.rglob("*.tmp")) == []


@pytest.mark.parametrize(
    ("begin", "root"),
    [(begin_steps, "state"), (begin_file("file.pt"), "obj")],
    ids=["checkpoint", "pt"],
)
@pytest.mark.parametrize("resized", [False, True])
def test_the_place_of_a_tensor_that_changed_is_named(
    tmp_path: Path, faults: tl.Faults, begin: Begin, root: str, resized: bool
) -> None:
    moment = torch.zeros(10 << 20)
    shared = torch.ones(3)
    inner = {0: {"exp_avg": moment, "step": torch.ones(1)}, 1: {"exp_avg": torch.zeros(3)}}
    state = {"a": [shared, (shared, torch.ones(5))], "optimizer": {"state": inner}}
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", faults.commands("write"), ALL)
        handle = begin(state, tmp_path, engine, "16MiB")
        with pytest.raises(tl.Timeout):
            handle.wait_staged(0.05)  # it waits for the writes
        if resized:
            state["a"][1][1].untyped_storage().resize_(1000)  # type: ignore[index]
        else:
            in_place(moment)
        faults.release()
        place = "['a'][1][1]" if resized else "['optimizer']['state'][0]['exp_avg']"
        with pytest.raises(tl.Error, match=re.escape(f"{root}{place} was ")):
            handle.wait(60)


@pytest.mark.parametrize(
    "begin",
    [begin_steps, begin_file("file.pt"), begin_file("file.safetensors")],
    ids=["checkpoint", "pt", "safetensors"],
)
def test_what_changes_beside_a_view_does_not_matter(tmp_path: Path, faults: tl.Faults, begin: Begin) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", 0, ALL)
        weights_and_gradients = torch.zeros(2, 10 << 20)
        weight = torch.nn.Parameter(weights_and_gradients[0])
        weight.grad = weights_and_gradients[1]
        state = {"weight": weight.detach()}
        handle = begin(state, tmp_path, engine, "16MiB")
        with pytest.raises(tl.Timeout):
            handle.wait_staged(0.05)
        (weight * 2).sum().backward()
        faults.release()
        handle.wait(60)
        assert not load(tmp_path)["weight"].any()


def test_views_that_are_all_of_their_memory_count(tmp_path: Path, faults: tl.Faults) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", 0, ALL)
        flat = torch.zeros(2, 10 << 20)
        handle = begin_file("file.safetensors")({"a": flat[0], "b": flat[1]}, tmp_path, engine, "16MiB")
        with pytest.raises(tl.Timeout):
            handle.wait_staged(0.05)
        flat[0, flat.shape[1] // 3] += 1
        faults.release()
        with pytest.raises(tl.Error, match="the tensor 'a' was changed before it was copied"):
            handle.wait(60)


def test_tensors_that_cannot_be_looked_at_are_saved(tmp_path: Path) -> None:
    lazy = torch.nn.LazyLinear(3)
    state = {"lazy": lazy.weight, "other": torch.ones(3)}
    tl.save(state, tmp_path / "blocking.pt")
    tl.save_async(state, tmp_path / "background.pt").wait(60)
    assert (tmp_path / "background.pt").read_bytes() == (tmp_path / "blocking.pt").read_bytes()


def test_what_changes_during_a_save_that_blocks_is_not_looked_for(tmp_path: Path) -> None:
    stop = threading.Event()
    ring = torch.zeros(4 << 20)

    def write() -> None:
        while not stop.is_set():
            ring[-1] += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for step in range(5):
            tl.save({"ring": ring}, tmp_path / "file.pt")
            tl.save({"ring": ring}, tmp_path / "file.safetensors")
            tl.Checkpointer(tmp_path / f"steps{step}", process_group=False).save(
                1, {"ring": ring}, block=True
            )
    finally:
        stop.set()
        thread.join()


def test_tensors_without_versions_are_saved(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"made in inference mode": torch.ones(3)}
    state["other"] = torch.zeros(3)
    tl.save_async(state, tmp_path / "file.pt").wait(60)
    assert tl.load(tmp_path / "file.pt")["made in inference mode"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["file.pt", "file.safetensors"])
def test_memory_that_is_resized_before_it_is_read(tmp_path: Path, faults: tl.Faults, name: str) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", 0, 1)
        first = tl.save_async(tensors_of(1), tmp_path / name, engine=engine)
        first.wait_staged(60)
        tensors = tensors_of(2)
        second = tl.save_async(tensors, tmp_path / name, engine=engine)  # waits for the first
        tensors["large"].untyped_storage().resize_(0)
        faults.release()
        with pytest.raises(tl.Error, match="resized or freed before it was copied"):
            second.wait(60)
        first.wait(60)
        assert_version(load(tmp_path), 1)


def test_tensors_that_get_other_memory_before_they_are_staged(tmp_path: Path, faults: tl.Faults) -> None:
    with tl.Engine("threads", faults=faults) as engine:
        faults.hold("write", 0, 1)
        tl.save_async({}, tmp_path / "file.pt", engine=engine).wait_staged(60)
        tensors = tensors_of(2)
        second = tl.save_async(tensors, tmp_path / "file.pt", engine=engine)  # waits for the first
        for tensor in tensors.values():
            tensor.data = torch.zeros(1)  # what they had belongs to the save now
        faults.release()
        second.wait(60)
        assert_version(load(tmp_path), 2)
