"""Four processes, in groups of two and four, give the numbers of one: however rows and tokens are dealt."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import ranks
import torch
from processes import start_ranks
from ranks import CONFIGS, IMPLEMENTATIONS, LOSSES, MICRO_BATCHES, SIZE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank by scenario, from one start of four processes."""
    path = tmp_path_factory.mktemp("ranks")
    start_ranks(ranks.run, path, SIZE)
    return [torch.load(path / f"{rank}.pt", weights_only=False) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def trained_alone():
    """The trainer's step on one process, in one micro-batch."""
    if not ranks.HAS_TRAINER:
        pytest.skip("transformers is not installed: pip install 'rollcorr[train]'")
    return ranks.trained()


@pytest.fixture(scope="module")
def data():
    return ranks.make_data()


def assert_same_numbers(actual, expected):
    """Counts, metrics and the worst agree; float64 sums to 1e-12."""
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-12, abs=1e-12)
    assert actual["worst"] == expected["worst"]
    for one, other in zip(actual["denominators"], expected["denominators"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def assert_same_tokens(actual, expected, select):
    """Weights and mask equal the rows chosen by `select`, bit for bit."""
    assert torch.equal(actual["loss_mask"], select(expected["loss_mask"]))
    assert (actual["weights"] is None) == (expected["weights"] is None)
    if expected["weights"] is not None:
        torch.testing.assert_close(actual["weights"], select(expected["weights"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [2, 4])
def test_uneven_and_empty_data_parallel_ranks_equal_one_process(results, data, size, name):
    whole = ranks.corrected(data, CONFIGS[name])
    assert whole["metrics"]["rollout_corr/token_count"] > 0
    for rank in range(SIZE):
        actual, place = results[rank]["data", size, name], rank % size
        assert_same_numbers(actual, whole)
        rows = slice(*ranks.SHARDS[size][place : place + 2])
        assert_same_tokens(actual, whole, lambda x, rows=rows: x[rows])
        assert torch.equal(actual["sequence_kept"], whole["sequence_kept"][rows])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_choose_one_horizon_from_all_rows(results, data, size):
    """Also a rank without rows. The rows of one rank would give another horizon."""
    whole = ranks.with_chosen_horizon(data)
    assert 0 < whole["metrics"]["rollout_corr/rollout_is_horizon"] < 1
    for rank in range(SIZE):
        rows = slice(*ranks.SHARDS[size][rank % size : rank % size + 2])
        assert_same_numbers(results[rank]["chosen horizon", size], whole)
        assert_same_tokens(results[rank]["chosen horizon", size], whole, lambda x, rows=rows: x[rows])
    first = ranks.with_chosen_horizon(ranks.shard(data, size, 0))
    assert first["metrics"]["rollout_corr/rollout_is_horizon"] != whole["metrics"]["rollout_corr/rollout_is_horizon"]


@pytest.mark.covering(2)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("split", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_14_slices_of_sequences_are_decided_as_whole_sequences(results, data, name, split, packed):
    """Known failure 14: sequence statistics of each context rank by itself."""
    whole_data = data.tokens(ranks.inside(data), packed=True) if packed else data
    for size, impl in itertools.product((2, 4), IMPLEMENTATIONS[split]):
        whole = ranks.corrected(whole_data, CONFIGS[name], impl=impl)
        for rank in range(SIZE):
            part = results[rank]["context", size, name, split, packed, impl]
            owned = ranks.context_slice(data, size, rank % size, split, packed=packed)
            assert_same_numbers(part, whole)
            assert_same_tokens(part, whole, functools.partial(slice_of, owned=owned, data=data))
            assert torch.equal(part["sequence_kept"], whole["sequence_kept"])


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("per_turn", [False, True])
def test_horizons_reach_over_the_ranks_slices(results, data, packed, per_turn):
    """Slices in the order of the ranks have the weights of whole sequences; zig-zag ones are refused."""
    whole = data.tokens(ranks.inside(data), packed=True) if packed else data
    whole = ranks.corrected(whole, ranks.horizon_fields(per_turn))
    for rank, size in itertools.product(range(SIZE), (2, 4)):
        owned = ranks.context_slice(data, size, rank % size, "contiguous", packed=packed)
        part = results[rank]["context horizon", size, packed, per_turn]
        assert_same_numbers(part, whole)
        assert_same_tokens(part, whole, functools.partial(slice_of, owned=owned, data=data))
        error = results[rank]["zig-zag horizon", size]
        assert re.search(
            r"rank \d begins at position \d+, and an earlier rank has \d+; it may begin at \d+: gather", error
        )


def slice_of(whole, *, owned, data):
    """Return a rank's part of a padded or packed tensor."""
    if owned.cu_seqlens is None:
        return whole[:, owned.position[0]]
    padded = torch.zeros(data.mask.shape, dtype=whole.dtype).masked_scatter(ranks.inside(data), whole)
    return padded[torch.arange(len(padded)).repeat_interleave(owned.cu_seqlens.diff()), owned.position]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mesh_of_both_groups_counts_every_token_once(results, data, name):
    whole = ranks.corrected(data, CONFIGS[name])
    for rank in range(SIZE):
        rows = slice(*ranks.SHARDS[2][rank // 2 : rank // 2 + 2])
        owned = ranks.context_slice(data, 2, rank % 2, "zig-zag", packed=False).position[0]
        assert_same_numbers(results[rank]["both", name], whole)
        assert_same_tokens(results[rank]["both", name], whole, lambda x, rows=rows, owned=owned: x[rows][:, owned])


def test_the_data_meet_every_rejection(data):
    """Guard the tests above against trivial data."""
    for name in set(CONFIGS) - {"metrics only"}:
        metrics = ranks.corrected(data, CONFIGS[name])["metrics"]
        assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1, name
        assert metrics["rollout_corr/nonfinite_count"] == metrics["rollout_corr/zero_probability_count"] == 1


@pytest.mark.parametrize("mode", LOSSES)
def test_an_optimizer_step_is_the_same_for_any_ranks_slices_and_micro_batches(results, data, mode):
    whole = ranks.optimizer_step(data, mode, 9)
    steps = [ranks.optimizer_step(data, mode, micro_batch) for micro_batch in MICRO_BATCHES]
    for rank in range(SIZE):
        steps += [results[rank]["step", size, mode, micro] for size in (2, 4) for micro in MICRO_BATCHES]
        steps += [results[rank]["context step", size, mode] for size in (2, 4)] + [results[rank]["both step", mode]]
    if not mode.startswith("bypass"):
        # Recounted weights are float32, the statistics' weights float64.
        counted_anew = [results[rank]["mini-batch step", mode] for rank in range(SIZE)]
        for step in counted_anew:
            torch.testing.assert_close(step["gradients"], whole["gradients"], rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(step["loss"], whole["loss"], rtol=1e-6, atol=1e-9)
    assert 0 < whole["correction"]["rollout_corr/rollout_rs_masked_fraction"] < 1
    start = torch.cat([p.detach().flatten() for p in ranks.Policy().parameters()])
    assert (whole["parameters"] - start).abs().max() > 0.05
    for step in steps:
        torch.testing.assert_close(step["gradients"], whole["gradients"], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(step["parameters"], whole["parameters"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step["loss"], whole["loss"], rtol=1e-12, atol=1e-12)
        for kind in ("metrics", "correction"):
            assert step[kind] == pytest.approx(whole[kind], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_the_trainer_takes_the_same_step_on_one_two_and_four_ranks_in_any_micro_batches(results, mode, trained_alone):
    alone = trained_alone[mode]
    assert 0 < alone["metrics"]["rollout_corr/rollout_rs_masked_fraction"] < 1
    for size, micro_batch in itertools.product((2, 4), ranks.TRAINER_MICRO_BATCHES):
        first = results[0]["trainer", size, micro_batch][mode]
        torch.testing.assert_close(first["parameters"], alone["parameters"], atol=2e-5, rtol=0)
        torch.testing.assert_close(first["log_prob"], alone["log_prob"], atol=2e-5, rtol=1e-4)
        assert first["metrics"] == pytest.approx(alone["metrics"], rel=2e-3, abs=2e-5)
        for rank in range(1, SIZE):
            assert torch.equal(results[rank]["trainer", size, micro_batch][mode]["parameters"], first["parameters"])


@pytest.mark.usefixtures("trained_alone")
def test_a_step_of_which_no_rank_keeps_anything_moves_no_weight_on_any_rank(results):
    """Three mini-batches; with four ranks some of them have no row."""
    for size, rank in itertools.product((2, 4), range(SIZE)):
        result = results[rank]["trainer", size, 1]["nothing kept"]
        assert result["metrics"]["rollout_corr/rollout_rs_masked_fraction"] == 1.0
        assert result["metrics"]["actor/skipped_steps"] == 3
        assert torch.equal(result["parameters"], result["before"])


@pytest.mark.parametrize("size", [2, 4])
def test_every_slice_reports_a_swapped_correction(results, size):
    assert all("are swapped" in results[rank]["context swapped", size] for rank in range(SIZE))


def test_groups_that_share_a_second_rank_are_refused(results):
    assert "ranks [1, 2, 3] are in the data-parallel and in the context group" in results[0]["overlap"]
