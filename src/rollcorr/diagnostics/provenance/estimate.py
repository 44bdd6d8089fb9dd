"""Logs of unknown origin: what the log-probs themselves say about the sampling behind them.

`estimate_provenance` compares the trainer's and the rollout's log-probs of the same sampled tokens and labels what it
finds: another temperature, a truncation, log-probs of something that was not sampled, a shift by one token,
placeholders. Each label has its evidence and a confidence. What the inputs cannot tell is said in `unknown`;
docs/sampling.md has the list. With the trainer's logits more can be told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollcorr.core.layout import check_layout, sequence_ids
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.labels import (
    Label,
    Provenance,
    confidence_of,
    processed_label,
    raw_label,
    tempered_label,
)
from rollcorr.diagnostics.provenance.pairs import (
    CERTAIN,
    Crowds,
    LogitTable,
    certain_share,
    correlation,
    crowds,
    logit,
    mean_and_z,
    slope,
    spread,
)

MIN_TOKENS = 16
"""Fewer valid tokens are not judged."""
SENTINEL = -9999.0
ONE_SIDED = 0.75
"""Share of likely tokens that must be higher on one side before a temperature is believed."""
EXPONENT = 0.05
"""Smallest |β − 1| that is called a temperature: an honest mismatch can look like less."""
FEW = 20
"""Fewer unlikely tokens decide nothing."""
CERTAIN_SHARE = 0.01
"""Share of tokens with probability 1 on one side only, above which it was truncated."""
MASS_LOST = 0.01
"""Smallest 1 − mean ratio that is called a truncation when no token is certain."""
HIGHER = 0.58
"""Share of tokens that must be higher on the truncated side if mass alone speaks for it: an honest pair has a half."""
SURPRISE = 0.02
"""Nats by which sampled tokens must be likelier than the policy's entropy says, before it is denied that it sampled."""
CLEARLY = 0.92
"""Spread of the residual at another temperature over that at the trainer's own, below which the other is believed."""
LARGE = 0.3
"""Standard deviation of the log-ratio, nats, above which a pair without a pattern is not called matched."""
Z = 4.0
"""Standard errors that a mean must be away from what it should be."""


def estimate_provenance(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    logits: Tensor | None = None,
    token_ids: Tensor | None = None,
    tempered: Mapping[float, Tensor] | None = None,
) -> Provenance:
    """Say what two log-probs of the same sampled tokens are log-probs of.

    Args:
        train_log_prob: the trainer's, nats. (B, T), or (N,) with `cu_seqlens`.
        rollout_log_prob: the engine's, of the same tokens. NaN, −inf and −9999 are missing.
        mask: true on sampled tokens, same shape; None for all.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        logits: the trainer's, undivided, (…, V) over the same tokens, with `token_ids`. Fits both temperatures, and
            tells whether the tokens were sampled from what the engine reports.
        token_ids: the sampled tokens.
        tempered: instead of logits, the trainer's log-probs by temperature: the best of those temperatures is taken.

    Returns:
        Labels with evidence, and what could not be told. Reads values: for diagnosis, not for the step path.

    Raises:
        ValueError: shapes differ, or logits come without token ids.
    """
    mask = torch.ones_like(train_log_prob, dtype=torch.bool) if mask is None else mask != 0
    check_layout(train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob, mask=mask, cu_seqlens=cu_seqlens)
    if (logits is None) != (token_ids is None):
        raise ValueError("logits and token_ids come together: give both or neither")
    sequence = _sequences(train_log_prob, cu_seqlens)
    train, rollout = (_flat(x) for x in (train_log_prob, rollout_log_prob))
    keep = mask.cpu().flatten()
    found: list[Label] = []

    placeholder, zeros = _placeholder(train, rollout, keep & _there(train) & _there(rollout))
    found += placeholder
    rollout = rollout.masked_fill(zeros, torch.nan)
    shifted, lag = _shifted(train, rollout, keep, sequence)
    found += shifted
    rollout = _late(rollout, keep, sequence, lag)
    valid = keep & _there(train) & _there(rollout)
    train, rollout = train[valid], rollout[valid]
    if len(train) < MIN_TOKENS:
        few = f"{len(train)} tokens have both log-probs; {MIN_TOKENS} are needed to judge"
        return Provenance(
            labels=tuple(found), tokens=len(train), temperature_ratio=1.0, kept_mass=1.0, lag=lag, unknown=(few,)
        )
    if logits is not None and token_ids is not None:
        table = LogitTable(logits.detach().cpu().flatten(0, -2)[valid], token_ids.detach().cpu().flatten()[valid])
        judged = _from_logits(train[table.rows], rollout[table.rows], table)
    elif tempered is not None:
        judged = _from_temperatures(train, rollout, {t: _flat(x)[valid] for t, x in tempered.items()})
    else:
        judged = _from_pairs(train, rollout)
    labels = found + judged.labels
    if any(label.remedy for label in labels):
        labels = [label for label in labels if label.name != "matched"]
    return Provenance(
        labels=tuple(labels),
        tokens=len(train),
        temperature_ratio=judged.temperature_ratio,
        kept_mass=judged.kept_mass,
        lag=lag,
        unknown=tuple(judged.unknown),
    )


@dataclass
class _Judged:
    labels: list[Label] = field(default_factory=list)
    temperature_ratio: float = 1.0
    kept_mass: float = 1.0
    unknown: list[str] = field(default_factory=list)


def _from_pairs(train: Tensor, rollout: Tensor) -> _Judged:
    """Log-probs alone: a temperature from the crowds, a truncation from certainty or lost mass, honesty from E[ρ]."""
    judged = _Judged()
    judged.labels += _truncation(train, rollout, judged)
    tempered = _temperature(train, rollout, judged, truncated=bool(judged.labels))
    judged.labels = tempered + judged.labels
    if not judged.labels:
        judged.labels.append(_no_pattern(train, rollout))
        judged.unknown.append(
            "whether the tokens were sampled from these log-probs: raw log-probs of a tempered or truncated sampler "
            "match a trainer that does neither; give logits, or compare with the sampling settings"
        )
    elif tempered:
        judged.unknown.append("the temperatures themselves: only their ratio shows; the trainer's own times the ratio")
    if any(label.name == "truncated" for label in judged.labels):
        judged.unknown.append("which of top-k, top-p and min-p truncated, and with what limit")
        if not tempered:
            judged.unknown.append("a temperature next to the truncation, unless unlikely tokens show it; give logits")
    return judged


def _from_temperatures(train: Tensor, rollout: Tensor, tempered: Mapping[float, Tensor]) -> _Judged:
    """The trainer's log-probs at several temperatures: the one that explains each side best, then as for pairs."""
    own = min(tempered, key=lambda t: spread(train, tempered[t]))
    temperature = min(tempered, key=lambda t: spread(rollout, tempered[t]))
    if not _better(rollout, tempered[temperature], tempered[own]):
        temperature = own
    judged = _at_temperature(tempered[temperature], rollout, rollout_beta=1 / temperature, train_beta=1 / own)
    judged.unknown.append("temperatures between those given; whether the tokens were sampled from them: give logits")
    return judged


def _from_logits(train: Tensor, rollout: Tensor, table: LogitTable) -> _Judged:
    """Logits: both temperatures by fit, the kept mass from the rest, and whether what was reported was sampled."""
    beta, own = table.fit(rollout), table.fit(train)
    if abs(beta / own - 1) < EXPONENT or not _better(rollout, table.log_prob(beta), table.log_prob(own)):
        beta = own
    judged = _at_temperature(table.log_prob(beta), rollout, rollout_beta=beta, train_beta=own)
    if judged.kept_mass < 1:
        judged.labels.append(processed_label("its log-probs are truncated, as its samples are", 1.0, {}))
        return judged
    surprise, z = mean_and_z(table.entropy(beta) + table.log_prob(beta))
    sampled = table.sampled_exponent()
    evidence = {
        "entropy_minus_surprise": surprise,
        "z": z,
        "reported_temperature": 1 / beta,
        "sampled_temperature": 1 / sampled,
    }
    if abs(z) < Z or abs(surprise) < SURPRISE:
        judged.labels.append(
            processed_label("the tokens look sampled from the log-probs reported", confidence_of(Z), evidence)
        )
        return judged
    judged.labels = [label for label in judged.labels if label.name != "matched"]
    says = (
        f"the tokens were not sampled from the log-probs reported: they look like temperature "
        f"{format_number(1 / sampled)} (or a truncation), the log-probs are those of {format_number(1 / beta)}"
    )
    judged.labels.append(raw_label(says, z, evidence))
    return judged


def _better(rollout: Tensor, other: Tensor, own: Tensor) -> bool:
    """Whether another temperature explains the rollout clearly better than the trainer's own; few must do more."""
    telling = max(int((rollout < CERTAIN).sum()), 1)
    return spread(rollout, other) < (CLEARLY - telling**-0.5) * spread(rollout, own)


def _at_temperature(at_fit: Tensor, rollout: Tensor, *, rollout_beta: float, train_beta: float) -> _Judged:
    """Labels once both temperatures are known; `at_fit` are the trainer's log-probs at the rollout's."""
    judged = _Judged()
    ratio = train_beta / rollout_beta
    if abs(ratio - 1) >= EXPONENT:
        judged.temperature_ratio = ratio
        evidence = {
            "temperature_ratio": ratio,
            "rollout_temperature": 1 / rollout_beta,
            "train_temperature": 1 / train_beta,
            "residual": float((rollout - at_fit).abs().mean()),
        }
        says = (
            f"the rollout's log-probs are at temperature {format_number(1 / rollout_beta)}, "
            f"the trainer's at {format_number(1 / train_beta)}"
        )
        judged.labels.append(tempered_label(says, len(rollout) ** 0.5, evidence))
    judged.labels += _truncation(at_fit, rollout, judged)
    if not judged.labels:
        judged.labels.append(_no_pattern(at_fit, rollout))
    return judged


def _temperature(train: Tensor, rollout: Tensor, judged: _Judged, *, truncated: bool) -> list[Label]:
    """Another temperature on one side, and whether the rollout's log-probs are those of its sampler."""
    sharper = crowds(train, rollout)
    rollout_is_sharper = sharper.share_up >= 0.5
    seen = sharper if rollout_is_sharper else crowds(rollout, train)
    if seen.likely < FEW and not truncated:
        line = slope(train, rollout)
        if abs(line.exponent - 1) >= EXPONENT and line.z >= Z:
            ratio = 1 / line.exponent
            says = f"the rollout's temperature is {format_number(ratio)} times the trainer's, or further off"
            return _tempered(train, rollout, judged, ratio, line.z, says, {"slope": line.exponent})
    if not seen.likely:
        judged.unknown.append("the temperature: no token leaves a choice")
        return []
    z = (2 * seen.share_up - 1) * seen.likely**0.5
    # A truncation lifts likely tokens as well; only unlikely ones that fell speak for a temperature beside it.
    beside = seen.unlikely >= FEW and seen.unlikely_p80 >= 1 + EXPONENT
    if not _is_temperature(seen) or z < Z - 0.5 or (truncated and not beside):
        return []
    exponent = seen.unlikely_p80 if truncated else seen.exponent
    ratio = 1 / exponent if rollout_is_sharper else exponent
    evidence = {
        "share_one_sided": seen.share_up,
        "violations": seen.violations,
        "likely_tokens": float(seen.likely),
        "unlikely_tokens": float(seen.unlikely),
    }
    bound = "at most " if rollout_is_sharper and (truncated or seen.unlikely < FEW) else ""
    says = f"the rollout's temperature is {bound}{format_number(ratio)} times the trainer's"
    labels = _tempered(train, rollout, judged, ratio, z, says, evidence)
    return labels[:1] if truncated else labels


def _tempered(
    train: Tensor, rollout: Tensor, judged: _Judged, ratio: float, z: float, says: str, shown: Mapping[str, float]
) -> list[Label]:
    """The label of a temperature, and what the mean ratio says about which side the tokens follow."""
    judged.temperature_ratio = ratio
    excess, honest_z = mean_and_z((train - rollout).exp() - 1)
    evidence = {"temperature_ratio": ratio, **shown, "mean_ratio": 1 + excess, "mean_ratio_z": honest_z}
    labels = [tempered_label(says, z, evidence)]
    if excess > 0 and honest_z >= Z - 1:  # E_μ[ρ] = 1 for any trainer, if μ sampled
        says = f"the mean ratio is {format_number(1 + excess)}: the tokens follow the trainer's distribution instead"
        labels.append(raw_label(says, honest_z, evidence))
    elif honest_z > -Z or excess > -MASS_LOST:
        labels.append(
            processed_label("the mean ratio is 1: the tokens follow the log-probs reported", confidence_of(Z), {})
        )
    return labels


def _truncation(train: Tensor, rollout: Tensor, judged: _Judged) -> list[Label]:
    """A softmax over fewer tokens on one side: certainty where the other side sees a choice, or mass that is lost."""
    labels = []
    for side, base, other in (("rollout", train, rollout), ("trainer", rollout, train)):
        certain = certain_share(base, other)
        lost, z = mean_and_z(1 - (base - other).exp())
        choice = logit(base).abs() < 7
        higher = float((other > base)[choice].double().mean()) if choice.any() else 0.0
        light = float((base - other).max()) < 1.5  # otherwise the mean ratio is a matter of a few tokens
        by_mass = (
            lost >= MASS_LOST and z >= Z + 2 and higher >= HIGHER and light and not _is_temperature(crowds(base, other))
        )
        if certain < CERTAIN_SHARE and not by_mass:
            continue
        mass = 1 - lost
        if side == "rollout":
            judged.kept_mass = min(mass, 1.0)
        evidence = {"certain_share": certain, "kept_mass": mass, "mass_z": z, "share_one_sided": higher}
        says = (
            f"the {side}'s log-probs are over a truncated vocabulary: kept mass {format_number(mass)} on average, "
            f"{certain:.1%} of tokens left without a choice"
        )
        remedy = (
            "replay the engine's kept sets on the trainer (support 'replayed'), subtract the log of the kept mass, or "
            "sample with top_p=1, top_k=-1, min_p=0"
            if side == "rollout"
            else "score over the whole vocabulary on the trainer, for the rollout's log-probs are"
        )
        confidence = confidence_of(max(z, certain / math.sqrt(max(certain, 1e-9) / len(base))))
        labels.append(Label(name="truncated", says=says, confidence=confidence, evidence=evidence, remedy=remedy))
    return labels


def _is_temperature(seen: Crowds) -> bool:
    """Whether likely tokens rose by one exponent while unlikely ones fell: a truncation lifts both."""
    fell = seen.unlikely < FEW or seen.unlikely_p80 >= 1 + EXPONENT / 2
    return seen.share_up >= ONE_SIDED and seen.exponent >= 1 + EXPONENT and seen.violations <= 0.35 and fell


def _placeholder(train: Tensor, rollout: Tensor, valid: Tensor) -> tuple[list[Label], Tensor]:
    """Exact zeros that have nothing to do with how sure the trainer was; and where they are."""
    zeros = valid & (rollout == 0)
    none = torch.zeros_like(zeros)
    count, total = int(zeros.sum()), int(valid.sum())
    if count < 2:
        return [], none
    doubted = train[zeros] < -1  # a sampler with one token left was sure of it, and so is the trainer, more or less
    expected = float((train[valid] < -1).double().mean())
    share = float(doubted.double().mean())
    if int(doubted.sum()) < 2 or share < 0.5 * expected:
        return [], none
    evidence = {"zero_share": count / total, "doubted_share": share, "doubted_share_of_all": expected}
    says = f"{count} of {total} rollout log-probs are exactly 0 whatever the trainer thinks: filled in, or greedy"
    remedy = "store NaN for what is missing; have the engine return log-probs of the tokens that it samples"
    z = float(doubted.sum()) ** 0.5
    label = Label(name="placeholder", says=says, confidence=confidence_of(z), evidence=evidence, remedy=remedy)
    return [label], zeros


def _shifted(train: Tensor, rollout: Tensor, keep: Tensor, sequence: Tensor) -> tuple[list[Label], int]:
    """The lag, of −1, 0 and 1, at which the two sides go together."""
    by_lag = {}
    for lag in (0, -1, 1):
        moved = _late(rollout, keep, sequence, lag)
        pairs = keep & _there(train) & _there(moved)
        if int(pairs.sum()) < MIN_TOKENS:
            return [], 0
        by_lag[lag] = correlation(train[pairs], moved[pairs])
    lag = max(by_lag, key=lambda k: by_lag[k])
    if lag == 0 or by_lag[lag] < 0.6 or by_lag[lag] - by_lag[0] < 0.3:
        return [], 0
    evidence = {"lag": float(lag), **{f"correlation_at_{k}": value for k, value in by_lag.items()}}
    z = (math.atanh(min(by_lag[lag], 0.9999)) - math.atanh(by_lag[0])) * math.sqrt(int(keep.sum()))
    says = f"the rollout's log-probs are {'late' if lag > 0 else 'early'} by one token"
    remedy = "log-prob t must be that of token t given the tokens before it; cut the first or last one"
    label = Label(name="shifted", says=says, confidence=confidence_of(z), evidence=evidence, remedy=remedy)
    return [label], lag


def _late(values: Tensor, keep: Tensor, sequence: Tensor, lag: int) -> Tensor:
    """Values moved so that entry t is that of t + lag in the same sequence; NaN where there is none."""
    if lag == 0:
        return values
    moved = values.roll(-lag)
    same = (sequence.roll(-lag) == sequence) & keep.roll(-lag)
    if len(same):
        same[-1 if lag > 0 else 0] = False
    return moved.masked_fill(~same, torch.nan)


def _no_pattern(train: Tensor, rollout: Tensor) -> Label:
    difference = train - rollout
    evidence = {"std": float(difference.std()), "abs_mean": float(difference.abs().mean())}
    if evidence["std"] <= LARGE:
        says = f"the same up to a log-ratio of standard deviation {format_number(evidence['std'])}"
        return Label(name="matched", says=says, confidence=confidence_of(len(train) ** 0.5), evidence=evidence)
    says = (
        f"standard deviation {format_number(evidence['std'])} nats of the log-ratio, without the pattern of a setting"
    )
    remedy = "look for other weights, another prompt template, or a policy that has moved on"
    return Label(name="unexplained", says=says, confidence=0.5, evidence=evidence, remedy=remedy)


def _there(log_prob: Tensor) -> Tensor:
    return log_prob.isfinite() & (log_prob != SENTINEL) & (log_prob <= -CERTAIN)


def _flat(log_prob: Tensor) -> Tensor:
    return log_prob.detach().cpu().flatten().double()


def _sequences(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        return sequence_ids(tokens, cu_seqlens=cu_seqlens).cpu()
    rows = torch.arange(tokens.shape[0], device="cpu").unsqueeze(-1)
    return rows.expand(tokens.shape).flatten()
