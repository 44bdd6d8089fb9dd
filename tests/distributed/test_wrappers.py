"""Bypass mode under real wrappers: every rank ends with the gradient of one process that has all rows."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import wrapper_ranks
from processes import start_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from wrapper_ranks import LOSSES, SHARDS, SIZE, TERMS, cases

from rollcorr.correction.training_step import TrainingStep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"),
        reason="FSDP2 needs torch 2.7 or newer on a CPU",
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank, from one start of three processes."""
    path = tmp_path_factory.mktemp("wrappers")
    start_ranks(wrapper_ranks.run, path, SIZE)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def expected():
    """Return gradient and factor of all rows in one process."""
    return {key: wrapper_ranks.alone(*key) for key in itertools.product(TERMS, LOSSES)}


def assert_same(actual, expected):
    """Equal within 1e-9 of the largest entry of the gradient, and missing where it is."""
    largest = max(g.abs().max().item() for g in expected.values() if g is not None)
    assert largest > 1e-3
    for name, gradient in expected.items():
        assert (actual[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(actual[name], gradient, rtol=0, atol=1e-9 * largest, msg=name)


@pytest.mark.parametrize(("size", "wrapper"), sorted({(size, case[0]) for size in SHARDS for case in cases(size)}))
def test_52_every_wrapper_split_and_loss_gives_the_gradient_of_one_process(results, expected, size, wrapper):
    for case, rank in itertools.product((case for case in cases(size) if case[0] == wrapper), range(size)):
        (gradients, factor), (whole, ratio) = results[rank][(size, *case)], expected[case[2:]]
        assert_same(gradients, whole)
        assert factor == pytest.approx(ratio, rel=1e-12)
        assert abs(ratio - 1) > 0.05


def test_the_cases_meet_every_pair(results):
    """Guards the test above against a table that has shrunk."""
    for size in (2, 3):
        met = cases(size)
        assert set(results[0]) >= {(size, *case) for case in met}
        pairs = {(i, j, case[i], case[j]) for case in met for i, j in itertools.combinations(range(4), 2)}
        assert len(pairs) == 16 + 20 + 10 + 16 + 8 + 8


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_ddp_hold_the_same_bits(results, size):
    for case in (case for case in cases(size) if case[0].startswith("DDP")):
        first, _ = results[0][(size, *case)]
        for rank in range(1, size):
            other, _ = results[rank][(size, *case)]
            assert all(g is None or torch.equal(g, other[name]) for name, g in first.items())


@pytest.mark.parametrize("size", SHARDS)
def test_after_the_step_ddp_reduces_by_itself_again(results, size):
    model, data = wrapper_ranks.Policy(), wrapper_ranks.make_data()
    (wrapper_ranks.policies_of(model, data)[0].log_prob.sum() / size).backward()
    mean = wrapper_ranks.gradients(model)
    for rank in range(size):
        found = results[rank][size, "afterwards"]
        torch.testing.assert_close(found["first.weight"], mean["first.weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["FSDP2 sums", "HSDP", ("recomputed", "DDP"), ("recomputed", "FSDP2")])
def test_fsdp2_that_sums_or_replicates_and_checkpointing_give_the_same(results, expected, case):
    for rank in range(2):
        assert_same(results[rank][case][0], expected["both", "ppo_clip"][0])


@pytest.mark.parametrize("wrapper", ["plain", "DDP", "FSDP2"])
def test_slices_of_sequences_on_the_ranks_of_a_wrapper_give_the_same(results, expected, wrapper):
    for rank in range(2):
        assert_same(results[rank]["context", wrapper][0], expected["both", "reinforce"][0])


@pytest.mark.parametrize("wrapper", ["plain", "DDP", "FSDP2"])
def test_other_losses_are_summed_over_ranks_unscaled(results, expected, wrapper):
    model = wrapper_ranks.Policy()
    wrapper_ranks.other_loss(model, wrapper_ranks.make_data()).backward()
    others, (scaled, _) = wrapper_ranks.gradients(model), expected["none", "ppo_clip"]
    whole = {name: None if gradient is None else gradient + others[name] for name, gradient in scaled.items()}
    for rank in range(2):
        assert_same(results[rank]["other loss", wrapper], whole)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_wrapper_over_more_ranks_than_the_groups_is_refused(results, wrapper):
    message = f"{wrapper} reduces gradients over 2 ranks, and group and context_group together have 1: give as group"
    assert message in results[0]["no group", wrapper]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A group of this process only."""
    path = tmp_path_factory.mktemp("group") / "init"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def step_for(model, group):
    return TrainingStep(model, wrapper_ranks.config("ppo_clip"), group=group)


def test_a_forward_pass_outside_the_block_is_an_error_and_no_wrong_number(one_rank):
    model, data = DistributedDataParallel(wrapper_ranks.Policy(always=True)), wrapper_ranks.make_data()
    policies, _ = wrapper_ranks.policies_of(model, data)
    refused = pytest.raises(RuntimeError, match="the forward pass ran with DDP's reducer armed")
    with refused, step_for(model, one_rank) as step:
        step.backward(step.policy_loss(policies, data["advantages"], data["mask"]))
    assert all(p.grad is None for p in model.parameters())


def test_the_reducer_is_on_again_after_an_exception(one_rank):
    model = DistributedDataParallel(wrapper_ranks.Policy())
    step = step_for(model, one_rank)
    with pytest.raises(KeyError), step:
        step.backward({}["an output"])
    assert model.require_backward_grad_sync


def test_wrappers_that_cannot_hold_gradients_apart_are_refused(one_rank):
    static = DistributedDataParallel(wrapper_ranks.Policy(), static_graph=True)
    with pytest.raises(ValueError, match=r"DDP\(static_graph=True\) knows no no_sync\(\)"):
        step_for(static, one_rank).__enter__()
    with pytest.warns(UserWarning, match="NO_SHARD"):
        older = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"wrap the model with torch\.distributed\.fsdp\.fully_shard"):
        step_for(nn.Sequential(older), one_rank).__enter__()
