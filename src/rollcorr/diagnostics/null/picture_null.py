"""A null for pictures: the exact KL of denoising steps between two policies that are known to be the same.

It holds the KL of each timestep value, per dimension: the joint KL grows with D, so a null of one size serves
another. Between timesteps the error of the velocity is compared, which depends little on σ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
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
FEW_PICTURES = 16
"""A null of fewer pictures does not know how much they differ."""
SAME_TIMESTEP = 1e-3
"""Two timestep values are the same if they differ by this share of the larger one, or less."""
LEAST_KL = 1e-12
"""KL per dimension, nats, that rounding of the means in float32 may cause."""


class TimestepNoise(NamedTuple):
    """The KL at one timestep value.

    Attributes:
        timestep: the value; NaN where none is recorded.
        steps: denoising steps.
        kl: mean KL per dimension, nats.
        largest: of them.
        scale: KL per dimension of a velocity that is off by 1; NaN if unknown.
    """

    timestep: float
    steps: int
    kl: float
    largest: float
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
    """

    name: str
    pictures: int
    dimensions: int
    cells: tuple[TimestepNoise, ...]
    origin: Origin = field(default_factory=Origin)

    @classmethod
    def of(cls, rows: PictureRows, *, name: str, origin: Origin) -> PictureNull:
        """The null of some denoising steps.

        Raises:
            BadInputError: none of them has an exact KL.
        """
        rows = rows.where(np.isfinite(rows.column("kl")))
        if not len(rows):
            raise BadInputError(
                f"{name}: no exact KL is recorded, so these pictures are no null; log exact_kl, or mean_distance and "
                "step_std, of each denoising step"
            )
        per_dimension, times, scale = kl_per_dimension(rows), rows.column("timestep"), rows.kl_scale
        cells = []
        for time in np.unique(times)[::-1]:
            at = np.isnan(times) if np.isnan(time) else times == time
            values = per_dimension[at]
            cells.append(
                TimestepNoise(
                    float(time), len(values), float(values.mean()), float(values.max()), float(scale[at].mean())
                )
            )
        pictures, size = len(np.unique(rows.column("picture"))), float(np.median(rows.column("dimensions")))
        return cls(name=name, pictures=pictures, dimensions=int(size), cells=tuple(cells), origin=origin)

    def merge(self, later: PictureNull) -> PictureNull:
        """Return the null of both measurements together."""
        found = {cell.timestep: cell for cell in self.cells}
        for cell in later.cells:
            own = found.get(cell.timestep, cell._replace(steps=0))
            count = own.steps + cell.steps
            kl = (own.kl * own.steps + cell.kl * cell.steps) / count
            found[cell.timestep] = cell._replace(steps=count, kl=kl, largest=max(own.largest, cell.largest))
        return PictureNull(
            name=self.name,
            pictures=self.pictures + later.pictures,
            dimensions=self.dimensions,
            cells=tuple(sorted(found.values(), reverse=True)),
            origin=self.origin.merge(later.origin),
        )

    def expected(self, rows: PictureRows) -> Column:
        """The joint KL that each denoising step has by noise alone, (n,) nats: in proportion to its D."""
        times, scale = rows.column("timestep"), rows.kl_scale
        known = np.array([cell.timestep for cell in self.cells])
        distance = np.abs(np.nan_to_num(times, nan=-1.0)[:, None] - np.nan_to_num(known, nan=-1.0))
        nearest = distance.argmin(1)
        kl, own_scale = (np.array([getattr(cell, name) for cell in self.cells])[nearest] for name in ("kl", "scale"))

        # A timestep that the null lacks takes the error of the velocity from the nearest one that it has.
        near = distance.min(1) <= SAME_TIMESTEP * np.maximum(np.abs(known[nearest]), 1.0)
        ratio = np.where(near | ~np.isfinite(scale / own_scale), 1.0, scale / own_scale)
        return np.asarray(np.maximum(kl * ratio, LEAST_KL) * rows.column("dimensions"))

    @property
    def exact_kl(self) -> float:
        """Mean exact KL of its steps, nats over all D."""
        counts = np.array([cell.steps for cell in self.cells])
        return float(np.array([cell.kl for cell in self.cells]) @ counts / counts.sum() * self.dimensions)

    def remarks(self, origin: Origin) -> tuple[str, ...]:
        """Return what a verdict with this null mentions: another engine or model than the log's."""
        found = []
        for what in ("engine", "model"):
            ours, theirs = getattr(self.origin, what), getattr(origin, what)
            if ours and set(theirs) - set(ours):
                named = f"{', '.join(ours)}; this log has {', '.join(theirs)}"
                found.append(f"{self.name} was measured with {what} {named}")
        return tuple(found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the null as JSON, whole or not at all."""
        document = {"format": PICTURE_FORMAT, "version": PICTURE_VERSION, "pictures": self.pictures}
        document |= {"dimensions": self.dimensions, "origin": asdict(self.origin)}
        cells = [{key: None if value != value else value for key, value in c._asdict().items()} for c in self.cells]
        write_text_durably(Path(path), json.dumps(document | {"timesteps": cells}, allow_nan=False) + "\n")


def kl_per_dimension(rows: PictureRows) -> Column:
    """The exact KL of each denoising step over D, (n,) nats."""
    return np.asarray(rows.column("kl") / rows.column("dimensions"))


def is_picture_null(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is a null of pictures; False where it cannot be read."""
    try:
        with open_input(Path(path)) as file:
            document = load_json(file.read(LARGEST_FILE))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("format") == PICTURE_FORMAT


def read_picture_null(path: str | os.PathLike[str]) -> PictureNull:
    """Read a null of pictures.

    Raises:
        BadInputError: there is no such file, it is damaged, or a newer release wrote it.
    """
    path = Path(path)
    try:
        with open_input(path) as file:
            document: Mapping[str, Any] = load_json(file.read(LARGEST_FILE))
        if document["format"] != PICTURE_FORMAT or document["version"] != PICTURE_VERSION:
            raise ValueError(f"format {document['format']}, version {document['version']}")
        return _from_document(document, path.name)
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror or error}; `rollcorr null LOG -o FILE` writes one") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"{path}: a damaged null of pictures ({in_one_line(error)}); measure it again") from error


_KL = ("kl", "largest", "scale")


def _from_document(document: Mapping[str, Any], name: str) -> PictureNull:
    found = [{key: np.nan if value is None else value for key, value in c.items()} for c in document["timesteps"]]
    cells = [TimestepNoise(cell["timestep"], int(cell["steps"]), *(cell[name] for name in _KL)) for cell in found]
    numbers = np.array(cells, dtype=np.float64)
    if not len(cells) or not np.isfinite(numbers[:, 1:4]).all():
        raise ValueError("its KL is not finite")
    origin = {name: tuple(map(str, values)) for name, values in document["origin"].items()}
    return PictureNull(
        name=name,
        pictures=int(document["pictures"]),
        dimensions=int(document["dimensions"]),
        cells=tuple(cells),
        origin=Origin(**origin),
    )
