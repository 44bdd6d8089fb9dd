"""Quantiles and the worst of a batch: by hand, against sorted values, merged, and without a wait."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import per_implementation

from rollcorr import Detail, RolloutCorrectionConfig, correct, merge_statistics
from rollcorr.core.detail_rows import RELATIVE_ERROR, WorstSequence, WorstToken, worst_of
from rollcorr.core.layout import pack
from rollcorr.core.metric_registry import finalize
from rollcorr.kernels.correction import implementations

CONFIG = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0)
QUANTILES = ("log_ratio_abs_p50", "log_ratio_abs_p99", "log_ratio_abs_p999", "rollout_is_p01", "rollout_is_p50")


def batch(B: int = 7, T: int = 13, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    train = -torch.rand(B, T, generator=generator)
    rollout = train + 0.5 * torch.randn(B, T, generator=generator)
    return train, rollout, torch.rand(B, T, generator=generator) < 0.8


@per_implementation
def test_the_worst_of_a_batch_by_hand():
    train = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -math.inf, -1.0], [-3.0, -1.0, -1.0]])
    rollout = torch.tensor([[-1.5, -2.0, 0.0], [-1.0, -1.0, math.nan], [-0.5, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])
    correction = correct(train, rollout, mask, CONFIG, detail=Detail(sequence_offset=10))
    worst = correction.worst()
    assert worst.tokens[:3] == (WorstToken(-math.inf, 11, 1), WorstToken(-2.5, 12, 0), WorstToken(0.5, 10, 0))
    assert worst.sequences == (
        WorstSequence(-math.inf, 11, 2),
        WorstSequence(-2.5, 12, 3),
        WorstSequence(0.5, 10, 2),
    )
    assert len(worst.tokens) == 7
    assert (correction.statistics.rows["tops"][:, 7:] == torch.tensor([0.0, -1.0, -1.0])).all(), "of no entry"


@per_implementation
def test_the_worst_must_be_asked_for():
    with pytest.raises(ValueError, match=r"ask for them: correct\(\.\.\., detail=True\)"):
        correct(*batch(), CONFIG).worst()
    assert not any("_p50" in name for name in correct(*batch(), CONFIG).metrics())


@per_implementation
def test_positions_must_have_the_shape_of_the_tokens():
    with pytest.raises(ValueError, match=r"train_log_prob \(7, 13\) and position_ids \(13,\) differ"):
        correct(*batch(), CONFIG, detail=Detail(position_ids=torch.arange(13)))


@per_implementation
@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
def test_quantiles_are_those_of_sorted_values(level):
    train, rollout, mask = batch(40, 50)
    correction = correct(train, rollout, mask, RolloutCorrectionConfig(rollout_is=level), detail=True)
    metrics = correction.metrics(prefix="")
    d = (train.double() - rollout.double()).masked_fill(~mask, 0.0)
    samples = {"log_ratio_abs": d[mask].abs(), "seq_log_ratio": d.sum(1)}
    if correction.weights is not None:
        samples["rollout_is"] = correction.weights[mask].double()
    for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        for sample, values in samples.items():
            if f"{sample}_{name}" in metrics:
                exact = values.sort().values[math.ceil(q * len(values)) - 1].item()
                assert metrics[f"{sample}_{name}"] == pytest.approx(exact, rel=RELATIVE_ERROR * 1.0001), (sample, name)
    assert ("rollout_is_p50" in metrics) == (level is not None)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**16), cuts=st.lists(st.integers(0, 7), max_size=3))
def test_packed_shards_merge_to_the_padded_whole(seed, cuts):
    train, rollout, mask = batch(seed=seed)
    whole = correct(train, rollout, mask, CONFIG, detail=True)
    parts, edges = [], [0, *sorted(cuts), 7]
    for start, end in pairwise(edges):
        rows = slice(start, end)
        positions = torch.arange(13).expand(7, 13)[rows][mask[rows]]
        (a, cu_seqlens), (b, _) = pack(train[rows], mask[rows]), pack(rollout[rows], mask[rows])
        detail = Detail(sequence_offset=start, position_ids=positions)
        ones = torch.ones(a.shape, dtype=torch.bool)
        parts.append(correct(a, b, ones, CONFIG, cu_seqlens=cu_seqlens, detail=detail).statistics)
    merged = merge_statistics(parts).read()
    assert worst_of(merged.tops).tokens == whole.worst().tokens
    for mine, other in zip(worst_of(merged.tops).sequences, whole.worst().sequences, strict=True):
        assert (mine.sequence, mine.tokens) == (other.sequence, other.tokens)
        assert mine.log_ratio == pytest.approx(other.log_ratio, rel=1e-6)
    metrics, expected = finalize(merged), whole.metrics()
    for name in QUANTILES:
        assert metrics[f"rollout_corr/{name}"] == expected[f"rollout_corr/{name}"]


@per_implementation
def test_a_packed_position_is_the_place_in_its_sequence():
    train, rollout = torch.tensor([0.0, 0.0, 0.0, -4.0, 0.0]), torch.zeros(5)
    detail = correct(train, rollout, torch.ones(5), CONFIG, cu_seqlens=torch.tensor([0, 2, 2, 5]), detail=True)
    assert detail.worst().tokens[0] == WorstToken(-4.0, 2, 1)


@per_implementation
@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0)])
def test_nothing_has_no_worst(shape):
    empty = torch.zeros(shape)
    correction = correct(empty, empty, empty, CONFIG, detail=True)
    assert correction.worst().tokens == correction.worst().sequences == ()
    assert correction.metrics()["rollout_corr/log_ratio_abs_p99"] == 0.0


@pytest.mark.skipif(not implementations()["cpu"][0], reason="the compiled kernel does not run here")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"rollout_is": "token"}, {"rollout_is": "sequence", "nonfinite": "neutral"}, {}])
def test_compiled_c_sees_what_torch_sees(options, dtype, packed):
    """Bin by bin and entry by entry, with ties, a missing log-prob, a probability of zero and empty sequences."""
    train, rollout, mask = batch(40, 50)
    train, rollout = train.mul(8).round().div(8).to(dtype), rollout.to(dtype)
    train[3, 5], rollout[4, 9], mask[7] = -math.inf, math.nan, False
    mask[3, 5] = mask[4, 9] = True
    positions = torch.arange(mask.numel()).view(mask.shape) * 3
    layout = {}
    if packed:
        inside = torch.arange(50) < torch.arange(40)[:, None]
        layout["cu_seqlens"] = pack(mask, inside)[1]
        train, rollout, mask, positions = (pack(x, inside)[0] for x in (train, rollout, mask, positions))

    config = RolloutCorrectionConfig(**options)
    for detail in (True, Detail(sequence_offset=100, position_ids=positions)):
        found = [correct(train, rollout, mask, config, **layout, detail=detail, impl=impl) for impl in ("cpu", "torch")]
        compiled, eager = (correction.statistics for correction in found)
        assert compiled.names == eager.names
        assert torch.equal(compiled.rows["histograms"], eager.rows["histograms"])
        assert torch.equal(compiled.rows["tops"], eager.rows["tops"])
        assert eager.rows["histograms"].sum() > 0


@pytest.mark.skipif(not implementations()["cpu"][0], reason="the compiled kernel does not run here")
def test_what_compiled_c_sees_does_not_depend_on_threads(threads):
    train, rollout, mask = batch(400, 200)
    seen = []
    for count in (1, 3):
        threads(count)
        seen.append(correct(train, rollout, mask, CONFIG, detail=True, impl="cpu").statistics.pack())
    assert torch.equal(*seen)
