"""Removing from a model: replacements of weights, and the edits of a block."""
