"""Null of a log: the mismatch of two equal policies, measured once and stored as a readable JSON file.

A null is the mismatch profile of rollouts whose two sides are known to be the same policy: a log of the first steps of
a correct run, or rollouts that an engine generated for it (`rollcorr.engines.measure_null`). A log is judged against a
null of the same engine, sampling settings and vocabulary; any other null is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollcorr.config.checks import in_one_line
from rollcorr.config.documents import load_json, open_input
from rollcorr.diagnostics.null.mismatch_profile import CELL, FIELDS, MismatchProfile, RowTable
from rollcorr.diagnostics.null.origin import Origin
from rollcorr.diagnostics.null.token_share import STEP_IDS, TokenShare, TokenSums
from rollcorr.run_directory.durable_files import write_text_durably
from rollcorr.run_directory.stored_run import BadInputError

FORMAT, VERSION = "rollcorr-null", 2
PICTURE_FORMAT = "rollcorr-picture-null"
LARGEST_FILE = 1 << 26
"""Largest size of a null file, bytes; this release writes 2 MB at most."""
FEW_TOKENS = 1000
"""Fewest tokens of a null: smaller ones do not measure how often rare events occur."""

Kind = Literal["log", "engine", "first steps"]
Sides = Literal["run", "engine", "trainer"]
_SIDES_IN_WORDS: Mapping[Sides, str] = {
    "run": "the engine with the trainer",
    "engine": "the engine with itself",
    "trainer": "the trainer with itself",
}


class NullPart(NamedTuple):
    """One measurement of a null.

    Attributes:
        first_step: first training step of its rollouts; None if not recorded.
        last_step: last training step of its rollouts; None if not recorded.
        rows: number of rows.
        tokens: number of valid tokens.
        k3: mean k3, nats per token.
    """

    first_step: int | None
    last_step: int | None
    rows: int
    tokens: int
    k3: float


class NullMismatchError(BadInputError):
    """Raised for a null that does not match the log: engine, settings, vocabulary or sides differ."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MismatchNull:
    """Mismatch of two equal policies.

    Attributes:
        name: name in a verdict: the file's name, or "steps 1 to 5 of this run".
        kind: source of the measurement: a log, an engine, or the first steps of the judged log.
        profile: the mismatch.
        share: share of Var(d) explained by the token id, from exact ids; a file contains sums of
            ids folded to 1,024.
        origin: engines, versions, models and sampling settings of the measurement.
        sides: the two compared log-probs, as in `rollcorr null --sides`; default "run".
        sample: d of the valid tokens of some rows, nats, (tokens,) each; at most 131,072 values per measurement.
        engine_precision: precision of the engine's weights as declared by the user, for example "int4"; default "".
        unvetted: reason why equal weights could not be verified; "" if the log-probs were judged.
        doubted: property of the log-probs that is rare in noise and common for different weights; "" without any.
        measured: measurements that add up to this null.
    """

    name: str
    kind: Kind
    profile: MismatchProfile
    share: TokenShare
    origin: Origin = field(default_factory=Origin)
    sides: Sides = "run"
    sample: tuple[NDArray[np.float64], ...] = ()
    engine_precision: str = ""
    unvetted: str = ""
    doubted: str = ""
    measured: tuple[NullPart, ...] = ()

    @property
    def label(self) -> str:
        """Return the name in a verdict, with the marks that the verdict has to mention."""
        marks = (self.engine_precision, self.unvetted and "unvetted", self.doubted and "doubtful")
        return f"{self.name} ({', '.join(filter(None, marks))})" if any(marks) else self.name

    @property
    def in_words(self) -> str:
        """Return its size, for a line on the console."""
        return f"k3 {self.profile.k3:.2g} per token with equal weights, over {self.profile.tokens:,} tokens"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return the remarks of every verdict with this null."""
        return tuple(
            f"{self.name} {text}"
            for text in (
                self.engine_precision and f"is of an engine that was declared {self.engine_precision}",
                self.unvetted and f"is unvetted: {self.unvetted}",
                self.doubted and f"is doubtful: {self.doubted}",
            )
            if text
        )

    def merge(self, later: MismatchNull) -> MismatchNull:
        """Return the null of both measurements, with the rows of `later` appended.

        The shares explained by the token id are pooled by tokens, because files do not contain exact ids.

        Raises:
            NullMismatchError: engines, sampling settings, vocabularies, sides or declared precisions differ.
        """
        self.check_origin(later.origin, largest_id=later.profile.ids.largest)
        for what, ours, theirs in (
            ("sides", self.sides, later.sides),
            ("engine precision", self.engine_precision, later.engine_precision),
        ):
            if ours != theirs:
                raise NullMismatchError(
                    f"{self.name} and {later.name} have other {what}: {ours or 'none'} and {theirs or 'none'}; only "
                    "nulls of one kind add up"
                )
        rows = later.profile.rows
        behind = int(self.profile.rows.index.max(initial=-1)) // rows.stride * rows.stride + rows.stride
        shifted = replace(later.profile.folded(), rows=replace(rows, index=rows.index + behind))
        return replace(
            self,
            profile=self.profile.folded().merge(shifted),
            share=_pool_shares(self.share, later.share),
            origin=self.origin.merge(later.origin),
            sample=(*self.sample, *later.sample),
            unvetted=self.unvetted and later.unvetted,
            doubted=self.doubted or later.doubted,
            measured=(*self.measured, *later.measured),
        )

    def check_sides(self) -> None:
        """Check that the null compares the same sides as a run: the engine with the trainer.

        Raises:
            NullMismatchError: it compares one side with itself, which has less noise than a run.
        """
        if self.sides in ("engine", "trainer"):
            raise NullMismatchError(
                f"{self.name} was measured with --sides {self.sides}: it compares {_SIDES_IN_WORDS[self.sides]}, and a "
                f"run compares {_SIDES_IN_WORDS['run']}, which shows more; measure a null with --sides run"
            )

    def check_origin(self, origin: Origin, *, largest_id: int = -1) -> tuple[str, ...]:
        """Check that a log may be compared with this null.

        Args:
            origin: origin recorded by the log.
            largest_id: largest token id of the log; default −1, if it records none.

        Returns:
            Remarks on differences and missing records that do not forbid the comparison.

        Raises:
            NullMismatchError: engine, sampling settings or vocabulary differ, or `check_sides` raises it.
        """
        self.check_sides()
        for what in ("engine", "sampling"):
            ours, theirs = set(getattr(self.origin, what)), set(getattr(origin, what))
            if ours and theirs - ours:
                raise NullMismatchError(
                    f"{self.name} was measured with {what} {', '.join(sorted(ours))}, and the log has "
                    f"{', '.join(sorted(theirs - ours))}; measure a null with the settings of this log"
                )
        own_largest = self.profile.ids.largest
        if min(largest_id, own_largest) >= 0 and self.profile.tokens >= FEW_TOKENS and largest_id > 2 * own_largest + 1:
            raise NullMismatchError(
                f"{self.name} has token ids up to {own_largest:,}, and the log up to {largest_id:,}: another "
                "vocabulary; measure a null with the model of this log"
            )

        remarks = list(self.remarks)
        for what, word in (("engine_version", "engine version"), ("model", "model")):
            ours, theirs = set(getattr(self.origin, what)), set(getattr(origin, what))
            if ours and theirs - ours:
                named = f"{', '.join(sorted(ours))}; this log has {', '.join(sorted(theirs - ours))}"
                remarks.append(f"{self.name} was measured with {word} {named}")
        unknown = [
            word
            for what, word in (("engine", "engine"), ("sampling", "sampling settings"))
            if not (getattr(self.origin, what) and getattr(origin, what))
        ]
        if unknown:
            remarks.append(f"whether {self.name} has the {' and the '.join(unknown)} of this log is not recorded")
        return tuple(remarks)

    def to_json(self) -> str:
        """Return the null as a JSON document, with the readable part first."""
        profile = self.profile
        document = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "sides": self.sides,
            "origin": {
                **asdict(self.origin),
                "sampling": [json.loads(text) for text in self.origin.sampling],
            },
            "engine_precision": self.engine_precision,
            "unvetted": self.unvetted,
            "doubted": self.doubted,
            "measured": [part._asdict() for part in self.measured],
            "counts": {"rows": profile.row_count, "tokens": profile.tokens, "missing": profile.missing},
            "summary": {"k3": profile.k3, "mean": profile.mean, "std": profile.std},
            "token_id": {**self.share._asdict(), "largest": profile.ids.largest},
            "profile": {
                "cells": dict(zip(CELL, profile.cells.tolist(), strict=True)),
                "sizes": profile.sizes.tolist(),
                "ids": profile.ids.folded().sums.tolist(),
                "rows": {
                    "stride": profile.rows.stride,
                    "index": profile.rows.index.tolist(),
                    **{name: _rounded(profile.rows.column(name)) for name in FIELDS},
                },
            },
            "sample": [_rounded(row) for row in self.sample],
        }

        # Numbers that are not finite become null.
        finite = json.loads(json.dumps(document), parse_constant=lambda name: None)
        return json.dumps(finite, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the null with an atomic write."""
        write_text_durably(Path(path), self.to_json() + "\n")


def read_null(path: str | os.PathLike[str]) -> MismatchNull:
    """Read a null file.

    Raises:
        BadInputError: the file is missing, contains no null, is damaged, or was written by a newer release.
    """
    path = Path(path)
    try:
        with open_input(path) as file:
            document = load_json(file.read(LARGEST_FILE))  # a longer file is cut, and then fails to parse
    except OSError as error:
        raise BadInputError(
            f"{path}: {error.strerror or error}; `rollcorr null LOG -o {path.name}` writes one"
        ) from error
    except ValueError as error:
        raise BadInputError(f"{path}: no JSON ({in_one_line(error)})") from error
    if isinstance(document, dict) and document.get("format") == PICTURE_FORMAT:
        raise BadInputError(f"{path}: a null of pictures; only `rollcorr check` on a log of pictures reads it")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadInputError(f"{path}: no null; `rollcorr null LOG -o FILE` writes one")
    if document.get("version") != VERSION:
        raise BadInputError(
            f"{path}: version {document.get('version')!r} of the format, and this release reads {VERSION}; "
            "measure it again with `rollcorr null`"
        )
    try:
        return _from_document(document, path.name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(f"{path}: a damaged null ({in_one_line(error)}); measure it again") from error


def _from_document(document: Mapping[str, Any], name: str) -> MismatchNull:
    stored, empty = document["profile"], MismatchProfile()
    token_id, origin = document["token_id"], document["origin"]
    rows = stored["rows"]
    profile = MismatchProfile(
        cells=_array([stored["cells"][key] for key in CELL], empty.cells.shape),
        sizes=_array(stored["sizes"], empty.sizes.shape),
        row_count=int(document["counts"]["rows"]),
        ids=TokenSums(_array(stored["ids"], (3, None)), int(token_id["largest"]), STEP_IDS),
        rows=RowTable(
            int(rows["stride"]),
            np.asarray(rows["index"], dtype=np.int64),
            _array(
                list(zip(*(rows[key] for key in FIELDS), strict=True)) or np.zeros((0, len(FIELDS))),
                (None, len(FIELDS)),
            ),
        ),
        missing=int(document["counts"]["missing"]),
    )
    texts = {f.name: tuple(map(str, origin[f.name])) for f in fields(Origin) if f.name != "sampling"}
    settings = tuple(json.dumps(entry, sort_keys=True) for entry in origin["sampling"])
    kind: Kind = "engine" if document["kind"] == "engine" else "log"
    sides: Sides = document["sides"]
    if sides not in _SIDES_IN_WORDS:
        raise ValueError(f"sides {sides!r} is none of {', '.join(_SIDES_IN_WORDS)}")
    return MismatchNull(
        name=name,
        kind=kind,
        profile=profile,
        share=TokenShare._make(np.nan if token_id[key] is None else token_id[key] for key in TokenShare._fields),
        origin=Origin(**texts, sampling=settings),
        sides=sides,
        sample=tuple(_array(row, (None,)) for row in document["sample"]),
        measured=tuple(NullPart(**part) for part in document["measured"]),
        **{name: str(document[name]) for name in ("engine_precision", "unvetted", "doubted")},
    )


def _pool_shares(one: TokenShare, other: TokenShare) -> TokenShare:
    """Return the share of two samples together, from their variances weighted by tokens."""
    if not (one.tokens and other.tokens):
        return one if one.tokens else other
    tokens = one.tokens + other.tokens
    between, variance = (
        (own * one.tokens + their * other.tokens) / tokens
        for own, their in ((one.between, other.between), (one.variance, other.variance))
    )
    error = math.hypot(one.error * one.tokens, other.error * other.tokens) / tokens
    return TokenShare(between / variance, error, between, variance, tokens, max(one.ids, other.ids))


def _array(values: Any, shape: tuple[int | None, ...]) -> NDArray[np.float64]:  # noqa: ANN401 (from JSON)
    array = np.asarray(values, dtype=np.float64)
    fits = array.ndim == len(shape) and all(b is None or a == b for a, b in zip(array.shape, shape, strict=False))
    if not fits or not np.isfinite(array).all():
        raise ValueError(f"an array of shape {array.shape} where {shape} finite numbers belong")
    return array


def _rounded(values: NDArray[np.float64]) -> list[float]:
    """Return the numbers rounded to six digits, the precision of d."""
    return [float(f"{value:.6g}") for value in values.tolist()]
