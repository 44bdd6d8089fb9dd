"""Rollout logs without a fault: what `rollcorr check` must not warn of.

    python experiments/diagnosis/healthy_logs.py OUTPUT [--model DIR] [--logs 504] [--seed 0]

The sampler and the trainer have the same weights, and the difference between them is that of an engine: a key-value
cache (fp32), bfloat16, or int8 weights and inputs. Groups differ in engine, temperature and truncation; the logs of a
group differ in size and in what they record. Short responses are pieces of longer ones, each with all that came before
it as its prompt. Responses of 1,000 to 8,000 tokens are spliced from those of the group's other logs, because the
model's context ends at 512: no part occurs twice in a response, but the responses of a log share parts. All other
responses are drawn anew for their log.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from live_faults import in_engine
from log_files import LogEntry, mean_k3, write_index, write_log
from small_model import DEFAULT_MODEL, load_model, make_prompts, stop_tokens
from torch import Tensor, nn
from torch.nn import functional

from rollcorr import SamplingSpec

POOL_ROWS = 192
POOL_TOKENS = 160
NULL_ROWS = 64
SPLICED_FROM = 24_000
"""Tokens at least, of other logs, that long responses are spliced from."""

SHORT, MEDIUM, LONG = "short", "medium", "long"
SIZES = (SHORT, MEDIUM, SHORT, MEDIUM, SHORT, LONG)
RECORDED = ("all", "no settings", "no ids", "pairs only")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Logs of one engine with one kind of sampling."""

    engine: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def name(self) -> str:
        """For paths and tables."""
        truncation = f"_top_k{self.top_k}" * bool(self.top_k) + f"_top_p{self.top_p}" * (self.top_p < 1)
        return f"{self.engine}_t{self.temperature}{truncation}"

    @property
    def replayed(self) -> bool:
        """Whether the sampler's kept sets are replayed by the trainer."""
        return bool(self.top_k) or self.top_p < 1


GROUPS = (
    *(Group(engine=engine, temperature=t) for engine in ("fp32", "bf16", "int8") for t in (1.0, 0.7)),
    Group(engine="bf16", temperature=1.0, top_k=20),
    Group(engine="bf16", temperature=0.7, top_p=0.9),
    Group(engine="int8", temperature=1.0, top_p=0.9),
    Group(engine="int8", temperature=0.7, top_k=20),
)


@dataclass(frozen=True)
class Row:
    """One response: its prompt, its tokens, both log-probs and, where truncated, the ids that could be drawn."""

    prompt: list[int]
    ids: list[int]
    rollout: list[float]
    train: list[float]
    kept: list[list[int]]


def endless_rows(model: nn.Module, group: Group, *, seed: int) -> Iterator[Row]:
    """Rows of a group, drawn in batches of `POOL_ROWS`, never twice the same."""
    generator = torch.Generator("cpu").manual_seed(seed)
    sampler = in_engine(model, group.engine)
    while True:
        prompts = make_prompts(model, POOL_ROWS, generator=generator)
        yield from _batch(sampler, model, prompts, group, generator=generator)


@torch.no_grad()
def _batch(
    sampler: nn.Module, trainer: nn.Module, prompts: list[list[int]], group: Group, *, generator: torch.Generator
) -> Iterator[Row]:
    """Sample a batch, and score it over the same kept sets with the trainer."""
    drawn, log_probs, kept_sets = _decode(sampler, prompts, group, generator=generator)
    lengths = (drawn >= 0).sum(1).tolist()

    # The trainer needs whole rows of logits, because a kept set is a set of logits.
    starts = [len(prompt) for prompt in prompts]
    width = max(start + length for start, length in zip(starts, lengths, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device="cpu")
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        ids[row, : starts[row]] = torch.tensor(prompt, device="cpu")
        ids[row, starts[row] : starts[row] + length] = drawn[row, :length]
    positions = torch.arange(width, device="cpu")
    ends = torch.tensor([start + length for start, length in zip(starts, lengths, strict=True)], device="cpu")
    logits = trainer(ids, attention_mask=(positions < ends[:, None]).long()).logits.float() / group.temperature

    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        chosen = logits[row, starts[row] - 1 : starts[row] - 1 + length]
        kept: list[list[int]] = []
        if group.replayed:
            allowed = kept_sets[row, :length]
            chosen = chosen.masked_fill(~allowed, -torch.inf)
            kept = [torch.nonzero(token)[:, 0].tolist() for token in allowed]
        train = functional.log_softmax(chosen, dim=-1).gather(1, drawn[row, :length, None])[:, 0]
        yield Row(prompt, drawn[row, :length].tolist(), log_probs[row, :length].tolist(), train.tolist(), kept)


def _decode(
    sampler: nn.Module, prompts: list[list[int]], group: Group, *, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw token by token: ids (B, T) with −1 behind the end, log-probs (B, T), and allowed ids (B, T, V) if any."""
    from transformers import DynamicCache

    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.int64, device="cpu")
    attention = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device="cpu")
        attention[row, width - len(prompt) :] = 1
    position = (attention.cumsum(1) - 1).clamp(min=0)

    cache, stops = DynamicCache(), torch.tensor(stop_tokens(sampler), device="cpu")
    running = torch.ones(len(prompts), dtype=torch.bool, device="cpu")
    drawn, log_probs, sets = [], [], []
    token = ids
    for _ in range(POOL_TOKENS):
        logits = sampler(token, attention_mask=attention, position_ids=position, past_key_values=cache).logits
        scaled = logits[:, -1].float() / group.temperature
        if group.replayed:
            allowed = _allowed(scaled, group)
            sets.append(allowed)
            scaled = scaled.masked_fill(~allowed, -torch.inf)
        log_prob = functional.log_softmax(scaled, dim=-1)
        token = torch.multinomial(log_prob.exp(), 1, generator=generator)
        drawn.append(torch.where(running[:, None], token, -1))
        log_probs.append(log_prob.gather(1, token))
        running &= ~torch.isin(token[:, 0], stops)
        if not running.any():
            break
        attention = functional.pad(attention, (0, 1), value=1)
        position = position[:, -1:] + 1
    return torch.cat(drawn, 1), torch.cat(log_probs, 1), torch.stack(sets, 1) if sets else torch.empty(0)


def _allowed(logits: Tensor, group: Group) -> Tensor:
    """The ids that top-k and top-p keep, (B, V) bool."""
    values, order = logits.sort(dim=-1, descending=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if group.top_k:
        keep[:, group.top_k :] = False
    if group.top_p < 1:
        probability = functional.softmax(values, dim=-1)
        keep &= probability.cumsum(-1) - probability < group.top_p
    return torch.zeros_like(keep).scatter(1, order, keep)


class Supply:
    """The rows of one group: fresh ones, pieces of fresh ones, and long ones spliced from those drawn before."""

    def __init__(self, rows: Iterator[Row], *, generator: torch.Generator) -> None:
        self._fresh, self._generator = rows, generator
        self._drawn: list[Row] = []
        self._pieces: list[Row] = []

    def log(self, size: str) -> list[Row]:
        """Rows of one log: 16 to 24 short ones, some dozens of ordinary ones, or a few of thousands of tokens."""
        if size == SHORT:
            return [self._piece() for _ in range(self._between(16, 24))]
        if size == MEDIUM:
            return [self.row() for _ in range(self._between(16, 32))]
        length = (1_000, 2_000, 4_000, 8_000)[self._between(0, 3)]
        return self._spliced(length, rows=self._between(16, 24))

    def row(self) -> Row:
        """A row that no other log holds."""
        self._drawn.append(next(self._fresh))
        return self._drawn[-1]

    def _between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self._generator, device="cpu"))

    def _piece(self) -> Row:
        while not self._pieces:
            whole, start = self.row(), 0
            while start < len(whole.ids):
                end = start + self._between(8, 64)
                self._pieces.append(_cut(whole, start, end))
                start = end
        return self._pieces.pop(0)

    def _spliced(self, length: int, *, rows: int) -> list[Row]:
        """Responses one after the other, in a new order for each row, until it has its length."""
        while sum(len(row.ids) for row in self._drawn) < max(SPLICED_FROM, 2 * length):
            self.row()
        spliced = []
        for _ in range(rows):
            order = iter(torch.randperm(len(self._drawn), generator=self._generator, device="cpu").tolist())
            parts = [self._drawn[next(order)]]
            while sum(len(part.ids) for part in parts) < length:
                parts.append(self._drawn[next(order)])
            whole = Row(
                parts[0].prompt,
                [token for part in parts for token in part.ids],
                [value for part in parts for value in part.rollout],
                [value for part in parts for value in part.train],
                [kept for part in parts for kept in part.kept],
            )
            spliced.append(_cut(whole, 0, length))
        return spliced


def _cut(row: Row, start: int, end: int) -> Row:
    """Tokens `start` to `end` of a response; what came before them is part of the prompt."""
    prompt = row.prompt + row.ids[:start]
    return Row(prompt, row.ids[start:end], row.rollout[start:end], row.train[start:end], row.kept[start:end])


def write_rows(path: Path, rows: list[Row], group: Group, *, recorded: str, step: int) -> None:
    """Write one log with as much of its metadata as `recorded` says."""
    settings = SamplingSpec(
        temperature=group.temperature,
        top_k=group.top_k or -1,
        top_p=group.top_p,
        logprobs="raw" if group.temperature == 1.0 and not group.replayed else "processed",
        engine="transformers",
    )
    with_ids, with_settings = recorded in ("all", "no settings"), recorded in ("all", "no ids")

    # The kept sets hold ids, so a log without ids has none.
    kept = None
    if group.replayed and with_ids:
        kept = [([token for ids in row.kept for token in ids], _offsets(row.kept)) for row in rows]
    write_log(
        path,
        prompt_ids=[row.prompt for row in rows] if with_ids else None,
        response_ids=[row.ids for row in rows] if with_ids else None,
        rollout_log_prob=[row.rollout for row in rows],
        old_log_prob=[row.train for row in rows],
        sampling=settings if with_settings else None,
        steps=[step] * len(rows) if with_settings else None,
        versions=[step] * len(rows) if recorded == "all" else None,
        kept=kept,
    )


def _offsets(kept: list[list[int]]) -> list[int]:
    offsets = [0]
    for ids in kept:
        offsets.append(offsets[-1] + len(ids))
    return offsets


def write_healthy(
    folder: Path, model: nn.Module, *, logs: int, seed: int, sizes: Sequence[str] = SIZES
) -> list[LogEntry]:
    """Write `logs` logs, in turn from each group, and a null of each group from rows of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for place, group in enumerate(GROUPS):
        rows = endless_rows(model, group, seed=seed * 1_000 + place)
        null_rows, null_path = [next(rows) for _ in range(NULL_ROWS)], f"null/{group.name}.parquet"
        supply = Supply(rows, generator=torch.Generator("cpu").manual_seed(seed * 1_000 + 500 + place))
        write_rows(folder / null_path, null_rows, group, recorded="all", step=0)
        null = _entry(null_path, "null", null_rows, group, null="", null_k3=math.nan, detail="")
        entries.append(null)

        for number in range(place, logs, len(GROUPS)):
            turn = number // len(GROUPS)
            size = sizes[turn % len(sizes)]
            recorded = RECORDED[turn // len(sizes) % len(RECORDED)]
            drawn = supply.log(size)
            path = f"healthy/{number:04d}.parquet"
            write_rows(folder / path, drawn, group, recorded=recorded, step=1)
            detail = f"{group.name}; {size}; {recorded}"
            entries.append(_entry(path, "healthy", drawn, group, null=null_path, null_k3=null.k3, detail=detail))
    write_index(folder, entries)
    return entries


def _entry(path: str, fault: str, rows: list[Row], group: Group, *, null: str, null_k3: float, detail: str) -> LogEntry:
    return LogEntry(
        path=path,
        fault=fault,
        engine=group.engine,
        temperature=group.temperature,
        null=null,
        rows=len(rows),
        tokens=sum(len(row.ids) for row in rows),
        k3=mean_k3([row.rollout for row in rows], [row.train for row in rows]),
        null_k3=null_k3,
        detail=detail,
    )


def main() -> None:
    """Write the logs that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of a causal model of transformers")
    parser.add_argument("--logs", type=int, default=504)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", default=",".join(SIZES), help="in turn, separated by commas")
    options = parser.parse_args()

    torch.set_num_threads(1)
    started = time.perf_counter()
    sizes = options.sizes.split(",")
    entries = write_healthy(
        options.output, load_model(options.model), logs=options.logs, seed=options.seed, sizes=sizes
    )
    tokens = sum(entry.tokens for entry in entries)
    sys.stdout.write(f"{len(entries)} logs, {tokens} tokens in {time.perf_counter() - started:.0f} s\n")


if __name__ == "__main__":
    main()
