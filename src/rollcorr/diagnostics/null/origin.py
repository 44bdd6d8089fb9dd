"""Where log-probs come from, as a log records it: engines, versions, models, sampling settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from rollcorr.rollout_log import RolloutBatch

MOST_KINDS = 16
"""Different values of one kind that are kept; a log with more has no single origin."""
COLUMNS = {"engine": "engine", "engine_version": "engine_version", "model": "model"}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The different values that a log records, sorted; empty where it records none.

    Attributes:
        engine: engines that sampled.
        engine_version: their versions.
        model: models that sampled.
        sampling: sampling settings, each as JSON with sorted keys.
    """

    engine: tuple[str, ...] = ()
    engine_version: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()

    @classmethod
    def of(cls, batch: RolloutBatch) -> Origin:
        """What a batch records."""
        found = {name: _distinct(batch, name) for name in COLUMNS}
        settings: set[str] = set()
        if batch.has("sampling"):
            settings = {settings_text(row) for row in batch.objects("sampling") if row}
        return cls(**{name: _few(values) for name, values in found.items()}, sampling=_few(settings))

    def merge(self, other: Origin) -> Origin:
        """What both record together."""
        return Origin(**{f.name: _few({*getattr(self, f.name), *getattr(other, f.name)}) for f in fields(Origin)})


def settings_text(settings: Mapping[str, object]) -> str:
    """Sampling settings as one text, whatever the order of their names; what is not set is left out."""
    return json.dumps({name: value for name, value in sorted(settings.items()) if value is not None})


def _distinct(batch: RolloutBatch, column: str) -> set[str]:
    if not batch.has(column):
        return set()
    return {value for value in batch.records.column(column).unique().to_pylist() if value is not None}


def _few(values: set[str]) -> tuple[str, ...]:
    return tuple(sorted(values)[:MOST_KINDS])
