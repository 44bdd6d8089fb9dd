"""When a series changed for the worse: one metric over the steps, at a cost per step that does not grow with the run.

The values are looked at by their logarithm, because a mismatch grows by factors. Against the median of the first steps
a cumulative sum (Page, 1954) collects what exceeds an allowance:

    x_t = ln value_t            m = median of the first 5 to 20 steps, more of them where the steps are noisy; of those
                                with the recorded age of step t, where 3 or more have it
    S_t = max(0, S_{t−1} + min(x_t − m − allowance, cap))            a change is found when S_t > limit

The cap keeps single spikes from being a change. What grows from the first step on has no steps that were well, so the
first steps are also asked for a trend (Mann, 1945). The onset is looked for when a change is found, and thrice more: of
several forms that begin at some place, with the level before and the size of the rise by least squares, the best fits.

    x_t = ln a                             before the onset
    x_t = ln a + b                         a step
    x_t = ln a + b u                       an exponential; u = 1, 2, … from the onset on
    x_t = ln(a + c u^p)                    a line (p = 1), a parabola (p = 2), and what lies between them (p = 1.5)

The baseline stays that of the first steps, whatever comes later. A rise from the first steps on is that of a sampler
which is never synchronized, or that of weights whose age grew with them. `AgeWatch` tells these apart by the recorded
age.
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
"""A spread below this, nats, is taken for it: a few steps may be alike by chance."""
COARSE = 20
"""Places of the first, coarse look."""
BEFORE = 60
"""Steps before an onset that tell the level there."""


def onset_of(values: Sequence[float]) -> tuple[int, Shape]:
    """The place at which a rise began, and its shape.

    Args:
        values: logarithms of a metric, in order, at least two; they rise somewhere.
    """
    x = without_spikes(np.asarray(values, dtype=np.float64))
    last = len(x) - 1
    if last < 1:
        return 0, "step"

    # The fit gets worse on both sides of the best place, so a coarse look comes first, and then one around its best.
    stride = max(1, last // COARSE)
    coarse = min((_fit(x, place) for place in range(1, last + 1, stride)), key=itemgetter(0))
    around = range(max(1, coarse[1] - stride), min(last, coarse[1] + stride) + 1)
    _, place, shape = min((_fit(x, place) for place in around), key=itemgetter(0))
    return place, shape


def _fit(x: Array, place: int) -> tuple[float, int, Shape]:
    """The smallest sum of squares of a rise that begins at a place, the place, and the shape that has it."""
    before, after = x[:place], x[place:]
    level = float(before[-BEFORE:].mean())
    unchanged = float(np.square(before - level).sum())
    deviation, shape = min(_deviations(level, after), key=itemgetter(0))
    return unchanged + deviation, place, shape


def without_spikes(x: Array) -> Array:
    """The values, with each that is far from its neighbors replaced by the median of the five around it."""
    padded = np.concatenate([x[2:0:-1], x, x[-2:-4:-1]]) if len(x) > 3 else np.pad(x, 2, mode="edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, 5)
    middle = np.median(around, axis=1)
    spread = max(LEAST_SPREAD, float(np.median(np.abs(x - middle))) / 0.6745)
    return np.where(np.abs(x - middle) > SPIKE * spread, middle, x)


def _deviations(level: float, after: Array) -> Iterator[tuple[float, Shape]]:
    """The sum of squares after an onset, of each form of a rise."""
    yield float(np.square(after - after.mean()).sum()), "step"
    if len(after) < 3:  # two values may rise in any way
        return

    u = np.arange(1, len(after) + 1, dtype=np.float64)
    slope = float(u @ (after - level) / (u @ u))
    yield float(np.square(after - level - slope * u).sum()), "growth"
    for power in POWERS:
        fitted = _fitted_power(level, after, u**power)
        if fitted is not None:
            yield float(np.square(after - fitted).sum()), "growth"


def _fitted_power(level: float, after: Array, growth: Array) -> Array | None:
    """ln(a + c g), with c by two steps of Gauss and Newton from the median; None where nothing has grown."""
    start = math.exp(level)
    rate = float(np.median((np.exp(after) - start) / growth))
    if not rate > 0:
        return None
    for _ in range(2):
        fitted = np.log(start + rate * growth)
        share = rate * growth / (start + rate * growth)  # d fitted / d ln rate
        rate *= math.exp(min(max(float(share @ (after - fitted) / (share @ share)), -1.0), 1.0))
    fitted_values: Array = np.log(start + rate * growth)
    return fitted_values


FEWEST_FIRST_STEPS = 5
MOST_FIRST_STEPS = 20
BASELINE_ERROR = 0.14
"""Standard error of the baseline, nats, for which more of the first steps are taken."""
FACTOR = 2.4
"""A metric may grow by this factor over a run without being a finding."""
NOISY = 0.4
"""Spread from step to step, nats, beyond which the allowance grows with it."""
LIMIT = 3.0
"""Nats above the allowance, summed over the steps, at which a change is found."""
CAP = 1.2
"""The most that one step adds, nats."""
FEWEST_STEPS = 3
"""Consecutive steps above the allowance that a change needs."""
TREND_STEPS = 40
"""First steps that are asked for a trend."""
TREND_Z = 3.4
"""Standard errors of Mann's statistic for a trend: about 1 of 3,000 series without one."""
TREND_FACTOR = 3.0
"""Growth that a trend needs besides, from the first three steps to the last three."""
REMEMBERED = 200
"""Steps in which an onset is looked for."""
SETTLED = 40
"""Steps after a change was found in which its onset is looked for again."""
NOISE_STEPS = 30
"""Steps that tell how noisy a metric is."""
WELL_STEPS = 5
"""Consecutive steps within the allowance after which a change has ended."""
WATCHED: Mapping[str, float] = {
    "k3_kl": 1e-11,
    "log_ratio_std": 4.5e-6,
    "log/token_id_share": 0.05,
    "exact_kl_mean": 1e-9,
}
"""The metrics that are watched, and the smallest value that counts: below it a change is rounding, or means nothing."""
AT_START = 5
"""A change that began within this many steps has no steps before it that were well."""
AGE = "engine/staleness"
"""The metric with the recorded age of the weights that sampled, in updates."""
MOST_AGES = 64
"""Different ages that are remembered."""
FEWEST_AT_AGE = 6
"""Steps of one age below which it is not known whether the mismatch grows at that age."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A lasting rise of a metric.

    Attributes:
        onset: the step with which it began.
        found: the step at which it was found.
        shape: it rose at once, or goes on growing.
        from_start: it began with the first steps, so that no steps before it were well.
        baseline: the median of the first steps; of the first three, where they show a trend. It never changes.
        value: the median of the latest steps.
        z: ln(value / baseline) in standard errors of the two medians, by the noise from step to step.
        ended: the step from which on the metric was well again; None while the change lasts.
        well: steps measured since it ended.
        lasted: steps from the onset to the end, or to now.
        age: the recorded age of the weights that it goes with, in updates; None where none is recorded, or where the
            mismatch grows though the age stays the same.
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
        """By what the metric has grown."""
        return self.value / self.baseline

    @property
    def confidence(self) -> float:
        """How sure the change is, 0 to 1, by its size in standard errors."""
        return self.z**2 / (1 + self.z**2)

    @property
    def numbers(self) -> dict[str, float]:
        """The evidence of a finding about it."""
        sizes = {"baseline": self.baseline, "factor": self.factor}
        return sizes | {"onset": float(self.onset), "found_at_step": float(self.found)}

    @property
    def is_over(self) -> bool:
        """Whether the metric has been well for as long as the change took: what it came from would have come back."""
        return self.ended is not None and self.well >= max(self.lasted, 2 * WELL_STEPS)


class SeriesWatch:
    """Watches every metric of `WATCHED` over the steps of a run."""

    def __init__(self) -> None:
        self._detectors: dict[str, ChangeDetector] = {}
        self._age = AgeWatch()

    def add(self, step: int, bare: Mapping[str, float]) -> None:
        """Take the metrics of a step in, by bare name."""
        if AGE in bare and "k3_kl" in bare:
            self._age.add(bare[AGE], bare["k3_kl"])
        for name, least in WATCHED.items():
            if name in bare:
                detector = self._detectors.setdefault(name, ChangeDetector())
                detector.add(step, max(bare[name], least), age=bare.get(AGE))

    @property
    def changes(self) -> dict[str, Change]:
        """Metric → its latest change, of those that had one."""
        age = self._age.explains
        return {name: replace(one.changes[-1], age=age) for name, one in self._detectors.items() if one.changes}


class AgeWatch:
    """Whether k3 goes with the recorded age of the weights: the age has grown, and at one age k3 has not."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._latest: deque[tuple[float, float]] = deque(maxlen=FEWEST_STEPS)
        self._first: dict[int, list[float]] = {}

    def add(self, age: float, k3: float) -> None:
        """Take a step in: the mean age of its weights, in updates, and k3 in nats."""
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
        """The age of the latest steps, in updates, if k3 goes with it; else None."""
        if self._start is None:
            return None
        age = median(of_step for of_step, _ in self._latest)
        if age - self._start < 1:
            return None

        # A sampler that keeps its first weights differs more at each step, whatever age it reports.
        first, now = self._first.get(round(age), []), median(k3 for _, k3 in self._latest)
        known = len(first) == FEWEST_AT_AGE
        return None if known and now >= TREND_FACTOR * median(first[:FEWEST_FIRST_STEPS]) else age


class ChangeDetector:
    """Watches one positive metric for a lasting rise. Each step costs the same, however long the run is."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._values: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._first: list[tuple[int | None, float]] = []
        self._differences: deque[float] = deque(maxlen=NOISE_STEPS)
        self._steps = self._well = self._above = self._since_found = 0
        self._sum = self._trend = 0.0

    def add(self, step: int, value: float, *, age: float | None = None) -> None:
        """Take a step in. A value that is not positive and finite is left out: it has no logarithm.

        Args:
            step: its number.
            value: of the metric.
            age: the recorded age of the weights behind it, in updates; None where it is not recorded.
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
            self._follow(step, x, excess)
        elif grows or (self._sum > LIMIT and self._above >= FEWEST_STEPS):
            # The baseline stays that of the first change. With a trend, only the very first steps are the start.
            first = [value for _, value in self._first][: FEWEST_STEPS if grows else None]
            level = math.log(self.changes[0].baseline) if self.changes else median(first)
            self._well = self._since_found = 0
            self.changes.append(self._located(found=step, level=level))
        elif self.changes:
            self.changes[-1] = replace(self.changes[-1], well=self.changes[-1].well + 1)

    def _excess(self, x: float, age: int | None) -> float:
        """How far a value lies above the baseline and its allowance, nats. The baseline is fixed once it is known.

        Old weights differ by more than fresh ones, so a step is compared with first steps of its own age, if it can be.
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
        """Standard deviation from step to step, nats, by the median: neither spikes nor a steady growth count."""
        if len(self._differences) < FEWEST_STEPS:
            return 2 * LEAST_SPREAD
        middle = median(self._differences)
        deviation = median(abs(difference - middle) for difference in self._differences)
        return max(LEAST_SPREAD, deviation / (0.6745 * math.sqrt(2)))

    def _error(self) -> float:
        """Standard error of the difference of two medians: of the first steps, and of the latest three."""
        return 1.25 * self._spread() * math.sqrt(1 / FEWEST_FIRST_STEPS + 1 / FEWEST_STEPS)

    def _has_trend(self, x: float) -> bool:
        """Whether the first steps grow, by Mann's count of pairs in order, and by how much."""
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

    def _follow(self, step: int, x: float, excess: float) -> None:
        """Go on with a change that lasts: look for its onset with more steps for a while, and for its end."""
        change = self.changes[-1]
        self._since_found += 1
        if self._since_found in (SETTLED // 4, SETTLED // 2, SETTLED):
            change = self._located(found=change.found, level=math.log(change.baseline))
        latest = median(value for _, value in list(self._values)[-FEWEST_STEPS:])
        z = (latest - math.log(change.baseline)) / self._error()
        change = replace(change, value=math.exp(latest), z=z, lasted=step - change.onset + 1)

        self._well = self._well + 1 if excess <= 0 else 0
        if self._well >= WELL_STEPS:
            steps = [number for number, _ in self._values]
            ended = steps[-self._well]
            change = replace(change, ended=ended, well=self._well, lasted=ended - change.onset)
            self._sum, self._values = 0.0, deque(list(self._values)[-self._well :], maxlen=REMEMBERED)
        self.changes[-1] = change

    def _located(self, *, found: int, level: float) -> Change:
        """The change with the onset that fits the remembered values best; `level` is the log of its baseline."""
        steps = [step for step, _ in self._values]
        values = [value for _, value in self._values]
        place, shape = onset_of(values)
        latest = median(values[-FEWEST_STEPS:])

        # The start of the run is known as long as no step was forgotten.
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
