"""Packs: the weights of a model in one file. docs/formats/pack.md."""
