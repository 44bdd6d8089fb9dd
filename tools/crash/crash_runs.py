"""Training runs that are killed, lose power, or have a full disk; then the same command again, and a comparison.

    python tools/crash/crash_runs.py --jobs 2               every kill point of every run, 100 random times, full disks
    python tools/crash/crash_runs.py --points 8 --times 2   a sample

A kill point is just before a call that opens for writing, writes, flushes, renames, deletes or makes something under
the run directory; and, for a write, half-way through it. A run that was killed there must, when the same command is
given again, end with what an uninterrupted run ends with, to the last bit: metrics (apart from `perf/`), rollout logs,
weights, moments, and every other file. Each run is a child forked from a process that has imported everything.

A power loss before each flush, and after the end, leaves only what was flushed (power_loss.py). In addition, a byte of
the newest checkpoint is changed, and the command is given while another process holds the run's lock. planted_bugs.py
plants the bugs that these find.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # the default one starts a thread
os.environ.setdefault("OMP_NUM_THREADS", "1")

from file_events import NO_LIMIT, FileEvents
from laboratory import Laboratory, Point
from power_loss import Event, read_events

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
SKIPPING = (
    "steps=4",
    "log.null=0",
    "log.evaluate=0",
    "algorithm.loss.kl_coef=0",
    "algorithm.rollout_correction={rollout_rs: token_k1, rollout_rs_threshold: '0.9999_1.0001'}",
)
"""Every other step has an engine that lags behind, so that each token is rejected and the optimizer step left out."""

RUNS: Mapping[str, tuple[str, ...]] = {
    "grpo": (*GRPO, *SHORT),
    "grpo_skipping": (*GRPO, *SHORT, *SKIPPING),
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

KINDS = ("kill", "power", "time", "disk", "damage", "lock")
FULL_DISK_LEVELS = 10

CANNOT_RUN_HERE = 77
"""Exit code where no child can be followed."""


def faults_of(laboratory: Laboratory, name: str, point: Point, expected: Mapping[str, str]) -> list[str]:
    """Do something to a run, give the command again, and list what is wrong afterwards."""
    faults = []
    if point.power:
        ended = laboratory.cut_power(name, point.event)

        # Of a run that had ended nothing may be lost; removals that were not flushed leave hidden names.
        if not ended.killed:
            left = {key: value for key, value in laboratory.outcome(name).items() if "/." not in f"/{key}"}
            faults += _differences(left, expected, "after the end")
    elif point.event or point.disk != NO_LIMIT:
        laboratory.follow(name, kill_at=point.event, in_the_middle=point.in_the_middle, disk=point.disk)
    for delay in point.delays:
        laboratory.run(name, delay=delay)
    if point.locked and (not laboratory.run_locked(name).exit_code or "is in use" not in laboratory.output(name)):
        faults.append("a second process was not refused")

    # Readers may look before the run goes on.
    faults += laboratory.torn_files(name)
    if point.damage:
        laboratory.run(name)
        laboratory.change_a_byte(name)

    printed = laboratory.output(name) if point.disk != NO_LIMIT else ""
    if "Traceback" in printed:
        faults.append(f"a traceback: {printed[-600:]}")
    if point.disk != NO_LIMIT and "No space left" not in printed:
        faults.append(f"the full disk was not reported: {printed[-600:]}")

    again = laboratory.run(name)
    if again.exit_code:
        return [*faults, f"the same command again ends with {again.exit_code}: {laboratory.output(name)[-600:]}"]
    if "cannot be used" in laboratory.output(name) and not point.damage:
        faults.append(f"a damaged file: {laboratory.output(name)[-600:]}")
    return faults + _differences(laboratory.outcome(name), expected, "in the end")


def _differences(found: Mapping[str, str], expected: Mapping[str, str], when: str) -> list[str]:
    """What two outcomes differ in, as one line, if they do."""
    different = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
    return [f"{len(different)} differences {when}: {', '.join(different[:8])}"] if different else []


def kill_points(events: Sequence[Event]) -> list[Point]:
    """Before each event of a followed run, and in the middle of each write that has a middle."""
    points = []
    for event in events:
        points.append(Point(event=event.number))
        if event.kind == "write" and event.amount > 1:
            points.append(Point(event=event.number, in_the_middle=True))
    return points


def power_points(events: Sequence[Event]) -> list[Point]:
    """Before each flush, which is when most is lost, and after the end."""
    return [*(Point(event=event.number, power=True) for event in events if event.kind == "fsync"), Point(power=True)]


def examine(
    name: str,
    folder: Path,
    events: FileEvents,
    *,
    options: argparse.Namespace,
    until: float,
) -> tuple[int, int]:
    """All of one configuration, in random order; returns how many runs were tried and how many failed."""
    first_event, last_event = options.events or (1, sys.maxsize)
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

    seen = read_events(log)
    kinds = Counter(event.kind for event in seen)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    print(f"{name}: {len(seen)} events under the run directory ({counted}); {len(kill_points(seen))} kill points")

    generator, levels = random.Random(options.seed), options.levels
    within = [e for e in seen if first_event <= e.number <= last_event and re.search(options.paths, e.path)]
    kills, losses = kill_points(within), power_points(within)
    if options.points is not None:
        kills, losses = spread(kills, options.points), spread(losses, max(options.points // 2, 1))
    of_kind = {
        "kill": kills,
        "power": losses,
        "time": [Point(delays=tuple(_delays(generator, seconds))) for _ in range(options.times)],
        "disk": [Point(disk=recorded.peak * (2 * level + 1) // (2 * levels)) for level in range(levels)],
        "damage": [Point(damage=True)],
        "lock": [Point(locked=True)],
    }
    chosen = [point for kind in options.kinds for point in of_kind[kind]]
    generator.shuffle(chosen)
    found = in_parallel(
        options.jobs, len(chosen), lambda i: _try(laboratory, f"{i}", chosen[i], expected), until=until,
        until_failure=options.first,
    )  # fmt: skip
    failed = [(chosen[i], faults) for i, faults in found.items() if faults]
    for point, faults in failed[:20]:
        at = f" ({seen[point.event - 1].kind} {seen[point.event - 1].path})" if point.event else ""
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


def in_parallel(
    jobs: int, count: int, call: Callable[[int], list[str]], *, until: float, until_failure: bool = False
) -> dict[int, list[str]]:
    """`{i: call(i)}` for i below `count`, in so many forked processes.

    None is begun after a time of the clock, or after a call that found a fault if `until_failure`.
    """
    with tempfile.TemporaryDirectory() as place:
        children = []
        for worker in range(jobs):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with Path(place, str(worker)).open("w", encoding="utf-8") as file:
                        for i in range(worker, count, jobs):
                            if time.monotonic() < until and not (until_failure and Path(place, "failed").exists()):
                                faults = call(i)
                                file.write(json.dumps({i: faults}) + "\n")
                                if faults:
                                    Path(place, "failed").touch()
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
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from make_shapes_model import make_small_transformer, make_word_table, save_small_model

        sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "caption_projection_dim": 16}
        save_small_model(make_small_transformer(seed=3, **sizes), make_word_table(), folder / "model")
        os._exit(0)
    os.waitpid(child, 0)


def main() -> int:
    """Read the options, examine every run; 1 if anything failed, 77 where this cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS), help="which runs")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="what is done to the runs")
    parser.add_argument("--first", action="store_true", help="stop after the first failure")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument(
        "--points", type=int, help="kill points of each run, evenly spread, and half as many power losses"
    )
    parser.add_argument("--events", type=int, nargs=2, metavar=("FIRST", "LAST"), help="only the events between these")
    parser.add_argument("--paths", default="", help="only the events whose path matches this regular expression")
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
            examine(name, folder, events, options=options, until=time.monotonic() + 60 * options.minutes)
            for name in options.runs
        ]
    tried, failed = (sum(column) for column in zip(*counts, strict=True))
    print(f"{tried - failed} of {tried} runs equal an uninterrupted one, {time.monotonic() - start:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
