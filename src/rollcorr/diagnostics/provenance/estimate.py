"""Logs of unknown origin: what the log-probs themselves say about the sampling behind them.

`estimate_provenance` compares the trainer's and the rollout's log-probs of the same sampled tokens and says what it
finds: another temperature, a truncation, log-probs of something that was not sampled, of other tokens or requests, in
other units, placeholders, tokens that nobody sampled, another prompt. A cause is judged on the rows that show it, then
the other rows are judged without them. Each finding has its evidence and a confidence. docs/guides/sampling.md lists
what log-probs cannot tell.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.core.layout import check_layout, sequence_ids
from rollcorr.diagnostics.faults import is_cause
from rollcorr.diagnostics.provenance.misreported import undo_misreported
from rollcorr.diagnostics.provenance.mixtures import Groups, find_groups
from rollcorr.diagnostics.provenance.odd_values import find_odd_values
from rollcorr.diagnostics.provenance.pair_rows import PairRows, extent
from rollcorr.diagnostics.provenance.patterns import MIN_TOKENS, find_temperature, find_truncation, no_pattern
from rollcorr.diagnostics.provenance.places import find_early, find_impossible, find_turn_drift
from rollcorr.diagnostics.provenance.provenance_findings import Provenance
from rollcorr.diagnostics.provenance.storage import find_storage


def estimate_provenance(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    token_ids: Tensor | None = None,
    steps: Tensor | None = None,
) -> Provenance:
    """Say what two log-probs of the same sampled tokens are log-probs of.

    Args:
        train_log_prob: the trainer's, nats. (B, T), or (N,) with `cu_seqlens`.
        rollout_log_prob: the engine's, of the same tokens. NaN, −inf and −9999 are missing.
        mask: true on sampled tokens, same shape; None for all.
        cu_seqlens: (B + 1,) token offsets, only when packed.
        token_ids: the sampled tokens, same shape as the log-probs. They bound the size of the vocabulary, and with it
            how unlikely a sampled token can be.
        steps: the training step of each sequence, (B,), where known: findings say with which step they begin.

    Returns:
        Findings with evidence. Reads values: for diagnosis, not for the step path.

    Raises:
        ValueError: shapes differ, or there is not one step for each sequence.
    """
    mask = torch.ones_like(train_log_prob, dtype=torch.bool) if mask is None else mask != 0
    check_layout(train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob, mask=mask, cu_seqlens=cu_seqlens)
    if token_ids is not None and token_ids.shape != train_log_prob.shape:
        raise ValueError(f"token_ids {tuple(token_ids.shape)} and log-probs {tuple(train_log_prob.shape)} differ")
    vocabulary = None if token_ids is None or not token_ids.numel() else int(token_ids.max()) + 1
    recorded = replace(_rows(train_log_prob, rollout_log_prob, mask, cu_seqlens, steps), vocabulary=vocabulary)

    # What was misreported is undone first, so that what follows compares the log-probs of the same tokens.
    stored = find_storage(recorded)
    undone = undo_misreported(recorded)
    odd, values = find_odd_values(undone.pairs)
    found, pairs = [*undone.findings, *odd], values
    for find in (find_impossible, find_early, find_turn_drift):
        more, pairs = find(pairs)
        found += more

    groups = find_groups(pairs)
    return Provenance(
        findings=tuple(_ranked([*found, *groups.findings, *_of_rest(pairs, groups), *stored])),
        tokens=int(pairs.valid.sum()),
        misreported=_changed(recorded, values),
        of_settings=groups.certain,
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
        notes = [finding for finding in notes if finding.code != "matched"]
        named = [finding for finding in named if finding.code != "unexplained"]
    return named + notes


def _of_rest(pairs: PairRows, groups: Groups) -> list[Finding]:
    """What the rows without settings of their own show; beside such rows, only causes."""
    rest = groups.pairs
    valid = rest.valid
    if int(valid.sum()) < MIN_TOKENS:
        return []
    train, rollout = rest.train[valid], rest.rollout[valid]
    truncated = find_truncation(train, rollout, vocabulary=pairs.vocabulary)
    found = find_temperature(train, rollout, truncated=bool(truncated)) + truncated or [no_pattern(train, rollout)]

    # They are judged together: which rows show it is not known.
    here = extent(pairs, rest.count(valid) > 0, valid)
    here |= {"first_row": None, "first_step": None, "steps": None}
    causes = [replace(finding, **here) for finding in found if is_cause(finding)]
    return causes if groups.findings else [*causes, *(finding for finding in found if not is_cause(finding))]


def _flat(log_prob: Tensor) -> Tensor:
    return log_prob.detach().cpu().flatten().double()


def _sequences(tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        return sequence_ids(tokens, cu_seqlens=cu_seqlens).cpu()
    return torch.arange(tokens.shape[0], device="cpu").unsqueeze(-1).expand(tokens.shape).flatten()
