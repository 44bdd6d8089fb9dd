"""What a run tells while it runs, and what it leaves behind.

    RUN/config.yaml           the effective configuration
    RUN/metrics.jsonl         one JSON object a step, flushed at once; a number that is not finite is null
    RUN/rollouts/             one Parquet file a step
    RUN/tensorboard/          the same metrics as events
    RUN/checkpoints/          see `rollcorr.train.checkpoint`
    RUN/summary.json          accuracy before and after, written at the end

Every file is whole after a crash, but for the last line of `metrics.jsonl`, which readers pass over.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Shown = tuple[str, str, str]
SHOWN: tuple[Shown, ...] = (
    ("reward", "reward/mean", "{:.3f}"),
    ("accuracy", "reward/accuracy", "{:.2f}"),
    ("KL", "rollout_corr/kl", "{:+.1e}"),
    ("k3", "rollout_corr/k3_kl", "{:.1e}"),
    ("ESS", "rollout_corr/rollout_is_eff_sample_size", "{:.3f}"),
    ("rejected", "rollout_corr/rollout_rs_masked_fraction", "{:.1%}"),
    ("tokens/s", "perf/tokens_per_second", "{:,.0f}"),
)
RECENT = 8


class RunLogger:
    """Writes a run's metrics and shows them live.

    Args:
        run_dir: the run's directory; made when missing.
        steps: training steps in total, for the progress bar.
        start: steps that are done already; later lines of `metrics.jsonl` and later rollout logs are dropped.
        tensorboard: write TensorBoard events too.
        console: where to show progress. A terminal gets a live table, anything else a line every tenth step.
        shown: the metrics to show: title, name, format.
    """

    def __init__(
        self,
        run_dir: Path,
        steps: int,
        *,
        start: int = 0,
        tensorboard: bool = True,
        console: Console | None = None,
        shown: Sequence[Shown] = SHOWN,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        drop_later_steps(run_dir, start)
        self._file = self.path.open("a", encoding="utf-8")
        self._events = _summary_writer(run_dir / "tensorboard", start) if tensorboard else None
        self._display = _Display(console or Console(), steps, start, shown)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, in the file first."""
        line = {"step": step} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, step)
        self._display.show(step, metrics)

    def say(self, message: str) -> None:
        """Show a line above the progress display."""
        self._display.console.print(message, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> RunLogger:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`. A last line that a killed run left half written is passed over.

    Raises:
        ValueError: any other line is no JSON; the message names file and line.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: no valid JSON ({error.msg})") from error
    return rows


def drop_later_steps(run_dir: Path, step: int) -> None:
    """Forget what a run logged after `step`: it will be computed again."""
    path = run_dir / "metrics.jsonl"
    if path.is_file():
        kept = [json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
    for log in (run_dir / "rollouts").glob("step_*.parquet"):
        if int(log.stem.removeprefix("step_")) > step:
            log.unlink()


class _Display:
    """A progress bar over the newest steps in a terminal; plain lines elsewhere."""

    def __init__(self, console: Console, steps: int, start: int, shown: Sequence[Shown]) -> None:
        self._shown = shown
        self.console = console
        self._steps = steps
        self._start = start
        self._recent: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=RECENT)
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._bar = self._progress.add_task("train", total=steps, completed=start)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render, transient=False)

    def start(self) -> None:
        if self.console.is_terminal:
            self._live.start()

    def stop(self) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        self._recent.append((step, metrics))
        self._progress.update(self._bar, completed=step)
        if not self.console.is_terminal and (step % 10 == 0 or step in (self._start + 1, self._steps)):
            values = "  ".join(f"{title} {_text(metrics, key, form)}" for title, key, form in self._shown)
            self.console.print(f"step {step}/{self._steps}  {values}", highlight=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table("step", *(title for title, _, _ in self._shown), box=None, padding=(0, 2, 0, 0))
        for column in table.columns:
            column.justify = "right"
        for step, metrics in self._recent:
            table.add_row(str(step), *(_text(metrics, key, form) for _, key, form in self._shown))
        return Group(self._progress.get_renderable(), table)


def _text(metrics: Mapping[str, float], key: str, form: str) -> str:
    return form.format(metrics[key]) if key in metrics else "–"


def _summary_writer(directory: Path, start: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("events need pip install 'rollcorr[train]', or set log.tensorboard=false") from error
    return SummaryWriter(str(directory), purge_step=start + 1 if start else None)
