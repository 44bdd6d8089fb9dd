"""Measure `rollcorr view` on a log of a million tokens: size, memory, and the time until the page is interactive.

    python benchmarks/run_view.py [--sequences 2000] [--length 500]

Memory is the peak resident memory of the command's process. The page is interactive once headless Chromium has drawn
its curves and the first tokens, from the start of the navigation; median of five. Without a browser, that part is left
out with a message.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rollcorr.rollout_log import RolloutBatch, RolloutLogWriter

STEPS = 10


def write_run(path: Path, *, sequences: int, length: int, prompt: str = "", metric: str = "lr") -> Path:
    """Write a run of ten steps with rollouts: noise of 0.02 nats, and two PAD tokens with log π = −17.5 in step 7."""
    generator = torch.Generator().manual_seed(0)
    path.mkdir(parents=True)
    of_step = sequences // STEPS
    lines = []
    for step in range(1, STEPS + 1):
        rollout = torch.empty(of_step, length).exponential_(1.2, generator=generator).neg()
        train = rollout + 0.02 * torch.randn(of_step, length, generator=generator)
        ids = torch.randint(100, 32_000, (of_step, length), generator=generator)
        if step == 7:
            rollout[:2, length // 2], train[:2, length // 2], ids[:2, length // 2] = -0.2, -17.5, 0
        batch = RolloutBatch.from_padded(
            torch.ones(of_step, length, dtype=torch.bool),
            rollout_log_prob=rollout,
            old_log_prob=train,
            response_ids=ids,
            step=step,
            prompt=[prompt] * of_step,
        )
        with RolloutLogWriter(path / "rollouts" / f"step_{step:06d}.parquet") as log:
            log.write(batch)
        k3 = float((train - rollout).expm1().sub(train - rollout).mean())
        measured = {"rollout_corr/token_count": float(of_step * length), "rollout_corr/k3_kl": k3}
        lines.append(json.dumps({"step": step, metric: 0.1, **measured}))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def time_until_interactive(page: Path, chromium: str) -> tuple[float, int]:
    """Return the median of five loads, seconds, and the number of DOM nodes."""
    from playwright.sync_api import sync_playwright

    seconds, nodes = [], 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(5):
            opened = browser.new_page(viewport={"width": 1400, "height": 1000})
            start = time.perf_counter()
            opened.goto(page.as_uri())
            opened.wait_for_selector("html[data-ready]", timeout=60_000)
            seconds.append(time.perf_counter() - start)
            nodes = opened.evaluate("document.querySelectorAll('*').length")
            opened.close()
        browser.close()
    return statistics.median(seconds), nodes


def main() -> None:
    """Write a run, view it, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--length", type=int, default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", sequences=options.sequences, length=options.length)
        page = Path(folder) / "view.html"
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "rollcorr", "view", str(run), "-o", str(page)], check=True)
        seconds = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"page {page.stat().st_size / 1e6:.1f} MB, written in {seconds:.1f} s, peak memory {memory:.0f} MiB")
        chromium = shutil.which("chromium")
        if chromium is None:
            print("no browser: apt-get install chromium")
            return
        interactive, nodes = time_until_interactive(page, chromium)
        print(f"interactive after {interactive:.2f} s, {nodes:,} DOM nodes")


if __name__ == "__main__":
    main()
