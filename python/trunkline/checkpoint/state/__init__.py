"""States: nestings of containers, values and tensors."""
