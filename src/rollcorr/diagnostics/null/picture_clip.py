"""Clip range ε of PPO above the noise of denoising steps in bypass mode, where the ratio is π_θ / μ.

Before any update log r = log π − log μ is noise with mean −KL / D and standard deviation √(2 KL) / D. A smaller ε clips
gradients that no update has moved.
"""

from __future__ import annotations

import math

import numpy as np

from rollcorr.diagnostics.null.picture_rows import PictureRows

# Common clip ranges, widest first.
CUSTOMARY = (1e-3, 1e-4, 1e-5)
# Largest share of steps clipped before the first update, and the quantile of |r − 1| below the advised ε: half of
# this share remains as a margin.
MOST_CLIPPED, KEPT = 0.05, 0.975


def clip_advice(rows: PictureRows) -> str:
    """Return a sentence on ε for denoising steps without a fault; empty without any finite log-ratio."""
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
