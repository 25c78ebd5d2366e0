"""What each command asks and shows, without torch, and the studies, imported on first use."""

from nope_probe import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
