"""Conversion of each old field, generation by generation, with its report and notes."""

import pytest

from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.config.conversion import convert

FIRST = {"rollout_is_threshold": 2.0, "rollout_is": True, "rollout_is_level": "token", "rollout_is_mode": "truncate"}
SECOND = {"rollout_is": "sequence", "bypass_old_logprob_for_rollout": False, "use_pure_rollout_correction": False}


def became(conversion):
    return {(row.field, row.became) for row in conversion.report}


@pytest.mark.parametrize(
    ("threshold", "apply_is", "mode", "expected"),
    [
        (None, True, "mask", None),
        (2.0, False, "truncate", {"rollout_is": "token", "apply_is": False}),
        (
            2.0,
            False,
            "mask",
            {
                "rollout_is": "token",
                "rollout_is_threshold": None,
                "apply_is": False,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": 2.0,
            },
        ),
        (2.0, True, "truncate", {"rollout_is": "token"}),
        (
            2.0,
            True,
            "mask",
            {
                "rollout_is": "token",
                "rollout_is_threshold": None,
                "rollout_rs": "token_k1",
                "rollout_rs_threshold": 2.0,
            },
        ),
    ],
    ids=["off", "metrics only", "rejection only", "truncate", "mask"],
)
def test_the_five_mode_combinations_of_2025_10(threshold, apply_is, mode, expected):
    conversion = convert({**FIRST, "rollout_is_threshold": threshold, "rollout_is": apply_is, "rollout_is_mode": mode})
    assert conversion.schema == "2025-10"
    assert conversion.config == (None if expected is None else RolloutCorrectionConfig(**expected))


@pytest.mark.parametrize(
    ("level", "criterion"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_2025_10_mask_mode_rejects_at_its_level(level, criterion):
    config = convert({**FIRST, "rollout_is_mode": "mask", "rollout_is_level": level}).config
    assert (config.rollout_is, config.rollout_rs, config.is_mode) == (level, criterion, "none")


@pytest.mark.parametrize(("lower", "ends"), [(None, (0.2, 5.0)), (0.8, (0.8, 5.0)), (0, (None, 5.0))])
def test_2025_10_lower_threshold_is_reciprocal_given_or_open(lower, ends):
    old = {**FIRST, "rollout_is_mode": "mask", "rollout_is_threshold": 5.0, "rollout_is_threshold_lower": lower}
    (criterion,) = convert(old).config.criteria
    assert (criterion.lower, criterion.upper) == ends


def test_2025_10_truncate_mode_reports_that_its_lower_threshold_did_nothing():
    conversion = convert({**FIRST, "rollout_is_threshold_lower": 0.8})
    assert ("rollout_is_threshold_lower", "(nothing)") in became(conversion)
    assert conversion.config == RolloutCorrectionConfig(rollout_is="token")


def test_2025_10_veto_has_a_new_name_and_may_be_a_text():
    config = convert({**FIRST, "rollout_is_veto_threshold": "1e-4"}).config
    assert config.rollout_token_veto_threshold == 1e-4


def test_2025_10_without_a_threshold_is_off_and_says_so():
    conversion = convert({"rollout_is": True, "rollout_is_level": "token"})
    assert conversion.config is None
    assert "missing" in conversion.notes[0]
    assert became(conversion) == {("rollout_is", "no correction"), ("rollout_is_level", "no correction")}


def test_every_old_field_is_in_the_report_with_a_reason():
    old = {**FIRST, "rollout_is_mode": "mask", "rollout_is_threshold_lower": 0.8, "rollout_is_veto_threshold": 1e-4}
    conversion = convert(old)
    assert {row.field for row in conversion.report} == old.keys()
    assert all(row.reason for row in conversion.report)
    assert {row.field: row.value for row in conversion.report} == old


@pytest.mark.parametrize(
    ("rs", "criterion"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_2025_11_rejection_levels_become_k1_criteria(rs, criterion):
    config = convert({"rollout_rs": rs, "rollout_rs_threshold": 2.0}).config
    assert config == RolloutCorrectionConfig(rollout_rs=criterion, rollout_rs_threshold=2.0)


@pytest.mark.parametrize(
    ("thresholds", "ends"),
    [
        ({"rollout_rs_threshold": 3.0, "rollout_is_threshold": 4.0}, (1 / 3, 3.0)),
        ({"rollout_rs_threshold": None, "rollout_is_threshold": 4.0}, (0.25, 4.0)),
        ({}, (0.5, 2.0)),
        ({"rollout_rs_threshold": 3.0, "rollout_rs_threshold_lower": 0.9}, (0.9, 3.0)),
        ({"rollout_is_threshold": 4.0, "rollout_rs_threshold_lower": 0}, (None, 4.0)),
    ],
)
def test_2025_11_thresholds_default_to_the_weights_and_to_the_reciprocal(thresholds, ends):
    (criterion,) = convert({"rollout_is": "sequence", "rollout_rs": "sequence", **thresholds}).config.criteria
    assert (criterion.lower, criterion.upper) == ends


def test_2025_11_rejection_may_be_null():
    with pytest.raises(
        ValueError, match=r"Did you mean 'token'\? rollout_rs must be one of .*'geometric' or None; got"
    ):
        convert({"rollout_rs": "tokens", "rollout_rs_threshold": 2.0}, schema="2025-11")
    conversion = convert({**SECOND, "rollout_rs": None, "rollout_rs_threshold": 2.0})
    assert ("rollout_rs_threshold", "(nothing)") in became(conversion)


@pytest.mark.parametrize("option", ["rollout_is_threshold", "rollout_rs_threshold", "rollout_token_veto_threshold"])
@pytest.mark.parametrize("band", ["0.5_2", "0_3", "0.5_2.0"])
def test_a_band_where_an_older_generation_takes_a_number_is_refused(option, band):
    """Python reads "0.5_2" as the number 0.52, and would cut every weight there."""
    with pytest.raises(ValueError, match=f"{option} must be a number or null; got '{band}'"):
        convert({"rollout_is": "token", "rollout_rs": "token", option: band}, schema="2025-11")


def test_2025_11_switches_become_mode_and_loss():
    pure = {**SECOND, "bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}
    assert convert(SECOND).config == RolloutCorrectionConfig.seq_is()
    assert convert(pure).config == RolloutCorrectionConfig.pure_is()
    assert convert(pure).schema == "2025-11"


def test_2025_11_bypass_with_ppo_keeps_weights_as_metrics_and_notes_that_rejection_starts_to_act():
    old = {**SECOND, "rollout_is": "token", "bypass_old_logprob_for_rollout": True}
    conversion = convert(old)
    assert conversion.config == RolloutCorrectionConfig.ppo_is_bypass()
    assert ("rollout_is", "apply_is: false") in became(conversion)
    assert "compared the rollout with itself" in conversion.notes[0]


def test_2025_11_weights_without_a_threshold_were_never_computed():
    assert convert({**SECOND, "rollout_is_threshold": None}).config == RolloutCorrectionConfig()


def test_2025_11_missing_level_is_null_with_a_note():
    conversion = convert({"rollout_rs": "token", "rollout_rs_threshold": 2.0})
    assert conversion.config.rollout_is is None
    assert "rollout_is is missing" in conversion.notes[0]


def test_2025_11_thresholds_without_a_use_are_dropped_and_reported():
    conversion = convert(
        {**SECOND, "rollout_is": None, "rollout_is_threshold": 3.0, "rollout_rs": None, "rollout_rs_threshold": 2.0}
    )
    assert conversion.config == RolloutCorrectionConfig()
    assert {("rollout_is_threshold", "(nothing)"), ("rollout_rs_threshold", "(nothing)")} <= became(conversion)


def test_the_newest_options_stay_as_they_are():
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)
    conversion = convert(config.to_dict())
    assert (conversion.schema, conversion.config, conversion.notes) == ("newest", config, ())
    assert convert({"rollout_is_threshold": None, "rollout_is": "token"}).config.is_mode == "none"


def test_the_newest_options_warn_like_the_configuration_they_make():
    with pytest.warns(InertOptionWarning, match="rollout_is="):
        convert({"rollout_is": "sequence", "bypass_mode": True})


@pytest.mark.parametrize(
    ("threshold", "verl_band"),
    [("0.6_1.4", "0.714286_1.66667"), ("0_1.4", "0.714286_inf"), ("0.5_inf", "0_2"), ("0.5_2.0", None), (1.7, None)],
)
def test_a_band_that_verl_reads_the_other_way_round_is_noted_with_its_equivalent(threshold, verl_band):
    notes = convert({"rollout_rs": "token_k1", "rollout_rs_threshold": threshold}).notes
    assert len(notes) == (verl_band is not None)
    assert verl_band is None or verl_band in notes[0]


def test_bypass_rejection_notes_verls_denominators():
    (note,) = convert(RolloutCorrectionConfig.bypass_ppo_clip_k3_rs().to_dict()).notes
    assert "normalizer: original" in note
