"""The loss of denoising steps in each mode, and an optimizer step over micro-batches and steps."""

from __future__ import annotations

import math

import pytest
import torch
from denoising import SCHEDULE, D, Denoiser, evaluate, make_batch, perturbed, rows_of, step_of, with_old
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.correction.training_step import TrainingStep
from rollcorr.diffusion import (
    DiffusionActorConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    diffusion_loss,
    loss_step_metrics,
)

NAN, INF = math.nan, math.inf
BAND = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
MODES = {
    "decoupled": {"rollout_is": "sequence", **BAND},
    "bypass": {"bypass_mode": True, **BAND},
    "reinforce": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", **BAND},
    "bypass, exact KL": {"bypass_mode": True, "rollout_rs": "step_kl", "rollout_rs_threshold": 0.3},
}
every_denominator = pytest.mark.parametrize("denominator", ["all", "kept", "weights"])
every_mode = pytest.mark.parametrize("mode", MODES)


# The tables cross every option with every mode.
pytestmark = pytest.mark.filterwarnings("ignore::rollcorr.config.InertOptionWarning")


def actor(mode="bypass", **fields) -> DiffusionActorConfig:
    fields = {"reduction": "sum", "clip_ratio": 0.01, **fields}
    return DiffusionActorConfig(rollout_correction=RolloutCorrectionConfig(**MODES.get(mode, {})), **fields)


def prepared(config, rows=6, window=2, scale=0.05, seed=0):
    """A batch whose rollout, old and current policy all differ, ready for the loss."""
    model = Denoiser()
    batch = make_batch(perturbed(model, scale), rows, window, seed)
    batch["ref_prev_sample_mean"] = evaluate(perturbed(model, 0.1, seed=9), batch)["prev_sample_mean"].detach()
    if config.bypass_mode:
        return apply_bypass_mode_to_diffusion_batch(batch, schedule=SCHEDULE)
    batch = with_old(batch, perturbed(model, 0.01, seed=3))
    return apply_rollout_correction_to_diffusion_batch(batch, config, schedule=SCHEDULE)[0]


def gradient(model):
    return [p.grad.clone() for p in model.parameters()]


def whole_step(config, batch):
    """Loss and gradients of one call for everything."""
    model = Denoiser()
    output = diffusion_loss(config, evaluate(model, batch), batch, whole_step=True)
    output.loss.backward()
    return output, gradient(model)


def split_step(config, batch, parts, *, by_step=False):
    """The same through micro-batches, and one step of the window at a time."""
    model = Denoiser()
    with TrainingStep(model, config) as step:
        for rows in torch.arange(len(batch["steps"])).tensor_split(parts):
            part = rows_of(batch, rows)
            pieces = [step_of(part, j) for j in range(part["steps"].shape[1])] if by_step else [part]
            for piece in pieces:
                step.backward(step.diffusion_loss(evaluate(model, piece), piece))
        outcome = step.finish()
    return outcome, gradient(model)


def assert_same(actual, expected):
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.covering(2)
@every_mode
@every_denominator
@pytest.mark.parametrize("loss_mode", ["flow_grpo", "grpo_guard", "flow_dppo"])
@settings(deadline=None, max_examples=3)
@given(seed=st.integers(0, 2**16), parts=st.integers(1, 6), by_step=st.booleans())
def test_micro_batches_and_single_steps_give_the_gradient_of_the_whole(
    mode, denominator, loss_mode, seed, parts, by_step
):
    config = actor(mode, rs_denominator=denominator, loss_mode=loss_mode, kl_coef=0.1)
    batch = prepared(config, seed=seed)
    output, expected = whole_step(config, batch)
    outcome, actual = split_step(config, batch, parts, by_step=by_step)
    if outcome.skipped:
        return  # empty batches have a test of their own
    assert_same(actual, expected)
    assert outcome.kept == output.loss_mask.sum()
    assert outcome.total == 12
    assert outcome.loss.item() == pytest.approx(output.loss.item(), rel=1e-9, abs=1e-12)


@every_denominator
def test_denominators_by_hand(denominator):
    """REINFORCE of one kept step of weight w in two: −w A log π over 2 steps, 1 kept one, or its weight."""
    config = actor("reinforce", rs_denominator=denominator, reduction="mean")
    data = {
        "rollout_log_probs": torch.tensor([[-1.0], [-9.0]], dtype=torch.float64),
        "advantages": torch.tensor([3.0, 1.0], dtype=torch.float64),
    }
    log_prob = torch.tensor([[-1.0 + math.log(1.5)], [-1.0]], dtype=torch.float64, requires_grad=True)
    output = diffusion_loss(config, {"log_probs": log_prob}, data, whole_step=True)
    output.loss.backward()
    assert output.loss_mask.tolist() == [[True], [False]]
    divisor = {"all": 2.0, "kept": 1.0, "weights": 1.5}[denominator]
    assert log_prob.grad.tolist() == [[pytest.approx(-1.5 * 3 / divisor)], [0.0]]


def test_dividing_each_micro_batch_by_its_own_count_is_something_else():
    """Dividing by the counts of each micro-batch has a different gradient, which the rescaling avoids."""
    config = actor("bypass", rs_denominator="kept")
    batch = prepared(config, rows=8, scale=0.1, seed=4)
    output, expected = whole_step(config, batch)
    model = Denoiser()
    for rows in torch.arange(8).tensor_split(4):
        part = rows_of(batch, rows)
        (diffusion_loss(config, evaluate(model, part), part, whole_step=True).loss / 4).backward()
    assert 0 < output.loss_mask.sum() < 16
    sizes = [g.norm() for g in (torch.cat([x.flatten() for x in gs]) for gs in (expected, gradient(model)))]
    off = torch.cat([(a - b).flatten() for a, b in zip(gradient(model), expected, strict=True)]).norm() / sizes[0]
    assert off > 0.05


@pytest.mark.parametrize("rollout_is", [None, "token", "sequence", "geometric"])
def test_in_bypass_ppo_loss_and_gradient_do_not_depend_on_the_weights(rollout_is):
    plain = actor("bypass")
    batch = prepared(plain)
    other = DiffusionActorConfig(
        reduction="sum",
        clip_ratio=0.01,
        rollout_correction=RolloutCorrectionConfig(bypass_mode=True, rollout_is=rollout_is, **BAND),
    )
    expected, actual = whole_step(plain, batch), whole_step(other, batch)
    assert torch.equal(actual[0].loss, expected[0].loss)
    for left, right in zip(actual[1], expected[1], strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("scope", ["token", "seq_sum", "seq_mean"])
def test_all_scopes_agree_step_by_step(scope):
    config = DiffusionActorConfig(
        reduction="sum",
        rollout_correction=RolloutCorrectionConfig(
            bypass_mode=True, rollout_rs=f"{scope}_k1", rollout_rs_threshold="0.5_2.0"
        ),
    )
    batch = prepared(config, rows=32)
    expected, _ = whole_step(actor("bypass"), batch)
    output, _ = whole_step(config, batch)
    assert torch.equal(output.loss_mask, expected.loss_mask)
    assert 0 < output.loss_mask.sum() < output.loss_mask.numel()


def test_bypass_rejects_on_the_current_policy_again_in_every_call():
    config = actor("bypass")
    batch = prepared(config, rows=64)
    policies = Denoiser(), perturbed(Denoiser(), 0.2)
    near, far = (diffusion_loss(config, evaluate(m, batch), batch, whole_step=True) for m in policies)
    j = D * (evaluate(Denoiser(), batch)["log_probs"] - batch["rollout_log_probs"])
    assert torch.equal(near.loss_mask, (j.abs() <= math.log(2)))
    assert far.loss_mask.sum() < near.loss_mask.sum()
    assert not near.correction.statistics.pack().requires_grad


def test_fetched_weights_multiply_the_loss_and_carry_no_gradient():
    config = actor("decoupled", rs_denominator="all")
    batch = prepared(config)
    batch["rollout_is_weights"] = batch["rollout_is_weights"].double().requires_grad_()
    output, _ = whole_step(config, batch)
    assert batch["rollout_is_weights"].grad is None
    doubled = {**batch, "rollout_is_weights": 2 * batch["rollout_is_weights"].detach()}
    assert whole_step(config, doubled)[0].policy_gradient.item() == pytest.approx(2 * output.policy_gradient.item())


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 100.0])
@pytest.mark.parametrize("mode", ["decoupled", "bypass", "reinforce"])
def test_a_spoiled_row_leaves_loss_and_gradient_as_without_it(mode, garbage):
    config = actor(mode, rs_denominator="kept")
    model = Denoiser()
    batch = make_batch(perturbed(model, 0.05), rows=7)
    batch = batch if config.bypass_mode else with_old(batch, perturbed(model, 0.01, seed=3))

    def ready(rows):
        part = rows_of(batch, torch.arange(rows))
        part["rollout_log_probs"] = part["rollout_log_probs"].clone()
        part["rollout_log_probs"][6:] = garbage
        if config.bypass_mode:
            return apply_bypass_mode_to_diffusion_batch(part)
        return apply_rollout_correction_to_diffusion_batch(part, config)[0]

    expected, actual = whole_step(config, ready(6)), whole_step(config, ready(7))
    assert not actual[0].loss_mask[6].any()
    assert_same(actual[1], expected[1])
    torch.testing.assert_close(actual[0].loss, expected[0].loss)


@every_mode
def test_nothing_kept_is_a_loss_of_0_and_a_step_to_skip(mode):
    fields = dict(MODES[mode])
    fields["rollout_rs_threshold"] = 1e-12 if "kl" in fields["rollout_rs"] else "1000_2000"
    config = DiffusionActorConfig(
        reduction="sum", rs_denominator="kept", rollout_correction=RolloutCorrectionConfig(**fields)
    )
    batch = prepared(config)
    output, gradients = whole_step(config, batch)
    assert output.loss.item() == 0.0
    assert all((g == 0).all() for g in gradients)
    model = Denoiser()
    with TrainingStep(model, config) as step:
        step.backward(step.diffusion_loss(evaluate(model, batch), batch))
        outcome = step.finish()
    assert outcome.skipped
    assert (outcome.kept, outcome.kept_fraction) == (0.0, 0.0)
    assert all(p.grad is None for p in model.parameters())


def test_too_little_kept_skips_the_step_at_the_configured_fraction():
    batch = prepared(actor("bypass"), rows=32, scale=0.1)
    fraction = whole_step(actor("bypass"), batch)[0].loss_mask.double().mean().item()
    assert 0 < fraction < 1
    for least, skipped in ((fraction - 0.01, False), (fraction, False), (fraction + 0.01, True)):
        config = actor("bypass", min_keep_fraction=least)
        model = Denoiser()
        with TrainingStep(model, config) as step:
            step.backward(step.diffusion_loss(evaluate(model, batch), batch))
            outcome = step.finish()
        assert bool(outcome.skipped) is skipped
        assert outcome.kept_fraction == pytest.approx(fraction)


def test_the_reference_kl_covers_rejected_steps_and_is_never_rescaled():
    """By hand: kl_coef · mean over all steps of mean_D (m − m_ref)² / 2s²."""
    config = actor("bypass", kl_coef=0.3)
    batch = prepared(config, scale=0.1)
    output, _ = whole_step(config, batch)
    mean = evaluate(Denoiser(), batch)["prev_sample_mean"]
    kl = (mean - batch["ref_prev_sample_mean"]).square().flatten(2).mean(-1) / (2 * batch["std"].square())
    assert not output.loss_mask.all()
    assert output.regularization.item() == pytest.approx(0.3 * kl.mean().item())
    with pytest.raises(KeyError, match=r"no 'ref_prev_sample_mean'.*or set kl_coef=0"):
        whole_step(config, {k: v for k, v in batch.items() if k != "ref_prev_sample_mean"})
    broken = {**batch, "ref_prev_sample_mean": batch["ref_prev_sample_mean"].clone()}
    broken["ref_prev_sample_mean"][0] = NAN
    output, gradients = whole_step(config, broken)
    assert output.loss.isfinite()
    assert all(g.isfinite().all() for g in gradients)


def test_advantages_are_clipped():
    batch = prepared(actor("bypass"))
    batch["advantages"] = torch.full_like(batch["advantages"], 50.0)
    clipped = {**batch, "advantages": torch.full_like(batch["advantages"], 5.0)}
    assert torch.equal(whole_step(actor("bypass"), batch)[0].loss, whole_step(actor("bypass"), clipped)[0].loss)


def test_without_a_correction_the_loss_is_plain_flow_grpo():
    config = DiffusionActorConfig(clip_ratio=0.01)
    model = Denoiser()
    batch = with_old(make_batch(model), perturbed(model, 0.01))
    output, _ = whole_step(config, batch)
    r = (evaluate(model, batch)["log_probs"] - batch["old_log_probs"]).exp()
    a = batch["advantages"][:, None]
    expected = torch.maximum(-r * a, -r.clamp(0.99, 1.01) * a).mean()
    assert output.loss.item() == pytest.approx(expected.item())
    assert output.correction is None


def test_metrics_of_a_step_merge_over_micro_batches_under_the_bypass_prefix():
    config = actor("bypass", rs_denominator="kept")
    batch = prepared(config, rows=32)

    def metrics(parts):
        model, outputs = Denoiser(), []
        for rows in torch.arange(32).tensor_split(parts):
            part = rows_of(batch, rows)
            outputs.append(diffusion_loss(config, evaluate(model, part), part, total_steps=64, schedule=SCHEDULE))
        return loss_step_metrics(outputs, config)

    whole = metrics(1)
    assert metrics(5) == pytest.approx(whole, rel=1e-9, abs=1e-12)
    assert {
        "actor/rollout_corr/kl",
        "actor/rollout_corr/kl_joint",
        "actor/rollout_corr/exact_kl_mean",
        "actor/rollout_corr/rejected_ratio",
        "actor/rollout_corr/zeroed_fraction_negative",
        "actor/rollout_corr/log_prob_abs_diff/t_900",
        "actor/policy_kl",
        "actor/clip_fraction_high",
        "actor/kl_ref",
    } <= whole.keys()
    assert whole["actor/rollout_corr/token_count"] == whole["actor/rollout_corr/sequence_count"] == 64
    decoupled = actor("decoupled")
    output, _ = whole_step(decoupled, prepared(decoupled))
    assert not [name for name in loss_step_metrics([output], decoupled) if "rollout_corr" in name]


def test_what_a_mode_needs_and_does_not_find_is_named():
    batch = prepared(actor("decoupled"))
    output = evaluate(Denoiser(), batch)

    def without(data, *keys):
        return {k: v for k, v in data.items() if k not in keys}

    with pytest.raises(
        KeyError, match=r"no 'rollout_keep_mask'.*call apply_rollout_correction_to_diffusion_batch once"
    ):
        diffusion_loss(actor("decoupled"), output, without(batch, "rollout_keep_mask"))
    with pytest.raises(KeyError, match=r"no 'old_log_probs'"):
        diffusion_loss(actor("decoupled"), output, without(batch, "old_log_probs"))
    with pytest.raises(KeyError, match=r"no 'rollout_log_probs', which bypass mode compares"):
        diffusion_loss(actor("bypass"), output, without(batch, "rollout_log_probs"), whole_step=True)
    with pytest.raises(KeyError, match=r"no 'advantages'"):
        diffusion_loss(actor("reinforce"), output, without(batch, "advantages"), whole_step=True)
    with pytest.raises(KeyError, match=r"no 'dt', which grpo_guard divides by"):
        diffusion_loss(actor("bypass", loss_mode="grpo_guard"), output, without(batch, "dt"), whole_step=True)
    with pytest.raises(KeyError, match=r"no 'prev_sample_mean', which flow_dppo compares"):
        diffusion_loss(actor("decoupled", loss_mode="flow_dppo"), without(output, "prev_sample_mean"), batch)
    with pytest.raises(ValueError, match=r"log_probs must be \(B, W\).*got \(6,\)\. One step is \(B, 1\)"):
        diffusion_loss(actor("bypass"), {"log_probs": output["log_probs"][:, 0]}, batch)
    with pytest.raises(ValueError, match=r"old_log_probs must be \(B, W\) = \(6, 1\) like log_probs; got \(6, 2\)"):
        diffusion_loss(actor("decoupled"), {"log_probs": output["log_probs"][:, :1]}, batch)
    with pytest.raises(ValueError, match="the loss of denoising steps has its options in config: omit loss"):
        TrainingStep(Denoiser(), actor("bypass"), loss=LossConfig())
    with pytest.raises(TypeError, match=r"a diffusion model: call diffusion_loss"):
        TrainingStep(Denoiser(), actor("bypass")).policy_loss(None, None, None)
    with pytest.raises(TypeError, match=r"of tokens: call policy_loss, or give TrainingStep a DiffusionActorConfig"):
        TrainingStep(Denoiser(), "bypass_ppo_clip").diffusion_loss(output, batch)


def test_bypass_losses_name_the_whole_step_of_denoising():
    config = actor("bypass")
    batch = prepared(config)
    output = evaluate(Denoiser(), batch)
    for steps in ({}, {"whole_step": True, "total_steps": 12}):
        with pytest.raises(ValueError, match=r"use TrainingStep.*or give either total_steps, or whole_step=True"):
            diffusion_loss(config, output, batch, **steps)
    diffusion_loss(config, output, batch, total_steps=12)


def test_denoising_losses_must_reach_the_step():
    model, config = Denoiser(), actor("bypass")
    batch = prepared(config)
    missed = pytest.raises(RuntimeError, match="1 losses of this step were not given")
    with missed, TrainingStep(model, config) as step:
        step.diffusion_loss(evaluate(model, batch), batch).loss.backward()
        step.finish()


def test_nothing_reads_a_value_on_the_way_to_the_gradient():
    """And every tensor that is made on the way is made where the batch is."""
    flat, step, mean = (torch.ones(*shape, device="meta") for shape in ((2,), (2, 3), (2, 3, 4)))
    data = dict.fromkeys(("rollout_log_probs", "old_log_probs", "std", "dt", "timesteps", "rollout_is_weights"), step)
    data |= dict.fromkeys(("prev_sample_mean", "ref_prev_sample_mean", "old_prev_sample_mean"), mean)
    data |= {"advantages": flat, "rollout_keep_mask": step.bool()}
    output = {"log_probs": step, "prev_sample_mean": mean}
    for mode in MODES:
        for loss_mode in ("flow_grpo", "grpo_guard", "flow_dppo"):
            config = actor(mode, loss_mode=loss_mode, kl_coef=0.1)
            found = diffusion_loss(config, output, data, total_steps=6, schedule=SCHEDULE)
            assert found.loss.shape == ()
            assert found.loss.device.type == found.statistics.pack().device.type == "meta"


@every_mode
def test_an_empty_micro_batch_adds_nothing(mode):
    """The call of a rank without samples."""
    config = actor(mode, kl_coef=0.1)
    batch = prepared(config)
    model = Denoiser()
    empty = rows_of(batch, slice(0, 0))
    output = diffusion_loss(config, evaluate(model, empty), empty, total_steps=12, schedule=SCHEDULE)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert all((g == 0).all() for g in gradient(model))
    assert not any(map(math.isnan, loss_step_metrics([output], config).values()))
    if not config.bypass_mode:
        bare = {k: v for k, v in empty.items() if not k.startswith("rollout_is")}
        _, metrics = apply_rollout_correction_to_diffusion_batch(bare, config, schedule=SCHEDULE)
        assert not any(map(math.isnan, metrics.values()))
