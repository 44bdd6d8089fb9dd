"""Presets: exact values against verl's own, signatures against the table."""

import inspect
import json
import warnings
from pathlib import Path

import pytest

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.presets import BAND_LOWER, PRESETS

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "golden.json").read_text(encoding="utf-8"))["presets"]


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "<default>"])
def test_current_presets_have_verls_values(name):
    fields = RolloutCorrectionConfig.preset(name).to_dict()
    assert {key: fields[key] for key in GOLDEN[name]} == GOLDEN[name]


OLDER = {
    "token_is": {"rollout_is": "token"},
    "token_tis": {"rollout_is": "token"},
    "seq_is": {"rollout_is": "sequence"},
    "seq_is_rs": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
    "seq_mis": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0},
    "geo_rs": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.001, "rollout_token_veto_threshold": 1e-4},
    "geo_mis": {
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
        "rollout_token_veto_threshold": 1e-4,
    },
    "ppo_is_bypass": {"rollout_is": "token", "bypass_mode": True, "apply_is": False},
    "pure_is": {"rollout_is": "sequence", "bypass_mode": True, "loss_type": "reinforce"},
    "bypass_pg_rs": {
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
        "bypass_mode": True,
        "loss_type": "reinforce",
    },
}


OWN = {
    "measure": {"rollout_is": "token", "apply_is": False},
    "decoupled_horizon_is": {"rollout_is": "horizon", "rollout_is_horizon": 0.9, "rollout_is_threshold": 4.0},
    "bypass_pg_horizon_is": {
        "rollout_is": "horizon",
        "rollout_is_horizon": 0.9,
        "rollout_is_threshold": 4.0,
        "bypass_mode": True,
        "loss_type": "reinforce",
    },
    "tis": {"rollout_is": "token"},
    "seq_tis": {"rollout_is": "sequence"},
    "mis": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
}
SAME_AS = {
    "tis": "decoupled_token_is",
    "seq_tis": "decoupled_seq_is",
    "mis": "decoupled_seq_is_rs",
    "icepop": "decoupled_token_icepop",
}


@pytest.mark.parametrize("name", OWN)
def test_presets_of_this_library_have_their_values(name):
    assert RolloutCorrectionConfig.preset(name) == RolloutCorrectionConfig(**OWN[name])


@pytest.mark.parametrize(("short", "long"), SAME_AS.items())
def test_a_short_name_means_the_preset_that_it_stands_for(short, long):
    assert PRESETS[short].values == PRESETS[long].values
    assert PRESETS[short].parameters == PRESETS[long].parameters
    assert long in PRESETS[short].description


@pytest.mark.parametrize("name", OLDER)
def test_older_presets_have_the_values_of_their_time(name):
    assert RolloutCorrectionConfig.preset(name) == RolloutCorrectionConfig(**OLDER[name])


def test_every_preset_is_checked_here_by_value():
    assert set(PRESETS) == (GOLDEN.keys() - {"<default>"}) | OLDER.keys() | OWN.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_documented_classmethod_whose_signature_is_the_table(name):
    method = getattr(RolloutCorrectionConfig, name)
    assert inspect.getdoc(method)
    parameters = inspect.signature(method).parameters
    assert tuple(parameters) == tuple(PRESETS[name].parameters)
    for argument, parameter in parameters.items():
        for field in PRESETS[name].parameters[argument]:
            assert parameter.default == PRESETS[name].values.get(field), (argument, field)


@pytest.mark.parametrize("name", PRESETS)
def test_the_method_and_the_name_give_the_same_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(RolloutCorrectionConfig, name)() == RolloutCorrectionConfig.preset(name)


@pytest.mark.parametrize("name", PRESETS)
def test_every_argument_of_a_preset_moves_its_fields(name):
    values = {"rollout_is_threshold": 3.0, "rollout_rs_threshold": 1.5, "rollout_token_veto_threshold": 0.01}
    values["rollout_is_horizon"] = 0.5
    for argument, fields in PRESETS[name].parameters.items():
        if BAND_LOWER in fields:
            continue
        value = values[fields[0]]
        config = getattr(RolloutCorrectionConfig, name)(**{argument: value})
        for field in fields:
            held = getattr(config, field)
            assert held == value or (name == "geo_mis" and held == "0.999_1.5")


def test_the_lower_end_of_an_older_band_is_reciprocal_given_or_open():
    def band(config):
        return config.criteria[0].lower, config.criteria[0].upper

    cls = RolloutCorrectionConfig
    assert band(cls.seq_is_rs(rs_threshold=4.0)) == (0.25, 4.0)
    assert band(cls.seq_is_rs(rs_threshold=4.0, rs_threshold_lower=0.8)) == (0.8, 4.0)
    assert band(cls.seq_mis(4.0, lower=0)) == (None, 4.0)
    assert cls.seq_mis(4.0) == cls.seq_is_rs(4.0, 4.0)
    assert band(cls.geo_rs()) == (1 / 1.001, 1.001)
    assert band(cls.geo_mis()) == (0.999, 1.001)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        (
            "decoupled_token_iss",
            {},
            ValueError,
            "Did you mean 'decoupled_token_is'? no preset is named 'decoupled_token_iss'; valid are ",
        ),
        ("Seq-TIS", {}, ValueError, "Did you mean 'seq_tis'? "),
        ("k3", {}, ValueError, "'decoupled_k3_rs'"),
        ("RS-k3", {}, ValueError, "no preset is named 'RS-k3'; valid are decoupled_token_is, "),
        ("my_config", {}, ValueError, "no preset is named 'my_config'; valid are decoupled_token_is, "),
        ("xyzzy", {}, ValueError, "no preset is named 'xyzzy'; valid are decoupled_token_is, "),
        ("decoupled_token_is", {"treshold": 2.0}, TypeError, "Did you mean 'threshold'? preset"),
        ("disabled", {"threshold": 2.0}, TypeError, "valid are none"),
        ("seq_is_rs", {"rs_threshold": "0.5_2.0", "rs_threshold_lower": 0.5}, ValueError, "two ends are given apart"),
        ("seq_is_rs", {"rs_threshold_lower": -1.0}, ValueError, "must be > 0, got -1"),
        ("seq_is_rs", {"rs_threshold_lower": 3.0}, ValueError, "swap them"),
    ],
)
def test_a_wrong_name_or_argument_is_refused_with_a_hint(name, arguments, error, message):
    with pytest.raises(error) as caught:
        RolloutCorrectionConfig.preset(name, **arguments)
    assert message in str(caught.value)
