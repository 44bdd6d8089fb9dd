"""The null that lies beside a run, as the noise that a verdict compares with."""

from __future__ import annotations

from pathlib import Path

from rollcorr.diagnostics.health.noise import Noise
from rollcorr.diagnostics.null.null_file import MismatchNull, read_null
from rollcorr.run_directory.directory import RunDirectory


def noise_of(null: MismatchNull, *, is_null: bool = True) -> Noise:
    """The noise of a token as a null measured it.

    Args:
        null: the null.
        is_null: the two policies behind it are known to be the same.
    """
    return Noise(sigma=null.profile.std, source=null.name, k3=null.profile.k3, is_null=is_null)


def noise_beside(run: Path) -> Noise | None:
    """The noise of the null in a run's directory; None where there is none, or a link to a file elsewhere.

    Raises:
        BadInputError: the file cannot be read as a null.
    """
    file = RunDirectory(run).null
    if file.is_symlink() or not file.is_file():
        return None
    return noise_of(read_null(file))
