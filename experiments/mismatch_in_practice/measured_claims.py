"""The claims of the document that fixed rollouts, the laboratory or arithmetic can judge, and their judges."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from measured_rows import (
    CUT,
    Row,
    Rows,
    clamped,
    distance,
    growth_fit,
    half_clamped,
    longest_of,
    name_of,
    pairs_of,
    select,
)

REPEATS, FAILS, PARTLY = "repeats", "does not repeat", "repeats in part"
LABORATORY = "[the laboratory](../../docs/laboratory.md#the-published-orders)"
Verdict = tuple[str, str]
Judge = Callable[[Rows, Rows], Verdict | None]


class Claim(NamedTuple):
    """What the document says, where, how the rows judge it (None while they are missing), and what judges it."""

    section: str
    text: str
    judge: Judge
    source: str = "measured"


def _one(grid: Rows, *, longest: bool = True, **wanted: Any) -> Row | None:  # noqa: ANN401
    rows = sorted(select(grid, **({"engine": "bf16", "updates": 0} | wanted)), key=lambda row: row["T"])
    return rows[-1 if longest else 0] if rows else None


def _fixed(verdict: str, seen: str) -> Judge:
    return lambda grid, temperature: (verdict, seen)


def _not_here(because: str) -> Judge:
    return _fixed("cannot be tested here", f"because {because}")


def _said(truth: bool, seen: str) -> Verdict:
    return (REPEATS if truth else FAILS), seen


def _same_weights_differ(grid: Rows, temperature: Rows) -> Verdict | None:
    exact, bf16 = _one(grid, engine="float32", sampling="1.0"), _one(grid, sampling="1.0")
    if exact is None or bf16 is None:
        return None
    gap = bf16["largest_probability_gap"]
    seen = f"bfloat16 differs by k3 = {bf16['k3']:.2g} nats per token, two float32 programs by {exact['k3']:.1g}"
    return _said(bf16["k3"] > 100 * exact["k3"], f"{seen}; the largest difference of a probability is {gap:.2f}")


def _contradictory(grid: Rows, temperature: Rows) -> Verdict | None:
    rows = [row for row in select(grid, sampling="1.0", updates=0, mode="processed") if row["engine"] != "float32"]
    if not rows:
        return None
    gaps = {row["engine"]: row["largest_probability_gap"] for row in rows}
    text = ", ".join(f"{name}: {gap:.2f}" for name, gap in gaps.items())
    far = [name for name, gap in gaps.items() if gap > 0.9]
    if not far:
        return FAILS, f"largest difference of a probability: {text}"
    return (REPEATS if "bf16" in far else PARTLY), f"largest difference of a probability: {text}"


def _raw_hides(grid: Rows, temperature: Rows) -> Verdict | None:
    raw, good = (_one(grid, sampling="0.4", mode=mode) for mode in ("raw", "processed"))
    if raw is None or good is None:
        return None
    seen = f"at temperature 0.4 k3 is {raw['k3']:.2g} with raw and {good['k3']:.2g} with processed log-probs"
    return _said(raw["k3"] > 10 * good["k3"], f"{seen}; the mean of −log ρ is {raw['kl']:+.3f}, so it is no KL")


def _cut_mismatch(grid: Rows, temperature: Rows) -> Verdict | None:
    raw, cut = (_one(grid, sampling=CUT, mode=mode) for mode in ("raw", "processed"))
    plain = _one(grid, sampling="1.0", mode="processed")
    if raw is None or cut is None or plain is None:
        return None
    seen = (
        f"the mean of −log ρ is {raw['kl']:+.3f} raw, {cut['kl']:+.3f} processed, {plain['kl']:+.4f} at temperature 1"
    )
    return _said(min(abs(raw["kl"]), cut["kl"]) > 10 * abs(plain["kl"]), seen)


def _recomputed_mask(grid: Rows, temperature: Rows) -> Verdict | None:
    row = _one(grid, sampling=CUT, mode="replayed")
    if row is None:
        return None
    stream = 1 - (1 - row["outside"]) ** row["T"]
    seen = f"{row['outside']:.3%} of the sampled tokens are outside the trainer's own set, so "
    return _said(row["outside"] > 0, seen + f"{stream:.0%} of responses of {row['T']:,} tokens have one")


def _replay(grid: Rows, temperature: Rows) -> Verdict | None:
    replayed, cut = (_one(grid, sampling=CUT, mode=mode) for mode in ("replayed", "processed"))
    if replayed is None or cut is None:
        return None
    seen = (
        f"mean −log ρ falls from {cut['kl']:.4f} to {replayed['kl']:+.5f}; ESS of Token-TIS {replayed['token_ess']:.3f}"
    )
    return _said(abs(replayed["kl"]) < 0.1 * cut["kl"], seen)


def _at(temperature: Rows, knob: str, value: float) -> Row | None:
    rows = select(temperature, knob=knob, temperature=value)
    return rows[0] if rows else None


def _vanishes(grid: Rows, temperature: Rows) -> Verdict | None:
    knobs = dict.fromkeys(row["knob"] for row in temperature)
    shares = {}
    for knob in knobs:
        one, ten = _at(temperature, knob, 1.0), _at(temperature, knob, 10.0)
        if one is None or ten is None:
            return None
        shares[knob] = ten["kl"] / one["kl"]
    if not shares:
        return None
    text = ", ".join(f"{knob}: {share:.1%}" for knob, share in shares.items())
    return _said(max(shares.values()) < 0.1, f"KL at temperature 10, as a share of that at 1: {text}")


def _sharpening(grid: Rows, temperature: Rows) -> Verdict | None:
    shares = {}
    for knob in dict.fromkeys(row["knob"] for row in temperature):
        one, cold = _at(temperature, knob, 1.0), _at(temperature, knob, 0.4)
        if one is None or cold is None:
            return None
        shares[knob] = (cold["kl_head"] / one["kl_head"], cold["kl_head"] / cold["kl"])
    if not shares:
        return None
    text = ", ".join(f"{knob}: × {factor:.1f} ({share:.0%} of the KL)" for knob, (factor, share) in shares.items())
    return _said(all(factor > 1.2 for factor, _ in shares.values()), f"KL of the head at 0.4 against 1.0: {text}")


def _flattening(grid: Rows, temperature: Rows) -> Verdict | None:
    found = {}
    for knob in dict.fromkeys(row["knob"] for row in temperature):
        one, warm = _at(temperature, knob, 1.0), _at(temperature, knob, 1.5)
        if one is None or warm is None:
            return None
        found[knob] = (warm["kl"] / one["kl"], warm["kl_tail"] / one["kl_tail"])
    if not found:
        return None
    text = ", ".join(f"{knob}: KL × {whole:.2f}, tail × {tail:.2f}" for knob, (whole, tail) in found.items())
    seen = f"at temperature 1.5 against 1.0: {text}. The tail grows, the KL as a whole falls"
    if all(whole > 1 for whole, _ in found.values()):
        return REPEATS, f"at temperature 1.5 against 1.0: {text}"
    return (PARTLY if all(tail > 1 for _, tail in found.values()) else FAILS), seen


def _any_temperature(grid: Rows, temperature: Rows) -> Verdict | None:
    one, cold = (_one(grid, sampling=sampling, mode="processed") for sampling in ("1.0", "0.4"))
    warm = _at(temperature, "bf16", 2.0)
    base = _at(temperature, "bf16", 1.0)
    if one is None or cold is None or warm is None or base is None:
        return None
    seen = (
        f"k3 {cold['k3']:.2g} at 0.4 against {one['k3']:.2g} at 1.0, each on its own samples; the KL at 2.0 is "
        f"{warm['kl'] / base['kl']:.2f} of that at 1.0"
    )
    colder, warmer = cold["k3"] > one["k3"], warm["kl"] > base["kl"]
    if colder and warmer:
        return REPEATS, seen
    return (PARTLY if colder or warmer else FAILS), seen


def _exponent(grid: Rows, temperature: Rows) -> Verdict | None:
    ratios = []
    for engine in ("bf16", "int8", "int8, 5 bits"):
        rows = sorted(select(grid, engine=engine, sampling="1.0", updates=0, mode="processed"), key=lambda r: r["T"])
        fit = growth_fit(rows) if rows else None
        if fit is not None:
            slope, error, expected, first, last = fit
            ratios.append((engine, slope / expected, error / expected, first, last))
    if not ratios:
        return None
    text = "; ".join(
        f"{name}, T = {first} … {last}: {ratio:.2f} ± {error:.2f}" for name, ratio, error, first, last in ratios
    )
    within = [abs(ratio - 1) <= max(2 * error, 0.2) for _, ratio, error, *_ in ratios]
    verdict = REPEATS if all(within) else (PARTLY if any(within) else FAILS)
    return verdict, f"fitted slope of log(1 + χ²_seq), divided by log(1 + χ̄²): {text}"


def _high_variance(grid: Rows, temperature: Rows) -> Verdict | None:
    rows = [row for row in select(grid, sampling="1.0", mode="processed") if row["T"] == longest_of(grid)]
    if not rows:
        return None
    largest = max(rows, key=lambda row: row["chi2_seq"])
    everything = max((row for row in select(grid, sampling="1.0", mode="processed")), key=lambda row: row["chi2_seq"])
    seen = (
        f"largest χ²_seq of a sample: {everything['chi2_seq']:.3g} ({name_of(everything)}, T = {everything['T']:,}); "
        f"at T = {largest['T']:,}: {largest['chi2_seq']:.3g}. {rows[0]['windows']} sequences do not hold the rare ones "
        "that would make it larger"
    )
    return _said(everything["chi2_seq"] > 1e3, seen)


def _few_carry(grid: Rows, temperature: Rows) -> Verdict | None:
    rows = [row for row in select(grid, sampling="1.0", mode="processed", T=longest_of(grid)) if 2 < distance(row) < 20]
    if not rows:
        return None
    text = "; ".join(f"{name_of(row)}: {row['ess']:.2f}, {row['low_weight']:.0%}" for row in rows)
    holds = sum(row["ess"] < 0.5 and row["low_weight"] > 0.5 for row in rows)
    seen = f"ESS and low weights where T × KL is 2 to 20 (document: 0.3 to 0.4, 80 to 90 %): {text}"
    return _share(holds, len(rows)), seen


def _token_ess(grid: Rows, temperature: Rows) -> Verdict | None:
    rows = [row for row in select(grid, sampling="1.0", mode="processed", T=longest_of(grid)) if distance(row) < 20]
    if not rows:
        return None
    least = min(rows, key=lambda row: row["token_ess"])
    return _said(
        least["token_ess"] >= 0.9, f"the least where T × KL < 20 is {least['token_ess']:.3f} ({name_of(least)})"
    )


def _before_clamp(grid: Rows, temperature: Rows) -> Verdict | None:
    rows = [row for row in select(grid, mode="processed") if 2 < distance(row) < 10 and clamped(row) < 0.1]
    if not rows:
        return None
    lost = sum(row["ess"] < 0.5 for row in rows)
    seen = f"{lost} of {len(rows)} cases with T × KL of 2 to 10 have an ESS below 0.5 (under 10 % at the clamp)"
    return _share(lost, len(rows)), seen


def _share(holds: int, cases: int) -> str:
    """A claim about many cases: all but a tenth of them, more than a half, or fewer."""
    if holds >= 0.9 * cases:
        return REPEATS
    return PARTLY if holds > cases / 2 else FAILS


def _safe_below(grid: Rows, temperature: Rows) -> Verdict | None:
    rows = [row for row in select(grid, mode="processed") if 0 < row["t_times_kl"] < 10]
    if not rows:
        return None
    worst = max(row["saturated_low"] for row in rows)
    return _said(
        worst < 0.2, f"at T × KL below 10 at most {worst:.0%} of the weights are at the clamp ({len(rows)} cases)"
    )


def _clamp_rule(grid: Rows, temperature: Rows) -> Verdict | None:
    ratios = []
    for pair in pairs_of(select(grid, mode="processed")):
        half, kl = half_clamped(pair), pair[-1]["kl"]
        if half is not None and kl > 0 and 20 / kl >= pair[0]["T"]:
            ratios.append(half * kl / 20)
    if not ratios:
        return None
    seen = (
        f"half of the weights are clamped at {min(ratios):.2f} to {max(ratios):.2f} times 20 / KL "
        f"({len(ratios)} pairs): some streams carry most of the KL, so the typical weight is larger than exp(−T × KL)"
    )
    near = 0.5 <= sorted(ratios)[len(ratios) // 2] <= 2
    return (REPEATS if near else PARTLY), seen


def _monotone(grid: Rows, temperature: Rows) -> Verdict | None:
    pairs = [
        pair for pair in pairs_of(select(grid, mode="processed", sampling=("1.0", "0.4"))) if distance(pair[-1]) > 2
    ]
    if not pairs:
        return None
    rising = [
        pair
        for pair in pairs
        if all(b["low_weight"] >= a["low_weight"] - 2 * b["low_weight_error"] for a, b in itertools.pairwise(pair))
    ]
    ends = [pair[-1]["low_weight"] for pair in pairs]
    seen = f"it rises in {len(rising)} of {len(pairs)} pairs with T × KL > 2, to {min(ends):.0%} … {max(ends):.0%}"
    return _said(len(rising) >= 0.8 * len(pairs), seen)


def _colder_is_lower(grid: Rows, temperature: Rows) -> Verdict | None:
    more = less = 0
    for row in select(grid, sampling="1.0", mode="processed"):
        wanted = {name: row[name] for name in ("engine", "updates", "T", "mode")}
        for other in select(grid, sampling="0.4", **wanted):
            gap = other["low_weight"] - row["low_weight"]
            error = (other["low_weight_error"] ** 2 + row["low_weight_error"] ** 2) ** 0.5
            more, less = more + (gap > 2 * error and gap > 0), less + (gap < -2 * error and gap < 0)
    if not more + less:
        return None
    seen = f"more low weights at 0.4 in {more} cases, fewer in {less}, by more than two standard errors"
    verdict = REPEATS if more > 3 * less else (FAILS if less > more else PARTLY)
    return verdict, seen


def _cut_is_low(grid: Rows, temperature: Rows) -> Verdict | None:
    row = _one(grid, sampling=CUT, mode="processed")
    return None if row is None else _said(row["low_weight"] > 0.9, f"{row['low_weight']:.0%} at T = {row['T']:,}")


def _cut_ess(grid: Rows, temperature: Rows) -> Verdict | None:
    row = _one(grid, sampling=CUT, mode="processed")
    if row is None:
        return None
    deceived = [other for other in grid if other["ess"] > 0.9 and clamped(other) > 0.5]
    found = sum(other["false_positive"] for other in deceived)
    seen = (
        f"T × KL = {row['t_times_kl']:.0f}, {clamped(row):.0%} at the clamp, ESS {row['ess']:.3f}; over all cases "
        f"{len(deceived)} have an ESS above 0.9 from clamped weights, and the health rule finds {found} of them"
    )
    if row["ess"] > 0.9 and clamped(row) > 0.5:
        return REPEATS, seen
    if deceived:
        return PARTLY, f"not at this distance, but at larger ones and with raw log-probs: {seen}"
    return FAILS, seen


def _kl_of_cut(grid: Rows, temperature: Rows) -> Verdict | None:
    cut, plain = _one(grid, sampling=CUT, mode="processed"), _one(grid, sampling="1.0", mode="processed")
    if cut is None or plain is None:
        return None
    seen = f"{cut['kl']:.3f} against k3 {plain['k3']:.2g} (document: 0.033 and 0.001); T_max = {20 / cut['kl']:,.0f}"
    return _said(cut["kl"] > 10 * plain["k3"], seen)


def _dilemma(grid: Rows, temperature: Rows) -> Verdict | None:
    rows = [row for row in select(grid, mode="processed", T=512) if 2 < distance(row) < 20]
    if not rows:
        return None
    escapes = 0
    for row in rows:
        lower = [float(value) for value in str(row["clip_at_lower"]).split()]
        upper = [float(value) for value in str(row["clip_at_upper"]).split()]
        ess = [float(value) for value in str(row["clip_ess"]).split()]
        bounds = zip(lower, upper, ess, strict=True)
        escapes += any(low + high < 0.5 and size > 0.5 for low, high, size in bounds)
    seen = (
        f"{len(rows) - escapes} of {len(rows)} cases at T × KL of 2 to 20 have no C with an ESS above 0.5 and fewer "
        "than half of the weights at a bound"
    )
    return (REPEATS if not escapes else (PARTLY if escapes < len(rows) else FAILS)), seen


def _geometric(grid: Rows, temperature: Rows) -> Verdict | None:
    rows = select(grid, sampling="1.0", mode="processed", T=longest_of(grid))
    rows = [row for row in rows if row["engine"] != "float32"]
    if not rows:
        return None
    text = "; ".join(
        f"{name_of(row)}: mean {row['geometric_mean']:.4f}, {row['geometric_outside']:.0%}" for row in rows
    )
    high = [row for row in rows if row["geometric_mean"] > 1.01]
    if not high:
        return "cannot be tested here", f"because no pair of policies here has so large a mean: {text}"
    return _said(
        all(row["geometric_outside"] > 0.95 for row in high),
        f"mean exp of the absolute log-ratio per token, and the share outside 1.001, at T = {rows[0]['T']:,}: {text}",
    )


def _precision_source(grid: Rows, temperature: Rows) -> Verdict | None:
    names = ("float32", "bf16", "int8", "int8, 5 bits", "bf16, 4 bits", "int8, 3 bits")
    found = {name: _one(grid, engine=name, sampling="1.0", mode="processed") for name in names}
    measured = {name: row["k3"] for name, row in found.items() if row is not None}
    if len(measured) < 3 or "float32" not in measured:
        return None
    text = ", ".join(f"{name} {value:.2g}" for name, value in measured.items())
    return _said(measured["float32"] < 0.01 * measured["bf16"], f"k3 by precision: {text}")


CLAIMS: tuple[Claim, ...] = (
    Claim("1", "Separate backends differ although their weights are equal", _same_weights_differ),
    Claim(
        "1", "Equal weights can contradict each other: probability ≈ 1 on one side, ≈ 0 on the other", _contradictory
    ),
    Claim("1", "Higher precision (FP16, FP32 head) reduces the mismatch at its source", _precision_source),
    Claim("1", "Batch-invariant kernels reduce it too", _not_here("no engine on a CPU has such kernels as a switch")),
    Claim("2", "Raw log-probs at a temperature other than 1 are a mismatch; processed ones correct it", _raw_hides),
    Claim("2", "Top-p and top-k are a mismatch with raw and with processed log-probs", _cut_mismatch),
    Claim("2", "A cut that the trainer recomputes is fragile: tokens near its edge fall out", _recomputed_mask),
    Claim("2", "Replayed kept sets give both sides the same actions", _replay),
    Claim("2", "At a fixed perturbation the KL goes to 0 as the temperature grows", _vanishes),
    Claim("2", "Sharpening (τ < 1) amplifies the mismatch in the head", _sharpening),
    Claim("2", "Flattening (τ > 1) brings mismatch from the tail, and the KL grows", _flattening),
    Claim("2", "Any temperature other than 1 tends to increase the KL; 1.0 is a robust point", _any_temperature),
    Claim(
        "2",
        "The actors of six frameworks scale by temperature, and none replays a cut",
        _not_here("it describes other projects on 2 December 2025"),
    ),
    Claim(
        "3, Table 1",
        "Orders of bias and variance of token and sequence weights",
        _fixed(PARTLY, f"as bounds they hold; three are not attained: {LABORATORY}"),
        "laboratory",
    ),
    Claim(
        "3",
        "1 % drift per token over 1,000 tokens gives a weight of 0.00004",
        _fixed(REPEATS, f"0.99^1000 = {0.99**1000:.1e}"),
        "arithmetic",
    ),
    Claim(
        "3",
        "χ² = 0.01 and T = 1,000 amplify the variance 20,000 times",
        _fixed(REPEATS, f"1.01^1000 = {1.01**1000:,.0f}; {LABORATORY} has it as an exact sum"),
        "arithmetic",
    ),
    Claim("3", "Var ρ(y) ≈ (1 + χ̄²)^T − 1", _exponent),
    Claim("4", "Beyond T × KL = 20 most weights are at the clamp: T_max = 20 / KL", _clamp_rule),
    Claim("4", "Well below it one is usually safe from the clamp", _safe_below),
    Claim("4", "Below the clamp the effective sample size is lost already", _before_clamp),
    Claim("5.2, figure 2b", "χ²_seq of Seq-TIS exceeds 10³", _high_variance),
    Claim("5.2, figure 2c", "The ESS of Token-TIS is 0.9 to 1.0", _token_ess),
    Claim(
        "5.2, figures 2c, 2d",
        "Under Seq-TIS the ESS is low and most weights are below 1/C: a few sequences carry the update",
        _few_carry,
    ),
    Claim("5.3, figure 3", "The low-weight fraction rises with length", _monotone),
    Claim("5.3, figure 3", "Temperature 0.4 has more low weights than 1.0", _colder_is_lower),
    Claim("5.4, figure 4b", "There nearly all sequences have a low weight", _cut_is_low),
    Claim("5.4, figure 4c", "… and the ESS is near 1, because all weights are clamped: a false positive", _cut_ess),
    Claim(
        "5.4, figure 5a",
        "The KL there is far above that of temperature 1, and T_max falls to hundreds of tokens",
        _kl_of_cut,
    ),
    Claim("5.4", "A two-sided clip is a dilemma: all weights alike, or a few decide", _dilemma),
    Claim(
        "6", "Geo-RS with the recommended 1.0002 to 1.001 rejects every sample where means are 1.01 to 1.05", _geometric
    ),
)
