"""Detect when a metric rises for good, online over the steps of a run, at a constant cost per step.

The detector works on logarithms, because a mismatch grows by factors. Relative to the median of the first steps, a
cumulative sum (Page, 1954) adds up the excess over an allowance:

    x_t = ln value_t            m = median of the first 5 to 20 steps, more of them for a noisy metric; of the steps
                                with the recorded age of step t, if at least 3 have this age
    S_t = max(0, S_{t−1} + min(x_t − m − allowance, cap))            a change is found when S_t > limit

The cap keeps a single spike from counting as a change. A metric that grows from the first step on has no healthy
steps, so the first steps are also tested for a trend (Mann, 1945). The onset is estimated when a change is found, and
three times after that: several forms of a rise are fitted by least squares at each candidate step, and the best fit
decides.

    x_t = ln a                             before the onset
    x_t = ln a + b                         a step
    x_t = ln a + b u                       an exponential; u = 1, 2, … from the onset on
    x_t = ln(a + c u^p)                    a line (p = 1), a parabola (p = 2), and a form between them (p = 1.5)

The baseline stays the median of the first steps for the full run. A rise from the first steps on has two causes: a
sampler that is never synchronized, or weights whose age grew from step to step. `AgeWatch` distinguishes them by the
recorded age.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import median
from typing import Literal

import numpy as np

Array = np.ndarray[tuple[int], np.dtype[np.float64]]
Shape = Literal["step", "growth"]

POWERS = (1.0, 1.5, 2.0)
SPIKE = 4.0
"""Standard deviations from the median of its neighbors beyond which a value is replaced by that median."""
LEAST_SPREAD = 0.05
"""Lower bound of a spread, nats: a few steps may be equal by chance."""
COARSE = 20
"""Number of candidate onsets in the first, coarse search."""
BEFORE = 60
"""Number of steps before an onset whose mean is the level there."""


def onset_of(values: Sequence[float]) -> tuple[int, Shape]:
    """Return the index at which a rise began, and its shape.

    Args:
        values: logarithms of a metric in the order of the steps, nats; the series contains a rise.
    """
    x = without_spikes(np.asarray(values, dtype=np.float64))
    last = len(x) - 1
    if last < 1:
        return 0, "step"

    # The fit degrades on both sides of the best place, so search coarsely first, then finely around the best.
    stride = max(1, last // COARSE)
    coarse = min((_fit(x, place) for place in range(1, last + 1, stride)), key=itemgetter(0))
    around = range(max(1, coarse[1] - stride), min(last, coarse[1] + stride) + 1)
    _, place, shape = min((_fit(x, place) for place in around), key=itemgetter(0))
    return place, shape


def _fit(x: Array, place: int) -> tuple[float, int, Shape]:
    """Fit each form of a rise from `place` on; return the smallest sum of squares, the place, and the best shape."""
    before, after = x[:place], x[place:]
    level = float(before[-BEFORE:].mean())
    unchanged = float(np.square(before - level).sum())
    deviation, shape = min(_deviations(level, after), key=itemgetter(0))
    return unchanged + deviation, place, shape


def without_spikes(x: Array) -> Array:
    """Replace each value that is far from its neighbors by the median of the five values around it, same shape."""
    padded = np.concatenate([x[2:0:-1], x, x[-2:-4:-1]]) if len(x) > 3 else np.pad(x, 2, mode="edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, 5)
    middle = np.median(around, axis=1)
    spread = max(LEAST_SPREAD, float(np.median(np.abs(x - middle))) / 0.6745)
    return np.where(np.abs(x - middle) > SPIKE * spread, middle, x)


def _deviations(level: float, after: Array) -> Iterator[tuple[float, Shape]]:
    """Yield the sum of squares after an onset, and the shape, of each form of a rise."""
    yield float(np.square(after - after.mean()).sum()), "step"
    if len(after) < 3:  # two values fit every form
        return

    u = np.arange(1, len(after) + 1, dtype=np.float64)
    slope = float(u @ (after - level) / (u @ u))
    yield float(np.square(after - level - slope * u).sum()), "growth"
    for power in POWERS:
        fitted = _fit_growth(level, after, u**power)
        if fitted is not None:
            yield float(np.square(after - fitted).sum()), "growth"


def _fit_growth(level: float, after: Array, growth: Array) -> Array | None:
    """Fit ln(a + c g), with c from the median rate and two Gauss–Newton steps; return `None` without growth."""
    start = math.exp(level)
    rate = float(np.median((np.exp(after) - start) / growth))
    if not rate > 0:
        return None
    for _ in range(2):
        fitted = np.log(start + rate * growth)
        share = rate * growth / (start + rate * growth)  # d fitted / d ln rate
        rate *= math.exp(min(max(float(share @ (after - fitted) / (share @ share)), -1.0), 1.0))
    return np.asarray(np.log(start + rate * growth))


FEWEST_FIRST_STEPS = 5
MOST_FIRST_STEPS = 20
BASELINE_ERROR = 0.14
"""Target standard error of the baseline, nats: a noisy metric uses more first steps to reach it."""
FACTOR = 2.4
"""Factor by which a metric may grow over a run without a finding."""
NOISY = 0.4
"""Spread from step to step, nats, beyond which the allowance grows with it."""
LIMIT = 3.0
"""Nats above the allowance, summed over the steps, at which a change is found."""
CAP = 1.2
"""The most that one step adds, nats."""
FEWEST_STEPS = 3
"""Consecutive steps above the allowance that a change needs."""
TREND_STEPS = 40
"""Number of first steps that are tested for a trend."""
TREND_Z = 3.4
"""Standard errors of Mann's statistic for a trend: false for about 1 of 3,000 series without a trend."""
TREND_FACTOR = 3.0
"""Growth that a trend also needs, from the median of the first three steps to that of the last three."""
REMEMBERED = 200
"""Number of latest steps in which an onset is searched."""
SETTLED = 40
"""Number of steps after a change was found in which its onset is estimated again."""
NOISE_STEPS = 30
"""Number of latest steps from which the noise of a metric is estimated."""
WELL_STEPS = 5
"""Consecutive steps within the allowance after which a change has ended."""
WATCHED: Mapping[str, float] = {
    "k3_kl": 1e-11,
    "log_ratio_std": 4.5e-6,
    "log/token_id_share": 0.05,
    "exact_kl_mean": 1e-9,
}
"""Watched metric → lower bound of its values: below it a change is rounding, or has no meaning."""
NULL_K3, NULL_STD, NULL_IS_VETTED, NULL_IS_LARGE = (
    "monitor/null_k3",
    "monitor/null_std",
    "monitor/null_is_vetted",
    "monitor/null_is_large",
)
"""Metrics of a null that a Monitor measures again during the run."""
AT_START = 5
"""Steps of a run within which a change counts as present from the start, without healthy steps before it."""
AGE = "engine/staleness"
"""The metric with the recorded age of the sampler's weights, in updates."""
MOST_AGES = 64
"""Largest number of different ages that are stored."""
FEWEST_AT_AGE = 6
"""Fewest steps of the same age to decide if the mismatch grows at that age."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A lasting rise of a metric.

    Attributes:
        onset: step at which the rise began.
        found: step at which it was detected.
        shape: "step" if it rose within a step, "growth" if it continues to grow.
        from_start: the rise began with the first steps, so there are no healthy steps before it.
        baseline: median of the first steps, or of the first three if they show a trend; constant for the run. In the
            metric's unit.
        value: median of the latest steps, in the metric's unit.
        z: ln(value / baseline) in standard errors of the two medians, estimated from the noise between steps.
        ended: step from which on the metric was healthy again; `None` while the change lasts.
        well: number of steps measured since the end.
        lasted: number of steps from the onset to the end, or to the latest step.
        age: recorded age of the weights that explains the rise, in updates; defaults to `None`: no age is recorded, or
            the mismatch also grows at a constant age.
    """

    onset: int
    found: int
    shape: Shape
    from_start: bool
    baseline: float
    value: float
    z: float
    ended: int | None
    well: int
    lasted: int
    age: float | None = None

    @property
    def factor(self) -> float:
        """Return the factor by which the metric has grown, value / baseline."""
        return self.value / self.baseline

    @property
    def confidence(self) -> float:
        """Return the confidence z² / (1 + z²), 0 to 1."""
        return self.z**2 / (1 + self.z**2)

    @property
    def numbers(self) -> dict[str, float]:
        """Return the evidence of a finding about this change: name → number."""
        sizes = {"baseline": self.baseline, "factor": self.factor}
        return sizes | {"onset": float(self.onset), "found_at_step": float(self.found)}

    @property
    def is_over(self) -> bool:
        """Return whether the metric has been healthy for as long as the change lasted, at least 2 · `WELL_STEPS`."""
        return self.ended is not None and self.well >= max(self.lasted, 2 * WELL_STEPS)


class SeriesWatch:
    """Detector of lasting rises for every metric of `WATCHED` over the steps of a run."""

    def __init__(self) -> None:
        self._detectors: dict[str, ChangeDetector] = {}
        self._age = AgeWatch()
        self._first_null: dict[str, float] = {}
        self._of_first_null: dict[str, float] = {}

    def add(self, step: int, bare: Mapping[str, float]) -> None:
        """Add the metrics of a step, by bare name; missing metrics are ignored.

        A sharper policy has more mismatch at equal weights. If the run measures its null again, the metrics are
        multiplied by the first null over the newest one.
        """
        if AGE in bare and "k3_kl" in bare:
            self._age.add(bare[AGE], bare["k3_kl"])
        for name, least in WATCHED.items():
            if name in bare:
                detector = self._detectors.setdefault(name, ChangeDetector())
                detector.add(step, max(bare[name] * self._growth_of_null(name, bare), least), age=bare.get(AGE))

    def _growth_of_null(self, name: str, bare: Mapping[str, float]) -> float:
        """Return the metric's first null over its newest one, at most 1; 1 without a null of equal weights."""
        null = bare.get({"k3_kl": NULL_K3, "log_ratio_std": NULL_STD}.get(name, ""), 0.0)
        if null > 0 and bare.get(NULL_IS_VETTED):
            # A few tokens suffice. After a restart the last null applies until the next measurement.
            self._of_first_null[name] = min(1.0, self._first_null.setdefault(name, null) / null)
        return self._of_first_null.get(name, 1.0)

    @property
    def changes(self) -> dict[str, Change]:
        """Return metric → its latest change; contains only metrics with a change."""
        age = self._age.explains
        return {name: replace(one.changes[-1], age=age) for name, one in self._detectors.items() if one.changes}


class AgeWatch:
    """Test if a growing age of the weights explains k3: the age has grown, and k3 at a fixed age has not."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._latest: deque[tuple[float, float]] = deque(maxlen=FEWEST_STEPS)
        self._first: dict[int, list[float]] = {}

    def add(self, age: float, k3: float) -> None:
        """Add a step: the mean age of its weights, in updates, and k3 in nats; ignored unless both are finite."""
        if not (math.isfinite(age) and math.isfinite(k3)):
            return
        self._start = age if self._start is None else self._start
        self._latest.append((age, k3))
        if round(age) in self._first or len(self._first) < MOST_AGES:
            first = self._first.setdefault(round(age), [])
            if len(first) < FEWEST_AT_AGE:
                first.append(k3)

    @property
    def explains(self) -> float | None:
        """Return the median age of the latest steps, in updates, if it explains k3; else `None`."""
        if self._start is None:
            return None
        age = median(of_step for of_step, _ in self._latest)
        if age - self._start < 1:
            return None

        # A sampler that keeps its first weights differs more at each step, even if the reported age is constant.
        first, now = self._first.get(round(age), []), median(k3 for _, k3 in self._latest)
        known = len(first) == FEWEST_AT_AGE
        return None if known and now >= TREND_FACTOR * median(first[:FEWEST_FIRST_STEPS]) else age


class ChangeDetector:
    """Detector of a lasting rise of a positive metric, at a constant cost per step."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._values: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._first: list[tuple[int | None, float]] = []
        self._differences: deque[float] = deque(maxlen=NOISE_STEPS)
        self._steps = self._well = self._above = self._since_found = 0
        self._sum = self._trend = 0.0

    def add(self, step: int, value: float, *, age: float | None = None) -> None:
        """Add a step. A value that is not positive and finite is ignored: it has no logarithm.

        Args:
            step: number of the step.
            value: the metric's value, in its unit.
            age: recorded age of the weights, in updates; defaults to `None`: not recorded.
        """
        if not (value > 0 and math.isfinite(value)):
            return
        x = math.log(value)
        if self._values:
            self._differences.append(x - self._values[-1][1])
        self._values.append((step, x))
        self._steps += 1

        excess = self._excess(x, None if age is None or not math.isfinite(age) else round(age))
        self._sum = max(0.0, self._sum + min(excess, CAP))
        self._above = self._above + 1 if excess > 0 else 0
        grows = self._has_trend(x)
        if self.changes and self.changes[-1].ended is None:
            self._update_change(step, x, excess)
        elif grows or (self._sum > LIMIT and self._above >= FEWEST_STEPS):
            # Later changes keep the first change's baseline. With a trend, only the first three steps are its start.
            first = [value for _, value in self._first][: FEWEST_STEPS if grows else None]
            level = math.log(self.changes[0].baseline) if self.changes else median(first)
            self._well = self._since_found = 0
            self.changes.append(self._locate_change(found=step, level=level))
        elif self.changes:
            self.changes[-1] = replace(self.changes[-1], well=self.changes[-1].well + 1)

    def _excess(self, x: float, age: int | None) -> float:
        """Compute the excess of a value over the baseline and its allowance, nats; negative below them.

        Stale weights differ more than fresh ones, so a step is compared with first steps of its own age if at least
        three have it. Healthy first steps also extend the baseline, until its error is small enough.

        Args:
            x: logarithm of the value.
            age: rounded age of the weights, in updates; `None` if not recorded.
        """
        spread = self._spread()
        needed = math.ceil((1.25 * spread / BASELINE_ERROR) ** 2)  # the error of a median is 1.25 σ / √n
        needed = min(max(needed, FEWEST_FIRST_STEPS), MOST_FIRST_STEPS)
        suspicious = self._sum > 0 and len(self._first) >= FEWEST_FIRST_STEPS
        alike = [value for of_age, value in self._first if of_age == age]
        has_room = len(alike) < needed and len(self._first) < MOST_FIRST_STEPS
        if has_room and not suspicious and not self.changes:
            self._first.append((age, x))
            alike.append(x)
        if len(self._first) < FEWEST_STEPS:
            return 0.0
        baseline = median(alike if len(alike) >= FEWEST_STEPS else [value for _, value in self._first])
        return x - baseline - math.log(FACTOR) - 0.5 * max(0.0, spread - NOISY)

    def _spread(self) -> float:
        """Estimate the standard deviation between steps, nats, from medians: robust to spikes and to steady growth."""
        if len(self._differences) < FEWEST_STEPS:
            return 2 * LEAST_SPREAD
        middle = median(self._differences)
        deviation = median(abs(difference - middle) for difference in self._differences)
        return max(LEAST_SPREAD, deviation / (0.6745 * math.sqrt(2)))

    def _error(self) -> float:
        """Compute the standard error, nats, of the difference between the first and the latest steps' medians."""
        return 1.25 * self._spread() * math.sqrt(1 / FEWEST_FIRST_STEPS + 1 / FEWEST_STEPS)

    def _has_trend(self, x: float) -> bool:
        """Return whether the first steps grow, by Mann's count of ordered pairs, and by at least `TREND_FACTOR`."""
        if self._steps > TREND_STEPS or self.changes:
            return False
        earlier = [value for _, value in self._values][:-1]
        self._trend += sum((x > value) - (x < value) for value in earlier)
        if self._steps < 2 * FEWEST_STEPS:
            return False
        n = self._steps
        z = self._trend / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
        grown = median([*earlier[-2:], x]) - median(earlier[:3])
        return z >= TREND_Z and grown > math.log(TREND_FACTOR)

    def _update_change(self, step: int, x: float, excess: float) -> None:
        """Update the lasting change with a step: its onset for the first steps after detection, its value and its end.

        Args:
            step: number of the step.
            x: logarithm of the value.
            excess: excess over the baseline and its allowance, nats.
        """
        change = self.changes[-1]
        self._since_found += 1
        if self._since_found in (SETTLED // 4, SETTLED // 2, SETTLED):
            change = self._locate_change(found=change.found, level=math.log(change.baseline))
        latest = median(value for _, value in list(self._values)[-FEWEST_STEPS:])
        change = replace(
            change,
            value=math.exp(latest),
            z=(latest - math.log(change.baseline)) / self._error(),
            lasted=step - change.onset + 1,
        )

        self._well = self._well + 1 if excess <= 0 else 0
        if self._well >= WELL_STEPS:
            steps = [number for number, _ in self._values]
            ended = steps[-self._well]
            change = replace(change, ended=ended, well=self._well, lasted=ended - change.onset)
            self._sum, self._values = 0.0, deque(list(self._values)[-self._well :], maxlen=REMEMBERED)
        self.changes[-1] = change

    def _locate_change(self, *, found: int, level: float) -> Change:
        """Return the change whose onset fits the stored values best.

        Args:
            found: step at which the change was detected.
            level: logarithm of the baseline.
        """
        steps = [step for step, _ in self._values]
        values = [value for _, value in self._values]
        place, shape = onset_of(values)
        latest = median(values[-FEWEST_STEPS:])

        # `_values` contains the start of the run only until the deque drops its first step.
        return Change(
            onset=steps[place],
            found=found,
            shape=shape,
            from_start=self._steps == len(steps) and place < AT_START,
            baseline=math.exp(level),
            value=math.exp(latest),
            z=(latest - level) / self._error(),
            ended=None,
            well=0,
            lasted=steps[-1] - steps[place] + 1,
        )
