"""Models whose weights are streamed do what fully loaded ones do, bit for bit."""

import copy
import gc
import json
import os
import pickle
import random
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support_forked import exit_codes, start_code
from support_models import ARCHITECTURES, make_folder, pack_directory, prompt, stock, transformers

import trunkline as tl
from trunkline._core import crc32c
from trunkline._streaming.streaming import streaming_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def least(folder: Path, **options: Any) -> int:
    """Return the smallest budget, as the error names it."""
    with pytest.raises(tl.OutOfBudget) as caught:
        tl.transformers.from_pretrained(folder, memory_budget=1, **options)
    found = re.search(r"the least is (\d+) bytes", str(caught.value))
    assert found
    return int(found[1])


def streamed(folder: Path, more: int = 0, **options: Any) -> Any:
    """Load with the smallest budget, and `more` bytes."""
    model = tl.transformers.from_pretrained(folder, memory_budget=least(folder, **options) + more, **options)
    assert streaming_of[model].streamed_bytes > 0
    return model


def logits(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**prompt(), **options).logits
    return result


def generated(model: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(3)
    result: torch.Tensor = model.generate(**prompt(), max_new_tokens=8, pad_token_id=0, **options)
    return result


def several_times(model: Any) -> None:
    """What is read ahead of a change is still good."""
    for _ in range(3):
        generated(model, do_sample=False)


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_every_architecture_is_equal_to_the_fully_loaded_model(kind: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, kind)
    expected = stock(folder)
    # By the layer, by the module, and by the module with some of them in memory.
    for unit_bytes, more in ((None, 0), (1, 0), (1, 60_000)):
        model = streamed(folder, more, unit_bytes=unit_bytes)
        assert torch.equal(logits(model), logits(expected))
        unused = streaming_of[model].stream.stats()["unused"]  # type: ignore[union-attr]
        assert torch.equal(logits(model), logits(expected))
        assert torch.equal(generated(model, do_sample=False), generated(expected, do_sample=False))
        # Modules may run in another order than they stand in; that is known after the first pass.
        assert streaming_of[model].stream.stats()["unused"] <= unused + 2  # type: ignore[union-attr]
        assert type(model) is type(expected)


@pytest.fixture
def several_threads() -> Iterator[None]:
    """Have torch divide matrices among threads, which changes the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_several_threads_compute_what_they_do_with_the_fully_loaded_model(
    dtype: torch.dtype, several_threads: None, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, dtype=dtype)
    model = streamed(folder, unit_bytes=1)
    expected = logits(stock(folder))
    for _ in range(2):
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_and_its_conversions(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "qwen3", dtype)
    assert torch.equal(logits(streamed(folder)), logits(stock(folder)))
    for other in (torch.float32, torch.bfloat16):
        model = streamed(folder, dtype=other)
        assert model.dtype == other
        assert torch.equal(logits(model), logits(stock(folder, dtype=other)))


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "use_cache": False},
        {"do_sample": True, "num_beams": 2, "top_k": 5},
    ],
    ids=str,
)
def test_every_way_to_generate(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert torch.equal(generated(streamed(folder), **options), generated(stock(folder), **options))


def test_a_prompt_is_one_pass(tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path), unit_bytes=1)
    hooks = streaming_of[model].hooks
    assert hooks
    model.generate(torch.arange(3, 50).reshape(1, -1), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert hooks.passes == 5


def test_stats_say_what_was_done(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model = streamed(folder)
    assert tl.stream.stats(model)["passes"] == 0
    assert tl.stream.stats(model)["of_limit"] is None
    generated(model, do_sample=False)
    stats = tl.stream.stats(model)
    total = sum(parameter.nbytes for parameter in stock(folder).parameters())
    assert stats["passes"] == 8
    assert stats["streamed_bytes"] + stats["resident_bytes"] == total
    assert stats["memory_bytes"] <= least(folder)
    assert stats["bytes_read"] >= 8 * stats["streamed_bytes"]
    parts = stats["wait_seconds"] + stats["verify_seconds"] + stats["compute_seconds"]
    assert parts == pytest.approx(stats["seconds"])
    assert stats["gb_s"] > 0
    assert stats["limit_seconds"] <= stats["seconds"]
    assert stats["of_limit"] == pytest.approx(stats["limit_seconds"] / stats["seconds"])
    assert stats["storage_gb_s"] > 0
    assert stats["source"].endswith("weights.safetensors")
    with pytest.raises(TypeError, match="model"):
        tl.stream.stats(stock(folder))


def test_weights_are_the_slots_themselves_and_only_while_they_are_used(tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path))
    memory = [range(m.data_ptr(), m.data_ptr() + m.nbytes) for m in streaming_of[model].hooks._memory.tensors]  # type: ignore[union-attr]
    seen = []
    linear = model.model.layers[2].mlp.up_proj
    linear.register_forward_pre_hook(lambda module, _: seen.append(module.weight.data_ptr()))
    logits(model)
    assert len(seen) == 1
    assert any(seen[0] in each for each in memory)
    assert linear.weight.device.type == "cpu"  # where it comes to for its use; adapters are put there
    with pytest.raises(tl.Unsupported, match="streamed"):
        linear.weight + 1
    assert model.device.type == "cpu"


def test_a_budget_for_all_keeps_all(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model = tl.transformers.from_pretrained(folder, memory_budget="1GB")
    assert torch.equal(logits(model), logits(stock(folder)))
    before = streaming_of[model].stream.stats()["bytes_read"]  # type: ignore[union-attr]
    logits(model)
    assert streaming_of[model].stream.stats()["bytes_read"] == before  # type: ignore[union-attr]
    assert tl.transformers.from_pretrained(folder) is not model  # a budget by itself


def test_a_pack_is_found_again_and_made_anew_when_its_source_changed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    pack = pack_directory(folder)
    streamed(folder)
    weights = pack / "weights.safetensors"
    made = weights.stat().st_mtime_ns, weights.stat().st_ino
    shard = next(folder.glob("model-00001*.safetensors"))
    streamed(folder)
    assert (weights.stat().st_mtime_ns, weights.stat().st_ino) == made
    os.utime(shard, ns=(1, 1))  # of the same contents
    streamed(folder)
    assert (weights.stat().st_mtime_ns, weights.stat().st_ino) == made
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    streamed(copied)
    assert not (copied / "trunkline-pack" / ".pack.json.tmp").exists()

    other = make_folder(tmp_path / "other", seed=1)
    for path in other.glob("*.safetensors"):
        shutil.copy(path, folder)
    assert torch.equal(logits(streamed(folder)), logits(stock(other)))
    assert weights.stat().st_ino != made[1] or weights.stat().st_mtime_ns != made[0]
    # One value, and a file that looks as before.
    status = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert torch.equal(logits(streamed(folder)), logits(stock(folder)))


def test_a_pack_is_a_safetensors_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "gpt2")
    model = streamed(folder, pack_dir=tmp_path / "pack")
    packed = load_file(tmp_path / "pack" / "weights.safetensors")
    expected = stock(folder).state_dict()
    for name in expected.keys() & packed.keys():
        assert torch.equal(packed[name], expected[name])
    assert len(expected.keys() & packed.keys()) >= len(packed) - 20
    assert streaming_of[model].pack == str(tmp_path / "pack" / "weights.safetensors")


def test_checksums_of_the_source_are_those_of_all_of_its_data(tmp_path: Path) -> None:
    """They are combined from those of the tensors, in the order of their use; some are not used at all."""
    for kind in ("qwen3-moe", "llama"):
        folder = make_folder(tmp_path / kind, kind)
        path = next(iter(sorted(folder.glob("*.safetensors"))))
        tensors = load_file(path)
        tensors["a_first.unused"] = torch.arange(1001, dtype=torch.int16)
        tensors["zz.unused"] = torch.arange(77, dtype=torch.uint8)
        tensors["empty.unused"] = torch.empty(0)
        save_file(tensors, path)
        assert torch.equal(logits(streamed(folder)), logits(stock(folder)))
        manifest = json.loads((pack_directory(folder) / "pack.json").read_text())
        for file in manifest["source"]:
            data = (folder / file["name"]).read_bytes()
            head = 8 + int.from_bytes(data[:8], "little")
            assert file["data_crc32c"] == crc32c(data[head:])


def test_a_pack_on_several_volumes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    volumes = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    model = streamed(folder, volumes=volumes)
    assert torch.equal(logits(model), logits(stock(folder)))
    assert all((volume / f"weights.safetensors.{index}").exists() for index, volume in enumerate(volumes))
    again = streamed(folder, volumes=volumes)
    assert torch.equal(logits(again), logits(model))


def test_files_whose_tensors_are_aligned_are_read_as_they_are(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    expected = stock(folder)
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    tl.save(expected.state_dict(), folder / "model.safetensors")
    model = streamed(folder, unit_bytes=1)
    assert streaming_of[model].pack == str(folder)
    assert not pack_directory(folder).exists()
    assert torch.equal(logits(model), logits(expected))


def test_a_pack_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trunkline._streaming import pack as packing

    folder = make_folder(tmp_path)

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packing, "crc32c", fail)
    with pytest.raises(OSError, match="No space"):
        tl.transformers.from_pretrained(folder)
    monkeypatch.undo()
    assert list(pack_directory(folder).iterdir()) == []
    assert torch.equal(logits(streamed(folder)), logits(stock(folder)))


def test_a_read_error_is_raised_by_generate_and_the_model_works_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model = streamed(folder, unit_bytes=1)
    expected = generated(model, do_sample=False)
    weights = pack_directory(folder) / "weights.safetensors"
    data = weights.read_bytes()
    os.truncate(weights, len(data) // 3)
    with pytest.raises(tl.EndOfFile):
        several_times(model)
    weights.write_bytes(data)
    assert torch.equal(generated(model, do_sample=False), expected)


def test_a_pack_that_was_mended_is_read_at_once(tmp_path: Path) -> None:
    """What was read ahead while it was damaged is not used."""
    folder = make_folder(tmp_path)
    model = streamed(folder, unit_bytes=1)
    expected = generated(model, do_sample=False)
    weights = pack_directory(folder) / "weights.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 3] + bytes(len(data) - len(data) // 3))
    with pytest.raises(tl.Corrupt):
        several_times(model)
    weights.write_bytes(data)
    assert torch.equal(generated(model, do_sample=False), expected)


def test_a_source_with_other_contents_is_compared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trunkline._streaming.source import Source

    folder = make_folder(tmp_path)
    streamed(folder)
    path = next(folder.glob("*.safetensors"))
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\1\2")
    compared = []
    sums = Source.data_checksums
    monkeypatch.setattr(Source, "data_checksums", lambda self: compared.append(self) or sums(self))
    model = tl.transformers.from_pretrained(folder)
    assert torch.equal(logits(model), logits(stock(folder)))
    assert len(compared) == 2  # and once as the pack was made anew


def test_a_changed_pack_is_detected(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model = streamed(folder)
    expected = generated(model, do_sample=False)
    weights = pack_directory(folder) / "weights.safetensors"
    entry = next(
        entry
        for entry in json.loads((pack_directory(folder) / "pack.json").read_text())["tensors"]
        if "layers.1.mlp.down" in entry["name"]
    )
    for flip in (1, 0):
        with weights.open("r+b") as file:
            file.seek(entry["offset"] + 77)
            byte = file.read(1)[0]
            file.seek(entry["offset"] + 77)
            file.write(bytes([byte ^ 1]))
        if flip:
            with pytest.raises(tl.Corrupt, match=r"layers\.1"):
                several_times(model)
        else:
            assert torch.equal(generated(model, do_sample=False), expected)
    with weights.open("r+b") as file:
        file.seek(entry["offset"])
        file.write(b"\0\1\2\3")
    with pytest.raises(tl.Corrupt):
        generated(streamed(folder), do_sample=False)


def test_an_interrupt_leaves_a_model_that_works(tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path), unit_bytes=1)
    expected = generated(model, do_sample=False)
    for layer, inner in ((0, "q_proj"), (1, "o_proj"), (3, "v_proj")):
        module = getattr(model.model.layers[layer].self_attn, inner)
        handle = module.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            generated(model, do_sample=False)
        handle.remove()
        assert torch.equal(generated(model, do_sample=False), expected)


def test_an_error_of_the_model_leaves_a_model_that_works(tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path), unit_bytes=1)
    expected = logits(model)

    def fail(*_: Any) -> None:
        raise ValueError("of the test")

    for module in (model.model.layers[1].mlp.act_fn, model.model.layers[2].mlp.gate_proj, model.model.norm):
        handle = module.register_forward_hook(fail)
        with pytest.raises(ValueError, match="of the test"):
            logits(model)
        handle.remove()
        assert torch.equal(logits(model), expected)


def test_two_threads_are_told(tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path))
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        go_on.wait(20)

    handle = model.model.layers[1].mlp.up_proj.register_forward_pre_hook(wait)
    expected: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: expected.append(logits(model)))
    thread.start()
    assert inside.wait(20)
    handle.remove()
    with pytest.raises(tl.Unsupported, match="one thread at a time"):
        logits(model)
    go_on.set()
    thread.join()
    assert torch.equal(logits(model), expected[0])


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with pytest.raises(tl.Unsupported, match="cuda"):
        tl.transformers.from_pretrained(folder, device="cuda")
    model = streamed(folder)
    model.train()
    with pytest.raises(tl.Unsupported, match="training"):
        model(**prompt())
    model.eval()
    assert logits(model).shape == (2, 9, 97)

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(tl.Unsupported, match="gptq"):
        tl.transformers.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(tl.Format, match=r"lacks .* of the model's weights: model.layers.4"):
        tl.transformers.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(tl.Format, match=r"has the shape .* but the model.s config requires"):
        tl.transformers.from_pretrained(folder)
    with pytest.raises(tl.Error, match="no such folder"):
        tl.transformers.from_pretrained(tmp_path / "nowhere")


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for options, error, name in (
        ({"dtype": "int8"}, ValueError, "dtype"),
        ({"dtype": 3}, ValueError, "dtype"),
        ({"memory_budget": "1 furlong"}, ValueError, "memory_budget"),
        ({"volumes": "one"}, TypeError, "volumes"),
        ({"volumes": []}, ValueError, "volumes"),
        ({"volumes": [folder], "pack_dir": folder}, ValueError, "pack_dir"),
        ({"unit_bytes": -1}, ValueError, "unit_bytes"),
        ({"unit_bytes": "1000TB"}, ValueError, "unit_bytes: must not exceed the memory of this machine"),
        ({"memory_budget": 2e9}, TypeError, 'memory_budget: .* a size such as "20GB"'),
        ({"dtype": "int4"}, ValueError, "dtype: must be one of .*not 'int4'; weights are not quantized"),
        ({"pack_dir": folder / "config.json"}, NotADirectoryError, "pack_dir: .*config.json is a file"),
    ):
        with pytest.raises(error, match=name):
            tl.transformers.from_pretrained(folder, **options)


def test_a_manifest_of_a_pack_that_is_none_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    streamed(folder)
    manifest = pack_directory(folder) / "pack.json"
    document = json.loads(manifest.read_text())
    for text in (
        "",
        "{}",
        "[]",
        json.dumps({**document, "version": 9}),
        json.dumps({**document, "tensors": [{}]}),
    ):
        manifest.write_text(text)
        with pytest.raises(tl.Format, match=r"pack\.json"):
            tl.transformers.from_pretrained(folder)
    manifest.unlink()
    assert torch.equal(logits(streamed(folder)), logits(stock(folder)))
    assert transformers.__version__


def test_gradients_are_refused(tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path), unit_bytes=1)
    embedded = model.get_input_embeddings()(prompt()["input_ids"]).requires_grad_()
    with pytest.raises(tl.Unsupported, match="gradients"):
        model(inputs_embeds=embedded)
    model.model.layers[2].mlp.register_parameter("adapter", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(tl.Unsupported, match="gradients"):
        model(**prompt())
    assert logits(model).shape == (2, 9, 97)  # without them it goes on


def test_weights_cannot_be_used_while_they_are_not_there(tmp_path: Path) -> None:
    """torch computes with some tensors on the meta device, and returns garbage."""
    model = streamed(make_folder(tmp_path), unit_bytes=1)
    expected = logits(model)
    module = model.model.layers[0].self_attn.q_proj
    row = torch.ones(1, 64, dtype=torch.bfloat16)
    for use in (
        lambda: torch.nn.functional.linear(row, module.weight),
        lambda: module.weight + 1,
        lambda: module.weight.data.mul_(2),
        lambda: module.weight.copy_(torch.zeros(64, 64)),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(module.weight),
        lambda: model.model.layers.to(torch.float32),
        lambda: model.model.layers.half(),
        model.half,
        lambda: model.to("meta:0", torch.float64),
    ):
        with pytest.raises(tl.Unsupported, match=r"streamed"):
            use()
    for move in (model.half, lambda: model.to("meta:0")):
        with pytest.raises(tl.Unsupported, match="cannot be moved or converted; pass device= or dtype= to"):
            move()
    assert module.weight.shape == (64, 64)
    assert module.weight.device.type == "cpu"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.get_input_embeddings().weight.device.type == "cpu"
    assert model.to("cpu") is model
    assert model.model.layers.bfloat16() is model.model.layers
    assert torch.equal(logits(model), expected)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model = streamed(folder, unit_bytes=1)
    expected = logits(model)
    other = stock(folder).state_dict()
    for options in ({}, {"assign": True}):
        with pytest.raises(tl.Unsupported, match="load_state_dict"):
            model.load_state_dict(other, **options)
    assert torch.equal(logits(model), expected)
    module = model.model.layers[1].mlp.down_proj
    module.weight = torch.nn.Parameter(torch.zeros(module.weight.shape, dtype=torch.bfloat16))
    with pytest.raises(tl.Unsupported, match="down_proj.weight was replaced"):
        logits(model)


def test_compiled_models_are_right(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    model = streamed(folder, unit_bytes=1)
    expected = logits(stock(folder))
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(logits(compiled), expected)
        assert torch.equal(logits(model), expected)


def test_a_model_that_is_dropped_gives_everything_back(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    logits(streamed(folder))
    gc.collect()

    def files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    for _ in range(5):
        logits(streamed(folder))
        gc.collect()
    assert files() <= before


def test_interrupts_at_any_moment_leave_a_model_that_works(tmp_path: Path) -> None:
    model = streamed(make_folder(tmp_path), unit_bytes=1)
    expected = generated(model, do_sample=False)
    generator = random.Random(5)
    previous = signal.getsignal(signal.SIGALRM)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    cut = 0
    try:
        for _ in range(80):
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.001, 0.03))
                generated(model, do_sample=False)
            except KeyboardInterrupt:  # noqa: PERF203
                cut += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert cut > 20
    assert torch.equal(generated(model, do_sample=False), expected)


def test_files_of_others_are_never_replaced_by_a_pack(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    precious = tmp_path / "precious"
    precious.mkdir()
    save_file({"mine": torch.ones(3)}, precious / "weights.safetensors")
    contents = (precious / "weights.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="not part of a pack"):
        streamed(folder, pack_dir=precious)
    assert (precious / "weights.safetensors").read_bytes() == contents

    single = tmp_path / "single"
    single.mkdir()
    save_file(stock(folder).state_dict(), single / "weights.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", single)
    contents = (single / "weights.safetensors").read_bytes()
    with pytest.raises(ValueError, match="own folder"):
        streamed(single, pack_dir=single)
    assert (single / "weights.safetensors").read_bytes() == contents
    assert torch.equal(logits(streamed(single)), logits(stock(folder)))


def test_the_pack_of_another_model_is_not_replaced(tmp_path: Path) -> None:
    folder, other = make_folder(tmp_path / "model"), make_folder(tmp_path / "other", "qwen3")
    streamed(folder, pack_dir=tmp_path / "pack")
    with pytest.raises(FileExistsError, match="a separate directory"):
        streamed(other, pack_dir=tmp_path / "pack")
    assert torch.equal(logits(streamed(folder, pack_dir=tmp_path / "pack")), logits(stock(folder)))
    # Of the same config the contents decide, however the files look.
    tuned = make_folder(tmp_path / "tuned", seed=2)
    for path in (*folder.glob("*.safetensors"), *tuned.glob("*.safetensors")):
        os.utime(path, ns=(1, 1))
    assert torch.equal(logits(streamed(tuned, pack_dir=tmp_path / "pack")), logits(stock(tuned)))


def test_a_source_that_is_replaced_while_it_is_packed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trunkline._streaming import pack as packing
    from trunkline.transformers import _packing

    folder, other = make_folder(tmp_path / "model"), make_folder(tmp_path / "other", seed=3)

    def replaced(owner: Any, name: str) -> None:
        """Put the other model's files there after the call."""
        original = getattr(owner, name)

        def wrapper(*arguments: Any) -> Any:
            result = original(*arguments)
            for path in other.glob("*.safetensors"):
                shutil.copy(path, folder / "new")
                (folder / "new").replace(folder / path.name)
            return result

        monkeypatch.setattr(owner, name, wrapper)

    for owner, name in ((packing.PackLocation, "remove"), (_packing, "_source")):
        replaced(owner, name)
        with pytest.raises(tl.Corrupt, match="modified or replaced"):
            tl.transformers.from_pretrained(folder)
        monkeypatch.undo()
        assert not (pack_directory(folder) / "pack.json").exists()
        shutil.copytree(make_folder(tmp_path / "again"), folder, dirs_exist_ok=True)
    for path in other.glob("*.safetensors"):
        shutil.copy(path, folder)
    assert torch.equal(logits(streamed(folder)), logits(stock(other)))


def test_processes_that_pack_at_once_agree(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    code = f"import trunkline as tl; tl.transformers.pack({str(folder)!r}, [{str(tmp_path / 'pack')!r}])"
    assert exit_codes([start_code(code) for _ in range(3)]) == [0, 0, 0]
    assert torch.equal(logits(streamed(folder, pack_dir=tmp_path / "pack")), logits(stock(folder)))


def test_files_and_dtypes_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")  # of shards with an index
    whole = stock(make_folder(tmp_path / "whole", seed=4))
    whole.save_pretrained(tmp_path / "one")
    shutil.copy(tmp_path / "one" / "model.safetensors", folder)
    assert torch.equal(logits(streamed(folder)), logits(stock(folder)))
    assert torch.equal(logits(streamed(folder)), logits(whole))

    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert streamed(folder, pack_dir=tmp_path / "p").dtype == stock(folder).dtype == torch.bfloat16

    tied = make_folder(tmp_path / "tied", "llama, tied")
    state = stock(tied).state_dict()
    for path in tied.glob("model*.safetensors*"):
        path.unlink()
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tied / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(streamed(tied)), logits(stock(tied)))
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    save_file(state, tied / "model.safetensors", {"format": "pt"})
    with pytest.raises(tl.Unsupported, match="tie_word_embeddings"):
        tl.transformers.from_pretrained(tied)


def test_what_is_no_folder_of_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tl.transformers.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        tl.stream.plan(tmp_path / "nowhere", bandwidth=1e9, flops=1e12)
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text("{")
    with pytest.raises(tl.Format, match=r"config\.json"):
        tl.transformers.from_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "of_nobody"}')
    with pytest.raises(tl.Unsupported, match="of_nobody"):
        tl.transformers.from_pretrained(folder)
    with pytest.raises(ValueError, match="unit_bytes"):
        tl.transformers.from_pretrained(make_folder(tmp_path / "other"), unit_bytes=0)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=36,
            intermediate_size=50,
            num_hidden_layers=3,
            num_attention_heads=4,
            head_dim=10,
            dtype="float32",
        ),
        transformers.Qwen2MoeConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=5,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_experts_per_tok=2,
            dtype="float32",
        ),
    ],
)
def test_models_of_any_sizes_are_laid_out_for_reading(config: Any, tmp_path: Path) -> None:
    """Also where hardly a weight has a size that fits anything."""
    folder = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for unit_bytes in (1, 1 << 20):
        model = streamed(folder, unit_bytes=unit_bytes)  # with the least budget, as it is named
        assert torch.equal(logits(model), logits(stock(folder)))
    tensors = json.loads((pack_directory(folder) / "pack.json").read_text())["tensors"]
    offsets = [tensor["offset"] for tensor in tensors]
    assert offsets == sorted(offsets)
