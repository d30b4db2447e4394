"""The cache of packs: where packs are by default, what is said of them, listing and removing them."""

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support_log import logged
from support_models import make_folder, pack_directory, prompt, stock

import trunkline as tl
from trunkline import _progress, cli
from trunkline._streaming import pack_cache

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRUNKLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**prompt()).logits
    return result


def run(capsys: pytest.CaptureFixture[str], *arguments: object, expect: int = 0) -> str:
    """Run the command; return what it printed, its errors if it is to fail."""
    capsys.readouterr()
    status = cli.main(["pack", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert status == expect, err
    return err if expect else out


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    document = json.loads(run(capsys, "--list", "--json"))
    assert document["bytes"] == sum(each["bytes"] for each in document["packs"])
    packs: list[dict[str, Any]] = document["packs"]
    return packs


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("TRUNKLINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert pack_cache.packs_directory() == Path("/home/someone/.cache/trunkline/packs")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, by its specification
    assert pack_cache.packs_directory() == Path("/home/someone/.cache/trunkline/packs")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert pack_cache.packs_directory() == Path("/var/cache/trunkline/packs")
    monkeypatch.setenv("TRUNKLINE_CACHE", "~/big")
    assert pack_cache.packs_directory() == Path("/home/someone/big/packs")


def test_each_dtype_has_a_pack_of_its_own(cache: Path, folder: Path) -> None:
    for dtype in (None, torch.float32, None):
        model = tl.transformers.from_pretrained(folder, memory_budget="800KB", dtype=dtype)
        expected = stock(folder) if dtype is None else stock(folder, dtype=dtype)
        assert torch.equal(logits(model), logits(expected))
    assert len(list(cache.iterdir())) == 2
    assert not tl.transformers.pack(folder)["made"]
    assert not tl.transformers.pack(folder, dtype="float32")["made"]
    assert sorted(path.suffix for path in folder.iterdir()) == [".json"] * 3 + [".safetensors"] * 2


def test_a_pack_beside_the_model_is_still_used(cache: Path, folder: Path, tmp_path: Path) -> None:
    """Where earlier versions made it."""
    beside = folder / "trunkline-pack"
    tl.transformers.pack(folder, [beside])
    model = tl.transformers.from_pretrained(folder, memory_budget="400KB")
    assert tl.stream.stats(model)["source"] == str(beside / "weights.safetensors")
    assert tl.stream.plan(folder, bandwidth=1e9, flops=1e12)["pack"]["directory"] == str(beside)
    assert not cache.exists()
    shutil.copytree(folder, tmp_path / "copy")
    assert not tl.transformers.pack(tmp_path / "copy")["made"]
    # One that no longer fits is left alone.
    before = {path.name: path.read_bytes() for path in beside.iterdir()}
    make_folder(folder, seed=1)
    model = tl.transformers.from_pretrained(folder, memory_budget="400KB")
    assert tl.stream.stats(model)["source"].startswith(str(cache))
    assert torch.equal(logits(model), logits(stock(folder)))
    assert {path.name: path.read_bytes() for path in beside.iterdir()} == before


def test_packs_are_listed_and_removed(
    cache: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(capsys) == []
    assert run(capsys, "--list") == f"no packs in {cache}\n"
    other = make_folder(tmp_path / "other", "qwen3")
    directories = {str(each): tl.transformers.pack(each)["directories"][0] for each in (folder, other)}
    packs = listed(capsys)
    assert {each["model"]: each["directory"] for each in packs} == directories
    assert all(each["dtype"] == "bfloat16" and not each["problem"] for each in packs)
    assert [each["form"] for each in packs] == ["", ""]
    text = run(capsys, "--list")
    assert all(each["name"] in text and each["model"] in text for each in packs)
    assert re.search(rf" [kM]B in {re.escape(str(cache))}$", text.splitlines()[-1])
    assert run(capsys, "--remove", packs[0]["name"]) == f"removed the pack in {packs[0]['directory']}\n"
    assert [each["name"] for each in listed(capsys)] == [packs[1]["name"]]
    assert json.loads(run(capsys, "--remove", packs[1]["model"], "--json"))["removed"] == [
        packs[1]["directory"]
    ]
    assert list(cache.iterdir()) == []
    assert "there is no pack nothing: neither in the cache" in run(capsys, "--remove", "nothing", expect=2)
    for options in (["--remove", "nothing", "--keep", "quantised"], ["--list", "--dtype", "float32"]):
        assert f"{options[0]} excludes {options[-2]}" in run(capsys, *options, expect=2)


def test_a_link_to_a_folder_means_its_pack(
    cache: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    made = tl.transformers.pack(link)
    assert made["made"]
    again = tl.transformers.pack(folder)
    assert (again["made"], again["directories"]) == (False, made["directories"])
    assert run(capsys, "--remove", link) == f"removed the pack in {made['directories'][0]}\n"
    assert list(cache.iterdir()) == []


def test_packs_elsewhere_are_removed_by_their_directory(
    cache: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    tl.transformers.pack(folder, disks)
    tl.transformers.pack(folder, [folder / "trunkline-pack"])
    (tmp_path / "b" / "mine.txt").write_text("precious")
    assert str(disks[1]) in run(capsys, "--remove", disks[0])
    assert [path.name for disk in disks for path in disk.iterdir()] == ["mine.txt"]
    run(capsys, "--remove", folder)  # by the folder of its model
    assert not (folder / "trunkline-pack").exists()
    assert stock(folder) is not None


def test_nothing_but_packs_is_removed(
    cache: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "weights.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())
    assert "is not the weights of a pack; nothing was removed" in run(capsys, "--remove", mine, expect=1)
    for path in (folder, tmp_path, folder / "config.json"):
        assert "there is no pack" in run(capsys, "--remove", path, expect=2)
    pack = Path(tl.transformers.pack(folder)["directories"][0])
    manifest = (pack / "pack.json").read_text()
    (pack / "pack.json").write_text(manifest.replace('"version": 1', '"version": 99'))
    assert "format version 99" in listed(capsys)[0]["problem"]
    assert "format version 99" in run(capsys, "--remove", pack.name, expect=1)
    (pack / "pack.json").write_text(manifest)
    holder = os.open(pack, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert "another process is making it" in run(capsys, "--remove", pack.name, expect=1)
    os.close(holder)
    assert (mine / "weights.safetensors").exists()
    assert not tl.transformers.pack(folder)["made"]


def test_a_folder_does_not_stand_for_the_model_of_the_hub_with_its_name(
    cache: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = Path(tl.transformers.pack(folder)["directories"][0])
    manifest = json.loads((pack / "pack.json").read_text())
    (pack / "pack.json").write_text(json.dumps(manifest | {"model": "org/small"}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "small").mkdir(parents=True)
    printed = run(capsys, "--remove", "org/small", expect=2)
    assert "there is no pack of the folder org/small" in printed
    assert f"that of the Hub's model of this name is {pack.name}" in printed
    (tmp_path / "org" / "small").rmdir()
    run(capsys, "--remove", "org/small")
    assert listed(capsys) == []


def test_what_is_wrong_with_a_pack_is_listed(
    cache: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = Path(tl.transformers.pack(folder)["directories"][0])
    folder.rename(tmp_path / "moved")
    assert listed(capsys)[0]["problem"] == "its model is gone"
    (pack / "pack.json").unlink()
    assert listed(capsys)[0]["problem"] == "incomplete"
    run(capsys, "--remove", pack.name)
    assert listed(capsys) == []


def test_wrong_usage(cache: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODEL is required" in run(capsys, expect=2)
    assert "--list excludes MODEL" in run(capsys, folder, "--list", expect=2)
    assert "--remove excludes MODEL" in run(capsys, folder, "--remove", "x", expect=2)
    tl.transformers.pack(folder)
    tl.transformers.pack(folder, dtype="float32")
    assert "has 2 packs: model-" in run(capsys, "--remove", folder, expect=2)


def test_what_is_written_is_said_before(
    cache: Path,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the log or, on a terminal, there; how far it is, too."""
    monkeypatch.setattr(_progress, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(_progress, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(_progress, "_INTERVAL_SECONDS", 0.0)
    with logged(caplog) as records:
        made = tl.transformers.pack(folder)
    said = f"writing a pack of {folder}, once: {made['bytes']} bytes ("
    [at] = [index for index, record in enumerate(records) if said in record]
    assert f"to {pack_directory(folder)} (" in records[at]
    assert records[at].endswith(" GB free)")
    shares = [record for record in records[at:] if record.startswith(f"INFO stream: packing {folder}: ")]
    assert re.search(r"  9\d% of 0.0 GB, .* left$", shares[-1])
    capsys.readouterr()

    monkeypatch.setattr(_progress, "is_on_terminal", lambda: True)
    with logged(caplog) as records:
        tl.transformers.pack(folder, dtype="float32")
    assert not [record for record in records if "writing a pack" in record or ": packing " in record]
    shown = capsys.readouterr().err
    assert shown.startswith(f"writing a pack of {folder}, once: ")
    assert f"\rpacking {folder}:  9" in shown


def test_plan_says_where_the_pack_is_or_would_be(
    cache: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers: dict[str, Any] = {"bandwidth": 1e9, "flops": 1e12}
    planned = tl.stream.plan(folder, **numbers)["pack"]
    assert (planned["needed"], planned["exists"]) == (True, False)
    assert planned["free_bytes"] > planned["bytes"]
    assert not cache.exists()

    def line() -> str:
        capsys.readouterr()
        assert cli.main(["plan", str(folder), "--bandwidth", "1GB", "--flops", "1e12"]) == 0
        return next(each for each in capsys.readouterr().out.splitlines() if "pack" in each)

    assert f"would be made in {planned['directory']} (" in line()
    made = tl.transformers.pack(folder)
    there = tl.stream.plan(folder, **numbers)["pack"]
    assert (there["exists"], there["bytes"]) == (True, made["bytes"])
    assert there["directory"] == planned["directory"] == made["directories"][0]
    assert planned["bytes"] == made["bytes"]
    assert line().endswith(f", in {made['directories'][0]}")
    expected = stock(folder)
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    of_config = tl.stream.plan(folder, **numbers)["pack"]
    assert of_config["needed"] is None
    assert "would be made, if one is needed, in " in line()
    tl.save(expected.state_dict(), folder / "model.safetensors")
    assert tl.stream.plan(folder, **numbers)["pack"]["needed"] is False
    assert line().strip() == "no pack is needed: the files are read in place"
