"""The clip ε of PPO that the noise of denoising steps allows in bypass mode, where the ratio is π_θ / μ.

Before any update log r = log π − log μ is noise: of mean −KL / D and deviation √(2 KL) / D. A smaller ε stops gradients
that no update has moved.
"""

from __future__ import annotations

import math

import numpy as np

from rollcorr.diagnostics.null.picture_rows import PictureRows
from rollcorr.diagnostics.numbers import format_number

CUSTOMARY = (1e-3, 1e-4, 1e-5)
"""Clips in use, from the widest."""
MOST_CLIPPED = 0.05
"""Share of the steps that may be clipped before the first update."""
KEPT = 0.975
"""Quantile of |r − 1| that the advised ε lies above: half of the allowed share is left to chance."""


def clip_advice(rows: PictureRows) -> str:
    """Return a sentence on ε for steps without a fault; empty without any."""
    deviation = np.abs(np.expm1(rows.column("train") - rows.column("rollout")))
    deviation = deviation[np.isfinite(deviation)]
    if not len(deviation):
        return ""

    # Round up to 1, 2 or 5 times a power of 10.
    needed = max(float(np.quantile(deviation, KEPT)), 1e-12)
    power = 10.0 ** math.floor(math.log10(needed))
    advised = next(step * power for step in (1, 2, 5, 10) if step * power >= needed)
    shares = {clip: float(np.mean(deviation > clip)) for clip in CUSTOMARY}
    clipped = next((clip for clip, share in shares.items() if share > MOST_CLIPPED), CUSTOMARY[-1])
    share = f"{shares[clipped]:.0%} of the steps is clipped before any update"
    return f"clip_ratio in bypass mode: at ε = {clipped:.0e}, {share}; take {format_number(advised)} or more"
