"""Tensors, their memory, and moving them; threads that survive signal handlers and the exit."""
