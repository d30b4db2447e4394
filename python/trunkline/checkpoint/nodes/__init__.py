"""Checkpoints on disks that one node each sees: which nodes there are, and which save is the latest."""
