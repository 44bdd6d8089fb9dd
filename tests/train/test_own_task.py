"""Own problems and rewards by import path: a run that uses both, the order of rows, and errors."""

from __future__ import annotations

import math
import re

import pytest

from rollcorr.rollout_log import read_rollout_log
from rollcorr.train import load_config, train
from rollcorr.train.grpo import make_task
from rollcorr.train.grpo.grpo_config import TaskConfig
from rollcorr.train.grpo.policy import make_byte_tokenizer
from rollcorr.train.grpo.tasks import OwnReward, Reward, TaskProblem

CODE = """
def problems():
    return [{"prompt": f"{n}:", "answer": str(n), "solution": str(n)} for n in range(5)]

def reward(response, row):
    return sum(character < "\\x80" for character in response) / 8 + (row["answer"] in response)

def length(response, row): return len(response)
def missing(response, row): return None
def infinite(response, row): return float("inf")
def nothing(): return []
def no_answer(): return [{"prompt": "p", "answer": "a"}, {"prompt": "p"}]
def number(): return [{"prompt": "p", "answer": 4}]
number_of_rows = 3
"""


@pytest.fixture
def code(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


def test_run_uses_own_problems_and_reward(tmp_path, code, micro_run):
    """With a warm-up and evaluations; the logged rewards follow from the logged tokens."""
    run = tmp_path / "run"
    own = [f"task.problems={code('problems')}", f"task.reward={code('reward')}"]
    extras = ["steps=2", "warm_up.steps=2", "warm_up.batch_size=2", "log.evaluate=3", "log.rollouts=true"]
    summary = train(load_config(None, [f"run_dir={run}", *micro_run, *own, *extras]))
    assert 0 < summary.after["reward"] <= 2
    assert summary.after["accuracy"] > 0

    tokenizer = make_byte_tokenizer()
    [log] = read_rollout_log(run / "rollouts" / "step_000001.parquet")
    rows = {f"{n}:": str(n) for n in range(5)}
    for row in log.to_rows():
        answer = rows[tokenizer.decode(row["prompt_ids"], skip_special_tokens=True)]
        text = tokenizer.decode(row["response_ids"], skip_special_tokens=True)
        assert row["reward"] == pytest.approx(sum(c < "\x80" for c in text) / 8 + (answer in text))


def test_own_rows_shuffle_by_seed_and_step(code):
    task = make_task(TaskConfig(problems=code("problems")))
    epoch = [problem.answer for problem in task.problems(5, seed=3, step=1)]
    assert sorted(epoch) == list("01234")
    assert epoch == [problem.answer for problem in task.problems(5, seed=3, step=1)]
    assert epoch != [problem.answer for problem in task.problems(5, seed=3, step=2)]


def test_own_reward_omits_special_tokens(code):
    tokenizer = make_byte_tokenizer()
    reward = OwnReward(code("length"), tokenizer)
    problem = TaskProblem("p", "a", "")
    ids = [*tokenizer.encode("abc", add_special_tokens=False), tokenizer.eos_token_id]
    assert reward(ids, problem) == Reward(3.0, correct=True)
    assert reward(ids[3:], problem) == Reward(0.0, correct=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent", "mine.py defines no 'absent'; it must be package.module:name or file.py:name"),
        ("number_of_rows", "is int, not a function"),
        ("nothing", "returned no row"),
        ("no_answer", "row 1: expected a dict with the texts `prompt`, `answer`"),
        ("number", "row 0: expected a dict with the texts"),
    ],
)
def test_unusable_problems_are_named(code, name, reason):
    with pytest.raises(ValueError, match=re.escape(f"task.problems={code(name)!r}") + ".*" + re.escape(reason)):
        make_task(TaskConfig(problems=code(name)))


@pytest.mark.parametrize(("name", "value"), [("missing", "None"), ("infinite", "inf")])
def test_unusable_reward_is_named(code, name, value):
    reward = OwnReward(code(name), make_byte_tokenizer())
    with pytest.raises(ValueError, match=rf"task.reward=.*{name}' of 'two' is {value}; return a finite number"):
        reward([65], TaskProblem("two", "2", ""))
    assert math.isfinite(OwnReward(code("length"), make_byte_tokenizer())([65], TaskProblem("two", "2", "")).value)


def test_own_problems_exclude_another_task():
    with pytest.raises(ValueError, match=r"task\.problems replaces task\.name='scratchpad'"):
        TaskConfig(name="scratchpad", problems="mine:problems")


def test_warm_up_needs_solutions(tmp_path, micro_run):
    (tmp_path / "rows.py").write_text('def rows(): return [{"prompt": "p", "answer": "a"}]\n')
    own = [f"task.problems={tmp_path / 'rows.py'}:rows", "warm_up.steps=1", "warm_up.batch_size=1"]
    with pytest.raises(ValueError, match=r"add `solution` to each row of task\.problems"):
        train(load_config(None, [f"run_dir={tmp_path / 'run'}", *micro_run, *own]))
