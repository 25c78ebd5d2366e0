"""Names of components, terms and measures."""

from nope_probe.analyses.pattern import Measures
from nope_probe.components import COMPONENTS, INK, TABLE, phrase, words
from nope_probe.figures.words import MEASURES


def test_every_measure_of_the_analysis_has_a_label_and_a_caption() -> None:
    assert list(MEASURES) == list(Measures.__dataclass_fields__)
    assert len({each.title for each in MEASURES.values()}) == len(MEASURES)
    assert all(each.caption.endswith(".") for each in MEASURES.values())


def test_a_title_is_label_and_unit() -> None:
    assert MEASURES["amplitude"].title == "amplitude, nats"
    assert MEASURES["relative_r2"].title == "relative share"


def test_every_component_has_words_a_colour_and_a_marker() -> None:
    assert set(COMPONENTS) <= set(TABLE)
    assert all(TABLE[name].colour != INK for name in COMPONENTS)


def test_sentences_and_unions_have_names_of_their_own() -> None:
    assert [words(name) for name in ("mask", "mask+qk", "w_x")] == [
        "causal mask",
        "mask + QK",
        "w_x",
    ]
    assert phrase("mlp") == "the MLPs"
    assert phrase("w_q") == "W_Q"
    assert phrase("mask+mlp") == "mask + MLP"
