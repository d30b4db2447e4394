"""Saving and loading what is trained: the parts behind trunkline.save, load, save_async and Checkpointer."""
