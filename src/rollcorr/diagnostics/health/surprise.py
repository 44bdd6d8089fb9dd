"""A jump in the surprisal of the sampled tokens: from one step to the next they were drawn from another distribution.

Log-probs from before the sampling settings agree on both sides whatever the sampler does. But tokens that are drawn at
a lower temperature, or with top-p, are more probable: the mean of −log μ jumps at the step at which that begins.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.numbers import format_number

SURPRISE = "rollout_log_ppl"
BEFORE, AFTER = 5, 3
"""Steps on each side of a jump that show its level."""
JUMP, SCATTER, AT_ONCE = 0.3, 5.0, 0.8
"""A jump as a share of the level before it; in units of the largest difference of neighboring steps on either side; and
the share of it that lies between its two steps. Learning changes the surprisal too, but over several steps."""
LEAST = 0.05
"""The smallest jump, nats."""


def surprise_jumped(evidence: Evidence) -> Finding | None:
    """The sampled tokens became more or less probable from one step to the next, and stayed so."""
    steps = evidence.series(SURPRISE)
    for place in range(BEFORE, len(steps) - AFTER + 1):
        before = [value for _, value in steps[place - BEFORE : place]]
        after = [value for _, value in steps[place : place + AFTER]]
        jump = median(after) - median(before)
        scatter = max(abs(b - a) for part in (before, after) for a, b in pairwise(part))
        at_once = (after[0] - before[-1]) / jump if jump else 0.0
        if abs(jump) >= max(LEAST, JUMP * median(before), SCATTER * scatter) and at_once >= AT_ONCE:
            onset = steps[place][0]
            return replace(
                fault("surprise_jumped").finding,
                title=f"the sampled tokens became {'more' if jump < 0 else 'less'} probable at step {onset}, at once",
                metric=SURPRISE,
                value=median(after),
                limit=f"about {format_number(median(before))}, as before",
                first_step=onset,
                steps=len(steps) - place,
            )
    return None
