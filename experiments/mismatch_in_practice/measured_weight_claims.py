"""Judges of sections 3 to 7 that read the tables of the measured study: weights, clamp, ESS and rejection."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from claims_verdicts import (
    CANNOT,
    FAILS,
    NEARLY_ALL,
    PARTLY,
    REPEATS,
    UNDECIDED,
    Evidence,
    Verdict,
    by_cases,
    by_direction,
    direction,
    misses_rare,
    said,
)
from measured_claims import EXACT, at_the_end, beyond, kl_text, nothing, same_case
from measured_rows import (
    CLAMP,
    CUT,
    Row,
    clamped,
    clip_values,
    distance,
    growth_fit,
    half_clamped,
    longest_of,
    name_of,
    pairs_of,
    select,
)

RECOMMENDED_MEAN = 1.01
"""From here on the document saw every sample rejected."""

DECISIVE = 0.4
"""The largest error of a fitted ratio that can tell 0 from 1."""

FAR = 5 * CLAMP
"""Where T × KL is far above the clamp."""

DOCUMENT_TOKENS = 10_000
"""Length of the document's answers."""

RANGE = (2.0, CLAMP)
"""T × KL, nats: weights differ by a lot, and the clamp is not reached."""


def log_weight_is_total_kl(evidence: Evidence) -> Verdict | None:
    """log w = −T × KL of the trajectory, on average over trajectories."""
    if not evidence.grid:
        return None
    equal = [
        abs(row["log_weight_mean"] + row["t_times_kl"]) < 1e-4 * max(1.0, abs(row["t_times_kl"]))
        for row in evidence.grid
    ]
    seen = f"It is an identity: the mean log weight is −T × KL in {sum(equal):,} of {len(equal):,} cases."
    return by_cases(sum(equal), len(equal), seen)


def nothing_to_order(evidence: Evidence) -> Verdict | None:
    """What a sampler with new weights differs by at temperatures 1.0 and 0.4, in bf16 and in float32.

    Below 2 nats over the document's 10,000 tokens, sequence weights differ too little for corrections to have an order.
    """
    engines = ("bf16", EXACT)
    found = {
        engine: [
            row["k3"]
            for name in ("1.0", "0.4")
            for row in at_the_end(evidence, engine=engine, sampling=name, mode="processed", updates=0)
        ]
        for engine in engines
    }
    if any(len(pair) < 2 for pair in found.values()):
        return None
    shown = "; ".join(
        f"{one:.2g} at temperature 1.0 and {cold:.2g} at 0.4 ({name})" for name, (one, cold) in found.items()
    )
    farthest = DOCUMENT_TOKENS * max(found["bf16"])
    seen = f"k3 per token, nats: {shown}. Over {DOCUMENT_TOKENS:,} tokens, bf16 comes to at most {farthest:.1f} nats."
    if farthest >= RANGE[0]:
        return Verdict(UNDECIDED, seen, "no training has a bf16 sampler")
    why = (
        "no training with a bf16 sampler was run: with new weights it differs too little at either temperature for "
        "corrections to have an order"
    )
    return Verdict(CANNOT, seen, why)


def variance_law(evidence: Evidence) -> Verdict | None:
    """The fitted growth of the second moment, by knob."""
    pairs = pairs_of(select(evidence.grid, sampling="1.0", mode="processed"))
    shown: dict[str, list[str]] = {"precision": [], "staleness": []}
    agree: dict[str, list[bool]] = {"precision": [], "staleness": []}
    for pair in pairs:
        fit = growth_fit(pair)
        if fit is None or fit[2] <= 1e-6:
            continue
        slope, error, expected, first, last = fit
        ratio, error = slope / expected, error / expected
        knob = "staleness" if pair[0]["updates"] else "precision"
        shown[knob].append(f"{ratio:.2f} ± {error:.2f} ({name_of(pair[0])}, T {first} to {last:,})")

        # A fit whose error covers 0 and 1 alike agrees with everything.
        if error <= DECISIVE:
            agree[knob].append(direction(ratio - 1, error) == 0)
    fits = sum(map(len, shown.values()))
    if not fits:
        return None
    listed = " ".join(f"By {knob}: {'; '.join(found)}." for knob, found in shown.items() if found)
    decisive = [holds for found in agree.values() for holds in found]
    seen = (
        f"The law predicts that the slope of log(1 + χ²_seq) in T, divided by log(1 + χ̄²), is 1. We found, in {fits} "
        f"of {len(pairs)} pairs with enough points below T log(1 + χ̄²) = 1: {listed} {len(decisive)} of them have an "
        f"error of {DECISIVE} or less, and count."
    )
    if not decisive:
        return Verdict(UNDECIDED, seen, "no fit is exact enough")
    counts = "; ".join(f"{knob}: {sum(found)} of {len(found)} fits agree" for knob, found in agree.items() if found)
    verdict = by_cases(sum(decisive), len(decisive), seen)
    return verdict._replace(why=counts) if verdict.word == PARTLY else verdict


def far_above_clamp(evidence: Evidence) -> Verdict | None:
    """The share of clamped weights where T × KL is far above 20."""
    rows = [row for row in select(evidence.grid, mode="processed") if row["t_times_kl"] >= FAR]
    if not rows:
        return Verdict(CANNOT, "", f"no case here has a T × KL of {FAR:g} or more")
    shown = ", ".join(f"{clamped(row):.0%} (T × KL = {row['t_times_kl']:.0f}, ESS {row['ess']:.2f})" for row in rows)
    holds = sum(clamped(row) > 0.5 for row in rows)
    seen = f"Cases with T × KL of {FAR:g} or more, five times the clamp, and their clamped weights: {shown}."
    return by_cases(holds, len(rows), seen)


def collapses(evidence: Evidence) -> Verdict | None:
    """Cases at or above the clamp of which nothing is left."""
    rows = [row for row in select(evidence.grid, mode="processed") if row["t_times_kl"] >= CLAMP]
    if not rows:
        return Verdict(CANNOT, "", f"no case here has a T × KL of {CLAMP:g} or more")
    clamp = sum(clamped(row) > 0.5 for row in rows)
    ess = sum(clamped(row) <= 0.5 and row["ess"] < 0.5 for row in rows)
    seen = (
        f"Of {len(rows)} cases with T × KL of 20 or more, {clamp} have more than half of the weights at the clamp. "
        f"In {ess} others the ESS is below 0.5."
    )
    return by_cases(clamp + ess, len(rows), seen)


def clamp_rule(evidence: Evidence) -> Verdict | None:
    """The length at which half of the weights are clamped, beside 20 / KL."""
    longest = longest_of(evidence.grid)
    pairs = [
        pair
        for pair in pairs_of(select(evidence.grid, mode="processed"))
        if pair[-1]["kl"] > 0 and pair[0]["T"] <= CLAMP / pair[-1]["kl"] <= longest
    ]
    if not pairs:
        return nothing(evidence, "no pair here has a T_max within its lengths")
    reached = [half * pair[-1]["kl"] / CLAMP for pair in pairs if (half := half_clamped(pair)) is not None]
    seen = f"In {len(pairs)} pairs with T_max ≤ {longest:,} we looked for the length where half of the weights clamp."
    if reached:
        seen += f" It is {min(reached):.1f} to {max(reached):.1f} times 20 / KL in {len(reached)} of them."
    if len(reached) < len(pairs):
        seen += f" In {len(pairs) - len(reached)} it is not reached within {longest:,} tokens."
    if reached and min(reached) > 1:
        seen += " A few sequences have most of the KL, so the typical one reaches the clamp later."
    near = sum(0.5 <= ratio <= 2 for ratio in reached)
    return by_cases(near, len(pairs), f"{seen} Within a factor of 2 of the rule: {near} of {len(pairs)}.")


def safe_below(evidence: Evidence) -> Verdict | None:
    """The clamp where the KL is that of the document's typical mismatch."""
    longest = longest_of(evidence.grid)
    rows = [row for row in select(evidence.grid, mode="processed", T=longest) if 0.001 <= row["kl"] <= 0.005]
    if not rows:
        return nothing(evidence, "no case here has a KL of 0.001 to 0.005")
    worst = max(rows, key=clamped)
    safe = sum(clamped(row) < 0.1 for row in rows)
    seen = (
        f"Of {len(rows)} pairs with a KL of 0.001 to 0.005, {safe} have less than 10 % of the weights at the clamp at "
        f"{longest:,} tokens; the worst has {clamped(worst):.0%} of {worst['windows']} sequences. Shorter responses "
        f"hardly reach the clamp, so they show nothing, and {DOCUMENT_TOKENS:,} tokens are not measured."
    )
    return by_cases(safe, len(rows), seen)


def before_clamp(evidence: Evidence) -> Verdict | None:
    """ESS below T × KL = 20, where few weights are clamped."""
    rows = [row for row in select(evidence.grid, mode="processed") if _between(row) and clamped(row) < 0.1]
    if not rows:
        return nothing(evidence, "no case here has a T × KL of 2 to 20 with few clamped weights")
    lost = sum(row["ess"] < 0.5 for row in rows)
    seen = f"{lost} of {len(rows)} cases with T × KL of 2 to 20, and under 10 % at the clamp, have an ESS below 0.5."
    return said(lost >= 0.1 * len(rows), seen)


def _between(row: Row) -> bool:
    return RANGE[0] <= distance(row) < RANGE[1]


def log_normal(evidence: Evidence) -> Verdict | None:
    """The ESS beside that of log-normal weights with the same T × KL, exp(−2 T × KL)."""
    rows = [row for row in select(evidence.grid, mode="processed") if 0.5 <= distance(row) < RANGE[1]]
    if not rows:
        return nothing(evidence, "no case here has a T × KL of 0.5 to 20")
    lost = sum(row["ess"] < 0.5 for row in rows)
    later = sum(row["ess"] > 2 * max(math.exp(-2 * distance(row)), 1 / row["windows"]) for row in rows)
    seen = (
        f"Of {len(rows)} cases with T × KL of 0.5 to 20, {lost} have an ESS below 0.5. Log-normal weights of the same "
        f"T × KL would have an ESS of exp(−2 T × KL); ours is more than twice as large in {later}."
    )
    if lost and later > len(rows) / 2:
        return Verdict(PARTLY, seen, "the ESS is lost below the clamp, but later than log-normal weights lose it")
    return said(lost > 0, seen)


def chi2_exceeds(evidence: Evidence) -> Verdict | None:
    """A sample of this size does not hold the sequences that make χ²_seq large."""
    rows = select(evidence.grid, sampling="1.0", mode="processed")
    if not rows:
        return None
    largest = max(rows, key=lambda row: row["chi2_seq"])
    seen = f"The largest χ²_seq of a sample is {largest['chi2_seq']:.3g} ({name_of(largest)}, T = {largest['T']:,})."
    if largest["chi2_seq"] > 1e3:
        return Verdict(
            UNDECIDED, seen, "it is above 10³ in some samples, and a sample of this size misses the rare ones"
        )
    streams = min(row["windows"] for row in rows)
    return Verdict(CANNOT, seen, misses_rare(streams))


def token_ess(evidence: Evidence) -> Verdict | None:
    """The ESS of Token-TIS below the clamp."""
    rows = [row for row in at_the_end(evidence, sampling="1.0", mode="processed") if distance(row) < CLAMP]
    if not rows:
        return None
    least = min(rows, key=lambda row: row["token_ess"])
    high = sum(row["token_ess"] >= 0.9 for row in rows)
    seen = (
        f"It is 0.9 or more in {high} of {len(rows)} pairs with T × KL below 20; the least is {least['token_ess']:.3f}"
    )
    return by_cases(high, len(rows), f"{seen} ({name_of(least)}).")


def sequence_ess(evidence: Evidence) -> Verdict | None:
    """The ESS of Seq-TIS, at temperature 1."""
    rows = [row for row in at_the_end(evidence, sampling="1.0", mode="processed") if _between(row)]
    if not rows:
        return nothing(evidence, "no case here has a T × KL of 2 to 20")
    shown = ", ".join(f"{row['ess']:.2f} ({name_of(row)})" for row in rows)
    low, streams = sum(row["ess"] < 0.5 for row in rows), sorted({row["windows"] for row in rows})
    seen = (
        f"Where T × KL is 2 to 20 it is {shown}: below 0.5 in {low} of {len(rows)} pairs. Each is one estimate from "
        f"{' or '.join(map(str, streams))} sequences, without an interval."
    )
    return by_cases(low, len(rows), seen)


def low_weights(evidence: Evidence) -> Verdict | None:
    """The share of low weights, at temperature 1."""
    rows = [row for row in at_the_end(evidence, sampling="1.0", mode="processed") if _between(row)]
    if not rows:
        return nothing(evidence, "no case here has a T × KL of 2 to 20")
    shown = ", ".join(f"{row['low_weight']:.0%} ({name_of(row)})" for row in rows)
    holds = sum(row["low_weight"] > 0.5 for row in rows)
    return by_cases(holds, len(rows), f"Where T × KL is 2 to 20 the low weights are {shown}.")


def rises_with_length(evidence: Evidence) -> Verdict | None:
    """Low weights against length."""
    pairs = [
        pair
        for pair in pairs_of(select(evidence.grid, mode="processed", sampling=("1.0", "0.4")))
        if distance(pair[-1]) > 2 and len(pair) > 1
    ]
    if not pairs:
        return nothing(evidence, "no pair here has a T × KL above 2")
    rising = sum(
        all(b["low_weight"] >= a["low_weight"] - 2 * b["low_weight_error"] for a, b in itertools.pairwise(pair))
        and pair[-1]["low_weight"] > pair[0]["low_weight"]
        for pair in pairs
    )
    starts, ends = ([pair[i]["low_weight"] for pair in pairs] for i in (0, -1))
    seen = (
        f"It rises in {rising} of {len(pairs)} pairs with T × KL above 2: from {min(starts):.0%} to {max(starts):.0%} "
        f"at T = {pairs[0][0]['T']} to {min(ends):.0%} to {max(ends):.0%} at T = {pairs[0][-1]['T']:,}."
    )
    return by_cases(rising, len(pairs), seen)


def colder_is_lower(evidence: Evidence) -> Verdict | None:
    """Low weights at temperature 0.4 against 1.0, case by case."""
    rows = [row for row in select(evidence.grid, sampling="1.0", mode="processed") if distance(row) > 0.1]
    pairs = [(row, cold) for row in rows for cold in same_case(evidence, row, sampling="0.4")]
    if not pairs:
        return nothing(evidence, "no case here has a T × KL above 0.1")
    signs = [
        direction(
            cold["low_weight"] - warm["low_weight"], math.hypot(cold["low_weight_error"], warm["low_weight_error"])
        )
        for warm, cold in pairs
    ]
    lower = {
        name_of(warm) for (warm, cold), _ in zip(pairs, signs, strict=True) if cold["low_weight"] < warm["low_weight"]
    }
    more, fewer = signs.count(1), signs.count(-1)
    seen = (
        f"Of {len(pairs)} cases with T × KL above 0.1, {more} have more low weights at 0.4 by two standard errors, and "
        f"{fewer} have fewer. Fewer without regard to errors, at some length: {'; '.join(sorted(lower)) or 'none'}."
    )
    if not more + fewer:
        return by_direction(0, seen)
    if fewer == 0 and more < NEARLY_ALL * len(pairs):
        return Verdict(PARTLY, seen, f"in {more} of {len(pairs)} cases, and in none the other way")
    return by_cases(more, more + fewer, seen)


def cut_is_low(evidence: Evidence) -> Verdict | None:
    """Low weights under cut sampling."""
    rows = at_the_end(evidence, sampling=CUT, mode="processed", updates=0)
    rows = [row for row in rows if row["engine"] != EXACT]
    if not rows:
        return None
    shown = ", ".join(f"{row['low_weight']:.0%} ({row['engine']}, T × KL = {row['t_times_kl']:.0f})" for row in rows)
    holds = sum(row["low_weight"] > 0.9 for row in rows)
    return by_cases(holds, len(rows), f"Low weights with processed log-probs at T = {rows[0]['T']:,}: {shown}.")


def cut_ess(evidence: Evidence) -> Verdict | None:
    """An ESS near 1 that comes from the clamp."""
    rows = at_the_end(evidence, sampling=CUT, mode="processed", engine="bf16", updates=0)
    if not rows:
        return None
    row = rows[0]
    deceived = [other for other in evidence.grid if other["ess"] > 0.9 and clamped(other) > 0.5]
    found = sum(other["false_positive"] for other in deceived)
    seen = (
        f"With processed log-probs (bf16, T = {row['T']:,}) T × KL is {row['t_times_kl']:.0f}, {clamped(row):.0%} of "
        f"the weights are clamped, and the ESS is {row['ess']:.2f}. In {len(deceived)} of {len(evidence.grid):,} cases "
        "of all samplings more than half of the weights are clamped and the ESS is above 0.9, which is misleading"
    )
    if deceived:
        modes = Counter(other["mode"] for other in deceived)
        seen += f" ({', '.join(f'{count} {mode}' for mode, count in modes.items())})"
        seen += f". The library's warning finds {found} of them"
    seen += "."
    if row["ess"] > 0.9 and clamped(row) > 0.5:
        return Verdict(REPEATS, seen)
    if deceived:
        own = (
            f"for bf16 under this sampling the ESS is {row['ess']:.2f}, with {clamped(row):.0%} of the weights clamped"
        )
        return Verdict(PARTLY, seen, f"a misleading ESS occurs, but {own}")
    return Verdict(FAILS, seen)


def kl_of_cut(evidence: Evidence) -> Verdict | None:
    """The mean of −log ρ under cut sampling against temperature 1, in the same engine."""
    cut, plain = (
        at_the_end(evidence, engine="bf16", updates=0, sampling=sampling, mode="processed") for sampling in (CUT, "1.0")
    )
    if not cut or not plain:
        return None
    seen = (
        f"bf16, processed: the mean of −log ρ is {kl_text(cut[0])} with the cut and {kl_text(plain[0])} at temperature "
        f"1.0. The k3 is {cut[0]['k3'] / plain[0]['k3']:.0f} times as large."
    )
    if cut[0]["kl"] > 0:
        seen += f" 20 / KL is {CLAMP / cut[0]['kl']:,.0f} tokens with the cut."
    return by_direction(beyond(cut[0], plain[0]), seen)


def beyond_t_max(evidence: Evidence) -> Verdict | None:
    """Sequences under cut sampling that are longer than 20 / KL."""
    rows = [
        row
        for row in select(evidence.grid, sampling=CUT, mode="processed")
        if row["kl"] > 0 and row["T"] > CLAMP / row["kl"]
    ]
    if not rows:
        return Verdict(CANNOT, "", "no response here is longer than 20 / KL under this sampling")
    shown = ", ".join(f"{row['low_weight']:.0%} ({name_of(row)}, T = {row['T']:,})" for row in rows)
    holds = sum(row["low_weight"] > 0.5 for row in rows)
    return by_cases(
        holds, len(rows), f"Responses longer than 20 / KL, and their low weights, clamped ones included: {shown}."
    )


def dilemma(evidence: Evidence) -> Verdict | None:
    """A two-sided clip: is there a C that leaves weights free, and the ESS high?"""
    rows = [row for row in select(evidence.grid, mode="processed") if _between(row) and row["clip_ess"]]
    if not rows:
        return nothing(evidence, "no case here has a T × KL of 2 to 20")
    stuck = 0
    for row in rows:
        found = zip(*(clip_values(row, name) for name in ("at_lower", "at_upper", "ess")), strict=True)
        stuck += not any(low + high < 0.5 and size > 0.5 for low, high, size in found)
    seen = (
        "We clipped weights to [1/C, C]. A good C leaves most weights unclipped and keeps the ESS above 0.5. "
        f"In {stuck} of {len(rows)} cases of all samplings and lengths with T × KL of 2 to 20, no tested C does both."
    )
    return by_cases(stuck, len(rows), seen)


def extreme_without_garbage(evidence: Evidence) -> str:
    """How common extreme weights are among honest sequences; empty without rows."""
    rows = [row for row in at_the_end(evidence, sampling="1.0", mode="processed") if _between(row)]
    if not rows:
        return ""
    shares = [row["low_weight"] for row in rows]
    return (
        f"No recorded sequence is broken, and still {min(shares):.0%} to {max(shares):.0%} of the weights are below "
        f"1/4 where T × KL is 2 to 20 ({len(rows)} pairs)."
    )


def _geometric_rows(evidence: Evidence) -> list[Row]:
    rows = at_the_end(evidence, sampling="1.0", mode="processed")
    return sorted((row for row in rows if row["engine"] != EXACT), key=lambda row: row["geometric_mean"])


def geometric(evidence: Evidence) -> Verdict | None:
    """Geo-RS where the geometric mean ratio is as large as the document's."""
    rows = _geometric_rows(evidence)
    if not rows:
        return None
    high = [row for row in rows if row["geometric_mean"] >= RECOMMENDED_MEAN]
    seen = "We took the geometric mean ratio of each sequence, inverted if below 1."
    if not high:
        return Verdict(CANNOT, seen, f"no pair here has a mean of {RECOMMENDED_MEAN} or more")
    shown = ", ".join(
        f"mean {row['geometric_mean']:.3f}, {row['geometric_outside']:.0%} rejected ({name_of(row)})" for row in high
    )
    holds = sum(row["geometric_outside"] > 0.95 for row in high)
    seen += f" Only {len(high)} of {len(rows)} pairs have a mean of {RECOMMENDED_MEAN} or more: {shown}."
    return by_cases(holds, len(high), f"{seen} The band is 1/1.001 to 1.001.")


def geometric_tuning(evidence: Evidence) -> Verdict | None:
    """One band, and what it rejects from pair to pair."""
    rows = _geometric_rows(evidence)
    if len(rows) < 2:
        return None
    first, last = rows[0], rows[-1]
    seen = (
        f"The band of 1/1.001 to 1.001 rejects {first['geometric_outside']:.0%} where the mean ratio is "
        f"{first['geometric_mean']:.4f} ({name_of(first)}), and {last['geometric_outside']:.0%} where it is "
        f"{last['geometric_mean']:.4f} ({name_of(last)}); {len(rows)} pairs."
    )
    return said(last["geometric_outside"] - first["geometric_outside"] > 0.5, seen)
