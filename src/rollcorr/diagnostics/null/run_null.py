"""Null in a run directory, used as the noise of a verdict."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from rollcorr.diagnostics.health.evidence import ABOVE_NULL, LEAST_K3
from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.null.excess import MIN_ROWS
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull, NullMismatchError, read_null
from rollcorr.diagnostics.null.picture_null import PictureNull, read_picture_null
from rollcorr.run_directory.directory import RunDirectory

GOOD_TOKENS = 10_000
"""Recommended tokens of a null: fewer hardly contain the rare tokens that thresholds depend on."""


def is_large(null: MismatchNull) -> bool:
    """Return whether a null is large enough to judge weights."""
    return null.profile.tokens >= FEW_TOKENS and null.profile.row_count >= MIN_ROWS


def remark_on_size(null: MismatchNull) -> str:
    """Return the limits of a small null with the number of tokens that it needs; empty for a large one."""
    has = f"{null.profile.tokens:,} tokens in {null.profile.row_count:,} sequences"
    if not is_large(null):
        return (
            f"{has} are too few to judge weights by: the spread of so few tokens is mostly chance, so verdicts with "
            f"this null stay 'not judged'. It needs at least {FEW_TOKENS:,} tokens in {MIN_ROWS} sequences, and better "
            f"{GOOD_TOKENS:,} tokens: log more rollouts of the same weights, and measure again"
        )
    if null.profile.tokens < GOOD_TOKENS:
        return (
            f"{has} show what is typical, and hardly what is rare: a token in a thousand is there "
            f"{null.profile.tokens / 1000:.0f} times, and thresholds are about such tokens. Better take "
            f"{GOOD_TOKENS:,} tokens or more"
        )
    return ""


def follow_policy(null: MismatchNull, later: MismatchNull, *, most_tokens: int = GOOD_TOKENS) -> MismatchNull:
    """Return a null with a later measurement; older measurements decay, so that the null follows the policy.

    Args:
        null: current null.
        later: measurement with equal weights on both sides.
        most_tokens: number of tokens from which older measurements decay; default `GOOD_TOKENS`.

    Raises:
        NullMismatchError: as `MismatchNull.merge`; or k3 of `later` is several times the null's k3, as for weights that
            did not arrive.
    """
    limit = ABOVE_NULL * max(null.profile.k3, LEAST_K3)
    if is_large(null) and later.profile.k3 >= limit:
        raise NullMismatchError(
            f"{later.name} has k3 {later.profile.k3:.2g}, at least {ABOVE_NULL:g} times that of {null.name}, so the "
            "weights may not be equal; look at the weight sync"
        )
    factor = min(1.0, max(0, most_tokens - later.profile.tokens) / max(null.profile.tokens, 1))
    if factor < 1:
        share = null.share._replace(tokens=int(factor * null.share.tokens))
        kept = null.sample[len(null.sample) - int(factor * len(null.sample)) :]
        null = replace(null, profile=null.profile.scaled(factor), share=share, sample=kept)
    return null.merge(later)


def noise_of(null: MismatchNull, *, is_null: bool = True) -> Noise:
    """Return the noise of a token as measured by a null; a small or doubtful null contributes the noise only.

    Args:
        null: measured null.
        is_null: the two policies behind it are known to be equal; default True.
    """
    profile = null.profile
    unusable = f"is doubtful: {null.doubted}" if null.doubted else ""
    if not is_large(null):
        has = f"{profile.tokens:,} in {profile.row_count:,} sequences"
        unusable = f"has too few tokens ({has}; at least {FEW_TOKENS:,} in {MIN_ROWS} are needed)"
    return Noise(
        sigma=profile.std, source=null.label, k3=profile.k3, is_null=is_null and not unusable, unusable=unusable
    )


def any_null_beside(run: str | os.PathLike[str]) -> MismatchNull | PictureNull | None:
    """Return a run directory's null, with its path as name; None if the file is missing or a link.

    Raises:
        BadInputError: the file cannot be read as a null, or its null compares one side with itself.
    """
    file = RunDirectory(Path(run)).null
    if file.is_symlink() or not file.is_file():
        return None
    pictures = read_picture_null(file)
    if pictures is not None:
        return replace(pictures, name=str(file))
    null = replace(read_null(file), name=str(file))
    null.check_sides()
    return null


def null_beside(run: str | os.PathLike[str]) -> MismatchNull | None:
    """Return the null of tokens in a run directory; None and Raises as in `any_null_beside`."""
    null = any_null_beside(run)
    return null if isinstance(null, MismatchNull) else None


def noise_beside(run: str | os.PathLike[str]) -> Noise | None:
    """Return the noise of the null in a run directory; None and Raises as in `null_beside`.

    A null of pictures has no noise of a token: it judges rows, not metrics.
    """
    null = any_null_beside(run)
    if isinstance(null, PictureNull):
        unusable = "judges only logged pictures (log.rollouts)"
        return Noise(sigma=math.nan, k3=math.nan, source=null.name, unusable=unusable)
    return None if null is None else noise_of(null)
