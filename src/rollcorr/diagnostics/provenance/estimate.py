"""Logs of unknown origin: what the log-probs themselves say about the sampling behind them.

`estimate_provenance` compares the trainer's and the rollout's log-probs of the same sampled tokens and says what it
finds: another temperature, a truncation, log-probs of something that was not sampled, of other tokens or requests, in
other units, placeholders, tokens that nobody sampled, another prompt. A cause is judged on the rows that show it, then
the other rows are judged without them. Each finding has its evidence and a confidence. What the inputs cannot tell is
said in `unknown`; docs/guides/sampling.md has the list. With the trainer's logits more can be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.core.layout import check_layout, sequence_ids
from rollcorr.diagnostics.faults import is_cause
from rollcorr.diagnostics.numbers import format_number
from rollcorr.diagnostics.provenance.misreported import undo_misreported
from rollcorr.diagnostics.provenance.mixtures import find_groups
from rollcorr.diagnostics.provenance.odd_values import find_odd_values
from rollcorr.diagnostics.provenance.pair_rows import PairRows, extent
from rollcorr.diagnostics.provenance.pairs import CERTAIN, LogitTable, mean_and_z, spread
from rollcorr.diagnostics.provenance.patterns import (
    EXPONENT,
    MIN_TOKENS,
    Judgment,
    Z,
    find_temperature,
    find_truncation,
    no_pattern,
)
from rollcorr.diagnostics.provenance.places import find_early, find_impossible, find_turn_drift
from rollcorr.diagnostics.provenance.provenance_findings import (
    Provenance,
    confidence_of,
    provenance_finding,
)
from rollcorr.diagnostics.provenance.storage import find_storage

SURPRISE = 0.02
"""Nats by which sampled tokens must be likelier than the policy's entropy says, before it is denied that it sampled."""
CLEARLY = 0.92
"""Spread of the residual at another temperature over that at the trainer's own, below which the other is believed."""


def estimate_provenance(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    tempered: Mapping[float, Tensor] | None = None,
    logits: Tensor | None = None,
    token_ids: Tensor | None = None,
    steps: Tensor | None = None,
) -> Provenance:
    """Say what two log-probs of the same sampled tokens are log-probs of.

    Args:
        train_log_prob: the trainer's, nats. (B, T), or (N,) with `cu_seqlens`.
        rollout_log_prob: the engine's, of the same tokens. NaN, −inf and −9999 are missing.
        mask: true on sampled tokens, same shape; None for all.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        tempered: the trainer's log-probs by temperature, instead of logits; the best of those temperatures is taken.
        logits: the trainer's, undivided, (…, V) over the same tokens, with `token_ids`. Fits both temperatures, and
            tells whether the tokens were sampled from what the engine reports.
        token_ids: the sampled tokens, same shape as the log-probs. Needed with logits. Alone they bound the size of
            the vocabulary, and with it how unlikely a sampled token can be.
        steps: the training step of each sequence, (B,), where known: findings say with which step they begin.

    Returns:
        Findings with evidence, and what could not be told. Reads values: for diagnosis, not for the step path.

    Raises:
        ValueError: shapes differ, logits come without token ids, or there is not one step for each sequence.
    """
    mask = torch.ones_like(train_log_prob, dtype=torch.bool) if mask is None else mask != 0
    check_layout(train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob, mask=mask, cu_seqlens=cu_seqlens)
    if logits is not None and token_ids is None:
        raise ValueError("logits and token_ids come together: give both or neither")
    if token_ids is not None and token_ids.shape != train_log_prob.shape:
        raise ValueError(f"token_ids {tuple(token_ids.shape)} and log-probs {tuple(train_log_prob.shape)} differ")
    recorded = _rows(train_log_prob, rollout_log_prob, mask, cu_seqlens, steps)

    # What was misreported is undone first, so that what follows compares the log-probs of the same tokens.
    stored = find_storage(recorded)
    undone = undo_misreported(recorded)
    odd, values = find_odd_values(undone.pairs)
    found, pairs = [*undone.findings, *odd], values
    vocabulary = None if token_ids is None or not token_ids.numel() else int(token_ids.max()) + 1
    for find in (lambda rows: find_impossible(rows, vocabulary), find_early, find_turn_drift):
        more, pairs = find(pairs)
        found += more

    valid = pairs.valid
    count = int(valid.sum())
    if count < MIN_TOKENS:
        judged = Judgment(unknown=[f"{count} tokens have both log-probs; {MIN_TOKENS} are needed to judge"])
    elif logits is not None and token_ids is not None:
        table = LogitTable(logits.detach().cpu().flatten(0, -2)[valid], token_ids.detach().cpu().flatten()[valid])
        judged = _from_logits(pairs.train[valid][table.rows], pairs.rollout[valid][table.rows], table)
    elif tempered is not None:
        others = {t: _flat(x)[valid] for t, x in tempered.items()}
        judged = _from_temperatures(pairs.train[valid], pairs.rollout[valid], others)
    else:
        judged = _from_rows(pairs)

    return Provenance(
        findings=tuple(_ranked([*found, *judged.findings, *stored])),
        tokens=count,
        temperature_ratio=judged.temperature_ratio,
        kept_mass=judged.kept_mass,
        lag=undone.lag,
        unknown=tuple(judged.unknown),
        misreported=_changed(recorded, values),
        of_settings=judged.certain_rows,
        zeros_left=int(undone.pairs.contradicted_zeros.sum()) if recorded.contradicted_zeros.any() else None,
    )


def _changed(before: PairRows, after: PairRows) -> Tensor:
    """Tokens that were left out, or whose value on a side became another one or none, (N,)."""
    changed = before.keep & ~after.keep
    for old, new in ((before.train, after.train), (before.rollout, after.rollout)):
        changed |= (old != new) & ~(old.isnan() & new.isnan())
    return changed


def _rows(train: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor | None, steps: Tensor | None) -> PairRows:
    """Both sides as rows, on the CPU."""
    row = _sequences(train, cu_seqlens)
    rows = int(train.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1)
    if steps is not None and steps.shape != (rows,):
        raise ValueError(f"steps {tuple(steps.shape)} need one entry for each of {rows} sequences")
    step = None if steps is None else steps.detach().cpu()
    count = torch.bincount(row, minlength=rows)
    first = count.cumsum(0) - count
    position = torch.arange(len(row), device="cpu") - first[row]
    return PairRows(_flat(train), _flat(rollout), mask.cpu().flatten(), row, position, rows, step)


def _ranked(findings: list[Finding]) -> list[Finding]:
    """Causes in the order in which they were found, then remarks; "matched" beside a cause would mislead."""
    named = [finding for finding in findings if finding.severity != "note"]
    notes = [finding for finding in findings if finding.severity == "note"]
    if any(map(is_cause, named)):
        notes = _without_matched(notes)
        named = [finding for finding in named if finding.code != "unexplained"]
    return named + notes


def _from_rows(pairs: PairRows) -> Judgment:
    """Log-probs alone: rows with settings of their own first, then what the others show."""
    groups = find_groups(pairs)
    rest = groups.pairs
    valid = rest.valid
    judged = groups.judged
    judged.certain_rows = groups.certain
    if int(valid.sum()) < MIN_TOKENS:
        judged.findings = groups.findings
        return judged
    of_rest = _from_pairs(rest.train[valid], rest.rollout[valid])
    here = extent(pairs, rest.count(valid) > 0, valid)
    here |= {"first_row": None, "first_step": None, "steps": None}  # judged together: which rows show it is not known
    findings = [replace(f, **here) if is_cause(f) else f for f in of_rest.findings]
    if not groups.findings:
        of_rest.findings = findings
        return of_rest

    # The rest is described only if it shows a cause of its own.
    judged.findings = groups.findings + list(filter(is_cause, findings))
    if judged.temperature_ratio == 1.0:
        judged.temperature_ratio = of_rest.temperature_ratio
    if judged.kept_mass == 1.0:
        judged.kept_mass = of_rest.kept_mass
    judged.unknown += of_rest.unknown
    return judged


def _from_pairs(train: Tensor, rollout: Tensor) -> Judgment:
    """Log-probs alone: a temperature from the crowds, a truncation from certainty or lost mass, honesty from E[ρ]."""
    judged = Judgment()
    truncated = find_truncation(train, rollout, judged)
    tempered = find_temperature(train, rollout, judged, truncated=bool(truncated))
    judged.findings = tempered + truncated
    if not judged.findings:
        judged.findings.append(no_pattern(train, rollout))
        judged.unknown.append(
            "whether the tokens were sampled from these log-probs: raw log-probs of a tempered or truncated sampler "
            "match a trainer that does neither; give logits, or compare with the sampling settings"
        )
    elif tempered:
        judged.unknown.append("the temperatures themselves: only their ratio shows; the trainer's own times the ratio")
    if truncated:
        judged.unknown.append("which of top-k, top-p and min-p truncated, and with what limit")
        if not tempered:
            judged.unknown.append("a temperature next to the truncation, unless unlikely tokens show it; give logits")
    return judged


def _from_temperatures(train: Tensor, rollout: Tensor, tempered: Mapping[float, Tensor]) -> Judgment:
    """The trainer's log-probs at several temperatures: the one that explains each side best, then as for pairs."""
    own = min(tempered, key=lambda t: spread(train, tempered[t]))
    temperature = min(tempered, key=lambda t: spread(rollout, tempered[t]))
    if not _better(rollout, tempered[temperature], tempered[own]):
        temperature = own
    judged = _at_temperature(tempered[temperature], rollout, rollout_beta=1 / temperature, train_beta=1 / own)
    judged.unknown.append("temperatures between those given; whether the tokens were sampled from them: give logits")
    return judged


def _from_logits(train: Tensor, rollout: Tensor, table: LogitTable) -> Judgment:
    """Logits: both temperatures by fit, the kept mass from the rest, and whether what was reported was sampled."""
    beta, own = table.fit(rollout), table.fit(train)
    if abs(beta / own - 1) < EXPONENT or not _better(rollout, table.log_prob(beta), table.log_prob(own)):
        beta = own
    judged = _at_temperature(table.log_prob(beta), rollout, rollout_beta=beta, train_beta=own)
    if judged.kept_mass < 1:
        reason = "its log-probs are truncated, as its samples are"
        judged.findings.append(provenance_finding("processed", reason, 1.0))
        return judged

    # Tokens sampled from the log-probs reported are as surprising, on average, as their entropy says.
    surprise, z = mean_and_z(table.entropy(beta) + table.log_prob(beta))
    sampled = table.sampled_exponent()
    evidence = {
        "entropy_minus_surprise": surprise,
        "z": z,
        "reported_temperature": 1 / beta,
        "sampled_temperature": 1 / sampled,
    }
    if abs(z) < Z or abs(surprise) < SURPRISE:
        reason = "the tokens look sampled from the log-probs reported"
        judged.findings.append(provenance_finding("processed", reason, confidence_of(Z), evidence))
        return judged
    reason = (
        f"the tokens were not sampled from the log-probs reported: they look like temperature "
        f"{format_number(1 / sampled)} (or a truncation), the log-probs are those of {format_number(1 / beta)}"
    )
    raw = provenance_finding("raw", reason, confidence_of(z), evidence)
    judged.findings = [*_without_matched(judged.findings), raw]
    return judged


def _better(rollout: Tensor, other: Tensor, own: Tensor) -> bool:
    """Whether another temperature explains the rollout clearly better than the trainer's own; few must do more."""
    telling = max(int((rollout < CERTAIN).sum()), 1)
    return spread(rollout, other) < (CLEARLY - telling**-0.5) * spread(rollout, own)


def _at_temperature(at_fit: Tensor, rollout: Tensor, *, rollout_beta: float, train_beta: float) -> Judgment:
    """What shows once both temperatures are known; `at_fit` are the trainer's log-probs at the rollout's."""
    judged = Judgment()
    ratio = train_beta / rollout_beta
    if abs(ratio - 1) >= EXPONENT:
        judged.temperature_ratio = ratio
        evidence = {
            "temperature_ratio": ratio,
            "rollout_temperature": 1 / rollout_beta,
            "train_temperature": 1 / train_beta,
            "residual": float((rollout - at_fit).abs().mean()),
        }
        reason = (
            f"the rollout's log-probs are at temperature {format_number(1 / rollout_beta)}, "
            f"the trainer's at {format_number(1 / train_beta)}"
        )
        judged.findings.append(provenance_finding("tempered", reason, confidence_of(len(rollout) ** 0.5), evidence))
    judged.findings += find_truncation(at_fit, rollout, judged)
    if not judged.findings:
        judged.findings.append(no_pattern(at_fit, rollout))
    return judged


def _without_matched(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.code != "matched"]


def _flat(log_prob: Tensor) -> Tensor:
    return log_prob.detach().cpu().flatten().double()


def _sequences(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        return sequence_ids(tokens, cu_seqlens=cu_seqlens).cpu()
    return torch.arange(tokens.shape[0], device="cpu").unsqueeze(-1).expand(tokens.shape).flatten()
