"""The verdict on pictures: the exact KL of their denoising steps against a null, in joint units at each timestep.

R is the KL over the null's at that timestep. What R does tells the causes apart: it grows from 1 with stale weights, is
large for some pictures with other prompts, and from the first step on with guidance, which depends on the prompt, or
with another precision, which does not.
"""

from __future__ import annotations

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

# Times its start that R must reach to be a rise, as of the metrics of language models.
RISE = 2.4
# Times the median of its step from which a picture is far above the rest; ordinary ones stay below 2.
FAR = 8.0
# Largest number of a step that no update came before.
FIRST_STEP = 1
# Error of the velocity, whose size is about 1, that no precision makes; fp8 makes 0.05.
LARGE_ERROR = 0.25
# Standard deviation of log KL at one step and timestep: noise of any precision has 0.15 at most, guidance 0.32.
SPREAD = 0.3
MEASURE = (
    "measure a null of pictures (`rollcorr null --config FILE -o null.json`, or `rollcorr null LOG` on steps with "
    "fresh weights)"
)


def judge_pictures(rows: PictureRows, null: PictureNull | None) -> WeightJudgment:
    """Judge denoising steps.

    Args:
        rows: of a log.
        null: what two correct policies differ by; None leaves the policies unjudged, unless the log itself shows that
            they differ.
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
    """Return the null of some denoising steps; a sampler that is declared as quantized may differ by any size.

    Raises:
        BadInputError: they have no exact KL, or visibly two policies.
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
    """R of each denoising step, and its course.

    Attributes:
        ratio: R, (n,); without a null in units of the first step.
        far: the pictures far above the others of their step, (n,) bool.
        steps: the training steps, rising; −1 without a record.
        medians: R of the ordinary pictures of each.
        ages: the age of the weights at each, updates; NaN without a record.
        error: error of the velocity, the median; NaN if unknown.
        spread: standard deviation of log KL within a step and timestep, without pictures far above.
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
        """The course of some denoising steps."""
        of_step = np.nan_to_num(rows.column("step"), nan=-1)
        steps, index = np.unique(of_step, return_inverse=True)
        base = null or PictureNull.of(rows.where(index == 0), name="the first step", origin=Origin())
        ratio = np.maximum(rows.column("kl"), LEAST_KL * rows.column("dimensions")) / base.expected(rows)

        # One picture is far above the rest if all of its steps together are.
        medians = np.array([np.median(ratio[index == i]) for i in range(len(steps))])
        of_picture = np.unique(rows.column("picture"), return_inverse=True)[1]
        relative = np.bincount(of_picture, ratio / medians[index]) / np.bincount(of_picture)
        far = (relative > FAR)[of_picture]

        # What is left within a step and timestep does not depend on either.
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
        """Whether the mismatch is larger or more uneven than any precision makes it."""
        return self.error > LARGE_ERROR or self.spread > SPREAD

    @property
    def starts_before_updates(self) -> bool:
        """Whether the first step of a training run is among the steps."""
        return bool(self.steps[0] in (0, FIRST_STEP))

    @property
    def growth(self) -> float:
        """R of the last third of the steps over that of the first one; 1 if there are fewer than three."""
        if len(self.steps) < 3:
            return 1.0
        return float(np.median(self.medians[-(len(self.steps) // 3) :]) / self.medians[0])

    @property
    def growth_with_age(self) -> float:
        """R at the oldest weights over R at the youngest; 1 if one age, or none, is recorded."""
        low, high = np.min(self.ages), np.max(self.ages)
        if not high > low:
            return 1.0
        old, young = (np.median(self.medians[self.ages == age]) for age in (high, low))
        return float(old / young)


def _findings(rows: PictureRows, null: PictureNull | None) -> Iterator[Finding]:
    """What the densities, the course over the steps and the comparison with a null show."""
    densities = density_finding(rows)
    if densities is not None:
        yield densities
    course = _Course.of(rows, null)
    times, ordinary = float(np.mean(course.ratio)), float(np.median(course.ratio))

    # The steps of a rise are not those of one cause that acts from the start.
    rise = _rise(course)
    if rise is not None and densities is None:
        yield rise
    if densities is None and course.far.any():
        yield from _of_some_pictures(course, rest_is_ordinary=null is not None and ordinary <= ABOVE)
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
        yield from _from_the_start(course)


def _rise(course: _Course) -> Finding | None:
    """The mismatch has grown: with the recorded age of the weights, or since the first step."""
    factor, code = course.growth_with_age, "stale_by_lag"
    if not factor > RISE:
        factor, code = course.growth, "frozen_sampler"
    if not min(factor, float(course.medians.max())) > RISE:
        return None  # also one that ends at the noise of the null
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


def _of_some_pictures(course: _Course, *, rest_is_ordinary: bool) -> Iterator[Finding]:
    """Some pictures are far above the others, which are as in the null or not."""
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


def _from_the_start(course: _Course) -> Iterator[Finding]:
    """The cause of an excess that does not grow: guidance or precision, unless old weights may be behind it."""
    fresh = course.starts_before_updates or not np.nanmax(course.ages, initial=-1)
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
