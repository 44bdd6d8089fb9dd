"""Micro-batches in bypass mode: gradients rescaled once at the end equal those of one big batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import per_implementation

from rollcorr.bypass import BypassGradients
from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.core.aggregation import Denominators, count_denominators
from rollcorr.policy_loss import PolicyLogProbs, policy_loss

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


def compute(model, rollouts, config, loss, denominators=None):
    inputs, tokens, rollout_log_prob, ref_log_prob, advantages, mask = rollouts
    log_prob, entropy = model(inputs, tokens)
    policies = PolicyLogProbs(log_prob, rollout_log_prob=rollout_log_prob, ref_log_prob=ref_log_prob)
    return policy_loss(policies, advantages, mask, config=config, loss=loss, entropy=entropy, denominators=denominators)


def gradients_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_gradients(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


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
    whole = TinyPolicy()
    compute(whole, rollouts, config, loss).loss.backward()

    model, original = TinyPolicy(), count_denominators(rollouts[-1])
    gradients = BypassGradients(model.parameters(), original, mode=mode)
    for part in zip(*(x.tensor_split(parts) for x in rollouts), strict=True):
        gradients.backward(compute(model, part, config, loss, denominators=original))
    gradients.finish()
    assert_same_gradients(gradients_of(model), gradients_of(whole))


@per_implementation
def test_ranks_add_their_counts_and_then_their_gradients():
    rollouts = random_rollouts(1)
    config, loss = configurations("token-mean", "reinforce", "kept", True)
    whole = TinyPolicy()
    compute(whole, rollouts, config, loss).loss.backward()

    original = count_denominators(rollouts[-1])
    ranks = []
    for part in zip(*(x.tensor_split([1, 4]) for x in rollouts), strict=True):
        model = TinyPolicy()
        gradients = BypassGradients(model.parameters(), original, mode="token-mean")
        gradients.backward(compute(model, part, config, loss, denominators=original))
        ranks.append((model, gradients))
    counts = sum((gradients.counts for _, gradients in ranks), Denominators(0.0, 0.0))
    for _, gradients in ranks:
        gradients.finish(counts)
    summed = [None if None in g else sum(g) for g in zip(*(gradients_of(m) for m, _ in ranks), strict=True)]
    assert_same_gradients(summed, gradients_of(whole))


@per_implementation
@every_mode
def test_the_factor_matters_and_leaves_kl_and_entropy_alone(mode):
    """Without the rescaling the gradient is diluted; rescaling all of it would inflate KL and entropy."""
    rollouts = random_rollouts(2)
    config, loss = configurations(mode, "ppo_clip", "kept", True)
    model, original = TinyPolicy(), count_denominators(rollouts[-1])
    gradients = BypassGradients(model.parameters(), original, mode=mode)
    output = compute(model, rollouts, config, loss, denominators=original)
    apart = torch.autograd.grad(output.regularization, model.first, retain_graph=True)[0]
    diluted = torch.autograd.grad(output.policy_gradient, model.first, retain_graph=True)[0]
    gradients.backward(output)
    factor = gradients.finish()
    expected = {
        "token-mean": original.tokens / output.counts.tokens,
        "token-sum": torch.ones(()),
    }.get(mode, original.sequences / output.counts.sequences)
    assert factor.item() == pytest.approx(expected.item())
    assert original.tokens > output.counts.tokens
    torch.testing.assert_close(model.first.grad, factor * diluted + apart)


@per_implementation
@every_mode
@pytest.mark.parametrize("regularized", [False, True])
def test_when_nothing_is_kept_only_kl_and_entropy_are_left(mode, regularized):
    inputs, tokens, rollout_log_prob, *rest = random_rollouts(3)
    rollouts = (inputs, tokens, rollout_log_prob - 50.0, *rest)
    config, loss = configurations(mode, "ppo_clip", "kept", regularized)
    model, original = TinyPolicy(), count_denominators(rollouts[-1])
    gradients = BypassGradients(model.parameters(), original, mode=mode)
    output = compute(model, rollouts, config, loss, denominators=original)
    gradients.backward(output)
    gradients.finish()
    assert not output.loss_mask.any()
    for parameter in (model.first, model.second):
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).any() == regularized


@per_implementation
def test_a_second_step_starts_afresh():
    rollouts = random_rollouts(4)
    config, loss = configurations("token-mean", "reinforce", "kept", True)
    model, original = TinyPolicy(), count_denominators(rollouts[-1])
    gradients = BypassGradients(model.parameters(), original, mode="token-mean")
    steps = []
    for _ in range(2):
        model.zero_grad()
        gradients.backward(compute(model, rollouts, config, loss, denominators=original))
        gradients.finish()
        steps.append(gradients_of(model))
    assert_same_gradients(*steps)


@per_implementation
def test_denominators_may_be_plain_numbers():
    rollouts = random_rollouts(5)
    config, loss = configurations("seq-mean-token-sum", "ppo_clip", "original", False)
    counted = count_denominators(rollouts[-1])
    plain = Denominators(float(counted.tokens), float(counted.sequences))
    model = TinyPolicy()
    gradients = BypassGradients(model.parameters(), plain, mode="seq-mean-token-sum")
    gradients.backward(compute(model, rollouts, config, loss, denominators=plain))
    assert gradients.finish() == 1
    assert BypassGradients(model.parameters(), plain, mode="token-mean").finish() == 0
