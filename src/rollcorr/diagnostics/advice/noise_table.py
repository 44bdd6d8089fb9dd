"""Compute the share of pure noise outside every customary limit, by noise and length.

The limits are the presets' thresholds, plus the first threshold of `CRITERIA` for each criterion without a preset.
Verdicts use the same expectations (`health.noise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollcorr.config import CRITERIA, RolloutCorrectionConfig
from rollcorr.config.presets import PRESETS, VERL_2025_11
from rollcorr.diagnostics.health.noise import Noise, expected_from_noise

SIGMAS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2)
"""Standard deviations of d, nats: from float32 kernels to weights that are several updates old."""
NOISE_LENGTHS = (100, 500, 1000, 8000)


@dataclass(frozen=True)
class NoiseRow:
    """Shares of noise outside one limit.

    Attributes:
        limit: the setting and its threshold.
        shows: unit of the shares.
        sigma: noise of a token, nats.
        shares: one share per length.
    """

    limit: str
    shows: str
    sigma: float
    shares: tuple[float, ...]


def noise_table(sigmas: Sequence[float] = SIGMAS, lengths: Sequence[int] = NOISE_LENGTHS) -> tuple[NoiseRow, ...]:
    """Compute the share of pure noise outside each customary limit.

    Args:
        sigmas: standard deviations of d, nats; default `SIGMAS`.
        lengths: tokens per response; default `NOISE_LENGTHS`.

    Returns:
        A row for each limit and σ; tokens are independent and normal.
    """
    rows = []
    for limit, shows, metric, config in _customary_limits():
        for sigma in sigmas:
            shares = tuple(_expected(metric, sigma, length, config) for length in lengths)
            rows.append(NoiseRow(limit, shows, sigma, shares))
    return tuple(rows)


def _expected(metric: str, sigma: float, length: int, config: RolloutCorrectionConfig) -> float:
    counts = {"sequence_count": 1.0, "token_count": float(length), metric: 0.0}
    return expected_from_noise(Noise(sigma=sigma, source="the table"), counts, config)[metric]


def _customary_limits() -> list[tuple[str, str, str, RolloutCorrectionConfig]]:
    """Return distinct limits: label, unit, metric, and a configuration with only this limit."""
    weights: dict[tuple[str, str], None] = {}
    criteria: dict[tuple[str, object], None] = {}
    vetoes: dict[float, None] = {}
    for name, row in PRESETS.items():
        preset = RolloutCorrectionConfig.preset(name)
        if preset.rollout_token_veto_threshold is not None:
            vetoes[preset.rollout_token_veto_threshold] = None
        if row.source == VERL_2025_11:  # the same bands under older names
            continue
        if preset.rollout_is is not None and preset.rollout_is != "horizon":
            weights[preset.rollout_is, str(preset.rollout_is_threshold)] = None
        if isinstance(preset.rollout_rs, str):
            criteria[preset.rollout_rs, preset.rollout_rs_threshold] = None
    in_presets = {name for name, _ in criteria}
    criteria |= {(name, first): None for name, (_, _, first) in CRITERIA.items() if name not in in_presets}

    limits = []
    for criterion, threshold in criteria:
        shows, fraction = "sequences rejected", "seq_masked_fraction"
        if criterion.startswith("token"):
            shows, fraction = "tokens rejected", "masked_fraction"
        config = RolloutCorrectionConfig(rollout_rs=criterion, rollout_rs_threshold=threshold)  # type: ignore[arg-type]
        limits.append((f"{criterion} {threshold}", shows, f"rollout_rs_{criterion}_{fraction}", config))
    for veto in vetoes:
        config = RolloutCorrectionConfig(rollout_token_veto_threshold=veto)
        limits.append((f"veto {veto:g}", "sequences rejected", "rollout_is_veto_fraction", config))
    for level, bound in weights:
        bound_of = float(bound) if "_" not in bound else bound
        config = RolloutCorrectionConfig(rollout_is=level, rollout_is_threshold=bound_of)  # type: ignore[arg-type]
        above = "weights above the ceiling" if config.is_mode == "truncate" else "weights above the band"
        limits.append((f"{level} weights {bound}", above, "rollout_is_ratio_fraction_high", config))
        size = "effective sample size"
        limits.append((f"{level} weights {bound}", size, "rollout_is_eff_sample_size", config))
    return limits
