"""Policies as tables: next-token probabilities that depend on a small state, so that sums over all sequences are exact.

A policy has S states and V tokens. In state s it samples token a with probability p(a | s) = softmax(logits[s])[a], and
moves to `next_state[s, a]`. A sequence starts in state 0 and has T tokens. Sums over the V^T sequences are then T steps
over S states, in float64: J(θ), its gradient, KL(μ‖π) and χ² are exact at any length.

Symbols (docs/reference/notation.md): π trainer policy, μ rollout policy, d = log π − log μ, ρ = exp d. θ is the
trainer's (S, V) table of logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class MarkovPolicy:
    """Tabular policy: p(a | s) = softmax(logits[s])[a], and the state after token a is next_state[s, a].

    Attributes:
        logits: (S, V) float64, nats. −inf is probability 0, as after top-p.
        next_state: (S, V) int64, in 0 … S − 1.

    Raises:
        ValueError: the shapes differ, a state is outside 0 … S − 1, or a row of logits has NaN, +inf or only −inf.
    """

    logits: Tensor
    next_state: Tensor

    def __post_init__(self) -> None:
        if self.logits.dim() != 2 or self.logits.shape != self.next_state.shape:
            raise ValueError(
                f"logits {tuple(self.logits.shape)} and next_state {tuple(self.next_state.shape)} must both be (S, V)"
            )
        table = self.logits.detach()
        if not table.logsumexp(-1).isfinite().all() or table.isnan().any():
            raise ValueError("every row of logits needs a finite largest value; got NaN, inf, or a row of −inf")
        if self.next_state.min() < 0 or self.next_state.max() >= self.states:
            raise ValueError(f"next_state must be in 0 … {self.states - 1}; got {int(self.next_state.max())}")

    @property
    def states(self) -> int:
        """S."""
        return self.logits.shape[0]

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.logits.shape[1]

    @cached_property
    def log_probs(self) -> Tensor:
        """log p(a | s), (S, V), nats."""
        return self.logits.log_softmax(-1)

    def with_logits(self, logits: Tensor) -> MarkovPolicy:
        """Return a policy with the same states and new logits.

        Args:
            logits: the new logits, (S, V).
        """
        return MarkovPolicy(logits, self.next_state)

    def start(self) -> Tensor:
        """Initial distribution, (S,): probability 1 of state 0."""
        return (torch.arange(self.states, device=self.logits.device) == 0).to(self.logits.dtype)

    def move(self, flow: Tensor) -> Tensor:
        """Compute the mass on the next states, (S,), from the mass on tokens.

        Args:
            flow: mass on each (state, token), (S, V).
        """
        return torch.zeros_like(flow[:, 0]).index_add(0, self.next_state.flatten(), flow.flatten())


def last_token_state(states: int, vocabulary: int) -> Tensor:
    """Return the (S, V) table in which the state is the last token, modulo the number of states."""
    return (torch.arange(vocabulary, device="cpu") % states).expand(states, vocabulary).contiguous()


@dataclass(frozen=True, eq=False)
class RewardRule:
    """Reward of a sequence: R = Σ_t points[s_t, a_t] / T; or with a goal, R = 1 if Σ_t points ≥ goal, else 0.

    The mean is a dense reward: every token adds its share. The goal is an outcome reward: only the total decides.

    Attributes:
        points: (S, V) float64. With a goal they are integers, so that the exact sum over totals is finite.
        goal: the smallest total that succeeds. Optional; the mean by default.

    Raises:
        ValueError: there is a goal, and a point is not an integer.
    """

    points: Tensor
    goal: float | None = None

    def __post_init__(self) -> None:
        if self.goal is not None and not torch.equal(self.points, self.points.round()):
            raise ValueError(f"with goal={self.goal:g} every point must be a whole number; round them, or leave it out")

    def of_totals(self, totals: Tensor, length: int) -> Tensor:
        """Compute the reward of sequences from their totals Σ_t points.

        Args:
            totals: Σ_t points of each sequence, of any shape.
            length: T, tokens per sequence.
        """
        if self.goal is None:
            return totals / length
        return (totals >= self.goal).to(totals.dtype)


def expected_reward(policy: MarkovPolicy, rule: RewardRule, length: int) -> Tensor:
    """Compute J = Σ_y p(y) R(y) over every sequence y, by dynamic programming.

    Args:
        policy: distribution of the sequences.
        rule: the reward.
        length: T, tokens per sequence.

    Returns:
        J, 0-d float64, differentiable in the logits.
    """
    if rule.goal is not None:
        return _compute_tail_probability(policy, rule.points.long(), rule.goal, length)
    visits = state_visits(policy, length)
    return (visits[:, None] * policy.logits.softmax(-1) * rule.points).sum() / length


def exact_gradient(policy: MarkovPolicy, rule: RewardRule, length: int) -> Tensor:
    """Compute ∇_θ J = Σ_y π(y) R(y) Σ_t ∇log π(y_t | s_t), summed over every sequence.

    The sum is the derivative of `expected_reward`, so it costs T · S · V operations and not V^T.

    Args:
        policy: distribution of the sequences.
        rule: the reward.
        length: T, tokens per sequence.

    Returns:
        (S, V) float64.
    """
    logits = policy.logits.detach().clone().requires_grad_()
    value = expected_reward(policy.with_logits(logits), rule, length)
    (gradient,) = torch.autograd.grad(value, logits)
    return gradient


def state_visits(policy: MarkovPolicy, length: int) -> Tensor:
    """Compute n(s) = Σ_t P(s_t = s), the expected number of tokens sampled in each state. (S,) float64.

    Args:
        policy: distribution of the sequences.
        length: T, tokens per sequence.
    """
    probabilities, reached = policy.logits.softmax(-1), policy.start()
    visits = torch.zeros_like(reached)
    for _ in range(length):
        visits = visits + reached
        reached = policy.move(reached[:, None] * probabilities)
    return visits


def expected_product(policy: MarkovPolicy, log_factors: Tensor, length: int) -> Tensor:
    """Compute log E[Π_t exp log_factors[s_t, a_t]] over sequences of the policy. 0-d float64.

    With log_factors = 2 d under μ this is log E_μ[ρ(y)²] = log(1 + χ²(π‖μ)).

    Args:
        policy: distribution of the sequences.
        log_factors: (S, V), nats.
        length: T, tokens per sequence.
    """
    probabilities = policy.logits.softmax(-1)
    factors = probabilities * log_factors.exp().masked_fill(probabilities == 0, 0.0)
    reached = policy.start()
    log_scale = reached.new_zeros(())
    for _ in range(length):
        reached = policy.move(reached[:, None] * factors)

        # Long products of ratios overflow float64, so keep the scale in log space.
        scale = reached.sum().clamp(min=1e-300)
        reached, log_scale = reached / scale, log_scale + scale.log()
    return log_scale + reached.sum().log()


def _compute_tail_probability(policy: MarkovPolicy, points: Tensor, goal: float, length: int) -> Tensor:
    """Compute P(total ≥ goal): move the mass of each (state, total so far) by one token at a time."""
    probabilities = policy.logits.softmax(-1)[:, :, None]
    lowest, highest = int(points.min()), int(points.max())
    width = length * (highest - lowest) + 1
    totals = torch.arange(width, device=points.device)

    # Store totals relative to the lowest total possible after that number of tokens, so they never decrease.
    rises = (points - lowest)[:, :, None] + totals
    target = policy.next_state[:, :, None] * width + rises.clamp(max=width - 1)
    reached = policy.start()[:, None] * (totals == 0)
    for _ in range(length):
        flow = reached[:, None, :] * probabilities
        moved = reached.new_zeros(reached.numel()).index_add(0, target.flatten(), flow.flatten())
        reached = moved.view_as(reached)
    return (reached * (totals + length * lowest >= goal)).sum()
