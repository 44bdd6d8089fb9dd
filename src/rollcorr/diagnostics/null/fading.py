"""Evidence of a different prompt: the excess over a null fades along the response, is displaced, or heals."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.null.excess import MIN_ROWS, cause
from rollcorr.diagnostics.null.excess_tokens import ExcessTokens
from rollcorr.diagnostics.null.token_share import TokenShare
from rollcorr.diagnostics.numbers import format_number

EARLY, SETTLED = 8, 32
"""Length of the beginning of a response in tokens, and the position from which k3 has settled."""
OTHER_PROMPT, OTHER_PROMPT_ALONE = 0.4, 0.06
"""k3 of the beginning in nats per token, above which prompts differ; the second limit is for unknown prompt lengths."""
FALLS = -0.5
"""Power b of (early excess) ~ (prompt length)^b, below which the prompt itself differs. An extra or missing token
weighs about 1/length or less, so b is −1 or lower; a stale cache has b of about 0."""
REPEATED_FALLS = -0.3
"""The same limit for responses that repeat few tokens."""
CACHE_FADES = 9.0
"""Fading below which a stale cache is ruled out. The response's own keys are correct and soon outweigh stale keys of
the prompt, while a prompt without its BOS token keeps differing. Decides only where prompt lengths do not."""
SURELY_ABOVE = 2.0
"""Standard errors above `FALLS` from which the prompt itself counts as the same."""
DISPLACED = 0.008
"""Share of Var(d) explained by an equal, spared neighbor among tokens at one position, above which one side scores a
token with its neighbor's probability: 0.018 or more for displaced prompts, up to 0.003 for other weights."""
HEALS, MAY_HEAL, HEALING_STEPS = 0.55, 0.6, 6
"""d² of the last third of the steps over the first third, below which the trainer learns the context that it scores in:
0.2 to 0.37 were measured, and 0.82 or more for other weights, which the same updates keep apart. The same ratio, below
which weights are not named either; and the fewest steps for this test."""
BY_POSITION, OF_PAIRS = 0.61, 0.7
"""Share that the position explains of the variance that bigrams leave open, from which positions are displaced: 0.79
was measured for a displaced text, and at most 0.47 for other weights. And the largest share of bigrams: if they explain
everything, nothing is left."""
ALIKE = 0.2
"""Standard deviation of log prompt length, below which no power is fitted."""


class Fading(NamedTuple):
    """Decay of the mismatch along a response.

    Attributes:
        ratio: k3 of the beginning over k3 after it has settled, each relative to the null; NaN with few rows.
        error: standard error of log(ratio); rows count as independent.
        early: k3 of the beginning, nats per token.
        power: b of (k3 of the beginning) ~ (prompt length)^b; default NaN, where lengths are unknown or similar.
        power_error: standard error of `power`; default NaN.
    """

    ratio: float
    error: float
    early: float
    power: float = math.nan
    power_error: float = math.nan


def fading_of(tokens: ExcessTokens) -> Fading:
    """Compute k3 at the beginning of the responses over later k3, each relative to the null at the same probabilities.

    Args:
        tokens: tokens of the excess.

    Returns:
        The fading; NaN with few rows that are long enough.
    """
    rows, first, row = np.unique(tokens.places["rows"], return_index=True, return_inverse=True)
    row = row.reshape(-1)
    early, settled = tokens.places["positions"] < EARLY, tokens.places["positions"] >= SETTLED
    parts = [x * part for x in (tokens.k3, tokens.noise) for part in (early, settled)]
    long_rows = np.bincount(row, settled) >= EARLY
    table = np.stack([np.bincount(row, part, len(rows)) for part in (*parts, early)], axis=1)[long_rows]
    total = table.sum(0)
    if len(table) < MIN_ROWS or min(total[:4]) <= 0:
        return Fading(math.nan, math.nan, math.nan)

    # Jackknife over rows, because tokens of one row are not independent.
    without = total - table
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(without[:, 0] / without[:, 2]) - np.log(without[:, 1] / without[:, 3])
    error = float(np.sqrt((len(table) - 1) * np.var(logs)))
    error = error if math.isfinite(error) else math.inf
    fading = Fading(float((total[0] / total[2]) / (total[1] / total[3])), error, float(total[0] / total[4]))
    if "prompt_length" not in tokens.places:
        return fading

    # Fit b of early ~ length^b over rows by least squares of the logarithms. Adding the null's k3 keeps every row
    # above the noise.
    length, of_row = tokens.places["prompt_length"][first][long_rows], table[:, 0] + table[:, 2]
    known = (length > 0) & (of_row > 0)
    x, y = np.log(length[known]), np.log(of_row[known])
    if len(x) < MIN_ROWS or float(x.std()) <= ALIKE:
        return fading
    x, y = x - x.mean(), y - y.mean()
    power = float(x @ y) / float(x @ x)
    error = math.sqrt(float(np.square(y - power * x).sum()) / (len(x) - 2) / float(x @ x))
    return fading._replace(power=power, power_error=error)


def fading_causes(times: str, fading: Fading, evidence: dict[str, float], *, repeats: bool = False) -> list[Finding]:
    """Return the causes of an excess that fades: a different prompt or a stale prefix cache, the likelier one first.

    A different prompt has a large excess, or one that is larger for short prompts. For responses that repeat few tokens
    the power decides if it is known, because all of the excess lies at the beginning.

    Args:
        times: size of the excess, in words.
        fading: decay of the excess.
        evidence: numbers of the excess.
        repeats: True if the responses repeat few tokens; default False.
    """
    evidence = {**evidence, "fading": fading.ratio, "early_k3": fading.early}
    if math.isfinite(fading.power):
        evidence["power_of_prompt_length"] = fading.power
    shown = f"{times}, and {format_number(fading.ratio)} times as much at the first {EARLY} tokens as after {SETTLED}"
    large = OTHER_PROMPT if math.isfinite(fading.power) else OTHER_PROMPT_ALONE
    same_prompt = fading.power - SURELY_ABOVE * fading.power_error > FALLS
    slowly = fading.ratio < CACHE_FADES and not same_prompt
    prompt = fading.early >= large or fading.power <= FALLS or slowly
    if repeats and math.isfinite(fading.power):
        prompt = fading.power <= REPEATED_FALLS
    first, second = ("template", "stale_prefix_cache") if prompt else ("stale_prefix_cache", "template")
    return [
        cause(first, shown, evidence, confidence=0.9 if fading.early >= large and not repeats else 0.7),
        cause(second, f"{shown}; less likely", evidence, confidence=0.3),
    ]


def other_context(tokens: ExcessTokens, context: TokenShare) -> str:
    """Return evidence, in words, that one side scores a different context; empty without any.

    Args:
        tokens: an excess that is a fixed function of the tokens from the first step on.
        context: share of Var(d) explained by bigrams.
    """
    healed = healing_ratio(tokens)
    if tokens.share_of_equal_neighbors() >= DISPLACED:
        return ", and a token beside an equal one is spared: one side is a token ahead or behind"
    if share_by_position(tokens, context) >= BY_POSITION and context.share < OF_PAIRS:
        share = tokens.share("pair_at").share
        return f", and the last two tokens explain it at their position alone ({share:.0%} of the variance)"
    if healed < HEALS:
        return f", and it fell to {healed:.0%} while the trainer learned in the context that it scores"
    return ""


def share_by_position(tokens: ExcessTokens, context: TokenShare) -> float:
    """Return the share that the position explains of the variance that bigrams, `context`, leave open."""
    at_position = tokens.share("pair_at")
    return (at_position.share - 2 * at_position.error - context.share) / max(1 - context.share, 1e-12)


def healing_ratio(tokens: ExcessTokens) -> float:
    """Return d², without outliers, of the last third of the steps over the first third; 1 with few steps."""
    step = tokens.places["step"]
    steps = np.unique(step)
    third = len(steps) // 3
    if len(steps) < HEALING_STEPS:
        return 1.0
    square = np.square(tokens.clipped)
    return float(square[step >= steps[-third]].mean() / square[step < steps[third]].mean())
