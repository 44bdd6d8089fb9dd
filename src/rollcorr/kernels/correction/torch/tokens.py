"""One block of tokens: log-ratios, token-level weights and rejections, their rows, and the sums of each sequence.

Arithmetic is float64, which costs no memory traffic here: log-ratios of 1e-7 keep their digits, k3 needs no series, and
neither sums nor sums of squares need compensation. Masks are float64 too, 1 and 0: eager torch compares into floats,
multiplies by them and sums them at several times the speed of bool. Masked values are made finite before the
multiplication by 0, so they never reach a result.

Deviations are taken from the block's own mean: a fixed center would cancel for values far from it, such as weights of
e⁻²⁰ described by their distance from 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollcorr.config import Criterion, RolloutCorrectionConfig
from rollcorr.core.divergence import ESTIMATES, SAFETY_BOUND
from rollcorr.core.mergeable_statistics import no_extremes
from rollcorr.core.weights import log_band
from rollcorr.kernels.correction.call import accepted_band, applied_weights, exceedance_band
from rollcorr.kernels.correction.rows import Computed
from rollcorr.kernels.correction.torch.table import Block, SequenceTable

NEVER = -1000.0
"""Nats: stands for log π = −inf. Its exponential is 0 too, and sums of it stay finite."""

FAR = 1e300  # beyond every bound: replaces infinity on a token of probability zero


class TokenPass:
    """Results of one block of tokens.

    Attributes:
        table: the sums over each sequence.
        rows: the rows of statistics that depend only on tokens.
        weights: weights of tokens, 0 on tokens that are not counted; without them, 1 on counted tokens.
        kept: 1 on the tokens that every token-level rejector keeps.
    """

    def __init__(
        self,
        block: Block,
        train: Tensor,
        rollout: Tensor,
        mask: Tensor,
        config: RolloutCorrectionConfig,
        log_weights: Tensor | None = None,
    ) -> None:
        """Read a block; `log_weights` are ℓ of its tokens in float64, where ℓ is not their d: level "horizon"."""
        self._block, self._config = block, config
        self.rows = Computed({}, {}, {})
        self._empty_extremes = no_extremes(mask.device)
        self._work = torch.empty(mask.shape, dtype=torch.float64, device=mask.device)
        self._valid = _comparison_as_float(torch.ne, mask.view(torch.uint8), 0)  # a bool's true may be any byte but 0
        self._classify(train.double(), rollout.double())
        self._compare_policies()
        self.weights = self._compute_token_weights(log_weights) if config.weighs_tokens else self._counted
        self.kept = self._reject()

    def _classify(self, pi: Tensor, mu: Tensor) -> None:
        """Classify the tokens, and sum the columns that are 0 on masked or missing tokens."""
        # log π + |log μ| is finite where both are, −inf for log π = −inf over a finite log μ, and inf or NaN otherwise.
        order = mu.abs().add_(pi)
        self._compared = _comparison_as_float(torch.lt, order, torch.inf).mul_(self._valid)
        self._measured = _comparison_as_float(torch.gt, order, -torch.inf).mul_(self._compared)
        self._is_zero = self._compared - self._measured
        self._counted = self._valid if self._config.nonfinite == "neutral" else self._compared

        # Probabilities are also compared where log π is −inf; a log-ratio needs two finite log-probs.
        pi, mu = (x.nan_to_num(0.0, 0.0, NEVER).mul_(self._compared) for x in (pi, mu))
        difference = torch.exp(pi, out=order).sub_(mu.exp()).abs_()
        difference.nan_to_num_(nan=0.0, posinf=torch.inf)  # as in `core.divergence`: ∞ − ∞ of two densities
        self.rows.sums["prob_diff_abs"] = difference.sum()
        least, largest = difference.aminmax() if difference.numel() else self._empty_extremes.unbind()
        self.rows.extremes["prob_diff_abs"] = torch.stack([least.clamp(max=0.0), largest])  # no metric reads the least

        self._d = pi.mul_(self._measured) - mu.mul_(self._measured)
        self._log_ratio = torch.sub(self._d, self._is_zero, alpha=FAR)  # below every bound at probability zero
        columns = {
            "valid": self._valid,
            "compared": self._compared,
            "measured": self._measured,
            "log_ratio": self._d,
            "train": pi,
            "rollout": mu,
        }
        self.table = SequenceTable((name, self._block.sum(values)) for name, values in columns.items())

    def _compare_policies(self) -> None:
        """Compute the mismatch of the policies, independent of the correction."""
        d, sums, (low, high) = self._d, self.rows.sums, log_band(0.9, 1.1)
        self._add_distribution("log_ratio", d, self._measured)
        size = d.abs()
        sums["abs_log_ratio"], sums["capped"] = size.sum(), self._count_where(torch.gt, size, SAFETY_BOUND)
        sums["ratio_outside_10pct"] = self._count_where(torch.gt, d, high) + self._count_where(
            torch.lt, self._log_ratio, low
        )

        # k3 = expm1(d) − d, and ρ² − 1 = (ρ − 1)² + 2 (ρ − 1).
        capped = torch.clamp(d, max=SAFETY_BOUND, out=size)
        rho_minus_1 = capped.clamp(min=-SAFETY_BOUND).expm1_()
        self._k3 = rho_minus_1 - capped
        self.table["k3"] = self._block.sum(self._k3).clamp_(min=0.0)  # rounding may return −1e-17
        rho_minus_1 = rho_minus_1.sub_(self._is_zero).view(-1)  # −1 where the probability is zero, since ρ = 0 there
        sums["chi2_token"] = torch.dot(rho_minus_1, rho_minus_1) + 2.0 * rho_minus_1.sum()
        self.rows.add_tokens(self._log_ratio, self._measured, self._compared, self._config, {*sums, *self.table})

        # The maximum over a sequence follows from the range of d: the divergences are convex.
        if any(criterion.scope == "seq_max" for criterion in self._config.criteria):
            unmeasured = 1.0 - self._measured
            self.table["log_ratio_max"] = self._block.max(torch.sub(d, unmeasured, alpha=FAR))
            self.table["negative_log_ratio_max"] = self._block.max(torch.sub(-d, unmeasured, alpha=FAR))

    def _compute_token_weights(self, log_weights: Tensor | None) -> Tensor:
        """Compute weights of tokens, 0 on tokens that are not counted."""
        config, sums, counted = self._config, self.rows.sums, self._counted
        log_weight, zero, judged = self._d, self._is_zero, self._log_ratio
        if log_weights is not None:
            zero = _comparison_as_float(torch.eq, log_weights, -torch.inf).mul_(counted)
            log_weight = log_weights.nan_to_num(neginf=0.0).mul_(counted)
            judged = torch.sub(log_weight, zero, alpha=FAR)
        sums["saturated_low"] = self._count_where(torch.lt, log_weight, -config.safety_bound)
        sums["saturated_high"] = self._count_where(torch.gt, log_weight, config.safety_bound)

        # Count exceedances before the bounds are applied.
        band = exceedance_band(config)
        if band != (None, None):
            low, high = log_band(*band)
            sums["is_low"] = self._count_where(torch.lt, judged, low, counted)
            sums["is_high"] = self._count_where(torch.gt, judged, high, counted)

        positive = counted - zero
        raw = log_weight.clamp(-config.safety_bound, config.safety_bound).exp_().mul_(positive)
        weight = applied_weights(raw, log_weight, config).mul_(positive)
        if config.is_mode == "icepop":
            sums["is_outside"] = self._count_where(torch.eq, weight, 0.0, counted)
        for name, values in (("weight", weight), ("weight_raw", raw)):
            self._add_distribution(name, values, counted)
            self.table[name] = self._block.sum(values)
        return weight

    def _reject(self) -> Tensor:
        """Return the tokens that token-level rejectors keep, and compute the sums for sequence-level rejectors."""
        config, valid, table = self._config, self._valid, self.table
        for kind in {c.kind: None for c in config.criteria if c.scope != "seq_max"}:
            if kind not in ("k1", "k3"):
                table[kind] = self._block.sum(ESTIMATES[kind](self._d))
        if config.rollout_token_veto_threshold is not None:
            low, _ = log_band(config.rollout_token_veto_threshold, None)
            table["catastrophic"] = self._block.sum(
                _comparison_as_float(torch.lt, self._log_ratio, low).mul_(self._counted)
            )

        # Every rejector reads only the response mask, and a token stays if no rejector removes it.
        rejectors = torch.zeros_like(valid)
        if config.nonfinite in ("reject_token", "raise"):
            rejectors = valid - self._compared
        rejected = {c.name: self._mark_rejected(c) for c in config.criteria if c.scope == "token"}
        for taken in rejected.values():
            rejectors.add_(taken)
        kept, once = (
            _comparison_as_float(torch.eq, rejectors, 0.0).mul_(valid),
            _comparison_as_float(torch.eq, rejectors, 1.0),
        )

        table["kept"], table["rejected_once"] = self._block.sum(kept), self._block.sum(once)
        for name, taken in rejected.items():
            table[f"{name}/rejected"] = self._block.sum(taken)
            table[f"{name}/alone"] = self._block.sum(taken.mul_(once))
        if config.weighs_tokens:
            table["kept_weight"] = self._block.sum(self.weights * kept)
        return kept

    def _mark_rejected(self, criterion: Criterion) -> Tensor:
        """Return the tokens that a token-level criterion rejects, and add its rows."""
        row, zero, (low, high) = f"rs/{criterion.name}", self._is_zero, accepted_band(criterion)
        values = self._k3 if criterion.kind == "k3" else ESTIMATES[criterion.kind](self._d)
        self._add_distribution(row, values, self._measured)

        # A k1 band is on the ratio itself. Probability zero is below it, and beyond the single bound of a divergence.
        judged = self._log_ratio if criterion.kind == "k1" else torch.add(values, zero, alpha=FAR)
        below = _comparison_as_float(torch.lt, judged, low).mul_(self._counted)
        above = _comparison_as_float(torch.gt, judged, high).mul_(self._counted)
        self.rows.sums[f"{row}/low"], self.rows.sums[f"{row}/high"] = below.sum(), above.sum()
        return below.add_(above)

    def _add_distribution(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add moments and extremes of values, 0 where the mask is 0."""
        count = mask.sum()
        mean = values.sum() / count.clamp(min=1)

        # Replace values by the mean where the mask is 0: the mean is never an extreme, and its deviation is 0.
        filled = torch.addcmul(values, 1.0 - mask, mean, out=self._work)
        ends = torch.stack(filled.aminmax()) if filled.numel() else self._empty_extremes
        self.rows.extremes[name] = torch.where(count > 0, ends, self._empty_extremes)
        deviation = filled.sub_(mean).view(-1)
        self.rows.moments[name] = torch.stack([count, mean, torch.dot(deviation, deviation)])

    def _count_where(self, compare: Compare, values: Tensor, limit: float, mask: Tensor | None = None) -> Tensor:
        """Return the number of values for which the comparison is true, where the mask is 1."""
        flags = compare(values, limit, out=self._work)
        return flags.sum() if mask is None else flags.mul_(mask).sum()


Compare = Callable[..., Tensor]


def _comparison_as_float(compare: Compare, values: Tensor, limit: float) -> Tensor:
    """Return 1.0 where the comparison is true, else 0.0."""
    return compare(values, limit, out=torch.empty(values.shape, dtype=torch.float64, device=values.device))
