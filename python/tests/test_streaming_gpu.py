"""Models whose weights pass through the memory of a GPU: on the stand-in, where the CPU computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from support_gpu import stand_in  # noqa: E402
from support_models import make_folder, prompt, stock  # noqa: E402
from support_posing import Poser, Shadowed  # noqa: E402

import trunkline as tl  # noqa: E402

RunScript = Callable[..., str]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from trunkline.transformers import meta_model

    functions = stand_in()
    functions.fakeCudaReset()
    functions.poser = Poser()
    functions.poser.pose(monkeypatch, Shadowed)
    monkeypatch.setattr(meta_model, "_moved", lambda tensor, device: tensor)
    yield functions
    complaints = functions.fakeCudaComplaints()
    functions.fakeCudaReset()
    assert complaints == b""


def generated(model: Any) -> Any:
    inputs = prompt()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = None
    with torch.no_grad():
        for _ in range(6):
            new = ids if cache is None else ids[:, -1:]
            output = model(input_ids=new, attention_mask=mask, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return ids


def least(folder: Path, **options: Any) -> int:
    with pytest.raises(tl.OutOfBudget) as refused:
        tl.transformers.from_pretrained(folder, device="cuda:0", memory_budget=1, **options)
    return int(str(refused.value).partition("the least is ")[2].split()[0])


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "gpt2", "qwen3-moe", "gemma3"])
@pytest.mark.parametrize("more", [0, 100_000, 10_000_000])
def test_tokens_are_those_of_the_fully_loaded_model(gpu: Any, kind: str, more: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", kind)
    expected = generated(stock(folder))
    gpu.fakeCudaDelayUpTo(500)
    budget = least(folder) + more
    model = tl.transformers.from_pretrained(
        folder, device="cuda:0", memory_budget=budget, host_memory="2MB", unit_bytes=1
    )
    for _ in range(2):
        assert torch.equal(generated(model), expected)
    stats = tl.stream.stats(model)
    assert stats["memory_bytes"] <= budget
    if more == 10_000_000:
        assert stats["streamed_bytes"] == stats["bytes_copied"] == stats["host_bytes"] == 0
    else:
        assert stats["bytes_copied"] >= 12 * stats["streamed_bytes"] > 0


def test_what_main_memory_has_room_for_is_read_once(gpu: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    model = tl.transformers.from_pretrained(
        folder, device="cuda:0", memory_budget=least(folder), host_memory="1GB"
    )
    generated(model)
    before = tl.stream.stats(model)
    generated(model)
    after = tl.stream.stats(model)
    assert after["bytes_read"] == before["bytes_read"]
    assert after["bytes_copied"] > before["bytes_copied"]
    assert after["storage_bytes"] == 0 < after["streamed_bytes"]
    assert gpu.fakeCudaPageableCopies() == 0


def test_what_each_pass_reads_is_told(gpu: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    all_of_it = 1 << 30
    streamed = 0
    for host_memory in (all_of_it, 96_000, 128_000):
        model = tl.transformers.from_pretrained(
            folder, device="cuda:0", memory_budget=least(folder), host_memory=host_memory, unit_bytes=1
        )
        generated(model)
        before = tl.stream.stats(model)
        for _ in range(3):
            generated(model)
        after = tl.stream.stats(model)
        told, streamed = after["storage_bytes"], after["streamed_bytes"]
        assert (told == 0) == (host_memory == all_of_it)
        assert told <= streamed
        # What was read ahead of the next pass, at either end, is no more than one of them.
        read = after["bytes_read"] - before["bytes_read"]
        assert abs(read - told * (after["passes"] - before["passes"])) <= told
    assert streamed > 128_000


def test_computing_comes_before_the_next_weights(gpu: Any, tmp_path: Path) -> None:
    """What the stream of the computation still does with a slot is waited for."""
    from support_posing import PosingStream

    folder = make_folder(tmp_path / "model")
    model = tl.transformers.from_pretrained(
        folder, device="cuda:0", memory_budget=least(folder), host_memory="2MB"
    )
    stream = PosingStream("cuda:0")
    gpu.poser.set_stream(stream)
    before = gpu.fakeCudaAwaited(stream.cuda_stream)
    generated(model)
    # Copies into slots that the computation has used wait for points in its stream.
    assert gpu.fakeCudaAwaited(stream.cuda_stream) > before


def test_a_captured_graph_is_refused_by_name(gpu: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    model = tl.transformers.from_pretrained(folder, device="cuda", memory_budget=least(folder))
    gpu.poser.capturing = True
    with pytest.raises(tl.Unsupported, match="CUDA graph is being captured"):
        generated(model)
    gpu.poser.capturing = False
    assert torch.equal(generated(model), generated(stock(folder)))


def test_a_failing_gpu_is_reported_and_the_model_works_again(gpu: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    model = tl.transformers.from_pretrained(
        folder, device="cuda", memory_budget=least(folder), host_memory="2MB"
    )
    expected = generated(stock(folder))
    assert torch.equal(generated(model), expected)
    gpu.fakeCudaFail(b"cuMemcpyHtoDAsync_v2", 700, 3, 1)
    with pytest.raises(tl.DeviceError):
        generated(model)
    gpu.fakeCudaReset()
    assert torch.equal(generated(model), expected)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with pytest.raises(ValueError, match="host_memory: only for a model on a GPU"):
        tl.transformers.from_pretrained(folder, host_memory="1GB")
    with pytest.raises(tl.Unsupported, match="device: mps"):
        tl.transformers.from_pretrained(folder, device="mps")


def test_main_memory_without_room_is_named(gpu: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with pytest.raises(tl.OutOfBudget, match="least"):
        tl.transformers.from_pretrained(folder, device="cuda", memory_budget=least(folder), host_memory=1000)


REAL = """
import sys, torch, transformers, trunkline as tl
from pathlib import Path
folder = Path(sys.argv[1])
config = transformers.LlamaConfig(
    vocab_size=997, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8)
config.dtype = torch.bfloat16
torch.manual_seed(0)
transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
ids = torch.randint(3, 900, (4, 20), device="cuda")
stock = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().to("cuda")
expected = stock.generate(ids, max_new_tokens=30, do_sample=False)
for budget in ("12MB", "20MB", "1GB"):
    for host in ("8MB", "1GB"):
        model = tl.transformers.from_pretrained(
            folder, device="cuda", memory_budget=budget, host_memory=host, unit_bytes="2MB")
        for _ in range(3):
            assert torch.equal(model.generate(ids, max_new_tokens=30, do_sample=False), expected)
        print(budget, host, tl.stream.stats(model))
print("well")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; a stand-in was tested instead")
def test_a_real_gpu(run_script: RunScript, tmp_path: Path) -> None:
    assert run_script(REAL, str(tmp_path)).split()[-1] == "well"
