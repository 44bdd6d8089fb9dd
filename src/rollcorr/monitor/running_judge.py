"""A run judged step by step: the health check over the recent steps, at a cost that does not grow with the run.

The window is that of the health check: the last ten steps that measured a token. What it finds becomes an alarm once,
and not again while it lasts. It has passed when it was absent for a whole window, so what hovers around a limit does
not sound at every crossing. `rollcorr report` judges the same metrics with the whole run in view.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.finding import Finding
from rollcorr.diagnostics.health.evidence import RECENT_STEPS, Evidence, bare_metrics, recent_medians
from rollcorr.diagnostics.health.health_check import judge
from rollcorr.diagnostics.numbers import label

_Key = tuple[str, str | None]


class Changes(NamedTuple):
    """What a step changed: the alarms that began with it, and those that have passed."""

    began: tuple[Finding, ...]
    passed: tuple[Finding, ...]


class RunningJudge:
    """The verdict on a run so far.

    Attributes:
        window: (step, metrics by bare name) of the recent steps that measured a token.
    """

    def __init__(self) -> None:
        self.window: deque[tuple[int, dict[str, float]]] = deque(maxlen=RECENT_STEPS)
        self._alarms: dict[_Key, Finding] = {}
        self._absent: dict[_Key, int] = {}

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """The alarms that last, the oldest first."""
        return tuple(self._alarms.values())

    def remember(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take a step into the window. One that measured no token is left out, as the health check does."""
        bare = bare_metrics(metrics)
        if bare.get("token_count", 1.0) > 0:
            self.window.append((step, bare))

    def judge(self, step: int, metrics: Mapping[str, float], config: RolloutCorrectionConfig | None) -> Changes:
        """Take a step into the window, and judge it.

        Args:
            step: its number.
            metrics: of the step, finite or not.
            config: what the correction was asked for.
        """
        self.remember(step, metrics)
        history = list(self.window)
        report = judge(Evidence(current=recent_medians(history), history=history, config=config))
        found = {(finding.code, finding.metric): finding for finding in report.warnings}

        began = tuple(finding for key, finding in found.items() if key not in self._alarms)
        passed = []
        for key in [key for key in self._alarms if key not in found]:
            self._absent[key] = self._absent.get(key, 0) + 1
            if self._absent[key] >= RECENT_STEPS:
                passed.append(self._alarms.pop(key))
                del self._absent[key]
        for key, finding in found.items():
            self._alarms[key] = finding
            self._absent.pop(key, None)
        return Changes(began, tuple(passed))


def alarm_text(step: int, finding: Finding) -> str:
    """An alarm in one line: what is wrong, since when, why it matters, and what to change."""
    value = "" if finding.value is None else f" is {finding.value:.4g}"
    limit = f", healthy: {finding.limit}" if finding.limit else ""
    measured = "" if finding.metric is None else f" ({label(finding.metric)}{value}{limit})"
    reason = f". Cause: {finding.reason}" if finding.reason else ""
    fix = f". Fix: {finding.fix}" if finding.fix else ""
    return f"step {step}: {finding.title}{measured}{reason}{fix}"
