"""Which preset a mismatch calls for: the rules of docs/guides/choosing.md, written once, as data.

A rule is the first whose limits hold. `advise` looks them up, and a test holds the page against them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

SEQUENCE_WEIGHTS_UNTIL = 0.5
"""Nats of T × KL: beyond it the effective sample size of sequence weights is below exp(−1)."""
FEW_TIMES = 3.0
"""A threshold on a mean divergence is at least so many times the divergence of the log: "a few times"."""


class Measured(NamedTuple):
    """What a rule looks at.

    Attributes:
        k3: KL per token from k3, nats.
        kl: |KL| per token from −d, nats.
        chi2_token: χ² per token.
        ess: effective sample size of token weights, 0 to 1.
        t_times_kl: mean length times |KL|, nats.
    """

    k3: float
    kl: float
    chi2_token: float
    ess: float
    t_times_kl: float


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A size of the mismatch, and what to do about it.

    Attributes:
        name: as in docs/guides/choosing.md.
        signs: what it is recognized by, in words.
        k3_below: nats; infinite for no limit.
        kl_below: nats.
        chi2_below: of χ² per token.
        ess_above: of token weights.
        short: preset where T × KL is small enough for sequence weights.
        long: preset beyond that.
    """

    name: str
    signs: str
    k3_below: float = math.inf
    kl_below: float = math.inf
    chi2_below: float = math.inf
    ess_above: float = 0.0
    short: str
    long: str

    def holds(self, measured: Measured) -> bool:
        """Whether the numbers are inside all limits."""
        return (
            measured.k3 < self.k3_below
            and measured.kl < self.kl_below
            and measured.chi2_token < self.chi2_below
            and measured.ess > self.ess_above
        )


SITUATIONS = (
    Situation(
        name="negligible",
        signs="k3 below 1e-4 and an effective sample size of token weights above 0.99",
        k3_below=1e-4,
        ess_above=0.99,
        short="measure",
        long="measure",
    ),
    Situation(
        name="small",
        signs="|KL| below 0.01 and χ² per token below 0.1",
        kl_below=0.01,
        chi2_below=0.1,
        short="decoupled_token_is",
        long="decoupled_token_is",
    ),
    Situation(
        name="moderate",
        signs="|KL| below 0.1 and χ² per token below 1",
        kl_below=0.1,
        chi2_below=1.0,
        short="decoupled_k3_rs_token_tis",
        long="decoupled_k3_rs_token_tis",
    ),
    Situation(
        name="severe",
        signs="|KL| of 0.1 or more, or χ² per token of 1 or more",
        short="decoupled_seq_is_rs",
        long="decoupled_k3_rs",
    ),
)
"""From the smallest mismatch to the largest; the last one holds always."""
