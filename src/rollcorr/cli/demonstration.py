"""`rollcorr demo`: what the library is for, in a minute."""

from __future__ import annotations

from rollcorr.cli.app import app


@app.command()
def demo() -> None:
    """Show a healthy run, a fault that is found and fixed, and a stale sampler with and without correction.

    It needs no model and no network, and takes less than a minute.
    The policies are tables over a few tokens. The corrections, the losses and the diagnosis are those of the library.
    Everything is seeded: the numbers are the same on every run.
    """
    from rich.console import Console

    from rollcorr.demo.demo_screen import show_stories

    show_stories(Console(highlight=False))
