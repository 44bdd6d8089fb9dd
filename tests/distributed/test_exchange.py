"""Number and size of messages; and sums that can be checked in one process."""

from __future__ import annotations

import pytest
import ranks
import torch
import torch.distributed as dist

from rollcorr import Detail, correct
from rollcorr.core.aggregation import Denominators
from rollcorr.core.detail_rows import BINS, TOP
from rollcorr.correction.denominators import count_denominators, sum_denominators
from rollcorr.correction.process_groups import (
    BLOCK,
    _split_into_buckets,
    filled_blocks,
    gather_slices,
    sum_gradients,
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A group of this process only."""
    path = tmp_path_factory.mktemp("group") / "init"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch):
    """Numbers in each vector that is gathered from now on."""
    sizes: list[int] = []
    gather = dist.all_gather

    def counted(parts, vector, group):
        sizes.append(vector.numel())
        assert vector.dtype == torch.float64
        gather(parts, vector, group=group)

    monkeypatch.setattr(dist, "all_gather", counted)
    return sizes


def batch(B: int = 9):
    data = ranks.make_data()
    return data.old[:B], data.rollout[:B], data.mask[:B]


def test_a_data_parallel_group_gathers_one_block_of_doubles_once(alone, sent):
    for fields in ({}, ranks.STANDARD, ranks.STANDARD | {"rollout_token_veto_threshold": 1e-4}):
        sent.clear()
        plain = correct(*batch(), ranks.config(fields), group=alone)
        assert sent == [BLOCK]
        assert plain.statistics.pack().numel() < 90


def test_every_criterion_at_once_still_takes_one_gather(alone, sent):
    names = [f"{scope}_{kind}" for scope in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")]
    names += ["seq_max_k2", "seq_max_k3"]
    fields = {"rollout_is": "token", "rollout_rs": ",".join(names), "rollout_rs_threshold": "2.0"}
    correct(*batch(), ranks.config(fields), group=alone)
    assert sent == [BLOCK]


def test_detail_travels_in_the_same_gather(alone, sent):
    plain = correct(*batch(), ranks.config(ranks.STANDARD), group=alone)
    detailed = correct(*batch(), ranks.config(ranks.STANDARD), group=alone, detail=True)
    numbers = [result.statistics.pack().numel() for result in (plain, detailed)]
    assert numbers[1] - numbers[0] == 3 * BINS + 2 * TOP * 3
    assert sent == [filled_blocks(number) for number in numbers]
    assert sent[1] == 34 * BLOCK


@pytest.mark.parametrize("B", [1, 9])
def test_a_context_group_gathers_the_table_once_before_anything_is_decided(alone, sent, B):
    correct(*batch(B), ranks.config(ranks.STANDARD), context_group=alone)
    assert len(sent) == 1
    assert sent[0] < 10 * B + 46


def test_a_group_of_one_changes_nothing(alone):
    data = ranks.make_data()
    for fields in ranks.CONFIGS.values():
        plain = ranks.corrected(data, fields)
        for impl in ("torch", "reference"):
            reduced = ranks.corrected(data, fields, context_group=alone, group=alone, impl=impl)
            assert reduced["metrics"] == pytest.approx(plain["metrics"], rel=1e-12, abs=1e-12)
            assert torch.equal(reduced["loss_mask"], plain["loss_mask"])
            assert reduced["worst"] == plain["worst"]


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 2, 2, 6])])
def test_gathered_slices_are_packed_and_know_their_own_tokens(alone, cu_seqlens):
    values = torch.arange(6.0) if cu_seqlens is not None else torch.arange(6.0).view(3, 2)
    whole = gather_slices(values, values > 2, cu_seqlens=cu_seqlens, group=alone)
    assert whole.cu_seqlens.tolist() == ([0, 2, 2, 6] if cu_seqlens is not None else [0, 2, 4, 6])
    assert torch.equal(whole.tensors[0][whole.own], values)
    assert whole.tensors[1].dtype == torch.bool


def test_denominators_over_groups_of_one_process_are_those_without_groups(alone):
    _, _, mask = batch()
    weights = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1))
    packed = {"cu_seqlens": torch.tensor([0, 0, 30, 108])}
    groups = {"group": alone, "context_group": alone}
    for tokens, options in ((mask, {}), (mask, {"weights": weights}), (mask.flatten(), packed)):
        actual, expected = count_denominators(tokens, **options, **groups), count_denominators(tokens, **options)
        torch.testing.assert_close(actual.tokens, expected.tokens, rtol=1e-12, atol=0)
        torch.testing.assert_close(actual.sequences, expected.sequences, rtol=1e-12, atol=0)


def test_a_rank_without_data_adds_nothing(alone):
    total = sum_denominators(Denominators(0.0, 0.0), alone)
    assert (total.tokens.item(), total.sequences.item()) == (0.0, 0.0)
    assert total.tokens.dtype == torch.float64


def test_gradients_of_several_dtypes_are_summed_and_missing_ones_stay_missing(alone):
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    parameters.append(torch.nn.Parameter(torch.ones(3)))
    frozen = torch.ones(1)
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 2.0)
    sum_gradients([*parameters, frozen], alone)
    assert [p.grad.tolist() for p in parameters[:2]] == [[2.0, 2.0]] * 2
    assert parameters[2].grad is None
    sum_gradients([], alone)


def test_gradients_travel_in_buckets_of_a_bounded_size():
    tensors = [torch.zeros(n) for n in (3, 2, 9, 1, 1, 1, 1)]  # four bytes an entry
    buckets = _split_into_buckets(tensors, limit=12)
    assert [[x.numel() for x in bucket] for bucket in buckets] == [[3], [2], [9, 1], [1, 1, 1]]
    assert list(_split_into_buckets([])) == []


def test_detail_names_tokens_by_what_the_caller_says():
    train, rollout = torch.full((1, 3), -2.0), torch.tensor([[-2.0, 0.0, -2.0]])
    detail = Detail(sequence_offset=4, position_ids=torch.tensor([[0, 7, 9]]))
    token = correct(train, rollout, torch.ones(1, 3), "disabled", detail=detail).worst().tokens[0]
    assert (token.log_ratio, token.sequence, token.position) == (-2.0, 4, 7)
