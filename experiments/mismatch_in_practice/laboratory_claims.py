"""Judges that read the laboratory's tables, where every number is an exact sum, or that do arithmetic."""

from __future__ import annotations

import itertools
import math

from claims_verdicts import CANNOT, FAILS, PARTLY, REPEATS, Evidence, Judge, Verdict, by_cases, said
from measured_rows import CLAMP, Row, select

PUBLISHED_T_MAX = {0.0006: 33_000, 0.001: 20_000, 0.002: 10_000, 0.005: 4_000, 0.01: 2_000, 0.02: 1_000, 0.05: 400}
SAFE_KL = (0.001, 0.005)
SAFE_LENGTH = 10_000
TOKEN, SEQUENCE = "decoupled_token_is", "sequence_truncated_4"


def off_policy(evidence: Evidence) -> Verdict | None:
    """Without correction the expected gradient is another one."""
    rows = sorted(
        select(evidence.exact, kind="noise", estimator="none", T=32, batch_size=256), key=lambda row: row["kl"]
    )
    if not rows:
        return None
    first, last = rows[0], rows[-1]
    seen = (
        f"Without correction the bias of the gradient is {first['bias']:.1%} of the gradient at a KL of "
        f"{first['kl']:g} per token, and {last['bias']:.0%} at {last['kl']:g} (32 tokens with noise)."
    )
    return said(all(b["bias"] > a["bias"] for a, b in itertools.pairwise(rows)), seen)


def unbiased(evidence: Evidence) -> Verdict | None:
    """Untruncated sequence weights, where the safety clamp of 20 is out of reach."""
    rows = [row for row in select(evidence.exact, estimator="sequence_untruncated") if row["t_times_kl"] <= 1]
    if not rows:
        return None
    worst = max(row["bias"] for row in rows)
    seen = f"The largest bias where T × KL is at most 1 is {worst:.0e} of the gradient: rounding ({len(rows)} cases)."
    return said(worst < 1e-6, seen)


def order(estimator: str, *quantities: str) -> Judge:
    """Published orders beside fitted ones; a lower one keeps the bound and does not attain it."""

    def judge(evidence: Evidence) -> Verdict | None:
        fits: dict[str, Row] = {
            row["quantity"]: row for row in evidence.orders if (row["estimator"], row["quantity"]) in wanted
        }
        if not fits:
            return None
        fits = {name.replace(", of", " in"): row for name, row in fits.items()}
        shown = "; ".join(
            f"{name}: {row['slope']:.2f} (document {row['published']:g}; {row['pair']})" for name, row in fits.items()
        )
        seen = f"Fitted exponents of exact numbers, each on one pair of policies: {shown}."
        above = any(abs(row["slope"]) > abs(row["published"]) + 0.1 for row in fits.values())
        lower = [name for name, row in fits.items() if abs(row["slope"]) < abs(row["published"]) - 0.1]
        if above:
            return Verdict(FAILS, seen)
        if lower:
            return Verdict(PARTLY, seen, f"it holds as an upper bound; slower growth: {'; '.join(lower)}")
        return Verdict(REPEATS, seen)

    wanted = {(estimator, quantity) for quantity in quantities}
    return judge


def growth(evidence: Evidence) -> Verdict | None:
    """(1 + χ̄²)^T against the exact second moment."""
    ratios: dict[str, list[float]] = {}
    for row in evidence.growth:
        ratios.setdefault(row["pair"], []).append(row["log_exact"] / row["log_law"])
    if not ratios:
        return None
    shown = "; ".join(f"{name}: {min(found):.2f} to {max(found):.2f}" for name, found in ratios.items())
    close = all(abs(ratio - 1) < 0.2 for found in ratios.values() for ratio in found)
    return said(close, f"The exact exponent, divided by that of the law: {shown}.")


def ceiling(evidence: Evidence) -> Verdict | None:
    """A larger ceiling C: less bias, more variance."""
    rows = select(evidence.threshold, kind="noise", family="sequence ceiling", batch_size=1024)
    rows = sorted(rows, key=lambda row: row["threshold"])
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    seen = (
        f"From C = {first['threshold']:g} to C = {last['threshold']:g} the bias falls from {first['bias']:.2f} to "
        f"{last['bias']:.2f} of the gradient, and the deviation rises from {first['deviation']:.2f} to "
        f"{last['deviation']:.2f} (noise, T × KL = 1, batches of 1,024)."
    )
    less_bias = all(b["bias"] <= a["bias"] for a, b in itertools.pairwise(rows))
    more_variance = all(b["deviation"] >= a["deviation"] for a, b in itertools.pairwise(rows))
    return said(less_bias and more_variance, seen)


def better_trade(evidence: Evidence) -> Verdict | None:
    """Truncated sequence weights against truncated token weights, both exact."""
    token = {_case(row): row for row in select(evidence.exact, estimator=TOKEN)}
    pairs = [(row, token[_case(row)]) for row in select(evidence.exact, estimator=SEQUENCE) if _case(row) in token]
    if not pairs:
        return None
    bias = sum(sequence["bias"] < one["bias"] for sequence, one in pairs)
    error = sum(sequence["mse"] < one["mse"] for sequence, one in pairs)
    seen = (
        f"Exact numbers, {len(pairs)} cases of kind, length, KL and batch size. Seq-TIS 4.0 has the smaller bias in "
        f"{bias}. It has the smaller mean squared error, which is bias² + variance, in {error}."
    )
    verdict = by_cases(error, len(pairs), seen)
    return verdict._replace(why=f"its error is smaller in {error} of {len(pairs)} cases") if verdict.why else verdict


def t_max(evidence: Evidence) -> Verdict | None:
    """The share of clamped weights where T = 20 / KL."""
    if not evidence.clamp:
        return None
    shares = [row["saturated_low"] for row in evidence.clamp]
    seen = (
        f"With independent tokens and T = 20 / KL, {min(shares):.0%} to {max(shares):.0%} of the weights are at the "
        f"clamp ({len(shares)} values of KL, 64 sequences each)."
    )
    return said(min(shares) > 0.25 and max(shares) < 0.75, seen)


def log_normal(evidence: Evidence) -> Verdict | None:
    """Where half of the effective sample size is lost, as a share of T_max."""
    if not evidence.clamp:
        return None
    distances = [row["ess_half_at"] * row["kl"] for row in evidence.clamp]
    seen = (
        f"With independent tokens the ESS is down to 1/2 at T × KL = {min(distances):.2f} to {max(distances):.2f}; "
        f"log-normal weights have it at {math.log(2) / 2:.2f}. The clamp is at 20."
    )
    return said(max(distances) < 1, seen)


def mask_variance(evidence: Evidence) -> Verdict | None:
    """What rejecting sequences leaves of the effective sample size, as T × KL grows."""
    rows = select(evidence.regimes, kind="noise", estimator="decoupled_seq_is_rs", batch_size=1024)
    rows = sorted(rows, key=lambda row: row["t_times_kl"])[:3]
    if len(rows) < 2:
        return None
    shown = "; ".join(f"{row['ess']:.2g} and {row['kept']:.1%} at T × KL = {row['t_times_kl']:.2g}" for row in rows)
    falls = all(b["ess"] < a["ess"] for a, b in itertools.pairwise(rows)) and rows[1]["ess"] < 0.5
    return said(falls, f"ESS and kept sequences of Seq-MIS with the band 0.5 to 2: {shown} (noise, 128 tokens).")


def geometric_sequence(evidence: Evidence) -> Verdict | None:
    """Geo-RS with sequence weights beside Geo-RS with token weights: in short sequences the band bounds both."""
    found = [
        select(evidence.regimes, kind="noise", estimator=f"decoupled_geo_rs_{weights}_tis", batch_size=1024)
        for weights in ("seq", "token")
    ]
    if not all(found):
        return None
    sequence, token = (min(rows, key=lambda row: row["t_times_kl"]) for rows in found)
    length = int(sequence["T"])
    seen = (
        f"At T × KL = {sequence['t_times_kl']:.2g} and {length} tokens the deviation of the gradient is "
        f"{sequence['deviation']:.2f} with sequence weights and {token['deviation']:.2f} with token weights; "
        f"{sequence['kept']:.0%} of the sequences are kept. At 10,000 tokens the band would allow weights up to "
        f"{1.001**10_000:,.0f}."
    )
    why = f"a kept sequence of {length} tokens has a weight of at most 1.001^{length} = {1.001**length:.2f}"
    return Verdict(CANNOT, seen, f"{why}, and no cell trains with it")


def garbage_gain(evidence: Evidence) -> str:
    """What a filter of whole sequences gains where 5 % are broken by hand; empty without rows."""
    rows = select(evidence.regimes, kind="noise, garbage", estimator="seq_mean_k2", batch_size=1024)
    row = next((row for row in rows if 5 < row["t_times_kl"] < 20), None)
    if row is None:
        return ""
    return (
        "The laboratory breaks 5 % of the sequences by hand: there a filter on the mean ratio lowers the error of the "
        f"gradient from {row['random_direction']:.2f} to {row['direction']:.2f}."
    )


def drift(evidence: Evidence) -> Verdict:
    """0.99 to the power of 1,000."""
    return said(abs(0.99**1000 / 0.00004 - 1) < 0.15, f"0.99^1000 = {0.99**1000:.6f}.")


def amplification(evidence: Evidence) -> Verdict:
    """1.01 to the power of 1,000."""
    return said(abs(1.01**1000 / 20_000 - 1) < 0.1, f"1.01^1000 = {1.01**1000:,.0f}.")


def clamp_bounds(evidence: Evidence) -> Verdict:
    """exp of −20 and 20."""
    low, high = math.exp(-CLAMP), math.exp(CLAMP)
    near = abs(low / 2e-9 - 1) < 0.05 and abs(high / 4.85e8 - 1) < 0.01
    return said(near, f"exp(−20) = {low:.2e} and exp(20) = {high:.2e}.")


def t_max_table(evidence: Evidence) -> Verdict:
    """20 / KL for each row of the published table."""
    wrong = [kl for kl, length in PUBLISHED_T_MAX.items() if abs(CLAMP / kl / length - 1) > 0.02]
    shown = ", ".join(f"{kl:g} → {CLAMP / kl:,.0f}" for kl in PUBLISHED_T_MAX)
    return said(not wrong, f"20 / KL: {shown}. The document rounds 33,333 to ~33,000.")


def usually_safe(evidence: Evidence) -> Verdict:
    """The document's own bound, over its own range."""
    low, high = (kl * SAFE_LENGTH for kl in SAFE_KL)
    seen = (
        f"At {SAFE_LENGTH:,} tokens a KL of {SAFE_KL[0]:g} to {SAFE_KL[1]:g} makes T × KL = {low:.0f} to {high:.0f}, "
        f"and the limit is 20. The document's own table allows {CLAMP / SAFE_KL[1]:,.0f} tokens at {SAFE_KL[1]:g}."
    )
    return Verdict(PARTLY, seen, f"at {SAFE_LENGTH:,} tokens it holds up to a KL of {CLAMP / SAFE_LENGTH:g}")


def geometric_length(evidence: Evidence) -> Verdict:
    """The geometric mean of equal ratios does not depend on how many there are."""
    short, long = ((1.1**length) ** (1 / length) for length in (10, 100))
    return said(abs(short - long) < 1e-9, f"(1.1^10)^(1/10) = {short:.4f} and (1.1^100)^(1/100) = {long:.4f}.")


def t_max_of_cut(evidence: Evidence) -> Verdict:
    """20 / KL at the two KLs of the document's run; that T_max falls is claim 56 in other words."""
    seen = f"20 / 0.01 = {CLAMP / 0.01:,.0f} and 20 / 0.033 = {CLAMP / 0.033:,.0f}."
    if abs(CLAMP / 0.033 / 600 - 1) >= 0.05:
        return Verdict(FAILS, seen)
    return Verdict(PARTLY, seen, "the quotient does; whether the KL rises is the claim before")


def _case(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("kind", "T", "kl", "batch_size"))
