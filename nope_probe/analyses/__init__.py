"""Analyses of captured maps: pure functions on tensors."""

if __name__ != "nope_probe.analyses":
    raise ImportError(f"import nope_probe.analyses, not {__name__}: a second copy would be loaded")
