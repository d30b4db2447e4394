"""Errors for folders that from_pretrained cannot load, which say what the folder is and what to do."""

import errno
import json
from pathlib import Path
from typing import Any

from trunkline._errors import Format, Unsupported, exception_of
from trunkline._formats.checkpoint_names import DESCRIPTOR
from trunkline._paths import names_in

_GGUF = b"GGUF"
_GIT_LFS = b"version https://git-lfs"
_POINTER_BYTES = 1024  # git-lfs: a pointer is smaller
_OTHER_WEIGHTS = {".h5": "TensorFlow", ".msgpack": "Flax"}


def check_model_folder(folder: Path) -> None:
    """Raise an error that says what the path is unless it is a directory with a config.json.

    FileNotFoundError if it does not exist, NotADirectoryError for a file, Unsupported for other formats.
    """
    if not folder.exists():
        raise _missing(folder)
    if not folder.is_dir():
        raise _is_file(folder)
    if (folder / "config.json").is_file():
        return
    names = sorted(names_in(folder))
    if "adapter_config.json" in names:
        base = _field(folder / "adapter_config.json", "base_model_name_or_path")
        raise _unsupported(
            folder,
            "holds a PEFT adapter, not a model; load the base model"
            + (f" ({base})" if base else "")
            + ", then add the adapter with peft.PeftModel.from_pretrained(model, adapter_folder)",
        )
    if "model_index.json" in names:
        raise _unsupported(
            folder,
            "holds a diffusers pipeline; only causal language models of transformers can be streamed. "
            "Load it with diffusers",
        )
    if found := _first(names, ".gguf"):
        raise _gguf(folder / found)
    if "params.json" in names and _first(names, ".pth"):
        raise _unsupported(
            folder,
            "holds weights in Meta's original format; download the checkpoint in the format of transformers "
            "(a folder with config.json and .safetensors files)",
        )
    message = f"cannot load a model from {folder}: it has no config.json; {_advice(folder, names)}"
    raise exception_of("system", errno.ENOENT, message, str(folder))


def check_weights(folder: Path) -> None:
    """Raise an error that says what to do unless the folder, which has a config.json, has safetensors files.

    Unsupported for weights in another format, FileNotFoundError if there are none, Format for Git LFS
    pointers.
    """
    names = sorted(names_in(folder))
    for name in names:
        if name.endswith(".safetensors") and _is_git_lfs_pointer(folder / name):
            raise Format(
                None,
                f"{folder / name} is a Git LFS pointer, not the file itself; run `git lfs pull` in {folder}",
                str(folder / name),
            )
    if _first(names, ".safetensors") or _first(names, ".safetensors.index.json"):
        return
    if found := _first(names, ".gguf"):
        raise _gguf(folder / found)
    if _first(names, ".bin"):
        raise _unsupported(
            folder,
            "has its weights in .bin files, but only safetensors files are supported; convert them once: "
            f"transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER)",
        )
    for suffix, framework in _OTHER_WEIGHTS.items():
        if _first(names, suffix):
            raise _unsupported(
                folder,
                f"has {framework} weights ({suffix} files), but only safetensors files are supported; "
                "download the model's safetensors files",
            )
    raise exception_of(
        "system",
        errno.ENOENT,
        f"{folder} has a config.json but no weights (.safetensors files); download or copy the whole model",
        str(folder),
    )


def _missing(folder: Path) -> Exception:
    message = f"cannot load a model from {folder}: no such folder; check the path"
    return exception_of("system", errno.ENOENT, message, str(folder))


def _is_file(path: Path) -> Exception:
    try:
        with path.open("rb") as file:
            if file.read(len(_GGUF)) == _GGUF:
                return _gguf(path)
    except OSError as error:
        return error
    return exception_of(
        "system",
        errno.ENOTDIR,
        f"{path} is a file; pass the folder that contains config.json and the weights"
        + (f": {path.parent}" if (path.parent / "config.json").is_file() else ""),
        str(path),
    )


def _gguf(path: Path) -> Exception:
    return Unsupported(
        None,
        f"{path} is a GGUF file, which is not supported; use the model's safetensors files, or convert it "
        f"once: transformers.AutoModelForCausalLM.from_pretrained({str(path.parent)!r}, "
        f"gguf_file={path.name!r}).save_pretrained(NEW_FOLDER)",
        str(path),
    )


def _advice(folder: Path, names: list[str]) -> str:
    """Return what to do about a folder without a config.json."""
    if DESCRIPTOR in names:
        return "it is a directory of checkpoints: read it with trunkline.Checkpointer(path).load()"
    inner = sorted(path.parent for path in (*folder.glob("*/config.json"), *folder.glob("*/*/config.json")))
    if inner:
        return f"a folder in it has one: pass {inner[-1]}"
    if _first(names, ".safetensors"):
        return "it has weights: copy the model's config.json beside them"
    if any(name.startswith("tokenizer") for name in names):
        return "it holds a tokenizer and no model; pass the model's folder"
    return "pass a folder in the layout of save_pretrained(), with config.json and .safetensors files"


def _is_git_lfs_pointer(path: Path) -> bool:
    try:
        if path.stat().st_size > _POINTER_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(len(_GIT_LFS)) == _GIT_LFS
    except OSError:
        return False


def _first(names: list[str], suffix: str) -> str | None:
    return next((name for name in names if name.endswith(suffix)), None)


def _field(path: Path, name: str) -> str:
    """Return a field of a JSON file that is a str; "" if there is none."""
    try:
        document: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, str) else ""


def _unsupported(folder: Path, message: str) -> Exception:
    return Unsupported(None, f"{folder} {message}", str(folder))
