"""Removing from a model: what replaces a weight, what is written into a block."""
