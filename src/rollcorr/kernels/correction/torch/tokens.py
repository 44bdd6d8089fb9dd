"""One block of tokens: classes, log-ratios, token-level weights and rejections, and the sums they leave.

Arithmetic is float64, where it costs no memory traffic: log-ratios of 1e-7 keep their digits, k3 needs no series, and
neither sums nor sums of squares need compensation. Masks are float64 too, 1 and 0: eager torch compares into numbers,
multiplies by them and sums them at several times the speed of bool. What a mask hides is made finite before it is
multiplied away, so nothing that stood there is seen.

On a block that stays in cache an operation takes about as long to ask for as to do. So a block asks for few: whatever
is summed over sequences lies in one buffer and is summed at once. The sums of the block follow from those, and spreads
are then taken around the block's own means: a fixed center would cancel what lies far from it, such as weights of e⁻²⁰
described by their distance from 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.core.divergence import ESTIMATES, SAFETY_BOUND
from rollcorr.core.weights import divergence_bound, log_band
from rollcorr.kernels.correction.bands import exceedance_band, zeroing_band
from rollcorr.kernels.correction.torch.table import Block, BlockRows, SequenceTable

NEVER = -1000.0
"""Nats: stands for log π = −inf. Its exponential is 0 too, and sums of it stay finite."""

FAR = 1e300  # beyond every value: stands in a minimum or maximum for tokens that take no part


def columns_of(config: RolloutCorrectionConfig) -> tuple[str, ...]:
    """What is summed over each sequence, by name.

    valid, compared and measured count tokens (docs/reference/notation.md). log_ratio is d, capped min(d, 20), expm1
    that of d within ±20, k2 d²/2; train and rollout are log π and log μ of measured tokens. weight is the applied
    weight of counted tokens, raw the one before truncation, where the two can differ. kept counts the tokens that every
    token-level rejector keeps, rejected_once those that exactly one takes.
    """
    weighs = config.rollout_is == "token"
    judging = [criterion.name for criterion in config.criteria if criterion.scope == "token"]
    needed = {
        **dict.fromkeys(("valid", "compared", "measured", "capped", "expm1"), True),
        "weight": weighs,
        "raw": weighs and config.is_mode != "none",
        "kept_weight": weighs and bool(judging),
        **dict.fromkeys(_kinds_to_sum(config), True),
        "catastrophic": config.rollout_token_veto_threshold is not None,
        **dict.fromkeys(("kept", "rejected_once"), bool(judging)),
        **{f"{name}/{what}": True for name in judging for what in ("rejected", "alone")},
        **dict.fromkeys(("log_ratio", "train", "rollout"), True),  # neighbors, so that they can be taken together
    }
    return tuple(name for name, is_needed in needed.items() if is_needed)


def _kinds_to_sum(config: RolloutCorrectionConfig) -> list[str]:
    """The divergences that need a column of their own: k1 and k3 follow from others, a maximum from the range of d."""
    kinds = {criterion.kind: None for criterion in config.criteria if criterion.scope != "seq_max"}
    return [kind for kind in kinds if kind not in ("k1", "k3")]


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
        self.columns = torch.empty(len(self._names), *shape, dtype=torch.float64, device=self._device)
        self.log_probs = self.columns[-2:].view(2, -1)  # both at once
        self._shaped = dict(zip(self._names, self.columns.unbind(), strict=True))
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
    """Reads blocks of tokens, writes what tokens alone decide, and keeps their sums in `table` and `per_block`."""

    def __init__(self, config: RolloutCorrectionConfig, sequences: int, device: torch.device) -> None:
        names = columns_of(config)
        self.table = SequenceTable(names, sequences, device)
        self.per_block: list[BlockRows] = []
        self._config, self._scratch, self._columns = config, _Scratch(names, device), names
        self._judging = [criterion for criterion in config.criteria if criterion.scope == "token"]
        self._kinds = _kinds_to_sum(config)
        self._ten_percent, self._band = log_band(0.9, 1.1), log_band(*exceedance_band(config))
        self._kept_band = zeroing_band(config)
        self._nothing = torch.zeros((), dtype=torch.float64, device=device)
        neutral = config.nonfinite == "neutral"
        self._counted = "valid" if neutral else "compared"
        self._positive = "positive" if neutral else "measured"  # counted, and not of probability zero
        self._samples = self._described_samples()

    def read(
        self, block: Block, train: Tensor, rollout: Tensor, mask: Tensor, weights: Tensor | None, loss_mask: Tensor
    ) -> None:
        """Read a block; `weights` and `loss_mask` are its outputs."""
        self._scratch.fit(mask.shape)
        self._rows = BlockRows({}, {}, {})
        self._classify(train, rollout, mask)
        self._compare(block)
        if weights is not None:
            self._weigh(weights)
        self._reject(loss_mask)
        self._describe(self.table.add(self._scratch.columns, block))
        self.per_block.append(self._rows)

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
        if self._positive == "positive":
            torch.sub(valid, compared, out=scratch("positive")).add_(measured)

        # Probabilities are compared where log π is −inf too; a log-ratio needs both to be finite.
        scratch.log_probs.nan_to_num_(0.0, 0.0, NEVER).mul_(compared)  # a compared rollout's is finite
        self._compare_probabilities()
        scratch.log_probs.mul_(measured)
        d = torch.sub(pi, mu, out=order)
        capped = torch.clamp(d, max=SAFETY_BOUND, out=scratch("capped"))
        torch.clamp(capped, min=-SAFETY_BOUND, out=scratch("expm1")).expm1_()

    def _compare_probabilities(self) -> None:
        """|π − μ| of compared tokens."""
        scratch, rows = self._scratch, self._rows
        mu = torch.exp(scratch("rollout"), out=scratch("spare"))
        difference = torch.exp(scratch("train"), out=scratch("work")).sub_(mu).abs_()
        difference.nan_to_num_(nan=0.0, posinf=torch.inf)  # as in `core.divergence`: ∞ − ∞ of two densities
        rows.sums["prob_diff_abs"] = difference.sum()  # exp(0) − exp(0) where nothing is compared

        # No metric reads the minimum.
        rows.extremes["prob_diff_abs"] = self._nothing, _largest(difference)

    def _compare(self, block: Block) -> None:
        """How far apart the policies are, whatever is done about it."""
        scratch, rows = self._scratch, self._rows
        d, expm1, work = scratch("log_ratio"), scratch("expm1"), scratch("work")
        rows.sums["expm1_squares"] = torch.dot(expm1, expm1)
        rows.sums["abs_log_ratio"] = torch.abs(d, out=work).sum()
        rows.sums["capped_high"] = torch.gt(d, SAFETY_BOUND, out=work).sum()
        rows.sums["capped_low"] = torch.lt(d, -SAFETY_BOUND, out=work).sum()
        low, high = self._ten_percent
        rows.sums["ratio_above_10pct"] = torch.gt(d, high, out=work).sum()
        rows.sums["ratio_below_10pct"] = torch.lt(d, low, out=work).sum()

        # Unmeasured tokens, whose d is 0, are moved out of the way of the smallest and of the largest.
        outside = torch.eq(scratch("measured"), 0.0, out=scratch("spare"))
        torch.add(d, outside, alpha=FAR, out=work)
        self.table.extreme("log_ratio_min", scratch.shaped("work"), block)
        torch.sub(d, outside, alpha=FAR, out=work)
        self.table.extreme("log_ratio_max", scratch.shaped("work"), block)

    def _weigh(self, out: Tensor) -> None:
        """Token-level weights, 0 where nothing is counted. Sequence levels only mark what counts."""
        config, scratch, rows, bound = self._config, self._scratch, self._rows, self._config.safety_bound
        if config.rollout_is != "token":
            out.copy_(scratch.shaped(self._counted))  # the sequence's weight is multiplied in at the end
            return

        # How many are beyond a bound is counted before it acts.
        d, positive, work = scratch("log_ratio"), scratch(self._positive), scratch("work")
        low, high = self._band
        rows.sums["is_high"] = torch.dot(torch.gt(d, high, out=work), positive)
        rows.sums["is_low"] = torch.dot(torch.lt(d, low, out=work), positive)  # probability zero is added later

        weight = scratch("weight")
        raw = weight if config.is_mode == "none" else scratch("raw")
        if bound == SAFETY_BOUND:
            torch.add(scratch("expm1"), 1.0, out=raw)  # e⁻²⁰ keeps 7 digits, as many as the weight's float32
        else:
            rows.sums["saturated_high"] = torch.gt(d, bound, out=work).sum()
            rows.sums["saturated_low"] = torch.lt(d, -bound, out=work).sum()
            torch.clamp(d, -bound, bound, out=raw).exp_()
        raw.mul_(positive)

        if config.is_mode == "truncate":
            torch.clamp(raw, min=config.rollout_is_floor, max=config.is_upper, out=weight)
            if config.rollout_is_floor is not None:
                weight.mul_(positive)  # a floor raises no weight that stands for nothing
        elif config.is_mode == "icepop":
            low, high = self._kept_band
            inside = torch.le(d, high, out=scratch("inside")).mul_(torch.ge(d, low, out=work)).mul_(positive)
            rows.sums["is_inside"] = inside.sum()
            torch.mul(raw, inside, out=weight)
            rows.extremes["weight"] = self._ends(weight, self._counted)
        out.copy_(scratch.shaped("weight"))

    def _described_samples(self) -> list[tuple[str, str, str]]:
        """The samples of tokens whose moments are rows: name of the row, buffer of the values, buffer that counts."""
        samples = [("log_ratio", "log_ratio", "measured")]
        if self._config.rollout_is == "token":
            samples.append(("weight", "weight", self._counted))
            if self._config.is_mode != "none":
                samples.append(("weight_raw", "raw", self._counted))
        kinds = [criterion for criterion in self._judging if criterion.kind != "k1"]
        return samples + [(f"rs/{criterion.name}", criterion.kind, "measured") for criterion in kinds]

    def _describe(self, totals: Tensor) -> None:
        """Moments of the block's samples around the block's own means; values are 0 where nothing is counted."""
        total = dict(zip(self._columns, totals.unbind(), strict=True))
        if "k3" not in total and any(values == "k3" for _, values, _ in self._samples):
            total["k3"] = total["expm1"] - total["capped"]
        at_least_one = {mask: total[mask].clamp(min=1) for mask in {mask for _, _, mask in self._samples}}

        for row, values, mask in self._samples:
            mean = total[values] / at_least_one[mask]
            deviation = torch.addcmul(
                self._scratch(values), self._scratch(mask), mean, value=-1.0, out=self._scratch("work")
            )
            self._rows.moments[row] = total[mask], mean, torch.dot(deviation, deviation)

    def _reject(self, loss_mask: Tensor) -> None:
        """Token-level rejections, and what sequence-level ones need of every token."""
        config, scratch = self._config, self._scratch
        for kind in self._kinds:
            self._estimate(kind)
        if config.rollout_token_veto_threshold is not None:
            low, _ = log_band(config.rollout_token_veto_threshold, None)
            below = torch.lt(scratch("log_ratio"), low, out=scratch("catastrophic"))
            below.mul_(scratch(self._positive)).add_(self._zero())

        # Every rejector looks at the response mask alone, and a token stays if none of them takes it.
        rejects_missing = config.nonfinite in ("reject_token", "raise")
        if not self._judging:
            loss_mask.copy_(scratch.shaped("compared" if rejects_missing else "valid"))
            return
        rejectors = torch.sub(scratch("valid"), scratch("compared"), out=scratch("rejectors"))
        if not rejects_missing:
            rejectors.zero_()
        for criterion in self._judging:
            rejectors.add_(self._judge(criterion))
        kept = torch.eq(rejectors, 0.0, out=scratch("kept")).mul_(scratch("valid"))
        loss_mask.copy_(scratch.shaped("kept"))

        rejected_once = torch.eq(rejectors, 1.0, out=scratch("rejected_once"))
        for criterion in self._judging:
            torch.mul(scratch(f"{criterion.name}/rejected"), rejected_once, out=scratch(f"{criterion.name}/alone"))
        if config.rollout_is == "token":
            torch.mul(scratch("weight"), kept, out=scratch("kept_weight"))

    def _estimate(self, kind: str) -> None:
        """A divergence of every token; 0 where nothing is measured, as d is 0 there."""
        d, values = self._scratch("log_ratio"), self._scratch(kind)
        if kind == "k2":
            torch.square(d, out=values).mul_(0.5)
        elif kind == "k3":
            torch.sub(self._scratch("expm1"), self._scratch("capped"), out=values)
        else:
            values.copy_(ESTIMATES[kind](d))

    def _judge(self, criterion: Criterion) -> Tensor:
        """The tokens that a token-level criterion rejects; its counts, squares and extremes on the way."""
        scratch, rows, row = self._scratch, self._rows, f"rs/{criterion.name}"
        d, rejected = scratch("log_ratio"), scratch(f"{criterion.name}/rejected")
        if criterion.kind == "k1":
            positive, (low, high) = scratch(self._positive), log_band(criterion.lower, criterion.upper)
            torch.lt(d, low, out=rejected).mul_(positive)
            if criterion.lower is not None:
                rejected.add_(self._zero())
            rows.sums[f"{row}/low"] = rejected.sum()
            above = torch.gt(d, high, out=scratch("work")).mul_(positive)
            rows.sums[f"{row}/high"] = above.sum()
            return rejected.add_(above)

        # A divergence has one bound, and probability zero is beyond it: its k2 and k3 are infinite.
        if criterion.kind == "k3":
            self._estimate("k3")
        values = scratch(criterion.kind)
        rows.extremes[row] = self._ends(values, "measured")
        torch.gt(values, divergence_bound(criterion.upper), out=rejected).add_(self._zero())
        rows.sums[f"{row}/high"] = rejected.sum()
        rows.sums[f"{row}/low"] = self._nothing
        return rejected

    def _zero(self) -> Tensor:
        """Tokens of probability zero."""
        return torch.sub(self._scratch("compared"), self._scratch("measured"), out=self._scratch("zero"))

    def _ends(self, values: Tensor, mask: str) -> tuple[Tensor, Tensor]:
        """Smallest and largest value where the mask is 1, 0-d."""
        outside, ends = self._scratch("spare"), self._scratch("ends")
        torch.eq(self._scratch(mask), 0.0, out=outside)
        smallest = -_largest(torch.add(values, outside, alpha=FAR, out=ends).neg_())
        return smallest, _largest(torch.sub(values, outside, alpha=FAR, out=ends))


def _largest(values: Tensor) -> Tensor:
    """0-d; −inf for a block without tokens, so that it has the row too."""
    return values.amax() if values.numel() else values.new_full((), -torch.inf)
