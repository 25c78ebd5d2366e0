"""The layer of each kind of model, and hooks on it."""
