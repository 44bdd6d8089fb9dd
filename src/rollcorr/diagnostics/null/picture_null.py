"""A null for pictures: the exact KL of denoising steps between two policies that are known to be the same.

It holds the KL of each timestep value, per dimension: the joint KL grows with D, so a null of one size serves
another. Between timesteps the error of the velocity is compared, which depends little on σ.
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
# A null of fewer pictures does not know how much they differ.
FEW_PICTURES = 16
# Pictures from which older measurements lose weight.
MOST_PICTURES = 64
# Times the null's KL above which a later measurement is not one of equal weights.
ABOVE = 3.0
# Two timestep values are the same if they differ by this share of the larger one, or less.
SAME_TIMESTEP = 1e-3
# KL per dimension, nats, that rounding of the means in float32 may cause.
LEAST_KL = 1e-12


class TimestepNoise(NamedTuple):
    """Denoising steps at one timestep.

    Attributes:
        timestep: its value; −1 if none is recorded.
        steps: how many.
        kl: their mean KL per dimension, nats.
        scale: KL per dimension of a velocity that is off by 1; NaN if unknown.
    """

    timestep: float
    steps: int
    kl: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class PictureNull:
    """What two correct policies differ by at each timestep.

    Attributes:
        name: what verdicts call it.
        pictures: how many were measured.
        dimensions: D of these pictures, for the record.
        cells: one for each timestep value, from noise to data.
        origin: the engines and models behind it.
        last_step: the training step of the newest measurement; 0 before the first one.
    """

    name: str
    pictures: int
    dimensions: int
    cells: tuple[TimestepNoise, ...]
    origin: Origin = field(default_factory=Origin)
    last_step: int = 0

    @classmethod
    def of(cls, rows: PictureRows, *, name: str, origin: Origin) -> PictureNull:
        """The null of some denoising steps.

        Args:
            rows: of two policies that are the same.
            name: what verdicts call it.
            origin: the engines and models behind it.

        Raises:
            BadInputError: none of them has an exact KL.
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
        """The joint KL that each denoising step has by noise alone, (n,) nats: in proportion to its D."""
        times, cells = np.nan_to_num(rows.column("timestep"), nan=-1), np.array(self.cells)
        distance = np.abs(times[:, None] - cells[:, 0])
        known, _, kl, scale = cells[distance.argmin(1)].T

        # A timestep that the null lacks takes the error of the velocity from the nearest one that it has.
        near = distance.min(1) <= SAME_TIMESTEP * np.maximum(known, 1.0)
        ratio = np.where(near | ~np.isfinite(rows.kl_scale / scale), 1.0, rows.kl_scale / scale)
        return np.asarray(np.maximum(kl * ratio, LEAST_KL) * rows.column("dimensions"))

    def followed_by(self, later: PictureNull) -> PictureNull:
        """Return this null with a later measurement, in which older ones decay so that it follows the policy.

        Raises:
            BadInputError: the KL of `later` is several times this null's, as that of weights which did not arrive.
        """
        known = {cell.timestep: cell for cell in self.cells}
        both = [(known[cell.timestep].kl, cell.kl, cell.steps) for cell in later.cells if cell.timestep in known]
        before, now = (sum(max(pair[side], LEAST_KL) * pair[2] for pair in both) for side in (0, 1))
        if self.pictures >= FEW_PICTURES and both and now >= ABOVE * before:
            raise BadInputError(
                f"{later.name} has {now / before:.2g} times the exact KL of {self.name} at the same timesteps, so the "
                "weights may not be equal; look at the weight sync"
            )

        # A timestep that is not measured again stays as it is.
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
        """Mean exact KL of its steps, nats over all D."""
        _, steps, kl, _ = np.array(self.cells).T
        return float(kl @ steps / steps.sum() * self.dimensions)

    def remarks(self, origin: Origin) -> tuple[str, ...]:
        """Return what a verdict with this null mentions: another engine than the log's."""
        ours, theirs = self.origin.engine, origin.engine
        if not ours or set(theirs) <= set(ours):
            return ()
        return (f"{self.name} was measured with engine {', '.join(ours)}; this log has {', '.join(theirs)}",)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the null as JSON, whole or not at all."""
        document = {"format": PICTURE_FORMAT, "version": PICTURE_VERSION, "pictures": self.pictures}
        document |= {"dimensions": self.dimensions, "last_step": self.last_step, "origin": asdict(self.origin)}
        cells = [{key: None if value != value else value for key, value in c._asdict().items()} for c in self.cells]
        write_text_durably(Path(path), json.dumps(document | {"timesteps": cells}, allow_nan=False) + "\n")


def read_picture_null(path: str | os.PathLike[str]) -> PictureNull | None:
    """Read a null of pictures; None if there is no such file, or it is no null of pictures.

    Raises:
        BadInputError: it is damaged, or a newer release wrote it.
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
