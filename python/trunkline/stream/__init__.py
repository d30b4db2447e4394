"""Models whose weights are larger than memory: predict their speed, and measure it.

trunkline.stream.plan("path/of/model", batch_size=32, memory_budget="8GB")
model = trunkline.transformers.from_pretrained("path/of/model", memory_budget="8GB")
model.generate(...)
trunkline.stream.stats(model)
"""

from trunkline._streaming.streaming import stats
from trunkline.stream._plan import plan

__all__ = ["plan", "stats"]
