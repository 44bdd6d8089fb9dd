"""The null that a Monitor measures itself: a correct run becomes healthy, one that was broken from step 1 never."""

from __future__ import annotations

import copy

import pytest
import torch
from synthetic_policies import head, sample, shifted
from transformers import LlamaConfig, LlamaForCausalLM

from rollcorr import Monitor, SamplingSpec
from rollcorr.correction.weight_probe import WeightProbe
from rollcorr.monitor.own_null import MOST_STEPS, OwnNull
from rollcorr.rollout_log import RolloutBatch

HEAD, OTHER = head(), head() + 0.02 * head(seed=9)
SPEC = SamplingSpec(logprobs="processed")
NOISE = 1e-6
"""About k3 of the two heads' rounding, nats."""


def add(monitor, rows, *, ids=True, **metrics):
    monitor.correct(rows.train, rows.rollout, rows.mask, columns={"response_ids": rows.ids} if ids else None)
    return monitor.step(**metrics)


def measured(seed, train, rollout=None):
    """Return 8 rows as `measure_null` returns them."""
    rows = sample(seed, train, rollout, rows=8)
    return RolloutBatch.from_padded(
        rows.mask, old_log_prob=rows.train, rollout_log_prob=rows.rollout, response_ids=rows.ids, sampling=SPEC
    )


def test_a_correct_run_becomes_healthy_by_itself(tmp_path):
    verdicts = []
    for folder, null_steps in (("without", None), ("with", "auto")):
        with Monitor(tmp_path / folder, sampling=SPEC, null_steps=null_steps) as monitor:
            for step in range(1, 13):
                add(monitor, sample(step, HEAD))
                monitor.flush()
            verdicts.append(monitor.verdict)
    assert verdicts == ["not judged", "healthy"]

    # A resumed run, and every reader of the directory, judge by the same null.
    with Monitor(tmp_path / "with", sampling=SPEC, start=12) as resumed:
        add(resumed, sample(13, HEAD))
        assert resumed.verdict == "healthy"


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("fault", ["shift", "temperature", "other weights"])
def test_a_run_broken_from_step_1_is_never_healthy(tmp_path, fault, ids):
    rows = {
        "shift": lambda step: shifted(sample(step, HEAD)),
        "temperature": lambda step: sample(step, HEAD, temperature=0.8),
        "other weights": lambda step: sample(step, HEAD, OTHER),
    }[fault]
    with Monitor(tmp_path, sampling=SPEC, null_steps="auto") as monitor:
        for step in range(1, 15):
            add(monitor, rows(step), ids=ids)
            monitor.flush()
            assert monitor.verdict != "healthy"


@pytest.mark.parametrize(("synced_k3", "verdict"), [(NOISE, "healthy"), (NOISE / 100, "not judged")])
def test_a_probe_vets_a_null_without_ids(tmp_path, synced_k3, verdict):
    with Monitor(tmp_path, sampling=SPEC, null_steps="auto") as monitor:
        for step in range(1, 13):
            metrics = add(monitor, sample(step, HEAD), ids=False)
            monitor.flush()
        assert monitor.not_judged[0].startswith("unchanged since steps 1 to 5")
        k3 = metrics["rollout_corr/k3_kl"] / NOISE
        monitor.add(WeightProbe(sampled_k3=k3 * NOISE, synced_k3=k3 * synced_k3, repeated_k3=0.0, tokens=900))
        monitor.flush()
        assert add(monitor, sample(13, HEAD), ids=False)["probe/synced_k3"] == pytest.approx(k3 * synced_k3)
        assert monitor.verdict == verdict


def test_stale_steps_make_no_null(tmp_path):
    with Monitor(tmp_path, sampling=SPEC, null_steps="auto") as monitor:
        for step in range(1, 9):
            metrics = add(monitor, sample(step, HEAD), **{"engine/staleness": 1.0})
            monitor.flush()
    assert "monitor/null_k3" not in metrics


def test_no_more_steps_are_kept_than_needed():
    """The writer thread may be late, so that no null was made yet."""
    null = OwnNull(None, None, from_first_steps=True)
    assert [null.wants({}) for _ in range(MOST_STEPS + 1)] == [True] * MOST_STEPS + [False]


def run_with_fresh_nulls(folder, seed, *, steps, sharper=1.0, stops_at=None, every=10):
    """Return the alarms and the step of the first one, in a run that measures its null again and again."""
    step_size = 0.002 * torch.randn(HEAD.shape, generator=torch.Generator().manual_seed(seed))
    with Monitor(folder, sampling=SPEC) as monitor:
        for step in range(1, steps + 1):
            train = HEAD * sharper ** (step / steps)
            rollout = train
            if stops_at is not None:
                train = train + step * step_size
                rollout = HEAD + min(step, stops_at) * step_size
            if step % every == 1:
                monitor.add(measured(1000 * seed + step, train, rollout))
                monitor.flush()
            rows = sample(1000 * seed + step, train, rollout)
            metrics = add(monitor, rows)
            if monitor.alarms:
                return monitor.alarms, step, metrics
    return (), steps, metrics


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("steps", "every", "sharper", "entropy"),
    [(20, 10, 1.9, 0.5), (20, 10, 3.0, 0.3), (40, 10, 3.0, 0.3), (80, 20, 3.0, 0.3)],
)
def test_a_policy_that_becomes_sharper_raises_no_alarm(tmp_path, steps, every, sharper, entropy, seed):
    """At 0.3 of the entropy k3 is 3 times that of the first steps, and so is the null, however few its tokens."""
    context = torch.randn(999, 16, generator=torch.Generator().manual_seed(seed))
    entropies = [torch.distributions.Categorical(logits=context @ HEAD * x).entropy() for x in (1, sharper)]
    assert entropies[1].mean() < entropies[0].mean() * entropy
    assert run_with_fresh_nulls(tmp_path, seed, steps=steps, sharper=sharper, every=every)[0] == ()


@pytest.mark.parametrize("seed", range(5))
def test_a_stopped_sync_is_found_within_ten_steps(tmp_path, seed):
    """Also if the next measurement comes a few steps later, and is of the old weights itself."""
    stop = 24 + 2 * seed
    alarms, step, _ = run_with_fresh_nulls(tmp_path, seed, steps=stop + 20, stops_at=stop)
    assert alarms
    assert 1 <= step - stop <= 10


def test_a_small_null_asks_for_more_tokens(tmp_path):
    with Monitor(tmp_path, sampling=SPEC) as monitor:
        monitor.add(measured(0, HEAD))
        monitor.flush()
        for step in range(1, 13):
            metrics = add(monitor, sample(step, HEAD))
        assert (metrics["monitor/null_is_vetted"], metrics["monitor/null_is_large"]) == (1, 0)
        assert "has too few tokens; measure it again" in " ".join(monitor.not_judged)
        for seed in range(1, 4):
            monitor.add(measured(seed, HEAD))
        monitor.flush()
        assert add(monitor, sample(13, HEAD))["monitor/null_is_large"] == 1
        assert monitor.verdict == "healthy"


@pytest.mark.parametrize("fault", [None, "shift", "temperature", "other weights"])
def test_a_training_transformer_needs_two_lines(tmp_path, fault):
    """A Llama that learns by policy gradients, with a sampler in bfloat16."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, initializer_range=0.3, **sizes)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.03 * weight.std() * torch.randn_like(weight)

    def log_probs(policy, ids, dtype=torch.float32, temperature=1.0):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = policy(input_ids=ids).logits[:, 3:-1].float()
        return (logits / temperature).log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]

    verdicts = []
    with Monitor(tmp_path, sampling=SPEC, null_steps="auto") as monitor:
        for _ in range(12):
            sampler = other if fault == "other weights" else model
            temperature = 0.8 if fault == "temperature" else 1.0
            with torch.no_grad():
                ids = torch.randint(64, (64, 4))
                for _ in range(16):
                    logits = sampler(input_ids=ids).logits[:, -1] / temperature
                    ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
                rollout = log_probs(sampler, ids, torch.bfloat16, temperature)
            train = log_probs(model, ids)
            rollout = rollout.roll(1, 1) if fault == "shift" else rollout
            mask = torch.ones_like(train, dtype=torch.bool)
            monitor.correct(train.detach(), rollout, mask, columns={"response_ids": ids[:, 4:]})
            reward = (ids[:, 4:] % 2 == 0).float().mean(1) - 0.5
            loss = -(reward[:, None] * train).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=loss.detach())
            monitor.flush()
            verdicts.append(monitor.verdict)
    assert (verdicts[-1] == "healthy") is (fault is None)
    assert fault is None or "healthy" not in verdicts
