"""The adapter in TRL's own trainers. `make test-trl` installs TRL; elsewhere recorded numbers of it are compared."""

import math
from functools import partial

import pytest
import torch
import trl_ranks
from faulty_disk import ERRORS, Faults, faulty_disk
from processes import eventually
from training_state import same_state, training_state

from rollcorr import Monitor, RolloutSample, read_rollout_log, read_run
from rollcorr.config import IncompatibleSamplingError, InertOptionWarning, RolloutCorrectionConfig, SamplingSpec
from rollcorr.engines import GenerationSettings, TransformersEngine
from rollcorr.integrations.trl import RolloutCorrectionMixin, attach
from rollcorr.integrations.trl.loss_check import check_loss

pytest.importorskip("trl", reason="TRL is not installed; `make test-trl` runs these tests in an environment of its own")
pytestmark = pytest.mark.filterwarnings("ignore", "error::rollcorr.config.InertOptionWarning")  # others' code warns

from torch.nn.utils import parameters_to_vector  # noqa: E402
from trl import GRPOTrainer  # noqa: E402
from trl_cases import (  # noqa: E402
    EOS,
    LENGTH,
    LOSSES,
    MODES,
    PAD,
    completions,
    grpo_trainer,
    loss_and_gradient,
    prompts,
    replayed,
    rloo_trainer,
    tiny_model,
    with_options,
)

CASES = [(loss, mode) for loss in LOSSES for mode in MODES if loss != "vespo" or mode.startswith("token")]
BOUNDS = [(3.0, None), (1.3, 0.6), (None, 0.8)]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return attach(replayed(grpo_trainer(tmp_path_factory.mktemp("grpo")), *completions()))


def assert_equal(ours, theirs):
    (loss, gradient), (their_loss, their_gradient) = ours, theirs
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("upper", "lower"), BOUNDS)
@pytest.mark.parametrize(("loss_type", "mode"), CASES)
def test_loss_and_gradient_equal_those_of_trl(trainer, loss_type, mode, upper, lower):
    with_options(trainer, mode, upper, lower)
    trainer.loss_type = loss_type
    attach(trainer)

    own_batch = GRPOTrainer._generate_and_score_completions(trainer, prompts())
    batch = trainer._generate_and_score_completions(prompts())
    assert own_batch["importance_sampling_ratio"].unique().numel() > 1  # the options act on this batch
    assert_equal(loss_and_gradient(trainer, batch), loss_and_gradient(trainer, own_batch))


def weights_after_sgd(trainer, generate, steps=3):
    """The weights after some steps from the same start, and how far they are from it."""
    model = trainer.model
    model.load_state_dict(tiny_model().state_dict())
    model.train()
    start = parameters_to_vector(model.parameters()).detach().clone()
    trainer.current_gradient_accumulation_steps = 1
    for _ in range(steps):
        trainer.compute_loss(model, generate(prompts())).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.5 * weight.grad
        model.zero_grad()
    end = parameters_to_vector(model.parameters()).detach().clone()
    return end, (end - start).abs().max()


@pytest.fixture(scope="module")
def sgd_trainer(tmp_path_factory):
    return attach(grpo_trainer(tmp_path_factory.mktemp("sgd")))


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(("loss_type", "mode"), CASES)
def test_measuring_trains_the_weights_of_trl(sgd_trainer, loss_type, mode, missing):
    ids, log_probs = completions()
    log_probs[1][0] = None if missing else log_probs[1][1]
    trainer = replayed(sgd_trainer, ids, log_probs)
    with_options(trainer, mode, 1.3, 0.6)
    trainer.loss_type = loss_type
    of_trl = partial(GRPOTrainer._generate_and_score_completions, trainer)
    theirs, moved = weights_after_sgd(trainer, of_trl)
    assert moved > 1e-3
    for config in ("measure", "disabled"):
        attach(trainer, config)
        ours, _ = weights_after_sgd(trainer, trainer._generate_and_score_completions)
        assert torch.equal(ours, theirs)


PARTS = [
    {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"},
    {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6", "normalizer": "original"},
    {"rollout_is": "token", "nonfinite": "neutral"},
]
VARIANTS = [
    {},
    {"importance_sampling_level": "sequence"},
    {"top_entropy_quantile": 0.5},
    {"use_vllm": False},
    {"vespo_k_pos": 0.6, "vespo_k_neg": 0.1},
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_of_trl_reads_the_correction(sgd_trainer, loss_type, variant, caplog, monkeypatch):
    trainer = replayed(sgd_trainer, *completions())
    for name, value in variant.items():
        monkeypatch.setattr(trainer if hasattr(trainer, name) else trainer.args, name, value)
    trainer.loss_type = loss_type
    batch = GRPOTrainer._generate_and_score_completions(trainer, prompts())
    batch.setdefault("old_per_token_logps", torch.zeros_like(batch["completion_mask"], dtype=torch.float32))
    before = torch.random.get_rng_state(), {name: list(values) for name, values in trainer._metrics["train"].items()}
    for options in PARTS:
        check_loss(trainer, batch, RolloutCorrectionConfig(**options))
    assert "could not check" not in caplog.text
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert dict(trainer._metrics["train"]) == before[1]
    assert all(weight.grad is None for weight in trainer.model.parameters())


def test_rloo_reads_the_correction(tmp_path, caplog):
    trainer = replayed(rloo_trainer(tmp_path), *completions())
    config = {"rollout_is": "sequence", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.3}
    attach(trainer, config)._generate_and_score_completions(prompts())
    assert trainer._loss_was_checked
    assert "could not check" not in caplog.text


class OmittingTrainer(GRPOTrainer):
    """GRPO with a loss of its own that lacks one part of the correction."""

    omitted = ""

    def _compute_loss(self, model, inputs):
        without = {
            "importance_sampling_ratio": torch.ones_like(inputs["advantages"])[:, None],
            "tool_mask": torch.ones_like(inputs["completion_mask"]),
            "num_items_in_batch": inputs["completion_mask"].sum(),
        }
        return super()._compute_loss(model, inputs | {self.omitted: without[self.omitted]})


@pytest.mark.parametrize("omitted", ["importance_sampling_ratio", "tool_mask", "num_items_in_batch"])
def test_a_run_with_an_omitted_part_ends_before_its_first_update(omitted, tmp_path):
    trainer = replayed(grpo_trainer(tmp_path, OmittingTrainer, max_steps=2), *completions())
    trainer.omitted = omitted
    before = parameters_to_vector(trainer.model.parameters()).clone()
    with pytest.raises(ValueError, match=f"the loss of OmittingTrainer .*does not apply '{omitted}'"):
        attach(trainer, PARTS[0]).train()
    assert torch.equal(parameters_to_vector(trainer.model.parameters()), before)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("with_vllm", [True, False])
def test_gmpo_is_refused_with_weights(with_vllm, tmp_path):
    """Its loss reads no weights, and mixes the rows of advantages of (8, 8)."""
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    ids, log_probs = [[5] * 8 for _ in range(8)], [[-3.0] * 8 for _ in range(8)]

    def rollout(given, trainer):
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in given]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": log_probs}

    def make():
        options = {"max_completion_length": 8, "loss_type": "grpo"}
        rollouts = {} if with_vllm else {"rollout_func": rollout}
        trainer = grpo_trainer(tmp_path, gmpo.GMPOTrainer, rollouts, config_class=gmpo.GMPOConfig, **options)
        return replayed(trainer, ids, log_probs) if with_vllm else trainer

    attach(make(), {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.5})._generate_and_score_completions(
        prompts()
    )
    with pytest.raises(
        ValueError, match=f"GMPOTrainer.*'{'importance_sampling_ratio' if with_vllm else 'advantages'}'"
    ):
        attach(make(), "tis")._generate_and_score_completions(prompts())


@pytest.mark.parametrize("make", [grpo_trainer, rloo_trainer])
def test_measuring_a_whole_run_changes_no_weight(make, tmp_path):
    """Also where the policy moves within a generation batch."""
    ids, log_probs = completions()
    options = {"max_steps": 3, "num_iterations": 2, "optim": "sgd", "learning_rate": 0.5}
    ends = []
    for config in (None, "measure"):
        trainer = replayed(make(tmp_path, **options), ids, log_probs)
        trainer = trainer if config is None else attach(trainer, config)
        trainer.train()
        ends.append(parameters_to_vector(trainer.model.parameters()))
    assert torch.equal(*ends)


def test_with_rollout_func_the_loss_is_what_trl_computes_with_vllm(trainer, tmp_path):
    """TRL stores the log-probs of `rollout_func` and ignores them unless vLLM is on."""
    ids, log_probs = completions()

    def rollout(given, trainer):
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in given]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": log_probs}

    without_vllm = grpo_trainer(tmp_path, trainer_options={"rollout_func": rollout})
    plain = without_vllm._generate_and_score_completions(prompts())
    assert "importance_sampling_ratio" not in plain
    for loss_type, mode in [("grpo", "token_truncate"), ("dapo", "sequence_mask"), ("vespo", "token_mask")]:
        for each in (trainer, without_vllm):
            each.loss_type = loss_type
            with_options(each, mode, 1.8, None)
        expected = GRPOTrainer._generate_and_score_completions(trainer, prompts())
        batch = attach(without_vllm)._generate_and_score_completions(prompts())
        corrected = loss_and_gradient(without_vllm, batch)
        assert_equal(corrected, loss_and_gradient(trainer, expected))
        assert (corrected[0] - loss_and_gradient(without_vllm, plain)[0]).abs() > 1e-3


def test_an_environment_mask_and_rejected_tokens_leave_the_loss_and_its_count(tmp_path):
    ids, log_probs = completions()
    foreign = [[0] + [1] * (len(row) - 1) for row in ids]

    def rollout(given, trainer):
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in given]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": log_probs, "env_mask": foreign}

    trainer = grpo_trainer(tmp_path, trainer_options={"rollout_func": rollout}, loss_type="dapo")
    plain = trainer._generate_and_score_completions(prompts())
    attach(trainer, {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"})
    batch = trainer._generate_and_score_completions(prompts())

    own_tokens = plain["completion_mask"] * plain["tool_mask"]
    ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).exp()
    kept = (own_tokens == 1) & (ratio >= 0.6) & (ratio <= 1.6)
    torch.testing.assert_close(batch["completion_mask"] * batch["tool_mask"], kept.long())
    assert batch["num_items_in_batch"] == kept.sum() < plain["num_items_in_batch"]


def engine_for(trainer, **options):
    sampling = SamplingSpec(temperature=trainer.temperature, logprobs=options.pop("logprobs", "processed"))
    generation = GenerationSettings(sampling=sampling, max_new_tokens=LENGTH, eos_token_id=EOS, pad_token_id=PAD)
    return TransformersEngine(trainer.model, generation, **options)


@pytest.mark.parametrize("make", [grpo_trainer, rloo_trainer])
def test_twenty_steps_train_with_an_engine_in_the_place_of_vllm(make, tmp_path):
    trainer = make(tmp_path, max_steps=20)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    engine = engine_for(trainer)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.05)
    attach(trainer, config, engine=engine).train()

    logs = [entry for entry in trainer.state.log_history if "rollout_corr/kl" in entry]
    assert trainer.state.global_step == len(logs) == 20
    assert all(math.isfinite(value) for entry in logs for value in entry.values() if not isinstance(value, str))
    assert all(entry["rollout_corr/kept_fraction"] == 1 for entry in logs)
    assert all(0 < entry["rollout_corr/k3_kl"] < 0.05 for entry in logs)  # bfloat16 against float32
    assert engine.weight_version == 19
    assert all((weight != before[name]).any() for name, weight in trainer.model.named_parameters())

    trainer.evaluate(trainer.train_dataset.select(range(8)))
    assert "eval_rollout_corr/kl" in trainer.state.log_history[-1]


@pytest.mark.parametrize("make", [grpo_trainer, rloo_trainer])
def test_a_monitor_has_for_each_step_what_trl_logs_for_it(make, tmp_path):
    """Two micro-batches for each optimizer step, and an evaluation in between, which is no step."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainer = make(tmp_path / "trl", **options)
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.05)
    with Monitor(tmp_path / "run", rollouts=RolloutSample()) as monitor:
        attach(trainer, config, engine=engine_for(trainer), monitor=monitor).train()
        trainer.evaluate(trainer.train_dataset.select(range(8)))

    run = read_run(tmp_path / "run")
    logs = [entry for entry in trainer.state.log_history if "rollout_corr/kl" in entry]
    assert len(run.series) == len(logs) == monitor.steps == 4
    for metrics, log in zip(run.series, logs, strict=True):
        assert metrics["loss"] == pytest.approx(log["loss"], rel=1e-4, abs=1e-4)
        assert metrics["reward/mean"] == pytest.approx(log["reward"], rel=1e-5)
        assert metrics["rollout_corr/kl"] == pytest.approx(log["rollout_corr/kl"], rel=1e-6, abs=1e-9)
        for name in ("reward", "entropy", "completions/mean_length", "num_tokens", "step_time"):
            assert metrics[f"trl/{name}"] == pytest.approx(log[name])
    rows = [row for part in read_rollout_log(tmp_path / "run") for row in part.to_rows()]
    assert len(rows) == 4 * 8
    assert len({row["group_id"] for row in rows}) == 4 * 2
    assert {(row["engine"], row["sampling"]["temperature"]) for row in rows} == {("transformers", trainer.temperature)}


@pytest.mark.parametrize("make", [grpo_trainer, rloo_trainer])
def test_fresh_nulls_change_nothing_that_is_trained(make, tmp_path, monkeypatch):
    """Neither weights nor optimizer, random states or modes differ after the last step."""
    states, asked = [], []
    for name, every in (("without", 0), ("with", 2)):
        trainer = make(tmp_path / name, max_steps=5)
        engine = engine_for(trainer)
        sample, rows = engine.generate, []
        monkeypatch.setattr(engine, "generate", lambda p, rows=rows, s=sample, **o: rows.append(len(p)) or s(p, **o))
        with Monitor(tmp_path / f"{name} run", strict=True) as monitor:
            attach(trainer, "measure", engine=engine, monitor=monitor, null_every=every).train()
        states.append(training_state(trainer.model, getattr(trainer.optimizer, "optimizer", trainer.optimizer)))
        asked.append(len(rows))
    assert same_state(*states)
    assert asked == [5, 8]  # again after the syncs of steps 1, 3 and 5
    last, measured = (read_run(tmp_path / f"{name} run").series[-1] for name in ("without", "with"))
    assert "monitor/null_k3" not in last
    assert 0 < measured["monitor/null_k3"] < 0.05


@pytest.mark.parametrize("number", ERRORS)
def test_a_failing_disk_changes_no_weight(tmp_path, number):
    """The disk fails in the second step, and for a while."""
    weights, faults = [], Faults(number, 6, 10)
    for name in ("whole", "failing"):
        trainer = grpo_trainer(tmp_path / name, max_steps=4)
        run = tmp_path / f"{name} run"
        with faulty_disk(run, faults), Monitor(run, rollouts=RolloutSample()) as monitor:
            attached = attach(trainer, "tis", engine=engine_for(trainer), monitor=monitor, keep_rollouts=run / "ring")
            faults.happen = name == "failing"
            attached.train()
            monitor.flush()
            faults.happen = False
        weights.append({key: value.detach().clone() for key, value in trainer.model.named_parameters()})
    assert faults.calls > 6, "the disk has failed"
    whole, failing = (read_run(tmp_path / f"{name} run").series for name in ("whole", "failing"))
    assert [metrics["loss"] for metrics in failing] == [metrics["loss"] for metrics in whole]
    assert len(failing) == monitor.steps == 4
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_a_corrected_batch_is_cut_into_micro_batches_as_trl_cuts_its_own(tmp_path):
    """Advantages of (B, T) and the mask of kept tokens go through the shuffle and the cut."""

    def rollout(given, trainer):
        ids, log_probs = completions(trainer.state.global_step)
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in given]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": log_probs}

    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = grpo_trainer(tmp_path, trainer_options={"rollout_func": rollout}, loss_type="dapo", **options)
    seen, compute = [], trainer._compute_loss
    trainer._compute_loss = lambda model, batch: (seen.append(batch), compute(model, batch))[1]
    config = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.6"}
    attach(trainer, config).train()

    seen = seen[-4:]  # after the check of the loss
    for halves in (seen[:2], seen[2:]):
        assert [half["advantages"].shape for half in halves] == [half["tool_mask"].shape for half in halves]
        kept = sum((half["completion_mask"] * half["tool_mask"]).sum() for half in halves)
        assert all(half["num_items_in_batch"] == kept for half in halves)


def test_the_mixin_is_a_trainer_like_any_other(tmp_path, caplog):
    class CorrectedTrainer(RolloutCorrectionMixin, GRPOTrainer):
        pass

    trainer = grpo_trainer(tmp_path, CorrectedTrainer, {"rollout_correction": "tis"}, max_steps=1)
    assert "token weights up to 2.0;" in caplog.text
    assert "corrects nothing: TRL's own sampler reports no log-probs" in caplog.text
    with pytest.warns(InertOptionWarning, match="reported no log-probs"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_rloo_weights_its_sequences(tmp_path):
    ids, log_probs = completions()
    log_probs[1][0] = log_probs[1][1]
    trainer = replayed(rloo_trainer(tmp_path), ids, log_probs)
    plain = trainer._generate_and_score_completions(prompts())
    attach(trainer, RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=1.5))
    batch = trainer._generate_and_score_completions(prompts())
    sampled = torch.tensor([sum(row) for row in log_probs])
    expected = plain["advantages"] * (plain["old_logps"] - sampled).exp().clamp(max=1.5)
    torch.testing.assert_close(batch["advantages"], expected, rtol=1e-5, atol=1e-6)
    loss = trainer._compute_loss(trainer.model, batch)
    torch.testing.assert_close(loss, -expected.mean(), rtol=1e-5, atol=1e-6)  # the policy has not moved


def test_an_engine_whose_log_probs_are_others_is_refused(tmp_path):
    trainer = grpo_trainer(tmp_path, temperature=0.7)
    with pytest.raises(IncompatibleSamplingError, match="temperature"):
        attach(trainer, engine=engine_for(trainer, logprobs="raw"))


def test_it_finishes_without_log_probs_on_one_rank(tmp_path):
    ranks = trl_ranks.start(trl_ranks.train, tmp_path, 2, join=False)
    try:
        assert any(eventually(lambda: ranks.join(timeout=1)) for _ in range(5)), "a rank waits for the other one"
    finally:
        for process in ranks.processes:
            process.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["steps"] == second["steps"] == 3
    assert first["measured"] == [True, False, True]
    [error] = first["errors"]
    assert "rank 1 reported no log-probs" in error
    assert not second["errors"]
