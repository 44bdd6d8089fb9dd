"""Place of an excess over a null: values of one axis that carry it, while all other tokens match the null.

One half of the log chooses the values of an axis, and the other half measures their share of the excess, so values
chosen by chance have no share. This share is compared with the share of noise that the null predicts at the same
probabilities: improbable tokens always differ by more, and are no place by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.excess_tokens import FEWEST, ExcessTokens, Floats, Ints

MOST = 0.8
"""Smallest share of the excess that a place carries."""
CHOSEN = 0.9
"""Share of the excess that the chosen values carry in the half that chose them."""
ORDINARY = 1.5
"""Ratio of k3 to the null's up to which the other tokens match the null."""
NARROW = 0.9
"""Largest share of the noise that a place has."""
SHOWN = 5
"""Largest number of values of a place in a sentence."""
EXACT = 64
"""Positions below this are separate values; later ones are binned by eighths of an octave."""
ORDERED = ("from_end", "turn", "prompt_length", "positions", "context_length")
AXES: Mapping[str, str] = {
    "from_end": "distance to the last token",
    "turn": "turn",
    "prompt_length": "prompt length",
    "positions": "position",
    "context_length": "tokens of context",
    "seen": "id seen before",
    "ids": "token id",
    "step": "step",
    "version": "version of the weights",
    "probability": "log-prob, in half nats",
    "rows": "row",
}
"""Axis of a place → its name in findings."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Values of one axis that carry most of an excess.

    Attributes:
        axis: one of `AXES`.
        values: sorted values on this axis, (v,).
        share: share of the excess that they carry; for chosen values, measured on tokens that did not choose them.
        of_noise: share of the null's noise that they carry.
        rest: ratio of k3 to the null's on the other tokens.
        tokens: True on the tokens of the place, (n,).
    """

    axis: str
    values: Ints
    share: float
    of_noise: float
    rest: float
    tokens: NDArray[np.bool_]

    @property
    def whole(self) -> bool:
        """Return whether the other tokens match the null."""
        return self.rest <= ORDINARY

    @property
    def stretches(self) -> list[list[int]]:
        """Return the values as inclusive ranges [first, last] without a gap."""
        breaks = np.flatnonzero(np.diff(self.values) > 1) + 1
        return [[int(part[0]), int(part[-1])] for part in np.split(self.values, breaks)]

    @property
    def where(self) -> dict[str, list[int] | list[list[int]]]:
        """Return the place for programs: lists of rows and ids, `stretches` of all other axes."""
        listed = self.axis in ("rows", "ids")
        return {self.axis: self.values.tolist() if listed else self.stretches}

    def __str__(self) -> str:
        return f"{place_in_words({self.axis: self.stretches})}: {min(self.share, 1):.0%} of the excess"


def place_in_words(where: Mapping[str, list[int] | list[list[int]]]) -> str:
    """Return each axis of a place with its first values, as in `Finding.where`."""
    words = []
    for axis, values in where.items():
        ends = [(value, value) if isinstance(value, int) else (value[0], value[-1]) for value in values]
        shown = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in ends[:SHOWN])
        more = f" and {len(ends) - SHOWN} more" if len(ends) > SHOWN else ""
        words.append(f"{AXES.get(axis, axis)} {shown}{more}")
    return ", ".join(words)


def places(tokens: ExcessTokens) -> list[Place]:
    """Return the places that carry `MOST` of the excess.

    Places whose other tokens match the null come first, then the densest: most excess relative to noise.
    """
    if len(tokens) < FEWEST:
        return []
    every = (place for axis in AXES for place in _places_on_axis(tokens, axis))
    found = [place for place in every if place.share >= MOST and place.of_noise <= NARROW]
    return sorted(found, key=lambda place: (not place.whole, place.of_noise / place.share))


def _places_on_axis(tokens: ExcessTokens, axis: str) -> Iterator[Place]:
    """Yield the places on an axis: values before or after a cut, and the densest values."""
    values = _axis_values(tokens, axis)
    if values is None or values.min() == values.max():
        return
    of, number = np.unique(values, return_inverse=True)
    number = number.reshape(-1).astype(np.int64)
    excess, noise = tokens.k3 - tokens.noise, tokens.noise
    if axis in ORDERED:
        first, last = _count_ordinary(number, tokens), len(of) - 1 - _count_ordinary(len(of) - 1 - number, tokens)
        for inside in (number >= first, number <= last, (number >= first) & (number <= last)):
            yield _measure_place(tokens, axis, values, inside, inside)

    # Half of the rows choose the values, and the other half measures them. For the axis of rows, positions are split.
    half = (tokens.places["positions" if axis == "rows" else "rows"] * 0x9E3779B1 >> 7) % 2 == 0
    elsewhere = np.zeros(len(number), dtype=np.bool_)
    for own in (half, ~half):
        elsewhere |= ~own & np.isin(number, _densest_values(number[own], excess[own], noise[own], len(of)))
    inside = np.isin(number, _densest_values(number, excess, noise, len(of)))
    yield _measure_place(tokens, axis, values, inside, elsewhere)


def _count_ordinary(number: Ints, tokens: ExcessTokens) -> int:
    """Return how many of the lowest values, pooled, match the null."""
    k3, noise = (np.cumsum(np.bincount(number, x)) for x in (tokens.k3, tokens.noise))
    return int(np.flatnonzero(k3 <= ORDINARY * noise).max(initial=-1)) + 1


def _measure_place(
    tokens: ExcessTokens, axis: str, values: Ints, inside: NDArray[np.bool_], weighed: NDArray[np.bool_]
) -> Place:
    """Return the place of the tokens `inside`, with its share of the excess measured on the tokens `weighed`."""
    excess, noise = tokens.k3 - tokens.noise, tokens.noise
    return Place(
        axis=axis,
        values=np.unique(values[inside]),
        share=float(excess[weighed].sum() / excess.sum()),
        of_noise=max(float(noise[of].sum() / noise.sum()) for of in (inside, weighed)),
        rest=float(tokens.k3[~inside].sum() / max(noise[~inside].sum(), 1e-12)),
        tokens=inside,
    )


def _densest_values(number: Ints, excess: Floats, noise: Floats, size: int) -> Ints:
    """Return the indices of the densest values that carry `CHOSEN` of the excess."""
    carried, due = np.bincount(number, excess, size), np.bincount(number, noise, size)
    order = np.argsort(-carried / (due + max(due.sum(), 1e-12) / (10 * size)))
    running = np.cumsum(carried[order])
    return order[: int(np.searchsorted(running, CHOSEN * carried.sum())) + 1]


def _axis_values(tokens: ExcessTokens, axis: str) -> Ints | None:
    """Return each token's value on an axis, with coarse bins for distant positions; None if the log lacks the axis."""
    if axis == "probability":
        return np.clip(np.floor(2 * tokens.rollout), -24, 0).astype(np.int64)
    values = tokens.places.get(axis)
    if values is None or axis not in ("positions", "from_end", "context_length"):
        return values
    far = EXACT + np.floor(8 * np.log2(np.maximum(values, 1) / EXACT))
    return np.where(values >= EXACT, far, values).astype(np.int64)
