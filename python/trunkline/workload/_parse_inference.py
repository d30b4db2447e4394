"""The section `inference` of a workload file, which is our own: no public file has one."""

from typing import cast

from trunkline.workload._section import Section
from trunkline.workload._spec import (
    INFERENCE_MODES,
    SYNCS,
    Dataset,
    Inference,
    InferenceMode,
    Logging,
    Normal,
    Sync,
)


def parse_inference(section: Section, dataset: Dataset) -> Inference:
    """Return what the section says. Raises SpecError."""
    mode = cast("InferenceMode", section.choice("mode", INFERENCE_MODES, "server"))
    batch = section.integer("batch_size", default=1, least=1)
    if dataset.format == "parquet":
        section.fail("mode", "reads single samples, which Parquet does not support; choose another format")
    rate = deadline = None
    percentile = 99.0
    if mode == "server":
        rate = section.number("arrival_rate")
        if rate <= 0:
            section.fail("arrival_rate", f"must be more than 0 queries a second, not {rate:g}")
        if section.has("deadline"):
            deadline = section.number("deadline")
        percentile = section.number("percentile", default=99.0)
        if percentile > 100:
            section.fail("percentile", f"must be at most 100, not {percentile:g}")
    return Inference(
        mode=mode,
        queries=section.integer("queries", default=1000, least=1),
        batch_size=batch,
        compute_seconds=_duration(section),
        arrival_rate=rate,
        deadline_seconds=deadline,
        percentile=percentile,
        prefetch=section.integer("prefetch_size", default=2, least=1) if mode == "offline" else 0,
        shuffle=section.flag("shuffle", True),
        model_bytes=section.integer("model_size_bytes", "model_size", default=0),
        logging=_logging(section.section("logging")) if section.is_section("logging") else None,
    )


def _duration(section: Section) -> Normal:
    key = "computation_time"
    if not section.is_section(key):
        return Normal(section.number(key), section.number(f"{key}_stdev", default=0.0))
    distribution = section.section(key)
    distribution.choice("type", ("normal",), "normal")
    return Normal(distribution.number("mean"), distribution.number("stdev", default=0.0))


def _logging(section: Section) -> Logging:
    sync = cast("Sync", section.choice("fsync", SYNCS, "group"))
    return Logging(
        record_bytes=section.integer("record_bytes", "record_length_bytes", default=1024, least=1),
        sync=sync,
        group=section.integer("group", default=64, least=1) if sync == "group" else 0,
        interval_seconds=section.number("interval", default=1.0) if sync == "interval" else 0.0,
    )
