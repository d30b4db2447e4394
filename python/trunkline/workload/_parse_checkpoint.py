"""The sections `model` and `checkpoint` of a workload file: what is saved, and when."""

from trunkline.workload._model_shape import STATE_DTYPES, ModelShape, Parallelism, Transformer
from trunkline.workload._section import Section
from trunkline.workload._spec import Checkpoint

_MOST_LAYERS, _MOST_RANKS = 100_000, 1_000_000  # beyond any model, so that sums take no hours
_DEFAULT_MODEL_BYTES = 10240  # DLIO's, for a file that says nothing of the model


def parse_checkpoint(model: Section, section: Section, is_training: bool) -> Checkpoint:
    """Return what the sections say. Without a training, they say how often to save and restore.

    `model`: empty if the file gives only its name. Raises SpecError.
    """
    shape = _shape(model, section)
    durable = section.flag("checkpoint_fsync" if section.has("checkpoint_fsync") else "fsync", True)
    if not is_training:
        return Checkpoint(
            shape,
            durable,
            saves=section.integer("num_checkpoints_write", "num_checkpoints", default=1),
            restores=section.integer("num_checkpoints_read", default=1),
            pause_seconds=max(0.0, section.number("time_between_checkpoints", default=0.0, least=-1)),
        )
    steps = _count(section, "steps_between_checkpoints")
    return Checkpoint(
        shape,
        durable,
        after_epoch=section.integer("checkpoint_after_epoch", default=1, least=1),
        every_epochs=section.integer("epochs_between_checkpoints", default=1, least=1),
        every_steps=steps or None,
    )


def _shape(model: Section, checkpoint: Section) -> ModelShape:
    """Keys of the model, of which older files have some in `checkpoint`."""
    where = {key: checkpoint if checkpoint.has(key) else model for key in ("num_layers", "zero_stage")}
    layers = _count(where["num_layers"], "num_layers")
    layer_elements = _elements(model, checkpoint, "layer_parameters")
    groups = _elements(model, checkpoint, "optimization_groups")
    has_transformer = layers > 0 and not layer_elements
    parallelism = _parallelism(model, checkpoint)
    if layers > _MOST_LAYERS:
        where["num_layers"].fail("num_layers", f"must be at most {_MOST_LAYERS}, not {layers}")
    if parallelism.pipeline > max(1, layers):
        where["num_layers"].fail(
            "num_layers", f"must be at least {parallelism.pipeline}, the pipeline stages"
        )
    sizes = checkpoint if checkpoint.has("model_size", "model_size_bytes") else model
    declares = layers > 0 or layer_elements or groups
    flat = sizes.integer("model_size_bytes", "model_size", default=0 if declares else _DEFAULT_MODEL_BYTES)
    return ModelShape(
        parallelism,
        _transformer(model, layers) if has_transformer else None,
        layers=0 if has_transformer else layers,
        layer_elements=layer_elements,
        group_elements=groups,
        flat_bytes=flat,
        on_all_ranks=checkpoint.choice("type", ("rank_zero", "all_ranks"), "rank_zero") == "all_ranks",
        model_dtype=model.choice("model_datatype", tuple(STATE_DTYPES), "fp16"),
        optimizer_dtype=model.choice("optimizer_datatype", tuple(STATE_DTYPES), "fp32"),
    )


def _parallelism(model: Section, checkpoint: Section) -> Parallelism:
    section = model.section("parallelism")

    def ranks(key: str) -> int:
        old = f"{key}_parallelism"
        if checkpoint.has(old):
            return checkpoint.integer(old, least=1)
        return section.integer(key, default=1, least=1)

    zero = checkpoint if checkpoint.has("zero_stage") else section
    stage = max(0, int(zero.number("zero_stage", default=0.0, least=-1)))
    if stage > 3:
        zero.fail("zero_stage", f"must be 0, 1, 2 or 3, not {stage}")
    data = max(1, _count(section, "data"))  # DLIO's -1: what the ranks come to
    parallelism = Parallelism(ranks("tensor"), ranks("pipeline"), data, stage)
    if parallelism.ranks > _MOST_RANKS:
        section.fail("tensor", f"x pipeline x data must be at most {_MOST_RANKS}, not {parallelism.ranks}")
    return parallelism


def _transformer(model: Section, layers: int) -> Transformer:
    section = model.section("transformer")
    heads = section.integer("num_attention_heads", default=32, least=1)
    return Transformer(
        layers,
        hidden=section.integer("hidden_size", default=2048, least=1),
        ffn=section.integer("ffn_hidden_size", default=8192, least=1),
        vocabulary=section.integer("vocab_size", default=32000, least=1),
        heads=heads,
        kv_heads=section.integer("num_kv_heads", default=min(8, heads), least=1),
    )


def _count(section: Section, key: str) -> int:
    """A number, of which -1 says that there is none."""
    number = section.number(key, default=0.0, least=-1)
    if number != int(number):
        section.fail(key, f"must be a whole number, not {number:g}")
    return max(0, int(number))


def _elements(model: Section, checkpoint: Section, key: str) -> tuple[int, ...]:
    return tuple((checkpoint if checkpoint.has(key) else model).integers(key))
