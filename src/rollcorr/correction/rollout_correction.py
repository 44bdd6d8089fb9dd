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
from rollcorr.core.boundary import bounded_offsets, check_floating, in_host_memory, plain, truth
from rollcorr.core.layout import check_layout, check_shapes, sequence_count
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.core.ratios import classify_tokens
from rollcorr.correction.correction_checks import Fingerprint
from rollcorr.correction.denominators import count_denominators
from rollcorr.correction.process_groups import (
    check_groups,
    context_reduction,
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


_OPTIONS = tuple(field.name for field in dataclasses.fields(RolloutCorrectionConfig))


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
    """Weights w(π/μ), a loss mask and mergeable statistics for one batch of rollouts.

    Without a configuration this measures: the mismatch, and the weights that a token-level correction would have.
    Nothing here waits for the device, unless `nonfinite="raise"` asks for it.

    Args:
        train_log_prob: log π of the sampled tokens, nats: π_old when decoupled, π_θ in bypass mode. (B, T), or (N,)
            when packed; bf16, fp16, fp32 or fp64. No gradient flows from it.
        rollout_log_prob: log μ, what the sampling policy gave the same tokens, nats. Same shape.
        response_mask: non-zero on tokens that the policy sampled; bool, integer or float; holes are allowed. Same
            shape. Log-probs where it is 0 are never read. Negative and non-finite values raise in host memory.
        config: a configuration, a preset's name, or a dictionary of any of the three generations. None: the preset
            `measure`, or what `options` say. Type checkers know the names; one that is known only at run time goes
            through `RolloutCorrectionConfig.preset(name)`.
        cu_seqlens: first token of each sequence, then N: (B + 1,) integers, only when packed. Checked on the CPU; on a
            GPU wrong values give wrong sums, but never touch memory beyond the data.
        group: data-parallel process group: batch normalization, counts and statistics are then those of the group.
            "local" is this process, like None, and `policy_loss` then does not warn on several ranks.
        context_group: ranks that hold other tokens of the same B sequences, in the same order, in any split; slices may
            be empty. Decisions, weights and statistics are then those of the whole sequences, on every rank.
        detail: also collect quantiles and the worst tokens and sequences, in a second read of the batch. A `Detail`
            says how they are named across ranks and shards.
        fill: what the weights hold where there is no weight: outside the response mask, and on tokens whose missing
            log-prob is rejected. 1 is for trainers that take the logarithm of every weight.
        densities: whether the log-probs are log-densities of continuous actions, which may all be above 0. Otherwise
            such values raise, because they look like probabilities.
        out: (weights, loss_mask) buffers to write to, contiguous, float32 and bool in the inputs' shape; weights None
            without importance sampling. On the CPU, fresh memory costs more than the arithmetic: reuse them.
        impl: which kernel. "auto" takes what `config.impl` names, else the fastest that is proven on this device:
            "cpu" (compiled C), "triton" (GPUs), else "torch".
        options: fields of `RolloutCorrectionConfig` that replace those of `config`, e.g. `rollout_is="token"`.

    Returns:
        A `Correction`. An empty or wholly rejected batch gives masks of the right shape: no value of a log-prob causes
        an error, unless `nonfinite="raise"` asks for one.

    Raises:
        TypeError: a log-prob, the mask or `cu_seqlens` is no tensor, or there is no option of that name.
        ValueError: shapes or devices disagree or do not fit the layout, a log-prob is no bf16, fp16, fp32 or fp64, the
            mask contains a negative or non-finite value or a policy holds probabilities (seen in host memory; `out` is
            then undefined), the configuration or `out` is wrong, the groups overlap, `impl` does not take this batch,
            or `nonfinite="raise"` met a missing log-prob.
        ImportError: `impl` was not built, or what it needs is missing.

    Example:
        >>> train, rollout = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.0, 0.0]])
        >>> correct(train, rollout, torch.tensor([[1, 1, 0]]), rollout_is="token").weights
        tensor([[1.6487, 1.0000, 0.0000]])
    """
    # Kernels take addresses without checks of their own, so everything but the values of `cu_seqlens` is checked first.
    check_shapes(
        cu_seqlens=cu_seqlens,
        train_log_prob=train_log_prob,
        rollout_log_prob=rollout_log_prob,
        response_mask=response_mask,
    )
    check_floating(train_log_prob=train_log_prob, rollout_log_prob=rollout_log_prob)
    for name in options:
        if name not in _OPTIONS:
            own = [option for option in inspect.signature(correct).parameters if option != "options"]
            known = dict.fromkeys((*own, *_OPTIONS))  # `impl` is both
            raise TypeError(unknown_name(f"there is no option {name!r} of correct", name, known))
    resolved = (
        config if isinstance(config, RolloutCorrectionConfig) and not options else configuration_of(config, options)
    )
    if out is not None:
        log_probs = {"train_log_prob": train_log_prob, "rollout_log_prob": rollout_log_prob}
        check_out(out, resolved, **log_probs, response_mask=response_mask)

    # No rank may count twice.
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
    if resolved is None:
        # There are no statistics to count from, and every response token stays.
        weights, loss_mask = None, truth(inputs.mask, "response_mask")
        if out is not None:
            loss_mask = out[1].copy_(loss_mask)
        sequence_kept = loss_mask.new_ones(sequence_count(loss_mask, cu_seqlens=inputs.cu_seqlens))
        counted = count_denominators(loss_mask, cu_seqlens=cu_seqlens, group=peers, context_group=context_group)
        counts = StepCounts(counted, counted, counted)
    else:
        weights, loss_mask, sequence_kept, statistics, sums = _corrected(
            inputs, resolved, peers, context_group, detail, out, impl
        )
        if not densities and in_host_memory(sums):
            _check_no_probabilities(inputs, sums)
        fingerprint = Fingerprint(sums, (train_log_prob.dtype, rollout_log_prob.dtype))
        if weights is not None and fill:
            # Outside the response mask, and where a token is rejected because a log-prob is missing.
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
    """Reject probabilities in place of log-probs, in host memory. Values within 2^-8 of 0 are rounding.

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
    """What `correct` makes of its `config` and `options`: the configuration, or None for no correction at all.

    Raises:
        TypeError, ValueError: the configuration is wrong, or options would change nothing.
    """
    if config is None:
        # Whoever names a level asks for weights in the loss, and `measure` keeps its own out of it.
        config = "disabled" if "rollout_is" in options else "measure"
    resolved = resolve(config)
    if not options:
        return resolved
    if resolved is None:
        raise ValueError(f"config={config!r} means no correction at all, so {', '.join(options)} would change nothing")
    return resolved.with_options(**options)


def _corrected(
    inputs: Batch,
    config: RolloutCorrectionConfig,
    group: ProcessGroup | None,
    context_group: ProcessGroup | None,
    detail: Detail | bool,
    out: Out | None,
    impl: Implementation,
) -> CorrectionOutput:
    """What the kernel makes of the batch, merged over the ranks, and with its weights normalized."""
    with torch.set_grad_enabled(False):
        # Decisions about a sequence are those of all its slices: the kernel exchanges them over the context group.
        output = _kernel(inputs, config, context_group, out, impl)
        statistics = output.statistics
        if detail:
            names = detail if isinstance(detail, Detail) else Detail()
            statistics = statistics | _detail(inputs, output.weights, config, context_group, names, impl)

        # What other sequences say is merged afterwards. It changes no decision, only the mean of the weights.
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

        # The mean weight is that of the group, so it is known only now. No weight has left this function yet.
        weights = output.weights
        if weights is not None and config.rollout_is_batch_normalize:
            weights = weights.div_(mean_weight(statistics).to(weights.dtype))
    return CorrectionOutput(weights, output.loss_mask, output.sequence_kept, statistics, output.policy_sums)


def _kernel(
    inputs: Batch,
    config: RolloutCorrectionConfig,
    context_group: ProcessGroup | None,
    out: Out | None,
    impl: Implementation,
) -> CorrectionOutput:
    """Run the kernel. Over a context group the reference needs whole sequences, and the others exchange their sums."""
    train, rollout, mask, cu_seqlens = inputs
    impl = config.impl if impl == "auto" else impl
    if context_group is None or impl != "reference":
        reduce = None if context_group is None else context_reduction(context_group)
        return correction_kernel(train, rollout, mask, config, cu_seqlens=cu_seqlens, reduce=reduce, out=out, impl=impl)

    # The specification stays free of exchanges: it gets whole sequences, and each rank keeps its own tokens.
    check_layout(response_mask=mask, cu_seqlens=cu_seqlens)
    whole = gather_slices(train, rollout, truth(mask, "response_mask"), cu_seqlens=cu_seqlens, group=context_group)
    train, rollout, mask = whole.tensors
    output = correction_kernel(train, rollout, mask, config, cu_seqlens=whole.cu_seqlens, impl=impl)
    weights = None if output.weights is None else output.weights[whole.own]
    return copied_to(out, output._replace(weights=weights, loss_mask=output.loss_mask[whole.own]))


def _detail(
    inputs: Batch,
    weights: Tensor | None,
    config: RolloutCorrectionConfig,
    context_group: ProcessGroup | None,
    detail: Detail,
    impl: Implementation,
) -> Statistics:
    """Quantiles and the worst tokens and sequences, over the context group."""
    if detail.position_ids is not None:
        check_layout(train_log_prob=inputs.train, position_ids=detail.position_ids, cu_seqlens=inputs.cu_seqlens)

    # Tokens can be merged as they are. Sequences must be joined first, because their sums decide who is worst.
    tokens, table = token_detail(inputs, config, weights, detail, compiled=impl in ("auto", "cpu"))
    if context_group is not None:
        tokens = gather_statistics(tokens, context_group)
        context_reduction(context_group)(table, Statistics.of(device=inputs.mask.device))
    return tokens | sequence_detail(table, detail)
