"""The protocol of an engine: prompts in; sampled tokens, their log-probs and where both came from out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from rollcorr.config import SamplingSpec
from rollcorr.core.sampling import KeptSets
from rollcorr.engines.model_scoring import TokenBatch


class EngineError(RuntimeError):
    """An engine failed. Nothing of what it was asked for may be used."""


class EngineUnavailableError(EngineError):
    """It died, cannot be reached, or did not answer in time, and retries did not help."""


class EngineAnswerError(EngineError):
    """It answered, but refused, or something is missing or no log-prob: a list too short, NaN, None, −9999."""


class WeightSyncError(EngineError):
    """It does not hold the weights that it was given: a fault of the copy, not staleness."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollout:
    """What an engine sampled.

    Attributes:
        tokens: prompts and responses, B rows.
        rollout_log_prob: what `sampling` says that it is, of each response token, nats, (B, T) float32; 0 outside
            the response mask.
        sampling: how the tokens were drawn, and by which policy version.
        raw_log_prob: log softmax(logits) at temperature 1 over the full vocabulary, where the engine tells it too.
        kept: the ids that could be sampled at each response token, packed: one set for each true entry of
            `tokens.response_mask`, row after row; None when nothing was truncated or the engine does not tell.
        log_kept_mass: log of the mass that those sets have in the whole softmax at the sampling temperature, nats,
            (B, T) float32; 0 outside the response mask; None like `kept`.
        policy_versions: the policy version behind each token, (B, T) int64, where the engine changed weights within
            a response; None when `sampling.policy_version` holds for all.
    """

    tokens: TokenBatch
    rollout_log_prob: Tensor
    sampling: SamplingSpec
    raw_log_prob: Tensor | None = None
    kept: KeptSets | None = None
    log_kept_mass: Tensor | None = None
    policy_versions: Tensor | None = None


class Engine(Protocol):
    """A sampler that holds its own copy of the policy."""

    @property
    def sampling(self) -> SamplingSpec:
        """How tokens are drawn, and by which policy version."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the policy that samples now."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], *, seed: int) -> Rollout:
        """Sample one response per prompt. Equal seeds, prompts and weights give equal tokens."""
        ...

    def score(self, tokens: TokenBatch) -> Tensor:
        """Log-probs that this engine gives to response tokens, at its sampling temperature, (B, T) float32."""
        ...

    def update_weights(self, model: nn.Module, *, version: int) -> None:
        """Take over the weights of `model` and verify that they arrived.

        Raises:
            WeightSyncError: a probe batch is scored differently by the two sides.
        """
        ...

    def export_weights(self) -> Mapping[str, Tensor]:
        """The weights that sample now, for a checkpoint of a run whose engine lags behind its policy."""
        ...

    def import_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Restore what `export_weights` returned."""
        ...


def check_weight_sync(engine_log_prob: Tensor, policy_log_prob: Tensor, *, tolerance: float) -> None:
    """Require max |engine log-prob − policy log-prob| ≤ tolerance on a probe batch.

    Args:
        engine_log_prob: the probe as scored by the engine, nats, (B, T).
        policy_log_prob: the probe as scored by the policy in the engine's precision, nats, (B, T).
        tolerance: the noise floor between the two, nats.

    Raises:
        WeightSyncError: the difference is larger, or not a number.
    """
    difference = float((engine_log_prob - policy_log_prob).abs().max())
    if not difference <= tolerance:
        raise WeightSyncError(
            f"weight sync incomplete: a probe batch differs by {difference:.3g} nats between engine and policy, "
            f"noise floor {tolerance:.3g}. Some parameters kept their old values; check tied and renamed ones"
        )
