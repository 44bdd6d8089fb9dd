"""Rollout logs of 100 training steps in which something breaks, and of as many in which nothing does.

    python experiments/diagnosis/series_faults.py OUTPUT [--model DIR] [--series 10] [--healthy 100] [--seed 0]

The difference between trainer and sampler is that of real weights: the rows were sampled once, in bfloat16, from the
start of a training run, and scored by models on the line from the start through a later snapshot and beyond. A fault
moves along that line. The noise of the engine drifts slowly in every series, faulty or not.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from live_faults import in_engine
from log_files import write_log
from small_model import DEFAULT_MODEL, copied, load_model, make_prompts, sample, score, train
from torch import Tensor, nn

STEPS = 100
ROWS_PER_STEP = 24
POOL_ROWS = 768
TOKENS = 64
UPDATES = 8
GRID = (0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.2, 3.2)
"""Places on the line: 0 is the sampler's weights, 1 those after `UPDATES` updates."""

INDEX = "series.csv"


@dataclass(frozen=True, kw_only=True)
class SeriesEntry:
    """One row of the index.

    Attributes:
        path: the log, below the folder of the index.
        kind: what happens in it; "healthy" when nothing does.
        onset: first step that is affected; −1 when none is.
        fivefold: first step whose expected k3 is five times that of the start; −1 when none is.
        k3: the expected k3 of each step, separated by spaces.
    """

    path: str
    kind: str
    onset: int
    fivefold: int
    k3: str


class Pool:
    """Rows sampled from the start of a run, and their log-probs under the weights along the line."""

    def __init__(self, model: nn.Module, *, seed: int, rows: int = POOL_ROWS) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        *_, later = train(copied(model).requires_grad_(True), UPDATES, generator=generator)
        self.prompts = make_prompts(model, rows, generator=generator)
        responses = sample(in_engine(model, "bf16"), self.prompts, tokens=TOKENS, generator=generator)
        self.ids, self.rollout = responses.ids, responses.log_prob
        self._scored = torch.stack([self._score(on_line(model, later, place)) for place in GRID])
        self._lengths = torch.tensor([len(ids) for ids in self.ids], device="cpu")
        self._mask = torch.arange(self._scored.shape[2], device="cpu") < self._lengths[:, None]
        self._rollout = _padded(self.rollout)
        self._mean_k3 = [self._k3(place, 1.0) for place in GRID]

    def _score(self, model: nn.Module) -> Tensor:
        # In parts, because the logits of all rows would need a gigabyte.
        parts = [slice(first, first + 128) for first in range(0, len(self.ids), 128)]
        return _padded([row for part in parts for row in score(model, self.prompts[part], self.ids[part])])

    def train(self, rows: Tensor, *, place: float, noise: float) -> list[list[float]]:
        """Trainer's log-probs of some rows: displaced by `place`, with the engine's own noise times `noise`."""
        d = self._difference(place, noise)[rows]
        # Noise that is multiplied would make the log-prob of a near-certain token positive; that of an engine does not.
        log_prob = torch.minimum(self._rollout[rows] + d, 0.05 * self._rollout[rows])
        return [log_prob[at, : len(self.ids[row])].tolist() for at, row in enumerate(rows.tolist())]

    def expected_k3(self, place: float, noise: float) -> float:
        """k3 over the whole pool; the displacement and the noise are independent, so their parts add."""
        upper = min(range(1, len(GRID)), key=lambda at: (GRID[at] < place, at))
        share = (place - GRID[upper - 1]) / (GRID[upper] - GRID[upper - 1])
        own = self._mean_k3[0]
        moved = (1 - share) * self._mean_k3[upper - 1] + share * self._mean_k3[upper]
        return moved + (noise**2 - 1) * own

    def _difference(self, place: float, noise: float) -> Tensor:
        upper = min(range(1, len(GRID)), key=lambda at: (GRID[at] < place, at))
        share = (place - GRID[upper - 1]) / (GRID[upper] - GRID[upper - 1])
        scored = (1 - share) * self._scored[upper - 1] + share * self._scored[upper]
        return noise * (self._scored[0] - self._rollout) + (scored - self._scored[0])

    def _k3(self, place: float, noise: float) -> float:
        d = self._difference(place, noise)[self._mask].double()
        return float((torch.expm1(d) - d).mean())


def on_line(start: nn.Module, later: nn.Module, place: float) -> nn.Module:
    """The model whose weights are start + place · (later − start)."""
    model = copied(start)
    with torch.no_grad():
        for weight, other in zip(model.parameters(), later.parameters(), strict=True):
            weight.lerp_(other, place)
    return model


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], device="cpu")


Course = Callable[[int], tuple[float, float]]
"""Step → the place on the line, and the factor of the engine's noise."""


def _never_synced(onset: int) -> Course:
    return lambda step: (0.04 * step, 1.0)


def _breaks(onset: int) -> Course:
    return lambda step: (0.06 * max(0, step - onset + 1), 1.0)


def _jump(onset: int) -> Course:
    # k3 of some 400 times its start; Pool.place_of finds the place.
    return lambda step: (-400.0 if step >= onset else 0.0, 1.0)


def _slow_growth(onset: int) -> Course:
    # The engine itself gets worse with its age: its noise doubles in k3 every eight steps.
    return lambda step: (0.0, 2 ** (max(0, step - onset + 1) / 16))


def _resume(onset: int) -> Course:
    # The engine restarts from the first checkpoint, and later syncs do not reach it.
    return lambda step: (0.5 + 0.03 * (step - onset) if step >= onset else 0.0, 1.0)


KINDS: Mapping[str, Callable[[int], Course]] = {
    "never_synced": _never_synced,
    "breaks": _breaks,
    "jump": _jump,
    "slow_growth": _slow_growth,
    "resume": _resume,
}


def place_with_k3(pool: Pool, factor: float) -> float:
    """The place on the line whose expected k3 is this many times that of the start."""
    low, high = 0.0, GRID[-1]
    for _ in range(40):
        middle = (low + high) / 2
        above = pool.expected_k3(middle, 1.0) > factor * pool.expected_k3(0.0, 1.0)
        low, high = (low, middle) if above else (middle, high)
    return low


def write_series(folder: Path, pool: Pool, kind: str, number: int, *, seed: int) -> SeriesEntry:
    """Write one log of `STEPS` steps; each step has rows of its own and says that its weights are fresh."""
    generator = torch.Generator("cpu").manual_seed(seed)
    onset = 1 if kind == "never_synced" else int(torch.randint(20, 61, (1,), generator=generator, device="cpu"))
    course: Course = KINDS[kind](onset) if kind != "healthy" else lambda step: (0.0, 1.0)
    drift = _drift(generator)

    steps, rows, train_log_prob, k3 = [], [], [], []
    for step in range(STEPS):
        place, noise = course(step)
        place = min(place_with_k3(pool, -place) if place < 0 else place, GRID[-1])
        chosen = torch.randperm(len(pool.ids), generator=generator, device="cpu")[:ROWS_PER_STEP]
        train_log_prob += pool.train(chosen, place=place, noise=noise * drift[step])
        k3.append(pool.expected_k3(place, noise))
        rows += chosen.tolist()
        steps += [step] * ROWS_PER_STEP

    path = f"{kind}/{number}.parquet"
    write_log(
        folder / path,
        prompt_ids=[pool.prompts[row] for row in rows],
        response_ids=[pool.ids[row] for row in rows],
        rollout_log_prob=[pool.rollout[row] for row in rows],
        old_log_prob=train_log_prob,
        steps=steps,
        versions=steps,
    )
    fivefold = next((step for step in range(STEPS) if k3[step] >= 5 * k3[0]), -1)
    return SeriesEntry(
        path=path,
        kind=kind,
        onset=-1 if kind == "healthy" else onset,
        fivefold=fivefold,
        k3=" ".join(f"{value:.3e}" for value in k3),
    )


def _drift(generator: torch.Generator) -> list[float]:
    """A factor of the noise for each step: 4 % of wander, and a trend of up to 10 % over the series."""
    trend = 0.1 * (2 * float(torch.rand(1, generator=generator, device="cpu")) - 1)
    level, factors = 0.0, []
    for step in range(STEPS):
        level = 0.9 * level + 0.04 * math.sqrt(1 - 0.81) * float(torch.randn(1, generator=generator, device="cpu"))
        factors.append(math.exp(level + trend * step / STEPS))
    return factors


def write_all(folder: Path, model: nn.Module, *, series: int, healthy: int, seed: int) -> list[SeriesEntry]:
    """Write the series of every kind and the healthy ones, and their index."""
    pool = Pool(model, seed=seed)
    jobs = [(kind, number) for kind in KINDS for number in range(series)]
    jobs += [("healthy", number) for number in range(healthy)]
    entries = []
    for place, (kind, number) in enumerate(jobs):
        entries.append(write_series(folder, pool, kind, number, seed=seed * 10_000 + place))
    with (folder / INDEX).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(SeriesEntry)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(entry) for entry in entries)
    return entries


def read_series(folder: Path) -> tuple[SeriesEntry, ...]:
    """The entries of a folder's index; none if there is none."""
    if not (folder / INDEX).exists():
        return ()
    with (folder / INDEX).open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return tuple(
            SeriesEntry(**row | {"onset": int(row["onset"]), "fivefold": int(row["fivefold"])}) for row in rows
        )


def main() -> None:
    """Write the series that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of a causal model of transformers")
    parser.add_argument("--series", type=int, default=10, help="series of each kind")
    parser.add_argument("--healthy", type=int, default=100, help="series in which nothing happens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    started = time.perf_counter()
    entries = write_all(
        options.output, load_model(options.model), series=options.series, healthy=options.healthy, seed=options.seed
    )
    for entry in entries:
        if entry.kind != "healthy":
            sys.stdout.write(f"{entry.path}  onset {entry.onset}, five times k3 at {entry.fivefold}\n")
    sys.stdout.write(f"{len(entries)} series in {time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
