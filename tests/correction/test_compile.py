"""torch.compile captures the correction and every policy loss as one graph, with the results of eager torch.

Here dynamo traces and eager torch runs the graph, which costs seconds. `make test-compile` also compiles forward and
backward passes with inductor, for every level and criterion. That needs a C++ compiler, and minutes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from implementations import under_test
from torch import Tensor

from rollcorr import correct
from rollcorr.config import InertOptionWarning, LossConfig, RolloutCorrectionConfig
from rollcorr.core.layout import pack
from rollcorr.core.metric_registry import CRITERIA
from rollcorr.correction.losses import PolicyLogProbs, policy_loss

BACKENDS = os.environ.get("ROLLCORR_COMPILE_BACKENDS", "eager").split()
"""Compilers of a traced graph: "eager" runs it as it is, "inductor" makes C++ of it."""

EVERY = len(BACKENDS) > 1 or BACKENDS != ["eager"]
MODES = {
    "plain": None,
    "decoupled": {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.3},
    "bypass": {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"},
    "bypass, REINFORCE": {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"},
}

pytestmark = [
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot trace tuples with properties"),
    pytest.mark.filterwarnings("ignore::rollcorr.config.InertOptionWarning"),
    # Inductor's own imports use deprecated parts of Python.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def batch(packed: bool = False) -> tuple[dict[str, Tensor], Tensor | None]:
    """Named tensors with holes, an empty row, a missing log-prob and a token of probability zero; and their offsets."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(6, 40, generator=generator)
    old = rollout + 0.2 * torch.randn(6, 40, generator=generator)
    mask = torch.rand(6, 40, generator=generator) < 0.9
    mask[2] = False
    rollout[0, 3], old[1, 5] = torch.nan, -torch.inf
    tensors = {
        "log_prob": old.nan_to_num(neginf=-9.0) + 0.05,
        "old": old,
        "rollout": rollout,
        "mask": mask,
        "advantages": torch.randn(6, 40, generator=generator),
    }
    if not packed:
        return tensors, None
    inside = torch.arange(40) < torch.tensor([40, 7, 12, 40, 30, 25])[:, None]
    return {name: pack(values, inside)[0] for name, values in tensors.items()}, pack(mask, inside)[1]


def compiled(function: Callable[..., tuple[Tensor, ...]], backend: str) -> Callable[..., tuple[Tensor, ...]]:
    """The function as one graph. A second graph, or a break between two, is an error."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], backend: str) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        if backend == "inductor":  # which adds in a different order
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mode", "packed"), [("plain", False), ("decoupled", False), ("bypass", True), ("bypass, REINFORCE", False)]
)
def test_a_correction_with_its_loss_is_one_graph(mode, packed, backend):
    settings = None if MODES[mode] is None else RolloutCorrectionConfig(**MODES[mode])
    bypass = settings is not None and settings.bypass_mode

    def step(log_prob, old, rollout, mask, advantages, cu_seqlens):
        correction, results = None, ()
        if settings is not None and not bypass:
            correction = correct(old, rollout, mask, settings, cu_seqlens=cu_seqlens)
            results = correction.weights, correction.loss_mask, correction.sequence_kept, correction.statistics.pack()
        output = policy_loss(
            PolicyLogProbs(
                log_prob=log_prob,
                old_log_prob=None if bypass else old,
                rollout_log_prob=None if settings is None else rollout,
                ref_log_prob=rollout,
            ),
            advantages,
            mask,
            config=settings,
            loss=LossConfig(kl_coef=0.1),
            correction=correction,
            whole_step=True,
            cu_seqlens=cu_seqlens,
        )
        # A trace reads no value, so there the loss leaves a row where eager code in host memory would raise.
        statistics = output.statistics.without("correction_mismatch").pack()
        return output.loss, statistics, output.loss_mask, output.counts.tokens, *results

    tensors, cu_seqlens = batch(packed)
    run, gradients, results = compiled(step, backend), [], []
    for call in (run, step):
        leaf = tensors["log_prob"].clone().requires_grad_()
        # Compile the torch path: it must equal its own eager form.
        with under_test("torch") if call is step else nullcontext():
            found = call(**tensors | {"log_prob": leaf}, cu_seqlens=cu_seqlens)
        found[0].backward()
        results.append(tuple(x.detach() for x in found))
        gradients.append((leaf.grad,))
    assert_same(*results, backend)
    assert_same(*gradients, backend)
    assert gradients[1][0].count_nonzero() > 0


@pytest.mark.skipif(not EVERY, reason="minutes: make test-compile")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("level", [None, "token", "sequence", "geometric"])
@pytest.mark.parametrize(
    "options",
    [
        {"rollout_rs": ",".join(CRITERIA), "rollout_rs_threshold": 1.5, "rollout_token_veto_threshold": 1e-4},
        {"rollout_is_threshold": "0.5_2.0", "nonfinite": "neutral"},
        {"rollout_is_floor": 0.1, "rollout_is_batch_normalize": True, "nonfinite": "reject_sequence"},
    ],
    ids=["every criterion", "IcePop", "floor"],
)
def test_every_correction_is_one_graph(options, level, packed, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        config = RolloutCorrectionConfig(rollout_is=level, **options)

    def step(old, rollout, mask, cu_seqlens):
        correction = correct(old, rollout, mask, config, cu_seqlens=cu_seqlens)
        found = correction.weights, correction.loss_mask, correction.sequence_kept, correction.statistics.pack()
        return tuple(x for x in found if x is not None)

    tensors, cu_seqlens = batch(packed)
    given = [tensors[name] for name in ("old", "rollout", "mask")]
    expected = correct(*given, config, cu_seqlens=cu_seqlens, impl="torch")
    eager = expected.weights, expected.loss_mask, expected.sequence_kept, expected.statistics.pack()
    assert_same(compiled(step, backend)(*given, cu_seqlens), tuple(x for x in eager if x is not None), backend)
