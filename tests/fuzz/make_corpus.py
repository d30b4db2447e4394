"""Writes tests/fuzz/corpus, the seeds of the fuzz targets: a valid input or two of each, and near misses.

    .venv/bin/python tests/fuzz/make_corpus.py

Run it after a format or a target has changed, and commit what it writes. Needs trunkline for its CRC-32C.
"""

import json
import shutil
from pathlib import Path

from trunkline._core import crc32c

CORPUS = Path(__file__).resolve().parent / "corpus"
ID = "0123456789abcdef"
TENSOR = {"name": "w", "dtype": "F32", "shape": [2, 3], "pieces": [[0, 8, 16], [0, 100, 8]]}
MANIFEST = {
    "step": 12,
    "commit": 4,
    "time": "2026-01-31T23:59:59Z",
    "chunk_bytes": 4096,
    "world_size": 2,
    "volumes": [".", f"/v/run-{ID}"],
    "shards": [
        {"volume": 0, "file": "a.safetensors", "bytes": 5000, "crc32c": "0123456789abcdef"},
        {"volume": 1, "file": "b", "bytes": 0, "crc32c": ""},
    ],
    "tensors": [TENSOR],
    "state": {"tensor": "w", "n": [1, -2.5e300, None, "\u00e9"]},
}


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def checksum(text: bytes) -> str:
    return f"{crc32c(text):08x}"


def framed_manifest(text: bytes, version: int = 1) -> bytes:
    return f"trunkline checkpoint {version} crc32c={checksum(text)} bytes={len(text)}\n".encode() + text


def store_descriptor(volumes: list[str], former: list[str], first_commit: int = 1) -> bytes:
    document = {"format": "trunkline checkpoints", "version": 1 if first_commit == 1 else 2, "id": ID}
    document |= {"volumes": volumes, "former_volumes": former}
    if first_commit > 1:
        document["first_commit"] = first_commit
    text = json.dumps(document, indent=1)
    return json.dumps(document | {"crc32c": checksum(text.encode())}, indent=1).encode() + b"\n"


def tier_record(tiers: list[dict[str, str]]) -> bytes:
    document = {"format": "trunkline tiers", "version": 2, "id": ID, "identity": 5, "tiers": tiers}
    text = json.dumps(document, indent=1)
    return json.dumps(document | {"crc32c": checksum(text.encode())}, indent=1).encode() + b"\n"


def safetensors(header: dict[str, object], data_bytes: int) -> bytes:
    """As the target wants it: the size of the data in two bytes, then the header."""
    return data_bytes.to_bytes(2, "little") + compact(header)


def safetensors_checksums(chunks: list[bytes], chunk_bytes: int) -> bytes:
    """As the target wants it: the size of the data in two bytes, then the entry for the target's head."""
    before, after = b'12345678{"__metadata__":{"trunkline.crc32c":"', b'"}}        '
    head_bytes = len(before) + 33 + 8 * (1 + len(chunks)) + len(after)
    fixed = f"{chunk_bytes:013d} {head_bytes:09d} "
    fixed += checksum(fixed.encode()) + " "
    of_chunks = "".join(map(checksum, chunks))
    blank = before + fixed.encode() + b"0" * (8 * (1 + len(chunks))) + after
    entry = fixed + checksum(blank) + of_chunks
    return sum(map(len, chunks)).to_bytes(2, "little") + entry.encode()


def home(body: bytes, version: int = 2) -> bytes:
    return f"trunkline home {version} crc32c={checksum(body)}\n".encode() + body


def record(data: bytes, length: int | None = None) -> bytes:
    """A record of a TFRecord file, whose checksums the target fills in."""
    return (len(data) if length is None else length).to_bytes(8, "little") + bytes(4) + data + bytes(4)


def archive(*members: tuple[bytes, bytes, bytes]) -> bytes:
    """As the target wants it: type, name and data of each member."""
    blocks = b"!"
    for kind, name, data in members:
        blocks += b"h" + kind + name + b"\n%o\n" % len(data)
        if data:
            blocks += b"d" + bytes([len(data)]) + data
    return blocks + b"z"


MOUNTINFO = (
    b"36 35 98:0 /root /mnt/a\\040b rw,noatime shared:1 master:2 - ext4 /dev/root rw,errors=continue\n"
    b"21 1 0:20 / / rw - overlay overlay rw,lowerdir=/x\n"
    b"37 36 259:1 / /mnt/a\\040b/c rw - xfs /dev/nvme0n1 rw\n"
)
FIO = {
    "jobs": [
        {
            "jobname": "a",
            "error": 0,
            "usr_cpu": 1.5,
            "sys_cpu": 2.5,
            "job_runtime": 1000,
            "read": {
                "io_bytes": 1048576,
                "runtime": 1000,
                "total_ios": 16,
                "clat_ns": {"mean": 1e6, "percentile": {"50.000000": 900000, "99.000000": 2000000}},
            },
        }
    ]
}
STRIPE = {"format": "trunkline-stripe", "version": 1, "id": ID * 2, "member": 0, "members": 2}
TUNING = {
    "machine": ID,
    "time": "2026-01-31T23:59:59Z",
    "paths": ["/data"],
    "storages": [{"filesystem": "ext4", "device": "/dev/nvme0n1p2", "id": ID}],
    "measured": [
        {"pattern": pattern, "default_bytes_per_second": 10**9, "tuned_bytes_per_second": 2 * 10**9}
        for pattern in ("sequential read", "sequential write", "random read", "random write")
    ],
    "settings": {"backend": "libaio", "lanes": 2, "queue_depth": 8, "block_bytes": 65536, "direct": False},
}
TUNINGS = {"format": "trunkline-tuning", "version": 1, "tunings": [TUNING, TUNING | {"settings": {}}]}
SEEDS: dict[str, dict[str, bytes]] = {
    "checkpoint_manifest": {
        "json": compact(MANIFEST),
        "framed": framed_manifest(compact(MANIFEST)),
        "features": framed_manifest(compact(MANIFEST | {"features": ["views"]}), 2),
        "features-json": compact(MANIFEST | {"features": ["views"]}),
        "metrics-json": compact(
            MANIFEST | {"features": ["metrics"], "metrics": {"loss": 0.25, "none": "NaN", "low": "-Infinity"}}
        ),
        "incremental-json": compact(
            MANIFEST
            | {
                "features": ["incremental"],
                "unit_bytes": 4096,
                "shards": [MANIFEST["shards"][0] | {"commit": 3}, *MANIFEST["shards"][1:]],
                "tensors": [TENSOR | {"digests": [[0, "0123456789abcdef" * 2]]}],
            }
        ),
        "newer": b"trunkline checkpoint 3 crc32c=00000000 bytes=2\n{}",
        "piece-outside": compact(MANIFEST | {"tensors": [TENSOR | {"pieces": [[0, 4990, 24]]}]}),
    },
    "safetensors": {
        "two": safetensors(
            {
                "__metadata__": {"format": "pt"},
                "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
                "b": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [12, 13]},
            },
            13,
        ),
        "empty": safetensors({}, 0),
        "overlap": safetensors(
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            12,
        ),
    },
    "safetensors_checksums": {
        "two": safetensors_checksums([b"abcd", b"ef"], 4),
        "none": safetensors_checksums([], 1 << 20),
        "too-few": safetensors_checksums([b"abcdefgh"], 4),
    },
    "stripe_descriptor": {
        "valid": compact(STRIPE | {"stripe_bytes": 1 << 20}),
        "odd-stripe": compact(STRIPE | {"stripe_bytes": 4097}),
    },
    "store_descriptor": {
        "valid": store_descriptor([f"/v/run-{ID}"], []),
        "after-aside": store_descriptor([f"/v/run-{ID}"], [], 8),
        "newer": compact({"format": "trunkline checkpoints", "version": 3}),
        "paths": f"nvme0/run-{ID}\nnvme1/run-{ID}\n".encode(),
    },
    "tier_record": {
        "valid": tier_record([{"directory": "/shared/run", "id": ID}, {"directory": "/far/run", "id": ""}]),
        "none": compact({"format": "trunkline tiers", "version": 1, "id": ID, "tiers": []}),
        "newer": compact({"format": "trunkline tiers", "version": 2}),
    },
    "volume_home": {
        "valid": home(b"2049 131073 1790000000123456789 /data/run\n"),
        "first": home(b"2049 131073 /data/run\n", 1),
        "body": b"2049 131073 /data/a b\nc\n",
        "newer": b"trunkline home 3 crc32c=00000000\n",
    },
    "strict_json": {
        "object": b'{"state": {"a": [1, -2.5e3, true, null, "x\\n"]}, "b\\u0061": {}, "": ""}',
        "twice": b'{"a":1,"\\u0061":2}',
        "escaped": b'{"a\\n":1,"a\\\\n":2}',
    },
    "proc_files": {
        "mountinfo": MOUNTINFO,
        "cgroup": b"12:cpu,memory:/user.slice/a\n0::/user.slice/user-0.slice\n",
        "status": b"CapEff:\t000001ffffffffff\nSeccomp:\t2\nMemTotal:  24000 kB\n",
        "setting": b"always [madvise] never",
        "limit": b"9223372036854771712\n",
    },
    "units": {"gib": b"1.5 GiB", "bytes": b"4096", "most": b"18446744073709551615", "mode": b"r+b"},
    "checkpoint_names": {
        "step": b"step-00000012",
        "manifest": b"manifest-0000000004",
        "shard": f"shard-00000-of-00002-{ID}.safetensors".encode(),
        "aside": b"aside-20260131T235959Z-2",
        "temporary": f".trunkline-{ID}.tmp".encode(),
    },
    "tfrecord_scan": {
        "two": b"!" + record(b"abc") + record(b""),
        "truncated": b"!" + record(b"abc") + record(b"abc", 2**63),
        "gzip": b"\x1f\x8b" + bytes(20),
    },
    "tar_scan": {
        "samples": archive((b"0", b"a.jpg", b"12"), (b"0", b"a.cls", b""), (b"0", b"d/b.seg.png", b"3")),
        "others": archive((b"5", b"d/", b""), (b"2", b"a.x", b""), (b"0", b"__m__/a.jpg", b"1")),
        "long": archive((b"L", b"././@LongLink", b"long.jpg\0"), (b"0", b"lo", b"1"), (b"K", b"", b"x")),
        "pax": archive(
            (b"x", b"", b"13 path=b.c\n10 size=3\n"), (b"0", b"a", b"123"), (b"g", b"", b"9 a=b\n")
        ),
        "twice": archive((b"0", b"a.jpg", b"1"), (b"0", b"b.jpg", b""), (b"0", b"a.JPG", b"")),
    },
    "tuning_file": {
        "valid": compact(TUNINGS),
        "newer": compact(TUNINGS | {"version": 2}),
        "no-lanes": compact(TUNINGS | {"tunings": [TUNING | {"settings": {"lanes": 0}}]}),
    },
    "bench_options": {"fio": compact(FIO), "block": b"64KiB", "device": b"cuda:1", "peers": b"fio"},
}

if __name__ == "__main__":
    shutil.rmtree(CORPUS, ignore_errors=True)
    for target, seeds in SEEDS.items():
        for name, contents in seeds.items():
            path = CORPUS / target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
