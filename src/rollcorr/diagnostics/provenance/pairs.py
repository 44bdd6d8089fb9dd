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
MOST_TOKENS, MOST_LOGITS = 2048, 1 << 26
"""What a fit to logits looks at, at most."""


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
    """

    likely: int
    unlikely: int
    share_up: float
    exponent: float
    violations: float
    unlikely_p80: float


def crowds(base: Tensor, other: Tensor) -> Crowds:
    """Compare two log-probs, `other` being the sharper one: swap them when `share_up` is below a half."""
    x, y = logit(base), logit(other)
    likely, unlikely = (x > LIKELY[0]) & (x < LIKELY[1]), x < UNLIKELY
    high = (y / x)[likely & (x > -UNLIKELY)].sort().values
    low = (y / x)[unlikely].sort().values
    share_up = float((y > x)[likely].double().mean()) if likely.any() else 0.5
    if not len(high):
        return Crowds(int(likely.sum()), len(low), share_up, torch.nan, torch.nan, torch.nan)
    # One or two tokens are no crowd: where the others stand would then say nothing about β.
    if len(low) < FEW:
        return Crowds(int(likely.sum()), len(low), share_up, float(high.quantile(0.1)), 0.1, torch.nan)
    beta = torch.logspace(-0.7, 0.7, 701, dtype=torch.float64, device=x.device)
    above, below = 1 - torch.searchsorted(low, beta) / len(low), torch.searchsorted(high, beta) / len(high)
    left, right = beta[above > below], beta[above < below]  # the difference falls; between them may be a gap
    ends = float(left[-1] if len(left) else beta[0]), float(right[0] if len(right) else beta[-1])
    exponent = math.sqrt(ends[0] * ends[1])
    wrong = float((low > 1.01 * exponent).double().mean()), float((high < exponent / 1.01).double().mean())
    return Crowds(int(likely.sum()), len(low), share_up, exponent, max(wrong), float(low.quantile(0.8)))


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


def spread(rollout: Tensor, log_prob: Tensor) -> float:
    """Mean |r − median r| of r = log μ − log p: least where p has the temperature of μ, whatever mass μ has lost.

    At the right temperature only noise and the kept mass are left in r; at a wrong one r moves with each token's
    surprise. Tokens that μ calls certain say nothing about a temperature and are left out, if enough others are there.
    """
    telling = rollout < CERTAIN
    residual = (rollout - log_prob)[telling if int(telling.sum()) >= 8 else ...]
    return float((residual - residual.median()).abs().mean())


class LogitTable:
    """A trainer's logits of sampled tokens, thinned, and what they say at any temperature.

    Args:
        logits: (n, V), before any division by a temperature.
        token_ids: (n,).
    """

    def __init__(self, logits: Tensor, token_ids: Tensor) -> None:
        at_most = min(MOST_TOKENS, max(1, MOST_LOGITS // logits.shape[-1]))
        step = max(1, -(-len(token_ids) // at_most))
        self.rows = torch.arange(0, len(token_ids), step, device="cpu")
        self._logits = logits[self.rows].float()
        self._logits = self._logits - self._logits.amax(-1, keepdim=True)
        self._sampled = self._logits.gather(-1, token_ids[self.rows].long().unsqueeze(-1)).squeeze(-1)

    def log_prob(self, beta: float) -> Tensor:
        """Log p_β of the sampled tokens, p_β = softmax(β z): (n,) float64."""
        return (beta * self._sampled - (beta * self._logits).logsumexp(-1)).double()

    def entropy(self, beta: float) -> Tensor:
        """H(p_β) of each context: (n,) float64, nats."""
        log_p = (beta * self._logits).log_softmax(-1)
        return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1).double()

    def fit(self, log_prob: Tensor) -> float:
        """β that explains some log-probs of these tokens best (`spread`): a grid, then finer around the best."""
        low, high, beta = 0.2, 5.0, 1.0
        for span in (1.25, 1.03, 1.0):
            grid = torch.logspace(math.log10(low), math.log10(high), 17, device="cpu").tolist()
            beta = min(grid, key=lambda b: spread(log_prob, self.log_prob(b)))
            low, high = beta / span, beta * span
        return beta

    def sampled_exponent(self) -> float:
        """β under which the tokens are likeliest to have been drawn: Newton on Σ (z_a − E_β z) = 0."""
        beta = 1.0
        for _ in range(20):
            p = (beta * self._logits).softmax(-1)
            finite = self._logits.masked_fill(p == 0, 0.0)
            mean = (p * finite).sum(-1)
            curvature = float(((p * finite.square()).sum(-1) - mean.square()).mean())
            if curvature <= 0:
                break
            step = float((self._sampled - mean).mean()) / curvature
            beta = min(max(beta + max(min(step, 0.5), -0.5), 0.05), 20.0)
        return beta
