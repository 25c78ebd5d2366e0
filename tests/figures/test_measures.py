"""The declared measures, and the looks of components."""

from nope_probe.analyses.pattern import Measures
from nope_probe.figures.names import TABLE
from nope_probe.figures.words import MEASURES
from nope_probe.removal import COMPONENTS, INK


def test_every_measure_has_a_title_and_every_component_a_colour() -> None:
    assert list(MEASURES) == list(Measures.__dataclass_fields__)
    assert len({measure.title for measure in MEASURES.values()}) == len(MEASURES)
    assert all(TABLE[name].colour != INK for name in COMPONENTS)
