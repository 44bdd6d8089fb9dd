"""A bounded, evenly spread sample of a log's sequences, for the estimate of provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.provenance.estimate import estimate_provenance
from rollcorr.diagnostics.provenance.provenance_findings import Provenance

FEW_IDS = 10.0
"""Ids in effect, (Σ n)² / Σ n², below which responses repeat themselves."""
MANY, ONE_EXPONENT = 100, 0.01
"""Likely and unlikely tokens, and the share of them off one exponent up to which it is a temperature whatever else the
responses lack: 0.001 under one, 0.03 and more under other weights, dropout or another prompt."""
TOKENS = 1 << 16
"""About how many tokens the sample holds: twice as many at most, and at least one sequence."""


class Context(NamedTuple):
    """What a token was sampled after: the prompt, and the response before it.

    Attributes:
        length: tokens of the prompt.
        seen: true on tokens whose id occurs in the prompt or earlier in the response, (c,).
        prefix: a hash of the prompt, its length, and the response up to and with the token, (c,) int64.
    """

    length: int
    seen: Tensor
    prefix: Tensor

    @classmethod
    def of(cls, prompt: Tensor, response: Tensor) -> Context:
        """Return the context of each token of a response, (c,), after a prompt, (p,)."""
        ids = torch.cat([prompt, response]).numpy().astype(np.uint64)
        _, first, number = np.unique(ids, return_index=True, return_inverse=True)
        seen = first[number.reshape(-1)] < np.arange(len(ids))

        # A polynomial in an odd number, modulo 2^64: equal for equal prefixes, and rarely for others.
        mixed = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        power = np.cumprod(np.full(len(ids), 0xBF58476D1CE4E5B9, dtype=np.uint64), dtype=np.uint64)
        begun = len(prompt)
        prefix = (np.cumsum(mixed * power, dtype=np.uint64) + np.uint64(begun)).view(np.int64)
        return cls(begun, torch.from_numpy(seen[begun:]), torch.from_numpy(prefix[begun:]))


class SampleRow(NamedTuple):
    """One sequence of the sample, masked tokens included: a token's position is its index.

    Attributes:
        train: log π as the log has it, (c,).
        rollout: log μ, (c,).
        mask: true on tokens that the policy sampled, (c,).
        response_ids: (c,) where the log has them.
        step: training step, where the log has it.
        prompt: ids of the prompt, (p,), where the log has them.
        context: of each token, once `located`.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    response_ids: Tensor | None = None
    step: int | None = None
    prompt: Tensor | None = None
    context: Context | None = None

    @property
    def known(self) -> NDArray[np.int64]:
        """Positions of the tokens that count: sampled, with both log-probs."""
        d = (self.train.double() - self.rollout).numpy()
        return np.flatnonzero(self.mask.numpy().astype(np.bool_) & np.isfinite(d) & (np.abs(d) < 100))

    @property
    def log_ratio(self) -> NDArray[np.float64]:
        """Log π − log μ of these tokens, nats."""
        d: NDArray[np.float64] = (self.train.double() - self.rollout).numpy()[self.known]
        return d

    def located(self) -> SampleRow:
        """The row with the context of its tokens, where it has the ids of prompt and response."""
        if self.prompt is None or self.response_ids is None:
            return self
        return self._replace(context=Context.of(self.prompt, self.response_ids))

    def within(self, steps: tuple[int, int]) -> bool:
        """Whether its step is one of these, from the first to the last."""
        return self.step is not None and steps[0] <= self.step <= steps[1]

    def copied(self) -> SampleRow:
        """The row without the batch that it is a view of."""
        ids = None if self.response_ids is None else self.response_ids.clone()
        return self._replace(
            train=self.train.clone(), rollout=self.rollout.clone(), mask=self.mask.clone(), response_ids=ids
        )


@dataclass(frozen=True, eq=False)
class PairSample:
    """Every k-th sequence of a log, k being the smallest power of 2 for which they are few enough.

    So the sample of a whole is the merged samples of its parts, however it was cut.

    Attributes:
        stride: k.
        rows: index of a sequence in the log → its log-probs and further columns; without those that have no valid
            token.
        held: their tokens.
    """

    stride: int = 1
    rows: Mapping[int, SampleRow] = field(default_factory=dict)
    held: int = 0

    @classmethod
    def of(
        cls,
        train: Tensor,
        rollout: Tensor,
        mask: Tensor,
        lengths: Tensor,
        *,
        first: int,
        stride: int = 1,
        response_ids: Tensor | None = None,
        steps: Tensor | None = None,
        prompts: Sequence[Tensor] | None = None,
        wanted: Tensor | None = None,
    ) -> PairSample:
        """The sample of a packed batch, and the index of its first sequence.

        A stride that the sample will have in the end, at least, saves the work for other rows.

        Args:
            train: log π, (N,).
            rollout: log μ, (N,).
            mask: true on sampled tokens, (N,).
            lengths: tokens of each sequence, (B,).
            first: index of the first sequence in the log.
            stride: of the sample so far.
            response_ids: (N,), where recorded.
            steps: (B,), where recorded.
            prompts: the ids of each prompt, where recorded.
            wanted: true on the sequences to sample from, (B,); None for all.
        """
        sizes = lengths.tolist()
        columns = [x.split(sizes) for x in (train, rollout, mask)]
        ids = [None] * len(sizes) if response_ids is None else response_ids.split(sizes)
        step_of = [None] * len(sizes) if steps is None else steps.tolist()
        parts = (SampleRow(*row) for row in zip(*columns, ids, step_of, strict=True))
        some = range(len(sizes)) if wanted is None else wanted.nonzero().squeeze(-1).tolist()
        those = {first + i for i in some if (first + i) % stride == 0}
        rows = {i: row for i, row in enumerate(parts, start=first) if i in those and bool(row.mask.any())}
        thin = _thinned(stride, rows)
        rows = {i: row.copied() for i, row in thin.rows.items()}
        if prompts is not None:
            rows = {i: row._replace(prompt=prompts[i - first].clone()) for i, row in rows.items()}
        return replace(thin, rows=rows)

    def merge(self, other: PairSample) -> PairSample:
        """The sample of both stretches of the log together."""
        stride = max(self.stride, other.stride)
        one, two = (x if x.stride == stride else _thinned(stride, x.rows) for x in (self, other))
        both = PairSample(stride, {**one.rows, **two.rows}, one.held + two.held)
        return both if both.few else _thinned(2 * stride, both.rows)

    def estimate(self) -> Provenance:
        """What the sample implies. The first row of a finding is counted in the log, over all of its files."""
        order = sorted(self.rows)
        rows = [self.rows[index] for index in order]
        known_steps = [row.step for row in rows if row.step is not None]
        steps = torch.tensor(known_steps, device="cpu") if rows and len(known_steps) == len(rows) else None
        sizes = torch.tensor([0, *(len(row.train) for row in rows)], device="cpu")
        columns = ([row.train for row in rows], [row.rollout for row in rows], [row.mask for row in rows])
        train, rollout, mask = (torch.cat([torch.zeros(0, device="cpu"), *column]) for column in columns)
        ids = [row.response_ids for row in rows if row.response_ids is not None]
        token_ids = torch.cat(ids) if ids and len(ids) == len(rows) else None
        cu_seqlens = sizes.cumsum(0)
        found = estimate_provenance(train, rollout, mask, cu_seqlens=cu_seqlens, token_ids=token_ids, steps=steps)
        of_log = [
            finding if finding.first_row is None else replace(finding, first_row=order[finding.first_row])
            for finding in found.findings
        ]
        found = replace(found, findings=tuple(of_log))
        if token_ids is None:
            return found
        count = torch.bincount(token_ids[mask.bool()].clamp(min=0)).double()
        different = float(count.sum() ** 2 / count.square().sum().clamp(min=1))
        return found if different >= FEW_IDS else _of_repetition(found)

    @property
    def few(self) -> bool:
        """Whether no more has to be left out."""
        return self.held <= 2 * TOKENS or len(self.rows) <= 1


def _of_repetition(found: Provenance) -> Provenance:
    """What can be told of responses that repeat few tokens: settings and prompts look like weights there.

    An update of the weights moves the one log-prob that there is, as a temperature does; and every response is unsure
    at its beginning alone.
    """
    kept = [f for f in found.findings if _is_sure(f) or (fault(f.code).kind != "settings" and f.code != "processed")]
    return replace(found, findings=tuple(kept))


def _is_sure(finding: Finding) -> bool:
    """Whether likely and unlikely tokens, many of both, follow one exponent: an update moves some off."""
    shown = finding.evidence
    many = min(shown.get("likely_tokens", 0.0), shown.get("unlikely_tokens", 0.0)) >= MANY
    return finding.code == "tempered" and many and shown["violations"] <= ONE_EXPONENT


def _thinned(stride: int, rows: Mapping[int, SampleRow]) -> PairSample:
    """Rows at multiples of the stride, which is doubled until few enough are left."""
    while True:
        rows = {index: row for index, row in rows.items() if index % stride == 0}
        sample = PairSample(stride, rows, sum(len(row.train) for row in rows.values()))
        if sample.few:
            return sample
        stride *= 2
