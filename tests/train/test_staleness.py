"""How old the weights behind a rollout are: by the rollout's own account, token by token."""

import dataclasses
import math

import pytest
import torch

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, Rollout, TokenBatch
from rollcorr.train.steps import token_staleness

MASK = torch.tensor([[True, True, True], [True, False, False]])


def rollout(*, spec=None, versions=None, mask=MASK):
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    tokens = TokenBatch(ids, torch.ones_like(mask), ids, mask)
    return Rollout(
        tokens=tokens,
        rollout_log_prob=torch.zeros(mask.shape),
        sampling=SamplingSpec(policy_version=spec),
        policy_versions=None if versions is None else torch.tensor(versions),
    )


def test_staleness_by_hand_from_the_version_behind_each_token():
    """At step 6 the policy is at version 5. Tokens have versions 3, 4, 5, 5; masked ones never count."""
    assert token_staleness(rollout(spec=5, versions=[[3, 4, 5], [5, 0, 99]]), 6) == ((2 + 1 + 0 + 0) / 4, 2)


def test_one_version_for_all_tokens_is_that_of_the_sampling_spec():
    assert token_staleness(rollout(spec=3), 6) == (2.0, 2)
    assert token_staleness(rollout(spec=5), 6) == (0.0, 0)


def test_a_batch_without_tokens_is_not_stale_and_an_unknown_version_is_unknown():
    assert token_staleness(rollout(spec=3, mask=torch.zeros_like(MASK)), 6) == (0.0, 0)
    mean, oldest = token_staleness(rollout(), 6)
    assert math.isnan(mean)
    assert oldest == 0


@pytest.mark.parametrize("told", [{"spec": 7}, {"spec": 5, "versions": [[5, 5, 7], [5, 0, 0]]}])
def test_a_version_that_the_policy_has_not_reached_is_refused(told):
    with pytest.raises(EngineAnswerError, match="step 6 was sampled by version 7, and the policy is at version 5"):
        token_staleness(rollout(**told), 6)


def test_a_step_reports_the_versions_of_its_tokens_and_trains_on_no_future_ones(micro_trainer):
    """The engine still reports version 0; its tokens report that its weights changed within the responses."""
    trainer = micro_trainer()
    sample, future = trainer.engine.generate, 0

    def spread(prompts, *, seed):
        sampled = sample(prompts, seed=seed)
        versions = torch.full_like(sampled.tokens.response_ids, 2 + future)
        versions[:, 0] = 0
        return dataclasses.replace(sampled, policy_versions=versions)

    trainer.step(1)
    trainer.step(2)
    trainer.engine.generate = spread
    result = trainer.step(3)
    lengths = result.batch.response_mask.sum(1)
    assert result.metrics["engine/staleness"] == pytest.approx(2 * len(lengths) / int(lengths.sum()))
    assert result.metrics["engine/staleness_max"] == 2

    before, future = [parameter.detach().clone() for parameter in trainer.model.parameters()], 1
    with pytest.raises(EngineAnswerError, match="sampled by version 3"):
        trainer.step(3)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
