"""Micro-batches in bypass mode: gradients rescaled once at the end equal the gradients of one big batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import per_implementation

from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.correction.denominators import count_denominators
from rollcorr.correction.losses import PolicyLogProbs, policy_loss
from rollcorr.correction.training_step import TrainingStep

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
every_mode = pytest.mark.parametrize("mode", MODES)


class TinyPolicy(torch.nn.Module):
    """Token log-probs and entropies over four outcomes from two layers; one more parameter is never used."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = torch.nn.Parameter(torch.randn(3, 5, generator=generator, dtype=torch.float64))
        self.second = torch.nn.Parameter(torch.randn(5, 4, generator=generator, dtype=torch.float64))
        self.frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, inputs, tokens):
        log_probs = torch.log_softmax(torch.tanh(inputs @ self.first) @ self.second, dim=-1)
        return log_probs.gather(-1, tokens[..., None])[..., 0], -(log_probs.exp() * log_probs).sum(-1)


def random_rollouts(seed, batch=6, width=5):
    """Inputs and tokens for the policy, μ at some distance from it, a reference, advantages and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(batch, width, 3, generator=generator, dtype=torch.float64)
    tokens = torch.randint(4, (batch, width), generator=generator)
    noise, reference, advantages = torch.randn(3, batch, width, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        log_prob, _ = TinyPolicy()(inputs, tokens)
    mask = torch.rand(batch, width, generator=generator) < 0.7
    return inputs, tokens, log_prob + 0.4 * noise, log_prob + 0.3 * reference, advantages, mask


def configurations(mode, loss_type, normalizer, regularized):
    values = {"rollout_is": "token"} if loss_type == "reinforce" else {}
    config = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type=loss_type,
        normalizer=normalizer,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.7_1.5",
        **values,
    )
    loss = LossConfig(
        loss_agg_mode=mode,
        loss_scale_factor=7.0 if mode == "seq-mean-token-sum-norm" else None,
        kl_coef=0.3 if regularized else 0.0,
        entropy_coef=0.2 if regularized else 0.0,
    )
    return config, loss


def policies_of(model, rollouts):
    inputs, tokens, rollout_log_prob, ref_log_prob, _, _ = rollouts
    log_prob, entropy = model(inputs, tokens)
    return PolicyLogProbs(log_prob=log_prob, rollout_log_prob=rollout_log_prob, ref_log_prob=ref_log_prob), entropy


def whole_step(rollouts, config, loss):
    """Loss and gradients of one call for everything."""
    model = TinyPolicy()
    policies, entropy = policies_of(model, rollouts)
    output = policy_loss(
        policies, rollouts[-2], rollouts[-1], config=config, loss=loss, entropy=entropy, whole_step=True
    )
    output.loss.backward()
    return output, gradients_of(model)


def add(step, rollouts):
    """One micro-batch."""
    policies, entropy = policies_of(step.model, rollouts)
    output = step.policy_loss(policies, rollouts[-2], rollouts[-1], entropy=entropy)
    step.backward(output)
    return output


def split_step(rollouts, config, loss, parts=1):
    model = TinyPolicy()
    with TrainingStep(model, config, loss=loss) as step:
        for part in zip(*(x.tensor_split(parts) for x in rollouts), strict=True):
            add(step, part)
        outcome = step.finish()
    return outcome, gradients_of(model)


def gradients_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_gradients(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.covering(2)
@every_mode
@pytest.mark.parametrize(
    ("loss_type", "normalizer"),
    [("ppo_clip", "kept"), ("ppo_clip", "original"), ("reinforce", "kept"), ("reinforce", "weights")],
)
@pytest.mark.parametrize("regularized", [False, True])
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 2**16), parts=st.integers(1, 6))
def test_micro_batches_rescaled_at_the_end_equal_one_big_batch(mode, loss_type, normalizer, regularized, seed, parts):
    rollouts = random_rollouts(seed)
    config, loss = configurations(mode, loss_type, normalizer, regularized)
    (outcome, gradients), (output, expected) = (
        split_step(rollouts, config, loss, parts),
        whole_step(rollouts, config, loss),
    )
    assert_same_gradients(gradients, expected)
    assert outcome.loss.item() == pytest.approx(output.loss.item(), rel=1e-12, abs=1e-12)
    assert (outcome.kept, outcome.total) == (output.loss_mask.sum(), rollouts[-1].sum())


@per_implementation
@every_mode
def test_the_factor_matters_and_leaves_kl_and_entropy_alone(mode):
    """Without the rescaling the gradient is diluted; rescaling all of it would inflate KL and entropy."""
    rollouts = random_rollouts(2)
    config, loss = configurations(mode, "ppo_clip", "kept", True)
    model, original = TinyPolicy(), count_denominators(rollouts[-1])
    policies, entropy = policies_of(model, rollouts)
    output = policy_loss(
        policies, rollouts[-2], rollouts[-1], config=config, loss=loss, denominators=original, entropy=entropy
    )
    apart = torch.autograd.grad(output.regularization, model.first, retain_graph=True)[0]
    diluted = torch.autograd.grad(output.policy_gradient, model.first, retain_graph=True)[0]
    outcome, gradients = split_step(rollouts, config, loss)
    factor = {
        "token-mean": original.tokens / output.counts.tokens,
        "token-sum": torch.ones(()),
    }.get(mode, original.sequences / output.counts.sequences)
    assert outcome.total == original.tokens > output.counts.tokens == outcome.kept
    torch.testing.assert_close(gradients[0], factor * diluted + apart)


@per_implementation
@every_mode
@pytest.mark.parametrize("regularized", [False, True])
def test_when_nothing_is_kept_only_kl_and_entropy_are_left(mode, regularized):
    inputs, tokens, rollout_log_prob, *rest = random_rollouts(3)
    rollouts = (inputs, tokens, rollout_log_prob - 50.0, *rest)
    config, loss = configurations(mode, "ppo_clip", "kept", regularized)
    outcome, gradients = split_step(rollouts, config, loss, 2)
    assert outcome.kept == outcome.kept_fraction == 0
    assert bool(outcome.skipped) is not regularized
    for gradient in gradients[:2]:
        assert gradient.isfinite().all()
        assert (gradient != 0).any() == regularized


def test_a_step_without_a_token_or_a_micro_batch_has_no_gradient():
    config, loss = configurations("token-mean", "ppo_clip", "kept", True)
    *rollouts, mask = random_rollouts(3)
    outcome, gradients = split_step((*rollouts, torch.zeros_like(mask)), config, loss)
    assert outcome.skipped
    assert not any(g.any() for g in gradients if g is not None)
    model = TinyPolicy()
    with TrainingStep(model, config, loss=loss) as step:
        assert step.finish() == (0, 0, 0, True)
    assert gradients_of(model) == [None] * 4


@per_implementation
def test_packed_sequences_carry_their_offsets():
    inputs, tokens, rollout_log_prob, ref_log_prob, advantages, mask = random_rollouts(5)
    config, loss = configurations("seq-mean-token-mean", "reinforce", "kept", True)
    expected = whole_step((inputs, tokens, rollout_log_prob, ref_log_prob, advantages, mask), config, loss)[1]
    offsets, model = torch.arange(0, 31, 5), TinyPolicy()
    with TrainingStep(model, config, loss=loss) as step:
        for rows in torch.arange(6).split(4):
            log_prob, entropy = model(inputs[rows], tokens[rows])
            log_prob, entropy, rollout, reference, advantage, valid = (
                x.flatten() for x in (log_prob, entropy, rollout_log_prob[rows], ref_log_prob[rows],
                                      advantages[rows], mask[rows])
            )  # fmt: skip
            policies = PolicyLogProbs(log_prob=log_prob, rollout_log_prob=rollout, ref_log_prob=reference)
            cu_seqlens = offsets[: len(rows) + 1]
            step.backward(step.policy_loss(policies, advantage, valid, entropy=entropy, cu_seqlens=cu_seqlens))
        step.finish()
    assert_same_gradients(gradients_of(model), expected)


def test_gradients_that_are_there_before_are_refused():
    config, loss = configurations("token-mean", "ppo_clip", "kept", False)
    model = TinyPolicy()
    model.second.grad = torch.zeros_like(model.second)
    with pytest.raises(ValueError, match=r"there are gradients already.*zero_grad\(set_to_none=True\)"):
        TrainingStep(model, config, loss=loss).__enter__()
    model.zero_grad()
    model.frozen.grad = torch.ones_like(model.frozen)  # nobody trains it
    with TrainingStep(model, config, loss=loss) as step:
        step.finish()


@per_implementation
@pytest.mark.parametrize("regularized", [False, True])
def test_the_gradient_of_another_loss_is_added_and_not_rescaled(regularized):
    """Such as the balancing loss of a mixture of experts, before, between or after the micro-batches."""
    rollouts = random_rollouts(2)
    config, loss = configurations("token-mean", "ppo_clip", "kept", regularized)
    expected = whole_step(rollouts, config, loss)[1]
    for place in range(3):
        model = TinyPolicy()
        with TrainingStep(model, config, loss=loss) as step:
            for i, part in enumerate(zip(*(x.tensor_split(2) for x in rollouts), strict=True)):
                if i == place:
                    model.second.sum().backward()
                add(step, part)
            if place == 2:
                model.second.sum().backward()
            outcome = step.finish()
        assert outcome.kept < outcome.total
        other = [g + 1 if i == 1 else g for i, g in enumerate(expected)]
        assert_same_gradients(gradients_of(model), other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_stay_in_the_dtype_of_their_parameters(dtype):
    rollouts = random_rollouts(2)
    config, loss = configurations("token-mean", "ppo_clip", "kept", True)
    model = TinyPolicy()
    model.first.data, model.second.data = model.first.data.to(dtype), model.second.data.to(dtype)
    inputs, tokens, *rest = rollouts
    with TrainingStep(model, config, loss=loss) as step:
        add(step, (inputs.to(dtype), tokens, *rest))
        step.finish()
    for gradient, expected in zip(gradients_of(model)[:2], whole_step(rollouts, config, loss)[1], strict=False):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), expected, rtol=0.1, atol=0.02)


def test_a_step_is_one_block_that_finishes_once():
    rollouts = random_rollouts(4)
    config, loss = configurations("token-mean", "reinforce", "kept", True)
    model = TinyPolicy()
    step = TrainingStep(model, config, loss=loss)
    with pytest.raises(RuntimeError, match=r"policy_loss\(\) belongs inside `with TrainingStep\(…\) as step:`"):
        add(step, rollouts)
    with step:
        output = add(step, rollouts)
        step.finish()
        with pytest.raises(RuntimeError, match=r"finish\(\) belongs inside .*, before finish\(\) and once per step"):
            step.finish()
        with pytest.raises(RuntimeError, match=r"backward\(\) belongs inside"):
            step.backward(output)
    with pytest.raises(RuntimeError, match="TrainingStep is for one optimizer step: make another for the next"):
        step.__enter__()
    model.zero_grad()
    lost = pytest.raises(RuntimeError, match=r"the block ended without finish\(\)")
    with lost, TrainingStep(model, config, loss=loss) as step:
        add(step, rollouts)
    with pytest.raises(KeyError), TrainingStep(TinyPolicy(), config, loss=loss):
        raise KeyError  # and not the error above
