"""Fast loading of models for vLLM: --load-format trunkline.

vLLM imports the entry point of this package and calls register(); that adds a load format, which does nothing
until it is chosen. docs/vllm.md describes it.
"""

from trunkline.vllm._plugin import register

__all__ = ["register"]
