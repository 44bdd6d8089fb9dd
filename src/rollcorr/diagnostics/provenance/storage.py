"""Detect log-probs that were cast to a 16-bit type: their float32 values end in zero bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.pair_rows import PairRows, extent
from rollcorr.diagnostics.provenance.provenance_findings import provenance_finding

SHARE = 0.98
"""Share of a row's values that must end in zero bits."""
SMALLEST = -0.05
"""Log-prob, nats, above which the bits of a value do not reveal its type."""
TYPES = (("bfloat16", 16, 2.0**-8), ("float16", 13, 2.0**-11))
"""(Name, trailing zero bits as float32, unit roundoff: the largest relative rounding error) of each type."""


def is_16_bit(values: Tensor) -> bool:
    """Return whether the log-probs of one side, (n,) nats, were cast to a 16-bit type; False with fewer than 8."""
    bits = values[values <= SMALLEST].float().view(torch.int32)
    short = (bits & ((1 << min(zeros for _, zeros, _ in TYPES)) - 1)) == 0
    return len(bits) >= 8 and float(short.double().mean()) >= SHARE


def find_storage(pairs: PairRows) -> list[Finding]:
    """Find rows whose log-probs were cast to a 16-bit type.

    Returns:
        A note per side and type, with the share of the differences' mean square that rounding explains.
    """
    findings = []
    valid = pairs.valid
    difference = (pairs.train - pairs.rollout).masked_fill(~valid, 0.0)
    for side, values in (("rollout", pairs.rollout), ("trainer", pairs.train)):
        # Near 0 a log-prob is the difference of two much larger numbers, so few of its bits are significant.
        single = values.masked_fill(~valid, 0.0).float()
        telling = valid & (single <= SMALLEST)
        if int(telling.sum()) < 16:
            continue
        bits = single.view(torch.int32)
        taken = torch.zeros(pairs.rows, dtype=torch.bool, device="cpu")
        for name, zeros, step in TYPES:
            short = telling & ((bits & ((1 << zeros) - 1)) == 0)
            count = pairs.count(telling)
            rows = (pairs.count(short) >= SHARE * count) & (count >= 8) & ~taken
            tokens = pairs.of_rows(rows) & telling
            if int(tokens.sum()) < 16 or len(single[tokens].unique()) < 8:
                continue
            taken |= rows
            tokens = pairs.of_rows(rows) & valid

            # The standard deviation of rounding is spacing/√12, with the spacing at the value's power of two.
            power = 2.0 ** single[tokens].double().abs().log2().floor()
            rounding = (power * 2 * step).square().mean() / 12
            measured = difference[tokens].square().mean()
            explained = min(float(rounding / measured.clamp(min=1e-30)), 1.0)
            evidence = {
                "rounding_std": float(rounding.sqrt()),
                "difference_std": float(measured.sqrt()),
                "explained_share": explained,
            }
            reason = (
                f"the {side}'s log-probs are {name} values: rounding alone makes a difference of "
                f"{format_number(evidence['rounding_std'])} nats, {explained:.0%} of the variance"
            )
            found = provenance_finding("storage", reason, 1.0, evidence)
            findings.append(replace(found, severity="note", **extent(pairs, rows, tokens)))
    return findings
