"""Judges of sections 1 and 2 that read the tables of the measured study: fixed rollouts of real engines.

A *pair* is an engine, a sampling, a staleness and a kind of log-probs; a *case* is a pair at one length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from claims_verdicts import (
    CANNOT,
    FAILS,
    NOT_SEEN,
    PARTLY,
    REPEATS,
    Evidence,
    Verdict,
    by_cases,
    by_direction,
    direction,
    said,
)
from measured_rows import (
    CUT,
    Row,
    Rows,
    longest_of,
    name_of,
    select,
)

BRIEF = {"1.0": "temperature 1.0", "0.4": "temperature 0.4", CUT: "cut sampling"}
EXACT = "float32"
NEAR_ZERO_AND_ONE = 0.9
"""A difference of probabilities that only ≈ 1 against ≈ 0 can have."""

ROUNDING = 1e-7
"""A k3 that the rounding of float32 may have, nats per token."""


def same_weights(rows: Rows) -> list[Row]:
    """Rows of engines that compute from the trainer's own weights: neither stale nor rounded."""
    return [row for row in rows if row["updates"] == 0 and "bits" not in row["engine"]]


def at_the_end(evidence: Evidence, **wanted: object) -> list[Row]:
    """The longest responses."""
    return select(evidence.grid, T=longest_of(evidence.grid), **wanted)


def nothing(evidence: Evidence, why: str) -> Verdict | None:
    """No row is in the range of a claim; None if nothing was measured at all."""
    return Verdict(CANNOT, "", why) if evidence.grid else None


def backends_differ(evidence: Evidence) -> Verdict | None:
    """Two programs of one precision, and several precisions, all with the same weights."""
    rows = {row["engine"]: row for row in same_weights(at_the_end(evidence, sampling="1.0", mode="processed"))}
    exact, others = rows.pop(EXACT, None), rows
    if exact is None or not others:
        return None
    shown = ", ".join(f"{row['k3']:.2g} ({name})" for name, row in others.items())
    seen = (
        f"The trainer computes in float32. The k3 of another program in float32 is {exact['k3']:.1g} nats per token, "
        f"which is rounding; that of lower precisions and other engines is {shown}."
    )
    differ = [name for name, row in others.items() if row["k3"] > ROUNDING]
    if exact["k3"] > ROUNDING:
        return by_cases(len(differ) + 1, len(others) + 1, seen)
    if not differ:
        return Verdict(FAILS, seen)
    return Verdict(PARTLY, seen, f"{' and '.join(differ)} differ; two programs in float32 do not")


def contradictory(evidence: Evidence) -> Verdict | None:
    """The largest difference of a sampled token's probability."""
    rows = [row for row in at_the_end(evidence, sampling="1.0", mode="processed", updates=0) if row["engine"] != EXACT]
    equal = same_weights(rows)
    if not equal:
        return None
    rounded = [row for row in rows if row not in equal]
    tokens = max(row["T"] * row["windows"] for row in equal)
    seen = f"With equal weights the largest difference of a probability over {tokens:,} tokens is {_gaps(equal)}."
    if rounded:
        seen += f" Rounded weights are other weights; they come to {_gaps(rounded)}."
    if any(row["largest_probability_gap"] > NEAR_ZERO_AND_ONE for row in equal):
        return Verdict(REPEATS, seen)
    return Verdict(NOT_SEEN, seen, f"a rare token may be missing among {tokens:,}")


def _gaps(rows: Rows) -> str:
    return ", ".join(f"{row['largest_probability_gap']:.2f} ({row['engine']})" for row in rows)


def precision_helps(evidence: Evidence) -> Verdict | None:
    """k3 by precision; the two named fixes were not run."""
    rows = at_the_end(evidence, sampling="1.0", mode="processed", updates=0)
    k3 = {row["engine"]: row["k3"] for row in sorted(rows, key=lambda row: row["k3"])}
    if EXACT not in k3 or "bf16" not in k3:
        return None
    seen = f"k3 in nats per token, by precision: {', '.join(f'{value:.2g} ({name})' for name, value in k3.items())}."
    if k3[EXACT] < 0.1 * k3["bf16"]:
        return Verdict(PARTLY, seen, "higher precision helps; FP16 and a head in FP32 themselves were not run")
    return Verdict(FAILS, seen)


def default_has_none(evidence: Evidence) -> Verdict | None:
    """At temperature 1 without a cut, raw and processed log-probs are one function: only rounding is left."""
    rows = same_weights(at_the_end(evidence, sampling="1.0", mode="raw"))
    exact = next((row for row in rows if row["engine"] == EXACT), None)
    if exact is None:
        return None
    seen = (
        "Raw and processed log-probs are the same function of the logits there. The k3 of another program in float32 "
        f"with equal weights is {exact['k3']:.1g} nats per token."
    )
    return said(exact["k3"] <= ROUNDING, seen)


def same_case(evidence: Evidence, row: Row, **changed: object) -> list[Row]:
    """The same case with some columns changed: no row, or one."""
    wanted = {name: row[name] for name in ("engine", "sampling", "updates", "mode", "T")} | changed
    return select(evidence.grid, **wanted)


def raw_hides(evidence: Evidence) -> Verdict | None:
    """Temperature 0.4, raw against processed."""
    rows = same_weights(at_the_end(evidence, sampling="0.4", mode="raw"))
    pairs = [(row, twin) for row in rows for twin in same_case(evidence, row, mode="processed")]
    shown = next((pair for pair in pairs if pair[0]["engine"] == "bf16"), None)
    if shown is None:
        return None
    raw, good = shown
    seen = f"Temperature 0.4, bf16. With raw log-probs the mean of −log ρ is {kl_text(raw)}"
    if direction(raw["kl"], raw["kl_error"]) < 0:
        seen += "; a KL cannot be negative, so what frameworks report as KL is not a KL here"
    seen += f". With processed log-probs it is {kl_text(good)}. The k3 falls from {raw['k3']:.2g} to {good['k3']:.2g}."
    holds = [direction(raw["kl"], raw["kl_error"]) != 0 and good["k3"] < 0.1 * raw["k3"] for raw, good in pairs]
    return by_cases(sum(holds), len(holds), f"{seen} It falls below a tenth in {sum(holds)} of {len(holds)} engines.")


def kl_text(row: Row) -> str:
    """The mean of −log ρ and its error."""
    return f"{row['kl']:+.2g} ± {row['kl_error']:.1g}"


def cut_is_a_mismatch(evidence: Evidence) -> Verdict | None:
    """Top-p and top-k, with raw and with processed log-probs."""
    found = {}
    for mode in ("raw", "processed", "replayed"):
        rows = at_the_end(evidence, engine="bf16", updates=0, sampling=CUT, mode=mode)
        if not rows:
            return None
        found[mode] = rows[0]
    raw, cut, replayed = found.values()
    seen = (
        f"Cut sampling, bf16: the mean of −log ρ is {kl_text(raw)} raw, {kl_text(cut)} processed and "
        f"{kl_text(replayed)} replayed. Only the step from processed to replayed isolates the cut: the raw number also "
        "contains temperature 0.7."
    )
    signs = (direction(-raw["kl"], raw["kl_error"]), beyond(cut, replayed))
    return by_direction(min(signs), seen)


def beyond(row: Row, other: Row) -> int:
    """The direction of the difference between two means of −log ρ."""
    return direction(row["kl"] - other["kl"], math.hypot(row["kl_error"], other["kl_error"]))


def recomputed_mask(evidence: Evidence) -> Verdict | None:
    """Tokens that the trainer's own cut would leave out."""
    rows = same_weights(at_the_end(evidence, sampling=CUT, mode="replayed"))
    if not rows:
        return None
    row = max(rows, key=lambda row: row["outside"])
    share = 1 - (1 - row["outside"]) ** row["T"]
    seen = (
        f"If the trainer recomputes top-p and top-k, {row['outside']:.3%} of the sampled tokens get probability 0 "
        f"({row['engine']}). If they were spread evenly, {share:.0%} of the responses of {row['T']:,} tokens would "
        "have one."
    )
    return said(row["outside"] > 0, seen)


def replay_shares_support(evidence: Evidence) -> Verdict | None:
    """Replayed kept sets."""
    rows = same_weights(at_the_end(evidence, sampling=CUT, mode="replayed"))
    pairs = [(row, twin) for row in rows for twin in same_case(evidence, row, mode="processed")]
    if not pairs:
        return None
    gone = [abs(row["kl"]) < 0.1 * twin["kl"] for row, twin in pairs]
    row, twin = pairs[0]
    seen = (
        f"If the trainer reuses the sampler's mask, the mean of −log ρ goes from {kl_text(twin)} to {kl_text(row)}, "
        f"and the mean token weight from {twin['token_mean_weight']:.3f} to {row['token_mean_weight']:.4f} "
        f"({row['engine']})."
    )
    return by_cases(sum(gone), len(gone), seen)


def default_is_smallest(evidence: Evidence) -> Verdict | None:
    """Temperature 1.0, no cut and processed log-probs against every other way to sample."""
    base = {row["engine"]: row for row in same_weights(at_the_end(evidence, sampling="1.0", mode="processed"))}
    others = [
        row
        for row in same_weights(at_the_end(evidence, sampling=("0.4", CUT), mode=("raw", "processed")))
        if row["engine"] in base
    ]
    if not others:
        return None
    signs = [
        direction(
            abs(row["kl"]) - abs(base[row["engine"]]["kl"]),
            math.hypot(row["kl_error"], base[row["engine"]]["kl_error"]),
        )
        for row in others
    ]
    larger, smaller = signs.count(1), signs.count(-1)
    near = [
        f"{row['engine']}, {BRIEF[row['sampling']]}, {row['mode']}"
        for row, s in zip(others, signs, strict=True)
        if not s
    ]
    seen = (
        f"We compared it with temperature 0.4 and with cut sampling, raw and processed, in engines with equal weights. "
        f"|mean −log ρ| is larger there in {larger} of {len(others)} cases, and smaller in {smaller}."
    )
    if near:
        seen += f" No difference of two standard errors: {'; '.join(near)}."
    verdict = by_cases(larger, len(others), seen)
    return verdict._replace(why=f"larger elsewhere in {larger} of {len(others)} cases") if verdict.why else verdict


def _knobs(evidence: Evidence) -> dict[str, dict[float, Row]]:
    found: dict[str, dict[float, Row]] = {}
    for row in evidence.temperature:
        found.setdefault(row["knob"], {})[row["temperature"]] = row
    return found if found and all({0.4, 1.0, 1.5, 2.0, 10.0} <= set(rows) for rows in found.values()) else {}


def _change(row: Row, base: Row, column: str) -> int:
    """The direction of a change; a part has the relative error of the whole KL."""
    errors = [entry[column] * entry["kl_error"] / entry["kl"] for entry in (row, base)]
    return direction(row[column] - base[column], math.hypot(*errors))


def _ratios(knobs: Mapping[str, Mapping[float, Row]], temperature: float, column: str) -> str:
    ratios = [f"{rows[temperature][column] / rows[1.0][column]:.2g} ({knob})" for knob, rows in knobs.items()]
    return ", ".join(ratios)


def vanishes(evidence: Evidence) -> Verdict | None:
    """The KL at temperature 10."""
    knobs = _knobs(evidence)
    if not knobs:
        return None
    shares = [rows[10.0]["kl"] / rows[1.0]["kl"] for rows in knobs.values()]
    seen = f"At temperature 10 the KL is {min(shares):.1%} to {max(shares):.1%} of that at 1 ({'; '.join(knobs)})."
    return said(max(shares) < 0.1, seen)


def sharpening(evidence: Evidence) -> Verdict | None:
    """The head's part of the KL at temperature 0.4."""
    knobs = _knobs(evidence)
    if not knobs:
        return None
    seen = (
        f"In the same contexts, the KL of the head at temperature 0.4, divided by that at 1.0, is "
        f"{_ratios(knobs, 0.4, 'kl_head')}. 1/τ is 2.5."
    )
    signs = [_change(rows[0.4], rows[1.0], "kl_head") for rows in knobs.values()]
    factors = [rows[0.4]["kl_head"] / rows[1.0]["kl_head"] for rows in knobs.values()]
    if min(signs) > 0 and not all(1.25 < factor < 5 for factor in factors):
        return Verdict(PARTLY, seen, "the head's KL grows, and not by about 1/τ")
    return by_direction(min(signs), seen)


def top_token(evidence: Evidence) -> Verdict | None:
    """The largest difference of a probability at 0.4 and at 1.0."""
    rows = [row for row in at_the_end(evidence, sampling="1.0", mode="processed") if row["engine"] != EXACT]
    pairs = [(row, twin) for row in rows for twin in same_case(evidence, row, sampling="0.4")]
    if not pairs:
        return None
    grows = sum(cold["largest_probability_gap"] > warm["largest_probability_gap"] for warm, cold in pairs)
    far = [name_of(cold) for _, cold in pairs if cold["largest_probability_gap"] > NEAR_ZERO_AND_ONE]
    seen = (
        f"The largest difference of a sampled token's probability is larger at temperature 0.4 than at 1.0 in {grows} "
        f"of {len(pairs)} pairs. It is above {NEAR_ZERO_AND_ONE} at 0.4 for: {'; '.join(far) or 'none'}."
    )
    if evidence.temperature:
        shares = {row["knob"]: row["other_top"] for row in evidence.temperature}
        shown = ", ".join(f"{share:.1%} ({knob})" for knob, share in shares.items())
        seen += f" The top token differs in {shown} of the contexts."
    if not far and grows > len(pairs) / 2:
        return Verdict(PARTLY, seen, "the largest differences grow; ≈ 1 against ≈ 0 did not occur")
    return by_cases(grows, len(pairs), seen)


def dampening(evidence: Evidence) -> Verdict | None:
    """The head's part of the KL above temperature 1."""
    knobs = _knobs(evidence)
    if not knobs:
        return None
    seen = f"The KL of the head at temperature 2, divided by that at 1.0, is {_ratios(knobs, 2.0, 'kl_head')}."
    return by_direction(-max(_change(rows[2.0], rows[1.0], "kl_head") for rows in knobs.values()), seen)


def tail_grows(evidence: Evidence) -> Verdict | None:
    """The tail's part of the KL above temperature 1: its share, and its amount."""
    knobs = _knobs(evidence)
    if not knobs:
        return None
    shares = {t: [rows[t]["kl_tail"] / rows[t]["kl"] for rows in knobs.values()] for t in (1.0, 1.5, 10.0)}
    shown = ", ".join(f"{min(found):.0%} to {max(found):.0%} at {t:g}" for t, found in shares.items())
    seen = (
        f"The tail's share of the KL is {shown}. Its KL, divided by that at 1.0, is {_ratios(knobs, 1.5, 'kl_tail')} "
        f"at temperature 1.5; {_ratios(knobs, 2.0, 'kl_tail')} at 2; {_ratios(knobs, 10.0, 'kl_tail')} at 10."
    )
    share_grows = all(low < high for low, high in zip(shares[1.0], shares[1.5], strict=True))
    amounts = [_change(rows[1.5], rows[1.0], "kl_tail") for rows in knobs.values()]
    if share_grows and min(amounts) <= 0:
        return Verdict(PARTLY, seen, "the tail's share grows; its amount at 1.5 does not grow by two standard errors")
    return said(share_grows, seen)


def very_hot(evidence: Evidence) -> Verdict | None:
    """The whole KL far above temperature 1."""
    knobs = _knobs(evidence)
    if not knobs:
        return None
    seen = (
        f"The KL, divided by that at temperature 1.0, is {_ratios(knobs, 2.0, 'kl')} at 2, and "
        f"{_ratios(knobs, 10.0, 'kl')} at 10. The χ² was not measured above temperature 1."
    )
    verdict = by_direction(min(_change(rows[t], rows[1.0], "kl") for rows in knobs.values() for t in (2.0, 10.0)), seen)
    if verdict.word != FAILS:
        return verdict
    return Verdict(CANNOT, seen, "both softmaxes are computed in float64 here, which leaves no noise in the tail")


def any_temperature(evidence: Evidence) -> Verdict | None:
    """The KL on both sides of temperature 1."""
    knobs = _knobs(evidence)
    if not knobs:
        return None
    colder = min(_change(rows[0.4], rows[1.0], "kl") for rows in knobs.values())
    warmer = min(_change(rows[2.0], rows[1.0], "kl") for rows in knobs.values())
    colder_ratios, warmer_ratios = (_ratios(knobs, temperature, "kl") for temperature in (0.4, 2.0))
    seen = f"In the same contexts, the KL divided by that at 1.0 is {colder_ratios} at 0.4, and {warmer_ratios} at 2."
    if colder > 0 > warmer:
        return Verdict(PARTLY, seen, "below 1 the KL grows; above 1 it falls, so 1.0 is no minimum")
    return by_direction(min(colder, warmer), seen)
