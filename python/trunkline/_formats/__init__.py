"""File formats of others, and names of files in checkpoints."""
