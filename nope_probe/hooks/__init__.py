"""Reading from and writing to a TransformerLens model, through its hook points only."""

if __name__ != "nope_probe.hooks":
    raise ImportError(f"import nope_probe.hooks, not {__name__}: a second copy would be loaded")
