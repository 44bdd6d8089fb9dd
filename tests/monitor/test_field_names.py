"""Batches of other frameworks, by their own names and in their own containers. None of them is installed here."""

from __future__ import annotations

import pytest
import torch

from rollcorr import Monitor, RolloutSample, correct, read_rollout_log
from rollcorr.layouts import local_lists
from rollcorr.monitor.field_names import read_fields

TRAIN = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -0.2, 0.0]])
ROLLOUT = TRAIN + torch.tensor([[0.1, -0.1, 0.0], [0.2, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
IDS = torch.tensor([[4, 5, 6], [7, 8, 0]])

VERL = {"old_log_probs": TRAIN, "rollout_log_probs": ROLLOUT, "response_mask": MASK, "responses": IDS}
TRL = {
    "old_per_token_logps": TRAIN,
    "sampling_per_token_logps": ROLLOUT,
    "completion_mask": MASK,
    "completion_ids": IDS,
    "advantages": torch.tensor([1.0, -1.0]),
    "num_items_in_batch": torch.tensor(5),
}
SKYRL = {"action_log_probs": TRAIN, "rollout_logprobs": ROLLOUT, "loss_mask": MASK, "response_mask": MASK}
SLIME = {
    "log_probs": [TRAIN[0], TRAIN[1, :2]],
    "rollout_log_probs": [ROLLOUT[0], ROLLOUT[1, :2]],
    "loss_masks": [MASK[0], MASK[1, :2]],
    "total_lengths": [5, 4],
    "response_lengths": [3, 2],
}


class TensorDictLike:
    """The part of a TensorDict's interface that a mapping has, without being one."""

    def __init__(self, tensors):
        self._tensors = tensors

    def keys(self):
        return self._tensors.keys()

    def __getitem__(self, name):
        return self._tensors[name]


class DataProtoLike:
    """verl's container: tensors, and one object for each row."""

    def __init__(self, tensors, others):
        self.batch = TensorDictLike(tensors)
        self.non_tensor_batch = others


@pytest.mark.parametrize("kind", [dict, TensorDictLike])
@pytest.mark.parametrize("batch", [VERL, TRL, SKYRL, SLIME], ids=["verl", "trl", "skyrl", "slime"])
def test_a_batch_by_the_names_of_its_framework_is_corrected_as_its_tensors_are(tmp_path, batch, kind):
    with Monitor(tmp_path, rollout_is="token") as monitor:
        found = monitor.correct(kind(batch))
    expected = correct(TRAIN, ROLLOUT, MASK, rollout_is="token")
    assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-6, abs=1e-9)
    inside = found.loss_mask if found.cu_seqlens is None else found.weights == found.weights
    torch.testing.assert_close(found.weights[inside], expected.weights[expected.loss_mask])


def test_a_data_proto_brings_its_groups_and_ids_to_the_log(tmp_path):
    batch = DataProtoLike(VERL, {"uid": ["a", "b"], "data_source": ["gsm8k", "gsm8k"]})
    with Monitor(tmp_path, rollouts=RolloutSample()) as monitor:
        monitor.correct(batch, fields="verl", columns={"x_source": batch.non_tensor_batch["data_source"]})
        monitor.step(reward=torch.tensor([1.0, 0.0]))
    rows = [row for part in read_rollout_log(tmp_path) for row in part.to_rows()]
    assert [row["group_id"] for row in rows] == ["a", "b"]
    assert [row["response_ids"] for row in rows] == [[4, 5, 6], [7, 8]]
    assert [row["x_source"] for row in rows] == ["gsm8k", "gsm8k"]


def test_a_tool_mask_takes_its_tokens_out():
    tool_mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    assert torch.equal(read_fields({**TRL, "tool_mask": tool_mask}).response_mask, (MASK * tool_mask).bool())


def test_a_mask_of_sequences_takes_out_all_their_tokens():
    """NeMo-RL's sample mask is (B,), its token mask (B, S)."""
    nemo_rl = {"prev_logprobs": TRAIN, "generation_logprobs": ROLLOUT, "token_mask": MASK}
    found = read_fields({**nemo_rl, "sample_mask": torch.tensor([0.0, 1.0])})
    assert found.response_mask.tolist() == [[False] * 3, [True, True, False]]


def test_names_of_ones_own_are_given_as_a_map():
    names = {"old_log_prob": "pi", "rollout_log_prob": "mu", "response_mask": "m", "reward": "r"}
    found = read_fields({"pi": TRAIN, "mu": ROLLOUT, "m": MASK, "r": [1.0, 0.0]}, names)
    assert found.train_log_prob is TRAIN
    assert found.rollout_log_prob is ROLLOUT
    assert found.columns == {"reward": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"old_log_prob": "pi"}, "fields has no rollout_log_prob, response_mask; it maps old_log_prob"),
        ({"old_logprob": "pi"}, "'old_logprob' is not a column of the rollout log"),
    ],
)
def test_a_wrong_map_of_names_is_an_error(names, message):
    with pytest.raises(ValueError, match=message):
        read_fields({"pi": TRAIN}, names)


def test_a_packed_batch_brings_its_offsets():
    tensors = {"old_log_prob": TRAIN.flatten(), "rollout_log_prob": ROLLOUT.flatten(), "response_mask": MASK.flatten()}
    assert read_fields({**tensors, "cu_seqlens": [0, 3, 6]}).cu_seqlens.tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    ("batch", "name", "fix"),
    [
        (TRL, "old_per_token_logps", "compute it first"),
        (TRL, "sampling_per_token_logps", "let the sampler report"),
        (TRL, "completion_mask", "it marks the sampled tokens"),
        (VERL, "old_log_probs", "compute it first"),
        (VERL, "rollout_log_probs", "let the sampler report"),
        (SLIME, "log_probs", "compute it first"),
    ],
)
@pytest.mark.parametrize("fields", [None, "its own"])
def test_a_field_that_is_none_is_named_with_what_to_do(batch, name, fix, fields):
    """All names were there, so the error listed exactly the names that it wanted."""
    framework = {id(TRL): "trl", id(VERL): "verl", id(SLIME): "slime"}[id(batch)]
    with pytest.raises(ValueError, match=rf"\b{name} is None: {fix}") as error:
        read_fields({**batch, name: None}, fields and framework)
    assert f"{name} (None)" in str(error.value)
    assert "no framework's fields" not in str(error.value)


def test_a_batch_that_fits_nobody_or_two_is_named():
    with pytest.raises(ValueError, match=r"no framework's fields. rollcorr: old_log_prob or train_log_prob"):
        read_fields({"logits": TRAIN})
    with pytest.raises(ValueError, match="the fields of verl and of trl; say which: fields='verl'"):
        read_fields({**VERL, **TRL})
    with pytest.raises(ValueError, match="no framework is called 'ver'"):
        read_fields(VERL, "ver")


@pytest.mark.parametrize("batch", [TRAIN, [TRAIN, ROLLOUT], "a text", None])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(TypeError, match="or one batch that holds them by name"):
        read_fields(batch)


class ContextRank:
    """Replaces the context group of one of two ranks; it sends no message."""

    def __init__(self, rank):
        self.rank = lambda: rank

    def size(self):
        return 2


@pytest.mark.parametrize("rank", [0, 1])
def test_whole_masks_are_cut_like_log_probs(rank):
    """slime passes each context rank its part of the log-probs, and the masks of full responses."""
    batch = {**SLIME, "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([0, 1])]}
    names = ("log_probs", "rollout_log_probs", "loss_masks")
    parts = local_lists(*(batch[name] for name in names), total_lengths=[5, 4], ranks=2, rank=rank)
    train, rollout, mask = (torch.cat(part) for part in parts)
    assert 0 < len(mask) < 5
    found = read_fields(
        {**batch, "log_probs": parts[0], "rollout_log_probs": parts[1]}, context_group=ContextRank(rank)
    )
    assert torch.equal(found.train_log_prob, train)
    assert torch.equal(found.rollout_log_prob, rollout)
    assert torch.equal(found.response_mask, mask)
