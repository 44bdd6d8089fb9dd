"""Statistics of two log-probs of the same tokens, from which `provenance` detects a temperature or a truncation.

`base` and `other` are (n,) float64 log-probs of sampled tokens, nats. If the two policies differ by a temperature,
other ∝ base^β, then on every token

    logit(other) ≥ β logit(base)   for β > 1, with equality when a single other token has all the remaining mass,

because the sum of the remaining probabilities raised to β is at most the β-th power of their sum. So the ratio of the
two logits is at most β on unlikely tokens (negative logits) and at least β on likely ones. β is the value at which
these two crowds of ratios meet. The estimate needs neither the model's logits nor entropies. A truncation moves only
the likely tokens, up to probability 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LIKELY = (0.5, 7.0)
"""Range of `base`'s logits in which a token counts as likely: p from 0.62 to 0.999; above it rounding dominates."""
VERY_LIKELY, MANY = (3.0, 5.0), 100
"""Logits of likely tokens that are compared with very likely ones above the range, and the fewest tokens of each."""
UNLIKELY = -1.5
"""Logit of `base` below which a token counts as unlikely: p < 0.18."""
CERTAIN = -1e-5
"""Log-prob above which a side counts as probability 1."""
UNCERTAIN = -1e-3
"""Log-prob below which a side counts as probability < 1."""
AS_LIKELY_ALONE = 0.5
"""Smallest share of certain tokens among tokens likelier than the median certain one, as a truncation causes."""
NEARLY = 0.1
"""Nearly certain tokens per certain one, above which the certain tokens are an extreme tail and not a truncation."""
LARGEST_LOGIT = 9.0
"""Logit above which a power of a policy may round to probability 1."""
FEW = 20
"""Fewest likely or unlikely tokens that count as a crowd."""


class Crowds(NamedTuple):
    """Comparison of two policies on likely and on unlikely tokens.

    Attributes:
        likely: number of likely tokens under `base`.
        unlikely: number of unlikely tokens under `base`.
        share_up: share of the likely tokens on which `other` is higher; 0.5 without likely tokens.
        exponent: β of other ∝ base^β, at which the crowds meet; an upper bound from the likely tokens if fewer than
            `FEW` tokens are unlikely; NaN if no likely token is far enough from p = ½.
        violations: larger share of the two crowds that violates its bound on β: near 0 for a temperature, 0.5 for
            noise; 0.1 if fewer than `FEW` tokens are unlikely.
        unlikely_p80: 80 % quantile of the ratio of logits on unlikely tokens, a lower bound on β; NaN with fewer than
            `FEW`.
        steepening: median ratio of logits of very likely tokens over the median ratio of likely ones; defaults to 1,
            also with fewer than `MANY` tokens of either kind.
    """

    likely: int
    unlikely: int
    share_up: float
    exponent: float
    violations: float
    unlikely_p80: float
    steepening: float = 1.0


def crowds(base: Tensor, other: Tensor) -> Crowds:
    """Compute the exponent β of other ∝ base^β and its quality, for the sharper policy `other`.

    Args:
        base: log-probs of the sampled tokens, (n,) nats.
        other: the sharper side's log-probs, (n,) nats. Swap the arguments if `share_up` is below 0.5.
    """
    x, y = logit(base), logit(other)
    likely, unlikely = (x > LIKELY[0]) & (x < LIKELY[1]), x < UNLIKELY
    high = (y / x)[likely & (x > -UNLIKELY)].sort().values
    near, far = (y / x)[likely & (x > VERY_LIKELY[0]) & (x <= VERY_LIKELY[1])], (y / x)[likely & (x > VERY_LIKELY[1])]
    steepening = float(far.median() / near.median()) if min(len(near), len(far)) >= MANY else 1.0
    low = (y / x)[unlikely].sort().values
    share_up = float((y > x)[likely].double().mean()) if likely.any() else 0.5
    if not len(high):
        return Crowds(int(likely.sum()), len(low), share_up, torch.nan, torch.nan, torch.nan)
    # Too few unlikely tokens bound β loosely, so use the lower end of the likely tokens' ratios.
    if len(low) < FEW:
        return Crowds(int(likely.sum()), len(low), share_up, float(high.quantile(0.1)), 0.1, torch.nan, steepening)
    beta = torch.logspace(-0.7, 0.7, 701, dtype=torch.float64, device=x.device)
    above, below = 1 - torch.searchsorted(low, beta) / len(low), torch.searchsorted(high, beta) / len(high)
    left, right = beta[above > below], beta[above < below]  # the difference falls; between them may be a gap
    ends = float(left[-1] if len(left) else beta[0]), float(right[0] if len(right) else beta[-1])
    exponent = math.sqrt(ends[0] * ends[1])
    wrong = float((low > 1.01 * exponent).double().mean()), float((high < exponent / 1.01).double().mean())
    return Crowds(int(likely.sum()), len(low), share_up, exponent, max(wrong), float(low.quantile(0.8)), steepening)


class Slope(NamedTuple):
    """Exponent between two policies that find every token unlikely: other ≈ base^β, up to a constant.

    Attributes:
        low: least-squares slope of `other` on `base`.
        high: inverse of the slope of `base` on `other`. With noise on either side, β lies between `low` and `high`.
        error: standard error of the slopes.
    """

    low: float
    high: float
    error: float

    @property
    def exponent(self) -> float:
        """Return the bound on β nearest to 1; 1 if it lies between the bounds."""
        low, high = sorted((self.low, self.high))
        return max(low, 1.0) if high >= 1 else high

    @property
    def z(self) -> float:
        """Return the number of standard errors between 1 and the exponent."""
        return abs(self.exponent - 1) / self.error if self.error > 0 else 0.0


def slope(base: Tensor, other: Tensor) -> Slope:
    """Compute β of other ∝ base^β by regression, (n,) nats on (n,) nats.

    This assumes similar contexts, so that log Σ base^β varies little between them. For different contexts the slope
    lies between 1 and β: this underestimates a temperature, but never reports one that does not exist.
    """
    x, y = base - base.mean(), other - other.mean()
    product, square = float(x @ y), float(x @ x)

    # A few tokens far from the mean would set the slope, and their noise is not in the error.
    if product <= 0 or square**2 < FEW * float(x.pow(4).sum()) or square == 0:
        return Slope(1.0, 1.0, math.inf)
    low, high = product / square, float(y @ y) / product
    return Slope(low, high, math.sqrt(max(low * (high - low), 0.0) / len(base)) + 1e-9)


def logit(log_prob: Tensor) -> Tensor:
    """Compute the logit log p − log(1 − p) of a log-prob, with p capped at 1 − 1e-7, the resolution of float32."""
    capped = log_prob.clamp(max=-1e-7)
    return capped - torch.log(-torch.expm1(capped))


def certain_share(base: Tensor, other: Tensor, *, exponent: float = 1.0) -> float:
    """Compute the share of tokens with probability 1 under `other` but not under `base`, as a truncation causes.

    A truncation that keeps a single token keeps the likeliest one, with probability exactly 1. So the share is 0 if

    - likelier tokens are not certain as well: other weights can make any token certain, and a filled-in zero can occur
      at any token;
    - the tokens that nearly reach 1 exceed a tenth of the certain ones, as under a low temperature or other weights.

    Args:
        base: log-probs of the sampled tokens, (n,) nats.
        other: the log-probs that may be truncated, (n,) nats.
        exponent: β if other ∝ base^β; tokens that this power makes certain do not count. Defaults to 1.
    """
    choice = base < UNCERTAIN
    certain = choice & (other > CERTAIN)
    nearly = choice & (other <= CERTAIN) & (other > 10 * CERTAIN)
    if not certain.any() or int(nearly.sum()) > NEARLY * int(certain.sum()):
        return 0.0
    likelier = choice & (base > base[certain].median())
    if likelier.any() and float(certain[likelier].double().mean()) < AS_LIKELY_ALONE:
        return 0.0
    if exponent > 1:
        certain &= logit(base) * exponent < LARGEST_LOGIT
    return float(certain.double().mean())


def mean_and_z(values: Tensor) -> tuple[float, float]:
    """Compute the mean of (n,) values, and mean / standard error.

    The second number is 0 for a single value and for a mean of 0, and ±∞ for any other constant.
    """
    mean = values.mean()
    error = values.std() / len(values) ** 0.5 if len(values) > 1 else values.new_tensor(torch.inf)
    if error > 0:
        return float(mean), float(mean / error)
    return float(mean), 0.0 if mean == 0 else torch.inf * float(mean.sign())
