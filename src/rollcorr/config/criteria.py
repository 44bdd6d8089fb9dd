"""Threshold strings and rejection criteria: "0.5_2.0,0.01" becomes typed bounds.

    number     x        k1: the ratio band [1/x, x] (so x ≥ 1); k2, k3: divergence at most x nats; weights: ceiling x
    band       lo_hi    k1: lo ≤ ρ ≤ hi; weights: 0 outside (IcePop); not for k2, k3
    open side  0_hi     k1 and weights: no lower bound
               lo_inf   k1 and weights: no upper bound
    list       a,b,…    one for each criterion, in the order of the criteria; a single threshold applies to all

ρ is always train / rollout. Bounds are inclusive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from rollcorr.config.checks import check_choice, check_number, unknown_name

Scope = Literal["token", "seq_sum", "seq_mean", "seq_max", "step"]
Kind = Literal["k1", "k2", "k3", "kl"]
Threshold = float | str
Band = tuple[float | None, float | None]

CRITERIA: dict[str, tuple[Scope, Kind, Threshold]] = {
    "token_k1": ("token", "k1", "0.5_2.0"),
    "token_k2": ("token", "k2", 2.0),
    "token_k3": ("token", "k3", 0.1),
    "seq_sum_k1": ("seq_sum", "k1", "0.5_2.0"),
    "seq_sum_k2": ("seq_sum", "k2", 2.5),
    "seq_sum_k3": ("seq_sum", "k3", 0.1),
    "seq_mean_k1": ("seq_mean", "k1", "0.999_1.001"),
    "seq_mean_k2": ("seq_mean", "k2", 2.0),
    "seq_mean_k3": ("seq_mean", "k3", 0.01),
    "seq_max_k2": ("seq_max", "k2", 2.0),
    "seq_max_k3": ("seq_max", "k3", 0.1),
}
"""Name → scope, divergence, and a threshold to start with, as in docs/guides/choosing.md."""

# For denoising steps only: the KL of the two means is exact, so no estimate is needed.
STEP_CRITERIA: dict[str, tuple[Scope, Kind]] = {"step_kl": ("step", "kl")}

_ALL_CRITERIA = {name: (scope, kind) for name, (scope, kind, _) in CRITERIA.items()} | STEP_CRITERIA

_NUMBER_PATTERN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """Rejection criterion: keep a unit iff lower ≤ ρ ≤ upper (k1), or its divergence ≤ upper (k2, k3, kl).

    Attributes:
        scope: unit to keep or reject: "token": each token; "seq_sum", "seq_mean", "seq_max": the sequence; "step": each
            denoising step of a diffusion model.
        kind: "k1" = −log ρ, bounded through the ratio ρ; "k2" = (log ρ)²/2; "k3" = ρ − 1 − log ρ; "kl" = the exact
            divergence of a denoising step, over all latent dimensions.
        lower: smallest ratio kept; k1 only. Optional; the side is open by default.
        upper: largest ratio kept (k1; optional, open by default), or largest divergence kept (k2, k3, kl), in nats.

    Raises:
        TypeError: a bound is not a number, or a name is not a string.
        ValueError: the name is seq_max_k1 (it does not exist), lower > upper, a bound is not finite and > 0, or k2 or
            k3 has a lower bound or no upper bound.

    Example:
        >>> Criterion(scope="seq_mean", kind="k1", lower=0.999, upper=1.001).name
        'seq_mean_k1'
    """

    scope: Scope
    kind: Kind
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        check_choice("scope", self.scope, get_args(Scope))
        check_choice("kind", self.kind, get_args(Kind))
        if self.name not in _ALL_CRITERIA:
            raise ValueError(f"{self.name} does not exist: seq_max takes k2 or k3, and step takes kl alone")

        for side, bound in (("lower", self.lower), ("upper", self.upper)):
            if bound is not None:
                check_number(f"{self.name} {side} bound", bound, above=0)

        # k1 bounds a ratio, on both sides. The other kinds are never negative, and have only an upper bound.
        if self.kind != "k1":
            if self.lower is not None:
                raise ValueError(f"{self.name} takes one upper bound in nats; got a lower bound {self.lower!r} too")
            if self.upper is None:
                raise ValueError(f"{self.name} needs an upper bound in nats; got None")
        elif self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError(f"{self.name} lower bound {self.lower!r} exceeds its upper bound {self.upper!r}")

    @property
    def name(self) -> str:
        """Name of the criterion in `rollout_rs`, for instance "seq_mean_k3"."""
        return f"{self.scope}_{self.kind}"


def parse_is_threshold(value: Threshold | None) -> Band:
    """Read `rollout_is_threshold`: a number C → (None, C); "lo_hi" → (lo, hi); None → (None, None).

    A side of a band may be open: "0_hi" → (None, hi), "lo_inf" → (lo, None). Use `is_weight_band` to
    distinguish "0_3" from "3".

    Raises:
        TypeError: the value is not `None`, a number or a string.
        ValueError: a bound is not a finite number > 0, lo > hi, or both sides of a band are open.
    """
    option = "rollout_is_threshold"
    if value is None:
        return None, None
    if not isinstance(value, str):
        return None, check_number(f"{option} (a ceiling on weights; None for no ceiling)", value, above=0)

    ends = _parse_band(option, value, "a ceiling C")
    if len(ends) == 1:
        return None, ends[0]
    if ends == (None, None):
        raise ValueError(f"{option} {value!r} is open on both sides; write None, which bounds weights by safety_bound")
    return ends


def is_weight_band(value: Threshold | None) -> bool:
    """Return True for a `rollout_is_threshold` that is a band (weights outside are 0), and False for a ceiling."""
    return isinstance(value, str) and "_" in value


def parse_rejection(names: str | Sequence[str], threshold: Threshold | None) -> tuple[Criterion, ...]:
    """Parse `rollout_rs` and `rollout_rs_threshold` into criteria.

    Returns:
        The criteria in the order written, without duplicates.

    Raises:
        TypeError: names or threshold have an invalid type.
        ValueError: an unknown name, a missing or malformed threshold, an invalid count, or one name with two bounds.
    """
    listed = criterion_names(names)
    if threshold is None:
        starts = ",".join(str(CRITERIA[name][2]) if name in CRITERIA else "NUMBER" for name in listed)
        raise ValueError(
            f"rollout_rs {','.join(listed)!r} needs rollout_rs_threshold; got None. To start, write "
            f"algorithm.rollout_correction.rollout_rs_threshold={starts}"
        )
    texts = threshold_texts(threshold)
    if len(texts) not in (1, len(listed)):
        raise ValueError(
            f"rollout_rs names {len(listed)} criteria ({', '.join(listed)}) but rollout_rs_threshold {threshold!r} "
            f"gives {len(texts)}: give one to share, or one for each"
        )

    criteria: dict[str, Criterion] = {}
    for name, text in zip(listed, texts if len(texts) > 1 else texts * len(listed), strict=True):
        criterion = _parse_criterion(name, text)
        if criteria.setdefault(name, criterion) != criterion:
            raise ValueError(f"rollout_rs names {name} twice with different bounds in {threshold!r}; keep one of them")
    return tuple(criteria.values())


def canonical_rejection(names: str | Sequence[str], threshold: Threshold | None) -> tuple[str, Threshold | None]:
    """Return `rollout_rs` as one comma-separated string and its threshold, without duplicate criteria.

    Raises:
        TypeError, ValueError: as `parse_rejection`.
    """
    kept = [criterion.name for criterion in parse_rejection(names, threshold)]
    return _select_criteria(criterion_names(names), threshold, kept)


def criterion_names(names: str | Sequence[str]) -> list[str]:
    """Split `rollout_rs` into names and check each.

    Returns:
        The names in the order written.

    Raises:
        TypeError: the value is not a string or a sequence of strings.
        ValueError: there is no name, an empty one, or an unknown one. The message suggests the nearest.
    """
    if isinstance(names, str):
        listed = [name.strip() for name in names.split(",")]
    elif isinstance(names, Sequence) and all(isinstance(name, str) for name in names):
        listed = [name.strip() for name in names]
    else:
        raise TypeError(
            f"rollout_rs must be names in one text or in a list; got {names!r} of type {type(names).__name__}"
        )

    if not any(listed):
        raise ValueError(f"rollout_rs {names!r} names no criterion; write None for no rejection")
    for name in listed:
        if name not in _ALL_CRITERIA:
            raise ValueError(unknown_name(f"rollout_rs {names!r}: unknown criterion {name!r}", name, _ALL_CRITERIA))
    return listed


def check_token_criteria(criteria: Iterable[Criterion]) -> None:
    """Check that every criterion needs only log-probs.

    Raises:
        ValueError: a criterion needs the means of denoising steps.
    """
    for criterion in criteria:
        if criterion.name in STEP_CRITERIA:
            raise ValueError(
                f"rollout_rs {criterion.name!r} is for denoising steps: their means give the exact KL, log-probs do "
                "not; use rollcorr.diffusion, or a criterion of tokens and sequences such as 'seq_mean_k3'"
            )


def without_criterion(names: str, threshold: Threshold, left_out: str) -> tuple[str | None, Threshold | None]:
    """Return `rollout_rs` and its threshold without one criterion; None and None if no criterion remains.

    Raises:
        TypeError, ValueError: as `parse_rejection`.
    """
    listed = criterion_names(names)
    kept = [name for name in listed if name != left_out]
    return _select_criteria(listed, threshold, kept) if kept else (None, None)


def _select_criteria(
    listed: list[str], threshold: Threshold | None, kept: Iterable[str]
) -> tuple[str, Threshold | None]:
    """Return a subset of the listed criteria with their thresholds; a shared threshold does not change."""
    if isinstance(threshold, str) and "," in threshold:
        texts = threshold_texts(threshold)
        threshold = ",".join(texts[listed.index(name)] for name in kept)
    return ",".join(kept), threshold


def threshold_texts(threshold: Threshold) -> list[str]:
    """Split `rollout_rs_threshold` at commas; a number is a list of one.

    Raises:
        TypeError: the value is not a number or a string.
    """
    if isinstance(threshold, str):
        return [text.strip() for text in threshold.split(",")]
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(
            "rollout_rs_threshold must be a number or a text such as '0.5_2.0,0.01'; "
            f"got {threshold!r} of type {type(threshold).__name__}"
        )
    return [repr(float(threshold))]


def join_band(lower: Threshold, upper: Threshold | None) -> str:
    """Format a band from its two ends for `rollout_rs_threshold`: (0.5, 2.0) → "0.5_2.0"; a lower end of 0 is open.

    Raises:
        TypeError: an end has an invalid type.
        ValueError: an end is missing, is not a finite number, or is a band already.
    """
    ends = {"rollout_rs_threshold_lower": lower, "rollout_rs_threshold": upper}
    texts = []
    for option, end in ends.items():
        if isinstance(end, str):
            _parse_number(end, option, end, "a single number, because the band's two ends are given apart")
            texts.append(end.strip())
        else:
            number = check_number(option, end)
            texts.append("0" if number == 0 else repr(number))
    return "_".join(texts)


def _parse_criterion(name: str, text: str) -> Criterion:
    """Return a criterion from its name and its threshold string."""
    scope, kind = _ALL_CRITERIA[name]
    option = f"rollout_rs_threshold for {name}"
    if kind != "k1":
        if "_" in text:
            raise ValueError(f"{option} is one upper bound in nats; got the band {text!r}")
        upper = _parse_bound(text, option, text, "one upper bound in nats such as '0.01'")
        return Criterion(scope=scope, kind=kind, upper=upper)

    ends = _parse_band(option, text, "x for [1/x, x]")
    if len(ends) == 2:
        return Criterion(scope=scope, kind=kind, lower=ends[0], upper=ends[1])
    (upper,) = ends
    if upper < 1:
        # [1/x, x] is empty here. Do not swap the ends: the user more likely meant only a lower bound.
        raise ValueError(
            f"{option}: the number {text} means the ratio band [1/x, x], which is empty for x < 1; "
            f"write '{text}_inf' for a lower bound alone, or '{text}_{1 / upper:g}' for both sides"
        )
    return Criterion(scope=scope, kind=kind, lower=1 / upper, upper=upper)


def _parse_band(option: str, text: str, single: str) -> tuple[float] | Band:
    """Read a number x as (x,), or a band lo_hi as (lo, hi). 0 and inf leave their side of a band open.

    Raises:
        ValueError: any other bound is not finite and > 0, or lo > hi.
    """
    parts = text.split("_")
    if len(parts) > 2:
        raise ValueError(f"{option} {text!r} has {len(parts)} parts; give {single}, or a band lo_hi")
    if len(parts) == 1:
        return (_parse_bound(text, option, text, f"{single}, or a band lo_hi such as '0.5_2.0'"),)

    wanted = "a band lo_hi such as '0.5_2.0'; '0_hi' and 'lo_inf' leave a side open"
    lower = None
    if _parse_number(parts[0], option, text, wanted) != 0:
        lower = _parse_bound(parts[0], option, text, wanted)
    if parts[1].strip().lower() == "inf":
        return lower, None
    upper = _parse_bound(parts[1], option, text, wanted)
    if lower is not None and lower > upper:
        raise ValueError(f"{option} {text!r}: the lower bound {lower:g} exceeds the upper bound {upper:g}; swap them")
    return lower, upper


def _parse_number(text: str, option: str, whole: str, wanted: str) -> float:
    """Parse a finite number from a strict decimal string: no underscore, no NaN, no infinity."""
    text = text.strip()
    if not _NUMBER_PATTERN.fullmatch(text) or abs(float(text)) == float("inf"):
        raise ValueError(f"{option} {whole!r}: {text!r} is not a finite number; expected {wanted}")
    return float(text)


def _parse_bound(text: str, option: str, whole: str, wanted: str) -> float:
    bound = _parse_number(text, option, whole, wanted)
    if bound <= 0:
        raise ValueError(f"{option} {whole!r}: a bound must be > 0, got {bound:g}")
    return bound
