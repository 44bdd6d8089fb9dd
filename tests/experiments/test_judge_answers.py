"""What the check answers for the judge's outside faults, by the answer key: a small part of each log of seed 0."""

import collections
import dataclasses
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra [train]")
pytest.importorskip("pyarrow", reason="needs the extra [log]")

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "judge"))

from compact_logs import write_logs
from judge_key import first_cause, read_key
from make_logs import Log

from rollcorr.diagnostics import check_logs, null_of_logs

FALSE = {}
"""Logs whose first cause is false, and the cause."""
AGAIN = 1
"""Logs with 1.5 to 3 times the null's k3 that ask for a new null."""
RIGHT = 29
"""Logs whose first cause is right, at least; the others are `unknown`."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Name → outcome and first code."""
    key, found, null = read_key(), {}, None
    for name, path in write_logs(tmp_path_factory.mktemp("logs")):
        if null is None:
            null = null_of_logs([path])
            continue
        result = check_logs([path], null=null)
        findings = [dataclasses.asdict(finding) for finding in result.hypotheses]
        answer = {"verdict": result.health.verdict, "findings": findings}
        found[name] = key.judge(Log("outside", name, 0), answer), first_cause(answer).get("code")
    return found


def test_few_outside_faults_get_a_false_name(answers):
    assert len(answers) == 44
    assert {name: code for name, (outcome, code) in answers.items() if outcome == "false"} == FALSE


def test_most_outside_faults_are_named(answers):
    outcomes = collections.Counter(outcome for outcome, _ in answers.values())
    assert outcomes["right"] >= RIGHT
    assert outcomes["unknown"] + outcomes["right"] + len(FALSE) + AGAIN == 44
    assert answers["tool_tokens"] == ("not judged", "measure_null_again")
