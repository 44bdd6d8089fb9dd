"""Torch's default device is the caller's business: results on CPU tensors are the same whatever it is.

"meta" stands for any other device here: a tensor that lands on it has no values, and a kernel that writes to its
address writes to address 0.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from boundary_cases import DECOUPLED, ENTRIES, IMPLEMENTATIONS, B, T, arguments, batch, tensors_of

from rollcorr import correct, merge_statistics
from rollcorr.config import LossConfig, RolloutCorrectionConfig
from rollcorr.core.metric_registry import CRITERIA, finalize
from rollcorr.core.sampling import KeptSets, check_kept_sets, kept_sets_of_support
from rollcorr.correction.denominators import count_denominators
from rollcorr.correction.losses import PolicyLogProbs, loss_metrics, policy_loss
from rollcorr.correction.training_step import TrainingStep
from rollcorr.kernels.correction.cpu import kernel
from rollcorr.rollout_log import RolloutBatch

EVERYTHING = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_rs=",".join(CRITERIA),
    rollout_rs_threshold=2.0,
    rollout_token_veto_threshold=1e-4,
    rollout_is_batch_normalize=True,
)


@contextlib.contextmanager
def by_context():
    with torch.device("meta"):
        yield


@contextlib.contextmanager
def by_setting():
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(before)


@pytest.fixture(params=[by_context, by_setting], ids=["context", "setting"])
def elsewhere(request):
    """Run a function under a different default device, with empty caches."""
    kernel._plan_of.cache_clear()

    def run(call):
        with request.param():
            assert torch.zeros(1).is_meta
            return call()

    return run


def assert_same(actual, expected) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert one.device.type == "cpu"
        assert torch.equal(one.nan_to_num(nan=-7.0), other.nan_to_num(nan=-7.0))


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_gives_the_same_result(entry, elsewhere):
    given = arguments(ENTRIES[entry])
    actual = elsewhere(lambda: tensors_of(ENTRIES[entry].call(**given)))
    assert_same(actual, tensors_of(ENTRIES[entry].call(**given)))


@pytest.mark.covering(2)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", [None, "disabled", DECOUPLED, EVERYTHING])
def test_metrics_denominators_and_the_worst_tokens_are_the_same(config, packed, impl, elsewhere):
    given = batch(packed=packed)
    tensors = given["train_log_prob"], given["rollout_log_prob"], given["response_mask"]

    def everything():
        correction = correct(*tensors, config, cu_seqlens=given.get("cu_seqlens"), detail=True, impl=impl)
        if correction.statistics is None:
            return [], correction.metrics()
        counts = [correction.denominators(name) for name in ("kept", "original", "weights")]
        merged = finalize(merge_statistics([correction.statistics] * 2).read())
        numbers = [float(x) for part in counts for x in (part.tokens, part.sequences)]
        return tensors_of(correction), (correction.metrics(), merged, numbers, correction.worst())

    actual, expected = elsewhere(everything), everything()
    assert actual[1] == expected[1]
    if expected[0]:
        assert_same(actual[0], expected[0])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_batch_of_nothing_is_the_same(impl, elsewhere):
    nothing = torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.bool)
    actual = elsewhere(lambda: correct(*nothing, EVERYTHING, detail=True, impl=impl).metrics())
    assert actual == correct(*nothing, EVERYTHING, detail=True, impl=impl).metrics()


@pytest.mark.parametrize("bypass", [False, True])
def test_an_optimizer_step_is_the_same(bypass, elsewhere):
    given = batch()
    mask = given["response_mask"]
    config = dataclasses.replace(
        DECOUPLED, bypass_mode=bypass, loss_type="reinforce" if bypass else "ppo_clip", normalizer="kept"
    )

    loss = LossConfig(loss_agg_mode="token-mean", kl_coef=0.1, entropy_coef=0.01)

    class Shift(torch.nn.Module):
        """A policy of one number, added to every log-prob."""

        def __init__(self):
            super().__init__()
            self.by = torch.nn.Parameter(given["log_prob"].mean().clone())

        def forward(self):
            return given["log_prob"] + self.by

    def policies(log_prob):
        old = None if bypass else given["old_log_prob"]
        return PolicyLogProbs(
            log_prob=log_prob,
            old_log_prob=old,
            rollout_log_prob=given["rollout_log_prob"],
            ref_log_prob=given["ref_log_prob"],
        )

    def bypass_step():
        model = Shift()
        with TrainingStep(model, config, loss=loss) as gradients:
            log_prob = model()
            output = gradients.policy_loss(policies(log_prob), given["advantages"], mask, entropy=-log_prob)
            gradients.backward(output)
            outcome = gradients.finish()
        return [output.loss.detach(), model.by.grad, *outcome], loss_metrics(output.statistics)

    def decoupled_step():
        model, original = Shift(), count_denominators(mask)
        log_prob = model()
        output = policy_loss(
            policies(log_prob),
            given["advantages"],
            mask,
            config=config,
            loss=loss,
            correction=correct(given["old_log_prob"], given["rollout_log_prob"], mask, config),
            denominators=original,
            original_denominators=original,
            entropy=-log_prob,
        )
        output.loss.backward()
        return [output.loss.detach(), model.by.grad], loss_metrics(output.statistics)

    step = bypass_step if bypass else decoupled_step
    actual, expected = elsewhere(step), step()
    assert_same(actual[0], expected[0])
    assert actual[1] == expected[1]


def test_kept_sets_are_the_same(elsewhere):
    support = torch.tensor([[True, False, True], [False, True, False]])
    mask = torch.tensor([[True, False, True]])

    def sets():
        kept = kept_sets_of_support(support)
        check_kept_sets(kept, 2, 3)
        given = KeptSets.of([[0, 2], [1]], device="cpu").padded(mask)
        return [kept.ids, kept.offsets, given.offsets, kept.select(torch.tensor([1], device="cpu")).ids]

    assert_same(elsewhere(sets), sets())


def test_the_rollout_log_is_the_same(elsewhere):
    given = batch()

    def logged():
        log = RolloutBatch.from_padded(
            given["response_mask"],
            step=3,
            response_ids=torch.arange(B * T, device="cpu").view(B, T),
            rollout_log_prob=given["rollout_log_prob"],
            log_prob=given["train_log_prob"],
            reward=[0.0, 1.0, 0.5, 1.0, 0.0],
        )
        log = RolloutBatch.from_rows(log.to_rows())
        padded = log.padded("rollout_log_prob")
        return [padded.nan_to_num(), log.values("reward"), log.values("step")]

    pytest.importorskip("pyarrow", reason="needs rollcorr[log]")
    assert_same(elsewhere(logged), logged())
