"""Parts of a correction, micro-batches and mini-batches, and their context. Their losses add up, or raise."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import per_implementation, widest_dtype

from rollcorr import (
    Correction,
    LossConfig,
    PolicyLogProbs,
    RolloutCorrectionConfig,
    TrainingStep,
    correct,
    policy_loss,
)
from rollcorr.config import InertOptionWarning
from rollcorr.config.loss_options import LOSS_AGG_MODES
from rollcorr.correction import loss_denominators

NORMALIZERS = ("kept", "original", "weights")
CORRECTIONS = {
    "token weights, a token band": {
        "rollout_is": "token",
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.6_1.7",
    },
    "normalized sequence weights, whole sequences rejected": {
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 0.03,
    },
    "measured only": {"rollout_is": "token", "apply_is": False},
    "nothing at all": {"rollout_is_threshold": None, "rollout_is": True},
}


def config_of(fields, normalizer="kept"):
    """Return a configuration; the bare options if there is none."""
    if isinstance(fields.get("rollout_is"), bool):
        return fields
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InertOptionWarning)
        return RolloutCorrectionConfig(**fields, normalizer=normalizer)


class Batch:
    """Seven sequences of up to five tokens, some without any; padded, or packed without a gap between sequences."""

    def __init__(self, seed=0, *, packed=False, sequences=7, width=5, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(5, sequences, width, generator=generator, dtype=dtype)
        self.old = noise[0] - 2
        self.rollout = self.old + 0.3 * noise[1]
        self.start = self.old + 0.2 * noise[2]
        self.reference = self.old + 0.1 * noise[3]
        self.advantages = noise[4]
        self.mask = torch.rand(sequences, width, generator=generator) < 0.7
        self.mask[2] = False
        self.cu_seqlens = None
        if packed:
            lengths = torch.tensor([width, 1, 0, *([width - 1] * (sequences - 3))])
            inside = torch.arange(width) < lengths[:, None]
            for name in ("old", "rollout", "start", "reference", "advantages", "mask"):
                setattr(self, name, getattr(self, name)[inside])
            self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def correct(self, fields, normalizer="kept", **options) -> Correction:
        config = config_of(fields, normalizer)
        old, rollout = (x.to(widest_dtype()) for x in (self.old, self.rollout))
        return correct(old, rollout, self.mask, config, cu_seqlens=self.cu_seqlens, **options)

    def tokens(self, rows):
        """The tokens of some sequences, in their order, and the offsets among them."""
        if self.cu_seqlens is None:
            return rows, None
        spans = [range(*self.cu_seqlens[i : i + 2].tolist()) for i in torch.arange(7)[rows].tolist()]
        tokens = torch.tensor([t for span in spans for t in span], dtype=torch.int64)
        return tokens, torch.tensor([0, *(len(span) for span in spans)]).cumsum(0)

    def loss(self, leaf, rows, correction, loss=None, **options):
        tokens, cu_seqlens = self.tokens(rows)
        policies = PolicyLogProbs(
            log_prob=leaf[tokens],
            old_log_prob=self.old[tokens],
            rollout_log_prob=self.rollout[tokens],
            ref_log_prob=self.reference[tokens],
        )
        return policy_loss(
            policies,
            self.advantages[tokens],
            self.mask[tokens],
            loss=loss,
            correction=correction,
            entropy=-leaf[tokens],
            cu_seqlens=cu_seqlens,
            **options,
        )

    def total(self, parts, correction, loss=None):
        """Σ of the losses of some parts, and its gradient."""
        leaf = self.start.clone().requires_grad_()
        total = torch.zeros((), dtype=leaf.dtype)
        for rows in parts:
            output = self.loss(leaf, rows, correction[rows], loss)
            output.loss.backward()
            total += output.loss.detach()
        return total, leaf.grad


def whole(sequences=7):
    return [slice(0, sequences)]


def assert_same(actual, expected, tolerance=1e-6):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * expected[1].abs().max().item())


def loss_config(mode, *, regularized=False):
    scale = 8.0 if mode.endswith("norm") else None
    terms = {"kl_coef": 0.1, "entropy_coef": 0.01} if regularized else {}
    return LossConfig(loss_agg_mode=mode, loss_scale_factor=scale, **terms)


# --- Any split of a batch is the batch -----------------------------------------------------------------------------

partitions = st.lists(st.integers(0, 3), min_size=7, max_size=7)  # which micro-batch each sequence goes to


@per_implementation
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    owners=partitions,
    mode=st.sampled_from(LOSS_AGG_MODES),
    normalizer=st.sampled_from(NORMALIZERS),
    name=st.sampled_from(list(CORRECTIONS)),
    packed=st.booleans(),
    regularized=st.booleans(),
    form=st.sampled_from(["numbers", "list", "bool"]),
)
def test_the_losses_and_gradients_of_any_parts_add_up_to_those_of_the_batch(
    seed, owners, mode, normalizer, name, packed, regularized, form
):
    batch = Batch(seed, packed=packed)
    loss = loss_config(mode, regularized=regularized)
    correction = batch.correct(CORRECTIONS[name], normalizer)
    owner = torch.tensor(owners)
    parts = [(owner == i) for i in range(4)]
    if form != "bool":
        parts = [part.nonzero().flatten() for part in parts]
    if form == "list":
        parts = [part.tolist() for part in parts]
    assert_same(batch.total(parts, correction, loss), batch.total(whole(), correction, loss))


@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), size=st.integers(1, 9), packed=st.booleans(), mode=st.sampled_from(LOSS_AGG_MODES))
def test_split_gives_the_parts_that_torch_gives(seed, size, packed, mode):
    batch = Batch(seed, packed=packed)
    correction = batch.correct(CORRECTIONS["token weights, a token band"])
    numbers = torch.arange(7).split(size)
    parts = correction.split(size)
    assert [part.sequences for part in parts] == [len(rows) for rows in numbers]
    for part, rows in zip(parts, numbers, strict=True):
        assert torch.equal(part.weights, correction[rows].weights)
        assert torch.equal(part.loss_mask, correction[rows].loss_mask)
        assert torch.equal(part.sequence_kept, correction.sequence_kept[rows])
    loss = loss_config(mode)
    slices = [slice(int(rows[0]), int(rows[-1]) + 1) for rows in numbers]
    assert_same(batch.total(slices, correction, loss), batch.total(whole(), correction, loss))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    owners=partitions,
    normalizer=st.sampled_from(NORMALIZERS),
    mode=st.sampled_from(LOSS_AGG_MODES),
    packed=st.booleans(),
)
def test_a_mini_batch_is_a_step_of_its_own_and_so_are_its_parts(seed, owners, normalizer, mode, packed):
    """PPO with two optimizer steps on one batch: each divides by its own rows, however it is split again."""
    batch, loss = Batch(seed, packed=packed), loss_config(mode)
    correction = batch.correct(CORRECTIONS["token weights, a token band"], normalizer)
    rows = torch.tensor([i for i, owner in enumerate(owners) if owner < 2], dtype=torch.int64)
    step = correction.mini_batch(rows)
    tokens, cu_seqlens = batch.tokens(rows)
    counted = loss_denominators(
        normalizer,
        correction.loss_mask[tokens],
        batch.mask[tokens],
        correction.loss_weights[tokens],
        cu_seqlens=cu_seqlens,
    )
    for actual, expected in zip(dataclasses.astuple(step.denominators()), dataclasses.astuple(counted), strict=True):
        torch.testing.assert_close(actual, expected)

    leaf = batch.start.clone().requires_grad_()
    masks = correction.loss_mask[tokens], batch.mask[tokens]
    original = loss_denominators("original", *masks, None, cu_seqlens=cu_seqlens)
    at_once = batch.loss(leaf, rows, correction[rows], loss, denominators=counted, original_denominators=original)
    at_once.loss.backward()
    split = batch.start.clone().requires_grad_()
    for part, numbers in zip(step.split(2), rows.split(2), strict=True):
        batch.loss(split, numbers, part, loss).loss.backward()
    assert_same((split.grad, split.grad), (leaf.grad, leaf.grad))


def test_a_part_takes_the_denominators_of_the_batch_and_not_its_own():
    """By hand: two sequences, three tokens; A = 1 and all policies equal, so each token's loss is −1 / 3."""
    zeros, mask = torch.zeros(2, 2), torch.tensor([[True, True], [True, False]])
    correction = correct(zeros, zeros.clone(), mask, "decoupled_token_is")
    losses = [
        policy_loss(
            PolicyLogProbs(log_prob=zeros[row], old_log_prob=zeros[row]), torch.ones(1, 2), mask[row], correction=part
        ).loss.item()
        for row, part in ((slice(0, 1), correction[:1]), (slice(1, 2), correction[1:]))
    ]
    assert losses == pytest.approx([-2 / 3, -1 / 3])


# --- Rejected parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (0, TypeError, "with a slice, a list of integers or a tensor; got 0"),
        ((slice(0, 1), slice(0, 2)), TypeError, "index a correction.s sequences"),
        ([True, False], TypeError, "index a correction.s sequences"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"rows \(2, 2\) must be 1-D"),
        (torch.ones(3, dtype=torch.bool), ValueError, r"and \(7,\) if bool"),
        (torch.zeros(2), ValueError, "rows must hold integers"),
    ],
)
def test_what_names_no_sequences_is_refused(rows, error, message):
    correction = Batch().correct({})
    with pytest.raises(error, match=message):
        correction[rows]


@pytest.mark.parametrize("packed", [False, True])
def test_parts_may_be_empty_repeated_and_counted_from_the_end(packed):
    batch = Batch(packed=packed)
    correction = batch.correct(CORRECTIONS["token weights, a token band"])
    assert correction[[]].sequences == correction[3:3].sequences == 0
    assert correction[[]], "a rank without sequences has a correction too"
    assert correction[[]].loss_mask.numel() == correction[3:3].loss_mask.numel() == 0
    twice = correction[[-1, 0, -1]]
    assert torch.equal(twice.sequence_kept, correction.sequence_kept[[-1, 0, -1]])
    tokens, cu_seqlens = batch.tokens(torch.tensor([6, 0, 6]))
    assert torch.equal(twice.weights, correction.weights[tokens])
    assert packed == (twice.cu_seqlens is not None and torch.equal(twice.cu_seqlens, cu_seqlens))
    with pytest.raises(ValueError, match="at least 1; got 0"):
        correction.split(0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("packed", [False, True])
def test_numbers_of_any_integer_dtype_name_sequences(packed, dtype):
    correction = Batch(packed=packed).correct(CORRECTIONS["token weights, a token band"])
    part = correction[torch.tensor([1, 0, 3, 1, 0, 0, 1], dtype=dtype)]
    assert torch.equal(part.weights, correction[[1, 0, 3, 1, 0, 0, 1]].weights)
    assert part.sequences == 7


def test_the_part_of_a_padded_batch_is_a_view():
    correction = Batch().correct(CORRECTIONS["token weights, a token band"])
    part = correction[2:4]
    assert part.weights.data_ptr() == correction.weights[2].data_ptr()
    assert part.loss_mask.data_ptr() == correction.loss_mask[2].data_ptr()
    assert part.statistics is correction.statistics


@pytest.mark.parametrize("rows", [slice(0, 2), torch.tensor([1, 0]), [2]], ids=["slice", "numbers", "list"])
def test_a_part_of_a_padded_correction_reads_nothing(rows):
    with torch.device("meta"):
        log_prob, mask = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
    correction = correct(log_prob, log_prob + 1, mask, "decoupled_seq_is_rs")
    part = correction[rows]
    assert part.denominators().tokens.is_meta
    leaf = torch.zeros(3, 4, device="meta").requires_grad_()
    index = rows if isinstance(rows, slice) else torch.as_tensor(rows, device="meta")
    policies = PolicyLogProbs(log_prob=leaf[index], old_log_prob=log_prob[index])
    output = policy_loss(policies, log_prob[index], mask[index], correction=part)
    output.loss.backward()
    assert leaf.grad.is_meta
    assert correction.mini_batch(rows).denominators().tokens.is_meta
    repr(part)  # would raise, if it read a value


# --- A correction that lacks its context ----------------------------------------------------------------------------


def test_a_part_cut_by_hand_is_refused_without_denominators():
    """Known from use: `dataclasses.replace` on rows, and the loss divided by the rows' own count."""
    batch = Batch()
    correction = batch.correct(CORRECTIONS["token weights, a token band"])
    rows = slice(0, 3)
    changes = {name: getattr(correction, name)[rows] for name in ("weights", "loss_mask", "response_mask")}
    part = dataclasses.replace(correction, **changes)
    leaf = batch.start.clone().requires_grad_()
    with pytest.raises(ValueError, match="cut or changed by hand"):
        batch.loss(leaf, rows, part)
    by_hand = batch.loss(
        leaf,
        rows,
        part,
        denominators=correction.denominators(),
        original_denominators=correction.denominators("original"),
    )
    assert torch.equal(by_hand.loss, batch.loss(leaf, rows, correction[rows]).loss)


def test_a_correction_made_by_hand_is_refused_without_denominators():
    batch = Batch()
    made = batch.correct(CORRECTIONS["token weights, a token band"])
    unknown = Correction(made.weights, made.loss_mask, made.sequence_kept, None, made.config)
    leaf = batch.start.clone().requires_grad_()
    with pytest.raises(ValueError, match="cut or changed by hand"):
        batch.loss(leaf, slice(0, 7), unknown)
    with pytest.raises(ValueError, match="no statistics to count from"):
        unknown.denominators()


def test_another_mask_put_into_a_whole_correction_is_counted_as_it_is():
    """A filter of one's own on top: the statistics did not count it, the call does."""
    batch = Batch()
    correction = batch.correct({"rollout_is": "token"})
    fewer = correction.loss_mask.clone()
    fewer[0] = False
    own = dataclasses.replace(correction, loss_mask=fewer)
    output = batch.loss(batch.start.clone().requires_grad_(), slice(0, 7), own)
    assert output.counts.tokens == fewer.sum()


def test_slices_of_one_batch_do_not_pass_for_another():
    batch = Batch()
    correction = batch.correct(CORRECTIONS["token weights, a token band"])
    leaf = batch.start.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"so it is of other tokens|response_mask that differs"):
        batch.loss(leaf, slice(0, 2), correction[2:4])
    with pytest.raises(ValueError, match=r"so the correction is of other tokens.*correction\[rows\]"):
        batch.loss(leaf, slice(0, 2), correction)


def test_a_loss_needs_no_configuration_and_refuses_another():
    batch = Batch()
    correction = batch.correct({"rollout_is": "token"})
    leaf = batch.start.clone().requires_grad_()
    own = batch.loss(leaf, slice(0, 7), correction)
    named = batch.loss(leaf, slice(0, 7), correction, config=correction.config)
    assert torch.equal(own.loss, named.loss)
    with pytest.raises(ValueError, match="correction was computed with"):
        batch.loss(leaf, slice(0, 7), correction, config="decoupled_seq_is")


# --- Groups that only one of the two calls knows --------------------------------------------------------------------


class Ranks:
    """Stands for a process group that is never used: an error comes before any exchange."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def of_ranks(ranks):
    """Return a correction computed over groups of these sizes, as a different process receives it."""
    correction = Batch().correct(CORRECTIONS["token weights, a token band"])
    return dataclasses.replace(correction, ranks=ranks)


def test_a_loss_does_not_judge_slices_by_a_correction_of_whole_sequences_or_the_other_way_round():
    batch = Batch()
    leaf = batch.start.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"context_group has 2 ranks and the correction is of sequences on 1"):
        batch.loss(leaf, slice(0, 7), of_ranks((1, 1)), context_group=Ranks(2))
    with pytest.raises(
        ValueError, match=r"sequences on 2 ranks, and their group did not travel.*pass context_group too"
    ):
        batch.loss(leaf, slice(0, 7), of_ranks((1, 2)))
    with pytest.raises(ValueError, match=r"context_group has 4 ranks and the correction is of sequences on 2"):
        batch.loss(leaf, slice(0, 7), of_ranks((1, 2)), context_group=Ranks(4))


def test_one_rank_of_a_group_that_was_changed_by_hand_needs_denominators():
    batch = Batch()
    with pytest.raises(ValueError, match="over 3 ranks, and does not know what the optimizer step is divided by"):
        batch.loss(batch.start.clone().requires_grad_(), slice(0, 7), of_ranks((3, 1)))


def test_a_loss_rejects_a_group_of_another_size():
    batch = Batch()
    with pytest.raises(ValueError, match="group has 3 ranks, the correction 2: pass the same group to correct"):
        batch.loss(batch.start.clone().requires_grad_(), slice(0, 7), of_ranks((2, 1)), group=Ranks(3))


def test_normalized_weights_need_the_ranks_of_the_step():
    batch = Batch()
    correction = batch.correct(CORRECTIONS["normalized sequence weights, whole sequences rejected"])
    policies = PolicyLogProbs(log_prob=batch.start, old_log_prob=batch.old, rollout_log_prob=batch.rollout)
    rejected = pytest.raises(
        ValueError, match=r"of \(1, 1\) ranks and the step of \(2, 1\).*same group and context_group"
    )
    with rejected, TrainingStep(torch.nn.Linear(1, 1), correction.config, group=Ranks(2)) as step:
        step.policy_loss(policies, batch.advantages, batch.mask, correction=correction)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_a_mini_batch_is_not_counted_without_the_groups(ranks):
    with pytest.raises(ValueError, match="their groups did not travel with it"):
        of_ranks(ranks).mini_batch(slice(0, 2))


# --- Context of parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("travel", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_correction_that_traveled_still_knows_its_step(travel, packed):
    batch = Batch(packed=packed)
    correction = batch.correct(CORRECTIONS["normalized sequence weights, whole sequences rejected"], "weights")
    there = travel(correction[1:5])
    leaf = batch.start.clone().requires_grad_()
    here = batch.loss(leaf, slice(1, 5), correction[1:5])
    assert torch.equal(batch.loss(leaf, slice(1, 5), there).loss, here.loss)
    assert there.metrics() == correction.metrics()


def test_another_device_has_everything():
    correction = Batch(packed=True).correct(CORRECTIONS["token weights, a token band"]).mini_batch([0, 1])
    moved = correction.to("meta")
    tensors = (moved.weights, moved.loss_mask, moved.sequence_kept, moved.response_mask, moved.cu_seqlens)
    assert all(tensor.is_meta for tensor in tensors)
    assert moved.statistics.pack().is_meta
    assert moved.denominators().tokens.is_meta
    assert moved.counts is not None
    assert correction.to("cpu") is correction


def test_changes_by_hand_leave_the_context_behind():
    correction = Batch().correct({"rollout_is": "token"})
    assert correction.counts is not None
    assert correction[1:].counts is not None
    assert dataclasses.replace(correction, weights=None).counts is None
    assert dataclasses.replace(correction)[1:].counts is None


# --- Swapped policies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(0, 7), slice(2, 5)], ids=["batch", "part"])
def test_policies_that_changed_places_since_the_correction_are_refused(rows):
    batch = Batch()
    swapped = correct(batch.rollout, batch.old, batch.mask, "decoupled_token_is")
    with pytest.raises(ValueError, match="old_log_prob and rollout_log_prob are swapped"):
        batch.loss(batch.start.clone().requires_grad_(), rows, swapped[rows])


def test_policies_of_which_only_one_is_given_are_compared_too():
    batch = Batch()
    correction = correct(batch.old, batch.rollout, batch.mask, "decoupled_token_is")
    policies = PolicyLogProbs(log_prob=batch.start, old_log_prob=batch.rollout)
    with pytest.raises(ValueError, match="are swapped"):
        policy_loss(policies, batch.advantages, batch.mask, correction=correction)


def test_train_policy_as_rollout_argument_is_refused():
    batch = Batch()
    correction = correct(batch.old, batch.rollout, batch.mask, "decoupled_token_is")
    policies = PolicyLogProbs(log_prob=batch.start, old_log_prob=batch.old.clone(), rollout_log_prob=batch.old)
    with pytest.raises(ValueError, match="rollout_log_prob"):
        policy_loss(policies, batch.advantages, batch.mask, correction=correction)


def test_one_tensor_for_both_policies_is_not_swapped():
    batch = Batch()
    correction = correct(batch.old, batch.old, batch.mask, "decoupled_token_is")
    policies = PolicyLogProbs(log_prob=batch.start, old_log_prob=batch.old, rollout_log_prob=batch.old[:])
    assert policy_loss(policies, batch.advantages, batch.mask, correction=correction).loss.isfinite()


def test_the_columns_of_one_tensor_are_not_taken_for_each_other():
    batch = Batch()
    both = torch.stack([batch.old, batch.rollout])
    correction = correct(both[0], both[1], batch.mask, "decoupled_token_is")
    policies = PolicyLogProbs(log_prob=batch.start, old_log_prob=both[0], rollout_log_prob=both[1])
    assert policy_loss(policies, batch.advantages, batch.mask, correction=correction).loss.isfinite()


@pytest.mark.parametrize("name", ["old_log_prob", "rollout_log_prob", "ref_log_prob"])
def test_a_fixed_policy_with_a_graph_beside_a_trained_one_without_is_refused(name):
    fixed, computed = torch.zeros(1, 2), torch.zeros(1, 2, requires_grad=True) * 2
    with pytest.raises(ValueError, match=rf"{name} carries a gradient and log_prob carries none.*swapped"):
        PolicyLogProbs(**({"log_prob": fixed, "old_log_prob": fixed} | {name: computed}))


def test_policies_are_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        PolicyLogProbs(torch.zeros(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_in_place_of_the_mask_are_refused(packed):
    batch = Batch(packed=packed)
    with pytest.raises(
        ValueError, match=r"response_mask contains -\d.* it may be labels .* or log-probs\. The order is"
    ):
        correct(batch.mask.double(), batch.old, batch.rollout, cu_seqlens=batch.cu_seqlens)


def test_sequences_chosen_twice_outgrow_small_offsets():
    x, mask = torch.zeros(200), torch.ones(200, dtype=torch.bool)
    correction = correct(x, x, mask, "disabled", cu_seqlens=torch.tensor([0, 120, 200], dtype=torch.uint8))
    part = correction[[1, 0, 1]]
    assert part.cu_seqlens.tolist() == [0, 80, 200, 280]
    assert part.loss_mask.shape == (280,)
