"""Small language models with random weights, in folders as transformers saves them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", minversion="5.0")
import torch  # noqa: E402

from trunkline.transformers._packing import default_location  # noqa: E402
from trunkline.transformers.hub import find_model  # noqa: E402
from trunkline.transformers.stored_model import StoredModel, read_stored_model  # noqa: E402

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON),
    "llama, tied": lambda: transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_COMMON, head_dim=16, sliding_window=8),
    "phi3": lambda: transformers.Phi3Config(**_COMMON, pad_token_id=0),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=4, n_head=4, n_positions=64),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=97,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=64,
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "mixtral": lambda: transformers.MixtralConfig(**_COMMON, num_local_experts=4),
}


def make_folder(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Path:
    """Save a model of random weights, in shards."""
    return save_model(ARCHITECTURES[kind](), folder, dtype, seed)


def save_model(config: Any, folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """The same for another configuration."""
    torch.manual_seed(seed)
    config.dtype = dtype
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder, max_shard_size="150KB")
    return folder


def stock(folder: Path, **options: Any) -> Any:
    """Load the model as transformers does."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def prompt(rows: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """Make inputs of several rows, the first of them padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def stored_model_of(folder: Path, dtype: torch.dtype | None = None) -> StoredModel:
    """Read the folder as from_pretrained does."""
    return read_stored_model(find_model(folder), dtype, None)


def pack_directory(folder: Path, dtype: torch.dtype | None = None) -> Path:
    """Return where the pack of a folder is, or would be, by default."""
    [directory] = default_location(stored_model_of(folder, dtype)).directories
    return directory


def make_hub_model(
    cache: Path, name: str, commit: str, refs: Sequence[str] = ("main",), **options: Any
) -> Path:
    """Make a model in the layout of the Hugging Face cache, as a download does; return its snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    made = make_folder(repository / "made", **options)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for path in made.iterdir():
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        path.replace(blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    made.rmdir()
    for ref in refs:
        path = repository / "refs" / ref
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)
    return snapshot


def shift(path: Path, nbytes: int) -> None:
    """Let the data of a safetensors file begin `nbytes` behind a multiple of 64."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    head = data[8:end].rstrip(b" ")
    head += b" " * ((nbytes - 8 - len(head)) % 64)
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[end:])
