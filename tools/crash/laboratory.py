"""One training run at a time in its own folder: killed, without power, on a full disk, damaged, or left in peace."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from file_events import NO_LIMIT, Ended, FileEvents
from outcome import outcome, torn_files
from power_loss import lose_power, read_events

RUN = "run"
SECONDS_AT_MOST = 300


@dataclass(frozen=True, kw_only=True)
class Point:
    """One thing to do to a run.

    Attributes:
        event: kill at this event; 0 for none.
        in_the_middle: of a write.
        delays: kill after so many seconds, once for each.
        disk: bytes that fit on the disk.
        power: what was not flushed is lost with the kill, or after the end where there is no event.
        damage: after the end, change a byte of the newest checkpoint.
        locked: another process holds the lock meanwhile.
    """

    event: int = 0
    in_the_middle: bool = False
    delays: tuple[float, ...] = ()
    disk: int = NO_LIMIT
    power: bool = False
    damage: bool = False
    locked: bool = False

    def __str__(self) -> str:
        if self.power:
            return f"without power before event {self.event}" if self.event else "without power after the end"
        if self.damage or self.locked:
            return "a changed byte in the newest checkpoint" if self.damage else "locked by another process"
        if self.event:
            return f"killed {'in the middle of' if self.in_the_middle else 'before'} event {self.event}"
        if self.disk != NO_LIMIT:
            return f"a disk of {self.disk:,} bytes"
        return "killed after " + ", then ".join(f"{seconds:.3f} s" for seconds in self.delays)


class Laboratory:
    """Runs of one configuration, each in its own folder below one.

    Args:
        overrides: the configuration.
        folder: where the runs are.
        events: follows the runs.
    """

    def __init__(self, overrides: Sequence[str], folder: Path, events: FileEvents) -> None:
        self.command = ["train", f"run_dir={RUN}", *overrides]
        self.folder = folder
        self.events = events

    def follow(self, name: str, **options: Any) -> Ended:  # noqa: ANN401 (those of FileEvents.run)
        """Run the command once, followed."""
        place = self._place(name)
        return self.events.run(lambda: self._train(place), place / RUN, **options)

    def run(self, name: str, *, delay: float | None = None) -> Ended:
        """Run the command once; kill it after a delay, if there is one."""
        place = self._place(name)
        child = os.fork()
        if child == 0:
            os._exit(self._train(place))
        if delay is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Ended(killed=code == -signal.SIGKILL, exit_code=code)

    def output(self, name: str) -> str:
        """What the runs of a name printed."""
        return (self._place(name) / "output.txt").read_text(encoding="utf-8", errors="replace")

    def cut_power(self, name: str, event: int) -> Ended:
        """Run the command up to an event, or to its end for 0, and lose what was not flushed."""
        place = self._place(name)
        log, removed = place / "events.log", place / "removed"
        removed.mkdir()
        ended = self.follow(name, kill_at=event, log=log, removed=removed)
        happened = [line for line in read_events(log) if not event or line.number < event]
        lose_power(place / RUN, happened, removed)
        return ended

    def change_a_byte(self, name: str) -> None:
        """Change the last byte of the newest checkpoint's weights."""
        weights = sorted((self._place(name) / RUN / "checkpoints").glob("step_*/**/*.safetensors"))[-1]
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    def run_locked(self, name: str) -> Ended:
        """Run the command while this process holds the lock of its directory."""
        from rollcorr.run_directory.run_lock import run_lock

        with run_lock(self._place(name) / RUN):
            return self.run(name)

    def outcome(self, name: str) -> dict[str, str]:
        """What the runs of a name left."""
        return dict(outcome(self._place(name) / RUN))

    def torn_files(self, name: str) -> list[str]:
        """Files of a name that are not whole."""
        return torn_files(self._place(name) / RUN)

    def remove(self, name: str) -> None:
        """Delete everything of a name."""
        shutil.rmtree(self.folder / name)

    def _place(self, name: str) -> Path:
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _train(self, place: Path) -> int:
        """The command, in a child: `rollcorr train …` in a folder of its own, with its output in a file."""
        from rollcorr.cli import main

        atexit._clear()  # what the parent does at its end is not for its children
        os.chdir(place)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        signal.alarm(SECONDS_AT_MOST)
        sys.argv = ["rollcorr", *self.command]
        code = 0
        try:
            main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 99
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        return code
