"""Where the stages of tools/gpu.py write what they find: one JSON file, whole at any moment."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """The results of a run.

    Args:
        path: the file. Its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {"stages": {}}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.load()

    def load(self) -> None:
        """Read what another process has written."""
        if self.path.exists():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))

    def start(self, command: str) -> None:
        """Begin a new run: what it takes to repeat its figures."""
        import torch

        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        on_gpu = torch.cuda.is_available()
        self.content = {
            "date": date.today().isoformat(),
            "commit": commit.stdout.strip(),
            "command": command,
            "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "python": platform.python_version(),
            "stages": {},
        }
        self._write()

    def stage(self, name: str) -> dict[str, Any]:
        """What there is of a stage."""
        found: dict[str, Any] = self.content["stages"].setdefault(name, {"status": "started", "wrong": 0, "rows": []})
        return found

    def finish(self, name: str, status: str, reason: str, seconds: float) -> None:
        """Say how a stage ended."""
        self.stage(name).update(status=status, reason=reason, seconds=round(seconds, 1))
        self._write()

    def of(self, name: str) -> Rows:
        """The place for a stage's rows, emptied."""
        self.content["stages"].pop(name, None)
        return Rows(self, name)

    def _write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


class Rows:
    """The rows of one stage; each is in the file before the next is measured."""

    def __init__(self, recorder: Recorder, stage: str) -> None:
        self._recorder, self._stage = recorder, stage

    def add(self, name: str, *, right: bool = True, **values: object) -> None:
        """Record one finding; `right=False` makes the run fail, and what follows still runs."""
        stage = self._recorder.stage(self._stage)
        stage["rows"].append({"name": name, **({} if right else {"wrong": True}), **values})
        stage["wrong"] += not right
        self._recorder._write()

    def attempt(self, name: str, run: Callable[[], dict[str, object]], *, required: bool = True) -> None:
        """Record what a function returns, or the error that it ended with.

        Args:
            name: of the row.
            run: measures; may return `right`.
            required: whether an error fails the run. A peer that cannot run here does not.
        """
        try:
            values = run()
        except Exception as error:
            traceback.print_exc()
            first_line = (str(error).strip().splitlines() or ["no message"])[0][:200]
            self.add(name, right=not required, error=f"{type(error).__name__}: {first_line}")
        else:
            self.add(name, **values)  # type: ignore[arg-type]


def _version(package: str) -> str | None:
    try:
        return str(__import__(package).__version__)
    except ImportError:
        return None
