"""Which heads attend differently in another model: tests and the sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from nope_probe.analyses.head_changes import FEW_FOLDS, HeadChange, head_changes
from nope_probe.figures.words import listed, reader_of
from nope_probe.studies.compare.members import Member, share_sequences
from nope_probe.studies.tables import interval_columns

NAMED = 3  # heads in the sentence
# Settings that choose the tokens and their folds.
OF_TOKENS = (
    *("data", "n_seqs", "seq_len", "folds", "seed"),
    *("windows", "pack", "bos", "shuffle", "beyond_context"),
)


def changes_table(members: Sequence[Member]) -> pd.DataFrame:
    """Return the changes of every head from the first run to each other run; empty without heads.

    Rows are by run, layer, head and quantity: change (nats) with its bounds, p_holm and changed.
    """
    base, *others = members
    if not all(member.attention for member in members):
        return pd.DataFrame()
    return pd.DataFrame(
        {"run": other.label, **change_columns(change)}
        for other in others
        for change in head_changes(
            base.attention, other.attention, paired=share_sequences([base, other])
        )
    )


def change_columns(change: HeadChange) -> dict[str, object]:
    """Return a change as columns of a table."""
    return {
        **{"layer": change.layer, "head": change.head, "quantity": change.quantity},
        **interval_columns(change=change.change),
        **{"p_holm": change.p_holm, "changed": change.changed},
    }


def ordered_heads(changes: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each head of a run, those with the largest change first.

    Returns:
        layer, head, information, position and content (changes in nats), and changed.
    """
    wide = changes.pivot(index=["layer", "head"], columns="quantity", values="change")
    by_head = changes.groupby(["layer", "head"])
    heads = pd.DataFrame(
        {
            "information": wide["information"],
            "position": wide["first_position"] + wide["others_position"],
            "content": wide["first_content"] + wide["others_content"],
            "changed": by_head["changed"].any(),
            "order": by_head["change"].agg(lambda change: change.abs().max()),
        }
    )
    ordered = heads.sort_values(["changed", "order"], ascending=False, kind="stable")
    return ordered.drop(columns="order").reset_index()


def changed_heads_sentence(label: str, heads: pd.DataFrame) -> str:
    """Return which heads changed in a run, and from which layer on.

    Args:
        label: the run's.
        heads: the result of `ordered_heads`.
    """
    changed = heads[heads["changed"]]
    if changed.empty:
        return f"None of {len(heads)} heads of {label} changed beyond noise."
    first, *more = changed[:NAMED].to_dict("records")
    then = f", then {listed([reader_of(row) for row in more])}" if more else ""
    from_layer = f", the first in L{changed['layer'].min()}" if len(changed) > 1 else ""
    return (
        f"{len(changed)} of {len(heads)} heads of {label} changed{from_layer}: "
        f"{reader_of(first)} most (position {first['position']:+.2g} nats, content "
        f"{first['content']:+.2g}){then}."
    )


def method_of_heads(members: Sequence[Member]) -> str:
    """Return how changes were tested, and what would test them better."""
    base, *others = members
    unlike = [other for other in others if not share_sequences([base, other])]
    said = (
        "A head changed if its information or one of its four parts did, by t over folds and "
        "Holm's rule over all heads and parts. Heads behind a changed head change as well. "
    )
    if not unlike:
        said += "The runs had the same tokens: changes are paired."
    else:
        names = [_differing(base.manifest.settings, other.manifest.settings) for other in unlike]
        flags = sorted({flag for of_run in names for flag in of_run})
        cure = f"run both with the same {listed(flags)}" if flags else "their tokenizers differ"
        said += f"The runs had different tokens, so changes are unpaired and wider: {cure}."
    fewest = min(len(member.manifest.fold_sizes) for member in members)
    if fewest < FEW_FOLDS:
        said += f" With {fewest} folds hardly any head can be named: take --folds {FEW_FOLDS}."
    return said


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the flags about tokens that two runs were given different values of."""
    names = [name for name in OF_TOKENS if one.get(name) != other.get(name)]
    return [f"--{name.replace('_', '-')}" for name in names]
