"""Which implementation of the log-probs runs: the one that is asked for, or the fastest that takes the call."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from rollcorr.core.boundary import in_host_memory, plain, usable_ids
from rollcorr.core.sampling import KeptSets, usable_kept_sets
from rollcorr.kernels.linear_logprob.arguments import (
    check_choice_of_tokens,
    check_options,
    check_temperature,
    check_tensors,
    flat,
    wide_temperature,
)
from rollcorr.kernels.linear_logprob.compose import Operations, composed_log_prob
from rollcorr.kernels.linear_logprob.dense import TorchEpilogue
from rollcorr.kernels.linear_logprob.full_logits import reference_log_prob
from rollcorr.kernels.linear_logprob.kept import kept_sums
from rollcorr.kernels.linear_logprob.problem import LinearLogProb, Problem
from rollcorr.kernels.linear_logprob.products import Precision, asked_for_gradient
from rollcorr.kernels.linear_logprob.triton import triton_log_prob
from rollcorr.kernels.linear_logprob.vocabulary import id_ranges

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Implementation = Literal["auto", "reference", "torch", "triton"]


def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    kept: KeptSets | None = None,
    entropy: bool | Tensor = False,
    log_kept_mass: bool | Tensor = False,
    accumulate_into: Tensor | None = None,
    vocab_group: ProcessGroup | None = None,
    first_id: int = 0,
    chunk: int | None = None,
    precision: Precision = "float32",
    compact: bool | None = None,
    impl: Implementation = "auto",
) -> LinearLogProb:
    """log p(a) = z_a − log Σ_j exp(z_j) with z_j = (h · W_j + b_j) / τ, j over the vocabulary or over a kept set.

    Differentiable in hidden states, weight and bias. Sums are float32, or float64 if an operand is; half-precision
    logits are never rounded before the softmax. Autocast has no effect here.

    Args:
        hidden: h, the hidden states that predict the tokens, (…, d), any float dtype.
        weight: W, the output head's, (V, d). One that does not require a gradient gets none. It must be whole in
            memory: of a sharded head give the gathered tensor.
        token_ids: a, (…), integers in 0 … V − 1; where `mask` is false any integer, for instance −100.
        bias: b, (V,).
        temperature: τ > 0, a number or one for each token, (…). A head's own factor on the logits belongs in here. It
            gets no gradient, except from impl="reference".
        mask: (…) bool; tokens where it is false get log-prob 0, and what stands there is not seen.
        kept: the sets K that the engine sampled from, in the order of `token_ids.flatten()`: j runs over K ∪ {a}, only
            these rows of the head are read, and only they get a gradient. None: the whole vocabulary.
        entropy: whether to return it too, or for which tokens, (…) bool. It is differentiable.
        log_kept_mass: the same for log Σ_{j ∈ K} p_j, which needs the whole vocabulary for those tokens.
        accumulate_into: (V, d) that the weight's gradient is added to, for instance `weight.grad`; autograd then gets
            none for the weight. With kept sets this spares a gradient of the head's size. A call of
            `torch.autograd.grad` for other inputs alone adds nothing.
        vocab_group: ranks that hold slices of the head and of the bias, in any order; all hold the same tokens and
            compute the same loss. The gradient of the hidden states comes out summed over them. In host memory an id
            that is in no slice is an error on each rank; on a device it has the logit 0.
        first_id: the id of the first row of this rank's slice.
        chunk: vocabulary entries whose logits are live at once. None: 8 MB of them, or 256 MB on a GPU.
        precision: of products on a GPU whose operands are float32, because they came so, differ in type, or torch is
            older than 2.8. "float32" rounds nothing, and takes about 14 times what bfloat16 takes on an H200: a warning
            says so where an operand was half precision. "tf32" keeps the first 11 significant bits of an operand, which
            is all that bfloat16 and float16 have, and takes about twice what bfloat16 takes. Half-precision operands of
            one type are multiplied as they are from torch 2.8 on, with either.
        compact: whether tokens that do not count are dropped before the products: forward those outside of `mask`,
            outside of `entropy` and with a set of one id; backward those without a gradient. How many they are is
            data, so on a GPU the host waits for it, about once each way. False computes all of them, and waits for
            nothing. None: True where the values lie in the host's memory, False elsewhere. On a padded batch True may
            spare more than a wait costs.
        impl: "auto" is "torch" everywhere: the Triton kernels are tested interpreted and compiled, but have not run on
            a device yet, and must be asked for.

    Returns:
        Log-probs and what else was asked for, in the shape of `token_ids`.

    Raises:
        TypeError: an operand is no tensor.
        ValueError: shapes or devices do not fit, a dtype is wrong, a number is out of range, the temperature requires a
            gradient, an id in host memory is none of the vocabulary (on a device it is clamped), or `impl` is unknown
            or does not take these arguments.
        ImportError: `impl="triton"`, and Triton or a GPU is missing.

    Example:
        >>> head = torch.tensor([[0.0], [1.0], [2.0]])
        >>> linear_log_prob(torch.tensor([[1.0]]), head, torch.tensor([2])).log_prob
        tensor([-0.4076])
    """
    if impl not in get_args(Implementation):
        raise ValueError(f"impl must be one of {', '.join(map(repr, get_args(Implementation)))}, got {impl!r}")
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be 'float32' or 'tf32', got {precision!r}")
    check_tensors(hidden, weight, token_ids, bias, accumulate_into, impl)
    for name, value in (("mask", mask), ("entropy", entropy), ("log_kept_mass", log_kept_mass)):
        check_choice_of_tokens(name, value, token_ids)
    check_temperature(temperature, token_ids, impl)
    check_options(token_ids, kept, log_kept_mass, vocab_group, first_id, chunk, impl)

    # No implementation checks an id again: one that leads out of the head would be an address beyond its memory.
    ranges = id_ranges(weight, token_ids, first_id, vocab_group)
    ids = usable_ids("token_ids", token_ids, *ranges, mask=mask)
    if kept is not None:
        kept = usable_kept_sets(kept, *ranges, mask=mask)
    weight = plain(weight)
    problem = Problem(
        hidden=plain(hidden).reshape(-1, hidden.shape[-1]),
        weight=weight if accumulate_into is None or not torch.is_grad_enabled() else asked_for_gradient(weight),
        token_ids=ids.flatten(),
        bias=bias,
        temperature=wide_temperature(hidden, weight, temperature),
        mask=None if mask is None else mask.flatten(),
        kept=kept,
        entropy=flat(entropy),
        log_kept_mass=flat(log_kept_mass),
        accumulate_into=accumulate_into,
        group=vocab_group,
        first_id=first_id,
        chunk=chunk,
        precision=precision,
        compact=in_host_memory(token_ids) if compact is None else compact,
    )
    device = hidden.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        if impl == "reference":
            result = reference_log_prob(problem)
        elif impl == "triton":
            result = triton_log_prob(problem)
        else:
            result = composed_log_prob(problem, Operations(TorchEpilogue(), kept_sums))
    return result.view(token_ids.shape)
