"""Origin of log-probs as recorded by a log: engines, versions, models, sampling settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from rollcorr.rollout_log import RolloutBatch

MOST_KINDS = 16
"""Largest number of stored values per field; a log with more has no single origin."""
COLUMNS = ("engine", "engine_version", "model")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Distinct values recorded by a log, sorted; each field defaults to empty, not recorded.

    Attributes:
        engine: engines that sampled.
        engine_version: versions of these engines.
        model: models that sampled.
        sampling: sampling settings, each as JSON with sorted keys.
    """

    engine: tuple[str, ...] = ()
    engine_version: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()

    @classmethod
    def of(cls, batch: RolloutBatch) -> Origin:
        """Return the origin that a batch records."""
        columns = {name: batch.records.column(name) for name in COLUMNS if batch.has(name)}
        found = {name: set(column.unique().to_pylist()) - {None} for name, column in columns.items()}
        settings: set[str] = set()
        if batch.has("sampling"):
            # Unset values are omitted.
            rows = (
                {name: x for name, x in sorted(row.items()) if x is not None}
                for row in batch.objects("sampling")
                if row
            )
            settings = set(map(json.dumps, rows))
        return cls(**{name: _limited(values) for name, values in found.items()}, sampling=_limited(settings))

    def merge(self, other: Origin) -> Origin:
        """Return the union of both origins."""
        return Origin(**{f.name: _limited({*getattr(self, f.name), *getattr(other, f.name)}) for f in fields(Origin)})


def _limited(values: set[str]) -> tuple[str, ...]:
    return tuple(sorted(values)[:MOST_KINDS])
