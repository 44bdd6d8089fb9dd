"""verl_parity=True against the installed verl itself, on random batches. Runs with `make test-verl`."""

import hashlib
import inspect
import random
import re
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from verl_goldens import assert_metrics

from rollcorr.integrations import verl as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    REASON = "verl is not installed: `make test-verl` installs it; the golden numbers prove parity without it"
    theirs = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason=REASON, exc_type=ImportError)
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason=REASON, exc_type=ImportError)
    from verl.protocol import DataProto
    from verl.trainer.config import algorithm

pytestmark = pytest.mark.filterwarnings("ignore")

K1_BANDS = ["0.5_2.0", "0.9_1.3", "0.999_1.001", 1.5, "0.2_1.05"]
UPPER_BOUNDS = [0.01, 0.5, "2.0", 20]
SEEDS = range(60)


class Draw:
    """A random batch and random options, from one seed."""

    def __init__(self, seed, *, device="cpu"):
        self.random, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        B, T = self.random.choice([(1, 1), (1, 7), (4, 1), (3, 9), (8, 33), (16, 65)])
        scale = self.random.choice([1e-3, 0.05, 0.5, 3.0, 15.0])
        self.train = -torch.rand(B, T, generator=generator, dtype=torch.float64) * 3
        self.rollout = self.train + torch.randn(B, T, generator=generator, dtype=torch.float64) * scale
        self.mask = torch.rand(B, T, generator=generator) < self.random.choice([0.3, 0.8, 1.1])
        self.mask[:: self.random.choice([3, 100])] &= self.random.random() < 0.5
        self.mask[-1, 0] = True
        self.mask = self.mask.to(self.random.choice([torch.bool, torch.int64, torch.float32, torch.float64]))
        self.current = self.train + torch.randn(B, T, generator=generator, dtype=torch.float64) * 0.3
        self.advantages = torch.randn(B, T, generator=generator, dtype=torch.float64)

    def weight_options(self):
        return {
            "rollout_is": self.random.choice(["token", "sequence"]),
            "rollout_is_threshold": self.random.choice([1.0, 2.0, 10, "3.5", "0.5_5.0", "0.001_1000"]),
            "rollout_is_batch_normalize": self.random.random() < 0.4,
        }

    def rejection_options(self):
        names = self.random.sample(sorted(theirs.SUPPORTED_ROLLOUT_RS_OPTIONS), self.random.choice([1, 1, 2, 4]))
        bounds = [str(self.random.choice(K1_BANDS if name.endswith("k1") else UPPER_BOUNDS)) for name in names]
        return {"rollout_rs": ",".join(names), "rollout_rs_threshold": ",".join(bounds)}

    def options(self):
        weights = self.weight_options() if self.random.random() < 0.7 else {}
        return weights | (self.rejection_options() if self.random.random() < 0.7 else {})


@pytest.mark.skipif(version("verl") != "0.9.1" or "site-packages" not in theirs.__file__, reason="numbers are of 0.9.1")
def test_the_recorded_numbers_are_of_the_installed_files():
    page = (Path(__file__).parents[1] / "golden" / "README.md").read_text(encoding="utf-8")
    for file in (theirs.__file__, core_algos.__file__, algorithm.__file__):
        name, digest = Path(file).name, hashlib.sha256(Path(file).read_bytes()).hexdigest()
        assert re.search(rf"0\.9\.1.*{re.escape(name)}.*{digest}", page), f"{name} has sha256 {digest}"


NAMES = [name for name in ours.__all__ if hasattr(theirs, name) or hasattr(core_algos, name)]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("compute", "apply", "agg"))])
def test_signatures_are_those_of_verl_with_keywords_behind_them(name):
    """`compute_policy_loss` is wrapped in verl by a decorator that keeps its signature."""
    their_function = getattr(theirs, name, None) or getattr(core_algos, name)
    expected = [(p.name, p.default) for p in inspect.signature(their_function).parameters.values()]
    actual = inspect.signature(getattr(ours, name)).parameters.values()
    assert [(p.name, p.default) for p in actual if p.kind is not p.KEYWORD_ONLY] == expected
    assert {p.name for p in actual if p.kind is p.KEYWORD_ONLY} <= {"verl_parity"}


def test_the_options_and_presets_of_verl_are_all_here():
    theirs_config, ours_config = algorithm.RolloutCorrectionConfig, ours.RolloutCorrectionConfig
    assert theirs.SUPPORTED_ROLLOUT_RS_OPTIONS == ours.SUPPORTED_ROLLOUT_RS_OPTIONS
    presets = [name for name, value in vars(theirs_config).items() if isinstance(value, classmethod)]
    assert len(presets) == 19
    for name in presets:
        their_preset = getattr(theirs_config, name)()
        assert {field: ours_config.read(their_preset)[field] for field in their_preset if field != "_target_"} == {
            field: getattr(ours_config, name)()[field] for field in their_preset if field != "_target_"
        }


def test_a_batch_of_verl_is_corrected_in_place_by_a_configuration_of_verl():
    draw = Draw(3)
    tensors = {"old_log_probs": draw.train, "rollout_log_probs": draw.rollout, "response_mask": draw.mask}
    config = algorithm.RolloutCorrectionConfig.decoupled_k3_rs_seq_tis()
    results = []
    for module, options in ((theirs, {}), (ours, {"verl_parity": True})):
        batch = DataProto.from_dict(tensors={name: tensor.clone() for name, tensor in tensors.items()})
        results.append(module.compute_rollout_correction_and_add_to_batch(batch, config, **options))
    (their_batch, their_metrics), (our_batch, our_metrics) = results
    for name in ("response_mask", "rollout_is_weights"):
        torch.testing.assert_close(our_batch.batch[name], their_batch.batch[name], rtol=1e-6, atol=1e-12)
    assert_metrics(our_metrics, their_metrics, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_corrections_equal_those_of_verl(seed):
    draw = Draw(seed)
    options = draw.options()
    inputs = draw.train, draw.rollout, draw.mask
    actual = ours.compute_rollout_correction_and_rejection_mask(*inputs, **options, verl_parity=True)
    try:
        expected = theirs.compute_rollout_correction_and_rejection_mask(*inputs, **options)
    except ZeroDivisionError:  # every weight is 0, and verl divides by their sum
        assert actual[2]["rollout_corr/rollout_is_eff_sample_size"] == 0
        return
    torch.testing.assert_close(actual[1], expected[1])
    assert_metrics(actual[2], expected[2], rtol=1e-6, atol=1e-7)
    if expected[0] is None:
        assert actual[0] is None
    else:
        assert type(actual[0]) is type(expected[0])
        key = "rollout_is_weights"
        torch.testing.assert_close(actual[0].batch[key], expected[0].batch[key], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_the_single_functions_equal_those_of_verl(seed):
    draw = Draw(seed)
    log_ratio, weights, rejection = draw.train - draw.rollout, draw.weight_options(), draw.rejection_options()
    weights["rollout_is_threshold"] = 2.5
    for name, options in (
        ("compute_rollout_correction_weights", weights),
        ("compute_rollout_rejection_mask", rejection),
    ):
        expected = getattr(theirs, name)(log_ratio, draw.mask, **options)
        actual = getattr(ours, name)(log_ratio, draw.mask, **options, verl_parity=True)
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=1e-12)
        assert_metrics(actual[1], expected[1], rtol=1e-6, atol=1e-7)
    for rollout in (draw.rollout, None):
        expected = theirs.compute_offpolicy_metrics(draw.train, rollout, draw.mask)
        actual = ours.compute_offpolicy_metrics(draw.train, rollout, draw.mask, verl_parity=True)
        assert_metrics(actual, expected, rtol=1e-6, atol=1e-7)
    expected = theirs.compute_rollout_corr_metrics_from_logprobs(draw.train, draw.rollout, draw.mask)
    actual = ours.compute_rollout_corr_metrics_from_logprobs(draw.train, draw.rollout, draw.mask, verl_parity=True)
    assert_metrics(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS[:20])
def test_metrics_of_given_weights_equal_those_of_verl(seed):
    draw = Draw(seed)
    valid = draw.mask != 0
    log_ratio = draw.train - draw.rollout
    raw = log_ratio.clamp(-20, 20).exp() * valid
    arguments = (raw.clamp(max=2.0), raw, log_ratio, draw.mask, "token", 2.0)
    expected = theirs.compute_is_metrics(*arguments)
    assert_metrics(ours.compute_is_metrics(*arguments, verl_parity=True), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("seed", SEEDS[:12])
def test_losses_and_gradients_equal_those_of_verl(seed, mode):
    draw = Draw(seed)
    config = SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=draw.random.choice([None, 0.1]),
        clip_ratio_high=draw.random.choice([None, 0.3]),
        get={"clip_ratio_c": 3.0}.get,
        global_batch_info=draw.random.choice(
            [{}, {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 9, "loss_scale_factor": None}]
        ),
        policy_loss={
            "rollout_correction": draw.weight_options()
            | draw.rejection_options()
            | {"rollout_is_threshold": 2.0, "loss_type": draw.random.choice(["ppo_clip", "reinforce"])}
        },
    )
    for name, extra in (("vanilla", {}), ("bypass_mode", {}), ("reinforce", {})):
        extra = {"verl_parity": True} if name != "reinforce" else {}
        results = []
        for module, keywords in ((core_algos, {}), (ours, extra)):
            log_prob = draw.current.clone().requires_grad_()
            function = getattr(module, f"compute_policy_loss_{name}")
            arguments = (draw.rollout, log_prob, draw.advantages, draw.mask, mode, config)
            loss, metrics = function(*arguments, **keywords)
            loss.backward()
            results.append((loss.detach(), log_prob.grad, metrics))
        (loss, gradient, metrics), (our_loss, our_gradient, our_metrics) = results
        if loss.isnan():  # everything is rejected, which verl divides by
            assert our_loss == 0
            assert (our_gradient == 0).all()
            continue
        torch.testing.assert_close(our_loss, loss, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(our_gradient, gradient, rtol=1e-6, atol=1e-9)
        assert_metrics(our_metrics, metrics, rtol=1e-6, atol=1e-7)
