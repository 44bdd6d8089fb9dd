"""Pairs of policies with a known mismatch: a trainer, a rollout policy derived from it, and their exact statistics.

kind           rollout logits, from the trainer's logits z         severity, 0 = the same policy
noise          z + σ ε, ε normal, one draw per (state, token)       σ, nats
heavy_tailed   z + σ ε, ε Student's t with 2 degrees of freedom     σ, nats
tempered       z / τ                                                1 − τ; below 0 flattens
truncated      z on the top-p set, −inf elsewhere                   1 − p
top_k          z on the k most likely tokens, −inf elsewhere        V − k
stale          z − η g / max |g|, g the exact gradient of J         η, nats: one update of this size is missing
quantized      z rounded to multiples of Δ                          Δ, nats
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from rollcorr.config.checks import check_choice, check_integer, check_number
from rollcorr.core.sampling import top_k_support, top_p_support
from rollcorr.simulation.markov_policies import (
    MarkovPolicy,
    RewardRule,
    exact_gradient,
    expected_product,
    expected_reward,
    last_token_state,
    state_visits,
)

Reports = Literal["sampled", "raw"]


@dataclass(frozen=True, eq=False)
class PolicyPair:
    """Trainer policy, rollout policy, reward rule and length: the inputs of every exact computation.

    Attributes:
        trainer: π, with finite logits.
        rollout: μ, over the same states and tokens.
        rule: the reward.
        length: T, the tokens of a sequence.
        kind: name of the mismatch, or "given".
        severity: severity of the kind; NaN for "given".
        reports: log-probs that the sampler reports as log μ. "sampled": its own log-probs. "raw": log-probs of the
            trainer's logits before temperature and truncation, as from engines that return raw log-probs; then d is 0
            everywhere.
        advantage_offset: added to the advantage R − E_μ[R] of every sequence. 0 is a group baseline.

    Raises:
        ValueError: the states or tokens of the two policies differ, or a token has probability 0 under the trainer.
    """

    trainer: MarkovPolicy
    rollout: MarkovPolicy
    rule: RewardRule
    length: int
    kind: str = "given"
    severity: float = math.nan
    reports: Reports = "sampled"
    advantage_offset: float = 0.0

    def __post_init__(self) -> None:
        check_integer("length", self.length, at_least=1)
        check_choice("reports", self.reports, ("sampled", "raw"))
        shapes = [tuple(t.shape) for t in (self.trainer.logits, self.rollout.logits, self.rule.points)]
        if len(set(shapes)) > 1:
            raise ValueError(f"trainer, rollout and points must have one shape (S, V); got {shapes}")
        if not torch.equal(self.trainer.next_state, self.rollout.next_state):
            raise ValueError("trainer and rollout must share next_state: they see the same context")
        if not self.trainer.logits.isfinite().all():
            raise ValueError("the trainer's logits must be finite: its log-prob of a sampled token would be −inf")

    @cached_property
    def reported_log_probs(self) -> Tensor:
        """Reported log-prob of each (state, token), (S, V), nats."""
        return self.rollout.log_probs if self.reports == "sampled" else self.trainer.log_probs

    @cached_property
    def log_ratios(self) -> Tensor:
        """d = log π − log μ of the sampler's own probabilities, (S, V), nats; +inf for tokens that μ cannot sample."""
        return self.trainer.log_probs - self.rollout.log_probs

    @cached_property
    def gradient(self) -> Tensor:
        """The exact on-policy gradient ∇J(θ) of the trainer. (S, V) float64."""
        return exact_gradient(self.trainer, self.rule, self.length)

    @cached_property
    def baseline(self) -> Tensor:
        """E_μ[R], the mean reward of rollouts. 0-d."""
        return expected_reward(self.rollout, self.rule, self.length)

    @cached_property
    def visits(self) -> Tensor:
        """Expected number of tokens that μ samples in each state, (S,)."""
        return state_visits(self.rollout, self.length)

    @property
    def sequence_kl(self) -> float:
        """KL(μ‖π) of sequences, nats: Σ_t E_μ[−d_t]."""
        return self._sum_over_visits(self.rollout.log_probs.exp() * -self.log_ratios)

    @property
    def kl(self) -> float:
        """KL(μ‖π) per token, nats: the mean over tokens, weighted by μ's visits to each state."""
        return self.sequence_kl / self.length

    @property
    def chi2(self) -> float:
        """χ̄² = E_μ[ρ_t²] − 1 per token, over μ's visits and over the tokens that μ can sample.

        If truncation removed tokens, E_μ[ρ] is below 1, and this may be negative.
        """
        squares = self.trainer.log_probs.exp().square() / self.rollout.log_probs.exp()
        return self._sum_over_visits(squares) / self.length - 1

    @property
    def sequence_log_second_moment(self) -> float:
        """log E_μ[ρ(y)²] = log(1 + χ²) of sequences, over the ones that μ can sample."""
        log_squares = (2 * self.log_ratios).masked_fill(self.rollout.log_probs == -torch.inf, 0.0)
        return float(expected_product(self.rollout, log_squares, self.length))

    @property
    def sequence_chi2(self) -> float:
        """χ²(π‖μ) of sequences; inf beyond the range of float64."""
        exponent = self.sequence_log_second_moment
        return math.inf if exponent > 700 else math.expm1(exponent)

    def with_length(self, length: int) -> PolicyPair:
        """Return a pair with the same policies and rule and a new T. A goal remains the same number of points."""
        return replace(self, length=length)

    def _sum_over_visits(self, values: Tensor) -> float:
        """Compute Σ of (S, V) values over the tokens that μ can sample, weighted by its visits to each state."""
        per_state = values.masked_fill(self.rollout.log_probs.exp() == 0, 0.0).sum(-1)
        return float((self.visits * per_state).sum())


@dataclass(frozen=True)
class Kind:
    """Kind of mismatch between sampler and trainer.

    Attributes:
        description: its description in one line.
        logits: function that computes the rollout logits from a pair, a severity and a generator for noise.
        largest: the largest severity that `pair_at_kl` tries.
        whole: True if severities are integers.
    """

    description: str
    logits: Callable[[PolicyPair, float, torch.Generator], Tensor]
    largest: float
    whole: bool = False


def _add_noise(pair: PolicyPair, severity: float, generator: torch.Generator) -> Tensor:
    logits = pair.trainer.logits
    return logits + severity * torch.randn(logits.shape, dtype=torch.float64, generator=generator, device="cpu")


def _add_heavy_tails(pair: PolicyPair, severity: float, generator: torch.Generator) -> Tensor:
    # t with 2 degrees of freedom is normal / √(χ²/2), and χ² with 2 is 2 · exponential.
    logits = pair.trainer.logits
    normal = torch.randn(logits.shape, dtype=torch.float64, generator=generator, device="cpu")
    uniform = torch.rand(logits.shape, dtype=torch.float64, generator=generator, device="cpu")
    return logits + severity * normal / (-torch.log1p(-uniform)).clamp(min=1e-12).sqrt()


def _change_temperature(pair: PolicyPair, severity: float, generator: torch.Generator) -> Tensor:
    if severity >= 1:
        raise ValueError(f"severity of tempered must be < 1 (it is 1 − temperature); got {severity:g}")
    return pair.trainer.logits / (1 - severity)


def _truncate_top_p(pair: PolicyPair, severity: float, generator: torch.Generator) -> Tensor:
    if not 0 <= severity < 1:
        raise ValueError(f"severity of truncated must be in [0, 1) (it is 1 − top_p); got {severity:g}")
    logits = pair.trainer.logits
    return logits.masked_fill(~top_p_support(logits, 1 - severity), -torch.inf)


def _truncate_top_k(pair: PolicyPair, severity: float, generator: torch.Generator) -> Tensor:
    logits, vocabulary = pair.trainer.logits, pair.trainer.vocabulary
    kept = vocabulary - round(severity)
    if not 1 <= kept <= vocabulary:
        raise ValueError(f"severity of top_k must be in 0 … V − 1 = {vocabulary - 1}; got {severity:g}")
    return logits.masked_fill(~top_k_support(logits, kept), -torch.inf)


def _undo_update(pair: PolicyPair, severity: float, generator: torch.Generator) -> Tensor:
    return pair.trainer.logits - severity * pair.gradient / pair.gradient.abs().max().clamp(min=1e-300)


def _quantize_logits(pair: PolicyPair, severity: float, generator: torch.Generator) -> Tensor:
    logits = pair.trainer.logits
    return logits.clone() if severity == 0 else (logits / severity).round() * severity


KINDS: Mapping[str, Kind] = {
    "noise": Kind("Gaussian noise on every logit", _add_noise, 8.0),
    "heavy_tailed": Kind("Student-t noise on every logit: a few tokens differ by far", _add_heavy_tails, 8.0),
    "tempered": Kind("sampled at another temperature", _change_temperature, 0.98),
    "truncated": Kind("sampled with top-p", _truncate_top_p, 0.98),
    "top_k": Kind("sampled with top-k", _truncate_top_k, 1e6, whole=True),
    "stale": Kind("one update behind, along the exact gradient", _undo_update, 40.0),
    "quantized": Kind("logits rounded to a grid", _quantize_logits, 12.0),
}
"""Every kind of mismatch for `make_pair`."""


def make_pair(
    kind: str,
    severity: float,
    *,
    length: int = 16,
    vocabulary: int = 8,
    states: int | None = None,
    spread: float = 1.5,
    seed: int = 0,
    outcome: bool = False,
    reports: Reports = "sampled",
) -> PolicyPair:
    """Create a random trainer policy, and a rollout policy with a known mismatch.

    Args:
        kind: a name of `KINDS`.
        severity: size of the mismatch; its meaning depends on the kind, and 0 is no mismatch.
        length: T.
        vocabulary: V.
        states: S. Defaults to V: the state is the last token. 1: tokens are independent.
        spread: standard deviation of the trainer's logits, nats.
        seed: seed of the logits, the points and the noise.
        outcome: False: the reward is the mean of normal points. True: points alternate between 0 and 1 over the
            tokens, and the reward is 1 if their sum reaches the trainer's mean, so about half of the sequences
            succeed.
        reports: see `PolicyPair`.

    Raises:
        TypeError, ValueError: an argument has an invalid type, is unknown, or is outside its limits.

    Example:
        >>> pair = make_pair("tempered", 0.3, vocabulary=4, length=6)
        >>> pair.gradient.shape
        torch.Size([4, 4])
    """
    severity = check_number("severity", severity)
    states = vocabulary if states is None else states
    if vocabulary < 2 or not 1 <= states <= vocabulary:
        raise ValueError(f"vocabulary must be >= 2 and states in 1 … vocabulary; got {vocabulary} and {states}")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    logits = spread * torch.randn(states, vocabulary, dtype=torch.float64, generator=generator, device="cpu")
    trainer = MarkovPolicy(logits, last_token_state(states, vocabulary))

    generator = torch.Generator(device="cpu").manual_seed(seed + 1)
    if outcome:
        state, token = (torch.arange(size, device="cpu") for size in trainer.logits.shape)
        points = ((state[:, None] + token) % 2).double()
        mean_total = length * float(expected_reward(trainer, RewardRule(points), length))
        rule = RewardRule(points, goal=math.ceil(mean_total))
    else:
        points = torch.randn(trainer.logits.shape, dtype=torch.float64, generator=generator, device="cpu")
        rule = RewardRule(points)

    alike = PolicyPair(trainer, trainer, rule, length, reports=reports)
    return with_mismatch(alike, kind, severity, seed=seed + 2)


def with_mismatch(pair: PolicyPair, kind: str, severity: float, *, seed: int = 0) -> PolicyPair:
    """Return a pair with the same trainer and reward, and a rollout policy with a different mismatch.

    Args:
        pair: pair with the trainer and the reward; its rollout policy is not used.
        kind: a name of `KINDS`.
        severity: size of the mismatch; 0 is no mismatch.
        seed: seed of the noise. The same seed draws the same noise at every severity.

    Raises:
        ValueError: the kind is unknown, or its severity outside its limits.
    """
    check_choice("kind", kind, KINDS)
    noise = torch.Generator(device="cpu").manual_seed(seed)
    rollout = pair.trainer.with_logits(KINDS[kind].logits(pair, severity, noise))
    return replace(pair, rollout=rollout, kind=kind, severity=severity)


def pair_at_kl(kind: str, kl: float, **options: object) -> PolicyPair:
    """Find the pair of a kind with KL(μ‖π) per token closest to `kl`, by bisection on the severity.

    Truncated and quantized policies change in steps, so their KL may differ from the target: check `pair.kl`.

    Args:
        kind: a name of `KINDS`.
        kl: nats per token.
        **options: options of `make_pair`.

    Raises:
        ValueError: `kl` is not above 0, or the kind cannot reach it.
    """
    target = check_number("kl", kl, above=0)

    # One pair for all severities: compute its exact gradient once.
    alike = make_pair(kind, 0.0, **options)  # type: ignore[arg-type]
    seed = int(options.get("seed", 0)) + 2  # type: ignore[call-overload]

    def made(severity: float) -> PolicyPair:
        return with_mismatch(alike, kind, severity, seed=seed)

    def distance(pair: PolicyPair) -> float:
        return abs(math.log(max(pair.kl, 1e-300) / target))

    if KINDS[kind].whole:
        return min((made(k) for k in range(1, alike.trainer.vocabulary)), key=distance)

    low, high = 0.0, KINDS[kind].largest
    if made(high).kl < target:
        raise ValueError(f"{kind} reaches a KL of {made(high).kl:.3g} nats at most here; got {target:g}; lower it")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if made(middle).kl < target else (low, middle)

    # At a step, return the side that is nearer on a log scale.
    return min((made(low), made(high)), key=distance)
