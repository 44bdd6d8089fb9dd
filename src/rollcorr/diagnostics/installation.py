"""Describe the installation for bug reports: versions, extras, and kernels with the reason if one does not run."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

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


def inspect_installation() -> dict[str, Any]:
    """Return the installed versions, kernels and extras as plain data, without slow imports.

    Returns:
        "versions" of rollcorr, Python and torch; "machine", system and processor architecture; "threads" that torch and
        the CPU kernels use; "accelerator", name of the first GPU or None; "kernels", for each implementation of the
        correction its "name" for `impl=`, whether it is "usable" here, and a "note" with the place or the reason; and
        "extras", for each extra its "name" and "missing" packages. A package without metadata has no extras.
    """
    kernels = implementations().items()
    return {
        "versions": {"rollcorr": rollcorr.__version__, "python": platform.python_version(), "torch": torch.__version__},
        "machine": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": [{"name": name, "usable": usable, "note": note} for name, (usable, note) in kernels],
        "extras": [
            {"name": name, "missing": [package for package in needed if not _installed(package)]}
            for name, needed in _extras().items()
        ],
    }


def show_installation(console: Console, installation: Mapping[str, Any]) -> None:
    """Print an installation as tables."""
    rows = [
        *installation["versions"].items(),
        ("machine", f"{installation['machine']}, {installation['threads']} threads"),
        ("accelerator", escape(installation["accelerator"] or "none")),
    ]
    console.print(text_table(rows))
    kernels = [(kernel["name"], kernel["usable"], kernel["note"]) for kernel in installation["kernels"]]
    _show(console, "correction kernels", kernels)
    if ("cpu", False) in (kernel[:2] for kernel in kernels):
        console.print(WITHOUT_CPU_KERNEL)
    extras = [
        (
            extra["name"],
            not extra["missing"],
            f"missing: {', '.join(extra['missing'])}" if extra["missing"] else "installed",
        )
        for extra in installation["extras"]
    ]
    _show(console, "extras", extras)


def _show(console: Console, title: str, rows: list[tuple[str, bool, str]]) -> None:
    if not rows:
        return
    marks = {True: "[green]yes[/]", False: "[yellow]no[/]"}
    table = text_table((escape(name), marks[fine], escape(note)) for name, fine, note in rows)
    table.title, table.title_justify = title, "left"
    console.print()
    console.print(table)


def _extras() -> dict[str, list[str]]:
    """Return extra → its packages, as the installed package declares them; without `dev`, and extras of extras."""
    declared: Sequence[str] = ()
    with contextlib.suppress(metadata.PackageNotFoundError):
        declared = metadata.requires("rollcorr") or ()
    packages: dict[str, list[str]] = {}
    for requirement in declared:
        match = _EXTRA.match(requirement)
        if match and match[1] != "rollcorr" and match[2] != "dev":
            packages.setdefault(match[2], []).append(match[1])
    return packages


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
