"""`correct` without a configuration, with options in place of one, and without weights."""

import dataclasses
import inspect
import warnings

import pytest
import torch
from implementations import per_implementation

from rollcorr import LossConfig, RolloutCorrectionConfig, SamplingSpec, correct, policy_loss
from rollcorr.config import InertOptionWarning
from rollcorr.diffusion import DiffusionActorConfig
from rollcorr.engines import GenerationSettings
from rollcorr.kernels.correction import triton
from rollcorr.kernels.correction.call import Batch

NAN, INF = float("nan"), float("inf")


def batch():
    train = torch.tensor([[-1.0, -2.0, -0.5, 0.0], [-0.3, -0.1, 0.0, 0.0]])
    rollout = torch.tensor([[-1.5, -1.0, -0.5, 9.0], [-0.2, -0.4, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    return train, rollout, mask


# --- Measuring is the default ----------------------------------------------------------------------------------------


def test_without_a_configuration_the_batch_is_measured_and_the_loss_stays_as_it_is():
    correction = correct(*batch())
    assert correction.config == RolloutCorrectionConfig.measure()
    assert correction.loss_weights is None
    assert torch.equal(correction.loss_mask, batch()[2].bool())
    assert {"k3_kl", "rollout_is_mean", "rollout_is_eff_sample_size", "t_times_kl"} <= correction.metrics(
        prefix=""
    ).keys()


def test_an_option_that_names_a_level_asks_for_weights_in_the_loss():
    correction = correct(*batch(), rollout_is="token")
    assert correction.config == RolloutCorrectionConfig(rollout_is="token")
    assert torch.equal(correction.loss_weights, correction.weights)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rollout_is": "sequence", "apply_is": False}, {"rollout_is": "sequence", "apply_is": False}),
        (
            {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
            {"rollout_is": "token", "apply_is": False, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
        ),
        (
            {"rollout_rs": ["seq_mean_k3"], "rollout_rs_threshold": 0.01},
            {"rollout_is": "token", "apply_is": False, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
        ),
        ({"nonfinite": "neutral"}, {"rollout_is": "token", "apply_is": False, "nonfinite": "neutral"}),
    ],
)
def test_other_options_leave_the_measuring_as_it_is(options, expected):
    assert correct(*batch(), **options).config == RolloutCorrectionConfig(**expected)


@pytest.mark.parametrize(
    "config",
    ["tis", {"rollout_is": "token"}, RolloutCorrectionConfig(rollout_is="token")],
    ids=["name", "dict", "config"],
)
def test_options_replace_those_of_a_configuration(config):
    found = correct(*batch(), config, rollout_is_threshold=3.0).config
    assert found == RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=3.0)


def test_equal_options_are_checked_once():
    first, second = (correct(*batch(), "tis", rollout_is_threshold=3.5).config for _ in range(2))
    assert first is second


def test_an_unknown_option_is_answered_with_the_nearest():
    with pytest.raises(TypeError, match=r"^Did you mean 'rollout_is'\? .* 'rolout_is' of correct; valid are "):
        correct(*batch(), rolout_is="token")
    with pytest.raises(TypeError, match=r"valid are .*\bimpl\b") as error:
        correct(*batch(), implementation="torch")
    assert str(error.value).count(" impl,") == 1  # an argument of correct and a field of its configuration
    with pytest.raises(ValueError, match="rollout_is must be one of"):
        correct(*batch(), rollout_is="tokens")


def test_a_misspelled_argument_is_answered_like_an_option():
    with pytest.raises(
        TypeError, match=r"Did you mean 'context_group'\? there is no option 'context_groups' of correct"
    ):
        correct(*batch(), context_groups=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"clip_ratio": 0.2},
            r"^Did you mean loss=LossConfig\(clip_ratio_low=…\) or loss=LossConfig\(clip_ratio_high=…\) or "
            r".* 'clip_ratio' of policy_loss; valid are policies, ",
        ),
        ({"clip_ratio_low": 0.2}, r"^Did you mean loss=LossConfig\(clip_ratio_low=…\)\? "),
        ({"rollout_is": "token"}, r"^Did you mean config=RolloutCorrectionConfig\(rollout_is=…\)\? "),
        ({"corection": None}, r"^Did you mean 'correction'\? .* of policy_loss; valid are policies, "),
        ({"zzz": 1}, r"no option 'zzz' of policy_loss; valid are policies, advantages, .*context_group$"),
    ],
)
def test_a_misspelled_argument_of_the_loss_is_answered_with_where_the_right_one_goes(options, message):
    with pytest.raises(TypeError, match=message):
        policy_loss(None, None, None, **options)


@pytest.mark.parametrize(
    ("options", "wrong", "right"),
    [
        (LossConfig, "clip_ratio_hi", "clip_ratio_high"),
        (RolloutCorrectionConfig, "rolout_is", "rollout_is"),
        (SamplingSpec, "temprature", "temperature"),
        (DiffusionActorConfig, "clip_rato", "clip_ratio"),
        (GenerationSettings, "max_new_token", "max_new_tokens"),
    ],
)
def test_a_misspelled_option_of_every_configuration_is_answered_with_the_nearest(options, wrong, right):
    with pytest.raises(
        TypeError, match=rf"Did you mean '{right}'\? there is no option '{wrong}' of {options.__name__}; valid are"
    ):
        options(**{wrong: 1})


@pytest.mark.parametrize("loss", [{"clip_ratio_low": 0.2}, "ppo"])
def test_a_loss_that_is_no_configuration_is_refused(loss):
    with pytest.raises(TypeError, match=r"loss must be a LossConfig, such as LossConfig\(clip_ratio_low=0.2\); got"):
        policy_loss(None, None, None, loss=loss)


def test_a_configuration_keeps_its_signature_and_warns_where_it_was_made():
    assert "clip_ratio_low" in inspect.signature(LossConfig).parameters
    with pytest.warns(InertOptionWarning) as found:
        LossConfig(loss_scale_factor=3.0)
    assert found[0].filename == __file__


def test_a_wrong_name_is_answered_with_the_nearest_presets():
    with pytest.raises(ValueError, match=r"Did you mean 'token_tis'\? no preset is named 'token-tis'"):
        correct(*batch(), "token-tis")


def test_options_beside_a_configuration_that_means_nothing_are_refused():
    with pytest.raises(ValueError, match="means no correction at all, so safety_bound would change nothing"):
        correct(*batch(), {"rollout_is_threshold": None, "rollout_is": True}, safety_bound=10.0)


def test_an_option_without_effect_still_warns():
    with pytest.warns(InertOptionWarning, match="rollout_is_batch_normalize"):
        correct(*batch(), "tis", apply_is=False, rollout_is_batch_normalize=True)


# --- Open sides and floors, by hand ----------------------------------------------------------------------------------


def weights_of(ratios, **options):
    d = torch.tensor([ratios]).log()
    mask = torch.ones(1, len(ratios))
    return correct(torch.full_like(d, -2.0) + d, torch.full_like(d, -2.0), mask, rollout_is="token", **options)


@per_implementation
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rollout_is_threshold": "0_3.0"}, [0.1, 0.7, 2.0, 0.0, 0.0]),
        ({"rollout_is_threshold": "0.5_inf"}, [0.0, 0.7, 2.0, 5.0, 0.0]),
        ({"rollout_is_threshold": 3.0, "rollout_is_floor": 0.5}, [0.5, 0.7, 2.0, 3.0, 0.0]),
        ({"rollout_is_threshold": None, "rollout_is_floor": 0.5}, [0.5, 0.7, 2.0, 5.0, 0.0]),
        ({"rollout_is_threshold": 2.0, "rollout_is_floor": 2.0}, [2.0, 2.0, 2.0, 2.0, 0.0]),
    ],
    ids=["0_3", "0.5_inf", "clip to [0.5, 3]", "floor alone", "floor = ceiling"],
)
def test_weights_by_their_bounds(options, expected):
    """The last ratio is 0, a fact that no floor changes."""
    correction = weights_of([0.1, 0.7, 2.0, 5.0, 0.0], **options)
    torch.testing.assert_close(correction.weights, torch.tensor([expected]))
    assert correction.loss_mask.all()


@per_implementation
def test_the_share_below_a_floor_is_counted_before_it_acts():
    metrics = weights_of([0.1, 0.7, 2.0, 5.0], rollout_is_threshold=3.0, rollout_is_floor=0.5).metrics(prefix="")
    assert metrics["rollout_is_ratio_fraction_low"] == 0.25
    assert metrics["rollout_is_ratio_fraction_high"] == 0.25
    assert (metrics["rollout_is_min"], metrics["rollout_is_max"]) == (0.5, 3.0)
    assert metrics["rollout_is_raw_min"] == pytest.approx(0.1)


@per_implementation
@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_whole_sequences_have_the_same_bounds(level):
    d = torch.tensor([[0.1], [0.7], [5.0]]).log()
    zeros, mask = torch.full_like(d, -2.0), torch.ones(3, 1)
    low, high = 0.5, 3.0
    clipped = correct(zeros + d, zeros, mask, rollout_is=level, rollout_is_threshold=high, rollout_is_floor=low)
    torch.testing.assert_close(clipped.weights.flatten(), torch.tensor([0.5, 0.7, 3.0]))
    open_below = correct(zeros + d, zeros, mask, rollout_is=level, rollout_is_threshold="0_3.0")
    torch.testing.assert_close(open_below.weights.flatten(), torch.tensor([0.1, 0.7, 0.0]))


def test_what_triton_does_not_take_it_says(monkeypatch):
    monkeypatch.setattr(triton, "interpreted", lambda: True)
    monkeypatch.setattr(triton, "status", lambda: None)
    batch = Batch(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))

    taken = [RolloutCorrectionConfig(), RolloutCorrectionConfig.tis("0_3.0"), RolloutCorrectionConfig.icepop()]
    assert [triton.why_not(batch, config) for config in taken] == [None] * 3
    with_floor = RolloutCorrectionConfig(rollout_is="token", rollout_is_floor=0.5)
    assert triton.why_not(batch, with_floor) == "rollout_is_floor is 0.5, and they raise no weights"
    assert "need an upper end of the band" in triton.why_not(batch, RolloutCorrectionConfig.tis("0.5_inf"))


@pytest.mark.parametrize(
    "options",
    [
        {"rollout_is_floor": 0.5},
        {"rollout_is_threshold": "0_3.0"},
        {"rollout_is": "horizon", "rollout_is_horizon": 0.5},
    ],
)
def test_verls_numbers_do_not_exist_for_what_verl_lacks(options):
    from rollcorr.integrations.verl import parity

    config = RolloutCorrectionConfig(**{"rollout_is": "token"} | options)
    with pytest.raises(ValueError, match="verl has neither a floor of weights nor a band with an open side"):
        parity.correct(*batch(), config)


# --- Where there is no weight ----------------------------------------------------------------------------------------


@per_implementation
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", ["tis", "seq_tis", "icepop"])
def test_a_fill_stands_where_there_is_no_weight_and_nowhere_else(config, packed):
    train, rollout, mask = batch()
    rollout[0, 1] = NAN  # missing: rejected, so it has no weight
    options = {}
    if packed:
        train, rollout, mask = (tensor.flatten() for tensor in (train, rollout, mask))
        options = {"cu_seqlens": torch.tensor([0, 4, 8])}
    plain = correct(train, rollout, mask, config, **options)
    filled = correct(train, rollout, mask, config, fill=1.0, **options)
    has_weight = (mask != 0) & rollout.isfinite()
    assert torch.equal(filled.weights[has_weight], plain.weights[has_weight])
    assert (filled.weights[~has_weight] == 1).all()
    assert (plain.weights[~has_weight] == 0).all()
    assert filled.metrics() == plain.metrics()


@per_implementation
def test_the_logarithm_of_filled_weights_is_finite_where_nothing_has_probability_zero():
    train, rollout, mask = batch()
    rollout[0, 1] = NAN
    assert correct(train, rollout, mask, "tis", fill=1.0).weights.log().isfinite().all()
    train[0, 0] = -INF
    assert correct(train, rollout, mask, "tis", fill=1.0).weights[0, 0] == 0


@per_implementation
def test_a_neutral_token_has_a_weight_and_normalization_does_not_touch_the_fill():
    train, rollout, mask = batch()
    rollout[0, 1] = NAN
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_batch_normalize=True, nonfinite="neutral")
    weights = correct(train, rollout, mask, config, fill=5.0).weights
    assert (weights[mask == 0] == 5).all()
    assert weights[mask != 0].mean().item() == pytest.approx(1.0)
    assert weights[0, 1] != 5


def test_a_fill_is_written_into_the_buffers_of_the_caller():
    weights, loss_mask = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.bool)
    correction = correct(*batch(), "tis", fill=1.0, out=(weights, loss_mask))
    assert correction.weights.data_ptr() == weights.data_ptr()
    assert weights[0, 3] == 1


def test_a_preset_without_weights_has_nothing_to_fill():
    assert correct(*batch(), "decoupled_k3_rs", fill=1.0).weights is None


# --- Configurations --------------------------------------------------------------------------------------------------


def test_with_options_equals_a_replacement():
    config = RolloutCorrectionConfig.decoupled_k3_rs_token_tis()
    assert config.with_options(safety_bound=10.0) == dataclasses.replace(config, safety_bound=10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config.with_options() == config


# --- Probabilities in place of log-probs ------------------------------------------------------------------------------

LOGS = torch.tensor([[-0.1, -2.0, 0.0], [-1.0, -0.5, -3.0]])
VALID = torch.tensor([[1, 1, 0], [1, 1, 1]])


@per_implementation
@pytest.mark.parametrize("mask", [VALID, VALID.bool(), VALID * torch.tensor([[0], [1]])], ids=["int", "bool", "row"])
@pytest.mark.parametrize("wrong", [LOGS.exp(), -LOGS, -LOGS.bfloat16()], ids=["probabilities", "negated", "bfloat16"])
def test_probabilities_are_refused_on_either_side(wrong, mask):
    for train, rollout, name in ((wrong, LOGS, "train_log_prob"), (LOGS, wrong, "rollout_log_prob")):
        with pytest.raises(ValueError, match=f"{name} holds probabilities.*{name}.log"):
            correct(train, rollout, mask, "decoupled_token_is")
        assert correct(train, rollout, mask, "decoupled_token_is", densities=True).loss_mask.any()


@per_implementation
@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(2, 3),
        torch.full((2, 3), 2**-8),
        torch.tensor([[0.5, 0.9, 9.0], [0.1, 0.2, -1e-6]]),
        torch.tensor([[0.5, 0.9, 9.0], [0.1, 0.2, -torch.inf]]),
        torch.full((2, 3), torch.nan),
        torch.tensor([[0.0, torch.inf, 9.0], [0.0, 2**-8, torch.inf]]),
        LOGS[:0],
    ],
    ids=["zeros", "bf16 rounding", "one negative", "one impossible", "missing", "infinite", "empty"],
)
def test_other_nonnegative_values_are_no_probabilities(values):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])[: len(values)]
    for train, rollout in ((values, LOGS[: len(values)]), (LOGS[: len(values)], values), (values, values)):
        assert correct(train, rollout, mask, "measure").loss_mask.shape == values.shape


def test_masked_probabilities_are_never_read():
    values = torch.tensor([[-1.0, 0.9], [0.9, 0.9]])
    mask = torch.tensor([[1, 0], [0, 0]])
    assert correct(values, values, mask, "measure").loss_mask.sum() == 1


def test_ordinary_log_probs_take_no_second_pass(monkeypatch):
    """The first sequence's sums are negative, so no token is looked at again."""
    monkeypatch.setattr(torch.Tensor, "__getitem__", None)
    correct(LOGS, LOGS, VALID.bool(), "measure", impl="cpu")
