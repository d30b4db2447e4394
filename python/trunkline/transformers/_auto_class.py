"""Which of transformers' auto classes loads a model: as a language model, with images, or with an encoder."""

from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from trunkline._errors import Unsupported

# By preference, for a config that does not name the class of its model.
_DECODERS = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
_WITH_ENCODER = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText)


def choose(config: Any, path: Path, text_only: bool) -> Any:
    """Return the auto class that loads the model of a config.

    It is the one whose model is the class that the config names in `architectures`. `text_only`: the causal
    language model, without what reads images or sound. Raises Unsupported for models that do not generate
    text, and for `text_only` of one that transformers has no causal language model of.
    """
    kind = getattr(config, "model_type", type(config).__name__)
    if text_only:
        if type(config) in AutoModelForCausalLM._model_mapping:
            return AutoModelForCausalLM
        raise Unsupported(
            None,
            f"text_only: {path}: transformers cannot load {kind} as a causal language model "
            "(AutoModelForCausalLM); omit text_only",
            str(path),
        )
    encoder = getattr(config, "is_encoder_decoder", False)
    preferred = (*_WITH_ENCODER, *_DECODERS) if encoder else (*_DECODERS, *_WITH_ENCODER)
    possible = [each for each in preferred if type(config) in each._model_mapping]
    if not possible:
        raise Unsupported(
            None,
            f"{path}: {kind} is not a model that generates text, but only language models (such as Llama, "
            "Qwen3-VL and T5) can be streamed; load it with transformers",
            str(path),
        )
    saved = getattr(config, "architectures", None) or []
    return next((each for each in possible if _names_of(each, config) & {*saved}), possible[0])


def _names_of(auto_class: Any, config: Any) -> set[str]:
    """Return the names of the classes that an auto class loads for a config."""
    found = auto_class._model_mapping[type(config)]
    return {each.__name__ for each in (found if isinstance(found, tuple | list) else (found,))}
