"""Null for pictures: the exact KL of denoising steps between two policies that are known to be equal.

It contains the KL per dimension at each timestep value: the joint KL grows with D, so a null of one size serves other
sizes. Between timesteps it compares the error of the velocity, which depends little on σ.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollcorr.config.checks import in_one_line
from rollcorr.config.documents import load_json, open_input
from rollcorr.diagnostics.null.null_file import LARGEST_FILE, PICTURE_FORMAT
from rollcorr.diagnostics.null.origin import Origin
from rollcorr.diagnostics.null.picture_rows import Column, PictureRows
from rollcorr.run_directory.durable_files import write_text_durably
from rollcorr.run_directory.stored_run import BadInputError

PICTURE_VERSION = 1
# Fewest pictures of a null: fewer do not show how much pictures differ.
FEW_PICTURES = 16
# Number of pictures from which older measurements decay.
MOST_PICTURES = 64
# Ratio to the null's KL from which a later measurement has different weights.
ABOVE = 3.0
# Largest relative difference of equal timestep values.
SAME_TIMESTEP = 1e-3
# KL per dimension, nats, that float32 rounding of the means may cause.
LEAST_KL = 1e-12


class TimestepNoise(NamedTuple):
    """Noise of the denoising steps at one timestep.

    Attributes:
        timestep: value of the timestep; −1 if not recorded.
        steps: number of denoising steps.
        kl: mean KL per dimension, nats.
        scale: KL per dimension of a velocity with error 1, nats; NaN if unknown.
    """

    timestep: float
    steps: int
    kl: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class PictureNull:
    """Exact KL between two equal policies at each timestep.

    Attributes:
        name: name in verdicts.
        pictures: number of measured pictures.
        dimensions: median D of these pictures.
        cells: noise at each timestep value, from noise to data.
        origin: engines and models of the measurement.
        last_step: training step of the newest measurement; default 0, before the first step.
    """

    name: str
    pictures: int
    dimensions: int
    cells: tuple[TimestepNoise, ...]
    origin: Origin = field(default_factory=Origin)
    last_step: int = 0

    @classmethod
    def of(cls, rows: PictureRows, *, name: str, origin: Origin) -> PictureNull:
        """Compute the null of denoising steps.

        Args:
            rows: denoising steps of two equal policies.
            name: name in verdicts.
            origin: engines and models of the measurement.

        Raises:
            BadInputError: no step has an exact KL.
        """
        rows = rows.where(np.isfinite(rows.column("kl")))
        if not len(rows):
            raise BadInputError(
                f"{name}: no exact KL is recorded, so these pictures are no null; log exact_kl, or mean_distance and "
                "step_std, of each denoising step"
            )
        per_dimension, times = (
            rows.column("kl") / rows.column("dimensions"),
            np.nan_to_num(rows.column("timestep"), nan=-1),
        )
        cells = []
        for time in np.unique(times)[::-1]:
            at = times == time
            mean, scale = float(per_dimension[at].mean()), float(rows.kl_scale[at].mean())
            cells.append(TimestepNoise(float(time), int(at.sum()), mean, scale))
        pictures, size = len(np.unique(rows.column("picture"))), float(np.median(rows.column("dimensions")))
        return cls(name=name, pictures=pictures, dimensions=int(size), cells=tuple(cells), origin=origin)

    def expected(self, rows: PictureRows) -> Column:
        """Compute the joint KL of each denoising step due to noise, (n,) nats: proportional to its D."""
        times, cells = np.nan_to_num(rows.column("timestep"), nan=-1), np.array(self.cells)
        distance = np.abs(times[:, None] - cells[:, 0])
        known, _, kl, scale = cells[distance.argmin(1)].T

        # For an unknown timestep, use the velocity error of the nearest known one.
        near = distance.min(1) <= SAME_TIMESTEP * np.maximum(known, 1.0)
        ratio = np.where(near | ~np.isfinite(rows.kl_scale / scale), 1.0, rows.kl_scale / scale)
        return np.asarray(np.maximum(kl * ratio, LEAST_KL) * rows.column("dimensions"))

    def followed_by(self, later: PictureNull) -> PictureNull:
        """Return this null with a later measurement; older measurements decay, so that the null follows the policy.

        Raises:
            BadInputError: the KL of `later` is several times this null's KL, as for weights that did not arrive.
        """
        known = {cell.timestep: cell for cell in self.cells}
        both = [(known[cell.timestep].kl, cell.kl, cell.steps) for cell in later.cells if cell.timestep in known]
        before, now = (sum(max(pair[side], LEAST_KL) * pair[2] for pair in both) for side in (0, 1))
        if self.pictures >= FEW_PICTURES and both and now >= ABOVE * before:
            raise BadInputError(
                f"{later.name} has {now / before:.2g} times the exact KL of {self.name} at the same timesteps, so the "
                "weights may not be equal; look at the weight sync"
            )

        # Keep timesteps that were not measured again.
        factor = min(1.0, max(0, MOST_PICTURES - later.pictures) / self.pictures)
        for cell in later.cells:
            old = known.get(cell.timestep, cell._replace(steps=0))
            kept = round(factor * old.steps)
            kl = (kept * old.kl + cell.steps * cell.kl) / (kept + cell.steps)
            known[cell.timestep] = cell._replace(steps=kept + cell.steps, kl=kl)
        cells = tuple(known[time] for time in sorted(known, reverse=True))
        pictures = round(factor * self.pictures) + later.pictures
        return replace(self, pictures=pictures, cells=cells, last_step=later.last_step)

    @property
    def in_words(self) -> str:
        """Return its size, for a line on the console."""
        return f"exact KL {self.exact_kl:.2g} with equal weights, over {self.pictures:,} pictures"

    @property
    def exact_kl(self) -> float:
        """Return the mean exact KL of its steps, nats over all D."""
        _, steps, kl, _ = np.array(self.cells).T
        return float(kl @ steps / steps.sum() * self.dimensions)

    def remarks(self, origin: Origin) -> tuple[str, ...]:
        """Return the remarks of a verdict with this null: an engine that differs from the log's."""
        ours, theirs = self.origin.engine, origin.engine
        if not ours or set(theirs) <= set(ours):
            return ()
        return (f"{self.name} was measured with engine {', '.join(ours)}; this log has {', '.join(theirs)}",)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the null as JSON with an atomic write."""
        document = {"format": PICTURE_FORMAT, "version": PICTURE_VERSION, "pictures": self.pictures}
        document |= {"dimensions": self.dimensions, "last_step": self.last_step, "origin": asdict(self.origin)}
        cells = [{key: None if value != value else value for key, value in c._asdict().items()} for c in self.cells]
        write_text_durably(Path(path), json.dumps(document | {"timesteps": cells}, allow_nan=False) + "\n")


def read_picture_null(path: str | os.PathLike[str]) -> PictureNull | None:
    """Read a null of pictures; returns None if the file is missing or has a different format.

    Raises:
        BadInputError: the file is damaged, or a newer release wrote it.
    """
    path = Path(path)
    try:
        with open_input(path) as file:
            document: Any = load_json(file.read(LARGEST_FILE))
    except (OSError, ValueError):
        return None
    if not isinstance(document, dict) or document.get("format") != PICTURE_FORMAT:
        return None
    try:
        cells = [{key: np.nan if value is None else value for key, value in c.items()} for c in document["timesteps"]]
        if document["version"] != PICTURE_VERSION or not cells or not all(cell["kl"] >= 0 for cell in cells):
            raise ValueError(f"version {document['version']} with {len(cells)} timesteps")
        return PictureNull(
            name=path.name,
            pictures=int(document["pictures"]),
            dimensions=int(document["dimensions"]),
            last_step=int(document.get("last_step", 0)),
            cells=tuple(
                TimestepNoise(cell["timestep"], int(cell["steps"]), cell["kl"], cell["scale"]) for cell in cells
            ),
            origin=Origin(**{name: tuple(map(str, values)) for name, values in document["origin"].items()}),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"{path}: a damaged null of pictures ({in_one_line(error)}); measure it again") from error
