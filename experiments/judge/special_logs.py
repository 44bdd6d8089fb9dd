"""Logs of part 3: turns, sharpened policies, nulls that must not be trusted, and further healthy logs."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import torch
from judge_engine import engine_copy
from outside_lab import PROMPT_LENGTHS, ROWS, Bench, Scored, with_update, write_log, write_null
from outside_trainer import tool_answer_cut
from torch import Tensor, nn

TEMPERATURES = (0.05, 0.3, 0.6, 1.0, 1.3)
NUMERICS = ("bf16", "fp16", "bf16_fp32_head", "int8")
SHARPNESS = 1.6


def turn_log(name: str, seed: int, folder: Path) -> None:
    """Six turns; from `turn_K` on, the trainer's context lacks half of a tool's answer."""
    bench, turn = Bench(seed), int(name.removeprefix("turn_"))
    groups = [tool_answer_cut(bench, prompts, turn_of_onset=turn) for prompts in bench.prompts]
    write_log(bench, groups, folder)


def sharpened_log(name: str, seed: int, folder: Path) -> None:
    """Equal weights on both sides: logits × 1.6 ("sharper_head"), or prompts of random ids ("other_prompts").

    The null is that of the start: the policy before it became sharp, with texts as prompts.
    """
    bench = Bench(seed, sharpness=SHARPNESS if name == "sharper_head" else 1.0)
    if name == "sharper_head":
        prompts = bench.prompts
    else:
        prompts = [torch.randint(259, 512, (ROWS, length), generator=bench.generator) for length in PROMPT_LENGTHS]
    write_log(bench, [bench.correct(group) for group in prompts], folder)


def wrong_engine(bench: Bench, name: str) -> nn.Module:
    """Return the engine of a null: a stale head, other weights, or an honest 4-bit copy of the right weights."""
    if name == "int4_engine":
        return engine_copy(bench.trainer, "int4")
    if name == "other_weights":
        return engine_copy(with_update(bench.trainer, rank=8, size=0.1, seed=21), "bf16")
    model = copy.deepcopy(bench.trainer)
    model.lm_head = copy.deepcopy(model.lm_head)
    noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(22))
    with torch.no_grad():
        model.lm_head.weight.add_(0.03 * noise * model.lm_head.weight.norm() / noise.norm())
    return engine_copy(model, "bf16")


def null_log(name: str, seed: int, folder: Path) -> None:
    """A log and a null of the same engine, whose weights are not the trainer's, or are those in 4 bits."""
    bench = Bench(seed)
    bench.engine = wrong_engine(bench, name)
    write_log(bench, [bench.correct(prompts) for prompts in bench.prompts], folder)
    write_null(bench, folder / "null.parquet")


def looping(bench: Bench, prompts: Tensor) -> Scored:
    """Return a correct group of long responses in which two rows repeat a phrase of four ids."""
    phrase = prompts[:2, 1:5].repeat(1, 5)
    rows = torch.cat([phrase, bench.draw_prompts(phrase.shape[1], len(prompts) - 2)])

    def repeat(logits: Tensor, ids: Tensor) -> Tensor:
        # The loop itself is the policy's own at this temperature; this only keeps it from ending.
        forced = torch.full_like(logits[:2], -torch.inf).scatter(1, ids[:2, -4:-3], 0.0)
        return torch.cat([forced, logits[2:]])

    rollout = bench.sample(rows, width=80, eos=-1, drawn_from=repeat, reported=lambda logits, _ids: logits)
    return bench.correct(rows, rollout)


def healthy_log(name: str, seed: int, folder: Path) -> None:
    """No fault: "TEMPERATURE-NUMERICS", or "looping" at T = 0.05 with 2 of 64 rows in a loop."""
    if name == "looping":
        bench = Bench(seed, temperature=0.05)
        write_log(bench, [looping(bench, bench.prompts[1])], folder)
    else:
        temperature, numerics = name.split("-")
        bench = Bench(seed, temperature=float(temperature), numerics=numerics)
        write_log(bench, [bench.correct(prompts) for prompts in bench.prompts], folder)
    write_null(bench, folder / "null.parquet")


SPECIAL = {
    "turns": (turn_log, [f"turn_{turn}" for turn in range(2, 7)], 2),
    "sharpened": (sharpened_log, ["sharper_head", "other_prompts"], 2),
    "nulls": (null_log, ["stale_head", "other_weights", "int4_engine"], 2),
    "healthy": (
        healthy_log,
        ["looping", *("-".join((str(t), n)) for t, n in itertools.product(TEMPERATURES, NUMERICS))],
        3,
    ),
}
"""By kind of log: its function, its names, and its number of seeds."""
