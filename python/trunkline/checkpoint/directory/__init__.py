"""A directory of checkpoints, one a step."""
