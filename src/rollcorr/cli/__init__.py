"""The command line: one command per job, heavy imports only inside the command that needs them."""

from rollcorr.cli.app import app
from rollcorr.cli.configuration import convert_config
from rollcorr.cli.diagnosis import check, report
from rollcorr.cli.installation import info
from rollcorr.cli.training import train

__all__ = ["app", "check", "convert_config", "info", "main", "report", "train"]


def main() -> None:
    """Entry point of the `rollcorr` command."""
    app()
