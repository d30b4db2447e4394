"""Writes files of tensors whose bytes are in other files, through a few windows of memory."""
