"""Stock DeepSpeed on Trunkline's ops: training, inference, checkpoints and tools.

DeepSpeed is not installed for these tests. TRUNKLINE_DEEPSPEED_PYTHON names the interpreter of an environment
with torch, deepspeed 0.19 and transformers; TRUNKLINE_DEEPSPEED_TESTS a copy of DeepSpeed's folder `tests`
with no other part of its sources beside it, for the last test (pytest and pytest-forked are needed there).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support_serving import link_package

PROGRAMS = Path(__file__).resolve().parent / "deepspeed_programs"
SECONDS = 900.0


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of an environment with DeepSpeed."""
    found = os.environ.get("TRUNKLINE_DEEPSPEED_PYTHON")
    if not found:
        pytest.skip(
            "TRUNKLINE_DEEPSPEED_PYTHON is not set: it names the Python of an environment with deepspeed"
        )
    return found


@pytest.fixture
def environment(python: str, tmp_path: Path) -> dict[str, str]:
    """The environment of programs that use this package as DeepSpeed's op."""
    packages = link_package(tmp_path / "packages")
    # trunkline_deepspeed.pth works in site-packages only; a folder of PYTHONPATH has this instead.
    (packages / "sitecustomize.py").write_text("import trunkline\n")
    return os.environ | {
        "PYTHONPATH": str(packages),
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "TRUNKLINE_DEEPSPEED": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
    }


def run(command: list[Any], environment: dict[str, str], **keywords: Any) -> str:
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        **keywords,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def result_of(python: str, program: str, environment: dict[str, str], *arguments: object) -> Any:
    printed = run([python, PROGRAMS / program, *map(str, arguments)], environment)
    found = re.search(r"^RESULT (.*)$", printed, re.MULTILINE)
    assert found is not None, printed[-2000:]
    return json.loads(found[1])


@pytest.mark.parametrize("pipelined", [0, 1])
def test_training_with_offload_to_disk_has_the_losses_of_offload_to_memory(
    python: str, environment: dict[str, str], pipelined: int, tmp_path: Path
) -> None:
    memory = result_of(python, "train.py", environment, "cpu", tmp_path, pipelined)
    folder = tmp_path / "swap"
    folder.mkdir()
    disk = result_of(python, "train.py", environment, "nvme", folder, pipelined)
    assert disk["losses"] == memory["losses"]
    assert len(set(disk["losses"])) == len(disk["losses"])
    assert disk["module"] == "trunkline.deepspeed"
    assert {"optimizer", "bfloat16params"} <= {
        Path(each).relative_to(folder).parts[1] for each in disk["files"]
    }


def test_inference_with_offload_to_disk_generates_the_same_tokens(
    python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    make_model = (
        "import sys, torch, transformers\n"
        "torch.manual_seed(0)\n"
        "transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=2048, hidden_size=768,\n"
        "    intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,\n"
        "    max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.1)\n"
        ").save_pretrained(sys.argv[1])\n"
    )
    run([python, "-c", make_model, tmp_path / "model"], environment)
    folder = tmp_path / "swap"
    folder.mkdir()
    results = {
        device: result_of(python, "generate.py", environment, device, folder, tmp_path / "model")
        for device in ("none", "nvme")
    }
    assert results["nvme"]["tokens"] == results["none"]["tokens"]
    assert len({token for each in results["none"]["tokens"] for token in each}) > 10
    assert len(results["nvme"]["files"]) > 4 * 7


def test_checkpoints_of_the_fast_writers_load_with_torch(
    python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    # On CPUs DeepSpeed pins memory with its op pin_memory only, which is ours too.
    native = environment | {"DS_PIN_MEMORY_BACKEND": "native"}
    result = result_of(python, "fast_writer.py", native, tmp_path)
    assert len(result["writer"]) == 4
    assert all(result["writer"].values())
    assert (result["engine"], result["is_equal"]) == ("FastCheckpointEngine", True)


def test_tools_measure_and_report(python: str, environment: dict[str, str], tmp_path: Path) -> None:
    tools = Path(python).parent
    for options in (
        (),
        ("--read", "--validate"),
        ("--multi_process", "2", "--io_parallel", "3", "--validate"),
    ):
        printed = run(
            [python, tools / "ds_io", "--folder", tmp_path, "--io_size", "1M", *options], environment
        )
        assert re.search(r"E2E (Read|Write) Speed = [\d.]+", printed)
    sweep = {"block_size": ["1M"], "queue_depth": [32], "io_parallel": [1, 2]}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    printed = run(
        [
            python,
            tools / "ds_nvme_tune",
            "--nvme_dir",
            tmp_path,
            "--io_size",
            "1M",
            "--sweep_config",
            tmp_path / "sweep.json",
            "--log_dir",
            tmp_path / "logs",
        ],
        environment,
    )
    assert '"aio": {' in printed
    printed = run([python, tools / "ds_report"], environment)
    assert re.search(
        r"^async_io: provided by trunkline [\d.]+ instead of DeepSpeed's own op$", printed, re.MULTILINE
    )
    assert re.search(r"^async_io \.+ .*OKAY", printed, re.MULTILINE)


def test_the_tests_of_deepspeed_pass(python: str, environment: dict[str, str], tmp_path: Path) -> None:
    folder = os.environ.get("TRUNKLINE_DEEPSPEED_TESTS")
    if not folder:
        pytest.skip(
            "TRUNKLINE_DEEPSPEED_TESTS is not set: it names the folder `tests` of DeepSpeed's sources"
        )
    printed = run(
        [
            python,
            "-m",
            "pytest",
            "unit/v1/nvme",
            "-m",
            "",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={tmp_path / 'pytest'}",
        ],
        environment,
        cwd=folder,
    )
    assert re.search(r"\d\d passed", printed)
