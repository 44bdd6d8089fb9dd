"""Print how far the tuned constants of the rules are from the logs on both sides of them.

    python experiments/judge/margins.py

A constant separates two groups of logs by one statistic of the excess over the null. `fitted` is the geometric mean of
the nearest log of each group, and the margin its distance from them, as a factor. The logs are those of
`compact_logs.py`; seeds that only measure the rules are left out. `make test` compares the constants with this output.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from calibrate import Answer, development, every_answer
from make_logs import Log

from rollcorr.diagnostics.null import excess_tokens, fading, weight_causes
from rollcorr.diagnostics.null.excess_tokens import ExcessTokens
from rollcorr.diagnostics.null.null_file import FEW_TOKENS

FEWEST_BESIDE = 200
"""Fewest tokens beside an equal one to measure them."""

Group = Callable[[Log], bool]


def _of(*names: str, tasks: str = "") -> Group:
    return lambda log: log.name in names and (not tasks or log.task in tasks.split())


_PENALTIES = _of("repetition_penalty", "presence_penalty")
_FIXED = _of("other_weights", "template")


class Constant(NamedTuple):
    """A constant, the statistic that it limits, and the logs whose statistic lies below and above it."""

    name: str
    value: float
    statistic: str
    below: Group
    above: Group


CONSTANTS = (
    Constant(
        "fading.DISPLACED",
        fading.DISPLACED,
        "neighbors",
        _of("other_weights"),
        _of("template", tasks="reverse arithmetic"),
    ),
    Constant(
        "excess_tokens.SPARED",
        excess_tokens.SPARED,
        "beside_equal",
        _of("template", tasks="reverse arithmetic"),
        _of("other_weights"),
    ),
    Constant(
        "fading.BY_POSITION", fading.BY_POSITION, "by_position", _of("other_weights"), _of("template", tasks="ngram")
    ),
    Constant("fading.HEALS", fading.HEALS, "healing", _of("template", tasks="copy"), _of("other_weights")),
    Constant(
        "weight_causes.SEEN_AS_LIKELY",
        weight_causes.SEEN_AS_LIKELY,
        "seen_as_likely",
        _of("other_weights", "template"),
        _PENALTIES,
    ),
    Constant("weight_causes.VARIES", weight_causes.VARIES, "equal_context", _of("dropout"), _FIXED),
    Constant("excess_tokens.STARTED", excess_tokens.STARTED, "first_step", _of("frozen_sync"), _FIXED),
)
"""Constants with logs on both sides. Logs whose cause is named by an earlier test are in neither group."""
FITTED = ("excess_tokens.SPARED", "fading.BY_POSITION", "fading.HEALS")
"""Constants that equal `fitted`; the others were set with further logs, too."""


def statistics(tokens: ExcessTokens) -> Mapping[str, float]:
    """Return the statistics of an excess; NaN where a log has too few tokens for one."""
    equal, repeats, size = tokens.share("prefix"), tokens.places["repeats"], np.abs(tokens.clipped)
    sides = [(repeats & side) > 0 for side in (1, 2)]
    beside = [size[x].mean() / size[~x].mean() for x in sides if x.sum() >= FEWEST_BESIDE]
    return {
        "neighbors": tokens.share_of_equal_neighbors(),
        "beside_equal": min(beside, default=math.nan),
        "by_position": fading.share_by_position(tokens, tokens.share("pair")),
        "healing": fading.healing_ratio(tokens),
        "seen_as_likely": tokens.of_seen(as_likely=True),
        "equal_context": equal.share if equal.tokens >= FEW_TOKENS else math.nan,
        "first_step": tokens.first_step,
    }


class Margin(NamedTuple):
    """The nearest statistic below and above a constant, and how many logs there are on both sides."""

    constant: Constant
    below: float
    above: float
    logs: tuple[int, int]

    @property
    def fitted(self) -> float:
        """Return the geometric mean of both sides, to two digits."""
        return float(f"{math.sqrt(max(self.below, 1e-9) * self.above):.2g}")

    @property
    def factor(self) -> float:
        """Return the factor between the constant and the nearer side."""
        return min(self.constant.value / max(self.below, 1e-9), self.above / self.constant.value)


def margins(answers: Iterable[Answer]) -> list[Margin]:
    """Return the margin of each constant."""
    measured = [(one.log, statistics(one.tokens)) for one in answers if one.tokens is not None]
    found = []
    for constant in CONSTANTS:
        values = [(log, known[constant.statistic]) for log, known in measured]
        below, above = (
            [value for log, value in values if of(log) and not math.isnan(value)]
            for of in (constant.below, constant.above)
        )
        found.append(Margin(constant, max(below), min(above), (len(below), len(above))))
    return found


def main() -> int:
    """Print the table."""
    lines = [
        "| constant | value | logs below, largest | logs above, smallest | fitted | margin |",
        "|---|---|---|---|---|---|",
    ]
    for one in margins(development(every_answer())):
        name, value = one.constant.name, one.constant.value
        below, above = (f"{count}, {x:.2g}" for count, x in zip(one.logs, (one.below, one.above), strict=True))
        lines.append(f"| `{name}` | {value:g} | {below} | {above} | {one.fitted:g} | {one.factor:.1f} |")
    print("\n".join(lines))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
