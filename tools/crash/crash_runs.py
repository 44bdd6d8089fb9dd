"""Training runs that are killed, or whose disk is full; then the same command again, and a comparison.

    python tools/crash/crash_runs.py --jobs 2               every kill point of every run, 100 random times, full disks
    python tools/crash/crash_runs.py --points 8 --times 2   a sample

A kill point is just before a call that opens for writing, writes, flushes, renames, deletes or makes something under
the run directory; and, for a write, half-way through it. A run that was killed there must, when the same command is
given again, end with what an uninterrupted run ends with, to the last bit: metrics (apart from `perf/`), rollout logs,
weights, moments, and every other file. Each run is a child forked from a process that has imported everything.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import hashlib
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # the default one starts a thread
os.environ.setdefault("OMP_NUM_THREADS", "1")

from file_events import NO_LIMIT, Ended, FileEvents

RUN = "run"
SHORT = ("steps=2", "checkpoint.every=1", "checkpoint.keep=2", "log.evaluate=2", "rollout.refresh_every=2", "threads=1")
GRPO = (
    "recipe=grpo",
    "model.path=null",
    "model.config={hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1, "
    "num_key_value_heads: 1, head_dim: 16}",
    "warm_up.steps=1",
    "warm_up.batch_size=2",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=4",
    "algorithm.loss.kl_coef=0.1",
    "optim.lr=0.01",
    "log.null=2",
)
FLOW_GRPO = (
    "recipe=flow_grpo",
    "reward.name=color",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.num_steps=4",
    "rollout.dtype=fp8",
    "optim.lr=0.01",
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "grpo": (*GRPO, *SHORT),
    "flow_grpo": (*FLOW_GRPO, "algorithm.loss.kl_coef=0.1", *SHORT),
    "flow_grpo_lora": (*FLOW_GRPO, "model.lora.rank=2", *SHORT),
}
"""Each with a stale engine, a reference policy or adapters, evaluations, rollout logs, pictures and events."""

MODULES = (
    "rollcorr.cli", "rollcorr.train.recipes", "rollcorr.train.grpo.grpo_recipe", "rollcorr.engines.transformers",
    "rollcorr.rollout_log", "transformers.models.qwen3.modeling_qwen3", "transformers.generation.utils",
    "transformers.models.auto.modeling_auto", "tokenizers", "torch.utils.tensorboard", "pyarrow.parquet",
    "pyarrow.compute", "safetensors.torch", "omegaconf", "typer._adapters", "dateutil.relativedelta", "numpy.ma",
)  # fmt: skip
DIFFUSION_MODULES = (
    "rollcorr.train.flow_grpo.flow_grpo_recipe", "diffusers.models.transformers.transformer_sd3",
    "diffusers.schedulers.scheduling_flow_match_euler_discrete", "peft", "PIL.PngImagePlugin",
)  # fmt: skip
"""What the runs import, partly inside functions."""

FULL_DISK_LEVELS = 10
SECONDS_AT_MOST = 300

CANNOT_RUN_HERE = 77
"""Exit code where no child can be followed."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One thing to do to a run.

    Attributes:
        event: kill at this event; 0 for none.
        in_the_middle: of a write.
        delays: kill after so many seconds, once for each.
        disk: bytes that fit on the disk.
    """

    event: int = 0
    in_the_middle: bool = False
    delays: tuple[float, ...] = ()
    disk: int = NO_LIMIT

    def __str__(self) -> str:
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

    def outcome(self, name: str) -> dict[str, str]:
        """What the runs of a name left."""
        return dict(_outcome(self._place(name) / RUN))

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


def _outcome(run: Path) -> Iterator[tuple[str, str]]:
    """Everything under a run directory, by name: digests of tensors, rows and bytes, without times."""
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_dir():
            yield f"{name}/", ""
        elif name.startswith("tensorboard/") or path.name in ("manifest.json", "run.json"):
            continue  # events have times; the identity of a run is drawn
        elif path.name == "history.json":
            history = json.loads(path.read_text(encoding="utf-8"))
            yield name, json.dumps({key: value for key, value in history.items() if key != "run"})
        elif path.suffix == ".safetensors":
            from safetensors.torch import load_file

            yield from _tensors(name, load_file(path))
        elif path.suffix == ".pt":
            import torch

            yield from _tensors(name, torch.load(path, weights_only=True))
        elif path.suffix == ".parquet":
            import pyarrow.parquet as pq

            yield name, _digest(repr(pq.read_table(path).to_pylist()).encode())
        elif path.name == "metrics.jsonl":
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                kept = {key: value for key, value in row.items() if not key.startswith("perf/")}
                yield f"{name} step {row['step']}", json.dumps(kept)
        else:
            yield name, _digest(path.read_bytes())


def _tensors(name: str, value: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 (a nested state)
    import torch

    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(f"{name}:{key}", part)
    elif torch.is_tensor(value):
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, f"{value.dtype} {tuple(value.shape)} {_digest(content)}"
    else:
        yield name, repr(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def faults_of(laboratory: Laboratory, name: str, point: Point, expected: Mapping[str, str]) -> list[str]:
    """Do something to a run, give the command again, and list what is wrong afterwards."""
    faults = []
    if point.event or point.disk != NO_LIMIT:
        laboratory.follow(name, kill_at=point.event, in_the_middle=point.in_the_middle, disk=point.disk)
    for delay in point.delays:
        laboratory.run(name, delay=delay)

    printed = laboratory.output(name) if point.disk != NO_LIMIT else ""
    if "Traceback" in printed:
        faults.append(f"a traceback: {printed[-600:]}")
    if point.disk != NO_LIMIT and "No space left" not in printed:
        faults.append(f"the full disk was not reported: {printed[-600:]}")

    again = laboratory.run(name)
    if again.exit_code:
        return [*faults, f"the same command again ends with {again.exit_code}: {laboratory.output(name)[-600:]}"]
    if "cannot be used" in laboratory.output(name):
        faults.append(f"a damaged file: {laboratory.output(name)[-600:]}")
    found = laboratory.outcome(name)
    different = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
    if different:
        faults.append(f"{len(different)} differences: {', '.join(different[:8])}")
    return faults


def kill_points(log: Path) -> list[Point]:
    """Before each event of a followed run, and in the middle of each write that has a middle."""
    points = []
    for line in log.read_text(encoding="utf-8").splitlines():
        number, kind, size, _ = line.split("\t")
        points.append(Point(event=int(number)))
        if kind == "write" and int(size) > 1:
            points.append(Point(event=int(number), in_the_middle=True))
    return points


def examine(
    name: str,
    folder: Path,
    events: FileEvents,
    *,
    jobs: int,
    between: tuple[int, int],
    points: int | None,
    times: int,
    levels: int,
    seed: int,
    until: float,
) -> tuple[int, int]:
    """All of one configuration, in random order; returns how many runs were tried and how many failed."""
    start = time.monotonic()
    laboratory = Laboratory(RUNS[name], folder / name, events)
    log = folder / f"{name}.events"
    recorded = laboratory.follow("recorded", log=log, disk=2**62)
    expected = laboratory.outcome("recorded")
    began = time.monotonic()
    whole = laboratory.run("whole")
    seconds = time.monotonic() - began
    if recorded.exit_code or whole.exit_code or laboratory.outcome("whole") != expected:
        print(f"{name}: an uninterrupted run fails or is not repeatable\n{laboratory.output('recorded')}")
        return 1, 1

    possible = kill_points(log)
    kinds = Counter(line.split("\t")[1] for line in log.read_text(encoding="utf-8").splitlines())
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{name}: {recorded.events} events under the run directory ({counted}); {len(possible)} kill points")

    generator = random.Random(seed)
    chosen = [point for point in possible if between[0] <= point.event <= between[1]]
    chosen = chosen if points is None else spread(chosen, points)
    chosen += [Point(delays=tuple(_delays(generator, seconds))) for _ in range(times)]
    chosen += [Point(disk=recorded.peak * (2 * level + 1) // (2 * levels)) for level in range(levels)]
    generator.shuffle(chosen)
    found = in_parallel(jobs, len(chosen), lambda i: _try(laboratory, f"{i}", chosen[i], expected), until=until)
    failed = [(chosen[i], faults) for i, faults in found.items() if faults]
    lines = log.read_text(encoding="utf-8").splitlines()
    for point, faults in failed[:20]:
        at = f" ({lines[point.event - 1]})" if point.event else ""
        print(f"{name}: {point}{at}: {'; '.join(faults)}")

    left_out = f"; {len(chosen) - len(found)} were left out for want of time" if len(found) < len(chosen) else ""
    taken = time.monotonic() - start
    print(f"{name}: {len(found) - len(failed)} of {len(found)} passed in {taken:.0f} s{left_out}", flush=True)
    return len(found), len(failed)


def spread(points: list[Point], count: int) -> list[Point]:
    """So many of the points, evenly spread, the first and the last among them."""
    if count >= len(points):
        return points
    return [points[round(i * (len(points) - 1) / max(count - 1, 1))] for i in range(count)]


def _delays(generator: random.Random, seconds: float) -> list[float]:
    """One to three kills in a row."""
    return [generator.uniform(0, seconds) for _ in range(generator.randint(1, 3))]


def _try(laboratory: Laboratory, name: str, point: Point, expected: Mapping[str, str]) -> list[str]:
    faults = faults_of(laboratory, name, point, expected)
    if not faults:
        laboratory.remove(name)
    return faults


def in_parallel(jobs: int, count: int, call: Callable[[int], list[str]], *, until: float) -> dict[int, list[str]]:
    """`{i: call(i)}` for i below `count`, in so many forked processes; none is begun after a time of the clock."""
    with tempfile.TemporaryDirectory() as place:
        children = []
        for worker in range(jobs):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with Path(place, str(worker)).open("w", encoding="utf-8") as file:
                        for i in range(worker, count, jobs):
                            if time.monotonic() < until:
                                file.write(json.dumps({i: call(i)}) + "\n")
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)

        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(ended):
            raise RuntimeError(f"a process that makes the runs ended with {max(map(abs, ended))}")
        lines = [line for file in Path(place).iterdir() for line in file.read_text(encoding="utf-8").splitlines()]
    return {int(i): faults for line in lines for i, faults in json.loads(line).items()}


def warm_up(names: Sequence[str]) -> None:
    """Import what the runs import, so that their forked children find it.

    Nothing is computed here: a process that has started threads cannot be forked.
    """
    for module in MODULES + (DIFFUSION_MODULES if any("flow" in name for name in names) else ()):
        importlib.import_module(module)

    # Tables that these libraries make once.
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from rollcorr.train.recipes import load_config

    for name in names:
        load_config(None, RUNS[name])
    get_checkpoint_conversion_mapping("qwen3")
    gc.collect()
    gc.freeze()


def make_the_small_models(folder: Path) -> None:
    """Make the diffusion model, in a child; and a reward that random weights can earn."""
    from rollcorr.train.grpo import grpo_trainer
    from rollcorr.train.grpo.tasks import Reward

    def share_of_low_bytes(response_ids: Sequence[int], *_: object, **__: object) -> Reward:
        low = sum(token < 128 for token in response_ids)
        return Reward(low / max(len(response_ids), 1), correct=low * 2 > len(response_ids))

    grpo_trainer.hard_gated_reward = share_of_low_bytes
    child = os.fork()
    if child == 0:
        from rollcorr.train.flow_grpo.pretrain import make_small_transformer, make_word_table, save_small_model

        sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16}
        save_small_model(make_small_transformer(seed=3, **sizes), make_word_table(), folder / "model")
        os._exit(0)
    os.waitpid(child, 0)


def main() -> int:
    """Read the options, examine every run; 1 if anything failed, 77 where this cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS), help="which runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--points", type=int, help="kill points of each run, evenly spread; all without it")
    parser.add_argument("--events", type=int, nargs=2, metavar=("FIRST", "LAST"), help="only the events between these")
    parser.add_argument("--times", type=int, default=100, help="runs killed at random times")
    parser.add_argument("--levels", type=int, default=FULL_DISK_LEVELS, help="disks of different sizes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so long, for each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the random times")
    parser.add_argument("--folder", type=Path, help="keep the failed runs here")
    options = parser.parse_args()

    start = time.monotonic()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where flushing costs nothing
    with tempfile.TemporaryDirectory(dir=memory) as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            events = FileEvents(folder)
            events.run(lambda: 0, folder)
        except OSError as error:
            print(error)
            return CANNOT_RUN_HERE
        for name in RUNS:
            if name.startswith("flow_grpo"):
                RUNS[name] = (*RUNS[name], f"model.path={folder / 'model'}")
        warm_up(options.runs)
        make_the_small_models(folder)

        counts = [
            examine(
                name, folder, events, jobs=options.jobs, between=tuple(options.events or (1, sys.maxsize)),
                points=options.points, times=options.times, seed=options.seed,
                levels=options.levels, until=time.monotonic() + 60 * options.minutes,
            )
            for name in options.runs
        ]  # fmt: skip
    tried, failed = (sum(column) for column in zip(*counts, strict=True))
    print(f"{tried - failed} of {tried} runs equal an uninterrupted one, {time.monotonic() - start:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
