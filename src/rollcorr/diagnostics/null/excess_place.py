"""Where an excess over a null lies: values on one axis that carry it, while the rest is as in the null.

Half of the log chooses the values of an axis, and the other half tells what share of the excess they carry: values that
are chosen for their noise carry nothing there. Shares are compared with those of the noise that the null predicts at
the same probabilities, so unlikely tokens are no place because unlikely tokens always differ by more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollcorr.diagnostics.null.excess_tokens import ExcessTokens, Floats, Ints

MOST = 0.8
"""Share of the excess that a place carries."""
CHOSEN = 0.9
"""Share of the excess of one half of the log that the chosen values carry there."""
ORDINARY = 1.5
"""k3 over the null's up to which the other tokens are as in the null."""
NARROW = 0.9
"""Share of the noise up to which values are a place at all."""
FEWEST = 200
"""Tokens without which no place is looked for."""
EXACT = 64
"""Positions that are told apart; later ones are taken together by eighths of an octave."""
ORDERED = ("from_end", "turn", "prompt_length", "positions", "context_length")
AXES: Mapping[str, str] = {
    "from_end": "tokens before the last one",
    "turn": "turn",
    "prompt_length": "prompt length",
    "positions": "position",
    "context_length": "tokens of context",
    "seen": "id seen before",
    "ids": "token id",
    "step": "step",
    "probability": "log-prob, in half nats",
    "rows": "row",
}
"""Axes on which a place may lie, in words."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Values on an axis that carry most of an excess.

    Attributes:
        axis: one of `AXES`.
        values: on it.
        share: of the excess that they carry, in tokens that did not choose them.
        of_noise: the share of the null's noise that they carry.
        rest: k3 of the other tokens over the null's.
        tokens: true on the tokens of the place, (n,).
    """

    axis: str
    values: Ints
    share: float
    of_noise: float
    rest: float
    tokens: NDArray[np.bool_]

    @property
    def whole(self) -> bool:
        """Whether the other tokens are as in the null."""
        return self.rest <= ORDINARY

    @property
    def stretches(self) -> list[list[int]]:
        """The values as [first, last] of stretches without a gap."""
        breaks = np.flatnonzero(np.diff(self.values) > 1) + 1
        return [[int(part[0]), int(part[-1])] for part in np.split(self.values, breaks)]

    @property
    def where(self) -> dict[str, list[int] | list[list[int]]]:
        """The place for programs: lists of rows and ids, stretches of the other axes."""
        listed = self.axis in ("rows", "ids")
        return {self.axis: self.values.tolist() if listed else self.stretches}

    def __str__(self) -> str:
        parts = self.stretches
        shown = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in parts[:5])
        more = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
        return f"{AXES[self.axis]} {shown}{more}: {min(self.share, 1):.0%} of the excess"


def places(tokens: ExcessTokens) -> list[Place]:
    """Return the places that carry `MOST` of the excess: those that leave nothing first, then the densest."""
    if len(tokens) < FEWEST:
        return []
    found = [place for axis in AXES for place in _on_axis(tokens, axis) if place.share >= MOST]
    found = [place for place in found if place.of_noise <= NARROW]
    return sorted(found, key=lambda place: (not place.whole, place.of_noise / place.share))


def _on_axis(tokens: ExcessTokens, axis: str) -> Iterator[Place]:
    """Yield the places on an axis: chosen values, and what lies before or after a cut."""
    values = _binned(tokens, axis)
    if values is None or values.min() == values.max():
        return
    of, number = np.unique(values, return_inverse=True)
    number = number.reshape(-1).astype(np.int64)
    excess, noise = tokens.k3 - tokens.noise, tokens.noise
    if axis in ORDERED:
        first, last = _ordinary(number, tokens), len(of) - 1 - _ordinary(len(of) - 1 - number, tokens)
        for inside in (number >= first, number <= last, (number >= first) & (number <= last)):
            yield _measured(tokens, axis, values, inside, inside)

    # Rows choose the values, and other rows weigh them; rows are chosen by every second of their tokens.
    half = (tokens.places["positions" if axis == "rows" else "rows"] * 0x9E3779B1 >> 7) % 2 == 0
    elsewhere = np.zeros(len(number), dtype=np.bool_)
    for own in (half, ~half):
        elsewhere |= ~own & np.isin(number, _chosen(number[own], excess[own], noise[own], len(of)))
    inside = np.isin(number, _chosen(number, excess, noise, len(of)))
    yield _measured(tokens, axis, values, inside, elsewhere)


def _ordinary(number: Ints, tokens: ExcessTokens) -> int:
    """How many of the first values, taken together, are as in the null."""
    k3, noise = (np.cumsum(np.bincount(number, x)) for x in (tokens.k3, tokens.noise))
    return int(np.flatnonzero(k3 <= ORDINARY * noise).max(initial=-1)) + 1


def _measured(
    tokens: ExcessTokens, axis: str, values: Ints, inside: NDArray[np.bool_], weighed: NDArray[np.bool_]
) -> Place:
    """A place, with what the tokens carry that weigh it."""
    excess, noise = tokens.k3 - tokens.noise, tokens.noise
    return Place(
        axis=axis,
        values=np.unique(values[inside]),
        share=float(excess[weighed].sum() / excess.sum()),
        of_noise=max(float(noise[of].sum() / noise.sum()) for of in (inside, weighed)),
        rest=float(tokens.k3[~inside].sum() / max(noise[~inside].sum(), 1e-12)),
        tokens=inside,
    )


def _chosen(number: Ints, excess: Floats, noise: Floats, size: int) -> Ints:
    """The values that carry `CHOSEN` of the excess, the densest first."""
    carried, due = np.bincount(number, excess, size), np.bincount(number, noise, size)
    order = np.argsort(-carried / (due + max(due.sum(), 1e-12) / (10 * size)))
    running = np.cumsum(carried[order])
    return order[: int(np.searchsorted(running, CHOSEN * carried.sum())) + 1]


def _binned(tokens: ExcessTokens, axis: str) -> Ints | None:
    """The value of each token on an axis, where far ones are taken together; None if the log does not record it."""
    if axis == "probability":
        return np.clip(np.floor(2 * tokens.rollout), -24, 0).astype(np.int64)
    values = tokens.places.get(axis)
    if values is None or axis not in ("positions", "from_end", "context_length"):
        return values
    far = EXACT + np.floor(8 * np.log2(np.maximum(values, 1) / EXACT))
    return np.where(values >= EXACT, far, values).astype(np.int64)
