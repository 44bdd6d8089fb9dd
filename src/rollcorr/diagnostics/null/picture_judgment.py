"""Verdict on pictures: the exact KL of their denoising steps against a null, in joint units at each timestep.

R is the KL over the null's KL at that timestep. Its course separates the causes: R grows from 1 with stale weights, is
large for some pictures with other prompts, and is large from the first step on with different guidance, which depends
on the prompt, or different precision, which does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.null.origin import Origin
from rollcorr.diagnostics.null.picture_densities import density_finding
from rollcorr.diagnostics.null.picture_null import ABOVE, FEW_PICTURES, LEAST_KL, PictureNull
from rollcorr.diagnostics.null.picture_rows import Column, PictureRows
from rollcorr.diagnostics.null.weight_judgment import WeightJudgment
from rollcorr.diagnostics.numbers import format_number
from rollcorr.run_directory.stored_run import BadInputError

# Growth of R since its start that counts as a rise, as for the metrics of language models.
RISE = 2.4
# Ratio of a picture to the median of its step that makes it an outlier; ordinary pictures stay below 2.
FAR = 8.0
# Numbers of the step before any update: trainers count from 0 or from 1.
FIRST_STEPS = (0, 1)
# Error of the velocity, whose size is about 1, beyond rounding of any precision; fp8 makes 0.05.
LARGE_ERROR = 0.25
# Limit of the standard deviation of log KL at one step and timestep: rounding has 0.15 at most, guidance 0.32.
SPREAD = 0.3
# Common clip ranges, widest first.
CUSTOMARY = (1e-3, 1e-4, 1e-5)
# Largest share of steps clipped before the first update, and the quantile of |r − 1| below the advised ε: half of
# this share remains as a margin.
MOST_CLIPPED, KEPT = 0.05, 0.975
MEASURE = (
    "measure a null of pictures (`rollcorr null --config FILE -o null.json`, or `rollcorr null LOG` on steps with "
    "fresh weights)"
)


def judge_pictures(rows: PictureRows, null: PictureNull | None) -> WeightJudgment:
    """Judge the policies behind denoising steps.

    Args:
        rows: denoising steps of a log.
        null: exact KL of two equal policies; None leaves the policies unjudged, unless the log itself shows that they
            differ.

    Returns:
        Findings with the name of the null, or the reason why the policies were not judged.
    """
    rows = _measured(rows)
    if not len(rows):
        sentence = "the policies are not judged: the exact KL is not recorded; record prev_sample_mean of both policies"
        return WeightJudgment(not_judged=(sentence,))
    usable = null is not None and null.pictures >= FEW_PICTURES
    findings = tuple(_findings(rows, null if usable else None))
    if null is not None and usable:
        return WeightJudgment(findings=findings, judged_against=null.name)
    mean = format_number(float(rows.column("kl").mean()))
    why = f"there is no null to compare an exact KL of {mean} nats with"
    if null is not None:
        why = f"{null.name} has {null.pictures} pictures, and {FEW_PICTURES} are needed"
    return WeightJudgment(findings=findings, not_judged=(f"the policies are not judged: {why}; {MEASURE}",))


def guarded_null(rows: PictureRows, *, name: str, origin: Origin, quantized: bool = False) -> PictureNull:
    """Return the null of denoising steps, after a check that they come from equal policies.

    Args:
        rows: denoising steps.
        name: name of the null in verdicts.
        origin: engines and models behind the steps.
        quantized: the sampler is declared as quantized and may differ by any size; default False.

    Raises:
        BadInputError: the steps have no exact KL, or visibly come from two policies.
    """
    null = PictureNull.of(rows, name=name, origin=origin)
    rows = _measured(rows)
    uneven = not quantized and _Course.of(rows, None).depends_on_prompts
    for finding in (*_findings(rows, None), *[fault("guidance_differs").finding] * uneven):
        raise BadInputError(f"these rollouts are no null: {finding}")
    return null


def _measured(rows: PictureRows) -> PictureRows:
    return rows.where(np.isfinite(rows.column("kl")) & (rows.column("dimensions") > 0))


@dataclass(frozen=True, kw_only=True)
class _Course:
    """R of each denoising step, and its course over the training steps.

    Attributes:
        ratio: R, (n,); without a null, relative to the first step.
        far: True on the steps of outlier pictures, (n,) bool.
        steps: training steps, rising, (s,); −1 if not recorded.
        medians: median R of each training step, (s,).
        ages: median age of the weights at each training step, updates, (s,); NaN if not recorded.
        error: median error of the velocity; NaN if unknown.
        spread: standard deviation of log KL within a step and timestep, without outlier pictures.
    """

    ratio: Column
    far: NDArray[np.bool_]
    steps: Column
    medians: Column
    ages: Column
    error: float
    spread: float

    @classmethod
    def of(cls, rows: PictureRows, null: PictureNull | None) -> _Course:
        """Compute R and its course from denoising steps."""
        of_step = np.nan_to_num(rows.column("step"), nan=-1)
        steps, index = np.unique(of_step, return_inverse=True)
        base = null or PictureNull.of(rows.where(index == 0), name="the first step", origin=Origin())
        ratio = np.maximum(rows.column("kl"), LEAST_KL * rows.column("dimensions")) / base.expected(rows)

        # Average over the steps of a picture: a single step may stand out by chance.
        medians = np.array([np.median(ratio[index == i]) for i in range(len(steps))])
        of_picture = np.unique(rows.column("picture"), return_inverse=True)[1]
        relative = np.bincount(of_picture, ratio / medians[index]) / np.bincount(of_picture)
        far = (relative > FAR)[of_picture]

        # Center within each step and timestep, so that the spread depends on neither.
        cells = np.unique(np.stack([of_step, rows.column("timestep")])[:, ~far], axis=1, return_inverse=True)[1]
        logs = np.log(np.maximum(ratio[~far], 1e-30))
        centered = logs - (np.bincount(cells, logs) / np.bincount(cells))[cells]
        error = np.sqrt(np.median(rows.column("kl") / rows.column("dimensions") / rows.kl_scale))
        age = of_step - 1 - rows.column("version")
        return cls(
            ratio=ratio,
            far=far,
            steps=steps,
            medians=medians,
            ages=np.array([np.median(age[index == i]) for i in range(len(steps))]),
            error=float(error),
            spread=float(centered.std()),
        )

    @property
    def depends_on_prompts(self) -> bool:
        """Return whether the mismatch is larger or more uneven than rounding of any precision makes it."""
        return self.error > LARGE_ERROR or self.spread > SPREAD

    @property
    def growth(self) -> float:
        """Return R of the last third of the steps over R of the first step; 1 with fewer than three steps."""
        if len(self.steps) < 3:
            return 1.0
        return float(np.median(self.medians[-(len(self.steps) // 3) :]) / self.medians[0])

    @property
    def growth_with_age(self) -> float:
        """Return R at the oldest weights over R at the youngest; 1 if fewer than two ages are recorded."""
        low, high = np.min(self.ages), np.max(self.ages)
        if not high > low:
            return 1.0
        old, young = (np.median(self.medians[self.ages == age]) for age in (high, low))
        return float(old / young)


def _findings(rows: PictureRows, null: PictureNull | None) -> Iterator[Finding]:
    """Yield the findings of the densities, of the course over the steps, and of the comparison with a null."""
    densities = density_finding(rows)
    if densities is not None:
        yield densities
    course = _Course.of(rows, null)
    times, ordinary = float(np.mean(course.ratio)), float(np.median(course.ratio))

    # Densities that differ act from the start, so they exclude a rise.
    rise = _find_rise(course)
    if rise is not None and densities is None:
        yield rise
    if densities is None and course.far.any():
        yield from _outlier_findings(course, rest_is_ordinary=null is not None and ordinary <= ABOVE)
    if null is None or not times > ABOVE:
        return
    expected = float(np.mean(null.expected(rows)))
    yield replace(
        fault("above_null").finding,
        metric="exact_kl_mean",
        title=f"the exact KL is {format_number(times)} times that of {null.name}",
        value=float(rows.column("kl").mean()),
        limit=f"below {ABOVE:g} times {format_number(expected)} nats, at these timesteps and this D",
        evidence={"exact_kl": float(rows.column("kl").mean()), "expected_kl": expected, "ratio": times},
    )
    if densities is None and rise is None and ordinary > ABOVE:
        yield from _steady_excess_finding(course)


def _find_rise(course: _Course) -> Finding | None:
    """Return the finding that R grew with the age of the weights or since the first step; None if it did not."""
    factor, code = course.growth_with_age, "stale_by_lag"
    if not factor > RISE:
        factor, code = course.growth, "frozen_sampler"
    if not min(factor, float(course.medians.max())) > RISE:
        return None  # also for a rise that ends at the noise of the null
    row, age = fault(code), format_number(float(np.nanmax(course.ages))) if code == "stale_by_lag" else ""
    first = next(int(s) for s, r in zip(course.steps, course.medians, strict=True) if r > RISE * course.medians[0])
    return replace(
        row.finding,
        metric="exact_kl_mean",
        title=row.title.format(age=age),
        value=factor,
        limit=f"at most {RISE:g} times the first step, at the same timesteps",
        confirm="compare a checksum of one parameter on both sides after a sync, or sync by hand: the KL falls back",
        first_step=first,
        confidence=1 - 1 / factor**2,
        evidence={"factor": factor},
    )


def _outlier_findings(course: _Course, *, rest_is_ordinary: bool) -> Iterator[Finding]:
    """Yield the finding of outlier pictures, and a note if the other pictures match the null."""
    share, largest = float(course.far.mean()), float(course.ratio.max())
    yield replace(
        fault("other_prompts").finding,
        metric="exact_kl_max",
        value=largest / float(np.median(course.ratio)),
        limit=f"at most {FAR:g} times the median of its step",
        row_share=share,
        confidence=0.9,
        evidence={"share": share, "largest": largest},
    )
    if rest_is_ordinary:
        yield replace(fault("ordinary_noise").finding, title="the other pictures are as in the null")


def _steady_excess_finding(course: _Course) -> Iterator[Finding]:
    """Yield guidance or precision as cause of a steady excess, unless old weights may explain it."""
    # An age of −1 means that none is recorded.
    fresh = course.steps[0] in FIRST_STEPS or not np.nanmax(course.ages, initial=-1)
    uneven = course.spread > SPREAD
    if not (fresh or uneven):
        return
    code = "guidance_differs" if course.depends_on_prompts else "precision_differs"
    yield replace(
        fault(code).finding,
        metric="exact_kl_mean",
        value=float(np.median(course.ratio)),
        limit=f"at most {ABOVE:g} times the null",
        first_step=int(course.steps[0]) if course.steps[0] >= 0 else None,
        confidence=0.9 if uneven or course.error < LARGE_ERROR / 2 else 0.7,
        evidence={"velocity_error": course.error, "spread_of_log_kl": course.spread},
    )


def clip_advice(rows: PictureRows) -> str:
    """Return a sentence on PPO's clip range ε in bypass mode; empty without any finite log-ratio.

    Before any update log r = log π − log μ is noise with mean −KL / D and standard deviation √(2 KL) / D. A smaller ε
    clips gradients that no update has moved.
    """
    deviation = np.abs(np.expm1(rows.column("train") - rows.column("rollout")))
    deviation = deviation[np.isfinite(deviation)]
    if not len(deviation):
        return ""

    # Round up to 1, 2 or 5 times a power of 10.
    needed = max(float(np.quantile(deviation, KEPT)), 1e-12)
    power = 10.0 ** math.floor(math.log10(needed))
    advised = next(step * power for step in (1, 2, 5, 10) if step * power >= needed)
    clip = next((clip for clip in CUSTOMARY if np.mean(deviation > clip) > MOST_CLIPPED), CUSTOMARY[-1])
    share = f"{np.mean(deviation > clip):.0%} of the steps is clipped before any update"
    return f"clip_ratio in bypass mode: at ε = {clip:.0e}, {share}; take {advised:.0e} or more".replace("e-0", "e-")
