"""What the registry says of one metric."""

from __future__ import annotations

from dataclasses import dataclass

from rollcorr.core.finalizers import Finalizer
from rollcorr.core.health_ranges import HealthyRange

MATHS = "Li (2025), rollout correction mathematics"
IS_GUIDE = "rollout importance sampling guide (2025-10)"
PRAXIS = "Fang & Khazi (2025), Mismatch Praxis"
OWN = "rollcorr"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric of the registry.

    Attributes:
        name: bare name, without the prefix. For a criterion's metrics, with the criterion's name filled in.
        unit: nats, tokens, sequences, ratio, probability, share or 1.
        sample: what is averaged over: tokens, sequences, unit or batch.
        formula: the definition, in the symbols of docs/notation.md.
        finalizer: how it is computed from merged statistics.
        source: who defined it.
        healthy: the healthy range, where one is known.
    """

    name: str
    unit: str
    sample: str
    formula: str
    finalizer: Finalizer
    source: str
    healthy: HealthyRange | None = None
