"""Weights with a horizon: equal to a double loop, to token weights at λ = 0 and to sequence weights at λ = 1.

Per turn they equal those of sequences that are single turns.
"""

from __future__ import annotations

import math

import pytest
import torch
from implementations import IMPLEMENTATIONS, TAKES

from rollcorr import PolicyLogProbs, RolloutCorrectionConfig, correct, policy_loss
from rollcorr.core.horizon import CHUNK, EFFECTIVE_SEQUENCES, chosen_decay, horizon_log_weights
from rollcorr.core.layout import pack
from rollcorr.correction import rollout_correction
from rollcorr.kernels.correction.call import Batch

DECAYS = (0.0, 1e-90, 0.02, 0.5, 0.95, 0.9999, 1.0)
SHAPES = ((1, 1), (4, CHUNK), (3, CHUNK + 1), (2, 5 * CHUNK - 5), (200, 3), (2, CHUNK**2 + 1))


def batch(B, T, scale=0.3, seed=0, dtype=torch.float64):
    """Log-probs, and a mask with holes and empty rows."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(B, T, generator=generator, dtype=dtype) - 0.1
    train = rollout + scale * torch.randn(B, T, generator=generator, dtype=dtype)
    lengths = torch.randint(0, T + 1, (B,), generator=generator)
    lengths[0] = T
    mask = (torch.rand(B, T, generator=generator) < 0.8) & (torch.arange(T) < lengths[:, None])
    return train, rollout, mask


def double_loop(d, mask, decay, per_turn=False):
    """ℓ in float64; two tokens are of one turn if no hole is between them."""
    found = torch.zeros_like(d, dtype=torch.float64)
    for row, valid, of_row in zip(d.double(), mask, found, strict=True):
        at = valid.nonzero().flatten()
        apart = (torch.arange(len(at))[:, None] - torch.arange(len(at))).abs()
        powers = torch.tensor(decay, dtype=torch.float64) ** apart
        if per_turn:
            powers = powers.where((at[:, None] - at).abs() == apart, 0.0)
        of_row[at] = powers @ row[at]
    return found


@pytest.mark.covering(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("per_turn", [False, True])
def test_log_weights_equal_a_double_loop(shape, decay, packed, per_turn):
    train, rollout, mask = batch(*shape)
    expected = double_loop(train - rollout, mask, decay, per_turn)
    inside = torch.arange(shape[1]) <= mask.int().cumsum(1).argmax(1, keepdim=True)
    if packed:
        (d, cu_seqlens), (valid, _) = pack(train - rollout, inside), pack(mask, inside)
        found = horizon_log_weights(d, valid, decay=decay, per_turn=per_turn, cu_seqlens=cu_seqlens)
        expected = expected[inside]
    else:
        found = horizon_log_weights(train - rollout, mask, decay=decay, per_turn=per_turn)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("decay", "level"), [(0.0, "token"), (1.0, "sequence")])
@pytest.mark.parametrize("bounds", [{}, {"rollout_is_threshold": "0.5_2.0"}, {"rollout_is_floor": 0.7}])
def test_the_ends_are_token_and_sequence_weights(impl, decay, level, bounds):
    tensors = batch(4, 3 * CHUNK, scale=0.1, dtype=TAKES[impl].dtypes[0])
    tensors[0][1, 0], tensors[1][2, 0] = -math.inf, math.nan
    found = correct(*tensors, rollout_is="horizon", rollout_is_horizon=decay, impl=impl, **bounds)
    # Triton's scan hands over to torch; its own token weights are float32, and have no floor.
    same = "torch" if impl == "triton" else impl
    expected = correct(*tensors, rollout_is=level, impl=same, **bounds)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-6 if level == "sequence" else 0, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_weights_by_hand(impl):
    """d = 0.4, hole, −0.2, 0.1; λ = 1/2: ℓ = 0.4 − 0.1 + 0.025, 0.2 − 0.2 + 0.05, 0.1 − 0.1 + 0.1."""
    rollout = torch.full((1, 4), -1.0)
    train = rollout + torch.tensor([[0.4, math.nan, -0.2, 0.1]])
    mask = torch.tensor([[1, 0, 1, 1]])
    options = {"rollout_is": "horizon", "rollout_is_horizon": 0.5, "impl": impl}
    expected = torch.tensor([[0.325, -math.inf, 0.05, 0.1]]).exp()
    torch.testing.assert_close(correct(train, rollout, mask, **options).weights, expected)

    # A missing log-prob adds distance: it is a response token.
    with_missing = correct(train, rollout, torch.ones(1, 4), **options).weights
    expected = torch.tensor([[0.4 - 0.05 + 0.0125, -math.inf, 0.1 - 0.2 + 0.05, 0.05 - 0.1 + 0.1]]).exp()
    torch.testing.assert_close(with_missing, expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_turns_by_hand(impl):
    """d = 0.4, −0.2, hole, 0.1; λ = 1/2: ℓ = 0.4 − 0.1, 0.2 − 0.2, 0.1. Probability zero stays in its turn, too."""
    rollout = torch.full((2, 4), -1.0)
    train = rollout + torch.tensor([[0.4, -0.2, math.nan, 0.1], [-math.inf, -0.2, 7.0, 0.1]])
    mask = torch.tensor([[1, 1, 0, 1]] * 2)
    options = {"rollout_is": "horizon", "rollout_is_horizon": 0.5, "impl": impl}
    found = correct(train, rollout, mask, **options, rollout_is_horizon_per_turn=True)
    expected = torch.tensor([[0.3, 0.0, -math.inf, 0.1], [-math.inf, -math.inf, -math.inf, 0.1]]).exp()
    torch.testing.assert_close(found.weights, expected)
    assert "horizon 0.5 per turn weights" in repr(found)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("nonfinite", ["reject_token", "neutral"])
def test_turns_weigh_like_sequences_of_their_own(impl, nonfinite):
    """Any layout of turns, with tokens that miss a log-prob: each turn as a packed sequence has the same weights."""
    train, rollout, mask = batch(3, 1100, scale=0.05, seed=5, dtype=TAKES[impl].dtypes[0])
    mask[0, 20:900] = True
    train[0, 40], rollout[0, 500], train[1, 3] = math.nan, math.nan, -math.inf
    options = {"rollout_is": "horizon", "rollout_is_horizon": 0.9, "nonfinite": nonfinite, "impl": impl}
    found = correct(train, rollout, mask, **options, rollout_is_horizon_per_turn=True)
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    starts = (mask & ~before)[mask].nonzero().flatten()
    cu_seqlens = torch.cat([starts, mask.sum()[None]])
    apart = correct(train[mask], rollout[mask], mask[mask], cu_seqlens=cu_seqlens, **options)
    torch.testing.assert_close(found.weights[mask], apart.weights, rtol=1e-6, atol=0)
    for name in ("mean", "std", "min", "max", "raw_max", "ratio_fraction_high", "eff_sample_size"):
        values = [x.metrics()[f"rollout_corr/rollout_is_{name}"] for x in (found, apart)]
        assert values[0] == pytest.approx(values[1], rel=1e-5), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_probability_zero_zeroes_the_whole_sequence(impl):
    train, rollout, _ = batch(2, 2000, dtype=torch.float32)
    train[0, 0] = -math.inf
    weights = correct(
        train, rollout, torch.ones(2, 2000), rollout_is="horizon", rollout_is_horizon=0.5, impl=impl
    ).weights
    assert (weights[0] == 0).all()
    assert (weights[1] > 0).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_sequences_do_not_reach_each_other(impl):
    """Not even log-ratios that leave float64 no digits."""
    train, rollout, mask = batch(3, 70, dtype=torch.float32)
    options = {"rollout_is": "horizon", "rollout_is_horizon": 0.9, "impl": impl}
    (packed_train, cu_seqlens), (packed_rollout, _) = pack(train, mask), pack(rollout, mask)
    before = correct(packed_train, packed_rollout, mask[mask], cu_seqlens=cu_seqlens, **options).weights
    packed_train[cu_seqlens[1] : cu_seqlens[2]] = -1e30
    after = correct(packed_train, packed_rollout, mask[mask], cu_seqlens=cu_seqlens, **options).weights
    outside = torch.ones_like(before, dtype=torch.bool)
    outside[cu_seqlens[1] : cu_seqlens[2]] = False
    assert torch.equal(before[outside], after[outside])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("per_turn", [False, True])
def test_no_gradient_flows_through_the_weights(impl, per_turn):
    """The gradient is that of a loss with constant weights: −w A / n at the sampling policy."""
    train, rollout, mask = batch(3, 8, dtype=TAKES[impl].dtypes[0])
    policy = train.clone().requires_grad_()
    options = {"rollout_is": "horizon", "rollout_is_horizon": 0.7, "rollout_is_horizon_per_turn": per_turn}
    correction = correct(policy, rollout, mask, **options, impl=impl)
    assert not correction.weights.requires_grad
    advantages = torch.arange(24.0).view(3, 8)
    policy_loss(
        PolicyLogProbs(log_prob=policy, old_log_prob=train, rollout_log_prob=rollout),
        advantages,
        mask,
        correction=correction,
    ).loss.backward()
    expected = -correction.weights * advantages / mask.sum()
    torch.testing.assert_close(policy.grad, expected.masked_fill(~mask, 0.0).to(policy.grad.dtype))


@pytest.mark.parametrize("over", ["valid", "kept"])
def test_the_batch_mean_is_over_tokens(over):
    tensors = batch(5, 40)
    plain = {"rollout_is": "horizon", "rollout_is_horizon": 0.8, "rollout_rs": "token_k1", "rollout_rs_threshold": 1.5}
    raw = correct(*tensors, **plain)
    units = tensors[2] if over == "valid" else raw.loss_mask
    normalized = correct(*tensors, **plain, rollout_is_batch_normalize=True, batch_normalize_over=over)
    torch.testing.assert_close(normalized.weights, raw.weights / raw.weights[units].mean())


def test_the_variance_formula_holds_for_independent_tokens():
    """Var ℓ = σ² (1 + λ²) / (1 − λ²), far from the ends of a sequence."""
    d = 0.1 * torch.randn(1, 200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for decay in (0.3, 0.8):
        log_weight = horizon_log_weights(d, torch.ones_like(d, dtype=torch.bool), decay=decay)
        expected = 0.01 * (1 + decay**2) / (1 - decay**2)
        assert log_weight.var().item() == pytest.approx(expected, rel=0.03)


@pytest.mark.covering(2)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("decay", [0.02, 0.9, 0.98, 0.999, 1.0])
@pytest.mark.parametrize("scale", [0.01, 0.2])
@pytest.mark.parametrize("holes", ["no holes", "holes", "per turn"])
@pytest.mark.parametrize("packed", [False, True])
def test_weights_equal_a_double_loop(impl, decay, scale, holes, packed):
    """Within 1e-6, relative, also over several tiles of the compiled kernel."""
    train, rollout, mask = batch(3, 1100, scale=scale, seed=3, dtype=torch.float32)
    train, rollout = train.clamp(max=-0.01), rollout.clamp(max=-0.01)
    inside = torch.arange(1100) < torch.tensor([1100, 700, 17])[:, None]
    turns = torch.isin(torch.arange(1100), torch.tensor([5, 6, 300, 301, 302, 600, 1099]), invert=True)
    mask = {"no holes": inside, "holes": mask & inside, "per turn": turns & inside}[holes]
    per_turn = holes == "per turn"
    log_weights = double_loop(train.double() - rollout.double(), mask, decay, per_turn)
    expected = log_weights.clamp(-20, 20).exp().where(mask, 0.0)
    options = {"rollout_is": "horizon", "rollout_is_horizon": decay, "rollout_is_threshold": None, "impl": impl}
    options["rollout_is_horizon_per_turn"] = per_turn
    if packed:
        (train, cu_seqlens), (rollout, _), (mask, _) = (pack(x, inside) for x in (train, rollout, mask))
        found, expected = correct(train, rollout, mask, cu_seqlens=cu_seqlens, **options).weights, expected[inside]
    else:
        found = correct(train, rollout, mask, **options).weights
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_any_length_at_any_address(impl):
    """The compiled kernel cuts vectors where cache lines begin, and fills up the last tile with slots."""
    lengths = torch.tensor([1, 3, 5, 63, 64, 65, 130, 513, 575, 700, 1027, 1100])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tokens = int(lengths.sum())
    generator = torch.Generator().manual_seed(6)
    rollout = -1 - torch.rand(tokens, generator=generator)
    # A mean that is not 0 shows slots that are counted as tokens, in the extremes and moments of weights.
    train = rollout + 0.005 + 0.01 * torch.randn(tokens, generator=generator)
    d = train.double() - rollout.double()
    whole = (d.split(lengths.tolist()), torch.ones(1, 1100, dtype=torch.bool))
    expected = torch.cat([double_loop(own[None], whole[1][:, : len(own)], 0.9)[0].exp() for own in whole[0]])
    options = {"rollout_is": "horizon", "rollout_is_horizon": 0.9, "rollout_is_threshold": None}
    arguments = train, rollout, torch.ones(tokens, dtype=torch.bool)
    found = correct(*arguments, cu_seqlens=cu_seqlens, **options, impl=impl)
    torch.testing.assert_close(found.weights.double(), expected, rtol=1e-6, atol=0)
    metrics = found.metrics(prefix="")
    wanted = {"mean": expected.mean(), "std": expected.std(correction=0), "min": expected.min(), "max": expected.max()}
    for name, value in wanted.items():
        assert metrics[f"rollout_is_{name}"] == pytest.approx(value.item(), rel=1e-6 if name != "std" else 1e-4), name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("at", [0, 511, 512, 1300, 1699])
@pytest.mark.parametrize("outlier", [-1.5, 3.0, -900.0])
def test_outliers_reach_their_neighbors_exactly(impl, at, outlier):
    """Tiles of small log-ratios, next to one that leaves float32 no digits."""
    train, rollout, _ = batch(1, 1700, scale=0.02, seed=4, dtype=torch.float32)
    train[0, at] = rollout[0, at] + outlier
    places = torch.arange(1700, dtype=torch.float64)
    d = (train.double() - rollout.double())[0]
    expected = (0.95 ** (places - places[:, None]).abs() @ d).clamp(-20, 20).exp()
    options = {"rollout_is": "horizon", "rollout_is_horizon": 0.95, "rollout_is_threshold": None, "impl": impl}
    found = correct(train, rollout, torch.ones(1, 1700), **options).weights[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_summary_names_lambda():
    config = RolloutCorrectionConfig(rollout_is="horizon", rollout_is_horizon=0.5)
    assert "horizon 0.5 weights up to 2.0" in repr(correct(*batch(1, 4), config))
    assert config == RolloutCorrectionConfig(**config.to_dict())


def test_chosen_lambda_by_hand():
    """B = 256 e, so V = 1: sqrt((1 − 0.1) / (1 + 0.1)) = 0.905; a variance of 1 leaves nothing."""
    B = EFFECTIVE_SEQUENCES * math.e
    assert chosen_decay(0.1, B) == 0.9
    assert chosen_decay(1.01, B) == chosen_decay(0.1, EFFECTIVE_SEQUENCES) == chosen_decay(0.1, 0.0) == 0.0
    assert chosen_decay(0.0, B) == 1.0


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name != "triton"])
def test_auto_chooses_lambda_from_the_batch(impl):
    """No kernel chooses λ, and Triton's interpreter takes a minute for a thousand sequences."""
    train, rollout, mask = batch(1024, 40, scale=0.2, dtype=torch.float32)
    options = {"rollout_is": "horizon", "rollout_is_threshold": None, "impl": impl}
    correction = correct(train, rollout, mask, rollout_is_horizon="auto", **options)
    metrics = correction.metrics(prefix="")
    decay = chosen_decay(metrics["log_ratio_std"] ** 2, mask.any(1).sum().item())
    assert 0.9 < decay < 1
    assert correction.config.rollout_is_horizon == metrics["rollout_is_horizon"] == decay
    expected = correct(train, rollout, mask, rollout_is_horizon=decay, **options)
    assert torch.equal(correction.weights, expected.weights)

    # A batch of at most 256 sequences gets token weights.
    few = train[:256], rollout[:256], mask[:256]
    found = correct(*few, rollout_is_horizon="auto", **options)
    expected = correct(*few, rollout_is="token", rollout_is_threshold=None, impl=impl)
    assert torch.equal(found.weights, expected.weights)


def test_chosen_lambda_reaches_the_sample_size():
    """Independent tokens far from the ends: B sequences are worth 256, within sampling error."""
    generator = torch.Generator().manual_seed(2)
    d = 0.3 * torch.randn(512, 400, generator=generator, dtype=torch.float64)
    decay = chosen_decay(0.09, 512)
    weights = horizon_log_weights(d, torch.ones_like(d, dtype=torch.bool), decay=decay)[:, 150:250].exp()
    size = (weights.sum(0) ** 2 / (weights**2).sum(0)).mean().item()
    assert size == pytest.approx(EFFECTIVE_SEQUENCES, rel=0.1)


def test_auto_has_no_number_before_a_batch():
    config = RolloutCorrectionConfig(rollout_is="horizon", rollout_is_horizon="auto")
    with pytest.raises(ValueError, match="has no value before a batch is read"):
        config.horizon_decay  # noqa: B018


@pytest.mark.parametrize(
    ("own", "other", "mixed"),
    [
        ([0, 1, 6, 7], [2, 5], True),  # zig-zag
        ([4, 5, 6, 7], [0, 3], True),  # not in the order of the ranks
        ([0, 1, 2, 3], [4, 7], False),
        ([0, 1, 2, 3], [math.inf, -math.inf], False),  # the other slice is empty
    ],
)
def test_position_ids_reveal_slices_out_of_order(own, other, mixed, monkeypatch):
    """`other` has the first and last position of the other rank's slice, which is the second of two."""
    first, last = other
    theirs = torch.tensor([[-first], [last]], dtype=torch.float64)
    monkeypatch.setattr(rollout_correction, "gather", lambda ends, group: torch.stack([ends, theirs]))
    x, positions = torch.zeros(1, 4), torch.tensor([own])
    found = None
    try:
        rollout_correction._check_rank_slice_order(Batch(x, x, torch.ones(1, 4)), positions, None)
    except ValueError as error:
        found = str(error)
    assert (found is not None and "in sequence 0 rank 1 begins at position" in found) == mixed


def test_slices_without_positions_are_refused():
    x = torch.zeros(1, 4)
    with pytest.raises(ValueError, match=r"no positions show it; pass detail=Detail\(position_ids"):
        rollout_correction._check_rank_slice_order(Batch(x, x, torch.ones(1, 4)), None, None)


def test_an_empty_slice_still_exchanges():
    """Otherwise the other ranks would wait for it."""
    calls = []
    empty = torch.zeros(2, 0)

    def gather(sums):
        calls.append(sums)
        return torch.stack([sums]), 0

    horizon_log_weights(empty, empty.bool(), decay=0.5, gather=gather)
    assert calls
    assert horizon_log_weights(empty, empty.bool(), decay=0.5).shape == empty.shape
