"""Log-ratios by hand, and the classes of tokens that cannot be compared."""

import math

import pytest
import torch

from rollcorr.core.layout import sequence_mean, sequence_sum
from rollcorr.core.ratios import classify_tokens, token_log_ratio

NAN, INF = math.nan, math.inf


def test_every_pair_of_log_probs_falls_into_one_class():
    train = torch.tensor([-1.0, -INF, NAN, INF, -1.0, -1.0, -INF, NAN])
    rollout = torch.tensor([-2.0, -2.0, -2.0, -2.0, -INF, NAN, -INF, NAN])
    mask = torch.tensor([True] * 7 + [False])
    measured, zero, missing = classify_tokens(train, rollout, mask)
    assert measured.tolist() == [True] + [False] * 7
    assert zero.tolist() == [False, True] + [False] * 6
    assert missing.tolist() == [False, False, True, True, True, True, True, False]


def test_log_ratio_is_zero_where_nothing_is_measured():
    ratio = token_log_ratio(torch.tensor([-1.0, NAN]), torch.tensor([-1.5, INF]), torch.tensor([True, False]))
    torch.testing.assert_close(ratio, torch.tensor([0.5, 0.0]))


def test_sequence_and_geometric_ratio_by_hand():
    log_ratio = torch.tensor([[0.5, -0.2, NAN], [1.0, 2.0, 3.0], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    torch.testing.assert_close(sequence_sum(log_ratio, mask), torch.tensor([0.3, 4.0, 0.0]))
    torch.testing.assert_close(sequence_mean(log_ratio, mask), torch.tensor([0.15, 2.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_the_subtraction(dtype):
    """−0.0703125 − (−5.03125) = 4.9609375 needs 10 bits; bfloat16 has 8 and would return 4.96875."""
    train, rollout = torch.tensor([-0.0703125], dtype=dtype), torch.tensor([-5.03125], dtype=dtype)
    ratio = token_log_ratio(train, rollout, torch.tensor([True]))
    assert ratio.dtype == torch.float32
    assert ratio.item() == 4.9609375
