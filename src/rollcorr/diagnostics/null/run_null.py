"""The null that lies beside a run, as the noise that a verdict compares with."""

from __future__ import annotations

from pathlib import Path

from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.null.excess import MIN_ROWS
from rollcorr.diagnostics.null.null_file import FEW_TOKENS, MismatchNull, read_null
from rollcorr.run_directory.directory import RunDirectory


def noise_of(null: MismatchNull, *, is_null: bool = True) -> Noise:
    """The noise of a token as a null measured it; one that is too small to judge by gives the noise alone.

    Args:
        null: the null.
        is_null: the two policies behind it are known to be the same.
    """
    profile = null.profile
    is_large = profile.tokens >= FEW_TOKENS and profile.row_count >= MIN_ROWS
    return Noise(sigma=profile.std, source=null.name, k3=profile.k3, is_null=is_null and is_large)


def noise_beside(run: Path) -> Noise | None:
    """The noise of the null in a run's directory; None where there is none, or a link to a file elsewhere.

    Raises:
        BadInputError: the file cannot be read as a null.
    """
    file = RunDirectory(run).null
    if file.is_symlink() or not file.is_file():
        return None
    return noise_of(read_null(file))
