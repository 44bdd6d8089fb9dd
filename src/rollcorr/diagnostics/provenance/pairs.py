"""Numbers that tell what two log-probs of the same tokens are log-probs of; `provenance` reads them.

`base` and `other` are (n,) float64 log-probs of sampled tokens. The telling fact: if other is base at another
temperature, other ∝ base^β, then on every token

    logit(other) ≥ β logit(base)   for β > 1, with equality when one other token has all the remaining mass,

because the mass of the remaining tokens raised to β is at most the β-th power of their sum. So the ratio of the two
logits is at most β on unlikely tokens (negative logits) and at least β on likely ones: β is where the two crowds meet.
It needs neither logits nor entropies. A truncation moves the likely tokens alone, up to probability 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LIKELY = (0.5, 7.0)
"""Logits of `base` between which a token is called likely: p from 0.62 to 0.999, below where rounding decides."""
VERY_LIKELY, MANY = (3.0, 5.0), 100
"""Logits between which a likely token is compared with a very likely one beyond them, if there are so many of each."""
UNLIKELY = -1.5
"""Logit of `base` below which a token is called unlikely: p < 0.18."""
CERTAIN = -1e-5
"""Log-prob above which a side says "probability 1"."""
UNCERTAIN = -1e-3
"""Log-prob below which a side says that there was a choice."""
AS_LIKELY_ALONE = 0.5
"""Share of the tokens likelier than most of those left alone that must be left alone too, as a truncation does."""
NEARLY = 0.1
"""Nearly certain tokens for each certain one, above which certainty is the end of a scale and not a truncation."""
LARGEST_LOGIT = 9.0
"""Logit above which a power of a policy may be as good as certain."""
FEW = 20
"""Fewer tokens of a crowd, likely or unlikely ones, decide nothing."""


class Crowds(NamedTuple):
    """Two policies compared on likely and on unlikely tokens.

    Attributes:
        likely: number of tokens that `base` calls likely.
        unlikely: number that it calls unlikely.
        share_up: share of the likely tokens on which `other` is higher.
        exponent: β of other ∝ base^β, where the crowds meet; an upper bound, from the likely tokens alone, where fewer
            than `FEW` are unlikely; NaN where no likely token is far enough from p = ½.
        violations: share of each crowd on the wrong side of β: near 0 for a temperature, 0.5 for noise.
        unlikely_p80: 80 % quantile of the ratio of logits on unlikely tokens: a lower bound on β; NaN with few.
        steepening: median ratio of logits of very likely tokens over that of likely ones; 1 with few.
    """

    likely: int
    unlikely: int
    share_up: float
    exponent: float
    violations: float
    unlikely_p80: float
    steepening: float = 1.0


def crowds(base: Tensor, other: Tensor) -> Crowds:
    """Compare two log-probs, `other` being the sharper one: swap them when `share_up` is below a half."""
    x, y = logit(base), logit(other)
    likely, unlikely = (x > LIKELY[0]) & (x < LIKELY[1]), x < UNLIKELY
    high = (y / x)[likely & (x > -UNLIKELY)].sort().values
    near, far = (y / x)[likely & (x > VERY_LIKELY[0]) & (x <= VERY_LIKELY[1])], (y / x)[likely & (x > VERY_LIKELY[1])]
    steepening = float(far.median() / near.median()) if min(len(near), len(far)) >= MANY else 1.0
    low = (y / x)[unlikely].sort().values
    share_up = float((y > x)[likely].double().mean()) if likely.any() else 0.5
    if not len(high):
        return Crowds(int(likely.sum()), len(low), share_up, torch.nan, torch.nan, torch.nan)
    # One or two tokens are no crowd: where the others stand would then say nothing about β.
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
    """The exponent between two policies that find every token unlikely: other ≈ base^β, up to a constant.

    Attributes:
        low: least-squares slope of `other` on `base`.
        high: inverse of the slope of `base` on `other`. Noise on either side puts these two on the two sides of β.
        error: standard error of the slopes.
    """

    low: float
    high: float
    error: float

    @property
    def exponent(self) -> float:
        """The bound that is nearer to 1; 1 if that lies between them."""
        low, high = sorted((self.low, self.high))
        return max(low, 1.0) if high >= 1 else high

    @property
    def z(self) -> float:
        """Standard errors between 1 and the exponent."""
        return abs(self.exponent - 1) / self.error if self.error > 0 else 0.0


def slope(base: Tensor, other: Tensor) -> Slope:
    """β of other ∝ base^β where contexts are alike, so that log Σ base^β differs little between them.

    Where they are not, the slope lies between 1 and β: it does not invent a temperature, it underrates one.
    """
    x, y = base - base.mean(), other - other.mean()
    product, square = float(x @ y), float(x @ x)
    if product <= 0 or square == 0:
        return Slope(1.0, 1.0, math.inf)
    low, high = product / square, float(y @ y) / product
    return Slope(low, high, math.sqrt(max(low * (high - low), 0.0) / len(base)) + 1e-9)


def logit(log_prob: Tensor) -> Tensor:
    """log p − log(1 − p), with p at most 1 − 1e-7, where float32 ends."""
    capped = log_prob.clamp(max=-1e-7)
    return capped - torch.log(-torch.expm1(capped))


def certain_share(base: Tensor, other: Tensor, *, exponent: float = 1.0) -> float:
    """Share of tokens to which `other` gives probability 1 and `base` does not: a truncation left them alone.

    A truncation leaves a token alone because it is likely, and gives it exactly 1. So nothing counts where

    - likelier tokens are not left alone as well: other weights find any token certain, and a zero that was filled in
      stands in any place;
    - many tokens come near 1: a low temperature, like other weights, brings them as close to it as they happen to be.

    Where `other` is `base` to a power, tokens that the power alone makes certain do not count either.
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
    """Mean, and mean / standard error (0 for a constant 0, as for one value)."""
    mean = values.mean()
    error = values.std() / len(values) ** 0.5 if len(values) > 1 else values.new_tensor(torch.inf)
    if error > 0:
        return float(mean), float(mean / error)
    return float(mean), 0.0 if mean == 0 else torch.inf * float(mean.sign())
