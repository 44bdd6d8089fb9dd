"""Libraries of the compiled correction: where they are, which one this machine uses, or why it can use no library."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollcorr.kernels.correction.cpu.job import KINDS, MAX_CRITERIA, SCOPES, Job
from rollcorr.kernels.correction.rows import Abilities, missing_rows

LEVELS = ("avx512", "avx2", "portable")
"""Instruction sets that it is compiled for, the fastest first."""

FOLDER = Path(__file__).parent
NOT_BUILT = "not_built.txt"
ABI = 11

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rollcorr_offsets_fit": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]),
    "rollcorr_large_pages": (None, [ctypes.c_void_p, ctypes.c_int64]),
    "rollcorr_correct": (ctypes.c_int, [ctypes.c_char_p]),
    "rollcorr_detail": (None, [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]),
    "rollcorr_seen_size": (ctypes.c_int64, []),
    **dict.fromkeys(
        ("rollcorr_sums", "rollcorr_criterion_sums", "rollcorr_moments", "rollcorr_extremes"), (ctypes.c_char_p, [])
    ),
}
"""Name → what a function returns and takes; a job comes as its bytes."""


class Library(NamedTuple):
    """A library that can run on this machine, and the rows that it computes."""

    level: str
    functions: ctypes.CDLL
    names: dict[str, tuple[str, ...]]  # sums, criterion_sums, moments, extremes
    abilities: Abilities


@cache
def library(level: str | None = None) -> Library:
    """Return the library of an instruction set; by default the fastest one that runs on this machine.

    Raises:
        ImportError: no library can be used; the message contains the reason and the fix.
        ValueError: `level` is not in `LEVELS`.
    """
    if level is not None and level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(map(repr, LEVELS))}, got {level!r}")
    reasons = []
    for candidate in LEVELS if level is None else (level,):
        found = load(FOLDER, candidate)
        if isinstance(found, Library):
            return found
        reasons.append(found)
    raise ImportError("the compiled CPU kernel cannot be used: " + "; ".join(dict.fromkeys(reasons)))


@cache
def status() -> tuple[str | None, str]:
    """Return (the instruction set in use, "") or (`None`, why the compiled kernel cannot be used)."""
    try:
        return library().level, ""
    except ImportError as error:
        return None, str(error)


@cache
def load(folder: Path, level: str) -> Library | str:
    """Return the library of one instruction set in a folder, or the reason why it cannot be used."""
    path = folder / f"correction_{level}.so"
    if not path.exists():
        return _absence_reason(folder, level)
    # Torch names the widest vectors that it may use, for example "AVX2" or "AVX512_VNNI".
    widest = torch.backends.cpu.get_cpu_capability().partition("_")[0]
    if level not in {"AVX512": LEVELS, "AVX2": LEVELS[1:]}.get(widest, LEVELS[2:]):
        return f"torch finds no {level} on this processor"
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path.name} does not load ({error})"
    if (functions.rollcorr_abi(), functions.rollcorr_job_size()) != (ABI, ctypes.sizeof(Job)):
        return f"{path.name} was built from another version of rollcorr; reinstall rollcorr"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    kinds = ("sums", "criterion_sums", "moments", "extremes")
    names = {kind: tuple(getattr(functions, f"rollcorr_{kind}")().decode().split()) for kind in kinds}
    abilities = Abilities(missing_rows(places_of(names, ["{criterion}"])), KINDS, SCOPES)
    return Library(level, functions, names, abilities)


def places_of(names: Mapping[str, Sequence[str]], criteria: Sequence[str]) -> dict[tuple[str, str], range]:
    """Return (kind, name) → indices in the flat buffer of statistics: the batch's, then each criterion's.

    Args:
        names: the library's row names.
        criteria: the names of the configuration's criteria.
    """
    places: dict[tuple[str, str], range] = {}
    start = 0
    for kind, size in (("sums", 1), ("moments", 3), ("extremes", 2)):
        samples = [f"/{name}" for name in names["criterion_sums"]] if kind == "sums" else ["", "/seq"]
        rows = [*names[kind], *(f"rs/{criterion}{sample}" for criterion in criteria for sample in samples)]
        places |= {(kind, name): range(start + i * size, start + (i + 1) * size) for i, name in enumerate(rows)}
        start += size * (len(names[kind]) + MAX_CRITERIA * len(samples))  # unused criteria keep their space
    return places


def _absence_reason(folder: Path, level: str) -> str:
    """Return the reason that the installation recorded for a missing library."""
    note = folder / NOT_BUILT
    for line in note.read_text(encoding="utf-8").splitlines() if note.exists() else ():
        noted, _, reason = line.partition(": ")
        if noted == "all":
            return f"no library was built at install ({reason})"
        if noted == level:
            return f"the {level} library was not built at install ({reason})"
    return f"the {level} library is not installed; install a C compiler, then reinstall rollcorr"
