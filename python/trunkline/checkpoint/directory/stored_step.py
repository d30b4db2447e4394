"""A step of a directory of checkpoints as a state whose tensors are still in its shards."""

import errno
from collections.abc import Iterator, Mapping
from typing import Any

from trunkline._core import CheckpointStore, Engine, GcPause
from trunkline._errors import Format, exception_of
from trunkline._export.lazy_state import LazyState, no_key, placeholder_tensors
from trunkline._export.placeholders import Placeholders
from trunkline._export.stored import Piece, Pieces, SourceFile
from trunkline._export.window import Part, WindowReader
from trunkline._tensor_io.memory import empty_bytes
from trunkline._tensor_io.tensors import dtype_named
from trunkline._torch_or_numpy import torch
from trunkline.checkpoint.state.leaves import BadLeaf, Json, decode_key
from trunkline.checkpoint.state.tree import restore

_DICTS = ("dict", "OrderedDict", "Counter")


def open_step(
    store: CheckpointStore, step: int | None, key: str | None, *, engine: Engine | None = None
) -> LazyState:
    """Return the state of a step (None: the one that was committed last), or the part of it below `key`.

    Reads the manifest, and those tensors that are needed to build the state: arrays of numpy, and views of
    memory in unusual layouts. Raises FileNotFoundError if there is no such checkpoint, ValueError for a key
    that it does not have, Corrupt, Format.
    """
    chosen = store.latest() if step is None else step
    if chosen is None:
        raise exception_of(
            "system", errno.ENOENT, f"{store.directory} has no checkpoint yet", store.directory
        )
    manifest = store.read_manifest(chosen)
    source = f"step {chosen} of {store.directory}"
    with GcPause():
        skeleton = _below(manifest["state"], key, source)
        stored = _stored_of(store, manifest)
        held = _needs_contents(skeleton, stored)
        state = _build(skeleton, manifest, stored, held, source, engine)
        lost = _lost_placeholders(state)
        if lost:  # building the state has copied them: their contents are needed for that
            state = _build(skeleton, manifest, stored, held | lost, source, engine)
    state.step = chosen
    return state


def _stored_of(store: CheckpointStore, manifest: Mapping[str, Any]) -> dict[str, Pieces]:
    files = [
        SourceFile(path, shard["bytes"], manifest["chunk_bytes"], _sums(shard["crc32c"]))
        for path, shard in zip(store.shard_paths(dict(manifest)), manifest["shards"], strict=True)
    ]
    return {
        tensor["name"]: Pieces(
            [Piece(files[shard], begin, nbytes) for shard, begin, nbytes in tensor["pieces"]]
        )
        for tensor in manifest["tensors"]
    }


def _sums(digits: str) -> list[int]:
    return [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]


def _below(skeleton: Json, key: str | None, source: str) -> Json:
    """Return the part of a skeleton that a key names: one key, or several with dots between them."""
    rest = key or ""
    while rest:
        tag = next((tag for tag in _DICTS if type(skeleton) is dict and tag in skeleton), None)
        nodes = skeleton[tag] if tag else []
        try:
            keys = [each if type(each) is str else decode_key(each) for each in nodes[::2]]
        except BadLeaf as error:
            raise Format(None, f"{source}: {error}") from None
        fitting = [
            each for each in keys if type(each) is str and (rest == each or rest.startswith(f"{each}."))
        ]
        if not fitting:
            raise no_key(key or "", keys, source)
        head = max(fitting, key=len)
        skeleton = nodes[2 * keys.index(head) + 1]
        rest = rest[len(head) + 1 :]
    return skeleton


def _nodes(skeleton: Json) -> Iterator[dict[str, Any]]:
    """Yield the nodes of tensors and arrays."""
    pending = [skeleton]
    while pending:
        node = pending.pop()
        if type(node) is list:
            pending.extend(node)
        elif type(node) is dict:
            if type(node.get("tensor")) is str or type(node.get("ndarray")) is str:
                yield node
            else:
                pending.extend(node.values())


def _needs_contents(skeleton: Json, stored: Mapping[str, Pieces]) -> set[str]:
    """Return the tensors that are copied, or read, where the state is built."""
    held: set[str] = set()
    for node in _nodes(skeleton):
        name = node.get("tensor") or node["ndarray"]
        is_view = "storage" in node and name in stored and stored[name].nbytes == node["storage"]
        if "ndarray" in node or ("stride" in node and not is_view):
            held.add(name)
    return held


def _build(
    skeleton: Json,
    manifest: Mapping[str, Any],
    stored: Mapping[str, Pieces],
    held: set[str],
    source: str,
    engine: Engine | None,
) -> LazyState:
    named = {node.get("tensor") or node["ndarray"] for node in _nodes(skeleton)}
    entries = [each for each in manifest["tensors"] if each["name"] in named]
    lazy = [each for each in entries if each["name"] not in held]
    placeholders = Placeholders([stored[each["name"]].nbytes for each in lazy])
    described = [_described(each) for each in lazy]
    names = [each["name"] for each in lazy]
    tensors = dict(zip(names, placeholder_tensors(placeholders, described), strict=True))
    tensors.update(_read([each for each in entries if each["name"] in held], stored, engine))
    value = restore(skeleton, tensors, manifest["state"])
    return LazyState(value, placeholders, names, [stored[name] for name in names], source)


def _described(entry: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = dtype_named(entry["dtype"]), tuple(entry["shape"])
    if dtype is torch.float4_e2m1fn_x2:  # the format counts each of a pair
        shape = (*shape[:-1], shape[-1] // 2)
    return dtype, shape


def _read(
    entries: list[Mapping[str, Any]], stored: Mapping[str, Pieces], engine: Engine | None
) -> dict[str, torch.Tensor]:
    """Return these tensors, read and verified."""
    made: dict[str, torch.Tensor] = {}
    parts: list[Part] = []
    for entry in entries:
        pieces = stored[entry["name"]]
        memory = empty_bytes(pieces.nbytes)
        parts.append(Part(pieces, 0, pieces.nbytes, memory.data_ptr(), entry["name"]))
        dtype, shape = _described(entry)
        made[entry["name"]] = memory.view(dtype).reshape(shape)
    with WindowReader(engine) as reader:
        reader.read([part for part in parts if part.end > 0], list(made.values()))
    return made


def _lost_placeholders(state: LazyState) -> set[str]:
    """Return the names of placeholders that no tensor of the state is in."""
    found: set[int] = set()
    pending: list[Any] = [state.value]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend(value.values())
            pending.append(vars(value).get("_metadata") if hasattr(value, "__dict__") else None)
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, torch.Tensor) and value.nbytes:
            at = state.placeholders.find(value.data_ptr())
            if at is not None:
                found.add(at[0])
    return {
        name
        for index, (name, stored) in enumerate(zip(state.names, state.stored, strict=True))
        if index not in found and stored.nbytes > 0
    }
