"""Traces of routing: what is recorded, what readers reject, and what replaying them predicts."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import support_warm
import torch
from support_experts import small_config
from support_models import make_folder, save_model
from test_routed_experts import decoded, routed
from test_streaming import least, logits

import trunkline as tl
from trunkline._streaming import routing_trace
from trunkline._streaming.routing_trace import RoutingTrace, TraceWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def generated(model: Any, tokens: int = 40) -> None:
    """Generate one row."""
    torch.manual_seed(0)
    with torch.no_grad():
        model.generate(
            torch.tensor([[5, 6, 7]]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True
        )


def recorded(folder: Path, path: Path, more: int = 0) -> tuple[dict[str, Any], RoutingTrace]:
    """Return what stats() says of a run, and its trace."""
    model = routed(folder, more, routing_trace=path)
    generated(model)
    return tl.stream.stats(model, per_layer=True), routing_trace.read(path)


def test_a_trace_has_each_step_of_each_layer(tmp_path: Path) -> None:
    folder = save_model(small_config("qwen3_moe", experts=16), tmp_path / "model")
    stats, trace = recorded(folder, tmp_path / "trace")
    experts = stats["experts"]
    assert trace.model == str(folder)
    assert trace.modules == (("model.layers.0.mlp.experts", 16), ("model.layers.1.mlp.experts", 16))
    assert [step.module for step in trace.steps] == [0, 1] * 40
    assert [step.tokens for step in trace.steps] == [3, 3] + [1] * 78
    for step in trace.steps:
        assert sum(count for _, count in step.uses) == 2 * step.tokens
        assert [expert for expert, _ in step.uses] == sorted({expert for expert, _ in step.uses})
    assert experts["steps"] == len(trace.steps)
    matrices = 2
    assert experts["hits"] + experts["misses"] == matrices * sum(len(step.uses) for step in trace.steps)
    for number, layer in enumerate(experts["layers"]):
        steps = [step for step in trace.steps if step.module == number]
        used = sum(len(step.uses) for step in steps)
        assert (layer["name"], layer["steps"]) == (trace.modules[number][0], len(steps))
        assert layer["used_per_step"] == pytest.approx(used / len(steps))
        assert layer["hit_rate"] == layer["hits"] / (matrices * used)
    for key in ("hits", "misses", "bytes_read", "evictions", "steps"):
        assert sum(layer[key] for layer in experts["layers"]) == experts[key]


def test_recording_does_not_depend_on_where_the_experts_are(tmp_path: Path) -> None:
    folder = save_model(small_config("mixtral"), tmp_path / "model")
    routed_model = routed(folder, routing_trace=tmp_path / "routed")
    whole = tl.transformers.from_pretrained(folder, memory_budget="1GB", routing_trace=tmp_path / "whole")
    assert torch.equal(decoded(routed_model), decoded(whole))
    traces = [routing_trace.read(tmp_path / name) for name in ("routed", "whole")]
    assert traces[0].steps == traces[1].steps
    assert traces[0].steps


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_other_families(kind: str, tmp_path: Path) -> None:
    folder = save_model(small_config(kind), tmp_path / "model")
    _, trace = recorded(folder, tmp_path / "trace")
    assert {step.module for step in trace.steps} == set(range(len(trace.modules)))


def test_the_environment_names_the_files_of_all_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "model", "qwen3-moe")
    monkeypatch.setattr(routing_trace, "_models", iter((1, 2, 3)))
    monkeypatch.setenv(routing_trace.VARIABLE, str(tmp_path / "trace-%p"))
    models = [routed(folder) for _ in range(2)]
    for model in models:
        logits(model)
    dense = make_folder(tmp_path / "dense")
    tl.transformers.from_pretrained(dense, memory_budget="1GB")  # nothing to record, and no error
    named = tmp_path / f"trace-{os.getpid()}"
    assert sorted(tmp_path.glob("trace-*")) == [named, Path(f"{named}.2")]
    assert routing_trace.read(named).steps == routing_trace.read(Path(f"{named}.2")).steps != ()
    monkeypatch.setenv(routing_trace.VARIABLE, str(tmp_path / "no" / "folder"))
    logits(routed(folder))  # only logged
    given = tmp_path / "given"
    logits(routed(folder, routing_trace=given))
    assert routing_trace.read(given).steps


def test_a_process_that_exits_leaves_a_whole_trace(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "qwen3-moe")
    script = (
        "import os, sys, trunkline as tl, torch\n"
        "model = tl.transformers.from_pretrained(sys.argv[1], memory_budget=int(sys.argv[2]))\n"
        "model(input_ids=torch.tensor([[1, 2, 3]]))\n"
        "if os.fork() == 0:\n"
        "    sys.exit(0)\n"
        "os.wait()\n"
        "model(input_ids=torch.tensor([[1]]))\n"
    )
    environment = {**os.environ, routing_trace.VARIABLE: str(tmp_path / "trace")}
    support_warm.run(["-c", script, folder, str(least(folder))], check=True, env=environment)
    assert [step.tokens for step in routing_trace.read(tmp_path / "trace").steps] == [3] * 4 + [1] * 4


def test_files_that_are_not_replaced(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "qwen3-moe")
    mine = tmp_path / "mine"
    mine.write_text("mine")
    with pytest.raises(tl.FileExistsError, match="mine: the file exists, and is not such a trace; choose"):
        routed(folder, routing_trace=mine)
    assert mine.read_text() == "mine"
    trace = tmp_path / "trace"
    model = routed(folder, routing_trace=trace)
    logits(model)
    with pytest.raises(tl.Error, match="another model is writing it"):
        routed(folder, routing_trace=trace)
    del model
    gc.collect()
    before = trace.read_bytes()
    with pytest.raises(tl.OutOfBudget):
        tl.transformers.from_pretrained(folder, memory_budget=1000, routing_trace=trace)
    assert trace.read_bytes() == before
    logits(routed(folder, routing_trace=trace))
    assert trace.read_bytes() == before
    with pytest.raises(tl.FileNotFoundError, match="cannot record the trace of routing"):
        routed(folder, routing_trace=tmp_path / "no" / "folder")
    dense = make_folder(tmp_path / "dense")
    with pytest.raises(tl.Unsupported, match="routing_trace: .*dense has no experts"):
        tl.transformers.from_pretrained(dense, memory_budget="1GB", routing_trace=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_where_nothing_can_be_written_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "model", "qwen3-moe")
    expected = logits(routed(folder))
    model = routed(folder, routing_trace=tmp_path / "trace")
    logits(model)
    before = (tmp_path / "trace").read_bytes()

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("trunkline._streaming.routing_trace.os.write", full)
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), expected)
    assert (tmp_path / "trace").read_bytes() == before
    routing_trace.read(tmp_path / "trace")


@pytest.fixture
def text(tmp_path: Path) -> bytes:
    """A small trace."""
    writer = TraceWriter(str(tmp_path / "small"), "a model", [("a", 4), ("b", 8)])
    writer.begin()
    for token in range(5):
        writer.record(0, 1, [(token % 4, 1), (3 + token % 1, 1)] if token % 4 < 3 else [(3, 1)])
        writer.record(1, 2, [(token, 2), (7, 1)])
    writer.close()
    return (tmp_path / "small").read_bytes()


def test_a_trace_that_is_written_can_be_read(text: bytes) -> None:
    trace = routing_trace.parse(text.splitlines(keepends=True), "small")
    assert (trace.model, trace.modules, len(trace.steps)) == ("a model", (("a", 4), ("b", 8)), 10)
    assert trace.steps[1] == routing_trace.Step(1, 2, ((0, 2), (7, 1)))


def test_every_damaged_byte_is_noticed_and_its_line_named(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    for at in range(len(text)):
        for mask in (1, 0x20):
            damaged = bytearray(text)
            damaged[at] ^= mask
            path.write_bytes(damaged)
            with pytest.raises((tl.Corrupt, tl.Format), match="damaged") as caught:
                routing_trace.read(path)
            line = text[:at].count(b"\n") + 1
            assert f"line {line} " in str(caught.value) or (line == 1 and "not a trace" in str(caught.value))
            assert caught.value.filename == str(path)


def test_lines_that_are_missing_or_cut_off_are_noticed(text: bytes) -> None:
    lines = text.splitlines(keepends=True)
    for left_out in range(1, len(lines) - 1):
        with pytest.raises(
            tl.Corrupt, match=f"line {left_out + 1} is damaged, or lines before it are missing"
        ):
            routing_trace.parse([*lines[:left_out], *lines[left_out + 1 :]], "trace")
    for end in range(len(lines[0]) - 1, len(text)):
        if not text[:end].endswith(b"\n"):
            with pytest.raises(tl.CutOff, match=r"trace: line \d+ is cut off"):
                routing_trace.parse(text[:end].splitlines(keepends=True), "trace")


def with_checksums(*texts: str) -> list[bytes]:
    """Return lines with valid checksums."""
    lines, checksum = [], 0
    for each in texts:
        checksum = tl._core.crc32c(each.encode(), checksum)
        lines.append(f"{each} {checksum:08x}\n".encode())
    return lines


HEADER = '{"format": "trunkline routing trace", "version": 1, "model": "m", "modules": [["a", 4], ["b", 8]]}'


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ("[2,1,[0]]", "the module is 2"),
        ("[true,1,[0]]", "the module is True"),
        ("[0,0,[0]]", "the number of tokens is 0"),
        ("[0,1,[4]]", "an expert is 4, not a whole number from 0 to 3"),
        ("[0,1,[1,1]]", "not in their order"),
        ("[0,1,[1,2],[1]]", "zip"),
        ("[0,1,[1],[0]]", "the use of an expert is 0"),
        ("[0,1]", "three or four elements"),
        ("{}", "three or four elements"),
        ("[0,1,2]", "line 2 is not valid"),
        ("[0,1,[0]", "line 2 is not valid"),
        ("[" * 100_000, "line 2 is not valid"),
        ("[0,1e999,[0]]", "the number of tokens is inf"),
    ],
)
def test_steps_that_cannot_be_are_rejected(step: str, why: str) -> None:
    with pytest.raises(tl.Format, match=why) as caught:
        routing_trace.parse(with_checksums(HEADER, step), "trace")
    assert "trace: line 2 is not valid in a trace of routing" in str(caught.value)


def test_other_versions_and_files_are_rejected(tmp_path: Path) -> None:
    newer = HEADER.replace('"version": 1', '"version": 2')
    with pytest.raises(tl.Format, match="line 1 .*version 2 is not supported; upgrade trunkline"):
        routing_trace.parse(with_checksums(newer), "trace")
    for header in (HEADER.replace('[["a", 4], ["b", 8]]', "[]"), HEADER.replace('"m"', "3")):
        with pytest.raises(tl.Format, match="line 1 is not valid"):
            routing_trace.parse(with_checksums(header), "trace")
    for other in (b"", b"[0,1,[2]]", b"{}\n", bytes(100)):
        (tmp_path / "other").write_bytes(other)
        with pytest.raises(tl.Format, match="other is not a trace of routing"):
            routing_trace.read(tmp_path / "other")
    with pytest.raises(tl.FileNotFoundError, match="cannot read the trace of routing"):
        routing_trace.read(tmp_path / "none")
