"""The correction in TRL's AsyncGRPOTrainer against a loss of unpacked rows. Run by `make test-trl`."""

import math
import os

import pytest
import torch

from rollcorr import Monitor, RolloutSample, read_rollout_log, read_run
from rollcorr.config import RolloutCorrectionConfig
from rollcorr.integrations.trl import attach

pytest.importorskip("trl", reason="TRL is not installed; `make test-trl` runs these tests in an environment of its own")
pytestmark = pytest.mark.filterwarnings("ignore")

from transformers import AutoModelForCausalLM  # noqa: E402

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytest.importorskip("trl.experimental.async_grpo.packing", reason="this version of TRL packs no rows")
from trl_async_cases import async_trainer, move  # noqa: E402
from trl_cases import ROWS  # noqa: E402

REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}
BOUNDS = {"truncate": 1.1, "mask": "0.9_1.15"}


def micro_batch(trainer):
    """One micro-batch, as TRL's own data loader packs it."""
    trainer.rollout_worker.start()
    trainer.model.train()
    return next(iter(trainer.get_train_dataloader()))


def loss_and_gradient(trainer, inputs):
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = {name: weight.grad.clone() for name, weight in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    return loss.detach(), gradient


def log_probs_of(model, sample):
    """Log π of a completion's tokens, from one row without padding or packing."""
    ids = torch.as_tensor(sample.input_ids)[None]
    rows = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    log_prob = rows.gather(1, ids[0, 1:, None]).squeeze(1)
    mask = torch.as_tensor(sample.completion_mask[1:]).bool()
    return log_prob[mask], torch.as_tensor(sample.old_log_probs[1:])[mask]


def reference(model, samples, level, constraint):
    """−Σ sg(w) A log π / tokens with w = π/μ of a token or sequence, cut at the bound or zeroed outside the band."""
    total, tokens, changed = 0, 0, 0
    for sample in samples:
        log_prob, rollout = log_probs_of(model, sample)
        log_ratio = (log_prob - rollout).detach()
        ratio = (log_ratio.sum().expand_as(log_ratio) if level == "sequence" else log_ratio).exp()
        low, high = (0.9, 1.15) if constraint == "mask" else (0.0, 1.1)
        outside = (ratio < low) | (ratio > high)
        weight = ratio.masked_fill(outside, 0.0) if constraint == "mask" else ratio.clamp(max=high)
        total = total - (weight * sample.advantage * log_prob).sum()
        tokens, changed = tokens + len(log_prob), changed + int(outside.sum())
    assert 0 < changed < tokens
    return total / tokens


@pytest.mark.parametrize("constraint", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_and_gradient_equal_the_reference(level, constraint, tmp_path, monkeypatch):
    trainer = async_trainer(tmp_path, monkeypatch)
    attach(trainer, REINFORCE | {"rollout_is": level, "rollout_is_threshold": BOUNDS[constraint]})
    inputs = micro_batch(trainer)
    assert inputs["input_ids"].shape[0] == 1
    move(trainer.model, 0.02)
    loss, gradient = loss_and_gradient(trainer, inputs)

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(trainer.model.state_dict())
    expected = reference(model, trainer.rollout_worker.samples[:ROWS], level, constraint)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-6, rtol=1e-6)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradient[name], weight.grad, atol=1e-6, rtol=0)
    assert "ratio" in trainer._metrics["train"]  # TRL's metrics stay


def test_clipped_loss_is_that_of_trl(tmp_path, monkeypatch):
    trainer = async_trainer(tmp_path, monkeypatch, epsilon=0.05, epsilon_high=0.08)
    inputs = micro_batch(trainer)
    move(trainer.model, 0.02)
    theirs = loss_and_gradient(trainer, inputs)
    for config in ("bypass_ppo_clip", "measure"):
        ours = loss_and_gradient(attach(trainer, config), inputs)
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-6, rtol=0)
    assert trainer._metrics["train"]["clip_ratio/region_mean"][0] > 0


def test_rejection_divides_by_kept_tokens(tmp_path, monkeypatch):
    trainer = async_trainer(tmp_path, monkeypatch)
    attach(trainer, REINFORCE | {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"})
    inputs = micro_batch(trainer)
    move(trainer.model, 0.02)
    loss, _ = loss_and_gradient(trainer, inputs)
    total = kept = tokens = 0
    for sample in trainer.rollout_worker.samples[:ROWS]:
        log_prob, rollout = log_probs_of(attached_copy(trainer, tmp_path), sample)
        inside = ((log_prob - rollout).exp() >= 0.9) & ((log_prob - rollout).exp() <= 1.1)
        total = total - (sample.advantage * log_prob[inside]).sum().detach()
        kept, tokens = kept + int(inside.sum()), tokens + len(inside)
    assert 0 < kept < tokens
    torch.testing.assert_close(loss, total / kept, atol=1e-6, rtol=1e-5)


def attached_copy(trainer, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(trainer.model.state_dict())
    return model


def test_twenty_steps_train_on_a_cpu(tmp_path, monkeypatch):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 3e-3}
    trainer = async_trainer(tmp_path / "trl", monkeypatch, steps=20, **options)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    with Monitor(tmp_path / "run", rollouts=RolloutSample()) as monitor:
        attach(trainer, "bypass_pg_is", monitor=monitor).train()

    logs = [entry for entry in trainer.state.log_history if "rollout_corr/k3_kl" in entry]
    assert trainer.state.global_step == len(logs) == 20
    assert all(math.isfinite(entry["loss"]) for entry in logs)
    assert logs[-1]["rollout_corr/k3_kl"] > 10 * logs[0]["rollout_corr/k3_kl"]  # the sampler's weights do not follow
    assert trainer.rollout_worker.versions == list(range(1, 22))
    assert trainer.weight_transfer.sent > 0
    assert all((weight != before[name]).any() for name, weight in trainer.model.named_parameters())

    run = read_run(tmp_path / "run")
    assert [metrics["step"] for metrics in run.series] == list(range(1, 21))
    assert run.config == RolloutCorrectionConfig.preset("bypass_pg_is")
    assert "loss" in run.series[0]
    rows = [row for part in read_rollout_log(tmp_path / "run") for row in part.to_rows()]
    assert len(rows) == 20 * ROWS
    sample = trainer.rollout_worker.samples[0]
    assert rows[0]["response_ids"] in [list(each.input_ids[2:]) for each in trainer.rollout_worker.samples[:ROWS]]
    assert sample.advantage != 0
