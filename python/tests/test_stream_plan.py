"""Predictions of streaming: from configurations alone, by hand, and on the command line."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import support_warm
import torch
from support_models import make_folder

import trunkline as tl
from trunkline import cli
from trunkline._streaming import roofline as rooflines
from trunkline._streaming.roofline import Sizes
from trunkline.stream import _machine

# As published with the weights.
LLAMA_3_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}
LLAMA_31_405B = {
    **LLAMA_3_70B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
H200_FLOPS = 400e12  # of bf16, about what matrices of this size reach


def run(*arguments: str | Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command; its exit status must be `expect`."""
    result = support_warm.run(["-m", "trunkline", *arguments])
    assert result.returncode == expect, result.stderr
    return result


def folder_of(config: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def by_hand(hidden: int, inner: int, layers: int, kv: int, vocab: int) -> tuple[int, int]:
    """Return the bytes of the layers' matrices, and of all, in bf16."""
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    return 2 * layers * layer, 2 * (layers * (layer + 2 * hidden) + hidden + 2 * vocab * hidden)


@pytest.mark.parametrize(
    ("config", "sizes", "billions"),
    [
        (LLAMA_3_70B, by_hand(8192, 28672, 80, 1024, 128256), 70.55),
        (LLAMA_31_405B, by_hand(16384, 53248, 126, 1024, 128256), 405.85),
    ],
    ids=["70B", "405B"],
)
def test_large_models_from_their_configurations_alone(
    config: dict[str, Any], sizes: tuple[int, int], billions: float, tmp_path: Path
) -> None:
    folder = folder_of(config, tmp_path)
    planned = tl.stream.plan(folder, batch_size=32, memory_budget="12GB", bandwidth="10GB", flops=H200_FLOPS)
    streamed, total = sizes
    assert planned["weight_bytes"] == total
    assert total == pytest.approx(billions * 2e9, rel=1e-4)
    assert planned["least_resident_bytes"] == total - streamed
    assert planned["resident_bytes"] == total - planned["streamed_bytes"]
    assert planned["bound"] == "storage"
    assert planned["tokens_per_second"] == pytest.approx(32 / (planned["streamed_bytes"] / 10e9))
    # What fits beside two slots stays, but for less than a unit of it.
    assert planned["streamed_bytes"] <= total - 12e9 + 2 * (
        planned["least_budget"] - planned["least_resident_bytes"]
    )
    assert [row["batch_size"] for row in planned["batch_sizes"]] == [1, 4, 16, 64, 256]
    assert planned["memory"][-1]["memory_budget"] == total
    assert planned["memory"][-1]["bound"] == "compute"
    assert [row["disks"] for row in planned["disks"]] == [1, 2, 4, 8]
    assert planned["disks"][2]["storage_seconds"] == pytest.approx(planned["storage_seconds"] / 4)


@pytest.mark.parametrize(
    ("gb_s", "total_tokens_per_second"),
    # Llama-3-70B, 128 prompts of 512 tokens, 32 new ones, H200 with NVMe: DeepSpeed reports 290 and 400
    # tokens a second of prompts and answers together, which is 18.7 and 25.7 GB/s of weights.
    [(18.7, 290), (25.7, 400)],
)
def test_published_runs_are_reproduced(gb_s: float, total_tokens_per_second: float, tmp_path: Path) -> None:
    folder = folder_of(LLAMA_3_70B, tmp_path)
    least = tl.stream.plan(folder, memory_budget="200GB", bandwidth="1GB", flops=H200_FLOPS)["least_budget"]
    step = tl.stream.plan(folder, batch_size=128, memory_budget=least, bandwidth=gb_s * 1e9, flops=H200_FLOPS)
    prompt = tl.stream.plan(
        folder, batch_size=128 * 512, memory_budget=least, bandwidth=gb_s * 1e9, flops=H200_FLOPS
    )
    seconds = max(prompt["storage_seconds"], prompt["compute_seconds"]) + 31 * step["seconds_per_step"]
    predicted = 128 * (512 + 32) / seconds
    # The prompts take 23 s of computing on one such GPU; the published runs overlapped them with reading.
    without_prompts = 128 * (512 + 32) / (32 * step["seconds_per_step"])
    assert without_prompts == pytest.approx(total_tokens_per_second, rel=0.05)
    assert predicted < without_prompts


def test_a_gpu_has_three_places_for_weights(tmp_path: Path) -> None:
    folder = folder_of(LLAMA_3_70B, tmp_path)
    numbers = {"bandwidth": "10GB", "bus_bandwidth": "50GB", "flops": H200_FLOPS}

    def plan(memory: str, host: str, rows: int = 8) -> dict[str, Any]:
        return tl.stream.plan(
            folder, device="cuda", batch_size=rows, memory_budget=memory, host_memory=host, **numbers
        )

    weights = 141.1e9
    unit = 1.5e9  # no more stays unused of a place than slots and a unit take
    planned = plan("40GB", "60GB")
    assert planned["device"] == "cuda"
    assert 0 <= planned["copied_bytes"] - (weights - 40e9) <= 4 * unit
    assert 0 <= planned["streamed_bytes"] - (planned["copied_bytes"] - 60e9) <= 3 * unit
    assert planned["resident_bytes"] == planned["weight_bytes"] - planned["copied_bytes"]
    assert planned["bus_seconds"] == pytest.approx(planned["copied_bytes"] / 50e9)
    assert planned["storage_seconds"] == pytest.approx(planned["streamed_bytes"] / 10e9)
    assert planned["bound"] == "storage"
    assert planned["seconds_per_step"] == planned["storage_seconds"]
    from_memory = plan("40GB", "200GB")
    assert from_memory["streamed_bytes"] == 0
    assert from_memory["bound"] == "bus"
    assert from_memory["seconds_per_step"] == pytest.approx(from_memory["copied_bytes"] / 50e9)
    assert from_memory["host"][-1]["bound"] == "bus"
    assert [row["seconds_per_step"] for row in from_memory["host"]] == sorted(
        (row["seconds_per_step"] for row in from_memory["host"]), reverse=True
    )
    in_hbm = plan("150GB", "500MB")
    assert (in_hbm["copied_bytes"], in_hbm["streamed_bytes"], in_hbm["bound"]) == (0, 0, "compute")
    assert [row["memory_budget"] for row in in_hbm["memory"]] == [in_hbm["weight_bytes"], int(150e9)]
    assert from_memory["host"][-1]["storage_seconds"] == 0
    with pytest.raises(tl.OutOfBudget, match=r"host_memory: 1000 bytes .* cannot hold two of the"):
        plan("40GB", "1000")
    with pytest.raises(tl.OutOfBudget, match="the least is"):
        plan("1GB", "10GB")
    with pytest.raises(ValueError, match="only for a model on a GPU"):
        tl.stream.plan(folder, memory_budget="40GB", host_memory="1GB")
    with pytest.raises(ValueError, match="bus_bandwidth: must be more than 0"):
        tl.stream.plan(folder, device="cuda", memory_budget="40GB", **{**numbers, "bus_bandwidth": 0})
    with pytest.raises(tl.Unsupported, match='device: "mps" is not supported'):
        tl.stream.plan(folder, device="mps")
    if not torch.cuda.is_available():
        with pytest.raises(tl.Unsupported, match="pass memory_budget=, bus_bandwidth= and flops="):
            tl.stream.plan(folder, device="cuda", bandwidth="10GB", flops=1e12)
    shown = run(
        *("plan", folder, "--device", "cuda", "--memory", "40GB", "--host-memory", "60GB", "--batch", "8"),
        *("--bandwidth", "10GB", "--bus-bandwidth", "50GB", "--flops", H200_FLOPS),
    ).stdout
    assert "are copied to it in each step, at 50.00 GB/s; main memory for the rest 60.00 GB" in shown
    assert "main memory " in shown


def test_the_limit_is_what_takes_longer() -> None:
    sizes = Sizes(100, (50_000,) * 10)
    for rows, bound in ((1, "storage"), (1000, "compute")):
        rate = rooflines.rate(sizes, 200_000, 1e6, rows, lambda nbytes, batch: nbytes * batch / 1e8)
        assert rate.bound == bound
        assert rate.seconds == max(rate.storage_seconds, rate.compute_seconds)
        assert rate.tokens_per_second == rows / rate.seconds
    with pytest.raises(tl.OutOfBudget, match="the least is"):
        rooflines.streamed_bytes(sizes, 50_000)
    assert rooflines.streamed_bytes(sizes, 10**6) == 0


def test_a_model_that_fits_reads_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    planned = tl.stream.plan(folder, memory_budget="1GB", bandwidth="1GB", flops=1e12)
    assert planned["streamed_bytes"] == 0
    assert planned["bound"] == "compute"
    least = planned["least_budget"]
    model = tl.transformers.from_pretrained(folder, memory_budget=least)
    assert (
        tl.stream.plan(folder, memory_budget=least, bandwidth=1e9, flops=1e12)["streamed_bytes"]
        == (tl.stream.stats(model)["streamed_bytes"])
    )
    with pytest.raises(tl.OutOfBudget):
        tl.transformers.from_pretrained(folder, memory_budget=least - 1)


def test_measuring(tmp_path: Path) -> None:
    compute = _machine.measure_compute(torch.float32, torch.device("cpu"))
    assert 0 < compute(1000, 1) < compute(2000, 1)
    assert compute(1000, 64) > compute(1000, 1) / 2
    with pytest.raises(FileNotFoundError, match="give the bandwidth"):
        _machine.measure_reading([tmp_path])
    (tmp_path / "model.safetensors").write_bytes(b"x" * (33 << 20))
    assert _machine.measure_reading([tmp_path]) > 1e6
    assert _machine.measure_reading([tmp_path, tmp_path]) > 1e6


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for options, error, name in (
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": True}, ValueError, "batch_size"),
        ({"bandwidth": 0}, ValueError, "bandwidth"),
        ({"bandwidth": "fast"}, ValueError, "bandwidth"),
        ({"memory_budget": "x"}, ValueError, "memory_budget"),
        ({"bandwidth": []}, TypeError, "bandwidth"),
        ({"bandwidth": float("inf")}, ValueError, "bandwidth"),
        ({"flops": 0}, ValueError, "flops"),
        ({"flops": float("nan")}, ValueError, "flops"),
        ({"bandwidth": None, "volumes": []}, ValueError, "volumes"),
        (
            {"bandwidth": None, "volumes": "abc"},
            TypeError,
            "volumes: must be a list of directories, not str; put",
        ),
        ({"device": "gpu"}, ValueError, """device: must be "cpu" or "cuda", not 'gpu'"""),
        ({"device": "cuda"}, tl.Unsupported, "device"),
        ({"memory_budget": 1}, tl.OutOfBudget, "the least is"),
    ):
        with pytest.raises(error, match=name):
            tl.stream.plan(folder, **{"bandwidth": 1e9, "flops": 1e12, **options})


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_here(*arguments: str | Path, expect: int = 0) -> Any:
        """The same in this process, which has imported transformers: that takes seconds."""
        assert cli.main(list(map(str, arguments))) == expect
        return capsys.readouterr()

    folder = make_folder(tmp_path / "model")
    packed = run("pack", str(folder), str(tmp_path / "a"), str(tmp_path / "b"), "--json")
    document = json.loads(packed.stdout)
    assert document["made"] is True
    assert (tmp_path / "b" / "weights.safetensors.1").exists()
    again = run_here("pack", str(folder), str(tmp_path / "a"), str(tmp_path / "b"))
    assert again.out.startswith("exists already: ")
    model = tl.transformers.from_pretrained(folder, volumes=[tmp_path / "a", tmp_path / "b"])
    assert tl.stream.stats(model)["source"] == str(tmp_path / "a" / "weights.safetensors")

    large = tmp_path / "large"
    large.mkdir()
    (large / "file").write_bytes(bytes(40 << 20))
    options = ("--bandwidth", "2GB", "--flops", "1e12", "--memory-budget", "1GB", "--batch-size", "4")
    planned = run_here("plan", str(folder), *options)
    assert "bound by compute" in planned.out
    assert json.loads(run_here("plan", str(folder), *options, "--json").out)["batch_size"] == 4

    measured = run_here("plan", str(folder), "--volumes", str(large), str(large), *options[2:], "--json")
    assert json.loads(measured.out)["bandwidth"] > 0
    for arguments, status, says in (
        (("pack",), 2, "trunkline pack: MODEL is required"),
        (("pack", folder, folder / "config.json"), 2, "pack: OUT: "),
        (
            ("plan", folder, "--volumes", tmp_path / "none"),
            2,
            "none: no such file or directory (ENOENT); name existing directories (--volumes), or give the "
            "bandwidth, for example --bandwidth 6.8GB",
        ),
        (("plan", folder, "--volumes", folder / "config.json"), 2, "(ENOTDIR); name existing directories"),
        (("plan", folder, "--bach", "1"), 2, "unknown option '--bach'. Did you mean '--batch'?\n"),
        (("plan", str(folder), "--batch", "many"), 2, "--batch"),
        (("plan", str(folder), *options, "--dtype", "int8"), 2, "plan: --dtype: must be one of"),
        (
            ("plan", folder, *options, "--device", "tpu"),
            2,
            """plan: --device: must be "cpu" or "cuda", not 'tpu'""",
        ),
        (("plan", folder, *options, "--device", "xpu"), 1, 'plan: --device: "xpu" is not supported; use cpu'),
        (("plan", folder, *options, "--batch", "0"), 2, "plan: --batch-size: must be a whole number from 1"),
        (("plan", folder, *options, "--bus-bandwidth", "5GB"), 2, "--host-memory, --bus-bandwidth: only for"),
        (("plan", str(folder), *options[:4], "--memory", "1"), 1, "the least is"),
        (
            ("plan", str(folder), *options[:4], "--memory", "8"),
            1,
            '8 bytes (did you mean "8GB"?) cannot hold',
        ),
        (("pack", str(tmp_path / "none"), str(tmp_path / "c")), 2, "no such folder"),
        (
            ("pack", "no-such-name"),
            2,
            "check the path; a model of the Hub has to be downloaded first: hf download no-such-name\n",
        ),
        (("plan", "no-such/name"), 2, "so download it first: hf download no-such/name config.json\n"),
        (("pack", "no-such/name"), 2, "so download it first: hf download no-such/name\n"),
    ):
        failed = run_here(*arguments, expect=status)
        assert says in failed.err
        assert "Traceback" not in failed.err
    older = run_here("plan", str(folder), *options[:4], "--memory", "1GB", "--batch", "4", "--json")
    assert json.loads(older.out)["batch_size"] == 4
