"""Incremental health check of a run over a sliding window of steps, at a constant cost per step.

The window contains the last ten steps that measured a token, as in the health check. A finding raises one alarm while
it persists. The alarm passes after a full window without the finding, so a metric that oscillates around a limit does
not raise an alarm at every crossing. Persistent rises of the mismatch are detected over the full run, by the same
detector as in `rollcorr report`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import NamedTuple

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.finding import Finding
from rollcorr.correction.correction_checks import MISMATCH
from rollcorr.diagnostics.health.diffusion_rules import rises_of_pictures
from rollcorr.diagnostics.health.evidence import RECENT_STEPS, Evidence
from rollcorr.diagnostics.health.health_check import (
    EXIT_CODES,
    FIRST_STEPS,
    Verdict,
    is_broken,
    judge,
    unjudged,
)
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.health.rules import COMPARISON
from rollcorr.diagnostics.health.trend import NULL_IS_LARGE, NULL_IS_VETTED, NULL_K3, NULL_STD, SeriesWatch
from rollcorr.monitor.step_totals import LOSS_PREFIX

AlarmKey = tuple[str, str | None]  # code and metric

UNVETTED = "is unvetted: nothing shows that both sides had the same weights; add a probe, monitor.add(engine.probe(…))"
# Metrics that are summed over the run.
COUNTS = ("sequence_count", "token_count")


class Changes(NamedTuple):
    """Changes of a step: the alarms that began, and the alarms that passed."""

    began: tuple[Finding, ...]
    passed: tuple[Finding, ...]


class RecentMedians(Mapping[str, float]):
    """The median of each metric over the recent steps, computed lazily because rules read only a few metrics.

    Args:
        history: (step, metrics by bare name).
    """

    def __init__(self, history: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        self._steps = [metrics for _, metrics in history]

    def __getitem__(self, name: str) -> float:
        values = [metrics[name] for metrics in self._steps if name in metrics]
        if not values:
            raise KeyError(name)
        return median(values)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for metrics in self._steps for name in metrics))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RunningJudge:
    """The verdict on a run so far.

    Args:
        null: the noise between two equal policies, from a null run; defaults to the noise of the first steps.
        sampling: whether the sampler's settings are recorded.
    """

    def __init__(self, null: Noise | None = None, *, sampling: bool = True) -> None:
        self.sampling = sampling
        # Recent steps that measured a token, as (step, metrics by bare name), and the metrics outside their range.
        self._history: deque[tuple[int, dict[str, float]]] = deque(maxlen=RECENT_STEPS)
        self._broken: deque[list[str]] = deque(maxlen=RECENT_STEPS)
        self._null = null
        self._watch = SeriesWatch()
        self._differed = self._diffusion = False
        self._first: list[tuple[int, dict[str, float]]] = []
        self._counted: Counter[str] = Counter()
        self._alarms: dict[AlarmKey, Finding] = {}
        self._absent: dict[AlarmKey, int] = {}

        # A thread adds causes, so they have a dictionary of their own.
        self._causes: dict[AlarmKey, Finding] = {}

    @property
    def verdict(self) -> Verdict:
        """Return the verdict so far, with the values of `HealthReport.verdict`."""
        if self._alarms:
            return "unhealthy"
        return "not judged" if self.not_judged else "healthy"

    @property
    def exit_code(self) -> int:
        """Return the exit code of the commands for the verdict."""
        return EXIT_CODES[self.verdict]

    @property
    def not_judged(self) -> tuple[str, ...]:
        """Return a sentence for each check without a verdict so far, with the reason."""
        current = self._history[-1][1] if self._history else {}
        evidence = Evidence(
            current=current,
            history=self._first,
            changes=self._watch.changes,
            noise=self._null,
            sampling=self.sampling,
            diffusion=self._diffusion,
        )
        return unjudged(evidence, counted=self._counted)[1]

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """Return the active alarms, the oldest first, each with its first cause if that is known."""
        return tuple(with_cause(alarm, self._causes.get(key)) for key, alarm in self._alarms.items())

    def explain(self, findings: Iterable[Finding], cause: Finding) -> None:
        """Attach a cause to alarms that still last. Any thread may call this."""
        keys = [(finding.code, finding.metric) for finding in findings]
        self._causes.update({key: cause for key in keys if key in self._alarms})

    def remember(self, step: int, bare: dict[str, float]) -> None:
        """Add a step to the window. Skip a step that measured no token, as the health check does.

        Args:
            step: number of the step.
            bare: as in `judge`.
        """
        if bare.get("token_count", 1.0) > 0:
            self._history.append((step, bare))
            self._broken.append([name for name, value in bare.items() if is_broken(name, value)])
            self._watch.add(step, bare)
            self._null = _own_noise(bare) or self._null
            self._differed = self._differed or any(bare.get(name) for name in COMPARISON)
            self._diffusion = self._diffusion or "kl_joint" in bare
            if len(self._first) < 2 * FIRST_STEPS:
                self._first.append((step, bare))
            self._counted.update({name: bare[name] for name in COUNTS if name in bare})

    def judge(self, step: int, bare: dict[str, float], config: RolloutCorrectionConfig | None) -> Changes:
        """Add a step to the window, and judge it. A step without a correction has no effect.

        Args:
            step: number of the step.
            bare: the metrics of the step by bare name, as `bare_metrics` returns them, without NaN. Metrics of a loss
                keep their prefix.
            config: the configuration of the correction.
        """
        warnings = _check_correction_rows(bare)
        if "token_count" in bare:
            self.remember(step, bare)
            history, changes = list(self._history), self._watch.changes
            evidence = Evidence(
                current=RecentMedians(history),
                history=history,
                config=config,
                changes=rises_of_pictures(history, changes) if self._diffusion else changes,
                diffusion=self._diffusion,
                noise=self._null,
                differed=self._differed,
                first=self._first[0] if self._first else None,
            )

            # Check only metrics with a recent value outside its range: no other median can be outside.
            found_now = judge(evidence, broken=dict.fromkeys(chain.from_iterable(self._broken)))
            warnings += tuple(finding for finding in found_now if finding.severity != "note")
        elif not warnings:
            return Changes((), ())
        found = {(finding.code, finding.metric): finding for finding in warnings}

        # An alarm ends after RECENT_STEPS steps in a row without its finding.
        began = tuple(finding for finding in found.values() if self.raise_alarm(finding))
        ended = []
        for key in [key for key in self._alarms if key not in found]:
            self._absent[key] = self._absent.get(key, 0) + 1
            if self._absent[key] >= RECENT_STEPS:
                ended.append(self._alarms.pop(key))
                del self._absent[key]
                self._causes.pop(key, None)
        return Changes(began, tuple(ended))

    def raise_alarm(self, finding: Finding) -> bool:
        """Add or renew an alarm from outside the metrics; return whether it begins now.

        Args:
            finding: the problem.
        """
        key = (finding.code, finding.metric)
        began = key not in self._alarms
        self._alarms[key] = finding
        self._absent.pop(key, None)
        return began


def with_cause(finding: Finding, cause: Finding | None) -> Finding:
    """Return an alarm with the reason and the fix of its cause; unchanged without one."""
    if cause is None or cause.code == finding.code:
        return finding
    reason = "; ".join(filter(None, (cause.title, cause.reason)))
    return replace(finding, reason=reason, fix=cause.fix, confirm=cause.confirm, follows_from=cause.code)


def _own_noise(bare: Mapping[str, float]) -> Noise | None:
    """Return the noise of the null that the Monitor measured; None without one."""
    if NULL_K3 not in bare or NULL_STD not in bare:
        return None
    unusable = "" if bare.get(NULL_IS_LARGE, 1.0) else "has too few tokens; measure it again after the next syncs"
    if not bare.get(NULL_IS_VETTED):
        unusable = UNVETTED
    return Noise(
        sigma=bare[NULL_STD],
        source="the null of this run",
        k3=bare[NULL_K3],
        is_null=not unusable,
        unusable=unusable,
    )


def _check_correction_rows(bare: Mapping[str, float]) -> tuple[Finding, ...]:
    """Return a warning if a loss on a device, where `policy_loss` cannot raise, applied a correction of other rows."""
    share = bare.get(f"{LOSS_PREFIX}{MISMATCH}", 0.0)
    if not share > 0:  # true for NaN as well
        return ()
    return (
        Finding(
            code=MISMATCH,
            title="the loss applies the correction of different rows",
            value=share,
            limit="0 of the sequences",
            reason="Σ log π_old or Σ log μ of these sequences differs between policy_loss and correct: different rows, "
            "a different step, or swapped policies",
            fix="index all tensors with the same rows, correction[rows] as old_log_prob[rows], and call "
            "correct(old_log_prob, rollout_log_prob, response_mask) for every batch",
            metric=f"{LOSS_PREFIX}{MISMATCH}",
        ),
    )


def alarm_text(step: int, finding: Finding) -> str:
    """Return an alarm in one line: the problem, its value, its cause, and its fix.

    Args:
        step: number of the step.
        finding: the problem.
    """
    numbers = [] if finding.value is None else [f"{finding.value:.4g}"]
    if finding.limit:
        numbers.append(f"limit {finding.limit}")
    shown = f" ({', '.join(numbers)})" if numbers else ""
    reason = f". Cause: {finding.reason}" if finding.reason else ""
    fix = f". Fix: {finding.fix}" if finding.fix else ""
    return f"step {step}: {finding.title}{shown}{reason}{fix}"
