"""Stock SGLang with TRUNKLINE_SGLANG, on the CPU: the same tokens, with weights that are read in each pass.

SGLang has an environment of its own (scripts/sglang_environment.py), since it needs other versions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from support_serving import find_sglang, save_served_model, sglang_path

import trunkline as tl
from trunkline._streaming import pack_cache
from trunkline.sglang._model_loading import _location_of
from trunkline.sglang._settings import Settings

# Minutes for each model: on demand.
MORE_MODELS = pytest.mark.skipif(
    os.environ.get("TRUNKLINE_TEST_SGLANG") != "all",
    reason="takes minutes: TRUNKLINE_TEST_SGLANG=all starts SGLang with more models",
)
HERE = Path(__file__).resolve().parent
SHARED_MEMORY = Path("/dev/shm")
SECONDS = 600.0  # for an engine to start and answer on a busy machine; it takes 15


@pytest.fixture(scope="module", autouse=True)
def no_leftovers() -> Iterator[None]:
    """SGLang ends its processes by SIGKILL, which leaves their shared memory: 24 MiB for each."""
    before = shared_memory_of_sglang()
    yield
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped += maps.read_text("utf-8", "replace")
    for path in shared_memory_of_sglang() - before:
        if str(path) not in mapped:
            path.unlink(missing_ok=True)


def shared_memory_of_sglang() -> set[Path]:
    return {*SHARED_MEMORY.glob("sgl_shm_mq_*"), *SHARED_MEMORY.glob("sglang_loads_*")}


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of the environment with SGLang."""
    found = find_sglang()
    if found is None:
        pytest.skip("SGLang is not installed: scripts/sglang_environment.py installs it (1.5 GB)")
    return found


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What PYTHONPATH must have."""
    return sglang_path(tmp_path_factory.mktemp("trunkline"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of small models with random weights."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3", "mixtral"):
        save_served_model(family, folder / family)
    return folder


def run(
    python: str, path: str, model: Path, settings: dict[str, object] | str | None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Generate, with these settings of TRUNKLINE_SGLANG."""
    environment = os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1", "TRUNKLINE_LOG": "info"}
    if options.get("tp_size") == 2:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    environment.pop("TRUNKLINE_SGLANG", None)
    if settings is not None:
        environment["TRUNKLINE_SGLANG"] = settings if isinstance(settings, str) else json.dumps(settings)
    return subprocess.run(
        [python, HERE / "sglang_generate.py", model, json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )


def tokens(result: subprocess.CompletedProcess[str]) -> list[list[int]]:
    found = re.search(r"^generated: (.*)$", result.stdout, re.MULTILINE)
    assert found is not None, result.stderr[-3000:]
    generated: list[list[int]] = json.loads(found[1])
    return generated


@functools.cache
def stock_tokens(python: str, path: str, model: Path, *, dtype: str, tp_size: int) -> list[list[int]]:
    """What SGLang generates without Trunkline."""
    return tokens(run(python, path, model, None, dtype=dtype, tp_size=tp_size))


def streamed_units(result: subprocess.CompletedProcess[str]) -> list[tuple[int, int]]:
    """How many units of how many are read in each pass, as each rank has logged it."""
    found = re.findall(r"(\d+) of (\d+) units of the layers' weights", result.stderr)
    return [(int(streamed), int(units)) for streamed, units in found]


@pytest.mark.parametrize(
    ("model", "dtype", "ranks", "budget"),
    [
        ("qwen3", "bfloat16", 2, "1.7MB"),
        pytest.param("llama", "float32", 1, "4MB", marks=MORE_MODELS),
        pytest.param("mixtral", "bfloat16", 1, "8MB", marks=MORE_MODELS),
    ],
)
def test_tokens_are_those_of_stock_sglang(
    python: str, path: str, models: Path, model: str, dtype: str, ranks: int, budget: str, tmp_path: Path
) -> None:
    """Twice, since the second start finds the pack and loads no weights of the layers."""
    options: dict[str, Any] = {"dtype": dtype, "tp_size": ranks}
    expected = stock_tokens(python, path, models / model, **options)
    assert len({token for each in expected for token in each}) > 20  # the model does not repeat itself
    settings = {"memory_budget": budget, "unit_bytes": 1, "pack_dir": str(tmp_path)}
    for start in ("first", "second"):
        result = run(python, path, models / model, settings, **options)
        assert tokens(result) == expected
        counts = streamed_units(result)
        assert len(counts) == ranks
        assert all(streamed >= units // 2 > 0 for streamed, units in counts)
        assert ("making a pack" in result.stderr) == (start == "first")
    assert not list(tmp_path.rglob(".trunkline-loading*"))


def test_a_model_in_memory_is_loaded_by_trunkline(python: str, path: str, models: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "tp_size": 2}
    result = run(python, path, models / "qwen3", {"stream": False}, **options)
    assert tokens(result) == stock_tokens(python, path, models / "qwen3", **options)
    assert len(re.findall(r"read 0\.\d+ GB of weights", result.stderr)) == 2
    assert streamed_units(result) == []


def test_damaged_weights_end_the_server(python: str, path: str, models: Path, tmp_path: Path) -> None:
    """Stock SGLang would serve them: only files with checksums can be verified."""
    for file in (models / "llama").iterdir():
        shutil.copy(file, tmp_path)
    weights = tmp_path / "model.safetensors"
    tl.save(tl.load(weights), weights)
    with weights.open("r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        byte = opened.read(1)
        opened.seek(-100, os.SEEK_END)
        opened.write(bytes([byte[0] ^ 1]))
    result = run(python, path, tmp_path, {"stream": False})
    assert result.returncode != 0
    assert re.search(r"model\.safetensors is corrupt: chunk \d+ of its data", result.stderr)


def test_weights_that_trunkline_did_not_read_end_the_server(python: str, path: str, models: Path) -> None:
    result = run(python, path, models / "llama", {"stream": False}, load_format="dummy")
    assert result.returncode != 0
    assert "the weights were not read by Trunkline, but by SGLang" in result.stderr


def test_packs_are_in_the_cache_unless_another_place_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUNKLINE_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"

    def directories(rank: str = "rank0", **settings: Any) -> list[Path]:
        return list(_location_of(model, Settings(**settings), rank, "bfloat16").directories)

    [cached] = directories()
    assert cached.parent == pack_cache.packs_directory()
    assert cached != directories("rank1")[0]
    assert directories(pack_dir=str(tmp_path / "mine")) == [tmp_path / "mine" / "rank0"]
    assert directories(volumes=("/a", "/b")) == [Path("/a/rank0"), Path("/b/rank0")]
    earlier = tmp_path / "x"  # any pack: where earlier versions made it, it is used
    llama = tmp_path / "llama"
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=32
        )
    ).save_pretrained(llama)
    tl.transformers.pack(llama, [earlier])
    (model / "trunkline-pack").mkdir(parents=True)
    earlier.rename(model / "trunkline-pack" / "rank0")
    assert directories() == [model / "trunkline-pack" / "rank0"]


def test_nothing_happens_without_the_variable(python: str, path: str) -> None:
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry; print(dict(HookRegistry._hooks))"
    )
    environment = os.environ | {"PYTHONPATH": path}
    environment.pop("TRUNKLINE_SGLANG", None)
    result = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "{}"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ("20GB", "must be JSON, such as"),
        ('{"memory_budget": "many"}', "memory_budget"),
        ('{"memory": "20GB"}', "'memory' is unknown; known are stream, memory_budget"),
        ('{"volumes": "/nvme0"}', "volumes: must be a list of directories"),
        ("[]", "must be"),
        ('{"stream": 0}', "stream: must be true or false, not 0"),
        ('{"stream": false, "memory_budget": "20GB"}', 'memory_budget: has no effect with "stream": false'),
    ],
)
def test_bad_settings_end_the_process(python: str, path: str, settings: str, complaint: str) -> None:
    """SGLang only logs what plugins raise."""
    code = "from sglang.srt.plugins import load_plugins; load_plugins(); print('went on')"
    environment = os.environ | {"PYTHONPATH": path, "TRUNKLINE_SGLANG": settings}
    result = subprocess.run(
        [python, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "went on" not in result.stdout
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("trunkline: ")
    assert complaint in last


@pytest.mark.parametrize(
    ("settings", "options", "complaint"),
    [
        ({"memory_budget": "1MB"}, {}, r"memory_budget: 1000000 bytes cannot hold .* the least is \d+ bytes"),
        ({"memory_budget": "3MB"}, {"cpu_offload_gb": 1}, "--cpu-offload-gb: SGLang's own offloading"),
    ],
)
def test_what_cannot_work_ends_the_server(
    python: str,
    path: str,
    models: Path,
    settings: dict[str, object],
    options: dict[str, object],
    complaint: str,
    tmp_path: Path,
) -> None:
    result = run(python, path, models / "llama", settings | {"pack_dir": str(tmp_path)}, **options)
    assert result.returncode != 0
    assert "generated:" not in result.stdout
    assert re.search(complaint, result.stderr), result.stderr[-3000:]
