"""The three gaps of a step, planted one at a time; and jumps in the surprisal of sampled tokens."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from rollcorr import Monitor, policy_loss
from rollcorr.correction import PolicyLogProbs
from rollcorr.diagnostics import causes
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.health_check import health
from rollcorr.diagnostics.health.rules import surprise_jumped
from rollcorr.diagnostics.health.weight_sync_rules import loss_pass_differs, step_gaps
from rollcorr.diagnostics.report.console import show_health

ROWS, LENGTH, VOCABULARY = 32, 24, 8


def log_probs(logits, ids):
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


def step_metrics(folder, *, sampler=0.002, score=0.0, loss=0.0, cooler=1.0, drift=0.0, mini_batches=2, seed=0):
    """Metrics of one step of a small policy.

    Args:
        folder: of the run.
        sampler: noise of the sampler's logits.
        score: noise of the logits in the pass of `old_log_prob`.
        loss: noise of the logits in the loss.
        cooler: divides the logits in the loss.
        drift: what each update adds to the logits of one id.
        mini_batches: updates of the step.
        seed: of everything drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(ROWS, LENGTH, VOCABULARY, generator=generator)

    def noisy(size):
        return logits + size * torch.randn(logits.shape, generator=generator)

    sampled_from = noisy(sampler)
    ids = torch.distributions.Categorical(logits=sampled_from).probs.reshape(-1, VOCABULARY)
    ids = torch.multinomial(ids, 1, generator=generator).reshape(ROWS, LENGTH)
    rollout, old, mask = log_probs(sampled_from, ids), log_probs(noisy(score), ids), torch.ones(ROWS, LENGTH)
    advantages = torch.randn(ROWS, generator=generator)
    with Monitor(folder) as monitor:
        correction = monitor.correct(old, rollout, mask)
        for update, rows in enumerate(torch.arange(ROWS).chunk(mini_batches)):
            moved = noisy(loss) / cooler
            moved[..., 0] += drift * update
            policies = PolicyLogProbs(
                log_prob=log_probs(moved, ids)[rows], old_log_prob=old[rows], rollout_log_prob=rollout[rows]
            )
            monitor.add(policy_loss(policies, advantages[rows], mask[rows], correction=correction[rows]))
        return monitor.step()


@pytest.mark.parametrize("mini_batches", [1, 4])
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ({}, None),
        ({"drift": 0.5}, None),
        ({"sampler": 0.4}, None),
        ({"loss": 0.4}, "the loss pass differs by dropout, or another temperature"),
        ({"cooler": 0.7}, "the loss pass differs by dropout, or another temperature"),
        ({"loss": 0.08}, "the loss pass differs by its kernel, precision or micro-batch size"),
        ({"score": 0.4}, "the pass of old_log_prob differs by dropout, or another temperature"),
        ({"sampler": 0.4, "loss": 0.4}, "differs by dropout, or another temperature"),
    ],
    ids=str,
)
def test_a_fault_is_found_in_its_own_gap(tmp_path, fault, found, mini_batches):
    """Neither the updates nor the sampler are taken for the trainer's second pass."""
    metrics = step_metrics(tmp_path, mini_batches=mini_batches, **fault)
    finding = next((f for f in health(metrics).findings if f.code == "loss_pass_differs"), None)
    if found is None:
        assert finding is None
    else:
        assert found in finding.reason
        assert finding.follows_from is None
    assert ("loss_pass_differs" in [cause.code for cause in causes(tmp_path)]) == (found is not None)


def test_the_gaps_of_a_step_are_printed_in_one_block(tmp_path):
    metrics = step_metrics(tmp_path, loss=0.4, drift=0.5)
    sampler, own, drift = step_gaps({name.removeprefix("rollout_corr/"): value for name, value in metrics.items()})
    assert sampler.kl < 1e-4 < 0.01 < own.kl
    assert drift.kl == metrics["actor/policy_kl"] != own.kl
    assert own.clipped > 0.01
    assert sampler.clipped is None
    console = Console(file=io.StringIO(), width=120)
    show_health(console, health(metrics), subject="a run")
    lines = console.file.getvalue().splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("sampler → trainer"))
    assert lines[first + 1].startswith("trainer → itself, before the first update")
    assert lines[first + 2].startswith("drift of the updates")


def test_bypass_mode_has_no_gap_of_the_trainer_with_itself(tmp_path):
    log_prob = -torch.rand(6, 5)
    policies = PolicyLogProbs(log_prob=log_prob, rollout_log_prob=log_prob - 0.5)
    config = {"bypass_mode": True}
    with Monitor(tmp_path, config) as monitor:
        monitor.add(policy_loss(policies, torch.ones(6), torch.ones(6, 5), config=config, whole_step=True))
        metrics = monitor.step()
    assert "actor/policy_kl" in metrics
    assert "actor/first/policy_kl" not in metrics
    assert loss_pass_differs(Evidence(current=metrics)) is None


def surprise(values):
    history = [(step, {"token_count": 100.0, "rollout_log_ppl": value}) for step, value in enumerate(values, start=1)]
    return surprise_jumped(Evidence(current=history[-1][1], history=history))


def test_a_jump_of_surprisal_has_its_step():
    """Only the sampler got a temperature: both sides' raw log-probs agree, 0.44 → 0.19 nats."""
    noise = 0.01 * np.random.default_rng(0).normal(size=20)
    finding = surprise([*(0.44 + noise[:12]), *(0.19 + noise[12:])])
    assert (finding.first_step, finding.steps) == (13, 8)
    assert "more probable at step 13" in finding.title
    assert "less probable" in surprise([*(0.19 + noise[:12]), *(0.44 + noise[12:])]).title


def test_learning_is_no_jump_of_surprisal():
    random = np.random.default_rng(1)
    falling = 2 * np.exp(-np.arange(60) / 8) + 0.1
    assert surprise(falling * np.exp(0.03 * random.normal(size=60))) is None
    abrupt = 0.2 + 1.8 / (1 + np.exp((np.arange(60) - 30) / 1.0))
    assert surprise(abrupt * np.exp(0.02 * random.normal(size=60))) is None
    assert surprise([0.44, 0.44, 0.19, 0.44, 0.44, 0.44, 0.44, 0.44, 0.19, 0.44, 0.44, 0.44]) is None
