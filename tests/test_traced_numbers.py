"""Every number on README, choosing.md and the laboratory's page is computed from a committed table, or is a setting.

A phrase with measured numbers is built here from its table, and must be on the page. What remains may only have the
numbers of `SETTINGS`, which nobody measured.
"""

import csv
import json
import math
import re
import statistics
from collections import defaultdict
from functools import lru_cache
from pathlib import Path

import pytest

from rollcorr.diagnostics.advice import rule

ROOT = Path(__file__).parents[1]
LABORATORY = ROOT / "experiments" / "laboratory"
BENCH = ROOT / "experiments" / "bench"
NUMBER = r"(?<![\w.^_/-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"


@lru_cache
def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def readme():
    curves = json.loads((ROOT / "docs" / "figures" / "demo_curves.json").read_text(encoding="utf-8"))

    def ends(name):
        values = [100 * seed[name][-1][1] for seed in curves]
        return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f} %"

    before = {f"{100 * seed[name][0][1]:.0f} %" for seed in curves for name in seed}
    assert before == {"53 %"}
    yield "(53 % at the start)"
    yield f"{ends('uncorrected')} without correction, {ends('corrected')} with Seq-TIS 4"
    yield f"{ends('fault')}; without this fault {ends('healthy')}"

    seconds = json.loads((ROOT / "benchmarks" / "results" / "correction_cpu.json").read_text(encoding="utf-8"))[
        "seconds"
    ]
    layouts = [timed for name, timed in seconds.items() if name.startswith("8,388,608 tokens")]
    speedups = [timed["verl 0.9.1"]["median"] / timed["cpu, out="]["median"] for timed in layouts]
    low, high = (round(f(speedups), -1) for f in (min, max))
    yield f"8 M tokens into reused CPU buffers, against verl 0.9.1 | {low:.0f}–{high:.0f} × as fast"

    live = rows(ROOT / "experiments" / "diagnosis" / "results" / "live.csv")
    right = {row["fault"]: int(row["right_first"]) for row in live if not row["fault"].startswith("healthy")}
    assert {row["logs"] for row in live} == {"10"}
    yield f"each of {len(right)} faults is named first in ≥ {min(right.values())} of 10 logs"


def choosing():
    yield f"| {rule.NEGLIGIBLE_ESS} or more | {rule.LOWEST_MEAN} or more |"
    yield f"| {rule.LOWEST_ESS} to {rule.NEGLIGIBLE_ESS} | {rule.LOWEST_MEAN} or more |"
    yield f"marks those that keep {rule.FEWEST_KEPT:.0%} of the tokens or fewer".replace("%", " %")

    evidence = rows(BENCH / "advice_evidence.csv")
    (demo,) = (row for row in evidence if row["source"] == "demo")
    yield f"has a T × KL of {float(demo['t_times_kl']):.0f} nats and an ESS of {float(demo['ess']):.2f}"
    token = [row for row in evidence if (row["sampler"], row["correction"]) == ("stale_quantized", "token_tis")]
    yield f"is ignored: it was {statistics.mean(float(row['ess']) for row in token):.2f} in the 4-bit runs"

    quantized, stale = rows(BENCH / "regret.csv")
    assert (quantized["sampler"], stale["sampler"]) == ("stale and quantized", "stale")
    cost, other, unseen = (
        f"{100 * float(of):.0f} %" for of in (quantized["regret"], stale["regret"], quantized["regret_unseen"])
    )
    yield f"cost {cost} of the possible gain"
    yield f"{other} on a stale float32 sampler. Limits fitted only on the float32 sampler would cost {unseen} on"

    # Arithmetic: exp(−2 T × KL), and products of 1.1.
    yield f"{math.exp(-2 * 0.35):.1f} at T × KL = 0.35"
    yield f"{math.exp(-2 * 0.6):.1f} at 0.6"
    yield f"the product is {1.1**10:.1f} for ten tokens, and {1.1**100:,.0f} for a hundred"


def laboratory():
    direction, errors = defaultdict(list), defaultdict(list)
    for row in rows(LABORATORY / "regimes.csv"):
        if row["batch_size"] == "1024" and row["kind"] not in ("noise, garbage", "tempered, raw"):
            direction[row["estimator"], row["regime"]].append(float(row["direction"]))
            errors[row["estimator"], row["regime"]].append(float(row["direction_error"]))
    mean = {key: statistics.mean(values) for key, values in direction.items()}
    assert mean["decoupled_token_is", "30"] > 0.5
    yield "at T × KL = 30 the error is above one half"
    ratio = [mean["sequence_untruncated", regime] / mean["decoupled_token_is", regime] for regime in ("0.1", "1", "10")]
    assert min(ratio) > 1
    yield "worse than token weights from T × KL = 0.1 on"
    behind = {regime: mean["none", regime] / mean["decoupled_token_is", regime] for regime in ("0.1", "1")}
    assert behind["0.1"] < 1.02 < 1.09 < behind["1"]
    yield "competitive only at T × KL = 0.1"

    ratios = [float(row["log_exact"]) / float(row["log_law"]) for row in rows(LABORATORY / "growth.csv")]
    several = [value for value in ratios if value != 1.0]
    assert all(0.9 < value < 0.92 for value in several)
    yield "the exponent differs (by about 10 %"

    clamp = rows(LABORATORY / "clamp.csv")
    half, tenth = ([float(row["t_max"]) / float(row[f"ess_{name}_at"]) for row in clamp] for name in ("half", "tenth"))
    yield f"to 1/2 at 1/{min(half):.0f} to 1/{max(half):.0f} of T_max"
    yield f"and to 1/10 at 1/{min(tenth):.0f} to 1/{max(tenth):.0f}"
    untruncated = [row for row in rows(LABORATORY / "kl.csv") if row["estimator"] == "sequence_untruncated"]
    assert max(float(row["bias"]) for row in untruncated if float(row["t_times_kl"]) <= 1) < 1e-6
    yield "no bias beyond rounding (1e-6 of |∇J|)"


PAGES = {
    "README.md": (readme, "0 2 2.0 4 8 26 40 2025"),
    "docs/guides/choosing.md": (
        choosing,
        "0 0.001 0.1 0.5 1 1.0002 1.001 1.1 1.5 1e-4 1e-6 2 2.5 2e-4 3 4 5 10 16 20 2025",
    ),
    "tools/laboratory_frame.md": (
        laboratory,
        "0 0.01 0.1 1 1,000 1,024 1e-9 2 2,048 3 5 16 20 20,000 30 32 64 98 128 256 2025",
    ),
}
"""Page → what it says of measurements, and the numbers of its settings, definitions, dates and limits."""


@pytest.mark.parametrize("page", PAGES)
def test_every_number_has_a_table_or_is_a_setting(page):
    measured, settings = PAGES[page]
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\s+", " ", re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))
    for phrase in measured():
        assert phrase in text, f"{page} lacks: {phrase}"
        text = text.replace(phrase, "")
    unknown = set(re.findall(NUMBER, text)) - set(settings.split())
    assert not unknown, f"{page}: no table has {', '.join(sorted(unknown))}"
