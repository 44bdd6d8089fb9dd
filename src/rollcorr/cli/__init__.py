"""The command line: one command per job, heavy imports only inside the command that needs them."""

import io
import signal
import sys
import traceback
from types import FrameType

from rollcorr.cli import (  # noqa: F401 - each joins its commands to the application
    advice,
    configuration,
    demonstration,
    diagnosis,
    explanation,
    logs,
    monitoring,
    null_measurement,
    simulation,
    training,
)
from rollcorr.cli.app import app, arrange_commands
from rollcorr.config.secrets import redact_text

__all__ = ["app", "main"]

arrange_commands()


def main() -> None:
    """Entry point of the `rollcorr` command."""
    # Messages hold signs such as ≤ and –. Where the terminal's encoding lacks one, a "?" must do: a run of days does
    # not die of a message.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    # A scheduler's signal must end the programs that a command has started, and remove its temporary folders.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end_cleanly)
    try:
        app()
    except Exception as error:
        _raise_without_secrets(error)


def _raise_without_secrets(error: Exception) -> None:
    """Let an unexpected error pass, or print its traceback with the secrets hidden and exit with code 1."""
    text = "".join(traceback.format_exception(error))
    hidden = redact_text(text)
    if hidden == text:
        raise error
    sys.stderr.write(hidden)
    raise SystemExit(1)


def _end_cleanly(number: int, frame: FrameType | None) -> None:
    """End the process as an error would, so that everything is closed on the way."""
    raise SystemExit(128 + number)
