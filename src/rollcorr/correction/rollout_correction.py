"""Rollout correction in one call: log-probs and a mask in; weights, a loss mask and metrics out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rollcorr.config import Implementation, RolloutCorrectionConfig
from rollcorr.config.checks import unknown_name
from rollcorr.config.conversion import resolve
from rollcorr.core.boundary import (
    bounded_offsets,
    check_floating,
    check_tensors,
    in_host_memory,
    plain,
    truth,
)
from rollcorr.core.horizon import chosen_decay
from rollcorr.core.layout import check_layout, check_shapes, sequence_count, sequence_max
from rollcorr.core.mergeable_statistics import STATISTICS_DTYPE, Statistics
from rollcorr.core.ratios import classify_tokens
from rollcorr.correction.correction_checks import Fingerprint
from rollcorr.correction.denominators import count_denominators
from rollcorr.correction.process_groups import (
    check_groups,
    context_reduction,
    gather,
    gather_slices,
    gather_statistics,
    members,
)
from rollcorr.correction.result import Correction, StepCounts, mean_weight, with_context
from rollcorr.kernels.correction.call import Batch, CorrectionOutput, Out, check_out, copied_to
from rollcorr.kernels.correction.detail import Detail as Detail
from rollcorr.kernels.correction.detail import sequence_detail, token_detail
from rollcorr.kernels.correction.dispatch import correction_kernel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

    from rollcorr.config import CorrectionOptions, PresetName


_OPTION_NAMES = tuple(field.name for field in dataclasses.fields(RolloutCorrectionConfig))


def correct(
    train_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | PresetName | Mapping[str, Any] | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | Literal["local"] | None = None,
    context_group: ProcessGroup | None = None,
    detail: Detail | bool = False,
    fill: float = 0.0,
    densities: bool = False,
    out: Out | None = None,
    impl: Implementation = "auto",
    **options: Unpack[CorrectionOptions],
) -> Correction:
    """Compute weights w(π/μ), a loss mask and mergeable statistics for one batch of rollouts.

    Without a configuration this only measures the mismatch, and the weights that a token-level correction would have.
    It does not synchronize with the device, except under `nonfinite="raise"` and `rollout_is_horizon="auto"`.

    Args:
        train_log_prob: log π of the sampled tokens, nats: π_old when decoupled, π_θ in bypass mode. (B, T), or (N,)
            when packed; bf16, fp16, fp32 or fp64. No gradient flows from it.
        rollout_log_prob: log μ of the same tokens, as the sampling policy reported it, nats. Same shape.
        response_mask: non-zero on tokens that the policy sampled; bool, integer or float; holes are allowed. Same
            shape. Log-probs where it is 0 are never read. Negative and non-finite values raise in host memory.
        config: a configuration, a preset's name, or a dictionary of any of the three generations; defaults to the
            preset `measure`, or to `options`. Type checkers know the names; pass a name that is known only at run time
            through `RolloutCorrectionConfig.preset(name)`.
        cu_seqlens: first token of each sequence, then N: (B + 1,) integers, only when packed. Checked on the CPU; on a
            GPU invalid values produce invalid sums, but never access memory beyond the data.
        group: data-parallel process group, over which batch normalization, counts and statistics are computed. Defaults
            to this process; "local" is the same, but `policy_loss` then does not warn on several ranks.
        context_group: ranks with other tokens of the same B sequences, in the same order, in any split; slices may be
            empty. Decisions, weights and statistics then cover the full sequences, on every rank. Level "horizon" needs
            consecutive tokens on each rank, in the order of the ranks.
        detail: also collect quantiles and the worst tokens and sequences, in a second read of the batch. A `Detail`
            configures their identifiers across ranks and shards.
        fill: the value of the weights where there is no weight: outside the response mask, and on tokens that are
            rejected for a missing log-prob. Use 1 for trainers that compute the logarithm of every weight.
        densities: whether the log-probs are log-densities of continuous actions, which may all be above 0. Otherwise
            such values raise, because they look like probabilities.
        out: (weights, loss_mask) output buffers, contiguous, float32 and bool in the inputs' shape; weights are `None`
            without importance sampling. On the CPU, allocation costs more than the arithmetic: reuse them.
        impl: the kernel. "auto" selects `config.impl`, or by default the fastest proven kernel for this device:
            "cpu" (compiled C), "triton" (GPUs), else "torch".
        options: fields of `RolloutCorrectionConfig` that override `config`, e.g. `rollout_is="token"`.

    Returns:
        A `Correction`. An empty or fully rejected batch returns masks of the correct shape. No log-prob value raises,
        except under `nonfinite="raise"`.

    Raises:
        TypeError: a log-prob, the mask or `cu_seqlens` is not a tensor, or an option is unknown.
        ValueError: shapes or devices disagree or do not fit the layout, a log-prob is not bf16, fp16, fp32 or fp64, the
            mask contains a negative or non-finite value or a policy contains probabilities (checked in host memory;
            `out` is then undefined), the configuration or `out` is invalid, the groups overlap, `impl` does not support
            this batch, or a log-prob is missing under `nonfinite="raise"`.
        ImportError: `impl` was not built, or one of its dependencies is missing.

    Example:
        >>> train, rollout = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.0, 0.0]])
        >>> correct(train, rollout, torch.tensor([[1, 1, 0]]), rollout_is="token").weights
        tensor([[1.6487, 1.0000, 0.0000]])
    """
    # Kernels do not check the pointers they receive, so everything but the values of `cu_seqlens` is checked first.
    tensors = {
        "train_log_prob": train_log_prob,
        "rollout_log_prob": rollout_log_prob,
        "response_mask": response_mask,
    }
    buffers = {} if out is None else dict(zip(("out weights", "out loss_mask"), out, strict=True))
    check_tensors(**tensors, **buffers, cu_seqlens=cu_seqlens)
    check_shapes(cu_seqlens=cu_seqlens, **tensors)
    check_floating(train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob)
    for name in options:
        if name not in _OPTION_NAMES:
            own = [option for option in inspect.signature(correct).parameters if option != "options"]
            known = dict.fromkeys((*own, *_OPTION_NAMES))  # `impl` is both
            raise TypeError(unknown_name(f"there is no option {name!r} of correct", name, known))
    resolved = (
        config if isinstance(config, RolloutCorrectionConfig) and not options else configuration_of(config, options)
    )
    if out is not None:
        check_out(out, resolved, **tensors)

    # No rank may be counted twice.
    peers = None if group is None else members(group)
    if peers is not None and context_group is not None:
        check_groups(peers, context_group)
    ranks = (1 if peers is None else peers.size(), 1 if context_group is None else context_group.size())

    inputs = Batch(
        plain(train_log_prob.detach()),
        plain(rollout_log_prob.detach()),
        plain(response_mask.detach()),
        None if cu_seqlens is None else bounded_offsets(cu_seqlens, response_mask.numel()),
    )
    counts, statistics, fingerprint = StepCounts(), None, None
    if resolved is not None and resolved.rollout_is == "horizon" and resolved.rollout_is_horizon == "auto":
        resolved = _with_chosen_horizon(inputs, resolved, peers, context_group, impl)
    if resolved is None:
        # Without statistics, count from the mask. Every response token stays.
        weights, loss_mask = None, truth(inputs.mask, "response_mask")
        if out is not None:
            loss_mask = out[1].copy_(loss_mask)
        sequence_kept = loss_mask.new_ones(sequence_count(loss_mask, cu_seqlens=inputs.cu_seqlens))
        counted = count_denominators(loss_mask, cu_seqlens=cu_seqlens, group=peers, context_group=context_group)
        counts = StepCounts(counted, counted, counted)
    else:
        weights, loss_mask, sequence_kept, statistics, sums = _run_correction(
            inputs, resolved, peers, context_group, detail, out, impl
        )
        if not densities and in_host_memory(sums):
            _check_no_probabilities(inputs, sums)
        fingerprint = Fingerprint(sums, (train_log_prob.dtype, rollout_log_prob.dtype))
        if weights is not None and fill:
            # Fill outside the response mask, and where a token is rejected for a missing log-prob.
            valid = truth(inputs.mask)
            _, _, missing = classify_tokens(inputs.train, inputs.rollout, valid)
            has_none = ~valid if resolved.nonfinite == "neutral" else ~valid | missing
            weights = weights.masked_fill_(has_none, fill)

    correction = Correction(
        weights,
        loss_mask,
        sequence_kept,
        statistics,
        resolved,
        response_mask=response_mask,
        cu_seqlens=cu_seqlens,
        group=group,
        context_group=context_group,
        ranks=ranks,
        batch_shape=tuple(response_mask.shape),
    )
    return with_context(correction, counts, fingerprint)


def _check_no_probabilities(inputs: Batch, policy_sums: Tensor) -> None:
    """Raise if the batch, in host memory, has probabilities in place of log-probs; values up to 2^-8 are rounding.

    Args:
        inputs: the batch.
        policy_sums: as in `CorrectionOutput`.

    Raises:
        ValueError: no value of a policy is below 0, and a finite one is above 2^-8.
    """
    # A negative sum needs a negative value. Usually the first sequence has one, and no pass over the tokens is needed.
    sums = policy_sums.numpy()
    if sums.shape[1] and sums.item(2, 0) < 0 and sums.item(3, 0) < 0:
        return
    for name, policy, totals in (("train", inputs.train, sums[2]), ("rollout", inputs.rollout, sums[3])):
        if (totals < 0).any():
            continue
        values = policy[truth(inputs.mask)]
        above = values[(values > 2**-8) & (values < torch.inf)]
        if above.numel() and not (values < 0).any():
            raise ValueError(
                f"{name}_log_prob holds probabilities, or log-probs without their sign: no value is below 0, and the "
                f"first is {above[0].item():g}; give natural logarithms, {name}_log_prob.log(), or "
                "densities=True where the actions are continuous"
            )


def configuration_of(
    config: RolloutCorrectionConfig | str | Mapping[str, Any] | None, options: Mapping[str, Any]
) -> RolloutCorrectionConfig | None:
    """Resolve the `config` and `options` arguments of `correct`: return a configuration, or `None` for no correction.

    Raises:
        TypeError, ValueError: the configuration is invalid, or options would have no effect.
    """
    if config is None:
        # A given `rollout_is` requests weights in the loss, and `measure` would keep them out. The preset "disabled" is
        # an empty configuration, to which the options are added below.
        config = "disabled" if "rollout_is" in options else "measure"
    resolved = resolve(config)
    if not options:
        return resolved
    if resolved is None:
        raise ValueError(f"config={config!r} means no correction at all, so {', '.join(options)} would change nothing")
    return resolved.with_options(**options)


def _run_correction(
    inputs: Batch,
    config: RolloutCorrectionConfig,
    group: ProcessGroup | None,
    context_group: ProcessGroup | None,
    detail: Detail | bool,
    out: Out | None,
    impl: Implementation,
) -> CorrectionOutput:
    """Run the kernel, merge its statistics over the ranks, and normalize its weights."""
    with torch.set_grad_enabled(False):
        if config.rollout_is == "horizon" and context_group is not None:
            _check_rank_slice_order(inputs, detail.position_ids if isinstance(detail, Detail) else None, context_group)

        # Decisions about a sequence depend on all of its slices: the kernel merges their sums over the context group.
        output = _run_kernel(inputs, config, context_group, out, impl)
        statistics = output.statistics
        if detail:
            names = detail if isinstance(detail, Detail) else Detail()
            statistics = statistics | _compute_detail(inputs, output.weights, config, context_group, names, impl)

        if config.rollout_is == "horizon":
            ends = torch.full((2,), config.horizon_decay, dtype=STATISTICS_DTYPE, device=inputs.mask.device)
            statistics = statistics | Statistics.of(extremes={"horizon": ends})

        # Merge the statistics of other sequences afterwards. They change only the mean of the weights, no decision.
        if group is not None:
            statistics = gather_statistics(statistics, group)
        if config.nonfinite == "raise":
            missing = int(statistics.sum("nonfinite").item())
            if missing:
                of_tokens = f"{missing} of {int(statistics.sum('tokens').item())} response tokens"
                raise ValueError(
                    f"{of_tokens} have a missing or non-finite log-prob; find out why, or choose "
                    "nonfinite='reject_token', 'reject_sequence' or 'neutral'"
                )

        # The mean weight covers the group, so it is known only after the merge.
        weights = output.weights
        if weights is not None and config.rollout_is_batch_normalize:
            weights = weights.div_(mean_weight(statistics).to(weights.dtype))
    return CorrectionOutput(weights, output.loss_mask, output.sequence_kept, statistics, output.policy_sums)


def _with_chosen_horizon(
    inputs: Batch,
    config: RolloutCorrectionConfig,
    group: ProcessGroup | None,
    context_group: ProcessGroup | None,
    impl: Implementation,
) -> RolloutCorrectionConfig:
    """Return the configuration with λ for the group's batch: one more read of the tokens, and a wait for the device."""
    with torch.set_grad_enabled(False):
        measuring = RolloutCorrectionConfig(impl=config.impl)
        statistics = _run_kernel(inputs, measuring, context_group, None, impl).statistics
        if group is not None:
            statistics = gather_statistics(statistics, group)
    numbers = statistics.read()
    count, _, deviations = numbers.moments["log_ratio"]
    decay = chosen_decay(deviations / max(count, 1.0), numbers.sums["sequences_measured"])
    return config.with_options(rollout_is_horizon=decay)


def _check_rank_slice_order(inputs: Batch, position_ids: Tensor | None, context_group: ProcessGroup) -> None:
    """Raise `ValueError` if a slice does not lie behind those of earlier ranks: a wait for the device."""
    if position_ids is None:
        raise ValueError(
            "rollout_is='horizon' with context_group= needs slices in the order of the ranks, and no positions show it;"
            " pass detail=Detail(position_ids=...), or choose another level"
        )
    check_layout(train_log_prob=inputs.train, position_ids=position_ids, cu_seqlens=inputs.cu_seqlens)
    valid, positions = truth(inputs.mask, "response_mask"), position_ids.double()
    ends = [sequence_max(sign * positions, valid, cu_seqlens=inputs.cu_seqlens) for sign in (-1, 1)]
    firsts, lasts = gather(torch.stack(ends), context_group).unbind(1)
    mixed = -firsts[1:] <= lasts.cummax(0).values[:-1]
    if mixed.any():
        rank, sequence = mixed.nonzero()[0].tolist()
        first, last = -firsts[rank + 1, sequence], lasts[: rank + 1, sequence].max()
        raise ValueError(
            "rollout_is='horizon' needs slices in the order of the ranks (no zig-zag): in sequence "
            f"{sequence} rank {rank + 1} begins at position {first:g}, and an earlier rank has {last:g}; it may begin "
            f"at {last + 1:g}: gather whole sequences (rollcorr.layouts.whole_tokens), or choose another level"
        )


def _run_kernel(
    inputs: Batch,
    config: RolloutCorrectionConfig,
    context_group: ProcessGroup | None,
    out: Out | None,
    impl: Implementation,
) -> CorrectionOutput:
    """Run the kernel. Over a context group the reference gathers full sequences; other kernels merge their sums."""
    train, rollout, mask, cu_seqlens = inputs
    impl = config.impl if impl == "auto" else impl
    if context_group is None or impl != "reference":
        reduce = None if context_group is None else context_reduction(context_group)
        return correction_kernel(train, rollout, mask, config, cu_seqlens=cu_seqlens, reduce=reduce, out=out, impl=impl)

    # The reference stays free of collectives: it computes on full sequences, and each rank keeps its own tokens.
    check_layout(response_mask=mask, cu_seqlens=cu_seqlens)
    whole = gather_slices(train, rollout, truth(mask, "response_mask"), cu_seqlens=cu_seqlens, group=context_group)
    train, rollout, mask = whole.tensors
    output = correction_kernel(train, rollout, mask, config, cu_seqlens=whole.cu_seqlens, impl=impl)
    weights = None if output.weights is None else output.weights[whole.own]
    return copied_to(out, output._replace(weights=weights, loss_mask=output.loss_mask[whole.own]))


def _compute_detail(
    inputs: Batch,
    weights: Tensor | None,
    config: RolloutCorrectionConfig,
    context_group: ProcessGroup | None,
    detail: Detail,
    impl: Implementation,
) -> Statistics:
    """Compute quantiles and the worst tokens and sequences, over the context group."""
    if detail.position_ids is not None:
        check_layout(train_log_prob=inputs.train, position_ids=detail.position_ids, cu_seqlens=inputs.cu_seqlens)

    # Token rows merge directly. Sequences must be joined first, because the worst ones are ranked by their sums.
    tokens, table = token_detail(inputs, config, weights, detail, compiled=impl in ("auto", "cpu"))
    if context_group is not None:
        tokens = gather_statistics(tokens, context_group)
        context_reduction(context_group).merge(table, Statistics.of(device=inputs.mask.device))
    return tokens | sequence_detail(table, detail)
