"""What the check answers for the judge's logs, by the answer key: rows of outside faults, loops and healthy logs."""

import collections
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra [train]")
pytest.importorskip("pyarrow", reason="needs the extra [log]")

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "judge"))

import calibrate
from compact_logs import HEALTHY_FILE
from judge_key import wilson
from margins import FITTED, margins

from rollcorr.diagnostics.resolver import CONFIDENCE

AGAIN = 1
"""Outside logs with 1.5 to 3 times the null's k3 that ask for a new null."""
RIGHT = 29
"""Outside logs whose first cause is right, at least; the others are `unknown`."""

OTHERS = {"loops/arithmetic/healthy-0": "not judged", "loops/ngram/template-1": "unknown"}
"""Loops whose answer is not right."""


@pytest.fixture(scope="module")
def answers():
    return list(calibrate.every_answer())


def outcomes(answers, kind):
    return {one.log.path.as_posix(): (one.outcome, one.code) for one in answers if one.log.kind == kind}


def test_no_fault_gets_a_false_name(answers):
    assert [one.log.path.as_posix() for one in answers if one.outcome == "false"] == []


def test_most_outside_faults_are_named(answers):
    found = outcomes(answers, "outside")
    counts = collections.Counter(outcome for outcome, _ in found.values())
    assert len(found) == 44
    assert counts["right"] >= RIGHT
    assert counts["unknown"] + counts["right"] + AGAIN == 44
    assert found["outside/tool_tokens-0"] == ("not judged", "measure_null_again")


def test_loops_are_named_or_unknown(answers):
    found = outcomes(answers, "loops")
    others = {name: outcome for name, (outcome, _) in found.items() if outcome != "right"}
    assert len(found) >= 60
    assert others == OTHERS


def test_repeated_contexts_accuse_no_healthy_log():
    """A few contexts recur in every row: the guard refused each of these nulls, and the log was accused."""
    found = outcomes(calibrate.answers_of(HEALTHY_FILE), "healthy")
    assert found == {
        "healthy/looping-0": ("not judged", "measure_null_again"),
        "healthy/0.05-bf16-0": ("not judged", "None"),
        "healthy/0.3-bf16-0": ("right", "ordinary_noise"),
        "healthy/0.3-fp16-1": ("right", "ordinary_noise"),
        "healthy/0.6-bf16-1": ("right", "ordinary_noise"),
    }


def test_confidence_is_the_share_that_was_right(answers):
    development = calibrate.development(answers)
    assert calibrate.table(development) == CONFIDENCE
    for one in answers:
        if one.score is not None:
            assert one.confidence == [share for least, share in CONFIDENCE if one.score >= least][-1]
    for (_, confidence), (right, count) in zip(CONFIDENCE, calibrate.bins(development), strict=True):
        low, high = wilson(right, count)
        assert count < 20 or low <= confidence <= high


def test_constants_separate_their_logs(answers):
    found = margins(calibrate.development(answers))
    assert {one.constant.name: one.factor for one in found if not one.factor > 1.2} == {}
    fitted = {one.constant.name: (one.constant.value, one.fitted) for one in found if one.constant.name in FITTED}
    assert len(fitted) == len(FITTED)
    assert all(value == fit for value, fit in fitted.values()), fitted
