"""Whether both densities of a denoising step have one deviation s; if not, which setting of the trainer explains it.

The sampler's log-prob gives the mean of z² of each step exactly, z̄² = −2 (log μ + log s + log √2π). A trainer with the
deviation r s reports log π = −log r s − log √2π − (z̄² + 2 KL / D) / 2r², up to noise of √(2 KL) / D r².
One number explains r at every timestep: another noise level gives one r, another scheduler shift one r for each σ.
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

# Standard errors between the mean of J and −KL at a timestep, above which the densities are of other steps.
CONTRADICTION_Z = 6.0
# Nats that they must differ by as well.
LEAST_GAP = 0.1
# Root mean square of the residual, in units of its noise, up to which a setting explains the log-probs.
FITS = 3.0
# Ratios of noise levels, and of shifts, that are tried: 1/6 to 6, in steps of 0.5 %.
FACTORS = np.exp(np.linspace(-1.8, 1.8, 721))
LOG_ROOT = math.log(math.sqrt(2 * math.pi))


def density_finding(rows: PictureRows) -> Finding | None:
    """Return why the trainer's densities are not those of the sampled steps; None if they are.

    Args:
        rows: denoising steps with an exact KL.
    """
    kl, size = np.maximum(rows.column("kl"), 1e-9), rows.column("dimensions")
    gap = size * (rows.column("train") - rows.column("rollout")) + kl

    # J + KL has mean 0 and variance 2 KL. Timesteps may differ in sign, so each is judged by itself.
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
    return (_named(rows) if several else None) or _described("schedule_differs", largest)


def _named(rows: PictureRows) -> Finding | None:
    """The noise level or the shift that explains the log-probs; None if neither does."""
    sigma, after, std = (rows.column(name) for name in ("sigma", "sigma_next", "step_std"))
    own_level = std / _unit_deviation(sigma, after)

    # What the sampler reports must be the density of its own step: z̄² has mean 1 and variance 2 / D.
    squares = _squares(rows)
    if abs(float(squares.mean()) - 1) > CONTRADICTION_Z * math.sqrt(2 / rows.column("dimensions").sum()) + 1e-4:
        return None

    def of_shift(factor: float) -> Column:
        """Ratio of the deviations if the trainer's scheduler has a shift larger by a factor."""
        moved = [factor * value / (1 + (factor - 1) * value) for value in (sigma, after)]
        return np.asarray(own_level * _unit_deviation(*moved) / std)

    # Without σ, as with DDIM, only the noise level can be told: s is in proportion to it at every timestep.
    knows_sigma = bool(np.isfinite(own_level).all())
    level, level_misfit = _best(rows, lambda factor: np.full(len(rows), factor))
    shift, shift_misfit = _best(rows, of_shift) if knows_sigma else (1.0, math.inf)
    if min(level_misfit, shift_misfit) > FITS:
        return None
    if not knows_sigma:
        title = f"the trainer scores with {format_number(level)} times the sampler's noise level"
        return _described("noise_level_differs", level, title, factor=level)
    sampler = float(np.median(own_level))
    if level_misfit <= shift_misfit:
        trainer = format_number(sampler * level)
        title = f"the sampler's noise level is {format_number(sampler)}, and the trainer scores with {trainer}"
        return _described("noise_level_differs", level, title, sampler_noise_level=sampler, factor=level)
    title = f"the trainer's scheduler has {format_number(shift)} times the sampler's shift"
    return _described("shift_differs", shift, title, factor=shift)


def _unit_deviation(sigma: Column, after: Column) -> Column:
    """s of a step at noise level 1: sqrt(σ / (1 − σ) · (σ − σ_next)), with σ_next in place of σ = 1 under the root."""
    below_one = np.where(sigma >= 1, after, sigma)
    return np.asarray(np.sqrt(sigma / (1 - below_one) * (sigma - after)))


def _squares(rows: PictureRows) -> Column:
    """z̄² of each step, from the sampler's log-prob."""
    return np.asarray(-2 * (rows.column("rollout") + np.log(rows.column("step_std")) + LOG_ROOT))


def _best(rows: PictureRows, ratio_of: Callable[[float], Column]) -> tuple[float, float]:
    """The factor that fits best, and its misfit: the root mean square of the residual over its noise."""
    log_std, size = np.log(rows.column("step_std")), rows.column("dimensions")
    spread = np.maximum(2 * rows.column("kl") / size, 1e-12)
    squares = _squares(rows) + spread
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


def _described(code: str, value: float, title: str = "", **evidence: float) -> Finding:
    row = fault(code)
    return replace(row.finding, metric="kl_joint", title=title or row.title, value=value, evidence=evidence)
