"""Sample a bounded, evenly spaced subset of a log's sequences for the estimate of provenance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
"""Effective number of distinct ids, (Σ n)² / Σ n², below which responses count as repetitive."""
MANY, ONE_EXPONENT = 100, 0.01
"""Fewest likely and unlikely tokens, and largest share of violations of a common exponent, for a certain temperature in
repetitive responses: measured 0.001 under a temperature, at least 0.03 under other weights, dropout or prompts."""
CONTEXT, REPEATS = 3, 4
"""Number of last ids, the token's own included, that count as its context: where they are equal, d hardly differs. And
the tokens per context, on average, from which the tokens of one context count as one observation."""
TOKENS = 1 << 16
"""Target number of tokens in the sample: it contains at most twice as many, and at least one sequence."""


class Context(NamedTuple):
    """Context of each token of a response: the prompt, and the response before the token.

    Attributes:
        length: number of tokens of the prompt.
        seen: true on tokens whose id occurs in the prompt or earlier in the response, (c,) bool.
        prefix: hash of the prompt, its length, and the response up to and including the token, (c,) int64.
    """

    length: int
    seen: Tensor
    prefix: Tensor

    @classmethod
    def of(cls, prompt: Tensor, response: Tensor) -> Context:
        """Compute the context of each token of a response, ids (c,), after a prompt, ids (p,)."""
        ids = torch.cat([prompt, response]).numpy().astype(np.uint64)
        _, first, number = np.unique(ids, return_index=True, return_inverse=True)
        seen = first[number.reshape(-1)] < np.arange(len(ids))

        # A polynomial hash modulo 2^64: equal prefixes have equal hashes, and collisions are rare.
        mixed = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        power = np.cumprod(np.full(len(ids), 0xBF58476D1CE4E5B9, dtype=np.uint64), dtype=np.uint64)
        begun = len(prompt)
        prefix = (np.cumsum(mixed * power, dtype=np.uint64) + np.uint64(begun)).view(np.int64)
        return cls(begun, torch.from_numpy(seen[begun:]), torch.from_numpy(prefix[begun:]))


class SampleRow(NamedTuple):
    """A sequence of the sample, masked tokens included: a token's position is its index.

    Attributes:
        train: log π as logged, (c,) nats.
        rollout: log μ as logged, (c,) nats.
        mask: true on tokens that the policy sampled, (c,) bool.
        response_ids: ids of the response, (c,); defaults to `None`: not recorded.
        step: training step; defaults to `None`: not recorded.
        prompt: ids of the prompt, (p,); defaults to `None`: not recorded.
        versions: version of the weights behind each token, (c,); defaults to `None`: not recorded.
        context: context of each token; defaults to `None` until `located` computes it.
    """

    train: Tensor
    rollout: Tensor
    mask: Tensor
    response_ids: Tensor | None = None
    step: int | None = None
    prompt: Tensor | None = None
    versions: Tensor | None = None
    context: Context | None = None

    @property
    def known(self) -> NDArray[np.int64]:
        """Return the positions of the sampled tokens with both log-probs and |d| < 100 nats, (k,) int64."""
        d = (self.train.double() - self.rollout).numpy()
        return np.flatnonzero(self.mask.numpy().astype(np.bool_) & np.isfinite(d) & (np.abs(d) < 100))

    @property
    def log_ratio(self) -> NDArray[np.float64]:
        """Return log π − log μ at the positions `known`, (k,) float64, nats."""
        return np.asarray((self.train.double() - self.rollout).numpy()[self.known])

    @property
    def contexts(self) -> NDArray[np.int64]:
        """Return a hash of the last `CONTEXT` ids at each token, (c,) int64; needs recorded ids."""
        recorded = [x.numpy() for x in (self.prompt, self.response_ids) if x is not None]
        ids = np.concatenate([np.full(CONTEXT, -1), *recorded]).astype(np.int64)
        last = np.lib.stride_tricks.sliding_window_view(ids, CONTEXT)[len(ids) - len(self.train) - CONTEXT + 1 :]

        # Equal hashes of other contexts are rare, and lose one token each.
        return np.asarray(last @ np.int64(1_000_003) ** np.arange(CONTEXT))

    def located(self) -> SampleRow:
        """Return the row with its tokens' context; the row itself if the ids of prompt or response are missing."""
        if self.prompt is None or self.response_ids is None:
            return self
        return self._replace(context=Context.of(self.prompt, self.response_ids))

    def within(self, steps: tuple[int, int]) -> bool:
        """Return whether the row's step is known and lies in the range (first, last), both included."""
        return self.step is not None and steps[0] <= self.step <= steps[1]

    def copied(self) -> SampleRow:
        """Return a copy of the row's tensors, so that the sample does not keep the full batch in memory."""
        return SampleRow._make(value.clone() if isinstance(value, Tensor) else value for value in self)


@dataclass(frozen=True, eq=False)
class PairSample:
    """Every k-th sequence of a log; k is the smallest power of 2 for which the sample is within its limit.

    So merging the samples of a log's parts returns the log's sample, for any partition.

    Attributes:
        stride: k; 1 by default.
        rows: index of a sequence in the log → its row; contains no sequence without a sampled token.
        held: number of tokens in these rows.
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
        versions: Tensor | None = None,
    ) -> PairSample:
        """Sample a packed batch.

        Args:
            train: log π, (N,) nats.
            rollout: log μ, (N,) nats.
            mask: true on sampled tokens, (N,) bool.
            lengths: number of tokens of each sequence, (B,) int.
            first: index of the batch's first sequence in the log.
            stride: stride of the sample so far, which skips rows that a merge would drop; defaults to 1.
            response_ids: ids of the responses, (N,); optional.
            steps: training step of each sequence, (B,); optional.
            prompts: ids of each prompt, B tensors of (p,); optional.
            wanted: true on the sequences to sample from, (B,) bool; defaults to all.
            versions: version of the weights behind each token, (N,); optional.
        """
        sizes = lengths.tolist()
        columns = [x.split(sizes) for x in (train, rollout, mask)]
        ids = [None] * len(sizes) if response_ids is None else response_ids.split(sizes)
        step_of = [None] * len(sizes) if steps is None else steps.tolist()
        prompt_of = [None] * len(sizes) if prompts is None else prompts
        version_of = [None] * len(sizes) if versions is None else versions.split(sizes)
        parts = (SampleRow(*row) for row in zip(*columns, ids, step_of, prompt_of, version_of, strict=True))
        some = range(len(sizes)) if wanted is None else wanted.nonzero().squeeze(-1).tolist()
        those = {first + i for i in some if (first + i) % stride == 0}
        rows = {i: row for i, row in enumerate(parts, start=first) if i in those and bool(row.mask.any())}
        thin = _thinned(stride, rows)
        return replace(thin, rows={i: row.copied() for i, row in thin.rows.items()})

    def merge(self, other: PairSample) -> PairSample:
        """Return the sample of both parts of the log together."""
        stride = max(self.stride, other.stride)
        one, two = (x if x.stride == stride else _thinned(stride, x.rows) for x in (self, other))
        both = PairSample(stride, {**one.rows, **two.rows}, one.held + two.held)
        return both if both.few else _thinned(2 * stride, both.rows)

    def estimate(self) -> Provenance:
        """Estimate the sample's provenance.

        Returns:
            The findings; `first_row` is an index in the log, counted over all of its files. Repetitive responses keep
            only findings that other weights cannot cause: there an update moves the few log-probs in the same way as a
            temperature does, and every response is uncertain only at its beginning. If the same contexts recur, a
            setting must show in one token of each.
        """
        order = sorted(self.rows)
        rows = [self.rows[index] for index in order]
        known_steps = [row.step for row in rows if row.step is not None]
        steps = torch.tensor(known_steps, device="cpu") if rows and len(known_steps) == len(rows) else None
        sizes = torch.tensor([0, *(len(row.train) for row in rows)], device="cpu")
        columns = ([row.train for row in rows], [row.rollout for row in rows], [row.mask for row in rows])
        train, rollout, mask = (torch.cat([torch.zeros(0, device="cpu"), *column]) for column in columns)
        ids = [row.response_ids for row in rows if row.response_ids is not None]
        token_ids = torch.cat(ids) if ids and len(ids) == len(rows) else None
        estimate = partial(
            estimate_provenance, train, rollout, cu_seqlens=sizes.cumsum(0), token_ids=token_ids, steps=steps
        )
        found = estimate(mask)
        of_log = [
            finding if finding.first_row is None else replace(finding, first_row=order[finding.first_row])
            for finding in found.findings
        ]
        if token_ids is None:
            return replace(found, findings=tuple(of_log))
        count = torch.bincount(token_ids[mask.bool()].clamp(min=0)).double()
        different = float(count.sum() ** 2 / count.square().sum().clamp(min=1))
        allowed: Collection[str] = found.codes
        if different < FEW_IDS:
            allowed = {finding.code for finding in of_log if _is_sure(finding)}
        elif any(map(_is_of_settings, of_log)):
            sampled = mask.bool().nonzero().squeeze(-1)
            contexts = np.concatenate([row.contexts + 998_244_353 * (row.step or 0) for row in rows])[sampled]
            one_each = sampled[np.unique(contexts, return_index=True)[1]]
            if len(one_each) * REPEATS < len(sampled):
                allowed = estimate(torch.zeros_like(mask).index_fill(0, one_each, 1)).codes
        return replace(found, findings=tuple(f for f in of_log if not _is_of_settings(f) or f.code in allowed))

    @property
    def few(self) -> bool:
        """Return whether the sample is within its limit of tokens, or has at most one row."""
        return self.held <= 2 * TOKENS or len(self.rows) <= 1


def _is_of_settings(finding: Finding) -> bool:
    """Return whether a finding is about sampling settings."""
    return fault(finding.code).kind == "settings" or finding.code == "processed"


def _is_sure(finding: Finding) -> bool:
    """Return whether enough likely and unlikely tokens follow a common exponent: an update would move some off it."""
    shown = finding.evidence
    many = min(shown.get("likely_tokens", 0.0), shown.get("unlikely_tokens", 0.0)) >= MANY
    return finding.code == "tempered" and many and shown["violations"] <= ONE_EXPONENT


def _thinned(stride: int, rows: Mapping[int, SampleRow]) -> PairSample:
    """Keep rows at multiples of the stride, and double the stride until the sample is within its limit."""
    while True:
        rows = {index: row for index, row in rows.items() if index % stride == 0}
        sample = PairSample(stride, rows, sum(len(row.train) for row in rows.values()))
        if sample.few:
            return sample
        stride *= 2
