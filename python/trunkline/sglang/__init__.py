"""SGLang on Trunkline: models larger than memory, served by a stock SGLang.

    TRUNKLINE_SGLANG='{"memory_budget": "20GB"}' python -m sglang.launch_server --model-path FOLDER ...

The weights of the decoder layers are then read in each pass, ahead of their use, as they are in models of
trunkline.transformers.from_pretrained. SGLang finds this package through the entry point
`sglang.srt.plugins`; without the variable TRUNKLINE_SGLANG it changes nothing.
"""

from trunkline.sglang._plugin import register

__all__ = ["register"]
