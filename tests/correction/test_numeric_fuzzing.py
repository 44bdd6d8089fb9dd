"""Any float tensor as input: no exception and no NaN comes out, and the documented guarantees apply.

A hundred examples for each implementation; `make test-slow` runs 10,000. Expected decisions are computed here, in
Python's float64, from docs/background/correction.md only.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import EVERY_DTYPE, IMPLEMENTATIONS, TAKES, under_test

from rollcorr import correct
from rollcorr.config import InertOptionWarning, LossConfig, RolloutCorrectionConfig
from rollcorr.config.loss_options import LOSS_AGG_MODES
from rollcorr.core.layout import pack
from rollcorr.core.metric_registry import CRITERIA
from rollcorr.correction.losses import PolicyLogProbs, policy_loss

MASK_DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16]

UNBOUNDED = {"training_ppl", "rollout_ppl", "ppl_ratio", "ppl_ratio_geo"}
UNBOUNDED |= {"prob_diff_abs_mean", "prob_diff_abs_max"}
"""Exponentials that are never clamped, and 1 / kl: these may be infinite, as what they measure is; but never NaN."""

many = settings(max_examples=max(100, settings().max_examples))
each_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)

odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, 5.0, 1000.0, -9999.0, -1e30, 1e30, -3.4e38, -1e-45, -104.0, -1.0]
differences = [0.0, 1e-7, -1e-4, math.log(2.0), -math.log(2.0), 20.0, -20.5, 89.0, -800.0, 1000.0]
near = st.tuples(st.floats(-30, 0, width=32), st.floats(-2, 2, width=32)).map(lambda x: (x[0] + x[1], x[0]))
far = [(π, μ) for π in odd for μ in odd] + [(μ + d, μ) for μ in (*odd, -0.5, -1e-7, -20.0) for d in differences]
tokens = st.one_of(near, st.sampled_from(far))
"""(log π, log μ)."""


class Batch(NamedTuple):
    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor


@st.composite
def batches(draw, dtypes=EVERY_DTYPE) -> Batch:
    """Return up to 4 × 6 tokens; log π is near log μ, or independent of it."""
    B, T = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    pairs = torch.tensor(draw(st.lists(tokens, min_size=B * T, max_size=B * T)), dtype=torch.float64).view(-1, 2)
    mask = draw(st.integers(0, 2 ** (B * T) - 1))
    first, second = draw(st.sampled_from(dtypes)), draw(st.sampled_from(dtypes))
    return Batch(
        pairs[:, 0].reshape(B, T).to(first),
        pairs[:, 1].reshape(B, T).to(second),
        torch.tensor([mask >> i & 1 for i in range(B * T)]).view(B, T).to(draw(st.sampled_from(MASK_DTYPES))),
    )


def threshold_of(name: str) -> st.SearchStrategy[str]:
    bands = ["0.5_2.0", "0_1.5", "0.9_inf", "1.25_1.5", "1.001"]
    return st.sampled_from(bands if name.endswith("k1") else ["0.3", "1e-6", "50"])


@st.composite
def configurations(draw, *, bounds=(20.0, 1.0, 40.0), **fixed) -> RolloutCorrectionConfig:
    names = draw(st.lists(st.sampled_from(CRITERIA), unique=True, max_size=4))
    fields = {
        "rollout_is": draw(st.sampled_from([None, "token", "sequence", "geometric"])),
        "rollout_is_threshold": draw(st.sampled_from([None, 2.0, 0.5, 1e6, "0.5_2.0", "1.5_3.0", "0_2.0"])),
        "rollout_is_batch_normalize": draw(st.booleans()),
        "batch_normalize_over": draw(st.sampled_from(["valid", "kept"])),
        "rollout_rs": ",".join(names) or None,
        "rollout_rs_threshold": ",".join(draw(threshold_of(name)) for name in names) or None,
        "rollout_token_veto_threshold": draw(st.sampled_from([None, 1e-4, 0.9])),
        "nonfinite": draw(st.sampled_from(["reject_token", "reject_sequence", "neutral"])),
        "safety_bound": draw(st.sampled_from(bounds)),
        "normalizer": draw(st.sampled_from(["kept", "original", "weights"])),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return RolloutCorrectionConfig(**fields | fixed)


def missing(train: float, rollout: float) -> bool:
    return not math.isfinite(rollout) or math.isnan(train) or train == math.inf


def rows(batch: Batch) -> list[list[tuple[int, float, bool]]]:
    """Of each sequence its valid tokens: (position, d, missing); log-ratios by the rule that `correct` declares."""
    found = []
    wide = torch.promote_types(torch.promote_types(batch.train.dtype, batch.rollout.dtype), torch.float32)
    train, rollout = batch.train.to(wide), batch.rollout.to(wide)
    for π, μ, valid in zip(train.tolist(), rollout.tolist(), (batch.mask != 0).tolist(), strict=True):
        tokens = [(t, a, b) for t, (a, b, m) in enumerate(zip(π, μ, valid, strict=True)) if m]
        found.append([(t, 0.0 if missing(a, b) else a - b, missing(a, b)) for t, a, b in tokens])
    return found


def divergence(kind: str, d: float) -> float:
    if kind == "k3":
        return math.inf if d == -math.inf else math.expm1(min(d, 20.0)) - min(d, 20.0)
    return math.inf if d == -math.inf else d * d / 2


def judged(value: float, lower: float | None, upper: float | None, slack: float) -> bool | None:
    """Whether a value is inside its bounds; None where rounding may decide."""
    inside = True
    for bound, sign in ((lower, 1), (upper, -1)):
        if bound is not None:
            room = sign * (value - bound)
            if abs(room) <= slack:
                return None
            inside &= room > 0
    return inside


def decisions(tokens: list[tuple[int, float, bool]], config: RolloutCorrectionConfig) -> dict[int, bool | None]:
    """Which valid tokens of a sequence stay in the loss; None where rounding may decide."""
    counted = [d for _, d, gone in tokens if config.nonfinite == "neutral" or not gone]
    kept = {t: not gone or config.nonfinite == "neutral" for t, _, gone in tokens}
    if config.nonfinite == "reject_sequence" and any(gone for *_, gone in tokens):
        return dict.fromkeys(kept, False)

    def limit(verdict: bool | None, which: list[int]) -> None:
        for t in which:
            if verdict is False:
                kept[t] = False
            elif verdict is None and kept[t] is not False:
                kept[t] = None

    veto = config.rollout_token_veto_threshold
    if veto is not None and counted:
        limit(judged(min(counted), math.log(veto), None, 1e-5), list(kept))
    for criterion in config.criteria:
        lower, upper = criterion.lower, criterion.upper
        if criterion.kind == "k1":
            lower, upper = (None if x is None else math.log(x) for x in (lower, upper))
        value = (lambda d: d) if criterion.kind == "k1" else (lambda d, kind=criterion.kind: divergence(kind, d))
        if criterion.scope == "token":
            for t, d, gone in tokens:
                if not gone or config.nonfinite == "neutral":
                    limit(judged(value(d), lower, upper, 1e-5 * (1 + abs(upper or 0))), [t])
        elif counted:
            values = [value(d) for d in counted]
            total = max(values) if criterion.scope == "seq_max" else sum(values)
            total = total / len(values) if criterion.scope == "seq_mean" else total
            size = max((abs(x) for x in values if math.isfinite(x)), default=0.0)
            limit(judged(total, lower, upper, 1e-5 * (1 + size + abs(upper or 0))), list(kept))
    return kept


def check_metrics(metrics: dict[str, float], valid: torch.Tensor) -> None:
    for name, value in metrics.items():
        assert math.isfinite(value) or (name in UNBOUNDED and value == math.inf), (name, value)
        if name.endswith(("_fraction", "_low", "_high", "eff_sample_size", "10pct", "oob_ratio")):
            assert 0 <= value <= 1, (name, value)
        if name.endswith(("_std", "_abs_mean", "_count", "_abs_diff", "prob_diff_abs_max")):
            assert value >= 0, (name, value)
        if name.endswith("_mean") and f"{name[:-5]}_min" in metrics:
            least, most = metrics[f"{name[:-5]}_min"], metrics[f"{name[:-5]}_max"]
            slack = 1e-6 * max(abs(least), abs(most))
            assert least - slack <= value <= most + slack, (name, least, value, most)
    assert metrics["token_count"] == valid.sum()
    assert metrics["sequence_count"] == valid.any(-1).sum()
    assert metrics["k3_kl"] >= 0
    assert min(metrics["chi2_token"], metrics["chi2_seq"]) >= -1


def check_weights(weights: torch.Tensor, batch: Batch, config: RolloutCorrectionConfig) -> None:
    valid = batch.mask != 0
    assert weights.dtype == torch.float32
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert (weights[~valid] == 0).all()
    for row, tokens in zip(weights.tolist(), rows(batch), strict=True):
        gone = [row[t] for t, _, missing in tokens if missing]
        if config.nonfinite != "neutral":
            assert not any(gone)
        if config.rollout_is == "token":
            assert not any(row[t] for t, d, _ in tokens if d == -math.inf)
    if config.rollout_is_batch_normalize:
        return
    ceiling = math.exp(config.safety_bound) if config.is_upper is None else config.is_upper
    assert (weights <= ceiling * (1 + 1e-5)).all()
    smallest = config.is_lower or config.rollout_is_floor
    if smallest is not None:
        assert ((weights == 0) | (weights >= smallest * (1 - 1e-5))).all()


@each_implementation
@many
@given(data=st.data())
def test_a_correction_keeps_its_promises_whatever_the_data_holds(impl, data):
    batch = data.draw(batches(TAKES[impl].dtypes))
    config = data.draw(configurations(bounds=(20.0, 1.0, TAKES[impl].largest_bound)))
    correction = correct(*batch, config, impl=impl, densities=True)
    valid = batch.mask != 0
    assert correction.loss_mask.dtype == torch.bool
    assert not (correction.loss_mask & ~valid).any()
    assert torch.equal(correction.sequence_kept, correction.loss_mask.any(-1) | ~valid.any(-1))
    if correction.weights is not None:
        check_weights(correction.weights, batch, config)
    check_metrics(correction.metrics(prefix=""), valid)
    for row, tokens in zip(correction.loss_mask.tolist(), rows(batch), strict=True):
        for t, expected in decisions(tokens, config).items():
            assert expected is None or row[t] == expected, (t, tokens)


@each_implementation
@many
@given(
    data=st.data(),
    config=configurations(),
    garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 0.0]),
)
def test_what_stands_under_the_mask_changes_no_bit(impl, data, config, garbage):
    batch = data.draw(batches(TAKES[impl].dtypes))
    hidden = batch.mask == 0
    train, rollout = (torch.tensor(x).to(y.dtype) for x, y in ((garbage, batch.train), (-garbage, batch.rollout)))
    other = Batch(train.where(hidden, batch.train), rollout.where(hidden, batch.rollout), batch.mask)
    first, second = (correct(*one, config, impl=impl, densities=True) for one in (batch, other))
    assert torch.equal(first.loss_mask, second.loss_mask)
    assert first.weights is None or torch.equal(first.weights, second.weights)
    assert torch.equal(first.statistics.pack(), second.statistics.pack())


@many
@given(data=st.data(), config=configurations(), lengths=st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_layouts_and_implementations_agree(data, config, lengths):
    """Packed and padded, for every implementation that accepts the dtype; decisions where rounding does not decide."""
    batch = data.draw(batches(TAKES["cpu"].dtypes))
    B, T = batch.mask.shape
    inside = torch.arange(T).expand(B, T) < torch.tensor(lengths)[:B, None]
    padded = batch._replace(mask=(batch.mask != 0) & inside)
    (train, cu_seqlens), (rollout, _), (mask, _) = (pack(x, inside) for x in batch)
    sure = torch.zeros_like(inside)
    for i, tokens in enumerate(rows(padded)):
        for t, expected in decisions(tokens, config).items():
            sure[i, t] = expected is not None
    whole = correct(*padded, config, impl="reference", densities=True)
    for impl in IMPLEMENTATIONS:
        for correction, select in (
            (correct(*padded, config, impl=impl, densities=True), lambda x: x),
            (
                correct(train, rollout, mask, config, cu_seqlens=cu_seqlens, impl=impl, densities=True),
                lambda x: x[inside],
            ),
        ):
            certain = select(sure)
            assert torch.equal(correction.loss_mask & certain, select(whole.loss_mask) & certain)
            if whole.weights is not None and config.batch_normalize_over == "valid" and config.is_mode != "icepop":
                torch.testing.assert_close(correction.weights, select(whole.weights), rtol=1e-4, atol=1e-6)


@each_implementation
@many
@given(data=st.data(), mode=st.sampled_from(["decoupled", "bypass", "reinforce", "none"]))
def test_losses_and_gradients_are_finite_and_rejected_tokens_have_none(impl, data, mode):
    batch = data.draw(batches([torch.float32, torch.bfloat16]))
    fixed = {"bypass": {"bypass_mode": True}, "reinforce": {"bypass_mode": True, "loss_type": "reinforce"}}
    config = None if mode == "none" else data.draw(configurations(**fixed.get(mode, {})))
    valid = batch.mask != 0
    noise = data.draw(st.sampled_from([0.0, 1e-4, 0.5, 30.0]))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    finite = torch.nan_to_num(batch.rollout.float(), nan=-1.0, posinf=-1.0, neginf=-50.0).clamp(-200, 0)
    leaf = (finite + noise * torch.randn(finite.shape, generator=seed)).where(valid, batch.train).requires_grad_()
    advantages = 3 * torch.randn(len(finite), generator=seed)
    mixed = data.draw(st.sampled_from(LOSS_AGG_MODES))
    loss = LossConfig(loss_agg_mode=mixed, loss_scale_factor=8.0 if mixed.endswith("norm") else None)
    bypass = config is not None and config.bypass_mode
    old = None if bypass else torch.where(valid, finite, batch.train)
    rollout = None if mode == "none" else batch.rollout
    policies = PolicyLogProbs(log_prob=leaf, old_log_prob=old, rollout_log_prob=rollout)
    with under_test(impl):
        correction = None
        if not bypass and config is not None:
            measured = correct(batch.train, batch.rollout, batch.mask, config, densities=True)
            correction = dataclasses.replace(measured)  # without the fingerprint: its old policy is not `old`
        output = policy_loss(
            policies, advantages, batch.mask, config=config, loss=loss, correction=correction, whole_step=True
        )
    output.loss.backward()
    assert output.loss.isfinite()
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[~output.loss_mask] == 0).all()
    assert not (output.loss_mask & ~valid).any()
    if not output.loss_mask.any():
        assert output.loss.item() == 0.0
