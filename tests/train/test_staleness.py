"""How old the weights behind a rollout are: by the rollout's own account, token by token."""

import dataclasses
import io
import math

import pytest
import torch
from rich.console import Console

from rollcorr.config import SamplingSpec
from rollcorr.diagnostics import check_logs
from rollcorr.engines.base import EngineAnswerError, Rollout, TokenBatch
from rollcorr.run_directory import read_metrics
from rollcorr.train import train
from rollcorr.train.grpo.grpo_trainer import GrpoTrainer
from rollcorr.train.steps import token_lags, token_staleness

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


def staleness(given, step):
    return token_staleness(token_lags(given, step), given.tokens.response_mask)


def test_staleness_by_hand_from_the_version_behind_each_token():
    """At step 6 the policy is at version 5. Tokens have versions 3, 4, 5, 5; masked ones never count."""
    assert staleness(rollout(spec=5, versions=[[3, 4, 5], [5, 0, 99]]), 6) == ((2 + 1 + 0 + 0) / 4, 2)


def test_one_version_for_all_tokens_is_that_of_the_sampling_spec():
    assert staleness(rollout(spec=3), 6) == (2.0, 2)
    assert staleness(rollout(spec=5), 6) == (0.0, 0)


def test_a_batch_without_tokens_is_not_stale_and_an_unknown_version_is_unknown():
    assert staleness(rollout(spec=3, mask=torch.zeros_like(MASK)), 6) == (0.0, 0)
    mean, oldest = staleness(rollout(), 6)
    assert math.isnan(mean)
    assert oldest == 0


@pytest.mark.parametrize("told", [{"spec": 7}, {"spec": 5, "versions": [[5, 5, 7], [5, 0, 0]]}])
def test_a_version_that_the_policy_has_not_reached_is_refused(told):
    with pytest.raises(EngineAnswerError, match="step 6 was sampled by version 7, and the policy is at version 5"):
        staleness(rollout(**told), 6)


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


@pytest.mark.parametrize("correction", ["decoupled_token_is", "bypass_ppo_clip"])
def test_steps_split_k3_as_check_does(correction, micro_config, monkeypatch, tmp_path):
    """The first token of each response keeps version 0; the rest are fresh."""
    aged = GrpoTrainer._sample

    def sample(self, step):
        batch = aged(self, step)
        versions = torch.full_like(batch.rollout.tokens.response_ids, step - 1)
        versions[:, 0] = 0
        return dataclasses.replace(batch, rollout=dataclasses.replace(batch.rollout, policy_versions=versions))

    monkeypatch.setattr(GrpoTrainer, "_sample", sample)
    options = "steps=3", "log.rollouts=true", f"algorithm.rollout_correction={correction}"
    train(micro_config(*options), console=Console(file=io.StringIO()))
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    names = [f"rollout_corr/{name}" for name in ("k3_kl_lag0", "k3_kl_staleness", "k3_kl_per_version")]
    assert names[2] not in steps[0], "all tokens are fresh"
    for step in (2, 3):
        row, log = steps[step - 1], tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet"
        checked = check_logs([log]).metrics
        assert row[names[0]] == pytest.approx(checked[names[0]], rel=1e-5)
        assert row[names[0]] + row[names[1]] == pytest.approx(row["rollout_corr/k3_kl"], rel=1e-5)
        assert row[names[1]] == pytest.approx(row[names[2]] * row["engine/staleness"], rel=1e-5)
