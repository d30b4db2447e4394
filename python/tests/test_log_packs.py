"""What is logged of packs, and of where from_pretrained puts weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support_log import logged
from support_models import make_folder, stored_model_of

import trunkline as tl
from trunkline import _waits
from trunkline._flock import DirectoryLock
from trunkline._streaming import location as pack_location
from trunkline._streaming.location import PackLocation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


def load(folder: Path, **options: object) -> None:
    tl.transformers.from_pretrained(folder, memory_budget="400KB", **options)  # type: ignore[arg-type]


def test_a_pack_that_is_made_and_then_used(
    caplog: pytest.LogCaptureFixture, folder: Path, tmp_path: Path
) -> None:
    pack = tmp_path / "pack"
    with logged(caplog) as records:
        load(folder, pack_dir=pack)
    text = "\n".join(records)
    assert f"INFO transformers: {folder}: the weights are read from a pack: pack_dir or volumes is" in text
    assert f"INFO stream: {pack}: there is no pack" in records
    assert f"INFO stream: {pack}: making a pack of " in text
    assert f"INFO stream: {pack}: the pack is made, in " in text
    with logged(caplog) as records:
        load(folder, pack_dir=pack)
    text = "\n".join(records)
    assert f"INFO transformers: {pack}: the pack there is used (" in text
    assert "making" not in text


def test_why_a_pack_is_made_again(caplog: pytest.LogCaptureFixture, folder: Path, tmp_path: Path) -> None:
    pack = tmp_path / "pack"
    load(folder, pack_dir=pack)
    with logged(caplog) as records:
        load(folder, pack_dir=pack, dtype=torch.float32)
    assert any("not used: it is of dtype bfloat16, not float32" in each for each in records)
    (pack / "weights.safetensors").unlink()
    with logged(caplog) as records:
        load(folder, pack_dir=pack, dtype=torch.float32)
    assert any("not used: its weights.safetensors is missing or incomplete" in each for each in records)
    make_folder(folder, seed=1)
    with logged(caplog) as records:
        load(folder, pack_dir=pack, dtype=torch.float32)
    assert any("not used: " in each and each.endswith(" has changed") for each in records)


def test_why_no_pack_was_made(caplog: pytest.LogCaptureFixture, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "weights.safetensors").write_bytes(b"of somebody else")
    with logged(caplog) as records, pytest.raises(FileExistsError):
        tl.transformers.pack(folder, [tmp_path / "pack"])
    assert any(": no pack was made: " in each for each in records)


def test_a_pack_that_waits_for_another_process(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_waits, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(pack_location, "_LOCK_RETRY_SECONDS", 0.001)
    tries: list[object] = []
    try_lock = DirectoryLock.try_lock

    def third_time(lock: DirectoryLock) -> bool:
        tries.append(lock)
        return len(tries) > 2 and try_lock(lock)

    monkeypatch.setattr(DirectoryLock, "try_lock", third_time)
    with logged(caplog) as records, PackLocation((tmp_path,)).lock():
        pass
    assert f"INFO stream: waiting for another process, which makes a pack in {tmp_path}" in records


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_whether_files_are_read_in_place(caplog: pytest.LogCaptureFixture, tmp_path: Path, kind: str) -> None:
    folder = make_folder(tmp_path / "model", kind)
    reason = stored_model_of(folder).why_pack()
    with logged(caplog) as records:
        tl.transformers.from_pretrained(folder, memory_budget="2MB")
    expected = "the files are read in place"
    if reason is not None:
        expected = f"the weights are read from a pack: {reason}"
    assert f"INFO transformers: {folder}: {expected}" in records


def test_where_weights_are_placed(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    with logged(caplog) as records:
        load(folder, unit_bytes="16KB")
    (placement,) = [each for each in records if ": on cpu stay " in each]
    assert "embeddings, norms, head; of " in placement
    assert "are read from" in placement
    assert "(memory_budget: 400000 bytes)" in placement
