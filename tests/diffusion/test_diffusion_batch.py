"""Bypass and decoupled correction of a batch: keys, shapes, units, metrics, and errors for invalid input."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from denoising import SCHEDULE, D, Denoiser, make_batch, perturbed, with_old

from rollcorr import correct
from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.core.diffusion import gaussian_kl
from rollcorr.correction.denominators import count_denominators
from rollcorr.diffusion import (
    DiffusionActorConfig,
    apply_bypass_mode_to_diffusion_batch,
    apply_rollout_correction_to_diffusion_batch,
    check_diffusion_batch,
    check_schedule,
)
from rollcorr.diffusion.step_correction import correct_steps, step_kl
from rollcorr.integrations.verl import compute_rollout_correction_and_rejection_mask

NAN, INF = math.nan, math.inf
BAND = {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}


def actor(reduction="sum", **correction) -> DiffusionActorConfig:
    return DiffusionActorConfig(reduction=reduction, rollout_correction=RolloutCorrectionConfig(**correction))


def sampled(scale: float = 0.05, rows: int = 64, window: int = 2, seed: int = 0):
    """A decoupled batch: rollout perturbed, trainer not."""
    model = Denoiser()
    return with_old(make_batch(perturbed(model, scale), rows, window, seed), model)


def applied(batch, config, **options):
    return apply_rollout_correction_to_diffusion_batch(dict(batch), config, **options)


def test_bypass_takes_the_rollout_for_the_old_policy():
    batch = make_batch(Denoiser())
    same = apply_bypass_mode_to_diffusion_batch(batch, schedule=SCHEDULE)
    assert same is batch
    assert batch["old_log_probs"] is batch["rollout_log_probs"]
    assert batch["old_prev_sample_mean"] is batch["prev_sample_mean"]


def test_the_same_model_is_left_alone():
    """Log-ratio 0 up to the order of additions, which depends on the processor; weight 1, no rejection."""
    batch = with_old(make_batch(Denoiser()), Denoiser())
    result, metrics = applied(batch, actor(**BAND))
    torch.testing.assert_close(batch["old_log_probs"], batch["rollout_log_probs"], rtol=0, atol=1e-9)
    torch.testing.assert_close(result["rollout_is_weights"], torch.ones_like(result["rollout_is_weights"]))
    assert result["rollout_keep_mask"].all()
    for name in ("kl", "k3_kl", "kl_joint", "k3_kl_joint", "exact_kl_max", "rejected_ratio", "log_ppl_abs_diff"):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(0.0, abs=1e-9), name


def test_weights_and_mask_are_those_of_correct_on_the_joint_log_probs():
    batch = sampled()
    result, metrics = applied(batch, actor("sum", **BAND))
    train, rollout = (D * batch[key] for key in ("old_log_probs", "rollout_log_probs"))
    expected = correct(train, rollout, torch.ones_like(train), RolloutCorrectionConfig(**BAND))
    assert torch.equal(result["rollout_keep_mask"], expected.loss_mask)
    torch.testing.assert_close(result["rollout_is_weights"], expected.weights.masked_fill(~expected.loss_mask, 0))
    for name in ("rollout_corr/kl", "rollout_corr/rollout_is_mean", "rollout_corr/rollout_rs_seq_masked_fraction"):
        assert metrics[name] == pytest.approx(expected.metrics()[name])
    assert 0 < metrics["rollout_corr/rejected_ratio"] < 1
    assert metrics["rollout_corr/rejected_ratio"] == metrics["rollout_corr/rollout_rs_masked_fraction"]


def test_a_power_lies_between_the_mean_and_the_sum():
    batch = sampled()
    level = {"rollout_is": "sequence", "rollout_is_threshold": None}
    logs = [applied(batch, actor(power, **level))[0]["rollout_is_weights"].log() for power in ("mean", 0.5, "sum")]
    torch.testing.assert_close(logs[2], D * logs[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logs[2], 2 * logs[1], rtol=1e-4, atol=1e-5)


def test_metrics_come_in_both_units_whatever_the_power():
    batch = sampled()
    j = D * (batch["old_log_probs"] - batch["rollout_log_probs"])
    exact = gaussian_kl(
        batch["prev_sample_mean"].flatten(0, 1), batch["old_prev_sample_mean"].flatten(0, 1), batch["std"].flatten()
    )
    for power, own in (("mean", -j.mean() / D), ("sum", -j.mean())):
        _, metrics = applied(batch, actor(power, rollout_is="sequence"))
        assert metrics["rollout_corr/kl"] == pytest.approx(own.item())
        assert metrics["rollout_corr/kl_joint"] == pytest.approx(-j.mean().item())
        assert metrics["rollout_corr/kl_per_dimension"] == pytest.approx(-j.mean().item() / D)
        assert metrics["rollout_corr/k3_kl_joint"] == pytest.approx((j.exp() - 1 - j).mean().item())
        assert metrics["rollout_corr/exact_kl_mean"] == pytest.approx(exact.mean().item())
        assert metrics["rollout_corr/exact_kl_max"] == pytest.approx(exact.max().item())


def test_mean_pooling_divides_kl_by_d_and_k3_by_its_square():
    batch = sampled(scale=0.003, rows=2000)
    _, mean = applied(batch, actor("mean", rollout_is="token"))
    assert mean["rollout_corr/kl_joint"] == pytest.approx(D * mean["rollout_corr/kl"])
    assert mean["rollout_corr/k3_kl"] * D**2 == pytest.approx(mean["rollout_corr/k3_kl_joint"], rel=0.1)


def test_the_joint_estimates_agree_with_the_exact_kl():
    """E_μ[−J] = E_μ[k3(J)] = KL(μ‖π), over 40,000 steps."""
    _, metrics = applied(sampled(scale=0.02, rows=20_000), actor("sum", rollout_is="token"))
    exact = metrics["rollout_corr/exact_kl_mean"]
    assert 0.001 < exact < 0.5
    assert metrics["rollout_corr/kl_joint"] == pytest.approx(exact, abs=5 * math.sqrt(2 * exact / 40_000))
    assert metrics["rollout_corr/k3_kl_joint"] == pytest.approx(exact, rel=0.1)


def test_densities_have_no_perplexity_that_overflows():
    batch = sampled()
    for key in ("old_log_probs", "rollout_log_probs"):
        batch[key] = batch[key] - 100  # e^1800 as a joint perplexity
    _, metrics = applied(batch, actor("sum", **BAND))
    assert all(map(math.isfinite, metrics.values()))
    assert not {"rollout_corr/training_ppl", "rollout_corr/prob_diff_abs_mean"} & metrics.keys()


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 100.0])
@pytest.mark.parametrize("key", ["old_log_probs", "rollout_log_probs"])
def test_a_spoiled_row_is_rejected_and_the_others_are_as_without_it(key, garbage):
    batch = sampled(rows=8)
    clean, _ = applied(batch, actor(**BAND))
    spoiled = {k: torch.cat([v, v[:1]]) for k, v in batch.items()}
    spoiled[key][-1] = garbage
    result, metrics = applied(spoiled, actor(**BAND))
    assert not result["rollout_keep_mask"][-1].any()
    assert (result["rollout_is_weights"][-1] == 0).all()
    for name in ("rollout_keep_mask", "rollout_is_weights"):
        assert torch.equal(result[name][:-1], clean[name])
    assert not any(map(math.isnan, metrics.values()))


def test_a_band_bounds_train_over_rollout():
    """ "0.5_3.0" keeps a ratio of 2.9 and not its inverse: 1/2.9 < 0.5."""
    batch = sampled(rows=2, window=1)
    for key in ("old_prev_sample_mean", "prev_sample_mean", "std"):
        del batch[key]
    batch["old_log_probs"] = batch["rollout_log_probs"] + torch.tensor([[math.log(2.9)], [-math.log(2.9)]])
    config = actor("mean", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_3.0")
    assert applied(batch, config)[0]["rollout_keep_mask"].tolist() == [[True], [False]]


def test_the_combined_tensor_is_0_where_rejected_and_tells_an_icepop_zero_from_it():
    batch = sampled(rows=3, window=1)
    batch["old_log_probs"] = batch["rollout_log_probs"] + torch.tensor([[0.0], [2.0], [5.0]], dtype=torch.float64)
    config = actor(
        "mean", rollout_is="token", rollout_is_threshold="0.5_2.0", rollout_rs="token_k2", rollout_rs_threshold=5.0
    )
    result, _ = applied(batch, config)
    assert result["rollout_is_weights"].tolist() == [[1.0], [0.0], [0.0]]
    assert result["rollout_keep_mask"].tolist() == [[True], [True], [False]]


def test_without_weights_a_kept_step_counts_1():
    batch = sampled()
    for fields in ({}, {"rollout_is": "sequence", "apply_is": False}):
        config = actor("sum", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0", **fields)
        result, _ = applied(batch, config)
        assert torch.equal(result["rollout_is_weights"], result["rollout_keep_mask"].float())


def test_the_exact_kl_rejects_by_its_bound_and_counts_beside_the_others():
    batch = sampled()
    exact = ((batch["prev_sample_mean"] - batch["old_prev_sample_mean"]).flatten(2) / batch["std"][..., None]).square()
    exact = exact.sum(-1) / 2
    bound = exact.median().item()
    for power in ("mean", "sum"):
        config = actor(power, rollout_is="token", rollout_rs="step_kl", rollout_rs_threshold=bound)
        result, metrics = applied(batch, config)
        assert torch.equal(result["rollout_keep_mask"], exact <= bound * (1 + 1e-6))
        assert metrics["rollout_corr/rollout_rs_step_kl_max"] == pytest.approx(exact.max().item())
        assert metrics["rollout_corr/rejected_ratio"] == pytest.approx((exact > bound).double().mean().item())
        touched = (exact > bound).any(1).double().mean().item()
        assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(touched)
    both = actor("sum", rollout_is="token", rollout_rs="seq_mean_k1,step_kl", rollout_rs_threshold=f"0.5_2.0,{bound}")
    alone = actor("sum", rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.0")
    together, metrics = applied(batch, both)
    by_ratio = applied(batch, alone)[0]["rollout_keep_mask"]
    assert torch.equal(together["rollout_keep_mask"], by_ratio & (exact <= bound * (1 + 1e-6)))
    only = (by_ratio & (exact > bound * (1 + 1e-6))).double().mean().item()
    assert metrics["rollout_corr/rollout_rs_step_kl_alone_fraction"] == pytest.approx(only)
    assert "rollout_corr/rollout_rs_seq_mean_k1_alone_fraction" not in metrics


@pytest.mark.parametrize("normalize", [False, True])
def test_counts_with_exact_kl_cover_kept_steps(normalize):
    """The exact KL rejects some steps, the ratio some samples; only steps kept by both count."""
    batch = sampled()
    fields = {"rollout_is": "token", "rollout_is_batch_normalize": normalize}
    config = actor("sum", **fields, rollout_rs="seq_mean_k1,step_kl", rollout_rs_threshold="0.3_3.0,0.2")
    exact = step_kl(batch["prev_sample_mean"], batch["old_prev_sample_mean"], batch["std"])
    correction = correct_steps(batch["old_log_probs"], batch["rollout_log_probs"], config, exact_kl=exact, dimensions=D)
    kept = correction.loss_mask
    assert {0, 1, 2} == set(kept.sum(1).tolist())

    for normalizer, weights in (("kept", None), ("weights", correction.weights)):
        expected, counts = count_denominators(kept, weights=weights), correction.denominators(normalizer)
        assert counts.tokens.item() == pytest.approx(expected.tokens.item(), rel=1e-6), normalizer
        assert counts.sequences.item() == pytest.approx(expected.sequences.item(), rel=1e-6), normalizer
    touched = (~kept).any(1).double().mean().item()
    assert correction.metrics(prefix="")["rollout_rs_seq_masked_fraction"] == pytest.approx(touched)


def test_the_exact_kl_and_the_joint_criteria_belong_to_denoising_steps():
    config = RolloutCorrectionConfig(rollout_rs="step_kl", rollout_rs_threshold=0.1)
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"'step_kl' is for denoising steps.*use rollcorr.diffusion"):
        correct(x, x, x, config)
    with pytest.raises(ValueError, match="'step_kl' is for denoising steps"):
        compute_rollout_correction_and_rejection_mask(
            x, x, torch.ones_like(x), rollout_rs="step_kl", rollout_rs_threshold=0.1, verl_parity=True
        )
    batch = sampled()
    del batch["prev_sample_mean"]
    with pytest.raises(ValueError, match="'step_kl' needs the mean of each step"):
        applied(batch, DiffusionActorConfig(rollout_correction=config))
    with pytest.raises(ValueError, match="rollout_rs_threshold for step_kl is one upper bound in nats; got the band"):
        RolloutCorrectionConfig(rollout_rs="step_kl", rollout_rs_threshold="0.5_2.0")
    with pytest.raises(ValueError, match="batch_normalize_over='kept' and step_kl"):
        actor(
            rollout_is="token",
            rollout_is_batch_normalize=True,
            batch_normalize_over="kept",
            rollout_rs="step_kl",
            rollout_rs_threshold=0.1,
        )


def test_the_mismatch_is_broken_down_by_timestep_value():
    batch = sampled(rows=200)
    _, metrics = applied(batch, actor("mean", rollout_is="token"), schedule=SCHEDULE)
    difference = (batch["old_log_probs"] - batch["rollout_log_probs"]).abs()
    for value in SCHEDULE:
        at = batch["timesteps"] == value
        assert metrics[f"rollout_corr/log_prob_abs_diff/t_{value:g}"] == pytest.approx(difference[at].mean().item())
    _, own = applied(batch, actor("mean", rollout_is="token"))
    assert own == metrics


def test_a_mean_pooled_band_is_out_of_reach_and_says_so_once():
    batch = sampled(scale=0.002)
    config = actor("mean", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.001")
    with pytest.warns(InertOptionWarning, match=r"'seq_mean_k1' rejects nothing: its bounds lie \d+ .*reduction='sum'"):
        applied(batch, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        applied(batch, config)
        applied(sampled(scale=0.05), actor("sum", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.5_2.001"))
    kl = actor("sum", rollout_rs="step_kl", rollout_rs_threshold=1e6)
    with pytest.warns(InertOptionWarning, match=r"'step_kl' rejects nothing.*Set a threshold nearer"):
        applied(batch, kl)


def test_batch_normalized_weights_average_1_also_beside_the_exact_kl():
    batch = sampled()
    fields = {"rollout_is": "token", "rollout_is_batch_normalize": True, "nonfinite": "neutral"}
    plain, _ = applied(batch, actor("sum", **fields))
    assert plain["rollout_is_weights"].mean().item() == pytest.approx(1.0, abs=1e-6)
    config = actor("sum", **fields, rollout_rs="step_kl", rollout_rs_threshold=0.05)
    kept, _ = applied(batch, config)
    mask = kept["rollout_keep_mask"]
    assert 0 < mask.sum() < mask.numel()
    torch.testing.assert_close(kept["rollout_is_weights"], plain["rollout_is_weights"].masked_fill(~mask, 0))


def test_a_correction_alone_will_do_for_a_configuration():
    batch = sampled()
    first, _ = applied(batch, {"rollout_is": "sequence"})
    second, _ = applied(batch, DiffusionActorConfig(rollout_correction="decoupled_seq_is"))
    assert torch.equal(first["rollout_is_weights"], second["rollout_is_weights"])
    none, metrics = applied(batch, DiffusionActorConfig())
    assert metrics == {}
    assert none["rollout_keep_mask"].all()


def test_what_is_missing_or_does_not_fit_is_named_with_the_fix():
    batch = sampled(rows=4)
    config = actor(**BAND)
    with pytest.raises(KeyError, match=r"no 'old_log_probs'.*recompute them with the trainer, or set bypass_mode"):
        applied({k: v for k, v in batch.items() if k != "old_log_probs"}, config)
    with pytest.raises(KeyError, match=r"no 'rollout_log_probs'.*calculate_log_probs: true"):
        apply_bypass_mode_to_diffusion_batch({})
    with pytest.raises(ValueError, match=r"rollout_log_probs must be \(B, W\).*got \(4,\)\. One step is \(B, 1\)"):
        applied(batch | {"rollout_log_probs": batch["rollout_log_probs"][:, 0]}, config)
    with pytest.raises(ValueError, match=r"old_log_probs must be \(B, W\) = \(4, 2\).*got \(4, 1\)"):
        applied(batch | {"old_log_probs": batch["old_log_probs"][:, :1]}, config)
    with pytest.raises(ValueError, match=r"advantages must be \(B,\) = \(4,\).*got \(4, 2\)"):
        applied(batch | {"advantages": torch.zeros(4, 2)}, config)
    with pytest.raises(ValueError, match=r"latents must be \(B, W \+ 1, …\) = \(4, 3, …\)"):
        applied(batch | {"latents": batch["latents"][:, 1:]}, config)
    with pytest.raises(ValueError, match=r"prev_sample_mean must be \(B, W, …\) = \(4, 2, …\)"):
        applied(batch | {"prev_sample_mean": batch["prev_sample_mean"][:, :1]}, config)
    with pytest.raises(ValueError, match="means of one batch must have one shape"):
        applied(batch | {"old_prev_sample_mean": batch["prev_sample_mean"][..., :1]}, config)
    with pytest.raises(ValueError, match="are one tensor"):
        applied(batch | {"old_log_probs": batch["rollout_log_probs"]}, config)
    with pytest.raises(ValueError, match="call apply_bypass_mode_to_diffusion_batch"):
        applied(batch, {"bypass_mode": True})
    bare = {k: batch[k] for k in ("old_log_probs", "rollout_log_probs")}
    with pytest.raises(ValueError, match=r"reduction='sum' needs D.*put latents or prev_sample_mean in the batch"):
        applied(bare, config)


@pytest.mark.parametrize("value", [NAN, INF])
def test_latents_that_are_not_finite_are_refused_by_sample_and_step(value):
    batch = sampled(rows=4)
    batch["latents"][2, 1, 0, 0, 0] = value
    with pytest.raises(ValueError, match=r"latents has NaN or inf in 1 of 4 samples, first in 2 at step 1.*Drop these"):
        check_diffusion_batch(batch)


def test_latents_and_means_in_half_precision_are_refused():
    batch = sampled(rows=4)
    with pytest.raises(ValueError, match=r"latents is torch.bfloat16; store it in float32"):
        check_diffusion_batch(batch | {"latents": batch["latents"].bfloat16()})


def test_log_probs_that_look_like_sums_are_refused():
    batch = sampled(rows=32)
    with pytest.raises(ValueError, match=r"D is 18: they look like sums.*Store means"):
        check_diffusion_batch(batch | {"rollout_log_probs": D * batch["rollout_log_probs"]})
    check_diffusion_batch(batch)


def test_a_schedule_that_is_off_by_one_is_found():
    """The trainer's starts one entry later, as when one side drops the first sigma."""
    with pytest.raises(ValueError, match=r"first at entry 0: 1000 and 900 \(entry i of the trainer .*off by one"):
        check_schedule(SCHEDULE[:-1], SCHEDULE[1:])
    with pytest.raises(ValueError, match=r"first at entry 0: 900 and 1000 \(entry i of the rollout .*off by one"):
        check_schedule(SCHEDULE[1:], SCHEDULE[:-1])
    with pytest.raises(ValueError, match=r"differ first at entry 1: 900 and 950; give both the same number of steps"):
        check_schedule(SCHEDULE, (1000.0, 950.0, *SCHEDULE[2:]))
    with pytest.raises(ValueError, match="the rollout's schedule has 5 entries and the trainer's 4"):
        check_schedule(SCHEDULE, SCHEDULE[:-1])
    check_schedule(SCHEDULE, SCHEDULE)


def test_timesteps_outside_the_trainers_schedule_are_refused():
    batch = sampled(rows=4)
    check_diffusion_batch(batch, schedule=SCHEDULE)
    batch["timesteps"][1] = torch.tensor([880.0, 740.0])
    with pytest.raises(
        ValueError, match=r"timestep 880 of sample 1, step 0, is not in the trainer's schedule \(nearest 900"
    ):
        check_diffusion_batch(batch, schedule=SCHEDULE)
    with pytest.raises(ValueError, match="timestep 880"):
        apply_bypass_mode_to_diffusion_batch(batch, schedule=SCHEDULE)


def test_a_window_with_a_hole_is_refused():
    batch = sampled(rows=4)
    batch["timesteps"][3] = torch.tensor([900.0, 500.0])
    with pytest.raises(ValueError, match="window of sample 3 goes from schedule entry 1 to 3"):
        check_diffusion_batch(batch, schedule=SCHEDULE)
