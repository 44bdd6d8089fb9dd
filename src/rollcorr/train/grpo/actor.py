"""The trainer's side of a rollout: log-probs and entropies of its tokens under the actor's `SamplingSpec`.

Without truncation these are `whole_scores`. With truncation the log-probs cover the engine's kept sets (or follow
`actor.sampling`), and log-probs over the full vocabulary are computed in addition. A reference policy is scored
over the full vocabulary too, so the KL penalty compares the same kind of log-probs. `GrpoBatch` is a step's rollout
with these scores: B responses, T padded response length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.core.logprobs import token_log_prob
from rollcorr.core.mergeable_statistics import Statistics, moments_of
from rollcorr.core.sampling import KeptSets
from rollcorr.correction.result import Correction
from rollcorr.correction.scoring import actor_entropy, actor_log_prob
from rollcorr.engines.base import EngineAnswerError, Rollout, TokenBatch
from rollcorr.engines.fused_scoring import needs_logits, score_responses_fused
from rollcorr.engines.response_scoring import ResponseScores, response_logits, score_responses
from rollcorr.train.grpo.tasks import Reward

if TYPE_CHECKING:
    from rollcorr.rollout_log import RolloutBatch

_MISSING_KEPT_ERROR = (
    "actor.sampling={} needs the kept {} of each token, and the engine {!r} gave none: choose an engine or an engine "
    "option that gives them, sample with top_p=1, top_k=-1 and min_p=0, or set actor.sampling=recompute"
)


class ActorScores(NamedTuple):
    """The trainer's scores of response tokens, nats, (B, T); undefined outside the response mask.

    Attributes:
        log_prob: under the actor's spec; with its graph.
        entropy: of the distribution of `log_prob`.
        full_log_prob: over the full vocabulary at the same temperature; optional. None if `log_prob` covers it.
        outside: true where the sampled token was missing in the support and was added; None without a support.
    """

    log_prob: Tensor
    entropy: Tensor
    full_log_prob: Tensor | None = None
    outside: Tensor | None = None

    def restriction(self, mask: Tensor) -> Statistics:
        """Return moments of a truncation on the trainer's side: tokens outside the support, and the support's mass.

        Contains "outside_fraction" and "kept_mass", the mass of the support with the sampled token; empty without
        truncation.
        """
        if self.outside is None or self.full_log_prob is None:
            return Statistics.of(device=mask.device)
        mass = (self.full_log_prob - self.log_prob).detach().exp()
        return Statistics.of(
            moments={"outside_fraction": moments_of(self.outside, mask), "kept_mass": moments_of(mass, mask)}
        )


@dataclass(frozen=True, eq=False)
class Actor:
    """The spec under which a rollout is scored, and the truncation that the engine recorded.

    Attributes:
        spec: distribution of the trainer's log-probs.
        kept: the engine's kept sets, B · T in the layout of the padded batch, on the host: selecting a micro-batch
            has a data-dependent size, which on the host never waits for the device.
        log_kept_mass: log S of the engine's sets, (B, T); for support "kept_mass".
    """

    spec: SamplingSpec
    kept: KeptSets | None = None
    log_kept_mass: Tensor | None = None

    @classmethod
    def of(cls, rollout: Rollout, spec: SamplingSpec) -> Actor:
        """Return the actor of a rollout.

        Raises:
            EngineAnswerError: the spec needs kept sets or their mass, and the engine did not return them.
        """
        if spec.restricts and spec.support == "replayed":
            if rollout.kept is None:
                raise EngineAnswerError(_MISSING_KEPT_ERROR.format("replay", "sets", spec.engine))
            return cls(spec, kept=rollout.kept.to("cpu").padded(rollout.tokens.response_mask.cpu()))

        if spec.restricts and spec.support == "kept_mass":
            if rollout.log_kept_mass is None:
                raise EngineAnswerError(_MISSING_KEPT_ERROR.format("kept_mass", "mass", spec.engine))
            return cls(spec, log_kept_mass=rollout.log_kept_mass)
        return cls(spec)

    def score(
        self,
        model: nn.Module,
        rollout: Rollout,
        rows: Tensor,
        *,
        entropy_gradient: bool = False,
        full_gradient: bool = False,
    ) -> ActorScores:
        """Score some rows of the rollout.

        Args:
            model: a causal language model.
            rollout: the batch.
            rows: which rows, int64, on the host.
            entropy_gradient: keep the graph of the entropies; only an entropy bonus needs it.
            full_gradient: keep the graph of `full_log_prob`; only a KL penalty needs it.
        """
        device = rollout.tokens.response_ids.device
        device_rows = rows.to(device, non_blocking=True)
        tokens = rollout.tokens.select(device_rows)
        if not self.spec.restricts:
            temperature = self.spec.temperature
            return ActorScores(*whole_scores(model, tokens, temperature=temperature, entropy_gradient=entropy_gradient))

        logits, ids = response_logits(model, tokens), tokens.response_ids
        positions = (rows[:, None] * ids.shape[1] + torch.arange(ids.shape[1], device=rows.device)).flatten()
        kept = None if self.kept is None else self.kept.select(positions).to(device)
        mass = None if self.log_kept_mass is None else self.log_kept_mass[device_rows]
        log_prob, outside = actor_log_prob(logits, ids, self.spec, kept=kept, log_kept_mass=mass)

        # A graph costs memory over the full vocabulary: keep it only for loss terms that need it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = actor_entropy(logits, ids, self.spec, kept=kept)
        with torch.set_grad_enabled(torch.is_grad_enabled() and full_gradient):
            full = token_log_prob(logits, ids, temperature=self.spec.temperature)
        return ActorScores(log_prob, entropy, full, outside)

    @torch.no_grad()
    def log_prob(self, model: nn.Module, rollout: Rollout, *, rows_at_once: int) -> Tensor:
        """Compute the log-probs of the full rollout without their graph, (B, T).

        Args:
            model: a causal language model.
            rollout: the batch.
            rows_at_once: rows of one forward pass.
        """
        chunks = torch.arange(len(rollout.tokens), device="cpu").split(rows_at_once)
        return torch.cat([self.score(model, rollout, rows).log_prob for rows in chunks])


def whole_scores(
    model: nn.Module, tokens: TokenBatch, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> ResponseScores:
    """Compute `score_responses` without (B, T, V) logits if the model is in float32 with a linear head.

    A half-precision model rounds its logits, so its scores are computed from them.

    Args:
        model: a causal language model.
        tokens: prompts and responses.
        temperature: divisor of the logits.
        entropy_gradient: keep the graph of the entropies.
    """
    if next(model.parameters()).dtype != torch.float32 or needs_logits(model):
        return score_responses(model, tokens, temperature=temperature, entropy_gradient=entropy_gradient)
    scores = score_responses_fused(model, tokens, temperature=temperature, entropy=True)
    assert scores.entropy is not None
    return ResponseScores(scores.log_prob, scores.entropy if entropy_gradient else scores.entropy.detach())


@dataclass(frozen=True, eq=False, kw_only=True)
class GrpoBatch:
    """One step's responses with the trainer's scores; tensors are (B, T) unless noted otherwise.

    Attributes:
        rollout: tokens and log μ, as the engine reported them.
        actor: spec of the trainer's log-probs of these tokens.
        rewards: reward of each response, length B.
        group_ids: index of its problem, (B,).
        old_log_prob: log π_old; None in bypass mode.
        ref_log_prob: log-probs of the reference policy, over the full vocabulary; None without a KL penalty.
        correction: weights and mask from π_old / μ; None in bypass mode or without a correction.
        advantages: (B,).
        metrics: metrics of the sampling and the rewards: name → number.
    """

    rollout: Rollout
    actor: Actor
    rewards: list[Reward]
    group_ids: Tensor
    old_log_prob: Tensor | None = None
    ref_log_prob: Tensor | None = None
    correction: Correction | None = None
    advantages: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def response_mask(self) -> Tensor:
        """Return the (B, T) bool mask, true on sampled tokens."""
        return self.rollout.tokens.response_mask

    def on_device(self, rows: Tensor) -> Tensor:
        """Return row numbers on the batch's device, without waiting for it."""
        return rows.to(self.group_ids.device, non_blocking=True)

    def without_tokens(self) -> GrpoBatch:
        """Return an empty copy: a rank without rows runs it, so that it joins every collective."""
        nothing = torch.zeros_like(self.response_mask)
        rollout = dataclasses.replace(
            self.rollout, tokens=dataclasses.replace(self.rollout.tokens, response_mask=nothing)
        )
        correction = self.correction and dataclasses.replace(self.correction, loss_mask=nothing, response_mask=nothing)
        return dataclasses.replace(self, rollout=rollout, correction=correction)


@dataclass(frozen=True, eq=False)
class StepResult:
    """Result of a step: metrics, batch, and log π_θ of the batch in the first epoch, (B, T).

    Attributes:
        metrics: name → number.
        batch: the sampled, scored and corrected batch.
        log_prob: log π_θ, nats, (B, T).
        fresh_null: rows that were sampled and scored with equal weights; optional.
    """

    metrics: dict[str, float]
    batch: GrpoBatch
    log_prob: Tensor
    fresh_null: RolloutBatch | None = None
