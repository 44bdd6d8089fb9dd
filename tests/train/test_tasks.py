"""Rewards by hand, problems determined by (seed, step), and malformed files."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcorr.train.grpo.grpo_config import TaskConfig
from rollcorr.train.grpo.policy import make_byte_tokenizer
from rollcorr.train.grpo.tasks import ArithmeticTask, Gsm8kTask, ScratchpadTask, hard_gated_reward, same_number

TOKENIZER = make_byte_tokenizer()
GSM8K = Path(__file__).parents[1] / "data" / "gsm8k_12.jsonl"  # plain, thousands, millions and negative answers


def reward(text: str, answer: str = "85", *, bonus_length: int = 10, ids: list[int] | None = None):
    ids = TOKENIZER.encode(text, add_special_tokens=False) if ids is None else ids
    return hard_gated_reward(ids, answer, TOKENIZER, bonus_length=bonus_length)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 85", 1.0),
        ("#### 85\n", 1.0),
        ("#### 85\nabc", 1.3),  # three tokens of ten after the answer line
        ("let me see\n#### 85\n0123456789", 2.0),
        ("#### 85\n" + "x" * 50, 2.0),  # the bonus is capped
        ("#### 84\nabc", 0.0),  # wrong
        ("85", 0.0),  # no answer line
        ("it is #### 85", 0.0),  # not a line of its own
        ("#### 84\n#### 85\n", 0.0),  # two answers are no answer
        ("####", 0.0),
        ("", 0.0),
        ("#### 85\n€", 1.3),  # one character, three byte tokens
    ],
)
def test_reward_by_hand(text, value):
    got = reward(text)
    assert got.value == pytest.approx(value)
    assert got.correct == (value > 0)


def test_special_tokens_earn_no_bonus():
    ids = TOKENIZER.encode("#### 85\nab", add_special_tokens=False)
    assert reward("", ids=[*ids, TOKENIZER.eos_token_id]).value == pytest.approx(1.2)


def test_a_bonus_over_no_tokens_is_no_bonus():
    assert reward("let me see\n#### 85\n0123456789", bonus_length=0).value == 1
    assert reward("#### 84\n", bonus_length=0).value == 0


def test_a_bonus_over_fewer_than_no_tokens_is_refused():
    with pytest.raises(ValueError, match="bonus_length must be at least 0, got -1"):
        TaskConfig(bonus_length=-1)


@given(text=st.text(max_size=30), tail=st.text(alphabet="abc. ", max_size=20))
@settings(deadline=None, max_examples=50)
def test_the_reward_is_gated_hard(text, tail):
    """Whatever is written: 0 without the right answer, between 1 and 2 with it."""
    assert reward(text.replace("#", "")).value == 0
    assert reward(f"#### 85\n{tail}").value == pytest.approx(1 + min(len(tail), 10) / 10)


@pytest.mark.parametrize(
    ("given_answer", "expected", "same"),
    [
        (" 1,234 ", "1234", True),
        ("$18", "18", True),
        ("18.", "18", True),
        ("18.0", "18", True),
        ("-3", "3", False),
        ("half", "half", True),
        ("half", "1/2", False),
        ("", "0", False),
        ("nan", "0", False),
    ],
)
def test_answers_are_compared_as_numbers(given_answer, expected, same):
    assert same_number(given_answer, expected) is same


def test_solutions_of_the_arithmetic_task_earn_a_reward():
    for problem in ArithmeticTask().problems(200, seed=0, step=3):
        assert reward(problem.solution, problem.answer).correct
        assert eval(problem.prompt.removesuffix("=?\n")) == int(problem.answer)


def test_a_scratch_pad_is_worked_from_line_to_line_and_earns_its_reward():
    for problem in ScratchpadTask(additions=3).problems(50, seed=0, step=3):
        label, added, start = problem.prompt[0], int(problem.prompt[3]), int(problem.prompt[5:])
        totals = [start + added, start + 2 * added, start + 3 * added]
        assert (label, problem.answer) == ("0", str(totals[-1]))
        assert problem.solution == (
            f"a +{added}={totals[0]:04d}\nb +{added}={totals[1]:04d}\nc +{added}={totals[2]:04d}\n"
            f"#### {totals[2]:04d}\n"
        )
        assert reward(problem.solution, problem.answer, bonus_length=0).value == 1


def test_the_answer_of_a_scratch_pad_comes_after_256_tokens():
    for problem in ScratchpadTask().problems(50, seed=1, step=0):
        assert problem.solution.startswith("a +")
        assert problem.solution.splitlines()[-2].startswith("z +")
        before, answer = problem.solution.split("#### ")
        assert len(TOKENIZER.encode(before, add_special_tokens=False)) == 260
        assert len(TOKENIZER.encode(problem.solution, add_special_tokens=False)) == 270
        assert int(answer) == int(problem.answer)


@pytest.mark.parametrize("additions", [0, 53])
def test_a_scratch_pad_has_a_letter_for_each_line(additions):
    with pytest.raises(ValueError, match=f"task.additions must be 1 to 52, one letter for each, got {additions}"):
        ScratchpadTask(additions=additions)


@pytest.mark.parametrize("make", [ArithmeticTask, ScratchpadTask])
def test_problems_follow_from_seed_and_step_alone(make):
    task = make()
    first = task.problems(8, seed=0, step=1)
    task.problems(8, seed=0, step=2)
    assert task.problems(8, seed=0, step=1) == first == make().problems(8, seed=0, step=1)
    assert task.problems(8, seed=0, step=2) != first
    assert task.problems(8, seed=1, step=1) != first


def test_operands_stay_below_their_limit():
    prompts = [p.prompt for p in ArithmeticTask(max_operand=1).problems(64, seed=0, step=0)]
    assert set(prompts) == {f"{a}{sign}{b}=?\n" for a in "01" for b in "01" for sign in "+-"}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def row(question: str, answer: str = "so\n#### 1") -> str:
    return json.dumps({"question": question, "answer": answer})


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_epoch_meets_every_row_once_in_a_new_order(tmp_path, count):
    task = Gsm8kTask(write(tmp_path / "d.jsonl", *(row(str(i)) for i in range(6))))
    seen = [problem.prompt for step in range(12) for problem in task.problems(count, seed=0, step=step)]
    epochs = [seen[start : start + 6] for start in range(0, len(seen) - 5, 6)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    if len(epochs) > 1:
        assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no valid JSON"),
        ("[]", "expected an object with the texts `question` and `answer`, got []"),
        ('{"question": "q"}', "with the texts `question` and `answer`"),
        ('{"question": 3, "answer": "#### 1"}', "with the texts `question` and `answer`"),
        (row("q", "1"), "must have one line `#### N`, found 0"),
        (row("q", "####  "), "must have one line `#### N`, found 1"),
        (row("q", "#### 1\n#### 2"), "must have one line `#### N`, found 2"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, reason):
    path = write(tmp_path / "bad.jsonl", row("fine"), "", line)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 3: ") as caught:
        Gsm8kTask(path)
    assert reason in str(caught.value)


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.jsonl.* is no file"):
        Gsm8kTask(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        Gsm8kTask(write(tmp_path / "empty.jsonl"))


def test_every_reference_solution_of_gsm8k_is_right():
    task = Gsm8kTask(GSM8K)
    assert len(task.rows) == 12
    for problem in task.rows:
        assert reward(problem.solution, problem.answer).value == 1.0
