"""Check that both densities of a denoising step have one deviation s, or name the trainer's setting that explains it.

The sampler's log-prob determines the mean of z² of each step, z̄² = −2 (log μ + log s + log √2π). A trainer with the
deviation r s reports log π = −log r s − log √2π − (z̄² + 2 KL / D) / 2r², up to noise of √(2 KL) / D r².
One setting explains r at every timestep: a different noise level has one r, a different scheduler shift one r per σ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.null.picture_rows import Column, PictureRows
from rollcorr.diagnostics.numbers import format_number

# Standard errors between the mean of J and −KL at a timestep, above which the densities belong to other steps.
CONTRADICTION_Z = 6.0
# Smallest difference between both, nats.
LEAST_GAP = 0.1
# Largest root mean square of the residual, in units of its noise, if a setting explains the log-probs.
FITS = 3.0
# Search grid for the ratio of noise levels or shifts: 1/6 to 6 in steps of 0.5 %.
FACTORS = np.exp(np.linspace(-1.8, 1.8, 721))
LOG_ROOT = math.log(math.sqrt(2 * math.pi))


def density_finding(rows: PictureRows) -> Finding | None:
    """Return the finding that the trainer's densities are not the densities of the sampled steps; None if they are.

    Args:
        rows: denoising steps with an exact KL.
    """
    kl, size = np.maximum(rows.column("kl"), 1e-9), rows.column("dimensions")
    gap = size * (rows.column("train") - rows.column("rollout")) + kl

    # J + KL has mean 0 and variance 2 KL. Timesteps may differ in sign, so test each one separately.
    largest = 0.0
    for time in np.unique(rows.column("timestep")):
        at = rows.column("timestep") == time if np.isfinite(time) else np.isnan(rows.column("timestep"))
        error = math.sqrt(2 * float(kl[at].mean()) / int(at.sum()))
        mean = abs(float(gap[at].mean()))
        if mean > max(LEAST_GAP, CONTRADICTION_Z * error):
            largest = max(largest, mean)
    if not largest:
        return None
    several = len(np.unique(rows.column("timestep"))) > 1
    return (_find_setting(rows) if several else None) or _build_finding("schedule_differs", largest)


def _find_setting(rows: PictureRows) -> Finding | None:
    """Return the finding of the noise level or shift that explains the log-probs; None if neither does."""
    sigma, after, std = (rows.column(name) for name in ("sigma", "sigma_next", "step_std"))
    own_level = std / _unit_deviation(sigma, after)

    # The sampler must report the density of its own step: then z̄² has mean 1 and variance 2 / D.
    squares = _mean_squares(rows)
    if abs(float(squares.mean()) - 1) > CONTRADICTION_Z * math.sqrt(2 / rows.column("dimensions").sum()) + 1e-4:
        return None

    def of_shift(factor: float) -> Column:
        """Return the ratio of the deviations if the trainer's scheduler shift is larger by a factor."""
        moved = [factor * value / (1 + (factor - 1) * value) for value in (sigma, after)]
        return np.asarray(own_level * _unit_deviation(*moved) / std)

    # Without σ, as in DDIM, only the noise level is identifiable: s is proportional to it at every timestep.
    knows_sigma = bool(np.isfinite(own_level).all())
    level, level_misfit = _fit_factor(rows, lambda factor: np.full(len(rows), factor))
    shift, shift_misfit = _fit_factor(rows, of_shift) if knows_sigma else (1.0, math.inf)
    if min(level_misfit, shift_misfit) > FITS:
        return None
    if not knows_sigma:
        title = f"the trainer scores with {format_number(level)} times the sampler's noise level"
        return _build_finding("noise_level_differs", level, title, factor=level)
    sampler = float(np.median(own_level))
    if level_misfit <= shift_misfit:
        trainer = format_number(sampler * level)
        title = f"the sampler's noise level is {format_number(sampler)}, and the trainer scores with {trainer}"
        return _build_finding("noise_level_differs", level, title, sampler_noise_level=sampler, factor=level)
    title = f"the trainer's scheduler has {format_number(shift)} times the sampler's shift"
    return _build_finding("shift_differs", shift, title, factor=shift)


def _unit_deviation(sigma: Column, after: Column) -> Column:
    """Return s at noise level 1, sqrt(σ / (1 − σ) · (σ − σ_next)), with σ_next for σ = 1 in the denominator."""
    below_one = np.where(sigma >= 1, after, sigma)
    return np.asarray(np.sqrt(sigma / (1 - below_one) * (sigma - after)))


def _mean_squares(rows: PictureRows) -> Column:
    """Return z̄² of each step from the sampler's log-prob, (n,)."""
    return np.asarray(-2 * (rows.column("rollout") + np.log(rows.column("step_std")) + LOG_ROOT))


def _fit_factor(rows: PictureRows, ratio_of: Callable[[float], Column]) -> tuple[float, float]:
    """Return the factor with the smallest misfit, and this misfit: the root mean square of residual over noise."""
    log_std, size = np.log(rows.column("step_std")), rows.column("dimensions")
    spread = np.maximum(2 * rows.column("kl") / size, 1e-12)
    squares = _mean_squares(rows) + spread
    found = (1.0, math.inf)
    for factor in FACTORS:
        ratio = ratio_of(float(factor))
        expected = -np.log(ratio) - log_std - LOG_ROOT - squares / (2 * ratio**2)

        # Half a step of the grid shifts log π by up to 0.25 % of its slope.
        noise = np.sqrt(spread / size) / ratio**2 + 0.0025 * np.abs(squares / ratio**2 - 1) + 1e-6
        misfit = float(np.sqrt(np.mean(((rows.column("train") - expected) / noise) ** 2)))
        if misfit < found[1]:
            found = (float(factor), misfit)
    return found


def _build_finding(code: str, value: float, title: str = "", **evidence: float) -> Finding:
    row = fault(code)
    return replace(row.finding, metric="kl_joint", title=title or row.title, value=value, evidence=evidence)
