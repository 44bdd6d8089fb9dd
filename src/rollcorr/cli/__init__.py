"""The command line: one command per job, heavy imports only inside the command that needs them."""

import io
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from rollcorr.cli import (
    configuration,
    conformance,
    diagnosis,
    explanation,
    monitoring,
    null_and_advice,
    rescoring,
    simulation,
    training,
    viewing,
)
from rollcorr.cli.app import app
from rollcorr.config.secrets import redact_text

__all__ = ["app", "main"]

PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Start here": {
        "demo": explanation.demo,
        "explain": explanation.explain,
        "presets": explanation.presets,
        "info": explanation.info,
    },
    "Diagnose a rollout log": {
        "check": diagnosis.check,
        "check-schedule": diagnosis.check_schedule,
        "confirm": rescoring.confirm_cause,
        "null": null_and_advice.measure,
        "calibrate": null_and_advice.calibrate_thresholds,
        "advise": null_and_advice.advise_on,
        "import": configuration.import_log,
    },
    "Follow a run": {
        "view": viewing.view,
        "watch": monitoring.watch,
        "report": diagnosis.report,
        "compare": monitoring.compare,
    },
    "Train, simulate, convert": {
        "train": training.train,
        "simulate": simulation.simulate,
        "conformance": conformance.conformance,
        "convert-config": configuration.convert_config,
    },
}
"""What `rollcorr --help` shows: the commands in groups, in the order in which a newcomer needs them."""

for panel, commands in PANELS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)


def main() -> None:
    """Run the `rollcorr` command: the entry point."""
    # Messages contain signs such as ≤ and –. If the terminal's encoding lacks one, print "?": a message must not end a
    # run of several days.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    # On a scheduler's signal, end the child processes of a command, and remove its temporary folders.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit_on_signal)
    try:
        app()
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        hidden = redact_text(text)
        if hidden == text:
            raise
        sys.stderr.write(hidden)
        raise SystemExit(1) from None


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """End the process like an error does, so that context managers and exit handlers run."""
    raise SystemExit(128 + number)
