from nope_probe.studies import compare_run as compare_run
from nope_probe.studies.ablate_run import Ablate as Ablate
from nope_probe.studies.attention_run import Attention as Attention
from nope_probe.studies.behaviour_run import Behaviour as Behaviour
from nope_probe.studies.circuit_run import CaptureStages as CaptureStages
from nope_probe.studies.heads_run import Heads as Heads
from nope_probe.studies.trace_run import TracePosition as TracePosition

__all__: list[str]
