"""The offset profiles of an attribution: of the scores, the pattern, and each source's term."""

from __future__ import annotations

import pandas as pd

from nope_probe.analyses.contrasts import contrast_map
from nope_probe.analyses.pattern import row_centred
from nope_probe.analyses.shapley import INTACT, source_terms
from nope_probe.experiments.ablation.conditions import Measured
from nope_probe.experiments.ablation.plan import Plan
from nope_probe.experiments.split_tables import offsets_table


def source_offsets_table(plan: Plan, measured: Measured, skip_keys: int) -> pd.DataFrame:
    """Return the table of offset profiles: layer, term, offset, and the mean with its bounds.

    The terms are `score`, `all` (the pattern) and those of `source_terms`, which add up to `all`.
    """
    contrasts = source_terms(plan.position)
    needed = {INTACT, *(condition for term in contrasts.values() for condition in term)}
    patterns = {each: row_centred(measured.maps[each].folds.double(), skip_keys) for each in needed}
    folds = {name: contrast_map(term, patterns) for name, term in contrasts.items()}
    intact = measured.maps[INTACT]
    terms = {"score": intact.folds, "all": patterns[INTACT], **folds}
    return offsets_table(terms, intact.counts, skip_keys)
