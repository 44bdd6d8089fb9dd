"""`rollcorr info`: say what is installed."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcorr.cli.app import app


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """Say what is installed: versions, which kernels are in use and why others are not, extras."""
    from rich.console import Console

    from rollcorr.diagnostics.installation import inspect_installation, show_installation, to_json

    installation = inspect_installation()
    if as_json:
        typer.echo(to_json(installation))
    else:
        show_installation(Console(highlight=False), installation)
