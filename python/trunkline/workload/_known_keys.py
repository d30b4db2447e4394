"""Keys of DLIO that change nothing here, and what is so about each."""

_SAME_READS = "ignored: does not change what is read"
_PLACES = "ignored: the directories of the run say where the data is"
_NOTHING_IS_COMPUTED = "ignored: nothing is preprocessed, and samples have no element types"
_ONLY_SERVER = "ignored: is about server mode"
_ONLY_CHECKPOINTS = "ignored: is about workloads without a training"
_ONLY_TRAININGS = "ignored: is about workloads with a training"

# By the path of a key, or of the section that it is in. The longest that fits holds.
_EFFECTS = {
    "model": "ignored: describes the model, whose computation is given as a time",
    "framework": _SAME_READS,
    "defaults": "not supported: other files are not included",
    "hydra": _SAME_READS,
    "workflow.generate_data": "ignored: `trunkline workload generate` and `run` say what is done",
    "workflow.debug": _SAME_READS,
    "workflow.profiling": "not supported: nothing is profiled",
    "profiling": "not supported: nothing is profiled",
    "storage": _PLACES,
    "dataset.data_folder": _PLACES,
    "dataset.keep_files": "ignored: the data set is kept",
    "dataset.generation_buffer_size": "ignored: does not change what is written",
    "dataset.record_length_resize": "ignored: what a sample is resized to is not read",
    "dataset.record_length_bytes_resize": "ignored: what a sample is resized to is not read",
    "dataset.record_element_bytes": _NOTHING_IS_COMPUTED,
    "dataset.record_element_type": _NOTHING_IS_COMPUTED,
    "dataset.record_dims": "not supported: write record_length_bytes",
    "dataset.enable_chunking": "ignored: is about HDF5",
    "dataset.chunk_size": "ignored: is about HDF5",
    "dataset.hdf5": "ignored: is about HDF5",
    "dataset.compression": "not supported: data is stored uncompressed",
    "dataset.compression_level": "ignored: nothing is compressed",
    "dataset.parquet.use_s3dlio_gen": "ignored: does not change what is written",
    "dataset.parquet.generation_batch_size": "ignored: does not change what is written",
    "dataset.parquet.read_mode": "ignored: the chosen columns of row groups are read",
    "reader.data_loader": "ignored: the native reader of trunkline.data reads",
    "reader.data_loader_classname": "ignored: the native reader of trunkline.data reads",
    "reader.data_loader_sampler": "ignored: the native reader of trunkline.data reads",
    "reader.reader_classname": "ignored: the native reader of trunkline.data reads",
    "reader.computation_threads": _NOTHING_IS_COMPUTED,
    "reader.preprocess_time": "not supported: preprocessing takes no time",
    "reader.preprocess_time_stdev": "not supported: preprocessing takes no time",
    "reader.transformed_record_dims": _NOTHING_IS_COMPUTED,
    "reader.transformed_record_element_type": _NOTHING_IS_COMPUTED,
    "reader.shuffle_size": "ignored: all samples are shuffled, not those in a buffer",
    "reader.multiprocessing_context": _SAME_READS,
    "reader.pin_memory": "ignored: memory is always pinned",
    "reader.dont_use_mmap": _SAME_READS,
    "reader.file_access": _SAME_READS,
    "reader.read_type": _SAME_READS,
    "reader.transfer_size": "ignored: the engine chooses the size of transfers",
    "reader.odirect": "ignored: direct I/O is used wherever it works",
    "train.seed_change_epoch": "ignored: each epoch has an order of its own",
    "checkpoint.checkpoint_folder": "ignored: the directories of the run say where checkpoints are saved",
    "checkpoint.checkpoint_mechanism_classname": "ignored: trunkline.dcp saves and restores",
    "checkpoint.mode": "ignored: the number of ranks of the run says which of them save and restore",
    "checkpoint.rank_sync": "ignored: ranks begin and end together",
    "checkpoint.randomize_tensor": "ignored: tensors are always random",
    "checkpoint.ksm": "ignored: tensors have different contents, and share no memory",
    "checkpoint.recovery_rank_shift": "not supported: each rank restores what it has saved",
    "checkpoint.recovery_after_steps": "not supported: nothing is restored within a training",
    "checkpoint.num_checkpoints": _ONLY_CHECKPOINTS,
    "checkpoint.num_checkpoints_write": _ONLY_CHECKPOINTS,
    "checkpoint.num_checkpoints_read": _ONLY_CHECKPOINTS,
    "checkpoint.time_between_checkpoints": _ONLY_CHECKPOINTS,
    "checkpoint.checkpoint_after_epoch": _ONLY_TRAININGS,
    "checkpoint.epochs_between_checkpoints": _ONLY_TRAININGS,
    "checkpoint.steps_between_checkpoints": _ONLY_TRAININGS,
    "inference.arrival_rate": _ONLY_SERVER,
    "inference.deadline": _ONLY_SERVER,
    "inference.percentile": _ONLY_SERVER,
    "inference.prefetch_size": "ignored: is about offline mode",
    "inference.logging.group": "ignored: is about fsync: group",
    "inference.logging.interval": "ignored: is about fsync: interval",
    "output.folder": "ignored: results go to standard output",
    "output.log_file": "ignored: results go to standard output",
}
_UNKNOWN = "not supported: unknown key; "


def effect_of(key: str, suggestion: str | None) -> str:
    """Return what is so about a key that nothing asked for. `suggestion`: a known key that is like it."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        effect = _EFFECTS.get(".".join(parts[:length]))
        if effect is not None:
            return effect
    return _UNKNOWN + (f"did you mean {suggestion}?" if suggestion else "check its spelling")


def is_unknown(effect: str) -> bool:
    """Whether it is the effect of a key that DLIO does not know, either."""
    return effect.startswith(_UNKNOWN)
