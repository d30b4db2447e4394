"""Copying the steps of a directory of checkpoints to other directories, in the background."""
