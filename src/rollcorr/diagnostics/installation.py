"""Describe the installation for bug reports: versions, extras, and kernels with the reason if one does not run."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata

import torch
from rich.console import Console
from rich.markup import escape

import rollcorr
from rollcorr.diagnostics.numbers import text_table
from rollcorr.kernels.correction import implementations

WITHOUT_CPU_KERNEL = (
    "Without the compiled kernel, corrections of tensors on the CPU run in torch: the same results, but more slowly."
)

_EXTRA = re.compile(r"^([A-Za-z0-9_.-]+)[^;]*;(?:.* and)?\s*extra == [\"']([\w-]+)[\"']$")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of the correction.

    Attributes:
        name: value for `impl=`.
        usable: True if it runs here.
        note: where it runs, or the reason why it does not run.
    """

    name: str
    usable: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class Extra:
    """One extra of the package.

    Attributes:
        name: as in `pip install 'rollcorr[name]'`.
        missing: its packages that are not installed.
    """

    name: str
    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The library and its environment.

    Attributes:
        versions: versions of rollcorr, Python and torch.
        machine: system and processor architecture.
        threads: number of threads that torch and the CPU kernels use.
        accelerator: name of the first GPU, if any.
        kernels: every implementation of the correction.
        extras: every extra; empty if the package is imported from a path without being installed.
    """

    versions: dict[str, str]
    machine: str
    threads: int
    accelerator: str | None
    kernels: tuple[Kernel, ...]
    extras: tuple[Extra, ...]


def inspect_installation() -> Installation:
    """Return the installed versions, kernels and extras, without slow imports."""
    kernels = (Kernel(name=name, usable=usable, note=note) for name, (usable, note) in implementations().items())
    return Installation(
        versions={"rollcorr": rollcorr.__version__, "python": platform.python_version(), "torch": torch.__version__},
        machine=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        kernels=tuple(kernels),
        extras=_extras(),
    )


def show_installation(console: Console, installation: Installation) -> None:
    """Print an installation as tables."""
    rows = [
        *installation.versions.items(),
        ("machine", f"{installation.machine}, {installation.threads} threads"),
        ("accelerator", escape(installation.accelerator or "none")),
    ]
    console.print(text_table(rows))
    _show(console, "correction kernels", [(kernel.name, kernel.usable, kernel.note) for kernel in installation.kernels])
    if not all(kernel.usable for kernel in installation.kernels if kernel.name == "cpu"):
        console.print(WITHOUT_CPU_KERNEL)
    extras = [
        (extra.name, not extra.missing, f"missing: {', '.join(extra.missing)}" if extra.missing else "installed")
        for extra in installation.extras
    ]
    _show(console, "extras", extras)


def to_json(installation: Installation) -> str:
    """Return an installation as a JSON object."""
    return json.dumps(asdict(installation), ensure_ascii=False, indent=2)


def _show(console: Console, title: str, rows: list[tuple[str, bool, str]]) -> None:
    if not rows:
        return
    marks = {True: "[green]yes[/]", False: "[yellow]no[/]"}
    table = text_table((escape(name), marks[fine], escape(note)) for name, fine, note in rows)
    table.title, table.title_justify = title, "left"
    console.print()
    console.print(table)


def _extras() -> tuple[Extra, ...]:
    """Return the extras that the installed package declares, except `dev` and extras that only combine extras."""
    try:
        declared = metadata.requires("rollcorr") or []
    except metadata.PackageNotFoundError:
        return ()
    packages: dict[str, list[str]] = {}
    for requirement in declared:
        match = _EXTRA.match(requirement)
        if match and match[1] != "rollcorr" and match[2] != "dev":
            packages.setdefault(match[2], []).append(match[1])
    return tuple(
        Extra(name=name, missing=tuple(package for package in needed if not _installed(package)))
        for name, needed in packages.items()
    )


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
