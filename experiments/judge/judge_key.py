"""Read the answer key, and judge one answer of `rollcorr check --json` by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from make_logs import Log

KEY = Path(__file__).with_name("answer_key.yaml")


@dataclass(frozen=True)
class Expected:
    """The key's row of one log."""

    codes: frozenset[str]
    """Accepted first codes."""
    onset: int | None
    """First step, or turn, with the fault; None: present from the first step on."""
    verdicts: tuple[str, ...]
    engine_precision: str | None
    """What the user declares with `rollcorr null --engine-precision`; None: nothing."""


@dataclass(frozen=True)
class Key:
    """The whole key."""

    causes: Mapping[str, list[str]]
    symptoms: frozenset[str]
    engines: Mapping[str, str]
    logs: Mapping[str, Mapping[str, Any]]

    def of(self, log: Log) -> Expected:
        """Return the row of a log; KeyError if it has none."""
        row = self.logs.get(f"{log.kind}/{log.name}") or self.logs[f"{log.kind}/*"]
        onset = row.get("onset")
        return Expected(
            codes=frozenset(code for cause in row["cause"] for code in self.causes[cause]),
            onset=onset[log.seed] if isinstance(onset, list) else onset,
            verdicts=tuple(row.get("verdict", ["unhealthy"])),
            engine_precision=next((value for part, value in self.engines.items() if part in str(log.path)), None),
        )

    def judge(self, log: Log, answer: Mapping[str, Any]) -> str:
        """Return "right", "unknown", "false", "not judged" or "healthy" for an answer.

        Args:
            log: which log.
            answer: the JSON of `rollcorr check`.
        """
        expected, code = self.of(log), first_cause(answer).get("code", "")
        verdict = answer["verdict"]
        if verdict in expected.verdicts and (code in expected.codes or "healthy" in expected.verdicts):
            return "right"
        if verdict != "unhealthy":
            return str(verdict)
        if code in self.causes["unknown"] or code in self.symptoms:
            return "unknown"
        return "false"


def read_key(path: Path = KEY) -> Key:
    """Read the key."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Key(content["causes"], frozenset(content["symptoms"]), content["engines"], content["logs"])


def first_cause(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first finding that no other finding explains: warnings before notes; {} if there is none."""
    found = [finding for finding in answer.get("hypotheses") or answer["findings"] if not finding.get("follows_from")]
    loud = [finding for finding in found if finding["severity"] != "note"]
    return next(iter([*loud, *found]), {})


def excess_in(place: Mapping[str, Any], path: Path) -> float:
    """Return the share of a log's excess that lies in a printed place.

    Args:
        place: `rows` and `ids`: lists; `positions` and `from_end`: lists of [first, last]. All of them must hold.
        path: the log's excess.npz.
    """
    token = np.load(path)
    last = np.zeros(int(token["row"].max()) + 1, dtype=int)
    np.maximum.at(last, token["row"], token["position"])
    columns = {**token, "from_end": last[token["row"]] - token["position"]}
    inside = np.ones(len(token["row"]), dtype=bool)
    for axis, name in (("rows", "row"), ("ids", "id")):
        if axis in place:
            inside &= np.isin(columns[name], place[axis])
    for axis, name in (("positions", "position"), ("from_end", "from_end")):
        if axis in place:
            inside &= np.any([(columns[name] >= a) & (columns[name] <= b) for a, b in place[axis]], axis=0)
    total = float(token["excess"].sum())
    return float(token["excess"][inside].sum()) / total if total else 0.0


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference", JASA 22.
    """
    if not count:
        return 0.0, 1.0
    z, share = 1.96, right / count
    center = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (center - half) / (1 + z * z / count)), min(1.0, (center + half) / (1 + z * z / count))
