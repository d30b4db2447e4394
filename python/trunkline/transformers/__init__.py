"""Hugging Face Transformers on Trunkline: models larger than memory, and background checkpoints.

    import trunkline as tl

    model = tl.transformers.from_pretrained("path/of/model", memory_budget="8GB")
    model.generate(...)  # stock transformers from here on

    trainer = tl.transformers.Trainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=trainer.checkpointer.latest() is not None)

Needs the package transformers, version 5; the Trainer needs accelerate as well.
"""

from trunkline.transformers._model import from_pretrained
from trunkline.transformers._packing import pack
from trunkline.transformers._resume import get_last_checkpoint
from trunkline.transformers._trainer import BackgroundCheckpoints, Trainer

__all__ = ["BackgroundCheckpoints", "Trainer", "from_pretrained", "get_last_checkpoint", "pack"]
