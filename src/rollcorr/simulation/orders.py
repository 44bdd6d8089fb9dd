"""Published orders of bias and variance, checked as slopes of exact values, with the constants of tighter bounds.

Fang and Khazi (2025, "Mismatch Praxis: Rollout Settings and IS Corrections",
https://www.llmdata.com/blog/mismatch-praxis/, Table 1) list, after Liu, Li et al. (2025, "When Speed Kills Stability",
https://richardli.xyz/rl-collapse):

    token weights, min(ρ_t, C)            bias O(T² Δ)             variance O(T² (1 + χ̄²))
    sequence weights, untruncated         bias 0                   variance O((1 + χ̄²)^T)
    sequence weights, min(Π ρ_t, C)       bias O(T (1 + χ²) / C)   variance O(T² C²)

All are upper bounds. A slope is the exponent of a power law, fitted to exact values over a stated range by least
squares on logarithms. An order is attained if some pair of policies has its slope.

Scores are martingale differences: E_π[∇log π(y_t) | prefix] = 0, so E_π|Σ_t ∇log π(y_t)|² ≤ T F, F being the largest
E|∇log π|² of a state. With |A| ≤ a, the orders are therefore lower by one power of T, and by one of C:

    E_μ|Σ_t ρ_t A ∇log π_t|²          = a² Σ_t E_μ[ρ_t² |∇log π_t|²]                          token, untruncated, A = ±a
    E_μ[min(ρ, C)² |A Σ_t ∇log π|²]   ≤ a² C E_μ[ρ |Σ_t ∇log π|²] = a² C E_π|Σ_t ∇log π|² ≤ a² C T F
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.simulation.gradient_errors import gradient_error, gradient_sums
from rollcorr.simulation.markov_policies import MarkovPolicy, RewardRule
from rollcorr.simulation.mismatches import PolicyPair
from rollcorr.simulation.sequence_rows import every_count


def fit_slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit log y = a + slope · log x to values above 0, three or more.

    Returns:
        The slope, and its standard error from the residuals: on exact values it only measures curvature.
    """
    coefficients, covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    return float(coefficients[0]), math.sqrt(covariance[0, 0])


@dataclass(frozen=True)
class OrderCheck:
    """One entry of the table, with its published order and its measurement.

    Attributes:
        estimator: token, sequence or truncated sequence weights.
        quantity: "bias" or "variance", with its variable.
        published: the exponent of the published order.
        pair: description of the policies in the fit.
        attained: True if the published exponent is expected for this pair; False if a lower one is proved.
        points: x and y of the fit.
    """

    estimator: str
    quantity: str
    published: float
    pair: str
    attained: bool
    points: Callable[[], tuple[list[float], list[float]]]


def independent_pair(
    train: Iterable[float], rollout: Iterable[float], points: Iterable[float], length: int, goal: float | None = None
) -> PolicyPair:
    """Create a pair with independent tokens (one state) from probabilities, which it normalizes.

    Args:
        train: π of each token, V of them.
        rollout: μ of each token.
        points: points of each token.
        length: T, tokens per sequence.
        goal: the smallest total that succeeds. By default, the reward is the mean of the points.
    """
    pi, mu = (torch.tensor([list(values)], dtype=torch.float64, device="cpu") for values in (train, rollout))
    table = torch.tensor([list(points)], dtype=torch.float64, device="cpu")
    trainer = MarkovPolicy(pi.log(), torch.zeros_like(pi, dtype=torch.int64))
    return PolicyPair(trainer, trainer.with_logits(mu.log()), RewardRule(table, goal), length)


def one_mistake(mistake: float, extra: float, length: int) -> PolicyPair:
    """Create a pair in which π errs with probability p per token, and μ with p + Δ; the reward is 1 without a mistake.

    The reward depends on all T tokens, but each token weight only corrects its own. So T − 1 ratios are missing at each
    of T tokens, which attains the bias T² Δ while T (p + Δ) is small.
    """
    worse = mistake + extra
    return independent_pair((1 - mistake, mistake), (1 - worse, worse), (0, -1), length, goal=0)


def pareto_ratios(index: float, octaves: int) -> PolicyPair:
    """Create a pair for one token with ρ = 2^i and μ-probability ∝ 2^(−index · i): P_μ(ρ > x) falls like x^−index.

    Index 2 attains the truncation bias 1 / C, index 1 the second moment E[min(ρ, C)²] ∝ C.
    """
    mu = [2.0 ** (-index * i) for i in range(octaves)]
    pi = [2.0**i * probability for i, probability in enumerate(mu)]
    return independent_pair(pi, mu, [float(i % 2) for i in range(octaves)], 1)


def rare_jump(length: int, *, jumps: float = 0.05, size: float = 20.0) -> PolicyPair:
    """Create a pair with a third token: ρ is `size`, and μ samples it `jumps` times per sequence at any length.

    So χ² of a sequence does not depend on T, and the bias of truncation is only a function of T.
    """
    rare = jumps / length
    train = (0.5 - size * rare / 2, 0.5 - size * rare / 2, size * rare)
    rollout = (0.5 - rare / 2, 0.5 - rare / 2, rare)
    return independent_pair(train, rollout, (1, 0, 0), length, goal=math.ceil(length / 2))


def absolute_error(pair: PolicyPair, level: str, ceiling: float | None) -> tuple[float, float]:
    """Compute the exact |bias| and variance of one sequence's gradient, not divided by |∇J|."""
    config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=ceiling, safety_bound=80.0)  # type: ignore[arg-type]
    sums = gradient_sums(every_count(pair), config)
    error = gradient_error(sums, pair.gradient, 1)
    scale = float(pair.gradient.norm())
    return error.bias.value * scale, (error.deviation.value * scale) ** 2


_LENGTHS = (8, 16, 32, 64, 128, 256)
_MISTAKE_PROBABILITY = 1e-4


def _sweep(
    values: Sequence[float], measured: Callable[[float], tuple[float, float]], which: int
) -> tuple[list[float], list[float]]:
    return list(values), [measured(value)[which] for value in values]


ORDER_CHECKS: tuple[OrderCheck, ...] = (
    OrderCheck(
        "token",
        "bias, of T",
        2.0,
        "one mistake, Δ = 1e-4",
        True,
        lambda: _sweep(
            _LENGTHS, lambda T: absolute_error(one_mistake(_MISTAKE_PROBABILITY, 1e-4, int(T)), "token", 2.0), 0
        ),
    ),
    OrderCheck(
        "token",
        "bias, of Δ",
        1.0,
        "one mistake, T = 32",
        True,
        lambda: _sweep(
            (1e-5, 3e-5, 1e-4, 3e-4),
            lambda d: absolute_error(one_mistake(_MISTAKE_PROBABILITY, d, 32), "token", 2.0),
            0,
        ),
    ),
    OrderCheck(
        "token",
        "variance, of T",
        2.0,
        "coin, μ = 0.3, untruncated",
        False,
        lambda: _sweep(
            _LENGTHS, lambda T: absolute_error(_coin_succeeding_half_the_time(0.3, int(T)), "token", None), 1
        ),
    ),
    OrderCheck(
        "token",
        "variance, of T, where truncation is active",
        2.0,
        "coin, μ = 0.3, C = 1",
        True,
        lambda: _sweep(
            (64, 128, 256, 512), lambda T: absolute_error(_coin_succeeding_half_the_time(0.3, int(T)), "token", 1.0), 1
        ),
    ),
    OrderCheck(
        "token",
        "variance, of 1 + χ̄²",
        1.0,
        "coin, T = 64, A = 1",
        True,
        lambda: _sweep(
            [1 / (4 * q * (1 - q)) for q in (0.4, 0.3, 0.2, 0.1, 0.05, 0.02)],
            lambda growth: absolute_error(_constant_advantage_coin(growth - 1, 64), "token", None),
            1,
        ),
    ),
    OrderCheck(
        "sequence, truncated",
        "bias, of C",
        -1.0,
        "Pareto ratios of index 2, T = 1",
        True,
        lambda: _sweep(
            (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
            lambda c: absolute_error(pareto_ratios(2.0, 40), "sequence", c),
            0,
        ),
    ),
    OrderCheck(
        "sequence, truncated",
        "bias, of T at fixed χ²",
        1.0,
        "rare jump, C = 2",
        False,
        lambda: _sweep((8, 16, 32, 64, 128), lambda T: absolute_error(rare_jump(int(T)), "sequence", 2.0), 0),
    ),
    OrderCheck(
        "sequence, truncated",
        "variance, of T",
        2.0,
        "rare jump, C = 2",
        False,
        lambda: _sweep((8, 16, 32, 64, 128), lambda T: absolute_error(rare_jump(int(T)), "sequence", 2.0), 1),
    ),
    OrderCheck(
        "sequence, truncated",
        "variance, of C",
        2.0,
        "Pareto ratios of index 1, T = 1",
        False,
        lambda: _sweep(
            (0.5, 1.0, 2.0, 4.0, 8.0, 16.0), lambda c: absolute_error(pareto_ratios(1.0, 24), "sequence", c), 1
        ),
    ),
)
"""Every order of the table that is a power. (1 + χ̄²)^T is no power of T: the study "growth" has it."""


def _coin_succeeding_half_the_time(second: float, length: int) -> PolicyPair:
    """Return the coin with a goal that μ reaches half of the time, so that the advantage is ±1/2 at any length."""
    return independent_pair((0.5, 0.5), (1 - second, second), (1, 0), length, goal=math.ceil((1 - second) * length))


def _constant_advantage_coin(chi2: float, length: int) -> PolicyPair:
    """Return the coin with reward 0 and advantage 1, so that only the weighted score contributes variance."""
    rule = RewardRule(torch.tensor([[1e-9, 0]], dtype=torch.float64, device="cpu"))
    return replace(coin_with_chi2(chi2, length), rule=rule, advantage_offset=1.0)


def coin_with_chi2(chi2: float, length: int) -> PolicyPair:
    """Return a fair coin π with the μ for which χ² per token is exactly `chi2`: 1/(4q) + 1/(4(1 − q)) = 1 + χ².

    The reward is 1 if at least half of the tokens are the first side.
    """
    second = (1 - math.sqrt(1 - 1 / (1 + chi2))) / 2
    return independent_pair((0.5, 0.5), (1 - second, second), (1, 0), length, goal=math.ceil(length / 2))
