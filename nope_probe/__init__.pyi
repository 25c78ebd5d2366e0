from collections.abc import Callable

from nope_probe import figures as figures
from nope_probe.analyses.attention import AttentionSplit as AttentionSplit
from nope_probe.analyses.attention import split_attention as split_attention
from nope_probe.analyses.attribution import LayerValues as LayerValues
from nope_probe.analyses.attribution import Values as Values
from nope_probe.analyses.attribution import attribute as attribute
from nope_probe.analyses.attribution import attribute_heads as attribute_heads
from nope_probe.analyses.jackknife import ByLayer as ByLayer
from nope_probe.analyses.pattern import Measures as Measures
from nope_probe.analyses.pattern import measure as measure
from nope_probe.analyses.pattern import measure_heads as measure_heads
from nope_probe.analyses.simulation import Simulation as Simulation
from nope_probe.analyses.simulation import simulate_scores as simulate_scores
from nope_probe.analyses.theory import theory_scores as theory_scores
from nope_probe.data.sequences import Sequences as Sequences
from nope_probe.data.sequences import gaussian as gaussian
from nope_probe.data.sequences import sequences as sequences
from nope_probe.errors import UserError as UserError
from nope_probe.figures.attention import TextView as TextView
from nope_probe.figures.attention import Why as Why
from nope_probe.hooks.ablation import ablated as ablated
from nope_probe.hooks.need import Needs as Needs
from nope_probe.hooks.need import capture_need as capture_need
from nope_probe.hooks.reading.attention import capture_attention as capture_attention
from nope_probe.hooks.reading.calibration import calibrate as calibrate
from nope_probe.hooks.reading.capture import capture_losses as capture_losses
from nope_probe.hooks.reading.capture import capture_scores as capture_scores
from nope_probe.hooks.reading.capture import capture_stages as capture_stages
from nope_probe.hooks.removing.settings import Ablation as Ablation
from nope_probe.hooks.removing.weights import Calibration as Calibration
from nope_probe.hooks.removing.weights import untrained as untrained
from nope_probe.maps.maps import AttentionMaps as AttentionMaps
from nope_probe.maps.maps import ScoreMaps as ScoreMaps
from nope_probe.maps.maps import StageMaps as StageMaps
from nope_probe.maps.rows import row_centred as row_centred
from nope_probe.models.info import LoadedModel as LoadedModel
from nope_probe.models.load import load as load
from nope_probe.models.parameter_free import build as build
from nope_probe.models.parameter_free import parameter_free as parameter_free
from nope_probe.run.folder import Run as Run
from nope_probe.run.folder import read_run as read_run
from nope_probe.stages import ParameterFreeSpec as ParameterFreeSpec
from nope_probe.studies.ablate_run import run_ablations as run_ablations
from nope_probe.studies.attention import text_view as text_view
from nope_probe.studies.attention_run import run_attention as run_attention
from nope_probe.studies.behaviour_run import run_behaviour as run_behaviour
from nope_probe.studies.circuit_run import run_circuit as run_circuit
from nope_probe.studies.compare_run import difference as difference
from nope_probe.studies.heads_run import run_heads as run_heads
from nope_probe.studies.readings import head_scores as head_scores
from nope_probe.studies.trace_run import run_trace as run_trace

__version__: str
__all__: list[str]

def lazy_names(
    package: str, path: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]: ...
