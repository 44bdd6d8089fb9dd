"""Random batches and configurations for the float64 oracle (tests/oracle.py), and the tolerances.

A decision within rounding of a bound has no right answer: 0.99999999 and 1.00000001 may both be what an implementation
sees. Batches in which any comparison is within 1e-5 of its bound are therefore drawn again, and `Case.redrawn` counts
how often that happened.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import oracle
import torch
from implementations import TAKES, Takes
from oracle import INF, Response, Token

from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.core.metric_registry import CRITERIA
from rollcorr.correction import Correction, correct

MARGIN = 1e-5
"""How far from a bound every decision is: of the ratio, or relative to a bound in nats."""

METRIC_TOLERANCE = 2e-5
WEIGHT_ULPS = 2
"""One more for normalized weights: weight, factor and quotient are each rounded, and right below a power of two a
rounding of 2⁻²⁴ is almost a whole unit."""

ROUNDING = 6e-8
"""Half a unit in the last place of float32, 2⁻²⁴, relative."""

FLOAT64_ROUNDING = 2.0**-52

HUGE = 1e10
"""Log-ratios that leave float64 no digits of ordinary ones beside them, if they cancel each other."""

LARGEST_NORMAL = 87.0
"""Safety bound up to which weights are normal numbers of float32: e^−88 is not."""

SMALLEST_PROBABILITY = 2e-38
"""About where float32 ends."""

LARGEST_DENSITY = 1e30
"""Probabilities are at most 1. Densities may be larger than float32 holds; their differences are then only "large"."""

LAST = -3.4e38
"""Sentinel at the end of the float32 range; −inf in half precision."""


WEIGHT_BOUNDS = [(bound, None) for bound in (None, 2.0, 2.0, 0.5, 1e6, "0.5_2.0", "1.5_3.0", "0.2_50", "0_1.7")]
MORE_WEIGHT_BOUNDS = [("0.6_inf", None), (2.0, 0.5), (3.0, 0.01), (None, 0.7), (None, 1.6)]
"""Thresholds with their floors; the second list for implementations that take every bound."""


LEVELS = [None, "token", "token", "sequence", "geometric"]


@dataclass(frozen=True)
class Case:
    """A padded batch; `lengths` are the row lengths of its packed form, which drops the other columns."""

    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    lengths: list[int]
    config: RolloutCorrectionConfig
    expected: oracle.Result
    redrawn: int

    def run(self, impl: str, *, packed: bool) -> Correction:
        """Return the package's result; `packed` drops the padding."""
        if not packed:
            return correct(self.train, self.rollout, self.mask, self.config, impl=impl, densities=True)
        tokens = [x[self.inside] for x in (self.train, self.rollout, self.mask)]
        cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0)
        return correct(*tokens, self.config, cu_seqlens=cu_seqlens, impl=impl, densities=True)

    @property
    def inside(self) -> torch.Tensor:
        return torch.arange(self.mask.shape[1]) < torch.tensor(self.lengths, dtype=torch.long)[:, None]


# --- drawing ---


def draw(seed: int, impl: str = "reference") -> Case:
    """The case of a seed: a configuration, and a batch in which no decision is within rounding of a bound.

    Equal seeds return equal cases; the implementation accepts each of them.
    """
    takes = TAKES[impl]
    for redrawn in range(100):
        rng = random.Random(f"{seed}/{redrawn}")
        config = draw_config(rng, takes)
        train, rollout, mask, lengths = draw_batch(rng, takes)
        # The oracle reads the values after rounding to the dtypes of the tensors.
        rows = [x.double().tolist() for x in (train, rollout, mask)]
        settings = oracle.settings_of(config)
        if not any(is_close for is_close in close_comparisons(rows, settings)):
            return Case(train, rollout, mask, lengths, config, oracle.correct(*rows, settings), redrawn)
    raise AssertionError(f"seed {seed}: no batch out of 100 keeps its distance from the bounds of {config}")


def draw_config(rng: random.Random, takes: Takes) -> RolloutCorrectionConfig:
    """Any level, any kind of bound, up to five criteria, any policy."""
    names = rng.sample(CRITERIA, rng.choice([0, 1, 2, 5]))
    k1_thresholds = ["0.5_2.0", "0_1.5", "0.9_inf", "1.25_1.5", "1.001", "0.999_1.002"]
    thresholds = [rng.choice(k1_thresholds if name.endswith("k1") else ["0.3", "1e-6", "0.01", "50"]) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        threshold, floor = rng.choice(WEIGHT_BOUNDS + (MORE_WEIGHT_BOUNDS if takes.every_weight_bound else []))
        return RolloutCorrectionConfig(
            rollout_is=rng.choice([*LEVELS, "horizon"]),
            rollout_is_horizon=rng.choice([0.0, 0.3, 0.9, 0.999, 1.0]),
            rollout_is_horizon_per_turn=rng.random() < 0.5,
            rollout_is_threshold=threshold,
            rollout_is_floor=floor,
            rollout_is_batch_normalize=rng.random() < 0.5,
            batch_normalize_over=rng.choice(["valid", "kept"]),
            rollout_rs=",".join(names) or None,
            rollout_rs_threshold=",".join(thresholds) or None,
            rollout_token_veto_threshold=rng.choice([None, 1e-4, 0.05, 0.9]),
            nonfinite=rng.choice(["reject_token", "reject_sequence", "neutral"]),
            safety_bound=rng.choice([20.0, 20.0, 1.0, 3.0, 40.0, min(LARGEST_NORMAL, takes.largest_bound)]),
        )


def draw_batch(rng: random.Random, takes: Takes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """(train, rollout, mask, lengths): up to 6 × 40 tokens of one character, with accidents."""
    # One batch in ten is empty.
    B, T = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 5, 17, 17, 40])
    if rng.random() < 0.05:
        B, T = rng.choice([(0, 0), (0, 5), (3, 0)])
    noise = np.random.default_rng(rng.randrange(2**32))

    # Confident tokens have log-probs next to 0, where bfloat16 is coarse in d and fine in log π.
    rollout = -noise.exponential(rng.choice([1e-4, 0.5, 3.0]), (B, T))
    d = noise.normal(size=(B, T)) * rng.choice([0.0, 1e-4, 1e-3, 0.05, 0.5, 2.0, 15.0])
    if rng.random() < 0.25:
        d += rng.choice([-20.0, -20.0, -19.0, 8.0, -120.0, 60.0])
    if rng.random() < 0.1:
        d = np.where(noise.random((B, T)) < 0.1, rng.choice([-800.0, 400.0, 1000.0]), d)
    train = rollout + d

    mask = noise.random((B, T)) < rng.choice([0.5, 0.9, 0.9, 1.0]) * (rng.random() > 0.05)
    lengths = [rng.choice([0, T, T, rng.randint(0, T)]) for _ in range(B)]
    mask &= np.arange(T) < np.array(lengths, dtype=int).reshape(B, 1)

    # Accidents at valid tokens, and garbage at masked ones.
    sentinel = max(LAST, -takes.largest_log_ratio)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 4)):
            side = train if rng.random() < 0.5 else rollout
            value = rng.choice([math.nan, INF, -INF, -INF, sentinel, sentinel])
            if B * T:
                side.flat[rng.randrange(B * T)] = value
    if rng.random() < 0.5:
        garbage = noise.choice([math.nan, INF, -INF, LAST, 1e30, 200.0], (2, B, T))
        train, rollout = np.where(mask, train, garbage[0]), np.where(mask, rollout, garbage[1])

    first, second = rng.choice(takes.dtypes), rng.choice(takes.dtypes)
    mask_dtype = rng.choice([torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16])
    tensors = torch.from_numpy(train).to(first), torch.from_numpy(rollout).to(second)
    return *tensors, torch.from_numpy(mask).to(mask_dtype), lengths


def close_comparisons(rows: list[list[list[float]]], settings: oracle.Settings) -> Iterator[bool]:
    """Of every comparison that the correction makes on this batch: is it within rounding of its bound?"""
    logs = [math.log(0.9), math.log(1.1), -oracle.CAP, oracle.CAP, -settings.safety_bound, settings.safety_bound]
    bounds = [settings.lower, settings.upper, settings.floor, settings.veto]
    bounds += [1 / settings.upper] if settings.upper else []
    for criterion in settings.criteria:
        bounds += [criterion.lower, criterion.upper] if criterion.kind == "k1" else []
    logs += [math.log(bound) for bound in bounds if bound is not None]

    for log_pi, log_mu, mask in zip(*rows, strict=True):
        tokens = [Token(0, t, log_pi[t], log_mu[t], settings.nonfinite) for t, valid in enumerate(mask) if valid]
        if not any(token.counts for token in tokens):
            continue
        sequence = Response(tokens)
        size = oracle.total(abs(token.d) for token in sequence.counting if token.d > -INF)
        of_tokens = [token.d for token in sequence.counting]
        yield any(abs(d - bound) <= MARGIN for d in of_tokens for bound in logs)
        # A sum of huge terms that cancel keeps no digit near a bound.
        cancelled = abs(oracle.total(token.d for token in sequence.measured)) < 1e-6 * size
        yield size > HUGE and cancelled
        sums = [sequence.S, sequence.G]
        yield any(abs(total - bound) <= MARGIN + 1e-12 * size for total in sums for bound in logs)

        for criterion in settings.criteria:
            if criterion.kind != "k1":
                judged = [oracle.divergence(criterion.kind, d) for d in of_tokens]
                judged.append(oracle.statistic(criterion, sequence))
                yield any(abs(value - criterion.upper) <= MARGIN * criterion.upper for value in judged)

        # At level "horizon" each token has its own sum.
        if settings.level == "horizon":
            for token in sequence.counting:
                terms = oracle.horizon_terms(token, sequence, settings)
                log_weight, size = oracle.total(terms), oracle.total(map(abs, terms))
                yield HUGE < size < INF and abs(log_weight) < 1e-6 * size
                yield any(abs(log_weight - bound) <= MARGIN + 1e-12 * size for bound in logs)

        # The mean raw weight of a sequence meets the same band.
        if settings.level is not None:
            oracle.weigh([sequence], settings)
            band = oracle.reported_band(settings) or ()
            yield any(abs(sequence.raw_weight - x) <= MARGIN * x for x in band if x is not None)


# --- comparing ---


def differences(case: Case, correction: Correction, impl: str, *, packed: bool) -> list[str]:
    """Where a correction differs from the oracle, in words; empty where it does not."""
    found = []
    select = (lambda x: x[case.inside]) if packed else (lambda x: x)
    expected = case.expected

    loss_mask = select(torch.tensor(expected.loss_mask, dtype=torch.bool).view(case.mask.shape))
    if not torch.equal(correction.loss_mask, loss_mask):
        found.append(f"loss_mask {correction.loss_mask.int().tolist()}, expected {loss_mask.int().tolist()}")
    if correction.sequence_kept.tolist() != expected.sequence_kept:
        found.append(f"sequence_kept {correction.sequence_kept.tolist()}, expected {expected.sequence_kept}")

    if (correction.weights is None) != (expected.weights is None):
        found.append(f"weights {correction.weights}, expected {expected.weights}")
    elif expected.weights is not None:
        weights = select(torch.tensor(expected.weights, dtype=torch.float64).view(case.mask.shape))
        off = ulps(correction.weights, weights)
        if off > WEIGHT_ULPS + case.config.rollout_is_batch_normalize:
            found.append(f"weights off by {off:.2f} float32 ulps: {correction.weights}, expected {weights}")

    metrics = correction.metrics(prefix="")
    if metrics.keys() != expected.metrics.keys():
        found.append(f"metrics that one side lacks: {sorted(metrics.keys() ^ expected.metrics.keys())}")
    floors = absolute_floors(case)
    for name in sorted(metrics.keys() & expected.metrics.keys()):
        actual, wanted = metrics[name], expected.metrics[name]
        if not agree(name, actual, wanted, floors, case):
            found.append(f"{name} = {actual!r}, expected {wanted!r}")
    return found


def ulps(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance in units in the last place of float32."""
    if not actual.numel():
        return 0.0
    if not actual.isfinite().all():
        return INF
    _, exponent = torch.frexp(expected)
    # Below the normal range the unit stays the smallest.
    unit = torch.ldexp(torch.ones_like(expected), exponent.clamp(min=-125) - 24)
    return ((actual.double() - expected).abs() / unit).max().item()


def agree(name: str, actual: float, wanted: float, floors: dict[str, float], case: Case) -> bool:
    """Return whether a metric equals the oracle's, relatively or within its floor."""
    if math.isinf(wanted):
        return actual == wanted
    if name == "max_viable_length" and floors["kl"] > METRIC_TOLERANCE * abs(case.expected.metrics["kl"]):
        # safety_bound / kl: where kl is rounding, so is this, and its sign with it.
        return actual > 0 or actual == wanted
    if name.startswith("prob_diff_abs") and wanted > LARGEST_DENSITY:
        # Densities beyond float32: large they must be, in whatever arithmetic.
        return actual > LARGEST_DENSITY
    return abs(actual - wanted) <= max(METRIC_TOLERANCE * abs(wanted), floors.get(name, 0.0))


def absolute_floors(case: Case) -> dict[str, float]:
    """Return the absolute tolerance of a metric: where terms cancel, relative precision has no meaning.

    An implementation may store each value in float32, so each is off by some ROUNDING of itself. Then

    - a mean of values of both signs is off by up to ROUNDING · mean |x|;
    - a standard deviation moves by no more than the values do: up to 3 ROUNDING · max |x| (k2 is a square);
    - |q − 1| has the error of q, which is near 1 wherever this matters.

    k3 of a tiny log-ratio cancels in float64 itself.
    """
    metrics = case.expected.metrics
    floors = {"rollout_is_seq_max_deviation": ROUNDING}

    # Where float32 ends, e^−87, a probability is 0.
    floors["prob_diff_abs_mean"] = floors["prob_diff_abs_max"] = SMALLEST_PROBABILITY

    size = metrics["log_ratio_abs_mean"]
    for name in ("kl", "log_ratio_mean", "log_ppl_diff", "log_ppl_diff_max", "log_ppl_diff_min", "t_times_kl"):
        floors[name] = ROUNDING * size
    floors["t_times_kl"] *= metrics["token_count"]
    # ρ² − 1 is 2 d near 0.
    floors["chi2_token"], floors["chi2_seq"] = 2 * ROUNDING * size, 2 * ROUNDING * size * metrics["token_count"]

    for name in metrics:
        if name.endswith("_std"):
            stem = name.removesuffix("_std")
            largest = max(abs(metrics[f"{stem}_min"]), abs(metrics[f"{stem}_max"]))
            floors[name] = 3 * ROUNDING * largest
            if "_k1" in name:
                floors[f"{stem}_mean"] = ROUNDING * largest

    # k3 = expm1(d) − d keeps float64's digits of d, and is d²/2.
    d = max(abs(metrics["log_ratio_min"]), abs(metrics["log_ratio_max"]))
    for name in metrics:
        if name == "k3_kl" or ("_k3_" in name and name.endswith(("mean", "std", "min", "max", "deviation"))):
            floors[name] = max(floors.get(name, 0.0), FLOAT64_ROUNDING * d)
    return floors
