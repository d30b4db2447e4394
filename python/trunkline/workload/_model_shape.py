"""The state of a training, for each rank: which tensors, of how many elements. Pure functions.

Transformers are divided as Megatron and DeepSpeed do, and counted as DLIO counts them: layers over pipeline
stages, matrices over tensor-parallel ranks, optimizer states (ZeRO 1 and 2) and also weights (ZeRO 3) over
data-parallel ranks. Layer 0 is the embedding; the last two are the head of the language model and the final
norm.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

STATE_DTYPES = {"int8": 1, "uint8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
_OPTIMIZER_COPIES = 3  # the weights in full precision, and two moments
_SMALL_TENSOR_ROWS = 5  # beside each copy, a tensor of 5 x hidden elements
_WIDTH_UNIT = 16  # widths of real models are multiples of it
_STEPS_OF_BISECTION = 60


@dataclass(frozen=True)
class Parallelism:
    """How a model is divided over ranks."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero_stage: int = 0

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.model_ranks * self.data

    def position(self, rank: int) -> tuple[int, int, int]:
        """The number of a rank within its tensor-parallel group, its pipeline, and among the copies."""
        return rank % self.tensor, rank // self.tensor % self.pipeline, rank // self.model_ranks


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder with grouped-query attention and gated feed-forward layers."""

    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    heads: int
    kv_heads: int

    @property
    def qkv_elements(self) -> int:
        """Elements of the attention's input projections in a layer."""
        return self.hidden * (self.hidden + 2 * (self.hidden // self.heads) * self.kv_heads)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        hidden = self.hidden
        layer = 2 * hidden + self.qkv_elements + hidden * hidden + 3 * hidden * self.ffn
        return 2 * self.vocabulary * hidden + layer * self.layers + hidden


@dataclass(frozen=True)
class StateTensor:
    """A tensor of a rank's state."""

    name: str
    dtype: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * STATE_DTYPES[self.dtype]


@dataclass(frozen=True)
class ModelShape:
    """What is saved: a transformer, or layers of given sizes, or a number of bytes."""

    parallelism: Parallelism
    transformer: Transformer | None = None
    layers: int = 0  # without a transformer: so many of `layer_elements`
    layer_elements: tuple[int, ...] = ()
    group_elements: tuple[
        int, ...
    ] = ()  # of the optimizer, on each rank; replaces what follows from the model
    flat_bytes: int = 0  # besides
    on_all_ranks: bool = True  # what is not divided: on all ranks, or on rank 0
    model_dtype: str = "fp16"
    optimizer_dtype: str = "fp32"


def rank_tensors(shape: ModelShape, rank: int) -> list[StateTensor]:
    """Return what one rank saves, of weights ("model.") and of the optimizer ("optimizer.")."""
    return [*_model_tensors(shape, rank), *_optimizer_tensors(shape, rank)]


def rank_bytes(shape: ModelShape, rank: int) -> tuple[int, int]:
    """Return the bytes of weights and of optimizer states that one rank saves."""
    model, optimizer = _model_tensors(shape, rank), _optimizer_tensors(shape, rank)
    return sum(each.nbytes for each in model), sum(each.nbytes for each in optimizer)


def total_bytes(shape: ModelShape) -> int:
    """Return the bytes that all ranks save together."""
    return sum(sum(rank_bytes(shape, rank)) for rank in range(shape.parallelism.ranks))


def total_files(shape: ModelShape) -> int:
    """Return how many files DLIO saves it in, for comparison with its tables.

    One for the optimizer of each rank, and one for its weights; with a pipeline and ZeRO below 3, one for
    each layer.
    """
    by_layer = shape.parallelism.pipeline > 1 and shape.parallelism.zero_stage < 3
    files = 0
    for rank in range(shape.parallelism.ranks):
        model = {each.name.rpartition(".")[0] if by_layer else "" for each in _model_tensors(shape, rank)}
        files += len(model) + bool(_optimizer_tensors(shape, rank))
    return files


def layers_of_stage(layers: int, stage: int, stages: int) -> range:
    """Return the layers of a pipeline stage, which count from 1. The first stages may have one more."""
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more) + 1
    return range(first, first + each + (1 if stage < more else 0))


def scaled_shape(shape: ModelShape, most_bytes: int) -> ModelShape:
    """Return the shape with all widths (hidden, ffn, vocabulary) smaller by one factor, as large as fits.

    Layers, ranks and their division stay. Raises ValueError if nothing remains.
    """
    if total_bytes(shape) <= most_bytes:
        return shape
    low, high = 0.0, 1.0
    for _ in range(_STEPS_OF_BISECTION):
        middle = (low + high) / 2
        if total_bytes(_shrunk(shape, middle)) <= most_bytes:
            low = middle
        else:
            high = middle
    small = _shrunk(shape, low)
    if total_bytes(small) > most_bytes:
        raise ValueError(
            f"scale_bytes: a checkpoint of all {shape.parallelism.ranks} ranks has at least "
            f"{total_bytes(small)} bytes; choose a larger size"
        )
    return small


def _shrunk(shape: ModelShape, factor: float) -> ModelShape:
    def width(size: int) -> int:
        """Of a model that trains well: parts of tensor-parallel ranks are equal, and tensors are aligned."""
        unit = math.lcm(shape.parallelism.tensor, _WIDTH_UNIT)
        return max(1, math.floor(size * factor / unit)) * unit

    def area(size: int) -> int:
        small = math.floor(size * factor * factor)
        return (small // _WIDTH_UNIT * _WIDTH_UNIT or max(1, small)) if size else 0

    model = shape.transformer
    if model is not None:
        model = replace(
            model, hidden=width(model.hidden), ffn=width(model.ffn), vocabulary=width(model.vocabulary)
        )
    return replace(
        shape,
        transformer=model,
        layer_elements=tuple(map(area, shape.layer_elements)),
        group_elements=tuple(map(area, shape.group_elements)),
        flat_bytes=area(shape.flat_bytes),
    )


def _model_tensors(shape: ModelShape, rank: int) -> list[StateTensor]:
    parallelism = shape.parallelism
    _, stage, copy = parallelism.position(rank)
    found = []
    if shape.flat_bytes and (shape.on_all_ranks or rank == 0):
        found.append(StateTensor("model.all.0", "uint8", shape.flat_bytes))
    if copy > 0 and parallelism.zero_stage < 3:
        return found  # the first copy saves for all
    if shape.transformer is not None:
        layers = _transformer_layers(shape.transformer, parallelism, stage)
    else:
        elements = [each // parallelism.tensor for each in shape.layer_elements]
        numbers = layers_of_stage(shape.layers, stage, parallelism.pipeline)
        layers = ((number, elements) for number in numbers)
    for number, sizes in layers:
        found += [
            StateTensor(f"model.{number}.{index}", shape.model_dtype, size)
            for index, size in enumerate(sizes)
            if size
        ]
    return found


def _transformer_layers(
    model: Transformer, parallelism: Parallelism, stage: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield (number, elements of each tensor) of the layers of a stage."""
    copies = parallelism.data if parallelism.zero_stage >= 3 else 1
    hidden = model.hidden

    def split(elements: int) -> int:
        return elements // parallelism.tensor // copies

    vocabulary = [split(hidden * model.vocabulary)]
    norm = hidden // copies
    layer = [
        norm,
        split(model.qkv_elements),
        split(hidden * hidden),
        norm,
        split(2 * hidden * model.ffn),
        split(hidden * model.ffn),
    ]
    if stage == 0:
        yield 0, vocabulary
    for number in layers_of_stage(model.layers, stage, parallelism.pipeline):
        yield number, layer
    if stage == parallelism.pipeline - 1:
        yield model.layers + 1, vocabulary
        yield model.layers + 2, [norm]


def _optimizer_tensors(shape: ModelShape, rank: int) -> list[StateTensor]:
    parallelism, model = shape.parallelism, shape.transformer
    _, _, copy = parallelism.position(rank)
    if shape.group_elements:
        if not shape.on_all_ranks and rank > 0:
            return []
        sizes = [each for each in shape.group_elements for _ in range(2)] + [sum(shape.group_elements)]
    elif model is None or (parallelism.zero_stage == 0 and copy > 0):
        return []
    else:
        divided = parallelism.model_ranks * (parallelism.data if parallelism.zero_stage else 1)
        sizes = [model.parameters // divided, _SMALL_TENSOR_ROWS * model.hidden] * _OPTIMIZER_COPIES
    return [
        StateTensor(f"optimizer.{index}", shape.optimizer_dtype, size)
        for index, size in enumerate(sizes)
        if size
    ]
