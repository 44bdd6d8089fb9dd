"""Cells of the built-in study: for each type of cell, a function from its settings to rows.

A cell is small (seconds), named, and built from plain values, so that a run can stop between any two and resume later.
A row is a flat dictionary; the rows of a study become one CSV file.

    agreement    sampled against exact, for every kind and estimator
    regimes      every estimator at T × KL = 0.1, 1, 10, 30, for every kind of mismatch; sampled
    length, kl   every estimator against one of them, the other fixed; exact
    threshold    every weight and criterion against its threshold at T × KL = 1; sampled
    orders       the slopes of the published orders; exact
    growth       log E[ρ²] compared with T log(1 + χ̄²)
    clamp        clamping and ESS of sequence weights at T_max = 20 / KL; sampled
    batch        normalizers whose denominators are weights: full batches, sampled
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

from rollcorr.config import RolloutCorrectionConfig
from rollcorr.config.correction_options import SAFETY_BOUND
from rollcorr.core import merge_statistics, metric_registry
from rollcorr.correction import correct
from rollcorr.simulation.estimators import every_estimator, threshold_sweep
from rollcorr.simulation.gradient_errors import (
    GradientError,
    LossCoefficients,
    batch_gradient,
    gradient_error,
    gradient_sums,
    random_rejection,
    rejected_unit,
    without_rejection,
)
from rollcorr.simulation.mismatches import KINDS, PolicyPair, make_pair, pair_at_kl
from rollcorr.simulation.orders import ORDER_CHECKS, coin_with_chi2, fit_slope
from rollcorr.simulation.sequence_rows import SequenceRows, every_count, every_sequence, mixed_rows, sample_rows

ResultRow = dict[str, Any]
REGIMES = (0.1, 1.0, 10.0, 30.0)
BATCH_SIZES = (16, 64, 256, 1024, 4096)
APART = ("tempered, raw", "noise, garbage")
"""Kinds that are no mismatch of two policies alone: raw log-probs that hide it, and a share of broken sequences."""
GARBAGE = 0.05
"""Share of the sequences that a broken worker samples, in the kind "noise, garbage"."""
CLAMP = SAFETY_BOUND
"""Largest log weight, nats. The mean log weight of a sequence reaches it at T_max = clamp / KL tokens."""
PUBLISHED_LENGTHS = {
    0.0006: 33_000, 0.001: 20_000, 0.002: 10_000, 0.005: 4_000, 0.01: 2_000, 0.02: 1_000, 0.05: 400,
}  # fmt: skip
"""KL per token → T_max: the table of Fang and Khazi (2025), https://www.llmdata.com/blog/mismatch-praxis/."""


@dataclass(frozen=True)
class Cell:
    """Unit of work of a study.

    Attributes:
        study: a name of `STUDIES`.
        settings: plain values that fully determine the result.
    """

    study: str
    settings: Mapping[str, Any]


def laboratory_cells(*, quick: bool = False) -> list[Cell]:
    """Return the cells of the full study; `quick` returns a subset that runs the same code in seconds."""
    # The quick study has the same types of cells, with fewer kinds, lengths and samples.
    kinds = ["noise", "truncated"] if quick else list(KINDS)
    draws, samples = (20_000, 256) if quick else (1_000_000, 2048)
    length = 32 if quick else 128
    exact_kinds = ["noise"] if quick else ["noise", "heavy_tailed", "stale"]
    lengths = (2, 8) if quick else (2, 4, 8, 16, 32, 64)
    divergences = (0.01, 0.1) if quick else (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 0.6)
    clamp_lengths = {0.05: 400} if quick else PUBLISHED_LENGTHS
    return [
        *(Cell("agreement", {"kind": kind, "draws": draws, "seed": 11}) for kind in kinds),
        *(
            Cell("regimes", {"kind": kind, "t_times_kl": level, "length": length, "samples": samples, "seed": 5})
            for level in (REGIMES[1:2] if quick else REGIMES)
            for kind in (*kinds, *APART)
        ),
        *(Cell("length", {"kind": kind, "length": T, "kl": 0.01}) for kind in exact_kinds for T in lengths),
        *(
            Cell("kl", {"kind": kind, "length": 8 if quick else 32, "kl": value})
            for kind in exact_kinds
            for value in divergences
        ),
        *(
            Cell("threshold", {"kind": kind, "t_times_kl": 1.0, "length": length, "samples": samples, "seed": 5})
            for kind in (*exact_kinds, "noise, garbage")
        ),
        Cell("batch", {"length": 16, "kl": 0.03, "batch_size": 64, "batches": 30 if quick else 200, "seed": 2}),
        *(Cell("orders", {"index": index}) for index in range(2 if quick else len(ORDER_CHECKS))),
        *(Cell("growth", {"length": T}) for T in ((10, 100) if quick else (10, 30, 100, 300, 1000))),
        *(Cell("clamp", {"kl": kl, "published": T, "samples": 64, "seed": 4}) for kl, T in clamp_lengths.items()),
    ]


def run_cell(cell: Cell) -> list[ResultRow]:
    """Measure one cell. The same settings return the same rows."""
    return STUDIES[cell.study](**cell.settings)


def measure(
    rows: SequenceRows,
    estimators: Mapping[str, RolloutCorrectionConfig | LossCoefficients | None],
    batch_sizes: tuple[int, ...],
    **labels: object,
) -> list[ResultRow]:
    """Measure each estimator at each batch size, and each filter together with its matched random rejection.

    Args:
        rows: sampled or exact.
        estimators: name → configuration, None for no correction, or a custom formula as in `gradient_sums`.
        batch_sizes: B, sequences.
        **labels: first columns of each row.

    Returns:
        One row for each estimator and batch size.
    """
    pair = rows.pair
    facts = {"T": pair.length, "kl": pair.kl, "t_times_kl": pair.sequence_kl, "chi2": pair.chi2, "sequences": len(rows)}
    found: list[ResultRow] = []

    # Filters often share the same weights, so measure their unfiltered baseline once.
    measured = functools.cache(functools.partial(gradient_sums, rows))
    for name, estimator in estimators.items():
        sums, unit, control = measured(estimator), None, None
        if isinstance(estimator, RolloutCorrectionConfig):
            unit = rejected_unit(estimator)
            if unit is not None:
                control = random_rejection(sums, measured(without_rejection(estimator)), rows, unit=unit)
        for batch_size in batch_sizes:
            error = gradient_error(sums, pair.gradient, batch_size)
            matched = None if control is None else gradient_error(control, pair.gradient, batch_size)
            found.append(
                {**labels, **facts, "estimator": name, "batch_size": batch_size}
                | _estimate_columns(error, *_COMPARED_ERRORS, "ess", "kept", "kept_sequences")
                | {"exact": error.exact, "unit": unit or ""}
                | _estimate_columns(matched, *_COMPARED_ERRORS, prefix="random_")
            )
    return found


def agreement(kind: str, draws: int, seed: int) -> list[ResultRow]:
    """Compare sampled means of every entry of the gradient with exact ones, in exact standard errors."""
    pair = make_pair(kind, 1.0 if KINDS[kind].whole else 0.3, vocabulary=4, length=5, seed=3)
    every, sample = every_sequence(pair), sample_rows(pair, draws, torch.Generator(device="cpu").manual_seed(seed))

    # Equal sequences have equal gradients, so evaluate each distinct sequence once, with its count.
    digits = 4 ** torch.arange(pair.length, device="cpu")
    codes, count = torch.unique((sample.tokens * digits).sum(-1), return_counts=True)
    place = torch.searchsorted(codes, (every.tokens * digits).sum(-1)).clamp(max=len(codes) - 1)
    drawn = (codes[place] == (every.tokens * digits).sum(-1)) * count[place]
    sampled = dataclasses.replace(every, probability=drawn / draws)

    found: list[ResultRow] = []
    for name, config in every_estimator().items():
        exact, seen = gradient_sums(every, config), gradient_sums(sampled, config)
        mean = exact.first.sum(0)
        error = ((exact.second.sum(0) - mean.square()).clamp(min=0) / draws).sqrt()
        compared = error > 1e-9
        deviation = ((seen.first.sum(0) - mean)[compared] / error[compared]).abs()
        found.append(
            {
                "kind": kind,
                "estimator": name,
                "draws": int(drawn.sum()),
                "entries": int(compared.sum()),
                "largest_z": float(deviation.max()) if compared.any() else 0.0,
            }
        )

    # Four standard errors for one comparison; for several, the same probability that any exceeds the limit.
    comparisons = sum(row["entries"] for row in found) * len(KINDS)
    limit = NormalDist().inv_cdf(1 - (1 - NormalDist().cdf(4)) / comparisons)
    return [row | {"limit": limit} for row in found]


def regimes(kind: str, t_times_kl: float, length: int, samples: int, seed: int) -> list[ResultRow]:
    """Measure every estimator on sampled sequences of a Markov policy with 16 tokens, at one T × KL."""
    rows = _sample_markov(kind, t_times_kl, length, samples, seed)
    return measure(rows, every_estimator(), (64, 1024), kind=kind, regime=t_times_kl)


def swept(kind: str, length: int, kl: float) -> list[ResultRow]:
    """Measure every estimator on every sequence of three independent tokens, with an outcome reward."""
    options: dict[str, Any] = {"vocabulary": 3, "states": 1, "length": length, "spread": 1.0, "seed": 2}
    rows = every_count(pair_at_kl(kind, kl, **options, outcome=True))
    return measure(rows, every_estimator(), BATCH_SIZES, kind=kind)


def threshold(kind: str, t_times_kl: float, length: int, samples: int, seed: int) -> list[ResultRow]:
    """Measure each family of weights and each criterion, from strict to open, on the sequences of `regimes`."""
    rows = _sample_markov(kind, t_times_kl, length, samples, seed)
    found = []
    for family, estimators in threshold_sweep().items():
        measured = measure(rows, estimators, (64, 1024), kind=kind, family=family)
        found += [row | {"threshold": float(row.pop("estimator"))} for row in measured]
    return found


def orders(index: int) -> list[ResultRow]:
    """Fit the slope of one published order, and return it with the points."""
    check = ORDER_CHECKS[index]
    x, y = check.points()
    slope, error = fit_slope(x, y)
    shared = {
        "estimator": check.estimator,
        "quantity": check.quantity,
        "pair": check.pair,
        "published": check.published,
        "slope": slope,
        "error": error,
        "attained": check.attained,
    }
    return [shared | {"x": a, "y": b} for a, b in zip(x, y, strict=True)]


def growth(length: int) -> list[ResultRow]:
    """Compare (1 + χ̄²)^T with the exact second moment and with its estimate from a batch of 1,024."""
    state_dependent = pair_at_kl("stale", 0.01, vocabulary=8, length=300, seed=2).with_length(length)
    found = []
    for name, pair in (
        ("one state, χ̄² = 0.01", coin_with_chi2(0.01, length)),
        ("8 states, one update behind", state_dependent),
    ):
        law = length * math.log1p(pair.chi2)
        rows = sample_rows(pair, 1024, torch.Generator(device="cpu").manual_seed(length))
        metrics = correct(rows.train_log_prob, rows.rollout_log_prob, rows.mask, "decoupled_seq_is").metrics(prefix="")
        found.append(
            {
                "pair": name,
                "T": length,
                "chi2": pair.chi2,
                "log_exact": pair.sequence_log_second_moment,
                "log_law": law,
                "chi2_seq_exact": pair.sequence_chi2,
                "chi2_seq_law": math.expm1(law),
                "chi2_seq_batch_of_1024": metrics["chi2_seq"],
            }
        )
    return found


def clamp(kl: float, published: int, samples: int, seed: int) -> list[ResultRow]:
    """Measure sequence weights at the longest viable length, and how much earlier their ESS vanishes."""
    limit = round(CLAMP / kl)
    pair = pair_at_kl("noise", kl, vocabulary=8, states=1, length=1, spread=1.5, seed=seed).with_length(limit)
    generator = torch.Generator(device="cpu").manual_seed(seed)

    # Process a few sequences at a time and merge exactly: a full batch of 33,000 tokens each would exhaust the memory.
    merged = []
    for _ in range(4):
        rows = sample_rows(pair, samples // 4, generator)
        merged.append(correct(rows.train_log_prob, rows.rollout_log_prob, rows.mask, "decoupled_seq_is").statistics)
    statistics = merge_statistics([part for part in merged if part is not None])
    metrics = metric_registry.finalize(statistics.read(), prefix="")
    growth_rate = math.log1p(pair.chi2)
    return [
        {
            "kl": pair.kl,
            "published": published,
            "t_max": CLAMP / pair.kl,
            "metric_max_viable_length": metrics["max_viable_length"],
            "saturated_low": metrics["saturated_low_fraction"],
            "ess_at_t_max": metrics["rollout_is_eff_sample_size"],
            "ess_half_at": math.log(2) / growth_rate,
            "ess_tenth_at": math.log(10) / growth_rate,
        }
    ]


def batch(length: int, kl: float, batch_size: int, batches: int, seed: int) -> list[ResultRow]:
    """Measure full batches with the package's own denominators, for normalizers that divide by weights."""
    pair = pair_at_kl("noise", kl, vocabulary=4, length=length, seed=3)
    rows = sample_rows(pair, batch_size * batches, torch.Generator(device="cpu").manual_seed(seed))
    found = []
    for level in ("token", "sequence"):
        base = RolloutCorrectionConfig(rollout_is=level)  # type: ignore[arg-type]
        for name, change in (
            ("kept", {}),
            ("weights", {"normalizer": "weights"}),
            ("batch-normalized", {"rollout_is_batch_normalize": True}),
        ):
            config = dataclasses.replace(base, **change)  # type: ignore[arg-type]
            gradients = torch.stack(
                [batch_gradient(rows.pick(slice(i * batch_size, (i + 1) * batch_size)), config) for i in range(batches)]
            ).flatten(1)
            found.append(
                {"level": level, "normalizer": name, "batch_size": batch_size, "T": length, "kl": pair.kl}
                | _batch_errors(gradients, pair)
            )
    return found


STUDIES: Mapping[str, Callable[..., list[ResultRow]]] = {
    "agreement": agreement,
    "regimes": regimes,
    "length": swept,
    "kl": swept,
    "threshold": threshold,
    "batch": batch,
    "orders": orders,
    "growth": growth,
    "clamp": clamp,
}
"""Study → the function that runs its cells."""


def _sample_markov(kind: str, t_times_kl: float, length: int, samples: int, seed: int) -> SequenceRows:
    """Sample sequences of a Markov policy with 16 tokens; the reward is a mean over tokens."""
    name, _, extra = kind.partition(", ")
    options: dict[str, Any] = {"vocabulary": 16, "length": length, "spread": 2.0, "seed": seed}
    pair = pair_at_kl(name, t_times_kl / length, **options, reports="raw" if extra == "raw" else "sampled")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    rows = sample_rows(pair, samples, generator)
    if extra != "garbage":
        return rows

    # A broken worker samples uniformly.
    broken = dataclasses.replace(pair, rollout=pair.trainer.with_logits(torch.zeros_like(pair.trainer.logits)))
    return mixed_rows(rows, sample_rows(broken, samples, generator), GARBAGE)


_COMPARED_ERRORS = ("bias", "deviation", "mse", "direction")
"""Errors that are also reported for the matched random rejection."""


def _estimate_columns(error: GradientError | None, *names: str, prefix: str = "") -> ResultRow:
    """Return columns for some estimates, each followed by its standard error; empty strings if `error` is None."""
    columns: ResultRow = {}
    for name in names:
        value, spread = ("", "") if error is None else getattr(error, name)
        columns |= {prefix + name: value, f"{prefix}{name}_error": spread}
    return columns


def _batch_errors(gradients: torch.Tensor, pair: PolicyPair) -> ResultRow:
    """Compute direction error, relative bias and deviation of `gradients`, with the noise of their mean subtracted."""
    count, truth = len(gradients), pair.gradient.flatten()
    scale = float(truth.square().sum())
    mean = gradients.mean(0)
    variance = float((gradients - mean).square().sum() / (count - 1))
    squared_bias = max(float((mean - truth).square().sum()) - variance / count, 0.0)
    aligned = float(mean @ truth) ** 2 / (scale * float(gradients.square().sum(-1).mean()))
    return {
        "direction": math.sqrt(max(1 - aligned, 0.0)),
        "bias": math.sqrt(squared_bias / scale),
        "bias_error": math.sqrt(variance / count / scale),
        "deviation": math.sqrt(variance / scale),
        "deviation_error": math.sqrt(variance / scale / 2 / (count - 1)),
    }
