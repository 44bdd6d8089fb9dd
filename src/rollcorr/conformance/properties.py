"""The fifteen properties of a rollout correction: what each requires, and its check.

A check calls the function on a batch and yields the differences in words. It expects numbers from plain Python in
float64, which shares no code with the package. Comparisons within 1e-4 of a bound count as either answer,
and numbers agree to 1e-3, because a standard deviation in float32 keeps few digits.

Source: the failures of other implementations in docs/contributing/known_failures.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from rollcorr.conformance.batches import OUTSIDE, Rows, log_ratio, padded
from rollcorr.conformance.function_calls import Options, Outcome, Subject, numbers_of

Check = Callable[[Subject, Rows, Options], Iterator[str]]
Place = tuple[int, int]

TOKEN: Options = {"level": "token", "ceiling": 2.0}
SEQUENCE: Options = {"level": "sequence", "ceiling": 2.0}
# Neither band is reciprocal, so a band on 1 / ρ keeps other tokens.
FILTERS: tuple[Options, ...] = ({"token_band": (0.5, 1.2)}, {"geometric_band": (0.7, 1.1)}, {"veto": 1e-3})
EACH = (TOKEN, SEQUENCE, *FILTERS)
WORDS = {True: "kept", False: "rejected"}
# Log-ratios up to which a function has no bound of its own, from which it may have one, and one below the veto.
SAFE, HUGE, IMPOSSIBLE = 10.0, 100.0, -12.0


class Property(NamedTuple):
    """One property of a rollout correction.

    Attributes:
        number: 1 to 15.
        title: a few words.
        statement: the requirement.
        check: yields differences.
        variants: sets of options; each that the function takes is checked.
        outputs: outputs that the check reads; "statistics" is any number.
        scale: standard deviation of the drawn log-ratios, nats; None draws it.
        special: log-ratios that replace some of the drawn ones.
    """

    number: int
    title: str
    statement: str
    check: Check
    variants: tuple[Options, ...] = (TOKEN,)
    outputs: tuple[str, ...] = ("weights",)
    scale: float | None = None
    special: tuple[float, ...] = ()


# --- weights ---


def weights_are_bounded_ratios(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Properties 1 and 2: min(ρ, ceiling), where ρ is exp(d) or exp(Σ d) by the level."""
    weights, ceiling = subject(rows, options).weights, _ceiling(subject, options)
    for (i, t), log_weight in _log_weights(rows, options).items():
        wanted = _bounded(log_weight, ceiling)
        # Without a ceiling the function may have a safety bound of its own.
        is_decided = ceiling < math.inf or abs(log_weight) <= SAFE
        if is_decided and not math.isclose(weights[i][t], wanted, rel_tol=1e-4, abs_tol=1e-6):
            formula = "exp(Σ d)" if options["level"] == "sequence" else "exp(d)"
            yield f"the weight at {(i, t)} is {weights[i][t]:.6g}, expected {wanted:.6g} = min({formula}, {ceiling})"


def huge_ratios_stay_finite(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 7: weights are finite; at the ceiling far above it, near 0 far below it; no number is NaN."""
    outcome, ceiling = subject(rows, options), _ceiling(subject, options)
    for i, t in _places(rows):
        # A token's clamp before the sum of level "sequence" belongs to property 2.
        weight, d = outcome.weights[i][t], log_ratio(rows[i][t]) if options["level"] == "token" else 0.0
        is_too_small = d > HUGE and weight < 0.999 * min(ceiling, math.exp(SAFE))
        is_too_large = d < -HUGE and weight > 1e-6
        if is_too_small or is_too_large or not math.isfinite(weight):
            yield f"the weight at {(i, t)} is {weight:.6g}, with log ratio {log_ratio(rows[i][t]):.6g}"
    yield from _nan_numbers(outcome)


# --- filters ---


def filters_keep_what_lies_inside(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Properties 3, 4 and 14: the loss mask is that of the filters, on the ratio itself."""
    kept = subject(rows, options).kept
    for i, row in enumerate(_valid_log_ratios(rows)):
        mean = math.fsum(row.values()) / max(len(row), 1)
        vetoed = [_inside(d, options.get("veto", 0.0)) for d in row.values()]
        of_row = [_inside(mean, *options.get("geometric_band", ())), *vetoed]
        for t, d in row.items():
            judged = [_inside(d, *options.get("token_band", ())), *of_row]
            # A rejection by one filter is final; a comparison within rounding of a bound decides nothing.
            wanted = all(judged)
            if kept[i][t] != wanted and (False in judged or None not in judged):
                ratios = f"ρ = {math.exp(d):.4g}, geometric mean of the row {math.exp(mean):.4g}"
                yield f"the token at {(i, t)} is {WORDS[kept[i][t]]}, expected {WORDS[wanted]}: {ratios}"


def rejection_needs_no_weights(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 12: with level None the loss mask is the one with token weights."""
    without, with_weights = (subject(rows, {**options, "level": level}) for level in (None, "token"))
    yield from _describe_differences(
        with_weights._replace(weights=[], numbers={}), without, _places(rows), "without weights"
    )


def filters_intersect(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 13: two filters keep the tokens that each of them keeps alone."""
    one, other = (subject(rows, {name: value}).kept for name, value in options.items())
    both = [[a and b for a, b in zip(*pair, strict=True)] for pair in zip(one, other, strict=True)]
    yield from _describe_differences(
        Outcome([], both, {}, {}), subject(rows, options), _places(rows), "with both filters"
    )


# --- values that must not matter ---


def padding_is_not_read(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 5: NaN outside the mask changes no output at valid tokens, and no number."""
    clean, dirty = (subject(padded(rows, columns=1, value=value), options) for value in (0.0, math.nan))
    yield from _describe_differences(clean, dirty, _places(rows), "with NaN at padding")


def missing_tokens_stay_alone(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 6: a token whose log π is NaN leaves the loss or is neutral; no other row and no number notices."""
    missing = [(i, t) for i, t in _places(rows) if math.isnan(rows[i][t][0])]
    outcome = subject(rows, options)
    for i, t in _places(rows) if outcome.weights and missing else []:
        weight, kept = outcome.weights[i][t], not outcome.kept or outcome.kept[i][t]
        # At level "sequence" a missing token has the weight of its sequence.
        is_invented = options is TOKEN and (i, t) in missing and weight not in (0.0, 1.0)
        if kept and (is_invented or not math.isfinite(weight)):
            yield f"with a NaN the weight at {(i, t)} is {weight:.6g}; a missing token needs 0, 1 or rejection"
        yield from _nan_numbers(outcome) if missing else ()

    # Rows without a missing token come out as if it were masked.
    others = [(i, t) for i, t in _places(rows) if i not in {row for row, _ in missing}]
    if missing and others:
        masked = tuple(tuple(OUTSIDE if math.isnan(token[0]) else token for token in row) for row in rows)
        yield from _describe_differences(
            subject(masked, options)._replace(numbers={}), outcome, others, "with a NaN in another row"
        )


def statistics_ignore_padding(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 9: more padding, with other finite values, changes no number."""
    narrow, wide = (subject(padded(rows, columns=n, value=-n), options) for n in (0, 3))
    yield from _describe_differences(narrow, wide, [], "with more padding")


def empty_rows_change_nothing(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 11: a row without tokens changes no other row and no number; a batch of such rows is no error."""
    empty = (OUTSIDE,)
    outcome = subject((*rows, empty), options)
    yield from _describe_differences(subject(rows, options), outcome, _places(rows), "with a row without tokens")
    if outcome.weights and not all(map(math.isfinite, outcome.weights[-1])):
        yield f"the weights of a row without tokens are {outcome.weights[-1]}"
    yield from _nan_numbers(subject((empty,), options))


# --- statistics ---


def ess_is_a_share(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 8: (Σ w)² / (n Σ w²) of the n valid tokens' weights, in [0, 1]."""
    ess = subject(rows, options).numbers["ess"]
    if not 0 <= ess <= 1 + 1e-6:
        yield f"ess is {ess:.6g}, outside [0, 1]"
    logs = _log_weights(rows, options).values()
    weights = [_bounded(log_weight, _ceiling(subject, options)) for log_weight in logs]
    wanted = math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
    # A safety bound of the function would change the share of weights beyond it.
    if max(map(abs, logs)) <= SAFE and not math.isclose(ess, wanted, rel_tol=1e-3):
        yield f"ess is {ess:.6g}, expected {wanted:.6g}"


def parts_merge_to_the_whole(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 10: `merge` of the results of two parts returns the numbers of the whole."""
    if len(rows) > 1:
        parts = [subject(part, options).result for part in (rows[:1], rows[1:])]
        merged = Outcome([], [], numbers_of(subject.function.merge(parts)), {})  # type: ignore[attr-defined]
        yield from _describe_differences(subject(rows, options), merged, [], "after merging two parts")


def k3_keeps_its_digits(subject: Subject, rows: Rows, options: Options) -> Iterator[str]:
    """Property 15: the mean of expm1(d) − d over valid tokens, to 2 %, at |d| near 1e-4 in float32."""
    terms = [math.expm1(d) - d for row in _valid_log_ratios(rows) for d in row.values()]
    k3, wanted = subject(rows, options).numbers["k3"], math.fsum(terms) / len(terms)
    if not math.isclose(k3, wanted, rel_tol=0.02):
        yield f"k3 is {k3:.6g}, expected {wanted:.6g}"


# --- expected numbers, and comparisons ---


def _valid_log_ratios(rows: Rows) -> list[dict[int, float]]:
    # By column, of the tokens under the mask.
    return [{t: log_ratio(token) for t, token in enumerate(row) if token[2]} for row in rows]


def _log_weights(rows: Rows, options: Options) -> dict[Place, float]:
    """Return the logarithm of each valid token's weight without bounds: d, or its row's Σ d."""
    by_row, of_rows = options["level"] == "sequence", enumerate(_valid_log_ratios(rows))
    return {(i, t): math.fsum(row.values()) if by_row else d for i, row in of_rows for t, d in row.items()}


def _places(rows: Rows) -> list[Place]:
    return [*_log_weights(rows, TOKEN)]


def _bounded(log_weight: float, ceiling: float) -> float:
    return min(math.exp(min(log_weight, 700.0)), ceiling)


def _ceiling(subject: Subject, options: Options) -> float:
    return float(options["ceiling"]) if subject.takes("ceiling") else math.inf


def _inside(d: float, low: float = 0.0, high: float = math.inf) -> bool | None:
    # Whether low ≤ exp d ≤ high; None within rounding of a bound.
    bounds = (math.log(low) if low > 0 else -math.inf, math.log(high) if high < math.inf else math.inf)
    return None if any(abs(d - bound) < 1e-4 for bound in bounds) else bounds[0] <= d <= bounds[1]


def _describe_differences(before: Outcome, after: Outcome, places: list[Place], note: str) -> Iterator[str]:
    """Yield where two outcomes differ at these places, then in their numbers; one that is gone counts as NaN."""
    pairs = {name: (value, after.numbers.get(name, math.nan)) for name, value in before.numbers.items()}
    tables = (("weight", before.weights, after.weights), ("loss mask", before.kept, after.kept))
    for label, one_table, other_table in tables:
        shared = places if one_table and other_table else []
        pairs = {f"the {label} at {(i, t)}": (one_table[i][t], other_table[i][t]) for i, t in shared} | pairs
    for label, (one, other) in pairs.items():
        if not (math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-5) or (math.isnan(one) and math.isnan(other))):
            yield f"{note} {label} is {other:.6g}, else {one:.6g}"


def _nan_numbers(outcome: Outcome) -> Iterator[str]:
    return (f"{name} is NaN" for name, value in outcome.numbers.items() if math.isnan(value))


PROPERTIES = (
    Property(
        1,
        "token weights",
        "w = min(exp d, ceiling) for each token; without a ceiling, exp d",
        weights_are_bounded_ratios,
    ),
    Property(
        2,
        '"sequence" is the product',
        "w = min(exp Σ d, ceiling) for each sequence, with no bound before the sum",
        weights_are_bounded_ratios,
        (SEQUENCE,),
        special=(25.0, -24.0),
    ),
    Property(
        3,
        "token band",
        "a token stays if low ≤ exp d ≤ high, on the ratio and not on its inverse",
        filters_keep_what_lies_inside,
        FILTERS[:1],
        ("loss_mask",),
    ),
    Property(
        4,
        "geometric band",
        "a sequence stays if low ≤ exp(mean d) ≤ high",
        filters_keep_what_lies_inside,
        FILTERS[1:2],
        ("loss_mask",),
    ),
    Property(5, "NaN at padding", "values outside the mask are not read", padding_is_not_read, EACH, ()),
    Property(
        6,
        "NaN at a valid token",
        "the token leaves the loss or has weight 1; other rows do not change, and no number is NaN",
        missing_tokens_stay_alone,
        EACH,
        (),
        special=(math.nan,),
    ),
    Property(
        7,
        "log ratio 200",
        "weights stay finite: at the ceiling for 200, near 0 for −200; no number is NaN",
        huge_ratios_stay_finite,
        (TOKEN, SEQUENCE),
        special=(200.0, -200.0),
    ),
    Property(
        8,
        "effective sample size",
        "ess = (Σ w)² / (n Σ w²) over the n valid tokens, in [0, 1]",
        ess_is_a_share,
        outputs=("ess",),
        special=(-60.0, 60.0),
    ),
    Property(
        9,
        "statistics ignore padding",
        "more padding changes no number",
        statistics_ignore_padding,
        EACH,
        ("statistics",),
    ),
    Property(
        10,
        "micro-batches merge",
        "the merged numbers of two parts are those of the whole",
        parts_merge_to_the_whole,
        EACH,
        ("statistics", "merge"),
    ),
    Property(
        11,
        "a row without tokens",
        "it changes no other row and no number; a batch of such rows gives no error and no NaN",
        empty_rows_change_nothing,
        EACH,
        (),
    ),
    Property(
        12,
        "rejection without weights",
        "with level None each filter rejects as with weights",
        rejection_needs_no_weights,
        tuple({"level": None, **options} for options in FILTERS),
        ("loss_mask",),
        special=(IMPOSSIBLE,),
    ),
    Property(
        13,
        "filters compose",
        "two filters keep the tokens that each of them keeps alone",
        filters_intersect,
        tuple({**one, **other} for one, other in combinations(FILTERS, 2)),
        ("loss_mask",),
        special=(IMPOSSIBLE,),
    ),
    Property(
        14,
        "veto per sequence",
        "a token with exp d < veto rejects exactly its sequence",
        filters_keep_what_lies_inside,
        FILTERS[2:],
        ("loss_mask",),
        special=(IMPOSSIBLE,),
    ),
    Property(
        15,
        "k3 at mismatch 1e-4",
        "k3 = mean(expm1 d − d) to 2 %, in float32",
        k3_keeps_its_digits,
        outputs=("k3",),
        scale=1e-4,
    ),
)
