"""The actor's configuration: accepted and rejected options, and warnings for options without effect."""

from __future__ import annotations

import pytest

from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.config.criteria import STEP_CRITERIA, without_criterion
from rollcorr.diffusion import DiffusionActorConfig


def test_a_correction_may_be_a_configuration_a_preset_or_a_dictionary():
    config = RolloutCorrectionConfig(rollout_is="sequence")
    for given in (config, "decoupled_seq_is", {"rollout_is": "sequence"}):
        assert DiffusionActorConfig(rollout_correction=given).correction == config
    assert DiffusionActorConfig().correction is None


def test_the_denominator_is_the_actors_or_else_the_corrections():
    def denominator(rs_denominator=None, **fields):
        correction = RolloutCorrectionConfig(rollout_is="token", **fields)
        return DiffusionActorConfig(rollout_correction=correction, rs_denominator=rs_denominator).denominator

    assert denominator() == "kept"
    assert denominator(normalizer="original") == "original"
    assert denominator("all", normalizer="weights") == "original"
    assert denominator("weights") == "weights"


def test_the_exact_kl_is_read_as_a_criterion_and_set_apart():
    config = DiffusionActorConfig(
        rollout_correction={"rollout_rs": "seq_mean_k1,step_kl,token_k3", "rollout_rs_threshold": "0.5_2.0,0.05,0.1"}
    )
    assert config.step_kl == 0.05
    assert [c.name for c in config.correction.criteria] == ["seq_mean_k1", "step_kl", "token_k3"]
    rest = config.log_prob_correction
    assert (rest.rollout_rs, rest.rollout_rs_threshold) == ("seq_mean_k1,token_k3", "0.5_2.0,0.1")
    alone = DiffusionActorConfig(rollout_correction={"rollout_rs": "step_kl", "rollout_rs_threshold": 0.05})
    assert alone.log_prob_correction.criteria == ()
    assert without_criterion("step_kl,token_k3", 0.1, "step_kl") == ("token_k3", 0.1)
    assert list(STEP_CRITERIA) == ["step_kl"]


@pytest.mark.parametrize("text", ["0.5_2.0", "-1", "nan", "0"])
def test_the_exact_kl_takes_one_upper_bound_above_0(text):
    with pytest.raises(ValueError, match="step_kl"):
        RolloutCorrectionConfig(rollout_rs="step_kl", rollout_rs_threshold=text)


def test_a_misspelt_criterion_is_told_the_nearest():
    with pytest.raises(ValueError, match=r"unknown criterion 'step_k1'.*step_kl"):
        RolloutCorrectionConfig(rollout_rs="step_k1", rollout_rs_threshold=0.1)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"loss_mode": "grpo"}, ValueError, "loss_mode"),
        ({"clip_ratio": 0}, ValueError, "clip_ratio must be finite and > 0"),
        ({"clip_ratio": "1e-4"}, TypeError, "clip_ratio must be a number"),
        ({"kl_mask_threshold": -1.0}, ValueError, "kl_mask_threshold"),
        ({"adv_clip_max": 0.0}, ValueError, "adv_clip_max"),
        ({"kl_coef": -0.1}, ValueError, "kl_coef must be finite and >= 0"),
        ({"min_keep_fraction": 1.5}, ValueError, "min_keep_fraction must be finite and >= 0 and <= 1"),
        ({"rs_denominator": "original"}, ValueError, "rs_denominator"),
        ({"reduction": "median"}, ValueError, "reduction must be 'mean', 'sum' or a power"),
        ({"reduction": 0.0}, ValueError, "reduction must be"),
        ({"rollout_correction": 3}, TypeError, "expected a RolloutCorrectionConfig"),
        ({"rollout_correction": {"rollout_iss": "token"}}, ValueError, "rollout_iss"),
    ],
)
def test_wrong_values_are_refused_by_name(fields, error, message):
    with pytest.raises(error, match=message):
        DiffusionActorConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"loss_mode": "flow_dppo", "clip_ratio": 0.1}, "clip_ratio"),
        ({"kl_mask_threshold": 0.1}, "kl_mask_threshold"),
        ({"reduction": "sum"}, "reduction"),
        ({"min_keep_fraction": 0.5}, "min_keep_fraction"),
        ({"rs_denominator": "all"}, "rs_denominator"),
        (
            {"rollout_correction": {"bypass_mode": True, "loss_type": "reinforce"}, "loss_mode": "grpo_guard"},
            "loss_mode",
        ),
        (
            {
                "rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
                "rs_denominator": "weights",
            },
            "rs_denominator",
        ),
    ],
)
def test_an_option_that_does_nothing_says_so(fields, option):
    with pytest.warns(InertOptionWarning, match=rf"^{option}="):
        DiffusionActorConfig(**fields)
