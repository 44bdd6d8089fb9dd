"""`rollcorr info`: say what is installed."""

from __future__ import annotations

from typing import Annotated

import typer

from rollcorr.cli.app import app


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what is installed: the versions, the extras, and which kernels run here or why they do not."""
    from rich.console import Console

    from rollcorr.diagnostics.installation import inspect_installation, show_installation, to_json

    installation = inspect_installation()
    if as_json:
        typer.echo(to_json(installation))
    else:
        show_installation(Console(highlight=False), installation)
