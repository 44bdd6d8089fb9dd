"""Configurations: defaults and parsing by hand, then every error and warning, then properties."""

import dataclasses
import json
import math
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.config import Criterion, InertOptionWarning, LossConfig, RolloutCorrectionConfig, SamplingSpec
from rollcorr.config.checks import in_one_line
from rollcorr.config.criteria import CRITERIA, join_band

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text(encoding="utf-8"))


def rejection(names, threshold):
    return RolloutCorrectionConfig(rollout_rs=names, rollout_rs_threshold=threshold)


def bounds(names, threshold):
    return [(criterion.lower, criterion.upper) for criterion in rejection(names, threshold).criteria]


def test_defaults_measure_and_change_nothing():
    assert RolloutCorrectionConfig().to_dict() == {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "bypass_mode": False,
        "loss_type": "ppo_clip",
        "rollout_token_veto_threshold": None,
        "apply_is": True,
        "nonfinite": "reject_token",
        "safety_bound": 20.0,
        "normalizer": "kept",
        "batch_normalize_over": "valid",
        "rollout_is_floor": None,
        "rollout_is_horizon": None,
        "rollout_is_horizon_per_turn": False,
        "impl": "auto",
    }
    assert RolloutCorrectionConfig().criteria == ()


@pytest.mark.parametrize(
    ("threshold", "mode", "lower", "upper"),
    [
        (2.0, "truncate", None, 2.0),
        (3, "truncate", None, 3.0),
        ("2.5", "truncate", None, 2.5),
        ("0.5_5.0", "icepop", 0.5, 5.0),
        (" 1e-1 _ 4 ", "icepop", 0.1, 4.0),
        ("0_3.0", "icepop", None, 3.0),
        ("0.0_3", "icepop", None, 3.0),
        ("0.5_inf", "icepop", 0.5, None),
        (None, "none", None, None),
    ],
)
def test_a_weight_threshold_is_a_ceiling_a_band_or_nothing(threshold, mode, lower, upper):
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold)
    assert (config.is_mode, config.is_lower, config.is_upper) == (mode, lower, upper)


@pytest.mark.parametrize("name", CRITERIA)
def test_every_criterion_reads_a_single_number(name):
    (criterion,) = rejection(name, 4.0).criteria
    assert criterion.name == name
    assert (criterion.lower, criterion.upper) == ((0.25, 4.0) if name.endswith("k1") else (None, 4.0))


@pytest.mark.parametrize(
    ("text", "lower", "upper"),
    [("0.6_1.4", 0.6, 1.4), ("0_1.4", None, 1.4), ("0.0_1.4", None, 1.4), ("0.6_inf", 0.6, None), ("1", 1.0, 1.0)],
)
def test_a_ratio_band_has_two_ends_of_which_one_may_be_open(text, lower, upper):
    assert bounds("token_k1", text) == [(lower, upper)]


def test_one_threshold_is_shared_by_several_criteria():
    assert bounds("token_k1,seq_mean_k2,seq_max_k3", 2.0) == [(0.5, 2.0), (None, 2.0), (None, 2.0)]


def test_several_thresholds_go_to_the_criteria_in_order():
    assert bounds(["token_k1", "seq_mean_k3"], "0.5_2.0, 0.01") == [(0.5, 2.0), (None, 0.01)]


def test_criteria_are_kept_as_one_text():
    assert rejection(["token_k1", " seq_mean_k3"], 2.0).rollout_rs == "token_k1,seq_mean_k3"


def test_a_repeated_criterion_with_the_same_bound_is_dropped_with_its_bound():
    config = rejection("token_k1,token_k2,token_k1", "0.5_2,0.1,2.0")
    assert (config.rollout_rs, config.rollout_rs_threshold) == ("token_k1,token_k2", "0.5_2,0.1")
    assert rejection("token_k1,token_k1", "0.5_2.0") == rejection("token_k1", "0.5_2.0")


BAD_REJECTIONS = [
    ("foo", 1.0, ValueError, "unknown criterion 'foo'"),
    ("seq_max_k1", 2.0, ValueError, "seq_max_k1"),
    ("seq_mean_k4", 2.0, ValueError, "Did you mean 'seq_mean_k"),
    ("", 1.0, ValueError, "names no criterion"),
    ([], 1.0, ValueError, "names no criterion"),
    ("token_k1,", 2.0, ValueError, "unknown criterion ''"),
    (7, 2.0, TypeError, "got 7 of type int"),
    ([1], 2.0, TypeError, "list"),
    ("token_k1", None, ValueError, "needs rollout_rs_threshold"),
    ("token_k1", "", ValueError, "'' is not a finite number"),
    ("token_k1", "0", ValueError, "must be > 0, got 0"),
    ("token_k1", 0.8, ValueError, "'0.8_inf' for a lower bound alone, or '0.8_1.25'"),
    ("token_k1", True, TypeError, "bool"),
    ("token_k1", "abc", ValueError, "'abc' is not a finite number"),
    ("token_k1", "nan", ValueError, "'nan' is not a finite number"),
    ("token_k1", "inf", ValueError, "'inf' is not a finite number"),
    ("token_k1", math.nan, ValueError, "'nan' is not a finite number"),
    ("token_k1", "1e999", ValueError, "not a finite number"),
    ("token_k1", "2_1", ValueError, "lower bound 2 exceeds the upper bound 1; swap them"),
    ("token_k1", "-1_2", ValueError, "must be > 0, got -1"),
    ("token_k1", "0.5_0", ValueError, "must be > 0, got 0"),
    ("token_k1", "0.5_2.0_3", ValueError, "has 3 parts"),
    ("token_k1", "1_000_2", ValueError, "has 3 parts"),
    ("token_k1", "0.5_", ValueError, "'' is not a finite number"),
    ("token_k1", [1.0], TypeError, "list"),
    ("token_k2", "0.5_2", ValueError, "one upper bound in nats; got the band '0.5_2'"),
    ("token_k2", "1_000", ValueError, "got the band '1_000'"),
    ("token_k2", "nan", ValueError, "'nan' is not a finite number"),
    ("token_k2", -1, ValueError, "must be > 0, got -1"),
    ("token_k3", "0", ValueError, "must be > 0, got 0"),
    ("token_k3", "inf", ValueError, "'inf' is not a finite number"),
    ("token_k1,token_k2", "1_2,3,4", ValueError, "names 2 criteria (token_k1, token_k2)"),
    ("token_k1,token_k2", "0.5_2.0", ValueError, "token_k2 is one upper bound"),
    ("token_k1,token_k1", "0.5_2,0.5_3", ValueError, "names token_k1 twice with different bounds"),
]


@pytest.mark.parametrize(("names", "threshold", "error", "message"), BAD_REJECTIONS)
def test_a_bad_rejection_says_what_it_got_and_what_was_expected(names, threshold, error, message):
    with pytest.raises(error) as caught:
        rejection(names, threshold)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rollout_is": "tokens"}, ValueError, "Did you mean 'token'?"),
        ({"rollout_is": True}, TypeError, "got True of type bool"),
        ({"rollout_is_threshold": 0}, ValueError, "> 0; got 0"),
        ({"rollout_is_threshold": math.inf}, ValueError, "finite"),
        ({"rollout_is_threshold": math.nan}, ValueError, "finite"),
        ({"rollout_is_threshold": True}, TypeError, "bool"),
        ({"rollout_is_threshold": [2.0]}, TypeError, "list"),
        ({"rollout_is_threshold": ""}, ValueError, "'' is not a finite number"),
        ({"rollout_is_threshold": "nan"}, ValueError, "'nan'"),
        ({"rollout_is_threshold": "0"}, ValueError, "> 0, got 0"),
        ({"rollout_is_threshold": "-1_2"}, ValueError, "> 0, got -1"),
        ({"rollout_is_threshold": "0_inf"}, ValueError, "open on both sides; write None"),
        ({"rollout_is_threshold": "0.5_"}, ValueError, "'lo_inf' leave a side open"),
        ({"rollout_is_threshold": "_2"}, ValueError, "'0_hi' and"),
        ({"rollout_is_threshold": "2_0"}, ValueError, "> 0, got 0"),
        ({"rollout_is": "token", "rollout_is_floor": 0}, ValueError, "> 0; got 0"),
        ({"rollout_is": "token", "rollout_is_floor": "0.5"}, TypeError, "rollout_is_floor must be a number"),
        ({"rollout_is": "token", "rollout_is_floor": 3.0}, ValueError, "exceeds the ceiling"),
        (
            {"rollout_is": "token", "rollout_is_floor": 0.5, "rollout_is_threshold": "0.5_2"},
            ValueError,
            "exclude each other",
        ),
        ({"rollout_is": "horizon"}, ValueError, "needs rollout_is_horizon, got None; set a number from 0"),
        ({"rollout_is": "horizon", "rollout_is_horizon": 1.01}, ValueError, "finite and >= 0 and <= 1; got 1.01"),
        ({"rollout_is": "horizon", "rollout_is_horizon": -0.1}, ValueError, "finite and >= 0 and <= 1; got -0.1"),
        ({"rollout_is": "horizon", "rollout_is_horizon": math.nan}, ValueError, "got nan"),
        ({"rollout_is": "horizon", "rollout_is_horizon": "0.5"}, TypeError, "rollout_is_horizon must be a number"),
        ({"rollout_is_threshold": "2_1"}, ValueError, "swap them"),
        ({"rollout_is_threshold": "1_2_3"}, ValueError, "3 parts"),
        ({"rollout_is_threshold": "inf"}, ValueError, "'inf' is not a finite number"),
        ({"rollout_token_veto_threshold": 0}, ValueError, "> 0; got 0"),
        ({"rollout_token_veto_threshold": "1e-4"}, TypeError, "str"),
        ({"rollout_is_batch_normalize": 1}, TypeError, "got 1 of type int"),
        ({"bypass_mode": "true"}, TypeError, "got 'true' of type str"),
        ({"apply_is": None}, TypeError, "apply_is"),
        ({"loss_type": "reinforce"}, ValueError, "set bypass_mode=True"),
        ({"loss_type": "ppo_clipp"}, ValueError, "Did you mean 'ppo_clip'?"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite must be one of"),
        ({"normalizer": "all"}, ValueError, "normalizer must be one of"),
        ({"batch_normalize_over": "batch"}, ValueError, "batch_normalize_over must be one of"),
        ({"safety_bound": 0.0}, ValueError, "> 0"),
        ({"safety_bound": 89.0}, ValueError, "<= 88"),
        ({"rollout_rs_threshold": [1.0]}, TypeError, "list"),
    ],
)
def test_a_bad_option_says_what_it_got_and_what_was_expected(options, error, message):
    with pytest.raises(error) as caught:
        RolloutCorrectionConfig(**options)
    assert message in str(caught.value)


ACCEPTED_BY_VERL = {
    ("rollout_rs_threshold", "0.5_2.0_3"),
    ("rollout_rs_threshold", "nan"),
    ("rollout_is_threshold", "nan"),
}


@pytest.mark.parametrize("case", [case for case in GOLDEN["errors"] if "input" not in case["kwargs"]], ids=str)
def test_what_verl_refuses_is_refused_except_for_what_the_specification_allows(case):
    kwargs = case["kwargs"]
    allowed_here = (
        kwargs.get("rollout_is") == "geometric"
        or (kwargs.get("rollout_rs"), kwargs.get("rollout_rs_threshold")) == ("token_k1,token_k1", "0.5_2,0.5_2")
        or kwargs.get("rollout_rs") == ["token_k1"]
        or kwargs.get("rollout_is_threshold") == "0_2"
        or ("rollout_is_threshold" in kwargs and kwargs["rollout_is_threshold"] is None)
    )
    if allowed_here:
        RolloutCorrectionConfig(**kwargs)
    else:
        assert case["result"] != "accepted" or ACCEPTED_BY_VERL & kwargs.items()
        with pytest.raises((TypeError, ValueError)):
            RolloutCorrectionConfig(**kwargs)


BYPASS_PPO = {"bypass_mode": True, "loss_type": "ppo_clip"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rollout_is": "sequence", **BYPASS_PPO}, "rollout_is="),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold="),
        ({"rollout_is_threshold": 3.0}, "rollout_is_threshold="),
        ({"rollout_is_batch_normalize": True}, "rollout_is_batch_normalize="),
        ({"apply_is": False}, "apply_is="),
        ({"normalizer": "weights"}, "normalizer="),
        ({"rollout_is": "token", "apply_is": False, "normalizer": "weights"}, "normalizer="),
        ({"batch_normalize_over": "kept"}, "batch_normalize_over="),
        ({"rollout_is": "token", "rollout_is_horizon": 0.5}, "rollout_is_horizon="),
        ({"rollout_is": "token", "rollout_is_horizon": 0.0}, "rollout_is_horizon="),
        ({"rollout_is": "token", "rollout_is_horizon_per_turn": True}, "rollout_is_horizon_per_turn="),
        ({"rollout_is": "token", "rollout_is_threshold": 3.0, "safety_bound": 1.0}, "rollout_is_threshold="),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0_inf"}, "rollout_rs_threshold="),
    ],
)
def test_an_option_without_effect_warns_once_and_names_itself(options, named):
    with pytest.warns(InertOptionWarning) as caught:
        RolloutCorrectionConfig(**options)
    assert len(caught) == 1
    assert str(caught[0].message).startswith(named)
    assert caught[0].filename == __file__


def test_options_that_have_an_effect_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutCorrectionConfig(rollout_is="token", apply_is=False, **BYPASS_PPO)
        RolloutCorrectionConfig(
            rollout_is="sequence",
            rollout_is_batch_normalize=True,
            batch_normalize_over="kept",
            normalizer="weights",
            bypass_mode=True,
            loss_type="reinforce",
        )


@pytest.mark.parametrize(
    ("options", "reach"),
    [
        ({}, False),
        ({"rollout_is": "token"}, True),
        ({"rollout_is": "token", "apply_is": False}, False),
        ({"rollout_is": "token", "apply_is": False, **BYPASS_PPO}, False),
        ({"rollout_is": "token", "bypass_mode": True, "loss_type": "reinforce"}, True),
    ],
)
def test_weights_reach_the_loss_unless_they_are_absent_withheld_or_would_count_twice(options, reach):
    assert RolloutCorrectionConfig(**options).weights_reach_loss is reach


@pytest.mark.parametrize(
    ("options", "measures"),
    [
        ({}, True),
        ({"rollout_is": "token", "apply_is": False}, True),
        ({"nonfinite": "neutral"}, True),
        ({"nonfinite": "reject_sequence"}, False),
        ({"rollout_is": "token"}, False),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}, False),
        ({"rollout_token_veto_threshold": 1e-4}, False),
        ({"bypass_mode": True}, False),
    ],
)
def test_weights_rejection_or_bypass_are_more_than_measuring(options, measures):
    assert RolloutCorrectionConfig(**options).only_measures is measures


numbers = st.floats(1e-6, 1e6)
divergences = st.one_of(numbers, numbers.map(repr))
bands = st.tuples(numbers, numbers).map(lambda ends: join_band(min(ends), max(ends)))


@st.composite
def configs(draw):
    names = draw(st.lists(st.sampled_from(sorted(CRITERIA)), unique=True, max_size=4))
    texts = [draw(bands) if name.endswith("k1") else repr(draw(numbers)) for name in names]
    level = draw(st.sampled_from([None, "token", "sequence", "geometric"]))
    return RolloutCorrectionConfig(
        rollout_is=level,
        rollout_is_threshold=draw(st.one_of(numbers, bands, st.none())) if level else 2.0,
        rollout_rs=",".join(names) or None,
        rollout_rs_threshold=",".join(texts) or None,
        rollout_token_veto_threshold=draw(st.one_of(st.none(), numbers)),
    )


@settings(deadline=None, max_examples=50)
@given(configs())
def test_a_configuration_survives_pickle_dictionaries_and_yaml_and_hashes_alike(config):
    for copy in (
        pickle.loads(pickle.dumps(config)),
        RolloutCorrectionConfig(**config.to_dict()),
        RolloutCorrectionConfig(**yaml.safe_load(yaml.safe_dump(config.to_dict()))),
        dataclasses.replace(config),
    ):
        assert copy == config
        assert hash(copy) == hash(config)
        assert copy.criteria == config.criteria


@settings(deadline=None, max_examples=50)
@given(st.tuples(numbers, numbers).map(sorted))
def test_a_band_from_two_ends_is_read_back_exactly(ends):
    assert bounds("token_k1", join_band(*ends)) == [tuple(ends)]


def test_a_configuration_cannot_be_changed_but_replaced():
    config = RolloutCorrectionConfig(rollout_is="token")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rollout_is = None
    assert dataclasses.replace(config, rollout_is_threshold=5.0).is_upper == 5.0
    assert config.is_upper == 2.0


def test_options_are_given_by_name():
    with pytest.raises(TypeError):
        RolloutCorrectionConfig("token")


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "seq_max", "kind": "k1", "upper": 2.0},
        {"scope": "token", "kind": "k1", "lower": 2.0, "upper": 1.0},
        {"scope": "token", "kind": "k1", "upper": math.inf},
        {"scope": "token", "kind": "k2", "lower": 0.1, "upper": 1.0},
        {"scope": "token", "kind": "k3"},
        {"scope": "sequence", "kind": "k1"},
    ],
)
def test_an_impossible_criterion_is_refused(options):
    with pytest.raises(ValueError):
        Criterion(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"clip_ratio_low": 1.5}, ValueError),
        ({"clip_ratio_high": -0.1}, ValueError),
        ({"clip_ratio_high": "0.2"}, TypeError),
        ({"clip_ratio_c": 1.0}, ValueError),
        ({"loss_agg_mode": "token-average"}, ValueError),
        ({"kl_coef": -1.0}, ValueError),
        ({"entropy_coef": math.nan}, ValueError),
        ({"loss_scale_factor": 0.0, "loss_agg_mode": "seq-mean-token-sum-norm"}, ValueError),
    ],
)
def test_a_bad_loss_option_is_refused(options, error):
    with pytest.raises(error, match=next(iter(options))):
        LossConfig(**options)


def test_a_loss_scale_that_divides_nothing_warns():
    with pytest.warns(InertOptionWarning, match="seq-mean-token-sum-norm"):
        LossConfig(loss_scale_factor=100.0)
    assert LossConfig(loss_scale_factor=100.0, loss_agg_mode="seq-mean-token-sum-norm").loss_scale_factor == 100.0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": -1.0}, ValueError),
        ({"temperature": "0.7"}, TypeError),
        ({"top_p": 0.0}, ValueError),
        ({"top_p": 1.1}, ValueError),
        ({"top_k": 0}, ValueError),
        ({"top_k": 2.5}, TypeError),
        ({"min_p": 2.0}, ValueError),
        ({"repetition_penalty": 0.0}, ValueError),
        ({"min_new_tokens": -1}, ValueError),
        ({"logprobs": "raw_logits"}, ValueError),
        ({"engine": 3}, TypeError),
        ({"policy_version": True}, TypeError),
    ],
)
def test_a_bad_sampling_setting_is_refused(options, error):
    with pytest.raises(error, match=next(iter(options))):
        SamplingSpec(**options)


def test_the_configuration_family_imports_no_torch():
    code = "import sys, rollcorr.config, rollcorr.config.conversion; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_configuration_has_the_hash_of_its_equals():
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01)
    other = pickle.loads(pickle.dumps(config))
    assert (other, hash(other)) == (config, hash(config))
    assert hash(config.with_options(impl="torch")) == hash(config)
    assert hash(config.with_options(safety_bound=10.0)) != hash(config)


def test_the_loss_has_the_documented_defaults():
    """Those of verl: a symmetric clip at 0.2, and a dual clip at 3."""
    loss = LossConfig()
    assert (loss.clip_ratio_low, loss.clip_ratio_high, loss.clip_ratio_c) == (0.2, 0.2, 3.0)
    assert (loss.loss_agg_mode, loss.loss_scale_factor) == (None, None)
    assert (loss.kl_coef, loss.kl_estimator, loss.entropy_coef) == (0.0, "k3", 0.0)


def test_a_band_may_be_one_number():
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="1_1")
    assert (config.criteria[0].lower, config.criteria[0].upper) == (1.0, 1.0)


def test_long_errors_are_cut_in_the_middle():
    assert in_one_line("x" * 1500) == "x" * 1500
    assert in_one_line("a" + "x" * 1499 + "b") == "a" + "x" * 749 + " … " + "x" * 749 + "b"
