"""Log-probs without logits: checks of the arguments, and the requested implementation, or the default.

The checks read only shapes and types, so they never wait for the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from numbers import Real
from typing import TYPE_CHECKING, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from rollcorr.core.boundary import (
    check_floating,
    check_integers,
    check_positive,
    check_tensors,
    in_host_memory,
    in_transform,
    plain,
    type_name,
    usable_ids,
)
from rollcorr.core.logprobs import NO_GREEDY
from rollcorr.core.sampling import KeptSets, usable_kept_sets
from rollcorr.kernels.linear_logprob.compose import composed_log_prob, id_ranges
from rollcorr.kernels.linear_logprob.dense import Epilogue
from rollcorr.kernels.linear_logprob.full_logits import reference_log_prob
from rollcorr.kernels.linear_logprob.kept import RaggedProducts
from rollcorr.kernels.linear_logprob.problem import LinearLogProb, Problem, wide_type
from rollcorr.kernels.linear_logprob.products import Precision, asked_for_gradient
from rollcorr.kernels.linear_logprob.triton import triton_log_prob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Value = TypeVar("Value")

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
    """Compute log p(a) = z_a − log Σ_j exp(z_j) with z_j = (h · W_j + b_j) / τ, j over the vocabulary or a kept set.

    Differentiable in hidden states, weight and bias. Sums are float32, or float64 if an operand is float64;
    half-precision logits are never rounded before the softmax. Autocast has no effect here.

    Args:
        hidden: h, the hidden states that predict the tokens, (…, d), any float dtype.
        weight: W, the output head's weight, (V, d). Without `requires_grad` it gets no gradient. It must be complete in
            memory: gather a sharded head first.
        token_ids: a, (…), integers in 0 … V − 1; any integer where `mask` is false, for example −100.
        bias: optional; b, (V,).
        temperature: τ > 0, a number or one for each token, (…). Include the head's own factor on the logits. It gets no
            gradient, except from impl="reference".
        mask: optional; (…) bool. Tokens where it is false get log-prob 0, and their values are ignored. The default is
            all tokens.
        kept: optional; the sets K that the engine sampled from, in the order of `token_ids.flatten()`: j runs over K ∪
            {a}, and only these rows of the head are read and get a gradient. The default is the full vocabulary.
        entropy: whether to return it, or for which tokens, (…) bool. It is differentiable.
        log_kept_mass: the same for log Σ_{j ∈ K} p_j, which needs the full vocabulary for those tokens.
        accumulate_into: optional; (V, d), to which the weight's gradient is added, for example `weight.grad`. Autograd
            then returns no gradient for the weight. With kept sets this avoids a gradient of the head's size. A call of
            `torch.autograd.grad` for only other inputs does not add to it.
        vocab_group: optional; ranks with slices of the head and of the bias, in any order. All ranks need the same
            tokens and compute the same loss. The gradient of the hidden states is summed over them. In host memory an
            id outside of every slice is an error on each rank; on a device it has the logit 0.
        first_id: the id of the first row of this rank's slice.
        chunk: number of vocabulary entries whose logits are in memory at once. The default is 8 MB of logits, or 256 MB
            on a GPU.
        precision: precision of products on a GPU with float32 operands. Operands are float32 if they were given so,
            differ in type, or torch is older than 2.8. "float32", the default, does not round, and needs about 14 times
            the time of bfloat16 on an H200: a warning reports that if an operand was half precision. "tf32" keeps the
            first 11 significant bits of an operand, all that bfloat16 and float16 have, and needs about twice the time
            of bfloat16. From torch 2.8 on, half-precision operands of one type are multiplied unchanged with either
            option.
        compact: whether to drop tokens that do not count before the products: forward the tokens outside of `mask`,
            outside of `entropy` and with a set of one id; backward the tokens without a gradient. Their number depends
            on the data, so on a GPU the host waits for it, about once in each direction. False computes all tokens,
            without a wait. The default is True for values in host memory, False elsewhere. On a padded batch True may
            save more time than the wait costs.
        impl: "auto" selects "torch" on every device. The Triton kernels are tested interpreted and compiled, but have
            not run on a device yet: select them explicitly.

    Returns:
        The log-probs and the requested extras, in the shape of `token_ids`.

    Raises:
        TypeError: an operand is not a tensor.
        ValueError: shapes or devices do not match, a dtype is invalid, a number is out of range, the temperature
            requires a gradient, an id in host memory is not in the vocabulary (on a device it is clamped), or `impl` is
            unknown or does not support these arguments.
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
    _check_operands(hidden, weight, token_ids, bias, accumulate_into, impl)
    for name, value in (("mask", mask), ("entropy", entropy), ("log_kept_mass", log_kept_mass)):
        _check_token_mask(name, value, token_ids)
    _check_temperature(temperature, token_ids, impl)
    _check_options(token_ids, kept, log_kept_mass, vocab_group, first_id, chunk, impl)

    # No implementation checks an id again: an id outside of the head would be an address beyond its memory.
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
        temperature=_flatten(temperature, wide_type(hidden, weight)),
        mask=_flatten(mask),
        kept=kept,
        entropy=_flatten(entropy),
        log_kept_mass=_flatten(log_kept_mass),
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
            result = composed_log_prob(problem, Epilogue(), RaggedProducts())
    return LinearLogProb._make(x if x is None else x.view(token_ids.shape) for x in result)


def _flatten(value: Value, dtype: torch.dtype | None = None) -> Value:
    """Return a flat tensor, optionally in a new dtype; return other values unchanged."""
    return cast("Value", value.flatten().to(dtype or value.dtype)) if isinstance(value, Tensor) else value


def _check_operands(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, bias: Tensor | None, accumulate_into: Tensor | None, impl: str
) -> None:
    """Raise ValueError unless the operands match; TypeError if one is not a tensor."""
    operands = {"hidden": hidden, "weight": weight, "bias": bias, "accumulate_into": accumulate_into}
    check_tensors(**operands, token_ids=token_ids)
    check_floating(**operands)
    check_integers(token_ids=token_ids)
    if impl != "reference" and in_transform():
        raise ValueError(
            f"impl={impl!r} does not work inside a transform of torch.func; use impl='reference', which makes all "
            "logits"
        )
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[-1:]:
        raise ValueError(f"hidden {tuple(hidden.shape)} must be (…, d) and weight {tuple(weight.shape)} (V, d)")
    if hidden.shape[:-1] != token_ids.shape:
        raise ValueError(f"hidden {tuple(hidden.shape)} must be token_ids {tuple(token_ids.shape)} with d added")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must have one entry for each of the weight's {len(weight)} rows")
    # If no backward pass reached the buffer, it would stay empty without an error.
    if accumulate_into is None:
        return
    if accumulate_into.shape != weight.shape:
        raise ValueError(f"accumulate_into {tuple(accumulate_into.shape)} and weight {tuple(weight.shape)} differ")
    inputs = [hidden, weight] if bias is None else [hidden, weight, bias]
    if torch.is_grad_enabled() and not any(x.requires_grad for x in inputs):
        raise ValueError(
            "accumulate_into would get nothing: neither hidden, weight nor bias requires a gradient; leave it out, or "
            "let the hidden states require one"
        )


def _check_temperature(temperature: float | Tensor, token_ids: Tensor, impl: str) -> None:
    """Raise ValueError unless it is a number above 0, or one for each token without a required gradient."""
    if not isinstance(temperature, Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, Real):
            kind = type_name(temperature)
            raise TypeError(f"temperature must be a number or a tensor, got {kind}; give torch.as_tensor(temperature)")
        check_positive("temperature", temperature, NO_GREEDY)
        return
    check_tensors(token_ids=token_ids, temperature=temperature)
    if temperature.shape != token_ids.shape:
        raise ValueError(f"temperature {tuple(temperature.shape)} and token_ids {tuple(token_ids.shape)} differ")
    check_floating(temperature=temperature)
    if temperature.requires_grad and torch.is_grad_enabled() and impl != "reference":
        raise ValueError(
            f"temperature requires a gradient, and impl={impl!r} gives it none; give temperature.detach(), or use "
            "impl='reference', which makes all logits"
        )


def _check_token_mask(name: str, value: Tensor | bool | None, token_ids: Tensor) -> None:
    """Raise ValueError if a tensor is not one bool per token; TypeError if the value is not a tensor or a bool."""
    if value is None or isinstance(value, bool):
        return
    check_tensors(**{"token_ids": token_ids, name: value})
    if value.shape != token_ids.shape:
        raise ValueError(f"{name} {tuple(value.shape)} and token_ids {tuple(token_ids.shape)} differ")
    if value.dtype != torch.bool:
        raise ValueError(f"{name} must be bool, got {value.dtype}")


def _check_options(
    token_ids: Tensor,
    kept: KeptSets | None,
    log_kept_mass: bool | Tensor,
    group: ProcessGroup | None,
    first_id: int,
    chunk: int | None,
    impl: str,
) -> None:
    """Raise ValueError if options contradict each other."""
    if kept is not None:
        check_tensors(token_ids=token_ids, **{"kept.ids": kept.ids, "kept.offsets": kept.offsets})
        if len(kept) != token_ids.numel():
            raise ValueError(
                f"kept sets are of {len(kept)} tokens, token_ids has {token_ids.numel()}; one set a token, or "
                "KeptSets.padded(mask) for a padded batch"
            )

    contradictions = {
        "log_kept_mass needs kept sets; give kept=, or leave it out": kept is None and log_kept_mass is not False,
        f"chunk must be at least 1 vocabulary entry, got {chunk}": chunk is not None and chunk < 1,
        f"first_id is {first_id} without a vocab_group; a whole head begins at 0": group is None and first_id != 0,
        "impl='reference' needs the whole head: gather it first, or use impl='auto'": group is not None
        and impl == "reference",
    }
    for message, holds in contradictions.items():
        if holds:
            raise ValueError(message)
