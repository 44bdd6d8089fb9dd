"""Entry points with valid tensor arguments, which the boundary tests invalidate one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rollcorr import correct
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.core import advantages, aggregation, losses
from rollcorr.core.layout import pack
from rollcorr.core.sampling import KeptSets
from rollcorr.correction import Correction
from rollcorr.correction.denominators import aggregate, count_denominators, loss_denominators, sequence_lengths
from rollcorr.correction.losses import PolicyLogProbs, policy_loss
from rollcorr.kernels.correction import implementations
from rollcorr.kernels.linear_logprob import linear_log_prob

B, T = 5, 7
IMPLEMENTATIONS = ["auto", *(name for name, (usable, _) in implementations().items() if usable and name != "triton")]
DECOUPLED = RolloutCorrectionConfig(
    rollout_is="token", rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.5_1.5,0.3"
)
BYPASS = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="sequence")

FLOAT, MASK, NUMBER, IDS, BOOL = "floating", "mask", "number", "integers", "bool"
"""What an argument holds: numbers of a floating type, zeros and others, any real numbers, integers, bool."""


@dataclass(frozen=True)
class Entry:
    """An entry point.

    Attributes:
        call: callback with the named tensors, and `cu_seqlens` when packed.
        kinds: kind of each argument.
        packed: whether the arguments are packed.
        explicit: name of an implementation, which may reject inputs that "auto" accepts.
    """

    call: Callable[..., Any]
    kinds: dict[str, str]
    packed: bool = False
    explicit: str | None = None


@cache
def batch(*, packed: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Right arguments of every name, of one batch with holes, an empty sequence and both kinds of mismatch."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rollout = -torch.rand(B, T, generator=generator) - 0.1
    inside = torch.arange(T) < torch.tensor([7, 3, 0, 5, 6])[:, None]
    tokens = {
        "rollout_log_prob": rollout,
        "train_log_prob": rollout + 0.3 * normal(B, T),
        "log_prob": rollout + 0.2 * normal(B, T),
        "ref_log_prob": rollout + 0.2 * normal(B, T),
        "advantages": normal(B, T),
        "values": normal(B, T),
        "weights": torch.rand(B, T, generator=generator) + 0.5,
    }
    tokens = {name: value.to(dtype) for name, value in tokens.items()}
    tokens["response_mask"] = inside & (torch.rand(B, T, generator=generator) < 0.8)
    cu_seqlens = None
    if packed:
        cu_seqlens = pack(inside, inside)[1]
        tokens = {name: value[inside] for name, value in tokens.items()}
    tokens |= {
        "old_log_prob": tokens["train_log_prob"],
        "behavior_log_prob": tokens["rollout_log_prob"],
        "entropy": tokens["log_prob"].neg(),
        "loss": tokens["advantages"],
        "token_rewards": tokens["values"],
        "mask": tokens["response_mask"],
        "loss_mask": tokens["response_mask"],
        "rewards": normal(B).to(dtype),
        "group_ids": torch.tensor([3, 3, 9, 9, 9]),
        "keep": torch.tensor([True, True, False, True, True]),
        "lengths": torch.tensor([7, 3, 0, 5, 6]),
        "hidden": normal(6, 4).to(dtype),
        "weight": normal(11, 4).to(dtype),
        "bias": normal(11).to(dtype),
        "token_ids": torch.tensor([1, 0, 10, 4, 4, 7]),
        "temperature": (torch.rand(6, generator=generator) + 0.5).to(dtype),
        "linear_mask": torch.tensor([True, True, False, True, True, True]),
    }
    return tokens if cu_seqlens is None else tokens | {"cu_seqlens": cu_seqlens}


def arguments(entry: Entry, **options: Any) -> dict[str, Tensor]:
    """Right arguments of an entry point."""
    found = batch(packed=entry.packed, **options)
    names = [*entry.kinds, *(["cu_seqlens"] if entry.packed else [])]
    return {name: found[ALIASES.get((entry.call, name), name)] for name in names}


def tensors_of(result: Any) -> list[Tensor]:
    """Return the comparable tensors of a result, in order, without statistics."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Correction):
        return [x for x in (result.weights, result.loss_mask, result.sequence_kept) if x is not None]
    if is_dataclass(result):
        result = [
            getattr(result, field.name) for field in fields(result) if field.name not in ("correction", "averaged")
        ]
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in tensors_of(part)]
    return []


def _plain_ppo(log_prob, old_log_prob, ref_log_prob, advantages, response_mask, entropy, **layout):
    policies = PolicyLogProbs(log_prob=log_prob, old_log_prob=old_log_prob, ref_log_prob=ref_log_prob)
    return policy_loss(policies, advantages, response_mask, config=None, entropy=entropy, **layout)


def _bypass(log_prob, rollout_log_prob, advantages, response_mask, **layout):
    policies = PolicyLogProbs(log_prob=log_prob, rollout_log_prob=rollout_log_prob)
    return policy_loss(policies, advantages, response_mask, config=BYPASS, whole_step=True, **layout)


def _ppo_clip(log_prob, old_log_prob, advantages, loss_mask, weights, **layout):
    return losses.ppo_clip_loss(
        log_prob, old_log_prob, advantages, loss_mask, clip_low=0.2, clip_high=0.2, weights=weights, **layout
    )


def _correct(impl: str) -> Callable[..., Any]:
    def call(train_log_prob, rollout_log_prob, response_mask, **layout):
        return correct(train_log_prob, rollout_log_prob, response_mask, DECOUPLED, impl=impl, **layout)

    return call


def _linear(impl: str, *, kept: bool) -> Callable[..., Any]:
    sets = KeptSets.of([[1, 2], [0], [3, 10], [4, 5, 6], [4], [8, 9]]) if kept else None

    def call(hidden, weight, token_ids, bias, temperature, mask):
        return linear_log_prob(
            hidden, weight, token_ids, bias=bias, temperature=temperature, mask=mask, kept=sets, entropy=True, impl=impl
        )

    return call


_LAYOUT: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "policy_loss plain": (
        _plain_ppo,
        {
            "log_prob": FLOAT,
            "old_log_prob": FLOAT,
            "ref_log_prob": FLOAT,
            "advantages": NUMBER,
            "response_mask": MASK,
            "entropy": FLOAT,
        },
    ),
    "policy_loss bypass": (
        _bypass,
        {"log_prob": FLOAT, "rollout_log_prob": FLOAT, "advantages": NUMBER, "response_mask": MASK},
    ),
    "ppo_clip_loss": (
        _ppo_clip,
        {"log_prob": FLOAT, "old_log_prob": FLOAT, "advantages": NUMBER, "loss_mask": MASK, "weights": NUMBER},
    ),
    "reinforce_loss": (
        losses.reinforce_loss,
        {"log_prob": FLOAT, "advantages": NUMBER, "loss_mask": MASK, "weights": NUMBER, "behavior_log_prob": FLOAT},
    ),
    "token_mean": (aggregation.token_mean, {"loss": FLOAT, "mask": MASK}),
    "token_sum": (aggregation.token_sum, {"loss": FLOAT, "mask": MASK}),
    "seq_mean_token_sum": (aggregation.seq_mean_token_sum, {"loss": FLOAT, "mask": MASK}),
    "seq_mean_token_mean": (aggregation.seq_mean_token_mean, {"loss": FLOAT, "mask": MASK, "lengths": NUMBER}),
    "aggregate": (
        lambda loss, mask, **layout: aggregate(loss, mask, "seq-mean-token-sum-norm", scale=8.0, **layout),
        {"loss": FLOAT, "mask": MASK},
    ),
    "count_denominators": (count_denominators, {"mask": MASK}),
    "count_denominators, weighted": (count_denominators, {"mask": MASK, "weights": NUMBER}),
    "loss_denominators": (
        lambda loss_mask, response_mask, **layout: loss_denominators("kept", loss_mask, response_mask, None, **layout),
        {"loss_mask": MASK, "response_mask": MASK},
    ),
    "sequence_lengths": (sequence_lengths, {"mask": MASK}),
    "gae_advantages": (
        advantages.gae_advantages,
        {"rewards": NUMBER, "values": NUMBER, "response_mask": MASK, "keep": BOOL},
    ),
    "terminal_rewards": (advantages.terminal_rewards, {"rewards": NUMBER, "response_mask": MASK}),
}
ALIASES = {(advantages.gae_advantages, "rewards"): "token_rewards"}


def _entries() -> dict[str, Entry]:
    found = {}
    correcting = {"train_log_prob": FLOAT, "rollout_log_prob": FLOAT, "response_mask": MASK}
    for packed in (False, True):
        layout = "packed" if packed else "padded"
        for impl in IMPLEMENTATIONS:
            found[f"correct {impl}, {layout}"] = Entry(
                _correct(impl), correcting, packed, None if impl == "auto" else impl
            )
        for name, (call, kinds) in _LAYOUT.items():
            found[f"{name}, {layout}"] = Entry(call, kinds, packed)
    found["reference_kl"] = Entry(losses.reference_kl, {"log_prob": FLOAT, "ref_log_prob": FLOAT, "mask": MASK})
    groups = {"rewards": NUMBER, "group_ids": IDS, "keep": BOOL}
    for name in ("grpo_advantages", "dr_grpo_advantages", "rloo_advantages"):
        found[name] = Entry(getattr(advantages, name), groups)
    operands = {
        "hidden": FLOAT,
        "weight": FLOAT,
        "token_ids": IDS,
        "bias": FLOAT,
        "temperature": FLOAT,
        "mask": BOOL,
    }
    for impl in ("torch", "reference"):
        for kept in (False, True):
            call = _linear(impl, kept=kept)
            found[f"linear_log_prob {impl}, {'kept' if kept else 'whole'}"] = Entry(call, operands, explicit=impl)
            ALIASES[call, "mask"] = "linear_mask"
    return found


ENTRIES = _entries()
PACKED = [name for name, entry in ENTRIES.items() if entry.packed]
