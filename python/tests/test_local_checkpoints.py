"""Checkpoints on disks that one node each sees: Checkpointer(..., local=True)."""

import errno
import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import support_warm
import torch
from rank_processes import LOCAL_PHASES, Failed, RankProcesses, mount_privately

import trunkline as tl
from trunkline._formats.node_names import RECORD
from trunkline.checkpoint.nodes.node_directory import NodeDirectory

STATE = {"kilobytes": 700, "tensors": 3}


def state(seed: int) -> dict[str, Any]:
    return {"seed": seed, **STATE}


def directories(tmp_path: Path, nodes: Sequence[int]) -> list[str]:
    """The directory of each rank, given its node."""
    return [str(tmp_path / f"node-{node}" / "run") for node in nodes]


def open_all(ranks: RankProcesses, paths: Sequence[str], **options: Any) -> list[Any]:
    for rank, path in enumerate(paths):
        ranks.tell(rank, "open_local", path, **options)
    return [ranks.reply(rank) for rank in range(ranks.size)]


def failures_of_opening(ranks: RankProcesses, paths: Sequence[str]) -> dict[int, Failed]:
    for rank, path in enumerate(paths):
        ranks.tell(rank, "open_local", path)
    return ranks.collect(range(ranks.size))


def nbytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*.safetensors"))


def test_one_process(tmp_path: Path) -> None:
    made = tl.Checkpointer(tmp_path / "run", local=True, keep=2, process_group=False)
    assert made.latest() is None
    assert made.steps() == []
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        made.load()
    assert not (tmp_path / "run").exists()
    saved = {"weight": torch.arange(1000.0), "step": 0, "list": [None, "x", (1, 2)]}
    for step in range(1, 5):
        saved["step"] = step
        made.save(step, saved).wait()
    assert made.steps() == [3, 4]
    again = tl.Checkpointer(tmp_path / "run", local=True, keep=2, process_group=False)
    with pytest.raises(FileExistsError, match=r"up to step 4; call load\(\) first"):
        again.save(5, saved, block=True)
    loaded = again.load()
    assert torch.equal(loaded.pop("weight"), saved["weight"])
    assert loaded == {"step": 4, "list": [None, "x", (1, 2)]}
    into = {"weight": torch.zeros(1000), "step": None, "list": [None, "", (0, 0)]}
    assert again.load(3, into)["step"] == 3
    assert torch.equal(into["weight"], saved["weight"])
    # The run has gone back: what it leaves behind is removed.
    again.save(4, saved, block=True)
    again.save(5, saved, block=True)
    assert again.steps() == [4, 5]
    assert len(list((tmp_path / "run/saves").glob("step-*"))) == 2
    again.verify()


def test_the_best_are_kept(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: float("nan"), 3: 0.2, 4: float("inf"), 5: 0.4}
    paths = directories(tmp_path, [0, 1])
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, keep=1, keep_best=("loss", "min", 1))
        for step, loss in losses.items():
            ranks.all("save", step, state(step), block=True, metrics={"loss": loss, "step": step})
        assert ranks.all("steps") == [[3, 5]] * 2
        assert ranks.all("ask", "best") == [3, 3]
        assert ranks.all("ask", "metrics", 3) == [{"loss": 0.2, "step": 3.0}] * 2
        for failed in ranks.failures("ask", "metrics", 4).values():
            assert "there is no checkpoint of step 4 that can be loaded" in failed.message
        assert ranks.all("loads", state(3), 3) == [True] * 2
        ranks.finish()
    with pytest.raises(ValueError, match="best.*needs keep_best"):
        tl.Checkpointer(tmp_path / "other", local=True).best()


def test_starting_over_leaves_the_earlier_run(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path, local=True).save(7, {"run": 1}, block=True)
    fresh = tl.Checkpointer(tmp_path, local=True, fresh=True)
    fresh.save(3, {"run": 2}, block=True)
    fresh.save(4, {"run": 2}, block=True)
    assert fresh.steps() == [3, 4]
    assert len(list((tmp_path / "saves").glob("step-*"))) == 3
    with pytest.warns(RuntimeWarning, match="step 7 on the nodes .* was abandoned"):
        assert tl.Checkpointer(tmp_path, local=True).load() == {"run": 2}


def test_volumes(tmp_path: Path) -> None:
    disks = [tmp_path / "disk-0", tmp_path / "disk-1"]
    with tl.Checkpointer(tmp_path / "run", local=True, keep=1, volumes=disks) as made:
        for step in (1, 2):
            saved = {"weight": torch.full((1 << 20,), float(step))}
            made.save(step, saved)
    assert nbytes_in(tmp_path / "run") == 0
    assert all(abs(nbytes_in(disk) - (2 << 20)) < 100_000 for disk in disks)
    with tl.Checkpointer(tmp_path / "run", local=True) as made:  # the directory knows its volumes
        assert torch.equal(made.load()["weight"], saved["weight"])
        made.save(3, saved)
    assert nbytes_in(tmp_path / "run") == 0


def test_what_a_failed_save_left_is_removed(tmp_path: Path) -> None:
    made = tl.Checkpointer(tmp_path, local=True, process_group=False)
    made.save(1, {"weight": torch.ones(1000)}, block=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeDirectory, "commit", lambda *_: (_ for _ in ()).throw(OSError(5, "injected")))
        with pytest.raises(OSError, match="injected"):
            made.save(2, {"weight": torch.ones(1000)}, block=True)
    # It was prepared on all nodes, so it counts.
    assert made.steps() == [1, 2]
    debris = tmp_path / "saves/step-00000001/shard-00000-of-00001-00112233aabbccdd.safetensors"
    debris.write_bytes(b"x")
    again = tl.Checkpointer(tmp_path, local=True, process_group=False)
    assert torch.equal(again.load()["weight"], torch.ones(1000))
    again.save(3, {"weight": torch.ones(1000)}, block=True)
    assert not debris.exists()
    assert again.steps() == [1, 2, 3]


def fail_to_mark(*_: object) -> None:
    raise OSError(28, "injected")


@pytest.mark.parametrize("begins", ["new", "after load(1)"])
def test_a_save_that_fails_when_it_is_marked_does_not_block_the_run(tmp_path: Path, begins: str) -> None:
    """The run has no other entry yet; the save counts, since all nodes have prepared it."""
    made = tl.Checkpointer(tmp_path, local=True, process_group=False, keep=None)
    expected = [2, 3]
    if begins != "new":
        made.save(1, {"a": 1}, block=True)
        made.save(2, {"a": 2}, block=True)
        made.load(1)
        expected = [1, 2, 3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NodeDirectory, "commit", fail_to_mark)
        with pytest.raises(OSError, match="injected"):
            made.save(2, {"a": 22}, block=True)
    made.save(3, {"a": 33}, block=True)
    assert made.steps() == expected
    assert made.load(2) == {"a": 22}
    assert made.load(3) == {"a": 33}


def test_the_later_of_two_checkpointers_in_one_process_goes_on(tmp_path: Path) -> None:
    first = tl.Checkpointer(tmp_path, local=True, process_group=False, keep=None)
    first.save(1, {"a": 1}, block=True)
    second = tl.Checkpointer(tmp_path, local=True, process_group=False, keep=None)
    second.load()
    second.save(2, {"b": 2}, block=True)
    with pytest.raises(tl.Error, match="another Checkpointer of this process has gone on") as caught:
        first.save(2, {"a": 2}, block=True)
    assert caught.value.errno == errno.EBUSY
    second.save(3, {"b": 3}, block=True)
    assert second.load(2) == {"b": 2}
    assert first.load() == {"b": 3}
    first.save(4, {"a": 4}, block=True)
    with pytest.raises(tl.Error, match="another Checkpointer of this process has gone on"):
        second.save(4, {"b": 4}, block=True)
    with pytest.raises(FileNotFoundError):
        second.load(99)
    first.save(5, {"a": 5}, block=True)  # what the other one failed to load does not matter
    assert first.steps() == [1, 2, 3, 4, 5]


def test_shares_of_another_node_are_not_loaded(tmp_path: Path) -> None:
    paths = [Path(each) for each in directories(tmp_path, [0, 1])]
    with RankProcesses(2) as ranks:
        open_all(ranks, [str(each) for each in paths])
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    saves = [each / "saves" for each in paths]
    saves[0].rename(tmp_path / "aside")
    saves[1].rename(saves[0])
    (tmp_path / "aside").rename(saves[1])
    with RankProcesses(2) as ranks:
        open_all(ranks, [str(each) for each in paths])
        failed = ranks.failures("loads", state(1))
        assert sorted(failed) == [0, 1]
        assert any("it is that of another node" in each.message for each in failed.values())
        ranks.finish()


def damage(manifest: Path, how: str) -> bytes:
    """Damage a manifest; return what it was."""
    whole = manifest.read_bytes()
    manifest.write_bytes(b"" if how == "empty" else whole[:-20] + b"x" + whole[-19:])
    return whole


@pytest.mark.parametrize("how", ["empty", "flipped"])
def test_an_old_share_that_is_damaged_does_not_keep_the_node_from_opening(tmp_path: Path, how: str) -> None:
    made = tl.Checkpointer(tmp_path, local=True, keep=None, process_group=False)
    for step in (10, 20, 30):
        made.save(step, {"step": step}, block=True)
    [manifest] = (tmp_path / "saves/step-00000001").glob("manifest*")
    whole = damage(manifest, how)
    with pytest.warns(
        RuntimeWarning, match="manifest.*A load reads it on other nodes, if.*remove .*step-00000001"
    ):
        again = tl.Checkpointer(tmp_path, local=True, keep=None, process_group=False)
    assert again.steps() == [20, 30]
    with pytest.raises(tl.Corrupt):
        again.verify()
    assert again.load() == {"step": 30}
    again.save(40, {"step": 40}, block=True)
    manifest.write_bytes(whole)
    again = tl.Checkpointer(tmp_path, local=True, keep=None, process_group=False)
    assert again.steps() == [10, 20, 30, 40]
    assert again.load(10) == {"step": 10}


def test_the_last_share_is_not_passed_over_when_it_is_damaged(tmp_path: Path) -> None:
    made = tl.Checkpointer(tmp_path, local=True, process_group=False)
    for step in (10, 20):
        made.save(step, {"step": step}, block=True)
    [manifest] = (tmp_path / "saves/step-00000002").glob("manifest*")
    whole = damage(manifest, "empty")
    with pytest.warns(RuntimeWarning, match="manifest"):
        again = tl.Checkpointer(tmp_path, local=True, process_group=False)
    for call in (
        again.latest,
        again.steps,
        again.load,
        lambda: again.load(10),
        lambda: again.save(30, {}).wait(),
    ):
        with pytest.raises(
            tl.Corrupt, match="may be the latest checkpoint.* remove .*/saves/step-00000002 to go on"
        ):
            call()
    manifest.write_bytes(whole)
    assert tl.Checkpointer(tmp_path, local=True, process_group=False).load() == {"step": 20}


def test_a_last_share_that_is_gone_is_warned_of(tmp_path: Path) -> None:
    """As when an older backup of saves/ is restored."""

    def opened() -> tl.Checkpointer:
        return tl.Checkpointer(tmp_path, local=True, keep=2, process_group=False)

    made = opened()
    for step in (10, 20, 30):
        made.save(step, {"step": step}, block=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened().latest() == 30
    shutil.rmtree(tmp_path / "saves/step-00000003")
    with pytest.warns(RuntimeWarning, match="share of step 30, .* is gone: .*/saves/step-00000003"):
        again = opened()
    assert again.load() == {"step": 20}
    again.save(40, {"step": 40}, block=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened().load() == {"step": 40}


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_job_that_is_refused_on_one_node_lets_go_of_the_others(tmp_path: Path, call: str) -> None:
    paths = directories(tmp_path, [0, 1])
    with RankProcesses(2) as before:
        open_all(before, paths)
        before.all("save", 1, state(1), block=True)
    with RankProcesses(2) as one, RankProcesses(1) as other:
        open_all(one, paths)
        open_all(other, paths[1:])
        assert other.failures("latest_loaded")  # its step has bytes on the other node; it has locked its own
        failed = (
            one.failures("latest_loaded") if call == "load" else one.failures("save", 2, state(2), block=True)
        )
        assert "another process saves there" in failed[1].message
        # The first node was free, and is so again.
        node = NodeDirectory(paths[0])
        node.lock(to_load=True)
        node.unlock_again()


def test_a_directory_with_a_slash_at_its_end(tmp_path: Path) -> None:
    made = tl.Checkpointer(f"{tmp_path}/run/", local=True, process_group=False)
    made.save(1, {"a": 1}, block=True)
    assert made.load() == {"a": 1}


def test_a_record_that_is_missing_is_an_error(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path, local=True, process_group=False).save(1, {"a": 1}, block=True)
    (tmp_path / RECORD).unlink()
    with pytest.raises(tl.Corrupt, match=f"{RECORD} is missing, and .*saves has checkpoints"):
        tl.Checkpointer(tmp_path, local=True, process_group=False)


def test_a_directory_of_other_checkpoints_is_rejected(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path, process_group=False).save(1, {"a": 1}, block=True)
    with pytest.raises(FileExistsError, match="saved without local=True"):
        tl.Checkpointer(tmp_path, local=True, process_group=False)


def test_a_state_that_does_not_fit_on_one_rank_is_an_error_of_all(tmp_path: Path) -> None:
    with RankProcesses(2) as ranks:
        open_all(ranks, directories(tmp_path, [0, 1]))
        ranks.all("save", 1, {"weight": torch.ones(1000)}, block=True)
        ranks.tell(0, "load_into", {"weight": torch.zeros(1000)})
        ranks.tell(1, "load_into", {"weight": torch.zeros(5)})
        failed = ranks.collect(range(2))
        assert sorted(failed) == [0, 1]
        assert failed[1].kind == "ValueError"
        assert failed[0].kind == "RankError"
        ranks.all("load_into", {"weight": torch.zeros(1000)})
        ranks.finish()


@pytest.mark.parametrize("local", [True, False])
def test_a_wrong_argument_of_load_on_one_rank_is_reported_by_all(tmp_path: Path, local: bool) -> None:
    with RankProcesses(3) as ranks:
        if local:
            open_all(ranks, directories(tmp_path, [0, 1, 0]))
        else:
            ranks.all("open", str(tmp_path / "run"))
        ranks.all("save", 1, {"weight": torch.ones(1000)}, block=True)
        for rank, device in enumerate(("cpu", "cuda:99", "cpu")):
            ranks.tell(rank, "load_with", device=device)
        failed = ranks.collect(range(3))
        ranks.all("load_with")
        ranks.finish()
    assert [failed[rank].kind for rank in range(3)] == ["RankError", failed[1].kind, "RankError"]
    for rank in (0, 2):
        assert "device: cuda:99 is not available" in failed[rank].message
        assert "rank 1" in failed[rank].message


def test_a_wrong_argument_of_load_of_a_step_concerns_one_rank_alone(tmp_path: Path) -> None:
    with RankProcesses(2) as ranks:
        ranks.all("open", str(tmp_path / "run"))
        ranks.all("save", 1, {"weight": torch.ones(1000)}, block=True)
        ranks.tell(1, "load_with", step=1, device="cuda:99")
        assert "device: cuda:99 is not available" in ranks.collect([1])[1].message
        ranks.all("load_with")
        ranks.all("save", 2, {"weight": torch.ones(1000)}, block=True)
        ranks.finish()


def test_the_error_of_one_rank_is_passed_on_once(tmp_path: Path) -> None:
    with RankProcesses(3) as ranks:
        open_all(ranks, directories(tmp_path, [0, 1, 0]))
        ranks.all("save", 1, {"weight": torch.ones(1000)}, block=True)
        for rank, elements in enumerate((1000, 5, 1000)):
            ranks.tell(rank, "load_into", {"weight": torch.zeros(elements)})
        failed = ranks.collect(range(3))
        ranks.finish()
    for rank in (0, 2):
        assert failed[rank].message.startswith("nothing was loaded: rank 1: into: state")
        assert failed[rank].message.count("nothing was loaded") == 1


def test_fresh_has_no_effect_after_loading(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path, local=True).save(1, {"a": 1}, block=True)
    made = tl.Checkpointer(tmp_path, local=True, fresh=True)
    with pytest.warns(RuntimeWarning, match="fresh=True has no effect"):
        made.load()
    made.save(2, {"a": 2}, block=True)
    assert made.steps() == [1, 2]


def test_listing_does_not_lock(tmp_path: Path) -> None:
    tl.Checkpointer(tmp_path, local=True).save(1, {"a": 1}, block=True)
    with RankProcesses(1) as ranks:  # another process than this one, which has saved
        assert open_all(ranks, [str(tmp_path)]) == [[1]]
        failed = ranks.failures("latest_loaded")
        assert "another process saves there" in failed[0].message


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"incremental": True}, "incremental: is not supported with local=True"),
        ({"writers": "node"}, "writers: is not supported with local=True"),
    ],
)
def test_options_that_are_not_supported(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tl.Checkpointer(tmp_path, local=True, **options)


@pytest.mark.parametrize(
    "options",
    [{"keep": 0}, {"keep_every": "x"}, {"fresh": "no"}, {"timeout": 0}, {"staging_bytes": "1 apple"}],
)
def test_options_are_checked_as_for_other_directories(tmp_path: Path, options: dict[str, Any]) -> None:
    raised = []
    for local in (False, True):
        with pytest.raises((TypeError, ValueError)) as error:
            tl.Checkpointer(tmp_path / "run", local=local, **options)
        raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]
    assert next(iter(options)) in raised[0][1]


def test_each_node_has_a_share(tmp_path: Path) -> None:
    """And any number of nodes and ranks loads it."""
    with RankProcesses(4) as ranks:
        open_all(ranks, directories(tmp_path, [0, 1, 0, 1]))
        assert ranks.one(3, "node_of_ranks") == (0, 1, 0, 1)
        for step in (1, 2):
            ranks.all("save", step, state(step), block=True)
        ranks.finish()
    total = 2 * 3 * 700 * 1024
    for node in range(2):
        assert abs(nbytes_in(tmp_path / f"node-{node}") - total / 2) < 200_000
    for nodes in ([1, 0], [0, 0, 1], [2, 1, 0]):  # the last with an empty one
        with RankProcesses(len(nodes)) as ranks:
            assert open_all(ranks, directories(tmp_path, nodes)) == [[1, 2]] * len(nodes)
            assert ranks.all("loads", state(2)) == [True] * len(nodes)
            assert ranks.all("loads", state(1), 1) == [True] * len(nodes)
            assert ranks.all("loads", state(2), 2) == [True] * len(nodes)
            ranks.finish()


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_rank_that_is_killed(tmp_path: Path, killed: int) -> None:
    """At any moment: all ranks load the same afterwards, and no save is lost that had succeeded on any."""
    paths = directories(tmp_path, [0, 1, 0, 1])
    saved = 0
    for phase in LOCAL_PHASES:
        if killed == 2 and phase not in ("placed", "writing", "durable"):
            continue  # another rank writes the record of its node
        with RankProcesses(4) as ranks:
            open_all(ranks, paths)
            if saved:
                assert ranks.all("loads", state(saved)) == [True] * 4
            ranks.all("save", saved + 1, state(saved + 1), block=True)
            ranks.all("set_timeout", 3.0)
            ranks.one(killed, "cut_local", phase, "kill")
            for rank in range(4):
                ranks.tell(rank, "save", saved + 2, state(saved + 2), block=True)
            succeeded = any([has_saved(ranks, rank) for rank in range(4)])  # noqa: C419 - all have to answer
        with RankProcesses(4) as ranks:
            open_all(ranks, paths)
            found = ranks.all("latest_loaded")
            assert len(set(found)) == 1
            assert found[0] in ([saved + 2] if succeeded else [saved + 1, saved + 2]), phase
            assert ranks.all("loads", state(found[0])) == [True] * 4
            saved = found[0] + 1
            ranks.all("save", saved, state(saved), block=True)
            assert ranks.all("loads", state(saved)) == [True] * 4
            ranks.finish()


@pytest.mark.parametrize("seed", range(int(os.environ.get("TRUNKLINE_TEST_KILLS", "4"))))
def test_ranks_that_are_killed_at_random(tmp_path: Path, seed: int) -> None:
    """One, those of a node or all, several times. What any rank had saved is never lost."""
    chance = random.Random(seed)
    paths = directories(tmp_path, [0, 1, 0, 1])
    records = [tmp_path / f"rank-{rank}" for rank in range(4)]
    least = 0
    for _ in range(3):
        with RankProcesses(4) as ranks:
            open_all(ranks, paths)
            if least:
                found = ranks.all("latest_loaded")
                assert len(set(found)) == 1
                assert found[0] >= least
                least = found[0]
            for rank in range(4):
                ranks.tell(rank, "save_until_killed", least + 1, str(records[rank]))
            time.sleep(chance.uniform(0.05, 1.5))  # there is no better moment than any
            for rank in chance.choice([[0], [1], [2], [3], [0, 2], [1, 3], [0, 1, 2, 3]]):
                ranks.processes[rank].kill()
        least = max([least, *(int(each.read_text() or 0) for each in records if each.exists())])
    with RankProcesses(4) as ranks:
        steps = open_all(ranks, paths)
        assert steps == [steps[0]] * 4
        for step in steps[0]:
            assert ranks.all("loads", {"seed": step, "kilobytes": 50}, step) == [True] * 4
        assert not least or steps[0][-1] >= least
        ranks.finish()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_while_it_loads(tmp_path: Path, killed: int) -> None:
    paths = directories(tmp_path, [0, 1])
    with RankProcesses(2) as ranks:
        open_all(ranks, paths)
        ranks.all("save", 1, state(1), block=True)
        ranks.all("save", 2, state(2), block=True)
        ranks.finish()
    for phase in ("mark", "marked"):
        with RankProcesses(2) as ranks:
            open_all(ranks, paths)
            ranks.all("set_timeout", 3.0)
            ranks.one(killed, "cut_local", phase, "kill")
            for rank in range(2):
                ranks.tell(rank, "loads", state(2))
            with pytest.raises((Failed, EOFError)):
                ranks.reply(1 - killed)
    with RankProcesses(2) as ranks:
        assert open_all(ranks, paths) == [[1, 2], [1, 2]]
        assert ranks.all("loads", state(2)) == [True, True]
        ranks.all("save", 3, state(3), block=True)
        assert ranks.all("loads", state(3)) == [True, True]
        ranks.finish()


def has_saved(ranks: RankProcesses, rank: int) -> bool:
    try:
        ranks.reply(rank)
    except (Failed, EOFError):
        return False
    return True


def test_a_save_that_fails_on_one_rank(tmp_path: Path) -> None:
    """It fails on all, and the next one of the same ranks succeeds."""
    with RankProcesses(2) as ranks:
        open_all(ranks, directories(tmp_path, [0, 1]))
        ranks.all("save", 1, state(1), block=True)
        ranks.one(1, "cut_local", "prepare", "raise")
        failed = ranks.failures("save", 2, state(2), block=True)
        assert sorted(failed) == [0, 1]
        assert "rank 1" in failed[0].message
        assert "injected failure" in failed[1].message
        ranks.all("collective")
        assert ranks.all("loads", state(1)) == [True, True]
        ranks.finish()


def test_a_node_that_is_not_there(tmp_path: Path) -> None:
    paths = directories(tmp_path, [0, 1])
    with RankProcesses(2) as ranks:
        open_all(ranks, paths)
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    absent = json.loads(Path(paths[1], RECORD).read_text())["id"]
    os.rename(paths[1], tmp_path / "away")  # noqa: PTH104
    with RankProcesses(2) as ranks:
        assert open_all(ranks, paths) == [[], []]
        for failed in ranks.failures("loads", state(1)).values():
            assert f"step 1 cannot be loaded: its bytes on {absent} are not here" in failed.message
        # Saving without it would leave the step behind.
        for failed in ranks.failures("save", 2, state(2), block=True).values():
            assert "up to step 1; call load() first" in failed.message
        ranks.finish()
    shutil.rmtree(paths[1])
    os.rename(tmp_path / "away", paths[1])  # noqa: PTH104
    with RankProcesses(2) as ranks:
        open_all(ranks, paths)
        assert ranks.all("loads", state(1)) == [True, True]
        ranks.finish()


def test_a_branch_that_was_abandoned_is_not_used_and_not_removed(tmp_path: Path) -> None:
    """Node 1 goes away when it alone has committed a save; node 0 goes on, and node 1 returns."""
    paths = directories(tmp_path, [0, 1])
    with RankProcesses(1) as ranks:
        open_all(ranks, paths[:1])
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    with RankProcesses(2) as ranks:
        open_all(ranks, paths)
        ranks.all("loads", state(1))
        ranks.all("set_timeout", 3.0)
        ranks.one(0, "cut_local", "mark", "kill")
        for rank in range(2):
            ranks.tell(rank, "save", 2, state(2), block=True)
        with pytest.raises((Failed, EOFError)):
            ranks.reply(1)
    assert len(json.loads(Path(paths[1], RECORD).read_text())["committed"]) == 2
    with RankProcesses(1) as ranks:
        open_all(ranks, paths[:1])
        assert ranks.all("loads", state(1)) == [True]
        ranks.all("save", 2, state(22), block=True)
        ranks.all("save", 3, state(33), block=True)
        ranks.finish()
    with RankProcesses(2) as ranks:
        assert open_all(ranks, paths) == [[1, 2, 3]] * 2
        assert ranks.all("loads", state(33)) == [True, True]
        assert ranks.all("loads", state(22), 2) == [True, True]
        ranks.all("save", 3, state(3), block=True)
        ranks.finish()
    # What it had is still there, and marked as committed.
    assert len(list(Path(paths[1], "saves").glob("step-*"))) == 2


def test_damage_is_found_on_all_ranks(tmp_path: Path) -> None:
    paths = directories(tmp_path, [0, 1])
    with RankProcesses(2) as ranks:
        open_all(ranks, paths)
        ranks.all("save", 1, state(1), block=True)
        ranks.all("save", 2, state(2), block=True)
        shard = next(Path(paths[1], "saves/step-00000002").glob("*.safetensors"))
        with shard.open("r+b") as file:
            file.seek(500_000)
            file.write(b"\xff" * 8)
        failed = ranks.failures("loads", state(2))
        assert failed[1].kind == "Corrupt"
        assert "does not match the checksum" in failed[1].message
        assert "nothing was loaded: rank 1: " in failed[0].message
        assert ranks.all("loads", state(1), 1) == [True, True]
        ranks.finish()


def test_a_copied_directory_is_not_another_node(tmp_path: Path) -> None:
    paths = directories(tmp_path, [0, 1])
    tl.Checkpointer(paths[0], local=True).save(1, {"a": 1}, block=True)
    shutil.copytree(paths[0], paths[1])
    with RankProcesses(2) as ranks:
        for failed in failures_of_opening(ranks, paths).values():
            assert "the directory of one is a copy" in failed.message
        ranks.finish()


def test_runs_that_went_on_apart(tmp_path: Path) -> None:
    paths = directories(tmp_path, [0, 1])
    for node in range(2):
        tl.Checkpointer(paths[node], local=True).save(node + 1, {"node": node}, block=True)
    with RankProcesses(2) as ranks:
        for failed in failures_of_opening(ranks, paths).values():
            assert "went on without knowing of each other" in failed.message
        ranks.finish()


def test_private_mount_namespaces_are_nodes(tmp_path: Path) -> None:
    """All ranks have the same path, on a disk of their own each."""
    (tmp_path / "local").mkdir()
    for node in range(2):
        (tmp_path / f"disk-{node}").mkdir()
    mounts = [(str(tmp_path / f"disk-{node}"), str(tmp_path / "local")) for node in (0, 1, 1)]
    if why := _why_no_mounts(*mounts[0]):
        pytest.skip(f"private mount namespaces are not permitted: {why}")
    path = str(tmp_path / "local/run")
    with RankProcesses(3, mounts=mounts) as ranks:
        open_all(ranks, [path] * 3)
        assert ranks.one(0, "node_of_ranks") == (0, 1, 1)
        ranks.all("save", 1, state(1), block=True)
        ranks.finish()
    assert list((tmp_path / "local").iterdir()) == []
    assert all(nbytes_in(tmp_path / f"disk-{node}") > 700_000 for node in range(2))
    with RankProcesses(3, mounts=mounts[::-1]) as ranks:
        open_all(ranks, [path] * 3)
        assert ranks.all("loads", state(1)) == [True] * 3
        ranks.finish()


def _why_no_mounts(source: str, target: str) -> str:
    """Try it in a child; empty if it is permitted."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mount_privately(source, target)
        except OSError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as said:
        return said.read().decode()


def test_a_step_is_deleted_from_all_nodes(tmp_path: Path) -> None:
    paths = directories(tmp_path, [0, 1, 1])
    with RankProcesses(3) as ranks:
        open_all(ranks, paths, keep=None)
        for step in (1, 2, 3):
            ranks.all("save", step, state(step), block=True)
        ranks.all("ask", "delete", 2)
        assert ranks.all("steps") == [[1, 3]] * 3
        for path in paths:
            assert [each.name for each in sorted(Path(path, "saves").glob("step-*"))] == [
                "step-00000001",
                "step-00000003",
            ]
        for step, why in ((3, "step 3 is the latest"), (2, "no checkpoint of step 2")):
            assert all(why in each.message for each in ranks.failures("ask", "delete", step).values())
        ranks.all("save", 4, state(4), block=True)
        ranks.finish()
    with RankProcesses(3) as ranks:
        assert open_all(ranks, paths, keep=None) == [[1, 3, 4]] * 3
        ranks.all("ask", "delete", 3)
        assert ranks.all("loads", state(4)) == [True] * 3
        assert ranks.all("loads", state(1), 1) == [True] * 3
        ranks.all("ask", "delete", 1)  # which the run has gone back to
        ranks.all("save", 2, state(2), block=True)
        assert ranks.all("steps") == [[2]] * 3
        ranks.finish()


def test_another_checkpointer_of_the_process_deletes_a_step(tmp_path: Path) -> None:
    made, other = (tl.Checkpointer(tmp_path, local=True, keep=None, process_group=False) for _ in range(2))
    for step in (1, 2, 3):
        made.save(step, {"step": step}, block=True)
    other.delete(1)
    assert made.steps() == other.steps() == [2, 3]
    with pytest.raises(tl.FileNotFoundError, match="no checkpoint of step 1"):
        made.load(1)
    other.delete(2)
    made.save(4, {"step": 4}, block=True)
    assert made.steps() == [3, 4]


def test_a_refused_deletion_does_not_keep_others_out(tmp_path: Path) -> None:
    made = tl.Checkpointer(tmp_path / "run", local=True, process_group=False)
    made.save(1, {"step": 1}, block=True)
    copy = tmp_path / "copy"  # which this process has not locked
    shutil.copytree(tmp_path / "run", copy)
    with pytest.raises(tl.Unsupported, match="step 1 is the latest"):
        tl.Checkpointer(copy, local=True, process_group=False).delete(1)
    code = "import sys, trunkline as tl; print(tl.Checkpointer(sys.argv[1], local=True).load())"
    done = support_warm.run(["-c", code, copy])
    assert done.stdout.strip() == "{'step': 1}", done.stderr


def test_a_share_that_comes_back_after_its_step_was_deleted_is_removed(tmp_path: Path) -> None:
    paths = directories(tmp_path, range(2))
    with RankProcesses(2) as ranks:
        open_all(ranks, paths, keep=None)
        for step in (1, 2):
            ranks.all("save", step, state(step), block=True)
        share, away = Path(paths[1], "saves/step-00000001"), tmp_path / "away"
        share.rename(away)
        ranks.all("ask", "delete", 1)
        away.rename(share)
        ranks.finish()
    with RankProcesses(2) as ranks:
        assert open_all(ranks, paths, keep=None) == [[2]] * 2
        assert ranks.all("loads", state(2)) == [True] * 2
        ranks.all("save", 3, state(3), block=True)
        assert ranks.all("steps") == [[2, 3]] * 2
        ranks.finish()
    assert not share.exists()
