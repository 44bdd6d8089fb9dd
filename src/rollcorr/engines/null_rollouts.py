"""An active null: rollouts whose two sides have the same weights, scored by two implementations.

An engine samples token by token from a cache, in its own precision; a later score reads the tokens in one pass. Their
log-probs differ without any fault. `rollcorr.diagnostics.null_of_logs` computes a null from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rollcorr.engines.base import Engine, Rollout
from rollcorr.engines.weight_probes import check_scorable, engine_score, untouched
from rollcorr.rollout_log import RolloutBatch


def measure_null(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    first_row: int = 0,
    score: Callable[[Rollout], Tensor] | None = None,
    again: Callable[[Rollout], Tensor] | None = None,
    model: str | None = None,
) -> RolloutBatch:
    """Sample from an engine, and score the same tokens again with the same weights.

    Args:
        engine: the sampler; its log-probs are μ.
        prompts: token ids, with the lengths and the content of the training prompts.
        seed: random seed.
        first_row: index of the first prompt among all prompts of the null, if several calls sample it.
        score: callback that returns the trainer's log-probs of a rollout's responses, (B, T) nats, under the engine's
            weights and of the same distribution as `rollout_log_prob`. Defaults to the engine's own score: this shows
            only the difference between sampling and scoring in this engine, which is smaller than to a trainer.
        again: callback that scores the rollout as well, and replaces the engine's reported log-probs; optional. With
            `score` the result is the trainer's own null.
        model: name of the model, recorded in the log.

    Returns:
        A batch of a rollout log, with π in `old_log_prob`. `RolloutLogWriter` writes it.

    Raises:
        ValueError: the engine returns raw log-probs at a temperature other than 1, which no score matches; or it
            truncates without reporting the kept mass, and must score.
    """
    check_scorable(engine.sampling)
    with untouched():
        rollout = engine.generate(prompts, seed=seed, first_row=first_row)
        tokens = rollout.tokens
        train = engine_score(engine, rollout) if score is None else score(rollout)
        sampled = rollout.rollout_log_prob if again is None else again(rollout).to(rollout.rollout_log_prob.device)
    return RolloutBatch.from_padded(
        tokens.response_mask,
        prompt_ids=tokens.prompt_ids,
        prompt_mask=tokens.prompt_mask,
        response_ids=tokens.response_ids,
        rollout_log_prob=sampled,
        old_log_prob=train.to(rollout.rollout_log_prob.device),
        sampling=rollout.sampling,
        policy_versions=engine.weight_version,
        model=model,
    )
