"""The correction in plain Python and float64: one token after the other, one formula after the other.

This is an oracle, not an implementation: nothing here is fast and nothing is shared with the package. It was written
from the definitions (docs/background/correction.md, docs/reference/metrics.md, docs/reference/notation.md), so an error
of the package is unlikely to be an error here as well. Numbers are Python floats, sums are `math.fsum`, which rounds
once.

Symbols: log π the training policy and log μ the rollout policy, of a sampled token, in nats; d = log π − log μ;
ρ = exp(d); V the valid tokens, R the sequences with a valid token. For sequence i: S_i = Σ d, G_i = S_i / c_i.

A valid token is of one of three classes:

    measured   log π and log μ finite       d = log π − log μ
    zero       log π = −inf, log μ finite   ρ = 0, d = −inf: a fact. In every count, in no mean of logarithms.
    missing    anything else                counted, then handled by `nonfinite`

A token *counts* if it has a ratio: measured, zero, or missing under nonfinite="neutral" (ρ = 1, d = 0).

    >>> settings = Settings(level="token", upper=2.0)
    >>> found = correct([[-1.0, -2.0, 0.0]], [[-2.0, -2.0, 0.0]], [[1, 1, 0]], settings)
    >>> found.weights
    [[2.0, 1.0, 0.0]]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

INF = math.inf
CAP = 20.0
"""k3 and χ² take log-ratios up to this."""


@dataclass(frozen=True)
class Criterion:
    """Keep a unit iff lower ≤ ρ ≤ upper (k1), or its divergence ≤ upper (k2, k3). None leaves a side open."""

    scope: str  # "token", "seq_sum", "seq_mean" or "seq_max"
    kind: str  # "k1", "k2" or "k3"
    lower: float | None = None
    upper: float | None = None

    @property
    def name(self) -> str:
        return f"{self.scope}_{self.kind}"


@dataclass(frozen=True)
class Settings:
    """Options of the correction, with the package's names and parsed thresholds.

    `lower` and `upper` bound the weights: as ends of the IcePop band if `band`, either of them open if None; else
    `upper` is a ceiling and `floor` raises small weights. Without them only the safety bound applies.
    """

    level: str | None = None  # "token", "sequence", "geometric", "horizon"; None computes no weights
    horizon: float | None = None  # λ of "horizon"
    per_turn: bool = False  # its sums end at holes in the mask
    lower: float | None = None
    upper: float | None = None
    band: bool = False
    floor: float | None = None
    normalize: bool = False
    normalize_over: str = "valid"  # or "kept"
    criteria: tuple[Criterion, ...] = ()
    veto: float | None = None
    nonfinite: str = "reject_token"  # or "reject_sequence", "neutral"
    safety_bound: float = 20.0


@dataclass(frozen=True)
class Result:
    """Rows as the batch had them; `weights` after batch normalization, None without a level."""

    weights: list[list[float]] | None
    loss_mask: list[list[bool]]
    sequence_kept: list[bool]
    metrics: dict[str, float]


def settings_of(config: Any) -> Settings:
    """The plain fields of a `RolloutCorrectionConfig`."""
    criteria = tuple(Criterion(c.scope, c.kind, c.lower, c.upper) for c in config.criteria)
    return Settings(
        level=config.rollout_is,
        horizon=config.rollout_is_horizon,
        per_turn=config.rollout_is_horizon_per_turn,
        lower=config.is_lower,
        upper=config.is_upper,
        band="_" in str(config.rollout_is_threshold),
        floor=config.rollout_is_floor,
        normalize=config.rollout_is_batch_normalize,
        normalize_over=config.batch_normalize_over,
        criteria=criteria,
        veto=config.rollout_token_veto_threshold,
        nonfinite=config.nonfinite,
        safety_bound=config.safety_bound,
    )


PER_TOKEN = ("token", "horizon")
"""Levels at which each token has a weight of its own."""


# --- tokens ---


class Token:
    """A valid token.

    Attributes:
        sequence, position: its place in the batch.
        log_pi, log_mu: its log-probs under both policies; valid where `measured`.
        kind: "measured", "zero" or "missing".
        d: its log-ratio; −inf where zero, 0 where missing.
        counts: it has a ratio, be it a neutral one.
        weight, raw_weight: importance weight after its bound, and before it (after the safety bound).
        rejected_by: names of the filters that reject it.
    """

    def __init__(self, sequence: int, position: int, log_pi: float, log_mu: float, nonfinite: str) -> None:
        self.sequence, self.position = sequence, position
        self.log_pi, self.log_mu = log_pi, log_mu
        if math.isfinite(log_pi) and math.isfinite(log_mu):
            self.kind, self.d = "measured", log_pi - log_mu
        elif log_pi == -INF and math.isfinite(log_mu):
            self.kind, self.d = "zero", -INF
        else:
            self.kind, self.d = "missing", 0.0
        self.counts = self.kind != "missing" or nonfinite == "neutral"
        self.weight = self.raw_weight = 0.0
        self.rejected_by: set[str] = set()


class Response:
    """The valid tokens of a sequence that has any.

    Attributes:
        tokens: its valid tokens.
        counting: those that have a ratio; the sums are over these.
        S, G: Σ d and Σ d / c over the counting tokens; −inf with a token of probability zero.
        weight, raw_weight: mean weight of the counting tokens, bounded and raw.
    """

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.counting = [token for token in tokens if token.counts]
        self.S = total(token.d for token in self.counting)
        self.G = self.S / len(self.counting) if self.counting else 0.0
        self.weight = self.raw_weight = 0.0

    @property
    def measured(self) -> list[Token]:
        return [token for token in self.tokens if token.kind == "measured"]


# --- arithmetic ---


def exp(x: float) -> float:
    """Return e^x, inf on overflow."""
    try:
        return math.exp(x)
    except OverflowError:
        return INF


def expm1(x: float) -> float:
    """Return e^x − 1, inf on overflow."""
    try:
        return math.expm1(x)
    except OverflowError:
        return INF


def total(values: Iterable[float]) -> float:
    """The sum, rounded once. Infinities of one sign win."""
    values = list(values)
    infinite = [x for x in values if math.isinf(x)]
    return sum(infinite) if infinite else math.fsum(values)


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 if empty."""
    return total(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    """Return the population standard deviation √(mean (x − mean)²); 0 if empty."""
    if not values:
        return 0.0
    center = mean(values)
    return math.sqrt(mean([(x - center) ** 2 for x in values]))


def share(flags: Sequence[bool]) -> float:
    """Return the share of true values; 0 if empty."""
    return sum(flags) / len(flags) if flags else 0.0


def ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 if whole is 0."""
    return part / whole if whole else 0.0


def log_of(bound: float | None, *, open_side: float) -> float:
    """The logarithm of a bound on ratios, or the open side's infinity."""
    return open_side if bound is None else math.log(bound)


# --- weights ---


def safe(log_weight: float, settings: Settings) -> float:
    """The weight before its bound: exp of ℓ clamped to ± safety_bound. A ratio of zero stays 0."""
    if log_weight == -INF:
        return 0.0
    return exp(max(-settings.safety_bound, min(settings.safety_bound, log_weight)))


def bounded(log_weight: float, settings: Settings) -> float:
    """The weight: IcePop, exp ℓ̂ inside [lo, hi], else 0; or truncated, exp ℓ̂ between floor and C. ℓ̂ is clamped first.

    A ratio of 0 has the weight 0, whatever the floor.
    """
    weight = safe(log_weight, settings)
    lowest = 0.0 if settings.lower is None else settings.lower
    highest = INF if settings.upper is None else settings.upper
    if settings.band:
        return weight if lowest <= weight <= highest else 0.0
    if settings.floor is not None and weight > 0:
        weight = max(weight, settings.floor)
    return min(weight, highest)


def log_weight_of(token: Token, sequence: Response, settings: Settings) -> float:
    """ℓ of a token: d, S_i or G_i, by the level; "horizon": Σ_s λ^|t−s| d_s over the valid tokens."""
    if settings.level == "horizon":
        return total(horizon_terms(token, sequence, settings))
    return {"token": token.d, "sequence": sequence.S, "geometric": sequence.G}[str(settings.level)]


def horizon_terms(token: Token, sequence: Response, settings: Settings) -> list[float]:
    """λ^|t−s| d_s for every valid token s: for λ > 0, a ratio of 0 to a power of λ is 0 at any distance.

    Tokens of one turn are as far apart in the row as among the valid tokens.
    """
    decay, at = settings.horizon, sequence.tokens.index(token)
    if decay == 0:
        return [token.d]
    tokens = [(abs(at - s), other) for s, other in enumerate(sequence.tokens)]
    if settings.per_turn:
        tokens = [(k, other) for k, other in tokens if abs(token.position - other.position) == k]
    return [other.d if other.d == -INF else decay**k * other.d for k, other in tokens]


def weigh(sequences: list[Response], settings: Settings) -> None:
    """Set the weight of each counting token; other tokens keep 0."""
    for sequence in sequences:
        for token in sequence.counting:
            log_weight = log_weight_of(token, sequence, settings)
            token.weight = bounded(log_weight, settings)
            token.raw_weight = safe(log_weight, settings)
        sequence.weight = mean([token.weight for token in sequence.counting])
        sequence.raw_weight = mean([token.raw_weight for token in sequence.counting])


def normalization(sequences: list[Response], settings: Settings) -> float:
    """Return the divisor of the weights: their mean over tokens (levels `PER_TOKEN`) or sequences (other levels).

    normalize_over="kept" averages over the tokens in the loss, or the sequences with such a token.
    """
    over_kept = settings.normalize_over == "kept"
    if settings.level in PER_TOKEN:
        return mean(
            [
                token.weight
                for sequence in sequences
                for token in sequence.counting
                if not (over_kept and token.rejected_by)
            ]
        )
    return mean(
        [
            sequence.weight
            for sequence in sequences
            if sequence.counting and not (over_kept and all(token.rejected_by for token in sequence.tokens))
        ]
    )


# --- rejection ---


def divergence(kind: str, d: float) -> float:
    """k1 = −d; k2 = d² / 2; k3 = expm1(d) − d, d up to +20. k2 and k3 of ρ = 0 are inf."""
    if kind == "k1":
        return -d
    if d == -INF:
        return INF
    if kind == "k2":
        return d * d / 2
    d = min(d, CAP)
    if abs(d) < 0.01:
        # expm1(d) − d cancels near 0; its series d²/2! + d³/3! + … does not.
        return math.fsum(d**n / math.factorial(n) for n in range(2, 12))
    return math.expm1(d) - d


def statistic(criterion: Criterion, sequence: Response) -> float:
    """Return the statistic of a sequence criterion: sum, mean or maximum of the divergence over counting tokens."""
    values = [divergence(criterion.kind, token.d) for token in sequence.counting]
    return {"token": mean, "seq_sum": total, "seq_mean": mean, "seq_max": max}[criterion.scope](values)


def above(criterion: Criterion, value: float) -> bool:
    """k1: ρ = exp(−value) beyond the upper bound; k2, k3: the divergence beyond it."""
    if criterion.kind == "k1":
        return -value > log_of(criterion.upper, open_side=INF)
    return criterion.upper is not None and value > criterion.upper


def below(criterion: Criterion, value: float) -> bool:
    """k1: ρ below the lower bound; k2 and k3 have none."""
    return criterion.kind == "k1" and criterion.lower is not None and -value < math.log(criterion.lower)


def rejects(criterion: Criterion, value: float) -> bool:
    """Bounds are inclusive."""
    return above(criterion, value) or below(criterion, value)


def reject(sequences: list[Response], settings: Settings) -> None:
    """Record which filters reject each token. Every filter sees only the response mask, so order never matters."""
    for sequence in sequences:
        missing = [token for token in sequence.tokens if token.kind == "missing"]
        if missing and settings.nonfinite == "reject_sequence":
            mark(sequence.tokens, "nonfinite")
        elif settings.nonfinite == "reject_token":
            mark(missing, "nonfinite")

        if settings.veto is not None and any(token.d < math.log(settings.veto) for token in sequence.counting):
            mark(sequence.tokens, "veto")

        for criterion in settings.criteria:
            if criterion.scope == "token":
                mark(
                    [t for t in sequence.counting if rejects(criterion, divergence(criterion.kind, t.d))],
                    criterion.name,
                )
            elif sequence.counting and rejects(criterion, statistic(criterion, sequence)):
                mark(sequence.tokens, criterion.name)


def mark(tokens: Iterable[Token], name: str) -> None:
    for token in tokens:
        token.rejected_by.add(name)


# --- metrics ---


def mismatch_metrics(sequences: list[Response], settings: Settings) -> dict[str, float]:
    """How far apart the policies are. Means of logarithms are over measured tokens; means of ratios take ρ = 0 too."""
    tokens = [token for sequence in sequences for token in sequence.tokens]
    measured = [token for token in tokens if token.kind == "measured"]
    compared = [token for token in tokens if token.kind != "missing"]
    d = [token.d for token in measured]
    kl = mean([-x for x in d])

    # Per sequence, over its measured tokens: −mean log π, −mean log μ and −G.
    rows = [sequence.measured for sequence in sequences if sequence.measured]
    train = [-mean([token.log_pi for token in row]) for row in rows]
    rollout = [-mean([token.log_mu for token in row]) for row in rows]
    difference = [-mean([token.d for token in row]) for row in rows]

    sums = [sequence.S for sequence in sequences if sequence.counting]
    probability_differences = [abs(exp(token.log_pi) - exp(token.log_mu)) for token in compared]
    return {
        "token_count": len(tokens),
        "sequence_count": len(sequences),
        "nonfinite_count": sum(token.kind == "missing" for token in tokens),
        "zero_probability_count": sum(token.kind == "zero" for token in tokens),
        "training_ppl": mean([exp(x) for x in train]),
        "training_log_ppl": mean(train),
        "rollout_ppl": mean([exp(x) for x in rollout]),
        "rollout_log_ppl": mean(rollout),
        "kl": kl,
        "k3_kl": mean([divergence("k3", x) for x in d]),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean([abs(x) for x in difference]),
        "log_ppl_diff_max": max(difference, default=0.0),
        "log_ppl_diff_min": min(difference, default=0.0),
        "ppl_ratio": mean([exp(x) for x in difference]),
        "ppl_ratio_geo": exp(mean(difference)) if difference else 0.0,
        "chi2_token": mean([chi2(token.d) for token in compared]),
        "chi2_seq": mean([chi2(x) for x in sums]),
        "capped_fraction": share([capped(token.d) for token in compared]),
        "chi2_seq_capped_fraction": share([capped(x) for x in sums]),
        "log_ratio_mean": mean(d),
        "log_ratio_std": std(d),
        "log_ratio_abs_mean": mean([abs(x) for x in d]),
        "log_ratio_min": min(d, default=0.0),
        "log_ratio_max": max(d, default=0.0),
        "prob_diff_abs_mean": mean(probability_differences),
        "prob_diff_abs_max": max(probability_differences, default=0.0),
        "ratio_outside_10pct": share([not math.log(0.9) <= token.d <= math.log(1.1) for token in compared]),
        "t_times_kl": ratio(len(tokens), len(sequences)) * kl,
        "max_viable_length": viable_length(kl, settings.safety_bound, measured),
    }


def chi2(log_ratio: float) -> float:
    """ρ² − 1 = expm1(2 d̂), d̂ = d clamped to ±20; −1 where ρ = 0."""
    if log_ratio == -INF:
        return -1.0
    return expm1(2 * max(-CAP, min(CAP, log_ratio)))


def capped(log_ratio: float) -> bool:
    """Whether the cap changes ρ² − 1. ρ = 0 is no log-ratio that was cut: it is exact, and counted elsewhere."""
    return CAP < abs(log_ratio) < INF


def viable_length(kl: float, safety_bound: float, measured: list[Token]) -> float:
    """The length at which the mean log of a sequence's weight reaches the safety bound: bound / kl, up to 1e9."""
    if not measured:
        return 0.0
    return min(safety_bound / kl, 1e9) if kl > 0 else 1e9


def weight_metrics(sequences: list[Response], settings: Settings) -> dict[str, float]:
    """Compute metrics of the weights before normalization, over counting tokens or sequences with one."""
    counting = [sequence for sequence in sequences if sequence.counting]
    units = [(token, sequence) for sequence in counting for token in sequence.counting]
    tokens = [token for token, _ in units]
    weights, raw = [token.weight for token in tokens], [token.raw_weight for token in tokens]
    q = [sequence.weight for sequence in counting]

    # The unit is the one that the level counts.
    if settings.level in PER_TOKEN:
        unit_logs, unit_weights = [log_weight_of(token, sequence, settings) for token, sequence in units], weights
    else:
        unit_logs = [log_weight_of(sequence.counting[0], sequence, settings) for sequence in counting]
        unit_weights = q

    metrics = {
        "rollout_is_mean": mean(weights),
        "rollout_is_std": std(weights),
        "rollout_is_min": min(weights, default=0.0),
        "rollout_is_max": max(weights, default=0.0),
        "rollout_is_raw_mean": mean(raw),
        "rollout_is_raw_std": std(raw),
        "rollout_is_raw_min": min(raw, default=0.0),
        "rollout_is_raw_max": max(raw, default=0.0),
        "rollout_is_eff_sample_size": effective_sample_size(unit_weights),
        "rollout_is_seq_mean": mean(q),
        "rollout_is_seq_std": std(q),
        "rollout_is_seq_min": min(q, default=0.0),
        "rollout_is_seq_max": max(q, default=0.0),
        "rollout_is_seq_max_deviation": max([abs(x - 1) for x in q], default=0.0),
        "saturated_low_fraction": share([-INF < x < -settings.safety_bound for x in unit_logs]),
        "saturated_high_fraction": share([x > settings.safety_bound for x in unit_logs]),
    }
    if settings.level == "horizon":
        metrics["rollout_is_horizon"] = settings.horizon
    if settings.level not in PER_TOKEN:
        finite = [x for x in unit_logs if x > -INF]
        metrics["rollout_is_log_min"] = min(finite, default=0.0)
        metrics["rollout_is_log_max"] = max(finite, default=0.0)

    band = reported_band(settings)
    if band is not None:
        low, high = band
        metrics["rollout_is_ratio_fraction_high"] = share([x > log_of(high, open_side=INF) for x in unit_logs])
        metrics["rollout_is_ratio_fraction_low"] = share([x < log_of(low, open_side=-INF) for x in unit_logs])
        raw_q = [sequence.raw_weight for sequence in counting]
        metrics["rollout_is_seq_fraction_high"] = share([x > (INF if high is None else high) for x in raw_q])
        metrics["rollout_is_seq_fraction_low"] = share([x < (0.0 if low is None else low) for x in raw_q])
    if settings.upper is not None:
        below_reciprocal = [-math.log(settings.upper) > sequence.S for sequence in counting]
        metrics["rollout_is_low_weight_fraction"] = share(below_reciprocal)
    if settings.band:
        # Of tokens at every level: a sequence outside the band counts all of its tokens.
        metrics["rollout_is_oob_ratio"] = share([token.weight == 0.0 for token in tokens])
    if settings.normalize:
        metrics["rollout_is_batch_norm_factor"] = normalization(sequences, settings)
    return metrics


def effective_sample_size(weights: Sequence[float]) -> float:
    """(Σ w)² / (k Σ w²) of k weights; 0 if all are 0. Weights are divided by the largest first, so none underflows."""
    largest = max(weights, default=0.0)
    if largest == 0.0:
        return 0.0
    scaled = [weight / largest for weight in weights]
    return total(scaled) ** 2 / (len(scaled) * total([x * x for x in scaled]))


def reported_band(settings: Settings) -> tuple[float | None, float | None] | None:
    """Return the band of the fraction metrics: [1/C or floor, C], IcePop's, or the band of the level's k1 criterion."""
    if settings.band:
        return settings.lower, settings.upper
    if settings.floor is not None:
        return settings.floor, settings.upper
    if settings.upper is not None:
        return 1 / settings.upper, settings.upper
    own = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}.get(str(settings.level))
    for criterion in settings.criteria:
        if criterion.name == own:
            return criterion.lower, criterion.upper
    return None


def rejection_metrics(sequences: list[Response], settings: Settings) -> dict[str, float]:
    """Compute metrics of all filters together. Shares are of V or R, missing tokens included."""
    tokens = [token for sequence in sequences for token in sequence.tokens]
    metrics = {
        "rollout_rs_masked_fraction": share([bool(token.rejected_by) for token in tokens]),
        "rollout_rs_seq_masked_fraction": share([bool(touching(sequence)) for sequence in sequences]),
        "rollout_rs_seq_dropped_fraction": share(
            [all(t.rejected_by for t in sequence.tokens) for sequence in sequences]
        ),
        "rollout_rs_overlap_fraction": share([len(token.rejected_by) > 1 for token in tokens]),
        "rollout_rs_seq_overlap_fraction": share([len(touching(sequence)) > 1 for sequence in sequences]),
    }
    if settings.veto is not None:
        impossible = [token.counts and token.d < math.log(settings.veto) for token in tokens]
        metrics["rollout_is_veto_fraction"] = share(["veto" in touching(sequence) for sequence in sequences])
        metrics["rollout_is_catastrophic_token_fraction"] = share(impossible)
    return metrics


def touching(sequence: Response) -> set[str]:
    """The filters that reject a token of the sequence."""
    return set().union(*(token.rejected_by for token in sequence.tokens))


def criterion_metrics(criterion: Criterion, sequences: list[Response]) -> dict[str, float]:
    """Compute the metrics of one criterion: its statistic, the values of sequences, and the rejected shares.

    An infinite statistic (ρ = 0) counts as beyond a bound and stays out of means, deviations and extremes. Shares of
    tokens are of those that the criterion judged, neutral ones included; means of tokens leave every missing one out.
    """
    tokens = [token for sequence in sequences for token in sequence.tokens]
    counting = [sequence for sequence in sequences if sequence.counting]
    per_sequence = [statistic(criterion, sequence) for sequence in counting]
    per_unit = judged = per_sequence
    if criterion.scope == "token":
        judged = [divergence(criterion.kind, token.d) for token in tokens if token.counts]
        per_unit = [divergence(criterion.kind, token.d) for token in tokens if token.kind != "missing"]

    name = criterion.name
    metrics = {
        **described(per_unit),
        **beyond(judged, criterion),
        **{f"seq_{key}": value for key, value in (described(per_sequence) | beyond(per_sequence, criterion)).items()},
        "seq_max_deviation": max([abs(x) for x in per_sequence if math.isfinite(x)], default=0.0),
        "masked_fraction": share([name in token.rejected_by for token in tokens]),
        "seq_masked_fraction": share([name in touching(sequence) for sequence in sequences]),
        "alone_fraction": share([token.rejected_by == {name} for token in tokens]),
        "seq_alone_fraction": share([touching(sequence) == {name} for sequence in sequences]),
    }
    return {f"rollout_rs_{name}_{key}": value for key, value in metrics.items()}


def described(values: list[float]) -> dict[str, float]:
    """Mean, standard deviation and extremes of the finite values."""
    finite = [x for x in values if math.isfinite(x)]
    return {
        "mean": mean(finite),
        "std": std(finite),
        "min": min(finite, default=0.0),
        "max": max(finite, default=0.0),
    }


def beyond(values: list[float], criterion: Criterion) -> dict[str, float]:
    """Shares of the values beyond the bounds, infinite ones included."""
    return {
        "fraction_high": share([above(criterion, x) for x in values]),
        "fraction_low": share([below(criterion, x) for x in values]),
    }


# --- everything ---


def correct(
    train_log_prob: Sequence[Sequence[float]],
    rollout_log_prob: Sequence[Sequence[float]],
    response_mask: Sequence[Sequence[float]],
    settings: Settings,
) -> Result:
    """Weights, loss mask, keep flags and metrics of a batch of sequences, one row each; rows may differ in length."""
    sequences = []
    for i, (log_pi, log_mu, mask) in enumerate(zip(train_log_prob, rollout_log_prob, response_mask, strict=True)):
        places = [t for t, valid in enumerate(mask) if valid != 0]
        if places:
            sequences.append(Response([Token(i, t, log_pi[t], log_mu[t], settings.nonfinite) for t in places]))

    reject(sequences, settings)
    metrics = mismatch_metrics(sequences, settings) | rejection_metrics(sequences, settings)
    for criterion in settings.criteria:
        metrics |= criterion_metrics(criterion, sequences)

    weights = None
    if settings.level is not None:
        weigh(sequences, settings)
        metrics |= weight_metrics(sequences, settings)
        factor = normalization(sequences, settings) if settings.normalize else 1.0
        # Where every weight is 0 there is no mean to divide by.
        weights = spread(sequences, response_mask, lambda token: token.weight / (factor or 1.0), 0.0)

    loss_mask = spread(sequences, response_mask, lambda token: not token.rejected_by, False)
    # A sequence that never had a token is not rejected.
    dropped = {s.tokens[0].sequence for s in sequences if all(token.rejected_by for token in s.tokens)}
    kept = [i not in dropped for i in range(len(response_mask))]
    return Result(weights, loss_mask, kept, metrics)


def spread(
    sequences: list[Response], like: Sequence[Sequence[float]], value: Callable[[Token], Any], elsewhere: Any
) -> list[list[Any]]:
    """A value per token, laid out like the mask; `elsewhere` where there is no valid token."""
    rows = [[elsewhere] * len(row) for row in like]
    for sequence in sequences:
        for token in sequence.tokens:
            rows[token.sequence][token.position] = value(token)
    return rows
