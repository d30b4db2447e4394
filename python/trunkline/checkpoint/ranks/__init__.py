"""What the ranks of a process group tell each other."""
