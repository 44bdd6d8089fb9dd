"""One block of tokens: classes, log-ratios, token-level weights and rejections, and the sums they leave.

Arithmetic is float64, where it costs no memory traffic: log-ratios of 1e-7 keep their digits, k3 needs no series, and
neither sums nor sums of squares need compensation. Masks are float64 too, 1 and 0: eager torch compares into numbers,
multiplies by them and sums them at several times the speed of bool. What a mask hides is made finite before it is
multiplied away, so nothing that stood there is seen.

On a block that stays in cache an operation takes about as long to ask for as to do. So a block asks for few: whatever
is summed over sequences lies in one buffer and is summed at once, and weights are described by their distance from 1,
which the divergences need anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollcorr.core.bounds import divergence_bound, log_band
from rollcorr.core.divergence import CAP
from rollcorr.kernels.correction.band import exceedance_band
from rollcorr.kernels.correction.table import Block, BlockRows, SequenceTable

if TYPE_CHECKING:
    from rollcorr.config import Criterion, RolloutCorrectionConfig

NEVER = -1000.0
"""Nats: stands for log π = −inf. Its exponential is 0 too, and sums of it stay finite."""

_FAR = 1e300  # beyond every value: stands in a minimum or maximum for tokens that take no part


def columns_of(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """What is summed over each sequence, by name.

    valid, compared (log-ratio or probability zero) and measured (log-ratio) count tokens. log_ratio is d, capped
    min(d, 20), expm1 that of d within ±20, train log π, k2 d²/2. raw_less_one and less_one are weights less 1, before
    and after truncation, of tokens whose probability is not zero.
    """
    names = ["valid", "compared", "measured", "log_ratio", "capped", "expm1"]
    judging = [criterion.name for criterion in config.criteria if criterion.scope == "token"]
    if config.rollout_is == "token":
        names += ["less_one"] + ["raw_less_one"] * (config.safety_bound != CAP) + ["kept_weight"] * bool(judging)
    if any(criterion.kind == "k2" and criterion.scope != "seq_max" for criterion in config.criteria):
        names.append("k2")
    if config.rollout_token_veto_threshold is not None:
        names.append("catastrophic")
    if judging:
        names += ["kept", "once", *(f"{name}/{what}" for name in judging for what in ("rejected", "alone"))]
    return (*names, "train")


class _Scratch:
    """float64 buffers for the tokens of a block, kept from block to block: fresh memory costs more than arithmetic."""

    def __init__(self, columns: tuple[str, ...], device: torch.device) -> None:
        self._names, self._device = columns, device
        self._shape: torch.Size | None = None

    def fit(self, shape: torch.Size) -> None:
        """Have buffers of a block's shape; every block but the last has the same."""
        if shape == self._shape:
            return
        self._shape = shape
        buffers = torch.empty(len(self._names) + 1, *shape, dtype=torch.float64, device=self._device)
        self.columns = buffers[:-1]
        self.log_probs = buffers[-2:].view(2, -1)  # both at once; the trainer's are the last column
        self._shaped = dict(zip((*self._names, "rollout"), buffers.unbind(), strict=True))
        self._flat = {name: buffer.view(-1) for name, buffer in self._shaped.items()}

    def __call__(self, name: str) -> Tensor:
        """The buffer of that name, flat; it holds whatever was last written."""
        if name not in self._flat:
            self._shaped[name] = torch.empty_like(self._shaped["valid"])
            self._flat[name] = self._shaped[name].view(-1)
        return self._flat[name]

    def shaped(self, name: str) -> Tensor:
        """The same in the block's shape."""
        self(name)
        return self._shaped[name]


class TokenPass:
    """Reads blocks of tokens, writes what tokens alone decide, and keeps their sums in `table` and `rows`."""

    def __init__(self, config: RolloutCorrectionConfig, sequences: int, device: torch.device) -> None:
        names = columns_of(config)
        self.table, self.rows = SequenceTable(names, sequences, device), BlockRows()
        self._config, self._scratch = config, _Scratch(names, device)
        self._judging = [criterion for criterion in config.criteria if criterion.scope == "token"]
        self._summing_k2 = "k2" in names
        self._ten_percent, self._band = log_band(0.9, 1.1), log_band(*exceedance_band(config))
        self._nothing = torch.zeros((), dtype=torch.float64, device=device)
        neutral = config.nonfinite == "neutral"
        self._counted = "valid" if neutral else "compared"  # takes part in weights and criteria
        self._positive = "positive" if neutral else "measured"  # counted, and not of probability zero

    def read(
        self, block: Block, train: Tensor, rollout: Tensor, mask: Tensor, weights: Tensor | None, loss_mask: Tensor
    ) -> None:
        """Read a block; `weights` and `loss_mask` are its outputs."""
        self._scratch.fit(mask.shape)
        self._classify(train, rollout, mask)
        self._compare(block)
        if weights is not None:
            self._weigh(weights)
        self._reject(loss_mask)
        self.table.add(self._scratch.columns, block)

    def _classify(self, train: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """Widen and sort the tokens; masked and missing values are 0 from here on."""
        scratch = self._scratch
        torch.ne(mask.view(torch.uint8), 0, out=scratch.shaped("valid"))  # a bool's true may be any byte but 0
        scratch.shaped("train").copy_(train)
        scratch.shaped("rollout").copy_(rollout)
        valid, pi, mu = scratch("valid"), scratch("train"), scratch("rollout")
        # log π + |log μ| is finite where both are, −inf for log π = −inf over a finite log μ, and inf or NaN otherwise.
        order = torch.abs(mu, out=scratch("log_ratio")).add_(pi)
        compared = torch.lt(order, torch.inf, out=scratch("compared")).mul_(valid)
        measured = torch.gt(order, -torch.inf, out=scratch("measured")).mul_(compared)
        scratch.log_probs.nan_to_num_(0.0, 0.0, NEVER).mul_(compared)  # a compared rollout's is finite
        d = torch.sub(pi, mu, out=order).mul_(measured)
        capped = torch.clamp(d, max=CAP, out=scratch("capped"))
        torch.clamp(capped, min=-CAP, out=scratch("expm1")).expm1_()
        if self._positive == "positive":
            torch.sub(valid, compared, out=scratch("positive")).add_(measured)

    def _compare(self, block: Block) -> None:
        """How far apart the policies are, whatever is done about it. The rollout's log-probs are used up."""
        scratch, rows = self._scratch, self.rows
        d, expm1, work = scratch("log_ratio"), scratch("expm1"), scratch("work")
        difference = torch.exp(scratch("train"), out=work).sub_(scratch("rollout").exp_()).abs_()
        difference.nan_to_num_(nan=0.0, posinf=torch.inf)  # as in `core.divergence`: ∞ − ∞ of two densities
        rows.add("prob_diff_abs", difference.sum())  # exp(0) − exp(0) where nothing is compared
        rows.extremes("prob_diff_abs", self._nothing, _largest(difference))  # no metric reads its minimum
        rows.add("expm1_squares", torch.dot(expm1, expm1))
        rows.add("log_ratio_squares", torch.dot(d, d))
        rows.add("abs_log_ratio", torch.abs(d, out=work).sum())
        rows.add("capped_high", torch.gt(d, CAP, out=work).sum())
        rows.add("capped_low", torch.lt(d, -CAP, out=work).sum())
        low, high = self._ten_percent
        rows.add("ratio_above_10pct", torch.gt(d, high, out=work).sum())
        rows.add("ratio_below_10pct", torch.lt(d, low, out=work).sum())
        outside = torch.eq(scratch("measured"), 0.0, out=scratch("rollout"))
        torch.add(d, outside, alpha=_FAR, out=work)
        self.table.extreme("log_ratio_min", scratch.shaped("work"), block)
        torch.sub(d, outside, alpha=_FAR, out=work)
        self.table.extreme("log_ratio_max", scratch.shaped("work"), block)

    def _weigh(self, out: Tensor) -> None:
        """Token-level weights, 0 where nothing is counted. Sequence levels only mark what counts."""
        config, scratch, rows, bound = self._config, self._scratch, self.rows, self._config.safety_bound
        if config.rollout_is != "token":
            out.copy_(scratch.shaped(self._counted))  # the sequence's weight is multiplied in at the end
            return
        d, positive, raw_less_one = scratch("log_ratio"), scratch(self._positive), scratch("expm1")
        less_one, weight = scratch("less_one"), scratch("work")
        low, high = self._band
        rows.add("is_high", torch.dot(torch.gt(d, high, out=weight), positive))
        rows.add("is_low", torch.dot(torch.lt(d, low, out=weight), positive))  # probability zero is added later
        if bound != CAP:
            rows.add("saturated_high", torch.gt(d, bound, out=weight).sum())
            rows.add("saturated_low", torch.lt(d, -bound, out=weight).sum())
            raw_less_one = torch.clamp(d, -bound, bound, out=scratch("raw_less_one")).expm1_()
            rows.add("raw_less_one_squares", torch.dot(raw_less_one, raw_less_one))
        if config.is_mode == "icepop":
            torch.add(raw_less_one, 1.0, out=weight).mul_(torch.le(d, high, out=less_one))
            weight.mul_(torch.ge(d, low, out=less_one)).mul_(positive)
            torch.sub(weight, positive, out=less_one)
            rows.extremes("weight", *self._ends(weight, self._counted))
        else:
            ceiling = torch.inf if config.is_upper is None else config.is_upper
            torch.clamp(raw_less_one, max=ceiling - 1.0, out=less_one).mul_(positive)
            torch.add(less_one, positive, out=weight)
        rows.add("less_one_squares", torch.dot(less_one, less_one))
        out.copy_(scratch.shaped("work"))

    def _reject(self, loss_mask: Tensor) -> None:
        """Token-level rejections, and what sequence-level ones need of every token."""
        config, scratch = self._config, self._scratch
        rejecting_missing = config.nonfinite in ("reject_token", "raise")
        if self._summing_k2:
            torch.square(scratch("log_ratio"), out=scratch("k2")).mul_(0.5)
        if config.rollout_token_veto_threshold is not None:
            low, _ = log_band(config.rollout_token_veto_threshold, None)
            below = torch.lt(scratch("log_ratio"), low, out=scratch("catastrophic"))
            below.mul_(scratch(self._positive)).add_(self._zero())
        if not self._judging:
            loss_mask.copy_(scratch.shaped("compared" if rejecting_missing else "valid"))
            return
        rejectors = torch.sub(scratch("valid"), scratch("compared"), out=scratch("rejectors"))
        if not rejecting_missing:
            rejectors.zero_()
        for criterion in self._judging:
            rejectors.add_(self._judge(criterion))
        once = torch.eq(rejectors, 1.0, out=scratch("once"))
        kept = torch.eq(rejectors, 0.0, out=scratch("kept")).mul_(scratch("valid"))
        for criterion in self._judging:
            torch.mul(scratch(f"{criterion.name}/rejected"), once, out=scratch(f"{criterion.name}/alone"))
        if config.rollout_is == "token":
            torch.add(scratch("less_one"), scratch(self._positive), out=scratch("kept_weight")).mul_(kept)
        loss_mask.copy_(scratch.shaped("kept"))

    def _judge(self, criterion: Criterion) -> Tensor:
        """The tokens that a token-level criterion rejects; its own counts, squares and extremes on the way."""
        scratch, rows, row = self._scratch, self.rows, f"rs/{criterion.name}"
        d, rejected = scratch("log_ratio"), scratch(f"{criterion.name}/rejected")
        if criterion.kind == "k1":
            positive, (low, high) = scratch(self._positive), log_band(criterion.lower, criterion.upper)
            torch.lt(d, low, out=rejected).mul_(positive)
            if criterion.lower is not None:
                rejected.add_(self._zero())
            rows.add(f"{row}/low", rejected.sum())
            above = torch.gt(d, high, out=scratch("work")).mul_(positive)
            rows.add(f"{row}/high", above.sum())
            return rejected.add_(above)
        values = scratch(criterion.kind)
        if criterion.kind == "k3":
            torch.sub(scratch("expm1"), scratch("capped"), out=values)
        rows.add(f"{row}/squares", torch.dot(values, values))
        rows.extremes(row, *self._ends(values, "measured"))
        torch.gt(values, divergence_bound(criterion.upper), out=rejected).add_(self._zero())
        rows.add(f"{row}/high", rejected.sum())
        rows.add(f"{row}/low", self._nothing)
        return rejected

    def _zero(self) -> Tensor:
        """Tokens of probability zero."""
        return torch.sub(self._scratch("compared"), self._scratch("measured"), out=self._scratch("zero"))

    def _ends(self, values: Tensor, mask: str) -> tuple[Tensor, Tensor]:
        """Smallest and largest value where the mask is 1, 0-d."""
        outside, ends = self._scratch("rollout"), self._scratch("ends")
        torch.eq(self._scratch(mask), 0.0, out=outside)
        smallest = -_largest(torch.add(values, outside, alpha=_FAR, out=ends).neg_())
        return smallest, _largest(torch.sub(values, outside, alpha=_FAR, out=ends))


def _largest(values: Tensor) -> Tensor:
    """0-d; −inf for a block without tokens, so that it has the row too."""
    return values.amax() if values.numel() else values.new_tensor(-torch.inf)
