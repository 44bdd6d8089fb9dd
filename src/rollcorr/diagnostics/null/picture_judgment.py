"""The verdict on pictures: the exact KL of their denoising steps against a null, in joint units at each timestep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rollcorr.config.finding import Finding
from rollcorr.diagnostics.faults import fault
from rollcorr.diagnostics.null.origin import Origin
from rollcorr.diagnostics.null.picture_null import FEW_PICTURES, PictureNull
from rollcorr.diagnostics.null.picture_rows import PictureRows
from rollcorr.diagnostics.null.weight_judgment import WeightJudgment
from rollcorr.diagnostics.numbers import format_number

ABOVE = 3.0
"""Times the null's exact KL above which the policies differ."""
MEASURE = (
    "measure a null of pictures (`rollcorr null --config FILE -o null.json`, or `rollcorr null LOG` on steps with "
    "fresh weights)"
)


def judge_pictures(rows: PictureRows, null: PictureNull | None) -> WeightJudgment:
    """Judge denoising steps.

    Args:
        rows: of a log.
        null: what two correct policies differ by; None leaves the weights unjudged.
    """
    rows = rows.where(np.isfinite(rows.column("kl")) & (rows.column("dimensions") > 0))
    if not len(rows):
        sentence = "the policies are not judged: the exact KL is not recorded; record prev_sample_mean of both policies"
        return WeightJudgment(not_judged=(sentence,))
    if null is None:
        mean = format_number(float(rows.column("kl").mean()))
        sentence = (
            f"the policies are not judged: there is no null to compare an exact KL of {mean} nats with; {MEASURE}"
        )
        return WeightJudgment(not_judged=(sentence,))
    few = () if null.pictures >= FEW_PICTURES else (_few(null),)
    return WeightJudgment(
        findings=tuple(_findings(rows, null)), judged_against="" if few else null.name, not_judged=few
    )


def _few(null: PictureNull) -> str:
    return (
        f"the policies are not judged: {null.name} has {null.pictures} pictures, and {FEW_PICTURES} are needed; measure "
        "more of them"
    )


def _findings(rows: PictureRows, null: PictureNull) -> Iterator[Finding]:
    """What the comparison with a null shows."""
    kl, expected = rows.column("kl"), null.expected(rows)
    times = float(kl.sum() / expected.sum())
    if not times > ABOVE:
        return
    yield replace(
        fault("above_null").finding,
        metric="exact_kl_mean",
        title=f"the exact KL is {format_number(times)} times that of {null.name}",
        value=float(kl.mean()),
        limit=f"below {ABOVE:g} times {format_number(float(expected.mean()))} nats, at these timesteps and this D",
        evidence={"exact_kl": float(kl.mean()), "expected_kl": float(expected.mean()), "ratio": times},
    )


def guarded_null(rows: PictureRows, *, name: str, origin: Origin) -> PictureNull:
    """Return the null of some denoising steps.

    Raises:
        BadInputError: they have no exact KL, or visibly two policies.
    """
    return PictureNull.of(rows, name=name, origin=origin)
