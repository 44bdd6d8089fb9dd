"""Write the two figures of the front page: the demo's curves, and a recording of `rollcorr check`.

    python tools/front_figures.py                         both, from the committed data
    python tools/front_figures.py --demo ROOT [ROOT …]    first take the curves of finished demos, one per seed

`docs/figures/demo_curves.json` keeps the curves; tests/test_front.py compares the recording with what `check` prints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
CURVES = FIGURES / "demo_curves.json"
RECORDED = ROOT / "tests" / "data" / "reverse_digits_stopped_sync.npz"

COMMAND = ("rollcorr", "check", "rollouts.parquet", "--null-steps", "1:5")
COLUMNS = 100
SHOWN_LINES = 16
"""Verdict, fix, place and the table of metrics; the findings follow on screen."""

LABELS = {
    "healthy": ("fresh weights", "#1f6f8b"),
    "corrected": ("cheap sampler, corrected (Seq-TIS 4)", "#2f855a"),
    "uncorrected": ("cheap sampler, not corrected", "#c2540a"),
    "fault": ("weight sync stopped", "#8b1e3f"),
}

# Rich's own frame loads a font from another host.
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def printed() -> str:
    """What `rollcorr check` prints about a loop whose weight sync stops at step 15, with its colors."""
    import numpy as np

    from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

    recorded = np.load(RECORDED)
    rows = [{name: recorded[name][row].tolist() for name in recorded.files} for row in range(len(recorded["step"]))]
    terminal = os.environ | {"COLUMNS": str(COLUMNS), "CLICOLOR_FORCE": "1", "FORCE_COLOR": "1", "TERM": "xterm"}
    with tempfile.TemporaryDirectory() as folder:
        with RolloutLogWriter(Path(folder) / COMMAND[2]) as log:
            log.write(RolloutBatch.from_rows(rows))
        command = [sys.executable, "-m", *COMMAND]
        run = subprocess.run(command, cwd=folder, env=terminal, capture_output=True, text=True, check=False)
    if run.returncode != 1:
        raise RuntimeError(f"{' '.join(COMMAND)} ended with exit code {run.returncode}, not 1: {run.stderr}")
    return run.stdout


def recording(output: str) -> str:
    """The first lines of the output as SVG: a terminal window."""
    from io import StringIO

    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=StringIO())
    console.print(Text(f"$ {' '.join(COMMAND)}", style="bold"))
    console.print(Text.from_ansi("\n".join(output.splitlines()[:SHOWN_LINES])))
    svg = console.export_svg(title="rollcorr", code_format=FRAME, unique_id="check")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def curves_of(root: Path) -> dict[str, list[tuple[int, float]]]:
    """The held-out accuracy of each run of a finished demo."""
    results = root / "results"
    return {name: json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["held_out"] for name in LABELS}


def draw(curves: list[dict[str, list[tuple[int, float]]]], path: Path) -> None:
    """The mean over seeds of each run, and each seed as a thin line."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "rollcorr", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 11}
    figure, axes = plt.subplots(figsize=(7.4, 3.5), layout="constrained")
    for name, (label, color) in LABELS.items():
        for seed in curves:
            axes.plot(*zip(*seed[name], strict=True), color=color, linewidth=0.8, alpha=0.45)
        steps = [step for step, _ in curves[0][name]]
        mean = [statistics.mean(seed[name][index][1] for seed in curves) for index in range(len(steps))]
        axes.plot(steps, mean, color=color, linewidth=2.4, marker="o", markersize=4, label=label)

    # Names at the ends would overlap: two curves end high, two near 0. Between them is room, and a wide plot stays
    # legible on a phone.
    axes.legend(frameon=False, loc="center right", bbox_to_anchor=(1.0, 0.37), handlelength=1.4, labelspacing=0.3)
    axes.set(xlabel="training step", ylabel="accuracy", ylim=(-0.03, 1), xlim=(-0.5, steps[-1] + 0.5))
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    """Write both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", nargs="+", type=Path, metavar="ROOT", help="folders of finished demos, one per seed")
    options = parser.parse_args()
    if options.demo:
        CURVES.write_text(json.dumps([curves_of(root) for root in options.demo]) + "\n", encoding="utf-8")

    draw(json.loads(CURVES.read_text(encoding="utf-8")), FIGURES / "demo_curves.svg")
    (FIGURES / "check.svg").write_text(recording(printed()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
