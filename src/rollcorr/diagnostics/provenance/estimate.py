"""Estimate the sampling settings of logs of unknown origin from the log-probs.

`estimate_provenance` compares the trainer's and the rollout's log-probs of the same sampled tokens. It detects a
temperature, a truncation, log-probs of a distribution that was not sampled from, of other tokens or requests, in other
units, placeholders, tokens that the policy did not sample, and a different prompt. Each cause is judged on the rows
that show it; the remaining rows are judged without them. Each finding contains its evidence and a confidence.
docs/guides/sampling.md lists the causes that log-probs cannot distinguish.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.core.layout import check_layout, sequence_ids
from rollcorr.diagnostics.faults import is_cause
from rollcorr.diagnostics.provenance.misreported import undo_misreported
from rollcorr.diagnostics.provenance.odd_values import find_odd_values
from rollcorr.diagnostics.provenance.pair_rows import ROW_TOKENS, PairRows, extent
from rollcorr.diagnostics.provenance.pairs import CERTAIN, FEW, LIKELY, UNCERTAIN, logit
from rollcorr.diagnostics.provenance.patterns import EXPONENT, MIN_TOKENS, find_temperature, find_truncation, no_pattern
from rollcorr.diagnostics.provenance.places import find_early, find_impossible, find_turn_drift
from rollcorr.diagnostics.provenance.provenance_findings import SURE, Provenance
from rollcorr.diagnostics.provenance.storage import find_storage

MOST = 0.8
"""Share of the rows above which a group counts as the full log, and is not split off."""
MIXTURE_EXPONENT = 0.1
"""Smallest |β − 1| reported as a temperature of a subset of rows: selecting the rows already biases β away from 1."""


def estimate_provenance(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    token_ids: Tensor | None = None,
    steps: Tensor | None = None,
) -> Provenance:
    """Estimate the sampling settings and data faults behind two log-probs of the same sampled tokens.

    Args:
        train_log_prob: the trainer's log-probs, nats. (B, T), or (N,) with `cu_seqlens`.
        rollout_log_prob: the engine's log-probs of the same tokens, nats, same shape. NaN, −inf and −9999 are missing.
        mask: true on sampled tokens, same shape; defaults to all tokens.
        cu_seqlens: token offsets, (B + 1,) int; only when packed.
        token_ids: ids of the sampled tokens, same shape as the log-probs; optional. They bound the vocabulary's size,
            and with it the smallest probability of a sampled token.
        steps: training step of each sequence, (B,); optional. With it, findings name the step at which they begin.

    Returns:
        Findings with evidence. Reads tensor values: for diagnosis, not for the step path.

    Raises:
        ValueError: shapes differ, or `steps` does not contain one step per sequence.
    """
    mask = torch.ones_like(train_log_prob, dtype=torch.bool) if mask is None else mask != 0
    check_layout(train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob, mask=mask, cu_seqlens=cu_seqlens)
    if token_ids is not None and token_ids.shape != train_log_prob.shape:
        raise ValueError(f"token_ids {tuple(token_ids.shape)} and log-probs {tuple(train_log_prob.shape)} differ")
    vocabulary = None if token_ids is None or not token_ids.numel() else int(token_ids.max()) + 1
    recorded = replace(_pack_pairs(train_log_prob, rollout_log_prob, mask, cu_seqlens, steps), vocabulary=vocabulary)

    # Undo misreported values first, so that later tests compare log-probs of the same tokens.
    stored = find_storage(recorded)
    undone = undo_misreported(recorded)
    odd, values = find_odd_values(undone.pairs)
    found, pairs = [*undone.findings, *odd], values
    for find in (find_impossible, find_early, find_turn_drift):
        more, pairs = find(pairs)
        found += more

    # A token changed if it was removed, or if its value changed or became NaN on either side.
    changed = recorded.keep & ~values.keep
    for old, new in ((recorded.train, values.train), (recorded.rollout, values.rollout)):
        changed |= (old != new) & ~(old.isnan() & new.isnan())
    groups = find_groups(pairs)
    return Provenance(
        findings=tuple(_ranked([*found, *groups.findings, *_findings_of_rest(pairs, groups), *stored])),
        tokens=int(pairs.valid.sum()),
        misreported=changed,
        of_settings=groups.certain,
        zeros_left=int(undone.pairs.contradicted_zeros.sum()) if recorded.contradicted_zeros.any() else None,
    )


def _pack_pairs(
    train: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor | None, steps: Tensor | None
) -> PairRows:
    """Pack both sides into rows, on the CPU."""
    if cu_seqlens is None:
        rows = train.shape[0]
        row = torch.arange(rows, device="cpu").unsqueeze(-1).expand(train.shape).flatten()
    else:
        rows, row = len(cu_seqlens) - 1, sequence_ids(train, cu_seqlens=cu_seqlens).cpu()
    if steps is not None and steps.shape != (rows,):
        raise ValueError(f"steps {tuple(steps.shape)} need one entry for each of {rows} sequences")
    step = None if steps is None else steps.detach().cpu()
    count = torch.bincount(row, minlength=rows)
    first = count.cumsum(0) - count
    position = torch.arange(len(row), device="cpu") - first[row]
    sides = [side.detach().cpu().flatten().double() for side in (train, rollout)]
    return PairRows(sides[0], sides[1], mask.cpu().flatten(), row, position, rows, step)


def _ranked(findings: list[Finding]) -> list[Finding]:
    """Return causes in the order of detection, then notes; drop "matched" and "unexplained" if there is a cause."""
    named = [finding for finding in findings if finding.severity != "note"]
    notes = [finding for finding in findings if finding.severity == "note"]
    if any(map(is_cause, named)):
        notes = [finding for finding in notes if finding.code != "matched"]
        named = [finding for finding in named if finding.code != "unexplained"]
    return named + notes


def _findings_of_rest(pairs: PairRows, groups: Groups) -> list[Finding]:
    """Return the findings of the rows outside all groups; only causes, not notes, if a group has a finding."""
    rest = groups.pairs
    valid = rest.valid
    if int(valid.sum()) < MIN_TOKENS:
        return []
    train, rollout = rest.train[valid], rest.rollout[valid]
    truncated = find_truncation(train, rollout, vocabulary=pairs.vocabulary)
    found = find_temperature(train, rollout, truncated=bool(truncated)) + truncated or [no_pattern(train, rollout)]

    # The rows are judged together, so the rows that show the cause are not known.
    here = extent(pairs, rest.count(valid) > 0, valid)
    here |= {"first_row": None, "first_step": None, "steps": None}
    causes = [replace(finding, **here) for finding in found if is_cause(finding)]
    return causes if groups.findings else [*causes, *(finding for finding in found if not is_cause(finding))]


@dataclass
class Groups:
    """Findings of groups of rows, and the rows outside these groups.

    Attributes:
        pairs: the rows not yet judged.
        findings: the groups' findings; empty by default.
        certain: true on tokens of rows whose group has a certain finding, (N,) bool; defaults to `None`: no such group.
    """

    pairs: PairRows
    findings: list[Finding] = field(default_factory=list)
    certain: Tensor | None = None


def find_groups(pairs: PairRows) -> Groups:
    """Find rows sampled at a different temperature than most rows, or over a truncated vocabulary.

    Returns:
        The findings of these rows, and the pairs without them.
    """
    groups = Groups(pairs)
    _truncated_rows(groups)
    _judge_tempered_rows(groups)
    return groups


def _truncated_rows(groups: Groups) -> None:
    """Judge rows with tokens of probability 1 on one side and clearly below 1 on the other."""
    pairs = groups.pairs
    valid = pairs.valid
    by_side = []
    for base, other in ((pairs.train, pairs.rollout), (pairs.rollout, pairs.train)):
        certain = valid & (other > CERTAIN) & (base < UNCERTAIN)
        by_side.append(pairs.count(certain))
    rollouts, trainers = by_side
    long_rows = pairs.count(valid) >= ROW_TOKENS
    for count, others in ((rollouts, trainers), (trainers, rollouts)):
        rows = long_rows & (count >= 1) & (count >= 0.01 * pairs.count(valid)) & (others == 0)
        whole = float(rows.sum()) >= MOST * float(long_rows.sum())
        if whole or float(count[rows].sum()) < 8:
            continue
        _judge_rows(groups, rows, partial(find_truncation, vocabulary=pairs.vocabulary))


def _judge_tempered_rows(groups: Groups) -> None:
    """Judge rows whose likely tokens nearly all have a higher log-prob on the same side."""
    pairs = groups.pairs
    valid = pairs.valid
    x, y = logit(pairs.train), logit(pairs.rollout)
    middle = (x + y) / 2
    likely = valid & (middle > LIKELY[0]) & (middle < LIKELY[1])
    count = pairs.count(likely)
    up = pairs.count(likely & (y > x))
    enough = count >= ROW_TOKENS
    if int(enough.sum()) < 4:
        return
    z = (2 * up - count) / count.clamp(min=1).sqrt()
    size = pairs.mean(((y - x) / middle).clamp(-1, 1), likely).abs()
    for side in (1, -1):
        hot = enough & (side * z >= 2.6) & (side * (2 * up / count.clamp(min=1) - 1) >= 0.6) & (size >= 0.04)
        share, rows = float(hot.sum()) / float(enough.sum()), int(hot.sum())
        if share >= MOST or rows < 2 or rows < 2 + 0.02 * float(enough.sum()):
            continue
        _judge_rows(groups, hot, _strong_temperature)


def _strong_temperature(train: Tensor, rollout: Tensor) -> list[Finding]:
    """Return a temperature finding if |β − 1| exceeds the bias that selecting rows can cause.

    The limit is higher with fewer than `FEW` unlikely tokens: then only the likely tokens bound β.
    """
    found = find_temperature(train, rollout)
    if not found:
        return []
    unlikely = found[0].evidence.get("unlikely_tokens", 0.0)
    least = MIXTURE_EXPONENT if unlikely >= FEW else 2 * MIXTURE_EXPONENT + EXPONENT
    return found if abs(found[0].evidence["temperature_ratio"] - 1) >= least else []


def _judge_rows(groups: Groups, rows: Tensor, find: Callable[[Tensor, Tensor], list[Finding]]) -> None:
    """Judge a subset of rows, record its findings in `groups`, and remove the subset from the pairs."""
    pairs = groups.pairs
    tokens = pairs.of_rows(rows) & pairs.valid
    if int(tokens.sum()) < 16:
        return
    found = find(pairs.train[tokens], pairs.rollout[tokens])
    if found:
        groups.findings += [replace(finding, **extent(pairs, rows, tokens)) for finding in found]
        groups.pairs = pairs.without(pairs.of_rows(rows))
        if any(finding.severity != "note" and (finding.confidence or 0.0) >= SURE for finding in found):
            whole = pairs.of_rows(rows)
            groups.certain = whole if groups.certain is None else groups.certain | whole
