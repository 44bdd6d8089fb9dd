"""The measured study: what rollouts of real engines do to importance weights.

    python experiments/mismatch_in_practice/measured.py              every cell that is not done; then page and figures
    python experiments/mismatch_in_practice/measured.py --quick      a subset in two minutes, with asserted numbers
    python experiments/mismatch_in_practice/measured.py --small      the whole grid on less, in five minutes
    python experiments/mismatch_in_practice/measured.py --list       what is done, and what the rest costs
    python experiments/mismatch_in_practice/measured.py --page       page and figures, from the committed results

A cell is a recording (an engine and a sampling), scored by a trainer that is some updates ahead. Its result is kept in
runs/measured/cells at once; Ctrl-C keeps what is done, and the same command goes on. (An engine that is written in C++
is not left within a recording: the end may take half a minute.) Recordings and trained policies
stay in runs/measured too: they are large, and made again from the seed. Their hashes are in the results, which go to
measured/ beside this file.

The study is that of Fang & Khazi (2025), "Mismatch Praxis", https://www.llmdata.com/blog/mismatch-praxis/.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from measured_numbers import Row, against_temperature, at_length, clipped  # noqa: E402
from measured_rollouts import (  # noqa: E402
    Recording,
    described,
    policies_ahead,
    policy_at,
    policy_folder,
    recorded,
    rounded,
    sides,
    train_log_probs,
    unavailable,
)

from rollcorr.run_directory.durable_files import write_text_durably  # noqa: E402
from rollcorr.simulation.studies import Cell  # noqa: E402
from rollcorr.simulation.study_run import StudyResult, cell_key, run_cells  # noqa: E402
from rollcorr.train.grpo import load_policy  # noqa: E402

SETTINGS = HERE / "measured.yaml"
RESULTS = HERE / "measured"
RUNS = Path("runs") / "measured"

SECONDS = {"record": 4.0e-4, "score": 2.5e-4, "update": 2.0}
"""Core-seconds per recorded token, per scored token, and per update, on an AMD EPYC with AVX-512."""


def settings_of(path: Path = SETTINGS, *, quick: bool = False, small: bool = False) -> dict[str, Any]:
    """measured.yaml, or one of its subsets."""
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    subset, less = settings.pop("quick"), settings.pop("small")
    if small:
        settings |= less
    if quick:
        chosen = subset.pop("engines")
        settings |= subset
        settings["engines"] = {name: settings["engines"][name] for name in chosen}
    return settings


def missing_engines(settings: Mapping[str, Any], console: Console) -> dict[str, str]:
    """The engines that cannot run here, each with the reason, which is printed."""
    reasons = {name: unavailable(engine) for name, engine in settings["engines"].items()}
    found = {name: reason for name, reason in reasons.items() if reason is not None}
    for name, reason in found.items():
        console.print(f"skipped: {name}: {reason}")
    return found


def without(settings: Mapping[str, Any], missing: Mapping[str, str]) -> dict[str, Any]:
    """The engines that can run."""
    return {name: engine for name, engine in settings["engines"].items() if name not in missing}


def cells_of(settings: Mapping[str, Any], engines: Mapping[str, Any]) -> list[Cell]:
    """Recordings first at 0 updates, so that an early end leaves every engine measured; then the other trainers."""
    shared = {
        "model": settings["model"]["path"],
        "rows": settings["rows"],
        "tokens": settings["tokens"],
        "seed": settings["seed"],
    }
    cells = []
    for updates in settings["stale"]:
        trained = {} if updates == 0 else {"training": settings["updates"]}
        for name, engine in engines.items():
            if updates and name not in settings["stale_engines"]:
                continue
            for label, sampling in settings["samplings"].items():
                # What follows from a recording is measured at once: its file then need not be read again.
                own = {"engine": name, "options": engine, "sampling": label, "sampled": sampling, "updates": updates}
                cells.append(
                    Cell("grid", shared | own | trained | {"lengths": settings["lengths"], "clips": settings["clips"]})
                )

    # Where both sides' logits are at hand: the same code computes them.
    label = next(label for label, sampling in settings["samplings"].items() if sampling == {"temperature": 1.0})
    base = next(name for name, engine in engines.items() if engine["kind"] == "transformers")
    for knob in ("bf16", "4 bits", *(f"{updates} updates" for updates in settings["stale"][1:2])):
        own = {"engine": base, "options": engines[base], "sampling": label, "knob": knob}
        more = {"temperatures": settings["temperatures"], "stale": settings["stale"], "training": settings["updates"]}
        cells.append(Cell("temperature", shared | own | {"sampled": settings["samplings"][label]} | more))
    return cells


def budget(cells: Sequence[Cell], folder: Path, settings: Mapping[str, Any], runs: Path) -> list[str]:
    """What is done, and what the rest costs."""
    left = [cell for cell in cells if not (folder / "cells" / f"{cell_key(cell)}.json").exists()]
    tokens = settings["rows"] * settings["tokens"]
    new = {recording_path(cell, runs) for cell in left}
    seconds = len(left) * tokens * SECONDS["score"]
    seconds += sum(not path.exists() for path in new) * tokens * SECONDS["record"]
    last = max(settings["stale"])
    if left and not policy_folder(runs / "policies", last).is_dir():
        seconds += last * SECONDS["update"]
    streams = f"{settings['rows']} streams of {settings['tokens']:,} tokens"
    return [
        f"{len(cells) - len(left)} of {len(cells)} cells are done, of {streams} each",
        f"{len(left)} are left: about {seconds / 60:.0f} core-minutes",
    ]


def recording_path(cell: Cell, runs: Path) -> Path:
    """Where a cell's recording is kept."""
    names = ("model", "rows", "tokens", "seed", "options", "sampled")
    key = cell_key(Cell("recording", {name: cell.settings[name] for name in names}))
    return runs / "recordings" / f"{key}.pt"


def run_cell(cell: Cell, runs: Path) -> list[Row]:
    """Measure one cell."""
    asked = cell.settings
    recording: Recording = recorded(
        recording_path(cell, runs),
        asked["model"],
        asked["options"],
        asked["sampled"],
        rows=asked["rows"],
        tokens=asked["tokens"],
        seed=asked["seed"],
    )
    return _grid(asked, recording, runs) if cell.study == "grid" else _temperature(asked, recording, runs)


def _grid(asked: Mapping[str, Any], recording: Recording, runs: Path) -> list[Row]:
    model = _trainer(asked["model"], asked["updates"], runs)
    scores = train_log_probs(model, recording)
    mask = recording.tokens.response_mask
    own = {name: asked[name] for name in ("engine", "sampling", "updates")}
    rows = []
    for mode, log_pi, log_mu in sides(recording, scores):
        for length in asked["lengths"]:
            row = own | {"mode": mode} | at_length(log_pi, log_mu, mask, length)

            # A two-sided clip is swept where there are enough tokens for a dilemma.
            sweep = [clipped(log_pi, log_mu, mask, length, float(c)) for c in asked["clips"]] if length >= 128 else []
            for column in ("at_lower", "at_upper", "ess", "share_of_largest"):
                row[f"clip_{column}"] = " ".join(f"{clip[column]:.3g}" for clip in sweep)
            row["outside"] = scores["outside"][mask].double().mean().item() if mode == "replayed" else ""
            rows.append(row | described(recording))
    return rows


def _temperature(asked: Mapping[str, Any], recording: Recording, runs: Path) -> list[Row]:
    trainer = _trainer(asked["model"], 0, runs)
    knob = asked["knob"]
    if knob == "bf16":
        engine = policy_at(asked["model"]).model
        for parameter in engine.parameters():  # the rotary frequencies keep their type, as in the engine
            parameter.data = parameter.data.bfloat16()
    elif knob == "4 bits":
        engine = rounded(trainer, 4)
    else:
        engine, trainer = trainer, _trainer(asked["model"], int(knob.split()[0]), runs)
    tokens = min(512, asked["tokens"])
    found = against_temperature(trainer, engine, recording, asked["temperatures"], tokens)
    return [{"knob": knob} | row for row in found]


def _trainer(path: str, updates: int, runs: Path) -> Any:  # noqa: ANN401 (a transformers model)
    if updates == 0:
        return policy_at(path).model
    model = load_policy(str(policy_folder(runs / "policies", updates))).model
    return model.eval()


def run_study(settings: Mapping[str, Any], folder: Path, runs: Path, console: Console, *, command: str) -> StudyResult:
    """Run the cells that are left and write the tables."""
    missing = missing_engines(settings, console)
    cells = cells_of(settings, without(settings, missing))
    for line in budget(cells, folder, settings, runs):
        console.print(line)

    if any(not (folder / "cells" / f"{cell_key(cell)}.json").exists() for cell in cells):
        stale = tuple(settings["stale"])
        policies_ahead(settings["model"]["path"], stale, settings["updates"], settings["seed"], runs / "policies")
    with _progress() as on_cell:
        result = run_cells(cells, folder, command=command, run=lambda cell: run_cell(cell, runs), on_cell=on_cell)

    # What the page needs to know besides the rows.
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    facts |= {"skipped": missing, "clips": [float(clip) for clip in settings["clips"]]}
    write_text_durably(folder / "run.json", json.dumps(facts, ensure_ascii=False, indent=2) + "\n")
    return result


@contextmanager
def _progress() -> Iterator[Callable[[Cell, int, int], None]]:
    """A bar over cells on a terminal, else a line for each."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)

        def on_cell(cell: Cell, number: int, total: int) -> None:
            asked = cell.settings
            what = f"{asked['engine']}, sampled at {asked['sampling']}, "
            what += asked.get("knob") or f"{asked['updates']} updates"
            progress.update(task, description=what, completed=number, total=total)
            if not console.is_terminal:
                console.print(f"cell {number + 1} of {total}: {what}")

        yield on_cell


def wrong_numbers(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """What the subset asserts, as sentences about what does not hold."""

    def one(**wanted: Any) -> Row:  # noqa: ANN401
        return next(row for row in rows["grid"] if all(row[name] == value for name, value in wanted.items()))

    longest = max(row["T"] for row in rows["grid"])
    cut = "0.7, 0.8, 20"
    at = {"engine": "bf16", "updates": 0, "T": longest}
    exact = one(**at | {"engine": "float32"}, sampling="1.0", mode="processed")
    clean = one(**at, sampling="1.0", mode="processed")
    crude = one(**at | {"engine": "int8, 3 bits"}, sampling="1.0", mode="processed")
    raw, cold = (one(**at, sampling="0.4", mode=mode) for mode in ("raw", "processed"))
    unmatched, replayed = (one(**at, sampling=cut, mode=mode) for mode in ("processed", "replayed"))
    holds = {
        "two float32 programs differ by k3 < 1e-7": exact["k3"] < 1e-7,
        "bf16 differs by k3 in (1e-5, 2e-3)": 1e-5 < clean["k3"] < 2e-3,
        "three bits differ ten times more": crude["k3"] > 10 * clean["k3"],
        "raw log-probs at temperature 0.4 make k3 ten times larger": raw["k3"] > 10 * cold["k3"],
        "a cut that the trainer does not know makes KL above 0.02": unmatched["kl"] > 0.02,
        "replayed kept sets bring k3 below 1e-2": replayed["k3"] < 1e-2,
        "a healthy control has no false positive": not clean["false_positive"] and clean["token_ess"] > 0.99,
        "three bits lower the sequence ESS below the token ESS": crude["ess"] < crude["token_ess"],
    }
    if longest * unmatched["kl"] > 30:
        holds["clamped weights look healthy"] = unmatched["ess"] > 0.9
        holds["the health rule finds them"] = bool(unmatched["false_positive"])
    return [sentence for sentence, truth in holds.items() if not truth]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description="The measured study.")
    parser.add_argument("--quick", action="store_true", help="a subset in two minutes, with asserted numbers")
    parser.add_argument("--small", action="store_true", help="the whole grid on 8 streams of 1,024 tokens (5 minutes)")
    parser.add_argument("--list", action="store_true", help="show what is done and what the rest costs")
    parser.add_argument("--page", action="store_true", help="write page and figures from the results that are there")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of the engines")
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="another file like measured.yaml")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)

    folder = runs = RUNS / "quick" if options.quick else RUNS
    settings = settings_of(options.settings, quick=options.quick, small=options.small)
    if options.list:
        cells = cells_of(settings, without(settings, missing_engines(settings, console)))
        console.print("\n".join(budget(cells, folder, settings, runs)))
        return 0
    if not options.page:
        torch.set_num_threads(options.threads)
        command = " ".join(["measured.py", *(sys.argv[1:] if arguments is None else arguments)])
        result = run_study(settings, folder, runs, console, command=command)
        console.print(f"{result.done} of {result.total} cells, {result.cpu_seconds / 60:.1f} core-minutes")
        if not options.quick:
            RESULTS.mkdir(exist_ok=True)
            for name in ("grid.csv", "temperature.csv", "run.json"):
                if (folder / name).exists():
                    shutil.copy(folder / name, RESULTS / name)
        if result.interrupted:
            console.print("interrupted; the same command goes on from here")
            return 130
        if options.quick:
            wrong = wrong_numbers(result.rows)
            for sentence in wrong:
                console.print(f"does not hold: {sentence}")
            console.print("every asserted number holds" if not wrong else f"{len(wrong)} do not hold")
            return 1 if wrong else 0

    from claims_page import write_claims_page
    from measured_page import write_page

    for path in (*write_page(RESULTS), write_claims_page()):
        console.print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
