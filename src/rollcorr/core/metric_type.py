"""What the registry says of one metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollcorr.core.finalizers import Finalizer
from rollcorr.core.health_ranges import HealthyRange

MATHS = "Li (2025), rollout correction mathematics"
IS_GUIDE = "rollout importance sampling guide (2025-10)"
PRAXIS = "Fang & Khazi (2025), Mismatch Praxis"
OWN = "rollcorr"

# What is averaged over, by the symbols of docs/reference/notation.md: valid tokens, and sequences with one.
V, R = "tokens", "sequences"


@dataclass(frozen=True)
class Metric:
    """One metric of the registry.

    Attributes:
        name: bare name, without the prefix. For a criterion's metrics, with the criterion's name filled in.
        unit: nats, tokens, sequences, ratio, probability, share or 1.
        sample: what is averaged over: tokens, sequences, unit or batch.
        formula: the definition, in the symbols of docs/reference/notation.md.
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


Line = tuple[str, str, str, str, Finalizer, str]
"""A line of a table of metrics: name, unit, sample, formula, finalizer, source."""


def metric_table(ranges: Mapping[str, HealthyRange], *lines: Line, prefix: str = "") -> dict[str, Metric]:
    """The metrics of a table, by name.

    Args:
        ranges: healthy ranges, by the name on the line.
        lines: the table.
        prefix: goes before every name.
    """
    return {prefix + line[0]: Metric(prefix + line[0], *line[1:], healthy=ranges.get(line[0])) for line in lines}
