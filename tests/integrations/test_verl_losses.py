"""The drop-in losses by hand; tests/integrations/test_verl_parity.py has their golden numbers."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
from implementations import per_implementation

from rollcorr.integrations import verl
from rollcorr.integrations.verl import v2025_11


def actor(correction=None, **global_batch_info):
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=0.5,
        get={"clip_ratio_c": 3.0}.get,
        global_batch_info=global_batch_info,
        policy_loss={"rollout_correction": correction},
    )


def batch(ratios, advantages, mask=None):
    """log π_θ with these ratios to log μ = −1."""
    log_prob = (torch.tensor(ratios, dtype=torch.float64).log() - 1).requires_grad_()
    mask = torch.ones_like(log_prob) if mask is None else torch.tensor(mask)
    return torch.full_like(log_prob, -1.0).detach(), log_prob, torch.tensor(advantages, dtype=torch.float64), mask


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3) / 3),
        ("token-sum", 1 + 2 + 3),
        ("seq-mean-token-sum", (3 + 3) / 2),
        ("seq-mean-token-mean", (1.5 + 3) / 2),
        ("seq-mean-token-sum-norm", (3 + 3) / 2 / 4),
    ],
)
def test_aggregation_by_hand_counts_no_empty_row(mode, expected):
    loss = torch.tensor([[1.0, 2.0, math.nan, 9.0], [3.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert verl.agg_loss(loss, mask, mode).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 6 / 10 * 2),
        ("token-sum", 6 * 2),
        ("seq-mean-token-sum", 6 / 5 * 2),
        ("seq-mean-token-mean", (1.5 + 3) / 5 * 2),
        ("seq-mean-token-sum-norm", 6 / 5 / 100 * 2),
    ],
)
def test_global_counts_and_ranks_by_hand(mode, expected):
    loss, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    counts = {"dp_size": 2, "batch_num_tokens": 10, "global_batch_size": 5, "loss_scale_factor": 100}
    assert verl.agg_loss(loss, mask, mode, **counts).item() == pytest.approx(expected)


@pytest.mark.parametrize(("mode", "missing"), [("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_b")])
def test_several_ranks_need_global_counts(mode, missing):
    with pytest.raises(ValueError, match=missing):
        verl.agg_loss(torch.ones(1, 1), torch.ones(1, 1), mode, dp_size=2)


def test_an_unknown_aggregation_is_named():
    with pytest.raises(ValueError, match="'token-median'"):
        verl.agg_loss(torch.ones(1, 1), torch.ones(1, 1), "token-median")


def test_ppo_by_hand_with_its_shares():
    """r = 2, 0.5, 4 and A = 1, −1, −1: clipped at 1.5, at 0.8, and by the dual clip at 3."""
    old, log_prob, advantages, mask = batch([[2.0, 0.5, 4.0]], [[1.0, -1.0, -1.0]])
    loss, metrics = verl.compute_policy_loss_vanilla(old, log_prob, advantages, mask, config=actor())
    assert loss.item() == pytest.approx((-1.5 + 0.8 + 3) / 3)
    assert metrics == {
        "actor/pg_clipfrac": pytest.approx(2 / 3),
        "actor/ppo_kl": pytest.approx(-math.log(4) / 3),
        "actor/pg_clipfrac_lower": pytest.approx(1 / 3),
    }
    older = verl.compute_policy_loss(old, log_prob, advantages, mask, cliprange=0.2, cliprange_high=0.5)
    assert [value.item() for value in older] == pytest.approx([loss.item(), 2 / 3, -math.log(4) / 3, 1 / 3])
    with pytest.raises(ValueError, match="cliprange"):
        verl.compute_policy_loss(old, log_prob, advantages, mask)


def test_ppo_weights_scale_the_loss_and_take_no_gradient():
    old, log_prob, advantages, mask = batch([[1.0, 1.0]], [[1.0, 1.0]])
    weights = torch.tensor([[2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = verl.compute_policy_loss_vanilla(
        old, log_prob, advantages, mask, config=actor(), rollout_is_weights=weights
    )
    loss.backward()
    assert log_prob.grad.flatten().tolist() == pytest.approx([-1.0, 0.0])
    assert weights.grad is None


def test_the_reported_kl_is_clamped_for_parity_alone():
    old, log_prob, advantages, mask = batch([[math.exp(30)]], [[1.0]])
    for verl_parity, expected in ((False, -30.0), (True, -20.0)):
        _, metrics = verl.compute_policy_loss_vanilla(
            old, log_prob, advantages, mask, config=actor(), verl_parity=verl_parity
        )
        assert metrics["actor/ppo_kl"] == pytest.approx(expected)


@per_implementation
def test_bypass_ppo_measures_weights_and_does_not_apply_them():
    """r = π_θ/μ = 1.4 is unclipped at 1.5, so the loss is −1.4 for A = 1; a weight of 1.4 would square it."""
    inputs = batch([[1.4, 1.4]], [[1.0, 1.0]])
    loss, metrics = verl.compute_policy_loss_bypass_mode(*inputs, config=actor({"rollout_is": "token"}))
    assert loss.item() == pytest.approx(-1.4)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.4)


@per_implementation
def test_bypass_reinforce_by_hand():
    """−min(r, 2) · log π · A with r = 4 and 1, log π = log r − 1, over two tokens."""
    old, log_prob, advantages, mask = batch([[4.0, 1.0]], [[1.0, 3.0]])
    correction = {"rollout_is": "token", "loss_type": "reinforce"}
    loss, metrics = verl.compute_policy_loss_bypass_mode(old, log_prob, advantages, mask, config=actor(correction))
    loss.backward()
    assert loss.item() == pytest.approx(-(2 * (math.log(4) - 1) + 3 * -1) / 2)
    assert log_prob.grad.flatten().tolist() == pytest.approx([-1.0, -1.5])
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(4) / 2)


@pytest.mark.covering(2)
@per_implementation
@pytest.mark.parametrize("counts", [{}, {"dp_size": 2, "batch_num_tokens": 8, "global_batch_size": 4}])
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_a_wholly_rejected_batch_gives_loss_and_gradient_zero(mode, loss_type, counts):
    old, log_prob, advantages, mask = batch([[9.0, 9.0]], [[1.0, 1.0]])
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.1, "loss_type": loss_type}
    loss, metrics = verl.compute_policy_loss_bypass_mode(
        old, log_prob, advantages, mask, mode, actor(correction, **counts)
    )
    loss.backward()
    assert loss.item() == 0
    assert (log_prob.grad == 0).all()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_a_bypass_loss_leaves_out_missing_log_probs(loss_type):
    """Also without weights and rejection: the loss reads the rollout log-probs."""
    old, log_prob, advantages, mask = batch([[1.0, 1.0]], [[1.0, 3.0]])
    old[0, 1] = float("nan")
    config = actor({"rollout_is": None, "loss_type": loss_type})
    loss, _ = verl.compute_policy_loss_bypass_mode(old, log_prob, advantages, mask, config=config)
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad.isfinite().all()
    assert log_prob.grad[0, 1] == 0

    pure, *_ = v2025_11.compute_policy_loss_with_rollout_correction(
        old, log_prob, advantages, mask, rollout_is=None, loss_agg_mode="token-mean"
    )
    assert pure.item() == pytest.approx(1.0)


@per_implementation
def test_the_caller_decides_what_a_bypass_loss_is_divided_by():
    """Of two tokens one is rejected: without counts the loss is its mean, with batch_num_tokens=2 half of it."""
    inputs = batch([[9.0, 1.0]], [[1.0, 1.0]])
    correction = {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.1}
    kept, _ = verl.compute_policy_loss_bypass_mode(*inputs, config=actor(correction))
    original, _ = verl.compute_policy_loss_bypass_mode(*inputs, config=actor(correction, batch_num_tokens=2))
    assert (kept.item(), original.item()) == (pytest.approx(-1.0), pytest.approx(-0.5))


@per_implementation
def test_masked_values_are_never_read_forward_or_backward():
    old, log_prob, advantages, _ = batch([[1.0, math.nan]], [[1.0, math.inf]])
    mask = torch.tensor([[True, False]])
    for correction in ({"loss_type": "reinforce", "rollout_is": "sequence"}, {}):
        log_prob.grad = None
        loss, _ = verl.compute_policy_loss_bypass_mode(old, log_prob, advantages, mask, config=actor(correction))
        loss.backward()
        assert loss.isfinite()
        assert log_prob.grad.flatten().tolist() == pytest.approx([-1.0, 0.0])


def test_errors_of_the_bypass_loss_name_what_is_missing():
    inputs = batch([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match="config is required"):
        verl.compute_policy_loss_bypass_mode(*inputs)
    with pytest.raises(ValueError, match="rollout_correction"):
        verl.compute_policy_loss_bypass_mode(*inputs, config=actor())
    with pytest.raises(ValueError, match="loss_type must be"):
        verl.compute_policy_loss_bypass_mode(*inputs, config=actor({"loss_type": "dpo"}))


def test_losses_show_the_arguments_of_verl_to_help_and_editors():
    tensors = ["old_log_prob", "log_prob", "advantages", "response_mask"]
    of_registry = [*tensors, "loss_agg_mode", "config", "rollout_is_weights"]
    for loss in (verl.compute_policy_loss_vanilla, verl.compute_policy_loss_bypass_mode):
        parameters = inspect.signature(loss).parameters
        assert list(parameters) == [*of_registry, "verl_parity"]
        assert parameters["verl_parity"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(inspect.signature(v2025_11.compute_policy_loss_vanilla).parameters) == of_registry
