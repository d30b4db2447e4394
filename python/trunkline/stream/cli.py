"""The commands `trunkline pack` and `trunkline plan`, which need Python and transformers."""

import argparse
import errno
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trunkline._command import Parser, run_command
from trunkline._errors import Unsupported
from trunkline._html import check_plot
from trunkline._sizes import size
from trunkline.stream._trace_text import trace_lines, write_plot

_SHOWN_IN_GB = 10**8  # and more

_OPTIONS = {
    "model_dir": "MODEL",
    "batch_size": "--batch-size",
    "memory_budget": "--memory-budget",
    "device": "--device",
    "dtype": "--dtype",
    "host_memory": "--host-memory",
    "bus_bandwidth": "--bus-bandwidth",
    "host_memory, bus_bandwidth": "--host-memory, --bus-bandwidth",
    "bandwidth": "--bandwidth",
    "volumes": "--volumes",
    "flops": "--flops",
    "text_only": "--text-only",
    "keep": "--keep",
    "routing_trace": "--trace",
}  # by the arguments of plan() and pack()


def main(arguments: Sequence[str]) -> int:
    """Run `pack ...` or `plan ...`; return the exit status."""
    command = arguments[0]
    left = "; the incomplete pack was removed" if command == "pack" else ""
    names = _OPTIONS if command == "plan" else {**_OPTIONS, "volumes": "OUT"}
    missing = (FileNotFoundError, NotADirectoryError)
    return run_command(
        command, make_parser(), arguments, lambda _: left, option_names=names, usage_errors=missing
    )


def make_parser() -> Parser:
    parser = Parser(prog="trunkline")
    commands = parser.add_subparsers(dest="command", required=True)
    for each in (_add_pack(commands), _add_plan(commands)):
        each.add_argument(
            "--dtype",
            metavar="bfloat16|float16|float32|float64",
            help="the dtype of the weights in memory (default: as in the config)",
        )
        each.add_argument(
            "--revision",
            metavar="REV",
            help="branch, tag or commit of a model in the Hugging Face cache (default: main)",
        )
        each.add_argument(
            "--text-only",
            action="store_true",
            help="without what reads images or sound, as with text_only=True of from_pretrained",
        )
        each.add_argument(
            "--keep",
            choices=("quantised", "dequantised"),
            default="dequantised",
            help="in which form quantised weights are streamed, as with keep= of from_pretrained (default: "
            "dequantised)",
        )
        each.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_pack(commands: Any) -> Parser:
    pack: Parser = commands.add_parser(
        "pack",
        help="prepare a Hugging Face model for running in less memory than its weights",
        description="Write the weights of a Hugging Face model in the order in which they are streamed, into "
        "a pack, unless it exists already. Load it with "
        "trunkline.transformers.from_pretrained(MODEL), with pack_dir=OUT, or with volumes=[OUT, ...].",
    )
    pack.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder of safetensors files with a config.json, or the name of a model in the Hugging Face "
        "cache",
    )
    pack.add_argument(
        "out",
        metavar="OUT",
        nargs="*",
        help="a directory; the pack is striped over several (default: the cache directory, TRUNKLINE_CACHE)",
    )
    others = pack.add_mutually_exclusive_group()
    others.add_argument("--list", action="store_true", help="list the packs in the cache directory")
    others.add_argument(
        "--remove",
        metavar="PACK",
        help="remove a pack, and nothing else: its name in the list, its model, or its directory",
    )
    pack.set_defaults(run=_pack_command)
    return pack


def _add_plan(commands: Any) -> Parser:
    plan: Parser = commands.add_parser(
        "plan",
        help="predict how many tokens per second a model generates with its weights streamed",
        description="Predict tokens per second by batch size, memory and number of disks. Needs only the "
        "config.json of the model, and --bandwidth if there is no large file to measure it with.",
    )
    plan.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with a config.json, or the name of a model in the Hugging Face cache",
    )
    plan.add_argument(
        "--batch-size",
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="rows generated at once (default: 1)",
    )
    plan.add_argument(
        "--memory-budget",
        "--memory",
        metavar="SIZE",
        help='memory for weights, such as "8GB" (default: half of what is available)',
    )
    plan.add_argument(
        "--device", default="cpu", metavar="cpu|cuda", help="the device that computes (default: cpu)"
    )
    plan.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="main memory for weights of a model on a GPU (default: half of what is available)",
    )
    plan.add_argument(
        "--bus-bandwidth",
        metavar="RATE",
        help='bytes per second to the GPU, such as "50GB" (default: measured)',
    )
    plan.add_argument(
        "--bandwidth",
        metavar="RATE",
        help='bytes per second of the storage, such as "6.8GB" (default: measured on the model\'s files)',
    )
    plan.add_argument(
        "--volumes", nargs="+", metavar="DIR", help="directories on other disks, measured all at once"
    )
    plan.add_argument("--flops", type=float, metavar="N", help="operations per second (default: measured)")
    plan.add_argument(
        "--skew",
        type=float,
        default=0.0,
        metavar="S",
        help="Zipf exponent of a router's choices; 0 is uniform (default: 0)",
    )
    plan.add_argument(
        "--trace",
        metavar="FILE",
        help="what the model's router chose, as from_pretrained(..., routing_trace=FILE) recorded it; adds "
        "the hit rate over sizes of the memory for experts",
    )
    plan.add_argument(
        "--plot", metavar="FILE", help="draw the hit rates of --trace: as a chart (.svg), or a page (.html)"
    )
    plan.set_defaults(run=_plan)
    return plan


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unsupported(
            errno.EOPNOTSUPP, f"requires the package {error.name}: pip install torch transformers"
        ) from error


def _pack_command(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if not options.list and options.remove is None:
        if options.model is None:
            raise ValueError("MODEL is required; see trunkline pack --help")
        return _pack(options)
    about_a_model = {
        "MODEL": options.model,
        "--dtype": options.dtype,
        "--revision": options.revision,
        "--text-only": options.text_only,
        "--keep": options.keep != "dequantised",
    }
    for name, given in about_a_model.items():
        if given:
            raise ValueError(f"{'--list' if options.list else '--remove'} excludes {name}")
    return _list_packs() if options.list else _remove_pack(options.remove)


def _pack(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    _require_transformers()
    from trunkline.transformers import pack

    document = pack(
        options.model,
        options.out or None,
        dtype=options.dtype,
        revision=options.revision,
        text_only=options.text_only,
        keep=options.keep,
    )
    where = f"{_gb(document['bytes'])} in {', '.join(document['directories'])}"
    return document, f"{'packed' if document['made'] else 'exists already'}: {where}"


def _list_packs() -> tuple[dict[str, Any], str]:
    from trunkline._streaming.pack_cache import cached_packs, packs_directory

    packs = cached_packs()
    document: dict[str, Any] = {
        "command": "pack --list",
        "schema": 1,
        "directory": str(packs_directory()),
        "packs": [each.document() for each in packs],
        "bytes": sum(each.nbytes for each in packs),
    }
    if not packs:
        return document, f"no packs in {packs_directory()}"
    width = max(len(each.directory.name) for each in packs)
    lines = [
        f"{each.directory.name:<{width}}{_gb(each.nbytes):>12}  {each.dtype:<9} {each.model}"
        f"{f', {each.form}' if each.form else ''}{f'  ({each.problem})' if each.problem else ''}".rstrip()
        for each in packs
    ]
    return document, "\n".join([*lines, f"{_gb(document['bytes'])} in {packs_directory()}"])


def _remove_pack(name_or_path: str) -> tuple[dict[str, Any], str]:
    from trunkline._streaming.pack_cache import remove_pack

    removed = list(map(str, remove_pack(name_or_path)))
    document = {"command": "pack --remove", "schema": 1, "removed": removed}
    return document, f"removed the pack in {', '.join(removed)}"


def _plan(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    if options.plot is not None:
        if options.trace is None:
            raise ValueError("--plot requires --trace")
        check_plot(options.plot)
    _require_transformers()
    from trunkline.stream import plan

    document = plan(
        options.model,
        device=options.device,
        batch_size=options.batch_size,
        memory_budget=options.memory_budget,
        host_memory=options.host_memory,
        bus_bandwidth=options.bus_bandwidth,
        bandwidth=options.bandwidth,
        volumes=options.volumes,
        dtype=options.dtype,
        flops=options.flops,
        skew=options.skew,
        routing_trace=options.trace,
        revision=options.revision,
        text_only=options.text_only,
        keep=options.keep,
    )
    if options.plot is not None:
        write_plot(document, options.plot)
        print(f"plot: {options.plot}", file=sys.stderr)
    return document, table(document)


def table(document: dict[str, Any]) -> str:
    """Format the result of plan() as a table."""
    stays = _gb(document["least_resident_bytes"])
    on_gpu = document["device"] != "cpu"
    copying = f"copying {document['bus_seconds']:.3g} s, " if on_gpu else ""
    times = (
        f"reading {document['storage_seconds']:.3g} s, {copying}computing "
        f"{document['compute_seconds']:.3g} s per step"
    )
    lines = [
        document["model"],
        f"  weights {_gb(document['weight_bytes'])}, of which {stays} always stay in memory",
        f"  memory for weights {_gb(document['memory_budget'])} (at least {_gb(document['least_budget'])}): "
        f"{_gb(document['streamed_bytes'])} are read in each step",
        *([_gpu_line(document)] if on_gpu else []),
        *([_experts_line(document["experts"])] if "experts" in document else []),
        f"  {_pack_line(document['pack'])}",
        f"  storage {document['bandwidth'] / 1e9:.2f} GB/s",
        f"  batch of {document['batch_size']}: {_tokens(document)} tokens/s, bound by {document['bound']} "
        f"({times})",
        "",
    ]
    parts: list[tuple[str, str, Callable[[dict[str, Any]], str]]] = [
        ("batch size", "batch_sizes", lambda row: str(row["batch_size"])),
        ("memory", "memory", lambda row: _gb(row["memory_budget"])),
        ("main memory", "host", lambda row: _gb(row["host_memory"])),
        ("disks", "disks", lambda row: f"{row['disks']} x"),
    ]
    for title, key, shown in parts:
        if key not in document:
            continue
        lines.append(f"  {title:<12}{'tokens/s':>12}{'s/step':>12}  bound by")
        lines += [
            f"  {shown(row):<12}{_tokens(row):>12}{row['seconds_per_step']:>12.3g}  {row['bound']}"
            for row in document[key]
        ]
        lines.append("")
    lines += [*trace_lines(document["trace"]), ""] if "trace" in document else []
    return "\n".join(lines[:-1])


def _pack_line(pack: dict[str, Any]) -> str:
    where, nbytes = pack["directory"], _gb(pack["bytes"])
    if pack["exists"]:
        return f"pack {nbytes}, in {where}"
    if pack["needed"] is False:
        return "no pack is needed: the files are read in place"
    would = "would be made" if pack["needed"] else "would be made, if one is needed,"
    return f"pack about {nbytes}, {would} in {where} ({_gb(pack['free_bytes'])} free)"


def _gpu_line(document: dict[str, Any]) -> str:
    copied, rate = _gb(document["copied_bytes"]), document["bus_bandwidth"] / 1e9
    return (
        f"  on {document['device']}: {copied} are copied to it in each step, at {rate:.2f} GB/s; "
        f"main memory for the rest {_gb(document['host_memory'])}"
    )


def _experts_line(experts: dict[str, Any]) -> str:
    total, cached, used, read = (
        _gb(experts[name]) for name in ("total_bytes", "cached_bytes", "used_bytes", "read_bytes")
    )
    return (
        f"  experts {total}: of the {used} that each step uses, it reads {read} (hit rate "
        f"{experts['hit_rate']:.0%} with {cached} of memory)"
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= _SHOWN_IN_GB else size(nbytes)


def _tokens(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_second']:.3g}"
