"""Why Triton has decisions of its own: torch's, on the table that Triton writes, would cost more than its kernels.

A launch has a fixed cost for any table. 2.5 µs is little for one launch of eager torch.
"""

from __future__ import annotations

import pytest
import torch
from correction_cases import configuration, everything
from counting import Counts
from fake_cuda import fake_cuda

from rollcorr.kernels.correction.call import Batch
from rollcorr.kernels.correction.torch import blocks

CRITERION = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
LAUNCH = 2.5e-6
TRITON = 90e-6
"""Seconds: the most that the Triton kernels were ever expected to take for 8 M tokens."""


@pytest.mark.parametrize("sequences", [1024, 8192])
@pytest.mark.parametrize("config", [configuration(rollout_is="token", **CRITERION), everything()], ids=["one", "all"])
def test_the_decisions_of_torch_would_take_longer_than_the_kernels_of_triton(config, sequences, monkeypatch):
    """104 launches with one criterion and 274 with all. Were it a tenth of Triton's time, its own copy should go."""
    counted = []

    def decide(*arguments):
        with Counts() as counts:
            decision = torch_decide(*arguments)
        counted.append(counts)
        return decision

    torch_decide = blocks.decide
    monkeypatch.setattr(blocks, "decide", decide)
    with fake_cuda():
        log_prob = torch.zeros(sequences, 4, device="cuda")
        blocks.torch_correction(Batch(log_prob, log_prob, log_prob.bool(), None), config)
    (counts,) = counted
    assert counts.culprits == []
    assert counts.operations * LAUNCH > TRITON / 10
