"""The page and the figures of the trained study, from the files of its cells: `trained.py --page` writes them.

Cells may be missing; the page then says which, and judges no claim that needs them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
FRAME = HERE / "trained_frame.md"
PAGE = HERE / "trained.md"
FIGURES = HERE / "trained"

COLUMN_TITLES = {
    "clean": "clean",
    "stale_quantized": "stale and quantized",
    "truncated": "temperature 0.7, top-p 0.8, top-k 20",
}
CORRECTION_TITLES = {
    "none": "no correction",
    "token_tis": "Token-TIS 2.0",
    "seq_tis": "Seq-TIS 4.0",
    "geo_rs_token_tis": "Geo-RS + Token-TIS",
    "seq_mis": "Seq-MIS",
    "replay": "replayed kept sets",
}
COLORS = {
    "none": "#444444",
    "token_tis": "#1f77b4",
    "seq_tis": "#d62728",
    "geo_rs_token_tis": "#2ca02c",
    "seq_mis": "#ff7f0e",
    "replay": "#9467bd",
}
MARGIN = 2.0
"""Standard errors that make a difference."""

LAST = 10
"""Steps at the end of a training over which a metric is averaged."""

SMOOTH = 5
"""Steps over which a curve is averaged."""

Cells = list[dict[str, Any]]


class Estimate(NamedTuple):
    """A mean over seeds and its standard error."""

    mean: float
    error: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


class Verdict(NamedTuple):
    """What became of a claim: "repeats", "does not repeat", "cannot be tested here" or "not measured yet", and why."""

    word: str
    evidence: str


UNJUDGED = Verdict("not measured yet", "its cells are not all done")


def write_page(found: Cells, names: Sequence[str], facts: Mapping[str, str]) -> None:
    """Write trained.md and its figures.

    Args:
        found: the cells that are done.
        names: all cells of the study.
        facts: more parts of the page, by their name in trained_frame.md.
    """
    if found:
        _curves(found, "reward", FIGURES / "reward.png")
        _curves(found, "held_out", FIGURES / "held_out.png")
        _curves(found, "grad_norm", FIGURES / "grad_norm.png", logarithmic=True)
    missing = [name for name in names if name not in {cell["cell"] for cell in found}]
    parts = {
        **facts,
        "done": f"{len(found)} of {len(names)}",
        "missing": ", ".join(f"`{name}`" for name in missing) or "none",
        "summary": _summary(found),
        "results": _results(found),
        "verdicts": _verdicts(found),
        "mismatch": _mismatch(found),
        "warnings": _warnings(found),
        "alarm": f"{ALARM:g}",
        "smooth": str(SMOOTH),
        "times": _times(found),
    }
    frame = FRAME.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"<<(\w+)>>", lambda place: parts[place[1]], frame), encoding="utf-8")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def select(found: Cells, column: str, correction: str) -> Cells:
    """The seeds of one training."""
    return [cell for cell in found if (cell["column"], cell["correction"]) == (column, correction)]


def accuracy(found: Cells, *, at: int = -1) -> Estimate | None:
    """Held-out accuracy over seeds, of the last checkpoint or another.

    The error is the larger of two: that of the problems drawn, and that of the seeds' spread where there are several.
    """
    if not found:
        return None
    values = [cell["held_out"][at]["accuracy"] for cell in found]
    of_problems = math.hypot(*(cell["held_out"][at]["standard_error"] for cell in found)) / len(found)
    return Estimate(_mean(values), max(of_problems, _spread(values)), len(found))


def at_the_end(found: Cells, metric: str) -> Estimate | None:
    """A metric over the last steps, over seeds; None where it is not measured."""
    values = [_mean(_finite(cell["metrics"][metric][-LAST:])) for cell in found if metric in cell["metrics"]]
    return Estimate(_mean(values), _spread(values), len(values)) if values else None


def overall(found: Cells, metric: str) -> Estimate | None:
    """A metric over all steps, over seeds."""
    values = [_mean(_finite(cell["metrics"][metric])) for cell in found if metric in cell["metrics"]]
    return Estimate(_mean(values), _spread(values), len(values)) if values else None


def gap(a: Cells, b: Cells) -> Estimate | None:
    """Final accuracy of `a` minus that of `b`, over the seeds that both have: such a pair answers the same problems.

    The error is the larger of two: that of the problems drawn, as if the two were independent, and that of the spread
    of the pairs.
    """
    others = {cell["seed"]: cell["held_out"][-1] for cell in b}
    pairs = [(cell["held_out"][-1], others[cell["seed"]]) for cell in a if cell["seed"] in others]
    if not pairs:
        return None
    gaps = [mine["accuracy"] - theirs["accuracy"] for mine, theirs in pairs]
    errors = [point["standard_error"] for pair in pairs for point in pair]
    return Estimate(_mean(gaps), max(math.hypot(*errors) / len(pairs), _spread(gaps)), len(pairs))


def gain(cells: Cells) -> Estimate | None:
    """Final accuracy minus that of the warm-up policy, with errors as in `gap`."""
    return gap(cells, [cell | {"held_out": cell["held_out"][:1]} for cell in cells])


def _gap_text(value: Estimate) -> str:
    return f"{value.mean:+.3f} ± {value.error:.3f} ({value.seeds} {'seed' if value.seeds == 1 else 'seeds'})"


def _summary(found: Cells) -> str:
    """What came out, in sentences."""
    lines = []
    for column in COLUMN_TITLES:
        none = select(found, column, "none")
        before, after = accuracy(none, at=0), accuracy(none)
        if before is None or after is None:
            continue
        lost = sum(map(is_lost, none))
        others = [
            f"{CORRECTION_TITLES[name]} at {accuracy(select(found, column, name))}"
            for name in CORRECTION_TITLES
            if name != "none" and select(found, column, name)
        ]
        line = f"- **{COLUMN_TITLES[column]}**: from {before}, no correction ends at {after}"
        line += f" ({lost} of {len(none)} seeds lost)"
        lines.append(line + (f"; {', '.join(others)}." if others else "."))
    return "\n".join(lines)


def _results(found: Cells) -> str:
    rows = []
    for column, correction in _trainings(found):
        seeds = select(found, column, correction)
        before, after, reward = accuracy(seeds, at=0), accuracy(seeds), at_the_end(seeds, "reward")
        gained = gain(seeds)
        assert gained is not None
        rows.append(
            (
                COLUMN_TITLES[column],
                CORRECTION_TITLES[correction],
                len(seeds),
                before,
                after,
                f"{gained.mean:+.3f} ± {gained.error:.3f}",
                reward,
                " · ".join(f"{cell['held_out'][-1]['accuracy']:.2f}" for cell in seeds),
            )
        )
    header = ("sampler", "correction", "seeds", "held-out before", "held-out after", "gain")
    return table((*header, f"reward, last {LAST} steps", "each seed"), rows)


def _verdicts(found: Cells) -> str:
    rows = []
    for claim in CLAIMS:
        verdict = claim.judge(found) or UNJUDGED
        rows.append((claim.text, claim.section, f"**{verdict.word}**", verdict.evidence))
    return table(("claim", "section", "here", "why"), rows)


class Claim(NamedTuple):
    """What the document says of its trainings, and how the cells judge it; None where they are not done."""

    text: str
    section: str
    judge: Callable[[Cells], Verdict | None]


def _token_keeps_up(found: Cells) -> Verdict | None:
    """Token-TIS against no correction, in the two columns that sample the whole distribution."""
    evidence, worse = [], False
    for column in ("clean", "stale_quantized"):
        lead = gap(select(found, column, "token_tis"), select(found, column, "none"))
        if lead is None:
            return None
        worse = worse or lead.mean < -MARGIN * lead.error
        evidence.append(f"{COLUMN_TITLES[column]}: {_gap_text(lead)}")
    return Verdict("does not repeat" if worse else "repeats", "Token-TIS against none, " + "; ".join(evidence))


def _sequence_is_worst(found: Cells) -> Verdict | None:
    sequence = select(found, "stale_quantized", "seq_tis")
    leads = [gap(sequence, select(found, "stale_quantized", other)) for other in ("token_tis", "none")]
    measured = [lead for lead in leads if lead is not None]
    if len(measured) < len(leads):
        return None
    worst = all(lead.mean < -MARGIN * lead.error for lead in measured)
    token, none = map(_gap_text, measured)
    evidence = f"stale and quantized: Seq-TIS against Token-TIS {token}, against none {none}"
    return Verdict("repeats" if worst else "does not repeat", evidence)


def _token_is_robust(found: Cells) -> Verdict | None:
    """Token-TIS against whatever else was tried, in the two columns that sample the whole distribution."""
    evidence, behind = [], False
    for column in ("clean", "stale_quantized"):
        token = select(found, column, "token_tis")
        others = {name: gap(select(found, column, name), token) for name in CORRECTION_TITLES if name != "token_tis"}
        leads = {name: lead for name, lead in others.items() if lead is not None}
        if "none" not in leads or "seq_tis" not in leads:
            return None
        best = max(leads, key=lambda name: leads[name].mean)
        behind = behind or leads[best].mean > MARGIN * leads[best].error
        evidence.append(f"{COLUMN_TITLES[column]}: the best other, {CORRECTION_TITLES[best]}, {_gap_text(leads[best])}")
    return Verdict("does not repeat" if behind else "repeats", "against Token-TIS, " + "; ".join(evidence))


def _within(column: str, correction: str, metric: str, low: float, high: float) -> Callable[[Cells], Verdict | None]:
    """Whether a metric, averaged over a training, is in a range that the document names."""

    def judge(found: Cells) -> Verdict | None:
        value = overall(select(found, column, correction), metric)
        if value is None:
            return None
        word = "repeats" if low <= value.mean <= high else "does not repeat"
        seeds = f"{value.seeds} {'seed' if value.seeds == 1 else 'seeds'}"
        return Verdict(word, f"{COLUMN_TITLES[column]}: {value.mean:.3g} ± {value.error:.1g} ({seeds})")

    return judge


def _all_fail(found: Cells) -> Verdict | None:
    evidence, learns = [], False
    for correction in ("none", "token_tis", "seq_tis"):
        gained = gain(select(found, "truncated", correction))
        if gained is None:
            return None
        learns = learns or gained.mean > MARGIN * gained.error
        evidence.append(f"{CORRECTION_TITLES[correction]} {_gap_text(gained)}")
    still = [norm == 0 for cell in found if cell["column"] == "truncated" for norm in cell["metrics"]["grad_norm"]]
    why = f"gain in held-out accuracy: {', '.join(evidence)}; in {_mean(still):.0%} of the steps every group was all "
    why += "right or all wrong, and nothing was learned"
    return Verdict("does not repeat" if learns else "repeats", why)


def _deceptive_ess(found: Cells) -> Verdict | None:
    """An ESS near 1 counts only where the clamp makes it; weights that are near 1 have it too."""
    cells = select(found, "truncated", "seq_tis")
    ess, clamped = (overall(cells, metric) for metric in ("ess", "saturated_low"))
    if ess is None or clamped is None:
        return None
    word = "repeats" if ess.mean > 0.9 and clamped.mean > 0.5 else "does not repeat"
    return Verdict(word, f"ESS {ess.mean:.3g}, but {clamped.mean:.2%} of the weights are at the lower clamp")


def _replay_helps(found: Cells) -> Verdict | None:
    lead = gap(select(found, "truncated", "replay"), select(found, "truncated", "none"))
    if lead is None:
        return None
    word = "repeats" if lead.mean > MARGIN * lead.error else "does not repeat"
    return Verdict(word, f"replayed kept sets against none: {_gap_text(lead)}")


def _masking_is_no_better(found: Cells) -> Verdict | None:
    lead = gap(select(found, "stale_quantized", "seq_mis"), select(found, "stale_quantized", "token_tis"))
    if lead is None:
        return None
    word = "does not repeat" if lead.mean > MARGIN * lead.error else "repeats"
    return Verdict(word, f"stale and quantized: Seq-MIS against Token-TIS {_gap_text(lead)}")


def _larger_kl(found: Cells) -> Verdict | None:
    truncated, clean = (overall(select(found, column, "none"), "kl") for column in ("truncated", "clean"))
    if truncated is None or clean is None:
        return None
    word = "repeats" if truncated.mean > 10 * abs(clean.mean) else "does not repeat"
    return Verdict(word, f"{truncated.mean:.2g} nats per token against {clean.mean:.2g} in the clean column")


def _not_here(why: str) -> Callable[[Cells], Verdict | None]:
    return lambda found: Verdict("cannot be tested here", why)


CLAIMS = (
    Claim("Token-TIS ends as well as no correction, or better", "5.1, figure 1", _token_keeps_up),
    Claim(
        "Seq-TIS is the worst of the three, for its variance outweighs its smaller bias",
        "5.1, figure 1; 5.2",
        _sequence_is_worst,
    ),
    Claim(
        "The ESS of Token-TIS stays at 0.9 to 1.0",
        "5.2",
        _within("stale_quantized", "token_tis", "ess", 0.9, 1.0),
    ),
    Claim("The ESS of Seq-TIS is 0.3 to 0.4", "5.2", _within("stale_quantized", "seq_tis", "ess", 0.3, 0.4)),
    Claim("Seq-TIS: χ²_seq exceeds 1,000", "5.2", _within("stale_quantized", "seq_tis", "chi2_seq", 1e3, math.inf)),
    Claim(
        "80 to 90 % of the sequences have a weight below 1/4 under Seq-TIS",
        "5.2",
        _within("stale_quantized", "seq_tis", "low_weight", 0.8, 0.9),
    ),
    Claim("With temperature 0.7, top-p 0.8 and top-k 20 all three fail", "5.4", _all_fail),
    Claim(
        "… there nearly all sequences have a low weight",
        "5.4",
        _within("truncated", "seq_tis", "low_weight", 0.9, 1),
    ),
    Claim(
        "… and the ESS is near 1 all the same, because every weight is clamped: a false positive",
        "5.4",
        _deceptive_ess,
    ),
    Claim("… and the KL is more than ten times that of temperature 1", "5.4", _larger_kl),
    Claim("Replayed kept sets make top-p and top-k usable (cited there, not run)", "2", _replay_helps),
    Claim("Seq-MIS, built on the same weights, does no better than Token-TIS", "6", _masking_is_no_better),
    Claim(
        "Geo-RS with the recommended band rejects every sample",
        "6",
        _within("stale_quantized", "geo_rs_token_tis", "rejected", 0.99, 1.0),
    ),
    Claim(
        "The response length stops at 20 / KL tokens",
        "5.4",
        _not_here("the length of a right answer is fixed by the task, and nothing rewards more"),
    ),
    Claim(
        "Temperature 0.4 keeps the order of the corrections",
        "5.1",
        _not_here("temperature 0.4 is no column of this grid"),
    ),
    Claim("Token-TIS with default sampling is the most robust choice", "7", _token_is_robust),
)


def _mismatch(found: Cells) -> str:
    rows = []
    for column, correction in _trainings(found):
        seeds = select(found, column, correction)
        names = ("k3", "t_times_kl", "chi2_seq", "mean_weight", "ess", "low_weight", "rejected")
        cells = [overall(seeds, name) for name in names]
        shown = ["–" if value is None else f"{value.mean:.2g}" for value in cells]
        rows.append((COLUMN_TITLES[column], CORRECTION_TITLES[correction], *shown))
    header = ("k3 per token, nats", "T × KL, nats", "χ²_seq", "mean weight", "ESS", "low weights", "rejected")
    return table(("sampler", "correction", *header), rows)


ALARM = 2.0
"""A metric warns when its mean over `SMOOTH` steps is so many times its first such mean."""

LEVEL = 10.0
"""T × KL also warns at this level, nats: half of the clamp of 20."""


class Warner(NamedTuple):
    """A metric that may foretell a loss, and what it warns above: a level, or None for `ALARM` times its beginning."""

    metric: str
    name: str
    level: float | None = None


WARNERS = (
    Warner("t_times_kl", f"`rollout_corr/t_times_kl` above {LEVEL:g} nats", LEVEL),
    Warner("t_times_kl", "`rollout_corr/t_times_kl`"),
    Warner("k3", "`rollout_corr/k3_kl`"),
    Warner("chi2_token", "`rollout_corr/chi2_token`"),
    Warner("entropy", "`actor/entropy`"),
    Warner("grad_norm", "`actor/grad_norm`"),
)


def is_lost(cell: Mapping[str, Any]) -> bool:
    """Whether a training ended with less than half of the accuracy that it began with."""
    return bool(cell["held_out"][-1]["accuracy"] < cell["held_out"][0]["accuracy"] / 2)


def policy_lost_at(cell: Mapping[str, Any]) -> int | None:
    """The first checkpoint whose held-out accuracy is below half of the first one's."""
    limit = cell["held_out"][0]["accuracy"] / 2
    return next((point["step"] for point in cell["held_out"] if point["accuracy"] < limit), None)


def reward_lost_at(cell: Mapping[str, Any]) -> int | None:
    """The first step at which the reward, averaged over `SMOOTH` steps, is below half of its first such mean."""
    smooth = _smooth(cell["metrics"]["reward"])
    return _first(smooth, lambda value: value < smooth[SMOOTH - 1] / 2)


def warns_at(cell: Mapping[str, Any], warner: Warner) -> int | None:
    """The first step at which a metric warns."""
    smooth = _smooth(cell["metrics"][warner.metric])
    level = ALARM * smooth[SMOOTH - 1] if warner.level is None else warner.level
    return _first(smooth, lambda value: value > level)


def _first(smooth: Sequence[float], holds: Callable[[float], bool]) -> int | None:
    return next((step for step, value in enumerate(smooth, 1) if step >= SMOOTH and holds(value)), None)


def _smooth(values: Sequence[float | None]) -> list[float]:
    return [_mean(_finite(values[max(0, i - SMOOTH + 1) : i + 1])) for i in range(len(values))]


def _warnings(found: Cells) -> str:
    lost = [cell for cell in found if is_lost(cell)]
    if not lost:
        return "No training was lost."
    kept = [cell for cell in found if not is_lost(cell) and cell["column"] in {cell["column"] for cell in lost}]
    rows: list[tuple[object, ...]] = [
        ("held-out accuracy at half, first checkpoint", *map(policy_lost_at, lost), ""),
        ("reward at half", *map(reward_lost_at, lost), ""),
    ]
    for warner in WARNERS:
        false = sum(warns_at(cell, warner) is not None for cell in kept)
        rows.append((warner.name, *(warns_at(cell, warner) for cell in lost), f"{false} of {len(kept)}"))
    shown = [["–" if value is None else value for value in row] for row in rows]
    header = ("step of", *(f"`{cell['cell']}`" for cell in lost), "warns where nothing was lost")
    return table(header, shown)


def _times(found: Cells) -> str:
    rows = []
    for column in COLUMN_TITLES:
        cells = [cell for cell in found if cell["column"] == column]
        if not cells:
            continue
        minutes = [cell["core_seconds"] / 60 for cell in cells]
        rows.append(
            (
                COLUMN_TITLES[column],
                len(cells),
                _all(cells, "steps"),
                _all(cells, "responses"),
                f"{min(cell['tokens'] for cell in cells):,} … {max(cell['tokens'] for cell in cells):,}",
                f"{min(minutes):.1f} … {max(minutes):.1f}",
                _all(cells, "processor"),
                _all(cells, "torch"),
                _all(cells, "threads"),
            )
        )
    header = ("sampler", "cells", "steps", "responses", "tokens trained on", "core-minutes per cell")
    return table((*header, "processor", "torch", "threads"), rows)


def _trainings(found: Cells) -> list[tuple[str, str]]:
    return [(column, name) for column in COLUMN_TITLES for name in CORRECTION_TITLES if select(found, column, name)]


def _all(found: Cells, name: str) -> str:
    """The values that cells have, without repetition."""
    return ", ".join(dict.fromkeys(str(cell[name]) for cell in found))


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _spread(values: Sequence[float]) -> float:
    """The standard error of a mean over seeds; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _curves(found: Cells, what: str, path: Path, *, logarithmic: bool = False) -> None:
    """A panel for each column; a thin line for each seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [column for column in COLUMN_TITLES if any(cell["column"] == column for cell in found)]
    figure, panels = pyplot.subplots(1, len(columns), figsize=(4.2 * len(columns), 3.4), sharey=True, squeeze=False)
    for panel, column in zip(panels[0], columns, strict=True):
        for correction, color in COLORS.items():
            lines = [_line(cell, what) for cell in select(found, column, correction)]
            for x, y in lines:
                panel.plot(x, y, color=color, linewidth=0.6, alpha=0.5)
            if lines:
                length = min(len(x) for x, _ in lines)
                means = [_mean([y[i] for _, y in lines]) for i in range(length)]
                panel.plot(lines[0][0][:length], means, color=color, linewidth=2, label=CORRECTION_TITLES[correction])
        panel.set_title(COLUMN_TITLES[column], fontsize=10)
        panel.set_xlabel("training step")
        if logarithmic:
            panel.set_yscale("log")
        panel.legend(fontsize=7)
    panels[0][0].set_ylabel(Y_LABELS[what])
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


Y_LABELS = {
    "reward": "reward, mean of 5 steps",
    "held_out": "held-out accuracy at temperature 1",
    "grad_norm": "norm of the gradient, mean of 5 steps",
}


def _line(cell: dict[str, Any], what: str) -> tuple[list[float], list[float]]:
    if what == "held_out":
        return [point["step"] for point in cell["held_out"]], [point["accuracy"] for point in cell["held_out"]]
    smooth = _smooth(cell["metrics"][what])
    return list(range(1, len(smooth) + 1)), smooth
