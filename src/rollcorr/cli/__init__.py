"""The command line: one command per job, heavy imports only inside the command that needs them."""

import io
import sys

from rollcorr.cli.app import app
from rollcorr.cli.configuration import convert_config
from rollcorr.cli.diagnosis import check, report
from rollcorr.cli.explanation import explain, presets
from rollcorr.cli.installation import info
from rollcorr.cli.logs import import_log
from rollcorr.cli.training import train

__all__ = ["app", "check", "convert_config", "explain", "import_log", "info", "main", "presets", "report", "train"]


def main() -> None:
    """Entry point of the `rollcorr` command."""
    # Messages hold signs such as ≤ and –. Where the terminal's encoding lacks one, a "?" must do: a run of days does
    # not die of a message.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()
