"""Rollout correction in one call: log-probs and a mask in; weights, a loss mask and metrics out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rollcorr.core import metrics as registry
from rollcorr.core.aggregation import Denominators
from rollcorr.core.layout import check_layout, sequence_count
from rollcorr.core.statistics import Statistics
from rollcorr.core.weights import normalization_factor
from rollcorr.distributed import gather_statistics
from rollcorr.kernels.correction import CorrectionOutput, Implementation, Out, check_out, correction_kernel
from rollcorr.schemas import resolve

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollcorr.config import RolloutCorrectionConfig


@dataclass(frozen=True, eq=False)
class Correction:
    """What to do with a batch of rollouts, and how far apart the two policies are.

    Attributes:
        weights: importance weights, float32, 0 outside the response mask, in the inputs' shape, without gradient; None
            without importance sampling.
        loss_mask: the tokens that stay in the loss, bool, in the inputs' shape.
        sequence_kept: (B,) bool: the sequence still has a token in the loss, or never had one. For group baselines.
        statistics: mergeable rows on the device; over the whole group when one was named. None without any correction.
        config: what was asked for; None for no correction at all.
    """

    weights: Tensor | None
    loss_mask: Tensor
    sequence_kept: Tensor
    statistics: Statistics | None
    config: RolloutCorrectionConfig | None

    @property
    def loss_weights(self) -> Tensor | None:
        """The weights that belong in the loss: None where they are metrics only (`weights_reach_loss`)."""
        return self.weights if self.config is not None and self.config.weights_reach_loss else None

    def metrics(self, *, prefix: str = registry.PREFIX) -> dict[str, float]:
        """Every metric of the registry that the configuration collects: one device-to-host transfer for all.

        The batch of an empty sample reports its counts as 0, and 0 for whatever cannot be measured.
        """
        return {} if self.statistics is None else registry.finalize(self.statistics.read(), prefix=prefix)

    def denominators(self, normalizer: Literal["kept", "original", "weights"] | None = None) -> Denominators:
        """What the loss sums are divided by, over the whole group: token and sequence count, or weight sum.

        Args:
            normalizer: "kept" counts what stays in the loss, "original" what the response mask held, "weights" sums the
                applied weights of what stays; where no weights reach the loss, each counts as 1. Default: the
                configuration's.

        Raises:
            ValueError: no correction was asked for, so there are no statistics to count from.
        """
        if self.statistics is None or self.config is None:
            raise ValueError("without a correction there are no counts; take the denominators from the response mask")
        normalizer = normalizer or self.config.normalizer
        if normalizer == "original":
            return Denominators(self.statistics.sum("tokens"), self.statistics.sum("sequences"))
        if normalizer == "kept" or self.loss_weights is None:
            return Denominators(self.statistics.sum("tokens_kept"), self.statistics.sum("sequences_kept"))
        factor = _factor(self.statistics) if self.config.rollout_is_batch_normalize else 1.0
        return Denominators(
            self.statistics.sum("kept_weight") / factor, self.statistics.sum("kept_sequence_weight") / factor
        )


def correct(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | str | Mapping[str, Any],
    *,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | None = None,
    out: Out | None = None,
    impl: Implementation = "auto",
) -> Correction:
    """Weights w(π/μ), a loss mask and mergeable statistics for one batch of rollouts.

    Nothing here waits for the device, unless `nonfinite="raise"` asks for it.

    Args:
        train_log_prob: log π of the sampled tokens, nats: π_old when decoupled, π_θ in bypass mode. (B, T), or (N,)
            when packed; bf16, fp16, fp32 or fp64. No gradient flows from it.
        rollout_log_prob: log μ, what the sampling policy gave the same tokens, nats. Same shape.
        response_mask: non-zero on tokens that the policy sampled; bool, integer or float; holes are allowed. Same
            shape. Values at masked positions are never read.
        config: a configuration, a preset's name, or a dictionary of any of the three generations.
        cu_seqlens: first token of each sequence, then N: (B + 1,) integers, only when packed.
        group: data-parallel process group: batch normalisation, counts and statistics are then those of the group.
        out: (weights, loss_mask) buffers to write to, contiguous, float32 and bool in the inputs' shape; weights None
            without importance sampling. Reused from step to step they save most of the time: fresh memory costs more
            than the arithmetic.
        impl: which kernel; "auto" takes the fastest that runs here: "cpu" (compiled C), else "blocked" (torch).

    Returns:
        A `Correction`. Data never raises: an empty or wholly rejected batch gives masks of the right shape.

    Raises:
        ValueError: shapes disagree or do not fit the layout, the configuration or `out` is wrong, `impl` does not take
            this batch, or `nonfinite="raise"` met a missing log-prob.
        ImportError: `impl` was not built.

    Example:
        >>> train, rollout = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.0, 0.0]])
        >>> correct(train, rollout, torch.tensor([[1, 1, 0]]), "decoupled_token_is").weights
        tensor([[1.6487, 1.0000, 0.0000]])
    """
    check_layout(
        cu_seqlens=cu_seqlens,
        train_log_prob=train_log_prob,
        rollout_log_prob=rollout_log_prob,
        response_mask=response_mask,
    )
    resolved = resolve(config)
    if out is not None:
        inputs = {"train_log_prob": train_log_prob, "rollout_log_prob": rollout_log_prob}
        check_out(out, resolved, **inputs, response_mask=response_mask)
    if resolved is None:
        return _nothing(response_mask, cu_seqlens, out)
    with torch.no_grad():
        output = correction_kernel(
            train_log_prob.detach(),
            rollout_log_prob.detach(),
            response_mask,
            resolved,
            cu_seqlens=cu_seqlens,
            out=out,
            impl=impl,
        )
        statistics = gather_statistics(output.statistics, group)
        if resolved.nonfinite == "raise":
            _raise_on_nonfinite(statistics)
        weights = _normalized(output, statistics, resolved)
    return Correction(weights, output.loss_mask, output.sequence_kept, statistics, resolved)


def check_mask(response_mask: Tensor) -> None:
    """Check that a mask holds only 0 and 1. Reads values: for loaders and debugging, not for the step path.

    Raises:
        ValueError: names the first value that is neither.
    """
    if response_mask.dtype == torch.bool:
        return
    wrong = response_mask[(response_mask != 0) & (response_mask != 1)]
    if wrong.numel():
        raise ValueError(f"response_mask must hold 0 and 1, got {wrong[0].item()} among {wrong.numel()} other values")


def _nothing(response_mask: Tensor, cu_seqlens: Tensor | None, out: Out | None) -> Correction:
    """No correction at all: the response mask is the loss mask."""
    mask = response_mask if response_mask.dtype == torch.bool else response_mask != 0
    kept = mask.new_ones(sequence_count(mask, cu_seqlens=cu_seqlens))
    return Correction(None, mask if out is None else out[1].copy_(mask), kept, None, None)


def _normalized(output: CorrectionOutput, statistics: Statistics, config: RolloutCorrectionConfig) -> Tensor | None:
    if output.weights is None or not config.rollout_is_batch_normalize:
        return output.weights
    return output.weights.div_(_factor(statistics).to(output.weights.dtype))


def _factor(statistics: Statistics) -> Tensor:
    return normalization_factor(statistics.sum("norm_weight"), statistics.sum("norm_units"))


def _raise_on_nonfinite(statistics: Statistics) -> None:
    missing = int(statistics.sum("nonfinite").item())
    if missing:
        total = int(statistics.sum("tokens").item())
        raise ValueError(
            f"{missing} of {total} response tokens have a missing or non-finite log-prob; find out why, or choose "
            "nonfinite='reject_token', 'reject_sequence' or 'neutral'"
        )
