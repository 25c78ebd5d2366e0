from nope_probe.figures.attention import head_values as head_values
from nope_probe.figures.maps import save as save
from nope_probe.figures.maps import score_maps as score_maps
from nope_probe.figures.maps import term_maps as term_maps
from nope_probe.figures.panels import RowMaps as RowMaps
from nope_probe.figures.stages import circuit as circuit
from nope_probe.figures.views import draw as draw
from nope_probe.figures.words import View as View
from nope_probe.studies.page import of_run as of_run

__all__: list[str]
