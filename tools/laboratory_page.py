"""docs/background/laboratory.md: the frame in laboratory_frame.md, with tables from experiments/laboratory.

`rollcorr simulate --output experiments/laboratory` writes those results.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from estimator_ranking import ranked_estimators

from rollcorr.core.metric_registry import CRITERIA
from rollcorr.simulation.mismatches import KINDS
from rollcorr.simulation.studies import REGIMES

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "laboratory"
SEVERITY = {
    "noise": "σ of the noise, nats",
    "heavy_tailed": "scale of the noise, nats",
    "tempered": "1 − temperature",
    "truncated": "1 − top_p",
    "top_k": "tokens left out",
    "stale": "largest change of a logit by the missing update, nats",
    "quantized": "spacing of the grid, nats",
}

Table = Callable[[Sequence[str], Iterable[Sequence[object]]], str]
Rows = list[dict[str, Any]]


def laboratory_page(generated: str, table: Table) -> str:
    """The page; `table` writes a Markdown table from a header and rows."""
    frame = (Path(__file__).parent / "laboratory_frame.md").read_text(encoding="utf-8")
    facts = json.loads((RESULTS / "run.json").read_text(encoding="utf-8"))
    parts = {
        "generated": generated,
        "kinds": _kinds(),
        "kind_count": str(len(KINDS)),
        "example": _example(),
        "agreement": _agreement(),
        "ranking": _ranking(table),
        "ranking_error": _ranking_error(),
        "gains": _gains(table),
        "gains_error": _gains_error(),
        "winners": _winners(),
        "orders": _orders(table),
        "growth": _growth(table),
        "growth_example": _growth_example(),
        "clamp": _clamp(table),
        "batch": _batch(table),
        "batch_words": _batch_words(),
        **{
            key: str(facts[key])
            for key in ("command", "cells", "cpu_seconds", "threads", "processor", "torch", "python")
        },
    }
    return re.sub(r"<<(\w+)>>", lambda place: parts[place[1]], frame)


def _read(study: str) -> Rows:
    """The rows of a study, with numbers as numbers."""
    with (RESULTS / f"{study}.csv").open(encoding="utf-8") as file:
        return [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Any:  # noqa: ANN401 (a number, a truth or a text)
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text


def _kinds() -> str:
    return "\n".join(f"| `{name}` | {kind.description} | {SEVERITY[name]} |" for name, kind in KINDS.items())


def _example() -> str:
    import torch

    from rollcorr import correct
    from rollcorr.simulation import make_pair, sample_rows

    pair = make_pair("tempered", 0.3, vocabulary=8, length=64)
    rows = sample_rows(pair, 256, torch.Generator(device="cpu").manual_seed(0))
    correction = correct(rows.train_log_prob, rows.rollout_log_prob, rows.mask, "decoupled_token_is")
    return (
        f"KL per token: exact {pair.kl:.4f}, measured {correction.metrics(prefix='')['kl']:.4f}\n"
        f"the exact gradient has {pair.gradient.numel()} entries, of norm {pair.gradient.norm():.4f}"
    )


def _agreement() -> str:
    rows = _read("agreement")
    entries = sum(int(row["entries"]) for row in rows)
    largest, limit = max(row["largest_z"] for row in rows), min(row["limit"] for row in rows)
    return (
        f"Exact and sampled numbers agree: with a million samples of each kind,\n"
        f"no entry of the mean gradients (of {entries:,}) differs by more than {largest:.2f} standard errors "
        f"(limit {limit:.2f})."
    )


def _ranking(table: Table) -> str:
    """Every estimator except single criteria, which have a table of their own."""
    rows = [row for row in _read("regimes") if row["estimator"] not in CRITERIA]
    by_regime = {regime: {e.estimator: e for e in ranked_estimators(rows, 1024, regime=regime)} for regime in REGIMES}
    lines: dict[tuple[str, ...], list[str]] = {}
    for entry in ranked_estimators(rows, 1024):
        cells = []
        for regime in REGIMES:
            found = by_regime[regime][entry.estimator]
            number = f"{found.direction:.3f}"
            if found.tied:
                number = f"**{number}**"
            cells.append(number if found.resolved else f"{number} †")
        lines.setdefault(tuple(cells), []).append(f"`{entry.estimator}`")
    return table(
        ("estimator", *(f"T × KL = {regime:g}" for regime in REGIMES)),
        [(", ".join(names), *cells) for cells, names in lines.items()],
    )


def _ranking_error() -> str:
    """The largest standard error in the ranking."""
    rows = _read("regimes")
    errors = [entry.error for regime in REGIMES for entry in ranked_estimators(rows, 1024, regime=regime)]
    return f"{max(errors):.3f}"


def _gain_rows() -> Rows:
    return [row for row in _read("threshold") if row["unit"] and row["batch_size"] == 1024]


def _gains_error() -> str:
    """The largest standard error of a direction error that a gain is the difference of."""
    rows = _gain_rows()
    return f"{max(max(row['direction_error'], row['random_direction_error']) for row in rows):.3f}"


def _gains(table: Table) -> str:
    rows = _gain_rows()
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows):
        # Criteria on k3 have nearly the gains of those on k2.
        if family.endswith("_k3"):
            continue
        cells: list[object] = []
        for kind in kinds:
            candidates = [row for row in rows if (row["family"], row["kind"]) == (family, kind)]
            row = min(candidates, key=lambda row: abs(row["kept"] - 0.8))
            gain = row["random_direction"] - row["direction"]
            cells.append(f"{gain:+.3f} ({1 - row['kept']:.0%})")
        lines.append((f"`{family}`", *cells))
    return table(("criterion", *kinds), lines)


def _winners() -> str:
    """How many filters of the regimes differ from their control by more than two standard errors, by kind."""
    gained: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for row in _read("regimes"):
        # A filter that rejects no row or all is its own control.
        if not row["unit"] or row["batch_size"] != 1024 or not 0.02 < row["kept"] < 0.999:
            continue
        gain = row["random_direction"] - row["direction"]
        error = math.hypot(row["direction_error"], row["random_direction_error"])
        gained[row["kind"]] += gain > 2 * error
        lost[row["kind"]] += gain < -2 * error
    kinds = ", ".join(f"{count} with `{kind}`" for kind, count in gained.items() if count)
    return f"{gained.total()} gain more than two standard errors ({kinds}), and {lost.total()} lose as much."


def _orders(table: Table) -> str:
    checks: dict[tuple[str, str], Rows] = {}
    for row in _read("orders"):
        checks.setdefault((row["estimator"], row["quantity"]), []).append(row)
    lines = []
    for (estimator, quantity), found in checks.items():
        row = found[0]
        lines.append((estimator, quantity, row["published"], f"{row['slope']:.2f} ± {row['error']:.2f}", row["pair"]))
    return table(("weights", "exponent of", "published", "measured", "policies"), lines)


def _growth_example() -> str:
    (row,) = [r for r in _read("growth") if r["pair"].startswith("one state") and r["T"] == 1000]
    return f"{row['chi2_seq_exact']:,.0f}"


def _growth(table: Table) -> str:
    lines = [
        (
            row["pair"],
            f"{row['T']:g}",
            f"{row['chi2']:.4f}",
            f"{row['chi2_seq_exact']:.3g}",
            f"{row['chi2_seq_law']:.3g}",
            f"{row['chi2_seq_batch_of_1024']:.3g}",
        )
        for row in sorted(_read("growth"), key=lambda row: (row["pair"].startswith("8"), row["T"]))
        if row["T"] in (30, 1000)
    ]
    header = ("policies", "T", "χ̄²", "χ²_seq, exact", "by the law")
    return table((*header, "`chi2_seq` of 1,024 samples"), lines)


def _clamp(table: Table) -> str:
    lines = [
        (
            f"{row['kl']:.4g}",
            f"~{row['published']:,.0f}",
            f"{row['metric_max_viable_length']:,.0f}",
            f"{row['ess_half_at']:,.0f}",
            f"{row['ess_tenth_at']:,.0f}",
        )
        for row in _read("clamp")
        if row["kl"] in (0.001, 0.005, 0.01, 0.05)
    ]
    header = ("KL per token", "T_max, published", "`max_viable_length`, measured")
    return table((*header, "T where ESS is 1/2", "T where ESS is 1/10"), lines)


def _batch_words() -> str:
    row = _read("batch")[0]
    return f"T = {row['T']:g}, KL = {row['kl']:.2g} per token, B = {row['batch_size']:g}, C = 2."


def _batch(table: Table) -> str:
    # Normalizers with equal numbers share a line.
    names: dict[tuple[str, ...], list[str]] = {}
    for row in _read("batch"):
        cells = (
            f"{row['bias']:.3f} ± {row['bias_error']:.3f}",
            f"{row['deviation']:.3f} ± {row['deviation_error']:.3f}",
            f"{row['direction']:.3f}",
        )
        names.setdefault((row["level"], *cells), []).append(row["normalizer"])
    lines = [(level, ", ".join(normalizers), *cells) for (level, *cells), normalizers in names.items()]
    return table(("weights", "divided by", "bias", "deviation", "direction error"), lines)
