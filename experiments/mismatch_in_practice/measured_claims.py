"""Judges that read the tables of the measured study: fixed rollouts of real engines.

A *pair* is an engine, a sampling, a staleness and a kind of log-probs; a *case* is a pair at one length.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping

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
    said,
)
from measured_rows import (
    CLAMP,
    CUT,
    Row,
    Rows,
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

BRIEF = {"1.0": "temperature 1.0", "0.4": "temperature 0.4", CUT: "cut sampling"}
EXACT = "float32"
NEAR_ZERO_AND_ONE = 0.9
"""A difference of probabilities that only ≈ 1 against ≈ 0 can have."""

ROUNDING = 1e-7
"""A k3 that the rounding of float32 may have, nats per token."""

RECOMMENDED_MEAN = 1.01
"""From here on the document saw every sample rejected."""

DECISIVE = 0.4
"""The largest error of a fitted ratio that can tell 0 from 1."""

FAR = 5 * CLAMP
"""Where T × KL is far above the clamp."""

RANGE = (2.0, CLAMP)
"""T × KL, nats: weights differ by a lot, and the clamp is not reached."""


def same_weights(rows: Rows) -> list[Row]:
    """Rows of engines that compute from the trainer's own weights: neither stale nor rounded."""
    return [row for row in rows if row["updates"] == 0 and "bits" not in row["engine"]]


def at_the_end(evidence: Evidence, **wanted: object) -> list[Row]:
    """The longest responses."""
    return select(evidence.grid, T=longest_of(evidence.grid), **wanted)


def _nothing(evidence: Evidence, why: str) -> Verdict | None:
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
    return said(any(row["largest_probability_gap"] > NEAR_ZERO_AND_ONE for row in equal), seen)


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
    """At temperature 1 without a cut, raw and processed log-probs are the same."""
    rows = same_weights(at_the_end(evidence, sampling="1.0", mode="raw"))
    pairs = [(row, *_twin(evidence, row, mode="processed")) for row in rows]
    same = [abs(pair[0]["kl"] - pair[1]["kl"]) < 1e-6 for pair in pairs if len(pair) == 2]
    if not same:
        return None
    seen = (
        f"Raw and processed log-probs agree in {sum(same)} of {len(same)} engines with equal weights. What is left is "
        "the mismatch of the engines themselves."
    )
    return by_cases(sum(same), len(same), seen)


def _twin(evidence: Evidence, row: Row, **changed: object) -> list[Row]:
    wanted = {name: row[name] for name in ("engine", "sampling", "updates", "mode", "T")} | changed
    return select(evidence.grid, **wanted)


def raw_hides(evidence: Evidence) -> Verdict | None:
    """Temperature 0.4, raw against processed."""
    rows = same_weights(at_the_end(evidence, sampling="0.4", mode="raw"))
    pairs = [(row, twin) for row in rows for twin in _twin(evidence, row, mode="processed")]
    shown = next((pair for pair in pairs if pair[0]["engine"] == "bf16"), None)
    if shown is None:
        return None
    raw, good = shown
    seen = f"Temperature 0.4, bf16. With raw log-probs the mean of −log ρ is {_kl(raw)}"
    if direction(raw["kl"], raw["kl_error"]) < 0:
        seen += "; a KL cannot be negative, so what frameworks report as KL is not a KL here"
    seen += f". With processed log-probs it is {_kl(good)}. The k3 falls from {raw['k3']:.2g} to {good['k3']:.2g}."
    holds = [direction(raw["kl"], raw["kl_error"]) != 0 and good["k3"] < 0.1 * raw["k3"] for raw, good in pairs]
    return by_cases(sum(holds), len(holds), f"{seen} It falls below a tenth in {sum(holds)} of {len(holds)} engines.")


def _kl(row: Row) -> str:
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
        f"Cut sampling, bf16: the mean of −log ρ is {_kl(raw)} raw, {_kl(cut)} processed and "
        f"{_kl(replayed)} replayed. Only the step from processed to replayed isolates the cut: the raw number also "
        "contains temperature 0.7."
    )
    signs = (direction(-raw["kl"], raw["kl_error"]), _beyond(cut, replayed))
    return by_direction(min(signs), seen)


def _beyond(row: Row, other: Row) -> int:
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
    pairs = [(row, twin) for row in rows for twin in _twin(evidence, row, mode="processed")]
    if not pairs:
        return None
    gone = [abs(row["kl"]) < 0.1 * twin["kl"] for row, twin in pairs]
    row, twin = pairs[0]
    seen = (
        f"If the trainer reuses the sampler's mask, the mean of −log ρ goes from {_kl(twin)} to {_kl(row)}, and the "
        f"mean token weight from {twin['token_mean_weight']:.3f} to {row['token_mean_weight']:.4f} ({row['engine']})."
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
    pairs = [(row, twin) for row in rows for twin in _twin(evidence, row, sampling="0.4")]
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

    # Both softmaxes are computed in float64 here, so the document's example of tail noise cannot occur.
    return verdict._replace(why="where logits differ; an engine whose tail underflows was not run above temperature 1")


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
    """Temperature 0.4 in float32, which is how a cell with new weights would sample."""
    rows = [at_the_end(evidence, engine=EXACT, sampling=name, mode="processed", updates=0) for name in ("1.0", "0.4")]
    if not all(rows):
        return None
    one, cold = (row["k3"] for (row,) in rows)
    seen = f"The k3 of an engine in float32 is {one:.1g} nats per token at temperature 1.0, and {cold:.1g} at 0.4."
    why = "new weights in float32 have no mismatch at either temperature that a correction could act on"
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
        return _nothing(evidence, "no pair here has a T_max within its lengths")
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
    rows = [row for row in select(evidence.grid, mode="processed") if 0.001 <= row["kl"] <= 0.005]
    if not rows:
        return _nothing(evidence, "no case here has a KL of 0.001 to 0.005")
    worst = max(rows, key=clamped)
    safe = sum(clamped(row) < 0.1 for row in rows)
    seen = (
        f"Of {len(rows)} cases with a KL of 0.001 to 0.005 and up to {longest_of(rows):,} tokens, {safe} have less "
        f"than 10 % of the weights at the clamp; the worst has {clamped(worst):.0%}."
    )
    return by_cases(safe, len(rows), seen)


def before_clamp(evidence: Evidence) -> Verdict | None:
    """ESS below T × KL = 20, where few weights are clamped."""
    rows = [row for row in select(evidence.grid, mode="processed") if _between(row) and clamped(row) < 0.1]
    if not rows:
        return _nothing(evidence, "no case here has a T × KL of 2 to 20 with few clamped weights")
    lost = sum(row["ess"] < 0.5 for row in rows)
    seen = f"{lost} of {len(rows)} cases with T × KL of 2 to 20, and under 10 % at the clamp, have an ESS below 0.5."
    return said(lost >= 0.1 * len(rows), seen)


def _between(row: Row) -> bool:
    return RANGE[0] <= distance(row) < RANGE[1]


def log_normal(evidence: Evidence) -> Verdict | None:
    """The ESS beside that of log-normal weights with the same T × KL, exp(−2 T × KL)."""
    rows = [row for row in select(evidence.grid, mode="processed") if 0.5 <= distance(row) < RANGE[1]]
    if not rows:
        return _nothing(evidence, "no case here has a T × KL of 0.5 to 20")
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
    return Verdict(CANNOT, seen, f"{streams} sequences do not hold the rare ones that make χ²_seq large")


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
        return _nothing(evidence, "no case here has a T × KL of 2 to 20")
    shown = ", ".join(f"{row['ess']:.2f} ({name_of(row)})" for row in rows)
    seen = f"Where T × KL is 2 to 20 it is {shown}."
    return by_cases(sum(row["ess"] < 0.5 for row in rows), len(rows), seen)


def low_weights(evidence: Evidence) -> Verdict | None:
    """The share of low weights, at temperature 1."""
    rows = [row for row in at_the_end(evidence, sampling="1.0", mode="processed") if _between(row)]
    if not rows:
        return _nothing(evidence, "no case here has a T × KL of 2 to 20")
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
        return _nothing(evidence, "no pair here has a T × KL above 2")
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
    pairs = [(row, cold) for row in rows for cold in _twin(evidence, row, sampling="0.4")]
    if not pairs:
        return _nothing(evidence, "no case here has a T × KL above 0.1")
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
        f"bf16, processed: the mean of −log ρ is {_kl(cut[0])} with the cut and {_kl(plain[0])} at temperature 1.0. "
        f"The k3 is {cut[0]['k3'] / plain[0]['k3']:.0f} times as large."
    )
    if cut[0]["kl"] > 0:
        seen += f" 20 / KL is {CLAMP / cut[0]['kl']:,.0f} tokens with the cut."
    return by_direction(_beyond(cut[0], plain[0]), seen)


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
    rows = [row for row in select(evidence.grid, mode="processed", T=512) if _between(row) and row["clip_ess"]]
    if not rows:
        return _nothing(evidence, "no case here has a T × KL of 2 to 20 at T = 512")
    stuck = 0
    for row in rows:
        found = zip(*(clip_values(row, name) for name in ("at_lower", "at_upper", "ess")), strict=True)
        stuck += not any(low + high < 0.5 and size > 0.5 for low, high, size in found)
    seen = (
        "We clipped weights to [1/C, C]. A good C leaves most weights unclipped and keeps the ESS above 0.5. "
        f"In {stuck} of {len(rows)} cases of all samplings with T × KL of 2 to 20 and T = 512, no tested C does both."
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
