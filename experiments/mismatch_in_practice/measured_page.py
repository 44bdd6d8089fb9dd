"""The pages of the measured study, from its tables: `measured.py --page` writes them.

Cells may be missing; the page then says how many, and leaves out what needs them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from measured_figures import write_figures
from measured_rows import (
    CLAMP,
    CUT,
    SAMPLINGS,
    Rows,
    clamped,
    clip_values,
    distance,
    growth_fit,
    half_clamped,
    longest_of,
    name_of,
    pairs_of,
    read_table,
    select,
)

HERE = Path(__file__).resolve().parent
FRAME = HERE / "measured_frame.md"


def write_page(folder: Path, target: Path = HERE) -> list[Path]:
    """Write measured.md, and the figures beside the tables; the paths."""
    paths = write_figures(read_table(folder / "grid.csv"), read_table(folder / "temperature.csv"), folder)
    page = target / "measured.md"
    page.write_text(page_text(folder), encoding="utf-8")
    return [*paths, page]


def page_text(folder: Path) -> str:
    """The page, from the tables in a folder."""
    grid, temperature = read_table(folder / "grid.csv"), read_table(folder / "temperature.csv")
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    longest = longest_of(grid)
    values = {
        "done": f"{run['cells']} of {run['cells_of_the_study']} cells",
        "skipped": " ".join(f"Not measured on this machine: {name} ({why})." for name, why in run["skipped"].items()),
        "streams": str(max((row["windows"] for row in select(grid, T=longest)), default=0)),
        "longest": f"{longest:,}",
        "facts": _facts(run),
        "sampling": sampling_table(grid),
        "outside": _outside(grid),
        "variance": variance_table(grid),
        "growth": growth_table(grid),
        "low_weights": low_weight_table(grid),
        "viable": viable_table(grid),
        "head": f"{temperature[0]['head_tokens']:.1f}" if temperature else "–",
        "temperature": temperature_table(temperature),
        "health": health_table(grid),
        "clip": clip_table(grid, run["clips"]),
    }
    return re.sub(r"<<(\w+)>>", lambda found: values[found.group(1)], FRAME.read_text(encoding="utf-8"))


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a sentence if it is empty."""
    lines = [" | ".join(map(str, row)) for row in rows]
    if not lines:
        return "(not measured yet)"
    return "\n".join(
        f"| {line} |" for line in (" | ".join(map(str, header)), " | ".join("---" for _ in header), *lines)
    )


def sampling_table(grid: Rows) -> str:
    """What each sampling and mode comes to, beside what the document says of it."""
    published = {
        ("raw", "1.0"): "no mismatch",
        ("raw", "0.4"): "mismatch",
        ("raw", CUT): "mismatch",
        ("processed", "1.0"): "no mismatch",
        ("processed", "0.4"): "corrected",
        ("processed", CUT): "mismatch",
        ("replayed", CUT): "identical action subspaces",
    }
    longest = longest_of(grid)
    rows = []
    for sampling in SAMPLINGS:
        for mode in ("raw", "processed", "replayed"):
            for row in select(grid, engine="bf16", updates=0, sampling=sampling, mode=mode, T=longest):
                rows.append(
                    (
                        mode,
                        SAMPLINGS[sampling],
                        published[mode, sampling],
                        f"{row['kl']:+.4f} ± {row['kl_error']:.4f}",
                        _short(row["k3"]),
                        _short(row["mean_weight"]),
                        _short(row["ess"]),
                    )
                )
    header = ("log-probs", "sampling", "document", "mean −log ρ, nats", "k3, nats", "mean weight", "ESS")
    note = "\n\nWhere nothing is cut, replayed kept sets are the whole vocabulary: the rows are those of *processed*."
    return table(header, rows) + note


def variance_table(grid: Rows) -> str:
    """Figure 2 as numbers, at the longest length."""
    rows = []
    for row in sorted(select(grid, sampling="1.0", mode="processed", T=longest_of(grid)), key=distance):
        rows.append(
            (
                name_of(row),
                _short(distance(row)),
                _short(row["mean_weight"]),
                _short(row["chi2_seq"]),
                _short(row["ess"]),
                _short(row["token_ess"]),
                f"{row['low_weight']:.0%}",
            )
        )
    header = ("engine", "T × KL, nats", "mean weight", "χ²_seq", "ESS, Seq-TIS", "ESS, Token-TIS", "low weights")
    return table(header, rows)


def growth_table(grid: Rows) -> str:
    """The fitted slope beside log(1 + χ̄²)."""
    rows = []
    for pair in pairs_of(select(grid, sampling="1.0", mode="processed")):
        fit = growth_fit(pair)
        if fit is not None and fit[2] > 1e-6:
            slope, error, expected, first, last = fit
            rows.append(
                (
                    name_of(pair[0]),
                    f"{first} … {last}",
                    f"{slope:.5f} ± {error:.5f}",
                    f"{expected:.5f}",
                    f"{slope / expected:.2f} ± {error / expected:.2f}",
                )
            )
    return table(("engine, temperature 1.0", "T, range of the fit", "slope", "log(1 + χ̄²)", "ratio"), rows)


def low_weight_table(grid: Rows) -> str:
    """The share of low weights at three lengths, for both temperatures."""
    lengths = [length for length in (32, 256, longest_of(grid)) if select(grid, T=length)]
    rows = []
    pairs = pairs_of(select(grid, sampling="1.0", mode="processed"))
    for pair in sorted(pairs, key=lambda pair: distance(pair[-1])):
        cells: list[object] = [name_of(pair[0])]
        for sampling in ("1.0", "0.4"):
            for length in lengths:
                wanted = {"engine": pair[0]["engine"], "updates": pair[0]["updates"], "mode": "processed"}
                found = select(grid, sampling=sampling, T=length, **wanted)
                cells.append(f"{found[0]['low_weight']:.0%}" if found else "–")
        rows.append(cells)
    header = [f"τ = {sampling}, T = {length:,}" for sampling in ("1.0", "0.4") for length in lengths]
    return table(("engine", *header), rows)


def viable_table(grid: Rows) -> str:
    """20 / KL beside the length at which half of the weights are clamped."""
    rows = []
    for pair in sorted(pairs_of(select(grid, mode="processed")), key=lambda pair: pair[-1]["kl"]):
        kl = pair[-1]["kl"]
        if kl <= 0 or CLAMP / kl > longest_of(grid):
            continue
        half = half_clamped(pair)
        before = [row["ess"] for row in pair if row["T"] <= CLAMP / kl]
        rows.append(
            (
                f"{name_of(pair[0])}, {SAMPLINGS[pair[0]['sampling']]}",
                f"{kl:.4f} ± {pair[-1]['kl_error']:.4f}",
                f"{CLAMP / kl:,.0f}",
                "not reached" if half is None else f"{half:,.0f}",
                _short(before[-1]) if before else "–",
            )
        )
    header = (
        "engine and sampling",
        "KL per token, nats",
        "T_max = 20 / KL",
        "half are clamped at T",
        "ESS just before T_max",
    )
    return table(header, rows)


def temperature_table(rows: Rows) -> str:
    """KL at a few temperatures, and its share in the tail."""
    measured = {row["temperature"] for row in rows}
    shown = [value for value in (0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 5.0, 10.0) if value in measured]
    body = []
    for knob in dict.fromkeys(row["knob"] for row in rows):
        found = {row["temperature"]: row for row in select(rows, knob=knob)}
        body.append((f"{knob}: KL, nats", *(_short(found[t]["kl"]) for t in shown)))
        body.append(
            (f"{knob}: share of the tail", *(f"{found[t]['kl_tail'] / max(found[t]['kl'], 1e-300):.0%}" for t in shown))
        )
    return table(("", *(f"τ = {t:g}" for t in shown)), body)


def health_table(grid: Rows) -> str:
    """How often the rule fired, where it should and where not; then one example of each."""
    deceived = [row for row in grid if row["ess"] > 0.9 and clamped(row) > 0.5]
    half = [row for row in grid if row["ess"] > 0.9 and 0 < clamped(row) <= 0.5]
    honest = [row for row in grid if row["ess"] > 0.9 and clamped(row) == 0]
    others = [row for row in grid if row["ess"] <= 0.9]
    counts = table(
        ("", "cases", "the rule fires"),
        [
            (name, len(rows), sum(row["false_positive"] for row in rows))
            for name, rows in (
                ("ESS > 0.9, more than half at the clamp", deceived),
                ("ESS > 0.9, some at the clamp", half),
                ("ESS > 0.9, none at the clamp (healthy controls are here)", honest),
                ("ESS ≤ 0.9", others),
            )
        ],
    )
    longest = longest_of(grid)
    examples = []
    for mode in ("processed", "replayed"):
        for row in select(grid, engine="bf16", updates=0, sampling=CUT, mode=mode, T=longest):
            examples.append(row)
    examples = [row for row in deceived if row["T"] == longest][:4] + examples
    examples += select(grid, engine="float32", updates=0, sampling="1.0", mode="processed", T=longest)
    header = ("example", "log-probs", "T × mean −log ρ, nats", "ESS", "at the clamp", "low weights", "warnings")
    body = [
        (
            f"{name_of(row)}, {SAMPLINGS[row['sampling']]}, T = {row['T']:,}",
            row["mode"],
            _short(row["t_times_kl"]),
            _short(row["ess"]),
            f"{clamped(row):.0%}",
            f"{row['low_weight']:.0%}",
            ", ".join(f"`{code}`" for code in dict.fromkeys(row["warnings"].split())) or "none",
        )
        for row in examples
    ]
    return counts + "\n\n" + table(header, body)


def clip_table(grid: Rows, clips: Sequence[float]) -> str:
    """For each pair: at the lower bound, and the ESS, at each ceiling."""
    rows = []
    for row in sorted(select(grid, mode="processed", T=512), key=distance):
        if distance(row) > 0.5 and row["sampling"] != "0.4":
            pairs = zip(clip_values(row, "at_lower"), clip_values(row, "ess"), strict=True)
            cells = [f"{low:.0%}, {ess:.2f}" for low, ess in pairs]
            rows.append((f"{name_of(row)}, {SAMPLINGS[row['sampling']]}", _short(distance(row)), *cells))
    return table(("at 1/C, ESS", "T × KL, nats", *(f"C = {clip:g}" for clip in map(float, clips))), rows)


def _outside(grid: Rows) -> str:
    found = select(grid, engine="bf16", updates=0, sampling=CUT, mode="replayed", T=longest_of(grid))
    return f"{found[0]['outside']:.3%}" if found else "(not measured yet)"


def _facts(run: Mapping[str, Any]) -> str:
    return (
        f"It took {run['cpu_seconds'] / 60:.1f} core-minutes on {run['processor']}, with torch {run['torch']} and "
        f"{run['threads']} thread{'s' if run['threads'] > 1 else ''}; the command was `{run['command']}`."
    )


def _short(value: float) -> str:
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.1e}"
