"""What a workload is: what is stored, read and saved, and how long the accelerator computes."""

from dataclasses import dataclass, field
from typing import Literal

from trunkline.workload._model_shape import ModelShape

Format = Literal["npz", "npy", "tfrecord", "jpeg", "png", "parquet", "indexed_binary"]
FORMATS: tuple[Format, ...] = ("npz", "npy", "tfrecord", "jpeg", "png", "parquet", "indexed_binary")
Shuffle = Literal["off", "seed", "random"]
SHUFFLES: tuple[Shuffle, ...] = ("off", "seed", "random")
InferenceMode = Literal["server", "offline"]
INFERENCE_MODES: tuple[InferenceMode, ...] = ("server", "offline")
Sync = Literal["each", "group", "interval", "off"]
SYNCS: tuple[Sync, ...] = ("each", "group", "interval", "off")
_DTYPES = {
    1: ("int8", "uint8"),
    2: ("int16", "uint16", "float16"),
    4: ("int32", "uint32", "float32"),
    8: ("int64", "uint64", "float64"),
}
DTYPE_BYTES = {dtype: size for size, dtypes in _DTYPES.items() for dtype in dtypes}


@dataclass(frozen=True)
class Normal:
    """A normal distribution; a constant if `stdev` is 0. Bytes, or seconds."""

    mean: float
    stdev: float = 0.0


@dataclass(frozen=True)
class Column:
    """A column of Parquet files: `size` values of `dtype` for each sample."""

    name: str
    dtype: str
    size: int
    is_read: bool

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample in this column."""
        return DTYPE_BYTES[self.dtype] * self.size


@dataclass(frozen=True)
class Part:
    """The files of one phase: those to train on, or those to evaluate with."""

    files: int
    subfolders: int


@dataclass(frozen=True)
class Dataset:
    """What is stored."""

    format: Format
    train: Part
    valid: Part
    samples_per_file: int
    record_bytes: Normal  # of a sample
    prefix: str
    columns: tuple[Column, ...] = ()
    rows_per_group: int = 1024  # Parquet: samples of a row group

    @property
    def read_bytes(self) -> float:
        """Bytes that are read for a sample, on average: the chosen columns of Parquet, else all."""
        if self.columns:
            return sum(column.sample_bytes for column in self.columns if column.is_read)
        return self.record_bytes.mean


NO_DATASET = Dataset("npz", Part(0, 0), Part(0, 0), 1, Normal(1.0), "img")  # of checkpoints alone


@dataclass(frozen=True)
class Reader:
    """How samples are read."""

    batch_size: int
    batch_size_eval: int
    threads: int
    prefetch: int  # batches, as the file has it; see batches_ahead
    file_shuffle: Shuffle
    sample_shuffle: Shuffle

    @property
    def batches_ahead(self) -> int:
        """Batches that are read ahead of the computation.

        Each reading thread has one batch at least, as the worker processes of torch's DataLoader have.
        """
        threads = max(1, self.threads)
        return threads * max(1, -(-self.prefetch // threads))


@dataclass(frozen=True)
class Train:
    """The training."""

    epochs: int
    compute_seconds: Normal  # of a batch
    total_steps: int | None  # bound for all epochs together
    seed: int


@dataclass(frozen=True)
class Evaluation:
    """What comes between epochs."""

    compute_seconds: Normal
    after_epoch: int  # the first one that is followed by an evaluation; epochs count from 1
    every_epochs: int


@dataclass(frozen=True)
class Checkpoint:
    """What is saved, and when: within a training, or without one so many times."""

    shape: ModelShape
    durable: bool  # fsync
    saves: int = 0  # without a training: first these,
    restores: int = 0  # then these,
    pause_seconds: float = 0.0  # and before each, so long
    after_epoch: int = 1  # within a training: the first one that is followed by a save; epochs count from 1
    every_epochs: int = 1
    every_steps: int | None = None  # of each epoch; replaces saving after epochs


@dataclass(frozen=True)
class Logging:
    """What an inference logs: a record for each sample, appended to a file of each rank."""

    record_bytes: int
    sync: Sync
    group: int  # "group": fsync once so many records are appended
    interval_seconds: float  # "interval": fsync so often, if there is anything new


@dataclass(frozen=True)
class Inference:
    """Queries that are answered, one at a time as they arrive, or in batches."""

    mode: InferenceMode
    queries: int  # of each rank; offline: batches
    batch_size: int  # samples of a query
    compute_seconds: Normal  # of a query
    arrival_rate: float | None  # server: queries a second of each rank, on average
    deadline_seconds: float | None  # server: for the latency
    percentile: float  # server: of the latency, which the deadline is for
    prefetch: int  # offline: batches in memory, the one that is computed on among them
    shuffle: bool
    model_bytes: int  # that each rank loads at start
    logging: Logging | None


@dataclass(frozen=True)
class Ignored:
    """A key that changes nothing here."""

    key: str
    line: int
    effect: str  # "ignored: ..." or "not supported: ..."


@dataclass(frozen=True)
class Workload:
    """A workload file, checked."""

    name: str
    source: str
    dataset: Dataset
    reader: Reader | None  # None: the file only describes the data set
    train: Train | None
    evaluation: Evaluation | None
    inference: Inference | None  # instead of a training
    checkpoint: Checkpoint | None  # without `train`: there is no data set, and only checkpoints are saved
    target_utilization: float | None  # 0 .. 1
    skipped_steps: int  # at the start of an epoch, for the utilization
    seed: int
    ignored: tuple[Ignored, ...] = field(default=(), compare=False)

    @property
    def has_dataset(self) -> bool:
        """Whether it reads samples; one of checkpoints alone does not."""
        return self.train is not None or self.checkpoint is None


def check_workload(workload: object) -> None:
    """Raise TypeError unless it is a Workload."""
    if not isinstance(workload, Workload):
        shown = repr(workload) if isinstance(workload, str) else "NAME_OR_FILE"
        raise TypeError(
            f"workload: must be a Workload, not {type(workload).__name__}; trunkline.workload.load({shown}) "
            "returns one"
        )
