"""Published rules that weights with a horizon compete with, for the bench alone.

Each gives a log weight to every token, from the log-ratios d of its sequence. `rollout_is: horizon` then truncates and
applies it: `trained_by` puts a rule in the place of the horizon's sums.

- `prefix`: exp Σ_{s≤t} d_s, within e^(−0.025 √t) and e^(0.05 √t). CTPO, Zhang et al. (2026), arXiv:2605.07331; the
  bounds are those of the authors' script.
- `min_prefix`: ρ_t min_{s<t} ρ_s. MinPRO, Lei et al. (2026), arXiv:2601.22718.
- `ess_cap`: min(ρ_t, (Σ ρ)² / (n Σ ρ²)) over the n tokens of the batch. P3O, Fakoor et al. (2026), arXiv:2605.12380,
  equations 11 and 12, without its KL term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from rollcorr.kernels.correction.torch import blocks

LOW, HIGH = 0.025, 0.05
"""Bounds of `prefix` at the first token, nats."""


def prefix(d: Tensor, mask: Tensor) -> Tensor:
    """Return clamp(Σ_{s≤t} d_s, −0.025 √t, 0.05 √t): (B, T) d → (B, T), nats."""
    root = mask.cumsum(-1).to(d.dtype).sqrt()
    return d.cumsum(-1).clamp(-LOW * root, HIGH * root)


def min_prefix(d: Tensor, mask: Tensor) -> Tensor:
    """Return d_t + min_{s<t} d_s: (B, T) d → (B, T), nats; d_1 for the first token."""
    least = d.masked_fill(~mask, torch.inf).cummin(-1).values.roll(1, -1)
    least[:, 0] = torch.inf
    return d + least.masked_fill(least.isinf(), 0.0)


def ess_cap(d: Tensor, mask: Tensor) -> Tensor:
    """Return min(d_t, log ESS), with ESS = (Σ ρ)² / (n Σ ρ²) over the batch: (B, T) d → (B, T), nats."""
    ratios = d[mask].exp()
    share = ratios.sum().square() / (len(ratios) * ratios.square().sum()).clamp(min=torch.finfo(d.dtype).tiny)
    return d.clamp(max=share.log()) if len(ratios) else d


RIVALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prefix": prefix,
    "min_prefix": min_prefix,
    "ess_cap": ess_cap,
}
"""Name of a correction → its log weights."""


@contextmanager
def trained_by(name: str) -> Iterator[None]:
    """Weigh by a rival wherever torch computes weights with a horizon; no change for other corrections.

    Raises:
        ValueError: a batch is packed, or has slices of sequences.
    """
    rule = RIVALS.get(name)

    def log_weights(
        log_ratio: Tensor, mask: Tensor, *, cu_seqlens: Tensor | None = None, gather: object = None, **_: object
    ) -> Tensor:
        if rule is None or cu_seqlens is not None or gather is not None:
            raise ValueError(f"the rival {name!r} takes padded batches of whole sequences only; set impl='torch'")
        impossible = mask & (log_ratio == -torch.inf)
        d = log_ratio.double().masked_fill(impossible | ~mask, 0.0)
        return rule(d, mask).masked_fill(~mask, 0.0).masked_fill(impossible, -torch.inf)

    if rule is None:
        yield
        return
    with mock.patch.object(blocks, "horizon_log_weights", log_weights):
        yield
