"""Signs of another prompt in an excess over a null: it fades along the response, is displaced, or heals."""

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
"""Tokens of a response that count as its beginning, and the position from which it has settled."""
OTHER_PROMPT, OTHER_PROMPT_ALONE = 0.4, 0.06
"""k3 of the beginning, nats per token, above which the prompts differ; the second where their lengths are not known."""
FALLS = -0.5
"""Power of the prompt's length by which the excess at the beginning goes, below which the prompt itself differs: a
token more or less weighs about 1/length or less, so the power is −1 or lower, and that of a stale cache is about 0."""
REPEATED_FALLS = -0.3
"""The same where the responses repeat few tokens."""
CACHE_FADES = 9.0
"""Fading below which it is no stale cache: the response's own keys are right and soon outweigh those of the prompt,
while a prompt that lacks its BOS keeps differing. It decides where the prompts' lengths leave it open."""
SURELY_ABOVE = 2.0
"""Standard errors above `FALLS` from which the power says that the prompt itself is the same."""
DISPLACED, HALF = 0.75, 0.5
"""Share of the ids that are spared where the next or the last token is the same, above which one side is a token ahead
or behind: 0.8 to 1 under other prompts, up to 0.5 under other weights; and k3 over that of other tokens at the same
positions below which an id is spared."""
ID_TOKENS, FEWEST_IDS, OF_PAIRS = 20, 5, 0.7
"""Tokens of an id, and ids, that this takes; and the share that a token and the one before it may explain: where they
explain all, equal neighbors are one pair of each id, and may be spared by chance."""
HEALS, HEALING_STEPS = 0.4, 6
"""k3 of the last third of the steps over that of the first third, below which the trainer learns the context that it
scores in: 0.07 to 0.49 were seen, and 0.77 and more under other weights, which the same updates keep apart."""
MAY_HEAL = 0.6
"""The same below which weights are not named either."""
BY_POSITION, WITH_SPARED = 0.55, 0.35
"""Share that the position explains of what a token and the one before it leave open, from which positions are
displaced; and the same where half of the ids are spared too. Under other weights 0.48 or less, and spared or 0.35."""
ALIKE = 0.2
"""Standard deviation of the logarithm of the prompts' lengths below which nothing depends on them."""


class Fading(NamedTuple):
    """How the mismatch goes along a response.

    Attributes:
        ratio: k3 of the beginning over k3 after it has settled, each against the null; NaN with few rows.
        error: standard error of its log, rows being independent.
        early: k3 of the beginning, nats per token.
        power: of the prompt's length that k3 of the beginning goes by; NaN where the lengths are not known or alike.
        power_error: its standard error.
    """

    ratio: float
    error: float
    early: float
    power: float = math.nan
    power_error: float = math.nan


def fading_of(tokens: ExcessTokens) -> Fading:
    """k3 at the beginning of the responses against k3 later, each over what the null has at these probabilities."""
    rows, first, row = np.unique(tokens.places["rows"], return_index=True, return_inverse=True)
    row = row.reshape(-1)
    early, settled = tokens.places["positions"] < EARLY, tokens.places["positions"] >= SETTLED
    parts = [x * part for x in (tokens.k3, tokens.noise) for part in (early, settled)]
    long_rows = np.bincount(row, settled) >= EARLY
    table = np.stack([np.bincount(row, part, len(rows)) for part in (*parts, early)], axis=1)[long_rows]
    total = table.sum(0)
    if len(table) < MIN_ROWS or min(total[:4]) <= 0:
        return Fading(math.nan, math.nan, math.nan)

    # A jackknife over rows: each is left out in turn.
    without = total - table
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(without[:, 0] / without[:, 2]) - np.log(without[:, 1] / without[:, 3])
    error = float(np.sqrt((len(table) - 1) * np.var(logs)))
    error = error if math.isfinite(error) else math.inf
    fading = Fading(float((total[0] / total[2]) / (total[1] / total[3])), error, float(total[0] / total[4]))
    if "prompt_length" not in tokens.places:
        return fading

    # The power b of early ~ length^b over rows: least squares of the logarithms. What the null expects is added, so
    # that no row is below the noise.
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
    """An excess that fades: another prompt where it is large, or larger for short prompts; else a stale cache.

    Where the responses repeat few tokens, the size says nothing: all of it lies at the beginning.
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
    """Return in words how a fixed function of the tokens shows that one side scores another context; else nothing.

    Args:
        tokens: an excess that is there from the first step on.
        context: how much of Var(d) a token and the one before it explain.
    """
    displaced, at_position, healed = _displaced(tokens), tokens.share("pair_at"), healing(tokens)
    beyond = (at_position.share - 2 * at_position.error - context.share) / max(1 - context.share, 1e-12)
    if displaced >= DISPLACED and context.share < OF_PAIRS:
        return f", and {displaced:.0%} of the ids are spared beside the same id: one side is a token ahead or behind"
    if beyond >= (WITH_SPARED if displaced >= HALF else BY_POSITION) and context.share < OF_PAIRS:
        return f", and the last two tokens explain it at their position alone ({at_position.share:.0%} of the variance)"
    if healed < HEALS:
        return f", and it fell to {healed:.0%} while the trainer learned in the context that it scores"
    return ""


def _displaced(tokens: ExcessTokens) -> float:
    """Share of the ids that are spared where the next token, or the last one, is the same; 0 with few of them."""
    repeats, position = tokens.places.get("repeats"), tokens.places["positions"]
    if repeats is None:
        return 0.0
    other, shares = (repeats == 0).astype(float), []
    usual = (np.bincount(position, tokens.k3 * other) / np.maximum(np.bincount(position, other), 1))[position]
    _, number = np.unique(tokens.places["ids"], return_inverse=True)
    for neighbor in (1, 2):
        own = ((repeats & neighbor) > 0).astype(float)
        k3, due, count = (np.bincount(number.reshape(-1), own * x) for x in (tokens.k3, usual, 1.0))
        known = count >= ID_TOKENS
        if known.sum() >= FEWEST_IDS:
            shares.append(float((k3 < HALF * due)[known].mean()))
    return max(shares, default=0.0)


def healing(tokens: ExcessTokens) -> float:
    """k3 of the last third of the steps over that of the first third; 1 with few steps."""
    step = tokens.places["step"]
    steps = np.unique(step)
    third = len(steps) // 3
    if len(steps) < HEALING_STEPS:
        return 1.0
    return float(tokens.k3[step >= steps[-third]].mean() / tokens.k3[step < steps[third]].mean())
