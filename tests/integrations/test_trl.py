"""The adapter against TRL's recorded numbers, with a fake trainer. test_trl_real.py runs TRL itself."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl_stand_in import (
    OPTIONS,
    RECORDED,
    StandInRLOOTrainer,
    StandInTrainer,
    current_log_prob,
    recorded_batch,
    tensor,
    trl_loss,
)

from rollcorr.config import IncompatibleSamplingError, InertOptionWarning, RolloutCorrectionConfig, SamplingSpec
from rollcorr.config.correction_options import KERNEL_SAFETY_BOUND
from rollcorr.correction import correct
from rollcorr.engines import Rollout, TokenBatch
from rollcorr.integrations.trl import RolloutCorrectionMixin, attach, config_from_trl
from rollcorr.integrations.trl.sampling_backends import EngineGeneration

CASES = [(case, loss_type) for case in RECORDED["cases"] for loss_type in case["losses"]]
NAMES = [f"{case['mode']}-{case['lower']}-{case['upper']}-{loss_type}" for case, loss_type in CASES]
PLAIN_IS = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=None)
REJECTING = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.5"}


def options_of(case):
    return {name: case[name] for name in ("mode", "upper", "lower")}


def corrected(loss_type="grpo", config=None, *, batch=None, **options):
    return attach(StandInTrainer(batch, loss_type, **options), config)._generate_and_score_completions([])


def assert_trl(batch, case, loss_type, *, multiplies):
    log_prob = current_log_prob()
    loss = trl_loss(loss_type, batch, log_prob, multiplies=multiplies)
    loss.backward()
    expected = case["losses"][loss_type]
    torch.testing.assert_close(loss.item(), expected["loss"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(log_prob.grad, tensor(expected["gradient"]), rtol=1e-6, atol=1e-6)


# --- TRL's recorded numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "loss_type"), CASES, ids=NAMES)
def test_the_stand_in_has_the_losses_of_trl(case, loss_type):
    batch = recorded_batch() | {"importance_sampling_ratio": tensor(case["ratio"])}
    assert_trl(batch, case, loss_type, multiplies=True)


@pytest.mark.parametrize(("case", "loss_type"), CASES, ids=NAMES)
def test_loss_and_gradient_are_those_of_trl(case, loss_type):
    assert_trl(corrected(loss_type, **options_of(case)), case, loss_type, multiplies=True)


@pytest.mark.parametrize(("case", "loss_type"), CASES, ids=NAMES)
def test_without_vllm_they_are_those_that_trl_has_with_it(case, loss_type):
    """The case of `rollout_func`: TRL does not multiply, and has no old log-probs if the policy has not changed."""
    batch = corrected(loss_type, batch=recorded_batch(old=False), use_vllm=False, **options_of(case))
    assert_trl(batch, case, loss_type, multiplies=False)


def test_the_recording_names_its_source():
    assert RECORDED["trl"] == "1.16.0"
    assert all(len(digest) == 64 for digest in RECORDED["sha256"].values())
    assert len(CASES) == 4 * 3 * 7 + 2 * 3  # VESPO supports token weights only


# --- Options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "upper", "lower", "level", "threshold", "floor"),
    [
        ("token_truncate", 3.0, None, "token", 3.0, None),
        ("token_truncate", 2, 0.5, "token", 2.0, 0.5),
        ("sequence_truncate", None, 0.5, "sequence", None, 0.5),
        ("sequence_truncate", 2.0, 0.0, "sequence", 2.0, None),
        ("token_mask", 2.0, 0.5, "token", "0.5_2.0", None),
        ("sequence_mask", 3.0, None, "sequence", "0_3.0", None),
        ("sequence_mask", None, 0.5, "sequence", "0.5_inf", None),
        ("token_mask", None, None, "token", None, None),
    ],
)
def test_options_of_trl_become_a_configuration(mode, upper, lower, level, threshold, floor):
    config = config_from_trl(StandInTrainer(mode=mode, upper=upper, lower=lower).args)
    assert (config.rollout_is, config.rollout_is_threshold, config.rollout_is_floor) == (level, threshold, floor)
    assert config.nonfinite == "neutral"
    assert config.weights_reach_loss
    assert not config.criteria


def test_the_compiled_kernel_takes_these_configurations():
    assert config_from_trl(StandInTrainer().args).safety_bound == KERNEL_SAFETY_BOUND


def test_the_older_name_of_the_cap_is_read():
    args = StandInTrainer(mode="token_truncate").args
    del args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    args.vllm_importance_sampling_cap = 5.0
    assert config_from_trl(args).rollout_is_threshold == 5.0


def test_where_trl_corrects_nothing_this_measures():
    for args in (StandInTrainer(correction=False).args, SimpleNamespace()):
        config = config_from_trl(args)
        assert config.rollout_is == "token"
        assert not config.weights_reach_loss


def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="sequence_mask; got 'tokens'"):
        attach(StandInTrainer(mode="tokens"))


@pytest.mark.parametrize(
    ("loss_type", "config", "message"),
    [
        ("grpo", {"bypass_mode": True}, "set bypass_mode=False"),
        ("grpo", {"rollout_is": "token", "normalizer": "weights"}, "got 'grpo'. Set normalizer='kept'"),
        ("vespo", {"rollout_is": "sequence"}, "rollout_is='sequence'. Set rollout_is='token'"),
        (None, {"rollout_is": "token"}, "set rollout_is='sequence' or 'geometric'"),
        (None, {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, "rollout_rs='token_k1'"),
    ],
)
def test_what_a_loss_cannot_do_is_refused_and_leaves_the_trainer_as_it_was(loss_type, config, message):
    trainer = StandInRLOOTrainer() if loss_type is None else StandInTrainer(loss_type=loss_type)
    before = type(trainer)
    with pytest.raises(ValueError, match=message):
        attach(trainer, RolloutCorrectionConfig(**config))
    assert type(trainer) is before


def test_something_else_is_no_trainer():
    with pytest.raises(TypeError, match="attach takes a GRPOTrainer, RLOOTrainer or AsyncGRPOTrainer of TRL; list has"):
        attach([])


# --- The batch --------------------------------------------------------------------------------------------------------


def kept_tokens(batch):
    """By hand: ratios in the band, and a log-prob that is there."""
    ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()
    return (batch["completion_mask"] == 1) & (ratio >= 0.7) & (ratio <= 1.5)


def test_rejected_tokens_leave_the_mask_and_the_count():
    before = recorded_batch()
    batch, kept = corrected("dapo", REJECTING), kept_tokens(before)
    assert torch.equal(batch["tool_mask"], kept.to(before["completion_mask"].dtype))
    assert batch["num_items_in_batch"].dtype == before["num_items_in_batch"].dtype
    assert batch["num_items_in_batch"] == kept.sum() < before["num_items_in_batch"]
    torch.testing.assert_close(batch["completion_mask"], before["completion_mask"])  # attention reads it


def test_a_mask_of_tools_stays_in_force():
    before = recorded_batch()
    before["tool_mask"] = torch.ones_like(before["completion_mask"])
    before["tool_mask"][:, 0] = 0
    batch = corrected("dapo", REJECTING, batch=before)
    assert torch.equal(batch["tool_mask"] != 0, kept_tokens(before) & (before["tool_mask"] != 0))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "vespo", "dr_grpo"])
def test_the_original_count_keeps_its_divisor_and_its_gradient_loses_the_rejected_tokens(loss_type):
    before, log_prob = recorded_batch(), current_log_prob()
    batch = corrected(loss_type, REJECTING | {"normalizer": "original"})
    trl_loss(loss_type, batch, log_prob, multiplies=True).backward()
    rejected = (before["completion_mask"] == 1) & ~kept_tokens(before)
    assert rejected.any()
    assert not log_prob.grad[rejected].any()

    # A loss over the kept tokens, with the original divisor.
    kept_batch, other = corrected(loss_type, REJECTING), current_log_prob()
    trl_loss(loss_type, kept_batch, other, multiplies=True).backward()
    tokens, kept = before["completion_mask"] == 1, kept_tokens(before)
    if loss_type == "grpo":
        scale = (kept.sum(1) / tokens.sum(1))[:, None]
    else:
        scale = 1.0 if loss_type == "dr_grpo" else kept.sum() / tokens.sum()
    torch.testing.assert_close(log_prob.grad, other.grad * scale, rtol=1e-5, atol=1e-7)


def test_the_loss_can_be_divided_by_the_weights():
    before = recorded_batch()
    batch = corrected("dapo", REJECTING | {"normalizer": "weights"})
    expected = batch["importance_sampling_ratio"][kept_tokens(before)].sum()
    torch.testing.assert_close(batch["num_items_in_batch"], expected)


def test_vespo_does_not_read_the_weight_of_a_token_that_left():
    batch, kept = corrected("vespo", REJECTING), kept_tokens(recorded_batch())
    assert (batch["importance_sampling_ratio"][~kept] == 1).all()
    assert (batch["importance_sampling_ratio"][kept] != 1).any()


@pytest.mark.parametrize("config", ["measure", "disabled", None])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "vespo"])
@pytest.mark.parametrize("old", [True, False])
def test_measuring_changes_nothing_in_the_batch(config, loss_type, old):
    """TRL's tensors themselves, though a token has no log-prob; TRL's options select "None"."""
    before = recorded_batch(old=old) | {"importance_sampling_ratio": torch.full((8, 1), 2.0)}
    trainer = StandInTrainer(before, loss_type, use_vllm=old, correction=config is not None)
    batch = attach(trainer, config)._generate_and_score_completions([])
    assert batch.keys() == before.keys()
    assert all(value is before[name] for name, value in batch.items())
    assert trainer._correction_statistics["train"].metrics()["rollout_corr/nonfinite_count"] == 1


@pytest.mark.parametrize("config", ["measure", "tis"])
def test_integers_are_log_probs_too(config):
    """As the zeros of a greedy sampler are."""
    batch = recorded_batch()
    zeros = torch.zeros_like(batch["sampling_per_token_logps"])
    found, expected = (
        corrected("dapo", config, batch=batch | {"sampling_per_token_logps": given}) for given in (zeros.long(), zeros)
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, check_dtype=name != "sampling_per_token_logps")


def test_measuring_changes_no_advantage_of_rloo():
    before = recorded_batch()["advantages"]
    for config in ("measure", "disabled"):
        assert torch.equal(rloo(config)[1]["advantages"], before)


def test_measuring_draws_no_random_number():
    trainer = attach(StandInTrainer(recorded_batch(old=False), use_vllm=False), "measure")
    score = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = lambda *given, **inputs: (torch.rand(1), score(*given, **inputs))[1]
    before = torch.random.get_rng_state()
    trainer._generate_and_score_completions([])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_option_disables_the_correction_of_trl():
    before = recorded_batch() | {"importance_sampling_ratio": torch.full((8, 1), 2.0)}
    for loss_type in ("grpo", "vespo"):
        trainer = attach(StandInTrainer(before, loss_type), "measure", disable_trl_correction=True)
        batch = attach(trainer)._generate_and_score_completions([])  # a second call keeps it
        assert loss_type == "vespo" or (batch.pop("importance_sampling_ratio") == 1).all()
        assert batch.keys() == before.keys() - {"importance_sampling_ratio"}
        assert all(value is before[name] for name, value in batch.items())


@pytest.mark.parametrize(
    ("trainer", "config", "options", "state"),
    [
        (StandInTrainer(), "tis", {}, "sequence_mask, replaced"),
        (StandInTrainer(), "measure", {}, "sequence_mask, stays"),
        (StandInTrainer(mode="token_mask"), "measure", {"disable_trl_correction": True}, "token_mask, disabled"),
        (StandInTrainer(correction=False), None, {}, "none"),
        (StandInRLOOTrainer(), "measure", {}, "none"),
    ],
)
def test_the_line_states_the_correction_of_trl(trainer, config, options, state, caplog):
    attach(trainer, config, **options)
    assert caplog.messages[0].endswith(f"; TRL's own correction: {state}")


def test_old_log_probs_come_from_the_forward_pass_of_the_trainer_where_trl_skipped_it():
    batch = recorded_batch(old=False) | {"pixel_values": torch.ones(8, 3)}
    trainer = attach(StandInTrainer(batch, use_vllm=False), PLAIN_IS)
    result = trainer._generate_and_score_completions([])
    [(ids, mask, width, rows, inputs)] = trainer.forward_passes
    assert (ids, mask, width, rows) == ((8, 9), (8, 9), 7, 4)
    assert list(inputs) == ["pixel_values"]
    assert torch.equal(result["old_per_token_logps"], recorded_batch()["old_per_token_logps"])

    trainer.batch = recorded_batch()
    trainer._generate_and_score_completions([])
    assert len(trainer.forward_passes) == 1


# --- RLOO -------------------------------------------------------------------------------------------------------------


class Sampler:
    """vLLM as RLOOTrainer sets it up: it returns no log-probs by default."""

    def __init__(self):
        self.logprobs, self.syncs = None, 0

    def sync_weights(self):
        self.syncs += 1

    def generate(self, prompts, images, num_generations, profiler=None):
        batch = recorded_batch()
        rows = zip(batch["sampling_per_token_logps"], batch["completion_mask"] != 0, strict=True)
        lists = [[[None if value != value else value] for value in row[mask].tolist()] for row, mask in rows]
        return prompts, None, lists if self.logprobs == 0 else None, None


def rloo(config):
    trainer = attach(StandInRLOOTrainer(Sampler()), config)
    return trainer, trainer._generate_and_score_completions([])


def test_rloo_gets_one_weight_for_each_sequence():
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=1.5, nonfinite="neutral")
    trainer, batch = rloo(config)
    before = recorded_batch()
    log_ratio = (before["old_per_token_logps"] - before["sampling_per_token_logps"]).nan_to_num(0.0)
    weights = (log_ratio * before["completion_mask"]).sum(1).exp().clamp(max=1.5)
    assert weights.unique().numel() > 2
    torch.testing.assert_close(batch["advantages"], before["advantages"] * weights)
    assert len(trainer.forward_passes) == 1  # TRL's own
    trainer.vllm_generation.sync_weights()
    assert trainer.vllm_generation.syncs == 1


def test_a_sequence_that_rloo_rejects_has_no_advantage():
    """One token has no log-prob, and a token cannot leave RLOO's loss."""
    trainer, batch = rloo(RolloutCorrectionConfig(rollout_rs="seq_max_k2", rollout_rs_threshold=0.3))
    before = recorded_batch()
    log_ratio = before["old_per_token_logps"] - before["sampling_per_token_logps"]
    inside = (log_ratio**2 / 2 <= 0.3) | (before["completion_mask"] == 0)
    kept = inside.all(dim=1)
    assert not kept[1]  # NaN
    assert 0 < kept.sum() < 8
    torch.testing.assert_close(batch["advantages"], before["advantages"] * kept)
    assert trainer._correction_config.nonfinite == "reject_sequence"


# --- A loss that does not read the correction ------------------------------------------------------------------------


class OmittingTrainer(StandInTrainer):
    """Its loss reads a batch in which one field is uncorrected."""

    omitted = None

    def compute_loss(self, model, inputs):
        without = {
            None: {},
            "weight": {"importance_sampling_ratio": torch.ones_like(inputs["completion_mask"])},
            "weight in advantages": {"advantages": inputs["advantages"].sign()},
            "square": {"importance_sampling_ratio": inputs.get("importance_sampling_ratio", torch.ones(1)) ** 2},
            "mask": {"tool_mask": torch.ones_like(inputs["completion_mask"])},
            "count": {"num_items_in_batch": inputs["completion_mask"].sum()},
        }[self.omitted]
        return super().compute_loss(model, {**inputs, **without})


ONLY_REJECTING = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.5"}
BY_WEIGHTS = {"rollout_is": "token", "normalizer": "weights", "nonfinite": "neutral"}
OMISSIONS = [
    ("weight", "dapo", "tis", {}, "importance_sampling_ratio"),
    ("weight", "vespo", "tis", {}, "importance_sampling_ratio"),
    ("weight", "grpo", ONLY_REJECTING, {}, None),
    ("weight", "grpo", ONLY_REJECTING | {"normalizer": "original"}, {}, "importance_sampling_ratio"),
    ("square", "bnpo", "tis", {}, "importance_sampling_ratio"),
    ("weight in advantages", "luspo", "tis", {"use_vllm": False}, "advantages"),
    ("mask", "grpo", REJECTING, {}, "tool_mask"),
    ("mask", "dapo", REJECTING, {}, "tool_mask"),
    ("mask", "grpo", REJECTING | {"normalizer": "original"}, {}, None),
    ("count", "dapo", REJECTING, {}, "num_items_in_batch"),
    ("count", "cispo", BY_WEIGHTS, {}, "num_items_in_batch"),
    ("count", "grpo", REJECTING, {}, None),
]


@pytest.mark.parametrize(("omitted", "loss_type", "config", "options", "unread"), OMISSIONS)
def test_a_loss_that_omits_a_part_is_refused(omitted, loss_type, config, options, unread, caplog):
    """No part is checked that this configuration and loss do without; the unchanged subclass passes."""

    class Mine(OmittingTrainer):
        pass

    attach(Mine(loss_type=loss_type, **options), config)._generate_and_score_completions([])
    Mine.omitted = omitted
    trainer = attach(Mine(loss_type=loss_type, **options), config)
    if unread is None:
        trainer._generate_and_score_completions([])
    else:
        with pytest.raises(ValueError, match=f"the loss of Mine .*does not apply '{unread}'"):
            trainer._generate_and_score_completions([])
    assert "could not check" not in caplog.text


@pytest.mark.parametrize("config", ["measure", "disabled"])
def test_measuring_needs_no_part_in_the_loss(config):
    trainer = attach(OmittingTrainer(), config)
    trainer.compute_loss = None
    trainer._generate_and_score_completions([])


def test_rloo_that_omits_the_weights_is_refused():
    class Mine(StandInRLOOTrainer):
        def compute_loss(self, model, inputs):
            return super().compute_loss(model, inputs | {"advantages": inputs["advantages"].sign()})

    for trainer_class, config in ((StandInRLOOTrainer, "seq_tis"), (Mine, "measure")):
        attach(trainer_class(Sampler()), config)._generate_and_score_completions([])
    with pytest.raises(ValueError, match="'advantages'"):
        attach(Mine(Sampler()), "seq_tis")._generate_and_score_completions([])


def test_the_check_runs_once_and_leaves_no_trace():
    calls = []

    class Mine(StandInTrainer):
        def compute_loss(self, model, inputs):
            calls.append(torch.rand(1))
            return super().compute_loss(model, inputs)

    trainer = attach(Mine(loss_type="dapo"), "tis")
    entropies = trainer._metrics["train"]["entropy"]
    before = torch.random.get_rng_state(), dict(vars(trainer))
    trainer._generate_and_score_completions([])
    made = len(calls)
    assert made > 0
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert trainer._metrics["train"]["entropy"] is entropies == []
    assert trainer.forward_passes == []
    assert vars(trainer).keys() == before[1].keys()
    assert all(weight.grad is None for weight in trainer.model.parameters())
    trainer._generate_and_score_completions([])
    assert len(calls) == made


class StatefulTrainer(StandInTrainer):
    """Its loss changes everything in reach, in one way for each of its names."""

    changes = ""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.model = torch.nn.BatchNorm1d(1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        self.model(torch.ones(2, 1)).sum().backward()
        self.baseline, self.seen, self.of_rows, self.names = torch.zeros(1), [], {"a": [1.0]}, {"a"}

    def compute_loss(self, model, inputs):
        {
            "model": lambda: model(inputs["advantages"].unsqueeze(1)),
            "python": random.random,
            "numpy": np.random.rand,
            "torch": lambda: torch.rand(1),
            "list": lambda: self.seen.append(1),
            "nested list": lambda: self.of_rows["a"].append(1.0),
            "set": lambda: self.names.add("b"),
            "tensor": lambda: self.baseline.add_(1),
            "log": lambda: self.log({"mine": 1.0}),
            "optimizer": lambda: self.optimizer.step(),
            "batch": lambda: inputs["num_images"].append(1),
        }[self.changes]()
        return super().compute_loss(model, inputs)

    def snapshot(self):
        numbers = (random.getstate(), repr(np.random.get_state()), torch.random.get_rng_state().tolist())  # noqa: NPY002
        tensors = [value.tolist() for value in (*self.model.state_dict().values(), self.baseline)]
        gradients = [weight.grad.tolist() for weight in self.model.parameters()]
        held = (self.seen, self.of_rows, self.names, self._metrics, self.logged, self.batch["num_images"])
        return numbers, tensors, gradients, repr(held), repr(self.optimizer.state_dict())


@pytest.mark.parametrize(
    "changes",
    ["model", "python", "numpy", "torch", "list", "nested list", "set", "tensor", "log", "optimizer", "batch"],
)
def test_the_check_undoes_what_a_loss_changes(changes):
    trainer = attach(StatefulTrainer(recorded_batch() | {"num_images": [1]}, "dapo"), "tis")
    trainer.changes = changes
    before = trainer.snapshot()
    trainer._generate_and_score_completions([])
    assert trainer.snapshot() == before


def test_a_loss_with_state_is_checked_like_any_other(caplog):
    """Each call of the loss starts from the same state, so a schedule of its own looks like no omission."""

    class Annealed(StandInTrainer):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.scale = torch.ones(1)

        def compute_loss(self, model, inputs):
            return super().compute_loss(model, inputs) * self.scale.mul_(0.9) * random.random()

    attach(Annealed(loss_type="dapo"), REJECTING)._generate_and_score_completions([])
    assert "could not check" not in caplog.text


VESPO_OPTIONS = [(0.6, 3.0, 3.0, 2.0), (2.0, 3.0, 0.5, 2.0), (0.0, 3.0, 0.0, 2.0), (0.0, 1e-4, 0.0, 1e-4)]


@pytest.mark.parametrize("options", VESPO_OPTIONS)
def test_vespo_is_accepted_with_any_of_its_options(options, monkeypatch, caplog):
    for name, value in zip(("k_pos", "lambda_pos", "k_neg", "lambda_neg"), options, strict=True):
        monkeypatch.setattr(OPTIONS, f"vespo_{name}", value)
    for config in ("tis", REJECTING):
        corrected("vespo", config)
    assert "could not check" not in caplog.text


def test_a_loss_that_cannot_be_probed_is_named(caplog):
    changing = iter(range(1, 100))
    losses = {
        "does not compute log-probs by": lambda trainer, inputs: inputs["advantages"].mean(),
        "runs a model": lambda trainer, inputs: trainer.model(inputs["advantages"].unsqueeze(1)).mean(),
        "KeyError('of my own')": lambda trainer, inputs: inputs["of my own"],
        "changes between two calls": lambda trainer, inputs: next(changing),
        "is not finite": lambda trainer, inputs: torch.nan,
        "ValueError('its gradient is not finite')": lambda trainer, inputs: (
            inputs["importance_sampling_ratio"].min() ** -1
        ),
    }
    for reason, factor in losses.items():

        class Mine(StandInTrainer):
            def compute_loss(self, model, inputs, reads=reason != "does not compute log-probs by", factor=factor):
                return factor(self, inputs) * (super().compute_loss(model, inputs) if reads else 1.0)

        trainer = attach(Mine(loss_type="dapo"), "tis")
        caplog.clear()
        trainer._generate_and_score_completions([])
        assert "could not check that the loss of Mine" in caplog.messages[0]
        assert reason in caplog.messages[0]


# --- Output for the user ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "config", "parts"),
    [
        (
            StandInTrainer(),
            None,
            ["TRL's vllm_importance_sampling_* options: sequence weights inside 0_3.0; missing"],
        ),
        (
            StandInTrainer(lower=0.5, mode="token_truncate"),
            None,
            ["token weights up to 3.0, at least 0.5; missing log-probs: neutral"],
        ),
        (
            StandInTrainer(loss_type="dapo"),
            REJECTING,
            ["its own configuration", "rejection by token_k1", "kept tokens"],
        ),
        (
            StandInRLOOTrainer(Sampler()),
            None,
            ["StandInRLOOTrainer (rloo)", "by default", "sampler: vLLM", "by all sequences"],
        ),
    ],
)
def test_one_line_says_what_is_active(trainer, config, parts, caplog):
    attach(trainer, config)
    [record] = caplog.records
    assert all(part in record.getMessage() for part in parts), record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    ("trainer", "config", "name", "what"),
    [
        (
            StandInTrainer(use_vllm=False),
            "tis",
            "StandInTrainer (grpo)",
            ", but corrects nothing: TRL's own sampler reports no log-probs; set use_vllm=True, or "
            "give attach an engine. Configuration: token weights up to 2.0;",
        ),
        (
            StandInTrainer(),
            "measure",
            "StandInTrainer (grpo)",
            " and measures only, as configured. Configuration:",
        ),
        (
            StandInRLOOTrainer(Sampler()),
            None,
            "StandInRLOOTrainer (rloo)",
            " and measures only, by default, as RLOOTrainer has no options for it. Configuration:",
        ),
        (
            StandInTrainer(correction=False),
            None,
            "StandInTrainer (grpo)",
            " and measures only, by TRL's vllm_importance_sampling_* options. Configuration:",
        ),
    ],
)
def test_the_line_says_when_nothing_is_corrected_and_why(trainer, config, name, what, caplog):
    """A user who only measures gets no failure message."""
    attach(trainer, config)
    assert caplog.messages[0].startswith(f"rollcorr is attached to {name}{what}")


def test_the_line_names_the_class_of_the_user(caplog):
    class Mine(RolloutCorrectionMixin, StandInTrainer):
        pass

    Mine(rollout_correction="tis")
    attach(attach(StandInTrainer(), "tis"), "icepop")
    starts = [message.partition(" by ")[0] for message in caplog.messages]
    assert starts == ["rollcorr corrects Mine (grpo)"] + 2 * ["rollcorr corrects StandInTrainer (grpo)"]


def test_one_line_names_what_is_active(caplog):
    class GRPOTrainer(StandInTrainer):
        pass

    attach(GRPOTrainer(loss_type="dapo"), "decoupled_k3_rs_token_tis")
    assert caplog.messages[0] == (
        "rollcorr corrects GRPOTrainer (dapo) by its own configuration: token weights up to 2.0; rejection by"
        " seq_mean_k3 beyond 0.01; missing log-probs: reject_token; sampler: vLLM; the loss is divided by the"
        " kept tokens; TRL's own correction: sequence_mask, replaced"
    )


def test_metrics_of_all_batches_since_the_last_log_are_merged():
    trainer = attach(StandInTrainer(), PLAIN_IS)
    second = recorded_batch()
    second["sampling_per_token_logps"] = second["sampling_per_token_logps"] - 0.2
    trainer._generate_and_score_completions([])
    trainer.batch = second
    trainer._generate_and_score_completions([])
    trainer.log({"loss": 1.0})

    both = [torch.cat([recorded_batch()[name], second[name]]) for name in BATCH]
    assert trainer.logged[0].pop("loss") == 1.0
    assert trainer.logged[0] == pytest.approx(correct(*both, PLAIN_IS).metrics())
    trainer.log({"loss": 2.0})
    assert trainer.logged[1] == {"loss": 2.0}


BATCH = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")


def test_metrics_of_an_evaluation_have_names_of_their_own():
    trainer = attach(StandInTrainer(), PLAIN_IS)
    trainer._generate_and_score_completions([])
    trainer.model.eval()
    trainer._generate_and_score_completions([])
    trainer.log({})
    assert trainer.logged[0]
    assert all(name.startswith("eval_rollout_corr/") for name in trainer.logged[0])
    trainer.model.train()
    trainer.log({})
    assert "rollout_corr/kl" in trainer.logged[1]


def test_a_sampler_without_log_probs_is_named_and_changes_nothing():
    batch = recorded_batch(old=False)
    del batch["sampling_per_token_logps"]
    with pytest.warns(InertOptionWarning, match="'logprobs' from rollout_func"):
        assert corrected(config="tis", batch=batch, use_vllm=False).keys() == batch.keys()
    with pytest.warns(InertOptionWarning, match="reported no log-probs"):
        attach(StandInRLOOTrainer())._generate_and_score_completions([])


def test_attaching_again_replaces_the_configuration():
    trainer = attach(attach(StandInTrainer()), "measure")
    assert type(trainer).__name__ == "CorrectedStandInTrainer"
    assert type(trainer).__mro__.count(RolloutCorrectionMixin) == 1
    assert not trainer._correction_config.weights_reach_loss


def test_the_mixin_takes_its_own_arguments_and_passes_the_others_on():
    class Trainer(RolloutCorrectionMixin, StandInTrainer):
        pass

    trainer = Trainer(loss_type="dapo", rollout_correction="tis")
    assert trainer.loss_type == "dapo"
    assert trainer._correction_config == RolloutCorrectionConfig.preset("tis")


# --- Engines ----------------------------------------------------------------------------------------------------------


class FakeEngine:
    """An engine that returns the length of each prompt, and records its arguments."""

    row_seeds = True

    def __init__(self, **sampling):
        self.sampling, self.updates, self.seeds = SamplingSpec(**sampling), [], []

    def update_weights(self, model, *, version):
        self.updates.append((version, any(module.training for module in model.modules())))

    def generate(self, prompts, *, seed, first_row):
        self.seeds.append((seed, first_row))
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        tokens = TokenBatch(mask.long(), mask, 5 * mask.long(), mask)
        return Rollout(tokens=tokens, rollout_log_prob=-0.5 * mask.float(), sampling=self.sampling)


def test_an_engine_answers_as_vllm_does():
    trainer, engine = StandInTrainer(use_vllm=False), FakeEngine()
    attach(trainer, engine=engine)
    trainer.vllm_generation.sync_weights()
    assert trainer.use_vllm
    assert engine.updates == [(3, False)]
    assert trainer.model.training

    answers = [trainer.vllm_generation.generate([[1, 1], [1]], None, 2, profiler=None) for _ in range(2)]
    assert answers[0] == ([[1, 1], [1]], [[5, 5], [5]], [[[-0.5], [-0.5]], [[-0.5]]], [[[5], [5]], [[5]]])
    assert engine.seeds[0] != engine.seeds[1]
    trainer.model.eval()
    trainer.vllm_generation.generate([[1]])
    assert engine.seeds[2] not in engine.seeds[:2]


@pytest.mark.parametrize(
    ("sampling", "temperature", "reason"),
    [
        ({"temperature": 0.7, "logprobs": "processed"}, 1.0, "temperature 0.7, the trainer's at 1"),
        ({"top_p": 0.9, "logprobs": "processed"}, 1.0, "top_p 0.9 kept"),
        ({"temperature": 0.7, "top_k": 8, "min_p": 0.1, "logprobs": "processed"}, 1.0, "top_k 8, min_p 0.1 kept"),
        (
            {"temperature": 0.7, "logprobs": "raw", "engine": "vllm"},
            0.7,
            SamplingSpec(engine="vllm").engine_sampling.processed,
        ),
    ],
)
def test_an_error_names_missing_engine_settings(sampling, temperature, reason):
    trainer = StandInTrainer()
    trainer.temperature = temperature
    with pytest.raises(IncompatibleSamplingError) as caught:
        EngineGeneration(FakeEngine(**sampling), trainer)
    assert reason in str(caught.value)
    assert "To fix it: give the engine SamplingSpec(temperature=trainer.temperature, logprobs=" in str(caught.value)


def test_what_an_engine_cannot_do_for_this_trainer_is_refused():
    with pytest.raises(IncompatibleSamplingError, match="temperature"):
        EngineGeneration(FakeEngine(temperature=0.7, logprobs="processed"), StandInTrainer())
    with pytest.raises(IncompatibleSamplingError, match=r"without top_k.* or keep the truncation, .*actor='replay'"):
        EngineGeneration(FakeEngine(top_p=0.9, logprobs="processed"), StandInTrainer())
    with pytest.raises(ValueError, match=r"supports neither. Sample without top_k, .* or with an engine that records"):
        EngineGeneration(FakeEngine(top_p=0.9, logprobs="processed"), StandInTrainer(), "replay")
    with pytest.raises(ValueError, match="actor='kept_mass' has no effect"):
        attach(StandInTrainer(), engine=FakeEngine(), actor="kept_mass")
    with pytest.raises(ValueError, match="actor='replay' needs engine="):
        attach(StandInTrainer(), actor="replay")
    with pytest.raises(ValueError, match="actor must be"):
        attach(StandInTrainer(), engine=FakeEngine(), actor="recompute")
    with pytest.raises(ValueError, match="text alone"):
        EngineGeneration(FakeEngine(), StandInTrainer()).generate([[1]], [["image"]])
