"""`rollcorr view`: one page of runs or a rollout log, as a file or served while the run grows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollcorr.cli.app import TEXT_OPTION, exit_on, share_memory


def view(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or one rollout log.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the page into this file.")] = Path("view.html"),
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Show the text of tokens with the tokenizer in this folder.")
    ] = None,
    text: Annotated[bool, TEXT_OPTION] = True,
    live: Annotated[bool, typer.Option("--live", help="Serve the page on 127.0.0.1 and follow the run.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --live; 0 takes a free one.")] = 8017,
) -> None:
    """Show runs on one page: verdict with cause and fix, curves, and the tokens with the largest k3.

    The page is one file and loads nothing from the network. Above 10,000 sequences or 1,250,000 tokens, half of the
    page goes to the sequences with the largest k3, and half to a random sample of the others; the page shows both
    counts.

    Example: rollcorr view RUN --live --port 8017, then open http://127.0.0.1:8017 in a browser.

    Exit codes: 0 done, 2 bad input, 130 interrupted.
    """
    share_memory()
    with exit_on(unwritten=None if live else output):
        from rollcorr.diagnostics.report.console import row_progress
        from rollcorr.diagnostics.report.html_page import write_page
        from rollcorr.diagnostics.report.view_page import token_decoder, view_page

        decode = token_decoder(tokenizer) if tokenizer is not None and text else None
        if not live:
            with row_progress() as on_rows:
                write_page(output, view_page(runs, decode=decode, text=text, on_rows=on_rows))
            typer.echo(f"page: {output}")
            return
        from rollcorr.cli.live_page import LivePage

        with LivePage(runs, port=port, decode=decode, text=text) as server:
            server.version()  # a path that is no run fails here and not in the browser
            typer.echo(f"live: http://127.0.0.1:{server.server_port}  (Ctrl-C stops)")
            try:
                server.serve_forever(poll_interval=0.2)
            except KeyboardInterrupt as error:
                raise typer.Exit(130) from error
