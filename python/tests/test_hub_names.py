"""Models by their names on the hub, resolved through the Hugging Face cache as transformers does."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import support_warm
import torch
from support_models import make_folder, make_hub_model, prompt, stock, transformers

import trunkline as tl
from trunkline import cli

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAME = "org/tiny-llama"
FIRST, SECOND = "1" * 40, "2" * 40


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**prompt()).logits
    return result


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits: main is the second, v1 (a tag) and a pull request are the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRUNKLINE_CACHE", str(tmp_path / "packs-of-this-test"))
    cache = tmp_path / "home" / "hub"
    make_hub_model(cache, NAME, FIRST, ("v1", "refs/pr/1"), seed=1)
    make_hub_model(cache, NAME, SECOND, ("main",), seed=2)
    # As HF_HUB_CACHE and HF_HUB_OFFLINE do for a process that starts: both libraries read them on import.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize("revision", [None, "main", "v1", "refs/pr/1", FIRST, SECOND])
def test_revisions_are_those_of_transformers(cache: Path, revision: str | None) -> None:
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    model = tl.transformers.from_pretrained(NAME, memory_budget="400KB", **options)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        NAME, local_files_only=True, **options
    ).eval()
    assert torch.equal(logits(model), logits(expected))
    assert model.name_or_path == model.config.name_or_path == expected.name_or_path == NAME
    commit = FIRST if revision in ("v1", "refs/pr/1", FIRST) else SECOND
    snapshot = cache / "models--org--tiny-llama" / "snapshots" / commit
    assert torch.equal(logits(model), logits(stock(snapshot)))
    assert sorted(path.name for path in snapshot.iterdir() if path.is_dir()) == []  # no pack in the cache


def test_packs_of_revisions_are_apart_and_survive_a_moved_cache(cache: Path, tmp_path: Path) -> None:
    one, other = (tl.transformers.pack(NAME, revision=revision) for revision in ("v1", "main"))
    assert one["directories"] != other["directories"]
    assert one["made"]
    assert other["made"]
    assert one["model"] == NAME
    moved = tmp_path / "moved"
    shutil.copytree(cache, moved, symlinks=True)
    again = tl.transformers.pack(NAME, revision="v1", cache_dir=moved)
    assert (again["made"], again["directories"]) == (False, one["directories"])


def test_a_local_folder_of_that_name_comes_first(cache: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / NAME, seed=3)
    model = tl.transformers.from_pretrained(NAME, memory_budget="400KB")
    assert torch.equal(logits(model), logits(stock(folder)))


def test_subfolders(tmp_path: Path, cache: Path) -> None:
    snapshot = make_hub_model(cache, "org/nested", FIRST)
    inner = snapshot / "inner"
    inner.mkdir()
    for path in list(snapshot.iterdir()):
        if path != inner:
            shutil.move(path.resolve(), inner / path.name)
            path.unlink()
    for name in ("org/nested", snapshot):
        model = tl.transformers.from_pretrained(name, subfolder="inner", memory_budget="400KB")
        assert torch.equal(logits(model), logits(stock(inner)))
    with pytest.raises(FileNotFoundError, match="outer: no such folder"):
        tl.transformers.from_pretrained(snapshot, subfolder="outer")
    with pytest.raises(TypeError, match="subfolder: must be a str, not int"):
        tl.transformers.from_pretrained(snapshot, subfolder=3)  # type: ignore[arg-type]


def test_what_is_not_in_the_cache(cache: Path) -> None:
    calls: list[tuple[Any, str]] = [
        (tl.transformers.from_pretrained, ""),
        (lambda name, **options: tl.transformers.pack(name, **options), ""),
        (
            lambda name, **options: tl.stream.plan(name, bandwidth=1e9, flops=1e12, **options),
            ', allow_patterns="config.json"',  # it needs nothing else
        ),
    ]
    for call, only in calls:
        with pytest.raises(FileNotFoundError) as caught:
            call("org/other")
        assert isinstance(caught.value, tl.Error)
        assert str(caught.value).startswith("cannot load a model from org/other: no such folder, and the")
        assert str(caught.value).endswith(f'huggingface_hub.snapshot_download("org/other"{only})')
        with pytest.raises(
            FileNotFoundError, match=rf'at revision v2; .*\("org/tiny-llama"{only}, revision="v2"\)'
        ):
            call(NAME, revision="v2")


def test_an_incomplete_download_says_what_completes_it(cache: Path) -> None:
    snapshot = cache / "models--org--tiny-llama" / "snapshots" / SECOND
    next(snapshot.glob("model-00002*")).unlink()
    with pytest.raises(FileNotFoundError, match=r'model-00002.* is missing; .*snapshot_download\("org/tiny'):
        tl.transformers.from_pretrained(NAME)
    for path in snapshot.glob("model*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r'no weights .*snapshot_download\("org/tiny-llama"\)'):
        tl.transformers.from_pretrained(NAME)


def test_files_that_streaming_does_not_need_may_be_missing(cache: Path) -> None:
    """Of a download that was restricted to patterns; the listing of the repository knows of all files."""
    trees = pytest.importorskip("huggingface_hub._tree_cache")
    entry = trees.TreeCacheEntry(size=3, blob_id="0" * 40, lfs_sha256=None, lfs_size=None, xet_hash=None)
    repository = cache / "models--org--tiny-llama"
    trees.write_tree_cache(str(repository), SECOND, {"pytorch_model.bin": entry, "config.json": entry})
    with pytest.raises(FileNotFoundError, match="incomplete"):
        huggingface_hub.snapshot_download(NAME, cache_dir=cache, local_files_only=True)
    model = tl.transformers.from_pretrained(NAME, memory_budget="400KB")
    assert torch.equal(logits(model), logits(stock(repository / "snapshots" / SECOND)))


def test_the_environment_of_a_process_chooses_the_cache(cache: Path, tmp_path: Path) -> None:
    """Of HF_HOME and HF_HUB_CACHE; on the command line too."""
    plan = ["-m", "trunkline", "plan", NAME, "--bandwidth", "1GB", "--flops", "1e12", "--json"]
    for variables in ({"HF_HOME": str(cache.parent)}, {"HF_HUB_CACHE": str(cache)}):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        done = support_warm.run(plan, env={**environment, **variables})
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["model"] == "LlamaForCausalLM (tiny-llama)"


def test_packing_on_the_command_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pack", NAME, "--revision", "v1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["made"]
    model = tl.transformers.from_pretrained(NAME, revision="v1", memory_budget="400KB")
    assert tl.stream.stats(model)["source"] == f"{made['directories'][0]}/weights.safetensors"
