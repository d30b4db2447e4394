"""Mutations of valid files never make the parsers in Python raise anything but typed errors."""

import random
from pathlib import Path

import fuzz_mutator
import fuzz_python
import pytest
from fuzz_targets import TARGETS, kept_inputs, new_mutator, seeds

import trunkline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
_EXECUTIONS = 10_000


@pytest.mark.parametrize("name", TARGETS)
def test_mutations_are_refused_or_read(name: str) -> None:
    target = TARGETS[name]
    valid = seeds(name)
    assert not any(map(target, valid))
    kept = kept_inputs(name)
    for data in kept:
        target(data)
    mutator = new_mutator(name, random.Random(name), [*valid, *kept])
    was_read = 0
    for number in range(_EXECUTIONS):
        data = mutator.mutation()
        try:
            was_read += target(data) is None
        except Exception as error:
            pytest.fail(f"mutation {number}: {type(error).__name__}: {error}\n{data!r}")
    assert 0 < was_read < _EXECUTIONS


@pytest.fixture
def fuzzer() -> fuzz_python.Fuzzer:
    tracer = fuzz_python.Tracer(str(Path(trunkline.__file__).parent))
    return fuzz_python.Fuzzer("safetensors_index", tracer, random.Random(1))


def test_inputs_that_reach_something_new_are_kept(fuzzer: fuzz_python.Fuzzer, tmp_path: Path) -> None:
    assert all(map(fuzzer.try_traced, seeds("safetensors_index")[:1]))
    assert not fuzzer.try_traced(seeds("safetensors_index")[0])
    before = len(fuzzer.arcs)
    fuzzer.run(2000, 60, tmp_path)
    assert fuzzer.executions >= 2000
    assert len(fuzzer.arcs) > before
    assert len(list(tmp_path.iterdir())) > 1


def test_a_merge_leaves_out_what_reaches_nothing_of_its_own(
    fuzzer: fuzz_python.Fuzzer, tmp_path: Path
) -> None:
    merged, corpus = tmp_path / "merged", tmp_path / "corpus"
    for folder in (merged, corpus):
        folder.mkdir()
    inputs = {b'{"weight_map":{"a":"b"}}', b'{"weight_map":{"aa":"bb"}}', b"{", b"[" * 100}
    for number, data in enumerate(inputs):
        (corpus / str(number)).write_bytes(data)
    fuzz_python.merge(fuzzer, [merged, corpus], max_bytes=90)
    assert {path.read_bytes() for path in merged.iterdir()} == {b"{", b'{"weight_map":{"a":"b"}}'}


@pytest.mark.parametrize("name", ["safetensors_index", "pt_directory", "pt_pickle"])
def test_an_input_is_split_into_what_can_be_replaced(name: str) -> None:
    data = seeds(name)[-1]
    split_input = new_mutator(name, random.Random(1), []).split
    assert split_input(b"") == ([], [])
    split = split_input(data)
    assert split.items
    assert all(0 <= begin < end <= len(data) for begin, end in split.items)
    assert all(0 <= begin < end <= len(data) for begin, end, _ in split.spans)


def test_the_pieces_of_json() -> None:
    data = b'{"a": [1, "x,\\"]"], "b": {}}'
    split = fuzz_mutator.split_json(data)
    assert {data[begin:end] for begin, end, _ in split.spans} == {
        *(b'"a"', b"1", b'"x,\\"]"', b'[1, "x,\\"]"]', b'"b"', b"{}", data)
    }
    assert {data[begin:end] for begin, end in split.items} == {
        *(b"1,", b' "x,\\"]"', b'"a": [1, "x,\\"]"],', b' "b": {}')
    }
