"""`TrainingStep` in one process: any split has the gradient of the batch, and misuse raises."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bypass import TinyPolicy, add, assert_same_gradients, configurations, gradients_of, random_rollouts

from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.correction import PolicyLogProbs, TrainingStep, correct, loss_denominators, policy_loss

BAND = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.5"}
REGULARIZED = LossConfig(kl_coef=0.3, entropy_coef=0.2)


class Batch:
    """Six rows with the log-probs of π_old, from which π_θ has moved a little."""

    def __init__(self, seed=2):
        self.inputs, self.tokens, self.rollout, self.reference, self.advantages, self.mask = random_rollouts(seed)
        noise = torch.randn(self.rollout.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            self.old = TinyPolicy()(self.inputs, self.tokens)[0] + 0.05 * noise

    def arguments(self, model, rows=slice(None), *, bypass=False, plain=False):
        log_prob, entropy = model(self.inputs[rows], self.tokens[rows])
        policies = PolicyLogProbs(
            log_prob=log_prob,
            old_log_prob=None if bypass else self.old[rows],
            rollout_log_prob=None if plain else self.rollout[rows],
            ref_log_prob=self.reference[rows],
        )
        return (policies, self.advantages[rows], self.mask[rows]), {"entropy": entropy}

    def corrected(self, config, rows=slice(None)):
        return correct(self.old[rows], self.rollout[rows], self.mask[rows], config)

    def whole(self, config, loss, *, counted=True):
        """Loss and gradients of one call; `counted` divides by the float32 weights, not by the statistics' weights."""
        model, correction = TinyPolicy(), self.corrected(config)
        arguments, options = self.arguments(model)
        if counted:
            own = (correction.loss_mask, self.mask, correction.loss_weights)
            options["denominators"] = loss_denominators(config.normalizer, *own)
            options["original_denominators"] = loss_denominators("original", *own)
        output = policy_loss(*arguments, loss=loss, correction=correction, **options)
        output.loss.backward()
        return output, gradients_of(model)

    def split(self, config, loss, parts, *, given=None, anew=False, **step_options):
        """The gradient through micro-batches; `anew` corrects each of them by itself."""
        model, correction = TinyPolicy(), self.corrected(config)
        with TrainingStep(model, config if given is None else given, loss=loss, **step_options) as step:
            for rows in torch.arange(6).tensor_split(parts):
                arguments, options = self.arguments(model, rows)
                part = self.corrected(config, rows) if anew else correction[rows]
                step.backward(step.policy_loss(*arguments, correction=part, **options))
            outcome = step.finish()
        return outcome, gradients_of(model)


class Dividing:
    """Runs backward passes as an Accelerator does, and counts them."""

    gradient_accumulation_steps = 4

    def __init__(self, distributed_type=None):
        self.distributed_type, self.passes = distributed_type, 0

    def backward(self, loss, **options):
        self.passes += 1
        (loss / self.gradient_accumulation_steps).backward(**options)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("normalizer", ["kept", "original", "weights"])
@pytest.mark.parametrize("known", [False, True])
@settings(deadline=None, max_examples=3)
@given(seed=st.integers(0, 2**16), parts=st.integers(1, 6), anew=st.booleans(), regularized=st.booleans())
def test_any_decoupled_split_gives_the_whole_gradient(mode, normalizer, known, seed, parts, anew, regularized):
    batch, config = Batch(seed), RolloutCorrectionConfig(**BAND, normalizer=normalizer)
    loss = configurations(mode, "ppo_clip", "kept", regularized)[1]
    output, expected = batch.whole(config, loss, counted=not (known and regularized))
    given = batch.corrected(config) if known else config
    outcome, gradients = batch.split(config, loss, parts, given=given, anew=anew)
    assert_same_gradients(gradients, expected)
    assert outcome.loss.item() == pytest.approx(output.loss.item(), rel=1e-12, abs=1e-12)
    assert (outcome.kept, outcome.total) == (output.loss_mask.sum(), batch.mask.sum())


def test_plain_ppo_needs_no_correction():
    batch, whole = Batch(), TinyPolicy()
    arguments, options = batch.arguments(whole, plain=True)
    policy_loss(*arguments, loss=REGULARIZED, **options).loss.backward()
    model = TinyPolicy()
    with TrainingStep(model, None, loss=REGULARIZED) as step:
        for rows in torch.arange(6).split(4):
            arguments, options = batch.arguments(model, rows, plain=True)
            step.backward(step.policy_loss(*arguments, **options))
        step.finish()
    assert_same_gradients(gradients_of(model), gradients_of(whole))


def test_losses_of_the_functional_form_count_too():
    batch, config, model = Batch(), RolloutCorrectionConfig(**BAND), TinyPolicy()
    correction = batch.corrected(config)
    with TrainingStep(model, config, loss=REGULARIZED) as step:
        for rows in torch.arange(6).split(4):
            arguments, options = batch.arguments(model, rows)
            step.backward(policy_loss(*arguments, loss=REGULARIZED, correction=correction[rows], **options))
        step.finish()
    assert_same_gradients(gradients_of(model), batch.whole(config, REGULARIZED)[1])


@pytest.mark.parametrize(
    ("known", "loss", "passes"), [(False, REGULARIZED, 6), (True, REGULARIZED, 3), (False, LossConfig(), 3)]
)
def test_a_known_correction_saves_the_second_backward_pass(known, loss, passes):
    batch, config, counter = Batch(), RolloutCorrectionConfig(**BAND), Dividing()
    given = batch.corrected(config) if known else config
    _, gradients = batch.split(config, loss, 3, given=given, accumulation=counter)
    assert counter.passes == passes
    assert_same_gradients(gradients, batch.whole(config, loss)[1])


def test_kl_and_entropy_stay_where_nothing_is_kept():
    batch, config = Batch(), RolloutCorrectionConfig(**BAND)
    batch.rollout = batch.rollout - 50.0
    expected = batch.whole(config, REGULARIZED)[1]
    assert expected[0].any()
    for known in (config, batch.corrected(config)):
        outcome, gradients = batch.split(config, REGULARIZED, 2, given=known)
        assert_same_gradients(gradients, expected)
        assert (outcome.kept, bool(outcome.skipped)) == (0, False)


def test_a_correction_of_other_rows_is_refused():
    batch, config = Batch(), RolloutCorrectionConfig(**BAND)
    first = batch.corrected(config).mini_batch(slice(0, 1))
    with pytest.raises(ValueError, match=r"are of other rows than the correction.*correction\.mini_batch\(rows\)"):
        batch.split(config, REGULARIZED, 2, given=first)


def test_a_correction_must_fit_the_step():
    batch, model = Batch(), TinyPolicy()
    arguments, options = batch.arguments(model)
    with TrainingStep(model, "decoupled_token_is") as step:
        with pytest.raises(ValueError, match=r"correction was computed with .* the step has config="):
            step.policy_loss(*arguments, correction=batch.corrected("decoupled_seq_is"), **options)
        arguments, options = batch.arguments(model, plain=True)
        output = policy_loss(*arguments, loss=LossConfig(loss_agg_mode="token-sum"), **options)
        with pytest.raises(ValueError, match="aggregated by token-sum, and the step is one of token-mean"):
            step.backward(output)
        step.finish()


def test_a_loss_outside_of_step_backward_is_an_error():
    batch, config, model = Batch(), RolloutCorrectionConfig(**BAND), TinyPolicy()
    missed = pytest.raises(
        RuntimeError, match=r"1 losses .* not given to step\.backward\(output\).*accelerator\.backward"
    )
    with missed, TrainingStep(model, config) as step:
        arguments, options = batch.arguments(model)
        step.policy_loss(*arguments, correction=batch.corrected(config), **options).loss.backward()
        step.finish()


def test_a_foreign_loss_stands_for_no_loss_of_the_step():
    batch, config, model = Batch(), RolloutCorrectionConfig(**BAND), TinyPolicy()
    missed = pytest.raises(RuntimeError, match="1 losses of this step were not given")
    with missed, TrainingStep(model, config) as step:
        arguments, options = batch.arguments(model)
        step.policy_loss(*arguments, correction=batch.corrected(config), **options)
        arguments, options = batch.arguments(model)
        step.backward(policy_loss(*arguments, correction=batch.corrected(config), **options))
        step.finish()


def test_a_loss_may_be_copied_before_backward():
    batch, config, model = Batch(), RolloutCorrectionConfig(**BAND), TinyPolicy()
    with TrainingStep(model, config) as step:
        arguments, options = batch.arguments(model)
        output = step.policy_loss(*arguments, correction=batch.corrected(config), **options)
        step.backward(dataclasses.replace(output, statistics=output.statistics))
        assert step.finish().kept == output.loss_mask.sum()


def test_bypass_losses_name_the_whole_step():
    batch, config = Batch(), RolloutCorrectionConfig.bypass_ppo_clip_k3_rs(0.02)
    arguments, _ = batch.arguments(TinyPolicy(), bypass=True)
    with pytest.raises(
        ValueError, match=r"use TrainingStep\(model, config\); or give either denominators, or whole_step"
    ):
        policy_loss(*arguments, config=config)
    output = policy_loss(*arguments, config=config, whole_step=True)
    with pytest.raises(ValueError, match="give either denominators, or whole_step=True"):
        policy_loss(*arguments, config=config, whole_step=True, denominators=output.counts)
    policy_loss(*arguments, config=config, denominators=output.counts)


def test_normalized_weights_cannot_be_split_in_bypass_mode():
    config = RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True
    )
    with pytest.raises(ValueError, match="set normalizer='weights' instead"):
        TrainingStep(TinyPolicy(), config)


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_the_division_of_an_accelerator_is_undone(loss_type):
    rollouts = random_rollouts(2)
    config, loss = configurations("token-mean", loss_type, "kept", True)
    gradients = []
    for options in ({}, {"accumulation": Dividing()}):
        model = TinyPolicy()
        with TrainingStep(model, config, loss=loss, **options) as step:
            for part in zip(*(x.tensor_split(4) for x in rollouts), strict=True):
                add(step, part)
            step.finish()
        gradients.append(gradients_of(model))
    assert_same_gradients(*gradients)


def test_the_division_of_accelerate_itself_is_undone():
    accelerate = pytest.importorskip("accelerate", reason="needs rollcorr[transformers], which installs accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    batch, config = Batch(), RolloutCorrectionConfig(**BAND)
    _, gradients = batch.split(config, REGULARIZED, 4, accumulation=accelerator)
    assert_same_gradients(gradients, batch.whole(config, REGULARIZED)[1])


def test_an_accumulation_that_is_no_accelerator_is_refused():
    with pytest.raises(TypeError, match=r"must be the accelerate\.Accelerator of the loop; got 4\. Micro-batches are"):
        TrainingStep(TinyPolicy(), "bypass_ppo_clip", accumulation=4)
    for owner in ("DEEPSPEED", "MEGATRON_LM"):
        with pytest.raises(ValueError, match=rf"{owner} owns its backward passes .* use the functional form"):
            TrainingStep(TinyPolicy(), "bypass_ppo_clip", accumulation=Dividing(owner))


def test_a_deepspeed_engine_is_refused_with_the_fix():
    class DeepSpeedEngine(torch.nn.Module):
        """Stands for deepspeed.DeepSpeedEngine, which is not installed."""

    class PipelineEngine(DeepSpeedEngine):
        """DeepSpeed derives subclasses from it."""

    for engine in (DeepSpeedEngine(), torch.nn.Sequential(PipelineEngine())):
        with pytest.raises(ValueError, match=r"a DeepSpeedEngine owns .* functional form, policy_loss\(…, correction="):
            TrainingStep(engine, "bypass_ppo_clip")


def test_a_group_is_a_group_or_local():
    batch, config = Batch(), RolloutCorrectionConfig(**BAND)
    with pytest.raises(TypeError, match=r"group must be a process group, None or .* got 'world'"):
        correct(batch.old, batch.rollout, batch.mask, config, group="world")
    local = correct(batch.old, batch.rollout, batch.mask, config, group="local")
    assert local.ranks == (1, 1)
    assert local.mini_batch(slice(0, 3)).denominators().tokens == local.loss_mask[:3].sum()


def loss_of_the_tutorial():
    """The function on the page itself."""
    page = Path("docs/tutorials/own_loop.md").read_text(encoding="utf-8")
    names = {}
    exec(page[page.index("def own_loss") :].partition("```")[0], names)
    return names["own_loss"]


def test_the_tutorials_loss_divides_by_weights_below_one():
    """Σ w = 0.597 over three tokens of advantage 1: the gradient of each is −w / Σ w, and together they are −1."""
    weights = torch.tensor([[0.15, 0.2], [0.247, 1.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    old = torch.full((2, 2), -3.0)
    part = correct(old, old - weights.log(), mask, "decoupled_token_is", normalizer="weights")[torch.arange(2)]
    assert part.loss_weights.sum().item() == pytest.approx(0.597, rel=1e-5)
    log_prob = old.clone().requires_grad_()
    loss_of_the_tutorial()(log_prob, torch.ones(2, 2), part).backward()
    torch.testing.assert_close(log_prob.grad, (-weights / 0.597).masked_fill(mask == 0, 0.0), rtol=1e-5, atol=0.0)


def test_the_tutorials_loss_is_zero_where_nothing_is_kept():
    old, mask = torch.full((2, 2), -1.0), torch.zeros(2, 2)
    log_prob = old.clone().requires_grad_()
    loss = loss_of_the_tutorial()(log_prob, torch.ones(2, 2), correct(old, old, mask, "decoupled_token_is"))
    loss.backward()
    assert loss.item() == 0
    assert not log_prob.grad.any()
