"""What pure noise would show: the expectation of each metric when the two policies differ by rounding alone.

Rounding makes the log-ratio d of a token nearly normal. The rollout policy sampled, so E_μ[exp(d)] = 1 and

    d ~ N(−σ²/2, σ²)              one token; kl = k3 = σ²/2, χ² = exp(σ²) − 1
    S ~ N(−T σ²/2, T σ²)          the sum over T tokens; the effective sample size of sequence weights is exp(−T σ²)
    G ~ N(−σ²/2, σ²/T)            the mean over T tokens

with tokens independent and all responses of the mean length. An estimate that has either sign, such as the mean of −d,
is seldom near its expectation: chance moves it by its standard error, σ / √N over N tokens. Of such a metric the range
is given that holds 95 % of batches. A metric far from this expectation shows something that
noise of this size does not explain; a metric near it is what this noise, this length and these thresholds make of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.kernels.correction.cpu.job import accepted_log_ratios

SIGNED = frozenset({"kl", "t_times_kl", "ppl_ratio", "chi2_token", "chi2_seq", "kl_joint"})
"""Estimates that chance moves to either side of 0, or of 1: from noise alone they have a range."""
RANGE_Z = 1.96
"""Standard errors of the range that holds 95 % of batches."""
MOST_SKEWED = 0.5
"""Skewness of a mean, above which it is not normal and its range is not given."""
MOST_SPREAD = 100.0
"""Variance of a log, nats², beyond which no batch is large enough for a range."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise of a token.

    Attributes:
        sigma: standard deviation of its log-ratio, nats.
        source: where it was measured, in words.
        k3: mean k3 per token there, nats; None: σ²/2.
        is_null: it was measured where both policies were known to be the same.
        unusable: why weights are not judged by it, as a clause after its source; empty if they are.
    """

    sigma: float
    source: str
    k3: float | None = None
    is_null: bool = False
    unusable: str = ""

    @property
    def mean_k3(self) -> float:
        """k3 per token, nats: as measured, else σ²/2."""
        return self.sigma**2 / 2 if self.k3 is None else self.k3


@dataclass(frozen=True)
class _Normal:
    """A normal log-weight of given mean and standard deviation."""

    mean: float
    std: float

    def times(self, factor: float) -> _Normal:
        """The value times a factor."""
        return _Normal(factor * self.mean, abs(factor) * self.std)

    def below(self, x: float) -> float:
        """P(value < x)."""
        return 0.5 * (1 + math.erf((x - self.mean) / (self.std * math.sqrt(2))))

    def outside(self, low: float, high: float) -> float:
        """P(value < low or value > high)."""
        return self.below(low) + 1 - self.below(high)

    def absolute_mean(self) -> float:
        """E[|value|]."""
        ratio = self.mean / self.std
        density = math.exp(-(ratio**2) / 2) * math.sqrt(2 / math.pi)
        return self.std * density + abs(self.mean) * math.erf(abs(ratio) / math.sqrt(2))

    def moment(self, power: int, low: float, high: float) -> float:
        """E[exp(power · value); low < value < high]."""
        log_size = power * self.mean + (power * self.std) ** 2 / 2
        if log_size > 700:  # beyond float64: what the truncation leaves of it is not computed
            return math.inf
        tilted = _Normal(self.mean + power * self.std**2, self.std)
        return math.exp(log_size) * (tilted.below(high) - tilted.below(low))


def expected_from_noise(
    noise: Noise, metrics: Mapping[str, float], config: RolloutCorrectionConfig | None
) -> dict[str, float]:
    """Metric → its value from noise alone, at the mean length and the thresholds of this run.

    Args:
        noise: of a token.
        metrics: by bare name; `token_count` and `sequence_count` give the mean length, and only metrics in it are
            answered.
        config: the correction; without it only what depends on no threshold is answered.
    """
    sigma = noise.sigma
    if not (0 < sigma < 10):
        return {}
    rows, tokens = metrics.get("sequence_count", 0.0), metrics.get("token_count", 0.0)
    length = tokens / rows if rows > 0 and tokens > 0 else None
    k3 = noise.mean_k3

    expected = {
        "kl": k3,
        "k3_kl": k3,
        "log_ratio_std": sigma,
        "log_ratio_abs_mean": sigma * math.sqrt(2 / math.pi),
        "chi2_token": math.expm1(min(sigma**2, 700.0)),
        "ppl_ratio": math.exp(sigma**2 / 2),
    }
    if length is not None:
        expected["t_times_kl"] = length * k3
        expected["chi2_seq"] = math.expm1(min(length * sigma**2, 700.0))
        expected["log_ppl_abs_diff"] = _Normal(-(sigma**2) / 2, sigma / math.sqrt(length)).absolute_mean()
    if config is not None:
        expected |= _of_weights(sigma, length, config)
        expected |= dict(_of_rejection(sigma, length, config))
    return {name: value for name, value in expected.items() if name in metrics and math.isfinite(value)}


def ranges_from_noise(noise: Noise, metrics: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Metric of `SIGNED` → the range that holds 95 % of batches of this size, where the policies differ by noise alone.

    Args:
        noise: of a token.
        metrics: by bare name; without `token_count`, and for metrics of sequences `sequence_count`, there is no range.
            Only metrics in it are answered.
    """
    sigma, tokens = noise.sigma, metrics.get("token_count", 0.0)
    if not (0 < sigma < 10 and tokens > 0):
        return {}
    k3 = noise.mean_k3
    token = _Normal(-(sigma**2) / 2, sigma)

    # −d of a token is normal, and so is its mean. exp(2 d) of a token, exp(2 S) and exp(−G) of a sequence are
    # lognormal.
    error = sigma / math.sqrt(tokens)
    ranges: dict[str, tuple[float, float] | None] = {
        "kl": _around(k3, error),
        "chi2_token": _mean_of_exp(token.times(2), tokens, less=1.0),
    }
    rows = metrics.get("sequence_count", 0.0)
    if rows > 0:
        length = tokens / rows
        of_sequence = _Normal(token.mean, sigma / math.sqrt(length))
        ranges |= {
            "t_times_kl": _around(length * k3, length * error),
            "chi2_seq": _mean_of_exp(_sums(sigma, length).times(2), rows, less=1.0),
            "ppl_ratio": _mean_of_exp(of_sequence.times(-1), rows),
        }
    return {name: within for name, within in ranges.items() if within is not None and name in metrics}


def _around(center: float, error: float) -> tuple[float, float]:
    return center - RANGE_Z * error, center + RANGE_Z * error


def _mean_of_exp(log_value: _Normal, count: float, *, less: float = 0.0) -> tuple[float, float] | None:
    """The range of the mean of `count` draws of exp(log_value) − less; None where its skewness is above the limit."""
    spread = log_value.std**2
    if spread > MOST_SPREAD:
        return None
    skewness = (math.exp(spread) + 2) * math.sqrt(math.expm1(spread)) / math.sqrt(count)
    if skewness > MOST_SKEWED:
        return None
    log_mean = log_value.mean + spread / 2
    center = math.expm1(log_mean) + (1.0 - less)  # exact near 1, where the excess is all that is left
    return _around(center, math.exp(log_mean) * math.sqrt(math.expm1(spread) / count))


def _of_weights(sigma: float, length: float | None, config: RolloutCorrectionConfig) -> dict[str, float]:
    """The weights of the configured level, truncated as configured."""
    spread = {"token": sigma}
    if length is not None:
        spread |= {"sequence": sigma * math.sqrt(length), "geometric": sigma / math.sqrt(length)}
    if config.rollout_is is None or config.rollout_is not in spread:
        return {}
    std = spread[config.rollout_is]
    mean = -(sigma**2) / 2 if config.rollout_is == "geometric" else -(std**2) / 2
    weight = _Normal(mean, std)

    bound = config.safety_bound
    low = -bound if config.is_lower is None else math.log(config.is_lower)
    high = bound if config.is_upper is None else math.log(config.is_upper)
    first, second = weight.moment(1, low, high), weight.moment(2, low, high)

    # IcePop gives 0 beyond its band; a ceiling, a floor and the safety bound give the weight at the bound.
    if config.is_mode != "icepop":
        floor = low if config.rollout_is_floor is None else math.log(config.rollout_is_floor)
        above, below = 1 - weight.below(high), weight.below(floor)
        first = weight.moment(1, floor, high) + above * math.exp(high) + below * math.exp(floor)
        second = weight.moment(2, floor, high) + above * math.exp(2 * high) + below * math.exp(2 * floor)

    # Small weights are counted below the band, below the floor, or below 1/C.
    small = low
    if config.is_lower is None:
        small = -high if config.rollout_is_floor is None else math.log(config.rollout_is_floor)
    found = {
        "rollout_is_mean": first,
        "rollout_is_ratio_fraction_high": 1 - weight.below(high),
        "rollout_is_ratio_fraction_low": weight.below(small),
    }
    if first > 0 and math.isfinite(second):
        found["rollout_is_std"] = math.sqrt(max(second - first**2, 0.0))
        found["rollout_is_eff_sample_size"] = min(first**2 / second, 1.0)
    if length is not None and config.is_upper is not None:
        found["rollout_is_low_weight_fraction"] = _sums(sigma, length).below(-math.log(config.is_upper))
    return found


def _of_rejection(sigma: float, length: float | None, config: RolloutCorrectionConfig) -> Iterator[tuple[str, float]]:
    """The share that each criterion, and the veto, reject."""
    rejected: list[tuple[float, float]] = []  # of the tokens, and of the sequences
    for criterion in config.criteria:
        share = touched = _rejected(sigma, length, criterion)
        if share is None or touched is None:
            continue
        if criterion.scope == "token" and length is not None:
            touched = 1 - (1 - share) ** length
        rejected.append((share, touched))
        yield f"rollout_rs_{criterion.name}_masked_fraction", share
        yield f"rollout_rs_{criterion.name}_seq_masked_fraction", touched

    if config.rollout_token_veto_threshold is not None:
        token = _Normal(-(sigma**2) / 2, sigma).below(math.log(config.rollout_token_veto_threshold))
        yield "rollout_is_catastrophic_token_fraction", token
        if length is not None:
            vetoed = 1 - (1 - token) ** length
            yield "rollout_is_veto_fraction", vetoed
            rejected.append((vetoed, vetoed))

    # Several criteria are taken for independent of each other.
    if len(rejected) >= len(config.criteria):
        yield "rollout_rs_masked_fraction", 1 - math.prod(1 - share for share, _ in rejected)
        yield "rollout_rs_seq_masked_fraction", 1 - math.prod(1 - touched for _, touched in rejected)


def _rejected(sigma: float, length: float | None, criterion: Criterion) -> float | None:
    """The share of the units of a criterion that it rejects; None where that needs a length, or is not known."""
    token = _Normal(-(sigma**2) / 2, sigma)
    low = -math.inf if criterion.lower is None else math.log(criterion.lower)
    high = math.inf if criterion.upper is None else math.log(criterion.upper)
    if criterion.scope == "token" and criterion.kind == "k1":
        return token.outside(low, high)
    if criterion.kind in ("k2", "k3") and criterion.upper is not None:
        bounds = accepted_log_ratios(criterion.kind, criterion.upper)
        share = token.outside(*bounds)
        if criterion.scope == "token":
            return share
        if length is None:
            return None
        if criterion.scope == "seq_max":
            return 1 - (1 - share) ** length

        # The mean of d²/2 over T tokens: its expectation is σ²/2, and its variance σ⁴ / (2 T).
        mean, std = sigma**2 / 2, sigma**2 / math.sqrt(2 * length)
        scale = length if criterion.scope == "seq_sum" else 1.0
        return 1 - _Normal(mean * scale, std * scale).below(criterion.upper)
    if length is None or criterion.kind != "k1":
        return None
    if criterion.scope == "seq_sum":
        return _sums(sigma, length).outside(low, high)
    return _Normal(-(sigma**2) / 2, sigma / math.sqrt(length)).outside(low, high)


def _sums(sigma: float, length: float) -> _Normal:
    """The sum of the log-ratios of a sequence."""
    return _Normal(-length * sigma**2 / 2, sigma * math.sqrt(length))
