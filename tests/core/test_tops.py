"""The worst entries equal a full sort for any ties and any split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.core.detail_rows import TOP, WorstSequence, host_entries, merge_tops, top_entries, top_indices, worst_of

values_with_ties = st.lists(st.sampled_from([0.0, 0.5, -0.5, 1.0, -2.0, 2.0, -math.inf]), max_size=60)


def top(values: torch.Tensor, start: int = 0, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The worst of values whose sequence is their index // 5 and whose place is their index % 5."""
    mask = torch.ones(values.shape, dtype=torch.bool) if mask is None else mask
    found, exists = top_indices(values, mask)
    at = found + start
    return top_entries(values[found], at // 5, at % 5, exists)


def test_the_worst_by_hand():
    values = torch.tensor([0.1, -3.0, math.nan, 2.0, 3.0])
    rows = host_entries(top(values, mask=values.isfinite()).tolist())
    assert [(value, at) for value, _, at in rows[:3]] == [(-3.0, 1), (3.0, 4), (2.0, 3)]
    assert len(rows) == 4


@given(values=values_with_ties, cuts=st.lists(st.integers(0, 60), max_size=7), order=st.randoms())
def test_any_cut_and_any_order_of_merging_keeps_the_same_entries(values, cuts, order):
    values = torch.tensor(values)
    expected = sorted(range(len(values)), key=lambda i: (-abs(values[i].item()), i))[:TOP]
    parts, start = [], 0
    for part in values.tensor_split(sorted(cuts)):
        parts.append(top(part, start))
        start += len(part)
    order.shuffle(parts)
    pairwise = parts[0]
    for part in parts[1:]:
        pairwise = merge_tops(torch.stack([pairwise, part]))
    for merged in (merge_tops(torch.stack(parts)), pairwise, top(values)):
        rows = host_entries(merged.tolist())
        assert [5 * sequence + at for _, sequence, at in rows] == expected
        assert [value for value, _, _ in rows] == [values[i].item() for i in expected]


def test_entries_become_objects():
    worst = worst_of({"tokens": (), "sequences": host_entries(top(torch.tensor([-math.inf, 6.0])).tolist())})
    assert worst.tokens == ()
    assert worst.sequences == (WorstSequence(-math.inf, 0, 0), WorstSequence(6.0, 0, 1))
    assert WorstSequence(6.0, 0, 4).mean_log_ratio == pytest.approx(1.5)
