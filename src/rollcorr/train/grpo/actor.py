"""The trainer's side of a rollout: log-probs and entropies of its tokens under the actor's `SamplingSpec`.

Where nothing truncates this is `whole_scores`. Under a truncation the log-probs run over the engine's kept sets (or
what `actor.sampling` asks for instead), and the log-probs over the whole vocabulary are kept beside them: a reference
policy is scored in this way too, so the KL penalty compares the same kind of log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollcorr.config.sampling_spec import SamplingSpec
from rollcorr.core.logprobs import token_log_prob
from rollcorr.core.mergeable_statistics import Statistics, moments_of
from rollcorr.core.sampling import KeptSets
from rollcorr.correction.scoring import actor_entropy, actor_log_prob
from rollcorr.engines.base import EngineAnswerError, Rollout, TokenBatch
from rollcorr.engines.fused_scoring import needs_logits, score_responses_fused
from rollcorr.engines.response_scoring import ResponseScores, response_logits, score_responses

_MISSING = (
    "actor.sampling={} needs the kept {} of each token, and the engine {!r} gave none: choose an engine or an engine "
    "option that gives them, sample with top_p=1, top_k=-1 and min_p=0, or set actor.sampling=recompute"
)


class ActorScores(NamedTuple):
    """What the trainer gives to response tokens, nats, (B, T); meaningless outside the response mask.

    Attributes:
        log_prob: as the actor's spec says; with its graph.
        entropy: of the distribution that `log_prob` is of.
        full_log_prob: over the whole vocabulary at the same temperature; None where `log_prob` already covers it.
        outside: true where the sampled token was not in the support and was taken in; None without a support.
    """

    log_prob: Tensor
    entropy: Tensor
    full_log_prob: Tensor | None = None
    outside: Tensor | None = None

    def restriction(self, mask: Tensor) -> Statistics:
        """Moments of what a truncation did on the trainer's side: tokens outside the support, and the support's mass.

        Rows "outside_fraction" and "kept_mass", the latter of the support with the sampled token in it; none without
        a truncation.
        """
        if self.outside is None or self.full_log_prob is None:
            return Statistics.of(device=mask.device)
        mass = (self.full_log_prob - self.log_prob).detach().exp()
        return Statistics.of(
            moments={"outside_fraction": moments_of(self.outside, mask), "kept_mass": moments_of(mass, mask)}
        )


@dataclass(frozen=True, eq=False)
class Actor:
    """What to score a rollout's tokens as, and what the engine recorded for it.

    Attributes:
        spec: what the trainer's log-probs are to be.
        kept: the engine's sets, laid over the padded batch (B · T of them), on the host: picking those of a
            micro-batch has a size that is data, and so never waits for the device.
        log_kept_mass: log S of the engine's sets, (B, T); for support "kept_mass".
    """

    spec: SamplingSpec
    kept: KeptSets | None = None
    log_kept_mass: Tensor | None = None

    @classmethod
    def of(cls, rollout: Rollout, spec: SamplingSpec) -> Actor:
        """The actor of a rollout.

        Raises:
            EngineAnswerError: the spec needs kept sets or their mass, and the engine did not give them.
        """
        if spec.restricts and spec.support == "replayed":
            if rollout.kept is None:
                raise EngineAnswerError(_MISSING.format("replay", "sets", spec.engine))
            return cls(spec, kept=rollout.kept.to("cpu").padded(rollout.tokens.response_mask.cpu()))

        if spec.restricts and spec.support == "kept_mass":
            if rollout.log_kept_mass is None:
                raise EngineAnswerError(_MISSING.format("kept_mass", "mass", spec.engine))
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
        here = rows.to(device, non_blocking=True)
        tokens = rollout.tokens.select(here)
        if not self.spec.restricts:
            temperature = self.spec.temperature
            return ActorScores(*whole_scores(model, tokens, temperature=temperature, entropy_gradient=entropy_gradient))

        logits, ids = response_logits(model, tokens), tokens.response_ids
        positions = (rows[:, None] * ids.shape[1] + torch.arange(ids.shape[1], device=rows.device)).flatten()
        kept = None if self.kept is None else self.kept.select(positions).to(device)
        mass = None if self.log_kept_mass is None else self.log_kept_mass[here]
        log_prob, outside = actor_log_prob(logits, ids, self.spec, kept=kept, log_kept_mass=mass)

        # A graph costs memory over the whole vocabulary, so only a term of the loss that needs one keeps it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            entropy = actor_entropy(logits, ids, self.spec, kept=kept)
        with torch.set_grad_enabled(torch.is_grad_enabled() and full_gradient):
            full = token_log_prob(logits, ids, temperature=self.spec.temperature)
        return ActorScores(log_prob, entropy, full, outside)

    @torch.no_grad()
    def log_prob(self, model: nn.Module, rollout: Rollout, *, rows_at_once: int) -> Tensor:
        """The log-probs of the whole rollout without their graph, (B, T).

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
    """As `score_responses`, without (B, T, V) logits where the model is in float32 and its head is linear.

    A model in half precision rounds its logits, and so do its scores here.

    Args:
        model: a causal language model.
        tokens: prompts and responses.
        temperature: that logits are divided by.
        entropy_gradient: keep the graph of the entropies.
    """
    if next(model.parameters()).dtype != torch.float32 or needs_logits(model):
        return score_responses(model, tokens, temperature=temperature, entropy_gradient=entropy_gradient)
    scores = score_responses_fused(model, tokens, temperature=temperature, entropy=True)
    assert scores.entropy is not None
    return ResponseScores(scores.log_prob, scores.entropy if entropy_gradient else scores.entropy.detach())
