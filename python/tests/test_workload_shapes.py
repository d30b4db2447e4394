"""Sizes of checkpoints of models that are divided over ranks: by hand, and from the public tables."""

import pytest

from trunkline.workload import load
from trunkline.workload._checkpoint_run import ranked_shape
from trunkline.workload._model_shape import (
    ModelShape,
    Parallelism,
    StateTensor,
    Transformer,
    layers_of_stage,
    rank_bytes,
    rank_tensors,
    scaled_shape,
    total_bytes,
    total_files,
)
from trunkline.workload._parse import parse_text

GIB = 2**30


# MLPerf Storage's table: GiB of weights (the largest rank) and of optimizer states, files, GiB of all ranks.
@pytest.mark.parametrize(
    ("name", "ranks", "model_gib", "optimizer_gib", "files", "total_gib"),
    [
        ("llama3-8b", 8, 1.87, 11.22, 16, 104.7),
        ("llama3-70b", 64, 2.03, 12.20, 128, 911),
        ("llama3-405b", 512, 3.46, 8.86, 1544, 5292),
        ("llama3-1t", 1024, 5.05, 12.91, 2072, 15427),
    ],
)
def test_built_in_models_have_the_published_sizes(
    name: str, ranks: int, model_gib: float, optimizer_gib: float, files: int, total_gib: float
) -> None:
    checkpoint = load(name).checkpoint
    assert checkpoint is not None
    shape = checkpoint.shape
    assert shape.parallelism.ranks == ranks
    sizes = [rank_bytes(shape, rank) for rank in range(ranks)]
    assert max(model for model, _ in sizes) / GIB == pytest.approx(model_gib, abs=0.006)
    assert {optimizer for _, optimizer in sizes} == {sizes[0][1]}
    assert sizes[0][1] / GIB == pytest.approx(optimizer_gib, abs=0.006)
    assert total_files(shape) == files
    assert total_bytes(shape) / GIB == pytest.approx(total_gib, rel=0.0005)
    assert (checkpoint.saves, checkpoint.restores, checkpoint.durable) == (10, 10, True)
    assert checkpoint.pause_seconds == 5


# 2 layers, hidden 8, ffn 12, vocabulary 20, 4 heads of which 2 have keys and values.
SMALL = Transformer(2, 8, 12, 20, 4, 2)
PARAMETERS = 20 * 8 + 2 * (8 + 8 * (8 + 2 * 4) + 8 * 8 + 8 + 3 * 8 * 12) + 8 + 20 * 8


def elements(shape: ModelShape, rank: int) -> dict[str, int]:
    return {each.name: each.elements for each in rank_tensors(shape, rank)}


def test_a_model_on_one_rank_is_saved_whole() -> None:
    assert SMALL.parameters == PARAMETERS == 1320
    found = elements(ModelShape(Parallelism(), SMALL), 0)
    layer = {0: 8, 1: 128, 2: 64, 3: 8, 4: 192, 5: 96}
    assert {name: size for name, size in found.items() if name.startswith("model.1.")} == {
        f"model.1.{index}": size for index, size in layer.items()
    }
    assert (found["model.0.0"], found["model.3.0"], found["model.4.0"]) == (160, 160, 8)
    assert sum(size for name, size in found.items() if name.startswith("model")) == 1320
    assert [found[f"optimizer.{index}"] for index in range(6)] == [1320, 40] * 3


def test_tensor_and_pipeline_parallel_ranks_divide_weights() -> None:
    shape = ModelShape(Parallelism(tensor=2, pipeline=2, data=2, zero_stage=1), SMALL)
    first, last = elements(shape, 1), elements(shape, 2)
    assert shape.parallelism.position(5) == (1, 0, 1)
    assert {name for name in first if name.startswith("model")} == {
        "model.0.0",
        *(f"model.1.{index}" for index in range(6)),
    }
    assert (first["model.0.0"], first["model.1.0"], first["model.1.4"]) == (80, 8, 96)
    assert {name.split(".")[1] for name in last if name.startswith("model")} == {"2", "3", "4"}
    copy = elements(shape, 5)  # its weights are those of rank 1
    assert set(copy) == {f"optimizer.{index}" for index in range(6)}
    assert copy["optimizer.0"] == 1320 // 8


def test_zero_3_divides_weights_among_copies_and_zero_0_nothing() -> None:
    divided = ModelShape(Parallelism(data=4, zero_stage=3), SMALL)
    assert [elements(divided, rank)["model.1.1"] for rank in range(4)] == [32] * 4
    assert elements(divided, 3)["optimizer.0"] == 330
    whole = ModelShape(Parallelism(data=4), SMALL)
    assert elements(whole, 0)["optimizer.0"] == 1320
    assert rank_tensors(whole, 1) == []


@pytest.mark.parametrize(
    ("layers", "stages", "wanted"),
    [(4, 1, [[1, 2, 3, 4]]), (5, 2, [[1, 2, 3], [4, 5]]), (7, 3, [[1, 2, 3], [4, 5], [6, 7]])],
)
def test_layers_are_divided_over_stages(layers: int, stages: int, wanted: list[list[int]]) -> None:
    assert [list(layers_of_stage(layers, stage, stages)) for stage in range(stages)] == wanted


def test_sizes_that_are_given_are_saved_as_they_are() -> None:
    flat = ModelShape(Parallelism(data=2), flat_bytes=1000, on_all_ranks=False)
    assert rank_tensors(flat, 0) == [StateTensor("model.all.0", "uint8", 1000)]
    assert rank_tensors(flat, 1) == []
    lists = ModelShape(
        Parallelism(tensor=2, data=2), layers=3, layer_elements=(100, 0, 30), group_elements=(7, 5)
    )
    assert elements(lists, 1) == {
        **{f"model.{layer}.{index}": size for layer in (1, 2, 3) for index, size in ((0, 50), (2, 15))},
        **{f"optimizer.{index}": size for index, size in enumerate((7, 7, 5, 5, 12))},
    }


def test_scaling_keeps_layers_ranks_and_proportions() -> None:
    checkpoint = load("llama3-405b").checkpoint
    assert checkpoint is not None
    shape = checkpoint.shape
    small = scaled_shape(shape, 100 * 10**9)
    assert 0.97 * 100e9 < total_bytes(small) <= 100e9
    before, after = shape.transformer, small.transformer
    assert before is not None
    assert after is not None
    assert small.parallelism == shape.parallelism
    assert all(width % 16 == 0 for width in (after.hidden, after.ffn, after.vocabulary))
    assert (after.layers, after.heads, after.kv_heads) == (before.layers, before.heads, before.kv_heads)
    assert after.ffn / after.hidden == pytest.approx(before.ffn / before.hidden, rel=0.01)
    assert after.vocabulary / after.hidden == pytest.approx(before.vocabulary / before.hidden, rel=0.01)
    share = [rank_bytes(each, 8 * 31)[0] / total_bytes(each) for each in (shape, small)]
    assert share[0] == pytest.approx(share[1], rel=0.02)
    assert scaled_shape(shape, 10**15) is shape
    lists = ModelShape(
        Parallelism(), layers=2, layer_elements=(10_000, 0), group_elements=(1, 9_000), flat_bytes=700
    )
    half = scaled_shape(lists, total_bytes(lists) // 2)
    assert (half.layer_elements[0] % 16, half.layer_elements[1], half.group_elements[0]) == (0, 0, 1)
    assert 0.98 < total_bytes(half) / (total_bytes(lists) // 2) <= 1
    with pytest.raises(ValueError, match="scale_bytes: a checkpoint of all 512 ranks has at least"):
        scaled_shape(shape, 1000)


def test_ranks_are_a_part_of_the_model_or_more_copies_of_it() -> None:
    checkpoint = load("llama3-70b").checkpoint
    assert checkpoint is not None
    assert ranked_shape(checkpoint, None, None) == ranked_shape(checkpoint, 3, None) == checkpoint.shape
    more = ranked_shape(checkpoint, 128, None)
    assert (more.parallelism.data, more.parallelism.ranks) == (16, 128)
    assert total_bytes(ranked_shape(checkpoint, 128, 10**10)) <= 10**10
    with pytest.raises(ValueError, match="ranks: 100 is not a multiple of 8"):
        ranked_shape(checkpoint, 100, None)


OLD = """\
model: old
workflow: {train: false, checkpoint: true}
checkpoint:
  num_layers: 3
  layer_parameters: [100, 0, 30]
  optimization_groups: [7, 5]
  tensor_parallelism: 2
  type: all_ranks
  num_checkpoints: 4
  checkpoint_fsync: false
  checkpoint_folder: /x
"""


def test_both_spellings_are_read() -> None:
    old = parse_text(OLD, "old.yaml")
    new = parse_text(
        "model: {name: old, num_layers: 3, layer_parameters: [100, 0, 30], optimization_groups: [7, 5],"
        " parallelism: {tensor: 2}}\nworkflow: {train: false, checkpoint: true}\n"
        "checkpoint: {type: all_ranks, num_checkpoints_write: 4, fsync: false}",
        "new.yaml",
    )
    assert old.checkpoint == new.checkpoint
    assert old.checkpoint is not None
    assert (old.checkpoint.saves, old.checkpoint.restores, old.checkpoint.durable) == (4, 1, False)
    assert [(each.key, each.effect) for each in old.ignored] == [
        (
            "checkpoint.checkpoint_folder",
            "ignored: the directories of the run say where checkpoints are saved",
        )
    ]
    sizes = [
        parse_text(f"workflow: {{train: false, checkpoint: true}}\n{text}", "x").checkpoint
        for text in (
            "model: {model_size: 500}",
            "model: {model_size_bytes: 500}",
            "checkpoint: {model_size: 500}",
            "checkpoint: {model_size_bytes: 500}",
        )
    ]
    assert [each and each.shape.flat_bytes for each in sizes] == [500] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("model: {num_layers: 1.5}", "num_layers: must be a whole number"),
        ("model: {num_layers: 2, parallelism: {pipeline: 3}}", "num_layers: must be at least 3"),
        ("model: {parallelism: {zero_stage: 4}}", "zero_stage: must be 0, 1, 2 or 3, not 4"),
        ("model: {num_layers: 1e9}", "num_layers: must be at most 100000, not 1000000000"),
        ("model: {parallelism: {tensor: 1000, data: 1001}}", "must be at most 1000000, not 1001000"),
        ("model: {parallelism: {data: 1.5}}", "data: must be a whole number"),
        ("model: {model_datatype: fp4}", "model_datatype: must be one of int8"),
        ("model: {optimization_groups: [1, -1]}", "optimization_groups: must be a list of whole numbers"),
        ("model: {layer_parameters: 7}", "layer_parameters: must be a list of whole numbers"),
        ("checkpoint: {num_checkpoints_write: 1, num_checkpoints: 2}", "num_checkpoints is the same as"),
    ],
)
def test_what_is_wrong_is_named(changes: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_text(f"workflow: {{train: false, checkpoint: true}}\n{changes}", "x.yaml")
