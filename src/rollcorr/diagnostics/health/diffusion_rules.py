"""Rules on denoising steps, in joint units: over all D latent dimensions of a step.

Log-probs of denoising steps are usually averages over D, so their differences look small at any image size: 1e-3 per
dimension is 66 nats at D = 65,536. The rules use the exact KL of a step, KL = ‖m_π − m_μ‖² / 2s², and the joint
log-ratio J = D (log π − log μ), which under the rollout policy is normal with mean −KL and variance 2 KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from rollcorr.config.finding import Finding
from rollcorr.core.health_ranges import HealthyRange
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.health.evidence import Evidence
from rollcorr.diagnostics.health.noise import RANGE_Z
from rollcorr.diagnostics.health.trend import Change

# Exact KL per step, nats, above which a note asks for a null: large images reach 2 with bf16 noise.
KL_WARNS = 0.1
# Largest exact KL, nats, for which k3 of J estimates the KL.
SMALL_KL = 1.0
# Standard errors between the mean of J and its expected value above which log-probs and means disagree.
CONTRADICTION_Z = 6.0
# Largest difference between the shares of zeroed gradients for A < 0 and for A > 0.
ONE_SIDED = 0.25
# Largest ratio of a timestep's |Δ log p| to its start.
GROWTH = 5.0
# Number of first values of a timestep whose median is its start.
FIRST_STEPS = 5
# Smallest growth of |Δ log p| at the median timestep for a rise of the KL, which grows by its square.
RISE_BY_TIMESTEP = 1.5
# Fewest values of a timestep to compute its growth.
FEWEST_VALUES = 4
# Lower bound of a start's |Δ log p|, nats per dimension.
LEAST = 1e-12
NEGATIVE, POSITIVE = "actor/zeroed_fraction_negative", "actor/zeroed_fraction_positive"
BY_TIMESTEP = "log_prob_abs_diff/t_"

_CLOSER = (
    "send the engine the trainer's weights, keep latents and the step in float32, raise the rollout's precision, and "
    "give both sides the same prompt embeddings, guidance and schedule"
)

# Metrics whose healthy range applies to denoising steps → (reason, fix) of a value outside the range.
STEP_ADVICE: Mapping[str, tuple[str, str]] = {
    "rollout_is_mean": (
        "under the rollout policy the weights average 1; if their mean is far from 1, the log-probs are not "
        "comparable, or truncation removed weight",
        "check that both sides use the same schedule and the same steps; then " + _CLOSER,
    ),
    "rollout_is_std": (
        "weights of high variance let a few samples decide the gradient",
        "lower the threshold, or reject the outliers by their exact KL (rollout_rs=step_kl)",
    ),
    "rollout_is_eff_sample_size": (
        "fewer than a third of the samples determine the update",
        "lower the threshold; then " + _CLOSER,
    ),
    "rollout_rs_masked_fraction": (
        "much of the batch is rejected, so the gradient is noisy and biased toward the kept part",
        "widen the band, or find out why so much lies outside it; then " + _CLOSER,
    ),
    "nonfinite_count": (
        "log-probs of denoising steps are missing or not finite",
        "find out why the sampler does not return them; `nonfinite=` sets how the correction treats these steps",
    ),
}


def step_range(name: str, limits: HealthyRange) -> HealthyRange | None:
    """Return a metric's healthy range with the texts for denoising steps.

    Args:
        name: bare name of the metric.
        limits: the metric's range in the registry.

    Returns:
        The range; `None` if it applies only to language models.
    """
    advice = STEP_ADVICE.get("rollout_rs_masked_fraction" if name.endswith("masked_fraction") else name)
    return None if advice is None else replace(limits, reason=advice[0], fix=advice[1])


def expected_at(exact_kl: float) -> dict[str, float]:
    """Return the expected metrics of J at an exact KL, nats: the mean of −J is the KL, as is k3 for a small KL."""
    expected = {"kl_joint": exact_kl}
    return expected | {"k3_kl_joint": exact_kl} if exact_kl <= SMALL_KL else expected


def range_at(exact_kl: float, steps: float) -> dict[str, tuple[float, float]]:
    """Compute the 95 % range of `kl_joint`, the mean of −log(π/μ) over steps of variance 2 KL each, in nats.

    Args:
        exact_kl: exact KL per step, nats.
        steps: number of denoising steps.

    Returns:
        Metric → (low, high), nats; empty if either argument is not positive.
    """
    if not (exact_kl > 0 and steps > 0):
        return {}
    error = RANGE_Z * math.sqrt(2 * exact_kl / steps)
    return {"kl_joint": (exact_kl - error, exact_kl + error)}


def rises_of_pictures(
    history: Sequence[tuple[int, Mapping[str, float]]], changes: Mapping[str, Change]
) -> Mapping[str, Change]:
    """Return the rise of the exact KL, if |Δ log p| at equal timesteps also rose.

    Windows at different timesteps change the KL tenfold between steps. Averages over D follow these changes, so their
    rises are ignored.

    Args:
        history: (step, numbers by bare name), as in `Evidence`.
        changes: metric → its latest lasting rise.
    """
    rises = {name: change for name, change in changes.items() if name == "exact_kl_mean"}
    values = _by_timestep(history).values()
    grown = [median(one[-2:]) / max(median(one[:2]), LEAST) for one in values if len(one) >= FEWEST_VALUES]
    return {} if grown and median(grown) < RISE_BY_TIMESTEP else rises


def _by_timestep(history: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, list[float]]:
    """Return timestep, as in its metric's name → |Δ log p| of each step that measured it, nats per dimension."""
    values: dict[str, list[float]] = {}
    for _, metrics in history:
        for name in metrics:
            if name.startswith(BY_TIMESTEP):
                values.setdefault(name.removeprefix(BY_TIMESTEP), []).append(metrics[name])
    return values


def step_divergence(evidence: Evidence) -> Finding | None:
    """Return a note if the exact KL of a step, or without it the mean of −J, exceeds 0.1 nats. A null judges it."""
    exact = evidence.get("exact_kl_mean")
    name = "kl_joint" if math.isnan(exact) else "exact_kl_mean"

    # −J is noisy around the KL, and k3 of J is never negative, so require both above the limit.
    if name == "kl_joint" and not evidence.get("k3_kl_joint") > KL_WARNS:
        return None
    return fault("step_divergence").above(evidence, name, KL_WARNS, severity="note")


def densities_contradict_means(evidence: Evidence) -> Finding | None:
    """Return an error if the mean of J is not −KL: one side's densities use other steps, as in a shifted schedule."""
    mean_j, count = -evidence.get("kl_joint"), evidence.current.get("token_count", 0.0)
    exact = evidence.get("exact_kl_mean")
    if math.isnan(mean_j) or not count > 1:
        return None

    # J has mean −KL and variance 2 KL. Without the exact KL only the sign is known: the mean of J is at most 0.
    known = not math.isnan(exact)
    expected = -exact if known else 0.0
    spread = math.sqrt(2 * max(exact if known else KL_WARNS, 1e-6) / count)
    off = abs(mean_j - expected) if known else mean_j
    if not (off > KL_WARNS and off > CONTRADICTION_Z * spread):
        return None
    against = f"the exact KL of {exact:.3g}" if known else "every possible KL, which cannot be negative"
    return replace(
        fault("schedule_differs").finding,
        metric="kl_joint",
        value=-mean_j,
        limit=f"{exact:.3g}, the exact KL" if known else "not below 0",
        reason=f"the mean of −J contradicts {against}: the two sides use another σ or s for the same step, as with a "
        "schedule that is off by one, or one side's log-prob is no density",
        severity="error",
        confidence=1 - 1 / (1 + (off / max(spread, 1e-12)) ** 2),
        **evidence.when("kl_joint", lambda value: abs(-value - expected) > KL_WARNS),
    )


def one_sided_gradients(evidence: Evidence) -> Finding | None:
    """Return a finding if the clip zeroes far more gradients for one sign of the advantage, which biases learning."""
    negative, positive = evidence.get(NEGATIVE), evidence.get(POSITIVE)
    gap = abs(negative - positive)
    name, side = (NEGATIVE, "negative") if negative > positive else (POSITIVE, "positive")
    if not gap > ONE_SIDED:
        return None
    return fault("one_sided_gradients").above(
        evidence,
        name,
        ONE_SIDED,
        title=f"most gradients of {side} advantages are zeroed",
        limit=f"within {ONE_SIDED:g} of the other sign's share, {min(negative, positive):.3g}",
        fix=f"use loss_mode=grpo_guard, which centers the ratios{evidence.or_leave_bypass}; then " + _CLOSER,
        evidence={"zeroed_negative": negative, "zeroed_positive": positive},
    )


def growth_by_timestep(evidence: Evidence) -> Finding | None:
    """Return a finding if |Δ log p| of a timestep has grown to several times its start: the sides drift apart there."""
    ends = {
        time: (median(values[:FIRST_STEPS]), median(values[-FIRST_STEPS:]))
        for time, values in _by_timestep(evidence.history).items()
        if len(values) >= 2 * FIRST_STEPS
    }
    grown = {time: now / start for time, (start, now) in ends.items() if start > 0 and now > GROWTH * start}
    if not grown:
        return None

    worst, times = max(grown, key=lambda time: grown[time]), sorted(grown, key=float, reverse=True)
    metric = f"{BY_TIMESTEP}{worst}"
    return replace(
        fault("growth_by_timestep").finding,
        metric=metric,
        title=f"the mismatch has grown at timestep{'s' * (len(times) > 1)} {', '.join(times)}",
        value=grown[worst],
        limit=f"at most {GROWTH:g} times its first {FIRST_STEPS} values",
        evidence={f"t_{time}": ratio for time, ratio in sorted(grown.items())},
        **evidence.when(metric, lambda value: value > GROWTH * ends[worst][0]),
    )


# Rules on denoising steps; `judge` runs them if the log-probs are densities of a diffusion sampler.
DIFFUSION_RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    densities_contradict_means,
    step_divergence,
    one_sided_gradients,
    growth_by_timestep,
)
