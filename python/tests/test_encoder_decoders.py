"""Models with an encoder do what fully loaded ones do, bit for bit, while their decoders are streamed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support_models import transformers
from test_streaming import least, streamed

import trunkline as tl
from trunkline._streaming.offloaded import OffloadedWeight

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

_COMMON = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), 97),
    **dict.fromkeys(("d_model", "hidden_size"), 64),
    "encoder_layers": 2,
    **dict.fromkeys(("decoder_layers", "num_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("max_position_embeddings", "max_source_positions", "max_target_positions"), 64),
    "d_kv": 16,
    "num_mel_bins": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
KINDS = ("bart", "blenderbot", "m2m_100", "mbart", "mt5", "pegasus", "t5", "umt5", "whisper")


def _class_of(kind: str) -> Any:
    return transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else transformers.AutoModelForSeq2SeqLM


def save(kind: str, folder: Path, **changes: Any) -> Path:
    config_class = transformers.CONFIG_MAPPING[kind]
    default = config_class()
    config = config_class(
        **{name: value for name, value in _COMMON.items() if hasattr(default, name)} | changes
    )
    torch.manual_seed(0)
    config.dtype = torch.bfloat16
    model = _class_of(kind).from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="150KB")
    return folder


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "whisper":
        return {"input_features": torch.randn(2, 16, 128, generator=generator).to(torch.bfloat16)}
    ids = torch.randint(3, 90, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_equal_to_the_fully_loaded_model(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path)
    expected = _class_of(kind).from_pretrained(folder).eval()
    model = streamed(folder)
    assert type(model) is type(expected)
    inputs = inputs_of(kind)
    start = torch.tensor([[1, 5, 6], [1, 7, 8]])
    with torch.no_grad():
        assert torch.equal(
            model(**inputs, decoder_input_ids=start).logits,
            expected(**inputs, decoder_input_ids=start).logits,
        )
    options: dict[str, Any] = {"max_new_tokens": 6, "decoder_start_token_id": 1, "do_sample": False}
    for beams in (1, 3):
        made = [each.generate(**inputs, num_beams=beams, **options) for each in (model, expected)]
        assert torch.equal(*made)
    away = [name for name, each in model.named_parameters() if isinstance(each, OffloadedWeight)]
    assert away
    assert all(".decoder." in f".{name}" for name in away)


def test_an_encoder_that_runs_alone_is_equal(tmp_path: Path) -> None:
    folder = save("t5", tmp_path)
    expected = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    model, inputs = streamed(folder), inputs_of("t5")
    with torch.no_grad():
        found = [each.get_encoder()(**inputs).last_hidden_state for each in (model, expected)]
    assert torch.equal(*found)


def test_a_plan_knows_that_generated_tokens_do_not_use_the_encoder(tmp_path: Path) -> None:
    folder = save("bart", tmp_path)
    planned = tl.stream.plan(folder, memory_budget=least(folder), bandwidth=1e9, flops=1e12)
    assert planned["least_budget"] == least(folder)
    stock = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    used = sum(each.nbytes for name, each in stock.named_parameters() if ".encoder." not in name)
    assert planned["compute_seconds"] == pytest.approx(2 * used / 2 / 1e12, rel=0.01)


def test_decoders_of_such_models_alone(tmp_path: Path) -> None:
    folder = save("whisper", tmp_path)
    model = streamed(folder, text_only=True)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model) is type(expected) is transformers.WhisperForCausalLM
    ids = torch.tensor([[1, 5, 6]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
