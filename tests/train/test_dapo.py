"""DAPO: each part by its formula, dynamic sampling on hand-made rollouts, and the example on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollcorr import PolicyLogProbs, SamplingSpec, policy_loss
from rollcorr.engines.completions import Completion, rollout_from_completions
from rollcorr.run_directory import read_metrics
from rollcorr.train import load_config, train
from rollcorr.train.grpo import grpo_trainer as grpo
from rollcorr.train.grpo.dynamic_sampling import join_rollouts, sample_groups, select_rows
from rollcorr.train.grpo.tasks import Reward, overlong_penalty

EXAMPLE = Path(__file__).parents[2] / "examples" / "train" / "dapo.yaml"


def rollout_of(*responses: list[int], versions: list[list[int]] | None = None, first_prompt: int = 1):
    """Return a truncated rollout; token t has log-prob −t / 8 and may be t or t + 1."""
    versions = versions or [None] * len(responses)
    completions = [
        Completion(
            token_ids=ids,
            log_probs=[-t / 8 for t in ids],
            raw_log_probs=[-t / 4 for t in ids],
            kept=[[t, t + 1] for t in ids],
            log_kept_mass=[-t / 16 for t in ids],
            versions=ages,
        )
        for ids, ages in zip(responses, versions, strict=True)
    ]
    prompts = [[7] * (first_prompt + row) for row in range(len(responses))]
    return rollout_from_completions(prompts, completions, sampling=SamplingSpec(policy_version=3), pad_token_id=0)


def rounds_of(*values: list[float]):
    """Return a callback over groups of two responses; response k of round r is one token, 10 r + k."""
    calls: list[int] = []

    def sample_round(number):
        calls.append(number)
        rewards = [Reward(value, correct=value > 0) for value in values[number]]
        return rollout_of(*([10 * number + k + 1] for k in range(len(rewards)))), rewards

    return calls, sample_round


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (21, -1)])
def test_overlong_penalty_by_hand(length, penalty):
    """L_max 20, L_cache 4: 0 up to 16, then (16 − length) / 4, −1 from 20."""
    assert overlong_penalty(length, longest=20, buffer=4) == penalty
    assert overlong_penalty(length, longest=20, buffer=0) == 0


def test_example_clips_high_ratios_at_1_28():
    """−mean over tokens of min(r A, clip(r, 0.8, 1.28) A), unequal lengths, without a correction."""
    ratio, mask = torch.tensor([[1.5, 1.25, 0.5], [1.5, 0.5, 9.0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([1.0, -2.0])
    policies = PolicyLogProbs(log_prob=ratio.log() - 2, old_log_prob=torch.full((2, 3), -2.0))
    loss = load_config(EXAMPLE).algorithm.loss
    expected = -(1.28 + 1.25 + 0.5 - 2 * 1.5 - 2 * 0.8) / 5
    assert policy_loss(policies, advantages, mask.bool(), loss=loss).loss.item() == pytest.approx(expected)


def test_equal_groups_are_replaced_in_order():
    calls, sample_round = rounds_of([1, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1], [1, 0, 0, 1, 0, 1])
    rollout, rewards, metrics = sample_groups(sample_round, groups=3, group_size=2, max_rounds=9)
    assert calls == [0, 1, 2]
    assert rollout.tokens.response_ids.tolist() == [[1], [2], [13], [14], [21], [22]]
    assert [reward.value for reward in rewards] == [1, 0, 0, 1, 1, 0]
    assert metrics["rollout/rounds"] == 3
    assert metrics["rollout/differing_groups"] == 5 / 9
    assert metrics["reward/accuracy"] == 9 / 18  # of the dropped responses too


def test_equal_groups_fill_the_batch_at_the_cap():
    calls, sample_round = rounds_of([0, 0, 1, 1], [1, 1, 0, 1])
    rollout, rewards, metrics = sample_groups(sample_round, groups=2, group_size=2, max_rounds=2)
    assert calls == [0, 1]
    assert rollout.tokens.response_ids.tolist() == [[1], [2], [13], [14]]
    assert [reward.value for reward in rewards] == [0, 0, 0, 1]
    assert metrics["rollout/rounds"] == 2


def test_one_round_keeps_every_group():
    calls, sample_round = rounds_of([0, 0, 1, 0])
    rollout, rewards, _ = sample_groups(sample_round, groups=2, group_size=2, max_rounds=1)
    assert calls == [0]
    assert len(rollout.tokens) == len(rewards) == 4


def test_joined_rows_equal_one_batch():
    parts = rollout_of([1, 2], [3]), rollout_of([4, 5, 6], [7], versions=[[1, 2, 3], [2]], first_prompt=3)
    whole = rollout_of([1, 2], [3], [4, 5, 6], [7], versions=[[3, 3], [3], [1, 2, 3], [2]])
    rows = torch.tensor([3, 0, 2])
    got, expected = select_rows(join_rollouts(parts), rows), select_rows(whole, rows)
    assert got.tokens.unpadded() == expected.tokens.unpadded() == ([[7] * 4, [7], [7] * 3], [[7], [1, 2], [4, 5, 6]])
    assert [got.kept.ids.tolist(), got.kept.offsets.diff().tolist()] == [[7, 8, 1, 2, 2, 3, 4, 5, 5, 6, 6, 7], [2] * 6]
    mask = got.tokens.response_mask
    for name in ("rollout_log_prob", "raw_log_prob", "log_kept_mass", "policy_versions"):
        assert torch.equal(getattr(got, name)[mask], getattr(expected, name)[mask]), name


def test_a_step_trains_on_differing_groups(micro_trainer, monkeypatch):
    """Two of three groups of the first round have equal rewards."""
    calls = iter(range(1000))

    def reward(*_, **__):
        call = next(calls)
        return Reward(float((call < 4 and call % 2 == 0) or (call >= 12 and call % 3 == 0)), correct=False)

    monkeypatch.setattr(grpo, "hard_gated_reward", reward)
    result = micro_trainer("rollout.max_rounds=5").step(1)
    rewards = torch.tensor([reward.value for reward in result.batch.rewards]).view(3, 4)
    assert (rewards.amax(1) > rewards.amin(1)).all()
    assert result.metrics["rollout/rounds"] == 2
    assert (result.batch.advantages != 0).any(-1).all()


def test_a_step_adds_the_overlong_penalty(micro_trainer, monkeypatch):
    monkeypatch.setattr(grpo, "hard_gated_reward", lambda *_, **__: Reward(1.0, correct=True))
    batch = micro_trainer("rollout.overlong_buffer=8", "rollout.overlong_penalty=0.5").step(1).batch
    lengths = batch.response_mask.sum(1).tolist()
    assert [reward.value for reward in batch.rewards] == [1 - 0.5 * length / 8 for length in lengths]


def test_a_buffer_beyond_the_longest_response_is_refused():
    with pytest.raises(ValueError, match=r"must be at most rollout\.max_new_tokens=48, got 49"):
        load_config(None, ["rollout.overlong_buffer=49"])


def test_the_example_trains_a_tiny_model(micro_run, low_byte_reward, tmp_path):
    small = ["steps=2", "optim.mini_batch_size=6", "rollout.overlong_buffer=4", f"run_dir={tmp_path / 'run'}"]
    train(load_config(EXAMPLE, [*micro_run, *small]))
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["rollout/rounds"] for row in metrics] == [1, 1]
    assert all(0 < row["actor/grad_norm"] < 100 for row in metrics)
