"""Calibrate thresholds and alarms from a null: reject a stated share of healthy sequences.

A customary threshold rejects any share from 0 to 1, depending on length and noise. A null contains the noise, so
quantiles of its rows are thresholds; a band has half of the rate on each side. For lengths without recorded rows, rows
are cut or spliced (`spliced_rows`), which ignores effects of a longer context.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.advice.order_statistics import QuantileEstimate, interval_of, quantile_estimate
from rollcorr.diagnostics.advice.spliced_rows import (
    FEWEST,
    SUMS,
    Source,
    UnitRows,
    at_length,
    halves_of,
    row_levels,
    rows_for,
    splices,
    token_means,
)
from rollcorr.diagnostics.null.mismatch_profile import MismatchProfile, size_edges
from rollcorr.diagnostics.null.null_file import MismatchNull
from rollcorr.diagnostics.null.token_ratios import k3_of
from rollcorr.run_directory.durable_files import write_text_durably
from rollcorr.run_directory.stored_run import BadInputError

Floats = NDArray[np.float64]

LENGTHS = (100, 500, 1000, 8000)
REPLICATES = 200
"""Number of bootstrap replicates for an interval."""
TOKEN_REPLICATES = 100
"""Number of bootstrap replicates over tokens; fewer, because tokens are numerous."""
SPLICES, SPLICES_AGAIN = 20_000, 2_000
"""Number of spliced sequences for an estimate, and for each of its replicates."""
LARGEST_RATIO = math.exp(88.0)
"""Largest ratio that float32 can represent."""
TIE, TIE_OF_RATIO = 1e-5, 2e-7
"""Relative margin, in nats, by which a written threshold is widened, and the additional nats for a ratio. Frameworks
compare in float32: rounding must not reject a value that several sequences share."""


@dataclass(frozen=True, kw_only=True)
class CalibratedLimit:
    """A threshold for one setting and length.

    Values beyond the threshold are rejected; values equal to it are kept. Ties are kept or rejected together (extremes
    of a policy with few distinct log-ratios are often tied), so the rejected share is at most the rate.

    Attributes:
        setting: a criterion ("seq_mean_k3"), "veto", or a kind of weight threshold ("token ceiling", "token band",
            "sequence ceiling", "sequence band").
        option: configuration field of the threshold.
        length: tokens per sequence; None if the threshold does not depend on it.
        source: origin of the sequences of this length.
        upper: largest accepted value: a ratio for k1 and weights, nats for k2 and k3; None without an upper bound.
        lower: smallest accepted value, a ratio; None without a lower bound.
    """

    setting: str
    option: str
    length: int | None
    source: Source
    upper: QuantileEstimate | None
    lower: QuantileEstimate | None = None

    @property
    def text(self) -> str:
        """Return the threshold in configuration syntax, widened by `TIE`."""
        ends = (self.lower, -1), (self.upper, 1)
        return "_".join(f"{self._farther_out(end.value, sign):.9g}" for end, sign in ends if end is not None)

    def _farther_out(self, value: float, sign: int) -> float:
        if self.setting.endswith(("k2", "k3")) or value <= 0:
            return value * (1 + sign * TIE)
        return value * math.exp(sign * (TIE_OF_RATIO + TIE * abs(math.log(value))))


@dataclass(frozen=True, kw_only=True)
class CalibratedAlarm:
    """Limit of a metric that a healthy step exceeds with a stated probability.

    Attributes:
        metric: "k3_kl" or "log_ratio_std".
        length: tokens per sequence.
        sequences: sequences per step.
        limit: nats per token.
    """

    metric: str
    length: int
    sequences: int
    limit: QuantileEstimate


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Thresholds and alarms from a null.

    Attributes:
        null: name of the null.
        rows: number of sequences in the null.
        tokens: number of tokens in the null.
        rate: share of healthy units that a threshold rejects: tokens for token settings, else sequences.
        alarm_rate: share of healthy steps that exceed an alarm.
        limits: thresholds by setting and length.
        alarms: alarms by metric and length.
        remarks: notes on the method, one sentence each.
    """

    null: str
    rows: int
    tokens: int
    rate: float
    alarm_rate: float
    limits: tuple[CalibratedLimit, ...]
    alarms: tuple[CalibratedAlarm, ...]
    remarks: tuple[str, ...]

    def limit(self, setting: str, length: int | None = None) -> CalibratedLimit:
        """Return the threshold of a setting.

        Args:
            setting: name, as in `CalibratedLimit`.
            length: tokens per sequence; default: None, for token settings.

        Raises:
            KeyError: the threshold was not calibrated.
        """
        for one in self.limits:
            if one.setting == setting and one.length == length:
                return one
        raise KeyError(f"no threshold for {setting} at length {length}")

    def to_json(self) -> str:
        """Return everything as a JSON document; an unbounded interval end becomes null."""
        document = {
            "format": "rollcorr-calibration",
            "version": 1,
            **{name: getattr(self, name) for name in ("null", "rows", "tokens", "rate", "alarm_rate", "remarks")},
            "limits": [
                {**asdict(one), "lower": _plain(one.lower), "upper": _plain(one.upper), "text": one.text}
                for one in self.limits
            ],
            "alarms": [{**asdict(one), "limit": _plain(one.limit)} for one in self.alarms],
        }
        return json.dumps(document, ensure_ascii=False, indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document atomically."""
        write_text_durably(Path(path), self.to_json() + "\n")


def calibrate(
    null: MismatchNull,
    *,
    rate: float = 0.05,
    lengths: Sequence[int] = LENGTHS,
    alarm_rate: float = 0.001,
    sequences: int = 256,
    seed: int = 0,
) -> Calibration:
    """Compute thresholds that reject a share of healthy sequences, and alarms that a share of healthy steps exceeds.

    Args:
        null: mismatch between two correct policies.
        rate: share of tokens (token settings) or sequences to reject; default 0.05.
        lengths: response lengths to calibrate for, tokens; default `LENGTHS`.
        alarm_rate: share of healthy steps that exceed an alarm; default 0.001.
        sequences: sequences per step, for the alarms.
        seed: random seed of splices and bootstrap.

    Returns:
        Thresholds and alarms with 95 % intervals, which reflect the sampling of the null's rows.

    Raises:
        BadInputError: the null contains fewer than 200 rows or compares one side with itself, or a rate or length is
            out of range.
    """
    null.check_sides()
    _check(null, rate, alarm_rate, lengths, sequences)
    rows = UnitRows.of_table(null.profile.rows)
    limits, halves = [*_token_limits(null, rate, seed)], halves_of(null.sample)
    alarms: list[CalibratedAlarm] = []
    remarks: list[str] = []
    for length in lengths:
        source, parts = rows_for(length, rows, null.sample)
        if source == "spliced" and len(parts) == len(rows):
            parts = _with_means_of_all(parts, null.profile)
        limits += _limits_at(length, source, parts, rate, seed, halves)
        alarms += _alarms_at(length, rows, alarm_rate, sequences, seed)
        if source != "recorded":
            remarks.append(_remark(length, source, parts))
    return Calibration(
        null=null.name,
        rows=null.profile.row_count,
        tokens=null.profile.tokens,
        rate=rate,
        alarm_rate=alarm_rate,
        limits=tuple(limits),
        alarms=tuple(alarms),
        remarks=tuple(remarks),
    )


def _with_means_of_all(rows: UnitRows, profile: MismatchProfile) -> UnitRows:
    """Return the table's rows, shifted to the means of all rows, because a splice multiplies an error of the mean.

    A large null stores only some rows in its table, but exact sums over all rows.
    """
    _, d, square, k3 = profile.cells.sum(1)
    means = np.array([d, square / 2, k3]) / profile.tokens
    own = token_means(rows)
    sums = rows.sums * np.where(own > 0, means / np.where(own > 0, own, 1.0), 1.0)[:, None]
    # d has either sign: shift its sums. k2 and k3 are scaled above, so they stay positive.
    sums[0] = rows.sums[0] + (means - own)[0] * rows.tokens
    return replace(rows, sums=sums)


def _check(null: MismatchNull, rate: float, alarm_rate: float, lengths: Sequence[int], sequences: int) -> None:
    for name, value in (("rate", rate), ("alarm rate", alarm_rate)):
        if not 0 < value < 0.5:
            raise BadInputError(f"the {name} is a share between 0 and 0.5; got {value:g}")
    for name, counts in (("length", lengths), ("number of sequences", [sequences])):
        if min(counts, default=0) < 1:
            raise BadInputError(f"a {name} is 1 or more; got {', '.join(map(str, counts)) or 'none'}")
    if len(null.profile.rows) < FEWEST:
        raise BadInputError(
            f"{null.name} has {len(null.profile.rows)} rows, and a quantile needs {FEWEST}; measure a larger null"
        )


def _remark(length: int, source: Source, parts: UnitRows) -> str:
    low, high = parts.tokens.min(), parts.tokens.max()
    if source == "cut":
        return f"T = {length:,} is cut from longer responses: fewer than {FEWEST} responses have about this length"
    return (
        f"T = {length:,} is extrapolated: responses of {low:,.0f} to {high:,.0f} tokens are put end to end, which "
        "leaves out what a longer context changes"
    )


def _limits_at(
    length: int, source: Source, parts: UnitRows, rate: float, seed: int, halves: Floats
) -> Iterator[CalibratedLimit]:
    """Compute the thresholds of all sequence settings at one length."""
    estimates = _quantile_estimator(length, source, parts, rate, seed, halves)

    def limit(
        setting: str, option: str, upper: QuantileEstimate | None, lower: QuantileEstimate | None = None
    ) -> CalibratedLimit:
        return CalibratedLimit(setting=setting, option=option, length=length, source=source, upper=upper, lower=lower)

    # S is the log of the product, S / T the log of the geometric mean.
    low, high, above = (estimates(0, q) for q in (rate / 2, 1 - rate / 2, 1 - rate))
    for setting, option, scale in (
        ("seq_sum_k1", "rollout_rs_threshold", 1),
        ("seq_mean_k1", "rollout_rs_threshold", length),
        ("sequence band", "rollout_is_threshold", 1),
        ("geometric band", "rollout_is_threshold", length),
    ):
        yield limit(setting, option, _ratio(high, scale), _ratio(low, scale))
    yield limit("sequence ceiling", "rollout_is_threshold", _ratio(above, 1))
    yield limit("geometric ceiling", "rollout_is_threshold", _ratio(above, length))
    for column, kind in ((1, "k2"), (2, "k3")):
        upper = estimates(column, 1 - rate)
        yield limit(f"seq_sum_{kind}", "rollout_rs_threshold", upper)
        yield limit(f"seq_mean_{kind}", "rollout_rs_threshold", QuantileEstimate(*(x / length for x in upper)))

    for column, setting in ((3, "seq_max_k2"), (4, "seq_max_k3")):
        yield limit(setting, "rollout_rs_threshold", estimates(column, 1 - rate))
    lowest = estimates(5, 1 - rate)
    veto = QuantileEstimate(-lowest.value, -lowest.high, -lowest.low)
    yield limit("veto", "rollout_token_veto_threshold", None, _ratio(veto, 1))


def _compute_maxima(lowest: Floats, highest: Floats) -> Floats:
    """Compute the largest k2, k3 and −d of sequences from the extremes of d: (3, r)."""
    size = np.maximum(np.abs(lowest), np.abs(highest))
    return np.stack([size**2 / 2, np.maximum(k3_of(lowest), k3_of(highest)), -lowest])


def _quantile_estimator(
    length: int, source: Source, parts: UnitRows, rate: float, seed: int, halves: Floats
) -> Callable[[int, float], QuantileEstimate]:
    """Return a function that estimates a quantile of a column: `SUMS`, then `_compute_maxima`."""
    count = max(length / float(parts.tokens.mean()), 1e-9)
    sums = at_length(parts.tokens, parts.sums, length, token_means(parts))
    columns = np.concatenate([sums, _compute_maxima(parts.lowest, parts.highest)])

    # P(max of k independent parts ≤ x) is the k-th power of P(part ≤ x).
    def of_parts(column: int, q: float) -> QuantileEstimate:
        return quantile_estimate(columns[column], q if column < len(SUMS) else q ** (1 / count))

    if source == "recorded":
        return of_parts

    # Windows of a row are dependent, and splices reuse rows, so the bootstrap resamples entire rows.
    random = np.random.default_rng([seed, length])
    wanted = np.array([rate / 2, 1 - rate / 2, 1 - rate])

    def quantiles(rows: UnitRows, count: int, halves: Floats) -> Floats:
        if source == "cut":
            drawn = at_length(rows.tokens, rows.sums, length, token_means(rows))
        else:
            made = splices(rows, length, count, random, row_levels(halves))
            drawn = np.concatenate([made[: len(SUMS)], _compute_maxima(*made[len(SUMS) :])])
        return np.quantile(drawn, wanted, axis=1, method="weibull").T

    value, rows = quantiles(parts, SPLICES, halves), halves.shape[-1]
    again = np.empty((REPLICATES, *value.shape))
    for replicate in again:
        drawn = random.integers(max(rows, 1), size=rows)
        replicate[:] = quantiles(_drawn_anew(parts, random), SPLICES_AGAIN, halves[..., drawn])

    def estimate(column: int, q: float) -> QuantileEstimate:
        if column >= len(value):
            return of_parts(column, q)
        place = int(np.abs(wanted - q).argmin())
        return QuantileEstimate(float(value[column, place]), *interval_of(again[:, column, place]))

    return estimate


def _drawn_anew(parts: UnitRows, random: np.random.Generator) -> UnitRows:
    """Return a bootstrap replicate: draw clusters with replacement, with all their stretches, and renumber them."""
    order = np.argsort(parts.cluster, kind="stable")
    numbers, first, sizes = np.unique(parts.cluster[order], return_index=True, return_counts=True)
    drawn = random.integers(len(numbers), size=len(numbers))
    size = sizes[drawn]
    start = np.repeat(first[drawn] - (size.cumsum() - size), size)
    rows = parts.taken(order[start + np.arange(len(start))])
    return replace(rows, cluster=np.repeat(np.arange(len(drawn)), size))


def _token_limits(null: MismatchNull, rate: float, seed: int) -> Iterator[CalibratedLimit]:
    """Compute the thresholds of all token settings; the share of tokens does not depend on the length."""
    low, high, above, k2, k3 = _token_quantiles(null, rate, seed)

    def limit(
        setting: str, option: str, upper: QuantileEstimate, lower: QuantileEstimate | None = None
    ) -> CalibratedLimit:
        return CalibratedLimit(setting=setting, option=option, length=None, source="recorded", upper=upper, lower=lower)

    band = _ratio(high, 1), _ratio(low, 1)
    yield limit("token_k1", "rollout_rs_threshold", *band)
    yield limit("token_k2", "rollout_rs_threshold", k2)
    yield limit("token_k3", "rollout_rs_threshold", k3)
    yield limit("token ceiling", "rollout_is_threshold", _ratio(above, 1))
    yield limit("token band", "rollout_is_threshold", *band)


def _token_quantiles(null: MismatchNull, rate: float, seed: int) -> list[QuantileEstimate]:
    """Estimate quantiles over tokens: d at rate/2, 1 − rate/2 and 1 − rate, then k2 and k3 at 1 − rate."""
    if not null.sample:
        return _binned_quantiles(null.profile, rate)
    d = np.concatenate(null.sample)
    row = np.repeat(np.arange(len(null.sample)), [len(values) for values in null.sample])
    random = np.random.default_rng([seed, 0])
    times = [
        np.bincount(random.integers(len(null.sample), size=len(null.sample)), minlength=len(null.sample))
        for _ in range(TOKEN_REPLICATES)
    ]

    estimates = []
    half, upper = (rate / 2, 1 - rate / 2, 1 - rate), (1 - rate,)
    for values, levels in ((d, half), (d * d / 2, upper), (k3_of(d), upper)):
        order = values.argsort()
        ordered, rows = values[order], row[order]
        again = np.empty((TOKEN_REPLICATES, len(levels)))
        for i, weight in enumerate(times):
            cumulated = weight[rows].cumsum()
            again[i] = ordered[np.searchsorted(cumulated, np.array(levels) * cumulated[-1])]
        for j, q in enumerate(levels):
            value = float(np.quantile(ordered, q, method="weibull"))
            estimates.append(QuantileEstimate(value, *interval_of(again[:, j])))
    return estimates


def _binned_quantiles(profile: MismatchProfile, rate: float) -> list[QuantileEstimate]:
    """Estimate the same quantiles from the histogram of d, if no tokens are stored; the bin is the interval."""
    edges = size_edges(profile.sizes.shape[1] // 32)
    ends = list(pairwise(edges.tolist()))
    bins = [*(QuantileEstimate(-math.sqrt(a * b), -b, -a) for a, b in ends)][::-1]
    bins += [QuantileEstimate(math.sqrt(a * b), a, b) for a, b in ends]
    counts = np.concatenate([profile.sizes[0, ::-1], profile.sizes[1]])

    def at(weights: Floats, order: NDArray[np.int64], q: float) -> QuantileEstimate:
        cumulated = weights[order].cumsum()
        return bins[int(order[np.searchsorted(cumulated, q * cumulated[-1])])]

    signed = np.arange(len(bins))
    found = [at(counts, signed, q) for q in (rate / 2, 1 - rate / 2, 1 - rate)]
    for size in (lambda x: x * x / 2, k3_of):
        values = size(np.array([one.value for one in bins]))
        chosen = at(counts, values.argsort(), 1 - rate)
        sizes = size(np.array(chosen))  # a decreasing function swaps low and high
        found.append(QuantileEstimate(float(sizes[0]), float(sizes.min()), float(sizes.max())))
    return found


def _alarms_at(length: int, rows: UnitRows, alarm_rate: float, sequences: int, seed: int) -> Iterator[CalibratedAlarm]:
    """Compute limits on k3 and the standard deviation of a step.

    The mean over the rows of a step is nearly normal; its third moment corrects the quantile (Cornish and Fisher).
    Responses to one prompt are dependent, so each prompt is one unit, also in the bootstrap.
    """
    random = np.random.default_rng([seed, length, 1])
    again = np.stack(
        [_step_limits(_drawn_anew(rows, random), length * sequences, alarm_rate) for _ in range(REPLICATES)]
    )
    values = _step_limits(rows, length * sequences, alarm_rate)
    for column, metric in enumerate(("k3_kl", "log_ratio_std")):
        limit = QuantileEstimate(float(values[column]), *interval_of(again[:, column]))
        yield CalibratedAlarm(metric=metric, length=length, sequences=sequences, limit=limit)


def _step_limits(rows: UnitRows, tokens: int, alarm_rate: float) -> Floats:
    """Compute the k3 and std that a step of `tokens` tokens exceeds with probability `alarm_rate`: (2,), nats."""
    mean, half_square, k3 = token_means(rows)
    variance = 2 * half_square - mean**2

    # A prompt's deviation from its expected part of the step's sums: of k3, and of the squared deviation from the mean.
    beyond = np.stack(
        [
            rows.sums[2] - k3 * rows.tokens,
            2 * rows.sums[1] - 2 * mean * rows.sums[0] + (mean**2 - variance) * rows.tokens,
        ]
    )
    first = np.flatnonzero(np.diff(rows.cluster, prepend=-1))
    beyond, average = np.add.reduceat(beyond, first, axis=1), rows.tokens.sum() / len(first)
    spread = np.maximum(beyond.std(1), 1e-300)
    skewness = ((beyond / spread[:, None]) ** 3).mean(1)
    count = tokens / average
    z = NormalDist().inv_cdf(1 - alarm_rate)
    quantile = z + (z * z - 1) * skewness / (6 * math.sqrt(count))
    limits = np.array([k3, variance]) + quantile * spread / (math.sqrt(count) * average)
    limits[1] = math.sqrt(max(limits[1], 0.0))
    return limits


def _ratio(estimate: QuantileEstimate, scale: float) -> QuantileEstimate:
    """Convert a log-ratio to a ratio, after division by `scale`."""
    return QuantileEstimate(*(min(math.exp(min(x / scale, 88.0)), LARGEST_RATIO) for x in estimate))


def _plain(estimate: QuantileEstimate | None) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in estimate._asdict().items()}
