"""correct(): the result of one call with three tensors."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from implementations import IMPLEMENTATIONS, per_implementation, widest_dtype
from torch.utils._python_dispatch import TorchDispatchMode

from rollcorr import correct
from rollcorr.config import InertOptionWarning, RolloutCorrectionConfig
from rollcorr.core.mergeable_statistics import Statistics
from rollcorr.correction.denominators import count_denominators

HALF = math.log(0.5)


def batch(seed: int = 0, B: int = 6, T: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(B, T, generator=generator) * 2
    train = rollout + 0.4 * torch.randn(B, T, generator=generator)
    return train, rollout, torch.rand(B, T, generator=generator) < 0.8


def config(**fields) -> RolloutCorrectionConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return RolloutCorrectionConfig(**fields)


@per_implementation
def test_a_batch_worked_by_hand():
    """Two sequences, ρ = (2, 1/2, –) and (4, 1, 1): weights, masks, counts and every kind of metric."""
    log = torch.tensor([[2.0, 0.5, 9.0], [4.0, 1.0, 1.0]], dtype=widest_dtype()).log()
    rollout = torch.full_like(log, math.log(0.25))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    correction = correct(
        rollout + log, rollout, mask, config(rollout_is="token", rollout_rs="seq_sum_k1", rollout_rs_threshold=2.0)
    )
    assert correction.weights.tolist() == [[2.0, 0.5, 0.0], [2.0, 1.0, 1.0]]
    assert correction.loss_mask.tolist() == [[True, True, False], [False, False, False]]
    assert correction.sequence_kept.tolist() == [True, False]
    metrics = correction.metrics(prefix="")
    expected = {
        "token_count": 5, "sequence_count": 2,
        "kl": 2 * HALF / 5,
        "k3_kl": ((1 + HALF) + (-0.5 - HALF) + (3 + 2 * HALF)) / 5,
        "chi2_token": (3 - 0.75 + 15) / 5,
        "chi2_seq": (0 + 15) / 2,
        "rollout_ppl": 4.0, "rollout_log_ppl": math.log(4.0),
        "training_ppl": (4.0 + 4 / 4 ** (1 / 3)) / 2,
        "log_ppl_diff": HALF * 2 / 3 / 2, "log_ppl_diff_max": 0.0, "log_ppl_diff_min": 2 * HALF / 3,
        "log_ppl_abs_diff": -HALF / 3,
        "ppl_ratio": (1 + 4 ** (-1 / 3)) / 2, "ppl_ratio_geo": math.exp(HALF / 3),
        "log_ratio_min": HALF, "log_ratio_max": -2 * HALF, "log_ratio_abs_mean": -4 * HALF / 5,
        "prob_diff_abs_mean": (0.25 + 0.125 + 0.75) / 5, "prob_diff_abs_max": 0.75,
        "ratio_outside_10pct": 3 / 5,
        "rollout_is_mean": 6.5 / 5, "rollout_is_min": 0.5, "rollout_is_max": 2.0,
        "rollout_is_raw_mean": 8.5 / 5, "rollout_is_raw_max": 4.0,
        "rollout_is_ratio_fraction_high": 1 / 5, "rollout_is_ratio_fraction_low": 0.0,
        "rollout_is_eff_sample_size": 6.5**2 / (5 * (4 + 0.25 + 4 + 1 + 1)),
        "rollout_is_seq_mean": (1.25 + 4 / 3) / 2, "rollout_is_seq_max_deviation": 1 / 3,
        "rollout_is_seq_fraction_high": 0.0, "rollout_is_low_weight_fraction": 0.0,
        "rollout_rs_masked_fraction": 3 / 5, "rollout_rs_seq_masked_fraction": 0.5,
        "rollout_rs_seq_sum_k1_mean": HALF, "rollout_rs_seq_sum_k1_fraction_high": 0.5,
        "rollout_rs_seq_sum_k1_masked_fraction": 3 / 5, "rollout_rs_seq_sum_k1_alone_fraction": 3 / 5,
        "t_times_kl": 2.5 * 2 * HALF / 5, "max_viable_length": 1e9,
    }  # fmt: skip
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value), name


@pytest.mark.parametrize(
    "given",
    [
        "decoupled_token_is",
        {"rollout_is": "token"},
        {"rollout_is_level": "token", "rollout_is_mode": "truncate", "rollout_is_threshold": 2.0, "rollout_is": True},
        {"rollout_is": "token", "bypass_old_logprob_for_rollout": False},
        RolloutCorrectionConfig(rollout_is="token"),
    ],
)
def test_a_preset_a_dictionary_of_any_generation_or_a_configuration(given):
    expected, actual = correct(*batch(), RolloutCorrectionConfig(rollout_is="token")), correct(*batch(), given)
    assert torch.equal(actual.weights, expected.weights)
    assert actual.metrics() == expected.metrics()


@per_implementation
def test_no_correction_at_all_computes_nothing():
    """2025-10 with a null threshold: neither weights nor metrics, which is not `disabled`."""
    train, rollout, mask = batch()
    correction = correct(train, rollout, mask, {"rollout_is_threshold": None, "rollout_is": True})
    assert correction.weights is None
    assert torch.equal(correction.loss_mask, mask)
    assert correction.sequence_kept.all()
    assert correction.metrics() == {}
    assert correct(train, rollout, mask, "disabled").metrics()
    own, counted = correction.denominators(), count_denominators(mask)
    assert (own.tokens, own.sequences) == (counted.tokens, counted.sequences)


@per_implementation
def test_metrics_only_changes_nothing():
    train, rollout, mask = batch()
    correction = correct(train, rollout, mask, "disabled")
    assert correction.weights is None
    assert torch.equal(correction.loss_mask, mask)
    measured = correct(train, rollout, mask, config(rollout_is="token", apply_is=False))
    assert measured.weights is not None
    assert measured.loss_weights is None


@per_implementation
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (2, 4)])
def test_an_empty_or_masked_batch_gives_shapes_and_zero_counts(shape):
    zeros = torch.full(shape, math.nan)
    mask = torch.zeros(shape)
    for preset in ("decoupled_seq_is_rs", "decoupled_k3_rs_token_tis", "decoupled_token_icepop", "disabled"):
        correction = correct(zeros, zeros, mask, preset)
        assert correction.loss_mask.shape == shape
        assert correction.sequence_kept.tolist() == [True] * shape[0]
        metrics = correction.metrics(prefix="")
        assert metrics["token_count"] == metrics["sequence_count"] == 0
        assert all(value == 0.0 for value in metrics.values()), metrics


@per_implementation
def test_a_probability_of_zero_is_a_fact_and_not_missing():
    """log π = −inf: weight 0, rejected by k1 with a lower bound, k2, k3 and the veto; out of log-space metrics."""
    train, rollout = torch.tensor([[-1.0, -math.inf]]), torch.full((1, 2), -1.0)
    mask = torch.ones(1, 2)
    correction = correct(train, rollout, mask, config(rollout_is="token"))
    assert correction.weights.tolist() == [[1.0, 0.0]]
    assert correction.loss_mask.all()
    metrics = correction.metrics(prefix="")
    assert (metrics["zero_probability_count"], metrics["nonfinite_count"]) == (1.0, 0.0)
    assert metrics["kl"] == metrics["k3_kl"] == 0.0
    assert metrics["training_log_ppl"] == 1.0
    assert metrics["chi2_token"] == -0.5
    for name, threshold, kept in (
        ("token_k1", "0.5_2.0", [True, False]),
        ("token_k1", "0_2.0", [True, True]),
        ("token_k2", 9.0, [True, False]),
        ("token_k3", 9.0, [True, False]),
        ("seq_mean_k1", "0.5_2.0", [False, False]),
        ("seq_sum_k1", "0_2.0", [True, True]),
        ("seq_max_k2", 9.0, [False, False]),
    ):
        rejecting = config(rollout_rs=name, rollout_rs_threshold=threshold)
        assert correct(train, rollout, mask, rejecting).loss_mask.tolist() == [kept], (name, threshold)
    vetoed = correct(train, rollout, mask, config(rollout_token_veto_threshold=1e-6))
    assert not vetoed.loss_mask.any()
    for level in ("sequence", "geometric"):
        assert correct(train, rollout, mask, config(rollout_is=level)).weights.tolist() == [[0.0, 0.0]]


@per_implementation
def test_the_veto_is_strict_and_independent_of_weights():
    log = torch.tensor([[1e-4, 1.0], [0.99e-4, 1.0]], dtype=widest_dtype()).log()
    rollout = torch.full_like(log, -1.0)
    correction = correct(rollout + log, rollout, torch.ones(2, 2), config(rollout_token_veto_threshold=1e-4))
    assert correction.loss_mask.tolist() == [[True, True], [False, False]]
    metrics = correction.metrics(prefix="")
    assert metrics["rollout_is_veto_fraction"] == 0.5
    assert metrics["rollout_is_catastrophic_token_fraction"] == 0.25


@per_implementation
def test_shares_are_at_most_one_when_missing_tokens_count_as_ratio_one():
    """Ratio 1 is below the band 1.5–2, and the missing tokens count in the denominator as in the numerator."""
    train = torch.tensor([[-1.0, math.nan, math.nan, math.nan]])
    neutral = config(nonfinite="neutral", rollout_rs="token_k1", rollout_rs_threshold="1.5_2.0")
    metrics = correct(train, torch.full((1, 4), -1.0), torch.ones(1, 4), neutral).metrics(prefix="")
    assert metrics["rollout_rs_token_k1_fraction_low"] == 1.0


@per_implementation
def test_what_a_criterion_rejects_alone_and_with_others():
    """ρ = (3, 1) and (3, 3): token_k1 ≤ 2 rejects the 3s, seq_sum_k1 ≤ 5 the second sequence."""
    log = torch.tensor([[3.0, 1.0], [3.0, 3.0]]).log()
    criteria = config(rollout_rs="token_k1,seq_sum_k1", rollout_rs_threshold="0_2,0_5")
    correction = correct(log - 2, torch.zeros(2, 2) - 2, torch.ones(2, 2), criteria)
    assert correction.loss_mask.tolist() == [[False, True], [False, False]]
    metrics = correction.metrics(prefix="rs/")
    assert metrics["rs/rollout_rs_token_k1_masked_fraction"] == 3 / 4
    assert metrics["rs/rollout_rs_token_k1_alone_fraction"] == 1 / 4
    assert metrics["rs/rollout_rs_token_k1_seq_alone_fraction"] == 1 / 2
    assert metrics["rs/rollout_rs_seq_sum_k1_masked_fraction"] == 2 / 4
    assert metrics["rs/rollout_rs_seq_sum_k1_alone_fraction"] == 0.0
    assert metrics["rs/rollout_rs_overlap_fraction"] == 2 / 4
    assert metrics["rs/rollout_rs_seq_overlap_fraction"] == 1 / 2


@per_implementation
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_per_sequence_shares_are_of_the_weights_after_the_safety_bound(level):
    """ρ = e³ is beyond the ceiling 4, and its raw weight e¹ is not; ρ = 0 stays below every floor."""
    train, rollout = torch.tensor([[3.0], [0.0], [-math.inf]]), torch.zeros(3, 1)
    bounded = config(rollout_is=level, rollout_is_threshold=4.0, safety_bound=1.0)
    metrics = correct(train, rollout, torch.ones(3, 1), bounded).metrics(prefix="")
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert metrics["rollout_is_seq_fraction_high"] == 0.0
    assert metrics["rollout_is_seq_fraction_low"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_empty_batch_may_have_any_strides(impl):
    """NumPy's empty arrays have strides of 0."""
    empty = torch.empty(0).as_strided((0, 5), (0, 0))
    assert correct(empty, empty, empty, "decoupled_token_is", impl=impl).loss_mask.shape == (0, 5)


@per_implementation
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("over", ["valid", "kept"])
def test_batch_normalisation_makes_the_mean_of_its_units_one(level, over):
    criteria = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.85_1.15"}
    correction = correct(
        *batch(), config(rollout_is=level, rollout_is_batch_normalize=True, batch_normalize_over=over, **criteria)
    )
    mask = correction.loss_mask if over == "kept" else batch()[2]
    assert 0 < correction.loss_mask.sum() < batch()[2].sum()
    weights = correction.weights.double().masked_fill(~mask, 0.0)
    if level == "token":
        mean = weights.sum() / mask.sum()
    else:
        per_sequence = weights.sum(-1) / mask.sum(-1).clamp(min=1)
        mean = per_sequence.sum() / mask.any(-1).sum()
    assert mean.item() == pytest.approx(1.0, rel=1e-6)
    plain = correct(*batch(), config(rollout_is=level, **criteria)).metrics(prefix="")
    assert correction.metrics(prefix="")["rollout_is_mean"] == plain["rollout_is_mean"]


@per_implementation
def test_denominators_follow_the_normalizer():
    train, rollout, mask = batch()
    correction = correct(train, rollout, mask, "decoupled_k3_rs_token_tis")
    kept, original, weights = (correction.denominators(name) for name in ("kept", "original", "weights"))
    assert kept.tokens == correction.loss_mask.sum()
    assert kept.sequences == correction.loss_mask.any(-1).sum()
    assert (original.tokens, original.sequences) == (mask.sum(), mask.any(-1).sum())
    applied = correction.weights.double().masked_fill(~correction.loss_mask, 0.0)
    assert weights.tokens.item() == pytest.approx(applied.sum().item(), rel=1e-6)
    assert correction.denominators().tokens == kept.tokens


@per_implementation
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalized_weights_are_summed_as_applied(level):
    """The statistics contain Σ w before batch normalization; the loss divides by the sum after it."""
    normalized = {"rollout_is_batch_normalize": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.6_1.7"}
    correction = correct(*batch(), config(rollout_is=level, **normalized))
    applied = count_denominators(correction.loss_mask, weights=correction.weights)
    summed = correction.denominators("weights")
    assert summed.tokens.item() == pytest.approx(applied.tokens.item(), rel=1e-6)
    assert summed.sequences.item() == pytest.approx(applied.sequences.item(), rel=1e-6)


class _Reads(TorchDispatchMode):
    """Counts operations that bring a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name in {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique"}
        return func(*args, **(kwargs or {}))


@per_implementation
@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("preset", ["decoupled_seq_is_rs", "decoupled_geo_rs_token_tis", "geo_mis"])
def test_nothing_is_read_until_metrics_are_and_then_once(preset, detail, monkeypatch):
    read = []
    monkeypatch.setattr(Statistics, "read", lambda self, bring=Statistics.read: read.append(1) or bring(self))
    with _Reads() as reads:
        correction = correct(*batch(), preset, detail=detail)
        assert not read
        correction.metrics()
    assert reads.count == 0
    assert read == [1]


def test_packed_batches_check_their_offsets_shape():
    tokens = torch.zeros(6)
    with pytest.raises(ValueError, match="with cu_seqlens"):
        correct(tokens, tokens, tokens, "disabled")
    with pytest.raises(ValueError, match=r"packed \(N,\)"):
        correct(tokens.view(2, 3), tokens.view(2, 3), tokens.view(2, 3), "disabled", cu_seqlens=torch.tensor([0, 3, 6]))
