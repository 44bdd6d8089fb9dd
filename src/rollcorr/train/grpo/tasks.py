"""Tasks: problems with a verifiable answer, and the reward of a response.

A response answers on a line of its own, `#### 42`. The reward is 0 unless there is exactly one such line with the
correct number, else

    1 + min(tokens_after_answer, bonus_length) / bonus_length

so it lies in {0} ∪ [1, 2]. The bonus asks for longer explanations after the answer, which stresses a correction
that degrades with length; with `bonus_length` 0 the reward is 0 or 1.
Source: Fang & Khazi (2025), "Mismatch Praxis", section 5.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_letters
from typing import Any, Protocol

import torch

from rollcorr.config.functions import load_function
from rollcorr.train.steps import derived_generator, shuffled_walk

ANSWER_LINE = re.compile(r"^[ \t]*####(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class TaskProblem:
    """One problem: prompt, correct answer, and a solution to imitate in the warm-up."""

    prompt: str
    answer: str
    solution: str


@dataclass(frozen=True)
class Reward:
    """Reward of a response, and whether its answer was correct."""

    value: float
    correct: bool


class Task(Protocol):
    """A source of problems. Batches depend only on (seed, step), so a restart keeps the data order."""

    def problems(self, count: int, *, seed: int, step: int) -> list[TaskProblem]:
        """Return the `count` problems of a step."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticTask:
    """One-step sums and differences: `47+38=?`, answered by `#### 85` and checks of the result.

    Attributes:
        max_operand: the largest operand.
    """

    max_operand: int = 99

    def problems(self, count: int, *, seed: int, step: int) -> list[TaskProblem]:
        """Draw operands uniformly from 0 … max_operand, and the sign by a fair coin.

        Args:
            count: number of problems.
            seed: the run's seed.
            step: number of the training step; each step gets different problems.
        """
        generator = derived_generator(seed, "problems", step)
        operands = torch.randint(self.max_operand + 1, (count, 2), generator=generator, device="cpu").tolist()
        signs = torch.randint(2, (count,), generator=generator, device="cpu").tolist()
        checks = torch.multinomial(
            torch.tensor([4.0, 3.0, 2.0, 1.0], device="cpu"), count, replacement=True, generator=generator
        )
        return [
            self._make_problem(a, b, sign, n) for (a, b), sign, n in zip(operands, signs, checks.tolist(), strict=True)
        ]

    def _make_problem(self, a: int, b: int, sign: int, checks: int) -> TaskProblem:
        result = a - b if sign else a + b
        question = f"{a}-{b}" if sign else f"{a}+{b}"
        inverse = f"{result}+{b}={a}" if sign else f"{result}-{b}={a}"
        sentences = (f"{question}={result}", inverse, "right")[:checks]
        return TaskProblem(f"{question}=?\n", str(result), f"#### {result}\n" + "".join(f"{s}. " for s in sentences))


@dataclass(frozen=True, kw_only=True)
class ScratchpadTask:
    """Repeated addition on a scratch pad: `0 +8=4170` asks to start at 4170 and to add 8 again and again.

    The solution has a line for each addition, `a +8=4178`, `b +8=4186`, …, and answers with the last total. A line is
    10 characters long, so 26 additions need 260 of them before the answer. One incorrect line makes the answer
    incorrect: a policy with 98 % correct additions has 59 % correct answers.

    Attributes:
        additions: how often the number is added, 1 to 52, one letter for each.

    Raises:
        ValueError: `additions` is out of this range.
    """

    additions: int = 26

    def __post_init__(self) -> None:
        if not 1 <= self.additions <= len(ascii_letters):
            raise ValueError(f"task.additions must be 1 to 52, one letter for each, got {self.additions}")

    def problems(self, count: int, *, seed: int, step: int) -> list[TaskProblem]:
        """Draw the start uniformly from 0 … 8999 and the summand from 0 … 9.

        Args:
            count: number of problems.
            seed: the run's seed.
            step: number of the training step; each step gets different problems.
        """
        generator = derived_generator(seed, "problems", step)
        starts = torch.randint(9000, (count,), generator=generator, device="cpu").tolist()
        added = torch.randint(10, (count,), generator=generator, device="cpu").tolist()
        return [self._make_problem(*numbers) for numbers in zip(starts, added, strict=True)]

    def _make_problem(self, start: int, added: int) -> TaskProblem:
        labels = enumerate(ascii_letters[: self.additions], 1)
        pad = "".join(f"{label} +{added}={start + n * added:04d}\n" for n, label in labels)
        result = start + self.additions * added
        return TaskProblem(f"0 +{added}={start:04d}\n", str(result), f"{pad}#### {result:04d}\n")


@dataclass(frozen=True)
class RowsTask:
    """A fixed list of problems.

    Attributes:
        rows: all problems.
    """

    rows: list[TaskProblem]

    def problems(self, count: int, *, seed: int, step: int) -> list[TaskProblem]:
        """Take the next `count` rows of an endless walk through the list, shuffled anew in every epoch.

        Args:
            count: number of problems.
            seed: the run's seed.
            step: number of the training step; each step gets different problems.
        """
        return [self.rows[row] for row in shuffled_walk(len(self.rows), count, purpose="epoch", seed=seed, step=step)]


class Gsm8kTask(RowsTask):
    """Problems from a JSONL file with `question` and `answer`, the answer ending in `#### N` (the GSM8K format)."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(_read_gsm8k(Path(path)))


class OwnTask(RowsTask):
    """Problems of a function that returns rows with the texts `prompt`, `answer` and, optionally, `solution`.

    Args:
        where: the function, as in `load_function`.

    Raises:
        ValueError: the function cannot be loaded, or returned no row, or a row without these texts.
    """

    def __init__(self, where: str) -> None:
        function = load_function(where, option="task.problems")
        rows = []
        for number, row in enumerate(function()):
            texts = {"solution": "", **row} if isinstance(row, Mapping) else {}
            if not all(isinstance(texts.get(name), str) for name in ("prompt", "answer", "solution")):
                raise ValueError(
                    f"task.problems={where!r}, row {number}: expected a dict with the texts `prompt`, `answer` and, "
                    f"optionally, `solution`, got {reprlib.repr(row)}"
                )
            rows.append(TaskProblem(texts["prompt"], texts["answer"], texts["solution"]))
        if not rows:
            raise ValueError(f"task.problems={where!r} returned no row; at least one is needed")
        super().__init__(rows)


class OwnReward:
    """The reward of a response by a function of its text and its row; above 0 is correct.

    Args:
        where: the function, as in `load_function`: `(response, row) -> number`, row with the keys of `OwnTask`.
        tokenizer: has `decode` and `all_special_ids`. Special tokens are not decoded.

    Raises:
        ValueError: the function cannot be loaded, or returned no finite number.
    """

    def __init__(self, where: str, tokenizer: Any) -> None:  # noqa: ANN401 (a tokenizer is duck-typed)
        self.where = where
        self.function = load_function(where, option="task.reward")
        self.tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids)

    def __call__(self, response_ids: Sequence[int], problem: TaskProblem) -> Reward:
        """Return the reward of a response.

        Args:
            response_ids: its token ids.
            problem: the problem that it answers.
        """
        text = self.tokenizer.decode([token for token in response_ids if token not in self._special])
        value = self.function(text, asdict(problem))
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"task.reward={self.where!r} of {problem.prompt[:80]!r} is {reprlib.repr(value)}; return a finite "
                "number"
            )
        return Reward(number, correct=number > 0)


def hard_gated_reward(response_ids: Sequence[int], answer: str, tokenizer: Any, *, bonus_length: int) -> Reward:  # noqa: ANN401 (a tokenizer is duck-typed)
    """Compute 1 + min(tokens_after_answer, bonus_length) / bonus_length if the answer is correct, else 0.

    Args:
        response_ids: token ids of the response. Special tokens (the end of the sequence) are not counted.
        answer: the correct answer.
        tokenizer: has `decode` and `all_special_ids`.
        bonus_length: tokens after the answer line that earn the full bonus; 0 for no bonus.

    Source: Fang & Khazi (2025), "Mismatch Praxis", section 5.
    """
    special = set(tokenizer.all_special_ids)
    ids = [token for token in response_ids if token not in special]
    lines = list(ANSWER_LINE.finditer(tokenizer.decode(ids)))
    if len(lines) != 1 or not same_number(lines[0].group(1), answer):
        return Reward(0.0, correct=False)
    if not bonus_length:
        return Reward(1.0, correct=True)

    # Shortest prefix of tokens that contains the answer line; the tokens after it earn the bonus.
    end = lines[0].end() + 1  # the line break belongs to the answer line
    used = bisect.bisect_left(range(len(ids)), end, key=lambda count: len(tokenizer.decode(ids[:count])))
    return Reward(1.0 + min(len(ids) - used, bonus_length) / bonus_length, correct=True)


def overlong_penalty(length: int, *, longest: int, buffer: int) -> float:
    """Compute DAPO's length penalty: 0 up to `longest` − `buffer` tokens, from there linear to −1 at `longest`.

    Args:
        length: tokens of the response, with the end token.
        longest: L_max, the longest response.
        buffer: L_cache, the tokens over which the penalty grows; 0 for no penalty.

    Returns:
        The penalty in [−1, 0], to be added to the reward.

    Source: Yu et al. (2025), "DAPO", arXiv:2503.14476, equation 13.
    """
    if not buffer:
        return 0.0
    return -min(max(length - (longest - buffer), 0) / buffer, 1.0)


def same_number(given: str, expected: str) -> bool:
    """Return whether two answers are the same number, or else the same text; `$`, `,`, `%` and spaces are ignored."""
    given, expected = (re.sub(r"[$,%\s]", "", text).rstrip(".") for text in (given, expected))
    try:
        return float(given) == float(expected)
    except ValueError:
        return given == expected


def _read_gsm8k(path: Path) -> list[TaskProblem]:
    if not path.is_file():
        raise FileNotFoundError(f"task.path {str(path)!r} is no file: give a JSONL file with `question` and `answer`")
    with path.open(encoding="utf-8") as lines:
        rows = [_gsm8k_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError(f"{path} is empty: one JSON object with `question` and `answer` is needed per line")
    return rows


def _gsm8k_row(line: str, where: str) -> TaskProblem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no valid JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
        raise ValueError(f"{where}: expected an object with the texts `question` and `answer`, got {line.strip()[:80]}")
    answers = ANSWER_LINE.findall(row["answer"])
    if len(answers) != 1 or not answers[0].strip():
        raise ValueError(f"{where}: `answer` must have one line `#### N`, found {len(answers)}")
    return TaskProblem(f"Question: {row['question']}\nAnswer: ", answers[0].strip(), row["answer"])
