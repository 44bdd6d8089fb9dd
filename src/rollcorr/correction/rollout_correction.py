"""Rollout correction in one call: log-probs and a mask in; weights, a loss mask and metrics out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.conversion import resolve
from rollcorr.core import metric_registry as registry
from rollcorr.core.aggregation import Denominators
from rollcorr.core.boundary import check_floating, plain, truth
from rollcorr.core.layout import bounded_offsets, check_layout, sequence_count
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.core.tops import Worst, worst_of
from rollcorr.core.weights import normalization_factor
from rollcorr.correction.process_groups import check_groups, context_reduction, gather_slices, gather_statistics
from rollcorr.kernels.correction import (
    CorrectionOutput,
    Implementation,
    Out,
    check_out,
    copied_to,
    correction_kernel,
)
from rollcorr.kernels.correction.detail import Detail as Detail
from rollcorr.kernels.correction.detail import sequence_detail, token_detail
from rollcorr.kernels.correction.torch.table import BlockRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Correction:
    """What to do with a batch of rollouts, and how far apart the two policies are.

    Attributes:
        weights: importance weights, float32, 0 outside the response mask, in the inputs' shape, without gradient; None
            without importance sampling.
        loss_mask: the tokens that stay in the loss, bool, in the inputs' shape.
        sequence_kept: (B,) bool: the sequence still has a token in the loss, or never had one. For group baselines.
        statistics: mergeable rows on the device, over all ranks of the groups. None without any correction.
        config: what was asked for. None: no correction at all.
        response_mask: the mask that was given, so that a loss can refuse a correction of other tokens. None: unknown.
        cu_seqlens: the offsets that were given. None when padded.
    """

    weights: Tensor | None
    loss_mask: Tensor
    sequence_kept: Tensor
    statistics: Statistics | None
    config: RolloutCorrectionConfig | None
    response_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def loss_weights(self) -> Tensor | None:
        """The weights that belong in the loss: None where they are metrics only (`weights_reach_loss`)."""
        return self.weights if self.config is not None and self.config.weights_reach_loss else None

    def metrics(self, *, prefix: str = registry.PREFIX) -> dict[str, float]:
        """Every metric of the registry that the configuration collects: one device-to-host transfer for all.

        An empty batch reports 0 for its counts, and 0 for everything that cannot be measured.
        """
        return {} if self.statistics is None else registry.finalize(self.statistics.read(), prefix=prefix)

    def worst(self) -> Worst:
        """The tokens and sequences with the largest |log ratio|: one device-to-host transfer.

        Raises:
            ValueError: `correct` was not asked for `detail`.
        """
        tops = {} if self.statistics is None else self.statistics.read().tops
        if not tops:
            raise ValueError("no worst tokens were collected; ask for them: correct(..., detail=True)")
        return worst_of(tops)

    def denominators(self, normalizer: Literal["kept", "original", "weights"] | None = None) -> Denominators:
        """What the loss is divided by, over all ranks of the groups, when this correction is one optimizer step.

        The numbers are those of `rollcorr.correction.loss_denominators`, read from the statistics.

        Args:
            normalizer: "kept" counts what stays in the loss, "original" what the response mask held, "weights" sums the
                applied weights of what stays. Where no weights reach the loss, each counts as 1. None: the
                configuration's normalizer.

        Raises:
            ValueError: no correction was asked for, so there are no statistics to count from.
        """
        if self.statistics is None or self.config is None:
            raise ValueError("without a correction there are no counts; take the denominators from the response mask")
        row = self.statistics.sum
        normalizer = normalizer or self.config.normalizer
        if normalizer == "original":
            return Denominators(row("tokens"), row("sequences"))
        if normalizer == "kept" or self.loss_weights is None:
            return Denominators(row("tokens_kept"), row("sequences_kept"))

        # The statistics hold the weights before batch normalization, and the loss applies those after it.
        factor = _factor(self.statistics) if self.config.rollout_is_batch_normalize else 1.0
        return Denominators(row("kept_weight") / factor, row("kept_sequence_weight") / factor)


def correct(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | str | Mapping[str, Any],
    *,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | None = None,
    context_group: ProcessGroup | None = None,
    detail: Detail | bool = False,
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
        cu_seqlens: first token of each sequence, then N: (B + 1,) integers, only when packed. Checked on the CPU; on a
            GPU wrong values give wrong sums, but never touch memory beyond the data.
        group: data-parallel process group: batch normalization, counts and statistics are then those of the group.
        context_group: ranks that hold other tokens of the same B sequences, in the same order, in any split; slices may
            be empty. Decisions, weights and statistics are then those of the whole sequences, on every rank.
        detail: also collect quantiles and the worst tokens and sequences, in a second read of the batch. A `Detail`
            says how they are named across ranks and shards.
        out: (weights, loss_mask) buffers to write to, contiguous, float32 and bool in the inputs' shape; weights None
            without importance sampling. On the CPU, fresh memory costs more than the arithmetic: reuse them.
        impl: which kernel. "auto" takes the fastest that is proven here: "cpu" (compiled C), else "torch".

    Returns:
        A `Correction`. An empty or wholly rejected batch gives masks of the right shape: no value causes an error,
        unless `nonfinite="raise"` asks for one.

    Raises:
        TypeError: a log-prob, the mask or `cu_seqlens` is no tensor.
        ValueError: shapes or devices disagree or do not fit the layout, a log-prob is no bf16, fp16, fp32 or fp64, the
            configuration or `out` is wrong, the groups overlap, `impl` does not take this batch, or
            `nonfinite="raise"` met a missing log-prob.
        ImportError: `impl` was not built, or what it needs is missing.

    Example:
        >>> train, rollout = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.0, 0.0]])
        >>> correct(train, rollout, torch.tensor([[1, 1, 0]]), "decoupled_token_is").weights
        tensor([[1.6487, 1.0000, 0.0000]])
    """
    # Kernels take addresses and offsets without checks of their own, so everything is checked first.
    check_layout(
        cu_seqlens=cu_seqlens,
        train_log_prob=train_log_prob,
        rollout_log_prob=rollout_log_prob,
        response_mask=response_mask,
    )
    check_floating(train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob)
    resolved = config if isinstance(config, RolloutCorrectionConfig) else resolve(config)
    if out is not None:
        log_probs = {"train_log_prob": train_log_prob, "rollout_log_prob": rollout_log_prob}
        check_out(out, resolved, **log_probs, response_mask=response_mask)
    if resolved is None:
        return _nothing(response_mask, cu_seqlens, out)

    # No rank may count twice.
    if group is not None and context_group is not None:
        check_groups(group, context_group)

    with torch.no_grad():
        inputs = _CorrectionInputs(
            plain(train_log_prob.detach()),
            plain(rollout_log_prob.detach()),
            plain(response_mask.detach()),
            None if cu_seqlens is None else bounded_offsets(cu_seqlens, response_mask.numel()),
            context_group,
        )

        # Decisions about a sequence are those of all its slices: the kernel exchanges them over the context group.
        output = _kernel(inputs, resolved, out, impl)
        statistics = output.statistics
        if detail:
            names = detail if isinstance(detail, Detail) else Detail()
            statistics = statistics | _detail(inputs, output.weights, resolved, names)

        # What other sequences say is merged afterwards. It changes no decision, only the mean of the weights.
        if group is not None:
            statistics = gather_statistics(statistics, group)
        if resolved.nonfinite == "raise":
            _raise_on_nonfinite(statistics)

        # The mean weight is that of the group, so it is known only now. No weight has left this function yet.
        weights = output.weights
        if weights is not None and resolved.rollout_is_batch_normalize:
            weights = weights.div_(_factor(statistics).to(weights.dtype))

    return Correction(
        weights,
        output.loss_mask,
        output.sequence_kept,
        statistics,
        resolved,
        response_mask=response_mask,
        cu_seqlens=cu_seqlens,
    )


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


class _CorrectionInputs(NamedTuple):
    train: Tensor
    rollout: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None
    context_group: ProcessGroup | None

    @property
    def valid(self) -> Tensor:
        """The mask as bool."""
        return truth(self.mask)


def _nothing(response_mask: Tensor, cu_seqlens: Tensor | None, out: Out | None) -> Correction:
    """No correction at all: the response mask is the loss mask."""
    mask = truth(plain(response_mask.detach()))
    kept = mask.new_ones(sequence_count(mask, cu_seqlens=cu_seqlens))
    loss_mask = mask if out is None else out[1].copy_(mask)
    return Correction(None, loss_mask, kept, None, None, response_mask=response_mask, cu_seqlens=cu_seqlens)


def _kernel(
    inputs: _CorrectionInputs, config: RolloutCorrectionConfig, out: Out | None, impl: Implementation
) -> CorrectionOutput:
    """Run the kernel. Over a context group the reference needs whole sequences, and the others exchange their sums."""
    train, rollout, mask, cu_seqlens, context_group = inputs
    if context_group is None or impl != "reference":
        reduce = None if context_group is None else context_reduction(context_group)
        return correction_kernel(train, rollout, mask, config, cu_seqlens=cu_seqlens, reduce=reduce, out=out, impl=impl)

    # The specification stays free of exchanges: it gets whole sequences, and each rank keeps its own tokens.
    whole = gather_slices(train, rollout, inputs.valid, cu_seqlens=cu_seqlens, group=context_group)
    train, rollout, mask = whole.tensors
    output = correction_kernel(train, rollout, mask, config, cu_seqlens=whole.cu_seqlens, impl=impl)
    weights = None if output.weights is None else output.weights[whole.own]
    return copied_to(out, output._replace(weights=weights, loss_mask=output.loss_mask[whole.own]))


def _detail(
    inputs: _CorrectionInputs, weights: Tensor | None, config: RolloutCorrectionConfig, detail: Detail
) -> Statistics:
    """Quantiles and the worst tokens and sequences, over the context group."""
    train, rollout, _, cu_seqlens, context_group = inputs
    if detail.position_ids is not None:
        check_layout(train_log_prob=train, position_ids=detail.position_ids, cu_seqlens=cu_seqlens)

    # Tokens can be merged as they are. Sequences must be joined first, because their sums decide who is worst.
    neutral = config.nonfinite == "neutral"
    tokens, table = token_detail(train, rollout, inputs.valid, weights, detail, neutral=neutral, cu_seqlens=cu_seqlens)
    reduce = context_reduction(context_group)
    if reduce is not None:
        tokens = gather_statistics(tokens, context_group)
        reduce(table, BlockRows())
    return tokens | sequence_detail(table, detail)


def _factor(statistics: Statistics) -> Tensor:
    """What batch normalization divides the weights by: their mean."""
    return normalization_factor(statistics.sum("norm_weight"), statistics.sum("norm_units"))


def _raise_on_nonfinite(statistics: Statistics) -> None:
    missing = int(statistics.sum("nonfinite").item())
    if missing:
        total = int(statistics.sum("tokens").item())
        raise ValueError(
            f"{missing} of {total} response tokens have a missing or non-finite log-prob; find out why, or choose "
            "nonfinite='reject_token', 'reject_sequence' or 'neutral'"
        )
