"""Figures of maps, values and measures: functions from values to a `plotly` figure.

Maps are arrays, tensors or the result of a capture; tables are those of a run or a study. No figure
needs torch. `of_run` lives in `studies`, and this file only names it.

Example:
    >>> import numpy as np
    >>> from nope_probe import figures
    >>> figures.score_maps(np.zeros((2, 5, 5))).layout.yaxis.title.text
    'query position'
"""

from nope_probe import lazy_names

# Plotly takes a while, and tables do not need it.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
