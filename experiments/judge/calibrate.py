"""Print the table of confidence: the share of logs with this score whose first cause was right.

    python experiments/judge/calibrate.py

The logs are those of `compact_logs.py`: outside faults of seed 0, and loops of `DEVELOPMENT` seeds. The score of a
cause is z² / (1 + z²) of its evidence, times the certainty of the test that named it (`evidence["score"]`).
`rollcorr.diagnostics.resolver.CONFIDENCE` contains the table, and `make test` compares both.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from compact_logs import LOOPS_FILE, OUTSIDE_FILE, log_of, write_logs
from judge_key import Key, first_cause, read_key, wilson
from make_logs import Log

from rollcorr.diagnostics import CheckResult, MismatchNull, PictureNull, check_logs, null_of_logs
from rollcorr.diagnostics.null.excess_tokens import ExcessTokens
from rollcorr.run_directory.stored_run import BadInputError

DEVELOPMENT = (0, 1)
"""Seeds whose logs the rules were written with; further seeds only measure them."""
EDGES = (0.0, 0.8, 0.93, 0.99)
"""Smallest score of each bin. Scores cluster at the certainties of the tests: 0.6, 0.9, 0.95 and 1."""


class Answer(NamedTuple):
    """Answer for a log: outcome by the key, first code, its score and confidence, and the excess over the null."""

    log: Log
    outcome: str
    code: str
    score: float | None
    confidence: float | None
    tokens: ExcessTokens | None


def answers_of(file: Path) -> Iterator[Answer]:
    """Check each log of a file of `compact_logs.py` with its null."""
    key, nulls = read_key(), dict[str, MismatchNull | PictureNull | None]()
    with tempfile.TemporaryDirectory() as folder:
        for name, path in write_logs(Path(folder), file):
            if name.split("/")[-1] == "null" or name.startswith("nulls/"):
                precision = next((value for part, value in key.engines.items() if part in name), "")
                nulls[name] = _null(path, precision)
                continue
            log = Log("outside", name, 0) if file == OUTSIDE_FILE else log_of(name)
            null = nulls["null" if file == OUTSIDE_FILE else log.null.with_suffix("").as_posix()]
            seen: list[ExcessTokens] = []
            with mock.patch.object(ExcessTokens, "of", _spy(seen)):
                result = check_logs([path], null=null)
            yield _answer(log, result, key, next(iter(seen), None))


def every_answer() -> Iterator[Answer]:
    """Check all logs of both files."""
    yield from answers_of(OUTSIDE_FILE)
    yield from answers_of(LOOPS_FILE)


def _spy(seen: list[ExcessTokens]) -> Callable[..., ExcessTokens | None]:
    """Return `ExcessTokens.of`, which also keeps what it returns."""
    original = ExcessTokens.of

    def of(*args: Any, **options: Any) -> ExcessTokens | None:  # noqa: ANN401
        found = original(*args, **options)
        seen.extend([] if found is None else [found])
        return found

    return of


def _null(path: Path, precision: str) -> MismatchNull | PictureNull | None:
    """Measure a null of an engine of this precision; None if its rollouts are refused."""
    try:
        return null_of_logs([path], engine_precision=precision)
    except BadInputError:
        return None


def _answer(log: Log, result: CheckResult, key: Key, tokens: ExcessTokens | None) -> Answer:
    """Shorten the result of a check."""
    findings = [dataclasses.asdict(finding) for finding in result.hypotheses]
    answer = {"verdict": result.health.verdict, "findings": findings}
    first = first_cause(answer)
    loud = first if first.get("severity", "note") != "note" else {}
    score = loud.get("evidence", {}).get("score")
    return Answer(log, key.judge(log, answer), str(first.get("code")), score, loud.get("confidence"), tokens)


def bins(answers: Iterable[Answer]) -> list[tuple[int, int]]:
    """Return for each bin of the score how many first causes were right, and how many there were."""
    named = [one for one in answers if one.score is not None and one.outcome in ("right", "false")]
    which = [sum(one.score >= edge for edge in EDGES) - 1 for one in named]
    return [
        (sum(one.outcome == "right" for one, own in zip(named, which, strict=True) if own == bin_), which.count(bin_))
        for bin_ in range(len(EDGES))
    ]


def table(answers: Iterable[Answer]) -> tuple[tuple[float, float], ...]:
    """Return (smallest score, confidence) of each bin: the center of Wilson's interval, increasing with the score.

    The center is (right + z² / 2) / (logs + z²), z = 1.96: below 1 although no development log was wrong.
    Source: Wilson (1927); Ayer et al. (1955), pooled adjacent violators.
    """
    pools: list[list[int]] = []
    for right, count in bins(answers):
        pools.append([right, count, 1])
        while len(pools) > 1 and _share(pools[-2]) > _share(pools[-1]):
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    shares = [_share(pool) for pool in pools for _ in range(pool[2])]
    return tuple(zip(EDGES, (round(share, 2) for share in shares), strict=True))


def _share(pool: Sequence[int]) -> float:
    return (pool[0] + 1.96**2 / 2) / (pool[1] + 1.96**2)


def development(answers: Iterable[Answer]) -> list[Answer]:
    """Return the answers that the table is made of."""
    return [one for one in answers if one.log.seed in DEVELOPMENT]


def main() -> int:
    """Print the table, and how it fits the other seeds."""
    found = list(every_answer())
    lines = [
        f"CONFIDENCE = {table(development(found))}",
        "",
        "| score from | seeds | right | 95 % |",
        "|---|---|---|---|",
    ]
    held_out = [one for one in found if one.log.seed not in DEVELOPMENT]
    for name, part in (("development", development(found)), ("held out", held_out)):
        for edge, (right, count) in zip(EDGES, bins(part), strict=True):
            low, high = wilson(right, count)
            lines.append(f"| {edge:g} | {name} | {right} of {count} | {low:.2f}–{high:.2f} |")
    print("\n".join(lines))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
