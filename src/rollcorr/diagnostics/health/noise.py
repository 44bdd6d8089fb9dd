"""Compute the expected value of each metric if the two policies differ only by rounding noise.

Rounding makes the log-ratio d of a token nearly normal. The rollout policy sampled, so E_μ[exp(d)] = 1 and

    d ~ N(−σ²/2, σ²)              one token; kl = k3 = σ²/2, χ² = exp(σ²) − 1
    S ~ N(−T σ²/2, T σ²)          the sum over T tokens; the effective sample size of sequence weights is exp(−T σ²)
    G ~ N(−σ²/2, σ²/T)            the mean over T tokens

for independent tokens and responses of the mean length. A signed estimate, such as the mean of −d, deviates from its
expectation by about its standard error, σ / √N over N tokens. For such a metric the module computes the range that
contains 95 % of batches. Noise of this size explains a metric near its expectation, at this length and these
thresholds; it does not explain a metric far from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.kernels.correction.cpu.job import accepted_log_ratios

SIGNED = frozenset({"kl", "t_times_kl", "ppl_ratio", "chi2_token", "chi2_seq", "kl_joint"})
"""Signed estimates, which noise moves to either side of 0 or 1: their expectation is a range."""
RANGE_Z = 1.96
"""Half-width, in standard errors, of the range that contains 95 % of batches."""
MOST_SKEWED = 0.5
"""Skewness of a mean above which it is not normal, and no range is computed."""
MOST_SPREAD = 100.0
"""Variance of a log value, nats², above which no batch is large enough for a range."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise of a token's log-ratio.

    Attributes:
        sigma: standard deviation of the log-ratio per token, nats.
        source: description of the measurement.
        k3: measured mean k3 per token, nats; defaults to σ²/2.
        is_null: the noise was measured with policies known to be equal; False by default.
        unusable: clause after `source` with the reason why weights are not judged by this noise; empty by default:
            they are.
    """

    sigma: float
    source: str
    k3: float | None = None
    is_null: bool = False
    unusable: str = ""

    @property
    def mean_k3(self) -> float:
        """Return k3 per token, nats: the measured value, by default σ²/2."""
        return self.sigma**2 / 2 if self.k3 is None else self.k3


@dataclass(frozen=True)
class _Normal:
    """Normal distribution of a log-weight, nats, with its mean and standard deviation."""

    mean: float
    std: float

    def times(self, factor: float) -> _Normal:
        """Return the distribution of the value times a factor."""
        return _Normal(factor * self.mean, abs(factor) * self.std)

    def below(self, x: float) -> float:
        """Compute P(value < x)."""
        return 0.5 * (1 + math.erf((x - self.mean) / (self.std * math.sqrt(2))))

    def outside(self, low: float, high: float) -> float:
        """Compute P(value < low or value > high)."""
        return self.below(low) + 1 - self.below(high)

    def absolute_mean(self) -> float:
        """Compute E[|value|]."""
        ratio = self.mean / self.std
        density = math.exp(-(ratio**2) / 2) * math.sqrt(2 / math.pi)
        return self.std * density + abs(self.mean) * math.erf(abs(ratio) / math.sqrt(2))

    def moment(self, power: int, low: float, high: float) -> float:
        """Compute E[exp(power · value); low < value < high], the partial expectation."""
        log_size = power * self.mean + (power * self.std) ** 2 / 2
        if log_size > 700:  # overflows float64, even if the truncated moment is finite
            return math.inf
        tilted = _Normal(self.mean + power * self.std**2, self.std)
        return math.exp(log_size) * (tilted.below(high) - tilted.below(low))


def expected_from_noise(
    noise: Noise, metrics: Mapping[str, float], config: RolloutCorrectionConfig | None
) -> dict[str, float]:
    """Compute the expected value of each metric from noise, at the mean length and the thresholds of this run.

    Args:
        noise: noise of a token.
        metrics: metrics by bare name; `token_count` and `sequence_count` determine the mean length.
        config: configuration of the correction; `None` excludes the metrics that depend on a threshold.

    Returns:
        Metric → its expected value, in the metric's unit; contains only names in `metrics`.
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
        expected |= _expected_weights(sigma, length, config)
        expected |= dict(_expected_rejection(sigma, length, config))
    return {name: value for name, value in expected.items() if name in metrics and math.isfinite(value)}


def ranges_from_noise(noise: Noise, metrics: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Compute the 95 % range of each signed metric from noise, over batches of this size.

    Args:
        noise: noise of a token.
        metrics: metrics by bare name; ranges need `token_count`, and ranges of sequence metrics `sequence_count`.

    Returns:
        Metric of `SIGNED` → (low, high), in the metric's unit; contains only names in `metrics`.
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
        "kl": _interval(k3, error),
        "chi2_token": _mean_of_exp(token.times(2), tokens, less=1.0),
    }
    rows = metrics.get("sequence_count", 0.0)
    if rows > 0:
        length = tokens / rows
        of_sequence = _Normal(token.mean, sigma / math.sqrt(length))
        ranges |= {
            "t_times_kl": _interval(length * k3, length * error),
            "chi2_seq": _mean_of_exp(_model_sequence_log_weight(sigma, length).times(2), rows, less=1.0),
            "ppl_ratio": _mean_of_exp(of_sequence.times(-1), rows),
        }
    return {name: within for name, within in ranges.items() if within is not None and name in metrics}


def _interval(center: float, error: float) -> tuple[float, float]:
    return center - RANGE_Z * error, center + RANGE_Z * error


def _mean_of_exp(log_value: _Normal, count: float, *, less: float = 0.0) -> tuple[float, float] | None:
    """Compute the 95 % range of the mean of `count` draws of exp(log_value) − less.

    Returns:
        (low, high); `None` if the mean's skewness is above `MOST_SKEWED`, or the spread above `MOST_SPREAD`.
    """
    spread = log_value.std**2
    if spread > MOST_SPREAD:
        return None
    skewness = (math.exp(spread) + 2) * math.sqrt(math.expm1(spread)) / math.sqrt(count)
    if skewness > MOST_SKEWED:
        return None
    log_mean = log_value.mean + spread / 2
    center = math.expm1(log_mean) + (1.0 - less)  # expm1 stays exact near 1
    return _interval(center, math.exp(log_mean) * math.sqrt(math.expm1(spread) / count))


def _expected_weights(sigma: float, length: float | None, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Compute the expected metrics of the weights, at the configured level and with the configured truncation.

    Args:
        sigma: standard deviation of a token's log-ratio, nats.
        length: mean response length, tokens; `None` if not known.
        config: configuration of the correction.
    """
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

    # IcePop sets weights outside its band to 0; a ceiling, a floor and the safety bound clamp them to the bound.
    if config.is_mode != "icepop":
        floor = low if config.rollout_is_floor is None else math.log(config.rollout_is_floor)
        above, below = 1 - weight.below(high), weight.below(floor)
        first = weight.moment(1, floor, high) + above * math.exp(high) + below * math.exp(floor)
        second = weight.moment(2, floor, high) + above * math.exp(2 * high) + below * math.exp(2 * floor)

    # The low fraction counts weights below the band, below the floor, or below 1/C.
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
        found["rollout_is_low_weight_fraction"] = _model_sequence_log_weight(sigma, length).below(
            -math.log(config.is_upper)
        )
    return found


def _expected_rejection(
    sigma: float, length: float | None, config: RolloutCorrectionConfig
) -> Iterator[tuple[str, float]]:
    """Yield (metric, expected share) for the rejections of each criterion and of the veto."""
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

    # Criteria are assumed to be independent of each other.
    if len(rejected) >= len(config.criteria):
        yield "rollout_rs_masked_fraction", 1 - math.prod(1 - share for share, _ in rejected)
        yield "rollout_rs_seq_masked_fraction", 1 - math.prod(1 - touched for _, touched in rejected)


def _rejected(sigma: float, length: float | None, criterion: Criterion) -> float | None:
    """Compute the share of a criterion's units (tokens or sequences) that it rejects.

    Args:
        sigma: standard deviation of a token's log-ratio, nats.
        length: mean response length, tokens; `None` if not known.
        criterion: the rejection criterion.

    Returns:
        The share, 0 to 1; `None` if it needs a length that is not known, or has no formula.
    """
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

        # The mean of d²/2 over T tokens has expectation σ²/2 and variance σ⁴ / (2 T).
        mean, std = sigma**2 / 2, sigma**2 / math.sqrt(2 * length)
        scale = length if criterion.scope == "seq_sum" else 1.0
        return 1 - _Normal(mean * scale, std * scale).below(criterion.upper)
    if length is None or criterion.kind != "k1":
        return None
    if criterion.scope == "seq_sum":
        return _model_sequence_log_weight(sigma, length).outside(low, high)
    return _Normal(-(sigma**2) / 2, sigma / math.sqrt(length)).outside(low, high)


def _model_sequence_log_weight(sigma: float, length: float) -> _Normal:
    """Return the distribution of a sequence's sum of log-ratios, nats."""
    return _Normal(-length * sigma**2 / 2, sigma * math.sqrt(length))
