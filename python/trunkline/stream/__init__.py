"""Weights larger than memory: what a model that streams them does.

model = trunkline.transformers.from_pretrained("path/of/model", memory_budget="8GB")
model.generate(...)
trunkline.stream.stats(model)
"""

from trunkline.stream._streaming import stats

__all__ = ["stats"]
