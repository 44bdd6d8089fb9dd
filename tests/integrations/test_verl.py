"""The drop-in functions as they are without parity: by hand, in the shapes that verl's call sites expect."""

import math
import sys
import warnings

import pytest
import torch
from implementations import per_implementation
from omegaconf import OmegaConf
from verl_goldens import assert_metrics, golden

from rollcorr import correct
from rollcorr.config import InertOptionWarning, convert, converted_document
from rollcorr.integrations import verl
from rollcorr.integrations.verl import RolloutCorrectionConfig, TensorBatch, v2025_11
from rollcorr.integrations.verl.v2025_11 import RolloutCorrectionConfig as OfNovember


@pytest.fixture(autouse=True)
def _no_verl(monkeypatch):
    """Act as if verl were not installed: these tests read the fake one."""
    monkeypatch.setitem(sys.modules, "verl.protocol", None)


def log_probs(*rows):
    """log π with these ratios to log μ = −1 everywhere; NaN where a row is shorter, and the mask of the rest."""
    width = max(map(len, rows))
    ratios = torch.tensor([[*row, *[math.nan] * (width - len(row))] for row in rows], dtype=torch.float64)
    return ratios.log() - 1, torch.full_like(ratios, -1.0), (~ratios.isnan()).long()


@per_implementation
def test_weights_mask_and_metrics_by_hand():
    """Token ratios 4, 0.5 and 1, 1.5: weights are truncated at 2, and the band [0.6, 3] rejects 4 and 0.5."""
    weights, mask, metrics = verl.compute_rollout_correction_and_rejection_mask(
        *log_probs([4.0, 0.5], [1.0, 1.5]),
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.6_3",
    )
    assert isinstance(weights, TensorBatch)
    assert weights.batch["rollout_is_weights"].flatten().tolist() == pytest.approx([2.0, 0.5, 1.0, 1.5])
    assert mask.tolist() == [[0, 0], [1, 1]]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.25)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(4 * 0.5 * 1.5) / 4)


@per_implementation
@pytest.mark.parametrize(("ratio", "kept", "kept_by_verl"), [(0.61, 1, 0), (1.39, 1, 1), (1.5, 0, 1), (0.59, 0, 0)])
@pytest.mark.parametrize("criterion", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_a_band_holds_the_ratio_itself_and_its_inverse_only_with_parity(criterion, ratio, kept, kept_by_verl):
    """Band [0.6, 1.4]; verl's band contains 1/ρ, so it keeps ρ in [0.71, 1.67]."""
    options = {"rollout_rs": criterion, "rollout_rs_threshold": "0.6_1.4"}
    for verl_parity, expected in ((False, kept), (True, kept_by_verl)):
        _, mask, _ = verl.compute_rollout_correction_and_rejection_mask(
            *log_probs([ratio]), **options, verl_parity=verl_parity
        )
        assert mask.item() == expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("verl_parity", [False, True])
def test_the_mask_comes_back_in_its_own_dtype_and_is_not_changed_in_place(dtype, verl_parity):
    train, rollout, mask = log_probs([4.0, 0.5], [1.0, 1.5])
    mask = mask.to(dtype)
    given = mask.clone()
    options = {"rollout_rs": "seq_sum_k2", "rollout_rs_threshold": 0.5, "verl_parity": verl_parity}
    _, kept, _ = verl.compute_rollout_correction_and_rejection_mask(train, rollout, mask, **options)
    assert kept.dtype == dtype
    assert mask.equal(given)


@per_implementation
def test_the_joint_function_and_the_single_ones_agree():
    train, rollout, mask = log_probs([4.0, 0.5, 0.2], [1.0, 1.5], [3.0])
    rejection = {"rollout_rs": "seq_mean_k3,token_k1", "rollout_rs_threshold": "0.5,0.3_3.5"}
    joint, kept, metrics = verl.compute_rollout_correction_and_rejection_mask(
        train, rollout, mask, rollout_is="sequence", rollout_is_batch_normalize=True, **rejection
    )
    weights, weight_metrics = verl.compute_rollout_correction_weights(
        train - rollout, mask, "sequence", 2.0, rollout_is_batch_normalize=True
    )
    alone, mask_metrics = verl.compute_rollout_rejection_mask(train - rollout, mask, **rejection)
    gap = verl.compute_offpolicy_metrics(train, rollout, mask)
    assert weights.equal(joint.batch["rollout_is_weights"])
    assert alone.equal(kept)
    found = weight_metrics | mask_metrics | gap
    assert_metrics(found, {name: metrics[f"rollout_corr/{name}"] for name in found}, rtol=1e-12)
    assert {"rollout_is_batch_norm_factor", "rollout_rs_token_k1_mean", "chi2_seq"} <= set(found)
    renamed = {f"rollout_corr/{name}": value for name, value in gap.items()}
    assert verl.compute_rollout_corr_metrics_from_logprobs(train, rollout, mask) == renamed


@per_implementation
def test_without_rollout_log_probs_only_the_trainers_perplexity_is_measured():
    train, _, mask = log_probs([math.e, 1.0])
    metrics = verl.compute_offpolicy_metrics(train, None, mask)
    assert metrics == {"training_ppl": pytest.approx(math.exp(0.5)), "training_log_ppl": pytest.approx(0.5)}


@per_implementation
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [2.0, "0.7_2.0"])
def test_metrics_of_given_weights_are_those_of_the_correction_that_made_them(level, threshold):
    train, rollout, mask = log_probs([4.0, 0.5, 0.2], [1.0, 1.5], [3.0])
    log_ratio = train - rollout
    weights, expected = verl.compute_rollout_correction_weights(log_ratio, mask, level, threshold)
    d = log_ratio.masked_fill(mask == 0, 0)
    log_weight = d if level == "token" else d.sum(-1, keepdim=True)
    raw = log_weight.exp().expand(3, 3) * mask
    lower = 0.7 if isinstance(threshold, str) else None
    actual = verl.compute_is_metrics(weights.double(), raw, log_weight, mask, level, 2.0, lower)
    assert_metrics(actual, {name: expected[name] for name in actual}, rtol=1e-6)
    assert {"rollout_is_eff_sample_size", "rollout_is_seq_fraction_high", "rollout_is_raw_max"} <= set(actual)


@per_implementation
def test_weights_carry_no_gradient():
    train, rollout, mask = log_probs([4.0, 0.5])
    for verl_parity in (False, True):
        weights, _, _ = verl.compute_rollout_correction_and_rejection_mask(
            train.requires_grad_(), rollout, mask, rollout_is="token", verl_parity=verl_parity
        )
        assert not weights.batch["rollout_is_weights"].requires_grad


@per_implementation
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_a_batch_without_a_token_is_neutral_and_has_no_parity(shape):
    train, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
    options = {"rollout_is": "sequence", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 1.0}
    weights, kept, metrics = verl.compute_rollout_correction_and_rejection_mask(train, train, mask, **options)
    assert weights.batch["rollout_is_weights"].equal(torch.zeros(shape))
    assert kept.equal(mask)
    assert metrics["rollout_corr/token_count"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
    with pytest.raises(ValueError, match="at least one valid token"):
        verl.compute_rollout_correction_and_rejection_mask(train, train, mask, **options, verl_parity=True)


@per_implementation
def test_a_level_without_a_threshold_computes_no_weights_as_in_verl_and_says_so():
    train, rollout, mask = log_probs([4.0, 0.5])
    with pytest.warns(InertOptionWarning, match="rollout_is_threshold=None"):
        weights, _, _ = verl.compute_rollout_correction_and_rejection_mask(
            train, rollout, mask, rollout_is="token", rollout_is_threshold=None
        )
    assert weights is None
    with pytest.raises(TypeError, match="got None"):
        verl.compute_rollout_correction_weights(train - rollout, mask, "token", None)


# Deviations of these functions from verl; every other golden error is the same.
OURS = {
    "a bound of zero": ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0"}, ValueError),
    "a bool is no number": ({"rollout_rs": "token_k1", "rollout_rs_threshold": True}, TypeError),
    "three parts": ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0_3"}, ValueError),
    "NaN bound": ({"rollout_rs": "token_k2", "rollout_rs_threshold": "nan"}, ValueError),
    "NaN ceiling": ({"rollout_is": "token", "rollout_is_threshold": "nan"}, ValueError),
    "a repeat is dropped": ({"rollout_rs": "token_k1,token_k1", "rollout_rs_threshold": "0.5_2,0.5_2"}, None),
    "a list of names": ({"rollout_rs": ["token_k1"], "rollout_rs_threshold": 2.0}, None),
    "a third level": ({"rollout_is": "geometric"}, None),
    "no ceiling": ({"rollout_is": "token", "rollout_is_threshold": None}, None),
    "a band with an open side": ({"rollout_is": "token", "rollout_is_threshold": "0_2"}, None),
    "nothing kept by IcePop": ({"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}, None),
}
GOLDEN_ERRORS = [case for case in golden()["errors"] if "input" not in case["kwargs"]]


@pytest.mark.parametrize("case", GOLDEN_ERRORS, ids=lambda case: str(case["kwargs"]))
def test_options_are_checked_on_use_with_the_stated_error(case):
    ours = [error for options, error in OURS.values() if options == case["kwargs"]]
    error = ours[0] if ours else {"ValueError": ValueError, "TypeError": TypeError, "accepted": None}[case["result"]]
    inputs = log_probs([1.0, 1.1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        if error is None:
            verl.compute_rollout_correction_and_rejection_mask(*inputs, **case["kwargs"])
        else:
            with pytest.raises(error):
                verl.compute_rollout_correction_and_rejection_mask(*inputs, **case["kwargs"])


@pytest.mark.parametrize("verl_parity", [False, True])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_shapes_that_differ_raise_and_name_both(wrong, verl_parity):
    inputs = list(log_probs([1.0, 1.1]))
    inputs[wrong] = inputs[wrong][:, :1]
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 1\)|\(1, 1\).*\(1, 2\)"):
        verl.compute_rollout_correction_and_rejection_mask(*inputs, verl_parity=verl_parity)


def test_the_raw_configuration_keeps_what_it_is_given_and_checks_it_on_use():
    config = RolloutCorrectionConfig(rollout_is="tokne", rollout_rs_threshold=[1])
    assert config["rollout_is"] == config.get("rollout_is") == config.rollout_is == "tokne"
    assert dict(config)["rollout_rs_threshold"] == [1]
    assert len(config) == len(list(config)) == 17
    with pytest.raises(KeyError):
        config["rollout"]
    with pytest.raises(ValueError, match="'token'"):
        config.to_config()
    with pytest.raises(AttributeError):
        config.rollout_is = "token"


@per_implementation
def test_to_config_is_the_configuration_of_this_library():
    config = RolloutCorrectionConfig.bypass_pg_geo_rs_seq_tis(3.0, rs_threshold=1.001).to_config()
    assert (config.rollout_is, config.rollout_is_threshold, config.is_mode) == ("sequence", 3.0, "truncate")
    assert config.criteria[0].upper == 1.001
    assert (config.bypass_mode, config.loss_type) == (True, "reinforce")
    correct(*log_probs([1.0]), config)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({}, "0.5_5.0"), ({"threshold": 3.0}, "0.5_3.0"), ({"threshold_lower": 0.8}, "0.8_5.0")],
)
def test_icepop_presets_take_the_two_ends_of_their_band_apart(arguments, expected):
    assert RolloutCorrectionConfig.bypass_pg_token_icepop(**arguments).rollout_is_threshold == expected
    assert RolloutCorrectionConfig.decoupled_token_icepop(3.0, 0.8).rollout_is_threshold == "0.8_3.0"


def test_presets_refuse_arguments_they_do_not_have():
    with pytest.raises(TypeError, match=r"has no argument 'rs_threshold'; valid are threshold"):
        RolloutCorrectionConfig.decoupled_token_is(rs_threshold=2.0)
    with pytest.raises(TypeError, match="too many positional arguments"):
        RolloutCorrectionConfig.disabled(2.0)
    with pytest.raises(TypeError, match="multiple values"):
        RolloutCorrectionConfig.decoupled_token_is(2.0, threshold=3.0)


@per_implementation
@pytest.mark.parametrize("kind", [dict, OmegaConf.create, RolloutCorrectionConfig.read])
def test_a_batch_gets_its_mask_and_weights_from_any_mapping(kind):
    train, rollout, mask = log_probs([4.0, 0.5], [1.0, 1.5])
    batch = TensorBatch({"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask})
    config = kind({"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.5})
    returned, metrics = verl.compute_rollout_correction_and_add_to_batch(batch, config)
    assert returned.batch["response_mask"].tolist() == [[0, 1], [1, 1]]
    assert returned.batch["rollout_is_weights"].flatten().tolist() == pytest.approx([2.0, 0.5, 1.0, 1.5])
    assert metrics["rollout_corr/rollout_rs_token_k2_masked_fraction"] == 0.25


def test_a_batch_without_weights_gets_the_mask_alone_and_parity_may_come_from_the_configuration():
    for extra, in_call in (({"verl_parity": True}, {}), ({}, {"verl_parity": True})):
        train, rollout, mask = log_probs([1.5])
        batch = TensorBatch({"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask})
        config = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.4", **extra}
        batch, _ = verl.compute_rollout_correction_and_add_to_batch(batch, config, **in_call)
        assert "rollout_is_weights" not in batch.batch
        assert batch.batch["response_mask"].tolist() == [[1]]  # verl keeps 1.5


@per_implementation
def test_the_veto_works_here_too_and_by_parity():
    for verl_parity in (False, True):
        train, rollout, mask = log_probs([1.0, 1e-5], [1.0, 1.0])
        batch = TensorBatch({"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask})
        config = RolloutCorrectionConfig(rollout_is=None, rollout_token_veto_threshold=1e-4, verl_parity=verl_parity)
        batch, metrics = verl.compute_rollout_correction_and_add_to_batch(batch, config)
        assert batch.batch["response_mask"].tolist() == [[0, 0], [1, 1]]
        assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5


def corrected_batch(ratios, config):
    """The batch of these ratios (NaN: no log-prob, on a valid token), corrected; and its metrics."""
    train, rollout, _ = log_probs(ratios)
    batch = TensorBatch(
        {
            "old_log_probs": train,
            "rollout_log_probs": rollout,
            "response_mask": torch.ones_like(train, dtype=torch.long),
        }
    )
    return verl.compute_rollout_correction_and_add_to_batch(batch, config)


@pytest.mark.parametrize("verl_parity", [False, True])
@pytest.mark.parametrize("kind", [dict, OmegaConf.create])
def test_weights_that_are_only_measured_leave_the_batch_without_weights(kind, verl_parity):
    options = {"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.5, "verl_parity": verl_parity}
    _, of_weights = corrected_batch([4.0, 0.5], kind(options))
    batch, metrics = corrected_batch([4.0, 0.5], kind({**options, "apply_is": False}))
    assert "rollout_is_weights" not in batch.batch
    assert batch.batch["response_mask"].tolist() == [[0, 1]]
    assert metrics == of_weights
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.25)


def test_a_converted_file_of_october_that_only_measured_still_does():
    old = {"rollout_is_threshold": 2.0, "rollout_is": False, "rollout_is_level": "token"}
    document = converted_document({"algorithm": old}, convert({"algorithm": old}))
    batch, metrics = corrected_batch([4.0, 0.5], document["algorithm"]["rollout_correction"])
    assert "rollout_is_weights" not in batch.batch
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.25)


@per_implementation
def test_a_floor_and_missing_log_probs_are_treated_as_asked():
    batch, _ = corrected_batch([4.0, 0.1], {"rollout_is": "token", "rollout_is_floor": 0.5})
    assert batch.batch["rollout_is_weights"].flatten().tolist() == pytest.approx([2.0, 0.5])

    for policy, kept in (("reject_token", [1, 0]), ("reject_sequence", [0, 0]), ("neutral", [1, 1])):
        batch, _ = corrected_batch([1.5, math.nan], {"rollout_is": "token", "nonfinite": policy})
        assert batch.batch["response_mask"].tolist() == [kept]
    with pytest.raises(ValueError, match="log-prob"):
        corrected_batch([1.5, math.nan], {"nonfinite": "raise"})


@pytest.mark.parametrize("generation", [verl, v2025_11])
@pytest.mark.parametrize("verl_parity", [False, True])
@pytest.mark.parametrize("options", [{"rollout_is": None}, {"rollout_is": "token", "apply_is": False}])
def test_measuring_keeps_the_mask_of_verl(generation, verl_parity, options):
    """Bit for bit, also where a log-prob is missing, and where a mask is no 0 or 1."""
    if generation is v2025_11 and "apply_is" in options:
        options = {"rollout_is": "token", "rollout_is_threshold": None}
    train, rollout, _ = log_probs([1.5, 1.2, 0.5])
    mask = torch.tensor([[0.3, 2.0, 0.0]])
    rollout[0, 1] = rollout[0, 1] if verl_parity else math.nan
    batch = TensorBatch({"old_log_probs": train, "rollout_log_probs": rollout, "response_mask": mask})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        generation.compute_rollout_correction_and_add_to_batch(batch, options, verl_parity=verl_parity)
    assert batch.batch["response_mask"].tolist() == mask.tolist()
    assert set(batch.batch) == {"old_log_probs", "rollout_log_probs", "response_mask"}


@per_implementation
def test_the_safety_bound_and_the_units_of_a_mean_are_those_asked_for():
    batch, _ = corrected_batch(
        [math.exp(3)], {"rollout_is": "token", "rollout_is_threshold": "0.5_inf", "safety_bound": 1}
    )
    assert batch.batch["rollout_is_weights"].item() == pytest.approx(math.e)

    normalized = {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_is_threshold": 10.0}
    normalized |= {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    for units, mean in (("valid", 2.5), ("kept", 1.0)):
        batch, _ = corrected_batch([1.0, 4.0], {**normalized, "batch_normalize_over": units})
        assert batch.batch["rollout_is_weights"][0, 0] == pytest.approx(1 / mean)


@pytest.mark.parametrize("option", [{"rollout_is_floor": 0.5}, {"nonfinite": "neutral"}, {"safety_bound": 9.0}])
def test_parity_refuses_an_option_that_verl_does_not_have(option):
    with pytest.raises(ValueError, match=f"leave out {next(iter(option))}"):
        corrected_batch([1.5], {"rollout_is": "token", "verl_parity": True, **option})


def test_unknown_keys_are_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"Did you mean 'rollout_.*'rollout_treshold'"):
        RolloutCorrectionConfig.read({"rollout_treshold": 2.0})
    with pytest.raises(ValueError, match=r"v2025_11 .*bypass_mode=true"):
        RolloutCorrectionConfig.read({"bypass_old_logprob_for_rollout": True})
    with pytest.raises(ValueError, match=r"no key 'q'; valid are rollout_is, .*impl$"):
        RolloutCorrectionConfig.read({"q": 1})
    with pytest.raises(ValueError, match=r"'normalizer'\. The actor of verl divides .*policy_loss"):
        RolloutCorrectionConfig.read({"normalizer": "original"})
    with pytest.raises(ValueError, match=r"'apply_is'\. It is newer than November 2025"):
        OfNovember.read({"apply_is": False})
    with pytest.raises(ValueError, match=r"Did you mean 'rollout_token_veto_threshold'"):
        OfNovember.read({"rollout_token_veto": 1e-4})


@pytest.mark.parametrize("struct", [False, True])
def test_bypass_mode_hands_over_the_log_probs_and_tells_the_actor(struct):
    """A node of verl's configuration is already switched on, or the call comes late (test_verl_bypass.py)."""
    _, rollout, _ = log_probs([1.0])
    actor = OmegaConf.create({"loss_mode": "bypass_mode"}) if struct else {"loss_mode": "vanilla"}
    if struct:
        OmegaConf.set_struct(actor, True)
    batch, correction = TensorBatch({"rollout_log_probs": rollout}), {"bypass_mode": True}
    verl.apply_bypass_mode(batch, correction, actor)
    assert batch.batch["old_log_probs"] is rollout
    assert actor["loss_mode"] == "bypass_mode"
    assert actor["rollout_correction"] == correction


def test_bypass_mode_without_rollout_log_probs_says_how_to_get_them():
    with pytest.raises(ValueError, match="calculate_log_probs=true"):
        verl.apply_bypass_mode(TensorBatch(), {}, {})
    with pytest.raises(ValueError, match="policy_loss_config"):
        verl.apply_bypass_mode(TensorBatch({"rollout_log_probs": torch.zeros(1, 1)}), {})


def test_a_stand_in_batch_refuses_a_second_tensor_of_one_name():
    batch = TensorBatch({"a": torch.zeros(2)})
    assert batch.union(TensorBatch({"a": torch.zeros(2), "b": torch.ones(2)})).batch["b"].sum() == 2
    with pytest.raises(ValueError, match="'a'"):
        batch.union(TensorBatch({"a": torch.ones(2)}))


@pytest.mark.parametrize("verl_parity", [False, True])
def test_batch_normalization_is_over_the_default_process_group(tmp_path, verl_parity):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        weights, metrics = verl.compute_rollout_correction_weights(
            log_probs([4.0, 0.5])[0] + 1,
            torch.ones(1, 2),
            "token",
            2.0,
            rollout_is_batch_normalize=True,
            verl_parity=verl_parity,
        )
    finally:
        torch.distributed.destroy_process_group()
    assert weights.flatten().tolist() == pytest.approx([2.0 / 1.25, 0.5 / 1.25])
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(1.25)
