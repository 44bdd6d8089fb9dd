"""From an engine's lists to tensors: valid lists arrive unchanged, an invalid one stops the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollcorr.config import SamplingSpec
from rollcorr.engines.base import EngineAnswerError, EngineRestartedError
from rollcorr.engines.completions import Completion, check_versions, rollout_from_completions, versions_of_spans

NAN, INF = math.nan, math.inf
PROMPTS = [[1, 2], [3], [4, 5, 6]]
PAD = 9


def build(*completions, prompts=PROMPTS, **options):
    options = {"sampling": SamplingSpec(policy_version=3), "pad_token_id": PAD} | options
    return rollout_from_completions(prompts, completions, **options)


def good(**changes):
    return Completion(**({"token_ids": [7, 8], "log_probs": [-0.5, -1.0]} | changes))


def test_three_answers_by_hand():
    rollout = build(
        good(), Completion(token_ids=[], log_probs=[]), Completion(token_ids=[0, 1, 2], log_probs=[-1, -2, -3])
    )
    assert rollout.tokens.prompt_ids.tolist() == [[PAD, 1, 2], [PAD, PAD, 3], [4, 5, 6]]
    assert rollout.tokens.response_ids.tolist() == [[7, 8, PAD], [PAD] * 3, [0, 1, 2]]
    assert rollout.tokens.response_mask.int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert rollout.rollout_log_prob.tolist() == [[-0.5, -1.0, 0.0], [0.0] * 3, [-1.0, -2.0, -3.0]]
    assert rollout.rollout_log_prob.dtype == torch.float32
    assert rollout.tokens.response_ids.dtype == torch.int64
    assert (rollout.kept, rollout.raw_log_prob, rollout.policy_versions) == (None, None, None)


@given(st.lists(st.lists(st.floats(-50, 0, width=32), max_size=6), min_size=1, max_size=5))
def test_every_log_prob_arrives_at_its_token(rows):
    answers = [Completion(token_ids=range(len(row)), log_probs=row, raw_log_probs=row) for row in rows]
    rollout = build(*answers, prompts=[[1]] * len(rows))
    mask = rollout.tokens.response_mask
    assert rollout.rollout_log_prob[mask].tolist() == [value for row in rows for value in row]
    assert torch.equal(rollout.raw_log_prob, rollout.rollout_log_prob)
    assert mask.sum(1).tolist() == [len(row) for row in rows]
    assert (rollout.rollout_log_prob[~mask] == 0).all()


def test_kept_sets_are_one_a_token_row_after_row():
    first, second = good(kept=[[7], [8, 1]]), good(kept=[[7, 0], [8]])
    kept = build(first, second, prompts=PROMPTS[:2]).kept
    assert kept.offsets.tolist() == [0, 1, 3, 5, 6]
    mass = build(good(kept=[[7], [8]], log_kept_mass=[-0.25, 1e-7]), prompts=[[1]]).log_kept_mass
    assert mass.tolist() == [[-0.25, 0.0]]
    assert kept.ids.tolist() == [7, 8, 1, 7, 0, 8]


def test_versions_are_told_only_where_they_differ_from_that_of_the_spec():
    assert build(good(versions=[3, 3]), prompts=[[1]]).policy_versions is None
    rollout = build(good(versions=[3, 4]), good(token_ids=[1], log_probs=[-1.0], versions=[3]), prompts=PROMPTS[:2])
    assert rollout.policy_versions.tolist() == [[3, 4], [3, 0]]


def test_rounding_above_zero_becomes_zero():
    assert build(good(log_probs=[3e-7, -1e-3]), prompts=[[1]]).rollout_log_prob.tolist() == [
        [0.0, pytest.approx(-1e-3)]
    ]


def test_a_batch_of_empty_responses_keeps_one_column():
    rollout = build(Completion(token_ids=[], log_probs=[], kept=[]), prompts=[[1]])
    assert rollout.tokens.response_mask.tolist() == [[False]]
    assert len(rollout.kept) == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"log_probs": [-0.5]}, "row 1 has 1 log_probs for 2 tokens"),
        ({"log_probs": [-0.5, -1.0, -2.0]}, "row 1 has 3 log_probs for 2 tokens"),
        ({"log_probs": [-0.5, None]}, r"log_probs\[1\] of row 1 is None"),
        ({"log_probs": None}, "row 1 has no log_probs"),
        ({"log_probs": [NAN, -1.0]}, r"log_probs\[0\] of row 1 is nan"),
        ({"log_probs": [-0.5, -INF]}, r"log_probs\[1\] of row 1 is -inf"),
        ({"log_probs": [-0.5, -9999.0]}, r"log_probs\[1\] of row 1 is -9999"),
        ({"log_probs": [-0.5, 0.01]}, r"log_probs\[1\] of row 1 is 0.01, a log-prob is at most 0"),
        ({"log_probs": [-0.5, "-1.0"]}, r"log_probs\[1\] of row 1 is '-1.0', no number"),
        ({"log_probs": [-0.5, False]}, r"log_probs\[1\] of row 1 is False, no number"),
        ({"log_probs": [-0.5, -(10**400)]}, r"log_probs\[1\] of row 1 is -1000"),
        ({"log_probs": -0.5}, "log_probs of row 1 is -0.5, no list"),
        ({"log_probs": "ab"}, "log_probs of row 1 is 'ab', no list"),
        ({"log_probs": {0: -0.5, 1: -1.0}}, "log_probs of row 1 is {0: -0.5, 1: -1.0}, no list"),
        ({"token_ids": None}, "row 1 has no token_ids"),
        ({"token_ids": "78"}, "token_ids of row 1 is '78', no list"),
        ({"token_ids": [7, 10**30]}, r"token_ids\[1\] of row 1 is 1000000000.*no token id of the vocabulary"),
        ({"kept": 5}, "kept of row 1 is 5, no list"),
        ({"kept": [[7], 8]}, r"kept\[1\] of row 1 is 8, no list"),
        ({"versions": [3, 2**63]}, r"versions\[1\] of row 1 is 9223372036854775808"),
        ({"token_ids": [7, -1]}, r"token_ids\[1\] of row 1 is -1, no token id of the vocabulary"),
        ({"token_ids": [7, 10]}, r"token_ids\[1\] of row 1 is 10, no token id of the vocabulary 0 … 9"),
        ({"token_ids": [7, 8.0]}, r"token_ids\[1\] of row 1 is 8.0, no token id"),
        ({"token_ids": [7, None]}, r"token_ids\[1\] of row 1 is None, no token id"),
        ({"kept": [[7]]}, "row 1 has 1 kept for 2 tokens"),
        ({"kept": [[7], []]}, r"kept\[1\] of row 1 is empty"),
        ({"kept": [[7], [8, 8]]}, r"kept\[1\] of row 1 names an id twice"),
        ({"kept": [[7], [10]]}, r"an id in kept\[1\] of row 1 is 10"),
        ({"kept": None}, "row 1 has no kept"),
        ({"log_kept_mass": [-0.1]}, "row 1 has 1 log_kept_mass for 2 tokens"),
        ({"log_kept_mass": [-0.1, 0.2]}, r"log_kept_mass\[1\] of row 1 is 0.2"),
        ({"raw_log_probs": [-1.0, None]}, r"raw_log_probs\[1\] of row 1 is None"),
        ({"raw_log_probs": None}, "row 1 has no raw_log_probs"),
        ({"versions": [3]}, "row 1 has 1 versions for 2 tokens"),
        ({"versions": [3, "default"]}, r"versions\[1\] of row 1 is 'default'"),
        ({"versions": None}, "row 1 has no versions"),
    ],
)
def test_one_bad_value_stops_the_batch_and_is_named(answer, message):
    full = {"kept": [[7], [8]], "log_kept_mass": [-0.1, 0.0], "raw_log_probs": [-0.5, -1.0], "versions": [3, 3]}
    with pytest.raises(EngineAnswerError, match=message):
        build(good(**full), good(**(full | answer)), good(**full), vocabulary_size=10)


def test_a_missing_answer_stops_the_batch():
    with pytest.raises(EngineAnswerError, match="answered 2 of 3 prompts; none is used"):
        build(good(), good())


def test_an_empty_prompt_is_the_callers_fault():
    with pytest.raises(ValueError, match="every prompt needs at least one token"):
        build(good(), prompts=[[]])


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([{"version": "1", "start": 0}], r"row 4: weight_versions is no list .* 'end'\): \["),
        ([{"version": "1", "start": 0, "end": 2.0}], r"weight_versions .*'end': 2\.0.* do not cover its 3 tokens"),
        ([{"version": "1", "start": 0, "end": None}], "do not cover its 3 tokens"),
        ([{"version": "1", "start": 0, "end": "3"}], "do not cover its 3 tokens"),
        ({"version": "1", "start": 0, "end": 3}, "no list of spans"),
        (["1"], "no list of spans"),
        (3, "no list of spans with a version, a start and an end"),
        ([{"version": 1, "start": 0, "end": 3}], "of weights 1, which is no policy version"),
        ([{"version": "٣", "start": 0, "end": 3}], "which is no policy version"),
        ([{"version": "9" * 5000, "start": 0, "end": 3}], "which is no policy version"),
        ([{"version": "1", "start": 0, "end": 5}, {"version": "1", "start": 5, "end": 3}], "do not cover its 3 tokens"),
        ([{"version": "1", "start": 0, "end": 2}], "do not cover its 3 tokens"),
        ([{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 3}], "do not cover its 3 tokens"),
    ],
)
def test_version_spans_that_say_too_little_are_refused(spans, message):
    with pytest.raises(EngineAnswerError, match=message):
        versions_of_spans(spans, 3, 4, initial=0)


def test_the_label_of_the_first_weights_says_that_an_engine_was_restarted_once_it_was_given_others():
    spans = [{"version": "default", "start": 0, "end": 2}]
    assert versions_of_spans(spans, 2, 0, initial=5) == [5, 5]
    with pytest.raises(EngineRestartedError, match=r"row 0 is of weights 'default'.*was restarted"):
        versions_of_spans(spans, 2, 0, initial=None)


def test_a_version_that_the_engine_was_not_given_is_named_with_its_token():
    answers = [good(versions=[3, 3]), good(versions=[3, 7]), good()]
    check_versions(answers[:1], [3], "vLLM")
    check_versions(answers, [3, 7], "vLLM")
    with pytest.raises(EngineAnswerError, match=r"token 1 of row 1 is of version 7 by vLLM's own .* given version 3:"):
        check_versions(answers, [3], "vLLM")


def test_version_spans_give_a_version_to_each_token():
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    assert versions_of_spans(spans, 3, 0, initial=0) == [1, 2, 2]
