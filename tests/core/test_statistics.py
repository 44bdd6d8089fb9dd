"""Merging is exact: any split of a sample has the statistics of the sample."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core.detail_rows import histogram_of, top_entries, top_indices
from rollcorr.core.host_statistics import kish_sample_size
from rollcorr.core.mergeable_statistics import Statistics, extremes_of, merge_statistics, moments_of

NAN = math.nan


def of(values: torch.Tensor, mask: torch.Tensor | None = None) -> Statistics:
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    return Statistics.of(
        sums={"n": mask.sum()},
        moments={"x": moments_of(values, mask)},
        extremes={"x": extremes_of(values, mask)},
    )


def test_moments_and_extremes_by_hand():
    host = of(torch.tensor([1.0, 2.0, 6.0, NAN]), torch.tensor([True, True, True, False])).read()
    assert host.sums == {"n": 3.0}
    assert host.moments["x"].mean == 3.0
    assert host.moments["x"].m2 == 4.0 + 1.0 + 9.0
    assert host.moments["x"].std == pytest.approx(math.sqrt(14 / 3))
    assert (host.extremes["x"].min, host.extremes["x"].max) == (1.0, 6.0)


def test_effective_sample_size_by_hand():
    assert kish_sample_size(2, 0.5, 0.5) == pytest.approx(0.5)  # weights 1 and 0: 1² / (2 · 1)
    assert kish_sample_size(0, 0.0, 0.0) == 0.0
    assert kish_sample_size(4, 0.0, 0.0) == 0.0
    assert kish_sample_size(4, math.exp(-20), 0.0) == 1.0


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=7),
)
def test_any_split_merges_to_the_whole(values, cuts):
    values = torch.tensor(values, dtype=torch.float64)
    whole = of(values).read()
    merged = merge_statistics(of(part) for part in values.tensor_split(sorted(cuts))).read()
    assert merged.sums == whole.sums
    assert merged.extremes == whole.extremes
    scale = values.abs().max().item() + 1e-300
    assert merged.moments["x"].mean == pytest.approx(whole.moments["x"].mean, abs=1e-12 * scale)
    assert merged.moments["x"].std == pytest.approx(whole.moments["x"].std, abs=1e-12 * scale)


def test_a_large_mean_cancels_nothing():
    """In float32, E[x²] − E[x]² is 0 here; in float64 it loses half of the digits."""
    values = 1e4 + 1e-3 * torch.tensor([-1.0, 1.0], dtype=torch.float64).repeat(50)
    parts = merge_statistics(of(part) for part in values.split(7))
    assert parts.read().moments["x"].std == pytest.approx(1e-3, rel=1e-7)


def test_pack_and_unpack_are_inverse_and_one_vector():
    statistics = of(torch.tensor([1.0, 2.0]))
    vector = statistics.pack()
    assert vector.shape == (1 + 3 + 2,)
    assert statistics.unpack(vector).read() == statistics.read()


def test_an_empty_sample_merges_to_the_other():
    filled = of(torch.tensor([2.0, 4.0]))
    assert of(torch.zeros(0)).merge(filled).read() == filled.read()


def test_rows_must_agree_to_merge_and_differ_to_join():
    other = Statistics.of(sums={"m": torch.tensor(1.0)}, moments={}, extremes={})
    with pytest.raises(ValueError, match=r"\['m', 'n', 'x'\]"):
        of(torch.ones(1)).merge(other)
    joined = (of(torch.ones(2)) | other).read()
    assert joined.sums == {"n": 2.0, "m": 1.0}
    with pytest.raises(ValueError, match=r"both sides: \['m'\]"):
        _ = other | other
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_statistics([])


def full(values: torch.Tensor, start: int) -> Statistics:
    """A row of every kind."""
    mask = torch.ones_like(values, dtype=torch.bool)
    found, exists = top_indices(values, mask)
    return Statistics.of(
        sums={"total": values.sum()},
        moments={"x": moments_of(values, mask)},
        extremes={"x": extremes_of(values, mask)},
        histograms={"x": histogram_of(values, mask)},
        tops={"x": top_entries(values[found], found + start, found, exists)},
    )


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), max_size=60),
    shards=st.integers(1, 8),
    seed=st.integers(0, 2**16),
    order=st.randoms(use_true_random=False),
)
def test_any_order_and_any_grouping_of_shards_merges_to_the_whole(values, shards, seed, order):
    """Known failure 13, for rows of every kind: k shards, merged as a random tree, agree to 1e-12."""
    values, parts, start = torch.tensor(values, dtype=torch.float64), [], 0
    whole = full(values, 0).read()
    cuts = torch.randint(0, len(values) + 1, (shards - 1,), generator=torch.Generator().manual_seed(seed))
    for part in values.tensor_split(sorted(cuts.tolist())):
        parts.append(full(part, start))
        start += len(part)
    assert len(parts) == shards
    while len(parts) > 1:
        order.shuffle(parts)
        parts = [parts[0].merge(parts[1]), *parts[2:]]
    merged = parts[0].read()
    scale = max(1.0, max(map(abs, values.tolist()), default=0.0))
    assert merged.sums["total"] == pytest.approx(whole.sums["total"], abs=1e-12 * scale * max(1, len(values)))
    assert merged.moments["x"].mean == pytest.approx(whole.moments["x"].mean, abs=1e-12 * scale)
    assert merged.moments["x"].std == pytest.approx(whole.moments["x"].std, rel=1e-12, abs=1e-12 * scale)
    assert merged.extremes == whole.extremes
    assert merged.histograms == whole.histograms
    assert [entry[:2] for entry in merged.tops["x"]] == [entry[:2] for entry in whole.tops["x"]]


def test_a_row_is_written_and_read_back_in_one_vector():
    statistics = full(torch.tensor([1.0, -2.0], dtype=torch.float64), 7)
    again = statistics.unpack(statistics.pack()).read()
    assert again == statistics.read()
    assert again.tops["x"][0] == (-2.0, 8, 1)


def test_all_ten_worst_entries_are_read():
    entries = full(torch.arange(1.0, 13.0), 0).read().tops["x"]
    assert [value for value, _, _ in entries] == [12.0, 11.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0]


def test_rows_are_left_out_by_name_and_the_others_stay_as_they_are():
    x, mask = torch.tensor([1.0, 2.0, 4.0]), torch.ones(3, dtype=torch.bool)
    rows = Statistics.of(
        sums={"a": x.sum(), "b": x[0]}, moments={"a": moments_of(x, mask), "c": moments_of(x[:1], mask[:1])}
    )
    left = rows.without("a", "nowhere")
    assert (left.names["sums"], left.names["moments"]) == (("b",), ("c",))
    assert left.sum("b") == 1.0
    assert left.moment("c").tolist() == [1.0, 1.0, 0.0]
    assert rows.without("a", "b", "c").pack().numel() == 0


def test_a_vector_is_read_where_only_the_names_of_its_rows_are_known():
    whole = of(torch.tensor([1.0, 2.0, 6.0]))
    again = Statistics.from_vector(whole.names, whole.pack())
    assert again.read() == whole.read()
    with pytest.raises(ValueError, match="these rows have 6 values, and the vector has 5"):
        Statistics.from_vector(whole.names, whole.pack()[:5])
